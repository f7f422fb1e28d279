//! Runs one region: decides, settles what is left out, and hands the rest to what fits the region.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::RunError;
use super::{dataflow, export, global, log};
use crate::dataflow::job::{Failure, Signals};
use crate::event::Event;
use crate::kind::Role;
use crate::partition::Partition;
use crate::plan::graph::RegionKind;
use crate::plan::ledger::Ledger;
use crate::store::{ArtifactWriter, Counts, PortRows, SnapshotWriter};

/// How many partitions ran and were reused.
#[derive(Default)]
pub(super) struct Ran {
    pub ran: u64,
    pub reused: u64,
    by_node: BTreeMap<usize, (u64, u64)>,
}

impl Ran {
    pub fn add(&mut self, node: usize, ran: u64, reused: u64) {
        self.ran += ran;
        self.reused += reused;
        let entry = self.by_node.entry(node).or_default();
        *entry = (entry.0 + ran, entry.1 + reused);
    }

    pub fn of(&self, node: usize) -> (u64, u64) {
        self.by_node.get(&node).copied().unwrap_or_default()
    }
}

pub(super) fn run(
    ledger: &mut Ledger,
    region: usize,
    run: &str,
    snapshots: &SnapshotWriter,
    signals: &Arc<Signals>,
    ran: &mut Ran,
) -> Result<(), RunError> {
    let nodes = ledger.graph.regions[region].nodes.clone();
    let selected = nodes.iter().any(|node| ledger.selection.selected[*node]);
    if ran.ran > 0 {
        // A stage before may have written under the very recipe of one of these.
        nodes.iter().for_each(|node| ledger.nodes[*node].records = None);
    }
    let verdicts = ledger.decide(region)?;
    for &node in &nodes {
        if ledger.selection.selected[node] {
            continue;
        }
        ledger.settle_as_it_stands(node)?;
        let stale = ledger.nodes[node].stale;
        if stale > 0 && ledger.graph.nodes[node].kept.contains(&true) {
            let message = format!("{stale} partitions are taken as they stand, though the plan would make them again");
            ledger.events.send(Event::Warning {
                stage: Some(ledger.graph.nodes[node].name.clone()),
                message,
            });
        }
    }
    if !selected {
        nodes.iter().try_for_each(|node| note(ledger, *node, snapshots))?;
        return Ok(snapshots.flush()?);
    }
    demand_artifacts(ledger, &nodes)?;
    match ledger.graph.regions[region].kind {
        RegionKind::Dataflow => dataflow::run(ledger, &nodes, verdicts, snapshots, signals, ran),
        RegionKind::Decide { node } => global::run(ledger, node, verdicts, ran),
        RegionKind::Export { node } => export::run(ledger, node, verdicts, run, ran),
        RegionKind::Log { log } => log::run(ledger, &nodes, log, verdicts, snapshots, signals, ran),
    }?;
    nodes.iter().try_for_each(|node| note(ledger, *node, snapshots))?;
    Ok(snapshots.flush()?)
}

/// Notes in the run's snapshots what a node has: all of it, or what is reused before the rest is made.
pub(super) fn note(ledger: &Ledger, node: usize, snapshots: &SnapshotWriter) -> Result<(), RunError> {
    let (described, state) = (&ledger.graph.nodes[node], &ledger.nodes[node]);
    let feeds_log = matches!(ledger.graph.regions[described.region].kind, RegionKind::Log { log } if log != node);
    if described.role == Role::Export || feeds_log {
        return Ok(());
    }
    let complete = state.all_settled && !state.never_complete && state.missing == 0;
    let recipe = state.settled_recipe.unwrap_or(described.recipe);
    let kind = ledger.stage(node).kind.name();
    Ok(snapshots.note(&described.name, kind, &recipe, complete, state.settled.values())?)
}

/// Refuses to run on artifacts of stages that are left out and do not have all of theirs, or not as they are needed.
fn demand_artifacts(ledger: &Ledger, nodes: &[usize]) -> Result<(), RunError> {
    // Those that run, and those that are left out but feed them.
    let mut works: Vec<usize> = Vec::new();
    for &node in nodes.iter().rev() {
        let feeds = |reader: &usize| {
            let inputs = &ledger.graph.nodes[*reader].inputs;
            inputs.iter().any(|input| input.node == node && !input.flow.is_stored())
        };
        if ledger.selection.selected[node] || works.iter().any(feeds) {
            works.push(node);
        }
    }
    for &node in works.iter().rev() {
        if ledger.stage(node).shape.needs_current {
            demand_current(ledger, node)?;
        }
        for input in &ledger.graph.nodes[node].inputs {
            let (producer, state) = (&ledger.graph.nodes[input.node], &ledger.nodes[input.node]);
            if !input.flow.is_stored() || ledger.selection.selected[input.node] {
                continue;
            }
            let lacks = if state.never_complete && state.settled.is_empty() {
                "which has no artifact yet".to_string()
            } else if state.never_complete {
                "whose artifact was never completed".to_string()
            } else if state.missing > 0 {
                format!("whose artifact has lost {} partitions", state.missing)
            } else {
                continue;
            };
            return Err(RunError::Usage {
                message: format!(
                    "stage `{}` reads `{}`, {lacks}",
                    ledger.graph.nodes[node].name, producer.name
                ),
                help: Some(format!(
                    "run `{}` first, or leave out --only and --from",
                    ledger.stage(input.node).name
                )),
            });
        }
    }
    Ok(())
}

/// Refuses to run on what was taken as it stands, however far before the node.
fn demand_current(ledger: &Ledger, node: usize) -> Result<(), RunError> {
    for upstream in ledger.graph.upstream(node) {
        let (described, state) = (&ledger.graph.nodes[upstream], &ledger.nodes[upstream]);
        let is_current = state.stale == 0 && state.missing == 0 && !state.never_complete;
        if is_current || ledger.selection.selected[upstream] || !described.kept.contains(&true) {
            continue;
        }
        return Err(RunError::Usage {
            message: format!(
                "stage `{}` takes nothing as it stands, and `{}` does not stand as the plan would make it",
                ledger.graph.nodes[node].name, described.name
            ),
            help: Some("leave out --only and --from".to_string()),
        });
    }
    Ok(())
}

pub(super) fn started(ledger: &Ledger, node: usize, run: u64, reused: u64) {
    ledger.events.send(Event::StageStarted {
        stage: ledger.graph.nodes[node].name.clone(),
        kind: ledger.stage(node).kind.name().to_string(),
        run,
        reused,
    });
}

/// The writer of a node's recipe, with what the recipe is made of.
pub(super) fn writer(ledger: &Ledger, node: usize) -> Result<ArtifactWriter, RunError> {
    let stage = ledger.stage(node);
    let described = &ledger.graph.nodes[node];
    let identity = serde_json::json!({
        "kind": stage.kind.name(),
        "version": stage.kind.version(),
        "part": format!("{:?}", described.part).to_lowercase(),
        "settings": stage.settings.identity(),
    });
    Ok(ledger.store.writer(&described.recipe, &identity)?)
}

pub(super) fn failed(failure: Failure) -> RunError {
    match failure.stage {
        Some(stage) => RunError::Stage {
            stage,
            partition: failure.partition,
            error: failure.error,
        },
        None => RunError::Internal {
            message: failure.error.to_string(),
        },
    }
}

/// Commits the only partition of a node, and settles it.
pub(super) fn commit_one(
    ledger: &mut Ledger,
    node: usize,
    partition: &Partition,
    key: crate::Digest,
    inputs: Vec<crate::Digest>,
    ports: Vec<PortRows>,
    counts: Counts,
) -> Result<(), RunError> {
    let writer = writer(ledger, node)?;
    let pending = writer.write_partition(partition, key, inputs, ports, Vec::new(), counts)?;
    let records = writer.commit(vec![pending])?;
    writer.finish([(partition, &key)])?;
    for record in records {
        ledger.nodes[node].settle(partition, record);
    }
    ledger.nodes[node].all_settled = true;
    Ok(())
}
