//! Multilingual LibriSpeech: `train/transcripts.txt` and `train/audio/<speaker>/<book>/<speaker>_<book>_<number>.flac` or `.opus`.

use std::path::{Path, PathBuf};

use flow_corpus::manifest_row::{Wanted, refuse};
use flow_corpus::tree;
use flow_corpus::{LaidOut, Manifest, ManifestError, ReadSettings};
use flow_storage::Storage;

use super::folder_entries::{MOST_FOLDERS, entries_of};
use super::splits::chosen;
use super::table_lines::{TableLines, fields};
use super::utterance::{Common, Utterance, language_called, text_of};

const TRANSCRIPTS: &str = "transcripts.txt";
/// Of the recordings, the first that is there.
const ENDINGS: [&str; 3] = ["flac", "opus", "wav"];

fn is_split(storage: &Storage, folder: &Path) -> bool {
    tree::is_file(storage, &folder.join(TRANSCRIPTS)) && tree::is_folder(storage, &folder.join("audio"))
}

/// Folders of splits, by name.
fn splits(storage: &Storage, root: &Path) -> Vec<(PathBuf, String)> {
    if is_split(storage, root) {
        let name = root.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return vec![(root.to_path_buf(), name)];
    }
    let entries = entries_of(storage, root);
    // A folder of splits has few.
    let names = entries.folders.iter().take(MOST_FOLDERS);
    names
        .map(|name| (root.join(name), name.clone()))
        .filter(|(folder, _)| is_split(storage, folder))
        .collect()
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    splits(storage, root)
        .first()
        .map(|(_, name)| format!("{name}/{TRANSCRIPTS} beside audio"))
}

/// The language of `mls_german`, `mls_german_opus` and of the folders of splits in it.
fn language_of(root: &Path) -> Option<String> {
    let absolute = tree::absolute(root);
    let mut names = absolute
        .ancestors()
        .take(2)
        .filter_map(|above| above.file_name()?.to_str());
    let name = names.find_map(|name| name.strip_prefix("mls_"))?;
    let name = name.strip_suffix("_opus").unwrap_or(name);
    language_called(name).map(str::to_string)
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let all = splits(storage, root);
    let names: Vec<&str> = all.iter().map(|(_, name)| name.as_str()).collect();
    let (places, told) = chosen(&names, &settings.split, root)?;
    let splits: Vec<(PathBuf, String)> = places.into_iter().map(|place| all[place].clone()).collect();
    let files: Vec<PathBuf> = splits.iter().map(|(folder, _)| folder.join(TRANSCRIPTS)).collect();
    let (common, lang) = (Common::of(settings), language_of(root));
    let told = told.map_or_else(String::new, |told| format!("; {told}"));
    let row = move |file: usize, line: &str| {
        let fields = fields(line, '\t', 2)?;
        let id = fields[0].trim();
        let mut parts = id.split('_');
        let (Some(speaker), Some(book), Some(_)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(refuse(
                "bad_line",
                format!("{id:?} is not an id of the form speaker_book_number"),
            ));
        };
        if flow_corpus::names::unsafe_name(id) {
            return Err(refuse("unsafe_name", format!("{id:?}")));
        }
        let (folder, split) = &splits[file];
        let path = folder.join("audio").join(speaker).join(book).join(id);
        let with = |ending: &&str| PathBuf::from(format!("{}.{ending}", path.display()));
        Ok(Utterance {
            id: id.to_string(),
            shard: split.clone(),
            text: text_of(fields[1], "the line has no text")?,
            folder_lang: lang.clone(),
            wanted: Wanted {
                files: ENDINGS.iter().map(with).collect(),
                member: None,
            },
            extra: [("speaker".to_string(), speaker.into())].into_iter().collect(),
            ..Utterance::default()
        }
        .row(&common))
    };
    let told = format!("Multilingual LibriSpeech{told}");
    LaidOut::of(
        TableLines::open(storage, &files, false, told, scratch, row)?,
        root,
        settings,
    )
}
