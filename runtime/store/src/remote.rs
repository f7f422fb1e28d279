//! A state directory in object storage: the same files, as objects below a prefix, and a copy of them on this machine that the
//! rest of the store works with.
//!
//! The bucket is the truth. Whoever opens the state directory brings the copy up to date first (`remote/update.rs`): records,
//! indices, snapshots and what belongs to runs are fetched where they changed; data files are listed, and fetched when they are
//! opened. What is written goes to the bucket before it has its name in the copy: data files first, and then the record that
//! names them, only if there is none of that name. An index replaces the one that was read and no other.

mod update;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use flow_storage::{FileVersion, ObjectUrl, ObjectVersion, Scheme, Storage, StorageFault};

use super::StoreError;
use super::atomic::Files;
use super::backend::Backend;
use super::layout::data_folder;
use super::lease::{LOCK, Lease, LeaseState};
use super::recovery::{Listing, is_temporary};
use super::sources::on_threads;
use flow_base::digest::Digest;
use flow_base::failpoints;
use update::Copied;

/// What the state directory has in object storage; what else is in the copy is of this machine alone.
const KEPT: [&str; 5] = ["FORMAT", "artifacts", "snapshots", "runs", "sources.json"];

/// Requests that are under way at the same time.
const AT_ONCE: usize = 16;

/// Files of more bytes are uploaded in parts, one file after the other: each part is held in memory.
const LARGE: u64 = 16 << 20;

/// How names of files begin that are being fetched.
const FETCHING: &str = ".fetch-";

/// The objects of a state directory, and their copy on this machine.
pub(super) struct Remote {
    storage: Storage,
    url: ObjectUrl,
    dir: PathBuf,
    /// Data files by the name of the recipe's folder, with their sizes.
    data: Mutex<BTreeMap<String, Listing>>,
    /// What the copy has of the other objects.
    copied: Mutex<Copied>,
    /// `None` when opened read-only.
    lease: Option<Arc<LeaseState>>,
}

impl Remote {
    /// `dir` is the folder of the copy.
    pub fn new(storage: &Storage, url: &ObjectUrl, dir: &Path, lease: Option<&Lease>) -> Remote {
        Remote {
            storage: storage.clone(),
            url: url.clone(),
            dir: dir.to_path_buf(),
            data: Mutex::default(),
            copied: Mutex::new(Copied::read(dir)),
            lease: lease.map(Lease::state),
        }
    }

    /// The key of a file of the copy below the prefix; none for what is of this machine alone.
    fn key_of(&self, path: &Path) -> Option<String> {
        let key = path.strip_prefix(&self.dir).ok()?.to_str()?;
        let name = key.rsplit('/').next()?;
        let is_kept = is_kept(key) && !is_temporary(name) && !is_fetched(name);
        is_kept.then(|| key.to_owned())
    }

    /// Uploads data files: each from its first path, under the name of its second.
    fn upload_data(&self, files: &[(PathBuf, PathBuf)]) -> Result<(), StoreError> {
        let sized = files.iter().map(|(from, to)| {
            let size = std::fs::metadata(from)
                .map_err(|e| StoreError::io("look at", from, e))?
                .len();
            Ok((from, to, size))
        });
        let sized: Vec<(&PathBuf, &PathBuf, u64)> = sized.collect::<Result<_, StoreError>>()?;
        let (large, small): (Vec<_>, Vec<_>) = sized.into_iter().partition(|(_, _, size)| *size > LARGE);
        on_threads(&small, AT_ONCE, |(from, to, size)| {
            let Some((key, url)) = self.named(to)? else {
                return Ok(());
            };
            self.storage.put(&url, read_whole(from)?)?;
            self.uploaded(&key, *size);
            Ok(())
        })
        .into_iter()
        .collect::<Result<(), StoreError>>()?;
        for (from, to, size) in large {
            let Some((key, url)) = self.named(to)? else { continue };
            let mut object = self.storage.create(&url)?;
            let mut file = File::open(from).map_err(|e| StoreError::io("read", from, e))?;
            io::copy(&mut file, &mut object).map_err(|e| StoreError::io("upload", Path::new(&url.to_string()), e))?;
            object.finish()?;
            self.uploaded(&key, size);
        }
        Ok(())
    }

    fn uploaded(&self, key: &str, size: u64) {
        if let Some((recipe, file)) = data_file(key) {
            let mut data = self.data();
            data.entry(recipe.to_owned()).or_default().insert(file.to_owned(), size);
        }
    }

    /// Writes the content of the file `from` as the object of the file `to`, which is not data. An index is written in place
    /// of the one that was read last alone.
    fn replace_object(&self, from: &Path, to: &Path) -> Result<(), StoreError> {
        let Some((key, url)) = self.named(to)? else {
            return Ok(());
        };
        // Before it is read: it may grow.
        let file = version_of(from);
        let bytes = read_whole(from)?;
        let version = if is_index(&key) {
            let before = self.copied().version(&key);
            let written = self.storage.put_if(&url, &bytes, before.as_ref());
            written.map_err(|error| match error.fault {
                StorageFault::AlreadyExists | StorageFault::Changed => self.written_meanwhile(&key),
                _ => StoreError::Storage(error),
            })?
        } else {
            self.storage.replace(&url, bytes)?
        };
        // A temporary file is renamed, and stays the same.
        self.copied().note(key, file, version);
        Ok(())
    }

    /// Writes the content of the file `from` as the object of the file `to` where there is none; says false where there is one.
    fn create(&self, from: &Path, to: &Path) -> Result<bool, StoreError> {
        let Some((key, url)) = self.named(to)? else {
            return Ok(true);
        };
        match self.storage.put_if(&url, &read_whole(from)?, None) {
            Ok(version) => {
                self.copied().note(key, version_of(from), version);
                Ok(true)
            }
            Err(error) if error.fault == StorageFault::AlreadyExists => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// That another run has written the object of this key.
    fn written_meanwhile(&self, key: &str) -> StoreError {
        StoreError::WrittenMeanwhile {
            url: format!("{}/{key}", self.url),
        }
    }

    /// Deletes the object of a file of the copy.
    fn remove(&self, path: &Path) -> Result<(), StoreError> {
        let Some((key, url)) = self.named(path)? else {
            return Ok(());
        };
        self.storage.delete(&url)?;
        self.copied().forget(&key);
        if let Some((recipe, file)) = data_file(&key)
            && let Some(files) = self.data().get_mut(recipe)
        {
            files.remove(file);
        }
        Ok(())
    }

    /// Deletes the objects of several files of the copy.
    fn remove_all(&self, paths: &[PathBuf]) -> Result<(), StoreError> {
        on_threads(paths, AT_ONCE, |path| {
            self.check()?;
            self.remove(path)
        })
        .into_iter()
        .collect()
    }

    /// Fetches an object as the file `path`, if `check` agrees with its size and digest.
    fn fetch_file(
        &self,
        url: &ObjectUrl,
        path: &Path,
        check: impl FnOnce(u64, &Digest) -> Result<(), StoreError>,
    ) -> Result<ObjectVersion, StoreError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let folder = path.parent().unwrap_or(&self.dir);
        let in_folder = |e| StoreError::io("create a file in", folder, e);
        std::fs::create_dir_all(folder).map_err(in_folder)?;
        let mut object = self.storage.open_now(url)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = folder.join(format!("{FETCHING}{}-{number}", std::process::id()));
        let fetched = (|| {
            let mut file = File::create(&temporary).map_err(in_folder)?;
            let mut hasher = blake3::Hasher::new();
            let mut buffer = vec![0; 1 << 18];
            let mut size = 0;
            loop {
                let read = match object.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(read) => read,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => {
                        return Err(match flow_storage::StorageError::in_io(&error) {
                            Some(fault) => StoreError::Storage(fault.clone()),
                            None => StoreError::io("read", Path::new(&url.to_string()), error),
                        });
                    }
                };
                hasher.update(&buffer[..read]);
                size += read as u64;
                file.write_all(&buffer[..read])
                    .map_err(|e| StoreError::io("write", &temporary, e))?;
            }
            check(size, &Digest::from_bytes(*hasher.finalize().as_bytes()))?;
            file.sync_all()
                .map_err(|e| StoreError::io("bring to the disk", &temporary, e))?;
            std::fs::rename(&temporary, path).map_err(|e| StoreError::io("rename a file to", path, e))
        })();
        if let Err(error) = fetched {
            let _ = std::fs::remove_file(&temporary);
            return Err(error);
        }
        Ok(ObjectVersion::from(object.stat()))
    }

    fn named(&self, path: &Path) -> Result<Option<(String, ObjectUrl)>, StoreError> {
        match self.key_of(path) {
            None => Ok(None),
            Some(key) => {
                let url = self.url.join(&key)?;
                Ok(Some((key, url)))
            }
        }
    }

    fn data(&self) -> MutexGuard<'_, BTreeMap<String, Listing>> {
        // Each change is one insertion or removal.
        self.data.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn copied(&self) -> MutexGuard<'_, Copied> {
        // As above.
        self.copied.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for Remote {
    fn url(&self) -> Option<&ObjectUrl> {
        Some(&self.url)
    }

    fn check(&self) -> Result<(), StoreError> {
        self.lease.as_ref().map_or(Ok(()), |lease| lease.check())
    }

    fn list(&self, recipe_folder: &Path) -> Result<Listing, StoreError> {
        let name = recipe_folder
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let mut listed = self.data().get(name).cloned().unwrap_or_default();
        if self.lease.is_none() {
            // A run of this machine may have written more since they were listed.
            let own = super::atomic::list(&data_folder(recipe_folder))?;
            listed.extend(own.into_iter().filter(|(name, _)| !is_fetched(name)));
        }
        Ok(listed)
    }

    fn size_of(&self, path: &Path) -> Option<u64> {
        let key = self.key_of(path)?;
        let (recipe, file) = data_file(&key)?;
        let listed = self.data().get(recipe).and_then(|files| files.get(file).copied());
        match self.lease {
            Some(_) => listed,
            None => listed.or_else(|| Some(std::fs::metadata(path).ok()?.len())),
        }
    }

    fn read(&self, path: &Path, bytes: u64) -> Result<(), StoreError> {
        let is_there = || std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() == bytes);
        let Some((key, url)) = self.named(path)?.filter(|_| !is_there()) else {
            return Ok(());
        };
        let damaged = |detail: String| StoreError::Damaged {
            path: url.to_string().into(),
            detail,
        };
        let digest = self.fetch_file(&url, path, |found, digest| {
            if found != bytes {
                return Err(damaged(format!("it has {found} bytes, and its record says {bytes}")));
            }
            // <key>.<port>.<digest>.parquet
            match key.strip_suffix(".parquet").and_then(|key| key.rsplit_once('.')) {
                Some((_, named)) if named == digest.short() => Ok(()),
                _ => Err(damaged("its digest is not the one in its name".to_string())),
            }
        });
        digest.map(drop)
    }

    fn put_data(&self, moves: &[(PathBuf, PathBuf)]) -> Result<(), StoreError> {
        self.check()?;
        self.upload_data(moves)?;
        if !moves.is_empty() {
            failpoints::hit(failpoints::DATA_UPLOADED, &[]);
        }
        Ok(())
    }

    fn note_data(&self, path: &Path, size: u64) {
        if let Some(key) = self.key_of(path) {
            self.uploaded(&key, size);
        }
    }

    fn put_new(&self, files: &Files, from: &Path, to: &Path) -> Result<bool, StoreError> {
        if !self.create(from, to)? {
            return Ok(false);
        }
        failpoints::hit(failpoints::RECORD_CREATED, &[]);
        // The copy follows, whatever an earlier process left in it.
        files.rename(from, to)?;
        Ok(true)
    }

    fn replace(&self, files: &Files, from: &Path, to: &Path) -> Result<(), StoreError> {
        self.replace_object(from, to)?;
        files.rename(from, to)
    }

    fn delete(&self, files: &Files, paths: &[PathBuf]) -> Result<(), StoreError> {
        paths.first().map_or(Ok(()), |path| files.step(path))?;
        self.remove_all(paths)?;
        paths.iter().try_for_each(|path| files.remove_here(path))
    }

    // Files by which the folder is found, `recipe.json` of a recipe and `plan.json` of a run, go last: what a crash leaves is found
    // again.
    fn delete_folder(&self, folder: &Path) -> Result<(), StoreError> {
        self.check()?;
        let Some((_, url)) = self.named(folder)? else {
            return Ok(());
        };
        let named = self.storage.list(&url)?;
        let paths = named
            .iter()
            .filter_map(|entry| Some(self.dir.join(entry.url.below(&self.url)?)));
        let is_last = |path: &PathBuf| {
            path.parent() == Some(folder)
                && path
                    .file_name()
                    .is_some_and(|name| name == "recipe.json" || name == "plan.json")
        };
        let (last, first): (Vec<PathBuf>, Vec<PathBuf>) = paths.partition(is_last);
        self.remove_all(&first)?;
        self.remove_all(&last)
    }

    fn put_changed(&self, folder: &Path) -> Result<(), StoreError> {
        let changed: Vec<PathBuf> = super::atomic::list(folder)?
            .keys()
            .map(|name| folder.join(name))
            .filter(|path| self.key_of(path).is_some_and(|key| !self.copied().is_noted(&key, path)))
            .collect();
        on_threads(&changed, AT_ONCE, |path| {
            self.check()?;
            self.replace_object(path, path)
        })
        .into_iter()
        .collect()
    }

    fn save(&self) -> Result<(), StoreError> {
        self.copied().write(&self.dir)
    }
}

/// Refuses locations that cannot hold a state directory.
///
/// # Errors
/// [`StoreError::Conditions`] for addresses of web servers.
pub(super) fn can_hold(url: &ObjectUrl) -> Result<(), StoreError> {
    match url.scheme() {
        Scheme::S3 | Scheme::Gs | Scheme::Az => Ok(()),
        Scheme::Https | Scheme::Http => Err(StoreError::Conditions {
            url: url.to_string(),
            detail: "addresses of web servers are read only".to_string(),
        }),
    }
}

/// Whether there is a state directory at `url`.
///
/// # Errors
/// If it cannot be looked at.
pub(super) fn is_there(storage: &Storage, url: &ObjectUrl) -> Result<bool, StoreError> {
    match storage.stat(&url.join("FORMAT")?) {
        Ok(_) => Ok(true),
        Err(error) if error.fault == StorageFault::NotFound => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Refuses a prefix with other content.
///
/// # Errors
/// [`StoreError::Foreign`], which names an object of another program; if it cannot be listed.
pub(super) fn refuse_foreign(storage: &Storage, url: &ObjectUrl) -> Result<(), StoreError> {
    if is_there(storage, url)? {
        return Ok(());
    }
    let found = storage.list_folder(url)?;
    let names = found.objects.iter().map(|entry| &entry.url).chain(&found.folders);
    match names.map(ObjectUrl::name).find(|name| *name != LOCK) {
        None => Ok(()),
        Some(name) => Err(StoreError::Foreign {
            path: url.to_string().into(),
            found: name.to_string(),
        }),
    }
}

/// Whether a file of the copy is one that is being fetched.
pub(super) fn is_fetched(name: &str) -> bool {
    name.starts_with(FETCHING)
}

/// Whether an object or a file of this key belongs to the state directory.
fn is_kept(key: &str) -> bool {
    let is_name = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', '\0']);
    key.split('/').all(is_name) && key.split('/').next().is_some_and(|first| KEPT.contains(&first))
}

/// Of the key of a data file the name of the recipe's folder, and the file's.
fn data_file(key: &str) -> Option<(&str, &str)> {
    let (recipe, file) = key.strip_prefix("artifacts/")?.split_once("/data/")?;
    (!recipe.contains('/') && !file.contains('/')).then_some((recipe, file))
}

/// Of the key of a group of records the name of the recipe's folder.
fn group_file(key: &str) -> Option<&str> {
    let (recipe, _) = key.strip_prefix("artifacts/")?.split_once("/records/")?;
    Some(recipe)
}

fn is_index(key: &str) -> bool {
    let recipe = key
        .strip_prefix("artifacts/")
        .and_then(|key| key.strip_suffix("/index.json"));
    recipe.is_some_and(|recipe| !recipe.contains('/'))
}

fn read_whole(path: &Path) -> Result<Bytes, StoreError> {
    let read = std::fs::read(path).map_err(|e| StoreError::io("read", path, e))?;
    Ok(read.into())
}

/// None where it is not there.
fn version_of(path: &Path) -> Option<FileVersion> {
    std::fs::metadata(path)
        .ok()
        .map(|metadata| FileVersion::of_file(&metadata))
}
