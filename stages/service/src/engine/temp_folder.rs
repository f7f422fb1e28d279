//! A private folder for uploads, deleted at the end of the program.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use flow_storage::is_one_file;
use tempfile::{Builder, NamedTempFile};

/// Prefix of the folders' names, before a number.
const PREFIX: &str = "flow-serve-";
/// The file in a folder that its process holds locked.
const LOCK: &str = "lock";

/// A folder of this process only, deleted when the last clone is dropped. Folders of killed processes are deleted by
/// the next [`TempFolder::new`]. Cheap to clone.
#[derive(Clone, Debug)]
pub struct TempFolder {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    /// Locked as long as it is open.
    _lock: File,
    max_bytes: u64,
    reserved: Mutex<u64>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A failure is ignored: the next process that starts deletes the folder.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Reserved bytes of a [`TempFolder`]; released when this is dropped.
#[derive(Debug)]
pub struct Reservation {
    folder: Arc<Inner>,
    bytes: u64,
}

impl TempFolder {
    /// Makes a folder below `parent`, which only this user can enter, and deletes those that dead processes of this user left
    /// there. Files in it may have `max_bytes` together.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn new(parent: &Path, max_bytes: u64) -> io::Result<Self> {
        let (path, lock) = loop {
            if let Some(made) = make(parent)? {
                break made;
            }
        };
        let inner = Inner {
            max_bytes,
            reserved: Mutex::new(0),
            path,
            _lock: lock,
        };
        delete_dead(parent, &inner);
        Ok(TempFolder { inner: Arc::new(inner) })
    }

    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// A new file, in which the bytes of a [`Reservation`] may be written.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn file(&self) -> io::Result<NamedTempFile> {
        Builder::new().prefix("upload-").tempfile_in(&self.inner.path)
    }

    /// Reserves bytes, to be held as long as the file exists. None: there is no room now.
    pub fn reserve(&self, bytes: u64) -> Option<Reservation> {
        let mut reservation = Reservation {
            folder: Arc::clone(&self.inner),
            bytes: 0,
        };
        reservation.grow(bytes).then_some(reservation)
    }

    /// Reserves bytes of a file that is there already, however little room there is.
    pub fn reserve_anyway(&self, bytes: u64) -> Reservation {
        let mut reserved = self.inner.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let before = *reserved;
        *reserved = before.saturating_add(bytes);
        Reservation {
            bytes: *reserved - before,
            folder: Arc::clone(&self.inner),
        }
    }
}

impl Reservation {
    /// Reserves more bytes. False: there is no room for them, and nothing has changed.
    #[must_use]
    pub fn grow(&mut self, bytes: u64) -> bool {
        let mut reserved = self.folder.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        match reserved.checked_add(bytes).filter(|all| *all <= self.folder.max_bytes) {
            Some(all) => {
                *reserved = all;
                self.bytes += bytes;
                true
            }
            None => false,
        }
    }

    /// Reserves as many bytes as files that are there already have now, however little room there is.
    pub fn set_anyway(&mut self, bytes: u64) {
        let mut reserved = self.folder.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let others = *reserved - self.bytes;
        *reserved = others.saturating_add(bytes);
        self.bytes = *reserved - others;
    }

    /// Gives back what is reserved beyond this many bytes.
    pub fn shrink(&mut self, bytes: u64) {
        let rest = self.bytes.saturating_sub(bytes);
        *self.folder.reserved.lock().unwrap_or_else(PoisonError::into_inner) -= rest;
        self.bytes -= rest;
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        *self.folder.reserved.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
    }
}

/// A new folder with a lock. None: another process deleted it as a dead process's before it was locked.
fn make(parent: &Path) -> io::Result<Option<(PathBuf, File)>> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = parent.join(format!("{PREFIX}{}-{number}", std::process::id()));
    match DirBuilder::new().mode(0o700).create(&path) {
        // Exists: the folder of a dead process with this id.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
        made => made?,
    }
    let lock_path = path.join(LOCK);
    let lock = match OpenOptions::new().write(true).create_new(true).open(&lock_path) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists) => {
            return Ok(None);
        }
        lock => lock?,
    };
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let is_there = fs::metadata(&lock_path).is_ok_and(|found| {
        let locked = lock.metadata();
        locked.is_ok_and(|locked| is_one_file(&locked, &found))
    });
    Ok(is_there.then_some((path, lock)))
}

/// Whether a name has exactly the form that [`make`] gives. Names with only this prefix may belong to others.
fn is_name(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
    numbers.is_some_and(|(process, number)| is_number(process) && is_number(number))
}

/// Deletes folders of dead processes: those that are not locked. Errors are ignored.
fn delete_dead(parent: &Path, own: &Inner) {
    let Ok(user) = own.path.metadata().map(|found| found.uid()) else {
        return;
    };
    for entry in parent.read_dir().into_iter().flatten().flatten() {
        let path = entry.path();
        let is_ours = is_name(&entry.file_name().to_string_lossy())
            && path != own.path
            // Symbolic links are not followed.
            && fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir() && found.uid() == user);
        if !is_ours {
            continue;
        }
        // Creates the lock file if missing, so that a process that has just made the folder does not use it.
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path.join(LOCK));
        if let Ok(lock) = lock
            && lock.try_lock().is_ok()
        {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_folder_is_private_and_goes_with_its_owner() {
        let parent = tempfile::tempdir().unwrap();
        let folder = TempFolder::new(parent.path(), 100).unwrap();
        let path = folder.path().to_owned();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let file = folder.file().unwrap();
        assert!(file.path().starts_with(&path));
        let other = folder.clone();
        drop(folder);
        assert!(path.exists() && file.path().exists());
        drop(other);
        assert!(!path.exists());
        drop(file);
        assert!(TempFolder::new(&parent.path().join("missing"), 1).is_err());
    }

    #[test]
    fn folders_of_the_dead_are_deleted_and_no_others() {
        let parent = tempfile::tempdir().unwrap();
        let living = TempFolder::new(parent.path(), 1).unwrap();
        let dead = parent.path().join("flow-serve-999999999-0");
        let without_lock = parent.path().join("flow-serve-999999999-1");
        let foreign = parent.path().join("something");
        // Of the user, who called it alike.
        let models = parent.path().join("flow-serve-models");
        for folder in [&dead, &without_lock, &foreign, &models] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("upload-1"), "left behind").unwrap();
        }
        fs::write(dead.join(LOCK), "").unwrap();
        // The target of a link is not touched.
        let link = parent.path().join("flow-serve-999999999-2");
        std::os::unix::fs::symlink(&foreign, &link).unwrap();
        let second = TempFolder::new(parent.path(), 1).unwrap();
        assert_ne!(second.path(), living.path());
        assert!(living.path().exists() && second.path().exists());
        assert!(!dead.exists() && !without_lock.exists());
        assert!(link.exists() && foreign.join("upload-1").exists());
        assert!(models.join("upload-1").exists());
        for other in [
            "flow-serve-1",
            "flow-serve-1-",
            "flow-serve--1",
            "flow-serve-1-2-3",
            "flow-serve-1-a",
            "flow-1-2",
        ] {
            assert!(!is_name(other), "{other}");
        }
    }

    #[test]
    fn bytes_are_bounded_and_given_back() {
        let parent = tempfile::tempdir().unwrap();
        let folder = TempFolder::new(parent.path(), 100).unwrap();
        let mut first = folder.reserve(60).unwrap();
        assert!(folder.reserve(41).is_none());
        let second = folder.reserve(30).unwrap();
        assert!(!first.grow(11) && first.grow(10) && !first.grow(u64::MAX));
        assert_eq!(first.bytes(), 70);
        drop(second);
        assert!(first.grow(30));
        drop(first);
        assert_eq!(folder.reserve(100).unwrap().bytes(), 100);

        let mut old = folder.reserve_anyway(250);
        assert!(folder.reserve(1).is_none());
        old.shrink(300);
        assert_eq!(old.bytes(), 250);
        old.shrink(40);
        assert_eq!(folder.reserve(60).unwrap().bytes(), 60);
        assert_eq!(folder.reserve_anyway(u64::MAX).bytes(), u64::MAX - 40);
        old.set_anyway(90);
        assert!(folder.reserve(11).is_none());
        old.set_anyway(30);
        assert_eq!((old.bytes(), folder.reserve(70).unwrap().bytes()), (30, 70));
        drop(old);
        assert!(folder.reserve(100).is_some());
    }
}
