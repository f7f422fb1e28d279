//! Bidirectional LSTM layers over chunks of one length. Values are stored as (steps, chunks, width).

use flow_kernels::lstm::{BidirectionalLstm, HIDDEN, PackedWeights};

use super::kernel_error;
use crate::error::{Error, Result};
use crate::weights::Weights;

/// Values that a layer gives: forward, then backward.
pub const WIDTH: usize = BidirectionalLstm::WIDTH;
const GATES: usize = 4 * HIDDEN;
/// More layers than this are refused: in a hostile file any number of tensors can refer to the same bytes.
const MOST_LAYERS: usize = 16;

/// The layers, one on top of the other.
pub struct Lstm(Vec<BidirectionalLstm>);

impl Lstm {
    /// As many layers as `weights` has.
    pub fn new(weights: &Weights, inputs: usize) -> Result<Self> {
        let layer = |layer: usize| -> Result<BidirectionalLstm> {
            let inputs = if layer == 0 { inputs } else { WIDTH };
            let direction = |end: &str| -> Result<[Vec<f32>; 4]> {
                let read = |what: &str, shape: &[usize]| weights.floats(&format!("lstm.{what}_l{layer}{end}"), shape);
                Ok([
                    read("weight_ih", &[GATES, inputs])?,
                    read("weight_hh", &[GATES, HIDDEN])?,
                    read("bias_ih", &[GATES])?,
                    read("bias_hh", &[GATES])?,
                ])
            };
            let read = [direction("")?, direction("_reverse")?];
            let packed = read
                .each_ref()
                .map(|[input, hidden, input_bias, hidden_bias]| PackedWeights {
                    input,
                    hidden,
                    input_bias,
                    hidden_bias,
                });
            BidirectionalLstm::new(packed).map_err(kernel_error)
        };
        let mut layers = vec![layer(0)?];
        while weights.has(&format!("lstm.weight_ih_l{}", layers.len())) {
            if layers.len() == MOST_LAYERS {
                return Err(Error::Weights(format!("lstm has more than {MOST_LAYERS} layers")));
            }
            layers.push(layer(layers.len())?);
        }
        Ok(Self(layers))
    }

    pub fn layers(&self) -> usize {
        self.0.len()
    }

    /// All layers: (steps, `chunks`, inputs) to (steps, `chunks`, [`WIDTH`]).
    pub fn apply(&self, mut x: Vec<f32>, chunks: usize) -> Result<Vec<f32>> {
        for layer in 0..self.layers() {
            x = self.apply_layer(layer, &x, chunks)?;
        }
        Ok(x)
    }

    /// One layer.
    pub fn apply_layer(&self, layer: usize, x: &[f32], chunks: usize) -> Result<Vec<f32>> {
        self.0[layer].apply(x, chunks).map_err(kernel_error)
    }
}
