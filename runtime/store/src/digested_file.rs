//! A file that is digested while it is read, so that it is read once.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::SystemTime;

use flow_storage::{FileVersion, Location, Storage};

use super::StoreError;
use flow_base::digest::Digest;
use flow_base::regular_file::open_regular_file;

/// Bytes per read of the parts that the caller does not need.
const PIECE: u64 = 1 << 20;

/// A file that is read from its beginning to its end, and digested on the way. To be handed to `Out::digested`.
///
/// An object in object storage is read once, in large ranges, into a file without a name in [`Storage::cache_folder`], which is gone
/// when it was digested.
pub struct DigestedFile {
    file: File,
    path: PathBuf,
    before: FileVersion,
    is_object: bool,
    opened: SystemTime,
    hasher: blake3::Hasher,
    at: u64,
}

impl DigestedFile {
    /// # Errors
    /// If the file is not there or cannot be opened, or is not a file (a folder, a pipe).
    pub fn open(storage: &Storage, path: &Path) -> io::Result<Self> {
        DigestedFile::open_while(storage, path, &|| true)
    }

    /// Begins to open a file, on a thread of its own, as long as `go_on` says so ([`DigestedFile::open_while`]).
    ///
    /// # Errors
    /// If there is no thread for it.
    pub fn open_ahead(
        storage: &Storage,
        path: &Path,
        go_on: impl Fn() -> bool + Send + 'static,
    ) -> io::Result<OpeningFile> {
        let is_wanted = Arc::new(AtomicBool::new(true));
        let (storage, own, file) = (storage.clone(), path.to_path_buf(), Arc::clone(&is_wanted));
        let open = move || DigestedFile::open_while(&storage, &own, &|| file.load(Ordering::Relaxed) && go_on());
        let opened = thread::Builder::new().name("open-ahead".into()).spawn(open)?;
        Ok(OpeningFile {
            opened: Some(opened),
            is_wanted,
        })
    }

    /// As [`DigestedFile::open`]. The copy of an object is given up once `go_on` says no, which is asked before each range of it.
    ///
    /// # Errors
    /// As of [`DigestedFile::open`]; of the kind [`io::ErrorKind::Interrupted`] if it is given up.
    pub fn open_while(storage: &Storage, path: &Path, go_on: &dyn Fn() -> bool) -> io::Result<Self> {
        let opened = SystemTime::now();
        let (file, before, is_object) = match Location::of_path(path)? {
            Location::Local(path) => {
                let file = open_regular_file(&path)?;
                let before = FileVersion::of_file(&file.metadata()?);
                (file, before, false)
            }
            Location::Object(url) => {
                let object = storage.open(&url)?;
                let file = object.download_while(&storage.cache_folder(), go_on)?;
                let file = file.ok_or_else(|| io::Error::from(io::ErrorKind::Interrupted))?;
                (file, FileVersion::of_object(object.stat()), true)
            }
        };
        Ok(DigestedFile {
            file,
            path: path.to_path_buf(),
            before,
            is_object,
            opened,
            hasher: blake3::Hasher::new(),
            at: 0,
        })
    }

    /// In bytes, when it was opened.
    pub fn length(&self) -> u64 {
        self.before.size
    }

    /// The file itself (of an object, its copy), for a look at parts of it.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The bytes at `offset`. Bytes before them that were not read yet are read (and digested) first.
    ///
    /// # Errors
    /// If they cannot be read, the file ends before them, or they are before what was read already.
    pub fn read(&mut self, offset: u64, size: usize) -> io::Result<Vec<u8>> {
        if offset < self.at {
            let message = format!("bytes at {offset} were asked for after those up to {}", self.at);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let mut between = Vec::new();
        while self.at < offset {
            between.resize((offset - self.at).min(PIECE) as usize, 0);
            self.read_next(&mut between)?;
        }
        let mut bytes = vec![0; size];
        self.read_next(&mut bytes)?;
        Ok(bytes)
    }

    fn read_next(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, self.at)?;
        self.hasher.update(bytes);
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Reads what is left. Gives the digest of all bytes, what was said of the file when it was opened, and when that was.
    ///
    /// # Errors
    /// If it cannot be read, or was changed since it was opened.
    pub(super) fn finish(mut self) -> Result<(PathBuf, FileVersion, SystemTime, Digest), StoreError> {
        let end = self.length();
        let rest = if self.at < end {
            self.read(end, 0).map(drop)
        } else {
            Ok(())
        };
        let after = rest
            .and_then(|()| self.file.metadata())
            .map_err(|error| StoreError::io("read", &self.path, error))?;
        // A copy is of one state of its object.
        if !self.is_object && FileVersion::of_file(&after) != self.before {
            let changing = io::Error::other("it changes while it is read; wait until it is written");
            return Err(StoreError::io("digest", &self.path, changing));
        }
        let digest = Digest::from_bytes(*self.hasher.finalize().as_bytes());
        Ok((self.path, self.before, self.opened, digest))
    }
}

/// A [`DigestedFile`] that is being opened. Dropped, the thread that copies an object ends with the next range of it, and its copy
/// with the thread.
pub struct OpeningFile {
    opened: Option<JoinHandle<io::Result<DigestedFile>>>,
    is_wanted: Arc<AtomicBool>,
}

impl OpeningFile {
    /// Waits until it is open.
    ///
    /// # Errors
    /// As of [`DigestedFile::open`].
    pub fn wait(mut self) -> io::Result<DigestedFile> {
        let ended = || io::Error::other("the thread that opens it has ended");
        let opened = self.opened.take().ok_or_else(ended)?;
        // Propagates a panic of the thread.
        opened.join().unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Ends it, and waits until there is no copy any more.
    pub fn give_up(mut self) {
        self.is_wanted.store(false, Ordering::Relaxed);
        if let Some(opened) = self.opened.take() {
            // Whatever came of it.
            let _ = opened.join();
        }
    }
}

impl Drop for OpeningFile {
    fn drop(&mut self) {
        self.is_wanted.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever parts are asked for, they are the right ones, and the digest is that of the whole.
        #[test]
        fn parts_are_read_and_the_whole_is_digested(length in 0usize..3_000_000, cuts in prop::collection::vec(0.0f64..1.0, 0..8)) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a");
            let bytes: Vec<u8> = (0..length).map(|at| (at * at / 7) as u8).collect();
            std::fs::write(&path, &bytes).unwrap();
            let mut file = DigestedFile::open(&Storage::default(), &path).unwrap();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| (cut * length as f64) as usize).collect();
            cuts.sort_unstable();
            for part in cuts.chunks_exact(2) {
                let read = file.read(part[0] as u64, part[1] - part[0]).unwrap();
                prop_assert!(read == bytes[part[0]..part[1]]);
            }
            let (_, state, _, digest) = file.finish().unwrap();
            prop_assert_eq!((state.size, digest), (length as u64, Digest::of(&bytes)));
        }
    }

    #[test]
    fn a_file_that_is_opened_ahead_is_as_it_was_when_that_began() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let missing = DigestedFile::open_ahead(&Storage::default(), &path, || true)
            .unwrap()
            .wait()
            .err();
        assert_eq!(missing.map(|error| error.kind()), Some(io::ErrorKind::NotFound));
        std::fs::write(&path, vec![1; 5_000]).unwrap();
        let began = SystemTime::now();
        let opening = DigestedFile::open_ahead(&Storage::default(), &path, || true).unwrap();
        let mut file = opening.wait().unwrap();
        file.read(0, 100).unwrap();
        let (_, _, opened, digest) = file.finish().unwrap();
        assert_eq!(digest, Digest::of(&[1; 5_000]));
        assert!(opened >= began && opened <= SystemTime::now());
        // Changed between its opening and its reading.
        let file = DigestedFile::open_ahead(&Storage::default(), &path, || true)
            .unwrap()
            .wait()
            .unwrap();
        std::fs::write(&path, vec![1; 6_000]).unwrap();
        assert!(file.finish().is_err());
        DigestedFile::open_ahead(&Storage::default(), &path, || true)
            .unwrap()
            .give_up();
    }

    #[test]
    fn a_file_that_changes_is_no_file_with_a_digest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, vec![1; 5_000]).unwrap();
        for changed in [vec![1; 4_000], vec![1; 6_000]] {
            let mut file = DigestedFile::open(&Storage::default(), &path).unwrap();
            file.read(1_000, 1_000).unwrap();
            assert_eq!(file.read(500, 1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
            std::fs::write(&path, &changed).unwrap();
            assert!(file.finish().is_err());
            std::fs::write(&path, vec![1; 5_000]).unwrap();
        }
        // As long as before, and changed at another time.
        let file = DigestedFile::open(&Storage::default(), &path).unwrap();
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(later)
            .unwrap();
        let error = file.finish().unwrap_err().to_string();
        assert!(error.contains("changes while it is read"), "{error}");
        assert!(DigestedFile::open(&Storage::default(), folder.path()).is_err());
        assert!(DigestedFile::open(&Storage::default(), &folder.path().join("none")).is_err());
    }
}
