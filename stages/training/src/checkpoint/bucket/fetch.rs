//! Fetches checkpoints that this machine does not have.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use flow_storage::{Entry, ObjectUrl, Storage, StorageError};

use super::RemoteFolder;
use crate::checkpoint::damage::damaged;
use crate::checkpoint::listing::{list, name_of, restart_name, restarts};
use crate::checkpoint::ranking::Ranking;
use crate::checkpoint::record::{RECORD, read_record};
use crate::checkpoint::writing::{lock, sync_folder};
use crate::error::TrainingError;

/// Folders that are being fetched. They are nobody's while the lock is held.
const FETCHING: &str = ".fetching-";

/// Which checkpoints a training needs, the newest always among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wanted {
    /// The best ones.
    pub best: Option<Ranking>,
    /// This many of the last.
    pub last: usize,
}

impl Wanted {
    pub const NEWEST: Wanted = Wanted { best: None, last: 1 };
}

/// Fetches the wanted checkpoints of the newest restart that `root` lacks, each compared with the digests of its record. Where
/// the newest is damaged, the one before it is fetched in its place. Returns what was damaged, one line each.
///
/// # Errors
/// Where the bucket cannot be read, the folder cannot be written, or every checkpoint is damaged.
pub fn fetch(storage: &Storage, url: &ObjectUrl, root: &Path, wanted: Wanted) -> Result<Vec<String>, TrainingError> {
    let folders = RemoteFolder::list_all(storage, url)?;
    let newest = folders.iter().rev().find(|(_, there)| there.whole().next().is_some());
    let Some((&number, there)) = newest else {
        return Ok(Vec::new());
    };
    if restarts(root)?.last().is_some_and(|local| *local > number) {
        return Ok(Vec::new());
    }
    let folder = match number {
        0 => root.to_owned(),
        number => root.join(restart_name(number)),
    };
    let local: BTreeMap<u64, _> = list(&folder)?.into_iter().map(|here| (here.step, here.path)).collect();
    let all: BTreeSet<u64> = local.keys().copied().chain(there.whole()).collect();
    let mut others: BTreeSet<u64> = all.iter().rev().take(wanted.last).copied().collect();
    if let Some(ranking) = wanted.best {
        let mut figures = Vec::new();
        for &step in &all {
            let record = match local.get(&step) {
                Some(path) => read_record(path),
                None => there.record(storage, step).map(|(record, _)| record),
            };
            match record {
                Err(TrainingError::Damaged { .. }) => {}
                record => figures.push((step, record?.figure(ranking.monitor))),
            }
        }
        others.extend(ranking.best(figures));
    }
    let newest_local = local.keys().next_back().copied();
    let newer: Vec<u64> = there
        .whole()
        .rev()
        .take_while(|step| newest_local.is_none_or(|local| *step > local))
        .collect();
    others.retain(|step| !local.contains_key(step) && Some(step) != newer.first());
    let fetched = Fetch {
        storage,
        there,
        folder: &folder,
    };
    others.retain(|step| there.whole().any(|whole| whole == *step));
    if newer.is_empty() && others.is_empty() {
        return Ok(Vec::new());
    }
    let _lock = match lock(root) {
        // It has the newest itself.
        Err(TrainingError::Locked { .. }) => return Ok(Vec::new()),
        lock => lock?,
    };
    fs::create_dir_all(&folder).map_err(TrainingError::file(&folder))?;
    fetched.remove_left()?;
    let mut warnings = Vec::new();
    // The newest comes last: without it, the next run fetches again what is missing.
    for step in others {
        match fetched.checkpoint(step) {
            Err(error @ TrainingError::Damaged { .. }) => warnings.push(error.to_string()),
            done => done?,
        }
    }
    // Before the newest, for the same reason: the next copy into the bucket would replace figures that are not here.
    if newer
        .first()
        .is_some_and(|newest| !folder.join(name_of(*newest)).exists())
    {
        fetched.beside()?;
    }
    let mut failure = None;
    for step in newer {
        if folder.join(name_of(step)).exists() {
            failure = None;
            break;
        }
        match fetched.checkpoint(step) {
            Ok(()) => {
                failure = None;
                break;
            }
            Err(error @ TrainingError::Damaged { .. }) => {
                warnings.push(error.to_string());
                failure = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    match failure {
        Some(error) if newest_local.is_none() => Err(error),
        _ => Ok(warnings),
    }
}

struct Fetch<'a> {
    storage: &'a Storage,
    there: &'a RemoteFolder,
    folder: &'a Path,
}

impl Fetch<'_> {
    /// Removes what a process that was killed had begun to fetch.
    fn remove_left(&self) -> Result<(), TrainingError> {
        for entry in fs::read_dir(self.folder).map_err(TrainingError::file(self.folder))? {
            let path = entry.map_err(TrainingError::file(self.folder))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(FETCHING) && path.is_dir() {
                fs::remove_dir_all(&path).map_err(TrainingError::file(&path))?;
            }
        }
        Ok(())
    }

    fn checkpoint(&self, step: u64) -> Result<(), TrainingError> {
        let fetching = self.folder.join(format!("{FETCHING}{}", name_of(step)));
        let fetched = self.checkpoint_in(&fetching, step);
        if fetched.is_err() {
            // What cannot be removed is removed by the next run.
            let _ = fs::remove_dir_all(&fetching);
        }
        fetched
    }

    fn checkpoint_in(&self, fetching: &Path, step: u64) -> Result<(), TrainingError> {
        let (record, bytes) = self.there.record(self.storage, step)?;
        let no_files = BTreeMap::new();
        let files = self.there.checkpoints.get(&step).unwrap_or(&no_files);
        let remote = files.get(RECORD).and_then(|entry| entry.url.parent());
        let remote = Path::new(&remote.map_or_else(String::new, |url| url.to_string())).to_owned();
        if record.step != step {
            return Err(damaged(&remote, format!("{RECORD} says step {}", record.step)));
        }
        fs::create_dir(fetching).map_err(TrainingError::file(fetching))?;
        for (name, expected) in &record.files {
            if name.contains('/') || name.starts_with('.') || name == RECORD {
                return Err(damaged(&remote, format!("{RECORD} names a file {name:?}")));
            }
            let Some(entry) = files.get(name).filter(|entry| entry.stat.size == expected.bytes) else {
                return Err(damaged(&remote, format!("{name} is not there as {RECORD} has it")));
            };
            let digest = self.copy(entry, &fetching.join(name))?;
            if digest != expected.blake3 {
                return Err(damaged(
                    &remote,
                    format!("{name} has other content than when it was written"),
                ));
            }
        }
        let path = fetching.join(RECORD);
        let write = || -> io::Result<()> {
            let mut file = File::create(&path)?;
            file.write_all(&bytes)?;
            file.sync_all()
        };
        write().map_err(TrainingError::file(&path))?;
        sync_folder(fetching)?;
        let target = self.folder.join(name_of(step));
        fs::rename(fetching, &target).map_err(TrainingError::file(&target))?;
        sync_folder(self.folder)
    }

    /// The figures, as they were when the last checkpoint was copied.
    fn beside(&self) -> Result<(), TrainingError> {
        for (name, entry) in &self.there.beside {
            let path = self.folder.join(name);
            let parent = path.parent().unwrap_or(self.folder);
            fs::create_dir_all(parent).map_err(TrainingError::file(parent))?;
            let writing = parent.join(format!("{FETCHING}file"));
            self.copy(entry, &writing)?;
            fs::rename(&writing, &path).map_err(TrainingError::file(&path))?;
        }
        Ok(())
    }

    /// Copies an object into a file, and returns its BLAKE3.
    fn copy(&self, entry: &Entry, path: &Path) -> Result<String, TrainingError> {
        let mut file = File::create(path).map_err(TrainingError::file(path))?;
        let mut hasher = blake3::Hasher::new();
        let copied = self.storage.open(&entry.url)?.copy_to(&mut |bytes| {
            hasher.update(bytes);
            file.write_all(bytes).map(|()| true)
        });
        let copied = copied.and_then(|_| file.sync_all());
        match copied {
            Ok(()) => Ok(hasher.finalize().to_hex().to_string()),
            Err(error) => Err(match StorageError::in_io(&error) {
                Some(error) => error.clone().into(),
                None => TrainingError::file(path)(error),
            }),
        }
    }
}
