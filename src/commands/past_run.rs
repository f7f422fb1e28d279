//! A finished or running run, as recorded in the state directory.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::path::PathBuf;
use std::sync::Arc;

use flow_base::escape::escape_line;
use flow_base::event::{EVENT_VERSION, Event};
use flow_plan::{PLAN_VERSION, Plan};
use flow_spec::Overrides;
use flow_spec::yaml::{self, Mapping, Value};
use flow_store::{Access, Record, RunSnapshots, StageSnapshot, Store};

use super::pipeline_file;
use crate::arguments::{LookArguments, StateArguments};
use crate::failure::Failure;
use crate::table::plural;
use crate::usual_names::USUAL_NAMES;

/// A state directory, to be read.
///
/// # Errors
/// If there is none, or it cannot be read.
pub fn opened_store(arguments: &StateArguments) -> Result<Store, Failure> {
    let dir = &arguments.state;
    if !Store::is_there(dir)? {
        return Err(Failure::usage(
            format!("{} is no state directory of flow", dir.display()),
            "name it with --state, or make one with `flow run`",
        ));
    }
    Ok(Store::open(dir, Access::Read)?)
}

pub struct PastRun {
    pub id: String,
    pub folder: PathBuf,
    pub store: Store,
}

/// The runs to search.
struct Wanted {
    /// The pipeline's name.
    pipeline: String,
    /// The value of every parameter, where some are given as to `flow run`; none: whatever they were.
    values: Option<Mapping>,
}

impl Wanted {
    /// None: any run will do.
    fn new(arguments: &LookArguments) -> Result<Option<Wanted>, Failure> {
        let Some(path) = &arguments.pipeline else {
            return Ok(None);
        };
        let mut wanted = Wanted {
            pipeline: path
                .file_stem()
                .unwrap_or(path.as_os_str())
                .to_string_lossy()
                .into_owned(),
            values: None,
        };
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
                Ok(Value::Mapping(values)) => wanted.values = Some(values),
                _ => return Err(Failure::Bug("values of parameters cannot be written".into())),
            }
        }
        Ok(Some(wanted))
    }
}

/// Where the values of a run differ from those that are wanted: `limit=5 (not 7)`.
fn differences(had: &Mapping, wanted: &Mapping) -> String {
    // Limited to keep the line readable.
    const SHOWN: usize = 3;
    let shown = |value: Option<&Value>| match value {
        Some(value) => serde_json::to_string(value).unwrap_or_default(),
        None => "no value".into(),
    };
    let names = wanted
        .keys()
        .chain(had.keys().filter(|name| !wanted.contains_key(name)));
    let all: Vec<String> = names
        .filter(|name| had.get(name) != wanted.get(name))
        .map(|name| {
            let (had, wanted) = (shown(had.get(name)), shown(wanted.get(name)));
            format!("{}={had} (not {wanted})", name.as_str().unwrap_or_default())
        })
        .collect();
    let mut text = all.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if all.len() > SHOWN {
        text.push_str(&format!(" and {}", plural((all.len() - SHOWN) as u64, "other value")));
    }
    text
}

/// One line of a run's events.
pub struct LoggedEvent {
    /// When, as it was written.
    pub at: String,
    pub event: Event,
}

impl PastRun {
    /// The run that the arguments name.
    pub fn find(arguments: &LookArguments) -> Result<PastRun, Failure> {
        PastRun::find_run(arguments, false)
    }

    /// The same; the latest is that of those that came as far as a plan.
    pub fn find_planned(arguments: &LookArguments) -> Result<PastRun, Failure> {
        PastRun::find_run(arguments, true)
    }

    /// The run of this id, or else the latest of this name.
    pub fn called(store: &Store, name: &str) -> Result<PastRun, Failure> {
        let runs = store.runs()?;
        let with_id = |id: &String| {
            let folder = store.run_folder(id)?;
            Ok::<_, Failure>(PastRun {
                folder,
                id: id.clone(),
                store: store.clone(),
            })
        };
        if let Some(id) = runs.iter().find(|id| *id == name) {
            return with_id(id);
        }
        for id in runs.iter().rev() {
            let run = with_id(id)?;
            if matches!(run.started(), Some(Event::RunStarted { name: Some(given), .. }) if given == name) {
                return Ok(run);
            }
        }
        let help = runs.last().map_or_else(
            || "there are no runs yet".to_string(),
            |last| format!("the latest is {last}"),
        );
        Err(Failure::usage(
            format!("there is no run `{name}` in {}", store.name()),
            help,
        ))
    }

    fn find_run(arguments: &LookArguments, planned: bool) -> Result<PastRun, Failure> {
        let dir = &arguments.state.state;
        let store = opened_store(&arguments.state)?;
        let wanted = Wanted::new(arguments)?;
        if arguments.run != "latest" {
            return PastRun::called(&store, &arguments.run);
        }
        let runs = store.runs()?;
        let mut latest = None;
        for id in runs.iter().rev() {
            if planned && !store.run_folder(id)?.join("plan.json").is_file() {
                continue;
            }
            let run = PastRun {
                folder: store.run_folder(id)?,
                id: id.clone(),
                store: store.clone(),
            };
            let Some(wanted) = &wanted else { return Ok(run) };
            if run.pipeline().as_ref() != Some(&wanted.pipeline) {
                continue;
            }
            let Some(values) = &wanted.values else { return Ok(run) };
            // A run that ended before its plan left none.
            let Some(had) = run.values()? else { continue };
            if had == *values {
                return Ok(run);
            }
            if latest.is_none() {
                latest = Some((run.id, differences(&had, values)));
            }
        }
        let of = wanted.map_or(String::new(), |wanted| format!(" of `{}`", wanted.pipeline));
        Err(match latest {
            Some((id, differences)) => Failure::usage(
                format!(
                    "there is no run{of} with these values of its parameters in {}",
                    dir.display()
                ),
                format!("the latest, {id}, had {differences}"),
            ),
            None => Failure::usage(
                format!("there is no run{of} in {}", dir.display()),
                "make one with `flow run`",
            ),
        })
    }

    /// Prints on standard error which run it is; the command's output follows on standard output.
    pub fn announce(&self) {
        // Ignores a closed standard error.
        let _ = writeln!(io::stderr(), "{}", self.described());
    }

    /// The run's id, pipeline, time and state directory, on one line.
    pub fn described(&self) -> String {
        let pipeline = self.pipeline().unwrap_or_else(|| "a pipeline without a name".into());
        let started = self
            .first_line()
            .and_then(|line| serde_json::from_str::<serde_json::Value>(&line).ok())
            .and_then(|line| Some(format!(", started {}", line.get("at")?.as_str()?)))
            .unwrap_or_default();
        let called = match self.started() {
            Some(Event::RunStarted { name: Some(name), .. }) => format!(" ({name})"),
            _ => String::new(),
        };
        let text = format!(
            "run {}{called} of {pipeline}{started}, state {}",
            self.id,
            self.store.name()
        );
        escape_line(&text).into_owned()
    }

    fn first_line(&self) -> Option<String> {
        let mut line = String::new();
        let mut reader = BufReader::new(File::open(self.folder.join("events.jsonl")).ok()?);
        reader.read_line(&mut line).ok()?;
        Some(line)
    }

    /// The name of the run's pipeline, from its first event.
    fn pipeline(&self) -> Option<String> {
        match self.started()? {
            Event::RunStarted { pipeline, .. } => Some(pipeline),
            _ => None,
        }
    }

    /// The run's first event.
    pub fn started(&self) -> Option<Event> {
        serde_json::from_str(&self.first_line()?).ok()
    }

    /// The settings of its stages of a kind, as they were in the run.
    pub fn settings_of(&self, kind: &str) -> Result<Vec<Value>, Failure> {
        let spec = self.spec()?.unwrap_or_default();
        let stages = spec.get("stages").and_then(Value::as_mapping);
        let of_kind = stages.into_iter().flat_map(Mapping::values).filter(|stage| {
            let uses = stage.get("uses").and_then(Value::as_str);
            uses == Some(kind)
        });
        Ok(of_kind.filter_map(|stage| stage.get("with").cloned()).collect())
    }

    /// The values of the pipeline's parameters in the run; none if it left none.
    fn values(&self) -> Result<Option<Mapping>, Failure> {
        let Some(spec) = self.spec()? else { return Ok(None) };
        match spec.get("params") {
            Some(Value::Mapping(values)) => Ok(Some(values.clone())),
            _ => {
                let path = self.folder.join("spec.yaml");
                Err(Failure::unreadable(format!(
                    "{} is damaged: it names no parameters",
                    path.display()
                )))
            }
        }
    }

    /// The pipeline as the run had it, with values in place of parameters; none if it left none.
    fn spec(&self) -> Result<Option<Value>, Failure> {
        let path = self.folder.join("spec.yaml");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(Failure::unreadable(format!("cannot read {}: {error}", path.display())));
            }
        };
        match yaml::parse_text(&text) {
            Ok(spec) => Ok(Some(spec)),
            Err(error) => Err(Failure::unreadable(format!(
                "{} is damaged: {}",
                path.display(),
                error.message
            ))),
        }
    }

    /// The plan that was frozen when the run started.
    pub fn plan(&self) -> Result<Plan, Failure> {
        let path = self.folder.join("plan.json");
        let text = std::fs::read_to_string(&path)
            .map_err(|error| Failure::unreadable(format!("cannot read {}: {error}", path.display())))?;
        let plan: Plan = serde_json::from_str(&text)
            .map_err(|error| Failure::unreadable(format!("{} is damaged: {error}", path.display())))?;
        if plan.version > PLAN_VERSION {
            return Err(Failure::unreadable(format!(
                "{} is of version {}, and this binary reads up to {PLAN_VERSION}",
                path.display(),
                plan.version
            )));
        }
        Ok(plan)
    }

    /// The snapshots of the run's stages.
    pub fn snapshots(&self) -> Result<RunSnapshots, Failure> {
        self.store.run_snapshots(&self.id)?.ok_or_else(|| {
            Failure::unreadable(format!(
                "run {} did not note what its stages had: an earlier version of flow made it",
                self.id
            ))
        })
    }

    /// The records of a stage in the run.
    pub fn records_of(&self, snapshot: &StageSnapshot) -> Result<Vec<Arc<Record>>, Failure> {
        let standing = snapshot.among(&self.store.records(&snapshot.recipe)?);
        match snapshot.keys.len() - standing.len() {
            0 => Ok(standing),
            lost => Err(Failure::unreadable(format!(
                "{} of stage `{}` that run {} had are no longer there: `flow gc` removed them, or their files are lost",
                plural(lost as u64, "partition"),
                snapshot.stage,
                self.id
            ))),
        }
    }

    /// All events so far, with their lines as they were written.
    pub fn events(&self) -> Result<Vec<(String, LoggedEvent)>, Failure> {
        let path = self.folder.join("events.jsonl");
        let text = std::fs::read_to_string(&path)
            .map_err(|error| Failure::unreadable(format!("cannot read {}: {error}", path.display())))?;
        let mut events = Vec::new();
        // A line without its end is being written now, or was when the run was killed.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        for (number, line) in whole.lines().enumerate() {
            let damaged = |error: serde_json::Error| {
                Failure::unreadable(format!("{}, line {} is damaged: {error}", path.display(), number + 1))
            };
            let mut value: serde_json::Value = serde_json::from_str(line).map_err(damaged)?;
            let at = value
                .as_object_mut()
                .and_then(|object| object.remove("at"))
                .and_then(|at| at.as_str().map(str::to_string));
            let event: Event = serde_json::from_value(value).map_err(damaged)?;
            if let Event::RunStarted { version, .. } = &event
                && *version > EVENT_VERSION
            {
                return Err(Failure::unreadable(format!(
                    "{} holds events of version {version}, and this binary reads up to {EVENT_VERSION}",
                    path.display()
                )));
            }
            events.push((
                line.to_string(),
                LoggedEvent {
                    at: at.unwrap_or_default(),
                    event,
                },
            ));
        }
        Ok(events)
    }
}
