//! Recordings with their texts beside them, which are the last resort; in folders that are called by splits, as LibriSpeech has them,
//! those of the chosen splits.

use std::collections::BTreeSet;
use std::path::Path;

use flow_corpus::folder::AudioFolder;
use flow_corpus::listing::AUDIO;
use flow_corpus::tree::answered;
use flow_corpus::{Layout, Manifest, ManifestError, ReadSettings};
use flow_storage::Storage;

use super::folder_entries::read_entries;
use super::refuse_settings;
use super::splits::{chosen, is_of_split};

/// Whether a name ends in this extension, in any letters.
fn has_ending(name: &str, extension: &str) -> bool {
    let ending = Path::new(name).extension();
    ending.is_some_and(|ending| ending.eq_ignore_ascii_case(extension))
}

/// # Errors
/// Where there is none, or no split of the name.
pub fn open(storage: &Storage, root: &Path, settings: &ReadSettings) -> Result<Manifest, ManifestError> {
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
        return Ok(Box::new(answered(|| {
            AudioFolder::open(storage, root, settings, None, None)
        })??));
    }
    let (places, told) = chosen(&names, &settings.split, root)?;
    let read: BTreeSet<String> = places.into_iter().map(|place| names[place].clone()).collect();
    Ok(Box::new(answered(|| {
        AudioFolder::open(storage, root, settings, Some(&read), told)
    })??))
}
