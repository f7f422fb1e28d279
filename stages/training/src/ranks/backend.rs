//! Which [`Collective`] the ranks of a training use.

use candle_core::Device;
use flow_model::Parameters;

use super::{Collective, HostStaging, LocalCollective, nccl, parameter_owners};
use crate::error::TrainingError;
use crate::trainer::TrainerConfig;

/// NCCL's unique id of a communicator, which all of its ranks are given.
pub(crate) type NcclUniqueId = [u8; 128];

/// A new id where the ranks are to use NCCL: the program has the feature, the model is on a GPU, and updates are not
/// offloaded to host memory. None where the ranks use host memory.
///
/// # Errors
/// Where NCCL's library is not there.
pub(crate) fn new_nccl_id(
    parameters: &Parameters,
    config: &TrainerConfig,
) -> Result<Option<NcclUniqueId>, TrainingError> {
    let device = parameters.device();
    let has_nccl = match device {
        Device::Cpu => nccl::is_chosen(),
        device => device.is_cuda() && cfg!(feature = "nccl"),
    };
    if config.ranks > 1 && has_nccl && !config.offload {
        return nccl::new_id(device).map(Some);
    }
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
        Some(_) if device.is_cuda() && !cfg!(feature = "nccl") => Err(TrainingError::data(
            "process 0 exchanges by NCCL, which this program was built without",
        )),
        Some(id) => {
            let (owners, timeout) = (owners(), config.rank_timeout);
            let gradients = config.reduce_dtype.of(parameters.dtype());
            let name = nccl::device_name(&device)?;
            Ok(Box::new(nccl::NcclCollective::new(
                local, parameters, owners, id, timeout, gradients, &name,
            )?))
        }
    }
}
