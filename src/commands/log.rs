//! `flow log`: the events of a run.

use std::io::Write;

use flow_inspect::sentence::sentence;
use flow_storage::Storage;

use super::past_run;
use crate::arguments::LogArguments;
use flow_cli::failure::{Exit, Failure};

pub fn log(storage: &Storage, arguments: &LogArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    for (line, logged) in past_run::find(storage, &arguments.look)?.events()? {
        if arguments.json {
            writeln!(out, "{line}")?;
        } else {
            writeln!(out, "{} {}", logged.at, sentence(&logged.event))?;
        }
    }
    Ok(Exit::Done)
}
