//! Comparison of the files of a checkpoint with their digests.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use flow_storage::FileVersion;
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
        // Before the version and the bytes: a change while they are read could leave the same times.
        let now = SystemTime::now();
        let version = FileVersion::of_file(&fs::metadata(&path).map_err(unreadable)?);
        if verified().get(&path) == Some(&(version, expected.clone())) {
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
        if version.is_settled(now) {
            verified().insert(path, (version, found));
        }
        Ok(())
    })
}

/// The files that this process has verified: a run looks for its checkpoint several times before the first step, and
/// should read the gigabytes only once.
fn verified() -> MutexGuard<'static, HashMap<PathBuf, (FileVersion, FileDigest)>> {
    static VERIFIED: LazyLock<Mutex<HashMap<PathBuf, (FileVersion, FileDigest)>>> = LazyLock::new(Mutex::default);
    // An insertion cannot be interrupted half way.
    VERIFIED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Size and BLAKE3 of a file.
pub(crate) fn digest_file(path: &Path) -> std::io::Result<FileDigest> {
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
