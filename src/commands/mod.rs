//! One file per command.

pub mod check;
pub mod doctor;
pub mod gc;
pub mod graph;
pub mod kinds;
pub mod lineage;
pub mod log;
pub mod memory;
pub mod model;
pub mod past_run;
pub mod plan;
pub mod rejects;
pub mod run;
pub mod shell;
pub mod status;

mod kind_page;
mod pipeline_schema;

use std::sync::Arc;

use flow_runtime::plan::Options;
use flow_runtime::registry::Registry;
use flow_runtime::spec::{self, Checked, Overrides};

use crate::arguments::{PipelineArguments, SelectionArguments};
use crate::failure::Failure;

/// Reads and checks the pipeline that the arguments name.
fn checked(arguments: &PipelineArguments, registry: &Registry) -> Result<Arc<Checked>, Failure> {
    let overrides = Overrides {
        configs: arguments.config.clone(),
        set: arguments.set.clone(),
        ..Overrides::default()
    };
    let pipeline = spec::load(&arguments.pipeline, &overrides)?;
    Ok(Arc::new(spec::check(pipeline, registry)?))
}

fn options(arguments: &SelectionArguments) -> Options {
    Options {
        workers: arguments.workers.map(usize::from),
        from: arguments.from.clone(),
        until: arguments.until.clone(),
        only: arguments.only.clone(),
        force: arguments.force.clone(),
        ..Options::new(&arguments.state.state)
    }
}
