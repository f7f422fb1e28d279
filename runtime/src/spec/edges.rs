//! Edges between stages: reading `from`, finding the producers, and putting stages in order.

use std::collections::{BTreeSet, HashMap};

use super::diagnostic::Diagnostic;
use super::pipeline::{Edge, Stage};
use super::source::Place;
use super::yaml::{self, Part, Steps, Value};
use crate::suggest::did_you_mean;

/// Names of stages, groups and inputs: what can stand in a file name, and before the `.` of a port.
pub(super) fn is_stage_name(name: &str) -> bool {
    name.len() <= 64
        && name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
}

/// Reads `from`: one reference, a list, or a map of names to references, or to lists of which the first counts whose stage takes
/// part. `group` (`manifest/`) goes before stage names.
/// The error is where, from the head of `from`, and what.
pub(super) fn read_from(from: &Value, steps: &Steps, group: &str) -> Result<Vec<Edge>, (Steps, String)> {
    let edges = match from {
        Value::Null => Vec::new(),
        Value::String(text) => vec![edge(None, text, steps.clone(), group)?],
        Value::Sequence(items) => items
            .iter()
            .enumerate()
            .map(|(index, item)| {
                let steps = steps.index(index);
                match item {
                    Value::String(text) => edge(None, text, steps, group),
                    other => Err((
                        steps,
                        format!(
                            "an input is named `stage` or `stage.port`, found {}",
                            yaml::describe(other)
                        ),
                    )),
                }
            })
            .collect::<Result<Vec<_>, _>>()?,
        Value::Mapping(map) => {
            let mut edges = Vec::new();
            for (key, value) in map {
                let Some(name) = key.as_str() else {
                    let message = format!("names of inputs must be text, found {}", yaml::describe(value));
                    return Err((steps.clone(), message));
                };
                if !is_stage_name(name) {
                    let message =
                        format!("`{name}` cannot name an input: use letters, digits, `_` and `-`, a letter first");
                    return Err((steps.key(name), message));
                }
                edges.extend(named_input(name, value, &steps.key(name), group)?);
            }
            edges
        }
        other => {
            return Err((
                steps.clone(),
                format!(
                    "`from` is a stage, a list of stages or a map of names to stages, found {}",
                    yaml::describe(other)
                ),
            ));
        }
    };
    let mut names = BTreeSet::new();
    for edge in edges.iter().filter(|edge| !edge.is_alternative) {
        if !names.insert(edge.input.as_str()) {
            let message = format!(
                "two inputs are called `{}`; give them names: `from: {{name: {}, ...}}`",
                edge.input,
                edge.to_string().trim_start_matches(group)
            );
            return Err((edge.steps.clone(), message));
        }
    }
    Ok(edges)
}

/// What a map of names gives for one of them: a reference, or a list of them.
fn named_input(name: &str, value: &Value, steps: &Steps, group: &str) -> Result<Vec<Edge>, (Steps, String)> {
    let no_reference = |steps: Steps, other: &Value| {
        let message = format!(
            "an input is named `stage` or `stage.port`, found {}",
            yaml::describe(other)
        );
        Err((steps, message))
    };
    let items = match value {
        Value::String(text) => return Ok(vec![edge(Some(name), text, steps.clone(), group)?]),
        Value::Sequence(items) if !items.is_empty() => items,
        other => return no_reference(steps.clone(), other),
    };
    let mut edges = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let Value::String(text) = item else {
            return no_reference(steps.index(index), item);
        };
        edges.push(Edge {
            is_alternative: index > 0,
            ..edge(Some(name), text, steps.index(index), group)?
        });
    }
    Ok(edges)
}

/// Of edges that stand for each other, leaves the first whose stage takes part; the first of all where none does.
pub(super) fn choose(edges: &mut Vec<Edge>, is_off: impl Fn(&Edge) -> bool) {
    let mut chosen: Vec<Edge> = Vec::with_capacity(edges.len());
    for edge in std::mem::take(edges) {
        match chosen.last_mut().filter(|_| edge.is_alternative) {
            None => chosen.push(edge),
            Some(last) if is_off(last) && !is_off(&edge) => *last = edge,
            Some(_) => {}
        }
    }
    chosen.iter_mut().for_each(|edge| edge.is_alternative = false);
    *edges = chosen;
}

fn edge(input: Option<&str>, text: &str, steps: Steps, group: &str) -> Result<Edge, (Steps, String)> {
    let (stage, port) = match text.split_once('.') {
        Some((stage, port)) => (stage, Some(port)),
        None => (text, None),
    };
    if !stage.split('/').all(is_stage_name) || !port.is_none_or(is_stage_name) {
        return Err((
            steps,
            format!("`{text}` names no stage: write `stage`, `stage.port` or `group/stage.port`"),
        ));
    }
    let own_name = stage.rsplit('/').next().unwrap_or(stage);
    Ok(Edge {
        input: input.unwrap_or(own_name).to_string(),
        named: input.is_some(),
        is_alternative: false,
        stage: format!("{group}{stage}"),
        port: port.map(str::to_string),
        steps,
    })
}

/// Checks that all producers are there, and puts producers before consumers, otherwise keeping the order.
pub(super) fn order(stages: Vec<Stage>, found: &mut Vec<Diagnostic>) -> Vec<Stage> {
    let positions: HashMap<&str, usize> = stages
        .iter()
        .enumerate()
        .map(|(index, stage)| (stage.name.as_str(), index))
        .collect();
    let mut producers: Vec<Vec<usize>> = Vec::new();
    for stage in &stages {
        let mut of_this = Vec::new();
        for edge in &stage.from {
            match positions.get(edge.stage.as_str()) {
                Some(index) => of_this.push(*index),
                None => found.push(unknown_producer(stage, edge, &stages)),
            }
        }
        producers.push(of_this);
    }
    let mut placed = vec![false; stages.len()];
    let mut sequence = Vec::new();
    // Stages are few; the first that is ready, again and again, keeps the order of the file.
    while let Some(next) =
        (0..stages.len()).find(|&index| !placed[index] && producers[index].iter().all(|&producer| placed[producer]))
    {
        placed[next] = true;
        sequence.push(next);
    }
    if sequence.len() < stages.len() {
        found.push(cycle(&stages, &producers, &placed));
        return stages;
    }
    let mut slots: Vec<Option<Stage>> = stages.into_iter().map(Some).collect();
    sequence.into_iter().filter_map(|index| slots[index].take()).collect()
}

fn unknown_producer(stage: &Stage, edge: &Edge, stages: &[Stage]) -> Diagnostic {
    let group = stage
        .name
        .rsplit_once('/')
        .map_or(String::new(), |(group, _)| format!("{group}/"));
    let known: Vec<&str> = stages
        .iter()
        .filter_map(|other| other.name.strip_prefix(&group))
        .filter(|name| format!("{group}{name}") != stage.name)
        .collect();
    let wanted = edge.stage.strip_prefix(&group).unwrap_or(&edge.stage);
    let place = Place::of(&stage.origin.source, &edge.steps, Part::Value);
    // `manifest.scan` for `manifest/scan` is the slip to expect.
    let help = match &edge.port {
        Some(port) if known.contains(&format!("{wanted}/{port}").as_str()) => {
            format!("did you mean `{wanted}/{port}`?")
        }
        _ => did_you_mean(wanted, known, "stages"),
    };
    Diagnostic::new(format!("stage `{}`: there is no stage `{wanted}`", stage.name))
        .at(place)
        .help(help)
}

/// Every stage that is left waits for one that is left: walking back along such edges ends in a circle.
fn cycle(stages: &[Stage], producers: &[Vec<usize>], placed: &[bool]) -> Diagnostic {
    let mut path: Vec<usize> = Vec::new();
    let mut at = placed.iter().position(|placed| !placed).unwrap_or(0);
    while !path.contains(&at) {
        path.push(at);
        match producers[at].iter().find(|&&producer| !placed[producer]) {
            Some(&producer) => at = producer,
            None => break,
        }
    }
    let start = path.iter().position(|&index| index == at).unwrap_or(0);
    let mut circle: Vec<usize> = path[start..].to_vec();
    // Begin with the stage that stands first in the file, so that the message does not depend on the walk.
    circle.reverse();
    let first = circle
        .iter()
        .enumerate()
        .min_by_key(|(_, index)| **index)
        .map_or(0, |(position, _)| position);
    circle.rotate_left(first);
    let names: Vec<&str> = circle
        .iter()
        .chain(circle.first())
        .map(|&index| stages[index].name.as_str())
        .collect();
    let stage = &stages[circle.first().copied().unwrap_or(0)];
    let place = stage.origin.place(&Steps::default().key("from"), Part::Value);
    Diagnostic::new(format!(
        "stages wait for each other in a circle: {}",
        names.join(" -> ")
    ))
    .at(place)
}
