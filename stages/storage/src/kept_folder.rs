//! The folder of copies on this machine: where it is, and what its files are called. See `kept.rs`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::error::{StorageError, StorageFault};
use crate::file_version::is_one_file;
use crate::location::ObjectUrl;
use crate::stat::Stat;

/// Bytes of the folder where `FLOW_STORAGE_CACHE_BYTES` is not set.
const DEFAULT_BYTES: u64 = 20_000_000_000;

/// A folder of copies, and how many bytes it may have.
#[derive(Clone, Debug)]
pub(crate) struct KeptFolder {
    pub path: PathBuf,
    pub limit: u64,
}

impl KeptFolder {
    /// By `FLOW_STORAGE_CACHE`, or else where programs keep what they can get again; and `FLOW_STORAGE_CACHE_BYTES`.
    ///
    /// # Errors
    /// When no variable names a folder, or the number is none.
    pub fn of(environment: &BTreeMap<String, String>) -> Result<KeptFolder, StorageError> {
        let set = |name: &str| environment.get(name).filter(|value| !value.is_empty());
        let cache = || {
            let home = || Some(Path::new(set("HOME")?).join(".cache"));
            set("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)
        };
        let path = match (set("FLOW_STORAGE_CACHE"), cache()) {
            (Some(named), _) => Path::new(named).join("flow"),
            (None, Some(cache)) => cache.join("flow/storage"),
            (None, None) => {
                let message = "there is no folder to keep copies of objects in: set FLOW_STORAGE_CACHE";
                return Err(StorageError::new(StorageFault::Cache, message));
            }
        };
        let limit = match set("FLOW_STORAGE_CACHE_BYTES") {
            None => DEFAULT_BYTES,
            Some(text) => text.trim().parse().map_err(|_| {
                let message = "the environment variable FLOW_STORAGE_CACHE_BYTES must be a whole number of bytes";
                StorageError::new(StorageFault::Other, message)
            })?,
        };
        Ok(KeptFolder { path, limit })
    }

    pub fn copies(&self) -> PathBuf {
        self.path.join("copies")
    }

    pub fn blocks(&self) -> PathBuf {
        self.path.join("blocks")
    }
}

/// What names a version of an object.
pub(crate) fn version_of(url: &ObjectUrl, stat: &Stat) -> String {
    let since = stat.modified.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let etag = stat.etag.as_deref().or(stat.version.as_deref());
    let what = etag.map_or_else(|| since.as_secs().to_string(), str::to_string);
    format!("{url}\0{}\0{what}\0", stat.size)
}

/// A digest as the name of a folder.
pub(crate) fn folder_name(version: &str) -> String {
    let mut name = blake3::hash(version.as_bytes()).to_hex().to_string();
    name.truncate(32);
    name
}

/// An error of the file system of this machine, in the words of this crate.
pub(crate) fn failed<'a>(url: &'a ObjectUrl, path: &'a Path) -> impl Fn(io::Error) -> StorageError + 'a {
    move |error| {
        let said = format!("{}, see FLOW_STORAGE_CACHE: {error}", path.display());
        StorageError::of(StorageFault::Cache, &url.to_string(), &said)
    }
}

/// Makes a folder, and those above it, for this user alone: what is in a bucket may not be for everybody.
pub(crate) fn make_private(folder: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Whether a file that was opened by a path is still the one there.
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(opened), Ok(now)) => is_one_file(&opened, &now),
        _ => false,
    }
}
