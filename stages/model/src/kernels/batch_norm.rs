//! Batch normalisation over rows, followed by SiLU, in one pass.

use candle_core::Tensor;
use rayon::prelude::*;

use super::elementwise::silu_slope;
use super::{Float, dispatch, rows_per_piece, slice, sum_over_rows, tensor};
use crate::error::Result;

/// Mean and biased variance of every column of `x` (.., C), each (C), summed in f64.
pub fn column_statistics(x: &Tensor) -> Result<(Vec<f64>, Vec<f64>)> {
    let x = x.contiguous()?;
    let width = x.dims().last().copied().unwrap_or(1);
    dispatch!(x.dtype(), T => {
        let xs = slice::<T>(&x)?;
        let xs: &[T] = &xs;
        let rows = xs.len() / width;
        let mean: Vec<f64> = sum_over_rows::<f64>(rows, width, |rows, sums| {
            for row in xs[rows.start * width..rows.end * width].chunks_exact(width) {
                for (sum, &x) in sums.iter_mut().zip(row) {
                    *sum += x.wide();
                }
            }
        })
        .iter()
        .map(|sum| sum / rows as f64)
        .collect();
        let variance = sum_over_rows::<f64>(rows, width, |rows, sums| {
            for row in xs[rows.start * width..rows.end * width].chunks_exact(width) {
                for ((sum, &x), &mean) in sums.iter_mut().zip(row).zip(&mean) {
                    let centred = x.wide() - mean;
                    *sum += centred * centred;
                }
            }
        })
        .iter()
        .map(|sum| sum / rows as f64)
        .collect();
        Ok((mean, variance))
    })
}

/// What normalises a column: `z = (x - mean) * inverse * weight + bias`; all (C).
pub struct Normaliser<'a> {
    pub mean: &'a Tensor,
    /// `1 / sqrt(variance + 1e-5)`.
    pub inverse: &'a Tensor,
    pub weight: &'a Tensor,
    pub bias: &'a Tensor,
}

/// `silu(z)` of `x` (.., C).
pub fn normalise_silu(x: &Tensor, by: &Normaliser) -> Result<Tensor> {
    let x = x.contiguous()?;
    let width = by.mean.elem_count();
    dispatch!(x.dtype(), T => {
        let xs = slice::<T>(&x)?;
        let xs: &[T] = &xs;
        let (factor, offset) = affine::<T>(by)?;
        let piece = rows_per_piece(width) * width;
        let mut out = vec![0.0 as T; xs.len()];
        out.par_chunks_mut(piece).zip(xs.par_chunks(piece)).for_each(|(out, xs)| {
            for (out, x) in out.chunks_exact_mut(width).zip(xs.chunks_exact(width)) {
                for i in 0..width {
                    let z = x[i] * factor[i] + offset[i];
                    out[i] = z * z.sigmoid();
                }
            }
        });
        tensor(out, x.shape())
    })
}

/// `z = x * factor + offset`.
fn affine<T: Float>(by: &Normaliser) -> Result<(Vec<T>, Vec<T>)> {
    let (mean, inverse) = (slice::<T>(by.mean)?, slice::<T>(by.inverse)?);
    let (weight, bias) = (slice::<T>(by.weight)?, slice::<T>(by.bias)?);
    let factor: Vec<f64> = weight
        .iter()
        .zip(inverse.iter())
        .map(|(w, i)| w.wide() * i.wide())
        .collect();
    let offset = bias
        .iter()
        .zip(mean.iter())
        .zip(&factor)
        .map(|((bias, mean), factor)| T::of(bias.wide() - mean.wide() * factor))
        .collect();
    Ok((factor.into_iter().map(T::of).collect(), offset))
}

/// Gradients of [`normalise_silu`]: (dx, d weight, d bias). With `batch_statistics` mean and variance are those of `x`
/// itself and have their part in dx; otherwise they are constants.
pub fn normalise_silu_backward(
    x: &Tensor,
    by: &Normaliser,
    dy: &Tensor,
    batch_statistics: bool,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let width = by.mean.elem_count();
    dispatch!(x.dtype(), T => {
        let (xs, dys) = (slice::<T>(&x)?, slice::<T>(&dy)?);
        let (xs, dys): (&[T], &[T]) = (&xs, &dys);
        let (factor, offset) = affine::<T>(by)?;
        let (mean, inverse) = (slice::<T>(by.mean)?, slice::<T>(by.inverse)?);
        let (mean, inverse): (&[T], &[T]) = (&mean, &inverse);
        let piece = rows_per_piece(width) * width;
        // dz first, in the place of dx.
        let mut out = vec![0.0 as T; xs.len()];
        out.par_chunks_mut(piece).zip(xs.par_chunks(piece)).zip(dys.par_chunks(piece)).for_each(
            |((out, xs), dys)| {
                for ((out, x), dy) in out
                    .chunks_exact_mut(width)
                    .zip(xs.chunks_exact(width))
                    .zip(dys.chunks_exact(width))
                {
                    for i in 0..width {
                        out[i] = dy[i] * silu_slope(x[i] * factor[i] + offset[i]);
                    }
                }
            },
        );
        let rows = xs.len() / width;
        let sums = sum_over_rows::<T>(rows, 2 * width, |rows, sums| {
            let (dw, db) = sums.split_at_mut(width);
            for row in rows {
                let (x, dz) = (&xs[row * width..][..width], &out[row * width..][..width]);
                for i in 0..width {
                    dw[i] += dz[i] * (x[i] - mean[i]) * inverse[i];
                    db[i] += dz[i];
                }
            }
        });
        let (dw, db) = sums.split_at(width);
        let n = T::of(rows as f64);
        out.par_chunks_mut(piece).zip(xs.par_chunks(piece)).for_each(|(out, xs)| {
            for (out, x) in out.chunks_exact_mut(width).zip(xs.chunks_exact(width)) {
                if batch_statistics {
                    for i in 0..width {
                        let normal = (x[i] - mean[i]) * inverse[i];
                        out[i] = factor[i] * (out[i] - (db[i] + normal * dw[i]) / n);
                    }
                } else {
                    for i in 0..width {
                        out[i] *= factor[i];
                    }
                }
            }
        });
        Ok((tensor(out, x.shape())?, tensor(dw.to_vec(), width)?, tensor(db.to_vec(), width)?))
    })
}
