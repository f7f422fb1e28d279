//! Whether a file system has room for what is to be written, asked before anything is.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::AudioError;

/// Left free on top of what is written: for the state directory, folders, and whoever else writes.
const SPARE: u64 = 64 << 20;

/// Bytes that the workers of this process have asked for and not written yet.
static RESERVED: AtomicU64 = AtomicU64::new(0);
/// Looking and reserving are one step.
static LOOKING: Mutex<()> = Mutex::new(());

/// Room that was found. What is left of it when dropped is given back.
#[derive(Debug)]
pub struct Room {
    left: AtomicU64,
}

/// Finds room for `needed` bytes in the folder `at`, besides what others of this process still have to write.
/// Nothing needed is always there. A quota does not show here: it is met in writing.
pub fn reserve(at: &Path, needed: u64) -> Result<Room, AudioError> {
    let _one_at_a_time = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    let room = Room {
        left: AtomicU64::new(needed),
    };
    if needed > 0 {
        let failed = |errno: rustix::io::Errno| AudioError::Write {
            path: at.to_owned(),
            source: errno.into(),
        };
        let about = rustix::fs::statvfs(at).map_err(failed)?;
        let free = about.f_bavail.saturating_mul(about.f_frsize);
        let margin = SPARE.saturating_add(RESERVED.load(Ordering::Relaxed));
        let needed = needed.saturating_add(margin);
        if needed > free {
            // Nothing was reserved yet, so nothing is to be given back.
            room.left.store(0, Ordering::Relaxed);
            return Err(AudioError::NoSpace {
                path: at.to_owned(),
                needed,
                margin,
                free,
            });
        }
    }
    RESERVED.fetch_add(room.left.load(Ordering::Relaxed), Ordering::Relaxed);
    Ok(room)
}

impl Room {
    /// So many bytes were written, or turned out not to be needed.
    pub fn used(&self, bytes: u64) {
        let take = |left: u64| Some(left - left.min(bytes));
        // The closure always gives a number.
        let before = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .unwrap_or_default();
        RESERVED.fetch_sub(before.min(bytes), Ordering::Relaxed);
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        RESERVED.fetch_sub(*self.left.get_mut(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_worker_has_still_to_write_is_not_there_for_another() {
        let temp = tempfile::tempdir().unwrap();
        let free = |needed| match reserve(temp.path(), needed) {
            Err(AudioError::NoSpace { free, .. }) => free,
            other => panic!("{other:?}"),
        };
        let all = free(u64::MAX - (1 << 40));
        let first = reserve(temp.path(), all / 2).unwrap();
        free(all / 2 + all / 4);
        first.used(all / 2);
        reserve(temp.path(), all / 2).unwrap();
        drop(first);
        reserve(temp.path(), all / 2).unwrap();
        reserve(&temp.path().join("none"), 0).unwrap();
    }
}
