//! What can go wrong with audio.

use std::path::PathBuf;

use flow_kind::store::is_fault_of_the_file;

/// Error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum AudioError {
    #[error("cannot decode the audio: {0}")]
    Decode(String),
    /// Of a format that is not known, or with a codec that is not.
    #[error("cannot decode the audio: {0}")]
    Unsupported(String),
    #[error("sample rate {0} Hz is outside 1,000 to 768,000 Hz")]
    SampleRate(u32),
    #[error("the audio is longer than {limit_seconds} s")]
    TooLong { limit_seconds: f64 },
    #[error("{path}: {size} bytes at offset {offset} reach past the end of the file")]
    PastEnd { path: PathBuf, offset: u64, size: u64 },
    #[error("{path}: {size} bytes are more than one recording may have ({limit})")]
    TooLarge { path: PathBuf, size: u64, limit: u64 },
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: std::io::Error },
    #[error(
        "{path}: {needed} bytes are to be written ({margin} of them to spare), and its file system has {free} bytes free"
    )]
    NoSpace {
        path: PathBuf,
        needed: u64,
        margin: u64,
        free: u64,
    },
    #[error("{path} cannot be written safely: {why}")]
    UnsafePath { path: PathBuf, why: String },
    #[error("{path}: {why}")]
    Sentences { path: PathBuf, why: String },
    #[error("{path}: {why}")]
    Manifest { path: PathBuf, why: String },
    #[error("{program}: {why}")]
    Espeak { program: PathBuf, why: String },
    #[error("cannot make a shard: {0}")]
    Shard(String),
    /// The run is being aborted.
    #[error("stopped")]
    Stopped,
}

impl AudioError {
    pub fn write(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        let path = path.into();
        AudioError::Write { path, source }
    }

    /// What is wrong with a file that rows or recordings are in.
    pub fn manifest(path: impl Into<PathBuf>, why: impl Into<String>) -> Self {
        AudioError::Manifest {
            path: path.into(),
            why: why.into(),
        }
    }

    pub fn unsafe_path(path: impl Into<PathBuf>, why: impl Into<String>) -> Self {
        AudioError::UnsafePath {
            path: path.into(),
            why: why.into(),
        }
    }

    pub fn read(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        let path = path.into();
        AudioError::Read { path, source }
    }

    /// True where an existing file cannot be read, for a reason that concerns only this file.
    pub fn is_unreadable(&self) -> bool {
        matches!(self, AudioError::Read { source, .. }
            if source.kind() != std::io::ErrorKind::NotFound && is_fault_of_the_file(source))
    }
}
