//! What is known of every node during planning and running, and how it is read: sources, records, digests, artifacts.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use crate::options::Options;
use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_base::event::Events;
use flow_base::host::cores;
use flow_base::panic_guard::catch_panic;
use flow_base::partition::Partition;
use flow_decide::stored::{self, ALL, Decisions, digests_schema};
use flow_kind::context::{Cancel, Context, StopAsked, Waker};
use flow_kind::inputs::{Input, Inputs};
use flow_kind::kind::{Body, Role, SourcePartition};
use flow_plan::earlier::EarlierPlan;
use flow_plan::failures::{Failures, Runnable};
use flow_plan::graph::{DECISIONS_PORT, DIGESTS_PORT, Flow, Graph, KEYS_PORT, KeyInput, Node, RESULT, StagePart};
use flow_plan::keys::{ListedPartition, source_digest};
use flow_plan::node_state::NodeState;
use flow_plan::run_error::RunError;
use flow_plan::select::StageSelection;
use flow_plan::snapshot::Snapshot;
use flow_plan::verdict::NodeVerdict;
use flow_spec::{Checked, CheckedInput, CheckedStage};
use flow_store::{Artifact, FileRange, Records, RejectSet, Store, artifact_digest};

/// Partitions whose files are digested together: enough for all threads, and few enough that the lists of their files take
/// hardly any memory.
const DIGESTED_AT_ONCE: usize = 16_384;

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
        let selection =
            StageSelection::new(checked, &graph, &options.selection).map_err(|(message, help)| RunError::Usage {
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
        RunError::stage(self.stage(node).name.clone(), partition.cloned(), error)
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
            labels: self.options.labels(),
            inputs: self.described_inputs(node),
            artifacts: artifacts.into(),
            rejects: self.rejects_before(node),
            worker: 0,
            workers: 1,
            threads: self.threads(),
            scratch,
            storage: self.options.storage.clone(),
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
            labels: self.options.labels(),
            inputs: self.described_inputs(node),
            artifacts: vec![None; stage.inputs.len()].into(),
            rejects: RejectSet::default(),
            worker: 0,
            workers: 1,
            threads: 1,
            scratch: PathBuf::new(),
            storage: self.options.storage.clone(),
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

    /// Reads what the keys of a node need of other nodes' artifacts.
    pub(super) fn read_key_inputs(&mut self, node: usize) -> Result<(), RunError> {
        for input in self.graph.nodes[node].key_inputs.clone() {
            match input {
                KeyInput::Whole { node, port }
                    if self.nodes[node].all_settled && !self.nodes[node].whole.contains_key(&port) =>
                {
                    let digest = self.digest_of_whole(node, port)?;
                    self.nodes[node].whole.insert(port, digest);
                }
                KeyInput::Decisions { node } if self.nodes[node].all_settled && self.nodes[node].decided.is_none() => {
                    let list = self.artifact(node, 1)?;
                    let digests = stored::digests(&list).map_err(|error| self.failed(node, None, error))?;
                    self.nodes[node].decided = Some(Arc::new(digests));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// What is known now.
    pub(super) fn snapshot(&self) -> Snapshot<'_> {
        Snapshot {
            checked: &self.checked,
            graph: &self.graph,
            selection: &self.selection,
            nodes: &self.nodes,
            has_failures: !self.failures.is_empty(),
            is_partial: self.is_partial(),
        }
    }

    /// Whether only some partitions are selected.
    pub fn is_partial(&self) -> bool {
        !self.options.selection.partitions.is_empty()
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
        self.snapshot().is_settled_upstream(node)
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

    /// Notes the failure of a node of a region. False: it was noted already, so leaving it out again does not help.
    ///
    /// # Errors
    /// Returns errors that are no failure of a stage of the region, such as a full disk of the state directory, or a
    /// signal.
    pub fn note_failure(&mut self, region: usize, error: RunError) -> Result<bool, RunError> {
        self.failures.note(&self.graph, &self.checked, region, error)
    }

    /// Notes that a node ran but must not be used, nor the nodes after it in its region, since it rejected too many
    /// rows.
    pub fn note_unusable(&mut self, node: usize, error: RunError) {
        let unusable = self.failures.note_unusable(&self.graph, node, error);
        self.set_not_settled(unusable);
    }

    /// Leaves out a region as a whole.
    pub fn leave_out_region(&mut self, region: usize) {
        let nodes = self.graph.regions[region].nodes.clone();
        self.failures.leave_out(&nodes);
        self.set_not_settled(nodes);
    }

    /// Removes failed partitions and those that depend on them from the verdicts of a region.
    pub fn runnable(&mut self, region: usize, verdicts: Vec<NodeVerdict>) -> Runnable {
        let selected = &self.selection.selected;
        let (runnable, left_out) = self
            .failures
            .runnable(&self.graph, &self.nodes, selected, region, verdicts);
        self.set_not_settled(left_out);
        runnable
    }

    fn set_not_settled(&mut self, nodes: Vec<usize>) {
        nodes.into_iter().for_each(|node| self.nodes[node].all_settled = false);
    }
}
