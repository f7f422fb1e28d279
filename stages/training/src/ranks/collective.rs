//! The collective operations that the ranks of a training use.

use std::fmt;

use candle_core::Tensor;
use flow_model::parameter_groups::StatisticsPass;
use flow_model::{ParameterGroup, ParameterId, Parameters};

use crate::error::TrainingError;

/// Identifies one collective operation of a training. Every rank takes part in each operation once; the order in which
/// a rank starts its operations does not matter, but for NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CollectiveKey {
    /// The optimizer step.
    pub step: u64,
    /// For gradients and batch statistics the index of the rank's micro-batch within the step, for parameters that of the
    /// parameter group in the update; else 0.
    pub round: u32,
    pub op: CollectiveOp,
}

/// The kind of a collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CollectiveOp {
    /// Reduce-scatter of the gradients of a parameter group.
    ReduceGradients(ParameterGroup),
    /// All-gather of loss, gradient norm and whether they are finite.
    GatherMetrics,
    /// All-gather of the statistics of batch normalisation.
    GatherBatchNorm,
    /// Broadcast of updated parameters by their owners.
    BroadcastParameters,
    /// All-gather of the names of the ranks' devices.
    GatherDevices,
    /// All-gather of what the batch normalisation of an encoder layer needs of each rank.
    GatherStatistics(StatisticsPass, usize),
}

impl fmt::Display for CollectiveKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.op {
            CollectiveOp::ReduceGradients(group) => write!(f, "the gradients of {group}, micro-batch {}", self.round)?,
            CollectiveOp::GatherMetrics => write!(f, "loss and gradient norm")?,
            CollectiveOp::GatherBatchNorm => write!(f, "the statistics of batch normalisation")?,
            CollectiveOp::BroadcastParameters => write!(f, "the new parameters")?,
            CollectiveOp::GatherDevices => write!(f, "the names of devices")?,
            CollectiveOp::GatherStatistics(pass, layer) => {
                let pass = match pass {
                    StatisticsPass::Forward => "forward",
                    StatisticsPass::Backward => "backward",
                };
                let round = self.round;
                write!(
                    f,
                    "the batch statistics of encoder layer {layer}, {pass}, micro-batch {round}"
                )?;
            }
        }
        write!(f, ", step {}", self.step)
    }
}

/// Sums of gradients over all ranks, in the order of the parameters.
pub type ReducedGradients = Vec<(ParameterId, Tensor)>;

/// Collective operations of one rank with all others. A call that waits for other ranks does so for at most a set time.
///
/// # Errors
/// All calls fail where a rank failed, or did not take part in time; the error names that rank.
pub trait Collective: Send {
    /// This rank; the first is 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Starts to sum this rank's gradients of a parameter group with those of all other ranks, and returns at once. A
    /// gradient that is missing here counts as zeros. All are of one number type, on all ranks; sums of bf16 may be given
    /// in f32.
    fn start_reduce_scatter(
        &mut self,
        key: CollectiveKey,
        gradients: Vec<(ParameterId, Tensor)>,
    ) -> Result<(), TrainingError>;

    /// The sums of an operation that was started, of the parameters that this rank owns. With `wait` it waits for them;
    /// otherwise None where they are not complete.
    fn finish_reduce_scatter(
        &mut self,
        key: CollectiveKey,
        wait: bool,
    ) -> Result<Option<ReducedGradients>, TrainingError>;

    /// The numbers of all ranks, in the order of the ranks. They need not have the same count.
    fn all_gather(&mut self, key: CollectiveKey, numbers: Vec<f64>) -> Result<Vec<Vec<f64>>, TrainingError>;

    /// The tensors of all ranks, in the order of the ranks. They must not be changed in place afterwards.
    fn all_gather_tensors(
        &mut self,
        key: CollectiveKey,
        tensors: Vec<Tensor>,
    ) -> Result<Vec<Vec<Tensor>>, TrainingError>;

    /// Starts to give the parameters `changed`, the same on all ranks, the values that their owners have, and returns at
    /// once. Until it is finished they must be neither read nor changed.
    fn start_broadcast(
        &mut self,
        key: CollectiveKey,
        parameters: &Parameters,
        changed: &[ParameterId],
    ) -> Result<(), TrainingError>;

    /// Waits for a broadcast that was started with the same parameters.
    fn finish_broadcast(&mut self, key: CollectiveKey, parameters: &Parameters) -> Result<(), TrainingError>;

    /// Makes the calls of all ranks fail with an error that names this one.
    fn abort(&mut self, message: &str);

    /// Seconds spent waiting for other ranks since the last call.
    fn take_wait_seconds(&mut self) -> f64;
}

/// The collective of a training with one rank.
#[derive(Debug, Default)]
pub struct SingleRank;

impl Collective for SingleRank {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn start_reduce_scatter(&mut self, _: CollectiveKey, _: Vec<(ParameterId, Tensor)>) -> Result<(), TrainingError> {
        Ok(())
    }

    fn finish_reduce_scatter(&mut self, _: CollectiveKey, _: bool) -> Result<Option<ReducedGradients>, TrainingError> {
        Ok(Some(Vec::new()))
    }

    fn all_gather(&mut self, _: CollectiveKey, numbers: Vec<f64>) -> Result<Vec<Vec<f64>>, TrainingError> {
        Ok(vec![numbers])
    }

    fn all_gather_tensors(
        &mut self,
        _: CollectiveKey,
        tensors: Vec<Tensor>,
    ) -> Result<Vec<Vec<Tensor>>, TrainingError> {
        Ok(vec![tensors])
    }

    fn start_broadcast(&mut self, _: CollectiveKey, _: &Parameters, _: &[ParameterId]) -> Result<(), TrainingError> {
        Ok(())
    }

    fn finish_broadcast(&mut self, _: CollectiveKey, _: &Parameters) -> Result<(), TrainingError> {
        Ok(())
    }

    fn abort(&mut self, _: &str) {}

    fn take_wait_seconds(&mut self) -> f64 {
        0.0
    }
}
