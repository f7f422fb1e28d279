//! What a process does that joined the run of another one.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use signal_hook::consts::SIGUSR1;

use super::signals::SignalHandlers;
use super::spread::Follower;
use crate::dataflow::job::Signals;
use crate::options::Options;
use flow_plan::run_error::RunError;
use flow_processes::{End, Outcome, Processes};
use flow_spec::Checked;

/// How often signals are checked.
const LOOK: Duration = Duration::from_millis(50);

/// Takes part in a run of process 0 until its end: computes the partitions that fall to this process, while the stages'
/// listeners execute their messages. `options` name the state directory, which process 0 and this process share, and the
/// threads of this process. A signal to this process is forwarded to process 0, which ends the run for all; a second one
/// ends this process at once. `given_up` may end the wait with an error.
///
/// # Errors
/// Where a process is lost, or `given_up` returns an error.
pub fn follow(
    processes: &Arc<Processes>,
    checked: &Arc<Checked>,
    options: &Options,
    mut given_up: impl FnMut() -> Option<String>,
) -> Result<End, RunError> {
    let came = Arc::new(Signals::default());
    let _handlers = options.signals.then(|| SignalHandlers::install(&came)).transpose()?;
    Follower::start(processes, checked, options).map_err(|error| RunError::Process {
        message: format!("the thread that computes partitions cannot be started: {error}"),
    })?;
    loop {
        match processes.outcome(LOOK) {
            Some(Outcome::Ended(end)) => {
                processes.leave();
                return Ok(end);
            }
            Some(Outcome::Lost(loss)) => return Err(RunError::Process { message: loss.message }),
            None => {}
        }
        match came.stop.signal.swap(0, Ordering::AcqRel) {
            0 => {}
            signal => processes.signal(signal as i32),
        }
        if came.checkpoint.swap(false, Ordering::AcqRel) {
            processes.signal(SIGUSR1);
        }
        if let Some(message) = given_up() {
            return Err(RunError::Process { message });
        }
    }
}
