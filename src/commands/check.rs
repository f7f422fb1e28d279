//! `flow check`: is the pipeline right?

use std::io::Write;

use flow_runtime::plan::Options;
use flow_runtime::registry::Registry;

use super::checked;
use crate::arguments::CheckArguments;
use crate::failure::{Exit, Failure};
use crate::table::plural;

pub fn check(arguments: &CheckArguments, registry: &Registry, out: &mut dyn Write) -> Result<Exit, Failure> {
    let checked = checked(&arguments.pipeline, registry)?;
    let stages = plural(checked.stages.len() as u64, "stage");
    if arguments.deep {
        // Making the plan lists every source and reads what the stages keep of their own.
        let options = Options::new(&arguments.state.state);
        flow_runtime::run::plan(&checked, &options).map_err(|error| Failure::run(error, &checked))?;
        writeln!(
            out,
            "{}: {stages}, nothing wrong; the files are there",
            arguments.pipeline.pipeline.display()
        )?;
    } else {
        writeln!(
            out,
            "{}: {stages}, nothing wrong",
            arguments.pipeline.pipeline.display()
        )?;
    }
    Ok(Exit::Done)
}
