//! Where the files of a state directory are: in a folder, or in object storage with a copy of them in a folder of this machine.
//! The store works with the folder; what is read from it, and what gets a name in it, goes through the backend.
//!
//! A commit is the same in both: data is put, then a record that names it is put where there is none. What a crash leaves of it
//! is found by listing.

use std::io;
use std::path::{Path, PathBuf};

use flow_storage::ObjectUrl;

use super::StoreError;
use super::atomic::{self, Files};
use super::layout::data_folder;
use super::recovery::Listing;

/// Reads and changes the files of a state directory. Paths are those in the folder; `files` changes the folder itself.
pub(super) trait Backend: Send + Sync {
    /// The prefix of the objects, if they are in object storage.
    fn url(&self) -> Option<&ObjectUrl>;

    /// Called before each change.
    ///
    /// # Errors
    /// If this process may write no more, as it has lost its lease.
    fn check(&self) -> Result<(), StoreError>;

    /// The data files of a recipe, with their sizes.
    fn list(&self, recipe_folder: &Path) -> Result<Listing, StoreError>;

    /// The size of a data file; none where there is none.
    fn size_of(&self, path: &Path) -> Option<u64>;

    /// Sees to it that the folder has the data file of `bytes` bytes.
    fn read(&self, path: &Path, bytes: u64) -> Result<(), StoreError>;

    /// Puts data files, from their temporary names as those that they will have. They have them once they are renamed in the
    /// folder.
    fn put_data(&self, moves: &[(PathBuf, PathBuf)]) -> Result<(), StoreError>;

    /// Another process of the run has put a data file.
    fn note_data(&self, path: &Path, bytes: u64);

    /// Puts the temporary file `from` as `to` where there is none; says false where there is one.
    fn put_new(&self, files: &Files, from: &Path, to: &Path) -> Result<bool, StoreError>;

    /// Puts the temporary file `from` in place of `to`.
    fn replace(&self, files: &Files, from: &Path, to: &Path) -> Result<(), StoreError>;

    /// Deletes files, if they are there.
    fn delete(&self, files: &Files, paths: &[PathBuf]) -> Result<(), StoreError>;

    /// Deletes what is not in the folder itself of a folder in it, which is deleted next.
    fn delete_folder(&self, folder: &Path) -> Result<(), StoreError>;

    /// Puts those files right in a folder that were changed without the backend.
    fn put_changed(&self, folder: &Path) -> Result<(), StoreError>;

    /// Keeps what is known for the next process.
    fn save(&self) -> Result<(), StoreError>;
}

/// A state directory that is a folder.
pub(super) struct Folder;

impl Backend for Folder {
    fn url(&self) -> Option<&ObjectUrl> {
        None
    }

    fn check(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn list(&self, recipe_folder: &Path) -> Result<Listing, StoreError> {
        atomic::list(&data_folder(recipe_folder))
    }

    fn size_of(&self, path: &Path) -> Option<u64> {
        path.metadata().ok().map(|file| file.len())
    }

    fn read(&self, _path: &Path, _bytes: u64) -> Result<(), StoreError> {
        Ok(())
    }

    fn put_data(&self, _moves: &[(PathBuf, PathBuf)]) -> Result<(), StoreError> {
        Ok(())
    }

    fn note_data(&self, _path: &Path, _bytes: u64) {}

    fn put_new(&self, files: &Files, from: &Path, to: &Path) -> Result<bool, StoreError> {
        files.will_link(from, to);
        match std::fs::hard_link(from, to) {
            Ok(()) => {}
            // On a network file system the reply to the first attempt may be lost, and the retry then finds the link
            // that the first made.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && is_one_file(from, to) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
            // File systems without hard links. The lock excludes other writers, so checking first is enough.
            Err(e) if matches!(e.kind(), io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied) => {
                if to.exists() {
                    return Ok(false);
                }
                files.rename(from, to)?;
                return Ok(true);
            }
            Err(e) => return Err(StoreError::io("create", to, e)),
        }
        files.remove(from)?;
        Ok(true)
    }

    fn replace(&self, files: &Files, from: &Path, to: &Path) -> Result<(), StoreError> {
        files.rename(from, to)
    }

    fn delete(&self, files: &Files, paths: &[PathBuf]) -> Result<(), StoreError> {
        for path in paths {
            files.step(path)?;
            files.remove_here(path)?;
        }
        Ok(())
    }

    fn delete_folder(&self, _folder: &Path) -> Result<(), StoreError> {
        Ok(())
    }

    fn put_changed(&self, _folder: &Path) -> Result<(), StoreError> {
        Ok(())
    }

    fn save(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

/// Whether two paths name the same file (device and inode).
fn is_one_file(a: &Path, b: &Path) -> bool {
    match (a.symlink_metadata(), b.symlink_metadata()) {
        (Ok(a), Ok(b)) => flow_storage::is_one_file(&a, &b),
        _ => false,
    }
}
