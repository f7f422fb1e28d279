//! The global norm of gradients, and clipping by it.

use candle_core::Tensor;
use flow_kernels::squares::sum_of_squares;
use flow_model::{Gradients, Parameters};

use crate::error::TrainingError;

/// Square of the global L2 norm of all gradients of trainable parameters. Summed in 64 bits, chunk by chunk in a fixed
/// order.
pub fn squared_norm(parameters: &Parameters, gradients: &Gradients) -> Result<f64, TrainingError> {
    let taken = |(id, parameter): (_, &flow_model::Parameter)| {
        let gradient = gradients.get(id).filter(|_| parameter.trainable);
        gradient.cloned()
    };
    let gradients: Vec<Tensor> = parameters.iter().filter_map(taken).collect();
    Ok(sum_of_squares(&gradients)?)
}

/// The factor that brings gradients of global norm `norm` down to `clip`: `clip / (norm + 1e-6)`, at most
/// 1. A `clip` of 0 means no clipping.
pub fn clip_factor(norm: f64, clip: f64) -> f64 {
    if clip > 0.0 {
        (clip / (norm + 1e-6)).min(1.0)
    } else {
        1.0
    }
}
