//! Layer normalisation over the last dimension: `(x - mean) / sqrt(variance + 1e-5) * weight + bias`, with the biased
//! variance.

use candle_core::Tensor;
use rayon::prelude::*;

use super::{Float, dispatch, rows_per_piece, slice, sum_of, sum_over_rows, tensor};
use crate::error::Result;

const EPSILON: f64 = 1e-5;

/// `x` (.., d) normalised; and mean and inverse deviation of every row, (rows, 2), for the backward pass.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<(Tensor, Tensor)> {
    let x = x.contiguous()?;
    let d = weight.elem_count();
    dispatch!(x.dtype(), T => {
        let (xs, weight, bias) = (slice::<T>(&x)?, slice::<T>(weight)?, slice::<T>(bias)?);
        let (xs, weight, bias): (&[T], &[T], &[T]) = (&xs, &weight, &bias);
        let rows = xs.len() / d;
        let piece = rows_per_piece(d);
        let mut out = vec![0.0 as T; xs.len()];
        let mut statistics = vec![0.0 as T; rows * 2];
        out.par_chunks_mut(piece * d)
            .zip(statistics.par_chunks_mut(piece * 2))
            .zip(xs.par_chunks(piece * d))
            .for_each(|((out, statistics), xs)| {
                for ((out, statistics), x) in out
                    .chunks_exact_mut(d)
                    .zip(statistics.chunks_exact_mut(2))
                    .zip(xs.chunks_exact(d))
                {
                    let n = T::of(d as f64);
                    let mean = sum_of(d, |i| x[i]) / n;
                    let variance = sum_of(d, |i| (x[i] - mean) * (x[i] - mean)) / n;
                    let inverse = (variance + T::of(EPSILON)).sqrt().recip();
                    statistics[0] = mean;
                    statistics[1] = inverse;
                    for i in 0..d {
                        out[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
                    }
                }
            });
        Ok((tensor(out, x.shape())?, tensor(statistics, (rows, 2))?))
    })
}

/// Gradient with respect to `x`, plus `residual` where given (the gradient that goes round the block).
pub fn layer_norm_backward(
    x: &Tensor,
    statistics: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let residual = residual.map(Tensor::contiguous).transpose()?;
    let d = weight.elem_count();
    dispatch!(x.dtype(), T => {
        let (xs, dys) = (slice::<T>(&x)?, slice::<T>(&dy)?);
        let (xs, dys): (&[T], &[T]) = (&xs, &dys);
        let (statistics, weight) = (slice::<T>(statistics)?, slice::<T>(weight)?);
        let (statistics, weight): (&[T], &[T]) = (&statistics, &weight);
        let mut out = match &residual {
            Some(residual) => slice::<T>(residual)?.to_vec(),
            None => vec![0.0 as T; xs.len()],
        };
        let piece = rows_per_piece(d);
        out.par_chunks_mut(piece * d)
            .zip(xs.par_chunks(piece * d))
            .zip(dys.par_chunks(piece * d))
            .zip(statistics.par_chunks(piece * 2))
            .for_each(|(((out, xs), dys), statistics)| {
                for (((out, x), dy), statistics) in out
                    .chunks_exact_mut(d)
                    .zip(xs.chunks_exact(d))
                    .zip(dys.chunks_exact(d))
                    .zip(statistics.chunks_exact(2))
                {
                    let (mean, inverse) = (statistics[0], statistics[1]);
                    let n = T::of(d as f64);
                    let weight = &weight[..d];
                    let sum = sum_of(d, |i| dy[i] * weight[i]) / n;
                    let along = sum_of(d, |i| dy[i] * weight[i] * (x[i] - mean)) * inverse / n;
                    for i in 0..d {
                        let normal = (x[i] - mean) * inverse;
                        out[i] += inverse * (dy[i] * weight[i] - sum - normal * along);
                    }
                }
            });
        tensor(out, x.shape())
    })
}

/// Gradients of weight and bias, each (d).
pub fn layer_norm_backward_weights(x: &Tensor, statistics: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let d = x.dims().last().copied().unwrap_or(1);
    dispatch!(x.dtype(), T => {
        let (xs, dys, statistics) = (slice::<T>(&x)?, slice::<T>(&dy)?, slice::<T>(statistics)?);
        let (xs, dys, statistics): (&[T], &[T], &[T]) = (&xs, &dys, &statistics);
        let sums = sum_over_rows::<T>(xs.len() / d, 2 * d, |rows, sums| {
            let (dw, db) = sums.split_at_mut(d);
            for row in rows {
                let (x, dy) = (&xs[row * d..][..d], &dys[row * d..][..d]);
                let (mean, inverse) = (statistics[2 * row], statistics[2 * row + 1]);
                for i in 0..d {
                    dw[i] += dy[i] * (x[i] - mean) * inverse;
                    db[i] += dy[i];
                }
            }
        });
        let (dw, db) = sums.split_at(d);
        Ok((tensor(dw.to_vec(), d)?, tensor(db.to_vec(), d)?))
    })
}
