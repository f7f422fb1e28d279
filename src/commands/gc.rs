//! `flow gc`: garbage collection of the state directory.

use std::io::Write;

use flow_runtime::store::{Access, Store};

use crate::arguments::GcArguments;
use crate::failure::{Exit, Failure};
use crate::table::{count, plural};

pub fn gc(arguments: &GcArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let state = &arguments.state.state;
    if !Store::is_there(state)? {
        return Err(Failure::usage(
            format!("{} is no state directory of flow", state.display()),
            "name it with --state",
        ));
    }
    let store = Store::open(state, Access::Run { run_id: "gc".into() })?;
    let collected = store.collect_garbage(arguments.keep as usize, arguments.dry_run)?;
    writeln!(
        out,
        "{} {}, {} of others ({} MiB) and {} of runs; {} stay",
        if arguments.dry_run { "would remove" } else { "removed" },
        plural(collected.artifacts, "artifact"),
        plural(collected.partitions, "partition"),
        count(collected.bytes >> 20),
        plural(collected.runs, "folder"),
        plural(collected.kept, "artifact"),
    )?;
    Ok(Exit::Done)
}
