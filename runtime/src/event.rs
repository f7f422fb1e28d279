//! What happens in a run, as events: the screen, `--progress json`, `--events` and the run's log are all
//! written from these.

use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use crate::reject::ReasonCount;
use crate::switched_off::SwitchedOff;

/// Version of the event format; stands in every `run_started`.
pub const EVENT_VERSION: u32 = 1;

/// One event. Serialised as a JSON object with the field `event`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    RunStarted {
        version: u32,
        run: String,
        pipeline: String,
        stages: Vec<String>,
        /// Stages that take no part, with the reason.
        #[serde(default)]
        switched_off: Vec<SwitchedOff>,
    },
    /// A stage begins: how many partitions will run and how many are reused.
    StageStarted {
        stage: String,
        kind: String,
        run: u64,
        reused: u64,
    },
    /// Partitions of a stage were committed (one event for a group).
    Committed {
        stage: String,
        partitions: u64,
        rows_in: u64,
        rows_out: u64,
        rejects: u64,
        done: u64,
        total: u64,
    },
    /// Figures of the stage's own: step, loss, seconds of audio, ...
    StageFigures { stage: String, figures: serde_json::Value },
    StageFinished {
        stage: String,
        rows_in: u64,
        rows_out: u64,
        rejects: Vec<ReasonCount>,
    },
    Exported {
        stage: String,
        folder: String,
        files: Vec<String>,
    },
    /// Something a person should know that does not end the run.
    Warning { stage: Option<String>, message: String },
    /// What a person may want to know about how the run is carried out.
    Note { message: String },
    RunFailed {
        stage: Option<String>,
        partition: Option<String>,
        row: Option<u32>,
        message: String,
    },
    RunFinished {
        outcome: String,
        seconds: f64,
        ran: u64,
        reused: u64,
    },
}

type Listener = Box<dyn FnMut(&Event) + Send>;

/// Where events go: any number of listeners, called in order under one lock.
#[derive(Clone, Default)]
pub struct Events {
    listeners: Arc<Mutex<Vec<Listener>>>,
}

impl Events {
    pub fn listen(&self, listener: impl FnMut(&Event) + Send + 'static) {
        self.lock().push(Box::new(listener));
    }

    pub fn send(&self, event: Event) {
        for listener in self.lock().iter_mut() {
            listener(&event);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Listener>> {
        // A listener that panicked must not silence the others.
        self.listeners.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
