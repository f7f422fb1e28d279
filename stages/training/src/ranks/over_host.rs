//! Ranks whose tensors lie on devices of their own, over a collective that works in host memory.

use candle_core::{Device, Tensor};
use flow_model::{ParameterId, Parameters};

use super::{Collective, Place, Sums};
use crate::error::TrainingError;

/// Hands copies in host memory to another collective, and brings what comes back to this rank's device.
pub struct OverHost<C> {
    inner: C,
    device: Device,
    /// The owner of each parameter. None where sums and parameters stay in host memory, since they are updated there.
    owners: Option<Vec<usize>>,
    /// The parameters as they were exchanged last.
    host: Option<Parameters>,
}

impl<C: Collective> OverHost<C> {
    /// `owners` says which rank owns which parameter; none where parameters are updated in host memory.
    pub fn new(inner: C, device: Device, owners: Option<Vec<usize>>) -> Self {
        OverHost {
            inner,
            device,
            owners,
            host: None,
        }
    }

    fn to_device(&self, tensors: Vec<Tensor>) -> Result<Vec<Tensor>, TrainingError> {
        let moved = tensors.iter().map(|tensor| tensor.to_device(&self.device));
        Ok(moved.collect::<candle_core::Result<_>>()?)
    }
}

impl<C: Collective> Collective for OverHost<C> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn start_sum(&mut self, place: Place, gradients: Vec<(ParameterId, Tensor)>) -> Result<(), TrainingError> {
        let host = gradients
            .into_iter()
            .map(|(id, gradient)| Ok((id, gradient.to_device(&Device::Cpu)?)))
            .collect::<Result<_, TrainingError>>()?;
        self.inner.start_sum(place, host)
    }

    fn finish_sum(&mut self, place: Place, wait: bool) -> Result<Option<Sums>, TrainingError> {
        let Some(sums) = self.inner.finish_sum(place, wait)? else {
            return Ok(None);
        };
        if self.owners.is_none() {
            return Ok(Some(sums));
        }
        let moved = sums.into_iter().map(|(id, sum)| Ok((id, sum.to_device(&self.device)?)));
        moved.collect::<Result<_, TrainingError>>().map(Some)
    }

    fn gather(&mut self, place: Place, numbers: Vec<f64>) -> Result<Vec<Vec<f64>>, TrainingError> {
        self.inner.gather(place, numbers)
    }

    fn gather_tensors(&mut self, place: Place, tensors: Vec<Tensor>) -> Result<Vec<Vec<Tensor>>, TrainingError> {
        let host = tensors.iter().map(|tensor| tensor.to_device(&Device::Cpu));
        let host = host.collect::<candle_core::Result<_>>()?;
        let all = self.inner.gather_tensors(place, host)?;
        all.into_iter().map(|tensors| self.to_device(tensors)).collect()
    }

    fn spread(
        &mut self,
        place: Place,
        parameters: &mut Parameters,
        changed: &[ParameterId],
    ) -> Result<(), TrainingError> {
        let Some(owners) = &self.owners else {
            return self.inner.spread(place, parameters, changed);
        };
        let rank = self.inner.rank();
        let (own, others): (Vec<ParameterId>, Vec<ParameterId>) =
            changed.iter().partition(|id| owners[id.index()] == rank);
        let host = match &mut self.host {
            None => self.host.insert(parameters.copied_to(&Device::Cpu)?),
            Some(host) => {
                for id in own {
                    host.overwrite(id, parameters.get(id))?;
                }
                host
            }
        };
        self.inner.spread(place, host, changed)?;
        for id in others {
            parameters.overwrite(id, host.get(id))?;
        }
        Ok(())
    }

    fn fail(&mut self, message: &str) {
        self.inner.fail(message);
    }

    fn waited(&mut self) -> f64 {
        self.inner.waited()
    }
}
