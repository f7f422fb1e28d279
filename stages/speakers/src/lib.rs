//! Who speaks when: voice activity, features for speaker embeddings, the steps from activations to turns, clustering,
//! and error rates. Inference on the CPU, in plain Rust over slices; knows neither stages nor runs.

pub mod error;
#[cfg(test)]
mod golden;
mod linear;
pub mod silero;
pub mod speech;
pub mod weights;

pub use error::{Error, Result};
pub use silero::{SileroStream, SileroVad};
