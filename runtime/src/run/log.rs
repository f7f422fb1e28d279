//! Runs a log stage, with the stages that feed it, from the step that its log has reached.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::RecordBatch;

use super::counts::RunCounts;
use super::job::{node_job, region_job, workers_of_each};
use super::node::{commit_one, failed, started};
use super::running::Running;
use crate::dataflow::run_region;
use crate::planner::state::PlanState;
use flow_base::error::StageError;
use flow_base::panic_guard::catch_panic;
use flow_base::partition::Partition;
use flow_kind::context::Cancel;
use flow_kind::kind::{Body, LogPosition};
use flow_plan::graph::RESULT;
use flow_plan::keys::result_key;
use flow_plan::run_error::RunError;
use flow_plan::verdict::{NodeVerdict, Verdict};
use flow_store::row_order::{RowNumbers, in_row_order};
use flow_store::{Counts, PortRows};

pub(super) fn run(
    state: &mut PlanState,
    nodes: &[usize],
    log: usize,
    verdicts: Vec<NodeVerdict>,
    running: &Running,
    run_counts: &mut RunCounts,
) -> Result<(), RunError> {
    let signals = &running.signals;
    let name = state.graph.nodes[log].name.clone();
    let not_settled = || RunError::internal(format!("the inputs of `{name}` are not settled in time"));
    let verdict = verdicts
        .into_iter()
        .find(|verdict| verdict.node == log)
        .map(|verdict| verdict.verdict);
    let Some(Verdict::Log { standing, mut result }) = verdict else {
        return Err(not_settled());
    };
    let step = match standing {
        LogPosition::Finished { .. } => {
            started(state, log, 0, 1);
            run_counts.add(log, 0, 1);
            None
        }
        LogPosition::At { step, .. } => Some(step),
    };
    if let Some(step) = step {
        let partitions = state.space(log)?.ok_or_else(not_settled)?.to_vec();
        let total = partitions.len() as u64;
        started(state, log, total.saturating_sub(step), step.min(total));
        let place: BTreeMap<usize, usize> = nodes.iter().enumerate().map(|(place, node)| (*node, place)).collect();
        let mut jobs = Vec::new();
        for &node in nodes {
            let mut job = node_job(state, node, &place, false)?;
            let space = state.space(node)?.ok_or_else(not_settled)?;
            job.active = partitions
                .iter()
                .map(|partition| space.binary_search(partition).is_ok())
                .collect();
            jobs.push(job);
        }
        if step >= total {
            // The log has all steps, but is not finished: only `complete` is left to be called.
            let context = state.context(log)?.ok_or_else(not_settled)?;
            let settings = Arc::clone(&state.stage(log).settings);
            catch_panic(|| match settings.open(&context)? {
                Body::Log(mut body) => body.complete(),
                _ => Err(StageError::failed(
                    "the kind says it keeps a log, but its body does not",
                )),
            })
            .map_err(|error| state.failed(log, None, error))?;
        }
        let left = total.saturating_sub(step);
        let workers = workers_of_each(state, left, 1);
        let spreads = |processes: usize| state.stage(log).settings.spreads(processes).unwrap_or(false);
        let cluster = match &running.spread {
            Some(spread) if left > 0 && spreads(running.processes()) => {
                spread.begin_log(state, nodes, &partitions, step as usize, &jobs, workers)?
            }
            _ => None,
        };
        let snapshots = Some(&running.snapshots);
        let job = region_job(state, partitions, step, jobs, snapshots, signals, workers, cluster);
        let done = run_region(job);
        if let Some(failure) = done.failure {
            return Err(failed(failure));
        }
        if let Some(signal) = signals.stop_asked() {
            return Err(RunError::Interrupted { signal });
        }
        // A log that ended early cancelled what was left of its region, and no more.
        state.cancel = Cancel::default();
        run_counts.add(log, 1, 0);
        match state.decide_log(log)? {
            Verdict::Log {
                standing: LogPosition::Finished { .. },
                result: rows,
            } => result = rows,
            Verdict::Log {
                standing: LogPosition::At { step, detail },
                ..
            } => {
                let message = format!(
                    "its inputs have no step left to give, but step {} comes next ({detail})",
                    step + 1
                );
                let help = "a stage that `--from` or `--only` leaves out gives the steps of its last run: run without \
                            them, so that it gives those of these settings";
                return Err(state.failed(log, None, StageError::failed(message).with_help(help)));
            }
            _ => return Err(not_settled()),
        }
    }
    for &node in nodes {
        if node != log {
            state.nodes[node].all_settled = true;
        }
    }
    if !state.nodes[log].all_settled {
        match result {
            Some(rows) => write_result(state, log, rows)?,
            None => state.nodes[log].all_settled = true,
        }
    }
    Ok(())
}

fn write_result(state: &mut PlanState, log: usize, rows: RecordBatch) -> Result<(), RunError> {
    let described = state.graph.nodes[log].clone();
    let Some(port) = described.outputs.first() else {
        return Ok(());
    };
    let failed = |error| state.failed(log, None, error);
    let key = result_key(&described.recipe, &rows).map_err(failed)?;
    let counts = Counts {
        rows_in: 0,
        rows_out: rows.num_rows() as u64,
        read: 0,
        merged: 0,
    };
    let mut numbers = RowNumbers::default();
    numbers.add(&rows).map_err(failed)?;
    numbers.check(&port.name).map_err(failed)?;
    let batches = in_row_order(&port.schema, vec![rows]).map_err(failed)?;
    let ports = vec![PortRows::new(&port.name, port.schema.clone(), batches)];
    commit_one(state, log, &Partition::new(RESULT), key, Vec::new(), ports, counts)
}
