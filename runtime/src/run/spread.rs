//! Regions that run on all processes of a run. Process 0 plans, and sends each of the others what falls to its workers:
//! partitions, and the records that they are computed from. The others list nothing, and commit nothing: they write data, and
//! process 0 writes the records that name it, under its lock.

mod follower;
mod message;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, unbounded};

pub(super) use self::follower::Follower;
use self::message::{
    Answer, Invitation, KeyOfPartition, LogMessage, LogNodeMessage, NodeMessage, RegionMessage, SettledNode,
    StoredInput,
};
use crate::dataflow::cluster::{Cluster, Dataflows};
use crate::dataflow::job::{NodeJob, Signals};
use crate::planner::state::PlanState;
use flow_base::partition::Partition;
use flow_kind::kind::Role;
use flow_plan::graph::Flow;
use flow_plan::keys::ListedPartition;
use flow_plan::run_error::RunError;
use flow_processes::{ANSWERS, INVITATIONS, Processes, RegionTopics};
use flow_store::Record;

/// How often process 0, which waits for answers, checks whether a process is lost.
const LOOK: Duration = Duration::from_millis(50);

/// Partitions of a source whose files the other processes look at before they compute: enough to notice a missing mount.
const PARTITIONS_TO_LOOK_AT: usize = 16;

/// At process 0: the other processes, which compute their share of the partitions.
pub(super) struct Spread {
    processes: Arc<Processes>,
    signals: Arc<Signals>,
    answers: Receiver<(usize, Vec<u8>)>,
}

/// The processes and workers among which the ordinals of a region are dealt out.
#[derive(Clone, Copy)]
struct Shares {
    processes: usize,
    /// Of each process.
    workers: usize,
}

impl Shares {
    /// The process whose worker has the ordinal.
    fn process_of(self, ordinal: usize) -> usize {
        ordinal % (self.processes * self.workers) / self.workers
    }
}

impl Spread {
    /// Invites the other processes to the run. A text tells which of them do not see the state directory, or the source files.
    ///
    /// # Errors
    /// Where a process is lost.
    pub fn new(
        processes: &Arc<Processes>,
        signals: &Arc<Signals>,
        run: &str,
        state: &PlanState,
    ) -> Result<Result<Spread, String>, RunError> {
        let (send, answers) = unbounded();
        processes.listen(ANSWERS, move |from, answer| {
            // The run may be over.
            let _ = send.send((from, answer));
        });
        let spread = Spread {
            processes: Arc::clone(processes),
            signals: Arc::clone(signals),
            answers,
        };
        let invitation = encode(&Invitation::Run {
            run: run.to_owned(),
            look_at: files_to_look_at(state),
        })?;
        let invitations = vec![invitation; processes.count() - 1];
        let mut unseen = Vec::new();
        for (from, answer) in spread.ask(invitations)? {
            if let Answer::Refused(why) = answer {
                unseen.push(format!("{}: {why}", spread.name(from)));
            }
        }
        if unseen.is_empty() {
            return Ok(Ok(spread));
        }
        Ok(Err(format!(
            "not all processes see what process 0 sees: {}",
            unseen.join("; ")
        )))
    }

    fn name(&self, process: usize) -> String {
        let peer = self.processes.peers().get(process);
        peer.map_or_else(|| format!("process {process}"), ToString::to_string)
    }

    /// Sends one message to each of the others, from process 1 on, and waits for their answers.
    fn ask(&self, messages: Vec<Vec<u8>>) -> Result<Vec<(usize, Answer)>, RunError> {
        let mut answers = BTreeMap::new();
        let asked = messages.len();
        for (to, message) in (1..).zip(messages) {
            self.processes.send(to, INVITATIONS, Box::new(message));
        }
        while answers.len() < asked {
            match self.answers.recv_timeout(LOOK) {
                Ok((from, answer)) => {
                    let answer = serde_json::from_slice(&answer).map_err(|error| RunError::Process {
                        message: format!("{} sent what cannot be read: {error}", self.name(from)),
                    })?;
                    if answers.insert(from, answer).is_some() {
                        return Err(RunError::Process {
                            message: format!("{} answered what it was not asked", self.name(from)),
                        });
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(RunError::internal("nobody listens to the other processes any more"));
                }
            }
            if let Some(loss) = self.processes.lost() {
                return Err(RunError::Process { message: loss.message });
            }
            if let Some(signal) = self.signals.stop_asked() {
                return Err(RunError::Interrupted { signal });
            }
        }
        Ok(answers.into_iter().collect())
    }

    fn tell(&self, invitation: &Invitation) -> Result<(), RunError> {
        for to in 1..self.processes.count() {
            self.processes.send(to, INVITATIONS, Box::new(encode(invitation)?));
        }
        Ok(())
    }

    /// Begins a region on all processes, with `workers` workers in each. `nodes` are those of the graph, `jobs` what process
    /// 0 would do alone. None where the region cannot be described to others: a path in it is not text.
    ///
    /// # Errors
    /// Where a process is lost, or cannot do its share.
    pub fn begin(
        &self,
        state: &PlanState,
        nodes: &[usize],
        partitions: &[Partition],
        jobs: &[NodeJob],
        workers: usize,
    ) -> Result<Option<Arc<Cluster>>, RunError> {
        let session = self.processes.new_session();
        let shares = Shares {
            processes: self.processes.count(),
            workers,
        };
        let mut messages = Vec::with_capacity(shares.processes - 1);
        for process in 1..shares.processes {
            let is_own = |ordinal: usize| shares.process_of(ordinal) == process;
            let own: Vec<usize> = (0..partitions.len()).filter(|ordinal| is_own(*ordinal)).collect();
            let message = RegionMessage {
                session,
                workers,
                settled: settled(state, nodes, jobs, partitions, &own),
                nodes: nodes
                    .iter()
                    .zip(jobs)
                    .map(|(node, job)| node_message(state, *node, job, partitions, &own))
                    .collect(),
            };
            match serde_json::to_vec(&Invitation::Region(Box::new(message))) {
                Ok(bytes) => messages.push(bytes),
                Err(_) => return Ok(None),
            }
        }
        self.begin_together(partitions, messages)?;
        let topics = RegionTopics::of_session(session);
        Ok(Some(Arc::new(Cluster::new(&self.processes, topics, Dataflows::One))))
    }

    /// Begins a log, whose steps before `start` are done, and the stages that feed it, on all processes: each runs all of
    /// `partitions` in a dataflow of its own, with `workers` workers. None where it cannot be described to others.
    ///
    /// # Errors
    /// As [`Spread::begin`].
    pub fn begin_log(
        &self,
        state: &PlanState,
        nodes: &[usize],
        partitions: &[Partition],
        start: usize,
        jobs: &[NodeJob],
        workers: usize,
    ) -> Result<Option<Arc<Cluster>>, RunError> {
        let session = self.processes.new_session();
        let left = partitions.get(start..).unwrap_or_default();
        let all: Vec<usize> = (0..left.len()).collect();
        let message = LogMessage {
            session,
            workers,
            nodes: nodes
                .iter()
                .zip(jobs)
                .map(|(node, job)| LogNodeMessage {
                    node: *node,
                    recipe: job.recipe,
                    idle: all
                        .iter()
                        .copied()
                        .filter(|at| job.active.get(start + at) != Some(&true))
                        .collect(),
                })
                .collect(),
            settled: settled(state, nodes, jobs, left, &all),
        };
        let Ok(message) = serde_json::to_vec(&Invitation::Log(Box::new(message))) else {
            return Ok(None);
        };
        self.begin_together(left, vec![message; self.processes.count() - 1])?;
        let topics = RegionTopics::of_session(session);
        let cluster = Cluster::new(&self.processes, topics, Dataflows::OfEachProcess);
        Ok(Some(Arc::new(cluster)))
    }

    /// Sends the partitions of a region, the invitations to it, and its begin if all agree.
    fn begin_together(&self, partitions: &[Partition], invitations: Vec<Vec<u8>>) -> Result<(), RunError> {
        let all = Arc::new(encode(&Invitation::Partitions(partitions.to_vec()))?);
        for to in 1..self.processes.count() {
            self.processes.send(to, INVITATIONS, Box::new(Arc::clone(&all)));
        }
        drop(all);
        let mut refused = None;
        for (from, answer) in self.ask(invitations)? {
            if let (None, Answer::Refused(why)) = (&refused, answer) {
                refused = Some(format!("{}: {why}", self.name(from)));
            }
        }
        if let Some(message) = refused {
            self.tell(&Invitation::Cancel)?;
            return Err(RunError::OfProcess { message });
        }
        self.tell(&Invitation::Begin)
    }
}

fn encode(invitation: &Invitation) -> Result<Vec<u8>, RunError> {
    serde_json::to_vec(invitation)
        .map_err(|error| RunError::internal(format!("a message to other processes cannot be written: {error}")))
}

/// What a process is to do of one node.
fn node_message(state: &PlanState, node: usize, job: &NodeJob, partitions: &[Partition], own: &[usize]) -> NodeMessage {
    let is_active = |ordinal: &usize| job.active.get(*ordinal) == Some(&true);
    let active: Vec<usize> = own.iter().copied().filter(is_active).collect();
    let record: Vec<KeyOfPartition> = own
        .iter()
        .filter_map(|&ordinal| {
            let parts = job.record.get(ordinal)?.clone()?;
            Some(KeyOfPartition { ordinal, parts })
        })
        .collect();
    let stored = job.streams.iter().filter_map(|stream| {
        let (_, ordinals) = stream.stored.as_ref()?;
        Some(StoredInput {
            position: stream.position,
            ordinals: own.iter().copied().filter(|ordinal| ordinals[*ordinal]).collect(),
        })
    });
    let sources: Vec<ListedPartition> = active
        .iter()
        .filter_map(|ordinal| job.source_partitions.get(&partitions[*ordinal]).cloned())
        .collect();
    let files = sources.iter().flat_map(|listed| &listed.partition.files);
    let ranges = sources.iter().flat_map(|listed| &listed.ranges);
    let noted = state.store.sources().noted_files(files, ranges);
    let standing = record.iter().flat_map(|key| {
        let writer = job.writer.as_ref();
        writer.map_or_else(Vec::new, |writer| writer.records_of(&partitions[key.ordinal]))
    });
    NodeMessage {
        node,
        recipe: job.recipe,
        stored: stored.collect(),
        standing: standing.map(|record| Record::clone(&record)).collect(),
        active,
        record,
        sources,
        noted,
    }
}

/// Some files of each source, with their sizes here.
fn files_to_look_at(state: &PlanState) -> Vec<(PathBuf, u64)> {
    let mut all = Vec::new();
    for node in &state.nodes {
        let every = node.sources.len().div_ceil(PARTITIONS_TO_LOOK_AT).max(1);
        let files = node
            .sources
            .values()
            .step_by(every)
            .flat_map(|listed| &listed.partition.files);
        let files = files.filter(|file| file.to_str().is_some() && !flow_storage::is_url(file));
        all.extend(files.filter_map(|file| Some((file.clone(), std::fs::metadata(file).ok()?.len()))));
    }
    all
}

/// The records of nodes outside of the region that its nodes read: of the process's own partitions, or all where they are
/// read as a whole.
fn settled(
    state: &PlanState,
    nodes: &[usize],
    jobs: &[NodeJob],
    partitions: &[Partition],
    own: &[usize],
) -> Vec<SettledNode> {
    // By node, whether it is read as a whole.
    let mut read: BTreeMap<usize, bool> = BTreeMap::new();
    for (&node, job) in nodes.iter().zip(jobs) {
        let described = &state.graph.nodes[node];
        for input in &described.inputs {
            let stream = job
                .streams
                .iter()
                .find(|stream| Some(stream.position) == input.position);
            let whole = match input.flow {
                Flow::Whole | Flow::Decisions => true,
                Flow::Replay => false,
                Flow::Stream if stream.is_some_and(|stream| stream.stored.is_some()) => false,
                Flow::Stream | Flow::SemiJoin => continue,
            };
            *read.entry(input.node).or_default() |= whole;
            // A source reads the rejects of all stages before its inputs.
            if whole && described.role == Role::Source {
                for before in state.graph.upstream(input.node) {
                    if state.nodes[before].all_settled {
                        read.insert(before, true);
                    }
                }
            }
        }
    }
    let own: Vec<&Partition> = own.iter().map(|ordinal| &partitions[*ordinal]).collect();
    let of_node = |(node, whole): (usize, bool)| settled_node(state, node, (!whole).then_some(&own));
    read.into_iter().map(of_node).collect()
}

/// The records of a node: of these partitions, or all.
fn settled_node(state: &PlanState, node: usize, own: Option<&Vec<&Partition>>) -> SettledNode {
    let settled = &state.nodes[node].settled;
    let records: Vec<Record> = match own {
        None => settled.values().map(|record| Record::clone(record)).collect(),
        Some(own) => {
            let own = own.iter().filter_map(|partition| settled.get(*partition));
            own.map(|record| Record::clone(record)).collect()
        }
    };
    SettledNode {
        node,
        recipe: state.nodes[node]
            .settled_recipe
            .unwrap_or(state.graph.nodes[node].recipe),
        records,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinals_fall_to_the_process_of_their_worker() {
        let shares = Shares {
            processes: 3,
            workers: 2,
        };
        let processes: Vec<usize> = (0..8).map(|ordinal| shares.process_of(ordinal)).collect();
        assert_eq!(processes, [0, 0, 1, 1, 2, 2, 0, 0]);
    }
}
