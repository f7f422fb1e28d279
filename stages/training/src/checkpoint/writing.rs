//! Writing checkpoints: the lock of their folder, whole or absent, and which ones stay.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use flow_model::Parameters;
use flow_model::model::TdtModel;

use super::{DAMAGED, LIVE, OPTIMIZER, RECORD, Record, average_of, best, digest_file, folders, list, name_of};
use crate::average;
use crate::error::TrainingError;
use crate::optimizer::AdamW;

const LOCK: &str = "lock";
pub(super) const WRITING: &str = ".writing-";
pub(super) const REMOVING: &str = ".removing-";

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

    /// Takes a damaged checkpoint out of the way, so that its step can be written again. Nothing of it is lost.
    pub fn set_aside(&self, checkpoint: &Path) -> Result<PathBuf, TrainingError> {
        let name = checkpoint.file_name().unwrap_or_default().to_string_lossy();
        let free = (1..)
            .map(|number| match number {
                1 => format!("{DAMAGED}{name}"),
                _ => format!("{DAMAGED}{name}-{number}"),
            })
            .map(|name| self.folder.join(name))
            .find(|path| !path.exists());
        let target = free.unwrap_or_else(|| self.folder.join(DAMAGED));
        fs::rename(checkpoint, &target).map_err(TrainingError::file(checkpoint))?;
        Ok(target)
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

    /// Makes the mean of the last `keep` checkpoints, which stands in a folder of its own until another one is made.
    pub fn make_average(&self, keep: usize) -> Result<(), TrainingError> {
        average_of::make(&self.folder, keep)
    }

    /// Removes the oldest checkpoints until `keep` are left (at least one always is), but not the one with the lowest
    /// validation error, if `keep_best`.
    pub fn prune(&self, keep: usize, keep_best: bool) -> Result<(), TrainingError> {
        let all = list(&self.folder)?;
        let best = match keep_best {
            true => best(&self.folder)?.map(|(standing, _)| standing.step),
            false => None,
        };
        for checkpoint in &all[..all.len().saturating_sub(keep.max(1))] {
            if Some(checkpoint.step) == best {
                continue;
            }
            // Renamed first, so that a half removed folder is never taken for a checkpoint.
            let removing = self.folder.join(format!("{REMOVING}{}", name_of(checkpoint.step)));
            fs::rename(&checkpoint.path, &removing).map_err(TrainingError::file(&checkpoint.path))?;
            fs::remove_dir_all(&removing).map_err(TrainingError::file(&removing))?;
        }
        Ok(())
    }
}

pub(super) fn sync_folder(folder: &Path) -> Result<(), TrainingError> {
    File::open(folder)
        .and_then(|file| file.sync_all())
        .map_err(TrainingError::file(folder))
}
