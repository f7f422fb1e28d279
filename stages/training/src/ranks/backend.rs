//! Which [`Collective`] the ranks of a training use.

use flow_model::Parameters;

#[cfg(feature = "nccl")]
use super::nccl;
use super::{Collective, HostStaging, LocalCollective, parameter_owners};
use crate::error::TrainingError;
use crate::trainer::TrainerConfig;

/// NCCL's unique id of a communicator, which all of its ranks are given.
pub(crate) type NcclUniqueId = [u8; 128];

/// A new id where the ranks are to use NCCL: the program has the feature, each process has one rank (`local_ranks` is
/// 1), the model is on a GPU, and updates are not offloaded to host memory. None where the ranks use host memory.
pub(crate) fn new_nccl_id(
    parameters: &Parameters,
    config: &TrainerConfig,
    local_ranks: usize,
) -> Result<Option<NcclUniqueId>, TrainingError> {
    #[cfg(feature = "nccl")]
    if config.ranks > 1 && local_ranks == 1 && parameters.device().is_cuda() && !config.offload {
        return nccl::new_id().map(Some);
    }
    let _ = (parameters, config, local_ranks);
    Ok(None)
}

/// The collective of a rank: NCCL where there is an id, else `local`, with copies in host memory if the model is on a
/// GPU.
///
/// # Errors
/// Where process 0 uses NCCL and this program does not have it.
pub(crate) fn new_collective(
    local: LocalCollective,
    parameters: &Parameters,
    config: &TrainerConfig,
    nccl_id: Option<NcclUniqueId>,
) -> Result<Box<dyn Collective>, TrainingError> {
    let device = parameters.device().clone();
    let owners = || parameter_owners(parameters, local.size());
    match nccl_id {
        None if config.offload => Ok(Box::new(HostStaging::new(local, device, None))),
        None if device.is_cpu() => Ok(Box::new(local)),
        None => {
            let owners = owners();
            Ok(Box::new(HostStaging::new(local, device, Some(owners))))
        }
        #[cfg(feature = "nccl")]
        Some(id) => {
            let (owners, timeout) = (owners(), config.rank_timeout);
            Ok(Box::new(nccl::NcclCollective::new(
                local, parameters, owners, id, timeout,
            )?))
        }
        #[cfg(not(feature = "nccl"))]
        Some(_) => Err(TrainingError::Data {
            message: "process 0 exchanges by NCCL, which this program was built without".into(),
        }),
    }
}
