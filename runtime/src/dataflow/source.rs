//! What opens a dataflow: sources, and artifacts that are read again partition by partition.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use timely::container::CapacityContainerBuilder;
use timely::dataflow::operators::Capability;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::operators::probe::Handle;
use timely::dataflow::{Scope, Stream};
use timely::scheduling::{Activator, SyncActivator};

use super::batch_container::{BatchContainer, Routed};
use super::job::{FilesDigest, RegionState};
use super::partition_output::drain;
use super::port_buffer::bytes_of;
use super::timer::Timer;
use super::unreadable::{SourceFiles, give};
use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_base::panic_guard::catch_panic;
use flow_base::partition::Partition;
use flow_kind::kind::Source;
use flow_kind::out::Out;
use flow_plan::keys::ListedPartition;
use flow_store::{Artifact, DigestedFile};

/// Reads partitions, one per call.
pub(super) struct Reader {
    shared: Arc<RegionState>,
    /// The source itself, or the node that reads the artifact.
    node: usize,
    from: From,
    todo: VecDeque<u64>,
}

/// The source files of a partition.
struct ReadFiles<'a> {
    shared: &'a RegionState,
    described: &'a ListedPartition,
    read_once: bool,
}

impl SourceFiles for ReadFiles<'_> {
    fn read_by_source(&self) -> bool {
        self.read_once
    }

    fn digest(&self, afresh: bool) -> Result<FilesDigest, StageError> {
        self.shared.digest_files(self.described, afresh)
    }

    fn note_read(&self, read: Vec<DigestedFile>) -> Result<Option<Digest>, StageError> {
        self.shared.note_read(self.described, read)
    }

    fn leaving(&self) -> bool {
        self.shared.leaving()
    }
}

enum From {
    Source(Box<dyn Source>),
    /// And the columns to read; all, if none are named.
    Artifact(Artifact, Option<Vec<String>>),
    Nothing,
}

impl Reader {
    pub fn source(shared: &Arc<RegionState>, node: usize, body: Box<dyn Source>, own: Vec<u64>) -> Self {
        Reader {
            shared: Arc::clone(shared),
            node,
            from: From::Source(body),
            todo: own.into(),
        }
    }

    pub fn artifact(
        shared: &Arc<RegionState>,
        node: usize,
        artifact: Artifact,
        columns: Option<Vec<String>>,
        own: Vec<u64>,
    ) -> Self {
        Reader {
            shared: Arc::clone(shared),
            node,
            from: From::Artifact(artifact, columns),
            todo: own.into(),
        }
    }

    pub fn idle(shared: &Arc<RegionState>, node: usize) -> Self {
        Reader {
            shared: Arc::clone(shared),
            node,
            from: From::Nothing,
            todo: VecDeque::new(),
        }
    }

    /// Reads one partition and hands its batches to `send`.
    fn read(&mut self, ordinal: u64, partition: &Partition, mut send: impl FnMut(Routed)) -> Result<(), StageError> {
        match &mut self.from {
            From::Nothing => {}
            From::Artifact(artifact, columns) => {
                // A partition that another input has and this one has not is empty here.
                if artifact.rows_of(partition).is_some() {
                    let columns: Option<Vec<&str>> = columns
                        .as_ref()
                        .map(|columns| columns.iter().map(String::as_str).collect());
                    for batch in artifact.read(partition, columns.as_deref())? {
                        send(Routed {
                            ordinal,
                            port: 0,
                            batch: batch?,
                            reserved: None,
                        });
                    }
                }
            }
            From::Source(body) => {
                let job = &self.shared.job;
                let upcoming = self.todo.iter().filter(|next| **next != ordinal).take(UPCOMING);
                let upcoming: Vec<Partition> = upcoming.map(|next| job.partitions[*next as usize].clone()).collect();
                catch_panic(|| {
                    body.upcoming(&upcoming);
                    Ok::<_, StageError>(())
                })?;
                let node = &job.nodes[self.node];
                let described = node.source_partitions.get(partition).filter(|_| node.writer.is_some());
                let mut in_hand = BTreeMap::from([(partition.clone(), self.shared.collected(self.node, ordinal))]);
                let mut out = match described {
                    None => {
                        let mut out = Out::new(partition.clone()).named_by(job.id_column);
                        catch_panic(|| body.read(partition, &mut out))?;
                        out
                    }
                    Some(described) => {
                        let files = ReadFiles {
                            shared: &self.shared,
                            described,
                            // A file that is missing, or no regular file, is reported by the runtime.
                            read_once: body.digests(&described.partition)
                                && described
                                    .partition
                                    .files
                                    .iter()
                                    .all(|file| flow_storage::is_file(job.store.storage(), file).unwrap_or(false)),
                        };
                        let (out, digest) = give(body.as_mut(), partition, job.id_column, &files)?;
                        self.shared.note_source(self.node, ordinal, digest);
                        out
                    }
                };
                drain(&mut out, &node.outputs, &mut in_hand, |_, port, batch| {
                    send(Routed {
                        ordinal,
                        port: port as u16,
                        batch,
                        reserved: None,
                    });
                })
                .map_err(|error| self.shared.fail_keeping(error))?;
                if let Some(collected) = in_hand.remove(partition) {
                    self.shared.write(self.node, ordinal, collected)?;
                }
            }
        }
        Ok(())
    }
}

/// Most partitions that are named to [`Source::upcoming`].
const UPCOMING: usize = 64;

type Capabilities = Option<(Capability<u64>, Capability<u64>)>;

/// Activators of a worker's sources: called when more partitions are written, so that the sources may read on.
pub(super) type Sources = Rc<RefCell<Vec<Activator>>>;

/// How long a source that is held back waits before it asks again although nothing more was written: another worker may
/// have finished reading a partition, whose size is then known. Each time wakes the worker, which is expensive in a
/// virtual machine.
const AGAIN: Duration = Duration::from_millis(20);

/// Gives the stream of batches, and one that carries nothing but the frontier of what was given.
pub(super) fn build<'scope>(
    scope: Scope<'scope, u64>,
    mut reader: Reader,
    written: &Handle<u64>,
    sources: &Sources,
    address: &Arc<OnceLock<SyncActivator>>,
) -> (Stream<'scope, u64, BatchContainer>, Stream<'scope, u64, Vec<()>>) {
    let mut builder = OperatorBuilder::new("source".into(), scope);
    let info = builder.operator_info();
    let activator = scope.activator_for(info.address.clone());
    sources.borrow_mut().push(scope.activator_for(info.address.clone()));
    let mut timer = Timer::new(scope.activator_for(info.address.clone()), AGAIN);
    let _ = address.set(scope.worker().sync_activator_for(info.address.to_vec()));
    let (data, data_stream) = builder.new_output::<BatchContainer>();
    let (end, end_stream) = builder.new_output::<Vec<()>>();
    let mut data: OutputBuilder<u64, CapacityContainerBuilder<BatchContainer>> = OutputBuilder::from(data);
    let written = written.clone();
    builder.build(move |mut initial| {
        let mut capabilities: Capabilities = match (initial.pop(), initial.pop()) {
            (Some(end), Some(data)) => Some((data, end)),
            _ => None,
        };
        move_to(&mut capabilities, reader.todo.front().copied());
        move |_| {
            // Held so that the output outlives the capabilities that belong to it.
            let _ = &end;
            let shared = Arc::clone(&reader.shared);
            if shared.leaving() {
                return;
            }
            if shared.stopping() {
                reader.todo.clear();
            }
            let Some(ordinal) = reader.todo.front().copied() else {
                capabilities = None;
                return;
            };
            let oldest = written
                .with_frontier(|frontier| frontier.first().copied())
                .unwrap_or(ordinal);
            if !shared.job.in_flight.take(ordinal, oldest.max(shared.job.start)) {
                timer.set();
                return;
            }
            let partition = &shared.job.partitions[ordinal as usize];
            if let Some((capability, _)) = &capabilities {
                let mut output = data.activate();
                let mut session = output.session(capability);
                let mut bytes = 0;
                let give = |routed: Routed| {
                    bytes += bytes_of(&routed.batch) as u64;
                    session.give(routed);
                };
                if let Err(error) = reader.read(ordinal, partition, give) {
                    // A body gives up with an error when the region is being left: that is no failure of its own. Nor is it
                    // where the run was asked to end.
                    if shared.gives_up() {
                        shared.give_up(ordinal);
                        activator.activate();
                    } else if !shared.job.cancel.is_set() {
                        shared.fail_stage(reader.node, Some(partition), error);
                    }
                    return;
                }
                shared.job.in_flight.gave(ordinal, bytes);
            }
            shared.gave(ordinal);
            reader.todo.pop_front();
            move_to(&mut capabilities, reader.todo.front().copied());
            // One partition per activation: the stages after it process it before the next one is read.
            activator.activate();
        }
    });
    (data_stream, end_stream)
}

fn move_to(capabilities: &mut Capabilities, next: Option<u64>) {
    match (next, capabilities.as_mut()) {
        (Some(next), Some((data, end))) => {
            data.downgrade(&next);
            end.downgrade(&next);
        }
        (None, _) => *capabilities = None,
        (Some(_), None) => {}
    }
}
