//! Runs the partitions of a region of streaming stages.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::counts::RunCounts;
use super::job::{node_job, region_job};
use super::node::{failed, note, started};
use crate::dataflow::job::{KeyPart, Signals};
use crate::dataflow::run_region;
use crate::digest::Digest;
use crate::partition::Partition;
use crate::plan::Action;
use crate::plan::decide::{NodeVerdict, PartitionVerdict, Verdict};
use crate::plan::graph::{Flow, KeyInput, NodeInput};
use crate::plan::keys::key_of;
use crate::plan::state::PlanState;
use crate::run_error::RunError;
use crate::store::{ArtifactWriter, SnapshotWriter};

pub(super) fn run(
    state: &mut PlanState,
    nodes: &[usize],
    verdicts: Vec<NodeVerdict>,
    snapshots: &SnapshotWriter,
    signals: &Arc<Signals>,
    run_counts: &mut RunCounts,
) -> Result<(), RunError> {
    let mut decided: Vec<Vec<PartitionVerdict>> = Vec::new();
    for NodeVerdict { node, verdict } in verdicts {
        match verdict {
            Verdict::Partitions(partitions) => decided.push(partitions),
            _ => {
                return Err(RunError::Internal {
                    message: format!(
                        "the partitions of `{}` are not known in time",
                        state.graph.nodes[node].name
                    ),
                });
            }
        }
    }
    // Places of nodes in the region, and partitions in the run's list.
    let place: BTreeMap<usize, usize> = nodes.iter().enumerate().map(|(place, node)| (*node, place)).collect();
    let mut all: Vec<Partition> = Vec::new();
    for own in &decided {
        if own.len() != all.len() || own.iter().zip(&all).any(|(one, partition)| one.partition != *partition) {
            all.extend(own.iter().map(|one| one.partition.clone()));
            all.sort_unstable();
            all.dedup();
        }
    }
    let at = |partition: &Partition| all.binary_search(partition).ok();
    let mut has = vec![vec![false; all.len()]; nodes.len()];
    let mut active = vec![vec![false; all.len()]; nodes.len()];
    for (own, (has, active)) in decided.iter().zip(has.iter_mut().zip(&mut active)) {
        for one in own {
            if let Some(at) = at(&one.partition) {
                has[at] = true;
                active[at] = one.action != Action::Reuse;
            }
        }
    }
    // What runs is fed by the nodes that stream into it, where their rows do not stand stored.
    for (own, node) in nodes.iter().enumerate().rev() {
        for input in state.graph.nodes[*node]
            .inputs
            .iter()
            .filter(|input| input.flow == Flow::Stream)
        {
            let Some(&producer) = place.get(&input.node) else {
                continue;
            };
            for one in &decided[producer] {
                if let Some(at) = at(&one.partition)
                    && active[own][at]
                    && !active[producer][at]
                {
                    active[producer][at] = !is_stored(state, input, one);
                }
            }
        }
    }
    let runs: Vec<usize> = (0..all.len())
        .filter(|partition| active.iter().any(|active| active[*partition]))
        .collect();
    let mut to_run = Vec::new();
    for (own, node) in nodes.iter().enumerate() {
        let run = decided[own].iter().filter(|one| one.action != Action::Reuse).count() as u64;
        let reused = decided[own].len() as u64 - run;
        to_run.push((run, reused));
        if state.selection.selected[*node] {
            started(state, *node, run, reused);
            run_counts.add(*node, 0, reused);
        }
    }
    if runs.is_empty() {
        return Ok(());
    }
    for node in nodes {
        note(state, *node, snapshots)?;
    }
    let mut jobs = Vec::new();
    for (own, &node) in nodes.iter().enumerate() {
        let mut job = node_job(state, node, &place, true)?;
        job.active = runs.iter().map(|partition| active[own][*partition]).collect();
        let streamed = state.graph.nodes[node]
            .inputs
            .iter()
            .filter(|input| input.flow == Flow::Stream);
        for input in streamed {
            let Some(&producer) = place.get(&input.node) else {
                continue;
            };
            let stored: Vec<bool> = runs
                .iter()
                .map(|&partition| active[own][partition] && has[producer][partition] && !active[producer][partition])
                .collect();
            let stream = job
                .streams
                .iter_mut()
                .find(|stream| Some(stream.position) == input.position);
            if let (true, Some(stream)) = (stored.contains(&true), stream) {
                stream.stored = Some((state.artifact(input.node, input.port)?, stored));
            }
        }
        let key_inputs = &state.graph.nodes[node].key_inputs;
        let by_partition: BTreeMap<&Partition, &PartitionVerdict> =
            decided[own].iter().map(|one| (&one.partition, one)).collect();
        for &partition in &runs {
            let one = by_partition
                .get(&all[partition])
                .filter(|one| one.action != Action::Reuse);
            job.record.push(
                one.map(|one| {
                    key_parts(key_inputs, one, |source| {
                        let place = place.get(&source).copied()?;
                        active[place][partition].then_some(place)
                    })
                })
                .transpose()?,
            );
        }
        (job.total, job.reused) = (to_run[own].0 + to_run[own].1, to_run[own].1);
        jobs.push(job);
    }
    let partitions: Vec<Partition> = runs.iter().map(|partition| all[*partition].clone()).collect();
    let writers: Vec<Option<ArtifactWriter>> = jobs.iter().map(|job| job.writer.clone()).collect();
    let job = region_job(state, partitions, 0, jobs, snapshots, signals);
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

/// Whether the rows of a partition stand on the port that an input reads, just as the producer would make them: they are
/// read instead.
fn is_stored(state: &PlanState, input: &NodeInput, producer: &PartitionVerdict) -> bool {
    let (described, node_state) = (&state.graph.nodes[input.node], &state.nodes[input.node]);
    let inputs: Option<Vec<Digest>> = producer.inputs.iter().copied().collect();
    match (node_state.settled.get(&producer.partition), inputs) {
        (Some(record), Some(inputs)) => {
            let port = &described.outputs[input.port].name;
            record.key == key_of(&described.recipe, &inputs) && record.ports.contains_key(port)
        }
        _ => false,
    }
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
            digest.map(KeyPart::Known).ok_or_else(|| RunError::Internal {
                message: format!("an input of partition {} is not settled in time", one.partition),
            })
        })
        .collect()
}
