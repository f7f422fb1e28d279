//! The only module that writes files: every file is written completely under a temporary name, flushed (fsync), and
//! only then renamed to its final name.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::StoreError;
use super::backend::{Backend, Folder};
use super::lock::{self, Lock, LostLock};
use super::recovery::{Listing, TEMPORARY};
use super::temporary_file;

/// Threads that flush files concurrently. The file system combines concurrent flushes into few journal writes, so the
/// number does not depend on the cores.
const SYNC_THREADS: usize = 16;

/// File operations. In tests they can be made to stop after any number of steps, as a crash would.
#[derive(Clone)]
pub struct Files {
    /// The state of the lock under which the files are written: once it is lost, nothing more is written.
    lost: LostLock,
    /// In a process that writes for the run of another one: the lock, and the run that has to hold it.
    run: Option<Arc<(PathBuf, String)>>,
    backend: Arc<dyn Backend>,
    #[cfg(test)]
    pub crash: Option<std::sync::Arc<super::crash::Crash>>,
}

impl Default for Files {
    /// Those of a folder, without a lock.
    fn default() -> Self {
        Files {
            lost: LostLock::default(),
            run: None,
            backend: Arc::new(Folder),
            #[cfg(test)]
            crash: None,
        }
    }
}

/// Writes `bytes` as the file `path`, replacing an existing one atomically: readers see the old file or the new one,
/// also after a crash, and it keeps its permissions. The folder may be the user's: what a process that was killed left there, the next one removes.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    write_atomically_with(path, |file| {
        file.write_all(bytes).map_err(|e| StoreError::io("write", path, e))
    })
}

/// As [`write_atomically`], with what `write` writes: for files that need not be in memory as a whole.
///
/// # Errors
/// Those of `write`, and where the file cannot be written.
pub fn write_atomically_with<E: From<StoreError>>(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<(), E>,
) -> Result<(), E> {
    let folder = folder_of(path);
    let created = temporary_file::open_folder(folder)
        .and_then(|opened| temporary_file::create_temporary_file(opened, folder))
        .map_err(|e| StoreError::io("write", path, e));
    let (name, mut file) = created?;
    let temporary = folder.join(name);
    // Before there is anything in it to read.
    let kept = temporary_file::keep_permissions(&file, path).map_err(|e| StoreError::io("write", path, e).into());
    let placed = kept.and_then(|()| write(&mut file)).and_then(|()| {
        let synced = file.sync_all().map_err(|e| StoreError::io("write", path, e));
        Ok(synced.and_then(|()| Files::default().rename(&temporary, path))?)
    });
    if let Err(error) = placed {
        let _ = std::fs::remove_file(&temporary);
        return Err(error);
    }
    // Until here it was known as one that is being written.
    drop(file);
    Ok(Files::default().sync_folder(folder)?)
}

/// Writes a value as the file `path`, as JSON on one line, replacing an existing one atomically.
pub fn write_json_atomically(path: &Path, value: &impl Serialize) -> Result<(), StoreError> {
    Files::default().replace_with(path, |file| {
        serde_json::to_writer(&mut *file, value)?;
        file.write_all(b"\n")
    })
}

impl Files {
    /// The same, under a lock.
    pub fn under(&self, lock: &Lock) -> Files {
        let mut files = self.clone();
        files.lost = lock.lost();
        files
    }

    /// The same, for a run whose lock another process holds.
    pub(crate) fn of_run(&self, lock: PathBuf, run: &str) -> Files {
        let mut files = self.clone();
        files.run = Some(Arc::new((lock, run.to_owned())));
        files
    }

    /// Before data gets its name.
    ///
    /// # Errors
    /// Where the run for which another process holds the lock holds it no more: that process is gone, and the next run may
    /// have begun.
    pub(crate) fn check_run(&self) -> Result<(), StoreError> {
        self.run.as_ref().map_or(Ok(()), |run| lock::check_run(&run.0, &run.1))
    }

    /// The same, of a state directory that is elsewhere.
    pub(super) fn with_backend(&self, backend: Arc<dyn Backend>) -> Files {
        Files {
            backend,
            ..self.clone()
        }
    }

    pub(super) fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Whether the state directory is in object storage, where each change is a request and others see it at once.
    pub(super) fn are_objects(&self) -> bool {
        self.backend.url().is_some()
    }

    /// The path, once the data file of `bytes` bytes is there: one in object storage is fetched.
    pub(super) fn at_hand(&self, path: PathBuf, bytes: u64) -> Result<PathBuf, StoreError> {
        self.backend.read(&path, bytes)?;
        Ok(path)
    }

    /// That another run has written a file of the state directory `dir`.
    pub(super) fn written_meanwhile(&self, dir: &Path, path: &Path) -> StoreError {
        let url = match self.backend.url() {
            Some(url) => format!("{url}/{}", path.strip_prefix(dir).unwrap_or(path).display()),
            None => path.display().to_string(),
        };
        StoreError::WrittenMeanwhile { url }
    }

    /// In tests: as if the machine stopped after some steps.
    #[cfg(test)]
    pub fn stopping(crash: &std::sync::Arc<super::crash::Crash>) -> Files {
        Files {
            crash: Some(crash.clone()),
            ..Files::default()
        }
    }

    /// Called before every step; fails if the lock is lost, or the test says that the machine has stopped.
    pub(super) fn step(&self, path: &Path) -> Result<(), StoreError> {
        self.lost.check()?;
        self.backend.check()?;
        #[cfg(test)]
        if let Some(crash) = &self.crash {
            crash.step().map_err(|e| StoreError::io("go on with", path, e))?;
        }
        let _ = path;
        Ok(())
    }

    /// Opens a new file under a temporary name in `folder`.
    pub(crate) fn create_temporary(&self, folder: &Path) -> Result<(PathBuf, File), StoreError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!("{TEMPORARY}{}-{number}", std::process::id()));
            self.step(&path)?;
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => {
                    #[cfg(test)]
                    if let Some(crash) = &self.crash {
                        crash.written(&path);
                    }
                    return Ok((path, file));
                }
                // The same process number on another host of a shared file system.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(e) => return Err(StoreError::io("create a file in", folder, e)),
            }
        }
    }

    /// Flushes the content of a file to the disk (fsync).
    pub fn sync(&self, path: &Path) -> Result<(), StoreError> {
        self.step(path)?;
        #[cfg(test)]
        if let Some(crash) = &self.crash {
            // In tests the simulated crash decides what reaches the disk.
            crash.synced(path);
            return Ok(());
        }
        File::open(path)
            .and_then(|file| file.sync_all())
            .map_err(|e| StoreError::io("bring to the disk", path, e))
    }

    /// Flushes the contents of many files to the disk.
    pub fn sync_all(&self, paths: &[PathBuf]) -> Result<(), StoreError> {
        let share = paths.len().div_ceil(SYNC_THREADS).max(1);
        if paths.len() <= 1 || self.is_stepped() {
            return paths.iter().try_for_each(|path| self.sync(path));
        }
        std::thread::scope(|scope| {
            let threads: Vec<_> = paths
                .chunks(share)
                .map(|paths| scope.spawn(move || paths.iter().try_for_each(|path| self.sync(path))))
                .collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    /// Flushes a folder, so that the names in it survive a power failure.
    pub(crate) fn sync_folder(&self, folder: &Path) -> Result<(), StoreError> {
        self.step(folder)?;
        #[cfg(test)]
        if let Some(crash) = &self.crash {
            crash.folder_synced(folder);
            return Ok(());
        }
        match File::open(folder).and_then(|file| file.sync_all()) {
            Ok(()) => Ok(()),
            // Some network file systems do not support fsync of a folder, and do not need it.
            Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
            Err(e) => Err(StoreError::io("bring to the disk", folder, e)),
        }
    }

    pub fn rename(&self, from: &Path, to: &Path) -> Result<(), StoreError> {
        self.step(to)?;
        #[cfg(test)]
        if let Some(crash) = &self.crash {
            crash.renamed(from, to);
        }
        std::fs::rename(from, to).map_err(|e| StoreError::io("rename a file to", to, e))
    }

    /// Gives the temporary file `from` the name `to`, unless that name is taken: then says false.
    pub(crate) fn rename_if_absent(&self, from: &Path, to: &Path) -> Result<bool, StoreError> {
        self.step(to)?;
        self.backend.put_new(self, from, to)
    }

    /// The test treats a link that is lost in a power failure like a lost rename: the file keeps its temporary name, or has none.
    pub(super) fn will_link(&self, from: &Path, to: &Path) {
        #[cfg(test)]
        if let (Some(crash), false) = (&self.crash, to.exists()) {
            crash.renamed(from, to);
        }
        let _ = (from, to);
    }

    /// Removes a file, if it is there.
    pub fn remove(&self, path: &Path) -> Result<(), StoreError> {
        self.backend.delete(self, &[path.to_path_buf()])
    }

    /// Removes a file of this machine, if it is there.
    pub(super) fn remove_here(&self, path: &Path) -> Result<(), StoreError> {
        #[cfg(test)]
        if let Some(crash) = &self.crash {
            crash.removed(path);
        }
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", path, e)),
            _ => Ok(()),
        }
    }

    /// Removes several files, if they are there.
    pub(crate) fn remove_all(&self, paths: &[PathBuf]) -> Result<(), StoreError> {
        self.backend.delete(self, paths)
    }

    /// Makes a folder that is not there.
    pub(crate) fn create_new_folder(&self, path: &Path) -> Result<(), StoreError> {
        self.step(path)?;
        std::fs::create_dir(path).map_err(|e| StoreError::io("create the folder", path, e))
    }

    pub(crate) fn create_folder(&self, path: &Path) -> Result<(), StoreError> {
        self.step(path)?;
        std::fs::create_dir_all(path).map_err(|e| StoreError::io("create the folder", path, e))
    }

    /// Writes `bytes` under a temporary name beside `path` and flushes them to the disk.
    pub fn prepare(&self, path: &Path, bytes: &[u8]) -> Result<PathBuf, StoreError> {
        self.prepare_with(path, |file| file.write_all(bytes))
    }

    fn prepare_with(
        &self,
        path: &Path,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<PathBuf, StoreError> {
        let (temporary, file) = self.create_temporary(folder_of(path))?;
        let mut file = BufWriter::new(file);
        let written = self
            .step(path)
            .and_then(|()| {
                let written = write(&mut file).and_then(|()| file.flush());
                written.map_err(|e| StoreError::io("write", path, e))
            })
            .and_then(|()| self.sync(&temporary));
        if let Err(error) = written {
            let _ = self.remove(&temporary);
            return Err(error);
        }
        Ok(temporary)
    }

    /// Writes `bytes` as the file `path`, replacing what is there.
    pub fn replace(&self, path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
        self.replace_with(path, |file| file.write_all(bytes))
    }

    /// As [`Files::replace`], with what `write` writes: for files that need not be in memory as a whole.
    pub(crate) fn replace_with(
        &self,
        path: &Path,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), StoreError> {
        let temporary = self.prepare_with(path, write)?;
        if let Err(error) = self.backend.replace(self, &temporary, path) {
            let _ = self.remove(&temporary);
            return Err(error);
        }
        self.sync_folder(folder_of(path))
    }

    /// Whether a test counts the steps, which must then have a fixed order.
    fn is_stepped(&self) -> bool {
        #[cfg(test)]
        return self.crash.is_some();
        #[cfg(not(test))]
        false
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// A temporary file that nobody has written for so long was left by a process that is no more.
const LEFT: Duration = Duration::from_secs(24 * 3600);

/// Whether a temporary file is so old that no process, of any machine, is still writing it.
pub(crate) fn is_left(path: &Path) -> bool {
    let written = std::fs::metadata(path).and_then(|file| file.modified()).ok();
    written.and_then(|at| at.elapsed().ok()).is_some_and(|age| age > LEFT)
}

/// The plain files of a folder with their sizes; empty if the folder is not there. Names that are not
/// Unicode are none of ours and left out.
pub fn list(folder: &Path) -> Result<Listing, StoreError> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Listing::new()),
        Err(e) => return Err(StoreError::io("list the folder", folder, e)),
    };
    let mut listing = Listing::new();
    for entry in entries {
        let entry = entry.map_err(|e| StoreError::io("list the folder", folder, e))?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        match entry.metadata() {
            Ok(metadata) if metadata.is_file() => {
                listing.insert(name, metadata.len());
            }
            Ok(_) => {}
            // Removed after the folder was listed.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(StoreError::io("look at", &entry.path(), e)),
        }
    }
    Ok(listing)
}

/// The content of a file; none if it is not there.
pub fn read(path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(StoreError::io("read", path, e)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_name_that_a_lost_answer_gave_already_is_ours_and_any_other_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join(".tmp-1-1"), folder.path().join("record.json"));
        let files = Files::default();
        std::fs::write(&from, "ours").unwrap();
        std::fs::hard_link(&from, &to).unwrap();
        assert!(files.rename_if_absent(&from, &to).unwrap());
        assert!(!from.exists());
        // The same bytes in another file are another's.
        std::fs::write(&from, "ours").unwrap();
        assert!(!files.rename_if_absent(&from, &to).unwrap());
        assert!(from.exists());
        // So is a link that leads to our own.
        std::fs::remove_file(&to).unwrap();
        std::os::unix::fs::symlink(&from, &to).unwrap();
        assert!(!files.rename_if_absent(&from, &to).unwrap());
    }

    #[test]
    fn a_file_that_is_replaced_keeps_its_permissions() {
        let folder = tempfile::tempdir().unwrap();
        let mode = |name: &str| {
            std::fs::metadata(folder.path().join(name))
                .unwrap()
                .permissions()
                .mode()
                & 0o7777
        };
        for (number, before) in [0o600, 0o640, 0o444, 0o666].into_iter().enumerate() {
            let name = number.to_string();
            let path = folder.path().join(&name);
            std::fs::write(&path, "old").unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(before)).unwrap();
            write_atomically(&path, b"new").unwrap();
            assert_eq!((mode(&name), std::fs::read(&path).unwrap()), (before, b"new".to_vec()));
        }
        // A link is replaced, not what it leads to; a new file has those of any new one.
        std::os::unix::fs::symlink("0", folder.path().join("link")).unwrap();
        std::fs::write(folder.path().join("plain"), "").unwrap();
        for name in ["link", "new"] {
            write_atomically(&folder.path().join(name), b"new").unwrap();
            assert_eq!(mode(name), mode("plain"), "{name}");
        }
    }
}
