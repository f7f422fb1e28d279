//! A file of an export, digested while it is written.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::StoreError;
use super::file_digest::read_digest;
use flow_base::digest::Digest;

/// Bytes after which the disk is asked to take what was written, so that the flush at the end waits for little.
const STARTED_AT_ONCE: u64 = 8 << 20;

/// Digests and lengths of the files of a set that were written, by name.
pub(super) type Noted = Arc<Mutex<BTreeMap<String, (Digest, u64)>>>;

/// Writes one file of a set from its beginning to its end, and digests it on the way, so that it is not read again for its
/// digest. See [`ExportSet::create`](crate::ExportSet::create).
pub struct ExportFile {
    file: File,
    path: PathBuf,
    name: String,
    digest: blake3::Hasher,
    bytes: u64,
    /// Up to where the disk was asked to take it.
    started: u64,
    noted: Noted,
}

impl ExportFile {
    pub(super) fn create(path: PathBuf, name: String, noted: Noted) -> io::Result<ExportFile> {
        Ok(ExportFile {
            file: File::create(&path)?,
            path,
            name,
            digest: blake3::Hasher::new(),
            bytes: 0,
            started: 0,
            noted,
        })
    }

    /// Where it lies until the set is finished.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file is whole: its digest is that of all bytes that were written here. Dropped instead, it is read for its digest.
    pub fn close(self) {
        let digest = Digest::from_bytes(*self.digest.finalize().as_bytes());
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        noted.insert(self.name, (digest, self.bytes));
    }
}

impl Write for ExportFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.digest.update(&bytes[..written]);
        self.bytes += written as u64;
        if self.bytes - self.started >= STARTED_AT_ONCE {
            start_write_back(&self.file, self.started, self.bytes - self.started);
            self.started = self.bytes;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Digest of a file of a set and its length in bytes: as it was noted when it was written, or else of what is read.
pub(super) fn digest_of(noted: &Noted, name: &str, path: &Path) -> Result<(Digest, u64), StoreError> {
    let found = std::fs::metadata(path).map_err(|e| StoreError::io("look at", path, e))?;
    let noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((digest, bytes)) = noted.get(name)
        && *bytes == found.len()
    {
        return Ok((*digest, *bytes));
    }
    drop(noted);
    let digest = read_digest(path).map_err(|e| StoreError::io("read", path, e))?;
    Ok((digest, found.len()))
}

/// Tells the kernel to write this part of a file to the disk, without waiting for it. It promises nothing: an fsync follows.
fn start_write_back(file: &File, start: u64, bytes: u64) {
    let (Ok(start), Ok(bytes)) = (i64::try_from(start), i64::try_from(bytes)) else {
        return;
    };
    // SAFETY: takes a descriptor, which `file` keeps open during the call, and numbers; it writes to no memory of ours.
    // Where it fails (a file system that does not know it) the flush at the end does all.
    unsafe { libc::sync_file_range(file.as_raw_fd(), start, bytes, libc::SYNC_FILE_RANGE_WRITE) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_is_the_digest_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let noted = Noted::default();
        // Past several starts of the write-back, and not at their borders.
        let bytes: Vec<u8> = (0..2 * STARTED_AT_ONCE as usize + 12_345)
            .map(|at| (at * at / 7) as u8)
            .collect();
        let path = folder.path().join("a");
        let mut file = ExportFile::create(path.clone(), "a".into(), Arc::clone(&noted)).unwrap();
        for part in bytes.chunks(777_777) {
            file.write_all(part).unwrap();
        }
        assert!(noted.lock().unwrap().is_empty());
        file.close();
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        let written = (Digest::of(&bytes), bytes.len() as u64);
        assert_eq!(noted.lock().unwrap()["a"], written);
        // One that somebody wrote to afterwards is read.
        std::fs::write(&path, b"other").unwrap();
        assert_eq!(digest_of(&noted, "a", &path).unwrap(), (Digest::of(b"other"), 5));
    }
}
