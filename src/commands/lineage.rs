//! `flow lineage`: the path of a segment, stage by stage.

use std::io::Write;

use flow_base::escape::escape_line;
use flow_inspect::lineage::steps;
use flow_storage::Storage;

use super::past_run;
use crate::arguments::LineageArguments;
use flow_cli::failure::{Exit, Failure};

pub fn lineage(storage: &Storage, arguments: &LineageArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let arguments = arguments.clone().in_order();
    let run = past_run::find_planned(storage, &arguments.look)?;
    past_run::announce(&run);
    for step in steps(storage, &run, &arguments.segment)? {
        writeln!(out, "{}", step.text())?;
        for (name, value) in &step.values {
            writeln!(out, "    {}: {}", escape_line(name), escape_line(value))?;
        }
    }
    Ok(Exit::Done)
}
