//! The run that the arguments of a command name.

use std::io::{self, Write};

use flow_inspect::past_run::{PastRun, RunFilter};
use flow_spec::Overrides;
use flow_spec::yaml::{self, Value};
use flow_storage::Storage;
use flow_store::{Access, Store};

use super::pipeline_file;
use crate::arguments::{LookArguments, StateArguments};
use crate::usual_names::USUAL_NAMES;
use flow_cli::failure::Failure;

/// A state directory, to be read.
///
/// # Errors
/// If there is none, or it cannot be read.
pub fn opened_store(storage: &Storage, arguments: &StateArguments) -> Result<Store, Failure> {
    let dir = &arguments.state;
    if !Store::is_there(storage, dir)? {
        return Err(Failure::usage(
            format!("{} is not a state directory of flow", dir.display()),
            "name it with --state, or make one with `flow run`",
        ));
    }
    Ok(Store::open(storage, dir, Access::Read)?)
}

/// The run that the arguments name.
pub fn find(storage: &Storage, arguments: &LookArguments) -> Result<PastRun, Failure> {
    find_run(storage, arguments, false)
}

/// The same; the latest is that of those that came as far as a plan.
pub fn find_planned(storage: &Storage, arguments: &LookArguments) -> Result<PastRun, Failure> {
    find_run(storage, arguments, true)
}

fn find_run(storage: &Storage, arguments: &LookArguments, is_planned: bool) -> Result<PastRun, Failure> {
    let store = opened_store(storage, &arguments.state)?;
    let filter = RunFilter {
        is_planned,
        ..filter(arguments)?
    };
    Ok(match arguments.run.as_str() {
        "latest" => PastRun::latest(&store, &filter)?,
        name => PastRun::called(&store, name)?,
    })
}

/// The pipeline and the values of parameters that the arguments name.
fn filter(arguments: &LookArguments) -> Result<RunFilter, Failure> {
    let mut filter = RunFilter::default();
    let Some(path) = &arguments.pipeline else {
        return Ok(filter);
    };
    filter.pipeline = Some(
        path.file_stem()
            .unwrap_or(path.as_os_str())
            .to_string_lossy()
            .into_owned(),
    );
    if !arguments.set.is_empty() || !arguments.config.is_empty() {
        let overrides = Overrides {
            configs: arguments.config.clone(),
            set: arguments.set.clone(),
            usual_names: USUAL_NAMES,
            ..Overrides::default()
        };
        let params = flow_spec::load_params(&pipeline_file(path)?, &overrides)?;
        let values = params.into_iter().map(|param| (Value::from(param.name), param.value));
        // Written and read as that of a run was.
        let text = yaml::to_text(&Value::Mapping(values.collect()));
        match yaml::parse_text(&text) {
            Ok(Value::Mapping(values)) => filter.values = Some(values),
            _ => return Err(Failure::Bug("values of parameters cannot be written".into())),
        }
    }
    Ok(filter)
}

/// Prints on standard error which run it is; the command's output follows on standard output.
pub fn announce(run: &PastRun) {
    // Ignores a closed standard error.
    let _ = writeln!(io::stderr(), "{}", run.described());
}
