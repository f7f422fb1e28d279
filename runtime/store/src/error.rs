//! What can go wrong with the state directory, exports and source files.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use parquet::errors::ParquetError;

use super::layout::FORMAT;
use flow_base::error::StageError;
use flow_base::full_disk::full_disk;

/// An error of the store. Its text names the file or folder; [`StoreError::help`] says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// Another run holds the lock: exit code 3.
    #[error("{what} {} is held by {holder}", path.display())]
    Held {
        what: &'static str,
        path: PathBuf,
        holder: Holder,
    },
    #[error("{} has format {found}, which is newer than this flow (it knows up to {known})", path.display())]
    Newer { path: PathBuf, found: u64, known: u64 },
    /// A file that is not what it was when it was written. A run removes one of its state directory and makes again what it
    /// held; so this is never said of a file for another reason.
    #[error("{} is damaged: {detail}", path.display())]
    Damaged { path: PathBuf, detail: String },
    /// A folder belongs to another recipe with the same first 16 digits, or a file was copied from another folder.
    #[error("{} belongs to recipe {found}, not to {expected}", path.display())]
    OtherRecipe {
        path: PathBuf,
        found: String,
        expected: String,
    },
    /// Rows that do not fit the port they are given for.
    #[error("port `{port}` of partition `{partition}`: {detail}")]
    Rows {
        port: String,
        partition: String,
        detail: String,
    },
    #[error("`{name}` cannot be the name of {what}")]
    Name { what: &'static str, name: String },
    #[error("partition `{partition}` was planned but not committed")]
    NotCommitted { partition: String },
    #[error("the state directory {} was opened for reading only", path.display())]
    ReadOnly { path: PathBuf },
    #[error("artifacts in {} are being written", path.display())]
    Busy { path: PathBuf },
    /// A folder that is not a state directory.
    #[error("{} is not a state directory: it has no FORMAT file, but holds `{found}`", path.display())]
    Foreign { path: PathBuf, found: String },
    /// The target folder of a set that has files of another stage or of another program.
    #[error("{} holds files of something else ({found}), which would be removed or overwritten", path.display())]
    OtherSet { path: PathBuf, found: String },
    /// Object storage knows no locks: two exports came to their end at the same time.
    #[error("another run has written the set in {folder} while this one did")]
    SetMeanwhile { folder: String },
    #[error("{url} cannot hold a state directory: {detail}")]
    Conditions { url: String, detail: String },
    /// A process that computes for a run finds that this does not have the lock any more.
    #[error("the run {run}, for which this process computes, does not hold the lock {} any more", path.display())]
    NotHeld { path: PathBuf, run: String },
    /// The lock of a state directory in object storage was not renewed for so long that another run may have it.
    #[error("the lock of the state directory {} could not be renewed", path.display())]
    NotRenewed { path: PathBuf },
    /// Another run has written a state directory in object storage whose lock this one holds.
    #[error("another run has written {url} while this one held the state directory")]
    WrittenMeanwhile { url: String },
    #[error(transparent)]
    Storage(#[from] flow_storage::StorageError),
}

/// Who holds a lock, as far as the lock file tells.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Holder {
    pub host: String,
    pub pid: u32,
    pub run: String,
}

impl Holder {
    /// The host may be empty, where it has not been written yet.
    pub fn new(host: &str, pid: u32, run: &str) -> Holder {
        let host = if host.is_empty() { "its host" } else { host };
        Holder {
            host: host.to_owned(),
            pid,
            run: run.to_owned(),
        }
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.pid == 0 {
            return f.write_str("another run, which has not yet said which");
        }
        write!(f, "run {} (process {} on {})", self.run, self.pid, self.host)
    }
}

impl StoreError {
    /// A file that is not what it was when it was written.
    pub(super) fn damaged(path: &Path, detail: impl fmt::Display) -> Self {
        StoreError::Damaged {
            path: path.to_path_buf(),
            detail: detail.to_string(),
        }
    }

    pub fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        StoreError::Io {
            action,
            path: path.to_path_buf(),
            source,
        }
    }

    /// A parquet error while reading `path`; an I/O error inside it stays one.
    pub(crate) fn parquet_read(path: &Path, error: ParquetError) -> Self {
        match io_of(error) {
            Ok(source) => StoreError::io("read", path, source),
            Err(detail) => StoreError::damaged(path, detail),
        }
    }

    /// A parquet error while writing `path`; an I/O error inside it stays one, so that a full disk is called a full disk.
    pub(crate) fn parquet_written(path: &Path, error: ParquetError) -> Self {
        StoreError::io("write", path, io_of(error).unwrap_or_else(io::Error::other))
    }

    /// What a person can do about it.
    pub fn help(&self) -> Option<String> {
        if let StoreError::Io { source, path, .. } = self
            && let Some(full) = full_disk(path, source)
        {
            return Some(format!(
                "{full}; --state names another state directory, and FLOW_STORAGE_CACHE the folder for the copy of one in object storage"
            ));
        }
        let text = match self {
            StoreError::Io { source, path, .. } => match source.kind() {
                io::ErrorKind::PermissionDenied => {
                    format!(
                        "this user may not do that in {}: change its owner or mode, or name another folder",
                        folder_of(path)
                    )
                }
                io::ErrorKind::ReadOnlyFilesystem => {
                    format!("{} is on a read-only file system: name another folder", folder_of(path))
                }
                io::ErrorKind::Unsupported => {
                    "the file system cannot lock files: put the state directory on another one with --state".to_string()
                }
                _ => return None,
            },
            StoreError::Held { holder, .. } => {
                format!(
                    "wait until it has ended, or stop it on {}; a lock whose owner has died is taken over by itself",
                    holder.host
                )
            }
            StoreError::Newer { .. } => "use the flow that wrote it, or another state directory (--state)".to_string(),
            // Without it the state directory is none.
            StoreError::Damaged { path, .. } if path.file_name().is_some_and(|name| name == "FORMAT") => {
                format!("if this version of flow wrote the state directory, put {{\"version\":{FORMAT}}} into {}", path.display())
            }
            StoreError::Damaged { path, .. } if !path.exists() => "run again: what it held is made once more".to_string(),
            StoreError::Damaged { path, .. } => {
                format!(
                    "remove {} and run again: what it held is made once more",
                    path.display()
                )
            }
            StoreError::OtherRecipe { path, .. } => format!("remove {} and run again", folder_of(path)),
            StoreError::OtherSet { found, .. } => {
                format!("name another folder in the setting `out` of the stage, or move {found}")
            }
            StoreError::SetMeanwhile { .. } => {
                "run again once the other run has ended, or name another folder".to_string()
            }
            StoreError::Conditions { .. } => "a state directory needs storage that writes an object only where there is none \
                (If-None-Match) or where it is unchanged (If-Match): Amazon S3, Google Cloud Storage, Azure, MinIO, Ceph and R2 \
                of today do; name a folder of this machine with --state, or see docs/storage.md"
                .to_string(),
            StoreError::NotRenewed { .. } => {
                "see that the storage can be reached, and run again: what is committed is reused".to_string()
            }
            StoreError::WrittenMeanwhile { .. } => {
                "wait until the other run has ended, and run again: what is committed is reused".to_string()
            }
            StoreError::Foreign { .. } => "name a new or empty folder with --state".to_string(),
            _ => return None,
        };
        Some(text)
    }

    /// Whether another run is in the way (exit code 3).
    pub fn is_held(&self) -> bool {
        matches!(self, StoreError::Held { .. })
    }
}

/// The I/O error inside a parquet error, or its text.
fn io_of(error: ParquetError) -> Result<io::Error, String> {
    match error {
        ParquetError::External(inner) => match inner.downcast::<io::Error>() {
            Ok(source) => Ok(*source),
            Err(other) => Err(other.to_string()),
        },
        other => Err(other.to_string()),
    }
}

fn folder_of(path: &Path) -> String {
    path.parent().unwrap_or(path).display().to_string()
}

impl From<StoreError> for StageError {
    fn from(error: StoreError) -> Self {
        let (help, message) = (error.help(), error.to_string());
        match error {
            StoreError::Damaged { path, .. } => StageError::Damaged { path, message, help },
            _ => StageError::Failed {
                message,
                row: None,
                help,
            },
        }
    }
}
