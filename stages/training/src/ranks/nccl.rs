//! The collective of ranks on GPUs that use NVIDIA's NCCL: over NVLink or PCIe within a machine and over the network
//! between machines, without copies in host memory.
//!
//! NCCL moves the large tensors: sums of gradients, and parameters. Numbers, and everything about failures, go through
//! the [`LocalCollective`] of the rank: each rank contributes there when it starts an operation, so a rank that does
//! not start it is named, and waiting for NCCL ends with the same timeout. NCCL itself would wait for ever.
//!
//! Compared with ranks that use host memory, the same sums are taken over the same ranks, with the same owners.
//! Parameters are copied, so all ranks hold the same bits of them. But the order of the terms of a sum is NCCL's: a
//! ring or a tree chosen by the machines, their links, the size of the tensor and NCCL's version. With the same choice
//! on the same machines a sum has the same bits again, which NCCL does not guarantee. So a run with NCCL does not give
//! the same bits as a run without, except for two ranks, whose sums are the same in either order.
//!
//! This was never run: it is compiled against NCCL's interface. What it relies on (the local collective, the order of
//! operations) is tested with ranks on the CPU.
//!
//! NCCL requires that all ranks of a communicator start the same operations in the same order. They do: gradients come
//! in the order of [`ParameterGroup::backward_order`], from a rank without a micro-batch too, and the operations at the
//! end of a step have a fixed order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DeviceRepr};
use candle_core::cuda_backend::cudarc::nccl::result::{NcclError, group_end, group_start};
use candle_core::cuda_backend::cudarc::nccl::safe::{Comm, Id, NcclType, ReduceOp};
use candle_core::cuda_backend::{CudaStorage, CudaStorageSlice};
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Shape, Tensor};
use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded, unbounded};
use flow_model::parameter_groups::trainable_groups;
use flow_model::{ParameterGroup, ParameterId, Parameters};

use super::{Collective, CollectiveKey, CollectiveOp, LocalCollective, NcclUniqueId, ReducedGradients};
use crate::error::TrainingError;

/// How often a rank that waits checks whether NCCL has finished.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// A unique id for a new communicator.
pub(super) fn new_id() -> Result<NcclUniqueId, TrainingError> {
    let id = Id::new().map_err(|error| nccl_error("a group cannot be made", &error))?;
    Ok(id.internal().map(|byte| byte as u8))
}

fn nccl_error(what: &str, error: &dyn std::fmt::Debug) -> TrainingError {
    TrainingError::Data {
        message: format!("NCCL: {what}: {error:?}"),
    }
}

/// One rank of a communicator; each rank has a GPU of its own.
pub(super) struct NcclCollective {
    /// For numbers, and for who has started an operation or failed.
    control: LocalCollective,
    owners: Arc<Vec<usize>>,
    /// The trainable parameters by group.
    groups: BTreeMap<ParameterGroup, Vec<ParameterId>>,
    /// By index: shape and data type of the gradient of a parameter.
    gradient_types: Vec<(Shape, candle_core::DType)>,
    device: Device,
    /// The stream that the model computes on.
    compute: Arc<CudaStream>,
    operations: Sender<NcclOperation>,
    pending: BTreeMap<CollectiveKey, PendingReduction>,
    timeout: Duration,
    wait_time: Duration,
}

/// An operation for the thread that has the communicator.
struct NcclOperation {
    /// The tensors are computed when this event has happened.
    after: CudaEvent,
    /// With the root: the rank that receives the sum, or whose values are broadcast.
    tensors: Vec<(Tensor, usize)>,
    /// Reduce; else broadcast.
    sum: bool,
    /// Gets the event that happens when the operation is finished.
    done: Sender<Result<CudaEvent, String>>,
}

/// Gradients that NCCL is reducing. They are kept until it has finished, as their memory would be reused otherwise.
struct PendingReduction {
    tensors: Vec<(ParameterId, Tensor)>,
    done: Receiver<Result<CudaEvent, String>>,
    event: Option<CudaEvent>,
    /// Indices of the gradients that at least one rank has, when all ranks have said so.
    present: Option<BTreeSet<usize>>,
}

impl NcclCollective {
    /// Starts to join the communicator; an error in that is reported by the first operation.
    pub fn new(
        control: LocalCollective,
        parameters: &Parameters,
        owners: Vec<usize>,
        id: NcclUniqueId,
        timeout: Duration,
    ) -> Result<NcclCollective, TrainingError> {
        let Device::Cuda(cuda) = parameters.device() else {
            return Err(nccl_error("the model is on no GPU", &parameters.device()));
        };
        let compute = cuda.cuda_stream();
        let groups = trainable_groups(parameters)?;
        // A gradient has the data type of the computation, also where its parameter is stored in a shorter one.
        let gradient_types = parameters
            .iter()
            .map(|(_, parameter)| (parameter.tensor.shape().clone(), parameters.dtype()))
            .collect();
        let (operations, received) = unbounded();
        let (rank, size, context) = (control.rank(), control.size(), compute.context().clone());
        std::thread::Builder::new()
            .name(format!("nccl-{rank}"))
            .spawn(move || run_communicator(&context, rank, size, id, &received))
            .map_err(|e| TrainingError::Rank {
                rank,
                message: format!("its thread for NCCL cannot be started: {e}"),
            })?;
        Ok(NcclCollective {
            control,
            owners: Arc::new(owners),
            groups,
            gradient_types,
            device: parameters.device().clone(),
            compute,
            operations,
            pending: BTreeMap::new(),
            timeout,
            wait_time: Duration::ZERO,
        })
    }

    /// Hands an operation to the thread of the communicator, and returns the channel of its event.
    fn enqueue(
        &self,
        tensors: Vec<(Tensor, usize)>,
        sum: bool,
    ) -> Result<Receiver<Result<CudaEvent, String>>, TrainingError> {
        let after = self
            .compute
            .record_event(None)
            .map_err(|error| nccl_error("the GPU cannot be asked", &error))?;
        let (done, event) = bounded(1);
        let operation = NcclOperation {
            after,
            tensors,
            sum,
            done,
        };
        // Where the thread has ended the channel is closed, which `is_finished` reports.
        let _ = self.operations.send(operation);
        Ok(event)
    }

    /// Whether an operation is finished. Its event is kept in `event` when the thread has sent it.
    fn is_finished(
        rank: usize,
        done: &Receiver<Result<CudaEvent, String>>,
        event: &mut Option<CudaEvent>,
    ) -> Result<bool, TrainingError> {
        let failed = |message: String| TrainingError::Rank { rank, message };
        if event.is_none() {
            match done.try_recv() {
                Ok(Ok(recorded)) => *event = Some(recorded),
                Ok(Err(message)) => return Err(failed(format!("NCCL: {message}"))),
                Err(TryRecvError::Empty) => return Ok(false),
                Err(TryRecvError::Disconnected) => return Err(failed("NCCL: its thread has ended".into())),
            }
        }
        match event {
            Some(event) => event
                .try_is_complete()
                .map_err(|error| failed(format!("the GPU failed in an exchange: {error:?}"))),
            None => Ok(false),
        }
    }

    /// Waits for an operation that all ranks have started.
    fn wait_for(
        &mut self,
        key: CollectiveKey,
        done: &Receiver<Result<CudaEvent, String>>,
        event: &mut Option<CudaEvent>,
    ) -> Result<(), TrainingError> {
        let began = Instant::now();
        while !Self::is_finished(self.control.rank(), done, event)? {
            self.control.check()?;
            if began.elapsed() > self.timeout {
                let message = format!(
                    "NCCL did not end the exchange of {key} within {} s",
                    self.timeout.as_secs_f64()
                );
                self.control.abort(&message);
                return Err(TrainingError::Rank {
                    rank: self.control.rank(),
                    message,
                });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        self.wait_time += began.elapsed();
        Ok(())
    }
}

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
            return Err(nccl_error("no sum is taken there", &key));
        };
        let present = gradients.iter().map(|(id, _)| id.index() as f64).collect();
        let mut gradients: BTreeMap<ParameterId, Tensor> = gradients.into_iter().collect();
        let mut tensors = Vec::new();
        for &id in self.groups.get(&group).map_or(&[][..], Vec::as_slice) {
            let tensor = match gradients.remove(&id) {
                Some(gradient) => gradient.contiguous()?,
                None => {
                    let (shape, dtype) = &self.gradient_types[id.index()];
                    Tensor::zeros(shape, *dtype, &self.device)?
                }
            };
            tensors.push((id, tensor));
        }
        self.control.start_all_gather(key, present)?;
        let to_owner = |(id, tensor): &(ParameterId, Tensor)| (tensor.clone(), self.owners[id.index()]);
        let done = self.enqueue(tensors.iter().map(to_owner).collect(), true)?;
        let pending = PendingReduction {
            tensors,
            done,
            event: None,
            present: None,
        };
        self.pending.insert(key, pending);
        Ok(())
    }

    fn finish_reduce_scatter(
        &mut self,
        key: CollectiveKey,
        wait: bool,
    ) -> Result<Option<ReducedGradients>, TrainingError> {
        let Some(mut pending) = self.pending.remove(&key) else {
            return Ok(Some(Vec::new()));
        };
        if pending.present.is_none() {
            let all = self.control.finish_all_gather(key, wait)?;
            pending.present = all.map(|all| all.into_iter().flatten().map(|index| index as usize).collect());
        }
        let ready = pending.present.is_some()
            && match wait {
                true => {
                    let PendingReduction { done, event, .. } = &mut pending;
                    let done = done.clone();
                    self.wait_for(key, &done, event)?;
                    true
                }
                false => Self::is_finished(self.control.rank(), &pending.done, &mut pending.event)?,
            };
        if !ready {
            self.pending.insert(key, pending);
            return Ok(None);
        }
        let present = pending.present.unwrap_or_default();
        let rank = self.control.rank();
        let own = |id: &ParameterId| self.owners[id.index()] == rank && present.contains(&id.index());
        Ok(Some(pending.tensors.into_iter().filter(|(id, _)| own(id)).collect()))
    }

    fn all_gather(&mut self, key: CollectiveKey, numbers: Vec<f64>) -> Result<Vec<Vec<f64>>, TrainingError> {
        self.control.all_gather(key, numbers)
    }

    /// Through host memory, as these tensors are small.
    fn all_gather_tensors(
        &mut self,
        key: CollectiveKey,
        tensors: Vec<Tensor>,
    ) -> Result<Vec<Vec<Tensor>>, TrainingError> {
        let on = |device: &Device, tensors: Vec<Tensor>| -> Result<Vec<Tensor>, TrainingError> {
            let moved: Result<_, candle_core::Error> = tensors.iter().map(|tensor| tensor.to_device(device)).collect();
            Ok(moved?)
        };
        let all = self.control.all_gather_tensors(key, on(&Device::Cpu, tensors)?)?;
        all.into_iter().map(|tensors| on(&self.device, tensors)).collect()
    }

    fn broadcast_parameters(
        &mut self,
        key: CollectiveKey,
        parameters: &mut Parameters,
        changed: &[ParameterId],
    ) -> Result<(), TrainingError> {
        // So that a rank that does not take part is named.
        self.control.all_gather(key, Vec::new())?;
        let from_owner = |id: &ParameterId| (parameters.get(*id).clone(), self.owners[id.index()]);
        let done = self.enqueue(changed.iter().map(from_owner).collect(), false)?;
        self.wait_for(key, &done, &mut None)
    }

    fn abort(&mut self, message: &str) {
        self.control.abort(message);
    }

    fn take_wait_seconds(&mut self) -> f64 {
        self.control.take_wait_seconds() + std::mem::take(&mut self.wait_time).as_secs_f64()
    }
}

/// The thread that has the communicator. When it ends, the communicator is dropped and aborts what is not finished, so
/// that no GPU waits for a rank that has ended.
fn run_communicator(
    context: &Arc<CudaContext>,
    rank: usize,
    size: usize,
    id: NcclUniqueId,
    operations: &Receiver<NcclOperation>,
) {
    let communicator = context
        .bind_to_thread()
        .and_then(|()| context.new_stream())
        .map_err(|error| format!("the GPU cannot be used: {error:?}"))
        .and_then(|stream| {
            let id = Id::uninit(id.map(|byte| byte as _));
            Comm::from_rank(stream, rank, size, id)
                .map_err(|error| format!("the group did not come together: {error:?}"))
        });
    for operation in operations {
        let outcome = communicator
            .as_ref()
            .map_err(Clone::clone)
            .and_then(|communicator| launch(communicator, &operation).map_err(|error| error.to_string()));
        // The receiver is dropped where the rank has failed.
        let _ = operation.done.send(outcome);
    }
}

/// Starts an operation on the stream of the communicator, and records its event.
fn launch(communicator: &Comm, operation: &NcclOperation) -> candle_core::Result<CudaEvent> {
    let stream = communicator.stream();
    let driver = |error| candle_core::Error::Msg(format!("the GPU cannot be asked: {error:?}"));
    stream.wait(&operation.after).map_err(driver)?;
    group_start().map_err(|error| failed(&error))?;
    let started = operation.tensors.iter().try_for_each(|(tensor, root)| {
        tensor.inplace_op1(&TensorOperation {
            communicator,
            root: *root as i32,
            sum: operation.sum,
        })
    });
    // Also where an operation could not be started: an NCCL group that is started must be ended.
    group_end().map_err(|error| failed(&error))?;
    started?;
    stream.record_event(None).map_err(driver)
}

fn failed(error: &NcclError) -> candle_core::Error {
    candle_core::Error::Msg(format!("an exchange failed: {error:?}"))
}

/// Reduces a tensor to that of `root`, or broadcasts that of `root`, in place.
struct TensorOperation<'a> {
    communicator: &'a Comm,
    root: i32,
    sum: bool,
}

impl TensorOperation<'_> {
    fn apply<T: NcclType + DeviceRepr>(&self, numbers: &mut CudaSlice<T>, layout: &Layout) -> candle_core::Result<()> {
        let Some((from, to)) = layout.contiguous_offsets() else {
            return Err(candle_core::Error::Msg("a tensor that is not contiguous".into()));
        };
        let mut numbers = numbers.slice_mut(from..to);
        let outcome = if self.sum {
            self.communicator
                .reduce_in_place(&mut numbers, &ReduceOp::Sum, self.root)
        } else {
            self.communicator.broadcast_in_place(&mut numbers, self.root)
        };
        outcome.map(drop).map_err(|error| failed(&error))
    }
}

impl InplaceOp1 for TensorOperation<'_> {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        Err(candle_core::Error::Msg("NCCL works on GPUs alone".into()))
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        match &mut storage.slice {
            CudaStorageSlice::F32(numbers) => self.apply(numbers, layout),
            CudaStorageSlice::F64(numbers) => self.apply(numbers, layout),
            CudaStorageSlice::BF16(numbers) => self.apply(numbers, layout),
            CudaStorageSlice::F16(numbers) => self.apply(numbers, layout),
            CudaStorageSlice::I64(numbers) => self.apply(numbers, layout),
            _ => Err(candle_core::Error::Msg(format!(
                "tensors of type {:?} are not exchanged",
                storage.dtype()
            ))),
        }
    }
}
