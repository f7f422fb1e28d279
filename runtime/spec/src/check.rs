//! Checks a pipeline against the kinds of a binary: settings, ports and schemas.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::SchemaRef;

use super::diagnostic::{Diagnostic, Diagnostics};
use super::merge::merge_groups;
use super::pipeline::{Edge, Pipeline, PutIn, Stage};
use super::source::Place;
use super::substitute;
use super::yaml::{Part, Steps};
use flow_base::error::StageError;
use flow_base::secret::Secrets;
use flow_base::suggest::did_you_mean;
use flow_base::switched_off::SwitchedOff;
use flow_base::url_use::url_scheme;
use flow_kind::inputs::{self, InputPort, Inputs, Offered, Reads, Unfit};
use flow_kind::kind::{Conservation, Role, Shape};
use flow_kind::registry::{AnyKind, AnySettings, Registry};

/// A pipeline whose settings are typed and whose schemas are known: what is planned and run.
pub struct Checked {
    pub pipeline: Pipeline,
    /// Producers before consumers; the same order as `pipeline.stages`.
    pub stages: Vec<CheckedStage>,
    /// See [`Registry::id_column`].
    pub id_column: &'static str,
}

/// One stage of a checked pipeline.
pub struct CheckedStage {
    /// With its groups: `manifest/dedup`.
    pub name: String,
    pub kind: Arc<dyn AnyKind>,
    pub settings: Arc<dyn AnySettings>,
    pub shape: Shape,
    /// In the order in which the kind declares them.
    pub inputs: Vec<CheckedInput>,
    pub max_rejects: Option<super::MaxRejects>,
}

/// One input of a checked stage.
#[derive(Clone, Debug)]
pub struct CheckedInput {
    /// See [`inputs::Input::name`].
    pub name: String,
    /// What the kind declares.
    pub declared: &'static InputPort,
    pub reads: Reads,
    /// Index into [`Checked::stages`].
    pub stage: usize,
    /// Index into the producer's `shape.outputs`.
    pub port: usize,
    pub schema: SchemaRef,
}

impl Checked {
    /// Index of a stage by its full name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.stages.iter().position(|stage| stage.name == name)
    }

    /// The place in the pipeline to which an error of a stage refers, also for errors found while running.
    pub fn diagnose(&self, stage: usize, error: &StageError) -> Diagnostic {
        match self.pipeline.stages.get(stage) {
            Some(stage) => diagnose(stage, error),
            None => Diagnostic::new(error.to_string()),
        }
    }

    /// The help for a stage name (on the command line) that does not exist.
    pub fn suggest(&self, name: &str) -> String {
        did_you_mean(name, self.stages.iter().map(|stage| stage.name.as_str()), "stages")
    }
}

/// Types the settings of every stage and computes all shapes. Finds as many mistakes as it can: stages
/// below a wrong one are left out, all others are checked. Stages that are switched off leave the pipeline's list.
pub fn check(mut pipeline: Pipeline, registry: &Registry) -> Result<Checked, Diagnostics> {
    let mut found = Vec::new();
    merge_groups(&mut pipeline, registry, &mut found);
    let mut outcomes: Vec<Outcome> = Vec::new();
    let positions: HashMap<String, usize> = pipeline
        .stages
        .iter()
        .enumerate()
        .map(|(index, stage)| (stage.name.clone(), index))
        .collect();
    let mut taking_part = 0;
    for stage in &mut pipeline.stages {
        for edge in &mut stage.from {
            choose(edge, &positions, &outcomes);
        }
        let known = Known {
            registry,
            positions: &positions,
            secrets: &pipeline.secrets,
        };
        let outcome = check_stage(stage, &known, &outcomes, taking_part, &mut found);
        taking_part += usize::from(matches!(outcome, Outcome::Checked(..)));
        outcomes.push(outcome);
    }
    let mut stages = Vec::new();
    let mut standing = Vec::new();
    let all = std::mem::take(&mut pipeline.stages).into_iter().zip(outcomes);
    for (position, (stage, outcome)) in all.enumerate() {
        match outcome {
            Outcome::Checked(_, checked) => {
                stages.push(*checked);
                standing.push(stage);
            }
            Outcome::Off { reason, since } => pipeline.switched_off.push(SwitchedOff {
                stage: stage.name,
                uses: stage.uses,
                reason,
                since,
                position,
                from: stage.from.into_iter().map(|edge| edge.stage).collect(),
            }),
            Outcome::Wrong => {}
        }
    }
    pipeline.stages = standing;
    if let (Some(off), true) = (pipeline.switched_off.first(), stages.is_empty() && found.is_empty()) {
        let message = format!("every stage is switched off, `{}` since {}", off.stage, off.reason);
        found.push(Diagnostic::new(message));
    }
    // Errors that the kinds found in their settings.
    for found in &mut found {
        found.message = pipeline.secrets.hide(&found.message).into_owned();
        found.help = found
            .help
            .as_deref()
            .map(|help| pipeline.secrets.hide(help).into_owned());
    }
    Diagnostics::unless_empty(found, ())?;
    Ok(Checked {
        pipeline,
        stages,
        id_column: registry.id_column(),
    })
}

/// The result of checking a stage.
enum Outcome {
    /// With its place in [`Checked::stages`].
    Checked(usize, Box<CheckedStage>),
    /// It is switched off, for this reason; perhaps since another stage is.
    Off { reason: String, since: Option<String> },
    /// It is wrong, or one upstream is; the error was reported.
    Wrong,
}

/// What all stages are checked with.
struct Known<'a> {
    registry: &'a Registry,
    positions: &'a HashMap<String, usize>,
    secrets: &'a Secrets,
}

fn check_stage(stage: &Stage, known: &Known, done: &[Outcome], index: usize, found: &mut Vec<Diagnostic>) -> Outcome {
    let Known {
        registry,
        positions,
        secrets,
    } = *known;
    let kind = match registry.get(&stage.uses) {
        Some(kind) => Some(kind),
        None => {
            let place = stage.origin.place(&Steps::default().key("uses"), Part::Value);
            found.push(
                Diagnostic::new(format!("unknown kind `{}`", stage.uses))
                    .at(place)
                    .help(registry.suggest(&stage.uses)),
            );
            None
        }
    };
    let parsed = kind.map(|kind| secrets.while_reading(|| kind.parse(&stage.with, registry.storage())));
    let settings = parsed.and_then(|parsed| match parsed {
        Ok(settings) => Some(settings),
        Err(error) => {
            let below = Steps::default().key("with").join(&error.steps);
            let part = if error.steps.0.is_empty() {
                Part::Key
            } else {
                error.part
            };
            let message = match part {
                Part::Key => error.message,
                Part::Value => with_member(stage, &error.steps, error.message),
            };
            let mut diagnostic = Diagnostic::new(in_stage(stage, &message)).at(stage.origin.place(&below, part));
            diagnostic.help = with_origin_of_value(stage, &error.steps, error.help);
            if error.steps.of(&stage.with).is_some_and(substitute::is_secret) {
                diagnostic.message = in_stage(stage, "this setting may be shown, so it cannot be a secret");
                diagnostic.help =
                    Some("only settings that are never shown take a parameter with `secret: true`".into());
            }
            found.push(diagnostic);
            None
        }
    });
    let produced = producers(stage, positions, done, found);
    // Of a stage that is switched off only the syntax is checked: its settings may be invalid in this run.
    if let Some(reason) = &stage.off {
        return Outcome::Off {
            reason: reason.clone(),
            since: None,
        };
    }
    let (Some(kind), Some(produced)) = (kind, produced) else {
        return Outcome::Wrong;
    };
    let bound = match bind(stage, kind.as_ref(), &produced) {
        Ok(bound) => Some(bound),
        Err(unfit) if unfit.switched_off => {
            let edge = unfit.place.and_then(|place| stage.from.get(place));
            return Outcome::Off {
                reason: unfit.message,
                since: edge.map(|edge| edge.stage.clone()),
            };
        }
        Err(unfit) => {
            let edge = unfit.place.and_then(|place| stage.from.get(place));
            let place = match edge {
                Some(edge) => Place::of(&stage.origin.source, &edge.steps, Part::Key),
                None if stage.from.is_empty() => stage.origin.place(&Steps::default().key("uses"), Part::Value),
                None => stage.origin.place(&Steps::default().key("from"), Part::Key),
            };
            let mut diagnostic = Diagnostic::new(in_stage(stage, &unfit.message)).at(place);
            let meant = edge
                .zip(unfit.wanted)
                .and_then(|(edge, wanted)| other_port(stage, edge, wanted, positions, done));
            diagnostic.help = meant.or(unfit.help);
            found.push(diagnostic);
            None
        }
    };
    let (Some(settings), Some(mut bound)) = (settings, bound) else {
        return Outcome::Wrong;
    };
    for (place, input) in &mut bound {
        if let Some(Some(produced)) = produced.get(*place) {
            input.before = schemas_before(produced.stage, done);
        }
    }
    let seen = Inputs::new(bound.iter().map(|(_, input)| input.clone()).collect());
    let shape = match settings.shape(&seen) {
        Ok(shape) => shape,
        Err(error) => {
            let mut diagnostic = diagnose(stage, &error);
            let off = stage
                .from
                .iter()
                .zip(&produced)
                .find(|(_, produced)| produced.is_none());
            if let Some((edge, _)) = off {
                let missing = format!("its input from `{}` is missing, which is switched off", edge.stage);
                diagnostic.help = Some(match diagnostic.help {
                    Some(help) => format!("{help}; {missing}"),
                    None => missing,
                });
            }
            found.push(diagnostic);
            return Outcome::Wrong;
        }
    };
    let inputs = bound.into_iter().filter_map(|(place, input)| {
        let produced = produced.get(place)?.as_ref()?;
        Some(CheckedInput {
            reads: shape.reads(&input),
            name: input.name,
            declared: input.port,
            stage: produced.stage,
            port: produced.port,
            schema: input.schema,
        })
    });
    let inputs: Vec<CheckedInput> = inputs.collect();
    // All its inputs are switched off.
    let missing = stage
        .from
        .iter()
        .zip(&produced)
        .find(|(_, produced)| produced.is_none());
    if let (Some((edge, _)), true) = (missing, inputs.is_empty() && shape.role != Role::Source) {
        return Outcome::Off {
            reason: format!("its input comes from `{}`, which is switched off", edge.stage),
            since: Some(edge.stage.clone()),
        };
    }
    if let Some(message) = unfit(stage, kind.as_ref(), &shape, &inputs) {
        found.push(
            Diagnostic::new(in_stage(stage, &message)).at(stage.origin.place(&Steps::default().key("from"), Part::Key)),
        );
        return Outcome::Wrong;
    }
    let checked = CheckedStage {
        name: stage.name.clone(),
        kind: Arc::clone(kind),
        settings,
        shape,
        inputs,
        max_rejects: stage.max_rejects,
    };
    Outcome::Checked(index, Box::new(checked))
}

/// What every stage of a role needs, whatever its kind says.
fn unfit(stage: &Stage, declared: &dyn AnyKind, shape: &Shape, inputs: &[CheckedInput]) -> Option<String> {
    let streamed = inputs.iter().filter(|input| input.reads == Reads::Streamed).count();
    let (kind, inputs) = (&stage.uses, inputs.len());
    let outputs = shape.outputs.iter().map(|port| port.name.as_str());
    if !outputs.eq(declared.outputs().iter().map(|port| port.name)) {
        return Some(format!("the outputs of kind `{kind}` are not those that it declares"));
    }
    match shape.role {
        Role::Local | Role::Log if streamed == 0 => {
            Some(format!("kind `{kind}` needs an input; give it one with `from`"))
        }
        Role::Global if streamed != 1 => Some(format!(
            "kind `{kind}` takes the rows of one input, and `from` gives {streamed}"
        )),
        Role::Export if inputs == 0 => Some(format!(
            "kind `{kind}` has nothing to write; give it an input with `from`"
        )),
        _ => None,
    }
}

/// The result of checking one entry of `from`.
struct Produced {
    /// Index into [`Checked::stages`].
    stage: usize,
    port: usize,
    schema: SchemaRef,
}

fn bind(
    stage: &Stage,
    kind: &dyn AnyKind,
    produced: &[Option<Produced>],
) -> Result<Vec<(usize, inputs::Input)>, Unfit> {
    let offered: Vec<Offered<'_>> = stage
        .from
        .iter()
        .zip(produced)
        .map(|(edge, produced)| Offered {
            key: edge.named.then_some(edge.input.as_str()),
            stage: edge.stage.rsplit('/').next().unwrap_or(&edge.stage),
            schema: produced.as_ref().map(|produced| &produced.schema),
        })
        .collect();
    inputs::bind(kind.name(), kind.inputs(), &offered)
}

/// Where an edge has fallbacks, it becomes the first choice whose stage is not switched off, or the last one if all are.
fn choose(edge: &mut Edge, positions: &HashMap<String, usize>, done: &[Outcome]) {
    let is_off = |edge: &Edge| {
        let producer = positions.get(&edge.stage).and_then(|index| done.get(*index));
        matches!(producer, Some(Outcome::Off { .. }))
    };
    for fallback in std::mem::take(&mut edge.fallbacks) {
        if is_off(edge) {
            *edge = fallback;
        }
    }
}

/// One entry for each edge, in the order of `from`: none where the producer is switched off. None as a whole where an
/// edge is wrong, or its producer is.
fn producers(
    stage: &Stage,
    positions: &HashMap<String, usize>,
    done: &[Outcome],
    found: &mut Vec<Diagnostic>,
) -> Option<Vec<Option<Produced>>> {
    let mut inputs = Vec::new();
    let mut whole = true;
    for edge in &stage.from {
        // Edges were resolved when the pipeline was read, producers first; a producer that is missing now has failed
        // its own check.
        let producer = positions.get(edge.stage.as_str()).and_then(|index| done.get(*index));
        let (index, producer) = match producer {
            Some(Outcome::Checked(index, producer)) => (*index, producer),
            Some(Outcome::Off { .. }) => {
                inputs.push(None);
                continue;
            }
            Some(Outcome::Wrong) | None => {
                whole = false;
                continue;
            }
        };
        let outputs = &producer.shape.outputs;
        let place = || edge.place(&stage.origin.source);
        if outputs.is_empty() {
            found.push(
                Diagnostic::new(format!(
                    "stage `{}` has no outputs to read (its kind is `{}`)",
                    edge.stage,
                    producer.kind.name()
                ))
                .at(place()),
            );
            whole = false;
            continue;
        }
        let port = match &edge.port {
            None => Some(0),
            Some(name) => outputs.iter().position(|port| port.name == *name),
        };
        match port {
            Some(port) => {
                inputs.push(Some(Produced {
                    stage: index,
                    port,
                    schema: Arc::clone(&outputs[port].schema),
                }));
            }
            None => {
                let name = edge.port.as_deref().unwrap_or_default();
                let help = did_you_mean(name, outputs.iter().map(|port| port.name.as_str()), "ports");
                found.push(
                    Diagnostic::new(format!("stage `{}` has no port `{name}`", edge.stage))
                        .at(place())
                        .help(help),
                );
                whole = false;
            }
        }
    }
    whole.then_some(inputs)
}

/// Which other port of the stage that an edge comes from has the columns that the input needs, for a help.
fn other_port(
    stage: &Stage,
    edge: &Edge,
    wanted: &InputPort,
    positions: &HashMap<String, usize>,
    done: &[Outcome],
) -> Option<String> {
    let producer = positions.get(edge.stage.as_str()).and_then(|index| done.get(*index));
    let Some(Outcome::Checked(_, producer)) = producer else {
        return None;
    };
    let outputs = &producer.shape.outputs;
    let port = outputs.iter().find(|port| wanted.is_told_by(&port.schema))?;
    // The name as written in the file of this stage, without the group that both are in.
    let group = stage.name.rsplit_once('/').map(|(group, _)| format!("{group}/"));
    let written = group.and_then(|group| edge.stage.strip_prefix(&group));
    let written = written.unwrap_or(&edge.stage);
    Some(format!("did you mean its port `{written}.{}`?", port.name))
}

/// The columns that the rows of a stage had before, the nearest first, as far as stages keep their rows.
fn schemas_before(stage: usize, done: &[Outcome]) -> Vec<SchemaRef> {
    let checked = |index: usize| {
        done.iter().find_map(|outcome| match outcome {
            Outcome::Checked(at, stage) if *at == index => Some(stage),
            _ => None,
        })
    };
    let mut before = Vec::new();
    let mut at = checked(stage);
    while let Some(stage) = at {
        let keeps_rows =
            matches!(stage.shape.role, Role::Local | Role::Global) && stage.shape.conservation == Conservation::Rows;
        let rows = stage.inputs.iter().find(|input| input.reads == Reads::Streamed);
        let Some(rows) = rows.filter(|_| keeps_rows) else { break };
        before.push(SchemaRef::clone(&rows.schema));
        at = checked(rows.stage);
    }
    before
}

fn in_stage(stage: &Stage, message: &str) -> String {
    format!("stage `{}`: {message}", stage.name)
}

/// The parameter that a value came from.
fn put_in<'s>(stage: &'s Stage, below_with: &Steps) -> Option<&'s PutIn> {
    let mut put_in = stage.put_in.iter();
    put_in.find(|put_in| below_with.0.starts_with(&put_in.steps.0))
}

/// Names the member of a parameter that is wrong, since the text shows only `${name}`.
fn with_member(stage: &Stage, below_with: &Steps, message: String) -> String {
    match put_in(stage, below_with) {
        Some(put_in) if put_in.steps.0.len() < below_with.0.len() => {
            let member = Steps(below_with.0[put_in.steps.0.len()..].to_vec());
            format!("`{}`: {message}", Steps::parse(&put_in.param).join(&member))
        }
        _ => message,
    }
}

/// Names the parameter that a wrong value came from, since the text shows only `${name}`.
fn with_origin_of_value(stage: &Stage, below_with: &Steps, help: Option<String>) -> Option<String> {
    match (put_in(stage, below_with), help) {
        (None, help) => help,
        (Some(put_in), help) => {
            // A user, a password or a signature may be there.
            let is_secret =
                url_scheme(put_in.value.trim_matches(['"', '\''])).is_some_and(|_| put_in.value.contains(['@', '?']));
            let value = if is_secret { "a URL" } else { &put_in.value };
            let said = format!("`${{{}}}` is {value} ({})", put_in.param, put_in.given_by);
            Some(help.map_or(said.clone(), |help| format!("{help}; {said}")))
        }
    }
}

fn diagnose(stage: &Stage, error: &StageError) -> Diagnostic {
    let message = in_stage(stage, &error.to_string());
    let with = Steps::default().key("with");
    match error {
        StageError::Setting { path, offset, help, .. } => {
            let below = Steps::parse(path);
            let message = in_stage(stage, &with_member(stage, &below, error.to_string()));
            let steps = with.join(&below);
            let place = match offset {
                Some(offset) => Place::within(&stage.origin.source, &stage.origin.steps.join(&steps), *offset),
                None => stage.origin.place(&steps, Part::Value),
            };
            let mut diagnostic = Diagnostic::new(message).at(place);
            diagnostic.help = with_origin_of_value(stage, &below, help.clone());
            diagnostic
        }
        StageError::Input { name, help, .. } => {
            let edge = stage.from.iter().find(|edge| edge.input == *name);
            let place = match edge {
                Some(edge) => edge.place(&stage.origin.source),
                None => stage.origin.place(&Steps::default().key("from"), Part::Key),
            };
            Diagnostic {
                message,
                place: Some(place),
                help: help.clone(),
            }
        }
        StageError::Refused { help, .. } | StageError::Failed { help, .. } | StageError::Damaged { help, .. } => {
            let place = stage.origin.place(&Steps::default(), Part::Key);
            Diagnostic {
                message,
                place: Some(place),
                help: help.clone(),
            }
        }
    }
}
