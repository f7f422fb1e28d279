//! Element-wise parts of the joint network and its loss, over lists of lattice cells.

pub(crate) mod cuda;
#[cfg(test)]
mod device_tests;

use candle_core::Tensor;
use rayon::prelude::*;

use crate::error::Result;
use crate::noise::DropMask;
use crate::{
    Float, LANES, by_chunks, dispatch, lanes, modify, multiversion, on_gpu, rows_per_chunk, slice, sum_of, tensor,
};

/// One cell of a lattice: which rows it joins.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cell {
    /// Row of the projected encoder output, (batch x frames, joint).
    pub frame: usize,
    /// Row of the projected prediction output, (batch x states, joint).
    pub state: usize,
    /// The next target token, if any is left.
    pub label: Option<usize>,
    /// Index of the cell in the list of all cells of the batch; determines the elements of the dropout mask.
    pub index: usize,
}

/// Log probabilities of one cell.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CellTerms {
    /// Log-sum-exp of the token logits, blank included.
    pub normaliser: f64,
    pub blank: f64,
    /// Of the cell's label; zero if it has none.
    pub label: f64,
}

/// The terms of the gradient of one cell's logits.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CellGradient {
    pub normaliser: f64,
    /// Posterior of blank.
    pub blank: f64,
    /// Posterior of the label.
    pub label: f64,
    /// Factor of the whole gradient: the reduction's and the caller's.
    pub factor: f64,
}

/// `drop(relu(f[frame] + g[state]))` per cell: (cells, joint).
pub fn hidden(f: &Tensor, g: &Tensor, cells: &[Cell], mask: Option<DropMask>) -> Result<Tensor> {
    on_gpu!(f, cuda::hidden(f, g, cells, mask));
    let width = f.dim(1)?;
    dispatch!(f.dtype(), T => {
        let (f, g) = (slice::<T>(f)?, slice::<T>(g)?);
        let (f, g): (&[T], &[T]) = (&f, &g);
        let rows = rows_per_chunk(width);
        let out = by_chunks(cells.len() * width, rows * width, |number, out: &mut [T]| multiversion!({
            for (out, cell) in out.chunks_exact_mut(width).zip(&cells[number * rows..]) {
                let f = &f[cell.frame * width..][..width];
                let g = &g[cell.state * width..][..width];
                for ((out, &f), &g) in out.iter_mut().zip(f).zip(g) {
                    let sum = f + g;
                    // Written so that NaN stays NaN.
                    *out = if sum <= 0.0 { 0.0 } else { sum };
                }
                if let Some(mask) = &mask {
                    let keep = T::of(mask.keep_factor);
                    for (j, out) in out.iter_mut().enumerate() {
                        *out = if mask.keeps(cell.index * width + j) { *out * keep } else { 0.0 };
                    }
                }
            }
        }));
        tensor(out, (cells.len(), width))
    })
}

/// On the CPU; devices have [`Lattices`](crate::tdt::Lattices). Log probabilities of every cell from its logits, without
/// bias: (cells, tokens + durations), the last token being blank. `durations` receives the log probabilities of the durations, duration minor.
pub fn cell_terms(
    logits: &Tensor,
    bias: &Tensor,
    cells: &[Cell],
    terms: &mut [CellTerms],
    durations: &mut [f64],
) -> Result<()> {
    let width = logits.dim(1)?;
    let duration_count = durations.len() / cells.len().max(1);
    dispatch!(logits.dtype(), T => {
        let (logits, bias) = (slice::<T>(logits)?, slice::<T>(bias)?);
        let (logits, bias): (&[T], &[T]) = (&logits, &bias);
        let rows = rows_per_chunk(width);
        let tokens = width - duration_count;
        // As many chunks as those of cells; of an RNN-T, which has no durations, empty ones.
        let durations: Vec<&mut [f64]> = match duration_count {
            0 => cells.chunks(rows).map(|_| <&mut [f64]>::default()).collect(),
            count => durations.chunks_mut(rows * count).collect(),
        };
        logits
            .par_chunks((rows * width).max(1))
            .zip(cells.par_chunks(rows))
            .zip(terms.par_chunks_mut(rows))
            .zip(durations)
            .for_each(|(((logits, cells), terms), durations)| multiversion!({
                let mut durations = durations.chunks_exact_mut(duration_count.max(1));
                for ((logits, cell), terms) in logits.chunks_exact(width).zip(cells).zip(terms) {
                    let durations = durations.next().unwrap_or_default();
                    let (token_logits, duration_logits) = logits.split_at(tokens);
                    let (token_bias, duration_bias) = bias.split_at(tokens);
                    let normaliser = log_sum_exp(token_logits, token_bias);
                    let log = |token: usize| (token_logits[token] + token_bias[token]).wide() - normaliser;
                    *terms = CellTerms { normaliser, blank: log(tokens - 1), label: cell.label.map_or(0.0, log) };
                    let normaliser = log_sum_exp(duration_logits, duration_bias);
                    for ((log, &logit), &bias) in durations.iter_mut().zip(duration_logits).zip(duration_bias) {
                        *log = (logit + bias).wide() - normaliser;
                    }
                }
            }));
        Ok(())
    })
}

/// `ln(sum(exp(logits + bias)))`.
#[inline(always)]
fn log_sum_exp<T: Float>(logits: &[T], bias: &[T]) -> f64 {
    let (blocks, bias_blocks) = (logits.chunks_exact(LANES), bias.chunks_exact(LANES));
    let (rest, bias_rest) = (blocks.remainder(), bias_blocks.remainder());
    let mut largest = [T::neg_infinity(); LANES];
    for (logits, bias) in blocks.zip(bias_blocks) {
        largest = lanes(|lane| {
            let value = logits[lane] + bias[lane];
            if value > largest[lane] { value } else { largest[lane] }
        });
    }
    let rest_values = rest.iter().zip(bias_rest).map(|(&logit, &bias)| logit + bias);
    let top = largest
        .iter()
        .copied()
        .chain(rest_values)
        .fold(T::neg_infinity(), |a, b| if b > a { b } else { a });
    let sum = sum_of([logits, bias], |[logit, bias]| (logit + bias - top).exp_quick());
    top.wide() + sum.wide().ln()
}

/// Gradient of the loss with respect to the logits of some cells: (cells, tokens + durations). On the CPU, as [`cell_terms`].
///
/// Tokens: `factor * clip((blank + label) * softmax - posterior of the token)`. Durations:
/// `factor * (sum of posteriors * softmax - posterior)`, with `durations` holding log probability and posterior of each
/// duration, and their posteriors' sum being that over the durations.
/// Row `i` of the result belongs to cell `i` and to row `rows[i]` of `logits`.
pub fn logit_gradient(
    logits: &Tensor,
    rows: &[usize],
    bias: &Tensor,
    cells: &[Cell],
    gradients: &[CellGradient],
    durations: &[(f64, f64)],
    clamp: f64,
) -> Result<Tensor> {
    let width = logits.dim(1)?;
    let duration_count = durations.len() / cells.len().max(1);
    dispatch!(logits.dtype(), T => {
        let (logits, bias) = (slice::<T>(logits)?, slice::<T>(bias)?);
        let (logits, bias): (&[T], &[T]) = (&logits, &bias);
        let chunk = rows_per_chunk(width);
        let tokens = width - duration_count;
        let out = by_chunks(cells.len() * width, chunk * width, |number, out: &mut [T]| multiversion!({
            for (offset, out) in out.chunks_exact_mut(width).enumerate() {
                let i = number * chunk + offset;
                let gradient = &gradients[i];
                let logits = &logits[rows[i] * width..][..width];
                let factor = T::of(gradient.factor);
                let occupancy = T::of(gradient.blank + gradient.label);
                // Split, so that large logits keep their precision: e^(x - n) with n rounded once.
                let normaliser = T::of(gradient.normaliser);
                let (out_tokens, out_durations) = out.split_at_mut(tokens);
                let inputs = logits[..tokens].iter().zip(&bias[..tokens]);
                if clamp > 0.0 {
                    for (out, (&logit, &bias)) in out_tokens.iter_mut().zip(inputs) {
                        *out = (logit + bias - normaliser).exp_quick() * occupancy;
                    }
                    out_tokens[tokens - 1] -= T::of(gradient.blank);
                    if let Some(label) = cells[i].label {
                        out_tokens[label] -= T::of(gradient.label);
                    }
                    let bound = T::of(clamp);
                    for out in out_tokens.iter_mut() {
                        *out = (if *out > bound { bound } else if *out < -bound { -bound } else { *out }) * factor;
                    }
                } else {
                    let occupancy = occupancy * factor;
                    for (out, (&logit, &bias)) in out_tokens.iter_mut().zip(inputs) {
                        *out = (logit + bias - normaliser).exp_quick() * occupancy;
                    }
                    out_tokens[tokens - 1] -= T::of(gradient.blank * gradient.factor);
                    if let Some(label) = cells[i].label {
                        out_tokens[label] -= T::of(gradient.label * gradient.factor);
                    }
                }
                let durations = &durations[i * duration_count..][..duration_count];
                let total: f64 = durations.iter().map(|(_, posterior)| posterior).sum();
                for (out, &(log, posterior)) in out_durations.iter_mut().zip(durations) {
                    *out = T::of((total * log.exp() - posterior) * gradient.factor);
                }
            }
        }));
        tensor(out, (cells.len(), width))
    })
}

/// Adds the gradient of some cells' hidden values to those of the rows they joined: `d_f` (batch x frames, joint) and
/// `d_g` (batch x states, joint). The gradient passes where the hidden value is above zero.
///
/// # Errors
/// On a device, where the cells are not in rising order of frame and state.
pub fn add_hidden_gradient(
    d_hidden: &Tensor,
    hidden: &Tensor,
    cells: &[Cell],
    keep_factor: f64,
    d_f: &Tensor,
    d_g: &Tensor,
) -> Result<()> {
    on_gpu!(
        hidden,
        cuda::add_hidden_gradient(d_hidden, hidden, cells, keep_factor, d_f, d_g)
    );
    let width = hidden.dim(1)?;
    dispatch!(hidden.dtype(), T => {
        let (d_hidden, hidden) = (slice::<T>(d_hidden)?, slice::<T>(hidden)?);
        let (d_hidden, hidden): (&[T], &[T]) = (&d_hidden, &hidden);
        let keep = T::of(keep_factor);
        let add = |sums: &mut [T], row: fn(&Cell) -> usize| {
            let rows = d_hidden.chunks_exact(width).zip(hidden.chunks_exact(width)).zip(cells.iter());
            for ((d_hidden, hidden), cell) in rows {
                let sums = &mut sums[row(cell) * width..][..width];
                for ((sum, &d), &h) in sums.iter_mut().zip(d_hidden).zip(hidden) {
                    *sum += if h > 0.0 { d * keep } else { 0.0 };
                }
            }
        };
        // One thread per sum: rows are shared between cells, and the order of the additions is fixed.
        let (first, second) = rayon::join(
            || modify::<T>(d_f, |sums| add(sums, |cell| cell.frame)),
            || modify::<T>(d_g, |sums| add(sums, |cell| cell.state)),
        );
        first.and(second)
    })
}
