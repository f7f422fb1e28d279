//! A moving average of the weights, which is often the better model at the end of a short training.

use std::path::Path;

use flow_kernels::elementwise::blend_in_place;
use flow_model::Parameters;
use flow_model::checkpoint::{read_safetensors, write_safetensors};
use flow_model::model::TdtModel;

use crate::error::TrainingError;

/// Exponential moving average of all floating-point tensors of a model, statistics of batch normalisation
/// included. Whole numbers (counters) are copied.
pub struct Average {
    decay: f64,
    parameters: Parameters,
}

impl Average {
    /// Begins at the present weights.
    pub fn new(decay: f64, parameters: &Parameters) -> Result<Self, TrainingError> {
        Ok(Average {
            decay,
            parameters: copied(parameters)?,
        })
    }

    /// Takes in the weights after optimizer step `step` (the first is 0):
    /// `average += (1 - d) * (weights - average)` with `d = min(decay, (1 + step) / (10 + step))`, so that the first
    /// weights are soon forgotten.
    pub fn update(&mut self, parameters: &Parameters, step: u64) -> Result<(), TrainingError> {
        let decay = self.decay.min((1 + step) as f64 / (10 + step) as f64);
        for (id, parameter) in parameters.iter() {
            if parameter.tensor.dtype().is_float() {
                blend_in_place(self.parameters.get(id), &parameter.tensor, 1.0 - decay)?;
            } else {
                self.parameters.set(id, parameter.tensor.copy()?)?;
            }
        }
        Ok(())
    }

    /// Lends the model with the averaged weights in place of its own, which `use_model` gets beside it.
    pub fn with<R>(&mut self, model: &mut TdtModel, use_model: impl FnOnce(&TdtModel, &Parameters) -> R) -> R {
        std::mem::swap(&mut self.parameters, &mut model.parameters);
        let result = use_model(model, &self.parameters);
        std::mem::swap(&mut self.parameters, &mut model.parameters);
        result
    }

    /// Goes on from a checkpoint: `model` holds the averaged weights as loaded, and gets those that training
    /// left off with, which are in the file `live`.
    pub fn resume(decay: f64, model: &mut TdtModel, live: &Path) -> Result<Self, TrainingError> {
        let average = Average::new(decay, &model.parameters)?;
        let mut missing: Vec<String> = model.parameters.iter().map(|(_, p)| p.name.clone()).collect();
        for (name, tensor) in read_safetensors(live)? {
            let Some(id) = model.parameters.id(&name) else { continue };
            model.parameters.set(id, tensor)?;
            missing.retain(|other| *other != name);
        }
        match missing.first() {
            None => Ok(average),
            Some(name) => Err(TrainingError::Data {
                message: format!("{}: it has no tensor {name}", live.display()),
            }),
        }
    }
}

/// Writes the weights that training goes on from.
pub fn write_live(path: &Path, parameters: &Parameters) -> Result<(), TrainingError> {
    let tensors: Vec<_> = parameters.iter().map(|(_, p)| (p.name.as_str(), &p.tensor)).collect();
    Ok(write_safetensors(path, &tensors)?)
}

/// Tensors of their own: the optimizer works in place.
fn copied(parameters: &Parameters) -> Result<Parameters, TrainingError> {
    Ok(parameters.copied_to(parameters.device())?)
}
