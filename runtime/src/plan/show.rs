//! Builds the plan that is shown and stored from verdicts.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::decide::{NodeVerdict, Verdict};
use super::state::PlanState;
use super::{Action, PLAN_VERSION, PartitionPlan, Plan, StagePlan, role_name};
use crate::kind::{LogPosition, Role};
use crate::partition::Partition;
use crate::run_error::RunError;

impl PlanState {
    /// The plan: decides over all regions with the present state. Reused partitions are only counted unless
    /// `with_reused`: there may be millions.
    pub fn plan(&mut self, with_reused: bool) -> Result<Plan, RunError> {
        self.read_records();
        self.keep_wanted_partitions()?;
        let mut stages: BTreeMap<usize, StagePlan> = BTreeMap::new();
        for region in 0..self.graph.regions.len() {
            for verdict in self.decide(region)? {
                let node = verdict.node;
                stages.insert(node, self.show(verdict, with_reused)?);
            }
            for node in self.graph.regions[region].nodes.clone() {
                if !self.selection.selected[node] {
                    self.settle_as_it_stands(node)?;
                }
            }
        }
        Ok(Plan {
            version: PLAN_VERSION,
            pipeline: self.checked.pipeline.name.clone(),
            stages: stages.into_values().collect(),
            switched_off: self.checked.pipeline.switched_off.clone(),
        })
    }

    fn show(&mut self, verdict: NodeVerdict, with_reused: bool) -> Result<StagePlan, RunError> {
        let NodeVerdict { node, verdict } = verdict;
        let described = self.graph.nodes[node].clone();
        let stage = self.stage(node);
        let selected = &self.selection.selected;
        let used = selected[node] || self.graph.downstream(node).into_iter().any(|after| selected[after]);
        let mut plan = StagePlan {
            stage: described.name.clone(),
            kind: stage.kind.name().to_string(),
            kind_version: stage.kind.version(),
            role: role_name(described.role).to_string(),
            region: described.region,
            recipe: described.recipe,
            identity: stage.settings.identity(),
            stored: described
                .outputs
                .iter()
                .zip(&described.stored)
                .filter(|(_, kept)| **kept)
                .map(|(port, _)| port.name.clone())
                .collect(),
            selected: selected[node],
            left_out: self.selection.left_out[node].clone(),
            used,
            run: 0,
            if_changed: 0,
            reuse: 0,
            unknown_partitions: false,
            reasons: Vec::new(),
            partitions: Vec::new(),
            removed: Vec::new(),
        };
        match verdict {
            Verdict::Partitions(decided) => {
                plan.removed = self.removed(node)?;
                if plan.selected {
                    let mut reasons: BTreeMap<(Action, &Arc<str>), u64> = BTreeMap::new();
                    for one in &decided {
                        *reasons.entry((one.action, &one.reason)).or_default() += 1;
                    }
                    for ((action, reason), partitions) in reasons {
                        plan.count(action, partitions, reason);
                    }
                }
                let shown = |action: Action| with_reused || action != Action::Reuse;
                plan.partitions = Vec::with_capacity(decided.iter().filter(|one| shown(one.action)).count());
                for one in decided.into_iter().filter(|one| shown(one.action)) {
                    plan.partitions.push(PartitionPlan {
                        partition: one.partition,
                        action: one.action,
                        reason: one.reason,
                    });
                }
            }
            Verdict::Unknown { waits_for } => {
                plan.unknown_partitions = plan.selected;
                if plan.selected {
                    plan.reasons.push((
                        Action::IfChanged,
                        format!("its partitions are known once `{waits_for}` has run"),
                        1,
                    ));
                }
            }
            Verdict::Log { standing, .. } if plan.selected => match standing {
                LogPosition::Finished { detail } => plan.count(Action::Reuse, 1, &detail),
                LogPosition::At { detail, .. } => plan.count(Action::Run, 1, &detail),
            },
            Verdict::Export { action, reason, .. } if plan.selected => plan.count(action, 1, &reason),
            Verdict::Feeds | Verdict::Log { .. } | Verdict::Export { .. } => {}
        }
        plan.reasons
            .sort_by(|a, b| (a.0, Reverse(a.2), &a.1).cmp(&(b.0, Reverse(b.2), &b.1)));
        Ok(plan)
    }

    /// Partitions that a source had in the last run and that no longer exist; those of later stages are removed with
    /// them.
    fn removed(&mut self, node: usize) -> Result<Vec<Partition>, RunError> {
        // With only some partitions selected, nothing is known of the others.
        if self.graph.nodes[node].role != Role::Source || self.is_partial() {
            return Ok(Vec::new());
        }
        let Some(space) = self.space(node)? else {
            return Ok(Vec::new());
        };
        let gone = self.last_snapshot(node)?.map_or_else(Vec::new, |snapshot| {
            let gone = |partition: &Partition| space.binary_search(partition).is_err();
            snapshot.keys.into_keys().filter(gone).collect()
        });
        Ok(gone)
    }
}

impl StagePlan {
    /// Called once for each reason.
    fn count(&mut self, action: Action, partitions: u64, reason: &str) {
        match action {
            Action::Run => self.run += partitions,
            Action::IfChanged => self.if_changed += partitions,
            Action::Reuse => self.reuse += partitions,
        }
        self.reasons.push((action, reason.to_string(), partitions));
    }
}
