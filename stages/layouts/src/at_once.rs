//! How many files are opened at the same time.

use std::path::Path;

use flow_storage::is_url;

/// For each object several requests are waited for.
const OBJECTS: usize = 16;

/// The threads that open files, some of which may be in object storage.
pub(crate) fn threads_for<P: AsRef<Path>>(mut files: impl Iterator<Item = P>) -> usize {
    if files.any(is_url) { OBJECTS } else { 1 }
}
