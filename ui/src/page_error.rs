//! Errors of a request.

use std::io;

use axum::http::StatusCode;
use flow_inspect::InspectError;
use flow_kind::StageError;
use flow_manifest::ManifestError;
use flow_store::StoreError;

/// The error of a request. It is shown as a page.
#[derive(Debug)]
pub struct PageError {
    pub status: StatusCode,
    pub message: String,
}

impl PageError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> PageError {
        PageError {
            status,
            message: message.into(),
        }
    }

    pub fn bad_request(message: impl Into<String>) -> PageError {
        PageError::new(StatusCode::BAD_REQUEST, message)
    }

    /// Not found.
    pub fn absent(what: &str) -> PageError {
        PageError::new(StatusCode::NOT_FOUND, format!("there is no such {what}"))
    }

    /// Damaged files: shown as an error page.
    pub fn unreadable(error: impl std::fmt::Display) -> PageError {
        PageError::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string())
    }
}

impl From<InspectError> for PageError {
    fn from(error: InspectError) -> Self {
        PageError::unreadable(error)
    }
}

impl From<StoreError> for PageError {
    fn from(error: StoreError) -> Self {
        PageError::unreadable(error)
    }
}

impl From<StageError> for PageError {
    fn from(error: StageError) -> Self {
        PageError::unreadable(error)
    }
}

impl From<ManifestError> for PageError {
    fn from(error: ManifestError) -> Self {
        PageError::unreadable(error)
    }
}

impl From<io::Error> for PageError {
    fn from(error: io::Error) -> Self {
        PageError::unreadable(error)
    }
}
