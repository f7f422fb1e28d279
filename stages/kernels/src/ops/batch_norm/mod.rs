//! Batch normalisation over rows, followed by SiLU, in one pass.

pub(crate) mod cuda;
#[cfg(test)]
mod device_tests;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::elementwise::silu_slope;
use crate::error::{Error, Result};
use crate::{
    Float, by_chunks, dispatch, multiversion, on_gpu, rows_and_sums, rows_per_chunk, slice, sum_over_rows, tensor,
};

/// Added to variances.
pub(crate) const EPSILON: f64 = 1e-5;
/// Weight of a new batch in the running statistics.
pub const MOMENTUM: f64 = 0.1;

/// The factor that makes the variance of this many rows unbiased. Of a single row torch takes n / 0; we keep the biased
/// variance then.
pub(crate) fn unbiased(rows: usize) -> f64 {
    rows as f64 / (rows as f64 - 1.0).max(1.0)
}

/// Statistics of the columns of `x` (.., C), each (C): the mean, `1 / sqrt(variance + 1e-5)`, and `running`, mean and
/// variance, moved by a tenth towards those of `x`, the variance towards the unbiased one.
pub fn batch_statistics(x: &Tensor, running: (&Tensor, &Tensor)) -> Result<(Tensor, Tensor, [Tensor; 2])> {
    on_gpu!(x, cuda::batch_statistics(x, running));
    let rows = x.elem_count() / running.0.elem_count().max(1);
    let (mean, variance) = column_statistics(x)?;
    let moved = [
        moved(running.0, &mean, 1.0)?,
        moved(running.1, &variance, unbiased(rows))?,
    ];
    Ok((like(mean, x)?, like(inverse(&variance), x)?, moved))
}

/// Running statistics moved by a tenth towards `factor` times those of a batch.
fn moved(running: &Tensor, batch: &[f64], factor: f64) -> Result<Tensor> {
    let moved = wide(running)?
        .iter()
        .zip(batch)
        .map(|(old, new)| (1.0 - MOMENTUM) * old + MOMENTUM * new * factor)
        .collect();
    like(moved, running)
}

/// Moments of the columns of `x` (.., C) for [`joined_statistics`], (2C + 1) in f64: the mean of each column, its biased
/// variance, and the number of rows.
pub fn column_moments(x: &Tensor, width: usize) -> Result<Tensor> {
    on_gpu!(x, cuda::column_moments(x, width));
    let rows = x.elem_count() / width.max(1);
    let (mut moments, variance) = column_statistics(x)?;
    moments.extend(variance);
    moments.push(rows as f64);
    let count = moments.len();
    Ok(Tensor::from_vec(moments, count, &Device::Cpu)?)
}

/// As [`batch_statistics`], of the rows behind several [`column_moments`], (parts, 2C + 1), in their order. A part without
/// rows is all zeros.
pub fn joined_statistics(moments: &Tensor, running: (&Tensor, &Tensor)) -> Result<(Tensor, Tensor, [Tensor; 2])> {
    on_gpu!(moments, cuda::joined_statistics(moments, running));
    let width = running.0.elem_count();
    check_parts(moments, width)?;
    let parts = moments.to_vec2::<f64>()?;
    let rows: f64 = parts.iter().map(|part| part[2 * width]).sum();
    let over = |column: &dyn Fn(&[f64]) -> f64| -> f64 {
        parts.iter().map(|part| part[2 * width] * column(part)).sum::<f64>() / rows
    };
    let mean: Vec<f64> = (0..width).map(|c| over(&|part| part[c])).collect();
    let variance: Vec<f64> = (0..width)
        .map(|c| over(&|part| part[width + c] + (part[c] - mean[c]).powi(2)))
        .collect();
    let moved = [
        moved(running.0, &mean, 1.0)?,
        moved(running.1, &variance, unbiased(rows as usize))?,
    ];
    Ok((like(mean, running.0)?, like(inverse(&variance), running.0)?, moved))
}

/// Refuses what is not (parts, 2C + 1) in f64.
pub(crate) fn check_parts(parts: &Tensor, width: usize) -> Result<()> {
    match parts.dims() {
        [count, sums] if *count > 0 && *sums == 2 * width + 1 && parts.dtype() == DType::F64 => Ok(()),
        dims => Err(Error::Input(format!(
            "batch norm: sums of shape {dims:?} in {} for {width} columns",
            parts.dtype().as_str()
        ))),
    }
}

/// `1 / sqrt(variance + 1e-5)`, in 64 bits and rounded.
pub fn inverse_deviation(variance: &Tensor) -> Result<Tensor> {
    on_gpu!(variance, cuda::inverse_deviation(variance));
    like(inverse(&wide(variance)?), variance)
}

fn inverse(variance: &[f64]) -> Vec<f64> {
    variance.iter().map(|v| 1.0 / (v + EPSILON).sqrt()).collect()
}

fn wide(vector: &Tensor) -> Result<Vec<f64>> {
    Ok(vector.to_dtype(DType::F64)?.to_vec1()?)
}

/// A vector of the type of another tensor.
fn like(values: Vec<f64>, other: &Tensor) -> Result<Tensor> {
    let count = values.len();
    Ok(Tensor::from_vec(values, count, &Device::Cpu)?.to_dtype(other.dtype())?)
}

/// Mean and biased variance of every column of `x` (.., C), each (C), summed in f64.
fn column_statistics(x: &Tensor) -> Result<(Vec<f64>, Vec<f64>)> {
    let x = x.contiguous()?;
    let width = x.dims().last().copied().unwrap_or(1);
    dispatch!(x.dtype(), T => {
        let xs = slice::<T>(&x)?;
        let xs: &[T] = &xs;
        let mean = column_means(xs, width, None);
        let rounded: Vec<T> = mean.iter().map(|&mean| T::of(mean)).collect();
        let rounded = &rounded[..width];
        let squares = column_means(xs, width, Some(rounded));
        // About the mean rounded to T; the variance is corrected by the rounding error of the mean.
        let variance = squares
            .iter()
            .zip(mean.iter().zip(rounded))
            .map(|(square, (mean, rounded))| square - (mean - rounded.wide()).powi(2))
            .collect();
        Ok((mean, variance))
    })
}

/// Means per column, of the squared distance from `about` where that is given: short runs of rows are added in T, as the
/// tensor has them, and those in f64.
fn column_means<T: Float>(xs: &[T], width: usize, about: Option<&[T]>) -> Vec<f64> {
    let rows = xs.len() / width;
    let sums = sum_over_rows::<f64>(rows, width, |rows, sums| {
        multiversion!({
            let mut short = vec![T::zero(); width];
            for run in xs[rows.start * width..rows.end * width].chunks(8 * width) {
                short.fill(T::zero());
                for row in run.chunks_exact(width) {
                    match about {
                        None => {
                            for (sum, &x) in short.iter_mut().zip(row) {
                                *sum += x;
                            }
                        }
                        Some(about) => {
                            for (sum, (&x, &about)) in short.iter_mut().zip(row.iter().zip(about)) {
                                *sum += (x - about) * (x - about);
                            }
                        }
                    }
                }
                for (sum, &short) in sums.iter_mut().zip(&short) {
                    *sum += short.wide();
                }
            }
        })
    });
    sums.iter().map(|sum| sum / rows as f64).collect()
}

/// The parameters of the normalisation of each column, all (C): `z = (x - mean) * inverse * weight + bias`.
pub struct Normaliser<'a> {
    pub mean: &'a Tensor,
    /// `1 / sqrt(variance + 1e-5)`.
    pub inverse: &'a Tensor,
    pub weight: &'a Tensor,
    pub bias: &'a Tensor,
}

/// `silu(z)` of `x` (.., C).
pub fn normalise_silu(x: &Tensor, by: &Normaliser) -> Result<Tensor> {
    on_gpu!(x, cuda::normalise_silu(x, by));
    let x = x.contiguous()?;
    let width = by.mean.elem_count();
    dispatch!(x.dtype(), T => {
        let xs = slice::<T>(&x)?;
        let xs: &[T] = &xs;
        let (factor, offset) = affine::<T>(by)?;
        let (factor, offset) = (&factor[..width], &offset[..width]);
        let chunk = rows_per_chunk(width) * width;
        let out = by_chunks(xs.len(), chunk, |number, out| multiversion!({
            for (out, x) in out.chunks_exact_mut(width).zip(xs[number * chunk..].chunks_exact(width)) {
                for (out, (&x, (&factor, &offset))) in out.iter_mut().zip(x.iter().zip(factor.iter().zip(offset))) {
                    *out = (x * factor + offset).silu();
                }
            }
        }));
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

/// What mean and variance were made of, and so which part they have in the gradient of `x`.
pub enum Statistics<'a> {
    /// Not of `x`.
    Constant,
    /// Of the rows of `x`.
    Own,
    /// Of the rows of several parts, of which `x` is one. The function is given the sums of this part, (2C + 1) in f64 (the
    /// gradients of weight and bias, and the number of rows), and gives those of all parts, (parts, 2C + 1).
    Joined(Gather<'a>),
}

/// Gathers what each part has, (n), to (parts, n).
pub type Gather<'a> = &'a mut dyn FnMut(&Tensor) -> Result<Tensor>;

/// Sums of a part for [`Statistics::Joined`].
pub(crate) fn part_sums(dw: &Tensor, db: &Tensor, rows: usize) -> Result<Tensor> {
    let rows = Tensor::full(rows as f64, 1, dw.device())?;
    Ok(Tensor::cat(
        &[&dw.to_dtype(DType::F64)?, &db.to_dtype(DType::F64)?, &rows],
        0,
    )?)
}

/// Gradients of [`normalise_silu`]: (dx, d weight, d bias), the latter two of the rows of `x` alone.
pub fn normalise_silu_backward(
    x: &Tensor,
    by: &Normaliser,
    dy: &Tensor,
    statistics: Statistics,
) -> Result<(Tensor, Tensor, Tensor)> {
    on_gpu!(x, cuda::normalise_silu_backward(x, by, dy, statistics));
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let width = by.mean.elem_count();
    dispatch!(x.dtype(), T => {
        let (xs, dys) = (slice::<T>(&x)?, slice::<T>(&dy)?);
        let (xs, dys): (&[T], &[T]) = (&xs, &dys);
        let (factor, offset) = affine::<T>(by)?;
        let (mean, inverse) = (slice::<T>(by.mean)?, slice::<T>(by.inverse)?);
        let (mean, inverse): (&[T], &[T]) = (&mean[..width], &inverse[..width]);
        let (factor, offset) = (&factor[..width], &offset[..width]);
        let rows = xs.len() / width;
        // First dz, in the memory of dx; and the sums of dz (x - mean) and dz.
        let (mut out, sums) = rows_and_sums(rows, width, 2 * width, |rows, out: &mut [T], sums| multiversion!({
            let (dw, db) = sums.split_at_mut(width);
            for (row, out) in rows.zip(out.chunks_exact_mut(width)) {
                let (x, dy) = (&xs[row * width..][..width], &dys[row * width..][..width]);
                // Short loops over few slices, as the compiler makes vector code of those only.
                let z = x.iter().zip(factor.iter().zip(offset));
                for (dz, (&dy, (&x, (&factor, &offset)))) in out.iter_mut().zip(dy.iter().zip(z)) {
                    *dz = dy * silu_slope(x * factor + offset);
                }
                for (dw, (&dz, (&x, &mean))) in dw.iter_mut().zip(out.iter().zip(x.iter().zip(mean))) {
                    *dw += dz * (x - mean);
                }
                for (db, &dz) in db.iter_mut().zip(out.iter()) {
                    *db += dz;
                }
            }
        }));
        let (dw, db) = sums.split_at(width);
        let dw: Vec<T> = dw.iter().zip(inverse).map(|(&dw, &inverse)| dw * inverse).collect();
        let (dw, db) = (tensor(dw, width)?, tensor(db.to_vec(), width)?);
        let (level, slope): (Vec<T>, Vec<T>) = match statistics {
            Statistics::Constant => (vec![0.0; width], vec![0.0; width]),
            Statistics::Own => {
                let n = T::of(rows as f64);
                let (dw, db) = (slice::<T>(&dw)?, slice::<T>(&db)?);
                db.iter().zip(dw.iter().zip(inverse)).map(|(&db, (&dw, &inverse))| (db / n, dw * inverse / n)).unzip()
            }
            Statistics::Joined(gather) => {
                let parts = gather(&part_sums(&dw, &db, rows)?)?;
                check_parts(&parts, width)?;
                let parts = parts.to_vec2::<f64>()?;
                let total = |at: usize| -> f64 { parts.iter().map(|part| part[at]).sum() };
                let n = total(2 * width);
                let of = |c: usize| (T::of(total(width + c) / n), T::of(total(c) * inverse[c].wide() / n));
                (0..width).map(of).unzip()
            }
        };
        let (level, slope) = (&level[..width], &slope[..width]);
        let chunk = rows_per_chunk(width) * width;
        out.par_chunks_mut(chunk).zip(xs.par_chunks(chunk)).for_each(|(out, xs)| {
            multiversion!({
                for (out, x) in out.chunks_exact_mut(width).zip(xs.chunks_exact(width)) {
                    let (out, x) = (&mut out[..width], &x[..width]);
                    for i in 0..width {
                        out[i] = factor[i] * (out[i] - level[i] - (x[i] - mean[i]) * slope[i]);
                    }
                }
            })
        });
        Ok((tensor(out, x.shape())?, dw, db))
    })
}
