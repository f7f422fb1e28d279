//! An AudioFolder whose tables are in folders below: each has the recordings beside and below it.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use flow_corpus::files::{Format, format_of_name};
use flow_corpus::folder::tables;
use flow_corpus::lines::LineManifest;
use flow_corpus::listing::{MOST_DEPTH, is_audio_name};
use flow_corpus::tables::TableManifest;
use flow_corpus::text_tables::TextTables;
use flow_corpus::tree;
use flow_corpus::{LaidOut, Manifest, ManifestError, ReadSettings};
use flow_storage::Storage;

use super::chosen_rows::ChosenRows;
use super::splits::{chosen, is_of_split};
use super::told::Told;

/// Tables that a message names.
const SHOWN: usize = 5;

/// The first table of each folder below this one, sorted; none where there are recordings that no table is beside or above: they may
/// have their texts beside them. Links are followed; a folder is looked into once.
///
/// # Errors
/// When a folder cannot be listed, or folders lie deeper than [`MOST_DEPTH`] in one another.
pub fn find(storage: &Storage, root: &Path) -> Result<Vec<PathBuf>, ManifestError> {
    let names = tables("");
    let mut found = Vec::new();
    let mut seen = HashSet::new();
    let mut waiting = vec![(root.to_path_buf(), 0, false)];
    while let Some((folder, depth, is_below_table)) = waiting.pop() {
        let canonical = tree::canonical(&folder).map_err(|error| ManifestError::io(&folder, error))?;
        if !seen.insert(canonical) {
            continue;
        }
        if depth > MOST_DEPTH {
            let why = format!(
                "folders_too_deep: it is more than {MOST_DEPTH} folders below {}",
                root.display()
            );
            return Err(ManifestError::manifest(folder, why));
        }
        let entries = tree::entries(storage, &folder).map_err(|error| ManifestError::io(&folder, error))?;
        let files: HashSet<&str> = entries
            .iter()
            .filter(|entry| !entry.is_folder)
            .filter_map(|entry| entry.name.to_str())
            .collect();
        let table = names.iter().find(|name| files.contains(name.as_str()));
        let has_table = is_below_table || table.is_some();
        if !has_table && files.iter().any(|name| is_audio_name(name)) {
            return Ok(Vec::new());
        }
        found.extend(table.map(|name| folder.join(name)));
        let folders = entries.iter().filter(|entry| entry.is_folder);
        // As `datasets` has it: hidden folders, and those of programs (`__MACOSX`), are no part of a corpus.
        let is_left_out = |name: &str| name.starts_with('.') || name.starts_with("__");
        let folders = folders.filter(|entry| !is_left_out(&entry.name.to_string_lossy()));
        waiting.extend(folders.map(|entry| (folder.join(&entry.name), depth + 1, has_table)));
    }
    found.sort_unstable();
    Ok(found)
}

/// The rows of some tables that [`find`] found below `root`; those of the chosen splits where the folders right below it are called by
/// splits. Paths are relative to the folder of their table.
///
/// # Errors
/// When a table cannot be read, there is no such split, or tables are of several formats.
pub fn open(
    storage: &Storage,
    root: &Path,
    found: Vec<PathBuf>,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let first_folder = |table: &PathBuf| -> String {
        let below = table.strip_prefix(root).unwrap_or(table);
        below.to_string_lossy().split('/').next().unwrap_or_default().to_owned()
    };
    let folders: Vec<String> = found.iter().map(first_folder).collect();
    let (places, of_splits) = if folders.iter().all(|folder| is_of_split(folder)) {
        chosen(&folders, &settings.split, root)?
    } else if settings.split.is_empty() {
        ((0..found.len()).collect(), None)
    } else {
        let why = "`split` belongs to layouts with splits, and the folders with tables are not called by splits";
        return Err(ManifestError::manifest(root, why));
    };
    let tables: Vec<PathBuf> = places.into_iter().map(|place| found[place].clone()).collect();
    let manifest = open_tables(storage, root, tables, settings, scratch)?;
    Ok(match of_splits {
        Some(of_splits) => Told::of(manifest, of_splits),
        None => manifest,
    })
}

/// The rows of some tables below `root`. Paths are relative to the folder of their table.
///
/// # Errors
/// When a table cannot be read, or they are of several formats.
pub fn open_tables(
    storage: &Storage,
    root: &Path,
    tables: Vec<PathBuf>,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let below = |table: &Path| -> String {
        let below = table.strip_prefix(root).unwrap_or(table);
        below.to_string_lossy().into_owned()
    };
    let formats: BTreeSet<&str> = tables
        .iter()
        .filter_map(|table| table.extension()?.to_str())
        .map(|ending| if ending == "tsv" { "csv" } else { ending })
        .collect();
    let [one, ..] = tables.as_slice() else {
        return Err(ManifestError::manifest(root, "there is no table in it"));
    };
    if formats.len() > 1 {
        let shown: Vec<String> = tables.iter().take(SHOWN).map(|table| below(table)).collect();
        let why = format!(
            "its tables are of several formats ({}), of which `datasets` takes one, too; name the folders one by one: {}{}",
            formats.into_iter().collect::<Vec<_>>().join(", "),
            shown.join(", "),
            if tables.len() > SHOWN { ", ..." } else { "" }
        );
        return Err(ManifestError::manifest(root, why));
    }
    let mut told = format!("AudioFolder with {} tables in folders below", tables.len());
    if tables.len() == 1 {
        told = format!("AudioFolder with {}", below(one));
    }
    let rows = match format_of_name(one) {
        Some(Format::Parquet) => {
            let manifest = Box::new(TableManifest::open(storage, tables, settings, scratch)?);
            return Ok(Told::first(told, manifest));
        }
        Some(Format::Nemo) => ChosenRows::all(LineManifest::open(storage, tables, Vec::new(), settings)?, told),
        _ => ChosenRows::all(TextTables::open(storage, tables, None, settings)?, told),
    };
    Ok(LaidOut::of_lines(rows, settings))
}
