//! Events as text.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use flow_base::escape::escape_line;
use flow_base::event::{Event, StageFailure};
use flow_base::reject::ReasonCount;
use flow_kind::RejectClass;

use crate::figures;
use crate::table::{count, plural};

/// One event as one line, whatever names and messages are in it.
pub fn sentence(event: &Event) -> String {
    escape_line(&in_words(event)).into_owned()
}

fn in_words(event: &Event) -> String {
    match event {
        Event::RunStarted {
            run,
            pipeline,
            stages,
            switched_off,
            name,
            ..
        } => {
            let stages = plural(stages.len() as u64, "stage");
            let name = name.as_ref().map_or(String::new(), |name| format!(" ({name})"));
            match switched_off.len() {
                0 => format!("run {run}{name} of {pipeline}: {stages}"),
                off => format!("run {run}{name} of {pipeline}: {stages}, {off} switched off"),
            }
        }
        Event::StageStarted {
            stage,
            kind,
            run,
            reused,
        } => match (run, reused) {
            (0, reused) => format!("{stage}: {} reused", plural(*reused, "partition")),
            (run, 0) => format!("{stage} ({kind}): {} to run", plural(*run, "partition")),
            (run, reused) => format!(
                "{stage} ({kind}): {} to run, {} reused",
                plural(*run, "partition"),
                count(*reused)
            ),
        },
        Event::Committed {
            stage,
            done,
            total,
            rows_out,
            rejects,
            ..
        } => {
            let rejects = if *rejects == 0 {
                String::new()
            } else {
                format!(", {}", plural(*rejects, "reject"))
            };
            format!(
                "{stage}: {} of {}, {} more{rejects}",
                count(*done),
                plural(*total, "partition"),
                plural(*rows_out, "row")
            )
        }
        Event::StageFigures { stage, figures } => format!("{stage}: {}", figures::on_one_line(figures)),
        Event::StageFinished {
            stage,
            rows_in,
            rows_out,
            rejects,
            outcome,
            failures,
        } => {
            let rows = match (rows_in, rows_out) {
                (0, 0) => String::new(),
                (0, rows_out) => format!(": {}", plural(*rows_out, "row")),
                (rows_in, rows_out) => format!(": {} in, {} out", plural(*rows_in, "row"), count(*rows_out)),
            };
            let why = first_of(failures).map_or_else(String::new, |failure| format!(" ({failure})"));
            format!("{stage} {}{why}{rows}{}", outcome.as_str(), reasons(rejects))
        }
        Event::Exported { stage, folder, files } => {
            format!("{stage}: {} in {folder}", plural(files.len() as u64, "file"))
        }
        Event::Warning {
            stage: Some(stage),
            message,
        } => format!("warning: {stage}: {message}"),
        Event::Warning { stage: None, message } => format!("warning: {message}"),
        Event::Note { message } => message.clone(),
        Event::RunFailed {
            stage,
            partition,
            row,
            message,
        } => {
            let mut places = Vec::new();
            places.extend(stage.as_ref().map(|stage| format!("stage {stage}")));
            places.extend(partition.as_ref().map(|partition| format!("partition {partition}")));
            places.extend(row.map(|row| format!("row {row}")));
            if places.is_empty() {
                format!("failed: {message}")
            } else {
                format!("failed: {}: {message}", places.join(", "))
            }
        }
        Event::RunFinished {
            outcome,
            seconds,
            ran: 0,
            reused,
            ..
        } if outcome == "done" => format!(
            "nothing to do: {} reused, found in {}",
            plural(*reused, "partition"),
            duration(*seconds)
        ),
        Event::RunFinished {
            outcome,
            seconds,
            ran,
            reused,
            ..
        } => {
            let outcome = match outcome.as_str() {
                "past_reject_limit" => "done, past a limit of rejects",
                other => other,
            };
            format!(
                "{outcome} in {}: {} ran, {} reused",
                duration(*seconds),
                plural(*ran, "partition"),
                count(*reused)
            )
        }
    }
}

/// A failure, with its partition.
pub fn failure(failure: &StageFailure) -> String {
    match &failure.partition {
        Some(partition) => format!("partition {partition}: {}", failure.message),
        None => failure.message.clone(),
    }
}

/// The first failure, and the number of others.
fn first_of(failures: &[StageFailure]) -> Option<String> {
    let first = failure(failures.first()?);
    Some(match failures.len() - 1 {
        0 => first,
        more => format!("{first}; and {}", plural(more as u64, "other failure")),
    })
}

/// `, 34 rejects: too_short 30, corrupt_audio 4 (fault)`, commonest first.
fn reasons(rejects: &[ReasonCount]) -> String {
    // `flow rejects` shows the rest.
    const SHOWN: usize = 4;
    let total: u64 = rejects.iter().map(|reason| reason.rows).sum();
    if total == 0 {
        return String::new();
    }
    let mut rejects: Vec<&ReasonCount> = rejects.iter().collect();
    rejects.sort_by(|a, b| b.rows.cmp(&a.rows).then_with(|| a.reason.cmp(&b.reason)));
    let mut named: Vec<String> = rejects
        .iter()
        .take(SHOWN)
        .map(|reason| {
            format!(
                "{} {}{}",
                reason.reason,
                count(reason.rows),
                if reason.class == RejectClass::Fault {
                    " (fault)"
                } else {
                    ""
                }
            )
        })
        .collect();
    if rejects.len() > SHOWN {
        named.push(plural((rejects.len() - SHOWN) as u64, "other reason"));
    }
    format!(", {}: {}", plural(total, "reject"), named.join(", "))
}

/// `0.42 s`, `3 min 20 s`, `2 h 5 min`.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    match whole {
        0..60 => format!("{seconds:.2} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
    }
}

/// Plain lines for a log file or a pipe, with rate-limited progress.
#[derive(Default)]
pub struct Plain {
    last: BTreeMap<String, Instant>,
}

/// Interval of a stage's progress lines.
const EVERY: Duration = Duration::from_secs(5);

impl Plain {
    /// The line for an event, if it gets one.
    pub fn line(&mut self, event: &Event) -> Option<String> {
        match event {
            // The command prints it at the end, with help.
            Event::RunFailed { .. } => None,
            Event::StageFigures { figures, .. } if figures::is_notice(figures) => Some(sentence(event)),
            Event::Committed { stage, .. } | Event::StageFigures { stage, .. } => {
                let now = Instant::now();
                let due = self
                    .last
                    .get(stage)
                    .is_none_or(|last| now.duration_since(*last) >= EVERY);
                if due {
                    self.last.insert(stage.clone(), now);
                }
                due.then(|| sentence(event))
            }
            event => Some(sentence(event)),
        }
    }
}

#[cfg(test)]
mod tests {
    use flow_base::event::StageOutcome;

    use super::*;

    #[test]
    fn events_read_as_sentences() {
        let reason = |reason: &str, rows, class| ReasonCount {
            reason: reason.into(),
            class,
            rows,
        };
        let rejects = vec![reason("b", 4, RejectClass::Fault), reason("a", 1200, RejectClass::Rule)];
        let event = Event::StageFinished {
            stage: "clean".into(),
            rows_in: 5000,
            rows_out: 3796,
            rejects,
            outcome: StageOutcome::Done,
            failures: Vec::new(),
        };
        assert_eq!(
            sentence(&event),
            "clean done: 5,000 rows in, 3,796 out, 1,204 rejects: a 1,200, b 4 (fault)"
        );
        let failed = |partitions: &[&str]| {
            let failure = |partition: &&str| StageFailure {
                partition: Some(partition.to_string()),
                message: "no\nspace".into(),
            };
            sentence(&Event::StageFinished {
                stage: "clean".into(),
                rows_in: 2,
                rows_out: 2,
                rejects: Vec::new(),
                outcome: StageOutcome::Failed,
                failures: partitions.iter().map(failure).collect(),
            })
        };
        assert_eq!(
            failed(&["a"]),
            "clean failed (partition a: no\\nspace): 2 rows in, 2 out"
        );
        assert_eq!(
            failed(&["a", "b", "c"]),
            "clean failed (partition a: no\\nspace; and 2 other failures): 2 rows in, 2 out"
        );
        let event = Event::StageStarted {
            stage: "scan".into(),
            kind: "manifest.scan".into(),
            run: 1,
            reused: 1999,
        };
        assert_eq!(
            sentence(&event),
            "scan (manifest.scan): 1 partition to run, 1,999 reused"
        );
        assert_eq!(
            [duration(0.4), duration(59.4), duration(200.0), duration(7500.0)],
            ["0.40 s", "59.40 s", "3 min 20 s", "2 h 5 min"]
        );
    }

    #[test]
    fn data_in_events_stays_on_its_line() {
        let failed = Event::RunFailed {
            stage: Some("probe".into()),
            partition: Some("hi/\u{1b}]0;x\u{7}\nfailed: no".into()),
            row: None,
            message: "no member \u{202e}3pm".into(),
        };
        assert_eq!(
            sentence(&failed),
            "failed: stage probe, partition hi/\\u{1b}]0;x\\u{7}\\nfailed: no: no member \\u{202e}3pm"
        );
    }

    #[test]
    fn plain_lines_are_not_flooded() {
        let mut plain = Plain::default();
        let event = Event::StageFigures {
            stage: "train".into(),
            figures: serde_json::json!({"step": 1}),
        };
        assert_eq!(plain.line(&event).as_deref(), Some("train: step 1"));
        assert_eq!(plain.line(&event), None);
    }
}
