//! Runs `decide` of a global stage: over the key rows of all partitions, in one commit.

use super::counts::RunCounts;
use super::node::{commit_one, started};
use crate::error::StageError;
use crate::kind::Body;
use crate::panic_guard::catch_panic;
use crate::partition::Partition;
use crate::plan::Action;
use crate::plan::decide::{NodeVerdict, Verdict};
use crate::plan::decisions::{ALL, Decisions, digests_schema};
use crate::plan::graph::{DECISIONS_PORT, DIGESTS_PORT, Flow};
use crate::plan::keys::key_of;
use crate::plan::state::PlanState;
use crate::run_error::RunError;
use crate::store::{Counts, PortRows};

pub(super) fn run(
    state: &mut PlanState,
    node: usize,
    verdicts: Vec<NodeVerdict>,
    run_counts: &mut RunCounts,
) -> Result<(), RunError> {
    let one = match verdicts.into_iter().next().map(|verdict| verdict.verdict) {
        Some(Verdict::Partitions(decided)) => decided.into_iter().next(),
        _ => None,
    };
    let Some(one) = one else {
        return Err(RunError::Internal {
            message: format!("`{}` was not decided", state.graph.nodes[node].name),
        });
    };
    let run = u64::from(one.action != Action::Reuse);
    started(state, node, run, 1 - run);
    run_counts.add(node, 0, 1 - run);
    if run == 0 {
        return Ok(());
    }
    let inputs: Option<Vec<_>> = one.inputs.iter().copied().collect();
    let (Some(inputs), Some(context)) = (inputs, state.context(node)?) else {
        return Err(RunError::Internal {
            message: format!(
                "the inputs of `{}` are not settled in time",
                state.graph.nodes[node].name
            ),
        });
    };
    let keys_node = state.graph.nodes[node].inputs[0].node;
    let mut keys = state.artifact(keys_node, 0)?;
    for input in &state.graph.nodes[node].inputs {
        if input.flow == Flow::SemiJoin {
            let chosen = state.artifact(input.node, input.port)?;
            keys = keys
                .semi_join(&chosen)
                .map_err(|error| state.failed(node, None, error))?;
        }
    }
    let stage = &state.checked.stages[state.graph.nodes[node].stage];
    let decided = catch_panic(|| {
        let Body::Global(mut body) = stage.settings.open(&context)? else {
            return Err(StageError::failed("the kind says it is global, but its body is not"));
        };
        let schema = body.decision_schema();
        let decisions = Decisions::new(schema.clone(), body.decide(&keys)?)?;
        if let Some(partition) = decisions
            .partitions()
            .find(|partition| keys.rows_of(partition).is_none())
        {
            return Err(StageError::failed(format!(
                "it decided over partition {partition}, which has no rows"
            )));
        }
        let (rows, list) = decisions.to_ports()?;
        Ok((schema, rows, list))
    });
    let (schema, rows, list) = decided.map_err(|error| state.failed(node, None, error))?;
    let counts = Counts {
        rows_in: keys.rows(),
        rows_out: rows.iter().map(|batch| batch.num_rows() as u64).sum(),
        read: 0,
        merged: 0,
    };
    let ports = vec![
        PortRows::new(DECISIONS_PORT, schema, rows),
        PortRows::new(DIGESTS_PORT, digests_schema(), vec![list]),
    ];
    let recipe = state.graph.nodes[node].recipe;
    commit_one(
        state,
        node,
        &Partition::new(ALL),
        key_of(&recipe, &inputs),
        inputs,
        ports,
        counts,
    )?;
    run_counts.add(node, 1, 0);
    Ok(())
}
