//! A run that is going on.

use std::sync::Arc;

use super::spread::Spread;
use crate::dataflow::job::Signals;
use flow_store::SnapshotWriter;

/// A run that is going on.
pub struct Running {
    pub id: String,
    pub snapshots: SnapshotWriter,
    pub signals: Arc<Signals>,
    /// The other processes, if they compute partitions.
    pub spread: Option<Spread>,
}

impl Running {
    /// Number of processes that compute partitions.
    pub fn processes(&self) -> usize {
        match (&self.spread, &self.signals.processes) {
            (Some(_), Some(processes)) => processes.count(),
            _ => 1,
        }
    }
}
