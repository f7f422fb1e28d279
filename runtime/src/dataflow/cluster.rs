//! A region that runs on several processes: timely's cluster over the connections that the processes have already, and
//! what they tell each other of commits and failures.
//!
//! Process 0 leads: it begins the region, commits what the others have written, and passes on that the region is to end. The
//! others follow: they compute the partitions that fall to their workers, and write their data. A log is run by each process in a
//! dataflow of its own: the stage keeps them in step.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use serde::{Deserialize, Serialize};
use timely::communication::Hooks;
use timely::communication::allocator::zero_copy::initialize::{CommsGuard, initialize_networking_from_sockets};
use timely::communication::allocator::zero_copy::stream::Stream;
use timely::communication::allocator::{AllocatorBuilder, ProcessBuilder};

use super::job::{Failure, RegionState};
use flow_base::error::StageError;
use flow_base::event::Event;
use flow_base::partition::Partition;
use flow_kind::context::{Cancel, ProcessShare};
use flow_processes::{Processes, RegionTopics};
use flow_storage::Storage;
use flow_store::{NotedFile, Record};

/// How often a process that waits for others checks whether one is lost.
const LOOK: Duration = Duration::from_millis(20);

/// How long process 0 waits for the others to leave a region that failed.
const LEAVING: Duration = Duration::from_secs(60);

/// The processes that run a region together.
pub(crate) struct Cluster {
    processes: Arc<Processes>,
    topics: RegionTopics,
    dataflows: Dataflows,
    /// Process 0: signals and the end of the region are told once.
    told_stop: AtomicI32,
    told_leave: AtomicBool,
    /// Process 0: which of the others have ended the region.
    ended: Mutex<Vec<bool>>,
    /// The others: files that process 0 cannot read either.
    unreadable: Mutex<BTreeSet<PathBuf>>,
    changed: Condvar,
}

/// How a region runs on several processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dataflows {
    /// The workers of all processes run one dataflow, and each partition falls to one of them.
    One,
    /// Each process runs all partitions in a dataflow of its own.
    OfEachProcess,
}

/// What process 0 tells the others of a region that runs.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    /// A signal came: no new partitions are to be begun.
    Stop(i32),
    /// Drop the dataflow: the region failed.
    Leave,
    /// Process 0 cannot read the file either.
    Unreadable(PathBuf),
}

/// What the others tell process 0.
#[derive(Serialize, Deserialize)]
enum Report {
    /// The data of these records is in its place.
    Placed {
        node: usize,
        records: Vec<Record>,
        noted: Vec<NotedFile>,
    },
    Event(Event),
    /// A source file that is not there, or cannot be read.
    Unseen(PathBuf),
    Failed(ToldFailure),
    /// The last report of a region.
    Ended,
}

/// A [`Failure`] as it is reported to process 0.
#[derive(Serialize, Deserialize)]
enum ToldFailure {
    Stage {
        stage: String,
        partition: Option<Partition>,
        error: StageError,
    },
    Process(String),
    Internal(StageError),
}

impl Cluster {
    pub fn new(processes: &Arc<Processes>, topics: RegionTopics, dataflows: Dataflows) -> Self {
        let mut ended = vec![false; processes.count()];
        // Process 0 reports nothing to itself.
        ended[0] = true;
        Cluster {
            processes: Arc::clone(processes),
            topics,
            dataflows,
            told_stop: AtomicI32::new(0),
            told_leave: AtomicBool::new(false),
            ended: Mutex::new(ended),
            unreadable: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Number of processes.
    fn count(&self) -> usize {
        self.processes.count()
    }

    /// Number of processes whose workers run one dataflow with those of this process.
    pub fn in_dataflow(&self) -> usize {
        match self.dataflows {
            Dataflows::One => self.count(),
            Dataflows::OfEachProcess => 1,
        }
    }

    /// The place of this process among those whose workers run one dataflow.
    pub fn place_in_dataflow(&self) -> usize {
        match self.dataflows {
            Dataflows::One => self.processes.process(),
            Dataflows::OfEachProcess => 0,
        }
    }

    /// The place of this process, where each one runs all partitions.
    pub fn share(&self) -> Option<ProcessShare> {
        (self.dataflows == Dataflows::OfEachProcess).then(|| ProcessShare {
            process: self.processes.process(),
            processes: self.count(),
        })
    }

    fn leads(&self) -> bool {
        self.processes.process() == 0
    }

    /// Who a process is, for messages.
    fn name(&self, process: usize) -> String {
        self.processes
            .peers()
            .get(process)
            .map_or_else(|| format!("process {process}"), ToString::to_string)
    }

    /// Takes the messages of the region until [`Cluster::end`]. Those that came before are not lost.
    pub fn listen(self: &Arc<Self>, shared: &Arc<RegionState>) {
        let (cluster, state) = (Arc::downgrade(self), Arc::downgrade(shared));
        let heard = move |from: usize, message: Vec<u8>| {
            let (Some(cluster), Some(shared)) = (cluster.upgrade(), state.upgrade()) else {
                return;
            };
            if cluster.leads() {
                cluster.report(&shared, from, &message);
            } else if from == 0 {
                cluster.order(&shared, &message);
            }
        };
        let topic = if self.leads() {
            self.topics.reports
        } else {
            self.topics.orders
        };
        self.processes.listen(topic, heard);
    }

    fn order(&self, shared: &RegionState, message: &[u8]) {
        match serde_json::from_slice(message) {
            Ok(Order::Stop(signal)) => shared.job.signals.ask_to_stop(signal),
            Ok(Order::Leave) => shared.leave(),
            Ok(Order::Unreadable(file)) => {
                lock(&self.unreadable).insert(file);
                self.changed.notify_all();
            }
            Err(error) => shared.fail(unreadable(&self.name(0), &error)),
        }
    }

    fn report(&self, shared: &RegionState, from: usize, message: &[u8]) {
        match serde_json::from_slice(message) {
            Ok(Report::Placed { node, records, noted }) => {
                let records = records.into_iter().map(Arc::new).collect();
                if let Err((node, error)) = shared.take_over(from, node, records, noted) {
                    shared.fail_stage(node, None, error);
                }
            }
            Ok(Report::Event(event)) => shared.job.events.send(event),
            Ok(Report::Unseen(file)) => {
                if is_readable(shared.job.store.storage(), &file) {
                    shared.fail(Failure::Process(format!(
                        "{} cannot read {}, which process 0 can: all processes read the same files",
                        self.name(from),
                        file.display()
                    )));
                } else {
                    self.send(from, self.topics.orders, &Order::Unreadable(file));
                }
            }
            Ok(Report::Failed(failure)) => shared.fail(match failure {
                ToldFailure::Stage {
                    stage,
                    partition,
                    error,
                } => Failure::Stage {
                    stage,
                    partition,
                    error: error.of_process(&self.name(from)),
                },
                ToldFailure::Process(message) => Failure::Process(format!("{}: {message}", self.name(from))),
                ToldFailure::Internal(error) => {
                    Failure::Internal(StageError::failed(format!("{}: {error}", self.name(from))))
                }
            }),
            Ok(Report::Ended) => {
                if let Some(ended) = lock(&self.ended).get_mut(from) {
                    *ended = true;
                }
                self.changed.notify_all();
            }
            Err(error) => shared.fail(unreadable(&self.name(from), &error)),
        }
    }

    fn send(&self, to: usize, topic: u32, message: &impl Serialize) {
        // All of these messages are texts, numbers and records that were read from JSON or are written to it.
        let bytes = serde_json::to_vec(message)
            .unwrap_or_else(|error| format!("a message that cannot be written: {error}").into_bytes());
        self.send_bytes(to, topic, bytes);
    }

    fn send_bytes(&self, to: usize, topic: u32, bytes: Vec<u8>) {
        self.processes.send(to, topic, Box::new(bytes));
    }

    fn tell_others(&self, order: &Order) {
        for to in 1..self.count() {
            self.send(to, self.topics.orders, order);
        }
    }

    /// At process 0: passes a signal on.
    pub fn tell_stop(&self, signal: i32) {
        if self.leads() && self.told_stop.swap(signal, Ordering::AcqRel) != signal {
            self.tell_others(&Order::Stop(signal));
        }
    }

    /// At process 0: tells the others to drop the dataflow.
    pub fn tell_leave(&self) {
        if self.leads() && !self.told_leave.swap(true, Ordering::AcqRel) {
            self.tell_others(&Order::Leave);
        }
    }

    /// At the others: reports records to be committed, whose data is in its place.
    pub fn placed(&self, node: usize, records: &[Arc<Record>], noted: Vec<NotedFile>) {
        let records = records.iter().map(|record| Record::clone(record)).collect();
        let report = Report::Placed { node, records, noted };
        self.send(0, self.topics.reports, &report);
    }

    /// At the others: reports the failure that ends the region.
    pub fn failed(&self, failure: &Failure) {
        if self.leads() {
            return;
        }
        let told = match failure {
            Failure::Stage {
                stage,
                partition,
                error,
            } => ToldFailure::Stage {
                stage: stage.clone(),
                partition: partition.clone(),
                error: error.clone(),
            },
            Failure::Store(error) => ToldFailure::Process(error.to_string()),
            Failure::Process(message) | Failure::Lost(message) => ToldFailure::Process(message.clone()),
            Failure::Internal(error) => ToldFailure::Internal(error.clone()),
        };
        self.send(0, self.topics.reports, &Report::Failed(told));
    }

    /// At the others: passes an event on.
    pub fn event(&self, event: &Event) {
        self.send(0, self.topics.reports, &Report::Event(event.clone()));
    }

    /// At the others: waits until process 0 has looked at a file that cannot be read here.
    ///
    /// # Errors
    /// If process 0 can read it, which ends the region, or the region ends.
    pub fn compare_unseen(&self, file: &Path, cancel: &Cancel) -> Result<(), StageError> {
        // A path that is no text cannot be sent: such a region does not run on several processes.
        if self.leads() || file.to_str().is_none() || lock(&self.unreadable).contains(file) {
            return Ok(());
        }
        self.send(0, self.topics.reports, &Report::Unseen(file.to_owned()));
        let mut unreadable = lock(&self.unreadable);
        while !unreadable.contains(file) {
            if cancel.is_set() || self.processes.lost().is_some() {
                return Err(StageError::failed("stopped"));
            }
            unreadable = self.wait(unreadable);
        }
        Ok(())
    }

    /// Ends the region: the others report it, and process 0 waits for all of them, or for the loss of one. When it has told
    /// them to leave, it waits for [`LEAVING`] at most.
    pub fn end(&self, shared: &RegionState) {
        if self.leads() {
            let mut told: Option<Instant> = None;
            let mut ended = lock(&self.ended);
            while !ended.iter().all(|ended| *ended) && self.processes.lost().is_none() {
                ended = self.wait(ended);
                shared.pass_signals_on();
                if self.told_leave.load(Ordering::Acquire) && told.get_or_insert_with(Instant::now).elapsed() > LEAVING
                {
                    let late = (0..ended.len()).filter(|process| !ended[*process]);
                    let late: Vec<String> = late.map(|process| self.name(process)).collect();
                    drop(ended);
                    let message = format!("{} did not leave within {} s", late.join(", "), LEAVING.as_secs());
                    shared.fail(Failure::Process(message));
                    break;
                }
            }
            // What a lost process did not report is not committed.
            if let Some(loss) = self.processes.lost() {
                shared.fail(Failure::Lost(loss.message));
            }
        } else {
            self.send(0, self.topics.reports, &Report::Ended);
        }
        self.processes.close(if self.leads() {
            self.topics.reports
        } else {
            self.topics.orders
        });
    }

    fn wait<'a, T>(&self, held: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        match self.changed.wait_timeout(held, LOOK) {
            Ok((held, _)) => held,
            Err(poisoned) => poisoned.into_inner().0,
        }
    }

    /// Where this process could not begin: ends what the others read of it, who would wait for it for ever.
    pub fn abandon(&self) {
        for to in (0..self.count()).filter(|to| *to != self.processes.process()) {
            self.send_bytes(to, self.topics.batches, Vec::new());
        }
    }

    /// Timely's communication between `workers` workers of each process.
    ///
    /// # Errors
    /// When threads cannot be started.
    pub fn communicators(&self, workers: usize) -> io::Result<(Vec<AllocatorBuilder>, Connections)> {
        let (own, count) = (self.processes.process(), self.count());
        let mut senders = Vec::with_capacity(count);
        let mut streams = Vec::with_capacity(count);
        for to in 0..count {
            let (send, from) = unbounded();
            senders.push(send);
            streams.push((to != own).then(|| PeerStream {
                processes: Arc::clone(&self.processes),
                to,
                topic: self.topics.batches,
                incoming: Arc::new(Mutex::new(Incoming {
                    from,
                    piece: Vec::new(),
                    read: 0,
                })),
            }));
        }
        self.processes.listen(self.topics.batches, move |from, bytes| {
            if let Some(send) = senders.get(from) {
                // The reading thread lives until the topic is closed.
                let _ = send.send(bytes);
            }
        });
        let hooks = Hooks::default();
        let within = ProcessBuilder::new_typed_vector(workers, hooks.refill.clone(), None);
        let (builders, threads) = initialize_networking_from_sockets(within, streams, own, workers, hooks)?;
        let connections = Connections {
            threads: Some(threads),
            processes: Arc::clone(&self.processes),
            topic: self.topics.batches,
        };
        Ok((builders.into_iter().map(AllocatorBuilder::Tcp).collect(), connections))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change under these locks is one flag or one insertion.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_readable(storage: &Storage, file: &Path) -> bool {
    match flow_storage::is_url(file) {
        true => flow_storage::is_file(storage, file).unwrap_or(false),
        false => std::fs::metadata(file).is_ok_and(|found| found.is_file()) && std::fs::File::open(file).is_ok(),
    }
}

fn unreadable(from: &str, error: &serde_json::Error) -> Failure {
    Failure::Internal(StageError::failed(format!("{from} sent what cannot be read: {error}")))
}

/// The threads that send and receive for timely's workers.
pub(crate) struct Connections {
    threads: Option<CommsGuard>,
    processes: Arc<Processes>,
    topic: u32,
}

impl Connections {
    /// Waits until all is sent and received: the workers of all processes have left. After the loss of a process the
    /// threads stay, as they would wait for it for ever; the run is then at its end.
    pub fn close(mut self) {
        let threads = self.threads.take();
        let closing = std::thread::Builder::new()
            .name("closing".into())
            .spawn(|| drop(threads));
        if let Ok(closing) = closing {
            while !closing.is_finished() && self.processes.lost().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        if self.processes.lost().is_none() {
            self.processes.close(self.topic);
        }
    }
}

impl Drop for Connections {
    /// Where workers could not be started, the threads would wait for others for ever: they are left to the process's end.
    fn drop(&mut self) {
        std::mem::forget(self.threads.take());
    }
}

/// The bytes that timely exchanges with one other process, as messages of the connection between the two.
struct PeerStream {
    processes: Arc<Processes>,
    to: usize,
    topic: u32,
    incoming: Arc<Mutex<Incoming>>,
}

struct Incoming {
    from: Receiver<Vec<u8>>,
    piece: Vec<u8>,
    /// How much of `piece` was read.
    read: usize,
}

impl Read for PeerStream {
    /// Waits for ever after the loss of a process: an error would make timely's thread panic.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        while incoming.read == incoming.piece.len() {
            match incoming.from.recv() {
                // The other side has shut its stream down.
                Ok(piece) if piece.is_empty() => return Ok(0),
                Ok(piece) => (incoming.piece, incoming.read) = (piece, 0),
                Err(_) => loop {
                    std::thread::park();
                },
            }
        }
        let left = &incoming.piece[incoming.read..];
        let count = left.len().min(into.len());
        into[..count].copy_from_slice(&left[..count]);
        incoming.read += count;
        Ok(count)
    }
}

impl Write for PeerStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !bytes.is_empty() {
            self.processes.send(self.to, self.topic, Box::new(bytes.to_vec()));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream for PeerStream {
    fn try_clone(&self) -> io::Result<Self> {
        Ok(PeerStream {
            processes: Arc::clone(&self.processes),
            to: self.to,
            topic: self.topic,
            incoming: Arc::clone(&self.incoming),
        })
    }

    fn set_nonblocking(&self, _: bool) -> io::Result<()> {
        Ok(())
    }

    /// An empty message ends the stream of what is written.
    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        if how != Shutdown::Read {
            self.processes.send(self.to, self.topic, Box::new(Vec::new()));
        }
        Ok(())
    }
}
