//! Runs a region of the plan as one timely dataflow. Beside `decision` the only module that names timely.
//!
//! Time is the ordinal of a partition. Partition p is worked on by worker p modulo workers, of all processes, from its
//! source to its record; only the batches of a log stage go to worker 0. A node holds a capability for each of its
//! partitions until the partition is written, so the frontier of what is written bounds what is in flight.

mod batch_container;
pub(crate) mod cluster;
mod commit;
pub(crate) mod in_flight;
pub(crate) mod job;
pub(crate) mod partition_output;
pub(crate) mod port_buffer;
mod source;
mod stage;
mod timer;
mod unreadable;
pub(crate) mod work;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use timely::communication::Config as Communication;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::Concatenate;
use timely::dataflow::operators::Probe;
use timely::dataflow::operators::generic::operator::Operator;
use timely::dataflow::operators::probe::Handle;
use timely::scheduling::SyncActivator;
use timely::worker::Worker;

use self::job::{Failure, Feed, RegionJob, RegionState};
use self::source::{Reader, Sources};
use self::stage::NodeOperator;
use self::work::Work;
use flow_base::error::StageError;
use flow_base::panic_guard::{catch_panic, panic_error};
use flow_kind::context::Waker;
use flow_kind::kind::Body;
use flow_store::{Artifact, Record};

/// What became of a region.
pub(crate) struct RegionDone {
    /// Committed records, each with the place of its node in the job.
    pub committed: Vec<(usize, Arc<Record>)>,
    pub failure: Option<Failure>,
}

/// How long a worker without work sleeps at most before it checks whether the region is to be left.
const NAP: Duration = Duration::from_millis(50);

/// Runs a region to its end, to its first failure, or until a signal ended it. What was written is committed in
/// each case.
pub(crate) fn run_region(job: RegionJob) -> RegionDone {
    let expected = expected_sources(&job);
    let shared = Arc::new(RegionState::new(job, expected));
    if let Some(cluster) = &shared.job.cluster {
        cluster.listen(&shared);
    }
    let (at_work, working) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let committing = &shared;
        scope.spawn(move || commit::while_working(committing, &working));
        if let Err(message) = execute(&shared) {
            shared.fail(Failure::Process(format!("the workers cannot be started: {message}")));
            if let Some(cluster) = &shared.job.cluster {
                cluster.abandon();
            }
        }
        drop(at_work);
    });
    if let Err((node, error)) = shared.commit() {
        shared.fail_stage(node, None, error);
    }
    if let Some(cluster) = &shared.job.cluster {
        cluster.end(&shared);
        // What the others told at last.
        if let Err((node, error)) = shared.commit() {
            shared.fail_stage(node, None, error);
        }
    }
    RegionDone {
        committed: shared.take_committed(),
        failure: shared.take_failure(),
    }
}

/// Runs the workers of this process until they leave.
fn execute(shared: &Arc<RegionState>) -> Result<(), String> {
    let job = &shared.job;
    let mut connections = None;
    let (builders, others) = match &job.cluster {
        Some(cluster) if cluster.in_dataflow() > 1 => {
            let workers = job.workers / cluster.in_dataflow();
            let (builders, opened) = cluster.communicators(workers).map_err(|error| error.to_string())?;
            connections = Some(opened);
            (builders, Box::new(()) as Box<dyn std::any::Any + Send>)
        }
        _ => match (job.workers, job.as_bytes) {
            (0 | 1, _) => Communication::Thread,
            (workers, false) => Communication::Process(workers),
            (workers, true) => Communication::ProcessBinary(workers),
        }
        .try_build()?,
    };
    let on_worker = Arc::clone(shared);
    let settings = timely::WorkerConfig::default();
    let guards = timely::execute::execute_from(builders, others, settings, move |worker| work(worker, &on_worker))?;
    for result in guards.join() {
        if let Err(message) = result {
            shared.fail(Failure::Internal(StageError::failed(message)));
        }
    }
    if let Some(connections) = connections {
        connections.close();
    }
    Ok(())
}

/// By ordinal, how many sources and artifacts give the partition.
fn expected_sources(job: &RegionJob) -> Vec<u32> {
    let mut expected = vec![0; job.partitions.len()];
    for node in &job.nodes {
        let own = u32::from(node.is_source)
            + node
                .streams
                .iter()
                .filter(|stream| matches!(stream.feed, Feed::Artifact(_)))
                .count() as u32;
        for (expected, active) in expected.iter_mut().zip(&node.active) {
            *expected += own * u32::from(*active);
        }
        for (_, stored) in node.streams.iter().filter_map(|stream| stream.stored.as_ref()) {
            for (expected, stored) in expected.iter_mut().zip(stored) {
                *expected += u32::from(*stored);
            }
        }
    }
    expected
}

/// Runs one worker. Never panics: a panic here would leave the other workers waiting for ever.
fn work(worker: &mut Worker, shared: &Arc<RegionState>) {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        build(worker, shared)?;
        while worker.has_dataflows() && !shared.leaving() {
            worker.step_or_park(Some(NAP));
        }
        Ok(())
    }));
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err((node, error))) => shared.fail_stage(node, None, error),
        Err(panic) => shared.fail(Failure::Internal(panic_error(panic.as_ref()))),
    }
    // Dropping bodies may panic too.
    for dataflow in worker.installed_dataflows() {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| worker.drop_dataflow(dataflow))) {
            shared.fail(Failure::Internal(panic_error(panic.as_ref())));
        }
    }
}

/// A body made ready for its operator.
enum Opened {
    Source(Box<dyn flow_kind::kind::Source>),
    Work(Box<Work>),
    /// This worker has no partition of the node.
    Idle,
}

/// The ordinals that a worker works on, of those that are active.
fn own_ordinals(shared: &RegionState, node: usize, worker: usize) -> Vec<u64> {
    let job = &shared.job;
    let node = &job.nodes[node];
    let mine = |ordinal: u64| {
        if node.is_log {
            worker == 0
        } else {
            ordinal as usize % job.workers == worker
        }
    };
    (job.start..job.partitions.len() as u64)
        .filter(|ordinal| mine(*ordinal) && node.active.get(*ordinal as usize).copied().unwrap_or(false))
        .collect()
}

fn build(worker: &mut Worker, shared: &Arc<RegionState>) -> Result<(), (usize, StageError)> {
    let job = &shared.job;
    let index = worker.index();
    // Bodies are opened before the dataflow is built, which must not end half way. Their operators' addresses
    // are known only then, so wakers look them up.
    let mut opened = Vec::with_capacity(job.nodes.len());
    for (place, node) in job.nodes.iter().enumerate() {
        let address: Arc<OnceLock<SyncActivator>> = Arc::default();
        if own_ordinals(shared, place, index).is_empty() {
            opened.push((Opened::Idle, address));
            continue;
        }
        let bell = Arc::clone(&address);
        let waker = Waker::new(move || {
            if let Some(activator) = bell.get() {
                // Fails only once the worker is gone, when nobody is left to wake.
                let _ = activator.activate();
            }
        });
        let context = node.context(job, index, waker);
        let body = catch_panic(|| match node.is_source {
            true => match node.settings.open(&context)? {
                Body::Source(body) => Ok(Opened::Source(body)),
                _ => Err(StageError::failed("the kind says it is a source, but its body is none")),
            },
            false => Ok(Opened::Work(Box::new(Work::open(node, &context)?))),
        });
        opened.push((body.map_err(|error| (place, error))?, address));
    }
    worker.dataflow::<u64, _, _>(|scope| {
        let written = Handle::new();
        let sources = Sources::default();
        let mut streams = Vec::new();
        let mut done = Vec::new();
        for (place, (body, address)) in opened.into_iter().enumerate() {
            let node = &job.nodes[place];
            let own = own_ordinals(shared, place, index);
            if node.is_source {
                let reader = match body {
                    Opened::Source(body) => Reader::source(shared, place, body, own),
                    _ => Reader::idle(shared, place),
                };
                let (data, end) = source::build(scope, reader, &written, &sources, &address);
                streams.push(data);
                done.push(end);
                continue;
            }
            let mut inputs = Vec::new();
            for stream in &node.streams {
                let columns = match &body {
                    Opened::Work(work) => work.columns(),
                    _ => None,
                };
                let mut replayed = |artifact: &Artifact, ordinals: &[bool]| {
                    let mine = replayed_ordinals(shared, ordinals, index);
                    let reader = Reader::artifact(shared, place, artifact.clone(), columns.clone(), mine);
                    let (data, end) = source::build(scope, reader, &written, &sources, &Arc::default());
                    done.push(end);
                    data
                };
                match &stream.feed {
                    Feed::Node { node, port } => inputs.push((stream.position, *port, streams[*node].clone())),
                    Feed::Artifact(artifact) => inputs.push((stream.position, 0, replayed(artifact, &node.active))),
                }
                if let Some((artifact, ordinals)) = &stream.stored {
                    inputs.push((stream.position, 0, replayed(artifact, ordinals)));
                }
            }
            let work = match body {
                Opened::Work(work) => Some(*work),
                _ => None,
            };
            let operator = NodeOperator::new(shared, place, index, work, own);
            let (data, end) = stage::build(scope, operator, inputs, node.is_log, &address);
            streams.push(data);
            done.push(end);
        }
        let done = scope.concatenate(done).probe_with(&written);
        // Comes after the probe in each round, and so finds that it has moved.
        done.sink(Pipeline, "written", move |(input, _)| {
            input.for_each(|_, _| {});
            for source in sources.borrow().iter() {
                source.activate();
            }
        });
    });
    Ok(())
}

/// The ordinals of an artifact that a worker reads: its own share, even where the node (a log) processes them on
/// another worker.
fn replayed_ordinals(shared: &RegionState, wanted: &[bool], worker: usize) -> Vec<u64> {
    let job = &shared.job;
    (job.start..job.partitions.len() as u64)
        .filter(|ordinal| *ordinal as usize % job.workers == worker && wanted[*ordinal as usize])
        .collect()
}
