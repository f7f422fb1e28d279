//! Which checkpoints a folder holds, and which of them is the newest or the best.

use std::fs;
use std::path::{Path, PathBuf};

use super::ranking::Ranking;
use super::record::{CheckpointRecord, read_record};
use super::verify::verify;
use crate::error::TrainingError;

/// Prefix of the folders of restarted trainings.
pub(super) const RESTART: &str = "restart-";
/// Prefix of the folders of damaged checkpoints.
pub(super) const DAMAGED: &str = "damaged-";

/// A checkpoint on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredCheckpoint {
    /// Its folder.
    pub path: PathBuf,
    /// Optimizer steps that are done.
    pub step: u64,
}

/// The folder in which training continues: the newest `restart-NNN`, or `root` itself. Reads only.
pub fn current(root: &Path) -> Result<PathBuf, TrainingError> {
    Ok(match restarts(root)?.last() {
        Some(number) => root.join(restart_name(*number)),
        None => root.to_owned(),
    })
}

/// The folder that a restart would create.
pub fn next_restart(root: &Path) -> Result<PathBuf, TrainingError> {
    Ok(root.join(restart_name(restarts(root)?.last().unwrap_or(&0) + 1)))
}

pub(super) fn restart_name(number: u64) -> String {
    format!("{RESTART}{number:03}")
}

/// Numbers of the restarts, ascending.
pub(super) fn restarts(root: &Path) -> Result<Vec<u64>, TrainingError> {
    let mut numbers: Vec<u64> = folders(root)?
        .iter()
        .filter_map(|name| name.strip_prefix(RESTART)?.parse().ok())
        .collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// All checkpoints of a folder, oldest first. A folder that does not exist holds none.
pub fn list(folder: &Path) -> Result<Vec<StoredCheckpoint>, TrainingError> {
    let mut found: Vec<StoredCheckpoint> = folders(folder)?
        .iter()
        .filter_map(|name| {
            Some(StoredCheckpoint {
                path: folder.join(name),
                step: step_of(name)?,
            })
        })
        .collect();
    found.sort_by_key(|checkpoint| checkpoint.step);
    Ok(found)
}

/// The newest checkpoint of a folder whose files have the digests of its record, with that record and the errors of
/// newer ones. None where the folder has no checkpoint.
///
/// # Errors
/// Where there are checkpoints and all are damaged, or one cannot be read.
pub fn newest_sound(
    folder: &Path,
) -> Result<Option<(StoredCheckpoint, CheckpointRecord, Vec<TrainingError>)>, TrainingError> {
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

/// The newest checkpoint of a folder and its record; its files are not verified.
pub fn latest(folder: &Path) -> Result<Option<(StoredCheckpoint, CheckpointRecord)>, TrainingError> {
    let Some(newest) = list(folder)?.pop() else {
        return Ok(None);
    };
    let record = read_record(&newest.path)?;
    Ok(Some((newest, record)))
}

/// The best checkpoints of a folder and their records, the best first.
pub fn best(folder: &Path, ranking: Ranking) -> Result<Vec<(StoredCheckpoint, CheckpointRecord)>, TrainingError> {
    let mut all: Vec<Option<(StoredCheckpoint, CheckpointRecord)>> = Vec::new();
    for standing in list(folder)? {
        match read_record(&standing.path) {
            Ok(record) => all.push(Some((standing, record))),
            // It is renamed, with a warning, when training would resume from it.
            Err(TrainingError::Damaged { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    let figures = all
        .iter()
        .flatten()
        .map(|(standing, record)| (standing.step, record.figure(ranking.monitor)));
    let take = |step: u64| {
        let place = all
            .iter()
            .position(|one| one.as_ref().is_some_and(|(standing, _)| standing.step == step));
        place.and_then(|place| all[place].clone())
    };
    Ok(ranking.best(figures).into_iter().filter_map(take).collect())
}

pub(super) fn folders(folder: &Path) -> Result<Vec<String>, TrainingError> {
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

pub(super) fn name_of(step: u64) -> String {
    format!("step-{step:09}")
}

pub(super) fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    (digits.len() >= 9 && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}
