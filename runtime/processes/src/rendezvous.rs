//! Rendezvous of the processes of a run: all connect to process 0, which sends each the addresses of the others.

use std::sync::Arc;
use std::time::Instant;

use super::follow::follow;
use super::group::Processes;
use super::joining::{Join, JoinError, JoinMessage, failed};
use super::lead::lead;

/// Joins the other processes. Returns when all are connected. `tell` is called with lines of progress
/// and warnings.
///
/// # Errors
/// Where not all connect in time, or they were not started for the same run.
pub fn join(join: &Join, tell: &dyn Fn(JoinMessage)) -> Result<Arc<Processes>, JoinError> {
    if join.processes == 0 || join.process >= join.processes || join.processes > u32::MAX as usize {
        return Err(JoinError::Refused {
            message: format!(
                "there is no process {} of {}: the first is 0",
                join.process, join.processes
            ),
        });
    }
    let until = Instant::now() + join.timeout;
    let (peers, streams) = if join.process == 0 {
        lead(join, until, tell)?
    } else {
        follow(join, until, tell)?
    };
    let processes = Processes::new(join.process, peers, streams);
    processes
        .map(Arc::new)
        .map_err(|error| failed(format!("the connections cannot be used: {error}"), ""))
}
