//! Checkpoints: the log of a training run.
//!
//! A checkpoint is a folder `step-000001200` that describes itself: the model (weights, configuration,
//! tokenizer), the optimizer's state, and `training.json`, which says how far training was, what it was
//! made from, and the digest of every other file. It is written under a temporary name, flushed and
//! renamed, so it is complete or absent. One that is damaged all the same is passed over for the one before it, and
//! set aside as `damaged-step-000001200` when training goes on. `restart-001`, `restart-002`, ... beside the checkpoints hold
//! training that was begun anew with `on_change: restart`; the newest of them is the current one.

pub mod average_of;
mod changes;
mod writing;

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use flow_model::model::TdtModel;
use flow_runtime::store::is_fault_of_the_file;
use flow_sampling::planned::Planned;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::average::MovingAverage;
use crate::error::TrainingError;
use crate::optimizer::{AdamW, AdamWConfig};

pub use changes::{changes, identity_changes};
pub use writing::{CheckpointFolder, FolderLock, lock};

/// Version of `training.json`. What is newer is refused by name.
pub const CHECKPOINT_VERSION: u32 = 2;

const RECORD: &str = "training.json";
const OPTIMIZER: &str = "optimizer.safetensors";
/// Weights that training goes on from, where `model.safetensors` holds an average of them.
const LIVE: &str = "live.safetensors";
const RESTART: &str = "restart-";
const DAMAGED: &str = "damaged-";

/// What makes a training run the run it is. If it differs, training cannot go on; it can only restart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Sizes of a model that began from nothing; for one that began from `init` null, or how new pieces of its
    /// vocabulary began where that is not the default.
    pub model: Value,
    /// BLAKE3 of the tokenizer file; null where the tokenizer of `init` is used.
    pub tokenizer: Option<String>,
    /// `none`, or where the first weights came from.
    pub init: String,
    pub seed: u64,
}

/// `training.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    pub version: u32,
    /// Optimizer steps that are done; the next one has this number.
    pub step: u64,
    pub micro_batches: u64,
    /// Utterances trained on.
    pub samples: u64,
    /// Samples of audio at 16 kHz. A whole number, so that the sum is the same when it goes through a file.
    pub audio_samples: u64,
    pub tokens: u64,
    /// Steps skipped because a loss or gradient was not finite, or nothing of them could be loaded.
    pub skipped_steps: u64,
    /// Epoch of the last micro-batch.
    pub epoch: u64,
    pub identity: Identity,
    /// The settings that a change of is noticed (see [`changes`]).
    pub settings: BTreeMap<String, Value>,
    /// Digest of the train rows.
    pub data: Option<String>,
    /// How random numbers are made. They are drawn anew for each micro-batch from the seed, the step, the
    /// rank and the micro-batch, so no state of a generator needs to be kept.
    pub random: String,
    /// Word error rate on the validation sample, where this very model was evaluated.
    #[serde(default)]
    pub validation_wer: Option<f64>,
    /// How micro-batches were planned, from which step on; the last is the present way.
    #[serde(default)]
    pub plans: Vec<Planned>,
    /// Every other file of the folder.
    pub files: BTreeMap<String, FileDigest>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileDigest {
    pub bytes: u64,
    pub blake3: String,
}

impl Record {
    /// One digest over the files that make the model, for results that refer to this checkpoint.
    pub fn model_digest(&self) -> String {
        let of_model = |(name, _): &(&String, &FileDigest)| *name != OPTIMIZER && *name != LIVE;
        digest_of_files(self.files.iter().filter(of_model))
    }
}

/// One digest over files and their names.
fn digest_of_files<'a>(files: impl Iterator<Item = (&'a String, &'a FileDigest)>) -> String {
    let mut hasher = blake3::Hasher::new();
    for (name, file) in files {
        hasher
            .update(name.as_bytes())
            .update(&[0])
            .update(file.blake3.as_bytes())
            .update(&[0]);
    }
    hasher.finalize().to_hex().to_string()
}

/// A checkpoint that stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    pub path: PathBuf,
    pub step: u64,
}

/// The folder in which training goes on: the newest `restart-NNN`, or `root` itself. Reads only.
pub fn current(root: &Path) -> Result<PathBuf, TrainingError> {
    Ok(match restarts(root)?.last() {
        Some(number) => root.join(restart_name(*number)),
        None => root.to_owned(),
    })
}

/// The folder that a restart would open.
pub fn next_restart(root: &Path) -> Result<PathBuf, TrainingError> {
    Ok(root.join(restart_name(restarts(root)?.last().unwrap_or(&0) + 1)))
}

fn restart_name(number: u64) -> String {
    format!("{RESTART}{number:03}")
}

fn restarts(root: &Path) -> Result<Vec<u64>, TrainingError> {
    let mut numbers: Vec<u64> = folders(root)?
        .iter()
        .filter_map(|name| name.strip_prefix(RESTART)?.parse().ok())
        .collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// All checkpoints of a folder, oldest first. A folder that does not exist holds none.
pub fn list(folder: &Path) -> Result<Vec<Standing>, TrainingError> {
    let mut found: Vec<Standing> = folders(folder)?
        .iter()
        .filter_map(|name| {
            Some(Standing {
                path: folder.join(name),
                step: step_of(name)?,
            })
        })
        .collect();
    found.sort_by_key(|checkpoint| checkpoint.step);
    Ok(found)
}

/// The newest checkpoint of a folder whose files are what they were when they were written, with what its record says,
/// and what is wrong with newer ones. An error if there are checkpoints, but none is sound.
pub fn newest_sound(folder: &Path) -> Result<Option<(Standing, Record, Vec<TrainingError>)>, TrainingError> {
    let mut damaged = Vec::new();
    for standing in list(folder)?.into_iter().rev() {
        let sound = read_record(&standing.path).and_then(|record| {
            verify(&standing.path, &record)?;
            Ok(record)
        });
        match sound {
            Ok(record) => return Ok(Some((standing, record, damaged))),
            Err(error @ TrainingError::Damaged { .. }) => damaged.push(error),
            Err(error) => return Err(error),
        }
    }
    damaged.into_iter().next().map_or(Ok(None), Err)
}

/// The newest checkpoint of a folder and what its record says.
pub fn latest(folder: &Path) -> Result<Option<(Standing, Record)>, TrainingError> {
    let Some(newest) = list(folder)?.pop() else {
        return Ok(None);
    };
    let record = read_record(&newest.path)?;
    Ok(Some((newest, record)))
}

/// The checkpoint of a folder with the lowest word error rate, of those that were evaluated; the oldest of several, and
/// what its record says.
pub fn best(folder: &Path) -> Result<Option<(Standing, Record)>, TrainingError> {
    let mut best: Option<(Standing, Record, f64)> = None;
    for standing in list(folder)? {
        let record = match read_record(&standing.path) {
            Ok(record) => record,
            // Whoever goes on from it sets it aside and says so.
            Err(TrainingError::Damaged { .. }) => continue,
            Err(error) => return Err(error),
        };
        if let Some(rate) = record.validation_wer
            && best.as_ref().is_none_or(|(_, _, lowest)| rate < *lowest)
        {
            best = Some((standing, record, rate));
        }
    }
    Ok(best.map(|(standing, record, _)| (standing, record)))
}

fn folders(folder: &Path) -> Result<Vec<String>, TrainingError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => {
            return Err(TrainingError::File {
                path: folder.to_owned(),
                source: e,
            });
        }
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(TrainingError::file(folder))?;
        if entry.file_type().map_err(TrainingError::file(folder))?.is_dir()
            && let Ok(name) = entry.file_name().into_string()
        {
            names.push(name);
        }
    }
    Ok(names)
}

fn name_of(step: u64) -> String {
    format!("step-{step:09}")
}

fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    (digits.len() >= 9 && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// Reads `training.json` of a checkpoint.
pub fn read_record(checkpoint: &Path) -> Result<Record, TrainingError> {
    let path = checkpoint.join(RECORD);
    let text = fs::read_to_string(&path).map_err(|e| unreadable(checkpoint, RECORD, e))?;
    let value: Value = serde_json::from_str(&text).map_err(|e| damaged(checkpoint, format!("{RECORD}: {e}")))?;
    match value["version"].as_u64() {
        Some(version) if version > u64::from(CHECKPOINT_VERSION) => {
            return Err(TrainingError::Refused {
                message: format!(
                    "{}: version {version} is newer than this program, which knows {CHECKPOINT_VERSION}",
                    path.display()
                ),
                help: Some("use the program that wrote it, or a newer one".into()),
            });
        }
        _ => {}
    }
    let record: Record = serde_json::from_value(value).map_err(|e| damaged(checkpoint, format!("{RECORD}: {e}")))?;
    let named = checkpoint.file_name().and_then(|name| step_of(name.to_str()?));
    if named.is_some_and(|step| step != record.step) {
        return Err(damaged(checkpoint, format!("{RECORD} says step {}", record.step)));
    }
    Ok(record)
}

/// Compares every file of a checkpoint with its digest.
pub fn verify(checkpoint: &Path, record: &Record) -> Result<(), TrainingError> {
    verify_files(checkpoint, &record.files)
}

/// Compares files of a folder with their digests.
fn verify_files(checkpoint: &Path, files: &BTreeMap<String, FileDigest>) -> Result<(), TrainingError> {
    files.par_iter().try_for_each(|(name, expected)| {
        if name.contains('/') || name.starts_with('.') {
            return Err(damaged(checkpoint, format!("{RECORD} names a file {name:?}")));
        }
        let path = checkpoint.join(name);
        let unreadable = |e: std::io::Error| unreadable(checkpoint, name, e);
        let looks = Looks::of(&path).map_err(unreadable)?;
        if verified().get(&path) == Some(&(looks, expected.clone())) {
            return Ok(());
        }
        let found = digest_file(&path).map_err(unreadable)?;
        if found.bytes != expected.bytes {
            return Err(damaged(
                checkpoint,
                format!("{name} has {} bytes instead of {}", found.bytes, expected.bytes),
            ));
        }
        if found != *expected {
            return Err(damaged(
                checkpoint,
                format!("{name} has other content than when it was written"),
            ));
        }
        if looks.has_settled() {
            verified().insert(path, (looks, found));
        }
        Ok(())
    })
}

/// The files that this process has compared with their digests: on its way to the first step a run asks several times
/// where it goes on, and to read gigabytes once is enough.
fn verified() -> MutexGuard<'static, HashMap<PathBuf, (Looks, FileDigest)>> {
    static VERIFIED: LazyLock<Mutex<HashMap<PathBuf, (Looks, FileDigest)>>> = LazyLock::new(Mutex::default);
    // Each entry is whole at any time, so one that panicked leaves nothing half done.
    VERIFIED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What shows that a file was written to, without reading it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Looks {
    inode: u64,
    bytes: u64,
    /// Seconds and nanoseconds of the last change of content, then of anything.
    changed: [i64; 4],
}

impl Looks {
    fn of(path: &Path) -> std::io::Result<Self> {
        let data = fs::metadata(path)?;
        Ok(Self {
            inode: data.ino(),
            bytes: data.len(),
            changed: [data.mtime(), data.mtime_nsec(), data.ctime(), data.ctime_nsec()],
        })
    }

    /// Whether the last change is so long ago that another one would show: clocks of file systems tick some hundred
    /// times a second, some only every two seconds.
    fn has_settled(&self) -> bool {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |now| now.as_secs());
        i64::try_from(now).is_ok_and(|now| self.changed[2] < now - 3)
    }
}

/// Reads the optimizer's state of a checkpoint.
pub fn read_optimizer(checkpoint: &Path, config: AdamWConfig) -> Result<AdamW, TrainingError> {
    AdamW::load(&checkpoint.join(OPTIMIZER), config)
}

/// Makes `model`, loaded from a checkpoint, the one that training goes on with, and gives the average of its
/// weights if `decay` asks for one.
pub fn read_average(
    checkpoint: &Path,
    record: &Record,
    decay: f64,
    model: &mut TdtModel,
) -> Result<Option<MovingAverage>, TrainingError> {
    let average = if record.files.contains_key(LIVE) {
        MovingAverage::resume(decay, model, &checkpoint.join(LIVE))?
    } else {
        MovingAverage::new(decay, &model.parameters)?
    };
    Ok((decay > 0.0).then_some(average))
}

/// The error for a damaged checkpoint.
fn damaged(checkpoint: &Path, message: String) -> TrainingError {
    TrainingError::Damaged {
        folder: checkpoint.to_owned(),
        message,
    }
}

/// The error where a file of a checkpoint cannot be read. It is damage, unless this process may not read the file or is
/// short of memory or open files: that says nothing of what it holds.
fn unreadable(checkpoint: &Path, name: &str, error: std::io::Error) -> TrainingError {
    if error.kind() == std::io::ErrorKind::PermissionDenied || !is_fault_of_the_file(&error) {
        return TrainingError::File {
            path: checkpoint.join(name),
            source: error,
        };
    }
    damaged(checkpoint, format!("{name}: {error}"))
}

fn digest_file(path: &Path) -> std::io::Result<FileDigest> {
    let mut file = File::open(path)?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0u8; 1 << 20];
    let mut bytes = 0;
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok(FileDigest {
                bytes,
                blake3: hasher.finalize().to_hex().to_string(),
            });
        }
        bytes += n as u64;
        hasher.update(&buffer[..n]);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use super::*;

    #[test]
    fn what_may_not_be_read_is_not_damaged() {
        let checkpoint = Path::new("checkpoints/step-000000004");
        // As the system gives them: no permission, too many open files.
        for number in [13, 24] {
            match unreadable(checkpoint, OPTIMIZER, Error::from_raw_os_error(number)) {
                TrainingError::File { path, source } => {
                    assert_eq!(path, checkpoint.join(OPTIMIZER));
                    assert_eq!(source.raw_os_error(), Some(number));
                }
                other => panic!("{number}: {other:?}"),
            }
        }
        for kind in [ErrorKind::NotFound, ErrorKind::InvalidData, ErrorKind::IsADirectory] {
            let error = unreadable(checkpoint, RECORD, kind.into());
            assert!(matches!(error, TrainingError::Damaged { .. }), "{kind}: {error:?}");
        }
        let denied = unreadable(checkpoint, RECORD, ErrorKind::PermissionDenied.into());
        match flow_runtime::StageError::from(denied) {
            flow_runtime::StageError::Failed { message, help, .. } => {
                assert!(message.contains("step-000000004/training.json"), "{message}");
                assert!(help.is_some_and(|help| help.contains("may not")));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_file_is_trusted_once_its_last_change_is_long_ago_and_shows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "one").unwrap();
        let looks = Looks::of(&path).unwrap();
        assert!(!looks.has_settled());
        let mut earlier = looks;
        earlier.changed[2] -= 10;
        assert!(earlier.has_settled());
        fs::write(&path, "four").unwrap();
        assert_ne!(Looks::of(&path).unwrap(), looks);
    }
}
