//! Tests as written in a pipeline file: rows that replace stages, and the expected output of others.

use std::collections::BTreeMap;
use std::fmt;

use super::edges::is_stage_name;
use super::pipeline::Origin;
use super::source::Place;
use super::yaml::{Mapping, Part, Steps};
use flow_base::partition::Partition;

/// One entry of `tests`. Its form was checked; whether there are such stages and columns is known once the pipeline is
/// checked with the test's parameters (see `flow_runtime::pipeline_test`).
#[derive(Clone, Debug)]
pub struct TestCase {
    pub name: String,
    /// The test's place in its file.
    pub origin: Origin,
    /// Values of parameters.
    pub(super) params: Mapping,
    pub rows: Vec<TestRows>,
    pub expect: Vec<Expectation>,
}

/// The rows that a port gives in a test.
#[derive(Clone, Debug)]
pub struct TestRows {
    pub port: PortName,
    /// In the order of the file; each partition once.
    pub partitions: Vec<(Partition, Vec<Mapping>)>,
}

/// The expected output of a stage. At least one of the two fields is given.
#[derive(Clone, Debug)]
pub struct Expectation {
    pub port: PortName,
    pub rows: Option<ExpectedRows>,
    /// The number of rejects for each reason; other reasons must not occur.
    pub rejects: Option<BTreeMap<String, u64>>,
}

#[derive(Clone, Debug)]
pub enum ExpectedRows {
    Count(u64),
    /// All rows, over the partitions sorted by name; of each the columns that count.
    Values(Vec<Mapping>),
}

/// `stage`, `stage.port` or `group/stage.port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortName {
    pub stage: String,
    /// None: the first port.
    pub port: Option<String>,
}

impl PortName {
    pub fn parse(text: &str) -> Option<PortName> {
        let (stage, port) = match text.split_once('.') {
            Some((stage, port)) => (stage, Some(port)),
            None => (text, None),
        };
        (stage.split('/').all(is_stage_name) && port.is_none_or(is_stage_name)).then(|| PortName {
            stage: stage.to_string(),
            port: port.map(str::to_string),
        })
    }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.port {
            Some(port) => write!(f, "{}.{port}", self.stage),
            None => f.write_str(&self.stage),
        }
    }
}

impl TestCase {
    /// The place of a part of the test; `below` is its path from the test's name.
    pub fn place(&self, below: &Steps, part: Part) -> Place {
        self.origin.place(below, part)
    }
}
