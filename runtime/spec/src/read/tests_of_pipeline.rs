//! The form of `tests`.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Reader;
use super::document::Document;
use crate::params::brief;
use crate::pipeline::Origin;
use crate::test_case::{Expectation, ExpectedRows, PortName, TestCase, TestRows};
use crate::yaml::{self, Mapping, Part, Steps, Value};
use flow_base::partition::Partition;

impl Reader<'_> {
    pub(super) fn tests(&mut self, document: &Document, tests: &Value) -> Vec<TestCase> {
        let steps = Steps::default().key("tests");
        let mut read = Vec::new();
        for (name, entry) in self.named_entries(document, tests, &steps, "tests") {
            let here = steps.key(name);
            let Some(entry) = self.map(document, entry, &here, &format!("test `{name}`")) else {
                continue;
            };
            self.unknown_keys(document, &here, &entry, &["params", "rows", "expect"]);
            let null = Value::Null;
            let part = |key: &str| entry.get(key).unwrap_or(&null);
            let params = match part("params") {
                Value::Null => Some(Mapping::new()),
                params => self.map(document, params, &here.key("params"), "`params`"),
            };
            let rows = self.test_rows(document, part("rows"), &here.key("rows"));
            let expect = self.expectations(document, part("expect"), &here.key("expect"));
            let is_empty = |value: &Value| value.is_null() || value.as_mapping().is_some_and(Mapping::is_empty);
            if is_empty(part("expect")) {
                let message = format!("test `{name}` expects nothing");
                let help = "say under `expect` what stages give: `split.train: {rows: 3}`".to_string();
                self.wrong_with(document.at(&here, Part::Key), message, Some(help));
            }
            read.extend(params.map(|params| TestCase {
                name: name.to_string(),
                origin: Origin {
                    source: Arc::clone(&document.source),
                    steps: here.clone(),
                },
                params,
                rows,
                expect,
            }));
        }
        read
    }

    fn test_rows(&mut self, document: &Document, given: &Value, steps: &Steps) -> Vec<TestRows> {
        let mut all = Vec::new();
        for (port, value, here) in self.ports(document, given, steps) {
            let what = format!("the rows of `{port}` by their partitions");
            let Some(map) = self.map(document, value, &here, &what) else {
                continue;
            };
            let mut partitions = Vec::new();
            for (key, rows) in &map {
                match key.as_str() {
                    Some(name) if !name.is_empty() => {
                        let rows = self.row_list(document, rows, &here.key(name));
                        partitions.push((Partition::new(name), rows));
                    }
                    _ => {
                        let message = format!(
                            "a partition is named by a text, such as `hi/hi_0000`, found {}",
                            brief(key)
                        );
                        self.wrong(document.at(&here, Part::Value), message);
                    }
                }
            }
            all.push(TestRows { port, partitions });
        }
        all
    }

    fn expectations(&mut self, document: &Document, expect: &Value, steps: &Steps) -> Vec<Expectation> {
        let mut all = Vec::new();
        for (port, value, here) in self.ports(document, expect, steps) {
            let Some(map) = self.map(document, value, &here, &format!("what is expected of `{port}`")) else {
                continue;
            };
            self.unknown_keys(document, &here, &map, &["rows", "rejects"]);
            let rows = match map.get("rows") {
                None => None,
                Some(Value::Number(count)) if count.is_u64() => count.as_u64().map(ExpectedRows::Count),
                Some(rows @ Value::Sequence(_)) => {
                    Some(ExpectedRows::Values(self.row_list(document, rows, &here.key("rows"))))
                }
                Some(other) => {
                    let message = format!(
                        "`rows` is how many there are, or a list of them, found {}",
                        brief(other)
                    );
                    self.wrong(document.at(&here.key("rows"), Part::Value), message);
                    None
                }
            };
            let rejects = map
                .get("rejects")
                .map(|rejects| self.reasons(document, rejects, &here.key("rejects")));
            if !map.contains_key("rows") && !map.contains_key("rejects") {
                let message = format!("nothing is expected of `{port}`");
                let help = "say `rows`, `rejects` or both".to_string();
                self.wrong_with(document.at(&here, Part::Key), message, Some(help));
            }
            all.push(Expectation { port, rows, rejects });
        }
        all
    }

    fn reasons(&mut self, document: &Document, rejects: &Value, steps: &Steps) -> BTreeMap<String, u64> {
        let mut reasons = BTreeMap::new();
        for (reason, count) in &self.map(document, rejects, steps, "`rejects`").unwrap_or_default() {
            match (reason.as_str(), count.as_u64()) {
                (Some(reason), Some(count)) => {
                    // None of a reason is what is expected of all that are not named.
                    if count > 0 {
                        reasons.insert(reason.to_string(), count);
                    }
                }
                (Some(reason), None) => {
                    let message = format!(
                        "expected the number of rows refused as `{reason}`, found {}",
                        brief(count)
                    );
                    self.wrong(document.at(&steps.key(reason), Part::Value), message);
                }
                (None, _) => {
                    let message = format!("a reason is a text, found {}", brief(reason));
                    self.wrong(document.at(steps, Part::Value), message);
                }
            }
        }
        reasons
    }

    /// The entries of `rows` or `expect`, with where they stand.
    fn ports<'v>(&mut self, document: &Document, value: &'v Value, steps: &Steps) -> Vec<(PortName, &'v Value, Steps)> {
        let map = match value {
            Value::Null => return Vec::new(),
            Value::Mapping(map) => map,
            other => {
                let message = format!("expected a map of stages, found {}", yaml::describe(other));
                self.wrong(document.at(steps, Part::Value), message);
                return Vec::new();
            }
        };
        let mut ports = Vec::new();
        for (key, value) in map {
            let Some(text) = key.as_str() else {
                let message = format!("names of stages must be text, found {}", brief(key));
                self.wrong(document.at(steps, Part::Value), message);
                continue;
            };
            let here = steps.key(text);
            match PortName::parse(text) {
                Some(port) => ports.push((port, value, here)),
                None => {
                    let message = format!("`{text}` names no stage: write `stage`, `stage.port` or `group/stage.port`");
                    self.wrong(document.at(&here, Part::Key), message);
                }
            }
        }
        ports
    }

    fn row_list(&mut self, document: &Document, rows: &Value, steps: &Steps) -> Vec<Mapping> {
        let rows = match rows {
            Value::Null => return Vec::new(),
            Value::Sequence(rows) => rows,
            other => {
                let message = format!("expected a list of rows, found {}", yaml::describe(other));
                self.wrong(document.at(steps, Part::Value), message);
                return Vec::new();
            }
        };
        let rows = rows.iter().enumerate();
        // A row that is none keeps its place, so that the places of others stay right.
        rows.map(|(index, row)| {
            self.map(document, row, &steps.index(index), "a row")
                .unwrap_or_default()
        })
        .collect()
    }

    /// The value as a map, or what is wrong with it.
    fn map(&mut self, document: &Document, value: &Value, steps: &Steps, what: &str) -> Option<Mapping> {
        match value {
            Value::Mapping(map) => Some(map.clone()),
            other => {
                let message = format!("{what}: expected a map, found {}", yaml::describe(other));
                self.wrong(document.at(steps, Part::Value), message);
                None
            }
        }
    }
}
