//! Makes the job of a region: bodies' settings, inputs, writers.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::node::writer;
use crate::dataflow::cluster::Cluster;
use crate::dataflow::in_flight::{InFlight, OwnPartitions};
use crate::dataflow::job::{Feed, NodeJob, RegionJob, Signals, StreamedInput, faults};
use crate::planner::state::PlanState;
use flow_base::available_memory::available_memory;
use flow_base::partition::Partition;
use flow_kind::kind::{Conservation, Role};
use flow_plan::graph::{Flow, KEYS_PORT, StagePart};
use flow_plan::run_error::RunError;
use flow_spec::{LimitAction, RejectLimit};
use flow_store::SnapshotWriter;

/// Bytes in flight for each worker: enough that no worker waits for input; more would not be faster.
const ENOUGH_FOR_A_WORKER: u64 = 256 << 20;

/// How many workers each of `processes` has for `left` partitions.
pub(super) fn workers_of_each(state: &PlanState, left: u64, processes: usize) -> usize {
    let share = left.div_ceil(processes.max(1) as u64).max(1);
    state.workers().min(usize::try_from(share).unwrap_or(usize::MAX))
}

/// With `workers` in this process, and as many in each of the others that the dataflow runs on.
#[expect(clippy::too_many_arguments, reason = "what a region consists of")]
pub(super) fn region_job(
    state: &PlanState,
    partitions: Vec<Partition>,
    start: u64,
    nodes: Vec<NodeJob>,
    snapshots: Option<&SnapshotWriter>,
    signals: &Arc<Signals>,
    workers: usize,
    cluster: Option<Arc<Cluster>>,
) -> RegionJob {
    let all_workers = workers * cluster.as_ref().map_or(1, |cluster| cluster.in_dataflow());
    let process = cluster.as_ref().map_or(0, |cluster| cluster.place_in_dataflow());
    let own = OwnPartitions {
        first: (process * workers) as u64,
        workers: workers as u64,
        all: all_workers as u64,
    };
    let share = available_memory().map(|bytes| bytes / 8);
    // What feeds a log are steps with all that they compute on, much larger than the rows of other partitions.
    let (in_flight, bytes) = match nodes.iter().any(|node| node.is_log) {
        true => ((2 * all_workers).max(4), share),
        false => {
            let enough = ENOUGH_FOR_A_WORKER.saturating_mul(workers as u64);
            (
                (4 * all_workers).max(16),
                Some(share.map_or(enough, |share| share.min(enough))),
            )
        }
    };
    RegionJob {
        partitions,
        start,
        nodes,
        workers: all_workers,
        cluster,
        threads: (state.threads() / workers).max(1),
        id_column: state.checked.id_column,
        in_flight: Arc::new(InFlight::new(
            state.options.in_flight.unwrap_or(in_flight).max(1) as u64,
            state.options.in_flight_bytes.or(bytes),
            own,
        )),
        as_bytes: state.options.as_bytes,
        labels: state.options.labels(),
        store: state.store.clone(),
        snapshots: snapshots.cloned(),
        events: state.events.clone(),
        cancel: state.cancel.clone(),
        signals: Arc::clone(signals),
    }
}

/// The job of a node; the caller fills in what depends on the run's partitions.
pub(super) fn node_job(
    state: &mut PlanState,
    node: usize,
    place: &BTreeMap<usize, usize>,
    recorded: bool,
) -> Result<NodeJob, RunError> {
    let described = state.graph.nodes[node].clone();
    let context = state
        .context(node)?
        .ok_or_else(|| RunError::internal(format!("the inputs of `{}` are not settled in time", described.name)))?;
    let mut streams = Vec::new();
    let mut decisions = None;
    for input in &described.inputs {
        let feed = match (input.flow, place.get(&input.node)) {
            (Flow::Stream, Some(&node)) => Feed::Node { node, port: input.port },
            (Flow::Replay, _) => Feed::Artifact(state.artifact(input.node, input.port)?),
            (Flow::Decisions, _) => {
                decisions = Some(Arc::new(state.load_decisions(input.node)?));
                continue;
            }
            _ => continue,
        };
        if let Some(position) = input.position {
            streams.push(StreamedInput {
                position,
                feed,
                stored: None,
            });
        }
    }
    let mut outputs = described.outputs.clone();
    if described.part == StagePart::Keys
        && let Some(port) = outputs.first_mut()
    {
        port.schema = state.global_schema(node, KEYS_PORT)?;
    }
    let writer = if recorded { Some(writer(state, node)?) } else { None };
    let stage = state.stage(node);
    let fault_limit = match stage.max_rejects {
        Some(limit) if limit.action == LimitAction::Fail && recorded => match limit.limit {
            RejectLimit::Count(count) => Some(count),
            RejectLimit::Share(_) => None,
        },
        _ => None,
    };
    let node_state = &state.nodes[node];
    Ok(NodeJob {
        stage: described.name.clone(),
        part: described.part,
        settings: Arc::clone(&stage.settings),
        inputs: context.inputs,
        artifacts: context.artifacts,
        rejects: context.rejects,
        scratch: context.scratch,
        streams,
        stored: if recorded {
            described.stored.clone()
        } else {
            vec![false; outputs.len()]
        },
        outputs,
        conservation: if described.role == Role::Log {
            Conservation::NewRows
        } else {
            described.conservation
        },
        is_source: described.role == Role::Source,
        is_log: described.role == Role::Log,
        source_partitions: if recorded {
            Arc::clone(&node_state.sources)
        } else {
            Arc::default()
        },
        decisions,
        active: Vec::new(),
        record: Vec::new(),
        recipe: described.recipe,
        writer,
        fault_limit,
        total: 0,
        reused: 0,
        reused_faults: node_state.settled.values().map(|record| faults(record)).sum(),
    })
}
