//! `flow status`: who runs, and how far the last run came.

use std::collections::BTreeMap;
use std::io::Write;

use flow_runtime::event::{Event, ReasonCount};
use flow_runtime::store::Store;

use super::past_run::PastRun;
use crate::arguments::LookArguments;
use crate::failure::{Exit, Failure};
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
    finished: bool,
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
            Event::StageStarted { stage, run, reused, .. } => {
                let at = of_stage(&mut reached, stage);
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
                let at = of_stage(&mut reached, stage);
                at.done += partitions;
                at.rows_out += rows_out;
                at.rejects += rejects;
            }
            Event::StageFinished {
                stage,
                rows_out,
                rejects,
                ..
            } => {
                let at = of_stage(&mut reached, stage);
                // From here on with the partitions that were reused.
                at.rows_out = *rows_out;
                at.rejects = rejects.iter().map(|ReasonCount { rows, .. }| rows).sum();
                at.finished = true;
            }
            Event::RunFailed { .. } => writeln!(out, "{}", sentence(&event))?,
            Event::RunFinished { .. } => ended = Some(sentence(&event)),
            _ => {}
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
        let state = if at.finished { "done" } else { "in work" };
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

/// The parts of a global stage (`dedup:keys`) count for the stage.
fn of_stage<'a>(reached: &'a mut BTreeMap<String, Reached>, stage: &str) -> &'a mut Reached {
    let name = stage.split(':').next().unwrap_or(stage);
    reached.entry(name.to_string()).or_default()
}
