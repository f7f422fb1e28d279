//! Locks: one run per state directory, one export at a time per folder, one training per folder of checkpoints.
//!
//! The kernel's lock on the open file ends with its owner however that died, and between processes of one machine it
//! is all that is needed. Some shared file systems keep it within a machine, though, so that two machines both get
//! it. There the record in the file counts: it names its owner, and holds a number that a thread of the owner raises
//! every few seconds. Whoever finds the record of another machine watches that number by its own clock (clocks of
//! two machines are never compared): if it moves, the owner lives; if it stands still long enough, the owner is
//! dead and the lock is taken over. An owner that was taken for dead, and finds another record in the file, writes
//! nothing more.

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

use super::StoreError;
use super::error::Holder;
use machine::{boot_id, is_of_one_machine};
use record::LockRecord;
pub(crate) use record::new_token;

/// How long is waited for what.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// An owner raises its number this often.
    beat: Duration,
    /// An owner whose number stands still for so long is dead. Twelve beats: it may be slow, not that slow.
    stale: Duration,
    /// How often the number of another owner is looked at.
    look: Duration,
    /// After a lock was taken from a dead owner, another machine that does the same has shown itself.
    settle: Duration,
    /// Whether files there are seen by one machine only; none: as the kind of the file system tells.
    one_machine: Option<bool>,
}

const PATIENCE: Patience = Patience {
    beat: Duration::from_secs(5),
    stale: Duration::from_secs(60),
    look: Duration::from_secs(1),
    settle: Duration::from_secs(2),
    one_machine: None,
};

/// A record older than this by the file's time is not shown as that of a living owner. Nothing but a message depends on
/// it, so clocks may differ.
const SHOWN: Duration = Duration::from_secs(600);

/// A held lock; let go when dropped.
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

/// Tells whether a lock was taken over by another machine, to which its owner seemed dead.
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
    /// [`StoreError::Held`] if somebody has it. On a shared file system it may take a minute to tell that an owner on
    /// another machine is dead.
    pub fn take(path: &Path, what: &'static str, run: &str) -> Result<Lock, StoreError> {
        Lock::take_with(path, what, run, &PATIENCE)
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
                // Someone who only asks who holds it (`holder_of`) holds it for an instant himself.
                Err(TryLockError::WouldBlock) if refusals < 5 => {
                    refusals += 1;
                    thread::sleep(Duration::from_millis(10));
                    continue;
                }
                Err(TryLockError::WouldBlock) => return refused(record::read(&file).holder()),
                Err(TryLockError::Error(error)) if has_no_locks(&error) => false,
                Err(TryLockError::Error(error)) => return Err(StoreError::io("lock", path, error)),
            };
            // The owner before us may have removed the file between our opening and our locking it; then the
            // lock is on a file that nobody else will ever open.
            if !is_still_at(&file, path) {
                continue;
            }
            let found = record::read(&file);
            // Somebody may have looked in between; the file is this one's as long as nobody wrote to it.
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
                // Another machine may have come to the same end at the same time; the record that stays counts.
                thread::sleep(patience.settle);
                if !own.is_at(path) {
                    continue;
                }
            }
            return Ok(Lock::begin(what, path, file, own, (!alone).then_some(patience.beat)));
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
            // Without the thread the lock is one that other machines may take over: better than none.
            let thread = thread::Builder::new().name("lock".into()).spawn(beats).ok()?;
            Some((end, thread))
        });
        Lock { held, left, beating }
    }

    /// Names that an owner before this one wrote down and did not take back: what it left in the folder, if they
    /// are there.
    pub fn left(&self) -> &[String] {
        &self.left
    }

    /// Writes down names of temporary files or folders, before they are made, in the place of those written down
    /// before. Whoever takes the lock after a crash knows by them what is not the user's.
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

    /// Shows that the owner lives, unless the lock is another's by now.
    fn beat(&self) {
        let mut record = self.record();
        match record::at(&self.path) {
            Ok(Some(other)) if other.token != record.token && !other.token.is_empty() => {
                let _ = self
                    .lost
                    .0
                    .set((self.what, folder_of(&self.path).to_path_buf(), other.holder()));
            }
            // Removed by somebody: nobody has it, so it is still ours. Whoever takes it makes a new file.
            Ok(None) => {}
            // What cannot be read or written now may be in five seconds; if not, others take the owner for dead.
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
        // Still locked here, so nobody else of this machine can have taken the file for theirs.
        let _ = if record.temporary.is_empty() {
            std::fs::remove_file(&held.path)
        } else {
            record.released = true;
            record.write(&held.file)
        };
        let _ = held.file.unlock();
    }
}

/// Who holds the lock at `path` at this moment; none if it is free or was never there.
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

/// What watching a record tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Lives,
    Dead,
    Unknown,
}

/// A record that is watched: its text when it was seen first, and when that was.
#[derive(Default)]
struct Watch {
    first: Option<(String, Instant)>,
}

impl Watch {
    fn look(&mut self, text: &str, now: Instant, stale: Duration) -> Owner {
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

/// Opens the lock file, and says whether this made it. None if it came and went meanwhile.
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

/// Some file systems have none, some have them only while a service runs.
fn has_no_locks(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::Unsupported || error.raw_os_error() == Some(libc::ENOLCK)
}

/// A link to nothing is there and cannot be opened, however often it is tried.
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
        (Ok(held), Ok(named)) => held.ino() == named.ino() && held.dev() == named.dev(),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
