//! Locks: one run per state directory, one export at a time per folder.
//!
//! The lock is the kernel's, on an open file, so it ends with its owner however that died. The text in the
//! file only tells the others whom to blame.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::StoreError;
use super::error::Holder;

/// A held lock; let go when dropped.
pub(crate) struct Lock {
    file: File,
    path: PathBuf,
    /// Whether the file goes with the lock (a folder of the user's) or stays (the state directory).
    removed_at_end: bool,
}

impl Lock {
    /// Takes the lock at `path`, or says who has it.
    pub(crate) fn take(path: &Path, what: &'static str, run: &str, removed_at_end: bool) -> Result<Lock, StoreError> {
        let mut refusals = 0;
        loop {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path)
                .map_err(|e| StoreError::io("open the lock file", path, e))?;
            match file.try_lock() {
                Ok(()) => {}
                // Someone who only asks who holds it (`holder_of`) holds it for an instant himself.
                Err(TryLockError::WouldBlock) if refusals < 5 => {
                    refusals += 1;
                    std::thread::sleep(std::time::Duration::from_millis(10));
                    continue;
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(StoreError::Held {
                        what,
                        path: locked_folder(path),
                        holder: read_holder(&mut file),
                    });
                }
                Err(TryLockError::Error(e)) => return Err(StoreError::io("lock", path, e)),
            }
            // The owner before us may have removed the file between our opening and our locking it; then the
            // lock is on a file that nobody else will ever open.
            if !is_still_at(&file, path) {
                continue;
            }
            let holder = Holder {
                host: host_name(),
                pid: std::process::id(),
                run: run.to_string(),
            };
            let text = serde_json::to_string(&holder).unwrap_or_default();
            file.set_len(0)
                .and_then(|()| file.seek(SeekFrom::Start(0)))
                .and_then(|_| file.write_all(text.as_bytes()))
                .map_err(|e| StoreError::io("write", path, e))?;
            return Ok(Lock {
                file,
                path: path.to_path_buf(),
                removed_at_end,
            });
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.removed_at_end {
            // Still locked here, so no one else can have taken it for theirs.
            let _ = std::fs::remove_file(&self.path);
        }
        let _ = self.file.unlock();
    }
}

/// Who holds the lock at `path` at this moment; none if it is free or was never there.
pub(crate) fn holder_of(path: &Path) -> Option<Holder> {
    let mut file = OpenOptions::new().read(true).open(path).ok()?;
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => Some(read_holder(&mut file)),
        _ => None,
    }
}

fn locked_folder(path: &Path) -> PathBuf {
    path.parent().unwrap_or(path).to_path_buf()
}

fn is_still_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(held), Ok(named)) => held.ino() == named.ino() && held.dev() == named.dev(),
        _ => false,
    }
}

fn read_holder(file: &mut File) -> Holder {
    let mut text = String::new();
    let _ = file.take(4096).read_to_string(&mut text);
    serde_json::from_str(&text).unwrap_or(Holder {
        host: "its host".into(),
        pid: 0,
        run: String::new(),
    })
}

pub(crate) fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .or_else(|| std::env::var("HOSTNAME").ok())
        .map(|name| name.trim().to_string())
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "unknown host".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_the_first_is_and_a_dead_owner_is_no_obstacle() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let first = Lock::take(&path, "the state directory", "run-1", false).unwrap();
        let Err(StoreError::Held { holder, .. }) = Lock::take(&path, "the state directory", "run-2", false) else {
            panic!("two owners");
        };
        assert_eq!((holder.run.as_str(), holder.pid), ("run-1", std::process::id()));
        assert!(!holder.host.is_empty());
        assert_eq!(holder_of(&path), Some(holder));
        drop(first);
        assert_eq!(holder_of(&path), None);
        // The text of the dead owner is still there; it does not matter.
        let _second = Lock::take(&path, "the state directory", "run-2", false).unwrap();
    }

    #[test]
    fn a_lock_that_removes_its_file_is_never_held_twice() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = std::sync::atomic::AtomicU32::new(0);
        let most = std::sync::atomic::AtomicU32::new(0);
        let taken = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    use std::sync::atomic::Ordering::SeqCst;
                    for _ in 0..500 {
                        if let Ok(lock) = Lock::take(&path, "the folder", "r", true) {
                            most.fetch_max(held.fetch_add(1, SeqCst) + 1, SeqCst);
                            taken.fetch_add(1, SeqCst);
                            held.fetch_sub(1, SeqCst);
                            drop(lock);
                        }
                    }
                });
            }
        });
        assert_eq!(most.into_inner(), 1);
        assert!(taken.into_inner() > 0);
        assert!(!path.exists());
    }
}
