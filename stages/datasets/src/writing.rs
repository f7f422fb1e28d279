//! What a dataset is written for.

use std::path::Path;

use flow_kind::StageError;
use flow_kind::event::Events;

/// The stage, where its messages go, and whether to give up.
pub struct Writing<'w> {
    pub stage: &'w str,
    pub events: &'w Events,
    pub stop: &'w (dyn Fn() -> bool + Sync),
}

impl Writing<'_> {
    /// # Errors
    /// If the run gives up.
    pub(crate) fn go_on(&self) -> Result<(), StageError> {
        match (self.stop)() {
            true => Err(StageError::failed("stopped")),
            false => Ok(()),
        }
    }
}

pub(crate) fn failed_to_write(path: &Path, error: &dyn std::fmt::Display) -> StageError {
    StageError::failed(format!("{}: {error}", path.display()))
}
