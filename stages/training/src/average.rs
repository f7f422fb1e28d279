//! An exponential moving average of the weights, often the better model at the end of a short training.

use std::path::Path;

use flow_kernels::elementwise::blend_all_in_place;
use flow_model::checkpoint::{read_safetensors, write_safetensors};
use flow_model::model::TdtModel;
use flow_model::{Parameter, Parameters};
use flow_nn::lora::module_of;

use crate::error::TrainingError;

/// Exponential moving average of all floating-point tensors of a model, statistics of batch normalisation
/// included, in the type that the model computes in, also of weights that are stored in bf16. Whole numbers (counters) are
/// copied. What never changes (`fixed`) is shared with the model.
pub struct MovingAverage {
    decay: f64,
    parameters: Parameters,
}

impl MovingAverage {
    /// Starts at the given weights.
    pub fn new(decay: f64, parameters: &Parameters) -> Result<Self, TrainingError> {
        Ok(MovingAverage {
            decay,
            parameters: copied(parameters)?,
        })
    }

    /// Adds the weights after optimizer step `step` (the first is 0):
    /// `average += (1 - d) * (weights - average)` with `d = min(decay, (1 + step) / (10 + step))`, so that the first
    /// weights are soon forgotten.
    pub fn update(&mut self, parameters: &Parameters, step: u64) -> Result<(), TrainingError> {
        let decay = self.decay.min((1 + step) as f64 / (10 + step) as f64);
        let is_fixed = fixed(parameters);
        let (floats, whole): (Vec<_>, Vec<_>) = parameters
            .iter()
            .filter(|(_, parameter)| !is_fixed(parameter))
            .partition(|(_, parameter)| parameter.tensor.dtype().is_float());
        for (id, parameter) in whole {
            self.parameters.set(id, parameter.tensor.copy()?)?;
        }
        let pairs: Vec<_> = floats
            .into_iter()
            .map(|(id, parameter)| (self.parameters.get(id), &parameter.tensor))
            .collect();
        Ok(blend_all_in_place(&pairs, 1.0 - decay)?)
    }

    /// The averaged weights in the types in which `parameters` are stored, to compute with. Where these are the same, no
    /// tensor is copied.
    pub fn stored_as(&self, parameters: &Parameters) -> Result<Parameters, TrainingError> {
        let mut stored = parameters.clone();
        for (id, parameter) in self.parameters.iter() {
            stored.set(id, parameter.tensor.clone())?;
        }
        Ok(stored)
    }

    /// Calls `use_model` with the model, which has the averaged weights meanwhile, to be written, and with its own weights.
    pub fn with_average<R>(&mut self, model: &mut TdtModel, use_model: impl FnOnce(&TdtModel, &Parameters) -> R) -> R {
        std::mem::swap(&mut self.parameters, &mut model.parameters);
        let result = use_model(model, &self.parameters);
        std::mem::swap(&mut self.parameters, &mut model.parameters);
        result
    }

    /// Resumes from a checkpoint: `model` was loaded with the averaged weights, all in the type that it computes in, and gets
    /// those that training continues from, which are in the file `live`.
    pub fn resume(decay: f64, model: &mut TdtModel, live: &Path) -> Result<Self, TrainingError> {
        let average = MovingAverage::new(decay, &model.parameters)?;
        let mut missing: Vec<String> = model.parameters.iter().map(|(_, p)| p.name.clone()).collect();
        for (name, tensor) in read_safetensors(live)? {
            let Some(id) = model.parameters.id(&name) else { continue };
            model.parameters.set(id, tensor)?;
            missing.retain(|other| *other != name);
        }
        match missing.first() {
            None => Ok(average),
            Some(name) => Err(TrainingError::data(format!(
                "{}: it has no tensor {name}",
                live.display()
            ))),
        }
    }
}

/// Writes the weights that training continues from.
pub fn write_live(path: &Path, parameters: &Parameters) -> Result<(), TrainingError> {
    let tensors: Vec<_> = parameters.iter().map(|(_, p)| (p.name.as_str(), &p.tensor)).collect();
    Ok(write_safetensors(path, &tensors)?)
}

/// Which parameters no step changes: with LoRA those of the model itself, its statistics included.
pub(crate) fn fixed(parameters: &Parameters) -> impl Fn(&Parameter) -> bool + use<> {
    let has_lora = parameters
        .iter()
        .any(|(_, parameter)| module_of(&parameter.name).is_some());
    move |parameter| has_lora && module_of(&parameter.name).is_none()
}

/// A copy in one type, as the optimizer changes tensors in place.
fn copied(parameters: &Parameters) -> Result<Parameters, TrainingError> {
    let is_fixed = fixed(parameters);
    let shares = parameters.iter().any(|(_, parameter)| is_fixed(parameter));
    let mut copy = match shares {
        true => parameters.clone(),
        false => parameters.copied_to(parameters.device())?,
    };
    for (id, parameter) in parameters.iter() {
        let (tensor, dtype) = (&parameter.tensor, parameters.dtype());
        if tensor.dtype().is_float() && tensor.dtype() != dtype {
            copy.add(&parameter.name, tensor.to_dtype(dtype)?, parameter.trainable);
        } else if shares && !is_fixed(parameter) {
            copy.set(id, tensor.force_contiguous()?)?;
        }
    }
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::*;

    /// With LoRA the average has the model's own weights, not copies of them, and follows the matrices alone.
    #[test]
    fn what_never_changes_is_shared() {
        let ones = Tensor::ones((2, 2), DType::F32, &Device::Cpu).unwrap();
        let mut parameters = Parameters::new(DType::F32, Device::Cpu);
        let base = parameters.add("a.weight", ones.clone(), false);
        let matrix = parameters.add("a.lora_A.weight", ones.clone(), true);
        let mut average = MovingAverage::new(0.5, &parameters).unwrap();
        assert_eq!(average.parameters.get(base).id(), parameters.get(base).id());
        assert_ne!(average.parameters.get(matrix).id(), parameters.get(matrix).id());
        let moved = |parameters: &mut Parameters, value: f64| parameters.set(matrix, (&ones * value).unwrap()).unwrap();
        moved(&mut parameters, 3.0);
        // The decay of a step so late is 0.5.
        average.update(&parameters, 1_000).unwrap();
        let found = average.parameters.get(matrix).to_vec2::<f32>().unwrap();
        assert_eq!(found, [[2.0; 2]; 2]);
        assert_eq!(average.parameters.get(base).to_vec2::<f32>().unwrap(), [[1.0; 2]; 2]);
    }
}
