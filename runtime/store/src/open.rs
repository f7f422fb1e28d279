//! Opens a state directory, in a folder or in object storage, and says what it is called there.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use flow_storage::{Location, ObjectUrl, Storage};
use serde::{Deserialize, Serialize};

use super::atomic::{self, Files};
use super::error::{Holder, StoreError};
use super::layout::{FORMAT, records_folder};
use super::lease::{self, Lease};
use super::lock::{self, Lock};
use super::remote::{self, Remote};
use super::sources::SourceDigests;
use super::{Access, Inner, Store, recovery, run_name, temporary_file, versioned_json};

#[derive(Serialize, Deserialize)]
struct Format {
    version: u64,
}

impl versioned_json::Versioned for Format {
    fn version(&self) -> u64 {
        self.version
    }
}

impl Store {
    /// Opens the state directory `dir`: a folder, or a URL of object storage. Of one in object storage a copy on this machine is
    /// brought up to date ([`Storage::state_folder`]).
    ///
    /// # Errors
    /// [`StoreError::Held`] if another run has it, [`StoreError::Newer`] if a newer flow wrote it, and
    /// [`StoreError::Damaged`] if it is not a state directory. [`StoreError::Conditions`] for object storage that writes no object
    /// with a condition.
    pub fn open(storage: &Storage, dir: impl AsRef<Path>, access: Access) -> Result<Store, StoreError> {
        match Location::of_path(dir.as_ref())? {
            Location::Local(dir) => Store::open_with(storage, &dir, access, Files::default()),
            Location::Object(url) => {
                remote::can_hold(&url)?;
                let copy = storage.state_folder(&url)?;
                Store::open_remote(storage, &url, &copy, access, lease::PATIENCE, Files::default())
            }
        }
    }

    /// Opens the state directory at `url`; `copy` is the folder of its copy.
    pub(super) fn open_remote(
        storage: &Storage,
        url: &ObjectUrl,
        copy: &Path,
        access: Access,
        patience: lease::Patience,
        files: Files,
    ) -> Result<Store, StoreError> {
        // What is in a bucket may not be for everybody.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(copy);
        made.map_err(|e| StoreError::io("create the folder", copy, e))?;
        if let Access::Follow { run_id } = &access {
            // Process 0 sends the records; data is fetched when it is read.
            lease::check_run(storage, url, run_id)?;
            let remote = Arc::new(Remote::new(storage, url, copy, None));
            return Store::opened(storage, copy, access, files.with_backend(remote), None, None, true);
        }
        let updating = Lock::wait_for(
            &copy.join("copy.lock"),
            "the copy of the state directory",
            patience.beat,
            patience.stale,
        )?;
        let (lock, lease) = match &access {
            Access::Read | Access::Follow { .. } => (None, None),
            Access::Run { run_id } => {
                remote::refuse_foreign(storage, url)?;
                let lock = Lock::take(&copy.join("lock"), "the state directory", run_id);
                // Whoever has the copy has the lease.
                let lock = lock.map_err(|error| match error {
                    StoreError::Held { what, holder, .. } => StoreError::Held {
                        what,
                        path: url.to_string().into(),
                        holder,
                    },
                    error => error,
                })?;
                (Some(lock), Some(Lease::take(storage, url, run_id, patience)?))
            }
        };
        let is_kept_up = lock.is_none() && lock::holder_of(&copy.join("lock")).is_some();
        let remote = Arc::new(Remote::new(storage, url, copy, lease.as_ref()));
        remote.update(is_kept_up)?;
        drop(updating);
        let format = read_format(copy)?;
        Store::opened(
            storage,
            copy,
            access,
            files.with_backend(remote),
            lock,
            lease,
            format.is_some(),
        )
    }

    pub(super) fn open_with(storage: &Storage, dir: &Path, access: Access, files: Files) -> Result<Store, StoreError> {
        let format = read_format(dir)?;
        let lock = match &access {
            Access::Read | Access::Follow { .. } => None,
            Access::Run { run_id } => {
                if format.is_none() {
                    refuse_foreign(dir)?;
                }
                files.create_folder(dir)?;
                Some(Lock::take(&dir.join("lock"), "the state directory", run_id)?)
            }
        };
        Store::opened(storage, dir, access, files, lock, None, format.is_some())
    }

    fn opened(
        storage: &Storage,
        dir: &Path,
        access: Access,
        files: Files,
        lock: Option<Lock>,
        lease: Option<Lease>,
        has_format: bool,
    ) -> Result<Store, StoreError> {
        let files = match (&lock, &access) {
            (Some(lock), _) => files.under(lock),
            (None, Access::Follow { run_id }) if !files.are_objects() => files.of_run(dir.join("lock"), run_id),
            (None, _) => files,
        };
        if lock.is_some() {
            remove_temporary_files(&files, dir)?;
            if !has_format {
                let path = dir.join("FORMAT");
                files.replace(
                    &path,
                    &versioned_json::to_sealed_json(&path, &Format { version: FORMAT })?,
                )?;
            }
        }
        let sources = match access {
            // Process 0 sends what it knows of the files that are read here.
            Access::Follow { .. } => SourceDigests::new(storage),
            Access::Read | Access::Run { .. } => SourceDigests::load(storage, dir)?,
        };
        if lock.is_some() {
            sources.save(&files, dir)?;
        }
        let inner = Inner {
            dir: dir.to_path_buf(),
            files,
            sources,
            writers: Mutex::default(),
            _lease: lease,
            lock,
        };
        Ok(Store { inner: Arc::new(inner) })
    }

    /// The object storage that it was opened with.
    pub fn storage(&self) -> &Storage {
        self.inner.sources.storage()
    }

    /// Whether a run has a folder here. Who follows a run in object storage has found its name in the lock.
    ///
    /// # Errors
    /// If `id` is not a plain name.
    pub fn has_run(&self, id: &str) -> Result<bool, StoreError> {
        Ok(self.run_folder(id)?.is_dir() || (self.inner.files.are_objects() && self.inner.lock.is_none()))
    }

    /// What the state directory is called in messages: its folder or its URL.
    pub fn name(&self) -> String {
        match self.inner.files.backend().url() {
            Some(url) => url.to_string(),
            None => self.inner.dir.display().to_string(),
        }
    }

    /// Who runs in the state directory `dir` (a folder or a URL) at this moment, as far as it can be determined.
    pub fn holder(storage: &Storage, dir: &Path) -> Option<Holder> {
        match Location::of_path(dir).ok()? {
            Location::Local(dir) => lock::holder_of(&dir.join("lock")),
            Location::Object(url) => lease::holder_of(storage, &url),
        }
    }

    /// Whether `dir`, a folder or a URL, is a state directory.
    ///
    /// # Errors
    /// If object storage cannot be asked.
    pub fn is_there(storage: &Storage, dir: &Path) -> Result<bool, StoreError> {
        match Location::of_path(dir)? {
            Location::Local(dir) => Ok(dir.join("FORMAT").is_file()),
            Location::Object(url) => remote::is_there(storage, &url),
        }
    }

    /// The folder of the state directory `dir`, or of the copy of one that is a URL.
    ///
    /// # Errors
    /// Where there is no folder for copies.
    pub fn folder_of(storage: &Storage, dir: &Path) -> Result<PathBuf, StoreError> {
        Ok(match Location::of_path(dir)? {
            Location::Local(dir) => dir,
            Location::Object(url) => storage.state_folder(&url)?,
        })
    }

    /// Uploads a file that was added to the folder of a run of the state directory `dir`, if that is in object storage.
    ///
    /// # Errors
    /// If it cannot be read or uploaded.
    pub fn upload_run_file(storage: &Storage, dir: &Path, run: &str, file: &str) -> Result<(), StoreError> {
        let Location::Object(url) = Location::of_path(dir)? else {
            return Ok(());
        };
        let path = storage.state_folder(&url)?.join("runs").join(run).join(file);
        let bytes = std::fs::read(&path).map_err(|e| StoreError::io("read", &path, e))?;
        Ok(storage.put(&url.join("runs")?.join(run)?.join(file)?, bytes)?)
    }

    /// Removes those of the damaged files `found` that are of the state directory, from the copy of one in object storage: the
    /// next plan makes again what they held. Its `FORMAT`, without which it is none, stays. Gives what was removed.
    pub fn remove_damaged<'p>(&self, found: impl IntoIterator<Item = &'p Path>) -> Vec<PathBuf> {
        let dir = &self.inner.dir;
        let is_removed =
            |path: &&Path| path.starts_with(dir) && **path != *dir.join("FORMAT") && std::fs::remove_file(path).is_ok();
        found.into_iter().filter(is_removed).map(Path::to_path_buf).collect()
    }

    /// Uploads what changed in the folder of a run, if the state directory is in object storage.
    ///
    /// # Errors
    /// If it cannot be uploaded.
    pub fn upload_run(&self, run: &str) -> Result<(), StoreError> {
        let backend = self.inner.files.backend();
        backend.put_changed(&self.run_folder(run)?)?;
        backend.save()
    }
}

/// Removes what a run that was killed left under temporary names. Those among the data of a recipe are left to its next
/// writer: there may be millions of files there.
fn remove_temporary_files(files: &Files, dir: &Path) -> Result<(), StoreError> {
    let mut folders = vec![dir.to_path_buf(), dir.join("snapshots")];
    let artifacts = std::fs::read_dir(dir.join("artifacts")).into_iter().flatten().flatten();
    for recipe in artifacts.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        folders.push(records_folder(&recipe.path()));
        folders.push(recipe.path());
    }
    // Several may have been killed one after the other.
    const RUNS: usize = 20;
    for run in run_name::runs_in(dir)?.iter().rev().take(RUNS) {
        let folder = dir.join("runs").join(run);
        // What cannot be removed does no harm.
        let _ = temporary_file::remove_left(&folder);
        folders.push(folder);
    }
    for folder in folders {
        // Names alone: a folder may hold the records of many partitions.
        let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        for name in names.filter(|name| recovery::is_temporary(name)) {
            files.remove(&folder.join(name))?;
        }
    }
    Ok(())
}

/// The format of the state directory in a folder; none where there is none.
fn read_format(dir: &Path) -> Result<Option<Format>, StoreError> {
    let path = dir.join("FORMAT");
    match atomic::read(&path)? {
        Some(bytes) => Ok(Some(versioned_json::from_json(&path, &bytes, FORMAT)?)),
        None => Ok(None),
    }
}

/// Refuses a folder with other content: a state directory is created in an empty folder, or in one in which its
/// creation was interrupted.
fn refuse_foreign(dir: &Path) -> Result<(), StoreError> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(StoreError::io("list the folder", dir, e)),
    };
    for entry in entries {
        let entry = entry.map_err(|e| StoreError::io("list the folder", dir, e))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name != "lock" && !recovery::is_temporary(&name) {
            return Err(StoreError::Foreign {
                path: dir.to_path_buf(),
                found: name.into_owned(),
            });
        }
    }
    Ok(())
}
