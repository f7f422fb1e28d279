//! The operator of a node: feeds its body, finds out by the frontier which partitions are complete, and hands
//! these to be written.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arrow::array::RecordBatch;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::{ExchangeCore, Pipeline};
use timely::dataflow::operators::Capability;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::{Scope, Stream};
use timely::progress::frontier::MutableAntichain;
use timely::scheduling::SyncActivator;

use super::batch_container::{BatchContainer, Routed};
use super::in_flight::MemoryReservation;
use super::job::{NodeJob, RegionState};
use super::partition_output::{PartitionOutput, drain};
use super::port_buffer::bytes_of;
use super::timer::Timer;
use super::work::Work;
use flow_base::error::StageError;
use flow_base::panic_guard::catch_panic;
use flow_base::partition::Partition;
use flow_kind::kind::Progress;
use flow_kind::out::Out;

/// How often a body that works on threads of its own is polled even if it does not wake the runtime, and how often a
/// log stage checks for signals.
const ASK: Duration = Duration::from_millis(50);

/// The right to send batches of a partition, and to keep it from counting as written.
struct PartitionCapabilities {
    data: Capability<u64>,
    end: Capability<u64>,
}

impl PartitionCapabilities {
    fn at(&self, ordinal: u64) -> PartitionCapabilities {
        PartitionCapabilities {
            data: self.data.delayed(&ordinal),
            end: self.end.delayed(&ordinal),
        }
    }
}

pub(super) struct NodeOperator {
    shared: Arc<RegionState>,
    node: usize,
    /// None on a worker that has no partition of the node.
    work: Option<Work>,
    /// Partitions of this worker that are not complete at the inputs, in order.
    own: VecDeque<u64>,
    /// For the first of `own`, and by it for all that follow.
    hold: Option<PartitionCapabilities>,
    /// Complete at the inputs, but not yet finished by the body.
    not_yet: BTreeMap<u64, PartitionCapabilities>,
    in_hand: BTreeMap<Partition, PartitionOutput>,
    stopped: bool,
    worker: usize,
}

/// A batch to be sent, with what allows it.
type Send<'a> = &'a mut dyn FnMut(&Capability<u64>, Routed);

impl NodeOperator {
    pub fn new(shared: &Arc<RegionState>, node: usize, worker: usize, work: Option<Work>, own: Vec<u64>) -> Self {
        NodeOperator {
            shared: Arc::clone(shared),
            node,
            work,
            own: own.into(),
            hold: None,
            not_yet: BTreeMap::new(),
            in_hand: BTreeMap::new(),
            stopped: false,
            worker,
        }
    }

    fn described(&self) -> &NodeJob {
        &self.shared.job.nodes[self.node]
    }

    fn fail(&self, ordinal: Option<u64>, error: StageError) {
        let partition = ordinal.and_then(|ordinal| self.shared.job.partitions.get(ordinal as usize));
        self.shared.fail_stage(self.node, partition, error);
    }

    /// Calls the body, and moves what it gives to its place.
    fn call<T>(
        &mut self,
        partition: &Partition,
        send: Send,
        call: impl FnOnce(&mut Work, &mut Out) -> Result<T, StageError>,
    ) -> Result<T, StageError> {
        let Some(work) = self.work.as_mut() else {
            return Err(StageError::failed(
                "a partition came to a worker that it does not fall to: a fault of the runtime",
            ));
        };
        let mut out = Out::new(partition.clone()).named_by(self.shared.job.id_column);
        let result = catch_panic(|| call(work, &mut out))?;
        let shared = Arc::clone(&self.shared);
        let node = &shared.job.nodes[self.node];
        let (hold, not_yet) = (&self.hold, &self.not_yet);
        drain(&mut out, &node.outputs, &mut self.in_hand, |partition, port, batch| {
            let Ok(at) = shared.job.partitions.binary_search(partition) else {
                return;
            };
            let ordinal = at as u64;
            let reserved = MemoryReservation::new(&shared.job.in_flight, ordinal, bytes_of(&batch) as u64);
            let routed = Routed {
                ordinal,
                port: port as u16,
                batch,
                reserved: Some(Arc::new(reserved)),
            };
            match not_yet.get(&ordinal) {
                Some(hold) => send(&hold.data, routed),
                // `drain` only passes batches of partitions in work: the first of `own`, or later ones.
                None => {
                    if let Some(hold) = hold {
                        send(&hold.data.delayed(&ordinal), routed);
                    }
                }
            }
        })
        .map_err(|error| shared.fail_keeping(error))?;
        Ok(result)
    }

    fn in_hand(&mut self, ordinal: u64, partition: &Partition) -> &mut PartitionOutput {
        self.in_hand
            .entry(partition.clone())
            .or_insert_with(|| self.shared.collected(self.node, ordinal))
    }

    fn batch(&mut self, input: usize, ordinal: u64, batch: RecordBatch, send: Send) -> Result<(), StageError> {
        let Some(partition) = self.shared.job.partitions.get(ordinal as usize).cloned() else {
            return Err(StageError::failed(
                "a batch of no partition came: a fault of the runtime",
            ));
        };
        let rows = batch.num_rows() as u64;
        let first = self
            .described()
            .streams
            .first()
            .is_some_and(|stream| stream.position == input);
        let collected = self.in_hand(ordinal, &partition);
        if first {
            collected.rows_in += rows;
        }
        let name = self.described().inputs[input].name.clone();
        self.call(&partition, send, |work, out| work.batch(&name, &partition, batch, out))
    }

    /// Completes the partitions that no input can add to.
    fn complete(&mut self, frontiers: &[MutableAntichain<u64>], send: Send) -> Result<(), (Option<u64>, StageError)> {
        while let Some(&ordinal) = self.own.front() {
            if frontiers.iter().any(|frontier| frontier.less_equal(&ordinal)) {
                break;
            }
            let partition = self.shared.job.partitions[ordinal as usize].clone();
            if self.shared.stopping() && !self.shared.is_given(ordinal) {
                // The run is ending, and a source may have left it out.
                self.in_hand.remove(&partition);
                self.stopped = true;
                self.advance();
                continue;
            }
            self.in_hand(ordinal, &partition);
            let here = |error| (Some(ordinal), error);
            let progress = self.call(&partition, send, |work, out| work.partition_complete(&partition, out));
            if progress.is_err() && self.shared.gives_up() {
                self.shared.give_up(ordinal);
                continue;
            }
            match progress.map_err(here)? {
                Progress::Done => {
                    self.finish(ordinal).map_err(here)?;
                    self.advance();
                }
                Progress::NotYet => {
                    if let Some(hold) = &self.hold {
                        self.not_yet.insert(ordinal, hold.at(ordinal));
                    }
                    self.advance();
                }
            }
        }
        Ok(())
    }

    /// Removes the first of `own`.
    fn advance(&mut self) {
        self.own.pop_front();
        match (self.own.front(), &mut self.hold) {
            (Some(next), Some(hold)) => {
                hold.data.downgrade(next);
                hold.end.downgrade(next);
            }
            _ => self.hold = None,
        }
    }

    fn finish(&mut self, ordinal: u64) -> Result<(), StageError> {
        let partition = &self.shared.job.partitions[ordinal as usize];
        match self.in_hand.remove(partition) {
            Some(collected) => self.shared.write(self.node, ordinal, collected),
            None => Ok(()),
        }
    }

    /// Asks the body which of the partitions that it processes on its own threads are done.
    fn poll(&mut self, send: Send) -> Result<(), (Option<u64>, StageError)> {
        if self.work.is_none() || (self.not_yet.is_empty() && self.in_hand.is_empty()) {
            return Ok(());
        }
        let done = self
            .call(&Partition::new(""), send, |work, out| work.poll(out))
            .map_err(|error| (None, error))?;
        for partition in done {
            let ordinal = self
                .shared
                .job
                .partitions
                .binary_search(&partition)
                .ok()
                .map(|at| at as u64);
            match ordinal.filter(|ordinal| self.not_yet.contains_key(ordinal)) {
                Some(ordinal) => {
                    self.finish(ordinal).map_err(|error| (Some(ordinal), error))?;
                    self.not_yet.remove(&ordinal);
                }
                None => {
                    let message = format!("said that partition {partition} is done, which it did not have to finish");
                    return Err((ordinal, StageError::failed(message)));
                }
            }
        }
        Ok(())
    }

    /// Checks for signals, on behalf of a log stage. True: the stage has written its checkpoint and the region ends.
    fn signals(&mut self) -> Result<bool, StageError> {
        let Some(work) = self.work.as_mut() else {
            return Ok(false);
        };
        let signals = &self.shared.job.signals;
        if signals.checkpoint.swap(false, std::sync::atomic::Ordering::AcqRel) {
            catch_panic(|| work.checkpoint(false))?;
        }
        if signals.stop_asked().is_some() {
            catch_panic(|| work.checkpoint(true))?;
            return Ok(true);
        }
        Ok(false)
    }

    /// One turn. True: call again soon.
    fn turn(&mut self, batches: Vec<(usize, Routed)>, frontiers: &[MutableAntichain<u64>], send: Send) -> bool {
        if self.shared.leaving() {
            return false;
        }
        if let Err((ordinal, error)) = self.try_turn(batches, frontiers, send) {
            // A body gives up with an error when the region is being left: that is no failure of its own.
            if !self.shared.leaving() {
                self.fail(ordinal, error);
            }
            return false;
        }
        let is_log = self.described().is_log && self.worker == 0;
        !self.not_yet.is_empty() || (is_log && self.work.is_some())
    }

    fn try_turn(
        &mut self,
        batches: Vec<(usize, Routed)>,
        frontiers: &[MutableAntichain<u64>],
        send: Send,
    ) -> Result<(), (Option<u64>, StageError)> {
        if self.described().is_log && self.signals().map_err(|error| (None, error))? {
            self.shared.leave();
            return Ok(());
        }
        for (input, routed) in batches {
            // Dropped, like the batch, when the body has processed it.
            let Routed {
                ordinal,
                batch,
                reserved: _reserved,
                ..
            } = routed;
            if self.described().active.get(ordinal as usize) == Some(&true) {
                let taken = self.batch(input, ordinal, batch, send);
                if taken.is_err() && self.shared.gives_up() {
                    self.shared.give_up(ordinal);
                    continue;
                }
                taken.map_err(|error| (Some(ordinal), error))?;
            }
        }
        self.complete(frontiers, send)?;
        let polled = self.poll(send);
        if polled.is_err() && self.shared.gives_up() {
            for ordinal in std::mem::take(&mut self.not_yet).into_keys() {
                self.shared.give_up(ordinal);
                self.in_hand.remove(&self.shared.job.partitions[ordinal as usize]);
            }
            self.stopped = true;
        } else {
            polled?;
        }
        let ended_early = self.work.as_ref().is_some_and(Work::ended_early);
        if (ended_early || (self.own.is_empty() && self.not_yet.is_empty()))
            && let (Some(mut work), false) = (self.work.take(), self.stopped)
        {
            catch_panic(|| work.complete()).map_err(|error| (None, error))?;
        }
        if ended_early {
            self.shared.leave();
        }
        Ok(())
    }
}

/// Gives the stream of batches, and one that carries nothing but the frontier of what was written.
pub(super) fn build<'scope>(
    scope: Scope<'scope, u64>,
    mut operator: NodeOperator,
    inputs: Vec<(usize, usize, Stream<'scope, u64, BatchContainer>)>,
    on_worker_0: bool,
    address: &Arc<OnceLock<SyncActivator>>,
) -> (Stream<'scope, u64, BatchContainer>, Stream<'scope, u64, Vec<()>>) {
    let mut builder = OperatorBuilder::new(operator.described().stage.clone(), scope);
    let info = builder.operator_info();
    let mut timer = Timer::new(scope.activator_for(info.address.clone()), ASK);
    let _ = address.set(scope.worker().sync_activator_for(info.address.to_vec()));
    type Pull = Box<dyn FnMut(&mut Vec<(usize, Routed)>)>;
    let mut pulls: Vec<Pull> = Vec::new();
    for (position, port, stream) in inputs {
        // Batches of one partition and input stay in order: `for_each`, which `for_each_time` does not promise.
        let take = move |data: &mut BatchContainer, into: &mut Vec<(usize, Routed)>| {
            into.extend(
                data.take()
                    .into_iter()
                    .filter(|routed| usize::from(routed.port) == port)
                    .map(|routed| (position, routed)),
            );
        };
        if on_worker_0 {
            let pact = ExchangeCore::<CapacityContainerBuilder<BatchContainer>, _>::new(|_: &Routed| 0);
            let mut handle = builder.new_input(stream, pact);
            pulls.push(Box::new(move |into| handle.for_each(|_, data| take(data, into))));
        } else {
            let mut handle = builder.new_input(stream, Pipeline);
            pulls.push(Box::new(move |into| handle.for_each(|_, data| take(data, into))));
        }
    }
    let (data, data_stream) = builder.new_output::<BatchContainer>();
    let (end, end_stream) = builder.new_output::<Vec<()>>();
    let mut data: OutputBuilder<u64, CapacityContainerBuilder<BatchContainer>> = OutputBuilder::from(data);
    builder.build(move |mut initial| {
        if let (Some(end), Some(data), Some(first)) = (initial.pop(), initial.pop(), operator.own.front()) {
            operator.hold = Some(PartitionCapabilities {
                data: data.delayed(first),
                end: end.delayed(first),
            });
        }
        move |frontiers| {
            // Held so that the output outlives the capabilities that belong to it.
            let _ = &end;
            let mut batches = Vec::new();
            for pull in &mut pulls {
                pull(&mut batches);
            }
            let mut output = data.activate();
            let again = operator.turn(batches, frontiers, &mut |capability, routed| {
                output.session(capability).give(routed)
            });
            if again {
                timer.set();
            }
        }
    });
    (data_stream, end_stream)
}
