//! One file per command.

pub mod align;
mod boosted;
pub mod check;
pub mod compare;
mod coverage;
pub mod diarize;
pub mod evaluate;
pub mod fmt;
pub mod gc;
pub mod graph;
#[cfg(feature = "service")]
pub mod jobs;
pub mod kinds;
pub mod lineage;
pub mod lm;
pub mod log;
pub mod model;
pub mod new;
pub mod past_run;
pub mod plan;
pub mod push;
pub mod rejects;
pub mod run;
#[cfg(feature = "service")]
pub mod serve;
pub mod shell;
pub mod status;
pub mod test;
pub mod transcribe;
mod transcribe_stream;
#[cfg(feature = "service")]
pub mod ui;
pub mod watch;

mod fetch;
mod kind_page;
mod pipeline_schema;
mod record;
mod recordings;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use flow_kind::registry::Registry;
use flow_plan::select::Selection;
use flow_runtime::Options;
use flow_spec::{Checked, Overrides};
use flow_storage::Storage;

use crate::arguments::{PipelineArguments, SelectionArguments};
use crate::bundle;
use crate::usual_names::USUAL_NAMES;
use flow_cli::failure::Failure;

/// Reads and checks the pipeline that the arguments name.
pub fn checked(arguments: &PipelineArguments, registry: &Registry) -> Result<Arc<Checked>, Failure> {
    let pipeline = flow_spec::load(&pipeline_file(&arguments.pipeline)?, &overrides(arguments), registry)?;
    Ok(Arc::new(flow_spec::check(pipeline, registry)?))
}

/// The inputs from arguments, besides the pipeline's file.
fn overrides(arguments: &PipelineArguments) -> Overrides {
    Overrides {
        configs: arguments.config.clone(),
        set: arguments.set.clone(),
        usual_names: USUAL_NAMES,
        ..Overrides::default()
    }
}

/// The file of a pipeline that is named on the command line: a path, or the name of one that the program carries.
fn pipeline_file(named: &Path) -> Result<PathBuf, Failure> {
    if named.exists() {
        return Ok(named.to_path_buf());
    }
    let name = named.to_str().filter(|name| !name.contains('/'));
    let Some(name) = name else {
        // For example the repository's path of a pipeline, outside a repository.
        let stem = named.file_stem().unwrap_or_default();
        return match bundle::pipelines().into_iter().find(|carried| stem == carried.as_str()) {
            Some(carried) => Err(Failure::usage(
                format!("there is no file `{}`", named.display()),
                format!("flow carries a pipeline of that name, which is called without a path: `flow run {carried}`"),
            )),
            None => Ok(named.to_path_buf()),
        };
    };
    // A file of the user takes precedence.
    let own = PathBuf::from(format!("{name}.yaml"));
    if own.exists() {
        return Ok(own);
    }
    let carried = bundle::pipeline(name).map_err(|error| {
        Failure::unreadable(format!(
            "the files that flow carries cannot be written (set XDG_CACHE_HOME to a folder for them): {error}"
        ))
    })?;
    carried.ok_or_else(|| {
        Failure::usage(
            format!("there is no file `{name}`"),
            format!("pipelines that flow carries: {}", bundle::pipelines().join(", ")),
        )
    })
}

fn options(storage: &Storage, arguments: &SelectionArguments) -> Options {
    Options {
        workers: arguments.workers.map(usize::from),
        selection: Selection {
            from: arguments.from.clone(),
            until: arguments.until.clone(),
            only: arguments.only.clone(),
            force: arguments.force.clone(),
            partitions: arguments.partition.clone(),
        },
        ..Options::new(storage, &arguments.state.state)
    }
}
