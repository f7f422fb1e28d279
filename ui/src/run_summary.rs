//! The summary of a run in lists: time, outcome, rows and rejects, and the error rates of its evaluations.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::{Arc, PoisonError};

use flow_base::event::Event;

use super::App;
use super::evaluation::{Rates, rates_of_run};
use super::follower::{Follower, last_lines};
use super::state_directory::{store, when};
use super::tables::TableRef;

/// Runs that the list shows: the latest ones.
pub const SHOWN: usize = 200;
/// Of larger files of events only the beginning and the end are read, as bytes.
const MAX_EVENTS: u64 = 32 << 20;
/// The longest first event that is read, as bytes.
const MAX_FIRST: u64 = 1 << 20;

#[derive(Clone, Debug, Default)]
pub struct RunSummary {
    pub pipeline: String,
    /// As the user named it, and the note of it.
    pub name: Option<String>,
    pub note: Option<String>,
    /// RFC 3339.
    pub started: String,
    /// None where it did not end.
    pub outcome: Option<String>,
    pub seconds: Option<f64>,
    /// The most rows that one of its stages gave out; None where that was not looked up.
    pub rows: Option<u64>,
    pub rejects: Option<u64>,
    /// Of each evaluation; None where its transcripts cannot be read.
    pub rates: Vec<(TableRef, Option<Rates>)>,
}

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
        return Arc::new(ends(&events));
    }
    let is_small = events.metadata().is_ok_and(|file| file.len() <= MAX_EVENTS);
    let mut summary = if is_small { whole(&events) } else { ends(&events) };
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

/// From all events.
fn whole(events: &Path) -> RunSummary {
    let mut run = Follower::new(events);
    if run.advance().is_err() {
        return RunSummary::default();
    }
    let stages = &run.progress.stages;
    RunSummary {
        rows: stages.iter().map(|stage| stage.rows_out).max(),
        rejects: Some(stages.iter().map(|stage| stage.rejected).sum()),
        seconds: run.ended.as_ref().map(|end| end.seconds),
        outcome: run.ended.map(|end| end.outcome),
        pipeline: run.pipeline,
        name: run.name,
        note: run.note,
        started: run.started,
        rates: Vec::new(),
    }
}

/// From the first and the last events alone.
fn ends(events: &Path) -> RunSummary {
    let mut first = Vec::new();
    if let Ok(file) = flow_kind::open_regular_file(events) {
        // A line that is cut is no JSON.
        let _ = BufReader::new(file.take(MAX_FIRST)).read_until(b'\n', &mut first);
    }
    let first: serde_json::Value = serde_json::from_slice(&first).unwrap_or_default();
    let text = |name: &str| first[name].as_str().unwrap_or_default().to_owned();
    let last = last_lines(events, None).map(|(_, lines)| lines).unwrap_or_default();
    let end = last.iter().rev().find_map(|line| match serde_json::from_str(line) {
        Ok(Event::RunFinished { outcome, seconds, .. }) => Some((outcome, seconds)),
        _ => None,
    });
    let (outcome, seconds) = end.unzip();
    RunSummary {
        pipeline: text("pipeline"),
        name: first["name"].as_str().map(str::to_owned),
        note: first["note"].as_str().map(str::to_owned),
        started: text("at"),
        outcome,
        seconds,
        ..RunSummary::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_summed_up_from_its_events_and_from_their_ends() {
        let folder = tempfile::tempdir().unwrap();
        let events = folder.path().join("events.jsonl");
        let line = |event: &str| format!("{{\"at\":\"2026-01-01T00:00:00Z\",{event}}}\n");
        let finished = |stage: &str, rows: u64| {
            line(&format!(
                "\"event\":\"stage_finished\",\"stage\":\"{stage}\",\"rows_in\":9,\"rows_out\":{rows},\"rejects\":[{{\"reason\":\"x\",\"class\":\"rule\",\"rows\":2}}]"
            ))
        };
        let mut text = line(
            "\"event\":\"run_started\",\"version\":1,\"run\":\"r\",\"pipeline\":\"p\",\"name\":\"warm\",\"stages\":[\"a\",\"b\"]",
        );
        text += &(finished("a", 7) + &finished("b", 3));
        std::fs::write(&events, &text).unwrap();
        let cut_short = whole(&events);
        assert_eq!(
            (cut_short.rows, cut_short.outcome, cut_short.seconds),
            (Some(7), None, None)
        );
        text += &line("\"event\":\"run_finished\",\"outcome\":\"done\",\"seconds\":1.5,\"ran\":2,\"reused\":0");
        std::fs::write(&events, &text).unwrap();
        for (summary, figures) in [(whole(&events), (Some(7), Some(4))), (ends(&events), (None, None))] {
            assert_eq!(
                (summary.pipeline.as_str(), summary.started.as_str()),
                ("p", "2026-01-01T00:00:00Z")
            );
            assert_eq!((summary.name.as_deref(), summary.note), (Some("warm"), None));
            assert_eq!((summary.outcome.as_deref(), summary.seconds), (Some("done"), Some(1.5)));
            assert_eq!((summary.rows, summary.rejects), figures);
        }
        // What is not there has no summary, and no error.
        assert_eq!(ends(&folder.path().join("gone")).outcome, None);
    }
}
