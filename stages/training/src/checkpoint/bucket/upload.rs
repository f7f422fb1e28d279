//! Copies checkpoints into object storage, and deletes old ones there.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use flow_storage::{ObjectUrl, Storage, StorageError, StorageFault};

use super::{RemoteFolder, is_beside};
use crate::checkpoint::damage::damaged;
use crate::checkpoint::listing::{StoredCheckpoint, list, name_of};
use crate::checkpoint::ranking::Ranking;
use crate::checkpoint::record::{RECORD, record_of};
use crate::error::TrainingError;
use crate::tensorboard;

/// Times that the record of a checkpoint is sent.
const MARK_ATTEMPTS: usize = 3;

/// A folder of checkpoints, and the prefix that they are copied to.
pub struct Mirror {
    storage: Storage,
    url: ObjectUrl,
    folder: PathBuf,
    keep: usize,
    ranking: Ranking,
    /// Ends the copying between two pieces of a file.
    cancel: Arc<AtomicBool>,
    /// Validation errors of whole checkpoints in the bucket, as far as they were read.
    rates: HashMap<u64, Option<f64>>,
    /// Steps of whose checkpoints both sides are known to be equal.
    equal: BTreeSet<u64>,
}

impl Mirror {
    /// Checkpoints in `folder` go below `url`, where the last `keep` stay, and the best ones.
    pub fn new(storage: &Storage, url: ObjectUrl, folder: &Path, keep: usize, ranking: Ranking) -> Mirror {
        Mirror {
            storage: storage.clone(),
            url,
            folder: folder.to_owned(),
            keep,
            ranking,
            cancel: Arc::default(),
            rates: HashMap::new(),
            equal: BTreeSet::new(),
        }
    }

    pub(super) fn cancel(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.cancel)
    }

    /// Copies what the bucket lacks, the newest first, and deletes old checkpoints there.
    ///
    /// # Errors
    /// Where an object cannot be written (it is named), or the bucket has checkpoints of another training.
    pub fn copy_all(&mut self) -> Result<(), TrainingError> {
        let mut there = RemoteFolder::list(&self.storage, &self.url)?;
        let mut tried = BTreeSet::new();
        let mut failure = None;
        // The folder changes meanwhile: each time it is looked at anew.
        while let Some(next) = list(&self.folder)?
            .into_iter()
            .rev()
            .find(|here| !self.equal.contains(&here.step) && tried.insert(here.step))
        {
            match self.copy(&next, &there) {
                Ok(()) => {
                    self.equal.insert(next.step);
                }
                // It was removed, as others are newer.
                Err(_) if !next.path.exists() => {}
                // Others are copied, and old ones deleted, all the same.
                Err(error @ TrainingError::Damaged { .. }) => failure = failure.or(Some(error)),
                Err(error) => return Err(error),
            }
        }
        there = RemoteFolder::list(&self.storage, &self.url)?;
        self.copy_beside(&there)?;
        self.prune(&there)?;
        failure.map_or(Ok(()), Err)
    }

    fn copy(&mut self, checkpoint: &StoredCheckpoint, there: &RemoteFolder) -> Result<(), TrainingError> {
        let path = checkpoint.path.join(RECORD);
        let bytes = fs::read(&path).map_err(TrainingError::file(&path))?;
        let record = record_of(&checkpoint.path, &String::from_utf8_lossy(&bytes))?;
        let prefix = self.url.join(&name_of(checkpoint.step))?;
        let marker = prefix.join(RECORD)?;
        if there.whole().any(|step| step == checkpoint.step) {
            let (other, other_bytes) = there.record(&self.storage, checkpoint.step)?;
            if other_bytes == bytes {
                self.rates.insert(checkpoint.step, record.figure(self.ranking.monitor));
                return Ok(());
            }
            if other.identity != record.identity {
                return Err(another_training(&prefix));
            }
            // The same training, which went another way from an earlier checkpoint on.
            self.storage.delete(&marker)?;
        }
        for (name, expected) in &record.files {
            if name.contains('/') || name.starts_with('.') {
                return Err(damaged(&checkpoint.path, format!("{RECORD} names a file {name:?}")));
            }
            if !self.copy_file(&checkpoint.path.join(name), &prefix.join(name)?, Some(&expected.blake3))? {
                return Err(damaged(
                    &checkpoint.path,
                    format!("{name} has other content than when it was written"),
                ));
            }
        }
        self.mark(&marker, bytes)?;
        self.rates.insert(checkpoint.step, record.figure(self.ranking.monitor));
        Ok(())
    }

    /// Writes the record of a checkpoint whose files are there, if there is none.
    fn mark(&self, marker: &ObjectUrl, record: Vec<u8>) -> Result<(), TrainingError> {
        for attempt in 1.. {
            match self.storage.put_if_absent(marker, record.clone()) {
                // The answer to an attempt before may be lost, or another process may copy the same.
                Err(error) if error.fault == StorageFault::AlreadyExists => {
                    let stat = self.storage.stat(marker)?;
                    let same = stat.size == record.len() as u64
                        && self.storage.read_range(marker, 0..stat.size, &stat)? == record;
                    let prefix = marker.parent().unwrap_or_else(|| marker.clone());
                    return if same { Ok(()) } else { Err(another_training(&prefix)) };
                }
                // The client does not send such a request again where the connection was cut.
                Err(error) if error.fault == StorageFault::Unavailable && attempt < MARK_ATTEMPTS => {}
                // Storage that cannot write where there is nothing.
                Err(error) if error.fault == StorageFault::Unsupported => break,
                put => return Ok(put?),
            }
        }
        Ok(self.storage.put(marker, record)?)
    }

    /// Copies a file. False where its BLAKE3 is not the expected one: then there is no object.
    fn copy_file(&self, path: &Path, url: &ObjectUrl, expected: Option<&str>) -> Result<bool, TrainingError> {
        let mut file = File::open(path).map_err(TrainingError::file(path))?;
        let mut writer = self.storage.create(url)?;
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; 1 << 20];
        loop {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(TrainingError::data(format!("{url}: the copying was stopped")));
            }
            let count = match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(TrainingError::file(path)(error)),
            };
            hasher.update(&buffer[..count]);
            writer
                .write_all(&buffer[..count])
                .map_err(|error| match StorageError::in_io(&error) {
                    Some(error) => TrainingError::from(error.clone()),
                    None => TrainingError::file(path)(error),
                })?;
        }
        if expected.is_some_and(|expected| expected != hasher.finalize().to_hex().as_str()) {
            return Ok(false);
        }
        writer.finish()?;
        Ok(true)
    }

    /// Copies the figures, where they have another size than in the bucket: lines are only added to them.
    fn copy_beside(&self, there: &RemoteFolder) -> Result<(), TrainingError> {
        for below in ["", tensorboard::FOLDER] {
            let folder = self.folder.join(below);
            let Ok(entries) = fs::read_dir(&folder) else { continue };
            for entry in entries {
                let path = entry.map_err(TrainingError::file(&folder))?.path();
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let name = match below {
                    "" => name.into_owned(),
                    below => format!("{below}/{name}"),
                };
                let Some(metadata) = path.metadata().ok().filter(|metadata| metadata.is_file()) else {
                    continue;
                };
                let known = there.beside.get(&name).map(|entry| entry.stat.size);
                if is_beside(&name) && known != Some(metadata.len()) {
                    self.copy_file(&path, &self.url.join(&name)?, None)?;
                }
            }
        }
        Ok(())
    }

    /// Deletes old checkpoints, and what is left of those that were not copied whole, but none that is in the folder. Of each,
    /// what says that it is whole goes first.
    fn prune(&mut self, there: &RemoteFolder) -> Result<(), TrainingError> {
        let mut kept: BTreeSet<u64> = list(&self.folder)?.into_iter().map(|here| here.step).collect();
        kept.extend(there.whole().rev().take(self.keep.max(1)));
        let old: Vec<u64> = there.whole().filter(|step| !kept.contains(step)).collect();
        if self.ranking.keep > 0 && !old.is_empty() {
            kept.extend(self.best(there)?);
        }
        let newest = there.whole().next_back();
        for (step, files) in &there.checkpoints {
            // A newer one may be on its way from another machine.
            if kept.contains(step) || Some(*step) > newest {
                continue;
            }
            self.delete(files)?;
            self.equal.remove(step);
            self.rates.remove(step);
        }
        Ok(())
    }

    fn delete(&self, files: &BTreeMap<String, flow_storage::Entry>) -> Result<(), TrainingError> {
        if let Some(marker) = files.get(RECORD) {
            self.storage.delete(&marker.url)?;
        }
        for (_, entry) in files.iter().filter(|(name, _)| *name != RECORD) {
            self.storage.delete(&entry.url)?;
        }
        Ok(())
    }

    /// Steps of the best whole checkpoints in the bucket.
    fn best(&mut self, there: &RemoteFolder) -> Result<Vec<u64>, TrainingError> {
        let mut figures = Vec::new();
        for step in there.whole() {
            let figure = match self.rates.get(&step) {
                Some(figure) => *figure,
                None => match there.record(&self.storage, step) {
                    Ok((record, _)) => record.figure(self.ranking.monitor),
                    Err(TrainingError::Damaged { .. }) => None,
                    Err(error) => return Err(error),
                },
            };
            self.rates.insert(step, figure);
            figures.push((step, figure));
        }
        Ok(self.ranking.best(figures))
    }
}

fn another_training(prefix: &ObjectUrl) -> TrainingError {
    TrainingError::refused(
        format!("{prefix} is a checkpoint of another training, and is not replaced"),
        "name another prefix as `checkpoints`",
    )
}
