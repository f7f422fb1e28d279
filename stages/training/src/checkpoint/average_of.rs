//! The mean of the last checkpoints as a model of its own, in a folder `average-000001200` beside them: a model folder with
//! `average.json`, which says of which checkpoints it is, and the digest of every other file.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use flow_model::checkpoint::{OpenModel, write_model_folder};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::writing::{CheckpointFolder, REMOVING, WRITING, sync_folder};
use super::{
    FileDigest, Standing, damaged, digest_file, digest_of_files, folders, list, read_record, unreadable, verify,
    verify_files,
};
use crate::error::TrainingError;

const AVERAGE: &str = "average-";
const RECORD: &str = "average.json";
/// Version of `average.json`.
const VERSION: u32 = 1;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    version: u32,
    /// The checkpoints, oldest first.
    of: Vec<Part>,
    files: BTreeMap<String, FileDigest>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    step: u64,
    /// Of the files that make its model.
    model: String,
}

/// A mean that stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Average {
    pub path: PathBuf,
    record: Record,
}

impl Average {
    /// Steps of the checkpoints that it is of, ascending.
    pub fn steps(&self) -> impl Iterator<Item = u64> {
        self.record.of.iter().map(|part| part.step)
    }

    /// One digest over the files that make the model.
    pub fn model_digest(&self) -> String {
        digest_of_files(self.record.files.iter())
    }
}

/// The mean of the newest checkpoints that stands in a folder. Reads only.
pub fn standing(folder: &Path) -> Result<Option<Average>, TrainingError> {
    let newest = folders(folder)?.into_iter().filter(|name| is_name(name)).max();
    let Some(name) = newest else { return Ok(None) };
    let path = folder.join(name);
    let record = read(&path)?;
    verify_files(&path, &record.files)?;
    Ok(Some(Average { path, record }))
}

/// What the folder of a mean says of it.
fn read(path: &Path) -> Result<Record, TrainingError> {
    let wrong = |what: String| damaged(path, format!("{RECORD}: {what}"));
    let text = fs::read_to_string(path.join(RECORD)).map_err(|error| unreadable(path, RECORD, error))?;
    let value: Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    if let Some(version) = value["version"].as_u64()
        && version > u64::from(VERSION)
    {
        return Err(wrong(format!(
            "version {version} is newer than this program, which knows {VERSION}"
        )));
    }
    serde_json::from_value(value).map_err(|error| wrong(error.to_string()))
}

/// The last `keep` checkpoints.
fn parts(folder: &Path, keep: usize) -> Result<Vec<(Standing, Part)>, TrainingError> {
    let all = list(folder)?;
    let last = all.len().saturating_sub(keep.max(1));
    let with_digest = |standing: Standing| {
        let record = read_record(&standing.path)?;
        let (step, model) = (record.step, record.model_digest());
        Ok((standing, Part { step, model }))
    };
    all.into_iter().skip(last).map(with_digest).collect()
}

/// Whether the mean of the last `keep` checkpoints stands.
pub fn is_made(folder: &Path, keep: usize) -> Result<bool, TrainingError> {
    let parts = parts(folder, keep)?;
    let of = parts.iter().map(|(_, part)| part);
    match standing(folder) {
        Ok(average) => Ok(average.is_some_and(|average| average.record.of.iter().eq(of))),
        // It is made again.
        Err(TrainingError::Damaged { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Makes the mean of the last `keep` checkpoints, and removes means of others.
pub(super) fn make(held: &CheckpointFolder, keep: usize) -> Result<(), TrainingError> {
    let folder = held.folder();
    if is_made(folder, keep)? {
        return Ok(());
    }
    let parts = parts(folder, keep)?;
    for (standing, _) in &parts {
        verify(&standing.path, &read_record(&standing.path)?)?;
    }
    let models: Vec<OpenModel> = parts
        .iter()
        .map(|(standing, _)| OpenModel::open(&standing.path))
        .collect::<Result<_, _>>()?;
    let (Some((newest, part)), Some(last)) = (parts.last(), models.last()) else {
        return Err(TrainingError::Data {
            message: format!("{} holds no checkpoint", folder.display()),
        });
    };
    let path = &newest.path;
    let name = format!("{AVERAGE}{:09}", part.step);
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
    let mut record = Record {
        version: VERSION,
        of: parts.iter().map(|(_, part)| part.clone()).collect(),
        files: BTreeMap::new(),
    };
    for entry in fs::read_dir(&writing).map_err(TrainingError::file(&writing))? {
        let path = entry.map_err(TrainingError::file(&writing))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let digest = digest_file(&path).map_err(TrainingError::file(&path))?;
        record.files.insert(name, digest);
    }
    let path = writing.join(RECORD);
    let mut text = serde_json::to_string_pretty(&record).map_err(|error| TrainingError::Data {
        message: format!("{}: {error}", path.display()),
    })?;
    text.push('\n');
    File::create(&path)
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .map_err(TrainingError::file(&path))?;
    sync_folder(&writing)?;
    for old in folders(folder)?.into_iter().filter(|name| is_name(name)) {
        let path = folder.join(&old);
        // What is not one of these means, or is damaged, is only moved out of the way.
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
    // Somebody may train into the folder by now who took this process for dead.
    held.check()?;
    let target = folder.join(name);
    fs::rename(&writing, &target).map_err(TrainingError::file(&target))?;
    sync_folder(folder)?;
    held.note(&[])
}

/// Whether a folder has a name that is given here.
fn is_name(name: &str) -> bool {
    let step = name.strip_prefix(AVERAGE);
    step.is_some_and(|step| step.len() >= 9 && step.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The mean of the values, summed in 64 bits in their order and stored as `last` is; of whole numbers (counters), `last`.
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
