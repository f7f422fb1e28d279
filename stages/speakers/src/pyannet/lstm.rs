//! Bidirectional LSTM layers over chunks of one length. Values lie as (steps, chunks, width).

use flow_kernels::Float;
use flow_kernels::product::PackedRhs;

use super::kernel_error;
use crate::error::Result;
use crate::weights::Weights;

/// Values of the state of one direction.
pub const HIDDEN: usize = 128;
/// Values that a layer gives: forward, then backward.
pub const WIDTH: usize = 2 * HIDDEN;
const GATES: usize = 4 * HIDDEN;
/// Rows whose products with the input weight are computed together: they stay in the second cache until they are used.
const ROWS: usize = 96;

/// The layers, one on top of the other.
pub struct Lstm(Vec<[Direction; 2]>);

impl Lstm {
    /// As many layers as `weights` has.
    pub fn new(weights: &Weights, inputs: usize) -> Result<Self> {
        let layer = |layer: usize| -> Result<[Direction; 2]> {
            let inputs = if layer == 0 { inputs } else { WIDTH };
            let direction = |end: &str| -> Result<Direction> {
                let weight = |what: &str, inputs: usize| -> Result<PackedRhs> {
                    let weight = weights.floats(&format!("lstm.weight_{what}_l{layer}{end}"), &[GATES, inputs])?;
                    PackedRhs::from_weight(&weight, GATES).map_err(kernel_error)
                };
                let mut bias = weights.floats(&format!("lstm.bias_ih_l{layer}{end}"), &[GATES])?;
                let second = weights.floats(&format!("lstm.bias_hh_l{layer}{end}"), &[GATES])?;
                bias.iter_mut().zip(&second).for_each(|(bias, second)| *bias += second);
                Ok(Direction {
                    inputs,
                    input: weight("ih", inputs)?,
                    hidden: weight("hh", HIDDEN)?,
                    bias,
                })
            };
            Ok([direction("")?, direction("_reverse")?])
        };
        let mut layers = vec![layer(0)?];
        while weights.has(&format!("lstm.weight_ih_l{}", layers.len())) {
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
        forward.apply(x, chunks, &mut out, false)?;
        backward.apply(x, chunks, &mut out, true)?;
        Ok(out)
    }
}

/// One direction of a layer.
struct Direction {
    inputs: usize,
    input: PackedRhs,
    hidden: PackedRhs,
    bias: Vec<f32>,
}

impl Direction {
    /// Writes its half of each row of `out`. A chunk gives the same bits alone and among others, as its rows of the products
    /// do.
    fn apply(&self, x: &[f32], chunks: usize, out: &mut [f32], backward: bool) -> Result<()> {
        let steps = x.len() / self.inputs / chunks;
        let column = if backward { HIDDEN } else { 0 };
        let in_block = (ROWS / chunks).max(1);
        let mut cells = vec![0.0; chunks * HIDDEN];
        // Where the states of the step before lie.
        let mut before = None;
        for first in (0..steps).step_by(in_block) {
            let count = in_block.min(steps - first);
            let begin = if backward { steps - first - count } else { first };
            let from = begin * chunks * self.inputs;
            let projected = self
                .input
                .product_of_rows(&x[from..], count * chunks, self.inputs)
                .map_err(kernel_error)?;
            for step in 0..count {
                let step = if backward { count - 1 - step } else { step };
                let at = (begin + step) * chunks * WIDTH + column;
                let recurrent = match before {
                    Some(before) => self
                        .hidden
                        .product_of_rows(&out[before..], chunks, WIDTH)
                        .map_err(kernel_error)?,
                    None => vec![0.0; chunks * GATES],
                };
                let projected = projected[step * chunks * GATES..].chunks_exact(GATES);
                let rows = projected
                    .zip(recurrent.chunks_exact(GATES))
                    .zip(cells.chunks_exact_mut(HIDDEN));
                for (((projected, recurrent), cells), row) in rows.zip(out[at..].chunks_mut(WIDTH)) {
                    advance(projected, recurrent, &self.bias, cells, &mut row[..HIDDEN]);
                }
                before = Some(at);
            }
        }
        Ok(())
    }
}

/// The cell after its products, gates in the order input, forget, candidate, output:
/// `c' = sigmoid(f) c + sigmoid(i) tanh(g)`, `h' = sigmoid(o) tanh(c')`. With `sigmoid(x) = 1 / (1 + e^-x)` and
/// `tanh(x) = (1 - e^-2x) / (1 + e^-2x)` for `x >= 0`, their products take one division each.
fn advance(projected: &[f32], recurrent: &[f32], bias: &[f32], cells: &mut [f32], hidden: &mut [f32]) {
    let mut gates = [0.0f32; GATES];
    let sums = projected.iter().zip(recurrent).zip(bias);
    for (gate, ((&projected, &recurrent), &bias)) in gates.iter_mut().zip(sums) {
        *gate = projected + recurrent + bias;
    }
    // e^-x of all gates but the candidate, which keeps its sign.
    let mut exponentials = [0.0f32; GATES];
    let candidate = 2 * HIDDEN..3 * HIDDEN;
    for (e, &gate) in exponentials[..candidate.start].iter_mut().zip(&gates) {
        *e = gate.exp_minus();
    }
    for (e, &gate) in exponentials[candidate.clone()]
        .iter_mut()
        .zip(&gates[candidate.clone()])
    {
        *e = (gate.abs() + gate.abs()).exp_minus();
    }
    for (e, &gate) in exponentials[candidate.end..].iter_mut().zip(&gates[candidate.end..]) {
        *e = gate.exp_minus();
    }
    let (input, rest) = exponentials.split_at(HIDDEN);
    let (forget, rest) = rest.split_at(HIDDEN);
    let (bent, output) = rest.split_at(HIDDEN);
    let mut added = [0.0f32; HIDDEN];
    for ((added, &input), (&bent, &gate)) in added.iter_mut().zip(input).zip(bent.iter().zip(&gates[candidate])) {
        // At most 1e38 times 2, which f32 holds.
        *added = ((1.0 - bent) / ((1.0 + input) * (1.0 + bent))).copysign(gate);
    }
    for ((cell, &forget), &added) in cells.iter_mut().zip(forget).zip(&added) {
        *cell = *cell / (1.0 + forget) + added;
    }
    for ((hidden, &cell), &output) in hidden.iter_mut().zip(cells.iter()).zip(output) {
        let bent = (cell.abs() + cell.abs()).exp_minus();
        *hidden = ((1.0 - bent) / ((1.0 + output) * (1.0 + bent))).copysign(cell);
    }
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
            let bias: Vec<f32> = (0..GATES).map(|at| value(at + 500, 0.3)).collect();
            let before: Vec<f32> = (0..HIDDEN).map(|at| value(at + 900, 2.0)).collect();
            let (mut cells, mut hidden) = (before.clone(), vec![0.0; HIDDEN]);
            advance(&gates, &[0.25; GATES], &bias, &mut cells, &mut hidden);
            for unit in 0..HIDDEN {
                let gate = |gate: usize| {
                    let at = gate * HIDDEN + unit;
                    f64::from(gates[at] + 0.25 + bias[at])
                };
                let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
                let cell = sigmoid(gate(1)) * f64::from(before[unit]) + sigmoid(gate(0)) * gate(2).tanh();
                assert!((f64::from(cells[unit]) - cell).abs() < 5e-7, "{size} {unit}");
                let expected = sigmoid(gate(3)) * f64::from(cells[unit]).tanh();
                assert!((f64::from(hidden[unit]) - expected).abs() < 5e-7, "{size} {unit}");
            }
        }
    }
}
