//! Makes the plan of a pipeline.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::state::PlanState;
use flow_base::partition::Partition;
use flow_kind::kind::Role;
use flow_plan::run_error::RunError;
use flow_plan::verdict::Verdict;
use flow_plan::{PLAN_VERSION, Plan, StagePlan, partitions, show};

impl PlanState {
    /// The plan: decides over all regions with the present state. Reused partitions are only counted unless
    /// `with_reused`: there may be millions.
    pub fn plan(&mut self, with_reused: bool) -> Result<Plan, RunError> {
        let begun = Instant::now();
        self.read_records();
        self.keep_wanted_partitions()?;
        let mut stages: BTreeMap<usize, StagePlan> = BTreeMap::new();
        for region in 0..self.graph.regions.len() {
            for verdict in self.decide(region)? {
                let node = verdict.node;
                let removed = match verdict.verdict {
                    Verdict::Partitions(_) => self.removed(node)?,
                    _ => Vec::new(),
                };
                stages.insert(node, show::stage_plan(&self.snapshot(), verdict, removed, with_reused));
            }
            for node in self.graph.regions[region].nodes.clone() {
                if !self.selection.selected[node] {
                    self.settle_as_it_stands(node)?;
                }
            }
        }
        tracing::debug!(regions = self.graph.regions.len(), elapsed = ?begun.elapsed(), "plan");
        Ok(Plan {
            version: PLAN_VERSION,
            pipeline: self.checked.pipeline.name.clone(),
            stages: stages.into_values().collect(),
            switched_off: self.checked.pipeline.switched_off.clone(),
        })
    }

    /// Partitions of a source that no longer exist.
    fn removed(&mut self, node: usize) -> Result<Vec<Partition>, RunError> {
        if !show::may_have_removed(&self.snapshot(), node) {
            return Ok(Vec::new());
        }
        let Some(space) = self.nodes[node].space.clone() else {
            return Ok(Vec::new());
        };
        let before = self.last_snapshot(node)?;
        let before = before.into_iter().flat_map(|snapshot| snapshot.keys.into_keys());
        Ok(show::removed(&space, before))
    }

    /// Restricts the participating sources to the requested partitions.
    ///
    /// # Errors
    /// If a source cannot be listed, or no source has a requested partition.
    fn keep_wanted_partitions(&mut self) -> Result<(), RunError> {
        if !self.is_partial() {
            return Ok(());
        }
        let mut sources = Vec::new();
        for node in 0..self.graph.nodes.len() {
            let (is_source, whole) = (self.graph.nodes[node].role == Role::Source, self.selection.whole[node]);
            if is_source && !whole && self.selection.selected[node] {
                sources.extend(self.space(node)?.map(|space| (node, space)));
            }
        }
        for (node, kept) in partitions::wanted(&self.options.selection.partitions, &sources)? {
            self.nodes[node].space = Some(Arc::new(kept));
        }
        Ok(())
    }
}
