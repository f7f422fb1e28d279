//! Source files that were deleted on purpose after their content was copied elsewhere. A note beside such a file keeps
//! its digest, so that it counts as unchanged until another file takes its place.

use std::io;
use std::path::{Path, PathBuf};

use flow_storage::{FileVersion, is_url};
use serde::{Deserialize, Serialize};

use super::StoreError;
use super::atomic::{self, Files};
use super::file_digest::read_digest;
use super::versioned_json;
use flow_base::digest::Digest;

/// Version of the note.
const REMOVED_VERSION: u64 = 1;
/// Suffix of the note's name, after the name of the file.
pub const TOMBSTONE_SUFFIX: &str = ".flow-removed";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    version: u64,
    digest: Digest,
    bytes: u64,
}

impl versioned_json::Versioned for Note {
    fn version(&self) -> u64 {
        self.version
    }
}

fn note_of(path: &Path) -> Option<PathBuf> {
    let mut name = path.file_name()?.to_os_string();
    name.push(TOMBSTONE_SUFFIX);
    Some(path.with_file_name(name))
}

/// Whether the file was deleted by [`remove_source`] and nothing has taken its place.
pub fn has_tombstone(path: &Path) -> bool {
    !is_url(path) && !path.exists() && note_of(path).is_some_and(|note| note.is_file())
}

/// The digest that a deleted file had; none if it was not deleted by [`remove_source`].
pub(super) fn digest(path: &Path) -> Result<Option<Digest>, StoreError> {
    // Objects are not deleted by this program.
    if is_url(path) {
        return Ok(None);
    }
    let Some(note) = note_of(path) else { return Ok(None) };
    match atomic::read(&note)? {
        Some(bytes) => Ok(Some(
            versioned_json::from_json::<Note>(&note, &bytes, REMOVED_VERSION)?.digest,
        )),
        None => Ok(None),
    }
}

/// Deletes a source file. Its digest is noted beside it first, so that results made from it remain valid. Returns its
/// size.
///
/// # Errors
/// If the file cannot be read or removed, changes meanwhile, or the note cannot be written: then it stays.
pub fn remove_source(path: &Path) -> Result<u64, StoreError> {
    remove_with(&Files::default(), path)
}

pub(super) fn remove_with(files: &Files, path: &Path) -> Result<u64, StoreError> {
    remove_read(files, path, read_digest)
}

/// `read` gives the digest of the file.
fn remove_read(files: &Files, path: &Path, read: impl FnOnce(&Path) -> io::Result<Digest>) -> Result<u64, StoreError> {
    let look = || std::fs::metadata(path).map_err(|e| StoreError::io("look at", path, e));
    let before = look()?;
    let note = note_of(path).filter(|_| before.is_file());
    let note = note.ok_or_else(|| StoreError::io("remove", path, io::Error::other("it is not a file")))?;
    let digest = read(path).map_err(|e| StoreError::io("read", path, e))?;
    let after = look()?;
    if FileVersion::of_file(&after) != FileVersion::of_file(&before) {
        let changing = io::Error::other("it changes while it is read");
        return Err(StoreError::io("remove", path, changing));
    }
    let stored = Note {
        version: REMOVED_VERSION,
        digest,
        bytes: before.len(),
    };
    files.replace(&note, &versioned_json::to_sealed_json(&note, &stored)?)?;
    files.remove(path)?;
    Ok(before.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SourceDigests;

    #[test]
    fn a_removed_file_counts_as_unchanged_until_another_takes_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tar");
        std::fs::write(&path, b"first").unwrap();
        assert!(!has_tombstone(&path));
        assert_eq!(remove_source(&path).unwrap(), 5);
        assert!(has_tombstone(&path) && !path.exists());
        let digests = SourceDigests::default();
        assert_eq!(digests.known(&path).unwrap(), Some(Digest::of(b"first")));
        assert_eq!(digests.digest(&path).unwrap(), Digest::of(b"first"));
        // Another file in its place counts by itself, whatever the note says.
        std::fs::write(&path, b"second").unwrap();
        assert!(!has_tombstone(&path));
        assert_eq!(digests.digest(&path).unwrap(), Digest::of(b"second"));
        // A file that was never there, and a folder.
        assert!(remove_source(&folder.path().join("none")).is_err());
        assert!(remove_source(folder.path()).is_err());
    }

    #[test]
    fn a_file_that_another_of_its_size_and_time_replaces_while_it_is_read_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("a.tar"), folder.path().join("other"));
        std::fs::write(&path, b"first").unwrap();
        std::fs::write(&other, b"other").unwrap();
        let time = path.metadata().unwrap().modified().unwrap();
        let file = std::fs::File::options().write(true).open(&other).unwrap();
        file.set_modified(time).unwrap();
        let replaced = remove_read(&Files::default(), &path, |path| {
            let digest = read_digest(path);
            std::fs::rename(&other, path)?;
            digest
        });
        assert!(replaced.unwrap_err().to_string().contains("changes while it is read"));
        assert_eq!(std::fs::read(&path).unwrap(), b"other");
        assert!(!folder.path().join("a.tar.flow-removed").exists());
    }

    #[test]
    fn a_damaged_note_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tar");
        std::fs::write(folder.path().join("a.tar.flow-removed"), b"{\"vers").unwrap();
        let error = SourceDigests::default().digest(&path).unwrap_err().to_string();
        assert!(error.contains("a.tar.flow-removed"), "{error}");
    }
}
