//! Checks that a file system has enough free space before anything is written.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use flow_audio::error::AudioError;

/// Bytes left free beyond the written files: for the state directory, folders, and other programs.
const SPARE: u64 = 64 << 20;

/// Bytes that the workers of this process have asked for and not written yet.
static RESERVED: AtomicU64 = AtomicU64::new(0);
/// One lock for checking and reserving.
static LOOKING: Mutex<()> = Mutex::new(());

/// Reserved space. The unused rest is released when dropped.
#[derive(Debug)]
pub struct Room {
    left: AtomicU64,
}

/// Reserves `needed` bytes in the folder `at`, in addition to what other workers of this process have reserved. Zero
/// bytes always succeed. Quotas are not detected here, but when writing.
pub fn reserve(at: &Path, needed: u64) -> Result<Room, AudioError> {
    let _one_at_a_time = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    let room = Room {
        left: AtomicU64::new(needed),
    };
    if needed > 0 {
        let failed = |errno: rustix::io::Errno| AudioError::write(at, errno.into());
        let about = rustix::fs::statvfs(at).map_err(failed)?;
        let free = about.f_bavail.saturating_mul(about.f_frsize);
        let margin = SPARE.saturating_add(RESERVED.load(Ordering::Relaxed));
        let needed = needed.saturating_add(margin);
        if needed > free {
            // Nothing was reserved, so nothing is released.
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
    /// Releases bytes that were written, or turned out not to be needed.
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
