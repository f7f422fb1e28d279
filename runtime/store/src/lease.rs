//! The lock of a state directory in object storage: an object `lock` that is written with conditions alone, so that of two
//! processes one is refused by the storage.
//!
//! As with the lock of a folder, the owner increments a counter in it every few seconds, and who waits for it watches the
//! counter by its own clock: clocks of two machines are never compared. An owner that seems dead is replaced where the object
//! is still as it was seen; it then finds another's name there, and writes nothing more. An owner whose renewal is
//! overdue pauses until it succeeds.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use flow_storage::{ObjectUrl, ObjectVersion, Storage, StorageError, StorageFault};
use serde::{Deserialize, Serialize};

use super::StoreError;
use super::error::Holder;
use super::lock::{Owner, Watch, boot_id, new_token};
use flow_base::host::host_name;

/// Name of the object.
pub(super) const LOCK: &str = "lock";

/// Maximum size of the lock in bytes; `flow` writes no larger one.
const LONGEST: u64 = 1 << 14;

/// Lost races after which acquisition fails.
const TRIES: usize = 20;

/// A lease that was renewed longer ago, by the storage's clock and this machine's, is not shown as that of a living owner. Only
/// messages depend on it.
const SHOWN: Duration = Duration::from_secs(600);

/// Intervals and timeouts of the lease.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// How often the owner increments its counter.
    pub beat: Duration,
    /// For which an owner acts after it last renewed the lease; shorter than `stale`.
    pub fresh: Duration,
    /// An owner whose counter does not change for so long is dead.
    pub stale: Duration,
    /// How often the counter of another owner is read.
    pub look: Duration,
    /// An owner that waits for so long until the lease is renewed gives up.
    pub wait: Duration,
}

pub(super) const PATIENCE: Patience = Patience {
    beat: Duration::from_secs(10),
    fresh: Duration::from_secs(40),
    stale: Duration::from_secs(60),
    look: Duration::from_secs(2),
    wait: Duration::from_secs(300),
};

/// The content of the object.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct LeaseRecord {
    host: String,
    pid: u32,
    run: String,
    /// The boot id of the owner's kernel, and its namespace of process numbers.
    boot: String,
    processes: String,
    /// A unique token of this acquisition.
    token: String,
    /// The counter that is incremented while the owner lives.
    beat: u64,
    released: bool,
}

impl LeaseRecord {
    fn new(run: &str) -> Self {
        LeaseRecord {
            host: host_name(),
            pid: std::process::id(),
            run: run.to_string(),
            boot: boot_id().to_string(),
            processes: process_namespace(),
            token: new_token(),
            beat: 0,
            released: false,
        }
    }

    /// What is no record is one of an unknown owner.
    fn parse(bytes: &[u8]) -> Self {
        serde_json::from_slice(bytes).unwrap_or_default()
    }

    fn bytes(&self) -> Result<Bytes, StoreError> {
        let text = serde_json::to_vec(self);
        let text = text.map_err(|error| StoreError::io("write", &PathBuf::from(LOCK), std::io::Error::other(error)))?;
        Ok(text.into())
    }

    fn holder(&self) -> Holder {
        Holder::new(&self.host, self.pid, &self.run)
    }

    /// Whether the owner was a process of this machine, as it runs now, that is no more.
    fn has_died_here(&self) -> bool {
        let is_here = !self.boot.is_empty()
            && self.boot == boot_id()
            && !self.processes.is_empty()
            && self.processes == process_namespace();
        is_here && self.pid != 0 && !PathBuf::from(format!("/proc/{}", self.pid)).exists()
    }
}

/// The namespace in which process numbers of this process are unique; empty where it cannot be determined.
fn process_namespace() -> String {
    let link = std::fs::read_link("/proc/self/ns/pid");
    link.map(|link| link.to_string_lossy().into_owned()).unwrap_or_default()
}

/// A moment, by clocks that nobody sets.
#[derive(Clone, Copy, Debug)]
struct Moment {
    at: Instant,
    /// Since the machine was started, also while it slept, which stops the other clock. None where it is not told.
    since_start: Option<Duration>,
}

impl Moment {
    fn now() -> Moment {
        let text = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
        let seconds = text.split_whitespace().next().and_then(|word| word.parse().ok());
        Moment {
            at: Instant::now(),
            since_start: seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
        }
    }

    fn age(self) -> Duration {
        let now = Moment::now();
        let with_sleep = now.since_start.zip(self.since_start);
        let with_sleep = with_sleep.map_or(Duration::ZERO, |(now, then)| now.saturating_sub(then));
        with_sleep.max(now.at.saturating_duration_since(self.at))
    }
}

/// A held lease; given back when dropped.
pub(super) struct Lease {
    state: Arc<LeaseState>,
    beating: Option<(Sender<()>, JoinHandle<()>)>,
}

/// What is known of a held lease.
pub(super) struct LeaseState {
    storage: Storage,
    lock: ObjectUrl,
    /// The state directory, as it is called in messages.
    state: PathBuf,
    held: Mutex<(LeaseRecord, ObjectVersion)>,
    /// Before the request that renewed it last.
    renewed: Mutex<Moment>,
    lost: OnceLock<Holder>,
    patience: Patience,
}

impl Lease {
    /// Takes the lock of the state directory at `url`; `run` is its user.
    ///
    /// # Errors
    /// [`StoreError::Held`] if another process has it, which may take some seconds to find, and a minute that it is dead.
    /// [`StoreError::Conditions`] where the storage writes an object against a condition, or knows none.
    pub fn take(storage: &Storage, url: &ObjectUrl, run: &str, patience: Patience) -> Result<Lease, StoreError> {
        let (lock, state) = (url.join(LOCK)?, PathBuf::from(url.to_string()));
        let own = LeaseRecord::new(run);
        let mut watch = Watch::default();
        let mut tries = 0;
        loop {
            let standing = storage.read_now(&lock, LONGEST)?;
            let mut before = None;
            let mut holder = LeaseRecord::default().holder();
            if let Some((version, bytes)) = standing {
                let found = LeaseRecord::parse(&bytes);
                holder = found.holder();
                if !found.released && !found.has_died_here() {
                    match watch.look(&String::from_utf8_lossy(&bytes), Instant::now(), patience.stale) {
                        Owner::Lives => return Err(held(&state, holder)),
                        Owner::Dead => {}
                        Owner::Unknown => {
                            thread::sleep(patience.look);
                            continue;
                        }
                    }
                }
                before = Some(version);
            }
            let began = Moment::now();
            match storage.put_if(&lock, &own.bytes()?, before.as_ref()) {
                Ok(version) => {
                    let (own, version) = prove(storage, &lock, url, own, version)?;
                    let state = Arc::new(LeaseState {
                        storage: storage.clone(),
                        lock,
                        state,
                        held: Mutex::new((own, version)),
                        renewed: Mutex::new(began),
                        lost: OnceLock::new(),
                        patience,
                    });
                    return Ok(Lease::begin(state));
                }
                Err(error) if is_taken(&error) && tries < TRIES => tries += 1,
                Err(error) if is_taken(&error) => return Err(held(&state, holder)),
                Err(error) => return Err(no_conditions(url, error)),
            }
        }
    }

    fn begin(state: Arc<LeaseState>) -> Lease {
        let (end, ended) = bounded::<()>(0);
        let owner = Arc::clone(&state);
        let beats = move || {
            while ended.recv_timeout(owner.patience.beat) == Err(RecvTimeoutError::Timeout) {
                owner.renew();
            }
        };
        // Without the thread the lease is not renewed, and `LeaseState::check` says so.
        let beating = thread::Builder::new().name("lease".into()).spawn(beats).ok();
        Lease {
            state,
            beating: beating.map(|thread| (end, thread)),
        }
    }

    pub fn state(&self) -> Arc<LeaseState> {
        Arc::clone(&self.state)
    }
}

impl LeaseState {
    /// Waits until the lease is known to be held.
    ///
    /// # Errors
    /// [`StoreError::Held`] if another process has taken it over, [`StoreError::NotRenewed`] if it could not be renewed.
    pub fn check(&self) -> Result<(), StoreError> {
        let began = Instant::now();
        loop {
            if let Some(holder) = self.lost.get() {
                return Err(held(&self.state, holder.clone()));
            }
            if self.is_fresh() {
                return Ok(());
            }
            // A process that slept learns from the next renewal whether another one has the lease: it waits for that.
            if began.elapsed() > self.patience.wait {
                return Err(StoreError::NotRenewed {
                    path: self.state.clone(),
                });
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Whether no other process can have taken the lease over.
    fn is_fresh(&self) -> bool {
        let renewed = *self.renewed.lock().unwrap_or_else(PoisonError::into_inner);
        renewed.age() < self.patience.fresh
    }

    fn held(&self) -> MutexGuard<'_, (LeaseRecord, ObjectVersion)> {
        // Replaced as a whole.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Increments the counter, unless another process has the lease by now.
    fn renew(&self) {
        let mut held = self.held();
        let began = Moment::now();
        let mut next = held.0.clone();
        next.beat += 1;
        let Ok(bytes) = next.bytes() else { return };
        let error = match self.storage.put_if(&self.lock, &bytes, Some(&held.1)) {
            Ok(version) => {
                *held = (next, version);
                *self.renewed.lock().unwrap_or_else(PoisonError::into_inner) = began;
                return;
            }
            Err(error) => error,
        };
        if !is_taken(&error) {
            return;
        }
        match self.storage.read_now(&self.lock, LONGEST) {
            Ok(Some((version, bytes))) => {
                let found = LeaseRecord::parse(&bytes);
                if found.token == held.0.token {
                    held.1 = version;
                } else {
                    let _ = self.lost.set(found.holder());
                }
            }
            // Somebody has deleted it, and nobody has taken it since.
            Ok(None) => {
                if let Ok(version) = self.storage.put_if(&self.lock, &bytes, None) {
                    *held = (next, version);
                    *self.renewed.lock().unwrap_or_else(PoisonError::into_inner) = began;
                }
            }
            Err(_) => {}
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.beating.take() {
            drop(end);
            if !self.state.is_fresh() {
                // The storage does not answer, perhaps for minutes; once the lease seems dead it is taken over.
                return;
            }
            let _ = thread.join();
        }
        let held = self.state.held();
        let released = LeaseRecord {
            released: true,
            ..held.0.clone()
        };
        // Not deleted: another's could be met. Where this fails, the lease is taken over once it seems dead.
        if let (None, Ok(bytes)) = (self.state.lost.get(), released.bytes()) {
            let _ = self.state.storage.put_if(&self.state.lock, &bytes, Some(&held.1));
        }
    }
}

/// Who has the lease of the state directory at `url`; none if nobody has.
pub(super) fn holder_of(storage: &Storage, url: &ObjectUrl) -> Option<Holder> {
    let lock = url.join(LOCK).ok()?;
    let age = storage.stat(&lock).ok()?.modified.elapsed().unwrap_or_default();
    let (_, bytes) = storage.read_now(&lock, LONGEST).ok()??;
    let found = LeaseRecord::parse(&bytes);
    (!found.released && !found.has_died_here() && age < SHOWN).then(|| found.holder())
}

/// # Errors
/// If the lock of the state directory at `url` is not that of a run.
pub(super) fn check_run(storage: &Storage, url: &ObjectUrl, run: &str) -> Result<(), StoreError> {
    let found = storage.read_now(&url.join(LOCK)?, LONGEST)?;
    match found.map(|(_, bytes)| LeaseRecord::parse(&bytes)) {
        Some(record) if record.run == run && !record.released => Ok(()),
        Some(record) if !record.released => Err(held(&PathBuf::from(url.to_string()), record.holder())),
        _ => Err(StoreError::NotHeld {
            path: url.to_string().into(),
            run: run.to_owned(),
        }),
    }
}

/// Shows that the storage heeds conditions: it has to refuse the lock where there is one, to replace the version that stands,
/// and to refuse the one before. Storage that ignores them would let two runs in.
fn prove(
    storage: &Storage,
    lock: &ObjectUrl,
    url: &ObjectUrl,
    own: LeaseRecord,
    first: ObjectVersion,
) -> Result<(LeaseRecord, ObjectVersion), StoreError> {
    let next = |beat: u64| LeaseRecord { beat, ..own.clone() };
    let ignored = |what: &str| {
        // Nobody can have it: all are refused here.
        let _ = storage.delete(lock);
        StoreError::Conditions {
            url: url.to_string(),
            detail: format!("it writes an object in spite of {what}"),
        }
    };
    match storage.put_if(lock, &next(1).bytes()?, None) {
        Ok(_) => return Err(ignored("`If-None-Match`, where there is one")),
        Err(error) if is_taken(&error) => {}
        Err(error) => return Err(no_conditions(url, error)),
    }
    let second = match storage.put_if(lock, &next(2).bytes()?, Some(&first)) {
        Ok(version) => version,
        Err(error) => return Err(no_conditions(url, error)),
    };
    match storage.put_if(lock, &next(3).bytes()?, Some(&first)) {
        Ok(_) => return Err(ignored("`If-Match`, where it is another version")),
        Err(error) if is_taken(&error) => {}
        Err(error) => return Err(no_conditions(url, error)),
    }
    Ok((next(2), second))
}

fn held(state: &std::path::Path, holder: Holder) -> StoreError {
    StoreError::Held {
        what: "the state directory",
        path: state.to_path_buf(),
        holder,
    }
}

/// Whether an object was not as a condition said.
fn is_taken(error: &StorageError) -> bool {
    matches!(error.fault, StorageFault::AlreadyExists | StorageFault::Changed)
}

fn no_conditions(url: &ObjectUrl, error: StorageError) -> StoreError {
    match error.fault {
        StorageFault::Unsupported => StoreError::Conditions {
            url: url.to_string(),
            detail: error.to_string(),
        },
        _ => StoreError::Storage(error),
    }
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
