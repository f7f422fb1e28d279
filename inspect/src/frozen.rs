//! The pipeline of a past run, as it was.

use std::path::Path;

use flow_kind::Role;
use flow_spec::yaml::{self, Value};

use crate::graph::Node;

/// The largest frozen pipeline that is read.
const MAX_SPEC: u64 = 16 << 20;

/// The pipeline of a run as it was frozen.
#[derive(Default)]
pub struct Frozen {
    pub nodes: Vec<Node>,
    /// Parameters and their values, as text.
    pub params: Vec<(String, String)>,
    /// Settings of stages, as `STAGE.SETTING`.
    pub settings: Vec<(String, String)>,
}

impl Frozen {
    /// Reads `spec.yaml` of a run; empty if it is not there or is none.
    pub fn read(file: &Path) -> Frozen {
        let is_small = file.metadata().is_ok_and(|metadata| metadata.len() <= MAX_SPEC);
        let text = if is_small {
            std::fs::read_to_string(file).ok()
        } else {
            None
        };
        let Some(spec) = text.and_then(|text| yaml::parse_text(&text).ok()) else {
            return Frozen::default();
        };
        let mut frozen = Frozen::default();
        for (name, value) in entries(&spec["params"]) {
            frozen.params.push((name, in_words(value)));
        }
        for (stage, written) in entries(&spec["stages"]) {
            for (name, value) in entries(&written["with"]) {
                frozen.settings.push((format!("{stage}.{name}"), in_words(value)));
            }
            let mut inputs = Vec::new();
            for (_, edge) in entries(&written["from"]) {
                let edge = edge.as_str().unwrap_or_default();
                let find = |name: &str| frozen.nodes.iter().position(|node| node.name == name);
                let port = edge
                    .rsplit_once('.')
                    .and_then(|(stage, port)| Some((find(stage)?, Some(port.to_owned()))));
                inputs.extend(find(edge).map(|producer| (producer, None)).or(port));
            }
            frozen.nodes.push(Node {
                name: stage,
                kind: written["uses"].as_str().unwrap_or_default().to_owned(),
                role: Role::Local,
                inputs,
                off: false,
            });
        }
        frozen
    }

    /// The value of a parameter.
    pub fn param(&self, name: &str) -> Option<&str> {
        let found = self.params.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The stages of a kind.
    pub fn stages_of(&self, kind: &str) -> impl Iterator<Item = &str> {
        let of_kind = self.nodes.iter().filter(move |node| node.kind == kind);
        of_kind.map(|node| node.name.as_str())
    }

    /// The settings of a stage, and the parameters of the pipeline that are not simply one of them.
    pub fn settings_of(&self, stage: &str) -> Vec<(String, String)> {
        let own = self.settings.iter().filter_map(|(name, value)| {
            let setting = name.strip_prefix(stage)?.strip_prefix('.')?;
            Some((setting.to_owned(), value.clone()))
        });
        let mut all: Vec<(String, String)> = own.collect();
        let count = all.len();
        for (name, value) in &self.params {
            let last = name.rsplit('.').next().unwrap_or(name);
            if !all[..count].iter().any(|(own, given)| own == last && given == value) {
                all.push((name.clone(), value.clone()));
            }
        }
        all
    }
}

fn entries(value: &Value) -> Vec<(String, &Value)> {
    let entries = value.as_mapping().into_iter().flatten();
    entries
        .filter_map(|(key, value)| Some((key.as_str()?.to_owned(), value)))
        .collect()
}

fn in_words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => serde_json::to_string(other).unwrap_or_default(),
    }
}
