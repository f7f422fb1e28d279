//! Failures in a run with `--keep-going`, and what is left out because of them.
//!
//! A stage fails for one partition, or as a whole where the failure is not due to one. A node is left out for a
//! partition if its input of the partition is missing, and as a whole if it needs all partitions of an input and one is
//! missing.

use std::collections::{BTreeMap, BTreeSet};

use super::Action;
use super::decide::{NodeVerdict, PartitionVerdict, Verdict};
use super::graph::{Flow, NodeInput, RegionKind};
use super::state::PlanState;
use crate::event::{StageFailure, StageOutcome};
use crate::kind::Role;
use crate::partition::Partition;
use crate::run_error::{LeftOut, RunError};

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
pub(crate) struct Failures {
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
}

/// The part of a region that can run.
pub(crate) struct Runnable {
    /// Nodes that run or are reused, with their verdicts.
    pub nodes: Vec<usize>,
    pub verdicts: Vec<NodeVerdict>,
    /// Those of them with partitions that are left out.
    pub incomplete: Vec<usize>,
}

/// Whether up-to-date rows of a partition are stored on the port that an input reads, so that they can be read instead
/// of computed.
pub(crate) fn is_stored(state: &PlanState, input: &NodeInput, producer: &PartitionVerdict) -> bool {
    let (described, node_state) = (&state.graph.nodes[input.node], &state.nodes[input.node]);
    match (node_state.settled.get(&producer.partition), producer.key) {
        (Some(record), Some(key)) => {
            let port = &described.outputs[input.port].name;
            record.key == key && record.ports.contains_key(port)
        }
        _ => false,
    }
}

impl PlanState {
    /// Notes the failure of a node of a region. False: it was noted already, so leaving it out again does not help.
    ///
    /// # Errors
    /// Returns errors that are no failure of a stage of the region, such as a full disk of the state directory, or a
    /// signal.
    pub fn note_failure(&mut self, region: usize, error: RunError) -> Result<bool, RunError> {
        let RunError::Stage { stage, partition, .. } = &error else {
            return Err(error);
        };
        let is_meant = |node: &usize| {
            let described = &self.graph.nodes[*node];
            described.name == *stage || self.stage(*node).name == *stage
        };
        let Some(node) = self.graph.regions[region].nodes.iter().copied().find(is_meant) else {
            return Err(error);
        };
        let failed = &mut self.failures.failed[node];
        let is_new = match partition {
            Some(partition) => !failed.whole && failed.partitions.insert(partition.clone()),
            None => !std::mem::replace(&mut failed.whole, true),
        };
        if is_new {
            self.failures.errors.push(error);
        }
        Ok(is_new)
    }

    /// Notes that a node ran but must not be used, nor the nodes after it in its region, since it rejected too many
    /// rows.
    pub fn note_unusable(&mut self, node: usize, error: RunError) {
        self.failures.errors.push(error);
        self.failures.failed[node].whole = true;
        let region = self.graph.nodes[node].region;
        let after = self.graph.downstream(node).into_iter();
        let after = after.filter(|after| self.graph.nodes[*after].region == region);
        for unusable in after.chain([node]).collect::<Vec<_>>() {
            self.failures.missing[unusable].whole = true;
            self.nodes[unusable].all_settled = false;
        }
    }

    /// Leaves out a region as a whole.
    pub fn leave_out_region(&mut self, region: usize) {
        for node in self.graph.regions[region].nodes.clone() {
            self.failures.missing[node].whole = true;
            self.nodes[node].all_settled = false;
        }
    }

    /// Removes failed partitions and those that depend on them from the verdicts of a region.
    pub fn runnable(&mut self, region: usize, verdicts: Vec<NodeVerdict>) -> Runnable {
        let nodes = self.graph.regions[region].nodes.clone();
        if self.failures.is_empty() {
            return Runnable {
                nodes,
                verdicts,
                incomplete: Vec::new(),
            };
        }
        // By node, the partitions that it cannot run.
        let mut blocked: BTreeMap<usize, Missing> = BTreeMap::new();
        // Nodes that failed as a whole, and those after them in the region, even if some of their partitions are
        // stored.
        let mut unusable: BTreeSet<usize> = BTreeSet::new();
        let decided: BTreeMap<usize, &Verdict> = verdicts.iter().map(|one| (one.node, &one.verdict)).collect();
        for &node in &nodes {
            let described = &self.graph.nodes[node];
            let mut own = self.failures.failed[node].clone();
            for input in &described.inputs {
                match (input.flow, blocked.get(&input.node)) {
                    (Flow::Stream, Some(producer)) => {
                        own.whole |= producer.whole;
                        let stands = |partition: &Partition| match decided.get(&input.node) {
                            Some(Verdict::Partitions(all)) => all
                                .iter()
                                .find(|one| one.partition == *partition)
                                .is_some_and(|one| one.action == Action::Reuse && is_stored(self, input, one)),
                            _ => false,
                        };
                        let missing = producer.partitions.iter().filter(|partition| !stands(partition));
                        own.partitions.extend(missing.cloned());
                    }
                    (Flow::Stream, None) => {}
                    (Flow::Replay, _) => own.add(&self.failures.missing[input.node]),
                    (Flow::Whole | Flow::SemiJoin | Flow::Decisions, _) => {
                        own.whole |= !self.failures.missing[input.node].is_empty();
                    }
                }
            }
            let follows = |input: &NodeInput| input.flow == Flow::Stream && unusable.contains(&input.node);
            if self.failures.failed[node].whole || described.inputs.iter().any(follows) {
                unusable.insert(node);
            }
            if matches!(described.role, Role::Log | Role::Export) {
                own.whole |= !own.is_empty();
            }
            blocked.insert(node, own);
        }
        if matches!(self.graph.regions[region].kind, RegionKind::Log { .. })
            && blocked.values().any(|blocked| !blocked.is_empty())
        {
            blocked.values_mut().for_each(|blocked| blocked.whole = true);
        }
        let mut runnable = Runnable {
            nodes: Vec::new(),
            verdicts: Vec::new(),
            incomplete: Vec::new(),
        };
        for mut one in verdicts {
            let node = one.node;
            let Some(own) = blocked.remove(&node) else { continue };
            let selected = self.selection.selected[node];
            // Where everything is stored, nothing is missing, even if it could not run.
            let stands = self.nodes[node].all_settled && !unusable.contains(&node);
            if own.whole {
                if selected && !stands {
                    self.failures.missing[node].whole = true;
                    self.nodes[node].all_settled = false;
                }
                continue;
            }
            if let Verdict::Partitions(all) = &mut one.verdict {
                let is_left_out =
                    |one: &PartitionVerdict| one.action != Action::Reuse && own.partitions.contains(&one.partition);
                let left_out: Vec<Partition> = all
                    .iter()
                    .filter(|one| is_left_out(one))
                    .map(|one| one.partition.clone())
                    .collect();
                if !left_out.is_empty() {
                    all.retain(|one| !is_left_out(one));
                    self.failures.missing[node].partitions.extend(left_out);
                    runnable.incomplete.push(node);
                }
            }
            runnable.nodes.push(node);
            runnable.verdicts.push(one);
        }
        runnable
    }

    /// The outcome and failures of a node's stage, over all of its nodes.
    pub fn outcome(&self, node: usize) -> (StageOutcome, Vec<StageFailure>) {
        if self.failures.is_empty() {
            return (StageOutcome::Done, Vec::new());
        }
        let stage = self.graph.nodes[node].stage;
        let of_stage = |other: &usize| self.graph.nodes[*other].stage == stage;
        let own: Vec<usize> = (0..self.graph.nodes.len()).filter(of_stage).collect();
        let is_named = |name: &str| {
            let named = |own: &usize| self.graph.nodes[*own].name == name;
            self.stage(node).name == name || own.iter().any(named)
        };
        let failures = self.failures.errors.iter().filter_map(|error| match error {
            RunError::Stage { stage, .. } if is_named(stage) => Some(StageFailure::from(error)),
            _ => None,
        });
        let failures: Vec<StageFailure> = failures.collect();
        let missing = || own.iter().map(|own| &self.failures.missing[*own]);
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
    pub fn left_out_for_failures(&self) -> Vec<LeftOut> {
        let mut left_out = Vec::new();
        for (node, described) in self.graph.nodes.iter().enumerate() {
            let (missing, failed) = (&self.failures.missing[node], &self.failures.failed[node]);
            if failed.whole || !self.selection.selected[node] {
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
