//! `flow status`: who runs, and how far the last run came.

use std::collections::BTreeMap;
use std::io::Write;

use flow_runtime::event::{Event, StageFailure, StageOutcome};
use flow_runtime::reject::ReasonCount;
use flow_runtime::store::Store;

use super::past_run::PastRun;
use crate::arguments::LookArguments;
use crate::failure::{Exit, Failure};
use crate::screen::figures;
use crate::screen::sentence::sentence;
use crate::table;

/// How far a stage came.
#[derive(Default)]
struct Reached {
    run: u64,
    done: u64,
    reused: u64,
    rows_out: u64,
    rejects: u64,
    /// None while it is in work.
    outcome: Option<StageOutcome>,
    /// What failed, as the stage told it.
    failures: Vec<StageFailure>,
}

pub fn status(arguments: &LookArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let run = PastRun::find(arguments)?;
    let holder = Store::holder(&arguments.state.state);
    let mut ended = None;
    let mut reached: BTreeMap<String, Reached> = BTreeMap::new();
    let mut order: Vec<String> = Vec::new();
    for (_, logged) in run.events()? {
        let event = logged.event;
        match &event {
            Event::RunStarted { pipeline, stages, .. } => {
                writeln!(out, "run {} of {pipeline}, started {}", run.id, logged.at)?;
                order = stages.clone();
            }
            Event::RunFailed { .. } => {
                writeln!(out, "{}", sentence(&event))?;
                take(&mut reached, &event);
            }
            Event::RunFinished { .. } => ended = Some(sentence(&event)),
            event => take(&mut reached, event),
        }
    }
    // The run tells of failures at its end.
    for (stage, at) in &reached {
        for StageFailure { partition, message } in &at.failures {
            let failed = Event::RunFailed {
                stage: Some(stage.clone()),
                partition: partition.clone(),
                row: None,
                message: message.clone(),
            };
            writeln!(out, "{}", sentence(&failed))?;
        }
    }
    match (&ended, &holder) {
        (Some(ended), _) => writeln!(out, "{ended}")?,
        (None, Some(holder)) => writeln!(out, "going on: {holder}")?,
        (None, None) => writeln!(
            out,
            "it was cut short; what was committed stays, and `flow run` goes on from there"
        )?,
    }
    if let (Some(_), Some(holder)) = (&ended, &holder) {
        writeln!(out, "another run holds the state directory: {holder}")?;
    }
    let mut rows = vec![
        ["stage", "done", "of", "reused", "rows out", "rejects", "state"]
            .map(String::from)
            .to_vec(),
    ];
    for stage in &order {
        let Some(at) = reached.get(stage) else {
            rows.push(
                [stage, "-", "-", "-", "-", "-", "not reached"]
                    .map(str::to_string)
                    .to_vec(),
            );
            continue;
        };
        let state = match (at.outcome, &ended) {
            (Some(outcome), _) => outcome.as_str(),
            (None, None) => "in work",
            (None, Some(_)) => "not finished",
        };
        let numbers = [at.done, at.run, at.reused, at.rows_out, at.rejects].map(table::count);
        rows.push(
            [stage.clone()]
                .into_iter()
                .chain(numbers)
                .chain([state.to_string()])
                .collect(),
        );
    }
    for line in table::lines(&rows) {
        writeln!(out, "{line}")?;
    }
    Ok(Exit::Done)
}

/// Notes what an event says of a stage.
fn take(reached: &mut BTreeMap<String, Reached>, event: &Event) {
    match event {
        Event::StageStarted { stage, run, reused, .. } => {
            let at = of_stage(reached, stage);
            at.run += run;
            at.reused += reused;
        }
        Event::Committed {
            stage,
            partitions,
            rows_out,
            rejects,
            ..
        } => {
            let at = of_stage(reached, stage);
            at.done += partitions;
            at.rows_out += rows_out;
            at.rejects += rejects;
        }
        // A stage with a log of its own commits no partitions; its figures say where it is.
        Event::StageFigures { stage, figures } => {
            if let Some((step, _)) = figures::steps(figures) {
                let at = of_stage(reached, stage);
                at.done = step.saturating_sub(at.reused).min(at.run);
            }
        }
        Event::StageFinished {
            stage,
            rows_out,
            rejects,
            outcome,
            failures,
            ..
        } => {
            let at = of_stage(reached, stage);
            if *outcome == StageOutcome::Done {
                // Exports, and the decisions of global stages, are told by their end alone.
                at.done = at.done.max(at.run);
            }
            // From here on with the partitions that were reused.
            at.rows_out = *rows_out;
            at.rejects = rejects.iter().map(|ReasonCount { rows, .. }| rows).sum();
            at.outcome = Some(*outcome);
            at.failures.clone_from(failures);
        }
        Event::RunFailed {
            stage: Some(stage),
            partition,
            message,
            ..
        } => {
            let at = of_stage(reached, stage);
            at.outcome = Some(StageOutcome::Failed);
            at.failures
                .retain(|failure| failure.partition != *partition || failure.message != *message);
        }
        _ => {}
    }
}

/// The parts of a global stage (`dedup:keys`) count for the stage.
fn of_stage<'a>(reached: &'a mut BTreeMap<String, Reached>, stage: &str) -> &'a mut Reached {
    let name = stage.split(':').next().unwrap_or(stage);
    reached.entry(name.to_string()).or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_committed_by_partitions_is_counted_too() {
        let mut reached = BTreeMap::new();
        let started = |stage: &str, run, reused| Event::StageStarted {
            stage: stage.into(),
            kind: "a.kind".into(),
            run,
            reused,
        };
        let finished = |stage: &str| Event::StageFinished {
            stage: stage.into(),
            rows_in: 0,
            rows_out: 1,
            rejects: Vec::new(),
            outcome: StageOutcome::Done,
            failures: Vec::new(),
        };
        let stepped = |step: u64| Event::StageFigures {
            stage: "train".into(),
            figures: serde_json::json!({"step": step, "max_steps": 40}),
        };
        let done = |reached: &BTreeMap<String, Reached>, stage: &str| {
            let at = &reached[stage];
            (at.done, at.run, at.outcome == Some(StageOutcome::Done))
        };
        // Of 40 steps ten were done by a run before.
        take(&mut reached, &started("train", 30, 10));
        assert_eq!(done(&reached, "train"), (0, 30, false));
        take(&mut reached, &stepped(22));
        assert_eq!(done(&reached, "train"), (12, 30, false));
        take(&mut reached, &stepped(40));
        take(&mut reached, &finished("train"));
        assert_eq!(done(&reached, "train"), (30, 30, true));
        // An export tells of its end alone.
        take(&mut reached, &started("write", 1, 0));
        assert_eq!(done(&reached, "write"), (0, 1, false));
        take(&mut reached, &finished("write"));
        assert_eq!(done(&reached, "write"), (1, 1, true));
    }
}
