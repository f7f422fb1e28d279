//! Files and folders of a corpus, on this machine or, where a path holds a URL, in object storage. Layouts are written once for both.
//!
//! A folder of object storage is listed once, with all that is below it, when it is opened: [`list_all`]. Questions about what is
//! below it are answered from that listing.

use std::cell::RefCell;
use std::ffi::OsString;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use flow_audio::tar::{self, Listing};
use flow_kind::open_input_file;
use flow_storage::{InputFile, Location, Storage, is_url};
pub use flow_storage::{folder_above, join};

use crate::ManifestError;

/// Bytes of a tar in object storage that are looked through to find out a layout.
const HEAD_OF_A_TAR: u64 = 32 << 20;

thread_local! {
    /// The first question that storage did not answer.
    static UNANSWERED: RefCell<Option<ManifestError>> = const { RefCell::new(None) };
}

/// Runs `work`, whose questions about files are answered by "no" if storage does not say. Calls may be nested; each reports its own.
///
/// # Errors
/// The first question that storage did not answer: what is there must not be taken for missing.
pub fn answered<T>(work: impl FnOnce() -> T) -> Result<T, ManifestError> {
    let of_outer = UNANSWERED.take();
    let done = work();
    UNANSWERED.replace(of_outer).map_or(Ok(done), Err)
}

/// The answer, or that of something which is not there. A question about an object that was not answered is noted.
pub fn or_note<T: Default>(path: &Path, answer: io::Result<T>) -> T {
    answer.unwrap_or_else(|error| {
        if is_url(path) && error.kind() != io::ErrorKind::NotFound {
            UNANSWERED.with_borrow_mut(|first| {
                first.get_or_insert_with(|| ManifestError::io(path, error));
            });
        }
        T::default()
    })
}

/// Whether a file is there. See [`answered`].
pub fn is_file(storage: &Storage, path: &Path) -> bool {
    unless_denied(path, flow_storage::is_file(storage, path))
}

/// Whether a folder is there, or objects are below a prefix. See [`answered`].
pub fn is_folder(storage: &Storage, path: &Path) -> bool {
    unless_denied(path, flow_storage::is_folder(storage, path))
}

/// What is denied counts as missing: it is outside of what was listed, and S3 denies those who may not list all of a bucket what is
/// not there.
fn unless_denied(path: &Path, answer: io::Result<bool>) -> bool {
    match answer {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => false,
        answer => or_note(path, answer),
    }
}

/// A file whose beginning is looked at to find out a layout; none where there is no regular file that can be read. See [`answered`].
pub fn open_head(storage: &Storage, path: &Path) -> Option<InputFile> {
    or_note(path, open_input_file(storage, path).map(Some))
}

/// Whether a URL names a prefix with objects below it. All of them are listed, once for a run: [`is_file`], [`is_folder`] and
/// [`entries`] ask no more of what is below it.
///
/// # Errors
/// When they cannot be listed.
pub fn list_all(storage: &Storage, url: &Path) -> io::Result<bool> {
    match Location::of_path(url)? {
        Location::Local(path) => Ok(path.is_dir()),
        Location::Object(url) => Ok(!storage.list_and_remember(&url)?.is_empty()),
    }
}

/// What is in a folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TreeEntry {
    pub name: OsString,
    /// A folder, or a link to one.
    pub is_folder: bool,
    pub is_link: bool,
}

/// What is right in a folder, in no order.
///
/// # Errors
/// When it cannot be read.
pub fn entries(storage: &Storage, folder: &Path) -> io::Result<Vec<TreeEntry>> {
    let mut found = Vec::new();
    match Location::of_path(folder)? {
        Location::Local(folder) => {
            for entry in std::fs::read_dir(folder)? {
                let entry = entry?;
                let kind = entry.file_type()?;
                let is_link = kind.is_symlink();
                found.push(TreeEntry {
                    // A folder may hold a million files: only links are looked up.
                    is_folder: kind.is_dir() || is_link && entry.path().is_dir(),
                    name: entry.file_name(),
                    is_link,
                });
            }
        }
        Location::Object(url) => {
            let names = storage.names_in(&url)?;
            if names.is_empty() {
                return Err(io::ErrorKind::NotFound.into());
            }
            found.extend(names.into_iter().map(|(name, is_folder)| TreeEntry {
                name: name.into(),
                is_folder,
                is_link: false,
            }));
        }
    }
    Ok(found)
}

/// The path without links and `..`, by which a folder is known again. A URL is one already.
///
/// # Errors
/// When it is not there.
pub fn canonical(path: &Path) -> io::Result<PathBuf> {
    match is_url(path) {
        true => Ok(path.to_path_buf()),
        false => std::fs::canonicalize(path),
    }
}

/// The path from the root on. A URL is one already.
pub fn absolute(path: &Path) -> PathBuf {
    match is_url(path) {
        true => path.to_path_buf(),
        false => std::path::absolute(path).unwrap_or_default(),
    }
}

/// The members of a tar. One in object storage is read in blocks, if these are kept on this machine, or else copied once.
///
/// # Errors
/// When it cannot be read.
pub fn list_tar(storage: &Storage, path: &Path) -> io::Result<Listing> {
    list_open_tar(&mut open_input_file(storage, path)?.for_jumps()?)
}

/// The members of a tar that is open.
///
/// # Errors
/// When it cannot be read.
pub fn list_open_tar(file: &mut InputFile) -> io::Result<Listing> {
    let length = file.length()?;
    tar::list(&mut BufReader::with_capacity(512, file), length)
}

/// The members of a tar to find out a layout: of one in object storage the first. See [`answered`].
pub fn list_head_of_tar(storage: &Storage, path: &Path) -> Option<Listing> {
    let file = open_head(storage, path)?;
    let is_object = matches!(file, InputFile::Object(_));
    let length = file.length().ok()?;
    let most = if is_object { length.min(HEAD_OF_A_TAR) } else { length };
    let listed = tar::list(&mut BufReader::with_capacity(512, file.in_blocks()), most);
    or_note(path, listed.map(Some))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inner_question_hides_no_outer_one() {
        let ask = |what: &str| or_note::<()>(Path::new("s3://b/c"), Err(io::Error::other(what.to_owned())));
        let outer = answered(|| {
            ask("outer");
            let inner = answered(|| ask("inner"));
            assert!(inner.unwrap_err().to_string().contains("inner"));
            assert!(answered(|| ()).is_ok());
        });
        assert!(outer.unwrap_err().to_string().contains("outer"));
        assert!(answered(|| ()).is_ok());
    }
}
