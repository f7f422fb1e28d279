//! One LSTM layer over a sequence, with the gate order i, f, g, o and the two biases of PyTorch.
//!
//! Sequences are time-major, (steps, batch, width), so that each step is one contiguous matrix. The products with the
//! input weights, and all weight gradients, are one matrix product over all steps.
//!
//! For inference on the CPU alone there are [`BidirectionalLstm`] and [`Recurrent`], whose weights are packed once.

pub(crate) mod cuda;
#[cfg(test)]
mod device_tests;
mod packed;
mod recurrent;

use candle_core::Tensor;
use rayon::prelude::*;

pub use self::packed::{BidirectionalLstm, HIDDEN, PackedWeights};
pub use self::recurrent::Recurrent;
use crate::error::{Error, Result};
use crate::ops::sums::bias::column_sums;
use crate::ops::sums::column_sums::ColumnSums;
use crate::product::{PackedRhs, product};
use crate::{Float, dispatch, multiversion, on_gpu, rows_per_chunk, slice, tensor};

/// The parameters of a layer: (4H, I), (4H, H), (4H) and (4H).
#[derive(Debug, Clone, Copy)]
pub struct LstmWeights<'a> {
    pub input: &'a Tensor,
    pub hidden: &'a Tensor,
    pub input_bias: &'a Tensor,
    pub hidden_bias: &'a Tensor,
}

/// What the backward pass of a layer needs.
#[derive(Debug)]
pub struct LstmSaved {
    /// (steps x batch, inputs)
    pub(super) input: Tensor,
    /// Activated gates, (steps x batch, 4H).
    pub(super) gates: Tensor,
    /// Cell states, (steps x batch, H).
    pub(super) cells: Tensor,
    /// Outputs, (steps x batch, H).
    pub(super) hidden: Tensor,
    pub(super) batch: usize,
}

/// Gradients of a layer: those of its parameters are computed when they are asked for.
#[derive(Debug)]
pub struct LstmGradients<'a> {
    /// (steps, batch, inputs)
    pub input: Tensor,
    /// Of the gates before their activation, (steps x batch, 4H).
    gates: Tensor,
    saved: &'a LstmSaved,
}

impl LstmGradients<'_> {
    /// (4H, inputs)
    pub fn input_weight(&self) -> Result<Tensor> {
        product(&self.gates.t()?, &self.saved.input)
    }

    /// (4H, H)
    pub fn hidden_weight(&self) -> Result<Tensor> {
        let (rows, width) = self.saved.hidden.dims2()?;
        match rows.checked_sub(self.saved.batch) {
            Some(rows) if rows > 0 => {
                let after_first = self.gates.narrow(0, self.saved.batch, rows)?;
                product(&after_first.t()?, &self.saved.hidden.narrow(0, 0, rows)?)
            }
            _ => Ok(Tensor::zeros(
                (4 * width, width),
                self.gates.dtype(),
                self.gates.device(),
            )?),
        }
    }

    /// Of both biases, (4H).
    pub fn bias(&self) -> Result<ColumnSums> {
        column_sums(&self.gates)
    }
}

/// `tanh` by the quick exponential: absolute error of about one unit in the last place of 1.
#[inline(always)]
fn tanh<T: Float>(x: T) -> T {
    let e = (x.abs() + x.abs()).exp_minus();
    let y = (T::one() - e) / (T::one() + e);
    y.copysign(x)
}

/// Activates one row of gates in place and advances the cell: `c' = f c + i g`, `h = o tanh(c')`.
#[inline(always)]
fn activate<T: Float>(gates: &mut [T], before: &[T], cell: &mut [T], hidden: &mut [T]) {
    let width = cell.len();
    let (input, rest) = gates.split_at_mut(width);
    let (forget, rest) = rest.split_at_mut(width);
    let (candidate, output) = rest.split_at_mut(width);
    // Short loops over few slices, as the compiler makes vector code of those only.
    for (input, forget) in input.iter_mut().zip(forget.iter_mut()) {
        *input = input.sigmoid();
        *forget = forget.sigmoid();
    }
    for (candidate, output) in candidate.iter_mut().zip(output.iter_mut()) {
        *candidate = tanh(*candidate);
        *output = output.sigmoid();
    }
    let (kept, added) = (forget.iter().zip(before), input.iter().zip(candidate.iter()));
    for (cell, ((&forget, &before), (&input, &candidate))) in cell.iter_mut().zip(kept.zip(added)) {
        *cell = forget * before + input * candidate;
    }
    for (hidden, (&output, &cell)) in hidden.iter_mut().zip(output.iter().zip(cell.iter())) {
        *hidden = output * tanh(cell);
    }
}

/// The layer over a sequence from a zero state: (steps, batch, inputs) to (steps, batch, H).
pub fn lstm(x: &Tensor, weights: LstmWeights) -> Result<(Tensor, LstmSaved)> {
    on_gpu!(x, cuda::lstm(x, weights));
    let (steps, batch, inputs) = x.dims3()?;
    let width = weights.hidden.dim(1)?;
    let x = x.contiguous()?.reshape((steps * batch, inputs))?;
    let projected = product(&x, &weights.input.t()?)?;
    let recurrent = PackedRhs::new(&weights.hidden.t()?)?;
    dispatch!(x.dtype(), T => {
        let mut gates = slice::<T>(&projected)?.to_vec();
        {
            let (a, b) = (slice::<T>(weights.input_bias)?, slice::<T>(weights.hidden_bias)?);
            let bias: Vec<T> = a.iter().zip(b.iter()).map(|(&a, &b)| a + b).collect();
            for row in gates.chunks_exact_mut(4 * width) {
                row.iter_mut().zip(&bias).for_each(|(gate, &bias)| *gate += bias);
            }
        }
        let mut cells = vec![0.0 as T; steps * batch * width];
        let mut hidden = vec![0.0 as T; steps * batch * width];
        let rows = rows_per_chunk(4 * width);
        let nothing = vec![0.0 as T; batch * width];
        for step in 0..steps {
            let at = step * batch * width;
            let gates = &mut gates[4 * at..4 * (at + batch * width)];
            if step > 0 {
                let previous = Tensor::from_slice(&hidden[at - batch * width..at], (batch, width), x.device())?;
                let product = recurrent.product(&previous)?;
                let product = slice::<T>(&product)?;
                gates.iter_mut().zip(product.iter()).for_each(|(gate, &product)| *gate += product);
            }
            let (before, cells) = cells.split_at_mut(at);
            let before = if step > 0 { &before[at - batch * width..] } else { &nothing[..] };
            gates
                .par_chunks_mut((rows * 4 * width).max(1))
                .zip(cells[..batch * width].par_chunks_mut((rows * width).max(1)))
                .zip(hidden[at..at + batch * width].par_chunks_mut((rows * width).max(1)))
                .enumerate()
                .for_each(|(chunk, ((gates, cells), hidden))| multiversion!({
                    let rows_here = gates.chunks_exact_mut(4 * width).zip(cells.chunks_exact_mut(width));
                    for (row, ((gates, cell), hidden)) in rows_here.zip(hidden.chunks_exact_mut(width)).enumerate() {
                        activate(gates, &before[(chunk * rows + row) * width..], cell, hidden);
                    }
                }));
        }
        let hidden = tensor(hidden, (steps * batch, width))?;
        let y = hidden.reshape((steps, batch, width))?;
        let gates = tensor(gates, (steps * batch, 4 * width))?;
        let cells = tensor(cells, (steps * batch, width))?;
        Ok((y, LstmSaved { input: x, gates, cells, hidden, batch }))
    })
}

/// Gradients of [`lstm`], given that of its result: back-propagation through time.
pub fn lstm_backward<'a>(dy: &Tensor, saved: &'a LstmSaved, weights: LstmWeights) -> Result<LstmGradients<'a>> {
    let (steps, batch, width) = dy.dims3()?;
    if batch != saved.batch || saved.cells.dims() != [steps * batch, width] {
        return Err(Error::Input(format!(
            "gradient of shape {:?} does not fit the LSTM's output",
            dy.dims()
        )));
    }
    on_gpu!(dy, cuda::lstm_backward(dy, saved, weights));
    let dy = dy.contiguous()?;
    dispatch!(dy.dtype(), T => {
        let (dy, gates, cells) = (slice::<T>(&dy)?, slice::<T>(&saved.gates)?, slice::<T>(&saved.cells)?);
        let (dy, gates, cells): (&[T], &[T], &[T]) = (&dy, &gates, &cells);
        let size = batch * width;
        let recurrent = PackedRhs::new(weights.hidden)?;
        let mut d_gates = vec![0.0 as T; steps * size * 4];
        let mut d_cell = vec![0.0 as T; size];
        let nothing = vec![0.0 as T; size];
        // The gradient that the next step passes to this step's output.
        let mut d_later = nothing.clone();
        let rows = rows_per_chunk(4 * width);
        for step in (0..steps).rev() {
            let at = step * size;
            let later = &d_later[..];
            let before = if step > 0 { &cells[at - size..at] } else { &nothing[..] };
            d_gates[4 * at..4 * (at + size)]
                .par_chunks_mut((rows * 4 * width).max(1))
                .zip(d_cell.par_chunks_mut((rows * width).max(1)))
                .enumerate()
                .for_each(|(chunk, (d_gates, d_cell))| multiversion!({
                    let rows_here = d_gates.chunks_exact_mut(4 * width).zip(d_cell.chunks_exact_mut(width));
                    for (row, (d_gates, d_cell)) in rows_here.enumerate() {
                        let row = (chunk * rows + row) * width;
                        let gates = &gates[4 * (at + row)..][..4 * width];
                        let (input, forget) = (&gates[..width], &gates[width..2 * width]);
                        let (candidate, output) = (&gates[2 * width..3 * width], &gates[3 * width..]);
                        let (candidate, output) = (&candidate[..width], &output[..width]);
                        let cell = &cells[at + row..][..width];
                        let dy = &dy[at + row..][..width];
                        let (later, before) = (&later[row..][..width], &before[row..][..width]);
                        let (d_input, rest) = d_gates.split_at_mut(width);
                        let (d_forget, rest) = rest.split_at_mut(width);
                        let (d_candidate, d_output) = rest.split_at_mut(width);
                        let (d_output, d_cell) = (&mut d_output[..width], &mut d_cell[..width]);
                        let (d_forget, d_candidate) = (&mut d_forget[..width], &mut d_candidate[..width]);
                        let one = T::of(1.0);
                        // Short loops over few slices, as in `activate`; `d_output` holds the gradient of the output
                        // of the layer first, `d_cell` that of the cell.
                        for (d_output, (&dy, &later)) in d_output.iter_mut().zip(dy.iter().zip(later)) {
                            *d_output = dy + later;
                        }
                        let gradients = d_output.iter_mut().zip(d_cell.iter_mut());
                        for ((d_output, d_cell), (&cell, &output)) in gradients.zip(cell.iter().zip(output)) {
                            let bent = tanh(cell);
                            *d_cell += *d_output * output * (one - bent * bent);
                            *d_output = *d_output * bent * output * (one - output);
                        }
                        for j in 0..width {
                            d_input[j] = d_cell[j] * candidate[j] * input[j] * (one - input[j]);
                        }
                        for j in 0..width {
                            d_candidate[j] = d_cell[j] * input[j] * (one - candidate[j] * candidate[j]);
                        }
                        for j in 0..width {
                            d_forget[j] = d_cell[j] * before[j] * forget[j] * (one - forget[j]);
                            d_cell[j] *= forget[j];
                        }
                    }
                }));
            if step > 0 {
                let d_step = Tensor::from_slice(&d_gates[4 * at..4 * (at + size)], (batch, 4 * width), saved.gates.device())?;
                d_later.copy_from_slice(&slice::<T>(&recurrent.product(&d_step)?)?);
            }
        }
        gradients(tensor(d_gates, (steps * batch, 4 * width))?, saved, weights, (steps, batch))
    })
}

/// Gradients of everything from that of the gates before their activation, (steps x batch, 4 H).
pub(crate) fn gradients<'a>(
    gates: Tensor,
    saved: &'a LstmSaved,
    weights: LstmWeights,
    (steps, batch): (usize, usize),
) -> Result<LstmGradients<'a>> {
    let input = product(&gates, weights.input)?.reshape((steps, batch, saved.input.dim(1)?))?;
    Ok(LstmGradients { input, gates, saved })
}

/// One step for decoding: input (batch, inputs) and state (batch, H) twice to the next output and cell.
pub fn lstm_step(x: &Tensor, hidden: &Tensor, cell: &Tensor, weights: LstmWeights) -> Result<(Tensor, Tensor)> {
    on_gpu!(x, cuda::lstm_step(x, hidden, cell, weights));
    let (batch, width) = hidden.dims2()?;
    let recurrent = product(hidden, &weights.hidden.t()?)?;
    let projected = product(x, &weights.input.t()?)?;
    dispatch!(x.dtype(), T => {
        let (recurrent, projected, before) = (slice::<T>(&recurrent)?, slice::<T>(&projected)?, slice::<T>(cell)?);
        let (a, b) = (slice::<T>(weights.input_bias)?, slice::<T>(weights.hidden_bias)?);
        let mut gates: Vec<T> = recurrent.iter().zip(projected.iter()).map(|(&a, &b)| a + b).collect();
        let mut cells = vec![0.0 as T; batch * width];
        let mut outputs = vec![0.0 as T; batch * width];
        for row in 0..batch {
            let gates = &mut gates[row * 4 * width..][..4 * width];
            for (gate, (&a, &b)) in gates.iter_mut().zip(a.iter().zip(b.iter())) {
                *gate += a + b;
            }
            let at = row * width..(row + 1) * width;
            activate(gates, &before[at.clone()], &mut cells[at.clone()], &mut outputs[at]);
        }
        Ok((tensor(outputs, (batch, width))?, tensor(cells, (batch, width))?))
    })
}

/// Rows of `new` where `take` says so, of `old` elsewhere.
pub fn replace_rows(old: &Tensor, new: &Tensor, take: &[bool]) -> Result<Tensor> {
    on_gpu!(old, cuda::replace_rows(old, new, take));
    let (_, width) = old.dims2()?;
    dispatch!(old.dtype(), T => {
        let (olds, news) = (slice::<T>(old)?, slice::<T>(new)?);
        let mut out = olds.to_vec();
        for (row, _) in take.iter().enumerate().filter(|(_, take)| **take) {
            out[row * width..(row + 1) * width].copy_from_slice(&news[row * width..(row + 1) * width]);
        }
        tensor(out, old.shape())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::Noise;
    use crate::testing::{check_gradient, max_difference, normal};

    /// Input, the four weights, and a weight for the output.
    fn random(steps: usize, batch: usize, inputs: usize, width: usize) -> ([Tensor; 5], Tensor) {
        let mut noise = Noise::new((steps * 1000 + batch * 100 + inputs * 10 + width) as u64);
        let x = normal(&[steps, batch, inputs], &mut noise);
        let input = (normal(&[4 * width, inputs], &mut noise) * 0.5).unwrap();
        let hidden = (normal(&[4 * width, width], &mut noise) * 0.5).unwrap();
        let (a, b) = (normal(&[4 * width], &mut noise), normal(&[4 * width], &mut noise));
        ([x, input, hidden, a, b], normal(&[steps, batch, width], &mut noise))
    }

    fn weights(all: &[Tensor; 5]) -> LstmWeights<'_> {
        LstmWeights {
            input: &all[1],
            hidden: &all[2],
            input_bias: &all[3],
            hidden_bias: &all[4],
        }
    }

    #[test]
    fn gradients_agree_with_finite_differences() {
        for (steps, batch, inputs, width) in [(1, 1, 1, 1), (4, 3, 5, 2), (7, 2, 3, 6), (2, 9, 4, 300)] {
            let (all, weight) = random(steps, batch, inputs, width);
            let (_, saved) = lstm(&all[0], weights(&all)).unwrap();
            let found = lstm_backward(&weight, &saved, weights(&all)).unwrap();
            let d_bias = found.bias().unwrap().total().unwrap();
            let weights_of = [found.input_weight(), found.hidden_weight()].map(Result::unwrap);
            let gradients = [&found.input, &weights_of[0], &weights_of[1], &d_bias, &d_bias];
            for (index, gradient) in gradients.into_iter().enumerate() {
                check_gradient(
                    &format!("LSTM argument {index}"),
                    &all[index],
                    &weight,
                    gradient,
                    |changed| {
                        let mut all = all.clone();
                        all[index] = changed.clone();
                        lstm(&all[0], weights(&all)).map(|(y, _)| y)
                    },
                );
            }
        }
    }

    #[test]
    fn single_steps_give_what_the_sequence_gives() {
        let (all, _) = random(5, 3, 4, 6);
        let (y, saved) = lstm(&all[0], weights(&all)).unwrap();
        let mut hidden = Tensor::zeros((3, 6), y.dtype(), y.device()).unwrap();
        let mut cell = hidden.clone();
        for step in 0..5 {
            let x = all[0].get(step).unwrap();
            (hidden, cell) = lstm_step(&x, &hidden, &cell, weights(&all)).unwrap();
            assert!(max_difference(&hidden, &y.get(step).unwrap()) < 1e-14);
        }
        assert!(max_difference(&cell, &saved.cells.narrow(0, 12, 3).unwrap()) < 1e-14);
    }

    #[test]
    fn quick_tanh_is_close() {
        for step in -4000..4000 {
            let x = step as f32 * 0.005;
            assert!((f64::from(tanh(x)) - f64::from(x).tanh()).abs() < 2e-7);
        }
        assert!(tanh(f32::NAN).is_nan());
    }
}
