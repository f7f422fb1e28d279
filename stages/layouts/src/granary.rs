//! Granary: NeMo's lines in folders that are called by the corpora whose recordings they are of, which it does not have.

use std::path::{Path, PathBuf};

use flow_corpus::json_line;
use flow_corpus::lines::LineManifest;
use flow_corpus::tree;
use flow_corpus::{LaidOut, Manifest, ManifestError, ReadSettings};
use flow_storage::{Storage, is_url};
use serde_json::Value;

use super::chosen_rows::ChosenRows;
use super::folder_entries::entries_of;
use super::line_file::LineFile;
use super::splits::{chosen, refuse_other};
use super::table_lines::first_value;

/// Folders, and the corpora of their recordings.
const CORPORA: [(&str, &str); 4] = [
    ("yodas", "YODAS2 (hf://datasets/espnet/yodas2)"),
    ("voxpopuli", "VoxPopuli (github.com/facebookresearch/voxpopuli)"),
    ("ytc", "YouTube-Commons (hf://datasets/PleIAs/YouTube-Commons)"),
    ("librilight", "Libri-Light (github.com/facebookresearch/libri-light)"),
];
/// First lines of a file. One of them must have its recording.
const SAMPLED: usize = 64;
/// Lists of transcripts, and of translations.
const TRANSCRIPTS: &str = "asr";
const TRANSLATIONS: &str = "ast";

struct List {
    path: PathBuf,
    /// Where its recordings come from.
    corpus: &'static str,
    split: &'static str,
}

fn corpus_of(folder: &str) -> Option<&'static str> {
    let known = CORPORA.iter().find(|(name, _)| folder.eq_ignore_ascii_case(name));
    known.map(|(_, corpus)| *corpus)
}

fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

fn list_of(path: PathBuf, corpus: &'static str) -> List {
    let is_translation = name_of(&path).split(['_', '-', '.']).any(|part| part == TRANSLATIONS);
    let split = if is_translation { TRANSLATIONS } else { TRANSCRIPTS };
    List { path, corpus, split }
}

fn lists_in(storage: &Storage, folder: &Path) -> Vec<List> {
    let Some(corpus) = corpus_of(name_of(folder)) else {
        return Vec::new();
    };
    let entries = entries_of(storage, folder);
    let names = entries.names.difference(&entries.folders);
    let names = names.filter(|name| name.ends_with(".jsonl"));
    names.map(|name| list_of(folder.join(name), corpus)).collect()
}

/// The lists of a folder of a language, of one of a corpus in it, or the one that is named.
fn lists(storage: &Storage, root: &Path) -> Vec<List> {
    if !tree::is_folder(storage, root) {
        let above = root.parent().map(name_of).unwrap_or_default();
        let corpus = corpus_of(above).filter(|_| root.extension().is_some_and(|extension| extension == "jsonl"));
        return corpus
            .map(|corpus| list_of(root.to_path_buf(), corpus))
            .into_iter()
            .collect();
    }
    let own = lists_in(storage, root);
    if !own.is_empty() {
        return own;
    }
    let entries = entries_of(storage, root);
    let inner = entries.folders.iter().map(|name| root.join(name));
    inner.flat_map(|folder| lists_in(storage, &folder)).collect()
}

/// Whether a line is one of Granary's: NeMo's, with the names that its makers give.
fn is_line(line: &Value) -> bool {
    let has = |key: &str| line.get(key).is_some();
    has("audio_filepath") && has("utt_id")
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    let first = lists(storage, root).into_iter().next()?;
    first_value(storage, &first.path)
        .is_some_and(|line| is_line(&line))
        .then(|| {
            first
                .path
                .strip_prefix(root)
                .unwrap_or(&first.path)
                .display()
                .to_string()
        })
}

/// Why a list cannot be read: none of the recordings that its first lines name is there.
fn without_recordings(storage: &Storage, list: &List, scratch: &Path) -> Result<Option<String>, ManifestError> {
    let file = LineFile::open(storage, &list.path, scratch)?;
    let folder = list.path.parent().unwrap_or(Path::new(""));
    let mut named = Vec::new();
    file.first_lines(SAMPLED, |line| {
        if let Ok((Value::Object(fields), _)) = json_line::parse(line)
            && let Some(path) = fields.get("audio_filepath").and_then(Value::as_str)
        {
            named.push(path.to_owned());
        }
    })?;
    let is_there = |path: &String| {
        let mut places = vec![tree::join(folder, path)];
        if Path::new(path).is_relative() && !is_url(path) && !is_url(folder) {
            places.push(path.into());
        }
        places.iter().any(|place| tree::is_file(storage, place))
    };
    let Some(first) = named.first().filter(|_| !named.iter().any(is_there)) else {
        return Ok(None);
    };
    Ok(Some(format!(
        "Granary has no recordings: fetch {}, and put them where `audio_filepath` says, such as {}",
        list.corpus,
        tree::join(folder, first).display()
    )))
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let mut lists = lists(storage, root);
    if lists.is_empty() {
        let names = CORPORA.map(|(name, _)| name).join(", ");
        let why = format!("there is no list (.jsonl) in a folder {names}");
        return Err(ManifestError::manifest(root, why));
    }
    if tree::is_folder(storage, root) {
        let splits: Vec<&str> = lists.iter().map(|list| list.split).collect();
        let wanted = if settings.split.is_empty() {
            TRANSCRIPTS
        } else {
            &settings.split
        };
        let (places, _) = chosen(&splits, wanted, root)?;
        let mut number = 0;
        lists.retain(|_| {
            number += 1;
            places.contains(&(number - 1))
        });
    } else {
        refuse_other(lists[0].split, &settings.split, root)?;
    }
    for list in &lists {
        if let Some(why) = without_recordings(storage, list, scratch)? {
            return Err(ManifestError::manifest(&list.path, why));
        }
    }
    let names: Vec<String> = lists.iter().map(|list| name_of(&list.path).to_owned()).collect();
    let files = lists.into_iter().map(|list| list.path).collect();
    let lines = LineManifest::open(storage, files, Vec::new(), settings)?;
    let told = format!("Granary, {}", names.join(", "));
    Ok(LaidOut::of_lines(ChosenRows::all(lines, told), settings))
}
