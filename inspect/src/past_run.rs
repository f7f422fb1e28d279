//! A finished or running run, as recorded in the state directory.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;

use flow_base::escape::escape_line;
use flow_base::event::{EVENT_VERSION, Event};
use flow_plan::{PLAN_VERSION, Plan};
use flow_spec::yaml::{self, Mapping, Value};
use flow_store::{Record, RunSnapshots, StageSnapshot, Store};

use crate::InspectError;
use crate::table::plural;

/// A run in a state directory.
pub struct PastRun {
    pub id: String,
    pub folder: PathBuf,
    pub store: Store,
}

/// What a run has to be.
#[derive(Clone, Debug, Default)]
pub struct RunFilter {
    /// The pipeline's name; none: any.
    pub pipeline: Option<String>,
    /// The value of every parameter, as a frozen pipeline has them; none: whatever they were.
    pub values: Option<Mapping>,
    /// It came as far as a plan.
    pub is_planned: bool,
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
    /// The run of this id, or else the latest of this name.
    pub fn called(store: &Store, name: &str) -> Result<PastRun, InspectError> {
        let runs = store.runs()?;
        let with_id = |id: &String| {
            let folder = store.run_folder(id)?;
            Ok::<_, InspectError>(PastRun {
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
        Err(InspectError::not_found(
            format!("there is no run `{name}` in {}", store.name()),
            help,
        ))
    }

    /// The latest run that the filter lets through.
    ///
    /// # Errors
    /// If there is none, with how the latest of its pipeline differs; or where the state directory cannot be read.
    pub fn latest(store: &Store, filter: &RunFilter) -> Result<PastRun, InspectError> {
        let runs = store.runs()?;
        let mut latest = None;
        for id in runs.iter().rev() {
            let run = PastRun {
                folder: store.run_folder(id)?,
                id: id.clone(),
                store: store.clone(),
            };
            if filter.is_planned && !run.folder.join("plan.json").is_file() {
                continue;
            }
            if filter.pipeline.is_some() && run.pipeline() != filter.pipeline {
                continue;
            }
            let Some(values) = &filter.values else { return Ok(run) };
            // A run that ended before its plan left none.
            let Some(had) = run.values()? else { continue };
            if had == *values {
                return Ok(run);
            }
            if latest.is_none() {
                latest = Some((run.id, differences(&had, values)));
            }
        }
        let of = filter
            .pipeline
            .as_ref()
            .map_or(String::new(), |name| format!(" of `{name}`"));
        Err(match latest {
            Some((id, differences)) => InspectError::not_found(
                format!(
                    "there is no run{of} with these values of its parameters in {}",
                    store.name()
                ),
                format!("the latest, {id}, had {differences}"),
            ),
            None => InspectError::not_found(
                format!("there is no run{of} in {}", store.name()),
                "make one with `flow run`",
            ),
        })
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
    pub fn settings_of(&self, kind: &str) -> Result<Vec<Value>, InspectError> {
        let spec = self.spec()?.unwrap_or_default();
        let stages = spec.get("stages").and_then(Value::as_mapping);
        let of_kind = stages.into_iter().flat_map(Mapping::values).filter(|stage| {
            let uses = stage.get("uses").and_then(Value::as_str);
            uses == Some(kind)
        });
        Ok(of_kind.filter_map(|stage| stage.get("with").cloned()).collect())
    }

    /// The values of the pipeline's parameters in the run; none if it left none.
    fn values(&self) -> Result<Option<Mapping>, InspectError> {
        let Some(spec) = self.spec()? else { return Ok(None) };
        match spec.get("params") {
            Some(Value::Mapping(values)) => Ok(Some(values.clone())),
            _ => {
                let path = self.folder.join("spec.yaml");
                Err(InspectError::unreadable(format!(
                    "{} is damaged: it names no parameters",
                    path.display()
                )))
            }
        }
    }

    /// The pipeline as the run had it, with values in place of parameters; none if it left none.
    fn spec(&self) -> Result<Option<Value>, InspectError> {
        let path = self.folder.join("spec.yaml");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(InspectError::unreadable(format!(
                    "cannot read {}: {error}",
                    path.display()
                )));
            }
        };
        match yaml::parse_text(&text) {
            Ok(spec) => Ok(Some(spec)),
            Err(error) => Err(InspectError::unreadable(format!(
                "{} is damaged: {}",
                path.display(),
                error.message
            ))),
        }
    }

    /// The plan that was frozen when the run started.
    pub fn plan(&self) -> Result<Plan, InspectError> {
        let path = self.folder.join("plan.json");
        let text = std::fs::read_to_string(&path)
            .map_err(|error| InspectError::unreadable(format!("cannot read {}: {error}", path.display())))?;
        let plan: Plan = serde_json::from_str(&text)
            .map_err(|error| InspectError::unreadable(format!("{} is damaged: {error}", path.display())))?;
        if plan.version > PLAN_VERSION {
            return Err(InspectError::unreadable(format!(
                "{} is of version {}, and this binary reads up to {PLAN_VERSION}",
                path.display(),
                plan.version
            )));
        }
        Ok(plan)
    }

    /// The snapshots of the run's stages.
    pub fn snapshots(&self) -> Result<RunSnapshots, InspectError> {
        self.store.run_snapshots(&self.id)?.ok_or_else(|| {
            InspectError::unreadable(format!(
                "run {} did not note what its stages had: an earlier version of flow made it",
                self.id
            ))
        })
    }

    /// The records of a stage in the run.
    pub fn records_of(&self, snapshot: &StageSnapshot) -> Result<Vec<Arc<Record>>, InspectError> {
        let standing = snapshot.among(&self.store.records(&snapshot.recipe)?);
        match snapshot.keys.len() - standing.len() {
            0 => Ok(standing),
            lost => Err(InspectError::unreadable(format!(
                "{} of stage `{}` that run {} had are no longer there: `flow gc` removed them, or their files are lost",
                plural(lost as u64, "partition"),
                snapshot.stage,
                self.id
            ))),
        }
    }

    /// All events so far, with their lines as they were written.
    pub fn events(&self) -> Result<Vec<(String, LoggedEvent)>, InspectError> {
        let path = self.folder.join("events.jsonl");
        let text = std::fs::read_to_string(&path)
            .map_err(|error| InspectError::unreadable(format!("cannot read {}: {error}", path.display())))?;
        let mut events = Vec::new();
        // A line without its end is being written now, or was when the run was killed.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        for (number, line) in whole.lines().enumerate() {
            let damaged = |error: serde_json::Error| {
                InspectError::unreadable(format!("{}, line {} is damaged: {error}", path.display(), number + 1))
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
                return Err(InspectError::unreadable(format!(
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
