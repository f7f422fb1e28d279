//! Speaker diarization: voice activity, features for speaker embeddings, the steps from activations to turns,
//! clustering, and error rates. Inference on the CPU, in plain Rust over slices, independent of stages and runs; the
//! kinds in [`stages`] are thin stages around it.

pub mod assignment;
pub mod campplus;
pub mod chunks;
pub mod clustering;
pub mod diarizer;
pub mod error;
pub mod error_rate;
pub mod error_stretches;
pub mod fbank;
#[cfg(test)]
#[path = "tests/formula.rs"]
mod formula;
#[cfg(test)]
#[path = "tests/golden.rs"]
mod golden;
mod layers;
pub mod powerset;
pub mod pyannet;
pub mod pyannote;
pub mod reconstruct;
#[cfg(test)]
#[path = "tests/reference.rs"]
mod reference;
pub mod rttm;
pub mod silero;
pub mod speech;
pub mod stages;
pub mod tones;
pub mod turns;
pub mod voices;
mod weights;
pub mod wespeaker;

pub use error::{Error, Result};
pub use pyannet::PyanNet;
pub use silero::{SileroStream, SileroVad};
pub use stages::{Diarize, Write};
