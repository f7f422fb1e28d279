//! Events of a run. The screen, `--progress json`, `--events` and the run's log are all written from them.

use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use crate::reject::ReasonCount;
use crate::secret::Secrets;
use crate::switched_off::SwitchedOff;

/// Version of the event format; part of every `run_started`.
pub const EVENT_VERSION: u32 = 1;

/// The outcome of a stage in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageOutcome {
    #[default]
    Done,
    /// It failed, at some partitions or as a whole.
    Failed,
    /// Some of its partitions were left out, as they depend on what failed before it.
    Incomplete,
    /// All of it was left out, as it depends on what failed before it.
    LeftOut,
}

impl StageOutcome {
    /// The outcome in words, for people.
    pub fn as_str(self) -> &'static str {
        match self {
            StageOutcome::Done => "done",
            StageOutcome::Failed => "failed",
            StageOutcome::Incomplete => "incomplete",
            StageOutcome::LeftOut => "left out",
        }
    }
}

/// A failure of a stage: of one partition, or of the whole stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageFailure {
    /// None where the failure is not due to one partition.
    pub partition: Option<String>,
    pub message: String,
}

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
        /// What the user calls the run, and notes of it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        note: Option<String>,
    },
    /// A stage begins: how many partitions will run and how many are reused. With `--keep-going` it may begin again
    /// after a failure, with the partitions that are left; those that this run has made do not count as reused.
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
        /// The rejects by reason.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        reasons: Vec<ReasonCount>,
        done: u64,
        total: u64,
    },
    /// Figures of the stage's own: step, loss, rows in a second, ...
    StageFigures { stage: String, figures: serde_json::Value },
    StageFinished {
        stage: String,
        rows_in: u64,
        rows_out: u64,
        rejects: Vec<ReasonCount>,
        #[serde(default)]
        outcome: StageOutcome,
        /// What failed, where the stage did.
        #[serde(default)]
        failures: Vec<StageFailure>,
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

impl Event {
    pub fn warning(stage: Option<String>, message: impl Into<String>) -> Event {
        let message = message.into();
        Event::Warning { stage, message }
    }

    pub fn note(message: impl Into<String>) -> Event {
        let message = message.into();
        Event::Note { message }
    }
}

type Listener = Box<dyn FnMut(&Event) + Send>;

/// Where events go: any number of listeners, called in order under one lock.
#[derive(Clone, Default)]
pub struct Events {
    listeners: Arc<Mutex<Vec<Listener>>>,
    secrets: Arc<Mutex<Secrets>>,
}

impl Events {
    pub fn listen(&self, listener: impl FnMut(&Event) + Send + 'static) {
        self.lock().push(Box::new(listener));
    }

    /// Takes the values of secrets out of all events from now on.
    pub fn hide(&self, secrets: &Secrets) {
        *self.secrets.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = secrets.clone();
    }

    pub fn send(&self, event: Event) {
        let secrets = self
            .secrets
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .clone();
        let event = hidden(event, &secrets);
        for listener in self.lock().iter_mut() {
            listener(&event);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Listener>> {
        // A listener that panicked must not silence the others.
        self.listeners.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The event without the values of secrets.
fn hidden(event: Event, secrets: &Secrets) -> Event {
    if secrets.is_empty() {
        return event;
    }
    let Ok(mut json) = serde_json::to_value(&event) else {
        return event;
    };
    let before = json.clone();
    secrets.hide_in_json(&mut json);
    // An event without secrets is sent unchanged: numbers that JSON does not have (NaN) would be lost in the
    // conversion.
    if json == before {
        return event;
    }
    serde_json::from_value(json).unwrap_or(Event::note("an event is not shown, as it held a secret"))
}
