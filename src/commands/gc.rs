//! `flow gc`: garbage collection of the state directory.

use std::io::Write;
use std::path::Path;

use flow_inspect::table::{count, plural};
use flow_storage::Storage;
use flow_store::{Access, Store};

use crate::arguments::GcArguments;
use flow_cli::failure::{Exit, Failure};

pub fn gc(storage: &Storage, arguments: &GcArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let state = &arguments.state.state;
    if !Store::is_there(storage, state)? {
        return Err(Failure::usage(
            format!("{} is not a state directory of flow", state.display()),
            "name it with --state",
        ));
    }
    writeln!(out, "{}", collected(storage, state, arguments.keep, arguments.dry_run)?)?;
    Ok(Exit::Done)
}

/// Removes what none of the last `keep` runs of each pipeline had, and says what that was. With `dry` nothing is removed.
pub(super) fn collected(storage: &Storage, state: &Path, keep: u32, dry: bool) -> Result<String, Failure> {
    let store = Store::open(storage, state, Access::Run { run_id: "gc".into() })?;
    let collected = store.collect_garbage(keep as usize, dry)?;
    let passed_over = match collected.damaged {
        0 => String::new(),
        damaged => format!("; {} of runs that are damaged count as absent", plural(damaged, "file")),
    };
    Ok(format!(
        "{} {}, {} of others ({} MiB) and {} of runs; kept {}{passed_over}",
        if dry { "would remove" } else { "removed" },
        plural(collected.artifacts, "artifact"),
        plural(collected.partitions, "partition"),
        count(collected.bytes >> 20),
        plural(collected.runs, "folder"),
        plural(collected.kept, "artifact"),
    ))
}
