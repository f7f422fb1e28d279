//! The mean of several checkpoints, in a folder `average-000001200` beside them: a model folder with `average.json`,
//! which lists the checkpoints and the digest of every other file.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use flow_model::checkpoint::{OpenModel, write_model_folder};
use serde::{Deserialize, Serialize};

use super::damage::{damaged, unreadable};
use super::listing::{StoredCheckpoint, best, folders, list};
use super::ranking::Ranking;
use super::record::{FileDigest, checked_value, digest_of_files, read_record, sealed_text};
use super::verify::{digest_file, verify, verify_files};
use super::writing::{CheckpointFolder, REMOVING, WRITING, sync_folder};
use crate::error::TrainingError;
use crate::protect::risen;

const AVERAGE: &str = "average-";
const RECORD: &str = "average.json";
/// Version of `average.json`.
const VERSION: u32 = 2;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MeanRecord {
    version: u32,
    /// The checkpoints, oldest first.
    of: Vec<MeanSource>,
    files: BTreeMap<String, FileDigest>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MeanSource {
    step: u64,
    /// Of the files that make its model.
    model: String,
}

/// A mean of checkpoints on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointMean {
    pub path: PathBuf,
    record: MeanRecord,
}

impl CheckpointMean {
    /// Steps of the averaged checkpoints, ascending.
    pub fn steps(&self) -> impl Iterator<Item = u64> {
        self.record.of.iter().map(|source| source.step)
    }

    /// One digest over the files that make the model.
    pub fn model_digest(&self) -> String {
        digest_of_files(self.record.files.iter())
    }
}

/// The newest mean of checkpoints in a folder, verified. Reads only.
pub fn latest_mean(folder: &Path) -> Result<Option<CheckpointMean>, TrainingError> {
    let newest = folders(folder)?.into_iter().filter(|name| is_name(name)).max();
    let Some(name) = newest else { return Ok(None) };
    let path = folder.join(name);
    let record = read(&path)?;
    verify_files(&path, &record.files)?;
    Ok(Some(CheckpointMean { path, record }))
}

/// Reads `average.json` of a mean.
fn read(path: &Path) -> Result<MeanRecord, TrainingError> {
    let wrong = |what: String| damaged(path, format!("{RECORD}: {what}"));
    let text = fs::read_to_string(path.join(RECORD)).map_err(|error| unreadable(path, RECORD, error))?;
    let value = checked_value(path, RECORD, &text, u64::from(VERSION))?;
    if let Some(version) = value["version"].as_u64()
        && version > u64::from(VERSION)
    {
        return Err(wrong(format!(
            "version {version} is newer than this program, which knows {VERSION}"
        )));
    }
    serde_json::from_value(value).map_err(|error| wrong(error.to_string()))
}

/// Which checkpoints a mean is of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MeanOf {
    /// The last `keep`, without those in which a protected language is worse by more than `max_rise`.
    Last { keep: usize, max_rise: Option<f64> },
    /// The best.
    Best(Ranking),
}

/// The checkpoints that a mean is of, oldest first.
fn sources(folder: &Path, of: MeanOf) -> Result<Vec<(StoredCheckpoint, MeanSource)>, TrainingError> {
    let mut chosen = list(folder)?;
    match of {
        MeanOf::Last { keep, max_rise } => {
            let mut last = Vec::new();
            while last.len() < keep.max(1)
                && let Some(checkpoint) = chosen.pop()
            {
                let is_within = match max_rise {
                    Some(limit) => risen(&read_record(&checkpoint.path)?.protected, limit).is_none(),
                    None => true,
                };
                last.extend(is_within.then_some(checkpoint));
            }
            last.reverse();
            chosen = last;
        }
        MeanOf::Best(ranking) => {
            let best = best(folder, ranking)?;
            chosen.retain(|checkpoint| best.iter().any(|(standing, _)| standing.step == checkpoint.step));
        }
    }
    let with_digest = |checkpoint: StoredCheckpoint| {
        let record = read_record(&checkpoint.path)?;
        let (step, model) = (record.step, record.model_digest());
        Ok((checkpoint, MeanSource { step, model }))
    };
    chosen.into_iter().map(with_digest).collect()
}

/// Whether a mean is on disk, or there is nothing that it could be of.
pub fn is_made(folder: &Path, of: MeanOf) -> Result<bool, TrainingError> {
    let sources = sources(folder, of)?;
    if sources.is_empty() {
        return Ok(true);
    }
    let of = sources.iter().map(|(_, source)| source);
    match latest_mean(folder) {
        Ok(average) => Ok(average.is_some_and(|average| average.record.of.iter().eq(of))),
        // A mean that cannot be read is written again.
        Err(TrainingError::Damaged { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes a mean, and removes other ones.
pub(super) fn make(held: &CheckpointFolder, of: MeanOf) -> Result<(), TrainingError> {
    let folder = held.folder();
    if is_made(folder, of)? {
        return Ok(());
    }
    let sources = sources(folder, of)?;
    for (checkpoint, _) in &sources {
        verify(&checkpoint.path, &read_record(&checkpoint.path)?)?;
    }
    let models: Vec<OpenModel> = sources
        .iter()
        .map(|(checkpoint, _)| OpenModel::open(&checkpoint.path))
        .collect::<Result<_, _>>()?;
    let (Some((newest, source)), Some(last)) = (sources.last(), models.last()) else {
        return Err(TrainingError::data(format!(
            "{} holds no checkpoint that a mean can be of",
            folder.display()
        )));
    };
    let path = &newest.path;
    let name = format!("{AVERAGE}{:09}", source.step);
    let writing = held.free(WRITING, &name);
    held.note(&[&writing])?;
    let mut tensors = Vec::with_capacity(last.tensors.len());
    for entry in &last.tensors {
        let values = models.iter().map(|model| {
            let same = model.tensors.iter().find(|other| other.name == entry.name);
            let same = same.filter(|other| other.shape() == entry.shape());
            let same = same.ok_or_else(|| damaged(path, format!("tensor {} is not in all checkpoints", entry.name)))?;
            Ok::<_, TrainingError>(same.load()?)
        });
        tensors.push((entry.name.clone(), mean(values, entry.load()?)?));
    }
    let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write_model_folder(&writing, &last.config_yaml, last.tokenizer.as_deref(), &tensors)?;
    let mut record = MeanRecord {
        version: VERSION,
        of: sources.iter().map(|(_, source)| source.clone()).collect(),
        files: BTreeMap::new(),
    };
    for entry in fs::read_dir(&writing).map_err(TrainingError::file(&writing))? {
        let path = entry.map_err(TrainingError::file(&writing))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let digest = digest_file(&path).map_err(TrainingError::file(&path))?;
        record.files.insert(name, digest);
    }
    let path = writing.join(RECORD);
    let text = sealed_text(&path, &record)?;
    File::create(&path)
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .map_err(TrainingError::file(&path))?;
    sync_folder(&writing)?;
    for old in folders(folder)?.into_iter().filter(|name| is_name(name)) {
        let path = folder.join(&old);
        // A damaged mean, or another folder of this name, is renamed instead of removed.
        match read(&path) {
            Ok(_) => {}
            Err(TrainingError::Damaged { .. }) => {
                held.set_aside(&path)?;
                continue;
            }
            Err(error) => return Err(error),
        }
        let removing = held.free(REMOVING, &old);
        held.note(&[&writing, &removing])?;
        let old = folder.join(old);
        fs::rename(&old, &removing).map_err(TrainingError::file(&old))?;
        fs::remove_dir_all(&removing).map_err(TrainingError::file(&removing))?;
    }
    // Another process may have taken the lock over, if this one did not respond.
    held.check()?;
    let target = folder.join(name);
    fs::rename(&writing, &target).map_err(TrainingError::file(&target))?;
    sync_folder(folder)?;
    held.note(&[])
}

/// Whether the name of a folder is that of a mean.
fn is_name(name: &str) -> bool {
    let step = name.strip_prefix(AVERAGE);
    step.is_some_and(|step| step.len() >= 9 && step.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The mean of the values, summed in 64 bits in their order and stored as `last` is; of whole numbers (counters),
/// `last`.
fn mean(values: impl Iterator<Item = Result<Tensor, TrainingError>>, last: Tensor) -> Result<Tensor, TrainingError> {
    if !last.dtype().is_float() {
        return Ok(last);
    }
    let mut sum: Option<Tensor> = None;
    let mut count = 0u32;
    for value in values {
        let value = value?.to_dtype(DType::F64)?;
        sum = Some(match sum {
            None => value,
            Some(sum) => (sum + value)?,
        });
        count += 1;
    }
    match sum {
        None => Ok(last),
        Some(sum) => Ok((sum / f64::from(count))?.to_dtype(last.dtype())?),
    }
}
