//! A private folder for uploads, which does not outlive the program.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tempfile::NamedTempFile;

/// A folder of this process alone, deleted when it is dropped; one that a process left behind when it was killed is deleted by
/// the next [`TempFolder::new`]. Cheap to clone.
#[derive(Clone)]
pub struct TempFolder {
    inner: Arc<()>,
}

/// Bytes of a [`TempFolder`] that are spoken for; given back when this is dropped.
pub struct Reservation {
    bytes: u64,
}

impl TempFolder {
    /// Makes a folder below `parent`, which only this user can enter, and deletes those that dead processes left there. Files
    /// in it may have `max_bytes` together.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn new(parent: &Path, max_bytes: u64) -> io::Result<Self> {
        let _ = (parent, max_bytes);
        todo!()
    }

    /// A new file, to be filled as far as its [`Reservation`] goes.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn file(&self) -> io::Result<NamedTempFile> {
        let _ = &self.inner;
        todo!()
    }

    /// Reserves so many bytes, to be held as long as the file is there. None: there is no room now.
    pub fn reserve(&self, bytes: u64) -> Option<Reservation> {
        let _ = bytes;
        todo!()
    }
}

impl Reservation {
    /// Reserves so many bytes more. False: there is no room for them, and nothing has changed.
    #[must_use]
    pub fn grow(&mut self, bytes: u64) -> bool {
        let _ = bytes;
        todo!()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}
