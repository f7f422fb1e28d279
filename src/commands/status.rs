//! `flow status`: the running process, and the progress of the last run.

use std::io::Write;

use flow_base::escape::escape_line;
use flow_base::event::{Event, StageFailure};
use flow_inspect::progress::{RunProgress, stage_of};
use flow_inspect::sentence::sentence;
use flow_inspect::table;
use flow_storage::Storage;
use flow_store::Store;

use super::past_run;
use crate::arguments::LookArguments;
use flow_cli::failure::{Exit, Failure};

pub fn status(storage: &Storage, arguments: &LookArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let run = past_run::find(storage, arguments)?;
    let holder = Store::holder(storage, &arguments.state.state);
    let mut ended = None;
    let mut progress = RunProgress::default();
    // Stages and failures in the event of the run's end.
    let mut told: Vec<(String, StageFailure)> = Vec::new();
    let mut order: Vec<String> = Vec::new();
    for (_, logged) in run.events()? {
        let event = logged.event;
        match &event {
            Event::RunStarted {
                pipeline,
                stages,
                name,
                note,
                ..
            } => {
                let name = name
                    .as_ref()
                    .map_or(String::new(), |name| format!(" ({})", escape_line(name)));
                writeln!(out, "run {}{name} of {pipeline}, started {}", run.id, logged.at)?;
                if let Some(note) = note {
                    writeln!(out, "note: {}", escape_line(note))?;
                }
                order = stages.clone();
            }
            Event::RunFailed {
                stage,
                partition,
                message,
                ..
            } => {
                writeln!(out, "{}", sentence(&event))?;
                let failure = StageFailure {
                    partition: partition.clone(),
                    message: message.clone(),
                };
                told.extend(stage.as_ref().map(|stage| (stage_of(stage).to_string(), failure)));
            }
            Event::RunFinished { .. } => ended = Some(sentence(&event)),
            _ => {}
        }
        progress.take(&event);
    }
    // Failures that are only in the events of their stages: the run was interrupted, or is going on.
    for stage in &progress.stages {
        for failure in &stage.failures {
            if told.iter().any(|(of, told)| *of == stage.name && told == failure) {
                continue;
            }
            let failed = Event::RunFailed {
                stage: Some(stage.name.clone()),
                partition: failure.partition.clone(),
                row: None,
                message: failure.message.clone(),
            };
            writeln!(out, "{}", sentence(&failed))?;
        }
    }
    match (&ended, &holder) {
        (Some(ended), _) => writeln!(out, "{ended}")?,
        (None, Some(holder)) => writeln!(out, "going on: {holder}")?,
        (None, None) => writeln!(
            out,
            "it was cut short; what was committed stays, and `flow run` continues from there"
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
        let Some(at) = progress.stages.iter().find(|at| at.name == *stage) else {
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
        let numbers = [at.done(), at.to_run(), at.reused(), at.rows_out, at.rejected].map(table::count);
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
