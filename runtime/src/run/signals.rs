//! SIGINT and SIGTERM end a run gently, a second one at once; SIGUSR1 asks for a checkpoint.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::{SigId, flag, low_level};

use super::RunError;
use crate::dataflow::job::Signals;

/// The handlers, for as long as this lives.
pub(super) struct Handlers {
    ids: Vec<SigId>,
}

impl Handlers {
    pub fn install(signals: &Arc<Signals>) -> Result<Handlers, RunError> {
        let failed = |error: std::io::Error| RunError::Internal {
            message: format!("cannot handle signals: {error}"),
        };
        let mut handlers = Handlers { ids: Vec::new() };
        let armed = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag unset, arms it and goes on; the second leaves.
            let ids = [
                flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&armed)).map_err(failed)?,
                flag::register(signal, Arc::clone(&armed)).map_err(failed)?,
                flag::register_usize(signal, Arc::clone(&signals.stop), signal as usize).map_err(failed)?,
            ];
            handlers.ids.extend(ids);
        }
        handlers
            .ids
            .push(flag::register(SIGUSR1, Arc::clone(&signals.checkpoint)).map_err(failed)?);
        Ok(handlers)
    }
}

impl Drop for Handlers {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            low_level::unregister(id);
        }
    }
}
