//! SIGINT and SIGTERM end a run gently, a second one at once; SIGHUP ends it gently, however often it comes; SIGUSR1 asks
//! for a checkpoint.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::{SigId, flag, low_level};

use crate::dataflow::job::Signals;
use flow_base::event::{Event, Events};
use flow_plan::run_error::RunError;

/// The handlers, for as long as this lives.
pub(super) struct SignalHandlers {
    ids: Vec<SigId>,
}

impl SignalHandlers {
    pub fn install(signals: &Arc<Signals>) -> Result<SignalHandlers, RunError> {
        let failed = |error: std::io::Error| RunError::internal(format!("cannot handle signals: {error}"));
        let mut handlers = SignalHandlers { ids: Vec::new() };
        let armed = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag unset, arms it and goes on; the second leaves.
            let ids = [
                flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&armed)).map_err(failed)?,
                flag::register(signal, Arc::clone(&armed)).map_err(failed)?,
                flag::register_usize(signal, Arc::clone(&signals.stop.signal), signal as usize).map_err(failed)?,
            ];
            handlers.ids.extend(ids);
        }
        // A closed terminal sends SIGHUP, and so does the shell that ends with it, so a second SIGHUP does not mean
        // that the user asked twice. Under nohup it stays ignored.
        if !is_ignored(SIGHUP) {
            handlers
                .ids
                .push(flag::register_usize(SIGHUP, Arc::clone(&signals.stop.signal), SIGHUP as usize).map_err(failed)?);
        }
        handlers
            .ids
            .push(flag::register(SIGUSR1, Arc::clone(&signals.checkpoint)).map_err(failed)?);
        Ok(handlers)
    }
}

/// Says that the run was asked to end, while what is in work is completed; until the sender is dropped.
pub(super) fn announce(signals: &Arc<Signals>, events: &Events) -> Sender<()> {
    const LOOK: Duration = Duration::from_millis(100);
    let (run, ended) = channel();
    let (signals, events) = (Arc::clone(signals), events.clone());
    let watch = move || {
        while ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
            if signals.stop_asked().is_some() {
                // The time for what is in work begins.
                signals.stop.is_over();
                let message = "interrupted: what is nearly done is completed; a second Ctrl-C or SIGTERM ends at once";
                return events.send(Event::note(message));
            }
        }
    };
    // Without a thread nothing is said.
    let _ = thread::Builder::new().name("signals".into()).spawn(watch);
    run
}

/// Whether the process was started with the signal ignored.
pub fn is_ignored(signal: i32) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: with no new action the call only writes the present one to the place it is given, which has room for it.
    let asked = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: the call succeeded, so it has written the whole action.
    asked == 0 && unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}

impl Drop for SignalHandlers {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            low_level::unregister(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ignored_is_told_from_what_is_not() {
        // Rust ignores SIGPIPE in every program; SIGWINCH keeps its default action.
        assert!(is_ignored(libc::SIGPIPE));
        assert!(!is_ignored(libc::SIGWINCH));
    }
}
