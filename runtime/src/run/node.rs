//! What every kind of region does with its nodes: reports them, writes their snapshots, commits their partitions.

use crate::dataflow::job::Failure;
use crate::planner::state::PlanState;
use flow_base::digest::Digest;
use flow_base::event::Event;
use flow_base::partition::Partition;
use flow_kind::kind::Role;
use flow_plan::graph::RegionKind;
use flow_plan::run_error::RunError;
use flow_store::{ArtifactWriter, Counts, PortRows, SnapshotWriter};

/// Writes to the run's snapshots the records of a node: all of them, or those that are reused before the others are
/// made.
pub(super) fn note(state: &PlanState, node: usize, snapshots: &SnapshotWriter) -> Result<(), RunError> {
    let (described, node_state) = (&state.graph.nodes[node], &state.nodes[node]);
    let feeds_log = matches!(state.graph.regions[described.region].kind, RegionKind::Log { log } if log != node);
    if described.role == Role::Export || feeds_log {
        return Ok(());
    }
    // An incomplete set of partitions must not be reused as the stage's result, and of nodes left out nothing is known.
    if state.is_partial() && !state.selection.selected[node] {
        return Ok(());
    }
    let complete =
        !state.is_partial() && node_state.all_settled && !node_state.never_complete && node_state.missing == 0;
    let recipe = node_state.settled_recipe.unwrap_or(described.recipe);
    let kind = state.stage(node).kind.name();
    Ok(snapshots.note(&described.name, kind, &recipe, complete, node_state.settled.values())?)
}

pub(super) fn started(state: &PlanState, node: usize, run: u64, reused: u64) {
    state.events.send(Event::StageStarted {
        stage: state.graph.nodes[node].name.clone(),
        kind: state.stage(node).kind.name().to_string(),
        run,
        reused,
    });
}

/// The writer of a node's recipe, with what the recipe is made of.
pub(super) fn writer(state: &PlanState, node: usize) -> Result<ArtifactWriter, RunError> {
    let stage = state.stage(node);
    let described = &state.graph.nodes[node];
    let identity = serde_json::json!({
        "kind": stage.kind.name(),
        "version": stage.kind.version(),
        "part": format!("{:?}", described.part).to_lowercase(),
        "settings": stage.settings.identity(),
    });
    let writer = state.store.writer(&described.recipe, &identity)?;
    Ok(writer.with_id_column(state.checked.id_column))
}

pub(super) fn failed(failure: Failure) -> RunError {
    match failure {
        Failure::Stage {
            stage,
            partition,
            error,
        } => RunError::stage(stage, partition, error),
        Failure::Store(error) => RunError::Store(error),
        Failure::Process(message) => RunError::OfProcess { message },
        Failure::Lost(message) => RunError::Process { message },
        Failure::Internal(error) => RunError::internal(error.to_string()),
    }
}

/// Commits the only partition of a node, and settles it.
pub(super) fn commit_one(
    state: &mut PlanState,
    node: usize,
    partition: &Partition,
    key: Digest,
    inputs: Vec<Digest>,
    ports: Vec<PortRows>,
    counts: Counts,
) -> Result<(), RunError> {
    let writer = writer(state, node)?;
    let pending = writer.write_partition(partition, key, inputs, ports, Vec::new(), counts)?;
    let records = writer.commit(vec![pending])?;
    writer.finish([(partition, &key)])?;
    for record in records {
        state.nodes[node].settle(partition, record);
    }
    state.nodes[node].all_settled = true;
    Ok(())
}
