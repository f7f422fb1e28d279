//! Shows runs to people: past runs of a state directory, the lineage of a segment, frozen pipelines, progress, events as text, and
//! the report of a run. The commands and the pages of `flow ui` use it.

pub mod figures;
pub mod frozen;
pub mod graph;
pub mod lineage;
pub mod past_run;
pub mod progress;
pub mod report;
pub mod sentence;
pub mod table;

use flow_store::StoreError;

/// The column that names a segment of speech, in the rows of all kinds: rejects have it, and [`lineage`] finds rows by it.
pub const ID_COLUMN: &str = "segment_id";

/// Why a run cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no such run or segment.
    #[error("{message}")]
    NotFound { message: String, help: String },
    /// A file of the run is damaged, or cannot be read.
    #[error("{0}")]
    Unreadable(String),
}

impl InspectError {
    fn not_found(message: impl Into<String>, help: impl Into<String>) -> InspectError {
        InspectError::NotFound {
            message: message.into(),
            help: help.into(),
        }
    }

    fn unreadable(error: impl std::fmt::Display) -> InspectError {
        InspectError::Unreadable(error.to_string())
    }
}
