//! Bidirectional LSTM layers over chunks of one length. Values are stored as (steps, chunks, width).

use flow_kernels::product::PackedRhs;
use flow_kernels::{Float, multiversion};

use super::kernel_error;
use super::recurrent::Recurrent;
use crate::error::{Error, Result};
use crate::layers::Aligned;
use crate::weights::Weights;

/// Values of the state of one direction.
pub const HIDDEN: usize = 128;
/// Values that a layer gives: forward, then backward.
pub const WIDTH: usize = 2 * HIDDEN;
pub const GATES: usize = 4 * HIDDEN;
/// More layers than this are refused: in a hostile file any number of tensors can refer to the same bytes.
const MOST_LAYERS: usize = 16;
/// Rows whose products with the input weight are computed together: they stay in the second cache until they are used.
const ROWS: usize = 192;

/// The layers, one on top of the other.
pub struct Lstm(Vec<[Direction; 2]>);

impl Lstm {
    /// As many layers as `weights` has.
    pub fn new(weights: &Weights, inputs: usize) -> Result<Self> {
        let layer = |layer: usize| -> Result<[Direction; 2]> {
            let inputs = if layer == 0 { inputs } else { WIDTH };
            let direction = |end: &str| -> Result<Direction> {
                let weight = |what: &str, inputs: usize| {
                    weights.floats(&format!("lstm.weight_{what}_l{layer}{end}"), &[GATES, inputs])
                };
                let mut bias = weights.floats(&format!("lstm.bias_ih_l{layer}{end}"), &[GATES])?;
                let second = weights.floats(&format!("lstm.bias_hh_l{layer}{end}"), &[GATES])?;
                bias.iter_mut().zip(&second).for_each(|(bias, second)| *bias += second);
                Ok(Direction {
                    inputs,
                    input: PackedRhs::from_weight(&weight("ih", inputs)?, GATES).map_err(kernel_error)?,
                    recurrent: Recurrent::new(&weight("hh", HIDDEN)?),
                    bias,
                })
            };
            Ok([direction("")?, direction("_reverse")?])
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
        let [forward, backward] = &self.0[layer];
        let steps = x.len() / forward.inputs / chunks;
        let mut out = vec![0.0; steps * chunks * WIDTH];
        let mut gates = Aligned::default();
        forward.apply(x, chunks, &mut out, &mut gates, false)?;
        backward.apply(x, chunks, &mut out, &mut gates, true)?;
        Ok(out)
    }
}

/// One direction of a layer.
struct Direction {
    inputs: usize,
    input: PackedRhs,
    recurrent: Recurrent,
    bias: Vec<f32>,
}

/// The chunks' states of one direction at one step.
struct States {
    hidden: Vec<[f32; HIDDEN]>,
    cells: Vec<[f32; HIDDEN]>,
}

impl Direction {
    /// Writes its half of each row of `out`. A chunk's result is equal to the bit whether computed alone or with
    /// others: the order of each sum is fixed. `gates` is memory for a block of steps.
    fn apply(&self, x: &[f32], chunks: usize, out: &mut [f32], gates: &mut Aligned, backward: bool) -> Result<()> {
        let steps = x.len() / self.inputs / chunks;
        let column = if backward { HIDDEN } else { 0 };
        let in_block = (ROWS / chunks).max(1);
        let zeros = || vec![[0.0; HIDDEN]; chunks];
        let mut states = States {
            hidden: zeros(),
            cells: zeros(),
        };
        for first in (0..steps).step_by(in_block) {
            let count = in_block.min(steps - first);
            let begin = if backward { steps - first - count } else { first };
            let from = begin * chunks * self.inputs;
            gates.resize(count * chunks * GATES);
            self.input
                .product_of_rows_into(&x[from..], count * chunks, self.inputs, gates)
                .map_err(kernel_error)?;
            for step in 0..count {
                let step = if backward { count - 1 - step } else { step };
                let gates = &mut gates[step * chunks * GATES..][..chunks * GATES];
                self.recurrent.add(&states.hidden, gates, step % 2 == 1);
                self.advance(gates, &mut states);
                let at = (begin + step) * chunks * WIDTH + column;
                for (row, hidden) in out[at..].chunks_mut(WIDTH).zip(&states.hidden) {
                    row[..HIDDEN].copy_from_slice(hidden);
                }
            }
        }
        Ok(())
    }

    /// One step for all chunks, given the products with both weights: (chunks, 4 [`HIDDEN`]).
    fn advance(&self, gates: &mut [f32], states: &mut States) {
        let rows = states.cells.iter_mut().zip(&mut states.hidden);
        multiversion!({
            for (gates, (cells, hidden)) in gates.chunks_exact_mut(GATES).zip(rows) {
                for (gate, bias) in gates.iter_mut().zip(&self.bias) {
                    *gate += bias;
                }
                activate(gates, cells, hidden);
            }
        });
    }
}

/// The cell after its products, gates in the order input, forget, candidate, output:
/// `c' = sigmoid(f) c + sigmoid(i) tanh(g)`, `h' = sigmoid(o) tanh(c')`. With `sigmoid(x) = 1 / (1 + e^-x)` and
/// `tanh(x) = (1 - e^-2x) / (1 + e^-2x)` for `x >= 0`, their products take one division each.
#[inline(always)]
fn activate(gates: &[f32], cells: &mut [f32; HIDDEN], hidden: &mut [f32; HIDDEN]) {
    let (input, rest) = gates.split_at(HIDDEN);
    let (forget, rest) = rest.split_at(HIDDEN);
    let (candidate, output) = rest.split_at(HIDDEN);
    // Short loops over few slices, as the compiler makes vector code of those only.
    let mut added = [0.0; HIDDEN];
    for (added, (&input, &candidate)) in added.iter_mut().zip(input.iter().zip(candidate)) {
        *added = sigmoid_tanh(input, candidate);
    }
    for ((cell, &forget), &added) in cells.iter_mut().zip(forget).zip(&added) {
        *cell = *cell / (1.0 + forget.exp_minus()) + added;
    }
    for (hidden, (&output, &cell)) in hidden.iter_mut().zip(output.iter().zip(cells.iter())) {
        *hidden = sigmoid_tanh(output, cell);
    }
}

/// `sigmoid(x) tanh(y)`. Its divisor is at most 2e38, which f32 holds.
#[inline(always)]
fn sigmoid_tanh(x: f32, y: f32) -> f32 {
    let bent = (y.abs() + y.abs()).exp_minus();
    ((1.0 - bent) / ((1.0 + x.exp_minus()) * (1.0 + bent))).copysign(y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cell_is_that_of_its_formula() {
        // Gates of all sizes, up to where the quick exponential saturates.
        let value = |at: usize, size: f32| ((at * 7919 % 2003) as f32 / 1001.5 - 1.0) * size;
        for size in [0.01, 1.0, 10.0, 300.0] {
            let gates: Vec<f32> = (0..GATES).map(|at| value(at + 3, size)).collect();
            let before: [f32; HIDDEN] = std::array::from_fn(|at| value(at + 900, 2.0));
            let (mut cells, mut hidden) = (before, [0.0; HIDDEN]);
            activate(&gates, &mut cells, &mut hidden);
            for unit in 0..HIDDEN {
                let gate = |gate: usize| f64::from(gates[gate * HIDDEN + unit]);
                let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
                let cell = sigmoid(gate(1)) * f64::from(before[unit]) + sigmoid(gate(0)) * gate(2).tanh();
                assert!((f64::from(cells[unit]) - cell).abs() < 5e-7, "{size} {unit}");
                let expected = sigmoid(gate(3)) * f64::from(cells[unit]).tanh();
                assert!((f64::from(hidden[unit]) - expected).abs() < 5e-7, "{size} {unit}");
            }
        }
    }
}
