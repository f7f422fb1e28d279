//! What a configuration of README.md consists of, where that is not Parquet files: by the endings of its files, as `datasets` does it.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use flow_corpus::ManifestError;
use flow_corpus::folder::tables;
use flow_corpus::listing::{MOST_DEPTH, is_audio_name};
use flow_corpus::tree;
use flow_storage::{Storage, is_url};

use super::readme::{Config, Found, declared, is_shown, matched, one_of_configs, told_of};
use crate::splits::chosen;

const README: &str = "README.md";
/// Files that are not data, whatever a pattern says.
const NO_DATA: [&str; 6] = [
    "README.md",
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dummy_data.zip",
    "dataset_dict.json",
];
/// Endings by which a draw is decided, the first one first.
const PREFERRED: [&str; 5] = ["parquet", "arrow", "jsonl", "json", "csv"];

/// What reads the files of a configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    Parquet,
    /// WebDataset.
    Tars,
    /// AudioFolder in archives.
    Zips,
    /// The tables of an AudioFolder.
    Tables,
    /// JSON lines or tables that name recordings.
    Lists,
    /// All that is in one folder, as if it had been named.
    Folder,
}

/// The files of a configuration and of the splits that are read.
#[derive(Debug, PartialEq)]
pub struct Selected {
    pub kind: Kind,
    /// Paths below the data set, each with its split.
    pub files: Vec<(String, String)>,
    /// For the log.
    pub told: String,
}

/// What the configuration `wanted` of `configs` consists of, or the default one, and of it the splits that `split` names. `files` are
/// all of the data set, unless it is not `is_whole`. None: README.md does not declare it, or its files are of no kind that is read.
///
/// # Errors
/// Where there are several configurations and none is named, a pattern matches nothing, or the split is not there.
pub(super) fn select(
    files: &[String],
    configs: &[Config],
    (wanted, split): (Option<&str>, &str),
    is_whole: bool,
    root: &Path,
) -> Result<Option<Selected>, ManifestError> {
    if configs.is_empty() || wanted.is_some_and(|wanted| configs.iter().all(|config| config.name != wanted)) {
        return Ok(None);
    }
    let is_one = |file: &&String| is_shown(file) && !NO_DATA.contains(&name_of(file));
    let data: Vec<&String> = files.iter().filter(is_one).collect();
    let config = match one_of_configs(configs, wanted, root) {
        Ok(place) => &configs[place],
        // Folders of languages are one corpus.
        Err(_) if kind_of(data.iter().map(|file| file.as_str())).is_some_and(|(kind, _)| kind == Kind::Parquet) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let found = matched(config, &data, "file", is_whole, root)?;
    let Some((kind, ending)) = kind_of(found.iter().map(|file| file.path.as_str())) else {
        return Ok(None);
    };
    let told = match told_of(&config.name, configs.len()) {
        told if told.is_empty() => "README.md".to_owned(),
        told => format!("configuration {told} of README.md"),
    };
    if config.patterns.is_none() && kind != Kind::Parquet {
        let folder = Selected {
            kind: Kind::Folder,
            files: vec![(config.folder.clone(), String::new())],
            told,
        };
        // Without a folder, the data set is read as it is without README.md.
        return Ok(Some(folder).filter(|_| !config.folder.is_empty()));
    }
    let is_of_kind = |file: &Found| match kind {
        Kind::Tables => is_table(&file.path),
        _ => endings_of(&file.path).any(|other| other == ending || is_json(&other) && is_json(&ending)),
    };
    let found: Vec<Found> = found.into_iter().filter(is_of_kind).collect();
    if found.is_empty() {
        return Ok(None);
    }
    let splits: Vec<&str> = found.iter().map(|file| file.split.as_str()).collect();
    let (places, of_splits) = chosen(&splits, split, root)?;
    let files = places.into_iter().map(|place| {
        let Found { path, split } = &found[place];
        (path.clone(), split.clone())
    });
    Ok(Some(Selected {
        kind,
        files: files.collect(),
        told: of_splits.map_or_else(|| told.clone(), |of_splits| format!("{told}; {of_splits}")),
    }))
}

fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn is_table(path: &str) -> bool {
    tables("").iter().any(|table| table == name_of(path))
}

fn is_json(ending: &str) -> bool {
    ["json", "jsonl", "ndjson"].contains(&ending)
}

/// What is after each dot of a name, in small letters.
fn endings_of(path: &str) -> impl Iterator<Item = String> {
    name_of(path).split('.').skip(1).map(str::to_ascii_lowercase)
}

/// What files are by their commonest ending, tables of an AudioFolder apart; and that ending.
fn kind_of<'f>(files: impl Iterator<Item = &'f str> + Clone) -> Option<(Kind, String)> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for file in files.clone().filter(|file| !is_table(file)) {
        for ending in endings_of(file) {
            *counts.entry(ending).or_default() += 1;
        }
    }
    if counts.is_empty() {
        let table = files.clone().find(|file| is_table(file))?;
        return Some((Kind::Tables, endings_of(table).last()?));
    }
    let place = |ending: &String| {
        PREFERRED
            .iter()
            .position(|other| other == ending)
            .unwrap_or(PREFERRED.len())
    };
    let mut counts: Vec<(String, usize)> = counts.into_iter().collect();
    counts.sort_by(|(a, of_a), (b, of_b)| of_b.cmp(of_a).then(place(a).cmp(&place(b))).then(b.cmp(a)));
    let kind = |ending: &str| match ending {
        "parquet" => Some(Some(Kind::Parquet)),
        "tar" => Some(Some(Kind::Tars)),
        "zip" => Some(Some(Kind::Zips)),
        "json" | "jsonl" | "ndjson" | "csv" | "tsv" => Some(Some(Kind::Lists)),
        "arrow" | "txt" | "lance" | "vortex" => Some(None),
        audio if is_audio_name(&format!("x.{audio}")) => Some(Some(Kind::Tables)),
        _ => None,
    };
    let (kind, ending) = counts
        .into_iter()
        .find_map(|(ending, _)| Some((kind(&ending)?, ending)))?;
    Some((kind?, ending))
}

/// The folder whose README.md may declare a configuration that a path is called by.
pub fn data_set_above(path: &Path) -> Option<&Path> {
    let above = tree::folder_above(path)?;
    Some(if above.as_os_str().is_empty() {
        Path::new(".")
    } else {
        above
    })
}

/// The data set at a folder, or above a path that is not there and is called by one of its configurations, and what is selected of it;
/// none where no README.md declares that. A folder of Parquet files is left to its own layout.
///
/// # Errors
/// Those of [`select`], where a README.md cannot be understood, or there is no such configuration.
pub fn selected_at(storage: &Storage, path: &Path, split: &str) -> Result<Option<(PathBuf, Selected)>, ManifestError> {
    let is_folder = tree::is_folder(storage, path);
    let (root, wanted) = match (
        is_folder,
        data_set_above(path),
        path.file_name().and_then(OsStr::to_str),
    ) {
        (true, ..) => (path, None),
        (false, Some(above), Some(name)) if !name.contains(['.', '{']) && !tree::is_file(storage, path) => {
            (above, Some(name))
        }
        _ => return Ok(None),
    };
    let readme = root.join(README);
    if !tree::is_file(storage, &readme) {
        return Ok(None);
    }
    let configs = declared(storage, &readme, root)?;
    if configs.is_empty() {
        return Ok(None);
    }
    if wanted.is_some() {
        one_of_configs(&configs, wanted, root)?;
    }
    let files = files_below(storage, root)?;
    let selected = select(&files, &configs, (wanted, split), false, root)?;
    let selected = selected.filter(|selected| !is_folder || selected.kind != Kind::Parquet);
    match (selected, wanted) {
        (None, Some(name)) => {
            let why = format!("no file of its configuration `{name}` is of a layout that is read");
            Err(ManifestError::manifest(root, why))
        }
        (selected, _) => Ok(selected.map(|selected| (root.to_path_buf(), selected))),
    }
}

/// The README.md on disk that declares the configuration that a path is called by, where nothing is at the path itself.
pub fn readme_of_config(path: &Path) -> Option<PathBuf> {
    let (readme, name) = (path.with_file_name(README), path.file_name()?.to_str()?);
    if is_url(path) || path.exists() || !readme.is_file() {
        return None;
    }
    let configs = declared(&Storage::default(), &readme, path).ok()?;
    configs.iter().any(|config| config.name == name).then_some(readme)
}

/// Paths of all files below a folder, relative to it, without hidden ones. Links are followed; a folder is looked into once.
///
/// # Errors
/// When a folder cannot be listed, or folders lie too deep in one another.
pub(super) fn files_below(storage: &Storage, root: &Path) -> Result<Vec<String>, ManifestError> {
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    let mut waiting = vec![(String::new(), 0)];
    while let Some((below, depth)) = waiting.pop() {
        let folder = root.join(&below);
        let canonical = tree::canonical(&folder).map_err(|error| ManifestError::io(&folder, error))?;
        if !seen.insert(canonical) {
            continue;
        }
        if depth > MOST_DEPTH {
            let why = format!("folders_too_deep: more than {MOST_DEPTH} folders are in one another ({below})");
            return Err(ManifestError::manifest(root, why));
        }
        for entry in tree::entries(storage, &folder).map_err(|error| ManifestError::io(&folder, error))? {
            let Some(name) = entry.name.to_str().filter(|name| is_shown(name)) else {
                continue;
            };
            let path = if below.is_empty() {
                name.to_owned()
            } else {
                format!("{below}/{name}")
            };
            match entry.is_folder {
                true => waiting.push((path, depth + 1)),
                false => found.push(path),
            }
        }
    }
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commonest_ending_tells_what_files_are() {
        let of = |files: &[&str]| kind_of(files.iter().copied()).map(|(kind, ending)| format!("{kind:?} {ending}"));
        for (files, expected) in [
            (&["a.tar", "b.tar", "c.parquet"][..], Some("Tars tar")),
            (&["a.tar", "c.parquet"], Some("Parquet parquet")),
            (&["a.jsonl.gz"], Some("Lists jsonl")),
            (&["x/a.wav", "x/metadata.csv", "y/metadata.csv"], Some("Tables wav")),
            (&["metadata.jsonl"], Some("Tables jsonl")),
            (&["a.FLAC", "b.csv"], Some("Lists csv")),
            (&["a.zip", "LICENSE", "a.py"], Some("Zips zip")),
            (&["a.txt", "b.txt", "c.csv"], None),
            (&["a.arrow"], None),
            (&["LICENSE"], None),
        ] {
            assert_eq!(of(files).as_deref(), expected, "{files:?}");
        }
    }
}
