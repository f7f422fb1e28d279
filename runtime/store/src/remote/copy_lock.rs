//! The lock of a copy of a state directory, while it is brought up to date.
//!
//! The kernel's lock ends with the process that holds it, but not while that is stopped. So its owner writes a counter into the
//! file, and who waits gives up once that stands still.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use serde::{Deserialize, Serialize};

use crate::StoreError;
use crate::error::Holder;
use crate::lease::Patience;
use flow_base::host::host_name;

const COPY_LOCK: &str = "copy.lock";

/// How often the lock is tried.
const TRY: Duration = Duration::from_millis(20);

/// Digits of the counter, so that each record covers the one before.
const DIGITS: usize = 20;

#[derive(Default, Serialize, Deserialize)]
struct CopyRecord {
    host: String,
    pid: u32,
    beat: String,
}

/// Held while a copy is brought up to date; waits for other processes that do so, as long as they go on.
pub(crate) struct CopyLock {
    _file: File,
    beating: Option<(Sender<()>, JoinHandle<()>)>,
}

impl CopyLock {
    /// # Errors
    /// [`StoreError::Held`] if another process holds it and has not gone on for `patience.stale`. If the file system of the copy has
    /// no locks.
    pub fn take(dir: &Path, patience: Patience) -> Result<CopyLock, StoreError> {
        let path = dir.join(COPY_LOCK);
        let failed = |e| StoreError::io("lock", &path, e);
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).read(true).write(true).open(&path);
        let file = file.map_err(failed)?;
        let mut seen: Option<(Vec<u8>, Instant)> = None;
        loop {
            match file.try_lock() {
                Ok(()) => return CopyLock::begin(file, patience.beat).map_err(failed),
                Err(TryLockError::Error(error)) => return Err(failed(error)),
                Err(TryLockError::WouldBlock) => {}
            }
            let now = std::fs::read(&path).unwrap_or_default();
            match &seen {
                Some((before, since)) if *before == now => {
                    if since.elapsed() >= patience.stale {
                        let record: CopyRecord = serde_json::from_slice(&now).unwrap_or_default();
                        return Err(StoreError::Held {
                            what: "the copy of the state directory",
                            path: dir.to_path_buf(),
                            holder: Holder::new(&record.host, record.pid, "which does not go on"),
                        });
                    }
                }
                _ => seen = Some((now, Instant::now())),
            }
            thread::sleep(TRY);
        }
    }

    fn begin(file: File, beat: Duration) -> io::Result<CopyLock> {
        let writing = file.try_clone()?;
        let write = move |beats: u64| {
            let record = CopyRecord {
                host: host_name(),
                pid: std::process::id(),
                beat: format!("{beats:0DIGITS$}"),
            };
            let text = serde_json::to_vec(&record).map_err(io::Error::other)?;
            writing.write_all_at(&text, 0)?;
            writing.set_len(text.len() as u64)
        };
        write(0)?;
        let (end, ended) = bounded::<()>(0);
        let beats = move || {
            let mut beats = 0;
            while ended.recv_timeout(beat) == Err(RecvTimeoutError::Timeout) {
                beats += 1;
                // Where it cannot be written others give up, which is better than that they wait.
                let _ = write(beats);
            }
        };
        let beating = thread::Builder::new().name("copy-lock".into()).spawn(beats)?;
        Ok(CopyLock {
            _file: file,
            beating: Some((end, beating)),
        })
    }
}

impl Drop for CopyLock {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.beating.take() {
            drop(end);
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience = Patience {
        beat: Duration::from_millis(20),
        stale: Duration::from_millis(400),
        ..crate::lease::PATIENCE
    };

    #[test]
    fn who_goes_on_is_waited_for_and_who_does_not_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let held = CopyLock::take(dir.path(), PATIENCE).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| CopyLock::take(dir.path(), PATIENCE).map(drop));
            thread::sleep(3 * PATIENCE.stale);
            assert!(!waiting.is_finished());
            drop(held);
            waiting.join().unwrap().unwrap();
        });
        // As of a process that is stopped.
        let mut stopped = CopyLock::take(dir.path(), PATIENCE).unwrap();
        let (end, thread) = stopped.beating.take().unwrap();
        drop(end);
        thread.join().unwrap();
        let error = CopyLock::take(dir.path(), PATIENCE).map(drop).unwrap_err().to_string();
        assert!(
            error.contains(&format!("(process {} on ", std::process::id())),
            "{error}"
        );
        drop(stopped);
        CopyLock::take(dir.path(), PATIENCE).map(drop).unwrap();
    }
}
