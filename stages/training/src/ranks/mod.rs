//! Training on several ranks: replicas of the model, each with a device and a thread of its own, that work on different
//! micro-batches of the same optimizer step.
//!
//! Gradients and the optimizer's state are sharded over the ranks (ZeRO-2): every parameter has one owner, which sums
//! its gradient over all ranks, keeps its moments, updates it and sends the new values to the others. A reduction
//! starts as soon as the backward pass has completed a parameter group, and goes on while the pass works on the group
//! below. Sums are taken in the order of the ranks, so they do not depend on timing.
//!
//! Ranks may be distributed over the processes of a run. Process 0 has the first ranks and writes the checkpoints; the
//! other processes ([`WorkerProcess`]) receive the model and keep no files. Where the processes share the state directory,
//! each of them loads the micro-batches of its own ranks and tells process 0 what it has loaded of a step, which begins
//! when all have; otherwise process 0 sends the micro-batches.

mod backend;
mod codec;
mod collective;
mod device_of_rank;
mod host_staging;
mod loaded_step;
mod local_collective;
pub mod nccl;
mod out_of_memory;
#[cfg(test)]
mod out_of_memory_tests;
mod own_batches;
mod ownership;
mod peer_transport;
mod process_group;
mod rank_thread;
mod remote_ranks;
mod replica;
mod shared_evaluation;
#[cfg(test)]
mod tests;
mod update;
mod worker_process;

pub(crate) use backend::{NcclUniqueId, new_collective, new_nccl_id};
pub use collective::{Collective, CollectiveKey, CollectiveOp, ReducedGradients, SingleRank};
pub(crate) use device_of_rank::open_device;
pub use host_staging::HostStaging;
pub(crate) use loaded_step::{LoadedElsewhere, LoadedShare, ShareOutcome};
pub(crate) use local_collective::GroupWatch;
pub(crate) use local_collective::group_in_process;
pub use local_collective::{LocalCollective, local_group};
pub use out_of_memory::OutOfMemory;
pub(crate) use own_batches::{ArrivedStep, WorkerInput, WorkerInputs};
pub use ownership::parameter_owners;
pub use process_group::ProcessGroup;
pub(crate) use process_group::RankLayout;
pub(crate) use rank_thread::{RankCommand, RankHandle, StateReply, gone, rank_disconnected, rank_thread_pool};
pub(crate) use remote_ranks::{RemoteRanks, RemoteStart};
pub use replica::OPTIMIZER_STEP;
pub use replica::{RankReport, Replica, StepPlan};
pub(crate) use shared_evaluation::{Evaluation, EvaluationReply, Evaluators, NamedWeights};
pub use worker_process::WorkerProcess;

use candle_core::Tensor;
use flow_model::{ParameterId, Parameters};

/// Gives a parameter the values of a tensor on any device. Parameters have at least one dimension.
fn copy_into(parameters: &Parameters, id: ParameterId, values: &Tensor) -> candle_core::Result<()> {
    let values = values.to_device(parameters.device())?;
    parameters.get(id).slice_set(&values, 0, 0)
}
