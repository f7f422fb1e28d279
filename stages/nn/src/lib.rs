//! Parts of neural networks: named parameters with their gradients, layers, the log-mel front end with SpecAugment, LoRA, and files
//! of tensors. No model: those are in `flow-model` and `flow-speakers`.
//!
//! Candle gives tensors, `flow_kernels` what is computed with them. Gradients are written by hand: each layer has a `forward` that
//! returns what its `backward` needs, and a `backward` that adds into named [`Gradients`].

pub mod config;
mod error;
pub mod features;
pub mod layers;
pub mod lora;
pub mod parameters;
pub mod patterns;
pub mod pending_sums;
mod precision;
mod shared_tensors;
pub mod spec_augment;
mod stacks;
pub mod tensor_files;
pub mod testing;
mod weights;

pub use error::{Error, Result};
pub use parameters::{
    BufferUpdates, Gradients, Initialise, Mode, Parameter, ParameterBuilder, ParameterId, Parameters,
};
pub use precision::Precision;
pub use weights::Weights;
