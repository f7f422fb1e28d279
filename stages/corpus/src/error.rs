//! What can go wrong in this crate.

use std::path::{Path, PathBuf};

use flow_audio::AudioError;
use flow_kind::StageError;

/// Why manifest work cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// SQL is wrong, or failed while running. `offset` is the line and column (from 1) in its text.
    #[error("{message}")]
    Sql {
        message: String,
        offset: Option<(usize, usize)>,
        help: Option<String>,
    },
    #[error("language table: {0}")]
    Languages(String),
    #[error("pattern of tags: {0}")]
    Tags(#[from] regex::Error),
    #[error("{}", at(path, source))]
    Io { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Arrow(#[from] arrow::error::ArrowError),
    #[error("{}: {source}", path.display())]
    Parquet {
        path: PathBuf,
        source: parquet::errors::ParquetError,
    },
    /// Whether a recording is there cannot be determined.
    #[error(transparent)]
    Recording(flow_storage::StorageError),
    /// An existing manifest is invalid.
    #[error("{}: {why}", path.display())]
    Manifest { path: PathBuf, why: String },
    /// Rows are invalid. `row` is the `_row` of the cause.
    #[error("{message}")]
    Rows { message: String, row: Option<u32> },
}

impl ManifestError {
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        ManifestError::Io {
            path: path.to_path_buf(),
            source,
        }
    }

    pub fn manifest(path: impl Into<PathBuf>, why: impl Into<String>) -> Self {
        ManifestError::Manifest {
            path: path.into(),
            why: why.into(),
        }
    }

    pub fn parquet(path: impl Into<PathBuf>, source: parquet::errors::ParquetError) -> Self {
        let path = path.into();
        ManifestError::Parquet { path, source }
    }

    pub fn rows(message: impl Into<String>, row: Option<u32>) -> Self {
        let message = message.into();
        ManifestError::Rows { message, row }
    }

    pub fn sql(message: impl std::fmt::Display) -> Self {
        ManifestError::Sql {
            message: message.to_string(),
            offset: None,
            help: None,
        }
    }

    /// The error of a stage for its setting `path`.
    pub fn of_setting(self, path: &str) -> StageError {
        match self {
            ManifestError::Sql { message, offset, help } => StageError::Setting {
                path: path.into(),
                offset,
                message,
                help,
            },
            other => StageError::setting(path, other),
        }
    }
}

impl From<AudioError> for ManifestError {
    fn from(error: AudioError) -> Self {
        match error {
            AudioError::Read { path, source } => ManifestError::io(&path, source),
            AudioError::Manifest { path, why } => ManifestError::manifest(path, why),
            other => ManifestError::rows(other.to_string(), None),
        }
    }
}

impl From<ManifestError> for StageError {
    fn from(error: ManifestError) -> Self {
        match error {
            ManifestError::Sql { message, help, .. } => StageError::Failed {
                message,
                row: None,
                help,
            },
            ManifestError::Rows { message, row } => StageError::Failed {
                message,
                row,
                help: None,
            },
            ManifestError::Io { path, source } => {
                let help = flow_kind::full_disk(&path, &source);
                let failed = StageError::failed(ManifestError::Io { path, source });
                help.into_iter().fold(failed, StageError::with_help)
            }
            other => StageError::failed(other),
        }
    }
}

/// An error with the path in front of it, but where it names its URL itself, as errors of object storage do.
pub(crate) fn at(path: &Path, error: &std::io::Error) -> String {
    let (path, error) = (path.display().to_string(), error.to_string());
    match error.strip_prefix(&path).is_some_and(|rest| rest.starts_with(':')) {
        true => error,
        false => format!("{path}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_its_place_once() {
        let at = |path: &str, error: &str| at(Path::new(path), &std::io::Error::other(error.to_owned()));
        assert_eq!(
            at("s3://b/a.flac", "s3://b/a.flac: permission denied"),
            "s3://b/a.flac: permission denied"
        );
        assert_eq!(
            at("s3://b/a", "s3://b/a.flac: permission denied"),
            "s3://b/a: s3://b/a.flac: permission denied"
        );
        assert_eq!(at("a.flac", "it is empty"), "a.flac: it is empty");
    }
}
