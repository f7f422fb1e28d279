//! GigaSpeech 2: `data/th/train_refined.tsv` with an id and a text to a line, without a heading, and recordings in
//! `train/<a>/<b>/<a>-<b>-<c>.wav`, `dev/…` and `test/…`.

use std::path::{Path, PathBuf};

use flow_corpus::manifest_row::{Wanted, refuse};
use flow_corpus::tree;
use flow_corpus::{LaidOut, Manifest, ManifestError, ReadSettings};
use flow_storage::Storage;

use super::splits::{chosen, usual};
use super::table_lines::{TableLines, fields};
use super::utterance::{Common, Utterance, language_called, text_of};

const RAW: &str = "train_raw";
const REFINED: &str = "train_refined";
/// Lists, of which the second is read for training where both are there, and the folder of their recordings.
const LISTS: [(&str, &str); 4] = [(RAW, "train"), (REFINED, "train"), ("dev", "dev"), ("test", "test")];

fn list(root: &Path, name: &str) -> PathBuf {
    root.join(format!("{name}.tsv"))
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    let name = LISTS[..2]
        .iter()
        .map(|(name, _)| *name)
        .find(|name| tree::is_file(storage, &list(root, name)))?;
    Some(format!("{name}.tsv"))
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let mut there: Vec<(&str, &str)> = LISTS
        .into_iter()
        .filter(|(name, _)| tree::is_file(storage, &list(root, name)))
        .collect();
    if there.is_empty() {
        return Err(ManifestError::manifest(root, "there is no train_refined.tsv in it"));
    }
    // Of the two lists for training one has the recordings of the other, which is read where it is named.
    let is_there = |name: &str| there.iter().any(|(other, _)| *other == name);
    let is_left_out = is_there(RAW) && is_there(REFINED) && !settings.split.eq_ignore_ascii_case(RAW);
    let training = [REFINED, RAW].into_iter().find(|name| is_there(name));
    let split = match settings.split.as_str() {
        named if usual(named) == "train" => training.unwrap_or(named),
        other => other,
    };
    if is_left_out {
        there.retain(|(name, _)| *name != RAW);
    }
    let names: Vec<&str> = there.iter().map(|(name, _)| *name).collect();
    let (places, told) = chosen(&names, split, root)?;
    let files: Vec<PathBuf> = places.iter().map(|place| list(root, there[*place].0)).collect();
    let folders: Vec<&str> = places.iter().map(|place| there[*place].1).collect();
    let absolute = tree::absolute(root);
    let lang = absolute
        .file_name()
        .and_then(|name| language_called(name.to_str()?).map(str::to_string));
    let (common, root_of) = (Common::of(settings), root.to_path_buf());
    let row = move |file: usize, line: &str| {
        let fields = fields(line, '\t', 2)?;
        let id = fields[0].trim();
        let above: Vec<&str> = id.rsplit_once('-').map_or("", |(above, _)| above).split('-').collect();
        if id.is_empty() || flow_corpus::names::unsafe_name(id) || above.contains(&"..") {
            return Err(refuse("unsafe_name", format!("{id:?}")));
        }
        let folder = above
            .iter()
            .fold(root_of.join(folders[file]), |folder, part| folder.join(part));
        Ok(Utterance {
            id: id.to_string(),
            shard: above.join("-"),
            text: text_of(fields[1], "the line has no text")?,
            folder_lang: lang.clone(),
            wanted: Wanted::file(folder.join(format!("{id}.wav"))),
            ..Utterance::default()
        }
        .row(&common))
    };
    let told = told.map_or_else(String::new, |told| format!("; {told}"));
    let left_out = if is_left_out {
        "; train_raw.tsv has the same recordings and is not read (`split: train_raw` reads it)"
    } else {
        ""
    };
    let told = format!("GigaSpeech 2{told}{left_out}");
    LaidOut::of(
        TableLines::open(storage, &files, false, told, scratch, row)?,
        root,
        settings,
    )
}
