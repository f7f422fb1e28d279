//! Bidirectional LSTM layers of 128 units for inference: weights are packed once. Values are stored as (steps, batch, width).

use super::Recurrent;
use crate::aligned::Aligned;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::multiversion;
use crate::product::PackedRhs;

/// Values of the state of one direction.
pub const HIDDEN: usize = 128;
pub(super) const GATES: usize = 4 * HIDDEN;
/// Rows whose products with the input weight are computed together: they stay in the second cache until they are used.
const ROWS: usize = 192;

/// The parameters of one direction: (4 [`HIDDEN`], inputs), (4 [`HIDDEN`], [`HIDDEN`]), and twice (4 [`HIDDEN`]).
#[derive(Debug, Clone, Copy)]
pub struct PackedWeights<'a> {
    pub input: &'a [f32],
    pub hidden: &'a [f32],
    pub input_bias: &'a [f32],
    pub hidden_bias: &'a [f32],
}

/// A layer that reads a sequence in both directions, each from a zero state.
pub struct BidirectionalLstm([Direction; 2]);

impl BidirectionalLstm {
    /// Values that it gives at each step: those of the forward direction, then of the backward one.
    pub const WIDTH: usize = 2 * HIDDEN;

    /// From the weights of the forward and of the backward direction.
    ///
    /// # Errors
    /// If they are of other sizes.
    pub fn new(directions: [PackedWeights; 2]) -> Result<Self> {
        let [forward, backward] = directions.map(Direction::new);
        let layer = Self([forward?, backward?]);
        match layer.0[0].inputs == layer.0[1].inputs {
            true => Ok(layer),
            false => Err(Error::Input("the directions of an LSTM have other inputs".into())),
        }
    }

    /// (steps, `batch`, inputs) to (steps, `batch`, [`Self::WIDTH`]). The result of a sequence is equal to the bit whether
    /// computed alone or with others: the order of each sum is fixed.
    ///
    /// # Errors
    /// If the length of `x` is no multiple of a step.
    pub fn apply(&self, x: &[f32], batch: usize) -> Result<Vec<f32>> {
        let [forward, backward] = &self.0;
        let step = batch * forward.inputs;
        if step == 0 || !x.len().is_multiple_of(step) {
            let (values, inputs) = (x.len(), forward.inputs);
            return Err(Error::Input(format!(
                "{values} values for an LSTM over {batch} sequences of {inputs} inputs"
            )));
        }
        let mut out = vec![0.0; x.len() / step * batch * Self::WIDTH];
        let mut gates = Aligned::default();
        forward.apply(x, batch, &mut out, &mut gates, false)?;
        backward.apply(x, batch, &mut out, &mut gates, true)?;
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

/// The sequences' states of one direction at one step.
struct States {
    hidden: Vec<[f32; HIDDEN]>,
    cells: Vec<[f32; HIDDEN]>,
}

impl Direction {
    fn new(weights: PackedWeights) -> Result<Self> {
        let biases = [weights.input_bias, weights.hidden_bias];
        let fit = weights.input.len().is_multiple_of(GATES) && weights.hidden.len() == GATES * HIDDEN;
        if !fit || weights.input.is_empty() || biases.iter().any(|bias| bias.len() != GATES) {
            return Err(Error::Input(format!(
                "weights that are not of an LSTM of {HIDDEN} units"
            )));
        }
        let [input, hidden] = biases;
        Ok(Self {
            inputs: weights.input.len() / GATES,
            input: PackedRhs::from_weight(weights.input, GATES)?,
            recurrent: Recurrent::new(weights.hidden),
            bias: input.iter().zip(hidden).map(|(input, hidden)| input + hidden).collect(),
        })
    }

    /// Writes its half of each row of `out`. `gates` is memory for a block of steps.
    fn apply(&self, x: &[f32], batch: usize, out: &mut [f32], gates: &mut Aligned<f32>, backward: bool) -> Result<()> {
        let steps = x.len() / self.inputs / batch;
        let column = if backward { HIDDEN } else { 0 };
        let in_block = (ROWS / batch).max(1);
        let zeros = || vec![[0.0; HIDDEN]; batch];
        let mut states = States {
            hidden: zeros(),
            cells: zeros(),
        };
        for first in (0..steps).step_by(in_block) {
            let count = in_block.min(steps - first);
            let begin = if backward { steps - first - count } else { first };
            let from = begin * batch * self.inputs;
            gates.resize(count * batch * GATES);
            self.input
                .product_of_rows_into(&x[from..], count * batch, self.inputs, gates)?;
            for step in 0..count {
                let step = if backward { count - 1 - step } else { step };
                let gates = &mut gates[step * batch * GATES..][..batch * GATES];
                self.recurrent.add(&states.hidden, gates, step % 2 == 1);
                self.advance(gates, &mut states);
                let at = (begin + step) * batch * BidirectionalLstm::WIDTH + column;
                for (row, hidden) in out[at..].chunks_mut(BidirectionalLstm::WIDTH).zip(&states.hidden) {
                    row[..HIDDEN].copy_from_slice(hidden);
                }
            }
        }
        Ok(())
    }

    /// One step for all sequences, given the products with both weights: (batch, 4 [`HIDDEN`]).
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
