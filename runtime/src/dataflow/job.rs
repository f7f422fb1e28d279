//! The description of a region that is to run, and the state that its workers share.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use flow_base::digest::Digest;
use flow_base::event::{Event, Events};
use flow_base::partition::Partition;
use flow_base::reject::{ReasonCount, Reject, RejectClass};
use flow_decide::stored::Decisions;
use flow_kind::context::{Cancel, CompareUnreadable, Context, RunLabels, StopAsked, Waker};
use flow_kind::inputs::Inputs;
use flow_kind::kind::{Conservation, Port};
use flow_kind::registry::AnySettings;
use flow_plan::graph::StagePart;
use flow_processes::{Loss, Processes};
use flow_store::{
    Artifact, ArtifactWriter, Counts, DigestedFile, NotedFile, Pending, PortRows, Record, RejectSet, SnapshotWriter,
    SourceDigests, Store, StoreError, add_up,
};

use super::cluster::Cluster;
use super::in_flight::{InFlight, MemoryReservation};
use super::partition_output::PartitionOutput;
use super::port_buffer::KeepError;
use flow_base::error::StageError;
use flow_plan::keys::{ListedPartition, key_of, source_digest};
use flow_store::row_order::in_row_order;

/// A region, ready to run.
pub(crate) struct RegionJob {
    /// The partitions of this run of the region, sorted; a partition's place is its time.
    pub partitions: Vec<Partition>,
    /// The first time; those before it are done (steps of a log).
    pub start: u64,
    /// Producers first.
    pub nodes: Vec<NodeJob>,
    /// Workers of the dataflow, in all processes that it runs on.
    pub workers: usize,
    /// The other processes that run the region.
    pub cluster: Option<Arc<Cluster>>,
    /// Thread budget of one worker's bodies.
    pub threads: usize,
    /// The column that names rows.
    pub id_column: &'static str,
    pub in_flight: Arc<InFlight>,
    pub as_bytes: bool,
    pub labels: RunLabels,
    pub store: Store,
    /// Where the run notes what its stages have; none in a process that follows another one's run.
    pub snapshots: Option<SnapshotWriter>,
    pub events: Events,
    pub cancel: Cancel,
    pub signals: Arc<Signals>,
}

/// What feeds one input of a node.
pub(crate) enum Feed {
    /// A node of the region (by its place in [`RegionJob::nodes`]) and its port.
    Node { node: usize, port: usize },
    /// An artifact, partition by partition.
    Artifact(Artifact),
}

pub(crate) struct StreamedInput {
    /// Position in the stage's `from`.
    pub position: usize,
    pub feed: Feed,
    /// The stored partitions of a node's port, and by ordinal whether they are read instead of computed again.
    pub stored: Option<(Artifact, Vec<bool>)>,
}

/// What the key of a partition is made of.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum KeyPart {
    Known(Digest),
    /// The files of the source at this place in the region, digested when the source reads the partition.
    Source(usize),
}

pub(crate) struct NodeJob {
    pub stage: String,
    pub part: StagePart,
    pub settings: Arc<dyn AnySettings>,
    pub inputs: Inputs,
    /// The inputs that are read as a whole, by place in `inputs`.
    pub artifacts: Arc<[Option<Artifact>]>,
    pub rejects: RejectSet,
    pub scratch: PathBuf,
    pub streams: Vec<StreamedInput>,
    pub outputs: Vec<Port>,
    pub stored: Vec<bool>,
    pub conservation: Conservation,
    pub is_source: bool,
    pub is_log: bool,
    /// For a source.
    pub source_partitions: Arc<BTreeMap<Partition, ListedPartition>>,
    /// For `apply`.
    pub decisions: Option<Arc<Decisions>>,
    /// By ordinal: whether the node works on the partition in this run.
    pub active: Vec<bool>,
    /// By ordinal: the parts of the key under which the partition is recorded; none where it is not.
    pub record: Vec<Option<Vec<KeyPart>>>,
    pub recipe: Digest,
    /// None for what feeds a log.
    pub writer: Option<ArtifactWriter>,
    /// More rejects of class fault than this end the run at once.
    pub fault_limit: Option<u64>,
    /// For events: partitions of the stage, and how many of them are reused with how many faults.
    pub total: u64,
    pub reused: u64,
    pub reused_faults: u64,
}

impl NodeJob {
    pub fn context(&self, job: &RegionJob, worker: usize, waker: Waker) -> Context {
        Context {
            stage: self.stage.clone(),
            labels: job.labels.clone(),
            inputs: self.inputs.clone(),
            artifacts: Arc::clone(&self.artifacts),
            rejects: self.rejects.clone(),
            worker,
            workers: job.workers,
            threads: job.threads,
            scratch: self.scratch.clone(),
            storage: job.store.storage().clone(),
            events: job.events.clone(),
            cancel: job.cancel.clone(),
            stop: job.signals.stop.clone(),
            waker,
            processes: job.signals.processes.clone(),
            share: job.cluster.as_ref().and_then(|cluster| cluster.share()),
            compare_unreadable: job.cluster.clone().map(|cluster| {
                let cancel = job.cancel.clone();
                let compare: CompareUnreadable = Arc::new(move |file| cluster.compare_unseen(file, &cancel));
                compare
            }),
        }
    }
}

/// What may end a run from outside: the signals that came, as flags that a handler may set, and processes that are lost.
#[derive(Default)]
pub(crate) struct Signals {
    /// The signal that asks the run to end.
    pub stop: StopAsked,
    /// SIGUSR1 came.
    pub checkpoint: Arc<AtomicBool>,
    /// The other processes of the run.
    pub processes: Option<Arc<Processes>>,
}

impl Signals {
    pub fn stop_asked(&self) -> Option<i32> {
        match self.stop.signal.load(Ordering::Acquire) {
            0 => None,
            signal => Some(signal as i32),
        }
    }

    /// As if the signal had come here.
    pub fn ask_to_stop(&self, signal: i32) {
        self.stop
            .signal
            .store(usize::try_from(signal).unwrap_or(0), Ordering::Release);
    }

    pub fn lost(&self) -> Option<Loss> {
        self.processes.as_ref()?.lost()
    }
}

/// The first failure of a run.
#[derive(Debug)]
pub(crate) enum Failure {
    Stage {
        stage: String,
        partition: Option<Partition>,
        error: StageError,
    },
    /// Of the state directory, whichever stage was at work.
    Store(StoreError),
    /// Of another process.
    Process(String),
    /// Another process is lost.
    Lost(String),
    /// Of the runtime itself.
    Internal(StageError),
}

/// A partition that is written and waits for its commit.
pub(crate) struct WrittenPartition {
    pub node: usize,
    pub pending: Pending,
}

/// What is known of the files of a source's partition.
#[derive(Clone, Debug)]
pub(crate) struct FilesDigest {
    pub digest: Digest,
    /// Why one of them cannot be read.
    pub unreadable: Option<String>,
}

/// What the workers of a region share.
pub(crate) struct RegionState {
    pub job: RegionJob,
    failure: Mutex<Option<Failure>>,
    /// All workers drop their dataflows and leave.
    leave: AtomicBool,
    /// By ordinal: how many of the region's sources have given the partition, and how many should.
    given: Vec<AtomicU32>,
    expected: Vec<u32>,
    source_digests: Mutex<BTreeMap<(usize, u64), Digest>>,
    waiting: Mutex<Vec<WrittenPartition>>,
    /// In process 0: records of other processes, whose data is in its place.
    placed: Mutex<Vec<(usize, Arc<Record>)>>,
    committed: Mutex<Vec<(usize, Arc<Record>)>>,
    /// By node: partitions committed, and rejects of class fault in them.
    sums: Mutex<Vec<(u64, u64)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change under these locks is one push, one insertion or one take: whole, whatever panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RegionState {
    pub fn new(job: RegionJob, expected: Vec<u32>) -> Self {
        RegionState {
            given: expected.iter().map(|_| AtomicU32::new(0)).collect(),
            expected,
            sums: Mutex::new(vec![(0, 0); job.nodes.len()]),
            job,
            failure: Mutex::default(),
            leave: AtomicBool::new(false),
            source_digests: Mutex::default(),
            waiting: Mutex::default(),
            placed: Mutex::default(),
            committed: Mutex::default(),
        }
    }

    /// Notes the first failure and asks all workers to leave.
    pub fn fail(&self, failure: Failure) {
        {
            let mut first = lock(&self.failure);
            if first.is_none() {
                if let Some(cluster) = &self.job.cluster {
                    cluster.failed(&failure);
                }
                *first = Some(failure);
            }
        }
        self.leave();
    }

    pub fn fail_stage(&self, node: usize, partition: Option<&Partition>, error: StageError) {
        self.fail(match self.job.nodes.get(node) {
            Some(node) => Failure::Stage {
                stage: node.stage.clone(),
                partition: partition.cloned(),
                error,
            },
            None => Failure::Internal(error),
        });
    }

    /// Notes that rows of a stage cannot be kept, and gives the error with which its operator ends. Unless the rows
    /// themselves are the cause, the failure is one of the state directory. It is noted here, before the operator's
    /// error, because only the first failure of a region is kept.
    pub fn fail_keeping(&self, error: KeepError) -> StageError {
        match error {
            KeepError::Stage(error) => error,
            KeepError::Store(error @ StoreError::Rows { .. }) => error.into(),
            KeepError::Store(error) => {
                let told = StageError::failed(&error);
                self.fail(Failure::Store(error));
                told
            }
        }
    }

    pub fn leave(&self) {
        // In this order: a body that gives up because of `cancel` has not failed, which `leaving` then says.
        self.leave.store(true, Ordering::Release);
        self.job.cancel.set();
        if let Some(cluster) = &self.job.cluster {
            cluster.tell_leave();
        }
    }

    pub fn leaving(&self) -> bool {
        if let Some(loss) = self.job.signals.lost() {
            self.fail(Failure::Lost(loss.message));
        }
        self.leave.load(Ordering::Acquire)
    }

    /// Passes a signal on to the other processes of the region.
    pub fn pass_signals_on(&self) {
        if let (Some(cluster), Some(signal)) = (&self.job.cluster, self.job.signals.stop_asked()) {
            cluster.tell_stop(signal);
        }
    }

    pub fn take_failure(&self) -> Option<Failure> {
        lock(&self.failure).take()
    }

    /// No new partitions are to be begun.
    pub fn stopping(&self) -> bool {
        self.job.signals.stop_asked().is_some()
    }

    /// Work that takes long is left to the next run.
    pub fn gives_up(&self) -> bool {
        self.job.signals.stop.is_over()
    }

    pub fn gave(&self, ordinal: u64) {
        if let Some(given) = self.given.get(ordinal as usize) {
            given.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Whether every source of the region has given all of the partition. Asked while a run is ending: a
    /// partition that a source left out is not complete, however far the frontier is.
    pub fn is_given(&self, ordinal: u64) -> bool {
        let at = ordinal as usize;
        match (self.given.get(at), self.expected.get(at)) {
            (Some(given), Some(expected)) => given.load(Ordering::Acquire) == *expected,
            _ => false,
        }
    }

    /// While a run is ending: what follows does not take the partition for complete, either.
    pub fn give_up(&self, ordinal: u64) {
        if let Some(given) = self.given.get(ordinal as usize) {
            given.store(u32::MAX / 2, Ordering::Release);
        }
    }

    /// Digests the files of a source's partition, and its ranges of files. With `afresh`, files are read even where
    /// their digest is noted.
    pub fn digest_files(&self, listed: &ListedPartition, afresh: bool) -> Result<FilesDigest, StageError> {
        let sources = self.job.store.sources();
        let mut files = Vec::with_capacity(listed.partition.files.len());
        let mut unreadable = None;
        for file in &listed.partition.files {
            if afresh {
                sources.forget(file);
            }
            let (digest, why) = sources.digest_or_why_not(file)?;
            self.compare_unseen(file, &digest)?;
            files.push(digest);
            unreadable = unreadable.or(why.map(|why| why.to_string()));
        }
        let ranges = sources.digest_ranges(&listed.ranges, self.job.threads).into_iter();
        let ranges = ranges.collect::<Result<Vec<_>, _>>()?;
        for (range, digest) in listed.ranges.iter().zip(&ranges) {
            self.compare_unseen(&range.path, digest)?;
        }
        Ok(FilesDigest {
            digest: source_digest(&listed.partition, &files, &ranges),
            unreadable,
        })
    }

    /// In a process that follows: an error where a source file is not there, or cannot be read, and process 0 reads it.
    fn compare_unseen(&self, file: &Path, digest: &Digest) -> Result<(), StageError> {
        match &self.job.cluster {
            Some(cluster) if [SourceDigests::absent(), SourceDigests::unreadable()].contains(digest) => {
                cluster.compare_unseen(file, &self.job.cancel)
            }
            _ => Ok(()),
        }
    }

    /// Notes the digest of a source's partition for the keys of the region.
    pub fn note_source(&self, node: usize, ordinal: u64, digest: Digest) {
        lock(&self.source_digests).insert((node, ordinal), digest);
    }

    /// Notes the digests of files that a source has read itself. Gives the digest of its partition where these are all of
    /// the partition's files.
    pub fn note_read(&self, listed: &ListedPartition, read: Vec<DigestedFile>) -> Result<Option<Digest>, StageError> {
        let sources = self.job.store.sources();
        let mut digests = BTreeMap::new();
        for file in read {
            let (path, digest) = sources.note_read(file)?;
            digests.insert(path, digest);
        }
        let files = listed.partition.files.iter().map(|file| digests.get(file).copied());
        let Some(files) = files.collect::<Option<Vec<Digest>>>() else {
            return Ok(None);
        };
        let ranges = sources.digest_ranges(&listed.ranges, self.job.threads).into_iter();
        let ranges = ranges.collect::<Result<Vec<_>, _>>()?;
        Ok(Some(source_digest(&listed.partition, &files, &ranges)))
    }

    /// Where to put what a node makes of a partition.
    pub fn collected(&self, node: usize, ordinal: u64) -> PartitionOutput {
        let described = &self.job.nodes[node];
        let recorded = matches!(described.record.get(ordinal as usize), Some(Some(_)));
        let keep: Vec<bool> = described.stored.iter().map(|kept| *kept && recorded).collect();
        let reserved = MemoryReservation::new(&self.job.in_flight, ordinal, 0);
        PartitionOutput::new(&keep, described.writer.as_ref(), Some(reserved))
    }

    /// Checks a partition that is complete, and writes it under temporary names if it is to be recorded.
    pub fn write(&self, node: usize, ordinal: u64, mut collected: PartitionOutput) -> Result<(), StageError> {
        let described = &self.job.nodes[node];
        collected.check_numbers(&described.outputs)?;
        collected.check_conservation(described.conservation, described.is_source)?;
        let (Some(writer), Some(Some(parts))) = (&described.writer, described.record.get(ordinal as usize)) else {
            return Ok(());
        };
        let mut inputs = Vec::with_capacity(parts.len());
        for part in parts {
            inputs.push(match part {
                KeyPart::Known(digest) => *digest,
                KeyPart::Source(source) => lock(&self.source_digests)
                    .get(&(*source, ordinal))
                    .copied()
                    .ok_or_else(|| StageError::failed("its source was not digested: a fault of the runtime"))?,
            });
        }
        let key = key_of(&described.recipe, &inputs);
        let partition = &self.job.partitions[ordinal as usize];
        let mut ports = Vec::new();
        let made = collected.buffers.into_iter().zip(collected.selected);
        for (port, (kept, selected)) in described.outputs.iter().zip(made) {
            if let Some(kept) = kept {
                let (file, batches) = kept.into_parts();
                let selection = match (selected, described.streams.first().map(|stream| &stream.feed)) {
                    (Some(ranges), Some(Feed::Artifact(input))) => {
                        let selection = input.select(partition, &ranges, self.job.store.dir());
                        Some(selection.ok_or_else(|| {
                            StageError::failed("it selects from rows that are not stored: a fault of the runtime")
                        })?)
                    }
                    _ => None,
                };
                ports.push(PortRows {
                    name: port.name.clone(),
                    schema: port.schema.clone(),
                    batches: in_row_order(&port.schema, batches)?,
                    file,
                    selection,
                });
            }
        }
        let counts = Counts {
            rows_in: if described.is_source {
                collected.read
            } else {
                collected.rows_in
            },
            rows_out: collected.rows_out,
            read: collected.read,
            merged: collected.merged,
        };
        let written = writer.write_partition(partition, key, inputs, ports, collected.rejects, counts);
        let pending = written.map_err(|error| self.fail_keeping(error.into()))?;
        lock(&self.waiting).push(WrittenPartition { node, pending });
        Ok(())
    }

    /// How many partitions wait for their commit.
    pub fn waiting(&self) -> usize {
        lock(&self.waiting).len() + lock(&self.placed).len()
    }

    /// Commits what waits, one group per node. A process that follows places its data, and tells process 0, which commits it.
    pub fn commit(&self) -> Result<(), (usize, StageError)> {
        let waiting = std::mem::take(&mut *lock(&self.waiting));
        let placed = std::mem::take(&mut *lock(&self.placed));
        let mut by_node: BTreeMap<usize, (Vec<Pending>, Vec<Arc<Record>>)> = BTreeMap::new();
        for written in waiting {
            by_node.entry(written.node).or_default().0.push(written.pending);
        }
        for (node, record) in placed {
            by_node.entry(node).or_default().1.push(record);
        }
        for (node, (group, placed)) in by_node {
            let Some(writer) = &self.job.nodes[node].writer else {
                continue;
            };
            let failed = |error: StoreError| (node, self.fail_keeping(error.into()));
            match (&self.job.snapshots, &self.job.cluster) {
                (Some(snapshots), _) => {
                    let records = writer.commit_with(group, &placed).map_err(failed)?;
                    self.note_committed(snapshots, node, records)?;
                }
                (None, Some(cluster)) => {
                    let records = writer.place(group).map_err(failed)?;
                    cluster.placed(node, &records, self.job.store.sources().take_noted());
                }
                (None, None) => drop(writer.commit(group).map_err(failed)?),
            }
        }
        // Digests of source files are a cache for the next run: a failure to write them is ignored.
        let _ = self.job.store.append_sources();
        Ok(())
    }

    /// In process 0: takes over records of another process, whose data is in its place. They wait for their commit.
    ///
    /// # Errors
    /// If it is no work of that process.
    pub fn take_over(
        &self,
        from: usize,
        node: usize,
        records: Vec<Arc<Record>>,
        noted: Vec<NotedFile>,
    ) -> Result<(), (usize, StageError)> {
        let described = self.job.nodes.get(node);
        if described.is_none_or(|described| described.writer.is_none()) {
            return Err((
                node,
                StageError::failed("another process committed what it was not given"),
            ));
        }
        if !records.iter().all(|record| self.is_share(from, node, record)) {
            return Err((
                node,
                StageError::failed("another process committed partitions of which it was given no work"),
            ));
        }
        self.job.store.sources().put_noted(noted);
        lock(&self.placed).extend(records.into_iter().map(|record| (node, record)));
        Ok(())
    }

    /// Whether a record is of a partition of the node that falls to a process, under the key that was planned, where that
    /// was known.
    fn is_share(&self, process: usize, node: usize, record: &Record) -> bool {
        let (job, described) = (&self.job, &self.job.nodes[node]);
        let Ok(ordinal) = job.partitions.binary_search(&record.partition) else {
            return false;
        };
        let Some(Some(parts)) = described.record.get(ordinal) else {
            return false;
        };
        let workers = job.workers / job.cluster.as_ref().map_or(1, |cluster| cluster.in_dataflow());
        let known = parts.iter().map(|part| match part {
            KeyPart::Known(digest) => Some(*digest),
            KeyPart::Source(_) => None,
        });
        let planned = known.collect::<Option<Vec<Digest>>>();
        ordinal % job.workers / workers.max(1) == process
            && planned.is_none_or(|planned| key_of(&described.recipe, &planned) == record.key)
    }

    /// Notes committed records: for the next run, for events, and for the limit of rejects.
    fn note_committed(
        &self,
        snapshots: &SnapshotWriter,
        node: usize,
        records: Vec<Arc<Record>>,
    ) -> Result<(), (usize, StageError)> {
        let described = &self.job.nodes[node];
        let sum = |of: fn(&Record) -> u64| records.iter().map(|record| of(record)).sum::<u64>();
        let (rows_in, rows_out, rejects) = (sum(|r| r.rows_in), sum(|r| r.rows_out), sum(|r| r.rejects.rows));
        let reasons = add_up(records.iter().flat_map(|record| &record.rejects.by_reason));
        let partitions = records.len() as u64;
        snapshots
            .note_committed(&described.stage, &described.recipe, &records)
            .map_err(|error| (node, self.fail_keeping(error.into())))?;
        let (done, faults) = {
            let mut sums = lock(&self.sums);
            let (done, of_fault) = &mut sums[node];
            *done += partitions;
            *of_fault += sum(faults);
            (described.reused + *done, described.reused_faults + *of_fault)
        };
        lock(&self.committed).extend(records.into_iter().map(|record| (node, record)));
        self.job.events.send(Event::Committed {
            stage: described.stage.clone(),
            partitions,
            rows_in,
            rows_out,
            rejects,
            reasons,
            done,
            total: described.total,
        });
        match described.fault_limit {
            Some(limit) if faults > limit => Err((node, self.past_limit(node, faults, limit))),
            _ => Ok(()),
        }
    }

    fn past_limit(&self, node: usize, faults: u64, limit: u64) -> StageError {
        let described = &self.job.nodes[node];
        // Copied, so that the lock is free for commits while the rejects are read.
        let own: Vec<Arc<Record>> = lock(&self.committed)
            .iter()
            .filter(|(of, _)| *of == node)
            .map(|(_, record)| Arc::clone(record))
            .collect();
        let reasons = add_up(own.iter().flat_map(|record| &record.rejects.by_reason));
        let stages = [(described.stage.clone(), described.recipe, own)];
        let set = self.job.store.reject_set(&stages);
        StageError::failed(too_many(faults, &limit.to_string(), &reasons, &set)).with_help(LIMIT_HELP)
    }

    pub fn take_committed(&self) -> Vec<(usize, Arc<Record>)> {
        std::mem::take(&mut *lock(&self.committed))
    }
}

/// Source files were changed while they were read.
pub(super) fn changed() -> StageError {
    StageError::failed("its source files changed while they were read")
        .with_help("wait until they are written, then run again")
}

/// Rejects of class fault in a record.
pub(crate) fn faults(record: &Record) -> u64 {
    record
        .rejects
        .by_reason
        .iter()
        .filter(|count| count.class == RejectClass::Fault)
        .map(|count| count.rows)
        .sum()
}

/// What to do about too many rejects.
pub(crate) const LIMIT_HELP: &str = "look at them with `flow rejects`; raise `max_rejects` if they are to be expected";

/// Reasons that a message names, and rejects of each that it shows.
const SHOWN_REASONS: usize = 5;
const SHOWN_OF_EACH: u64 = 2;
/// Letters of a reject's detail that a message shows.
const SHOWN_OF_A_DETAIL: usize = 200;

/// The message that a stage is past its limit of rejects: the commonest reasons of class fault, each with its first
/// reject. `set` are the stage's rejects; where they cannot be read, only the reasons are named.
pub(crate) fn too_many(faults: u64, limit: &str, reasons: &[ReasonCount], set: &RejectSet) -> String {
    let mut commonest: Vec<&ReasonCount> = reasons
        .iter()
        .filter(|count| count.class == RejectClass::Fault)
        .collect();
    commonest.sort_by(|a, b| b.rows.cmp(&a.rows).then_with(|| a.reason.cmp(&b.reason)));
    commonest.truncate(SHOWN_REASONS);
    let counts: Vec<String> = commonest
        .iter()
        .map(|count| format!("{} {}", count.rows, count.reason))
        .collect();
    let mut message = format!(
        "{faults} rejects of class fault, and max_rejects is {limit}: {}",
        counts.join(", ")
    );
    let first = set.first_of_each(SHOWN_OF_EACH).unwrap_or_default();
    let mut separator = "; the first: ";
    for count in commonest {
        let of_reason = |reject: &Reject| reject.class == RejectClass::Fault && reject.reason == count.reason;
        for (_, partition, reject) in first.iter().filter(|(.., reject)| of_reason(reject)) {
            message.push_str(separator);
            message.push_str(&in_words(partition, reject));
            separator = "; ";
        }
    }
    message
}

/// Where a reject is from and what is wrong with it, on one line.
fn in_words(partition: &Partition, reject: &Reject) -> String {
    let place = reject.place(partition);
    if reject.detail.is_empty() {
        return format!("{place}: {}", reject.reason);
    }
    let detail = reject.short_detail(SHOWN_OF_A_DETAIL).replace('\n', " ");
    format!("{place}: {}, {detail}", reject.reason)
}
