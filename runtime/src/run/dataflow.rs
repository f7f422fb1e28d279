//! Runs the partitions of a region of streaming stages.

use std::collections::BTreeMap;

use super::counts::RunCounts;
use super::job::{node_job, region_job, workers_of_each};
use super::node::{failed, note, started};
use super::running::Running;
use super::schedule::Schedule;
use crate::dataflow::job::KeyPart;
use crate::dataflow::run_region;
use crate::planner::state::PlanState;
use flow_base::partition::Partition;
use flow_plan::Action;
use flow_plan::failures::is_stored;
use flow_plan::graph::{Flow, KeyInput, NodeInput};
use flow_plan::run_error::RunError;
use flow_plan::verdict::{NodeVerdict, PartitionVerdict, Verdict};
use flow_store::ArtifactWriter;

pub(super) fn run(
    state: &mut PlanState,
    nodes: &[usize],
    verdicts: Vec<NodeVerdict>,
    running: &Running,
    run_counts: &mut RunCounts,
) -> Result<(), RunError> {
    let (snapshots, signals) = (&running.snapshots, &running.signals);
    let mut decided: Vec<Vec<PartitionVerdict>> = Vec::new();
    for NodeVerdict { node, verdict } in verdicts {
        match verdict {
            Verdict::Partitions(partitions) => decided.push(partitions),
            _ => {
                return Err(RunError::internal(format!(
                    "the partitions of `{}` are not known in time",
                    state.graph.nodes[node].name
                )));
            }
        }
    }
    // By node, its index in the region.
    let place: BTreeMap<usize, usize> = nodes.iter().enumerate().map(|(place, node)| (*node, place)).collect();
    let mut schedule = Schedule::new(&decided);
    // Nodes that run are fed by the nodes that stream into them, unless the rows of these are stored.
    for (own, node) in nodes.iter().enumerate().rev() {
        for (input, producer) in streams(state, *node, &place) {
            let verdicts = by_partition(&decided[producer]);
            let is_stored = |partition: &Partition| {
                let verdict = verdicts.get(partition);
                verdict.is_some_and(|verdict| is_stored(&state.graph, &state.nodes, input, verdict))
            };
            schedule.feed(own, producer, is_stored);
        }
    }
    let schedule = schedule.only_run();
    let mut to_run = Vec::new();
    for (own, node) in nodes.iter().enumerate() {
        let run = decided[own].iter().filter(|one| one.action != Action::Reuse).count() as u64;
        let reused = decided[own].len() as u64 - run;
        to_run.push((run, reused));
        if state.selection.selected[*node] {
            let begun = run_counts.knows(*node);
            run_counts.set_reused(*node, reused);
            // After a failure there may be nothing left to begin again.
            if run > 0 || !begun {
                started(state, *node, run, run_counts.of(*node).1);
            }
        }
    }
    if schedule.partitions().is_empty() {
        return Ok(());
    }
    for node in nodes {
        note(state, *node, snapshots)?;
    }
    let mut jobs = Vec::new();
    for (own, &node) in nodes.iter().enumerate() {
        let mut job = node_job(state, node, &place, true)?;
        job.active = schedule.run_by(own);
        for (input, producer) in streams(state, node, &place) {
            let stored = schedule.read_stored(own, producer);
            let stream = job
                .streams
                .iter_mut()
                .find(|stream| Some(stream.position) == input.position);
            if let (true, Some(stream)) = (stored.contains(&true), stream) {
                stream.stored = Some((state.artifact(input.node, input.port)?, stored));
            }
        }
        let key_inputs = &state.graph.nodes[node].key_inputs;
        let verdicts = by_partition(&decided[own]);
        for (ordinal, partition) in schedule.partitions().iter().enumerate() {
            let verdict = verdicts
                .get(partition)
                .filter(|verdict| verdict.action != Action::Reuse);
            let parts = verdict.map(|verdict| {
                key_parts(key_inputs, verdict, |source| {
                    let place = place.get(&source).copied()?;
                    schedule.is_run(place, ordinal).then_some(place)
                })
            });
            job.record.push(parts.transpose()?);
        }
        (job.total, job.reused) = (to_run[own].0 + to_run[own].1, to_run[own].1);
        jobs.push(job);
    }
    let partitions = schedule.partitions().to_vec();
    let writers: Vec<Option<ArtifactWriter>> = jobs.iter().map(|job| job.writer.clone()).collect();
    let left = partitions.len() as u64;
    let workers = workers_of_each(state, left, running.processes());
    let cluster = match &running.spread {
        Some(spread) if left > 1 => spread.begin(state, nodes, &partitions, &jobs, workers)?,
        _ => None,
    };
    let workers = match cluster {
        Some(_) => workers,
        None => workers_of_each(state, left, 1),
    };
    let job = region_job(state, partitions, 0, jobs, Some(snapshots), signals, workers, cluster);
    let done = run_region(job);
    for (own, record) in done.committed {
        let node = nodes[own];
        let partition = record.partition.clone();
        state.nodes[node].settle(&partition, record);
        run_counts.add(node, 1, 0);
    }
    if let Some(failure) = done.failure {
        return Err(failed(failure));
    }
    let mut missing = None;
    for (own, &node) in nodes.iter().enumerate() {
        let node_state = &state.nodes[node];
        let Some(one) = decided[own]
            .iter()
            .find(|one| !node_state.settled.contains_key(&one.partition))
        else {
            if to_run[own].0 > 0
                && let Some(writer) = &writers[own]
            {
                writer.finish(
                    node_state
                        .settled
                        .iter()
                        .map(|(partition, record)| (partition, &record.key)),
                )?;
            }
            state.nodes[node].all_settled = true;
            continue;
        };
        if state.selection.selected[node] {
            missing = Some(format!(
                "partition {} of `{}` was not committed",
                one.partition, state.graph.nodes[node].name
            ));
        }
    }
    match (signals.stop_asked(), missing) {
        (_, None) => Ok(()),
        (Some(signal), Some(_)) => Err(RunError::Interrupted { signal }),
        (None, Some(message)) => Err(RunError::Internal { message }),
    }
}

/// The inputs of a node that stream from nodes of the region, with the places of these.
fn streams<'a>(
    state: &'a PlanState,
    node: usize,
    place: &'a BTreeMap<usize, usize>,
) -> impl Iterator<Item = (&'a NodeInput, usize)> {
    let streamed = state.graph.nodes[node].inputs.iter();
    streamed
        .filter(|input| input.flow == Flow::Stream)
        .filter_map(|input| Some((input, *place.get(&input.node)?)))
}

fn by_partition(verdicts: &[PartitionVerdict]) -> BTreeMap<&Partition, &PartitionVerdict> {
    verdicts.iter().map(|verdict| (&verdict.partition, verdict)).collect()
}

/// The parts of a running partition's key. A source that runs it digests its files as it reads them.
fn key_parts(
    key_inputs: &[KeyInput],
    one: &PartitionVerdict,
    running: impl Fn(usize) -> Option<usize>,
) -> Result<Vec<KeyPart>, RunError> {
    key_inputs
        .iter()
        .zip(&one.inputs)
        .map(|(input, digest)| {
            if let KeyInput::Source { node } = input
                && let Some(place) = running(*node)
            {
                return Ok(KeyPart::Source(place));
            }
            digest.map(KeyPart::Known).ok_or_else(|| {
                RunError::internal(format!(
                    "an input of partition {} is not settled in time",
                    one.partition
                ))
            })
        })
        .collect()
}
