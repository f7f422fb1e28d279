//! Layers of the encoder. Each has a `forward` that returns what its `backward` needs, and a hand-written `backward`
//! that adds into named gradients.
//!
//! Activations are (rows, width) matrices, a row per frame, utterance by utterance: row `b * time + t`.

pub mod adapter;
pub mod attention;
pub mod conformer_layer;
pub mod convolution;
#[cfg(test)]
mod device_tests;
pub mod dropout;
pub mod feed_forward;
pub mod held_rows;
pub mod linear;
pub mod norm;
pub mod subsampling;

use flow_kernels::Lengths;
use flow_kernels::attention::Context;

/// How the rows of an activation are laid out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frames {
    /// Utterances.
    pub batch: usize,
    /// Frames per utterance, padding included.
    pub time: usize,
    /// Valid frames of each utterance.
    pub lengths: Lengths,
    /// Which frames a frame sees in self-attention.
    pub context: Context,
}

impl Frames {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.batch * self.time
    }
}
