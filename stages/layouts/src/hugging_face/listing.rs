//! The files of a data set: those of its configuration and split, by the names of folders and files.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use flow_corpus::written_set::{REJECTS, is_prefix_of_set};
use flow_corpus::{ManifestError, ReadSettings};
use flow_kind::Storage;

use crate::folder_entries::{Entries, MOST_FOLDERS, entries_of, read_entries};
use crate::splits::{chosen, spoken_of, usual};
use crate::utterance::language_called;

/// Folders below the first in which files are looked for.
const MOST_DEPTH: usize = 3;

/// A file that is listed: its folder below the first one, and its split.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed {
    pub path: PathBuf,
    pub config: String,
    pub split: String,
}

/// Files of an extension in a folder and below it.
pub fn listed(storage: &Storage, root: &Path, extension: &str) -> Result<Vec<Listed>, ManifestError> {
    let read = |folder: &Path| {
        let entries = read_entries(storage, folder)?;
        let is_one = |name: &str| Path::new(name).extension().is_some_and(|found| found == extension);
        let mut unnamed = entries.unnamed.iter();
        match unnamed.find(|(name, is_folder)| *is_folder || is_one(name)) {
            Some((name, _)) => Err(ManifestError::manifest(
                folder.join(name),
                "its name is not UTF-8; give it another",
            )),
            None => Ok(entries),
        }
    };
    let mut found = listed_until(root, extension, read, |_, _| false)?;
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// The first file of an extension that is found in few folders.
pub fn first_listed(storage: &Storage, root: &Path, extension: &str) -> Option<Listed> {
    let is_enough = |found, folders| found > 0 || folders >= MOST_FOLDERS;
    let found = listed_until(root, extension, |folder| Ok(entries_of(storage, folder)), is_enough).ok()?;
    found.into_iter().min_by(|a, b| a.path.cmp(&b.path))
}

/// `is_enough` is asked after each folder with how many files and folders there were. As for Hugging Face, names that begin with an
/// underscore do not count.
fn listed_until(
    root: &Path,
    extension: &str,
    entries: impl Fn(&Path) -> Result<Rc<Entries>, ManifestError>,
    is_enough: impl Fn(usize, usize) -> bool,
) -> Result<Vec<Listed>, ManifestError> {
    let (mut found, mut folders) = (Vec::new(), 0);
    let mut waiting = VecDeque::from([(root.to_path_buf(), Vec::<String>::new())]);
    while let Some((folder, below)) = waiting.pop_front() {
        let entries = entries(&folder)?;
        for name in entries.names.difference(&entries.folders) {
            let path = folder.join(name);
            let is_one = path.extension().is_some_and(|found| found == extension);
            // Rejects of a dataset that `manifest.write` wrote.
            let is_of_set = entries.names.contains("flow.json") || is_prefix_of_set(&folder);
            let is_beside = name == REJECTS && is_of_set;
            if is_one && !name.starts_with("metadata.") && !name.starts_with('_') && !is_beside {
                let (config, split) = config_and_split(&below, name);
                found.push(Listed { path, config, split });
            }
        }
        folders += 1;
        if is_enough(found.len(), folders) {
            break;
        }
        if below.len() < MOST_DEPTH {
            let inner = entries.folders.iter().filter(|name| !name.starts_with('_'));
            waiting.extend(inner.map(|name| (folder.join(name), [&below[..], std::slice::from_ref(name)].concat())));
        }
    }
    Ok(found)
}

/// Configuration and split by the names of folders and of the file: `hindi/train-00000-of-00047.parquet`, `data/test-….parquet`,
/// `hi_in/partial-train/0000.parquet`.
pub fn config_and_split(below: &[String], name: &str) -> (String, String) {
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let of_name = numbered(stem).map(|numbered| numbered.split.to_string());
    let mut folders: Vec<&str> = below
        .iter()
        .map(String::as_str)
        .filter(|folder| *folder != "data")
        .collect();
    let split = match of_name {
        Some(split) => split,
        None => {
            let last = folders
                .last()
                .map(|last| last.strip_prefix("partial-").unwrap_or(last))
                .unwrap_or_default();
            let is_number = stem.bytes().all(|byte| byte.is_ascii_digit());
            match usual(spoken_of(last)) {
                // As the hub names converted files: the folder is the split.
                _ if is_number && !folders.is_empty() => {
                    let split = usual(last).to_string();
                    folders.pop();
                    split
                }
                split @ ("train" | "validation" | "test") => {
                    folders.pop();
                    split.to_string()
                }
                _ => match spoken_of(stem) {
                    split @ ("train" | "validation" | "test") => split.to_string(),
                    _ => "train".into(),
                },
            }
        }
    };
    (folders.join("/"), split)
}

/// What the name of a file with a number says.
struct Numbered<'a> {
    split: &'a str,
    number: usize,
    total: usize,
}

/// The parts of `train-00000-of-00047` and of `train-00000-of-00001-3859b9935622e1d8`.
fn numbered(stem: &str) -> Option<Numbered<'_>> {
    let (before, total) = stem.split_once("-of-")?;
    let (split, number) = before.rsplit_once('-')?;
    let number_of = |digits: &str| {
        let is_number = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| digits.parse().ok()).flatten()
    };
    Some(Numbered {
        split,
        number: number_of(number)?,
        total: number_of(total.get(..5)?)?,
    })
}

/// The files of one configuration and of the splits that are read, and what is told of them.
pub fn chosen_files(
    root: &Path,
    all: Vec<Listed>,
    settings: &ReadSettings,
) -> Result<(Vec<Listed>, String), ManifestError> {
    let mut configs: Vec<&str> = all.iter().map(|file| file.config.as_str()).collect();
    configs.sort_unstable();
    configs.dedup();
    // One configuration for each language is one corpus.
    let is_language = |config: &&str| language_called(config.rsplit('/').next().unwrap_or_default()).is_some();
    if configs.len() > 1 && !configs.iter().all(is_language) {
        let why = format!(
            "it has several configurations: {}; name the folder of one",
            configs.join(", ")
        );
        return Err(ManifestError::manifest(root, why));
    }
    let splits: Vec<&str> = all.iter().map(|file| file.split.as_str()).collect();
    let (places, told) = chosen(&splits, &settings.split, root)?;
    let files: Vec<Listed> = places.into_iter().map(|place| all[place].clone()).collect();
    configs.retain(|config| files.iter().all(|file| file.config != *config));
    let without = match configs.is_empty() {
        true => String::new(),
        false => format!("; configurations without that split: {}", configs.join(", ")),
    };
    let missing = match missing_numbers(files.iter().map(|file| file.path.as_path())) {
        Some(missing) => format!("; {missing}"),
        None => String::new(),
    };
    let partial = files.iter().any(|file| {
        file.path
            .components()
            .any(|part| part.as_os_str().to_string_lossy().starts_with("partial-"))
    });
    let partial = if partial {
        "; it is only the beginning of the split (partial)"
    } else {
        ""
    };
    Ok((
        files,
        told.map_or_else(String::new, |told| format!("; {told}")) + &without + &missing + partial,
    ))
}

/// The split that a file is of by its name, or that of its folder; empty where neither says it.
pub fn split_of_file(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let above = path
        .parent()
        .and_then(Path::file_name)
        .unwrap_or_default()
        .to_string_lossy();
    let mut splits = [&stem, &above].into_iter().map(|name| spoken_of(name));
    let known = splits.find(|split| ["train", "validation", "test"].contains(split));
    known.unwrap_or_default().to_string()
}

/// What is missing of files with numbers, `train-00000-of-00047.parquet`.
pub fn missing_numbers<'p>(paths: impl Iterator<Item = &'p Path>) -> Option<String> {
    let mut sets: BTreeMap<(&Path, &str, usize), BTreeSet<usize>> = BTreeMap::new();
    for path in paths {
        let stem = path.file_stem().and_then(OsStr::to_str).unwrap_or_default();
        if let (Some(Numbered { split, number, total }), Some(folder)) = (numbered(stem), path.parent()) {
            sets.entry((folder, split, total)).or_default().insert(number);
        }
    }
    let ((folder, split, total), found) = sets.iter().find(|((_, _, total), found)| found.len() < *total)?;
    let files = folder.join(format!("{split}-NNNNN-of-{total:05}"));
    Some(format!("it has {} of {total} files `{}`", found.len(), files.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_files_of_a_numbered_split_are_told() {
        let missing = |names: &[&str]| missing_numbers(names.iter().map(Path::new));
        let all = [
            "d/train-00000-of-00002.parquet",
            "d/train-00001-of-00002.parquet",
            "d/x.parquet",
        ];
        assert_eq!(missing(&all), None);
        let told = missing(&all[1..]).unwrap();
        assert_eq!(told, "it has 1 of 2 files `d/train-NNNNN-of-00002`");
    }

    #[test]
    fn names_of_files_tell_configuration_and_split() {
        let of = |path: &str| {
            let mut parts: Vec<String> = path.split('/').map(str::to_string).collect();
            let name = parts.pop().unwrap();
            let (config, split) = config_and_split(&parts, &name);
            format!("{config}:{split}")
        };
        for (path, expected) in [
            ("data/train-00000-of-00047.parquet", ":train"),
            (
                "data/train.clean.100-00000-of-00014-3859b9935622e1d8.parquet",
                ":train.clean.100",
            ),
            ("hindi/valid-00000-of-00001.parquet", "hindi:valid"),
            ("hi_in/partial-train/0000.parquet", "hi_in:train"),
            ("hi_in/9_hours/0000.parquet", "hi_in:9_hours"),
            ("all/test.clean/0000.parquet", "all:test.clean"),
            ("dev/0000.parquet", ":validation"),
            ("my_dev_1.parquet", ":validation"),
            ("x.parquet", ":train"),
        ] {
            assert_eq!(of(path), expected, "{path}");
        }
    }
}
