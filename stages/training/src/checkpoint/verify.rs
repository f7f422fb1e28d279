//! Comparison of the files of a checkpoint with their digests.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use rayon::prelude::*;

use super::damage::{damaged, unreadable};
use super::record::{CheckpointRecord, FileDigest, RECORD};
use crate::error::TrainingError;

/// Compares every file of a checkpoint with its digest.
///
/// # Errors
/// Where a file is missing, cannot be read, or differs.
pub fn verify(checkpoint: &Path, record: &CheckpointRecord) -> Result<(), TrainingError> {
    verify_files(checkpoint, &record.files)
}

/// Compares files of a folder with their digests.
pub(super) fn verify_files(checkpoint: &Path, files: &BTreeMap<String, FileDigest>) -> Result<(), TrainingError> {
    files.par_iter().try_for_each(|(name, expected)| {
        if name.contains('/') || name.starts_with('.') {
            return Err(damaged(checkpoint, format!("{RECORD} names a file {name:?}")));
        }
        let path = checkpoint.join(name);
        let unreadable = |e: std::io::Error| unreadable(checkpoint, name, e);
        let stamp = FileStamp::of(&path).map_err(unreadable)?;
        if verified().get(&path) == Some(&(stamp, expected.clone())) {
            return Ok(());
        }
        let found = digest_file(&path).map_err(unreadable)?;
        if found.bytes != expected.bytes {
            return Err(damaged(
                checkpoint,
                format!("{name} has {} bytes instead of {}", found.bytes, expected.bytes),
            ));
        }
        if found != *expected {
            return Err(damaged(
                checkpoint,
                format!("{name} has other content than when it was written"),
            ));
        }
        if stamp.has_settled() {
            verified().insert(path, (stamp, found));
        }
        Ok(())
    })
}

/// The files that this process has verified: a run looks for its checkpoint several times before the first step, and
/// should read the gigabytes only once.
fn verified() -> MutexGuard<'static, HashMap<PathBuf, (FileStamp, FileDigest)>> {
    static VERIFIED: LazyLock<Mutex<HashMap<PathBuf, (FileStamp, FileDigest)>>> = LazyLock::new(Mutex::default);
    // An insertion cannot be interrupted half way.
    VERIFIED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The metadata that changes when a file is written to.
#[derive(Clone, Copy, Debug, PartialEq)]
struct FileStamp {
    inode: u64,
    bytes: u64,
    /// Seconds and nanoseconds of the last change of content, then of anything.
    changed: [i64; 4],
}

impl FileStamp {
    fn of(path: &Path) -> std::io::Result<Self> {
        let data = fs::metadata(path)?;
        Ok(Self {
            inode: data.ino(),
            bytes: data.len(),
            changed: [data.mtime(), data.mtime_nsec(), data.ctime(), data.ctime_nsec()],
        })
    }

    /// Whether the last change is so long ago that another one would have another time: file systems record times in
    /// steps of up to two seconds.
    fn has_settled(&self) -> bool {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |now| now.as_secs());
        i64::try_from(now).is_ok_and(|now| self.changed[2] < now - 3)
    }
}

/// Size and BLAKE3 of a file.
pub(super) fn digest_file(path: &Path) -> std::io::Result<FileDigest> {
    let mut file = File::open(path)?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0u8; 1 << 20];
    let mut bytes = 0;
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok(FileDigest {
                bytes,
                blake3: hasher.finalize().to_hex().to_string(),
            });
        }
        bytes += n as u64;
        hasher.update(&buffer[..n]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_trusted_once_its_last_change_is_long_ago_and_shows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "one").unwrap();
        let stamp = FileStamp::of(&path).unwrap();
        assert!(!stamp.has_settled());
        let mut earlier = stamp;
        earlier.changed[2] -= 10;
        assert!(earlier.has_settled());
        fs::write(&path, "four").unwrap();
        assert_ne!(FileStamp::of(&path).unwrap(), stamp);
    }
}
