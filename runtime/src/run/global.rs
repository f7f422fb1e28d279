//! Runs `decide` of a global stage: over the key rows of all partitions, in one commit.

use std::sync::Arc;
use std::time::Instant;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;

use super::Running;
use super::counts::RunCounts;
use super::node::{commit_one, started};
use crate::context::Context;
use crate::error::StageError;
use crate::event::Event;
use crate::grouped_decision::{self, Budget, Decided, Shuffle, Stopped, Task, fits_in_one_pass};
use crate::incremental_decision::{StandingDecisions, has_room_for};
use crate::kind::{Body, Global};
use crate::panic_guard::catch_panic;
use crate::partition::Partition;
use crate::plan::Action;
use crate::plan::decide::{NodeVerdict, Verdict};
use crate::plan::decisions::{ALL, Decisions, digests_schema};
use crate::plan::graph::{DECISIONS_PORT, DIGESTS_PORT, Flow};
use crate::plan::keys::key_of;
use crate::plan::state::PlanState;
use crate::run_error::RunError;
use crate::store::{Artifact, Counts, PortRows};

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
        return Err(RunError::Internal {
            message: format!("`{}` was not decided", state.graph.nodes[node].name),
        });
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
        return Err(RunError::Internal {
            message: format!(
                "the inputs of `{}` are not settled in time",
                state.graph.nodes[node].name
            ),
        });
    };
    let keys = keys_of(state, node)?;
    let (schema, decided) = decide(state, node, &context, &keys, running)?;
    let stored = catch_panic(|| {
        let decisions = Decisions::new(schema.clone(), decided)?;
        if let Some(partition) = decisions
            .partitions()
            .find(|partition| keys.rows_of(partition).is_none())
        {
            return Err(StageError::failed(format!(
                "it decided over partition {partition}, which has no rows"
            )));
        }
        decisions.to_ports()
    });
    let (rows, list) = stored.map_err(|error| state.failed(node, None, error))?;
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
        return Err(RunError::Internal {
            message: format!("`{}` has no key rows", state.graph.nodes[node].name),
        });
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
pub(super) fn open(state: &PlanState, node: usize, context: &Context) -> Result<Box<dyn Global>, RunError> {
    let settings = &state.stage(node).settings;
    let opened = catch_panic(|| match settings.open(context)? {
        Body::Global(body) => Ok(body),
        _ => Err(StageError::failed("the kind says it is global, but its body is not")),
    });
    opened.map_err(|error| state.failed(node, None, error))
}

/// The schema of the decisions, and the decisions. There are three ways to the same decisions:
///
/// 1. By changes, in a process that stays alive over many runs (`--watch`), once a dataflow holds the key rows: after the first
///    run, where the kind can, and the memory suffices.
/// 2. Group by group, where the kind can and there are several processes, or one whose memory does not suffice for all key rows
///    at once.
/// 3. At once, all else.
fn decide(
    state: &PlanState,
    node: usize,
    context: &Context,
    keys: &Artifact,
    running: &Running,
) -> Result<(SchemaRef, Vec<(Partition, RecordBatch)>), RunError> {
    let failed = |error| state.failed(node, None, error);
    let mut body = open(state, node, context)?;
    let standing = state.options.standing.as_ref().filter(|_| running.spread.is_none());
    if let Some(standing) = standing
        && let Some(incremental) = catch_panic(|| Ok(body.incrementally())).map_err(failed)?
    {
        let recipe = &state.graph.nodes[node].recipe;
        let begun = Instant::now();
        match standing.decide(recipe, &incremental, keys) {
            Ok(Some(decided)) => {
                let message = format!(
                    "{} decided by changes in {} ms",
                    context.stage,
                    begun.elapsed().as_millis()
                );
                state.events.send(Event::Note { message });
                catch_panic(|| incremental.complete(context, &decided)).map_err(failed)?;
                return Ok((body.decision_schema(), decided.decisions));
            }
            Ok(None) => {}
            Err(error) => {
                let message = format!(
                    "{} decides about all key rows, as by changes it failed: {error}",
                    context.stage
                );
                state.events.send(Event::Note { message });
            }
        }
        let decided = decide_from_nothing(state, node, context, keys, running, &mut body)?;
        // While the rest of the run goes on.
        standing.load(recipe, &incremental, keys);
        return Ok(decided);
    }
    decide_from_nothing(state, node, context, keys, running, &mut body)
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
    let body = open(state, node, &context)?;
    let incremental = catch_panic(|| Ok(body.incrementally())).map_err(|error| state.failed(node, None, error))?;
    let Some(incremental) = incremental else { return Ok(()) };
    let keys = keys_of(state, node)?;
    standing.load(&state.graph.nodes[node].recipe, &incremental, &keys);
    Ok(())
}

/// Decides without what was known before.
fn decide_from_nothing(
    state: &PlanState,
    node: usize,
    context: &Context,
    keys: &Artifact,
    running: &Running,
    body: &mut Box<dyn Global>,
) -> Result<(SchemaRef, Vec<(Partition, RecordBatch)>), RunError> {
    let failed = |error| state.failed(node, None, error);
    let (schema, grouped) = catch_panic(|| Ok((body.decision_schema(), body.by_groups()))).map_err(failed)?;
    let at_once = |body: &mut Box<dyn Global>| catch_panic(|| body.decide(keys)).map_err(failed);
    let Some(grouped) = grouped else {
        return Ok((schema, at_once(body)?));
    };
    let spread = running.spread.as_ref().filter(|_| keys.partitions().len() > 1);
    let budget = Budget::new(state.options.decide_bytes, state.options.processes.as_deref());
    if spread.is_none() && fits_in_one_pass(grouped.as_ref(), keys.rows(), budget) {
        return Ok((schema, at_once(body)?));
    }
    let partitions: Arc<[Partition]> = keys.partitions().cloned().collect();
    let signals = Arc::clone(&running.signals);
    let stop = move || signals.stop_asked();
    let shuffle = match spread {
        Some(spread) => spread.begin_decide(state, node, &partitions, stop)?,
        None => Shuffle::alone(stop),
    };
    let passes = |round: usize, replied: u64| {
        let bytes = grouped.bytes(round, keys.rows(), replied);
        let passes = budget.passes(bytes, shuffle.processes());
        if passes > 1 {
            state.events.send(Event::Note {
                message: format!(
                    "{} decides in up to {passes} passes over its key rows, as they do not fit into memory at once",
                    context.stage
                ),
            });
        }
        passes
    };
    let decided = grouped_decision::run(&Task {
        grouped: grouped.as_ref(),
        keys,
        partitions: &partitions,
        shuffle: &shuffle,
        passes: &passes,
    });
    let fault = |message: &str| RunError::Internal {
        message: message.to_owned(),
    };
    let decided = decided.map_err(|why| match why {
        Stopped::Stage(error) | Stopped::Elsewhere(Some(error)) => failed(error),
        Stopped::Elsewhere(None) => fault("another process left a decision without a reason"),
        Stopped::Lost(message) => RunError::Process { message },
        Stopped::Signal(signal) => RunError::Interrupted { signal },
    })?;
    let Some(Decided { carried, decisions }) = decided else {
        return Err(fault("process 0 was given no decisions"));
    };
    catch_panic(|| grouped.complete(context, &carried, &decisions)).map_err(failed)?;
    Ok((schema, decisions))
}
