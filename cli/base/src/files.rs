//! Files that a command line names.

use std::fs;
use std::path::PathBuf;

use crate::failure::Failure;

/// The files that are named, and those of folders and below them with one of these endings, in order. `help` is for an error.
///
/// # Errors
/// If a folder cannot be read, or there is no such file.
pub fn files_below(named: &[PathBuf], endings: &[&str], help: &str) -> Result<Vec<PathBuf>, Failure> {
    let mut waiting: Vec<PathBuf> = named.iter().rev().cloned().collect();
    let mut files = Vec::new();
    while let Some(path) = waiting.pop() {
        if !path.is_dir() {
            files.push(path);
            continue;
        }
        let unreadable = |error| Failure::unreadable(format!("{}: {error}", path.display()));
        let entries = fs::read_dir(&path).map_err(unreadable)?.collect::<Result<Vec<_>, _>>();
        let mut entries: Vec<PathBuf> = entries.map_err(unreadable)?.iter().map(fs::DirEntry::path).collect();
        // A link to a folder above would have no end, and hidden ones have no results (`--out` of `flow transcribe` has a state).
        entries.retain(|entry| {
            let name = entry.file_name().unwrap_or_default();
            if name.as_encoded_bytes().starts_with(b".") {
                return false;
            }
            let is_folder = entry.is_dir() && !entry.is_symlink();
            is_folder
                || entry
                    .extension()
                    .is_some_and(|ending| endings.iter().any(|known| ending.eq_ignore_ascii_case(known)))
        });
        entries.sort();
        waiting.extend(entries.into_iter().rev());
    }
    match files.is_empty() {
        true => Err(Failure::usage(
            format!("there is no file that ends in .{}", endings.join(" or .")),
            help,
        )),
        false => Ok(files),
    }
}
