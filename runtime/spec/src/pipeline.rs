//! A pipeline with its parameters put in and its groups opened: what is checked, planned and run.

use std::path::PathBuf;
use std::sync::Arc;

use super::params::ParamValue;
use super::source::{Place, SourceFile};
use super::yaml::{self, Mapping, Part, Steps, Value};
use flow_base::secret::Secrets;
use flow_base::switched_off::SwitchedOff;

/// The version of the pipeline format that this binary writes, and the newest that it reads.
pub const FORMAT: u64 = 1;

/// A pipeline, ready to be checked against the kinds of a binary.
#[derive(Clone, Debug)]
pub struct Pipeline {
    /// The file's name without its ending.
    pub name: String,
    pub path: PathBuf,
    pub description: Option<String>,
    /// The values of its own parameters (not those of included pipelines), in the order of the file.
    pub params: Vec<ParamValue>,
    /// Producers before consumers; otherwise in the order of the file, groups first.
    pub stages: Vec<Stage>,
    /// Stages that do not take part. Known once the pipeline was checked; until then they are part of `stages`.
    pub switched_off: Vec<SwitchedOff>,
    /// The values of parameters with `secret: true`, which are kept nowhere else.
    pub secrets: Secrets,
}

/// One stage of a pipeline.
#[derive(Clone, Debug)]
pub struct Stage {
    /// With its groups: `manifest/dedup`.
    pub name: String,
    /// The name of its kind.
    pub uses: String,
    pub from: Vec<Edge>,
    /// The settings, after parameters were put in; null where there are none.
    pub with: Value,
    /// Groups of parameters given whole (`<<: ${train}`): the kind takes from them the settings that it has and that `with`
    /// does not give. Settled when the pipeline is checked.
    pub(super) merged: Vec<MergedGroup>,
    /// Why the stage does not take part: a `when` that does not hold.
    pub(super) off: Option<String>,
    pub max_rejects: Option<MaxRejects>,
    /// The stage's place in its file.
    pub origin: Origin,
    /// Which values in `with` came from parameters: path below `with`, parameter, where its value came from.
    pub(super) put_in: Vec<PutIn>,
}

/// One input of a stage.
#[derive(Clone, Debug)]
pub struct Edge {
    /// The name that the pipeline gives it: the key in a map, or else the name of the producer without its groups.
    pub input: String,
    /// Whether the name is a key in a map.
    pub named: bool,
    /// The producer, with its groups.
    pub stage: String,
    /// None: its first port.
    pub port: Option<String>,
    /// What is read instead where that stage is switched off: the first of these that is not. Settled when the pipeline is
    /// checked, after which there are none.
    pub(super) fallbacks: Vec<Edge>,
    /// The edge's path from the head of the file.
    pub(super) steps: Steps,
    /// Where the producer is named, if the stage names an input of its file or an output of an included one instead.
    pub(super) named_at: Option<Origin>,
}

impl Edge {
    /// The edge itself and its fallbacks, in their order; once the pipeline was checked, the edge alone.
    pub fn choices(&self) -> impl Iterator<Item = &Edge> {
        std::iter::once(self).chain(&self.fallbacks)
    }

    /// Where the producer is named; `source` is the file of the stage that reads it.
    pub(super) fn place(&self, source: &Arc<SourceFile>) -> Place {
        match &self.named_at {
            Some(named_at) => named_at.place(&Steps::default(), Part::Value),
            None => Place::of(source, &self.steps, Part::Value),
        }
    }
}

/// How many rejects of class `fault` a stage may give.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaxRejects {
    pub limit: RejectLimit,
    pub action: LimitAction,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RejectLimit {
    /// Of the rows that came in: 0 to 1.
    Share(f64),
    Count(u64),
}

/// What happens past the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitAction {
    /// The stage fails (exit code 1).
    Fail,
    /// The run goes on and ends with exit code 4.
    Warn,
}

/// A place in the pipeline: a file and a path in it.
#[derive(Clone, Debug)]
pub struct Origin {
    pub source: Arc<SourceFile>,
    pub steps: Steps,
}

impl Origin {
    pub fn place(&self, below: &Steps, part: Part) -> Place {
        Place::of(&self.source, &self.steps.join(below), part)
    }
}

/// A group of parameters that is merged into a stage's settings (`<<`).
#[derive(Clone, Debug)]
pub(super) struct MergedGroup {
    /// Its members: names, values, and where these came from.
    pub members: Vec<PutIn>,
    pub values: Mapping,
    /// Its name; empty where it is a map of another kind.
    pub group: String,
    /// Its path below `with`.
    pub steps: Steps,
}

#[derive(Clone, Debug)]
pub(super) struct PutIn {
    pub steps: Steps,
    pub param: String,
    pub value: String,
    pub given_by: String,
}

impl Pipeline {
    /// The pipeline as it runs, with all values put in, for a run's records. It names groups by their stages
    /// (`manifest/scan`) and is meant to be read, not to be run.
    pub fn frozen(&self) -> String {
        yaml::to_text(&self.whole())
    }

    /// All that the pipeline is made of, by name and as JSON on one line: the values of its parameters first, then what the
    /// stages have, as `stage train: with.max_steps`.
    pub fn values(&self) -> Vec<(String, String)> {
        let mut values = Vec::new();
        for (part, value) in entries(&self.whole()) {
            match part.as_str() {
                "params" => flatten("", value, &mut values),
                "stages" => {
                    for (stage, value) in entries(value) {
                        flatten(&format!("stage {stage}: "), value, &mut values);
                    }
                }
                _ => {}
            }
        }
        values
    }

    fn whole(&self) -> Value {
        let mut root = Mapping::new();
        root.insert("flow".into(), FORMAT.into());
        root.insert("pipeline".into(), self.path.display().to_string().into());
        let params = self
            .params
            .iter()
            .map(|param| (Value::from(param.name.clone()), param.value.clone()));
        root.insert("params".into(), Value::Mapping(params.collect()));
        let stages = self.stages.iter().map(|stage| {
            let mut entry = Mapping::new();
            entry.insert("uses".into(), stage.uses.clone().into());
            if !stage.from.is_empty() {
                let from = stage
                    .from
                    .iter()
                    .map(|edge| (Value::from(edge.input.clone()), Value::from(edge.to_string())));
                entry.insert("from".into(), Value::Mapping(from.collect()));
            }
            if !stage.with.is_null() {
                entry.insert("with".into(), stage.with.clone());
            }
            if let Some(max_rejects) = stage.max_rejects {
                let limit = match max_rejects.limit {
                    RejectLimit::Share(share) => Value::from(format!("{}%", share * 100.0)),
                    RejectLimit::Count(count) => Value::from(count),
                };
                entry.insert("max_rejects".into(), limit);
                let action = if max_rejects.action == LimitAction::Fail {
                    "fail"
                } else {
                    "warn"
                };
                entry.insert("max_rejects_action".into(), action.into());
            }
            (Value::from(stage.name.clone()), Value::Mapping(entry))
        });
        root.insert("stages".into(), Value::Mapping(stages.collect()));
        if !self.switched_off.is_empty() {
            let off = self.switched_off.iter();
            let off = off.map(|off| (Value::from(off.stage.clone()), Value::from(off.reason.clone())));
            root.insert("switched_off".into(), Value::Mapping(off.collect()));
        }
        Value::Mapping(root)
    }
}

/// The entries of a mapping, with their keys as text.
fn entries(value: &Value) -> impl Iterator<Item = (String, &Value)> {
    let entries = value.as_mapping().into_iter().flatten();
    entries.map(|(key, value)| (key.as_str().map_or_else(|| in_json(key), str::to_owned), value))
}

fn in_json(value: &Value) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// Adds a value, or those of a mapping with their paths. `path` is the prefix of their names.
fn flatten(path: &str, value: &Value, into: &mut Vec<(String, String)>) {
    for (name, value) in entries(value) {
        let name = format!("{path}{name}");
        if value.is_mapping() {
            flatten(&format!("{name}."), value, into);
        } else {
            into.push((name, in_json(value)));
        }
    }
}

impl std::fmt::Display for Edge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.port {
            Some(port) => write!(f, "{}.{port}", self.stage),
            None => f.write_str(&self.stage),
        }
    }
}
