//! FLEURS: `data/hi_in/train.tsv`, which has no heading, and recordings in `audio/train`.

use std::path::{Path, PathBuf};

use flow_corpus::column_names::renamed;
use flow_corpus::manifest_row::{Wanted, refuse};
use flow_corpus::tree;
use flow_corpus::unpacking::extracting;
use flow_corpus::{LaidOut, Manifest, ManifestError, ReadSettings};
use flow_storage::Storage;
use serde_json::Map;

use super::splits::chosen;
use super::table_lines::{TableLines, fields, first_line};
use super::utterance::{Common, Utterance, language_called, text_of};

const SPLITS: [&str; 3] = ["train", "dev", "test"];
/// Columns: id, file name, text as it was written, text, letters, number of samples, gender.
const FIELDS: usize = 7;
/// Samples a second.
const RATE: f64 = 16_000.0;
const WRITTEN: &str = "raw_transcription";
const SPOKEN: &str = "transcription";

/// Whether a table has rows of FLEURS from its first line on.
fn is_table(storage: &Storage, table: &Path) -> bool {
    first_line(storage, table).is_some_and(|line| {
        let fields: Vec<&str> = line.split('\t').collect();
        fields.len() == FIELDS
            && fields[0].parse::<u64>().is_ok()
            && fields[1].ends_with(".wav")
            && fields[5].parse::<u64>().is_ok()
    })
}

fn tables(storage: &Storage, root: &Path) -> Vec<(PathBuf, &'static str)> {
    let all = SPLITS
        .into_iter()
        .map(|split| (root.join(format!("{split}.tsv")), split));
    all.filter(|(table, _)| is_table(storage, table)).collect()
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    tables(storage, root)
        .first()
        .map(|(_, split)| format!("{split}.tsv without a heading"))
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let all = tables(storage, root);
    let names: Vec<&str> = all.iter().map(|(_, split)| *split).collect();
    let (places, told) = chosen(&names, &settings.split, root)?;
    let tables: Vec<(PathBuf, &'static str)> = places.into_iter().map(|place| all[place].clone()).collect();
    for (_, split) in &tables {
        let packed = root.join("audio").join(format!("{split}.tar.gz"));
        if !tree::is_folder(storage, &root.join("audio").join(split)) && tree::is_file(storage, &packed) {
            let why = format!(
                "recordings of a compressed tar are not read where they are; {}",
                extracting(&packed)
            );
            return Err(ManifestError::manifest(&packed, why));
        }
    }
    let pairs = renamed(&settings.columns).map_err(|why| ManifestError::manifest(root, why))?;
    if let Some((theirs, ours)) = pairs
        .iter()
        .find(|pair| ![(WRITTEN, "text"), (SPOKEN, "text")].contains(pair))
    {
        let why = format!(
            "`columns` has {theirs}={ours}, but of FLEURS it says which text is read: [{WRITTEN}=text] or [{SPOKEN}=text]"
        );
        return Err(ManifestError::manifest(root, why));
    }
    let as_written = pairs.contains(&(WRITTEN, "text"));
    let files: Vec<PathBuf> = tables.iter().map(|(path, _)| path.clone()).collect();
    let folder = tree::absolute(root);
    let lang = folder
        .file_name()
        .and_then(|name| language_called(name.to_str()?).map(str::to_string));
    let told = told.map_or_else(String::new, |told| format!("; {told}"));
    let column = if as_written { WRITTEN } else { SPOKEN };
    let told = format!("FLEURS; texts are of the column {column}{told}");
    let (common, root_of) = (Common::of(settings), root.to_path_buf());
    let row = move |file: usize, line: &str| {
        let fields = fields(line, '\t', FIELDS)?;
        let name = fields[1].trim();
        if name.is_empty() || flow_corpus::names::unsafe_name(name) {
            return Err(refuse("unsafe_name", format!("{name:?}")));
        }
        let samples: u64 = fields[5]
            .trim()
            .parse()
            .map_err(|_| refuse("bad_type", format!("{:?} is not a number of samples", fields[5])))?;
        let split = tables[file].1;
        let (text, other) = if as_written {
            (fields[2], fields[3])
        } else {
            (fields[3], fields[2])
        };
        let mut extra = Map::new();
        // Several recordings have one sentence.
        extra.insert("sentence_id".into(), fields[0].into());
        extra.insert("gender".into(), fields[6].trim().to_lowercase().into());
        let key = if as_written { SPOKEN } else { WRITTEN };
        extra.insert(key.into(), other.into());
        let id = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
        Ok(Utterance {
            id: id.to_string(),
            shard: split.to_string(),
            text: text_of(text, "the line has no text")?,
            folder_lang: lang.clone(),
            duration: Some(samples as f64 / RATE),
            wanted: Wanted::file(tree::join(&root_of.join("audio").join(split), name)),
            extra,
            ..Utterance::default()
        }
        .row(&common))
    };
    LaidOut::of(
        TableLines::open(storage, &files, false, told, scratch, row)?,
        root,
        settings,
    )
}
