//! The one error type of this crate.

use std::path::{Path, PathBuf};

/// Why a model could not be fetched from the hub.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A text that begins with `hf://` is not a valid reference.
    #[error("{message}")]
    Reference { message: String },
    /// The hub or the cache did not deliver a file; `help` says what to do.
    #[error("{message}")]
    Unavailable { message: String, help: String },
    /// A file of the cache could not be read or written.
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
}

impl HubError {
    pub(crate) fn unavailable(message: impl Into<String>, help: impl Into<String>) -> HubError {
        HubError::Unavailable {
            message: message.into(),
            help: help.into(),
        }
    }

    pub(crate) fn file(path: &Path) -> impl FnOnce(std::io::Error) -> HubError + '_ {
        move |source| HubError::File {
            path: path.to_owned(),
            source,
        }
    }
}
