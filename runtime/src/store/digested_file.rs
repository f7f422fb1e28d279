//! A file that is digested while it is read, so that it is read once.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use flow_storage::{Location, Storage};

use super::StoreError;
use super::file_state::FileState;
use crate::digest::Digest;
use crate::open_regular_file;

/// Bytes per read of the parts that the caller does not need.
const PIECE: u64 = 1 << 20;

/// A file that is read from its beginning to its end, and digested on the way. To be handed to [`crate::Out::digested`].
///
/// An object in object storage is read once, in large ranges, into a file without a name in [`Storage::cache_folder`], which is gone
/// when it was digested.
pub struct DigestedFile {
    file: File,
    path: PathBuf,
    before: FileState,
    is_object: bool,
    opened: SystemTime,
    hasher: blake3::Hasher,
    at: u64,
}

impl DigestedFile {
    /// # Errors
    /// If the file is not there or cannot be opened, or is no file (a folder, a pipe).
    pub fn open(path: &Path) -> io::Result<Self> {
        let opened = SystemTime::now();
        let (file, before, is_object) = match Location::of_path(path)? {
            Location::Local(path) => {
                let file = open_regular_file(&path)?;
                let before = FileState::of_file(&file.metadata()?);
                (file, before, false)
            }
            Location::Object(url) => {
                let object = Storage::global().open(&url)?;
                let file = object.download(&Storage::global().cache_folder())?;
                (file, FileState::of_object(object.stat()), true)
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
    /// If they cannot be read, the file ends before them, or they lie before what was read already.
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
    pub(super) fn finish(mut self) -> Result<(PathBuf, FileState, SystemTime, Digest), StoreError> {
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
        if !self.is_object && FileState::of_file(&after) != self.before {
            let changing = io::Error::other("it changes while it is read; wait until it is written");
            return Err(StoreError::io("digest", &self.path, changing));
        }
        let digest = Digest::from_bytes(*self.hasher.finalize().as_bytes());
        Ok((self.path, self.before, self.opened, digest))
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
            let mut file = DigestedFile::open(&path).unwrap();
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
    fn a_file_that_changes_is_no_file_with_a_digest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, vec![1; 5_000]).unwrap();
        for changed in [vec![1; 4_000], vec![1; 6_000]] {
            let mut file = DigestedFile::open(&path).unwrap();
            file.read(1_000, 1_000).unwrap();
            assert_eq!(file.read(500, 1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
            std::fs::write(&path, &changed).unwrap();
            assert!(file.finish().is_err());
            std::fs::write(&path, vec![1; 5_000]).unwrap();
        }
        // As long as before, and changed at another time.
        let file = DigestedFile::open(&path).unwrap();
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(later)
            .unwrap();
        let error = file.finish().unwrap_err().to_string();
        assert!(error.contains("changes while it is read"), "{error}");
        assert!(DigestedFile::open(folder.path()).is_err());
        assert!(DigestedFile::open(&folder.path().join("none")).is_err());
    }
}
