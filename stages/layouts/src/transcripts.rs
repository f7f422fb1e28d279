//! Recordings with their texts beside them, which are the last resort; in folders that are called by splits, as LibriSpeech has them,
//! those of the chosen splits.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use flow_corpus::folder::AudioFolder;
use flow_corpus::listing::AUDIO;
use flow_corpus::tree::answered;
use flow_corpus::{Layout, Manifest, ManifestError, ReadSettings};
use flow_storage::Storage;

use super::folder_entries::{entries_of, read_entries};
use super::splits::{chosen, is_of_split};
use super::{detected, refuse_settings};

/// Folders of each depth that are looked into for a layout, and how many depths.
const LOOKED_INTO: usize = 8;
const BELOW: usize = 2;
/// What the log says.
const TOLD: &str = "recordings with their texts beside them";

/// Whether a name ends in this extension, in any letters.
fn has_ending(name: &str, extension: &str) -> bool {
    let ending = Path::new(name).extension();
    ending.is_some_and(|ending| ending.eq_ignore_ascii_case(extension))
}

/// # Errors
/// Where there is none, or no split of the name. Where no recording has a text, and a folder below has another layout, that is named.
pub fn open(storage: &Storage, root: &Path, settings: &ReadSettings) -> Result<Manifest, ManifestError> {
    let opened = open_folder(storage, root, settings);
    let has_texts = match &opened {
        _ if settings.layout != Layout::Auto => true,
        Ok(folder) => answered(|| folder.has_texts(storage))?,
        Err(ManifestError::Manifest { .. }) => false,
        Err(_) => true,
    };
    if !has_texts && let Some((folder, layout)) = layout_below(storage, root)? {
        let why = format!(
            "the folder has no recordings with their texts, but {} has the layout {layout}: name that folder",
            folder.display()
        );
        return Err(ManifestError::manifest(root, why));
    }
    Ok(Box::new(opened?))
}

/// The first folder below this one, of the first ones at each depth, that has a layout, and its layout.
fn layout_below(storage: &Storage, root: &Path) -> Result<Option<(PathBuf, String)>, ManifestError> {
    let mut level = vec![root.to_path_buf()];
    for _ in 0..BELOW {
        let mut next = Vec::new();
        for folder in &level {
            let entries = answered(|| entries_of(storage, folder))?;
            next.extend(entries.folders.iter().take(LOOKED_INTO).map(|name| folder.join(name)));
        }
        next.truncate(LOOKED_INTO);
        for folder in &next {
            if let Some((known, evidence)) = detected(storage, folder)?.into_iter().next() {
                return Ok(Some((folder.clone(), format!("{} ({evidence})", known.name))));
            }
        }
        level = next;
    }
    Ok(None)
}

fn open_folder(storage: &Storage, root: &Path, settings: &ReadSettings) -> Result<AudioFolder, ManifestError> {
    let entries = read_entries(storage, root)?;
    let folders = &entries.folders;
    let is_recording = |name: &&String| AUDIO.iter().any(|audio| has_ending(name, audio));
    let has_splits = !folders.is_empty()
        && folders.iter().all(|name| is_of_split(name))
        && !entries.names.difference(folders).any(|name| is_recording(&name));
    let names: Vec<String> = folders.iter().cloned().collect();
    // There may be a million files, which are listed again.
    drop(entries);
    if !has_splits {
        refuse_settings(Layout::Transcripts, "transcripts", root, settings)?;
        return answered(|| AudioFolder::open(storage, root, settings, None, TOLD.into()))?;
    }
    let (places, told) = chosen(&names, &settings.split, root)?;
    let read: BTreeSet<String> = places.into_iter().map(|place| names[place].clone()).collect();
    let told = told
        .into_iter()
        .fold(TOLD.to_owned(), |all, told| format!("{all}; {told}"));
    answered(|| AudioFolder::open(storage, root, settings, Some(&read), told))?
}
