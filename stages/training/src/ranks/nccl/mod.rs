//! The collective of ranks on GPUs that use NVIDIA's NCCL: over NVLink or PCIe within a machine and over the network
//! between machines, without copies in host memory. Each rank has a communicator of its own, on a thread of its own,
//! whether it shares its process with other ranks or not.
//!
//! NCCL moves the tensors: sums of gradients, parameters, statistics of batch normalisation. Numbers, and everything about
//! failures, go through the [`LocalCollective`] of the rank: each rank contributes there when it starts an operation, so a
//! rank that does not start it is named. NCCL itself would wait for ever.
//!
//! Compared with ranks that use host memory, the same sums are taken over the same ranks, with the same owners.
//! Parameters are copied, so all ranks hold the same bits of them. But the order of the terms of a sum is NCCL's: a
//! ring or a tree chosen by the machines, their links, the size of the tensor and NCCL's version. With the same choice
//! on the same machines a sum has the same bits again, which NCCL does not guarantee. So a run with NCCL does not give
//! the same bits as a run without, except for two ranks, whose sums are the same in either order.
//!
//! NCCL requires that all ranks of a communicator start the same operations in the same order. They do: gradients come
//! in the order of [`ParameterGroup::backward_order`], from a rank without a micro-batch too, and the operations at the
//! end of a step have a fixed order.
//!
//! NVIDIA's library was never run here. In tests a stand-in has its functions ([`with_host_library`]) and works on tensors in host
//! memory, so that all of this runs but for what asks CUDA (`stream.rs`).

mod communicator;
mod device_check;
mod library;
mod on_host;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Shape, Tensor};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use flow_model::parameter_groups::trainable_groups;
use flow_model::{ParameterGroup, ParameterId, Parameters};

use self::communicator::{Call, CommunicatorThread, Operation};
pub(super) use self::device_check::device_name;
use self::library::Library;
pub(super) use self::on_host::is_chosen;
pub use self::on_host::{use_host_library, with_host_library};
use self::stream::{Mark, Streams};
use super::{Collective, CollectiveKey, CollectiveOp, LocalCollective, NcclUniqueId, ReducedGradients};
use crate::error::TrainingError;

/// How often a rank that waits for the thread of its communicator looks whether another rank has failed.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// How much longer than for other ranks a rank waits for the thread of its communicator, which waits for them.
const GRACE: Duration = Duration::from_secs(20);

/// A unique id for a new communicator of ranks on such a device.
pub(super) fn new_id(device: &Device) -> Result<NcclUniqueId, TrainingError> {
    let id = library_for(device)?.unique_id();
    id.map_err(|failure| nccl_error(&format!("a group cannot be made: {}", failure.message)))
}

/// The library of ranks on such a device.
fn library_for(device: &Device) -> Result<&'static Library, TrainingError> {
    match device {
        Device::Cpu => {
            on_host::library().ok_or_else(|| nccl_error("it is for ranks on GPUs, and the model is on the CPU"))
        }
        _ => Library::installed(),
    }
}

fn nccl_error(message: &str) -> TrainingError {
    TrainingError::data(format!("NCCL: {message}"))
}

/// What a rank is told when its operation was given to the device.
type Done = Receiver<Result<Arc<Mark>, String>>;

/// One rank of a communicator.
pub(super) struct NcclCollective {
    /// For numbers, and for who has started an operation or failed.
    control: LocalCollective,
    owners: Arc<Vec<usize>>,
    /// The trainable parameters by group.
    groups: BTreeMap<ParameterGroup, Vec<ParameterId>>,
    /// By index: the shape of a parameter.
    shapes: Vec<Shape>,
    /// Of the gradients that are exchanged.
    dtype: DType,
    device: Device,
    streams: Streams,
    operations: Sender<Operation>,
    /// Whether the devices of all ranks are known to be different ones.
    checked: bool,
    reductions: BTreeMap<CollectiveKey, PendingReduction>,
    broadcasts: BTreeMap<CollectiveKey, Done>,
    /// Operations that this rank has started and whose contributions in `control` are not collected.
    announced: BTreeSet<CollectiveKey>,
    timeout: Duration,
    wait_time: Duration,
}

/// Gradients that NCCL is reducing.
struct PendingReduction {
    /// The gradients of this rank's parameters, one after the other.
    own: Option<Tensor>,
    ids: Vec<ParameterId>,
    done: Done,
    mark: Option<Arc<Mark>>,
    /// Indices of the gradients that at least one rank has, when all ranks have said so.
    present: Option<BTreeSet<usize>>,
}

/// The gradients of a group that go to one rank, one after the other in one tensor.
struct Bucket {
    ids: Vec<ParameterId>,
    numbers: Tensor,
}

impl NcclCollective {
    /// Prepares to join the communicator, with the first operation. `gradients` is the number type that they come in,
    /// `device_name` is that of the rank's device, in words that no other device has.
    ///
    /// # Errors
    /// Where NCCL's library is not there, or the model is on no device that it is for.
    pub fn new(
        control: LocalCollective,
        parameters: &Parameters,
        owners: Vec<usize>,
        id: NcclUniqueId,
        timeout: Duration,
        gradients: DType,
        device_name: &str,
    ) -> Result<NcclCollective, TrainingError> {
        let device = parameters.device().clone();
        let library = library_for(&device)?;
        let streams = Streams::of(&device).map_err(|message| nccl_error(&message))?;
        let groups = trainable_groups(parameters)?;
        let shapes = parameters
            .iter()
            .map(|(_, parameter)| parameter.tensor.shape().clone())
            .collect();
        let (operations, received) = unbounded();
        let rank = control.rank();
        let thread = CommunicatorThread {
            library,
            rank,
            size: control.size(),
            id,
            streams: streams.clone(),
            group: control.watch(),
            timeout,
        };
        std::thread::Builder::new()
            .name(format!("nccl-{rank}"))
            .spawn(move || thread.run(&received))
            .map_err(|e| TrainingError::rank(rank, format!("its thread for NCCL cannot be started: {e}")))?;
        let name = device_name.bytes().map(f64::from).collect();
        control.start_all_gather(DEVICES, name)?;
        Ok(NcclCollective {
            control,
            owners: Arc::new(owners),
            groups,
            shapes,
            dtype: gradients,
            device,
            streams,
            operations,
            checked: false,
            reductions: BTreeMap::new(),
            broadcasts: BTreeMap::new(),
            announced: BTreeSet::new(),
            timeout,
            wait_time: Duration::ZERO,
        })
    }

    /// Waits, the first time, until all ranks have named their devices.
    ///
    /// # Errors
    /// Where two ranks have the same.
    fn check_devices(&mut self) -> Result<(), TrainingError> {
        if self.checked {
            return Ok(());
        }
        let named = self.control.finish_all_gather(DEVICES, true)?.unwrap_or_default();
        let text = |name: &Vec<f64>| name.iter().map(|byte| *byte as u8).collect::<Vec<u8>>();
        let names: Vec<String> = named
            .iter()
            .map(|name| String::from_utf8_lossy(&text(name)).into_owned())
            .collect();
        device_check::check(&names)?;
        self.checked = true;
        Ok(())
    }

    /// Hands operations to the thread of the communicator, after telling the other ranks so.
    fn start(&mut self, key: CollectiveKey, told: Vec<f64>, calls: Vec<Call>) -> Result<Done, TrainingError> {
        self.check_devices()?;
        self.control.start_all_gather(key, told)?;
        let after = self.streams.computed().map_err(|message| nccl_error(&message))?;
        let (done, receiver) = bounded(1);
        // Where the thread has ended the channel is closed, which whoever waits for `done` finds.
        let _ = self.operations.send(Operation {
            key,
            after,
            calls,
            done,
        });
        Ok(receiver)
    }

    fn failed(&self, message: &str) -> TrainingError {
        // A failure of another rank is named in place of what follows from it.
        match self.control.check() {
            Err(error) => error,
            Ok(()) => TrainingError::rank(self.control.rank(), message.to_owned()),
        }
    }

    /// Waits until an operation is given to the device, and has the model's stream wait until it is finished there.
    fn finish(&mut self, key: CollectiveKey, done: &Done) -> Result<(), TrainingError> {
        let mark = self.given_to_device(key, done)?;
        self.streams
            .compute_after(&mark)
            .map_err(|message| self.failed(&message))
    }

    fn given_to_device(&mut self, key: CollectiveKey, done: &Done) -> Result<Arc<Mark>, TrainingError> {
        let began = Instant::now();
        let mark = loop {
            match done.recv_timeout(CHECK_INTERVAL) {
                Ok(Ok(mark)) => break mark,
                Ok(Err(message)) => return Err(self.failed(&message)),
                Err(RecvTimeoutError::Disconnected) => return Err(self.failed("NCCL: its thread has ended")),
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.control.check()?;
            if began.elapsed() > self.timeout + GRACE {
                let message = format!("NCCL does not answer in the exchange of {key}");
                self.control.abort(&message);
                return Err(self.failed(&message));
            }
        };
        self.wait_time += began.elapsed();
        Ok(mark)
    }

    /// The gradients of a group by owner. Zeros represent those that this rank does not have.
    fn buckets(
        &self,
        group: ParameterGroup,
        gradients: Vec<(ParameterId, Tensor)>,
    ) -> Result<BTreeMap<usize, Bucket>, TrainingError> {
        let mut gradients: BTreeMap<ParameterId, Tensor> = gradients.into_iter().collect();
        let mut by_owner: BTreeMap<usize, Vec<ParameterId>> = BTreeMap::new();
        for &id in self.groups.get(&group).map_or(&[][..], Vec::as_slice) {
            by_owner.entry(self.owners[id.index()]).or_default().push(id);
        }
        let mut buckets = BTreeMap::new();
        for (owner, ids) in by_owner {
            let count: usize = ids.iter().map(|id| self.shapes[id.index()].elem_count()).sum();
            let numbers = Tensor::zeros(count, self.dtype, &self.device)?;
            let mut at = 0;
            for id in &ids {
                if let Some(gradient) = gradients.remove(id) {
                    numbers.slice_set(&gradient.flatten_all()?.contiguous()?, 0, at)?;
                }
                at += self.shapes[id.index()].elem_count();
            }
            buckets.insert(owner, Bucket { ids, numbers });
        }
        Ok(buckets)
    }

    /// The gradients of a bucket, as views of it.
    fn unpacked(
        &self,
        ids: &[ParameterId],
        numbers: &Tensor,
        present: &BTreeSet<usize>,
    ) -> Result<ReducedGradients, TrainingError> {
        let mut at = 0;
        let mut sums = Vec::new();
        for &id in ids {
            let shape = &self.shapes[id.index()];
            let count = shape.elem_count();
            if present.contains(&id.index()) {
                sums.push((id, numbers.narrow(0, at, count)?.reshape(shape)?));
            }
            at += count;
        }
        Ok(sums)
    }

    /// Collects the contributions of operations that all ranks are known to have started.
    fn forget_announced(&mut self) -> Result<(), TrainingError> {
        while let Some(key) = self.announced.pop_first() {
            self.control.finish_all_gather(key, true)?;
        }
        Ok(())
    }
}

/// The all-gather of the names of devices, once at the beginning.
const DEVICES: CollectiveKey = CollectiveKey {
    step: 0,
    round: 0,
    op: CollectiveOp::GatherDevices,
};

impl Collective for NcclCollective {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.control.size()
    }

    fn start_reduce_scatter(
        &mut self,
        key: CollectiveKey,
        gradients: Vec<(ParameterId, Tensor)>,
    ) -> Result<(), TrainingError> {
        let CollectiveOp::ReduceGradients(group) = key.op else {
            return Err(nccl_error(&format!("no sum is taken in {key}")));
        };
        let present = gradients.iter().map(|(id, _)| id.index() as f64).collect();
        let mut buckets = self.buckets(group, gradients)?;
        let calls = buckets
            .iter()
            .map(|(&owner, bucket)| Call::Reduce(bucket.numbers.clone(), owner))
            .collect();
        let done = self.start(key, present, calls)?;
        let own = buckets.remove(&self.control.rank());
        let pending = PendingReduction {
            ids: own.as_ref().map_or(Vec::new(), |bucket| bucket.ids.clone()),
            own: own.map(|bucket| bucket.numbers),
            done,
            mark: None,
            present: None,
        };
        self.reductions.insert(key, pending);
        Ok(())
    }

    fn finish_reduce_scatter(
        &mut self,
        key: CollectiveKey,
        wait: bool,
    ) -> Result<Option<ReducedGradients>, TrainingError> {
        let Some(mut pending) = self.reductions.remove(&key) else {
            return Ok(Some(Vec::new()));
        };
        if pending.present.is_none() {
            let all = self.control.finish_all_gather(key, wait)?;
            pending.present = all.map(|all| all.into_iter().flatten().map(|index| index as usize).collect());
        }
        if pending.mark.is_none() {
            pending.mark = match wait {
                true => Some(self.given_to_device(key, &pending.done)?),
                false => match pending.done.try_recv() {
                    Ok(Ok(mark)) => Some(mark),
                    Ok(Err(message)) => return Err(self.failed(&message)),
                    Err(_) => None,
                },
            };
        }
        let ready = match &pending.mark {
            // The device waits, not the host.
            Some(mark) if wait => {
                self.streams
                    .compute_after(mark)
                    .map_err(|message| self.failed(&message))?;
                true
            }
            Some(mark) => mark.is_past().map_err(|message| self.failed(&message))?,
            None => false,
        };
        match (&pending.present, ready) {
            (Some(present), true) => {
                let Some(own) = &pending.own else {
                    return Ok(Some(Vec::new()));
                };
                self.unpacked(&pending.ids, own, present).map(Some)
            }
            _ => {
                self.reductions.insert(key, pending);
                Ok(None)
            }
        }
    }

    fn all_gather(&mut self, key: CollectiveKey, numbers: Vec<f64>) -> Result<Vec<Vec<f64>>, TrainingError> {
        let all = self.control.all_gather(key, numbers)?;
        // All ranks have started what comes before this.
        self.forget_announced()?;
        Ok(all)
    }

    /// All ranks give tensors of the same types and shapes.
    fn all_gather_tensors(
        &mut self,
        key: CollectiveKey,
        tensors: Vec<Tensor>,
    ) -> Result<Vec<Vec<Tensor>>, TrainingError> {
        let ranks = self.control.size();
        // Those of one type, by name, one after the other.
        let mut by_type: BTreeMap<&str, (Vec<usize>, Vec<Tensor>)> = BTreeMap::new();
        for (at, tensor) in tensors.iter().enumerate() {
            let (places, flat) = by_type.entry(tensor.dtype().as_str()).or_default();
            places.push(at);
            flat.push(tensor.flatten_all()?);
        }
        let mut calls = Vec::new();
        let mut gathered = Vec::new();
        for (places, flat) in by_type.into_values() {
            let from = Tensor::cat(&flat, 0)?;
            let to = Tensor::zeros((ranks, from.elem_count()), from.dtype(), &self.device)?;
            calls.push(Call::AllGather { from, to: to.clone() });
            gathered.push((places, to));
        }
        let done = self.start(key, Vec::new(), calls)?;
        self.announced.insert(key);
        self.finish(key, &done)?;
        let mut all = vec![tensors.clone(); ranks];
        for (places, to) in gathered {
            for (rank, all) in all.iter_mut().enumerate() {
                let (row, mut at) = (to.get(rank)?, 0);
                for &place in &places {
                    let shape = tensors[place].shape();
                    all[place] = row.narrow(0, at, shape.elem_count())?.reshape(shape)?;
                    at += shape.elem_count();
                }
            }
        }
        Ok(all)
    }

    fn start_broadcast(
        &mut self,
        key: CollectiveKey,
        parameters: &Parameters,
        changed: &[ParameterId],
    ) -> Result<(), TrainingError> {
        let from_owner = |id: &ParameterId| Call::Broadcast(parameters.get(*id).clone(), self.owners[id.index()]);
        let calls = changed.iter().map(from_owner).collect();
        let done = self.start(key, Vec::new(), calls)?;
        self.announced.insert(key);
        self.broadcasts.insert(key, done);
        Ok(())
    }

    /// The values are there when the model's stream comes to what is given to it after this.
    fn finish_broadcast(&mut self, key: CollectiveKey, _: &Parameters) -> Result<(), TrainingError> {
        match self.broadcasts.remove(&key) {
            Some(done) => self.finish(key, &done),
            None => Ok(()),
        }
    }

    fn abort(&mut self, message: &str) {
        self.control.abort(message);
    }

    fn take_wait_seconds(&mut self) -> f64 {
        self.control.take_wait_seconds() + std::mem::take(&mut self.wait_time).as_secs_f64()
    }
}
