//! Builds the plan that is shown and stored from verdicts.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::snapshot::Snapshot;
use super::verdict::{NodeVerdict, Verdict};
use super::{Action, PartitionPlan, StagePlan, role_name};
use flow_base::partition::Partition;
use flow_kind::kind::{LogPosition, Role};

/// The entry of a node in the plan. `removed`: see [`removed`]. Reused partitions are only counted unless `with_reused`: there may
/// be millions.
pub fn stage_plan(
    known: &Snapshot<'_>,
    NodeVerdict { node, verdict }: NodeVerdict,
    removed: Vec<Partition>,
    with_reused: bool,
) -> StagePlan {
    let described = &known.graph.nodes[node];
    let stage = &known.checked.stages[described.stage];
    let selected = &known.selection.selected;
    let used = selected[node] || known.graph.downstream(node).into_iter().any(|after| selected[after]);
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
        left_out: known.selection.left_out[node].clone(),
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
            plan.removed = removed;
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
    plan
}

/// Whether partitions of a node may have been removed since the last run: of a source, unless only some are selected, and nothing
/// is known of the others.
pub fn may_have_removed(known: &Snapshot<'_>, node: usize) -> bool {
    known.graph.nodes[node].role == Role::Source && !known.is_partial
}

/// Partitions that a source had in an earlier run and that no longer exist; those of later stages are removed with them.
pub fn removed(space: &[Partition], earlier: impl Iterator<Item = Partition>) -> Vec<Partition> {
    earlier
        .filter(|partition| space.binary_search(partition).is_err())
        .collect()
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
