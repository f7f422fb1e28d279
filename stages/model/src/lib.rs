//! The speech model: log-mel features, FastConformer encoder, heads (a transducer, which is TDT or RNN-T, CTC, or both) with
//! their losses, greedy decoding and beam search, tokenizer and checkpoint formats. Equal to NVIDIA NeMo's Parakeet models, with the
//! same tensor names.
//!
//! Candle gives tensors, `flow_kernels` what is computed with them. Gradients are written by hand: each layer has a `forward` that
//! returns what its `backward` needs, and a `backward` that adds into named [`Gradients`].

pub mod alignment;
pub mod allocation;
#[cfg(test)]
mod candle_tests;
pub mod checkpoint;
pub mod config;
pub mod decoding;
pub mod decoding_memory;
pub mod encoder;
mod error;
pub mod features;
pub mod fusion;
pub mod heads;
pub mod joint;
pub mod layers;
pub mod lora;
pub mod loss;
pub mod model;
pub mod parameter_groups;
pub mod parameters;
pub mod pass_parts;
pub mod patterns;
mod pending_sums;
mod precision;
pub mod prediction;
pub mod prompt;
pub mod selftest;
mod shared_tensors;
pub mod spec_augment;
mod stacks;
pub mod testing;
pub mod timestamps;
pub mod tokenizer;
pub mod vocabulary;
mod weights;

pub use config::ModelConfig;
pub use encoder::Encoder;
pub use error::{Error, Result};
pub use parameter_groups::ParameterGroup;
pub use parameters::{
    BufferUpdates, Gradients, Initialise, Mode, Parameter, ParameterBuilder, ParameterId, Parameters,
};
pub use precision::Precision;
pub use weights::Weights;
