//! A collective for tensors on GPUs, over one for host memory: tensors are copied to host memory and back.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use flow_kernels::device::moved;
use flow_model::{ParameterId, Parameters};

use super::{Collective, CollectiveKey, ReducedGradients, copy_into};
use crate::error::TrainingError;

/// Copies tensors to host memory for another collective, and its results to the device of this rank.
pub struct HostStaging<C> {
    inner: C,
    device: Device,
    /// The owner of each parameter, by index. None where sums and parameters stay in host memory, as updates are made
    /// there.
    owners: Option<Vec<usize>>,
    /// Copies of the parameters as of the last broadcast.
    host: Option<Parameters>,
    /// The parameters of other ranks in each broadcast that is not finished.
    broadcasts: BTreeMap<CollectiveKey, Vec<ParameterId>>,
}

impl<C: Collective> HostStaging<C> {
    /// `owners` as [`super::parameter_owners`] gives them; none where parameters are updated in host memory.
    pub fn new(inner: C, device: Device, owners: Option<Vec<usize>>) -> Self {
        HostStaging {
            inner,
            device,
            owners,
            host: None,
            broadcasts: BTreeMap::new(),
        }
    }

    fn to_device(&self, tensors: Vec<Tensor>) -> Result<Vec<Tensor>, TrainingError> {
        let moved = tensors.iter().map(|tensor| tensor.to_device(&self.device));
        Ok(moved.collect::<candle_core::Result<_>>()?)
    }
}

impl<C: Collective> Collective for HostStaging<C> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn start_reduce_scatter(
        &mut self,
        key: CollectiveKey,
        gradients: Vec<(ParameterId, Tensor)>,
    ) -> Result<(), TrainingError> {
        let host = gradients
            .into_iter()
            .map(|(id, gradient)| Ok((id, moved(&gradient, &Device::Cpu)?)))
            .collect::<Result<_, TrainingError>>()?;
        self.inner.start_reduce_scatter(key, host)
    }

    fn finish_reduce_scatter(
        &mut self,
        key: CollectiveKey,
        wait: bool,
    ) -> Result<Option<ReducedGradients>, TrainingError> {
        let Some(sums) = self.inner.finish_reduce_scatter(key, wait)? else {
            return Ok(None);
        };
        if self.owners.is_none() {
            return Ok(Some(sums));
        }
        let moved = sums.into_iter().map(|(id, sum)| Ok((id, sum.to_device(&self.device)?)));
        moved.collect::<Result<_, TrainingError>>().map(Some)
    }

    fn all_gather(&mut self, key: CollectiveKey, numbers: Vec<f64>) -> Result<Vec<Vec<f64>>, TrainingError> {
        self.inner.all_gather(key, numbers)
    }

    fn all_gather_tensors(
        &mut self,
        key: CollectiveKey,
        tensors: Vec<Tensor>,
    ) -> Result<Vec<Vec<Tensor>>, TrainingError> {
        let host = tensors.iter().map(|tensor| moved(tensor, &Device::Cpu));
        let host = host.collect::<flow_kernels::Result<_>>()?;
        let all = self.inner.all_gather_tensors(key, host)?;
        all.into_iter().map(|tensors| self.to_device(tensors)).collect()
    }

    fn start_broadcast(
        &mut self,
        key: CollectiveKey,
        parameters: &Parameters,
        changed: &[ParameterId],
    ) -> Result<(), TrainingError> {
        let Some(owners) = &self.owners else {
            return self.inner.start_broadcast(key, parameters, changed);
        };
        let rank = self.inner.rank();
        let (own, others): (Vec<ParameterId>, Vec<ParameterId>) =
            changed.iter().partition(|id| owners[id.index()] == rank);
        let host = match &mut self.host {
            None => self.host.insert(parameters.copied_to(&Device::Cpu)?),
            Some(host) => {
                for id in own {
                    copy_into(host, id, parameters.get(id))?;
                }
                host
            }
        };
        self.inner.start_broadcast(key, host, changed)?;
        self.broadcasts.insert(key, others);
        Ok(())
    }

    fn finish_broadcast(&mut self, key: CollectiveKey, parameters: &Parameters) -> Result<(), TrainingError> {
        let Some(host) = &self.host else {
            return self.inner.finish_broadcast(key, parameters);
        };
        self.inner.finish_broadcast(key, host)?;
        for id in self.broadcasts.remove(&key).unwrap_or_default() {
            copy_into(parameters, id, host.get(id))?;
        }
        Ok(())
    }

    fn abort(&mut self, message: &str) {
        self.inner.abort(message);
    }

    fn take_wait_seconds(&mut self) -> f64 {
        self.inner.take_wait_seconds()
    }
}
