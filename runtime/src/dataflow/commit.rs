//! Commits what workers have written, in groups, on a separate thread, so that no worker waits for fsync.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::job::{Failure, RegionState};
use flow_base::panic_guard::panic_error;

/// Partitions per node in a group, and how long the first of a group waits at most.
const GROUP: usize = 64;
const GROUP_AGE: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(20);

/// Commits whenever a group is full or old enough, until the other end of `working` is dropped or the region is to be
/// left. The caller commits the remaining partitions.
pub(super) fn while_working(shared: &RegionState, working: &Receiver<()>) {
    let full = GROUP * shared.job.nodes.len().max(1);
    let mut last = Instant::now();
    while working.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) && !shared.leaving() {
        shared.pass_signals_on();
        let waiting = shared.waiting();
        if waiting >= full || (waiting > 0 && last.elapsed() >= GROUP_AGE) {
            match catch_unwind(AssertUnwindSafe(|| shared.commit())) {
                Ok(Ok(())) => {}
                Ok(Err((node, error))) => shared.fail_stage(node, None, error),
                // The workers stop once the failure is noted.
                Err(panic) => shared.fail(Failure::Internal(panic_error(panic.as_ref()))),
            }
            last = Instant::now();
        } else if waiting == 0 {
            last = Instant::now();
        }
    }
}
