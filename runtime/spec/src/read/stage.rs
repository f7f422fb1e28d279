//! Stages, with parameters put into their settings.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Reader;
use super::document::Document;
use crate::edges::{Names, read_from};
use crate::params::{Scope, brief, place_of_not_finite};
use crate::pipeline::{LimitAction, MaxRejects, MergedGroup, Origin, PutIn, RejectLimit, Stage};
use crate::substitute::{self, Problem, Taken};
use crate::yaml::{self, Mapping, Part, Steps, Value};
use flow_base::suggest::did_you_mean;

/// The key under which groups of parameters are given whole.
pub(super) const MERGE: &str = "<<";

impl Reader<'_> {
    pub(super) fn stages(
        &mut self,
        document: &Document,
        stages: &Value,
        scope: &Scope,
        names: Names<'_>,
        taken: &BTreeMap<String, String>,
    ) -> Vec<Stage> {
        let steps = Steps::default().key("stages");
        let mut read = Vec::new();
        for (name, entry) in self.named_entries(document, stages, &steps, "stages") {
            let here = steps.key(name);
            if let Some(what) = taken.get(name) {
                let message = format!("`{name}` names both {what} and a stage");
                self.wrong(document.at(&here, Part::Key), message);
            }
            let Value::Mapping(entry) = entry else {
                self.wrong(
                    document.at(&here, Part::Value),
                    format!(
                        "stage `{name}`: expected a map with `uses`, found {}",
                        yaml::describe(entry)
                    ),
                );
                continue;
            };
            read.extend(self.stage(document, name, entry, &here, scope, names));
        }
        read
    }

    fn stage(
        &mut self,
        document: &Document,
        name: &str,
        entry: &Mapping,
        here: &Steps,
        scope: &Scope,
        names: Names<'_>,
    ) -> Option<Stage> {
        self.unknown_keys(
            document,
            here,
            entry,
            &["uses", "when", "from", "with", "max_rejects", "max_rejects_action"],
        );
        let null = Value::Null;
        let part = |key: &str| entry.get(key).unwrap_or(&null);
        let uses = match part("uses") {
            Value::String(kind) => Some(kind.clone()),
            Value::Null => {
                self.wrong_with(
                    document.at(here, Part::Key),
                    format!("stage `{name}` does not say what kind it uses"),
                    Some("add `uses: KIND`; `flow kinds` lists them".to_string()),
                );
                None
            }
            other => {
                self.wrong(
                    document.at(&here.key("uses"), Part::Value),
                    format!(
                        "stage `{name}`: `uses` must name a kind, found {}",
                        yaml::describe(other)
                    ),
                );
                None
            }
        };
        let from = match read_from(part("from"), &here.key("from"), names) {
            Ok(from) => Some(from),
            Err((steps, message)) => {
                self.wrong(document.at(&steps, Part::Value), format!("stage `{name}`: {message}"));
                None
            }
        };
        let mut taken = Vec::new();
        let kind = uses.as_deref().and_then(|kind| self.registry.get(kind));
        let sql = kind.map_or(&[][..], |kind| kind.sql_settings());
        if let Some((steps, number)) = place_of_not_finite(part("with"), &here.key("with")) {
            let message = format!("stage `{name}`: expected a finite number, found {}", brief(number));
            let help = "a parameter whose default is not a finite number can give one".to_string();
            self.wrong_with(document.at(&steps, Part::Value), message, Some(help));
        }
        let with = self.settings(document, part("with"), &here.key("with"), scope, sql, &mut taken);
        let with = match with {
            with @ (Value::Null | Value::Mapping(_)) => Some(with),
            other => {
                self.wrong(
                    document.at(&here.key("with"), Part::Value),
                    format!(
                        "stage `{name}`: `with` must be a map of settings, found {}",
                        yaml::describe(&other)
                    ),
                );
                None
            }
        };
        let (with, merged) = match with {
            Some(Value::Mapping(mut with)) => {
                let merged = self.merged(document, &mut with, part("with"), &here.key("with"), scope);
                (Some(Value::Mapping(with)), merged)
            }
            with => (with, Vec::new()),
        };
        let off = entry
            .get("when")
            .and_then(|written| self.off(document, written, &here.key("when"), scope));
        let max_rejects = self.max_rejects(document, name, entry, here, scope);
        let depth = here.0.len() + 1;
        let put_in = taken.into_iter().filter_map(|taken| {
            let param = scope.origin(&taken.param)?;
            Some(PutIn {
                steps: Steps(taken.steps.0.get(depth..)?.to_vec()),
                param: taken.param,
                value: brief(&param.value),
                given_by: param.given_by.clone(),
            })
        });
        let origin = Origin {
            source: Arc::clone(&document.source),
            steps: here.clone(),
        };
        Some(Stage {
            name: format!("{}{name}", names.group),
            put_in: put_in.collect(),
            uses: uses?,
            from: from?,
            with: with?,
            merged,
            off,
            max_rejects,
            origin,
        })
    }

    /// Takes the merge key (`<<`, as in YAML 1.1) out of settings: a reference to a group of parameters, or several.
    fn merged(
        &mut self,
        document: &Document,
        with: &mut Mapping,
        written: &Value,
        steps: &Steps,
        scope: &Scope,
    ) -> Vec<MergedGroup> {
        let Some(value) = with.remove(MERGE) else {
            return Vec::new();
        };
        let below = Steps::default().key(MERGE);
        let written = below.of(written).unwrap_or(&Value::Null);
        let groups: Vec<(Steps, Value, &Value)> = match (value, written) {
            (Value::Sequence(items), Value::Sequence(written)) => (items.into_iter().zip(written).enumerate())
                .map(|(index, (item, written))| (below.index(index), item, written))
                .collect(),
            (value, written) => vec![(below, value, written)],
        };
        let mut merged = Vec::new();
        for (below, value, written) in groups {
            let Value::Mapping(values) = value else {
                // What could not be put in was reported.
                if !value.is_null() {
                    let message = format!(
                        "`{MERGE}` takes a group of parameters, found {}",
                        yaml::describe(&value)
                    );
                    let help = Some(format!("write `{MERGE}: ${{train}}` with the name of a group"));
                    self.wrong_with(document.at(&steps.join(&below), Part::Value), message, help);
                }
                continue;
            };
            let group = written
                .as_str()
                .and_then(|text| text.strip_prefix("${")?.strip_suffix('}'));
            let group = group.unwrap_or_default().to_string();
            let members = values.keys().filter_map(Value::as_str).filter_map(|key| {
                let param = scope.origin(&format!("{group}.{key}"))?;
                Some(PutIn {
                    steps: Steps::default().key(key),
                    param: param.name.clone(),
                    value: brief(&param.value),
                    given_by: param.given_by.clone(),
                })
            });
            merged.push(MergedGroup {
                members: members.collect(),
                group,
                steps: below,
                values,
            });
        }
        merged
    }

    fn max_rejects(
        &mut self,
        document: &Document,
        name: &str,
        entry: &Mapping,
        here: &Steps,
        scope: &Scope,
    ) -> Option<MaxRejects> {
        let null = Value::Null;
        let steps = here.key("max_rejects");
        let limit = match self.put_in(
            document,
            entry.get("max_rejects").unwrap_or(&null),
            &steps,
            scope,
            &mut Vec::new(),
        ) {
            Value::Null => None,
            Value::Number(count) if count.is_u64() => count.as_u64().map(RejectLimit::Count),
            Value::String(text) if share(&text).is_some() => share(&text).map(RejectLimit::Share),
            other => {
                let help = Some("write a share of the rows (`5%`) or a count (`100`)".to_string());
                self.wrong_with(
                    document.at(&steps, Part::Value),
                    format!("stage `{name}`: `max_rejects` cannot be {}", brief(&other)),
                    help,
                );
                None
            }
        };
        let steps = here.key("max_rejects_action");
        let action = match entry.get("max_rejects_action") {
            None | Some(Value::Null) => LimitAction::Fail,
            Some(Value::String(word)) if word == "fail" => LimitAction::Fail,
            Some(Value::String(word)) if word == "warn" => LimitAction::Warn,
            Some(other) => {
                let help = Some(did_you_mean(
                    other.as_str().unwrap_or_default(),
                    ["fail", "warn"],
                    "actions",
                ));
                self.wrong_with(
                    document.at(&steps, Part::Value),
                    format!("stage `{name}`: `max_rejects_action` cannot be {}", brief(other)),
                    help,
                );
                LimitAction::Fail
            }
        };
        if entry.contains_key("max_rejects_action") && !entry.contains_key("max_rejects") {
            self.wrong(
                document.at(&steps, Part::Key),
                format!("stage `{name}`: `max_rejects_action` needs a `max_rejects`"),
            );
        }
        limit.map(|limit| MaxRejects { limit, action })
    }

    /// Settings with parameters put in; in those that are SQL, references become bound values.
    fn settings(
        &mut self,
        document: &Document,
        with: &Value,
        steps: &Steps,
        scope: &Scope,
        sql: &[&str],
        taken: &mut Vec<Taken>,
    ) -> Value {
        if sql.is_empty() {
            return self.put_in(document, with, steps, scope, taken);
        }
        let (mut bound, mut problems) = (Mapping::new(), Vec::new());
        let mut settings = bind_sql(with, sql, steps, scope, &mut bound, &mut problems, taken);
        self.problems(document, problems);
        if let (Value::Mapping(settings), false) = (&mut settings, bound.is_empty()) {
            match settings
                .entry(Value::from("params"))
                .or_insert_with(|| Value::Mapping(Mapping::new()))
            {
                Value::Mapping(params) => {
                    for (name, value) in bound {
                        if params.get(&name).is_some_and(|standing| *standing != value) {
                            let name = name.as_str().unwrap_or_default();
                            self.wrong(
                                document.at(&steps.key("params").key(name), Part::Key),
                                format!("the name `{name}` is taken by a parameter of the pipeline"),
                            );
                        }
                        params.insert(name, value);
                    }
                }
                other => {
                    let message = format!("`params` must be a map of values, found {}", yaml::describe(other));
                    self.wrong(document.at(&steps.key("params"), Part::Value), message);
                }
            }
        }
        settings
    }
}

fn bind_sql(
    value: &Value,
    sql: &[&str],
    steps: &Steps,
    scope: &Scope,
    bound: &mut Mapping,
    problems: &mut Vec<Problem>,
    taken: &mut Vec<Taken>,
) -> Value {
    match value {
        Value::Mapping(map) => {
            let entries = map.iter().map(|(key, inner)| {
                let name = key.as_str().unwrap_or_default();
                let below = steps.key(name);
                let inner = match inner {
                    Value::String(text) if sql.contains(&name) => {
                        Value::String(substitute::in_sql(text, &below, &mut &*scope, bound, problems))
                    }
                    inner => bind_sql(inner, sql, &below, scope, bound, problems, taken),
                };
                (key.clone(), inner)
            });
            Value::Mapping(entries.collect())
        }
        Value::Sequence(items) => Value::Sequence(
            items
                .iter()
                .enumerate()
                .map(|(index, item)| bind_sql(item, sql, &steps.index(index), scope, bound, problems, taken))
                .collect(),
        ),
        other => substitute::in_value(other, steps, &mut &*scope, problems, taken),
    }
}

/// `5%` as 0.05.
fn share(text: &str) -> Option<f64> {
    let percent: f64 = text.trim().strip_suffix('%')?.trim_end().parse().ok()?;
    (0.0..=100.0).contains(&percent).then_some(percent / 100.0)
}
