//! Checkpoints: the log of a training run.
//!
//! A checkpoint is a folder `step-000001200` that describes itself: the model (weights, configuration,
//! tokenizer), the optimizer's state, and `training.json`, which says how far training was, what it was
//! made from, and the digest of every other file. It is written under a temporary name, flushed and
//! renamed, so it is complete or absent. `restart-001`, `restart-002`, ... beside the checkpoints hold
//! training that was begun anew with `on_change: restart`; the newest of them is the current one.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use flow_model::Parameters;
use flow_model::model::TdtModel;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::average::{self, Average};
use crate::error::TrainingError;
use crate::optimizer::{AdamW, AdamWConfig};

/// Version of `training.json`. What is newer is refused by name.
pub const CHECKPOINT_VERSION: u32 = 1;

const RECORD: &str = "training.json";
const OPTIMIZER: &str = "optimizer.safetensors";
/// Weights that training goes on from, where `model.safetensors` holds an average of them.
const LIVE: &str = "live.safetensors";
const LOCK: &str = "lock";
const WRITING: &str = ".writing-";
const REMOVING: &str = ".removing-";
const RESTART: &str = "restart-";

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
    /// Steps skipped because a loss or gradient was not finite.
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
        let mut hasher = blake3::Hasher::new();
        for (name, file) in self
            .files
            .iter()
            .filter(|(name, _)| *name != OPTIMIZER && *name != LIVE)
        {
            hasher
                .update(name.as_bytes())
                .update(&[0])
                .update(file.blake3.as_bytes())
                .update(&[0]);
        }
        hasher.finalize().to_hex().to_string()
    }
}

/// What differs between the recorded settings and the present ones, one line each: `phase2_lr: 0.0001 in
/// the checkpoint, 0.0002 now`. A raised `max_steps` is no change, unless it moves the ends of the stages of a curriculum.
/// Data is compared only where both sides know it.
pub fn changes(record: &Record, settings: &BTreeMap<String, Value>, data: Option<&str>) -> Vec<String> {
    let names: std::collections::BTreeSet<&String> = record.settings.keys().chain(settings.keys()).collect();
    let mut changes = Vec::new();
    // With a curriculum whose stages share the steps out; without one the setting is not there.
    let moves = record
        .settings
        .get("curriculum_steps")
        .is_some_and(|steps| steps == &serde_json::json!([]));
    for name in names {
        let (before, now) = (
            record.settings.get(name).unwrap_or(&Value::Null),
            settings.get(name).unwrap_or(&Value::Null),
        );
        let raised = name == "max_steps" && !moves && now.as_u64() >= before.as_u64();
        if !raised && !same_value(before, now) {
            changes.push(format!("{name}: {before} in the checkpoint, {now} now"));
        }
    }
    if let (Some(before), Some(now)) = (&record.data, data)
        && before != now
    {
        changes.push("the train rows are others than those of the checkpoint".to_owned());
    }
    changes
}

/// What differs in identity, one line each.
pub fn identity_changes(before: &Identity, now: &Identity) -> Vec<String> {
    let mut changes = Vec::new();
    let mut compare = |name: &str, before: String, now: String| {
        if before != now {
            changes.push(format!("{name}: {before} in the checkpoint, {now} now"));
        }
    };
    match (&before.model, &now.model) {
        (Value::Object(a), Value::Object(b)) => {
            let names: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for name in names {
                let text = |map: &serde_json::Map<String, Value>| map.get(name).unwrap_or(&Value::Null).to_string();
                compare(&format!("model.{name}"), text(a), text(b));
            }
        }
        (a, b) => compare("model", a.to_string(), b.to_string()),
    }
    let tokenizer = |t: &Option<String>| {
        t.as_ref()
            .map_or("that of init".to_owned(), |digest| digest.chars().take(16).collect())
    };
    compare("tokenizer", tokenizer(&before.tokenizer), tokenizer(&now.tokenizer));
    compare("init", before.init.clone(), now.init.clone());
    compare("seed", before.seed.to_string(), now.seed.to_string());
    changes
}

/// 1 and 1.0 are the same setting, and so are numbers that differ in the last bit: a number read from JSON
/// may.
fn same_value(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => (a - b).abs() <= 1e-14 * a.abs().max(b.abs()),
        _ => a == b,
    }
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

/// The newest checkpoint of a folder and what its record says.
pub fn latest(folder: &Path) -> Result<Option<(Standing, Record)>, TrainingError> {
    let Some(newest) = list(folder)?.pop() else {
        return Ok(None);
    };
    let record = read_record(&newest.path)?;
    Ok(Some((newest, record)))
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
    let text = fs::read_to_string(&path).map_err(|e| damaged(checkpoint, format!("{RECORD}: {e}")))?;
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
    for (name, expected) in &record.files {
        if name.contains('/') || name.starts_with('.') {
            return Err(damaged(checkpoint, format!("{RECORD} names a file {name:?}")));
        }
        let found = digest_file(&checkpoint.join(name)).map_err(|e| damaged(checkpoint, format!("{name}: {e}")))?;
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
    }
    Ok(())
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
) -> Result<Option<Average>, TrainingError> {
    let average = if record.files.contains_key(LIVE) {
        Average::resume(decay, model, &checkpoint.join(LIVE))?
    } else {
        Average::new(decay, &model.parameters)?
    };
    Ok((decay > 0.0).then_some(average))
}

/// The error for a damaged checkpoint, with the way out: the one before it, if there is one.
fn damaged(checkpoint: &Path, message: String) -> TrainingError {
    let before = checkpoint.parent().and_then(|folder| {
        let all = list(folder).ok()?;
        let at = all.iter().position(|c| c.path == checkpoint)?;
        Some(all.get(at.checked_sub(1)?)?.path.display().to_string())
    });
    let help = match before {
        Some(before) => format!("move it out of its folder to go on from {before}"),
        None => "move it out of its folder to begin anew; there is none before it".to_owned(),
    };
    TrainingError::Damaged {
        folder: checkpoint.to_owned(),
        message,
        help,
    }
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

/// The lock of a checkpoint folder: one process at a time trains into it. Goes when this is dropped, and
/// with the process.
#[derive(Debug)]
pub struct FolderLock {
    _file: File,
}

/// Makes the folder if there is none, and locks it.
pub fn lock(root: &Path) -> Result<FolderLock, TrainingError> {
    fs::create_dir_all(root).map_err(TrainingError::file(root))?;
    let path = root.join(LOCK);
    let mut file = File::options()
        .create(true)
        .read(true)
        .write(true)
        .truncate(false)
        .open(&path)
        .map_err(TrainingError::file(&path))?;
    if let Err(error) = file.try_lock() {
        let mut owner = String::new();
        // Only the message suffers when it cannot be read.
        let _ = file.read_to_string(&mut owner);
        return Err(match error {
            fs::TryLockError::WouldBlock => TrainingError::Locked {
                folder: root.to_owned(),
                owner: if owner.is_empty() {
                    "another process trains into it".into()
                } else {
                    owner.trim().to_owned()
                },
            },
            fs::TryLockError::Error(source) => TrainingError::File { path, source },
        });
    }
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let owner = format!("process {} on {} trains into it\n", std::process::id(), host.trim());
    file.set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| file.write_all(owner.as_bytes()))
        .map_err(TrainingError::file(&path))?;
    Ok(FolderLock { _file: file })
}

/// A checkpoint folder, held for writing.
#[derive(Debug)]
pub struct CheckpointFolder {
    folder: PathBuf,
    _lock: FolderLock,
}

impl CheckpointFolder {
    /// Opens `folder` (the locked one, or a restart below it). What an interrupted process left half written
    /// is removed.
    pub fn open(lock: FolderLock, folder: &Path) -> Result<Self, TrainingError> {
        fs::create_dir_all(folder).map_err(TrainingError::file(folder))?;
        for name in folders(folder)? {
            if name.starts_with(WRITING) || name.starts_with(REMOVING) {
                let path = folder.join(&name);
                fs::remove_dir_all(&path).map_err(TrainingError::file(&path))?;
            }
        }
        Ok(CheckpointFolder {
            folder: folder.to_owned(),
            _lock: lock,
        })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes one checkpoint and returns its folder. One that stands already for this step is left alone.
    /// `live` are the weights that training goes on from, where `model` has an average of them.
    pub fn write(
        &self,
        record: &Record,
        model: &TdtModel,
        optimizer: &AdamW,
        live: Option<&Parameters>,
    ) -> Result<PathBuf, TrainingError> {
        let name = name_of(record.step);
        let target = self.folder.join(&name);
        if target.exists() {
            return Ok(target);
        }
        let writing = self.folder.join(format!("{WRITING}{name}"));
        if writing.exists() {
            fs::remove_dir_all(&writing).map_err(TrainingError::file(&writing))?;
        }
        fs::create_dir(&writing).map_err(TrainingError::file(&writing))?;
        model.save(&writing)?;
        optimizer.save(&writing.join(OPTIMIZER))?;
        if let Some(live) = live {
            average::write_live(&writing.join(LIVE), live)?;
        }
        let mut record = record.clone();
        record.files.clear();
        for entry in fs::read_dir(&writing).map_err(TrainingError::file(&writing))? {
            let path = entry.map_err(TrainingError::file(&writing))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            File::open(&path)
                .and_then(|file| file.sync_all())
                .map_err(TrainingError::file(&path))?;
            record
                .files
                .insert(name, digest_file(&path).map_err(TrainingError::file(&path))?);
        }
        let path = writing.join(RECORD);
        let mut text = serde_json::to_string_pretty(&record).map_err(|e| TrainingError::Data {
            message: format!("{}: {e}", path.display()),
        })?;
        text.push('\n');
        let mut file = File::create(&path).map_err(TrainingError::file(&path))?;
        file.write_all(text.as_bytes())
            .and_then(|()| file.sync_all())
            .map_err(TrainingError::file(&path))?;
        sync_folder(&writing)?;
        fs::rename(&writing, &target).map_err(TrainingError::file(&target))?;
        sync_folder(&self.folder)?;
        Ok(target)
    }

    /// Removes the oldest checkpoints until `keep` are left (at least one always is).
    pub fn prune(&self, keep: usize) -> Result<(), TrainingError> {
        let all = list(&self.folder)?;
        for checkpoint in &all[..all.len().saturating_sub(keep.max(1))] {
            // Renamed first, so that a half removed folder is never taken for a checkpoint.
            let removing = self.folder.join(format!("{REMOVING}{}", name_of(checkpoint.step)));
            fs::rename(&checkpoint.path, &removing).map_err(TrainingError::file(&checkpoint.path))?;
            fs::remove_dir_all(&removing).map_err(TrainingError::file(&removing))?;
        }
        Ok(())
    }
}

fn sync_folder(folder: &Path) -> Result<(), TrainingError> {
    File::open(folder)
        .and_then(|file| file.sync_all())
        .map_err(TrainingError::file(folder))
}
