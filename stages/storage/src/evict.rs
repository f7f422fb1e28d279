//! Takes copies away, those first that were not used for longest, until they have no more bytes than they may.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::kept_folder::{KeptFolder, is_at};

/// A copy or a block.
struct Kept {
    used: SystemTime,
    bytes: u64,
    path: PathBuf,
    is_block: bool,
}

/// Removes until the copies in a folder have at most `limit` bytes, as far as no process uses them. What cannot be looked at or
/// removed stays: it costs room, and is no reason to fail.
pub(crate) fn to(folder: &KeptFolder, limit: u64) {
    let mut kept = Vec::new();
    for entry in entries(&folder.copies()) {
        let used = fs::metadata(entry.join("lock")).and_then(|metadata| metadata.modified());
        kept.push(Kept {
            used: used.unwrap_or(SystemTime::UNIX_EPOCH),
            bytes: bytes_below(&entry, 0),
            path: entry,
            is_block: false,
        });
    }
    for object in entries(&folder.blocks()) {
        for path in entries(&object) {
            let Ok(metadata) = fs::metadata(&path) else { continue };
            kept.push(Kept {
                used: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
                bytes: metadata.len(),
                path,
                is_block: true,
            });
        }
    }
    let mut all: u64 = kept.iter().map(|kept| kept.bytes).sum();
    if all <= limit {
        return;
    }
    kept.sort_by_key(|kept| kept.used);
    for one in kept {
        if all <= limit {
            return;
        }
        let removed = match one.is_block {
            true => fs::remove_file(&one.path).is_ok(),
            false => remove_copy(&one.path),
        };
        if removed {
            all -= one.bytes;
        }
        if let Some(object) = one.path.parent().filter(|_| one.is_block) {
            // Only where it is empty.
            let _ = fs::remove_dir(object);
        }
    }
}

/// Removes a copy that no process uses.
fn remove_copy(folder: &Path) -> bool {
    let path = folder.join("lock");
    let Ok(lock) = OpenOptions::new().read(true).write(true).open(&path) else {
        // Without a lock it was not created by `flow`, or is being removed.
        return false;
    };
    if lock.try_lock().is_err() || !is_at(&lock, &path) {
        return false;
    }
    // First what says that it is whole, last the lock.
    let _ = fs::remove_file(folder.join("files"));
    let content = fs::remove_dir_all(folder.join("content"));
    if content.is_err_and(|error| error.kind() != std::io::ErrorKind::NotFound) {
        return false;
    }
    fs::remove_dir_all(folder).is_ok()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let read = fs::read_dir(folder).into_iter().flatten().flatten();
    read.map(|entry| entry.path()).collect()
}

/// Folders in copies are this deep at most.
const DEEPEST: usize = 4;

fn bytes_below(folder: &Path, depth: usize) -> u64 {
    let mut bytes = 0;
    for path in entries(folder) {
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_dir() && depth < DEEPEST => bytes += bytes_below(&path, depth + 1),
            Ok(metadata) => bytes += metadata.len(),
            Err(_) => {}
        }
    }
    bytes
}
