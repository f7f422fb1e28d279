//! Copies on this machine of files and folders in object storage, for readers that need a path.

use std::path::{Path, PathBuf};

use flow_storage::{Location, Storage};

use flow_store::{StoreError, path_in_set};

/// The path on this machine of a file or folder: the path itself, or where a URL is given that of a copy which is kept
/// ([`Storage::keep`]), of the object or of those right below it whose names `wanted` takes. None: `progress`, which is given
/// lines about the copying, ended it.
///
/// # Errors
/// If the URL names nothing, or it cannot be copied.
pub fn local_copy(
    storage: &Storage,
    path: &Path,
    wanted: &dyn Fn(&str) -> bool,
    progress: &mut dyn FnMut(&str) -> bool,
) -> Result<Option<PathBuf>, StoreError> {
    match Location::of_path(&path_in_set(storage, path)?)? {
        Location::Local(path) => Ok(Some(path)),
        Location::Object(url) => Ok(storage.keep(&url, wanted, progress)?),
    }
}
