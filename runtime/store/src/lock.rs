//! Locks: one run per state directory, one export at a time per folder, one training per folder of checkpoints.
//!
//! The kernel's lock on the open file ends with the process that holds it, and is sufficient between processes of one
//! machine. Some shared file systems do not enforce it across machines, so that two machines could both get it. There
//! the record in the file decides: it names the owner, and has a counter (a heartbeat) that a thread of the owner
//! increments every few seconds. A process that finds the record of another machine watches the counter by its own
//! clock (clocks of two machines are never compared): while the counter changes, the owner is alive; if it does not
//! change for long enough, the owner is dead and the lock is taken over. An owner that was declared dead, and finds
//! another record in the file, writes nothing more.

mod machine;
mod record;

use std::fs::{File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};

use flow_storage::is_one_file;

use super::StoreError;
use super::error::Holder;
pub(super) use machine::boot_id;
pub use machine::is_of_one_machine;
use record::LockRecord;
pub(crate) use record::new_token;

/// Intervals and timeouts of the lock.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// How often an owner increments its counter.
    beat: Duration,
    /// An owner whose counter does not change for this long is dead: twelve heartbeats.
    stale: Duration,
    /// How often the counter of another owner is read.
    look: Duration,
    /// How long to wait after a takeover, so that another machine that takes the lock over at the same time is noticed.
    settle: Duration,
    /// Whether only one machine can see the files; none: decided by the type of the file system.
    one_machine: Option<bool>,
    /// Whether the counter is incremented also where the kernel's lock is sufficient.
    always_beats: bool,
}

const PATIENCE: Patience = Patience {
    beat: Duration::from_secs(5),
    stale: Duration::from_secs(60),
    look: Duration::from_secs(1),
    settle: Duration::from_secs(2),
    one_machine: None,
    always_beats: false,
};

/// A record older than this, by the file's modification time, is not reported as that of a living owner. Only a message
/// depends on it, so clocks may differ.
const SHOWN: Duration = Duration::from_secs(600);

/// A held lock; released when dropped.
#[derive(Debug)]
pub struct Lock {
    held: Arc<Held>,
    left: Vec<String>,
    beating: Option<(Sender<()>, JoinHandle<()>)>,
}

#[derive(Debug)]
struct Held {
    what: &'static str,
    path: PathBuf,
    file: File,
    record: Mutex<LockRecord>,
    lost: LostLock,
}

/// Whether another machine has taken the lock over because this owner seemed dead.
#[derive(Clone, Debug, Default)]
pub(crate) struct LostLock(Arc<OnceLock<(&'static str, PathBuf, Holder)>>);

impl LostLock {
    /// # Errors
    /// [`StoreError::Held`] if the lock was lost.
    pub fn check(&self) -> Result<(), StoreError> {
        match self.0.get() {
            None => Ok(()),
            Some((what, path, holder)) => Err(StoreError::Held {
                what,
                path: path.clone(),
                holder: holder.clone(),
            }),
        }
    }
}

impl Lock {
    /// Takes the lock at `path`, a file of its own in the folder that it guards. `what` names the folder in
    /// messages, `run` its user.
    ///
    /// # Errors
    /// [`StoreError::Held`] if another process has it. On a shared file system it may take a minute to find that an
    /// owner on another machine is dead.
    pub fn take(path: &Path, what: &'static str, run: &str) -> Result<Lock, StoreError> {
        Lock::take_with(path, what, run, &PATIENCE)
    }

    /// Takes a lock that only processes of this machine share, and waits for its owner as long as that goes on: as long as
    /// its counter, which is incremented every `beat`, changes within `stale`. A stopped process keeps the kernel's lock.
    ///
    /// # Errors
    /// [`StoreError::Held`] if the owner does not go on.
    pub(crate) fn wait_for(
        path: &Path,
        what: &'static str,
        beat: Duration,
        stale: Duration,
    ) -> Result<Lock, StoreError> {
        let patience = Patience {
            beat,
            stale,
            one_machine: Some(true),
            always_beats: true,
            ..PATIENCE
        };
        let mut watch = Watch::default();
        loop {
            let held = match Lock::take_with(path, what, "which does not go on", &patience) {
                Err(held @ StoreError::Held { .. }) => held,
                taken => return taken,
            };
            let found = record::at(path).map_err(|e| StoreError::io("read", path, e))?;
            match watch.look(found.unwrap_or_default().text(), Instant::now(), stale) {
                Owner::Dead => return Err(held),
                Owner::Lives => watch = Watch::default(),
                Owner::Unknown => {}
            }
        }
    }

    fn take_with(path: &Path, what: &'static str, run: &str, patience: &Patience) -> Result<Lock, StoreError> {
        let one_machine = patience
            .one_machine
            .unwrap_or_else(|| is_of_one_machine(folder_of(path)));
        let mut watch = Watch::default();
        let mut refusals = 0;
        let mut made = None;
        let refused = |holder| {
            Err(StoreError::Held {
                what,
                path: folder_of(path).to_path_buf(),
                holder,
            })
        };
        loop {
            let Some((file, is_new)) = open(path)? else { continue };
            let inode = file.metadata().map_err(|e| StoreError::io("look at", path, e))?.ino();
            made = if is_new { Some(inode) } else { made };
            let by_kernel = match file.try_lock() {
                Ok(()) => true,
                // A process that only asks for the holder (`holder_of`) holds the lock for a moment.
                Err(TryLockError::WouldBlock) if refusals < 5 => {
                    refusals += 1;
                    thread::sleep(Duration::from_millis(10));
                    continue;
                }
                Err(TryLockError::WouldBlock) => return refused(record::read(&file).holder()),
                Err(TryLockError::Error(error)) if has_no_locks(&error) => false,
                Err(TryLockError::Error(error)) => return Err(StoreError::io("lock", path, error)),
            };
            // The previous owner may have removed the file after it was opened here and before it was locked; the lock
            // is then on an unlinked file.
            if !is_still_at(&file, path) {
                continue;
            }
            let found = record::read(&file);
            // A `holder_of` elsewhere may have locked it meanwhile; the file still belongs to this process if its
            // record was not changed.
            let is_new = made == Some(inode) && found.text().is_empty();
            let alone = one_machine && by_kernel;
            let is_free = is_new || alone || found.released || (by_kernel && found.is_of_boot(boot_id()));
            if !is_free {
                match watch.look(found.text(), Instant::now(), patience.stale) {
                    Owner::Lives => return refused(found.holder()),
                    Owner::Dead => {}
                    Owner::Unknown => {
                        drop(file);
                        thread::sleep(patience.look);
                        continue;
                    }
                }
            }
            let own = LockRecord::new(run, found.temporary.clone());
            own.write(&file).map_err(|e| StoreError::io("write", path, e))?;
            if !alone && !is_new {
                // Another machine may have taken the lock over at the same time; the record that remains in the file
                // decides.
                thread::sleep(patience.settle);
                if !own.is_at(path) {
                    continue;
                }
            }
            let beat = (!alone || patience.always_beats).then_some(patience.beat);
            return Ok(Lock::begin(what, path, file, own, beat));
        }
    }

    fn begin(what: &'static str, path: &Path, file: File, record: LockRecord, beat: Option<Duration>) -> Lock {
        let left = record.temporary.clone();
        let held = Arc::new(Held {
            what,
            path: path.to_path_buf(),
            file,
            record: Mutex::new(record),
            lost: LostLock::default(),
        });
        let beating = beat.and_then(|beat| {
            let (end, ended) = bounded::<()>(0);
            let owner = Arc::clone(&held);
            let beats = move || {
                while ended.recv_timeout(beat) == Err(RecvTimeoutError::Timeout) {
                    owner.beat();
                }
            };
            // Without the thread other machines may take the lock over, which is better than no lock.
            let thread = thread::Builder::new().name("lock".into()).spawn(beats).ok()?;
            Some((end, thread))
        });
        Lock { held, left, beating }
    }

    /// Names that a previous owner noted and did not remove: temporary files that it left in the folder, if they exist.
    pub fn left(&self) -> &[String] {
        &self.left
    }

    /// Notes names of temporary files or folders before they are made; replaces the names noted before. After a crash,
    /// the next owner of the lock knows by them which files are not the user's.
    ///
    /// # Errors
    /// If the lock file cannot be written, or the lock is lost.
    pub fn note(&self, names: &[&str]) -> Result<(), StoreError> {
        self.check()?;
        let mut record = self.held.record();
        record.temporary = names.iter().map(|name| name.to_string()).collect();
        record
            .write(&self.held.file)
            .and_then(|()| self.held.file.sync_all())
            .map_err(|e| StoreError::io("write", &self.held.path, e))
    }

    /// # Errors
    /// [`StoreError::Held`] if another machine has taken the lock over.
    pub fn check(&self) -> Result<(), StoreError> {
        self.held.lost.check()
    }

    pub(crate) fn lost(&self) -> LostLock {
        self.held.lost.clone()
    }
}

impl Held {
    fn record(&self) -> MutexGuard<'_, LockRecord> {
        // A record is changed field by field and written as a whole; any state of it names this owner.
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Increments the counter, unless the lock belongs to another owner by now.
    fn beat(&self) {
        let mut record = self.record();
        match record::at(&self.path) {
            Ok(Some(other)) if other.token != record.token && !other.token.is_empty() => {
                let _ = self
                    .lost
                    .0
                    .set((self.what, folder_of(&self.path).to_path_buf(), other.holder()));
            }
            // The file was removed: no other process has the lock, so it is still held here. A process that takes it
            // makes a new file.
            Ok(None) => {}
            // An I/O error may be gone at the next heartbeat; if not, others declare this owner dead.
            _ => {
                record.beat += 1;
                let _ = record.write(&self.file);
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.beating.take() {
            drop(end);
            let _ = thread.join();
        }
        let held = &self.held;
        let mut record = held.record();
        if !record.is_at(&held.path) {
            return;
        }
        // The file is still locked here, so no other process of this machine can own it.
        let _ = if record.temporary.is_empty() {
            std::fs::remove_file(&held.path)
        } else {
            record.released = true;
            record.write(&held.file)
        };
        let _ = held.file.unlock();
    }
}

/// # Errors
/// If the lock at `path`, of the state directory, is not that of a run.
pub(crate) fn check_run(path: &Path, run: &str) -> Result<(), StoreError> {
    match record::at(path).map_err(|error| StoreError::io("read", path, error))? {
        Some(record) if record.is_of_run(run) && !record.released => Ok(()),
        Some(record) if !record.released => Err(StoreError::Held {
            what: "the state directory",
            path: folder_of(path).to_path_buf(),
            holder: record.holder(),
        }),
        _ => Err(StoreError::NotHeld {
            path: path.to_path_buf(),
            run: run.to_owned(),
        }),
    }
}

/// Who holds the lock at `path` now; none if it is free or does not exist.
pub(crate) fn holder_of(path: &Path) -> Option<Holder> {
    let file = OpenOptions::new().read(true).open(path).ok()?;
    let found = record::read(&file);
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => Some(found.holder()),
        _ if found.released || found.is_of_boot(boot_id()) || is_of_one_machine(folder_of(path)) => None,
        _ => {
            let age = SystemTime::now().duration_since(file.metadata().ok()?.modified().ok()?);
            age.map_or(true, |age| age < SHOWN).then(|| found.holder())
        }
    }
}

/// The result of watching a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    Lives,
    Dead,
    Unknown,
}

/// A watched record: its text when it was first seen, and the time of that.
#[derive(Default)]
pub(super) struct Watch {
    first: Option<(String, Instant)>,
}

impl Watch {
    pub fn look(&mut self, text: &str, now: Instant, stale: Duration) -> Owner {
        let (before, since) = self.first.get_or_insert_with(|| (text.to_owned(), now));
        if before != text {
            Owner::Lives
        } else if now.saturating_duration_since(*since) >= stale {
            Owner::Dead
        } else {
            Owner::Unknown
        }
    }
}

/// Opens the lock file, and returns whether this call created it. None if it was created and removed by others
/// meanwhile.
fn open(path: &Path) -> Result<Option<(File, bool)>, StoreError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    match options.clone().create_new(true).open(path) {
        Ok(file) => return Ok(Some((file, true))),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(StoreError::io("open the lock file", path, error)),
    }
    match options.open(path) {
        Ok(file) => Ok(Some((file, false))),
        Err(error) if error.kind() == ErrorKind::NotFound && !is_dangling(path) => Ok(None),
        Err(error) => Err(StoreError::io("open the lock file", path, error)),
    }
}

/// Whether the error is that the file system has no locks, or none at the moment (a lock service that does not run).
fn has_no_locks(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::Unsupported || error.raw_os_error() == Some(libc::ENOLCK)
}

/// A dangling symbolic link exists and cannot be opened: trying again does not help.
fn is_dangling(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|found| found.is_symlink())
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn is_still_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(held), Ok(named)) => is_one_file(&held, &named),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
