//! What is in folders: what layouts are recognised by.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use flow_audio::listing::is_of_program;
use flow_corpus::ManifestError;

/// Names in a folder, without those that begin with a dot and the folders of programs.
#[derive(Debug, Default)]
pub struct Entries {
    pub names: BTreeSet<String>,
    /// Of these, folders and links to folders.
    pub folders: BTreeSet<String>,
    /// Names that are not UTF-8, as they can be shown, and whether they are of folders.
    pub unnamed: BTreeSet<(String, bool)>,
}

thread_local! {
    /// What is in the folders that were looked into while a layout is found out: each layout asks, and there may be a million files.
    static KEPT: RefCell<Option<HashMap<PathBuf, Rc<Entries>>>> = const { RefCell::new(None) };
}

/// Runs `detect`, which finds out a layout: each folder is listed once meanwhile.
pub fn remembering_folders<T>(detect: impl FnOnce() -> T) -> T {
    KEPT.set(Some(HashMap::new()));
    let found = detect();
    KEPT.set(None);
    found
}

/// What is in a folder, to find out a layout; of what is not a folder, or cannot be read, nothing.
pub fn entries_of(folder: &Path) -> Rc<Entries> {
    let known = KEPT.with_borrow(|kept| kept.as_ref()?.get(folder).map(Rc::clone));
    known.unwrap_or_else(|| {
        let found = read_entries(folder).unwrap_or_default();
        KEPT.with_borrow_mut(|kept| {
            if let Some(kept) = kept {
                kept.insert(folder.to_path_buf(), Rc::clone(&found));
            }
        });
        found
    })
}

/// What is in a folder, to read all of it.
///
/// # Errors
/// When it cannot be read.
pub fn read_entries(folder: &Path) -> Result<Rc<Entries>, ManifestError> {
    let failed = |error| ManifestError::io(folder, error);
    let mut found = Entries::default();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let kind = entry.file_type().map_err(failed)?;
        // Only links are looked up.
        let is_folder = kind.is_dir() || kind.is_symlink() && entry.path().is_dir();
        let name = match entry.file_name().into_string() {
            Ok(name) => name,
            Err(name) => {
                found.unnamed.insert((name.to_string_lossy().into_owned(), is_folder));
                continue;
            }
        };
        if name.starts_with('.') || is_of_program(name.as_ref()) {
            continue;
        }
        if is_folder {
            found.folders.insert(name.clone());
        }
        found.names.insert(name);
    }
    Ok(Rc::new(found))
}

/// Folders that are looked into to find out a layout.
pub const MOST_FOLDERS: usize = 200;

/// The first folder of some above `folder`, itself included, or else the current one, below which one of the relative `paths` is;
/// none where there is no such folder or no relative path.
pub fn base_of<'p>(folder: &Path, paths: impl Iterator<Item = &'p str>) -> Option<PathBuf> {
    let relative: Vec<&str> = paths.filter(|path| Path::new(path).is_relative()).collect();
    let absolute = std::path::absolute(folder).ok()?;
    let ways = absolute.ancestors().count();
    // As the folder was written, so that rows have paths of the same kind.
    let above = (0..ways.min(6)).scan(folder.to_path_buf(), |way, step| {
        if step > 0 {
            *way = match way.parent().filter(|parent| !parent.as_os_str().is_empty()) {
                Some(parent) if !way.ends_with("..") => parent.to_path_buf(),
                _ => absolute.ancestors().nth(step)?.to_path_buf(),
            };
        }
        Some(way.clone())
    });
    let here = std::iter::once(PathBuf::new());
    here.chain(above)
        .find(|base| relative.iter().any(|path| base.join(plain_file(path)).is_file()))
}

/// The file that a path leads to, without the place of a recording in it (`a.ark:1234`).
fn plain_file(path: &str) -> &str {
    match path.rsplit_once(':') {
        Some((file, place)) if !place.is_empty() && place.bytes().all(|byte| byte.is_ascii_digit()) => file,
        _ => path,
    }
}
