//! What is known of a run before it is decided about a region, and what follows from it for keys and reasons.

use super::cursor::Cursor;
use super::earlier::{EarlierPlans, NeedsAnother};
use super::graph::{Graph, KeyInput};
use super::keys;
use super::node_state::NodeState;
use super::reason::{self, Identity};
use super::select::StageSelection;
use flow_base::digest::Digest;
use flow_base::partition::Partition;
use flow_spec::Checked;

/// What is known. Nothing in it changes while it is decided.
#[derive(Clone, Copy)]
pub struct Snapshot<'a> {
    pub checked: &'a Checked,
    pub graph: &'a Graph,
    pub selection: &'a StageSelection,
    pub nodes: &'a [NodeState],
    /// Whether stages failed in this run.
    pub has_failures: bool,
    /// Whether only some partitions are selected.
    pub is_partial: bool,
}

impl Snapshot<'_> {
    /// As [`Snapshot::key_input`], for each of the partitions, which ascend.
    pub fn key_input_of_each(&self, input: KeyInput, space: &[Partition]) -> Vec<Option<Digest>> {
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
                space.iter().map(of_partition).collect()
            }
            KeyInput::Partition { node, port } if !self.has_failures => {
                let state = &self.nodes[node];
                let name = &self.graph.nodes[node].outputs[port].name;
                let absent = state.all_settled.then(keys::absent);
                let mut settled = Cursor::new(state.settled.iter());
                let of_partition = |partition| {
                    let port = settled.find(partition).and_then(|record| record.ports.get(name));
                    port.map(|port| port.digest).or(absent)
                };
                space.iter().map(of_partition).collect()
            }
            // The same for all partitions, or found by a map of its own.
            _ => space.iter().map(|partition| self.key_input(input, partition)).collect(),
        }
    }

    /// The digest of one input of one partition for its key; none while it is unknown. Digests of whole artifacts and of decisions
    /// are among what was read before.
    pub fn key_input(&self, input: KeyInput, partition: &Partition) -> Option<Digest> {
        match input {
            KeyInput::Source { node } => match self.nodes[node].source_digests.get(partition) {
                Some(digest) => Some(*digest),
                None if self.nodes[node].sources.contains_key(partition) => None,
                None => Some(keys::absent()),
            },
            KeyInput::Partition { node, port } => {
                let state = &self.nodes[node];
                let name = &self.graph.nodes[node].outputs[port].name;
                match state.settled.get(partition).and_then(|record| record.ports.get(name)) {
                    Some(port) => Some(port.digest),
                    // After a failure a stage is never settled, but partitions that it does not have at all are known.
                    None => (state.all_settled || self.has_failures && state.lacks(partition)).then(keys::absent),
                }
            }
            KeyInput::Whole { node, port } => {
                let state = &self.nodes[node];
                state.whole.get(&port).copied().filter(|_| state.all_settled)
            }
            KeyInput::Decisions { node } => {
                let state = &self.nodes[node];
                let decided = state.decided.as_ref().filter(|_| state.all_settled);
                decided.map(|decided| decided.get(partition).copied().unwrap_or_else(keys::no_decisions))
            }
        }
    }

    /// Whether all nodes upstream of a node are settled.
    pub fn is_settled_upstream(&self, node: usize) -> bool {
        let upstream = self.graph.upstream(node);
        upstream.iter().all(|upstream| self.nodes[*upstream].all_settled)
    }

    /// The stage upstream whose artifact is not settled.
    pub fn waits_for(&self, node: usize) -> String {
        let open = |index: &usize| !self.nodes[*index].all_settled && self.graph.nodes[*index].stored.contains(&true);
        let upstream = self.graph.upstream(node);
        let first = upstream.iter().copied().find(open).unwrap_or(node);
        self.graph.nodes[first].name.clone()
    }

    /// What changed in a stage since an earlier plan.
    pub fn changed_since(
        &self,
        node: usize,
        earlier: EarlierPlans<'_>,
        back: usize,
    ) -> Result<Option<String>, NeedsAnother> {
        let described = &self.graph.nodes[node];
        let Some(before) = earlier.before(&described.name, back)? else {
            return Ok(None);
        };
        let stage = &self.checked.stages[described.stage];
        let now = Identity {
            kind: stage.kind.name(),
            version: stage.kind.version(),
            settings: &stage.settings.identity(),
        };
        Ok(reason::recipe_changed(before, &now))
    }

    /// Why a node whose recipe has no records runs.
    pub fn why_no_recipe(&self, node: usize, earlier: EarlierPlans<'_>) -> Result<String, NeedsAnother> {
        let described = &self.graph.nodes[node];
        let mut known = false;
        let mut back = 0;
        // A failed run has planned this recipe, too: the plan before it is compared instead.
        while let Some(before) = earlier.before(&described.name, back)? {
            known = true;
            if before.recipe != described.recipe {
                break;
            }
            back += 1;
        }
        if !known {
            return Ok("never run".to_string());
        }
        if let Some(own) = self.changed_since(node, earlier, back)? {
            return Ok(own);
        }
        for upstream in self.graph.upstream(node).into_iter().rev() {
            if self.graph.nodes[upstream].region == described.region
                && let Some(reason) = self.changed_since(upstream, earlier, back)?
            {
                return Ok(format!("`{}` before it: {reason}", self.graph.nodes[upstream].name));
            }
        }
        Ok(match earlier.before(&described.name, back)? {
            Some(_) => "its inputs changed".to_string(),
            None => "no record of it".to_string(),
        })
    }
}
