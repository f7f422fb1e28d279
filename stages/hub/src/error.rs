//! The one error type of this crate.

use std::path::{Path, PathBuf};

/// Why a model of the hub could not be had.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A text that begins with `hf://` names no model.
    #[error("{message}")]
    Reference { message: String },
    /// The hub or the cache does not give what was asked for; `help` says what to do.
    #[error("{message}")]
    Unavailable { message: String, help: String },
    /// A file of the cache could not be read or written.
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
}

impl HubError {
    pub(crate) fn file(path: &Path) -> impl FnOnce(std::io::Error) -> HubError + '_ {
        move |source| HubError::File {
            path: path.to_owned(),
            source,
        }
    }
}
