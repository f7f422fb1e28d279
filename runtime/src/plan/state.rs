//! The state of every node during planning and running: partitions, records, digests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use super::Options;
use super::cursor::Cursor;
use super::decisions::{self, ALL, Decisions, digests_schema};
use super::earlier::EarlierPlan;
use super::failures::Failures;
use super::graph::{DECISIONS_PORT, DIGESTS_PORT, Flow, Graph, KEYS_PORT, KeyInput, Node, StagePart};
use super::keys::{self, ListedPartition, source_digest};
use super::select::StageSelection;
use crate::context::{Cancel, Context, StopAsked, Waker};
use crate::digest::Digest;
use crate::error::StageError;
use crate::event::Events;
use crate::host::cores;
use crate::inputs::{Input, Inputs};
use crate::kind::{Body, Role, SourcePartition};
use crate::panic_guard::catch_panic;
use crate::partition::Partition;
use crate::run_error::RunError;
use crate::spec::{Checked, CheckedInput, CheckedStage};
use crate::store::{Artifact, FileRange, Record, Records, RejectSet, Store, artifact_digest};

/// The one partition of a log stage's outputs.
pub(crate) const RESULT: &str = "result";

/// How many runs back older plans are looked at. Runs that had all of no stage, such as those about some partitions, are not
/// counted.
pub(super) const LOOK_BACK: usize = 10;

/// Partitions whose files are digested together: enough for all threads, and few enough that the lists of their files take
/// no memory to speak of.
const DIGESTED_AT_ONCE: usize = 16_384;

#[derive(Default)]
pub(crate) struct NodeState {
    /// The records of the node's recipe; read on first use.
    pub records: Option<Arc<Records>>,
    /// The partitions on which the node works; none while they are not known.
    pub space: Option<Arc<Vec<Partition>>>,
    pub sources: Arc<BTreeMap<Partition, ListedPartition>>,
    /// Digests of the partitions of a source, as far as they were needed.
    pub source_digests: BTreeMap<Partition, Digest>,
    /// Records that later nodes may read, by partition.
    pub settled: BTreeMap<Partition, Arc<Record>>,
    /// No more records will be settled.
    pub all_settled: bool,
    /// The recipe of the settled records: differs from the node's where an older artifact is reused.
    pub settled_recipe: Option<Digest>,
    /// Number of settled records that are out of date.
    pub stale: u64,
    /// Number of partitions of a reused artifact that are lost.
    pub missing: u64,
    /// To be reused, although no run ever completed it.
    pub never_complete: bool,
    whole: BTreeMap<usize, Digest>,
    decided: Option<Arc<BTreeMap<Partition, Digest>>>,
}

impl NodeState {
    /// Settles a partition, and drops values derived from the settled records.
    pub fn settle(&mut self, partition: &Partition, record: Arc<Record>) {
        self.whole.clear();
        self.decided = None;
        self.settled.insert(partition.clone(), record);
    }

    /// Settles partitions in place of all that were.
    pub fn settle_all(&mut self, records: Vec<(Partition, Arc<Record>)>) {
        self.whole.clear();
        self.decided = None;
        self.settled = records.into_iter().collect();
    }

    /// Drops all settled records.
    pub fn unsettle_all(&mut self) {
        self.whole.clear();
        self.decided = None;
        self.settled.clear();
        self.all_settled = false;
        self.settled_recipe = None;
        (self.stale, self.missing, self.never_complete) = (0, 0, false);
    }

    /// Unsettles a partition, which is computed again.
    pub fn unsettle(&mut self, partition: &Partition) {
        self.whole.clear();
        self.decided = None;
        self.settled.remove(partition);
    }
}

/// Whether it is known that a node does not have a partition.
fn lacks(state: &NodeState, partition: &Partition) -> bool {
    let space = state.space.as_ref();
    space.is_some_and(|space| space.binary_search(partition).is_err())
}

pub(crate) struct PlanState {
    pub checked: Arc<Checked>,
    pub graph: Graph,
    pub options: Options,
    pub selection: StageSelection,
    pub store: Store,
    pub nodes: Vec<NodeState>,
    /// Plans of the last runs of the pipeline, the latest first, as far as they were asked for: for reasons.
    pub(super) previous: Vec<EarlierPlan>,
    pub(super) unread: Vec<String>,
    /// How many runs that had all of a stage were read.
    pub(super) complete_read: usize,
    pub events: Events,
    pub cancel: Cancel,
    /// Whether scratch folders may be made.
    pub may_write: bool,
    /// Failures so far, in a run with `--keep-going`.
    pub failures: Failures,
    /// Why a run would be refused, where only a plan is made.
    pub refusals: Vec<RunError>,
}

impl PlanState {
    pub fn new(
        checked: &Arc<Checked>,
        options: &Options,
        store: Store,
        events: &Events,
        may_write: bool,
    ) -> Result<PlanState, RunError> {
        let unread = store.runs()?;
        PlanState::with_runs(checked, options, store, events, may_write, unread)
    }

    /// For a process that follows another one's run: it looks at no earlier runs.
    pub fn follow(
        checked: &Arc<Checked>,
        options: &Options,
        store: Store,
        events: &Events,
    ) -> Result<PlanState, RunError> {
        PlanState::with_runs(checked, options, store, events, true, Vec::new())
    }

    fn with_runs(
        checked: &Arc<Checked>,
        options: &Options,
        store: Store,
        events: &Events,
        may_write: bool,
        unread: Vec<String>,
    ) -> Result<PlanState, RunError> {
        let graph = Graph::new(checked).map_err(|message| RunError::Usage { message, help: None })?;
        let selection = StageSelection::new(checked, &graph, options).map_err(|(message, help)| RunError::Usage {
            message,
            help: Some(help),
        })?;
        let nodes: Vec<NodeState> = graph.nodes.iter().map(|_| NodeState::default()).collect();
        let failures = Failures::new(nodes.len());
        Ok(PlanState {
            checked: Arc::clone(checked),
            graph,
            options: options.clone(),
            selection,
            store,
            nodes,
            previous: Vec::new(),
            unread,
            complete_read: 0,
            events: events.clone(),
            cancel: Cancel::default(),
            may_write,
            failures,
            refusals: Vec::new(),
        })
    }

    pub fn stage(&self, node: usize) -> &CheckedStage {
        &self.checked.stages[self.graph.nodes[node].stage]
    }

    pub fn failed(&self, node: usize, partition: Option<&Partition>, error: StageError) -> RunError {
        RunError::Stage {
            stage: self.stage(node).name.clone(),
            partition: partition.cloned(),
            error,
        }
    }

    /// The records of the node's recipe.
    pub fn records(&mut self, node: usize) -> Result<Arc<Records>, RunError> {
        if let Some(records) = &self.nodes[node].records {
            return Ok(Arc::clone(records));
        }
        let records = Arc::new(self.store.records(&self.graph.nodes[node].recipe)?);
        self.nodes[node].records = Some(Arc::clone(&records));
        Ok(records)
    }

    /// Reads the records of all nodes' recipes, on all threads; errors are reported on first use.
    pub fn read_records(&mut self) {
        let recipes = self.graph.nodes.iter().map(|node| node.recipe).collect();
        let found = self.store.records_of_all(recipes, self.threads());
        for (node, state) in self.graph.nodes.iter().zip(&mut self.nodes) {
            state.records = found.get(&node.recipe).cloned();
        }
    }

    /// The partitions on which a node works; none while a stage before it has yet to run.
    pub fn space(&mut self, node: usize) -> Result<Option<Arc<Vec<Partition>>>, RunError> {
        if let Some(space) = &self.nodes[node].space {
            return Ok(Some(Arc::clone(space)));
        }
        let Node { part, role, inputs, .. } = self.graph.nodes[node].clone();
        let space = match (part, role) {
            (StagePart::Decide, _) => vec![Partition::new(ALL)],
            (_, Role::Export) => Vec::new(),
            (_, Role::Source) => {
                let Some(listed) = self.list_source(node)? else {
                    return Ok(None);
                };
                let names = listed.iter().map(|listed| listed.partition.name.clone()).collect();
                let by_name = listed.into_iter().map(|listed| (listed.partition.name.clone(), listed));
                self.nodes[node].sources = Arc::new(by_name.collect());
                names
            }
            _ => {
                let mut all = Vec::new();
                for input in inputs
                    .iter()
                    .filter(|input| matches!(input.flow, Flow::Stream | Flow::Replay))
                {
                    let Some(space) = self.out_space(input.node)? else {
                        return Ok(None);
                    };
                    if all.is_empty() {
                        all = space.to_vec();
                    } else if all != *space {
                        all.extend(space.iter().cloned());
                        all.sort_unstable();
                        all.dedup();
                    }
                }
                all
            }
        };
        let space = Arc::new(space);
        self.nodes[node].space = Some(Arc::clone(&space));
        Ok(Some(space))
    }

    /// The partitions of a node's outputs.
    fn out_space(&mut self, node: usize) -> Result<Option<Arc<Vec<Partition>>>, RunError> {
        if self.graph.nodes[node].role == Role::Log {
            return Ok(Some(Arc::new(vec![Partition::new(RESULT)])));
        }
        if self.nodes[node].all_settled && !self.selection.selected[node] {
            // Reused, with the partitions that it has.
            return Ok(Some(Arc::new(self.nodes[node].settled.keys().cloned().collect())));
        }
        self.space(node)
    }

    pub(super) fn list_source(&mut self, node: usize) -> Result<Option<Vec<ListedPartition>>, RunError> {
        let Some(context) = self.context(node)? else {
            return Ok(None);
        };
        let listed = catch_panic(|| match self.stage(node).settings.open(&context)? {
            Body::Source(mut body) => {
                let partitions = body.partitions()?;
                let with_ranges = |partition: SourcePartition| {
                    let ranges = body.ranges(&partition.name)?;
                    Ok(ListedPartition { partition, ranges })
                };
                partitions
                    .into_iter()
                    .map(with_ranges)
                    .collect::<Result<Vec<_>, StageError>>()
            }
            _ => Err(StageError::failed("the kind says it is a source, but its body is none")),
        })
        .map_err(|error| self.failed(node, None, error))?;
        if let Some(pair) = listed
            .windows(2)
            .map(|pair| [&pair[0].partition.name, &pair[1].partition.name])
            .find(|pair| pair[0] >= pair[1])
        {
            let message = format!(
                "partitions must be sorted by name, each name once: `{}` before `{}`",
                pair[0], pair[1]
            );
            return Err(self.failed(node, None, StageError::failed(message)));
        }
        Ok(Some(listed))
    }

    /// The context with which a body of the node is opened, on one worker; none while a whole input is not settled.
    pub fn context(&mut self, node: usize) -> Result<Option<Context>, RunError> {
        let Some(artifacts) = self.whole_inputs(node)? else {
            return Ok(None);
        };
        let stage = self.stage(node).name.clone();
        let scratch = if self.may_write {
            self.store.scratch(&stage)?
        } else {
            stage
                .split('/')
                .fold(self.store.dir().join("scratch"), |folder, part| folder.join(part))
        };
        Ok(Some(Context {
            stage,
            inputs: self.described_inputs(node),
            artifacts: artifacts.into(),
            rejects: self.rejects_before(node),
            worker: 0,
            workers: 1,
            threads: self.threads(),
            scratch,
            events: self.events.clone(),
            cancel: self.cancel.clone(),
            stop: StopAsked::default(),
            waker: Waker::default(),
            processes: self.options.processes.clone(),
            share: None,
            compare_unreadable: None,
        }))
    }

    fn described_inputs(&self, node: usize) -> Inputs {
        let input = |input: &CheckedInput| Input {
            name: input.name.clone(),
            port: input.declared,
            schema: input.schema.clone(),
            before: Vec::new(),
        };
        Inputs::new(self.stage(node).inputs.iter().map(input).collect())
    }

    pub fn threads(&self) -> usize {
        self.options.threads.unwrap_or_else(cores).max(1)
    }

    pub fn workers(&self) -> usize {
        self.options.workers.unwrap_or_else(cores).max(1)
    }

    /// The inputs that the kind reads whole, by their place among all.
    fn whole_inputs(&mut self, node: usize) -> Result<Option<Vec<Option<Artifact>>>, RunError> {
        let mut artifacts = vec![None; self.stage(node).inputs.len()];
        for input in self.graph.nodes[node].inputs.clone() {
            let (Some(position), Flow::Whole) = (input.position, input.flow) else {
                continue;
            };
            if !self.nodes[input.node].all_settled {
                return Ok(None);
            }
            artifacts[position] = Some(self.artifact(input.node, input.port)?);
        }
        Ok(Some(artifacts))
    }

    /// The settled records of a node's port as an artifact.
    pub fn artifact(&self, node: usize, port: usize) -> Result<Artifact, RunError> {
        let described = &self.graph.nodes[node];
        let port = &described.outputs[port];
        let state = &self.nodes[node];
        let recipe = state.settled_recipe.unwrap_or(described.recipe);
        let schema = match described.part {
            StagePart::Keys | StagePart::Decide if port.name != DIGESTS_PORT => self.global_schema(node, &port.name)?,
            StagePart::Decide => digests_schema(),
            _ => port.schema.clone(),
        };
        Ok(self
            .store
            .artifact(&recipe, &port.name, schema, state.settled.values())?)
    }

    /// The digest of [`PlanState::artifact`], without making it.
    fn digest_of_whole(&self, node: usize, port: usize) -> Result<Digest, RunError> {
        let port = &self.graph.nodes[node].outputs[port].name;
        Ok(artifact_digest(port, self.nodes[node].settled.values())?)
    }

    /// The schema of key rows and decisions, which only the body knows.
    pub fn global_schema(&self, node: usize, port: &str) -> Result<arrow::datatypes::SchemaRef, RunError> {
        let stage = self.stage(node);
        let context = Context {
            stage: stage.name.clone(),
            inputs: self.described_inputs(node),
            artifacts: vec![None; stage.inputs.len()].into(),
            rejects: RejectSet::default(),
            worker: 0,
            workers: 1,
            threads: 1,
            scratch: PathBuf::new(),
            events: Events::default(),
            cancel: self.cancel.clone(),
            stop: StopAsked::default(),
            waker: Waker::default(),
            processes: None,
            share: None,
            compare_unreadable: None,
        };
        catch_panic(|| match stage.settings.open(&context)? {
            Body::Global(body) if port == KEYS_PORT => Ok(body.key_schema()),
            Body::Global(body) if port == DECISIONS_PORT => Ok(body.decision_schema()),
            _ => Err(StageError::failed("the kind says it is global, but its body is not")),
        })
        .map_err(|error| self.failed(node, None, error))
    }

    /// All decisions of a settled `decide`.
    pub fn load_decisions(&self, decide: usize) -> Result<Decisions, RunError> {
        let (rows, list) = (self.artifact(decide, 0)?, self.artifact(decide, 1)?);
        Decisions::load(&rows, &list).map_err(|error| self.failed(decide, None, error))
    }

    /// As [`PlanState::key_input`], for each of the partitions, which ascend.
    pub fn key_input_of_each(&mut self, input: KeyInput, space: &[Partition]) -> Result<Vec<Option<Digest>>, RunError> {
        match input {
            KeyInput::Source { node } => {
                let state = &self.nodes[node];
                let mut digests = Cursor::new(state.source_digests.iter());
                let mut sources = Cursor::new(state.sources.iter());
                let of_partition = |partition| match (sources.find(partition), digests.find(partition)) {
                    (_, Some(digest)) => Some(*digest),
                    (Some(_), None) => None,
                    (None, None) => Some(keys::absent()),
                };
                Ok(space.iter().map(of_partition).collect())
            }
            KeyInput::Partition { node, port } if self.failures.is_empty() => {
                let state = &self.nodes[node];
                let name = &self.graph.nodes[node].outputs[port].name;
                let absent = state.all_settled.then(keys::absent);
                let mut settled = Cursor::new(state.settled.iter());
                let of_partition = |partition| {
                    let port = settled.find(partition).and_then(|record| record.ports.get(name));
                    port.map(|port| port.digest).or(absent)
                };
                Ok(space.iter().map(of_partition).collect())
            }
            // The same for all partitions, or found by a map of its own.
            _ => space.iter().map(|partition| self.key_input(input, partition)).collect(),
        }
    }

    /// The digest of one input of one partition for its key; none while it is unknown.
    pub fn key_input(&mut self, input: KeyInput, partition: &Partition) -> Result<Option<Digest>, RunError> {
        match input {
            KeyInput::Source { node } => Ok(match self.nodes[node].source_digests.get(partition) {
                Some(digest) => Some(*digest),
                None if self.nodes[node].sources.contains_key(partition) => None,
                None => Some(keys::absent()),
            }),
            KeyInput::Partition { node, port } => {
                let state = &self.nodes[node];
                let name = &self.graph.nodes[node].outputs[port].name;
                Ok(
                    match state.settled.get(partition).and_then(|record| record.ports.get(name)) {
                        Some(port) => Some(port.digest),
                        // After a failure a stage is never settled, but partitions that it does not have at all are
                        // known.
                        None => (state.all_settled || !self.failures.is_empty() && lacks(state, partition))
                            .then(keys::absent),
                    },
                )
            }
            KeyInput::Whole { node, port } => {
                if !self.nodes[node].all_settled {
                    return Ok(None);
                }
                if let Some(digest) = self.nodes[node].whole.get(&port) {
                    return Ok(Some(*digest));
                }
                let digest = self.digest_of_whole(node, port)?;
                self.nodes[node].whole.insert(port, digest);
                Ok(Some(digest))
            }
            KeyInput::Decisions { node } => {
                if !self.nodes[node].all_settled {
                    return Ok(None);
                }
                if self.nodes[node].decided.is_none() {
                    let list = self.artifact(node, 1)?;
                    let digests = decisions::digests(&list).map_err(|error| self.failed(node, None, error))?;
                    self.nodes[node].decided = Some(Arc::new(digests));
                }
                let decided = self.nodes[node].decided.as_ref();
                Ok(decided.map(|decided| decided.get(partition).copied().unwrap_or_else(decisions::nothing_said)))
            }
        }
    }

    /// Digests the files of the named partitions of a source; known digests are not computed again.
    pub fn digest_sources(&mut self, node: usize, partitions: &[Partition]) -> Result<(), RunError> {
        let state = &self.nodes[node];
        let wanted: Vec<&ListedPartition> = partitions
            .iter()
            .filter(|partition| !state.source_digests.contains_key(*partition))
            .filter_map(|partition| state.sources.get(partition))
            .collect();
        let sources = self.store.sources();
        let mut made = Vec::with_capacity(wanted.len());
        for wanted in wanted.chunks(DIGESTED_AT_ONCE) {
            let files = wanted.iter().flat_map(|listed| listed.partition.files.iter().cloned());
            let files: Vec<PathBuf> = files.collect();
            let ranges = wanted.iter().flat_map(|listed| listed.ranges.iter().cloned());
            let ranges: Vec<FileRange> = ranges.collect();
            let mut digests = sources.digest_all(&files, self.threads()).into_iter();
            let mut of_ranges = sources.digest_ranges(&ranges, self.threads()).into_iter();
            for listed in wanted {
                let files = digests.by_ref().take(listed.partition.files.len());
                let files = files.collect::<Result<Vec<_>, _>>()?;
                let ranges = of_ranges.by_ref().take(listed.ranges.len());
                let ranges = ranges.collect::<Result<Vec<_>, _>>()?;
                let digest = source_digest(&listed.partition, &files, &ranges);
                made.push((listed.partition.name.clone(), digest));
            }
        }
        self.nodes[node].source_digests.extend(made);
        Ok(())
    }

    /// Whether all nodes upstream of a node are settled.
    pub fn is_settled_upstream(&self, node: usize) -> bool {
        let upstream = self.graph.upstream(node);
        upstream.iter().all(|upstream| self.nodes[*upstream].all_settled)
    }

    /// The rejects of every settled stage before the whole inputs of a source, a log or an export, or before the decision of a
    /// global stage, in the order of the pipeline.
    fn rejects_before(&self, node: usize) -> RejectSet {
        let described = &self.graph.nodes[node];
        let decides = described.part == StagePart::Decide;
        if !decides && !matches!(described.role, Role::Source | Role::Log | Role::Export) {
            return RejectSet::default();
        }
        let mut before = BTreeSet::new();
        if decides {
            before.extend(self.graph.upstream(node));
        }
        for input in described.inputs.iter().filter(|input| input.flow == Flow::Whole) {
            before.insert(input.node);
            before.extend(self.graph.upstream(input.node));
        }
        let settled = before.into_iter().filter(|before| self.nodes[*before].all_settled);
        self.rejects_of(&settled.collect::<Vec<_>>())
    }

    /// The rejects of settled nodes.
    pub fn rejects_of(&self, nodes: &[usize]) -> RejectSet {
        let mut stages = Vec::new();
        for &node in nodes {
            let (described, state) = (&self.graph.nodes[node], &self.nodes[node]);
            if matches!(described.part, StagePart::Keys | StagePart::Decide) || described.role == Role::Log {
                continue;
            }
            let recipe = state.settled_recipe.unwrap_or(described.recipe);
            let with_rejects = state.settled.values().filter(|record| record.rejects.rows > 0);
            stages.push((self.stage(node).name.clone(), recipe, with_rejects.cloned().collect()));
        }
        self.store.reject_set(&stages)
    }
}
