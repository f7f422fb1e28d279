//! The totals of a stage, and whether it is past its limit of rejects.

use super::counts::RunCounts;
use super::summary::StageSummary;
use crate::dataflow::job::{LIMIT_HELP, faults, too_many};
use crate::planner::state::PlanState;
use flow_base::error::StageError;
use flow_kind::kind::Role;
use flow_plan::graph::StagePart;
use flow_plan::run_error::RunError;
use flow_spec::{LimitAction, RejectLimit};
use flow_store::add_up;

/// Sums over all partitions of a stage, reused ones too. None for the inner parts of a global stage, and for
/// stages that this run is not about.
pub(super) fn summarise(state: &PlanState, node: usize, run_counts: &RunCounts) -> Option<StageSummary> {
    let described = &state.graph.nodes[node];
    if matches!(described.part, StagePart::Keys | StagePart::Decide) || !state.selection.selected[node] {
        return None;
    }
    let stage = state.stage(node);
    let records = &state.nodes[node].settled;
    let (ran, reused) = run_counts.of(node);
    Some(StageSummary {
        stage: stage.name.clone(),
        kind: stage.kind.name().to_string(),
        ran,
        reused,
        rows_in: records.values().map(|record| record.rows_in).sum(),
        rows_out: records.values().map(|record| record.rows_out).sum(),
        rejects: add_up(records.values().flat_map(|record| &record.rejects.by_reason)),
    })
}

/// True if the stage is past a limit that only warns.
///
/// # Errors
/// If it is past a limit that fails.
pub(super) fn check(state: &PlanState, node: usize, summary: &StageSummary) -> Result<bool, RunError> {
    let stage = state.stage(node);
    let Some(limit) = stage.max_rejects else {
        return Ok(false);
    };
    if stage.shape.role == Role::Log {
        return Ok(false);
    }
    let faults: u64 = state.nodes[node].settled.values().map(|record| faults(record)).sum();
    let (past, said) = match limit.limit {
        RejectLimit::Count(count) => (faults > count, format!("{count}")),
        RejectLimit::Share(share) => {
            // A partition that could not be read counts as one row, since its number of rows is unknown. So the share
            // of such partitions is compared with the limit, too.
            let records = state.nodes[node].settled.values();
            let unread = records
                .filter(|record| record.rows_in == 0 && self::faults(record) > 0)
                .count();
            let partitions = state.nodes[node].settled.len();
            if unread as f64 > share * partitions as f64 {
                (true, format!("{}% of {partitions} partitions", share * 100.0))
            } else {
                let of = summary.rows_in.max(faults);
                (
                    faults as f64 > share * of as f64,
                    format!("{}% of {of} rows", share * 100.0),
                )
            }
        }
    };
    if !past {
        return Ok(false);
    }
    let message = too_many(faults, &said, &summary.rejects, &state.rejects_of(&[node]));
    match limit.action {
        LimitAction::Warn => {
            state.events.send(flow_base::event::Event::Warning {
                stage: Some(stage.name.clone()),
                message,
            });
            Ok(true)
        }
        LimitAction::Fail => Err(state.failed(node, None, StageError::failed(message).with_help(LIMIT_HELP))),
    }
}
