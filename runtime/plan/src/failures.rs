//! Failures in a run with `--keep-going`, and what is left out because of them.
//!
//! A stage fails for one partition, or as a whole where the failure is not due to one. A node is left out for a
//! partition if its input of the partition is missing, and as a whole if it needs all partitions of an input and one is
//! missing.

use std::collections::{BTreeMap, BTreeSet};

use super::Action;
use super::graph::{Flow, Graph, NodeInput, RegionKind};
use super::node_state::NodeState;
use super::verdict::{NodeVerdict, PartitionVerdict, Verdict};
use crate::run_error::{LeftOut, RunError};
use flow_base::event::{StageFailure, StageOutcome};
use flow_base::partition::Partition;
use flow_kind::kind::Role;
use flow_spec::Checked;

/// Partitions of a node, or all of it.
#[derive(Clone, Debug, Default)]
struct Missing {
    whole: bool,
    partitions: BTreeSet<Partition>,
}

impl Missing {
    fn is_empty(&self) -> bool {
        !self.whole && self.partitions.is_empty()
    }

    fn add(&mut self, other: &Missing) {
        self.whole |= other.whole;
        self.partitions.extend(other.partitions.iter().cloned());
    }
}

#[derive(Debug, Default)]
pub struct Failures {
    /// In the order in which they came.
    errors: Vec<RunError>,
    /// By node, what failed.
    failed: Vec<Missing>,
    /// By node, the partitions that are not available to later regions.
    missing: Vec<Missing>,
}

impl Failures {
    pub fn new(nodes: usize) -> Self {
        Failures {
            errors: Vec::new(),
            failed: vec![Missing::default(); nodes],
            missing: vec![Missing::default(); nodes],
        }
    }

    pub fn is_empty(&self) -> bool {
        self.errors.is_empty()
    }

    /// Whether a node is left out as a whole, or failed as a whole.
    pub fn misses_all(&self, node: usize) -> bool {
        self.missing[node].whole
    }

    pub fn take_errors(&mut self) -> Vec<RunError> {
        std::mem::take(&mut self.errors)
    }

    /// Notes the failure of a node of a region. False: it was noted already, so leaving it out again does not help.
    ///
    /// # Errors
    /// Returns errors that are no failure of a stage of the region, such as a full disk of the state directory, or a
    /// signal.
    pub fn note(&mut self, graph: &Graph, checked: &Checked, region: usize, error: RunError) -> Result<bool, RunError> {
        let RunError::Stage { stage, partition, .. } = &error else {
            return Err(error);
        };
        let is_meant = |node: &usize| {
            let described = &graph.nodes[*node];
            described.name == *stage || checked.stages[described.stage].name == *stage
        };
        let Some(node) = graph.regions[region].nodes.iter().copied().find(is_meant) else {
            return Err(error);
        };
        let failed = &mut self.failed[node];
        let is_new = match partition {
            Some(partition) => !failed.whole && failed.partitions.insert(partition.clone()),
            None => !std::mem::replace(&mut failed.whole, true),
        };
        if is_new {
            self.errors.push(error);
        }
        Ok(is_new)
    }

    /// Notes that a node ran but must not be used, nor the nodes after it in its region, since it rejected too many
    /// rows. Gives these.
    pub fn note_unusable(&mut self, graph: &Graph, node: usize, error: RunError) -> Vec<usize> {
        self.errors.push(error);
        self.failed[node].whole = true;
        let region = graph.nodes[node].region;
        let after = graph.downstream(node).into_iter();
        let after = after.filter(|after| graph.nodes[*after].region == region);
        let unusable: Vec<usize> = after.chain([node]).collect();
        self.leave_out(&unusable);
        unusable
    }

    /// Leaves out nodes as a whole.
    pub fn leave_out(&mut self, nodes: &[usize]) {
        nodes.iter().for_each(|node| self.missing[*node].whole = true);
    }

    /// Removes failed partitions and those that depend on them from the verdicts of a region. Gives also the nodes that are left
    /// out as a whole. `known`: what is known of each node.
    pub fn runnable(
        &mut self,
        graph: &Graph,
        known: &[NodeState],
        selected: &[bool],
        region: usize,
        verdicts: Vec<NodeVerdict>,
    ) -> (Runnable, Vec<usize>) {
        let nodes = graph.regions[region].nodes.clone();
        if self.is_empty() {
            let runnable = Runnable {
                nodes,
                verdicts,
                incomplete: Vec::new(),
            };
            return (runnable, Vec::new());
        }
        // By node, the partitions that it cannot run.
        let mut blocked: BTreeMap<usize, Missing> = BTreeMap::new();
        // Nodes that failed as a whole, and those after them in the region, even if some of their partitions are
        // stored.
        let mut unusable: BTreeSet<usize> = BTreeSet::new();
        let decided: BTreeMap<usize, &Verdict> = verdicts.iter().map(|one| (one.node, &one.verdict)).collect();
        for &node in &nodes {
            let described = &graph.nodes[node];
            let mut own = self.failed[node].clone();
            for input in &described.inputs {
                match (input.flow, blocked.get(&input.node)) {
                    (Flow::Stream, Some(producer)) => {
                        own.whole |= producer.whole;
                        let stands = |partition: &Partition| match decided.get(&input.node) {
                            Some(Verdict::Partitions(all)) => all
                                .iter()
                                .find(|one| one.partition == *partition)
                                .is_some_and(|one| one.action == Action::Reuse && is_stored(graph, known, input, one)),
                            _ => false,
                        };
                        let missing = producer.partitions.iter().filter(|partition| !stands(partition));
                        own.partitions.extend(missing.cloned());
                    }
                    (Flow::Stream, None) => {}
                    (Flow::Replay, _) => own.add(&self.missing[input.node]),
                    (Flow::Whole | Flow::SemiJoin | Flow::Decisions, _) => {
                        own.whole |= !self.missing[input.node].is_empty();
                    }
                }
            }
            let follows = |input: &NodeInput| input.flow == Flow::Stream && unusable.contains(&input.node);
            if self.failed[node].whole || described.inputs.iter().any(follows) {
                unusable.insert(node);
            }
            if matches!(described.role, Role::Log | Role::Export) {
                own.whole |= !own.is_empty();
            }
            blocked.insert(node, own);
        }
        if matches!(graph.regions[region].kind, RegionKind::Log { .. })
            && blocked.values().any(|blocked| !blocked.is_empty())
        {
            blocked.values_mut().for_each(|blocked| blocked.whole = true);
        }
        let mut left_out = Vec::new();
        let mut runnable = Runnable {
            nodes: Vec::new(),
            verdicts: Vec::new(),
            incomplete: Vec::new(),
        };
        for mut one in verdicts {
            let node = one.node;
            let Some(own) = blocked.remove(&node) else { continue };
            let selected = selected[node];
            // Where everything is stored, nothing is missing, even if it could not run.
            let stands = known[node].all_settled && !unusable.contains(&node);
            if own.whole {
                if selected && !stands {
                    left_out.push(node);
                }
                continue;
            }
            if let Verdict::Partitions(all) = &mut one.verdict {
                let is_left_out =
                    |one: &PartitionVerdict| one.action != Action::Reuse && own.partitions.contains(&one.partition);
                let missing = all.iter().filter(|one| is_left_out(one));
                let missing: Vec<Partition> = missing.map(|one| one.partition.clone()).collect();
                if !missing.is_empty() {
                    all.retain(|one| !is_left_out(one));
                    self.missing[node].partitions.extend(missing);
                    runnable.incomplete.push(node);
                }
            }
            runnable.nodes.push(node);
            runnable.verdicts.push(one);
        }
        self.leave_out(&left_out);
        (runnable, left_out)
    }

    /// The outcome and failures of a node's stage, over all of its nodes.
    pub fn outcome(&self, graph: &Graph, checked: &Checked, node: usize) -> (StageOutcome, Vec<StageFailure>) {
        if self.is_empty() {
            return (StageOutcome::Done, Vec::new());
        }
        let stage = graph.nodes[node].stage;
        let of_stage = |other: &usize| graph.nodes[*other].stage == stage;
        let own: Vec<usize> = (0..graph.nodes.len()).filter(of_stage).collect();
        let is_named = |name: &str| {
            let named = |own: &usize| graph.nodes[*own].name == name;
            checked.stages[stage].name == name || own.iter().any(named)
        };
        let failures = self.errors.iter().filter_map(|error| match error {
            RunError::Stage { stage, .. } if is_named(stage) => Some(StageFailure::from(error)),
            _ => None,
        });
        let failures: Vec<StageFailure> = failures.collect();
        let missing = || own.iter().map(|own| &self.missing[*own]);
        let outcome = if !failures.is_empty() {
            StageOutcome::Failed
        } else if missing().any(|missing| missing.whole) {
            StageOutcome::LeftOut
        } else if missing().any(|missing| !missing.is_empty()) {
            StageOutcome::Incomplete
        } else {
            StageOutcome::Done
        };
        (outcome, failures)
    }

    /// What was left out because of failures, without the failures themselves.
    pub fn left_out(&self, graph: &Graph, selected: &[bool]) -> Vec<LeftOut> {
        let mut left_out = Vec::new();
        for (node, described) in graph.nodes.iter().enumerate() {
            let (missing, failed) = (&self.missing[node], &self.failed[node]);
            if failed.whole || !selected[node] {
                continue;
            }
            let partitions: Vec<Partition> = missing.partitions.difference(&failed.partitions).cloned().collect();
            if missing.whole || !partitions.is_empty() {
                left_out.push(LeftOut {
                    stage: described.name.clone(),
                    partitions: if missing.whole { Vec::new() } else { partitions },
                });
            }
        }
        left_out
    }
}

/// The part of a region that can run.
pub struct Runnable {
    /// Nodes that run or are reused, with their verdicts.
    pub nodes: Vec<usize>,
    pub verdicts: Vec<NodeVerdict>,
    /// Those of them with partitions that are left out.
    pub incomplete: Vec<usize>,
}

/// Whether up-to-date rows of a partition are stored on the port that an input reads, so that they can be read instead
/// of computed.
pub fn is_stored(graph: &Graph, nodes: &[NodeState], input: &NodeInput, producer: &PartitionVerdict) -> bool {
    let (described, node_state) = (&graph.nodes[input.node], &nodes[input.node]);
    match (node_state.settled.get(&producer.partition), producer.key) {
        (Some(record), Some(key)) => {
            let port = &described.outputs[input.port].name;
            record.key == key && record.ports.contains_key(port)
        }
        _ => false,
    }
}
