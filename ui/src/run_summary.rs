//! The summary of a run in lists: time, outcome, rows and rejects, and the error rates of its evaluations; from its events.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use flow_base::event::Event;

use super::follower::{Follower, last_lines};
use super::rates::Rates;
use super::table_ref::TableRef;

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

/// The summary from all events. Unreadable ones give an empty one.
pub fn whole(events: &Path) -> RunSummary {
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

/// The summary from the first and the last events alone.
pub fn ends(events: &Path) -> RunSummary {
    let mut first = Vec::new();
    if let Ok(file) = flow_kind::open_regular_file(events) {
        // A line that is cut is not JSON.
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
