//! What process 0 sends the others of a run, and their answers.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::dataflow::job::KeyPart;
use flow_base::digest::Digest;
use flow_base::partition::Partition;
use flow_plan::keys::ListedPartition;
use flow_store::{NotedFile, Record};

#[derive(Serialize, Deserialize)]
pub(super) enum Invitation {
    /// To take part in a run, which has a folder in the state directory. `look_at` are some of its source files with their
    /// sizes, which the process has to see, too.
    Run {
        run: String,
        look_at: Vec<(PathBuf, u64)>,
    },
    /// All partitions of the region that comes next, sorted.
    Partitions(Vec<Partition>),
    /// To take part in a region. Begins with [`Invitation::Begin`], if all agreed.
    Region(Box<RegionMessage>),
    /// To run a log, and the stages that feed it, beside process 0. Begins with [`Invitation::Begin`], too.
    Log(Box<LogMessage>),
    Begin,
    Cancel,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Answer {
    Agreed,
    Refused(String),
}

/// The share of one process in a region.
#[derive(Serialize, Deserialize)]
pub(super) struct RegionMessage {
    pub session: u32,
    /// Of each process.
    pub workers: usize,
    /// Producers first.
    pub nodes: Vec<NodeMessage>,
    pub settled: Vec<SettledNode>,
}

/// A log that each process runs for itself, with the stages that feed it.
#[derive(Serialize, Deserialize)]
pub(super) struct LogMessage {
    pub session: u32,
    /// Of each process.
    pub workers: usize,
    /// Producers first.
    pub nodes: Vec<LogNodeMessage>,
    pub settled: Vec<SettledNode>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct LogNodeMessage {
    /// Its place in the graph, which follows from the pipeline.
    pub node: usize,
    pub recipe: Digest,
    /// Places among the partitions, which are the steps that are left, of those that it does not have.
    pub idle: Vec<usize>,
}

/// What the process is to do of a node. Ordinals are places among the partitions of the region, of the process's own ones.
#[derive(Serialize, Deserialize)]
pub(super) struct NodeMessage {
    /// Its place in the graph, which follows from the pipeline.
    pub node: usize,
    pub recipe: Digest,
    pub active: Vec<usize>,
    pub record: Vec<KeyOfPartition>,
    pub stored: Vec<StoredInput>,
    pub sources: Vec<ListedPartition>,
    /// What is known of the sources' files.
    pub noted: Vec<NotedFile>,
    /// Records of its partitions that are committed already.
    pub standing: Vec<Record>,
}

/// The parts of the key under which a partition is recorded.
#[derive(Serialize, Deserialize)]
pub(super) struct KeyOfPartition {
    pub ordinal: usize,
    pub parts: Vec<KeyPart>,
}

/// Partitions of an input that are read where they are stored.
#[derive(Serialize, Deserialize)]
pub(super) struct StoredInput {
    /// In the stage's `from`.
    pub position: usize,
    pub ordinals: Vec<usize>,
}

/// Records of a node that others read.
#[derive(Serialize, Deserialize)]
pub(super) struct SettledNode {
    pub node: usize,
    pub recipe: Digest,
    pub records: Vec<Record>,
}
