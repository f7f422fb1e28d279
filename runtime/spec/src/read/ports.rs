//! Inputs and outputs of a pipeline file that others include, and what an include gives to them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Reader;
use super::document::Document;
use crate::connections::Connection;
use crate::edges::{Names, input_name, read_from};
use crate::pipeline::{Edge, Stage};
use crate::yaml::{self, Mapping, Part, Steps, Value};

impl Reader<'_> {
    /// The names in `inputs`. One that is not given and not optional is a mistake of the include, or of whoever runs the file
    /// by itself.
    pub(super) fn inputs(
        &mut self,
        document: &Document,
        value: &Value,
        of: &str,
        is_included: bool,
    ) -> BTreeSet<String> {
        let steps = Steps::default().key("inputs");
        let mut names = BTreeSet::new();
        for (name, entry) in self.named_entries(document, value, &steps, "inputs") {
            let here = steps.key(name);
            names.insert(name.to_string());
            let is_optional = match entry {
                Value::Null | Value::String(_) => false,
                Value::Mapping(entry) => self.is_optional(document, name, entry, &here),
                other => {
                    let message = format!(
                        "input `{name}`: expected its description, or `{{optional: true, help: ...}}`, found {}",
                        yaml::describe(other)
                    );
                    self.wrong(document.at(&here, Part::Value), message);
                    continue;
                }
            };
            let full = input_name(of, name);
            if self.connections.contains_key(&full) {
                continue;
            }
            if !is_optional {
                let message = match is_included {
                    true => format!("`{}` is not given its input `{name}`", of.trim_end_matches('/')),
                    false => format!("this file is a part of other pipelines, which give it the input `{name}`"),
                };
                let help = "a pipeline gives it under `from` where it includes this file".to_string();
                self.wrong_with(document.at(&here, Part::Key), message, Some(help));
            }
            let connection = Connection {
                what: format!("the input `{name}`"),
                choices: Vec::new(),
                source: Arc::clone(&document.source),
            };
            self.connections.insert(full, connection);
        }
        names
    }

    fn is_optional(&mut self, document: &Document, name: &str, entry: &Mapping, here: &Steps) -> bool {
        self.unknown_keys(document, here, entry, &["optional", "help"]);
        match entry.get("optional") {
            None => false,
            Some(Value::Bool(is_optional)) => *is_optional,
            Some(other) => {
                let message = format!(
                    "input `{name}`: `optional` must be true or false, found {}",
                    yaml::describe(other)
                );
                self.wrong(document.at(&here.key("optional"), Part::Value), message);
                true
            }
        }
    }

    /// Keeps what an include gives to inputs, and gives their names. `of` is put before those of the included file, `names` are
    /// those of the file that includes it.
    pub(super) fn given_inputs(
        &mut self,
        document: &Document,
        from: &Value,
        here: &Steps,
        of: &str,
        names: Names<'_>,
    ) -> Vec<String> {
        let edges = self.edges(document, from, &here.key("from"), names, "`from` of a group");
        let mut inputs = Vec::new();
        for edge in edges {
            let name = edge.input.clone();
            self.keep(document, input_name(of, &name), format!("the input `{name}`"), &edge);
            inputs.push(name);
        }
        inputs
    }

    /// Keeps the outputs of a file. `stages` are those that it has.
    pub(super) fn outputs(&mut self, document: &Document, outputs: &Value, names: Names<'_>, stages: &[Stage]) {
        let steps = Steps::default().key("outputs");
        for edge in self.edges(document, outputs, &steps, names, "`outputs`") {
            let full = format!("{}{}", names.of, edge.input);
            if stages.iter().any(|stage| stage.name == full) || names.inputs.contains(&edge.input) {
                let message = format!("`{}` names both an output and a stage or an input", edge.input);
                self.wrong(document.at(&steps.key(&edge.input), Part::Key), message);
                continue;
            }
            let group = names.of.trim_end_matches('/');
            let what = match group.is_empty() {
                true => format!("the output `{}`", edge.input),
                false => format!("the output `{}` of `{group}`", edge.input),
            };
            self.keep(document, full, what, &edge);
        }
    }

    fn keep(&mut self, document: &Document, full: String, what: String, edge: &Edge) {
        let choices = edge.choices().map(|choice| Edge {
            fallbacks: Vec::new(),
            ..choice.clone()
        });
        let connection = Connection {
            what,
            choices: choices.collect(),
            source: Arc::clone(&document.source),
        };
        self.connections.insert(full, connection);
    }

    /// A map of names to stages, as `from` has it.
    fn edges(&mut self, document: &Document, value: &Value, steps: &Steps, names: Names<'_>, what: &str) -> Vec<Edge> {
        match value {
            Value::Null => return Vec::new(),
            Value::Mapping(_) => {}
            other => {
                let message = format!(
                    "{what} must be a map of names to stages, found {}",
                    yaml::describe(other)
                );
                self.wrong(document.at(steps, Part::Value), message);
                return Vec::new();
            }
        }
        read_from(value, steps, names).unwrap_or_else(|(steps, message)| {
            self.wrong(document.at(&steps, Part::Value), message);
            Vec::new()
        })
    }

    /// Whether the stages of an included file have the include's name before theirs.
    pub(super) fn is_group(&mut self, document: &Document, name: &str, value: &Value, here: &Steps) -> bool {
        match value {
            Value::Null => true,
            Value::Bool(is_group) => *is_group,
            other => {
                let message = format!(
                    "group `{name}`: `group` must be true or false, found {}",
                    yaml::describe(other)
                );
                self.wrong(document.at(&here.key("group"), Part::Value), message);
                true
            }
        }
    }

    /// Notes the names that an include with `group: false` brings into the file, each of which has to be new there.
    pub(super) fn take_names(
        &mut self,
        document: &Document,
        name: &str,
        here: &Steps,
        stages: &[Stage],
        group: &str,
        taken: &mut BTreeMap<String, String>,
    ) {
        let brought = stages.iter().filter_map(|stage| {
            let own = stage.name.strip_prefix(group)?;
            Some(own.split('/').next().unwrap_or(own).to_string())
        });
        for brought in brought.collect::<BTreeSet<_>>() {
            if let Some(what) = taken.insert(brought.clone(), format!("a stage of `{name}`")) {
                let message = format!("`{brought}` names both {what} and a stage of `{name}`");
                self.wrong(document.at(here, Part::Key), message);
            }
        }
    }
}
