//! `flow run`: runs a pipeline.

use std::io::Write;

use flow_runtime::event::Events;
use flow_runtime::registry::Registry;

use super::{checked, options};
use crate::arguments::RunArguments;
use crate::failure::{Exit, Failure};
use crate::report::Report;
use crate::screen::{self, Screen};

pub fn run(arguments: &RunArguments, registry: &Registry, out: &mut dyn Write) -> Result<Exit, Failure> {
    let checked = checked(&arguments.pipeline, registry)?;
    let events = Events::default();
    if let Some(path) = &arguments.events {
        let file = std::fs::File::create(path).map_err(|error| {
            Failure::usage(
                format!("cannot write events to {}: {error}", path.display()),
                "give --events a file in a folder that can be written",
            )
        })?;
        screen::json_lines(file, &events);
    }
    let screen = Screen::show(arguments.progress, &events);
    let report = Report::listen(&events);
    let mut options = options(&arguments.selection);
    options.signals = true;
    let outcome = flow_runtime::run::run(&checked, &options, &events);
    let results = screen.close();
    let written = report.write(&options.state);
    for table in &results.tables {
        writeln!(out, "{table}")?;
    }
    if let Ok(Some(path)) = &written {
        writeln!(out, "report: {}", path.display())?;
    }
    out.flush()?;
    let summary = outcome.map_err(|error| Failure::run(error, &checked))?;
    written?;
    Ok(if summary.past_reject_limit.is_empty() {
        Exit::Done
    } else {
        Exit::Noted
    })
}
