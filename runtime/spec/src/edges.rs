//! Edges between stages: reading `from`, finding the producers, and putting stages in order.

use std::collections::{BTreeSet, HashMap};

use super::diagnostic::Diagnostic;
use super::pipeline::{Edge, Stage};
use super::yaml::{self, Part, Steps, Value};
use flow_base::suggest::did_you_mean;

/// The form of names of stages, groups and inputs: fit for a file name, and without `.`, which separates a port.
pub(super) fn is_stage_name(name: &str) -> bool {
    name.len() <= 64
        && name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
}

/// What names in a file mean.
#[derive(Clone, Copy)]
pub(super) struct Names<'n> {
    /// Put before the names of its stages: `manifest/`, or nothing.
    pub group: &'n str,
    /// Its inputs.
    pub inputs: &'n BTreeSet<String>,
    /// Where its inputs are among those of all files; see [`input_name`].
    pub of: &'n str,
}

/// The name of a file's input, in place of that of a stage. No stage can have it. `of` is the path of includes to the file.
pub(super) fn input_name(of: &str, input: &str) -> String {
    format!("{of}<{input}>")
}

/// Reads `from`: one reference, a list, or a map of names to references, or to lists of them of which one is read.
/// The error is the path below `from`, and the message.
pub(super) fn read_from(from: &Value, steps: &Steps, names: Names<'_>) -> Result<Vec<Edge>, (Steps, String)> {
    let edges = match from {
        Value::Null => Vec::new(),
        Value::String(text) => vec![edge(None, text, steps.clone(), names)?],
        Value::Sequence(items) => items
            .iter()
            .enumerate()
            .map(|(index, item)| {
                let steps = steps.index(index);
                match item {
                    Value::String(text) => edge(None, text, steps, names),
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
        Value::Mapping(map) => map
            .iter()
            .map(|(key, value)| match (key.as_str(), value) {
                (Some(name), _) if !is_stage_name(name) => Err((
                    steps.key(name),
                    format!("`{name}` cannot name an input: use letters, digits, `_` and `-`, a letter first"),
                )),
                (Some(name), Value::String(text)) => edge(Some(name), text, steps.key(name), names),
                (Some(name), Value::Sequence(choices)) => first_of(name, choices, &steps.key(name), names),
                (Some(name), other) => Err((
                    steps.key(name),
                    format!(
                        "an input is named `stage` or `stage.port`, or is a list of these, found {}",
                        yaml::describe(other)
                    ),
                )),
                (None, other) => Err((
                    steps.clone(),
                    format!("names of inputs must be text, found {}", yaml::describe(other)),
                )),
            })
            .collect::<Result<Vec<_>, _>>()?,
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
    let mut taken = BTreeSet::new();
    for edge in &edges {
        if !taken.insert(edge.input.as_str()) {
            let message = format!(
                "two inputs are called `{}`; give them names: `from: {{name: {}, ...}}`",
                edge.input,
                edge.to_string().trim_start_matches(names.group)
            );
            return Err((edge.steps.clone(), message));
        }
    }
    Ok(edges)
}

/// Reads a list of stages of which the first that is not switched off is read.
fn first_of(input: &str, choices: &[Value], steps: &Steps, names: Names<'_>) -> Result<Edge, (Steps, String)> {
    let mut edges = Vec::with_capacity(choices.len());
    for (index, choice) in choices.iter().enumerate() {
        let steps = steps.index(index);
        let Value::String(text) = choice else {
            let message = format!(
                "an input is named `stage` or `stage.port`, found {}",
                yaml::describe(choice)
            );
            return Err((steps, message));
        };
        edges.push(edge(Some(input), text, steps, names)?);
    }
    let mut edges = edges.into_iter();
    let Some(mut first) = edges.next() else {
        let message = format!("the list of stages for `{input}` is empty: name at least one");
        return Err((steps.clone(), message));
    };
    first.fallbacks = edges.collect();
    Ok(first)
}

fn edge(input: Option<&str>, text: &str, steps: Steps, names: Names<'_>) -> Result<Edge, (Steps, String)> {
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
    let is_input = names.inputs.contains(stage);
    if is_input && port.is_some() {
        return Err((steps, format!("`{stage}` is an input of this file, which has no ports")));
    }
    let own_name = stage.rsplit('/').next().unwrap_or(stage);
    Ok(Edge {
        input: input.unwrap_or(own_name).to_string(),
        named: input.is_some(),
        stage: match is_input {
            true => input_name(names.of, stage),
            false => format!("{}{stage}", names.group),
        },
        port: port.map(str::to_string),
        fallbacks: Vec::new(),
        steps,
        named_at: None,
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
        for edge in stage.from.iter().flat_map(Edge::choices) {
            match positions.get(edge.stage.as_str()) {
                Some(index) => of_this.push(*index),
                None => found.push(unknown_producer(stage, edge, &stages)),
            }
        }
        producers.push(of_this);
    }
    let mut placed = vec![false; stages.len()];
    let mut sequence = Vec::new();
    // Repeatedly takes the first stage that is ready, which keeps the order of the file; quadratic, but stages are few.
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
    let place = edge.place(&stage.origin.source);
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

/// Every remaining stage depends on a remaining one: following these edges backwards ends in a cycle.
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
    // Begins with the stage that comes first in the file, so that the message is deterministic.
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
