//! Inputs and outputs of included pipelines: names by which stages of one file read those of another.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::diagnostic::Diagnostic;
use super::pipeline::{Edge, Origin, Stage};
use super::source::SourceFile;
use super::yaml::{Part, Steps};
use flow_base::suggest::did_you_mean;

/// An input or an output: of these stages the first that is not switched off is read.
pub(super) struct Connection {
    /// What it is called in messages: "the output `train` of `rows`".
    pub what: String,
    /// None where an optional input is not given.
    pub choices: Vec<Edge>,
    /// The file that names them.
    pub source: Arc<SourceFile>,
}

/// Most connections that lead from one to a stage.
const DEPTH: usize = 64;

/// Most unknown stages that are told with a suggestion, as each is compared with all names.
const SUGGESTIONS: usize = 16;

/// By the name that edges have in place of a stage's: `rows/train`, and for inputs `input_name`.
pub(super) type Connections = BTreeMap<String, Connection>;

/// Has each edge read the stages that its connection represents. An edge to an optional input that is not given is left out.
pub(super) fn connect(stages: &mut [Stage], mut connections: Connections, found: &mut Vec<Diagnostic>) {
    leave_out_unknown(stages, &mut connections, found);
    let connections = &connections;
    let mut known = BTreeMap::new();
    for stage in stages {
        let from = std::mem::take(&mut stage.from);
        for edge in from {
            if edge.choices().all(|choice| !connections.contains_key(&choice.stage)) {
                stage.from.push(edge);
                continue;
            }
            let mut choices = Vec::new();
            for choice in edge.choices() {
                let Some(connection) = connections.get(&choice.stage) else {
                    add(&mut choices, choice);
                    continue;
                };
                if choice.port.is_some() {
                    let message = format!("stage `{}`: {} has no ports", stage.name, connection.what);
                    found.push(Diagnostic::new(message).at(choice.place(&stage.origin.source)));
                }
                for stands in stages_of(&choice.stage, connections, &mut known, &mut Vec::new(), found) {
                    add(&mut choices, &stands);
                }
            }
            for choice in &mut choices {
                choice.input.clone_from(&edge.input);
                choice.named = edge.named;
                choice.steps = edge.steps.clone();
            }
            let mut choices = choices.into_iter();
            if let Some(mut first) = choices.next() {
                first.fallbacks = choices.collect();
                stage.from.push(first);
            }
        }
    }
}

/// Reports what connections name that is not there, whether or not a stage reads it.
fn leave_out_unknown(stages: &[Stage], connections: &mut Connections, found: &mut Vec<Diagnostic>) {
    let stages = stages.iter().map(|stage| stage.name.clone());
    let known: BTreeSet<String> = stages.chain(connections.keys().cloned()).collect();
    for connection in connections.values_mut() {
        let (what, source) = (&connection.what, &connection.source);
        connection.choices.retain(|choice| {
            if known.contains(&choice.stage) {
                return true;
            }
            let message = format!("{what}: there is no stage `{}`", choice.stage);
            let mut diagnostic = Diagnostic::new(message).at(choice.place(source));
            if found.len() < SUGGESTIONS {
                let names = known.iter().map(String::as_str).filter(|name| !name.contains('<'));
                diagnostic = diagnostic.help(did_you_mean(&choice.stage, names, "stages"));
            }
            found.push(diagnostic);
            false
        });
    }
}

/// Adds a stage that is not among the choices.
fn add(choices: &mut Vec<Edge>, edge: &Edge) {
    if !choices
        .iter()
        .any(|choice| choice.stage == edge.stage && choice.port == edge.port)
    {
        choices.push(Edge {
            fallbacks: Vec::new(),
            ..edge.clone()
        });
    }
}

/// The stages that a connection represents, through the connections that it names. `known` are those that were found before,
/// `within` those that led here.
fn stages_of(
    name: &str,
    connections: &Connections,
    known: &mut BTreeMap<String, Vec<Edge>>,
    within: &mut Vec<String>,
    found: &mut Vec<Diagnostic>,
) -> Vec<Edge> {
    if let Some(known) = known.get(name) {
        return known.clone();
    }
    let mut stages = Vec::new();
    within.push(name.to_string());
    if let Some(connection) = connections.get(name) {
        for choice in &connection.choices {
            let named_at = Origin {
                source: Arc::clone(&connection.source),
                steps: choice.steps.clone(),
            };
            if within.contains(&choice.stage) {
                let message = format!("{} refers to itself", connection.what);
                found.push(Diagnostic::new(message).at(named_at.place(&Steps::default(), Part::Value)));
            } else if within.len() >= DEPTH {
                let message = format!("{} is more than {DEPTH} names away from a stage", connection.what);
                found.push(Diagnostic::new(message).at(named_at.place(&Steps::default(), Part::Value)));
                break;
            } else if connections.contains_key(&choice.stage) {
                for edge in stages_of(&choice.stage, connections, known, within, found) {
                    add(&mut stages, &edge);
                }
            } else {
                let edge = Edge {
                    named_at: Some(named_at),
                    ..choice.clone()
                };
                add(&mut stages, &edge);
            }
        }
    }
    within.pop();
    known.insert(name.to_string(), stages.clone());
    stages
}
