//! Runs `decide` of a global stage: over the key rows of all partitions, in one commit.

use std::sync::Arc;
use std::time::Instant;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;

use super::counts::RunCounts;
use super::node::{commit_one, started};
use super::running::Running;
use crate::planner::state::PlanState;
use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_base::event::Event;
use flow_base::failpoints;
use flow_base::panic_guard::catch_panic;
use flow_base::partition::Partition;
use flow_decide::stored::{ALL, Decisions, digests_schema};
use flow_decide::{Decided, Ended, Resources, StandingDecisions, has_room_for};
use flow_kind::context::Context;
use flow_kind::decision::Decision;
use flow_kind::kind::{Body, Global};
use flow_plan::Action;
use flow_plan::graph::{DECISIONS_PORT, DIGESTS_PORT, Flow};
use flow_plan::keys::key_of;
use flow_plan::run_error::RunError;
use flow_plan::verdict::{NodeVerdict, Verdict};
use flow_store::{Artifact, Counts, PortRows};

pub(super) fn run(
    state: &mut PlanState,
    node: usize,
    verdicts: Vec<NodeVerdict>,
    running: &Running,
    run_counts: &mut RunCounts,
) -> Result<(), RunError> {
    let one = match verdicts.into_iter().next().map(|verdict| verdict.verdict) {
        Some(Verdict::Partitions(decided)) => decided.into_iter().next(),
        _ => None,
    };
    let Some(one) = one else {
        return Err(RunError::internal(format!(
            "`{}` was not decided",
            state.graph.nodes[node].name
        )));
    };
    let run = u64::from(one.action != Action::Reuse);
    started(state, node, run, 1 - run);
    run_counts.add(node, 0, 1 - run);
    if run == 0 {
        hold_keys(state, node, running);
        return Ok(());
    }
    let inputs: Option<Vec<_>> = one.inputs.iter().copied().collect();
    let (Some(inputs), Some(context)) = (inputs, state.context(node)?) else {
        return Err(RunError::internal(format!(
            "the inputs of `{}` are not settled in time",
            state.graph.nodes[node].name
        )));
    };
    let keys = keys_of(state, node)?;
    // The one guard around the kind's functions, on whichever thread they are called.
    let decided = catch_panic(|| decide(state, node, &context, &keys, running));
    let (schema, rows, list) = decided.map_err(|ended| match ended {
        Ended::Stage(error) => state.failed(node, None, error),
        Ended::Signal(signal) => RunError::Interrupted { signal },
    })?;
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

/// The key rows that a node decides about: of the rows that come through the global stage before, where there is one.
pub(super) fn keys_of(state: &mut PlanState, node: usize) -> Result<Artifact, RunError> {
    let inputs = state.graph.nodes[node].inputs.clone();
    let Some(first) = inputs.first() else {
        return Err(RunError::internal(format!(
            "`{}` has no key rows",
            state.graph.nodes[node].name
        )));
    };
    let mut keys = state.artifact(first.node, 0)?;
    for input in inputs.iter().filter(|input| input.flow == Flow::SemiJoin) {
        let chosen = state.artifact(input.node, input.port)?;
        keys = keys
            .semi_join(&chosen)
            .map_err(|error| state.failed(node, None, error))?;
    }
    Ok(keys)
}

/// How many key rows a node decides about.
fn key_rows(state: &PlanState, node: usize) -> Result<u64, RunError> {
    let inputs = &state.graph.nodes[node].inputs;
    let chosen = inputs.iter().rev().find(|input| input.flow == Flow::SemiJoin);
    let rows = match (chosen, inputs.first()) {
        (Some(chosen), _) => state.artifact(chosen.node, chosen.port)?.rows(),
        (None, Some(first)) => state.artifact(first.node, 0)?.rows(),
        (None, None) => 0,
    };
    Ok(rows)
}

/// Opens the body of a global stage.
fn open(state: &PlanState, node: usize, context: &Context) -> Result<Box<dyn Global>, StageError> {
    match state.stage(node).settings.open(context)? {
        Body::Global(body) => Ok(body),
        _ => Err(StageError::failed("the kind says it is global, but its body is not")),
    }
}

/// The schema of the decisions, and what the ports of the node hold: by what changed, in a process that stays alive over many
/// runs (`--watch`), once a dataflow holds the key rows; otherwise over all key rows.
fn decide(
    state: &PlanState,
    node: usize,
    context: &Context,
    keys: &Artifact,
    running: &Running,
) -> Result<(SchemaRef, Vec<RecordBatch>, RecordBatch), Ended> {
    let body = open(state, node, context)?;
    let (schema, decision) = (body.decision_schema(), body.decision());
    let standing = state.options.standing.as_ref();
    let standing = standing.filter(|_| running.spread.is_none() && decision.can_be_held());
    let recipe = &state.graph.nodes[node].recipe;
    let held = match standing {
        Some(standing) => by_changes(state, context, &decision, keys, standing, recipe),
        None => None,
    };
    let is_held = held.is_some();
    let decided = match held {
        Some(decided) => decided,
        None => {
            let signals = Arc::clone(&running.signals);
            let resources = Resources {
                memory: Resources::memory(state.options.decide_bytes, state.options.processes.as_deref()),
                scratch: context.scratch.clone(),
                stop: Box::new(move || signals.stop_asked()),
            };
            flow_decide::decide(&decision, keys, &resources)?
        }
    };
    decided.complete(&decision, context)?;
    if let (Some(standing), false) = (standing, is_held) {
        // While the rest of the run goes on.
        standing.load(recipe, &decision, keys);
    }
    failpoints::hit(failpoints::DECIDED, &[]);
    let decisions = Decisions::new(schema.clone(), decided.decisions)?;
    let unknown = decisions
        .partitions()
        .find(|partition| keys.rows_of(partition).is_none());
    if let Some(partition) = unknown {
        let message = format!("it decided over partition {partition}, which has no rows");
        return Err(StageError::failed(message).into());
    }
    let (rows, list) = decisions.to_ports()?;
    Ok((schema, rows, list))
}

/// None where no dataflow holds the key rows, or it failed.
fn by_changes(
    state: &PlanState,
    context: &Context,
    decision: &Decision,
    keys: &Artifact,
    standing: &StandingDecisions,
    recipe: &Digest,
) -> Option<Decided> {
    let begun = Instant::now();
    let (decided, message) = match standing.decide(recipe, decision, keys) {
        Ok(None) => return None,
        Ok(Some(decided)) => {
            let took = begun.elapsed().as_millis();
            (
                Some(decided),
                format!("{} decided by changes in {took} ms", context.stage),
            )
        }
        Err(error) => (
            None,
            format!(
                "{} decides about all key rows, as by changes it failed: {error}",
                context.stage
            ),
        ),
    };
    state.events.send(Event::Note { message });
    decided
}

/// In a process that stays alive: loads the key rows that a decision is about which stands. Where they cannot be loaded the next
/// decision is made in another way.
fn hold_keys(state: &mut PlanState, node: usize, running: &Running) {
    let Some(standing) = state.options.standing.clone().filter(|_| running.spread.is_none()) else {
        return;
    };
    let recipe = state.graph.nodes[node].recipe;
    if standing.holds(&recipe) {
        return;
    }
    if let Err(error) = load_keys(state, node, &standing) {
        let message = format!(
            "{} will decide about all key rows, as they cannot be held: {error}",
            state.graph.nodes[node].name
        );
        state.events.send(Event::Note { message });
    }
}

fn load_keys(state: &mut PlanState, node: usize, standing: &StandingDecisions) -> Result<(), RunError> {
    // Before files are opened and key rows are joined: records say how many there are.
    if !has_room_for(key_rows(state, node)?) {
        return Ok(());
    }
    let Some(context) = state.context(node)? else {
        return Ok(());
    };
    let decision = catch_panic(|| open(state, node, &context).map(|body| body.decision()));
    let decision = decision.map_err(|error| state.failed(node, None, error))?;
    if !decision.can_be_held() {
        return Ok(());
    }
    let keys = keys_of(state, node)?;
    standing.load(&state.graph.nodes[node].recipe, &decision, &keys);
    Ok(())
}
