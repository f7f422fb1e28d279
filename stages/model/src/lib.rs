//! The speech model: FastConformer encoder, heads (a transducer, which is TDT or RNN-T, CTC, or both) with
//! their losses, greedy decoding and beam search, tokenizer and checkpoint formats. Equal to NVIDIA NeMo's Parakeet models, with the
//! same tensor names.
//!
//! Its layers, front end and files of tensors are those of `flow_nn`.

pub mod alignment;
pub mod allocation;
#[cfg(test)]
mod candle_tests;
pub mod checkpoint;
pub mod confidence;
pub mod config;
pub mod decoding;
pub mod decoding_memory;
pub mod encoder;
pub mod fusion;
pub mod heads;
pub mod joint;
pub mod loss;
pub mod model;
pub mod parameter_groups;
pub mod pass_parts;
pub mod prediction;
pub mod prompt;
pub mod selftest;
#[cfg(test)]
mod testing;
pub mod timestamps;
pub mod tokenizer;
pub mod vocabulary;

pub use config::ModelConfig;
pub use encoder::Encoder;
pub use flow_nn::{
    BufferUpdates, Error, Gradients, Initialise, Mode, Parameter, ParameterBuilder, ParameterId, Parameters, Precision,
    Result, Weights,
};
pub use parameter_groups::ParameterGroup;
