//! Checkpoints in object storage.
//!
//! Training writes into a folder of this machine, as always ([`local_root`]). From there each checkpoint is copied below the
//! prefix that the setting `checkpoints` names, under the names that it has in the folder:
//!
//! ```text
//! s3://bucket/run/step-000001200/model.safetensors   its files
//! s3://bucket/run/step-000001200/training.json       written last, where there is none: the checkpoint is whole
//! s3://bucket/run/metrics.jsonl                      as it is when a checkpoint is copied
//! s3://bucket/run/restart-001/...                    as in the folder
//! ```
//!
//! Where the folder lacks the newest checkpoint, it is fetched before anything looks for it.

mod fetch;
mod upload;
mod uploader;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use flow_storage::{Entry as Object, Location, ObjectUrl, Storage, StorageError, StorageFault};

use super::listing::{RESTART, StoredCheckpoint, restart_name, step_of};
use super::ranking::Ranking;
use super::record::{CheckpointRecord, RECORD, record_of};
use crate::error::TrainingError;
use crate::metrics::METRICS;
use crate::mlflow;
use crate::session::VOCABULARY;
use crate::tensorboard;

pub use fetch::Wanted;
pub use upload::Mirror;
pub use uploader::{Uploader, Waker};

/// Maximum size of `training.json` in bytes; `flow` writes no larger one.
const LONGEST_RECORD: u64 = 64 << 20;

/// The folder of this machine for the checkpoints that the setting `checkpoints` names: itself, or of a URL one beside the kept
/// copies of objects ([`Storage::working_folder`]).
///
/// # Errors
/// Where the URL cannot be used.
pub fn local_folder(storage: &Storage, checkpoints: &str) -> Result<PathBuf, TrainingError> {
    Ok(match Location::parse(checkpoints)? {
        Location::Local(path) => path,
        Location::Object(url) => storage.working_folder(&url)?,
    })
}

/// Warnings that were not told yet, by what was fetched.
type Fetched = BTreeMap<(String, Wanted), Vec<String>>;

/// What was fetched in this process.
static FETCHED: Mutex<Fetched> = Mutex::new(BTreeMap::new());

/// As [`local_folder`], into which the wanted checkpoints are fetched that only the bucket has: once in a process, which itself
/// writes all later ones.
///
/// # Errors
/// Where the bucket cannot be read, or what it holds is damaged.
pub fn local_root(storage: &Storage, checkpoints: &str, wanted: Wanted) -> Result<PathBuf, TrainingError> {
    let folder = local_folder(storage, checkpoints)?;
    if let Location::Object(url) = Location::parse(checkpoints)? {
        // Others wait for what is fetched.
        let mut fetched = FETCHED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Vacant(first) = fetched.entry((checkpoints.to_owned(), wanted)) {
            first.insert(fetch::fetch(storage, &url, &folder, wanted)?);
        }
    }
    Ok(folder)
}

/// What was wrong with checkpoints that were to be fetched, told once.
pub fn take_warnings(checkpoints: &str) -> Vec<String> {
    let mut fetched = FETCHED.lock().unwrap_or_else(PoisonError::into_inner);
    let of_this = fetched.iter_mut().filter(|((of, _), _)| of == checkpoints);
    of_this.flat_map(|(_, warnings)| std::mem::take(warnings)).collect()
}

/// The copying of the checkpoints in `folder`, which is that of `checkpoints` or a restart below it. None where these are on this
/// machine alone.
///
/// # Errors
/// Where the URL cannot be used.
pub fn mirror(
    storage: &Storage,
    checkpoints: &str,
    folder: &Path,
    keep: usize,
    ranking: Ranking,
) -> Result<Option<Mirror>, TrainingError> {
    let Location::Object(url) = Location::parse(checkpoints)? else {
        return Ok(None);
    };
    let root = local_folder(storage, checkpoints)?;
    let below = match folder.strip_prefix(&root) {
        Ok(below) => url.join(&below.to_string_lossy())?,
        Err(_) => url,
    };
    Ok(Some(Mirror::new(storage, below, folder, keep, ranking)))
}

/// Whether a checkpoint is whole where `checkpoints` names it, too.
///
/// # Errors
/// Where storage does not say.
pub fn is_uploaded(storage: &Storage, checkpoints: &str, checkpoint: &StoredCheckpoint) -> Result<bool, TrainingError> {
    let Location::Object(url) = Location::parse(checkpoints)? else {
        return Ok(true);
    };
    let root = local_folder(storage, checkpoints)?;
    let below = checkpoint.path.strip_prefix(&root).unwrap_or(&checkpoint.path);
    let record = url.join(&below.to_string_lossy())?.join(RECORD)?;
    let local = checkpoint.path.join(RECORD);
    let size = std::fs::metadata(&local).map_err(TrainingError::file(&local))?.len();
    match storage.stat(&record) {
        Ok(stat) => Ok(stat.size == size),
        Err(error) if error.fault == StorageFault::NotFound => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// What is below the prefix of a training, or of one of its restarts.
#[derive(Debug, Default)]
struct RemoteFolder {
    /// Files of checkpoints by their names, by step.
    checkpoints: BTreeMap<u64, BTreeMap<String, Object>>,
    /// Files beside them, by their names below the folder.
    beside: BTreeMap<String, Object>,
}

impl RemoteFolder {
    /// Lists a prefix. What is in restarts below it is left out.
    fn list(storage: &Storage, url: &ObjectUrl) -> Result<RemoteFolder, StorageError> {
        let mut folders = RemoteFolder::list_all(storage, url)?;
        Ok(folders.remove(&0).unwrap_or_default())
    }

    /// The prefix (0), and the restarts below it by their numbers.
    fn list_all(storage: &Storage, url: &ObjectUrl) -> Result<BTreeMap<u64, RemoteFolder>, StorageError> {
        let mut folders: BTreeMap<u64, RemoteFolder> = BTreeMap::new();
        for entry in storage.list(url)? {
            let Some(below) = entry.url.below(url).map(str::to_owned) else {
                continue;
            };
            let restart = below.split_once('/').and_then(|(folder, rest)| {
                let number: u64 = folder.strip_prefix(RESTART)?.parse().ok()?;
                (number > 0 && folder == restart_name(number)).then_some((number, rest))
            });
            let (number, name) = restart.unwrap_or((0, &below));
            let folder = folders.entry(number).or_default();
            match name.split_once('/') {
                Some((checkpoint, file)) if !file.contains('/') && step_of(checkpoint).is_some() => {
                    let step = step_of(checkpoint).unwrap_or_default();
                    let files = folder.checkpoints.entry(step).or_default();
                    files.insert(file.to_owned(), entry);
                }
                _ if is_beside(name) => {
                    folder.beside.insert(name.to_owned(), entry);
                }
                _ => {}
            }
        }
        Ok(folders)
    }

    /// Steps of the checkpoints that are whole, ascending.
    fn whole(&self) -> impl DoubleEndedIterator<Item = u64> {
        let whole = self.checkpoints.iter().filter(|(_, files)| files.contains_key(RECORD));
        whole.map(|(step, _)| *step)
    }

    /// The record of a whole checkpoint, with its bytes.
    fn record(&self, storage: &Storage, step: u64) -> Result<(CheckpointRecord, Vec<u8>), TrainingError> {
        let entry = self.checkpoints.get(&step).and_then(|files| files.get(RECORD));
        let Some(entry) = entry else {
            return Err(TrainingError::data(format!(
                "the checkpoint of step {step} has no {RECORD}"
            )));
        };
        let folder = PathBuf::from(entry.url.parent().map_or_else(String::new, |url| url.to_string()));
        if entry.stat.size > LONGEST_RECORD {
            return Err(super::damage::damaged(&folder, format!("{RECORD} is too long")));
        }
        let bytes = storage.read_range(&entry.url, 0..entry.stat.size, &entry.stat)?;
        let record = record_of(&folder, &String::from_utf8_lossy(&bytes))?;
        Ok((record, bytes.to_vec()))
    }
}

/// Whether a file beside the checkpoints belongs to the training, by its name below their folder.
fn is_beside(name: &str) -> bool {
    match name.split_once('/') {
        None => name == METRICS || name == VOCABULARY || name == mlflow::RUN,
        Some((folder, name)) => folder == tensorboard::FOLDER && tensorboard::is_ours(name),
    }
}
