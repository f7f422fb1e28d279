//! The summaries of runs, kept from request to request.

use std::sync::{Arc, PoisonError};

use super::app::App;
use super::evaluation::rates_of_run;
use super::run_summary::{self, RunSummary};
use super::state_directory::{store, when};

/// Runs that the list shows: the latest ones.
pub const SHOWN: usize = 200;
/// Of larger files of events only the beginning and the end are read, as bytes.
const MAX_EVENTS: u64 = 32 << 20;

/// The summary of the run of this name. With `figures`, rows, rejects and error rates are looked up where they are not
/// cached. Unreadable parts are left out; the page of the run shows the error.
pub fn summary(app: &App, id: &str, figures: bool) -> Arc<RunSummary> {
    let known = || app.summaries.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(summary) = known().get(id) {
        return Arc::clone(summary);
    }
    let Ok(folder) = store(app).and_then(|store| Ok(store.run_folder(id)?)) else {
        return Arc::default();
    };
    let events = folder.join("events.jsonl");
    if !figures {
        return Arc::new(run_summary::ends(&events));
    }
    let is_small = events.metadata().is_ok_and(|file| file.len() <= MAX_EVENTS);
    let mut summary = if is_small {
        run_summary::whole(&events)
    } else {
        run_summary::ends(&events)
    };
    summary.rates = rates_of_run(app, id);
    let summary = Arc::new(summary);
    // A finished run does not change.
    if summary.outcome.is_some() {
        let mut known = known();
        if known.len() > 2 * SHOWN {
            known.clear();
        }
        known.insert(id.to_owned(), Arc::clone(&summary));
    }
    summary
}

/// What a stage of a run is called beside those of others: `decode of finetune, 2026-01-01 12:00:00`.
pub fn titled(app: &App, run: &str, stage: &str) -> String {
    let run = summary(app, run, false);
    let name = run.name.as_ref().map_or(String::new(), |name| format!(" ({name})"));
    format!("{stage} of {}{name}, {}", run.pipeline, when(&run.started))
}
