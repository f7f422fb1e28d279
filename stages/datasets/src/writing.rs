//! What a dataset is written for.

use std::path::Path;

use flow_kind::event::Events;
use flow_kind::{StageError, Storage};

/// The stage, where recordings are read, where messages go, and whether to give up.
pub struct Writing<'w> {
    pub stage: &'w str,
    /// For recordings that are in object storage.
    pub storage: &'w Storage,
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
