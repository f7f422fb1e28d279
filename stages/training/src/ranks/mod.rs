//! Training on several ranks: replicas of the model, each with a device and a thread of its own, that work on different
//! micro-batches of the same optimizer step.
//!
//! Gradients and the optimizer's state are shared out over the ranks (ZeRO-2): every parameter has one owner, which
//! sums its gradient over all ranks, keeps its moments, updates it and gives the new values to the others. A sum is
//! begun as soon as the backward pass has completed a part of the model, and goes on while the pass works on the part
//! below. Sums are taken in the order of the ranks, so they do not depend on timing.
//!
//! Ranks may be spread over the processes of a run. Process 0 has the first ones, feeds all of them and writes the
//! checkpoints; the others have what it sends them ([`serve`]) and keep nothing.

mod elsewhere;
mod joined;
mod meeting;
#[cfg(feature = "nccl")]
mod nccl;
mod other;
mod over_host;
mod remote;
mod replica;
mod update;
mod wire;

use std::fmt;
use std::sync::Arc;

use candle_core::Tensor;
use flow_model::{ParameterId, Parameters, Part};
use flow_runtime::processes::Processes;

use crate::error::TrainingError;
use crate::trainer::TrainerConfig;

pub(crate) use elsewhere::share;
pub use joined::{Joined, serve};
pub(crate) use meeting::members_among;
pub use meeting::{Member, members};
pub(crate) use other::{OtherRank, Work, gone, pool};
pub use over_host::OverHost;
pub(crate) use remote::{Begin, Remote};
pub use replica::{RankReport, Replica, StepPlan};

/// The failpoint before each optimizer step of a rank, with the numbers of the rank and the step.
pub const OPTIMIZER_STEP: &str = "optimizer-step";

/// The processes that ranks are shared out over, as process 0 sees them.
#[derive(Clone, Copy)]
pub struct Among<'a> {
    pub processes: &'a Arc<Processes>,
    /// Memory that a rank needs, where it was found out; the others look whether they have it.
    pub rank_bytes: Option<u64>,
}

/// Says where the ranks of a group meet that exchange by NCCL.
pub(crate) type NcclId = [u8; 128];

/// A group that exchanges by NCCL, where this program can, and each process has one rank, on a GPU of its own. Others meet
/// in memory, and go to other processes by way of the host's memory, as do those whose updates are offloaded to it.
pub(crate) fn nccl_group(
    parameters: &Parameters,
    config: &TrainerConfig,
    here: usize,
) -> Result<Option<NcclId>, TrainingError> {
    #[cfg(feature = "nccl")]
    if config.ranks > 1 && here == 1 && parameters.device().is_cuda() && !config.offload {
        return nccl::new_id().map(Some);
    }
    let _ = (parameters, config, here);
    Ok(None)
}

/// The way in which a rank meets the others.
pub(crate) fn collective(
    member: Member,
    parameters: &Parameters,
    config: &TrainerConfig,
    nccl: Option<NcclId>,
) -> Result<Box<dyn Collective>, TrainingError> {
    let device = parameters.device().clone();
    let owners = || owners(parameters, member.size());
    match nccl {
        None if config.offload => Ok(Box::new(OverHost::new(member, device, None))),
        None if device.is_cpu() => Ok(Box::new(member)),
        None => {
            let owners = owners();
            Ok(Box::new(OverHost::new(member, device, Some(owners))))
        }
        #[cfg(feature = "nccl")]
        Some(id) => {
            let (owners, timeout) = (owners(), config.rank_timeout);
            Ok(Box::new(nccl::NcclMember::new(
                member, parameters, owners, id, timeout,
            )?))
        }
        #[cfg(not(feature = "nccl"))]
        Some(_) => Err(TrainingError::Data {
            message: "process 0 exchanges by NCCL, which this program was built without".into(),
        }),
    }
}

/// Where ranks meet. Every rank comes to the same places, once each; in which order does not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The optimizer step.
    pub step: u64,
    /// Which of a rank's micro-batches within the step.
    pub round: u32,
    pub what: What,
}

/// What the ranks meet for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// The sum of the gradients of a part.
    Gradients(Part),
    /// Loss, gradient norm, and whether anything is wrong with them.
    Figures,
    /// Statistics of batch normalisation.
    Statistics,
    /// New values of the parameters.
    Parameters,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.what {
            What::Gradients(part) => write!(f, "the gradients of {part}, micro-batch {}", self.round)?,
            What::Figures => write!(f, "loss and gradient norm")?,
            What::Statistics => write!(f, "the statistics of batch normalisation")?,
            What::Parameters => write!(f, "the new parameters")?,
        }
        write!(f, ", step {}", self.step)
    }
}

/// What ranks do together. A call that needs other ranks waits for them, at most for a set time; it fails when one of
/// them failed, or did not come.
pub trait Collective: Send {
    /// This rank; the first is 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Hands over this rank's gradients of a part, to be summed, and returns at once. A gradient that is missing here
    /// counts as zeros.
    fn start_sum(&mut self, place: Place, gradients: Vec<(ParameterId, Tensor)>) -> Result<(), TrainingError>;

    /// The sums of those parameters that this rank owns, in the order of the parameters. None if not `wait` and they are
    /// not there yet.
    fn finish_sum(&mut self, place: Place, wait: bool) -> Result<Option<Sums>, TrainingError>;

    /// The numbers that every rank gives, in the order of the ranks.
    fn gather(&mut self, place: Place, numbers: Vec<f64>) -> Result<Vec<Vec<f64>>, TrainingError>;

    /// The tensors that every rank gives, in the order of the ranks. They must not be changed in place afterwards.
    fn gather_tensors(&mut self, place: Place, tensors: Vec<Tensor>) -> Result<Vec<Vec<Tensor>>, TrainingError>;

    /// Gives these parameters, the same on all ranks, the values that their owners have.
    fn spread(
        &mut self,
        place: Place,
        parameters: &mut Parameters,
        changed: &[ParameterId],
    ) -> Result<(), TrainingError>;

    /// Lets all ranks know that this one cannot go on.
    fn fail(&mut self, message: &str);

    /// Seconds spent waiting for other ranks since this was asked last.
    fn waited(&mut self) -> f64;
}

/// Sums of gradients.
pub type Sums = Vec<(ParameterId, Tensor)>;

/// The owner of every parameter among `ranks`: the one that owns the fewest elements so far, the first of them where
/// several do. Buffers have no owner; what stands for them is 0.
pub fn owners(parameters: &Parameters, ranks: usize) -> Vec<usize> {
    let mut owned = vec![0u64; ranks.max(1)];
    parameters
        .iter()
        .map(|(_, parameter)| {
            if !parameter.trainable {
                return 0;
            }
            let owner = (0..owned.len()).min_by_key(|&rank| owned[rank]).unwrap_or(0);
            owned[owner] += parameter.tensor.elem_count() as u64;
            owner
        })
        .collect()
}

/// The one rank of a training without others.
#[derive(Debug, Default)]
pub struct Alone;

impl Collective for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn start_sum(&mut self, _: Place, _: Vec<(ParameterId, Tensor)>) -> Result<(), TrainingError> {
        Ok(())
    }

    fn finish_sum(&mut self, _: Place, _: bool) -> Result<Option<Sums>, TrainingError> {
        Ok(Some(Vec::new()))
    }

    fn gather(&mut self, _: Place, numbers: Vec<f64>) -> Result<Vec<Vec<f64>>, TrainingError> {
        Ok(vec![numbers])
    }

    fn gather_tensors(&mut self, _: Place, tensors: Vec<Tensor>) -> Result<Vec<Vec<Tensor>>, TrainingError> {
        Ok(vec![tensors])
    }

    fn spread(&mut self, _: Place, _: &mut Parameters, _: &[ParameterId]) -> Result<(), TrainingError> {
        Ok(())
    }

    fn fail(&mut self, _: &str) {}

    fn waited(&mut self) -> f64 {
        0.0
    }
}

#[cfg(test)]
mod tests;
