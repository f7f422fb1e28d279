//! Runs one region: decides which partitions run, settles the nodes that are left out, and runs the others by the
//! region's kind (dataflow, decide, log, export).

use std::time::Instant;

use super::counts::RunCounts;
use super::node::note;
use super::running::Running;
use super::{dataflow, export, global, log};
use crate::planner::state::PlanState;
use flow_base::event::Event;
use flow_kind::context::Cancel;
use flow_plan::failures::Runnable;
use flow_plan::graph::RegionKind;
use flow_plan::run_error::RunError;

/// Runs a region, and again without what failed, where the run is to go on after failures: on what is committed, so that
/// partitions that were in flight are computed again.
pub(super) fn run_on(
    state: &mut PlanState,
    region: usize,
    running: &Running,
    run_counts: &mut RunCounts,
) -> Result<(), RunError> {
    loop {
        let Err(error) = run(state, region, running, run_counts) else {
            return Ok(());
        };
        if !state.options.keep_going {
            return Err(error);
        }
        let said = error.to_string();
        let stage = match &error {
            RunError::Stage { stage, .. } => Some(stage.clone()),
            _ => None,
        };
        if !state.note_failure(region, error)? {
            state.leave_out_region(region);
            return Ok(());
        }
        state.events.send(Event::warning(
            stage,
            format!("{said}; the run goes on with what does not depend on it"),
        ));
        // The run is ending: partitions in flight are dropped.
        state.cancel = Cancel::default();
        for node in state.graph.regions[region].nodes.clone() {
            state.nodes[node].records = None;
        }
    }
}

fn run(state: &mut PlanState, region: usize, running: &Running, run_counts: &mut RunCounts) -> Result<(), RunError> {
    let snapshots = &running.snapshots;
    let nodes = state.graph.regions[region].nodes.clone();
    let selected = nodes.iter().any(|node| state.selection.selected[*node]);
    if run_counts.ran > 0 || !state.failures.is_empty() {
        // An earlier stage of this run may have written records under the recipe of one of these.
        nodes.iter().for_each(|node| state.nodes[*node].records = None);
    }
    let begun = Instant::now();
    let verdicts = state.decide(region)?;
    tracing::debug!(region, elapsed = ?begun.elapsed(), "decided what runs");
    let mut noted = Vec::with_capacity(nodes.len());
    for &node in &nodes {
        if state.selection.selected[node] {
            noted.push(node);
            continue;
        }
        let is_current = state.nodes[node].all_settled;
        state.settle_as_it_stands(node)?;
        if is_beyond(state, node, is_current) {
            state.nodes[node].beyond = true;
            continue;
        }
        noted.push(node);
        let stale = state.nodes[node].stale;
        if stale > 0 && !state.is_partial() && state.graph.nodes[node].stored.contains(&true) {
            let message = match stale {
                1 => "a partition is used although its stored output is stale".to_string(),
                _ => format!("{stale} partitions are used although their stored output is stale"),
            };
            state
                .events
                .send(Event::warning(Some(state.graph.nodes[node].name.clone()), message));
        }
    }
    if !selected {
        noted.iter().try_for_each(|node| note(state, *node, snapshots))?;
        return Ok(snapshots.flush()?);
    }
    demand_artifacts(state, &nodes)?;
    let Runnable {
        nodes,
        verdicts,
        incomplete,
    } = state.runnable(region, verdicts);
    if nodes.is_empty() {
        return Ok(snapshots.flush()?);
    }
    let begun = Instant::now();
    match state.graph.regions[region].kind {
        RegionKind::Dataflow => dataflow::run(state, &nodes, verdicts, running, run_counts),
        RegionKind::Decide { node } => global::run(state, node, verdicts, running, run_counts),
        RegionKind::Export { node } => export::run(state, node, verdicts, &running.id, run_counts),
        RegionKind::Log { log } => log::run(state, &nodes, log, verdicts, running, run_counts),
    }?;
    let stages = || nodes.iter().map(|node| state.graph.nodes[*node].name.as_str());
    tracing::debug!(region, stages = ?stages().collect::<Vec<_>>(), elapsed = ?begun.elapsed(), "region");
    for node in incomplete {
        state.nodes[node].all_settled = false;
    }
    let noted = nodes.iter().filter(|node| noted.contains(node));
    noted.into_iter().try_for_each(|node| note(state, *node, snapshots))?;
    Ok(snapshots.flush()?)
}

/// Whether a node that is not selected only follows those that are, and has other input than their present output.
fn is_beyond(state: &PlanState, node: usize, is_current: bool) -> bool {
    let any = |nodes: Vec<usize>| nodes.iter().any(|node| state.selection.selected[*node]);
    let mut inputs = state.graph.nodes[node].inputs.iter();
    (!is_current || inputs.any(|input| state.nodes[input.node].beyond))
        && any(state.graph.upstream(node))
        && !any(state.graph.downstream(node))
}

/// Refuses to run on artifacts of unselected stages that are incomplete or out of date.
fn demand_artifacts(state: &PlanState, nodes: &[usize]) -> Result<(), RunError> {
    // Nodes that run, and unselected nodes that feed them.
    let mut works: Vec<usize> = Vec::new();
    for &node in nodes.iter().rev() {
        let feeds = |reader: &usize| {
            let inputs = &state.graph.nodes[*reader].inputs;
            inputs.iter().any(|input| input.node == node && !input.flow.is_stored())
        };
        if state.selection.selected[node] || works.iter().any(feeds) {
            works.push(node);
        }
    }
    for &node in works.iter().rev() {
        if state.stage(node).shape.needs_current {
            demand_current(state, node)?;
        }
        for input in &state.graph.nodes[node].inputs {
            let (producer, node_state) = (&state.graph.nodes[input.node], &state.nodes[input.node]);
            if !input.flow.is_stored() || state.selection.selected[input.node] {
                continue;
            }
            let lacks = if node_state.never_complete && node_state.settled.is_empty() {
                "which has no artifact yet".to_string()
            } else if node_state.never_complete {
                "whose artifact was never completed".to_string()
            } else if node_state.missing > 0 {
                format!("whose artifact has lost {} partitions", node_state.missing)
            } else {
                continue;
            };
            return Err(RunError::Usage {
                message: format!(
                    "stage `{}` reads `{}`, {lacks}",
                    state.graph.nodes[node].name, producer.name
                ),
                help: Some(format!(
                    "run `{}` first, or leave out --only and --from",
                    state.stage(input.node).name
                )),
            });
        }
    }
    Ok(())
}

/// Refuses to run on results that may be out of date, however far upstream of the node.
fn demand_current(state: &PlanState, node: usize) -> Result<(), RunError> {
    for upstream in state.graph.upstream(node) {
        let (described, node_state) = (&state.graph.nodes[upstream], &state.nodes[upstream]);
        let is_current = node_state.stale == 0 && node_state.missing == 0 && !node_state.never_complete;
        if is_current || state.selection.selected[upstream] || !described.stored.contains(&true) {
            continue;
        }
        return Err(RunError::Usage {
            message: format!(
                "stage `{}` needs up-to-date input, but the stored output of `{}` is stale",
                state.graph.nodes[node].name, described.name
            ),
            help: Some("leave out --only and --from".to_string()),
        });
    }
    Ok(())
}
