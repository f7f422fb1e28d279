//! Ranks whose tensors are on GPUs and go from one to the other by NVIDIA's NCCL: within a machine over NVLink or PCIe,
//! between machines over the network, without a way through host memory.
//!
//! NCCL moves what is large: sums of gradients, and parameters. Numbers, and all that has to do with failure, go through the
//! [`Member`] that every rank has: a rank says there that it has come to a place, so whoever does not come is named, and a
//! rank that waits for NCCL does so no longer than for another rank. NCCL itself would wait for ever.
//!
//! What is the same, and what is not, beside ranks that meet in memory: which sums are taken, of which ranks, and who owns
//! what. Parameters are copied, so all ranks hold the same bits of them. But the order in which a sum is taken is NCCL's: it
//! goes around a ring or up a tree that follows from the machine, its links, the size of the tensor and NCCL's version, and
//! not from the numbers of the ranks. As long as NCCL chooses the same way, on the same machines, a sum is the same again; it
//! promises nowhere to do so. So a run with NCCL gives the bits of no other set-up, but for two ranks, whose sums are the same
//! in either order.
//!
//! This was never run: it is compiled against NCCL's interface, and what it rests on (the table, the order of exchanges) is
//! tested with ranks on the CPU.
//!
//! NCCL asks that all ranks of a group ask for the same exchanges in the same order. They do: a backward pass completes parts
//! in the order of [`Part::in_order`], a rank without a micro-batch hands over nothing in that order too, and what comes at
//! the end of a step comes in one order.

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
use flow_model::{ParameterId, Parameters, Part};

use super::{Collective, Member, NcclId, Place, Sums, What};
use crate::error::TrainingError;

/// How often a rank looks whether NCCL is done.
const LOOK: Duration = Duration::from_micros(200);

/// What the ranks of one group have in common: 128 bytes that say where they meet.
pub(super) fn new_id() -> Result<NcclId, TrainingError> {
    let id = Id::new().map_err(|error| broken("a group cannot be made", &error))?;
    Ok(id.internal().map(|byte| byte as u8))
}

fn broken(what: &str, error: &dyn std::fmt::Debug) -> TrainingError {
    TrainingError::Data {
        message: format!("NCCL: {what}: {error:?}"),
    }
}

/// One rank of a group whose ranks have a GPU each.
pub(super) struct NcclMember {
    /// Where the ranks tell each other that they have come.
    table: Member,
    owners: Arc<Vec<usize>>,
    /// The parameters of each part, in order.
    parts: BTreeMap<Part, Vec<ParameterId>>,
    /// By index: what a gradient that is missing here looks like.
    zeros: Vec<(Shape, candle_core::DType)>,
    device: Device,
    /// Where the model computes.
    compute: Arc<CudaStream>,
    jobs: Sender<Job>,
    under_way: BTreeMap<Place, UnderWay>,
    timeout: Duration,
    waited: Duration,
}

/// An exchange that NCCL is to do, on the thread that has the group.
struct Job {
    /// What it works on is there once this has happened.
    after: CudaEvent,
    /// With the rank that receives a sum, or whose values all get.
    tensors: Vec<(Tensor, usize)>,
    sum: bool,
    done: Sender<Result<CudaEvent, String>>,
}

/// Gradients that are being summed. They live until that has happened: freed before, their memory would be used for
/// something else.
struct UnderWay {
    tensors: Vec<(ParameterId, Tensor)>,
    done: Receiver<Result<CudaEvent, String>>,
    event: Option<CudaEvent>,
    /// Which gradients some rank has, once all have come.
    present: Option<BTreeSet<usize>>,
}

impl NcclMember {
    /// Begins to join the group; whether that goes well shows at the first exchange.
    pub fn new(
        table: Member,
        parameters: &Parameters,
        owners: Vec<usize>,
        id: NcclId,
        timeout: Duration,
    ) -> Result<NcclMember, TrainingError> {
        let Device::Cuda(cuda) = parameters.device() else {
            return Err(broken("the model is on no GPU", &parameters.device()));
        };
        let compute = cuda.cuda_stream();
        let mut parts: BTreeMap<Part, Vec<ParameterId>> = BTreeMap::new();
        let mut zeros = Vec::with_capacity(parameters.len());
        for (id, parameter) in parameters.iter() {
            if parameter.trainable {
                parts.entry(Part::of(&parameter.name)).or_default().push(id);
            }
            // Gradients are in the type that is computed in, also of parameters that are stored in a shorter one.
            zeros.push((parameter.tensor.shape().clone(), parameters.dtype()));
        }
        let (jobs, take) = unbounded();
        let (rank, size, context) = (table.rank(), table.size(), compute.context().clone());
        std::thread::Builder::new()
            .name(format!("nccl-{rank}"))
            .spawn(move || exchange(&context, rank, size, id, &take))
            .map_err(|e| TrainingError::Rank {
                rank,
                message: format!("its thread for NCCL cannot be started: {e}"),
            })?;
        Ok(NcclMember {
            table,
            owners: Arc::new(owners),
            parts,
            zeros,
            device: parameters.device().clone(),
            compute,
            jobs,
            under_way: BTreeMap::new(),
            timeout,
            waited: Duration::ZERO,
        })
    }

    fn begin(
        &self,
        tensors: Vec<(Tensor, usize)>,
        sum: bool,
    ) -> Result<Receiver<Result<CudaEvent, String>>, TrainingError> {
        let after = self
            .compute
            .record_event(None)
            .map_err(|error| broken("the GPU cannot be asked", &error))?;
        let (done, told) = bounded(1);
        let job = Job {
            after,
            tensors,
            sum,
            done,
        };
        // Where the thread is gone, nothing will be told, which `look` finds out.
        let _ = self.jobs.send(job);
        Ok(told)
    }

    /// The event that an exchange is done with, if it has happened.
    fn look(
        rank: usize,
        done: &Receiver<Result<CudaEvent, String>>,
        event: &mut Option<CudaEvent>,
    ) -> Result<bool, TrainingError> {
        let failed = |message: String| TrainingError::Rank { rank, message };
        if event.is_none() {
            match done.try_recv() {
                Ok(Ok(come)) => *event = Some(come),
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

    /// Waits for an exchange into which all ranks have gone.
    fn wait(
        &mut self,
        place: Place,
        done: &Receiver<Result<CudaEvent, String>>,
        event: &mut Option<CudaEvent>,
    ) -> Result<(), TrainingError> {
        let began = Instant::now();
        while !Self::look(self.table.rank(), done, event)? {
            self.table.check()?;
            if began.elapsed() > self.timeout {
                let message = format!(
                    "NCCL did not end the exchange of {place} within {} s",
                    self.timeout.as_secs_f64()
                );
                self.table.fail(&message);
                return Err(TrainingError::Rank {
                    rank: self.table.rank(),
                    message,
                });
            }
            std::thread::sleep(LOOK);
        }
        self.waited += began.elapsed();
        Ok(())
    }
}

impl Collective for NcclMember {
    fn rank(&self) -> usize {
        self.table.rank()
    }

    fn size(&self) -> usize {
        self.table.size()
    }

    fn start_sum(&mut self, place: Place, gradients: Vec<(ParameterId, Tensor)>) -> Result<(), TrainingError> {
        let What::Gradients(part) = place.what else {
            return Err(broken("no sum is taken there", &place));
        };
        let present = gradients.iter().map(|(id, _)| id.index() as f64).collect();
        let mut gradients: BTreeMap<ParameterId, Tensor> = gradients.into_iter().collect();
        let mut tensors = Vec::new();
        for &id in self.parts.get(&part).map_or(&[][..], Vec::as_slice) {
            let tensor = match gradients.remove(&id) {
                Some(gradient) => gradient.contiguous()?,
                None => {
                    let (shape, dtype) = &self.zeros[id.index()];
                    Tensor::zeros(shape, *dtype, &self.device)?
                }
            };
            tensors.push((id, tensor));
        }
        self.table.announce(place, present)?;
        let to_owner = |(id, tensor): &(ParameterId, Tensor)| (tensor.clone(), self.owners[id.index()]);
        let done = self.begin(tensors.iter().map(to_owner).collect(), true)?;
        let under_way = UnderWay {
            tensors,
            done,
            event: None,
            present: None,
        };
        self.under_way.insert(place, under_way);
        Ok(())
    }

    fn finish_sum(&mut self, place: Place, wait: bool) -> Result<Option<Sums>, TrainingError> {
        let Some(mut under_way) = self.under_way.remove(&place) else {
            return Ok(Some(Vec::new()));
        };
        if under_way.present.is_none() {
            let all = self.table.answers(place, wait)?;
            under_way.present = all.map(|all| all.into_iter().flatten().map(|index| index as usize).collect());
        }
        let ready = under_way.present.is_some()
            && match wait {
                true => {
                    let UnderWay { done, event, .. } = &mut under_way;
                    let done = done.clone();
                    self.wait(place, &done, event)?;
                    true
                }
                false => Self::look(self.table.rank(), &under_way.done, &mut under_way.event)?,
            };
        if !ready {
            self.under_way.insert(place, under_way);
            return Ok(None);
        }
        let present = under_way.present.unwrap_or_default();
        let rank = self.table.rank();
        let own = |id: &ParameterId| self.owners[id.index()] == rank && present.contains(&id.index());
        Ok(Some(under_way.tensors.into_iter().filter(|(id, _)| own(id)).collect()))
    }

    fn gather(&mut self, place: Place, numbers: Vec<f64>) -> Result<Vec<Vec<f64>>, TrainingError> {
        self.table.gather(place, numbers)
    }

    /// Through host memory: what is gathered is small.
    fn gather_tensors(&mut self, place: Place, tensors: Vec<Tensor>) -> Result<Vec<Vec<Tensor>>, TrainingError> {
        let on = |device: &Device, tensors: Vec<Tensor>| -> Result<Vec<Tensor>, TrainingError> {
            let moved: Result<_, candle_core::Error> = tensors.iter().map(|tensor| tensor.to_device(device)).collect();
            Ok(moved?)
        };
        let all = self.table.gather_tensors(place, on(&Device::Cpu, tensors)?)?;
        all.into_iter().map(|tensors| on(&self.device, tensors)).collect()
    }

    fn spread(
        &mut self,
        place: Place,
        parameters: &mut Parameters,
        changed: &[ParameterId],
    ) -> Result<(), TrainingError> {
        // So that whoever does not come is named.
        self.table.gather(place, Vec::new())?;
        let from_owner = |id: &ParameterId| (parameters.get(*id).clone(), self.owners[id.index()]);
        let done = self.begin(changed.iter().map(from_owner).collect(), false)?;
        self.wait(place, &done, &mut None)
    }

    fn fail(&mut self, message: &str) {
        self.table.fail(message);
    }

    fn waited(&mut self) -> f64 {
        self.table.waited() + std::mem::take(&mut self.waited).as_secs_f64()
    }
}

/// The thread that has the group. What is left when it ends is broken off, so that no GPU waits for one that is gone.
fn exchange(context: &Arc<CudaContext>, rank: usize, size: usize, id: NcclId, jobs: &Receiver<Job>) {
    let joined = context
        .bind_to_thread()
        .and_then(|()| context.new_stream())
        .map_err(|error| format!("the GPU cannot be used: {error:?}"))
        .and_then(|stream| {
            let id = Id::uninit(id.map(|byte| byte as _));
            Comm::from_rank(stream, rank, size, id)
                .map_err(|error| format!("the group did not come together: {error:?}"))
        });
    for job in jobs {
        let outcome = joined
            .as_ref()
            .map_err(Clone::clone)
            .and_then(|group| carry_out(group, &job).map_err(|error| error.to_string()));
        // A rank that failed waits for nothing any more.
        let _ = job.done.send(outcome);
    }
}

fn carry_out(group: &Comm, job: &Job) -> candle_core::Result<CudaEvent> {
    let stream = group.stream();
    let driver = |error| candle_core::Error::Msg(format!("the GPU cannot be asked: {error:?}"));
    stream.wait(&job.after).map_err(driver)?;
    group_start().map_err(|error| failed(&error))?;
    let begun = job.tensors.iter().try_for_each(|(tensor, root)| {
        tensor.inplace_op1(&OnTensor {
            group,
            root: *root as i32,
            sum: job.sum,
        })
    });
    // Also where one could not be begun: a group that is open stays open.
    group_end().map_err(|error| failed(&error))?;
    begun?;
    stream.record_event(None).map_err(driver)
}

fn failed(error: &NcclError) -> candle_core::Error {
    candle_core::Error::Msg(format!("an exchange failed: {error:?}"))
}

/// Sums a tensor over all ranks into that of `root`, or gives all the values of `root`'s.
struct OnTensor<'a> {
    group: &'a Comm,
    root: i32,
    sum: bool,
}

impl OnTensor<'_> {
    fn on<T: NcclType + DeviceRepr>(&self, numbers: &mut CudaSlice<T>, layout: &Layout) -> candle_core::Result<()> {
        let Some((from, to)) = layout.contiguous_offsets() else {
            return Err(candle_core::Error::Msg("a tensor that is not contiguous".into()));
        };
        let mut numbers = numbers.slice_mut(from..to);
        let outcome = if self.sum {
            self.group.reduce_in_place(&mut numbers, &ReduceOp::Sum, self.root)
        } else {
            self.group.broadcast_in_place(&mut numbers, self.root)
        };
        outcome.map(drop).map_err(|error| failed(&error))
    }
}

impl InplaceOp1 for OnTensor<'_> {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        Err(candle_core::Error::Msg("NCCL works on GPUs alone".into()))
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        match &mut storage.slice {
            CudaStorageSlice::F32(numbers) => self.on(numbers, layout),
            CudaStorageSlice::F64(numbers) => self.on(numbers, layout),
            CudaStorageSlice::BF16(numbers) => self.on(numbers, layout),
            CudaStorageSlice::F16(numbers) => self.on(numbers, layout),
            CudaStorageSlice::I64(numbers) => self.on(numbers, layout),
            _ => Err(candle_core::Error::Msg(format!(
                "tensors of type {:?} are not exchanged",
                storage.dtype()
            ))),
        }
    }
}
