//! At every process but 0: its share of the regions of the run.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use crossbeam_channel::{Receiver, unbounded};

use super::message::{Answer, Invitation, LogMessage, NodeMessage, RegionMessage, SettledNode};
use crate::dataflow::cluster::{Cluster, Dataflows};
use crate::dataflow::job::{NodeJob, RegionJob, Signals};
use crate::dataflow::run_region;
use crate::options::Options;
use crate::planner::state::PlanState;
use crate::run::job::{node_job, region_job};
use flow_base::digest::Digest;
use flow_base::event::{Event, Events};
use flow_base::partition::Partition;
use flow_plan::graph::Node;
use flow_plan::run_error::RunError;
use flow_processes::{ANSWERS, INVITATIONS, Processes, RegionTopics};
use flow_spec::Checked;
use flow_store::{Access, ArtifactWriter, Store};

/// Takes part in the regions of a run, on a thread of its own.
pub(in crate::run) struct Follower {
    processes: Arc<Processes>,
    checked: Arc<Checked>,
    options: Options,
    store: Option<Store>,
}

/// A region that is ready to run. The writers of its recipes are held as long as it is there.
struct Share {
    job: RegionJob,
    _writers: Vec<ArtifactWriter>,
}

impl Follower {
    /// Begins to listen to process 0.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(processes: &Arc<Processes>, checked: &Arc<Checked>, options: &Options) -> std::io::Result<()> {
        let (send, invitations) = unbounded();
        processes.listen(INVITATIONS, move |from, message| {
            if from == 0 {
                // The thread lives as long as the process.
                let _ = send.send(message);
            }
        });
        let mut follower = Follower {
            processes: Arc::clone(processes),
            checked: Arc::clone(checked),
            options: options.clone(),
            store: None,
        };
        std::thread::Builder::new().name("regions".into()).spawn(move || {
            // Process 0 would wait for this share for ever.
            if catch_unwind(AssertUnwindSafe(|| follower.follow(&invitations))).is_err() {
                follower.processes.cut();
            }
        })?;
        Ok(())
    }

    fn follow(&mut self, invitations: &Receiver<Vec<u8>>) {
        let mut ready: Option<Share> = None;
        let mut partitions = Vec::new();
        while let Ok(message) = invitations.recv() {
            match serde_json::from_slice(&message) {
                Ok(Invitation::Run { run, look_at }) => {
                    let seen = self.join_run(&run).and_then(|()| see(&look_at));
                    self.answer(seen);
                }
                Ok(Invitation::Partitions(all)) => partitions = all,
                Ok(Invitation::Region(region)) => {
                    let share = self.share(*region, std::mem::take(&mut partitions));
                    let share = share.map_err(|error| error.to_string());
                    let answer = share.map(|share| ready = Some(share));
                    self.answer(answer);
                }
                Ok(Invitation::Log(log)) => {
                    let share = self.log(*log, std::mem::take(&mut partitions));
                    let share = share.map_err(|error| error.to_string());
                    let answer = share.map(|share| ready = Some(share));
                    self.answer(answer);
                }
                Ok(Invitation::Begin) => match ready.take() {
                    Some(Share { job, _writers }) => {
                        // Commits and failures were reported to process 0.
                        run_region(job);
                    }
                    None => return self.processes.cut(),
                },
                Ok(Invitation::Cancel) => ready = None,
                // Whether it is a question cannot be determined.
                Err(_) => return self.processes.cut(),
            }
        }
    }

    fn answer(&self, result: Result<(), String>) {
        let answer = result.map_or_else(Answer::Refused, |()| Answer::Agreed);
        // Texts can always be written.
        let bytes = serde_json::to_vec(&answer).unwrap_or_default();
        self.processes.send(0, ANSWERS, Box::new(bytes));
    }

    /// Opens the state directory, in which the run has a folder.
    fn join_run(&mut self, run: &str) -> Result<(), String> {
        self.store = None;
        let place = || std::path::absolute(&self.options.state).unwrap_or_else(|_| self.options.state.clone());
        let opened = Store::open(
            &self.options.storage,
            &self.options.state,
            Access::Follow { run_id: run.to_owned() },
        );
        let store = opened.map_err(|error| error.to_string())?;
        if !store.has_run(run).map_err(|error| error.to_string())? {
            return Err(format!("its state directory {} has no run {run}", place().display()));
        }
        self.store = Some(store);
        Ok(())
    }

    /// What is known of the run for a region: the records that process 0 sent.
    fn known(&self, cluster: Option<&Arc<Cluster>>, settled: Vec<SettledNode>) -> Result<PlanState, RunError> {
        let fault = |message: &str| RunError::internal(message.to_owned());
        let store = self.store.clone().ok_or_else(|| fault("it was invited to no run"))?;
        let events = Events::default();
        events.hide(&self.checked.pipeline.secrets);
        if let Some(told) = cluster.cloned() {
            events.listen(move |event| {
                if let Event::StageFigures { .. } | Event::Warning { .. } | Event::Note { .. } = event {
                    told.event(event);
                }
            });
        }
        let mut state = PlanState::follow(&self.checked, &self.options, store.clone(), &events)?;
        for settled in settled {
            let node = state.nodes.get_mut(settled.node);
            let node = node.ok_or_else(|| fault("it was sent records of a stage that it does not have"))?;
            node.settled_recipe = Some(settled.recipe);
            for record in settled.records {
                let partition = record.partition.clone();
                node.settle(&partition, Arc::new(record));
            }
            node.all_settled = true;
        }
        Ok(state)
    }

    fn cluster(&self, session: u32, dataflows: Dataflows) -> Arc<Cluster> {
        let topics = RegionTopics::of_session(session);
        Arc::new(Cluster::new(&self.processes, topics, dataflows))
    }

    fn job(
        &self,
        state: &PlanState,
        partitions: Vec<Partition>,
        jobs: Vec<NodeJob>,
        workers: usize,
        cluster: Arc<Cluster>,
    ) -> RegionJob {
        let signals = Arc::new(Signals {
            processes: Some(Arc::clone(&self.processes)),
            ..Signals::default()
        });
        region_job(
            state,
            partitions,
            0,
            jobs,
            None,
            &signals,
            workers.max(1),
            Some(cluster),
        )
    }

    fn share(&self, region: RegionMessage, partitions: Vec<Partition>) -> Result<Share, RunError> {
        let cluster = self.cluster(region.session, Dataflows::One);
        let mut state = self.known(Some(&cluster), region.settled)?;
        let place = places(region.nodes.iter().map(|message| message.node));
        let mut jobs = Vec::with_capacity(region.nodes.len());
        let mut writers = Vec::with_capacity(region.nodes.len());
        for message in region.nodes {
            let (job, writer) = share_of_node(&mut state, message, &place, &partitions)?;
            jobs.push(job);
            writers.push(writer);
        }
        let job = self.job(&state, partitions, jobs, region.workers, cluster);
        Ok(Share { job, _writers: writers })
    }

    /// A log and the stages that feed it, of which nothing is recorded.
    fn log(&self, log: LogMessage, partitions: Vec<Partition>) -> Result<Share, RunError> {
        let cluster = self.cluster(log.session, Dataflows::OfEachProcess);
        let mut state = self.known(Some(&cluster), log.settled)?;
        let place = places(log.nodes.iter().map(|message| message.node));
        let mut jobs = Vec::with_capacity(log.nodes.len());
        for message in log.nodes {
            same_node(&state, message.node, &message.recipe)?;
            let mut job = node_job(&mut state, message.node, &place, false)?;
            job.active = vec![true; partitions.len()];
            for idle in message.idle {
                if let Some(active) = job.active.get_mut(idle) {
                    *active = false;
                }
            }
            jobs.push(job);
        }
        let job = self.job(&state, partitions, jobs, log.workers, cluster);
        let _writers = Vec::new();
        Ok(Share { job, _writers })
    }
}

/// By node, its place in the region.
fn places(nodes: impl Iterator<Item = usize>) -> BTreeMap<usize, usize> {
    nodes.enumerate().map(|(place, node)| (node, place)).collect()
}

fn share_of_node(
    state: &mut PlanState,
    message: NodeMessage,
    place: &BTreeMap<usize, usize>,
    partitions: &[Partition],
) -> Result<(NodeJob, ArtifactWriter), RunError> {
    let described = same_node(state, message.node, &message.recipe)?;
    let sources = state.store.sources();
    sources.put_noted(message.noted);
    // What process 0 noted need not be reported to it.
    sources.take_noted();
    let standing = message.standing.into_iter().map(Arc::new);
    let writer = state.store.follow_writer(&message.recipe, standing)?;
    let by_name = message
        .sources
        .into_iter()
        .map(|listed| (listed.partition.name.clone(), listed));
    state.nodes[message.node].sources = Arc::new(by_name.collect());
    let mut job = node_job(state, message.node, place, true)?;
    job.active = flags(partitions.len(), &message.active);
    job.record = vec![None; partitions.len()];
    for key in message.record {
        if let Some(record) = job.record.get_mut(key.ordinal) {
            *record = Some(key.parts);
        }
    }
    for stored in message.stored {
        let input = described
            .inputs
            .iter()
            .find(|input| input.position == Some(stored.position));
        let stream = job.streams.iter_mut().find(|stream| stream.position == stored.position);
        if let (Some(input), Some(stream)) = (input, stream) {
            let artifact = state.artifact(input.node, input.port)?;
            stream.stored = Some((artifact, flags(partitions.len(), &stored.ordinals)));
        }
    }
    Ok((job, writer))
}

/// The node of the graph, which must be the one that process 0 has there.
fn same_node(state: &PlanState, node: usize, recipe: &Digest) -> Result<Node, RunError> {
    let described = state.graph.nodes.get(node);
    match described {
        Some(described) if described.recipe == *recipe => Ok(described.clone()),
        _ => Err(RunError::Process {
            message: format!(
                "stage `{}` is another one here: a file that its settings name differs from that of process 0",
                described.map_or("", |described| &described.name)
            ),
        }),
    }
}

/// By ordinal, whether it is among `ordinals`.
fn flags(count: usize, ordinals: &[usize]) -> Vec<bool> {
    let mut flags = vec![false; count];
    for ordinal in ordinals {
        if let Some(flag) = flags.get_mut(*ordinal) {
            *flag = true;
        }
    }
    flags
}

/// Whether source files are here as process 0 sees them: a mount may be missing.
fn see(files: &[(PathBuf, u64)]) -> Result<(), String> {
    for (path, size) in files {
        let found = match std::fs::metadata(path).map(|file| file.len()) {
            Ok(here) if here == *size => continue,
            Ok(here) => format!("has {here} bytes here"),
            Err(error) => format!("cannot be seen here ({error})"),
        };
        return Err(format!(
            "{}, which has {size} bytes for process 0, {found}",
            path.display()
        ));
    }
    Ok(())
}
