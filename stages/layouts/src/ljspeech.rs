//! LJSpeech: `metadata.csv` with bars between the fields, without a heading and quotes, beside `wavs`.

use std::path::Path;

use flow_corpus::manifest_row::{Wanted, refuse};
use flow_corpus::tree;
use flow_corpus::{LaidOut, Manifest, ManifestError, ReadSettings, file_stem};
use flow_storage::Storage;
use serde_json::Map;

use super::table_lines::{TableLines, fields, first_line};
use super::utterance::{Common, Utterance, text_of};

const TABLE: &str = "metadata.csv";
const ENDINGS: [&str; 2] = ["wav", "flac"];

/// Whether a folder has such a table: its first field names a recording in `wavs`.
pub fn is_there(storage: &Storage, root: &Path) -> bool {
    let Some(line) = first_line(storage, &root.join(TABLE)) else {
        return false;
    };
    let Some((id, _)) = line.split_once('|') else {
        return false;
    };
    let is_file = |ending: &&str| tree::is_file(storage, &tree::join(&root.join("wavs"), format!("{id}.{ending}")));
    !flow_corpus::names::unsafe_name(id) && ENDINGS.iter().any(is_file)
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    is_there(storage, root).then(|| format!("{TABLE} without a heading beside wavs"))
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let common = Common::of(settings);
    let (folder, shard) = (root.join("wavs"), file_stem(root));
    let row = move |_: usize, line: &str| {
        let fields = fields(line, '|', 2)?;
        let id = fields[0].trim();
        if id.is_empty() || flow_corpus::names::unsafe_name(id) {
            return Err(refuse("unsafe_name", format!("{id:?}")));
        }
        if fields.len() > 3 {
            return Err(refuse(
                "bad_line",
                format!("{} fields in place of 2 or 3", fields.len()),
            ));
        }
        // The normalised text, where there is one.
        let text = fields.get(2).copied().unwrap_or(fields[1]);
        let mut extra = Map::new();
        if fields.len() == 3 {
            extra.insert("raw_text".into(), fields[1].trim().into());
        }
        Ok(Utterance {
            id: id.to_string(),
            shard: shard.clone(),
            text: text_of(text, "the line has no text")?,
            wanted: Wanted {
                files: ENDINGS
                    .iter()
                    .map(|ending| tree::join(&folder, format!("{id}.{ending}")))
                    .collect(),
                member: None,
            },
            extra,
            ..Utterance::default()
        }
        .row(&common))
    };
    let told = "LJSpeech; texts are the normalised ones where there are three fields".to_string();
    LaidOut::of(
        TableLines::open(storage, &[root.join(TABLE)], false, told, scratch, row)?,
        root,
        settings,
    )
}
