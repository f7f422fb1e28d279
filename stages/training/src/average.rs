//! An exponential moving average of the weights, often the better model at the end of a short training.

use std::path::Path;

use flow_kernels::elementwise::blend_all_in_place;
use flow_model::Parameters;
use flow_model::checkpoint::{read_safetensors, write_safetensors};
use flow_model::model::TdtModel;

use crate::error::TrainingError;

/// Exponential moving average of all floating-point tensors of a model, statistics of batch normalisation
/// included, in the type that the model computes in, also of weights that are stored in bf16. Whole numbers (counters) are
/// copied.
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
        let (floats, whole): (Vec<_>, Vec<_>) = parameters
            .iter()
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

/// A copy in one type, as the optimizer changes tensors in place.
fn copied(parameters: &Parameters) -> Result<Parameters, TrainingError> {
    let mut copy = parameters.copied_to(parameters.device())?;
    for (_, parameter) in parameters.iter() {
        let (tensor, dtype) = (&parameter.tensor, parameters.dtype());
        if tensor.dtype().is_float() && tensor.dtype() != dtype {
            copy.add(&parameter.name, tensor.to_dtype(dtype)?, parameter.trainable);
        }
    }
    Ok(copy)
}
