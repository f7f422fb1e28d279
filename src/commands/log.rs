//! `flow log`: the events of a run.

use std::io::Write;

use super::past_run::PastRun;
use crate::arguments::LogArguments;
use crate::failure::{Exit, Failure};
use crate::screen::sentence::sentence;

pub fn log(arguments: &LogArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    for (line, logged) in PastRun::find(&arguments.look)?.events()? {
        if arguments.json {
            writeln!(out, "{line}")?;
        } else {
            writeln!(out, "{} {}", logged.at, sentence(&logged.event))?;
        }
    }
    Ok(Exit::Done)
}
