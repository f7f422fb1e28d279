//! Writing of checkpoints, atomically and under the lock of their folder, and removal of old ones.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use flow_kind::store::{Lock, StoreError};
use flow_model::Parameters;
use flow_model::model::TdtModel;

use super::average_of::{self, MeanOf};
use super::listing::{DAMAGED, RESTART, best, list, name_of};
use super::ranking::Ranking;
use super::record::{CheckpointRecord, LIVE, OPTIMIZER, RECORD, sealed_text};
use super::verify::digest_file;
use crate::average;
use crate::error::TrainingError;
use crate::optimizer::AdamW;

const LOCK: &str = "lock";
pub(super) const WRITING: &str = ".writing-";
pub(super) const REMOVING: &str = ".removing-";

/// The lock of a checkpoint folder: one process at a time trains into it. Released when this is dropped, and when the
/// process ends.
#[derive(Debug)]
pub struct FolderLock {
    root: PathBuf,
    lock: Lock,
}

/// Makes the folder if there is none, and locks it.
pub fn lock(root: &Path) -> Result<FolderLock, TrainingError> {
    fs::create_dir_all(root).map_err(TrainingError::file(root))?;
    let lock = Lock::take(&root.join(LOCK), "the folder of checkpoints", "training").map_err(refused)?;
    Ok(FolderLock {
        root: root.to_owned(),
        lock,
    })
}

/// Removes what a process left that was killed once its last step was written: nobody would lock the folder again. One that is
/// held, or that cannot be written, stays as it is.
pub fn remove_left(root: &Path) {
    if root.join(LOCK).exists()
        && let Ok(lock) = lock(root)
    {
        let _ = lock.remove_left();
    }
}

fn refused(error: StoreError) -> TrainingError {
    match error {
        StoreError::Held { path, holder, .. } => TrainingError::Locked {
            folder: path,
            owner: match holder.pid {
                0 => "another process trains into it".into(),
                pid => format!("process {pid} on {} trains into it", holder.host),
            },
        },
        StoreError::Io { path, source, .. } => TrainingError::File { path, source },
        other => TrainingError::data(other.to_string()),
    }
}

impl FolderLock {
    /// Removes the folders that an interrupted process was writing or removing, by the names that it noted in the lock
    /// file. Other folders stay, whatever their names.
    fn remove_left(&self) -> Result<(), TrainingError> {
        for name in self.lock.left() {
            let (folder, own) = match name.split_once('/') {
                Some((folder, own)) => (Some(folder), own),
                None => (None, name.as_str()),
            };
            let below = folder.is_none_or(|folder| folder.strip_prefix(RESTART).is_some_and(is_number));
            let ours = [WRITING, REMOVING].iter().any(|prefix| own.starts_with(prefix)) && !own.contains('/');
            let path = self.root.join(name);
            if below && ours && path.symlink_metadata().is_ok_and(|found| found.is_dir()) {
                fs::remove_dir_all(&path).map_err(TrainingError::file(&path))?;
            }
        }
        self.note(&[])
    }

    fn note(&self, paths: &[&Path]) -> Result<(), TrainingError> {
        let names: Vec<String> = paths
            .iter()
            .map(|path| {
                path.strip_prefix(&self.root)
                    .unwrap_or(path)
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.lock.note(&names).map_err(refused)
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// A checkpoint folder, held for writing.
#[derive(Debug)]
pub struct CheckpointFolder {
    folder: PathBuf,
    lock: FolderLock,
}

impl CheckpointFolder {
    /// Opens `folder` (the locked one, or a restart below it). What an interrupted process left half written
    /// is removed.
    pub fn open(lock: FolderLock, folder: &Path) -> Result<Self, TrainingError> {
        fs::create_dir_all(folder).map_err(TrainingError::file(folder))?;
        lock.remove_left()?;
        Ok(CheckpointFolder {
            folder: folder.to_owned(),
            lock,
        })
    }

    /// A free path for a temporary folder, which is recorded in the lock before the folder is created.
    fn noted(&self, prefix: &str, name: &str) -> Result<PathBuf, TrainingError> {
        let path = self.free(prefix, name);
        self.lock.note(&[&path])?;
        Ok(path)
    }

    /// A free path for a temporary folder.
    pub(super) fn free(&self, prefix: &str, name: &str) -> PathBuf {
        free(&self.folder, &format!("{prefix}{name}"))
    }

    /// Records in the lock which folders the next run removes, if this one is interrupted.
    pub(super) fn note(&self, paths: &[&Path]) -> Result<(), TrainingError> {
        self.lock.note(paths)
    }

    /// # Errors
    /// If another process has taken the folder over.
    pub(super) fn check(&self) -> Result<(), TrainingError> {
        self.lock.lock.check().map_err(refused)
    }

    /// Renames a damaged checkpoint, so that its step can be written again. Returns the new path.
    pub fn set_aside(&self, checkpoint: &Path) -> Result<PathBuf, TrainingError> {
        let name = checkpoint.file_name().unwrap_or_default().to_string_lossy();
        let target = free(&self.folder, &format!("{DAMAGED}{name}"));
        fs::rename(checkpoint, &target).map_err(TrainingError::file(checkpoint))?;
        Ok(target)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder of the checkpoint of a step, which may not exist.
    pub fn of_step(&self, step: u64) -> PathBuf {
        self.folder.join(name_of(step))
    }

    /// Writes one checkpoint and returns its folder. An existing one of this step is left as it is.
    /// `live` are the weights that training continues from, where `model` has an average of them. `more` writes further files into the
    /// folder that it is given.
    pub fn write(
        &self,
        record: &CheckpointRecord,
        model: &TdtModel,
        optimizer: &AdamW,
        live: Option<&Parameters>,
        more: impl FnOnce(&Path) -> Result<(), TrainingError>,
    ) -> Result<PathBuf, TrainingError> {
        let name = name_of(record.step);
        let target = self.folder.join(&name);
        if target.exists() {
            return Ok(target);
        }
        let writing = self.noted(WRITING, &name)?;
        let written = fs::create_dir(&writing)
            .map_err(TrainingError::file(&writing))
            .and_then(|()| more(&writing))
            .and_then(|()| fill(&writing, record, model, optimizer, live))
            // Another process may have taken the lock over, if this one did not respond.
            .and_then(|()| self.check())
            .and_then(|()| fs::rename(&writing, &target).map_err(TrainingError::file(&target)));
        if let Err(error) = written {
            // The first error is reported; what cannot be removed is removed by the next run.
            if fs::remove_dir_all(&writing).is_ok() {
                let _ = self.lock.note(&[]);
            }
            return Err(error);
        }
        sync_folder(&self.folder)?;
        self.lock.note(&[])?;
        Ok(target)
    }

    /// Writes the mean that is to be handed on, in a folder of its own that replaces an earlier mean.
    pub fn make_average(&self, of: MeanOf) -> Result<(), TrainingError> {
        average_of::make(self, of)
    }

    /// Removes the oldest checkpoints until `keep` are left (at least one always is), but none of the best.
    pub fn prune(&self, keep: usize, ranking: Ranking) -> Result<(), TrainingError> {
        let all = list(&self.folder)?;
        let best: Vec<u64> = match ranking.keep {
            0 => Vec::new(),
            _ => best(&self.folder, ranking)?
                .iter()
                .map(|(standing, _)| standing.step)
                .collect(),
        };
        for checkpoint in &all[..all.len().saturating_sub(keep.max(1))] {
            if best.contains(&checkpoint.step) {
                continue;
            }
            // Renamed first, so that a half removed folder is never taken for a checkpoint.
            let removing = self.noted(REMOVING, &name_of(checkpoint.step))?;
            fs::rename(&checkpoint.path, &removing).map_err(TrainingError::file(&checkpoint.path))?;
            fs::remove_dir_all(&removing).map_err(TrainingError::file(&removing))?;
            self.lock.note(&[])?;
        }
        Ok(())
    }
}

/// The first of `name`, `name-2`, `name-3`, ... that is not taken.
fn free(folder: &Path, name: &str) -> PathBuf {
    let mut path = folder.join(name);
    let mut number = 2;
    while path.symlink_metadata().is_ok() {
        path = folder.join(format!("{name}-{number}"));
        number += 1;
    }
    path
}

/// Writes the files of a checkpoint into a folder, and syncs them.
fn fill(
    writing: &Path,
    record: &CheckpointRecord,
    model: &TdtModel,
    optimizer: &AdamW,
    live: Option<&Parameters>,
) -> Result<(), TrainingError> {
    model.save(writing)?;
    optimizer.save(&writing.join(OPTIMIZER))?;
    if let Some(live) = live {
        average::write_live(&writing.join(LIVE), live)?;
    }
    let mut record = record.clone();
    record.files.clear();
    for entry in fs::read_dir(writing).map_err(TrainingError::file(writing))? {
        let path = entry.map_err(TrainingError::file(writing))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        File::open(&path)
            .and_then(|file| file.sync_all())
            .map_err(TrainingError::file(&path))?;
        record
            .files
            .insert(name, digest_file(&path).map_err(TrainingError::file(&path))?);
    }
    let path = writing.join(RECORD);
    let text = sealed_text(&path, &record)?;
    let mut file = File::create(&path).map_err(TrainingError::file(&path))?;
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(TrainingError::file(&path))?;
    sync_folder(writing)
}

pub(super) fn sync_folder(folder: &Path) -> Result<(), TrainingError> {
    File::open(folder)
        .and_then(|file| file.sync_all())
        .map_err(TrainingError::file(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_down_in_a_restart_is_removed_too() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("restart-001");
        let held = CheckpointFolder::open(lock(dir.path()).unwrap(), &folder).unwrap();
        let ours = held.noted(WRITING, &name_of(3)).unwrap();
        fs::create_dir(&ours).unwrap();
        // A folder of that name that is not ours.
        let other = folder.join(".writing-step-000000004");
        fs::create_dir(&other).unwrap();
        assert_eq!(
            free(&folder, ".writing-step-000000004"),
            folder.join(".writing-step-000000004-2")
        );
        drop(held);
        // The names remain in the lock file after the process ends, also after a normal release of the lock.
        assert!(dir.path().join(LOCK).exists());
        CheckpointFolder::open(lock(dir.path()).unwrap(), &folder).unwrap();
        assert!(!ours.exists() && other.exists());
        assert!(!dir.path().join(LOCK).exists());
    }
}
