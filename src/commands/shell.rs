//! `flow completions` and `flow man`: completion scripts and manual pages, generated from the command line's
//! definition.

use std::io::Write;

use clap::{Command, CommandFactory};

use crate::arguments::{Arguments, CompletionsArguments, ManArguments};
use flow_cli::failure::{Exit, Failure};

/// The name of the program.
const NAME: &str = "flow";

/// The command line for manual pages: without `flow help`, which is the same as `flow --help`.
fn described() -> Command {
    Arguments::command().disable_help_subcommand(true)
}

pub fn completions(arguments: &CompletionsArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    // Written to memory first: where standard output cannot take it (`| head`), clap's generators panic.
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Arguments::command(), NAME, &mut script);
    out.write_all(&script)?;
    Ok(Exit::Done)
}

pub fn man(arguments: &ManArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let Some(folder) = &arguments.out else {
        let mut page = Vec::new();
        clap_mangen::Man::new(described()).render(&mut page)?;
        out.write_all(&page)?;
        return Ok(Exit::Done);
    };
    let unwritable =
        |error: std::io::Error| Failure::unreadable(format!("cannot write to {}: {error}", folder.display()));
    std::fs::create_dir_all(folder).map_err(unwritable)?;
    clap_mangen::generate_to(described(), folder).map_err(unwritable)?;
    Ok(Exit::Done)
}
