//! Layer normalisation over the last dimension: `(x - mean) / sqrt(variance + 1e-5) * weight + bias`, with the biased
//! variance.

mod cuda;
#[cfg(test)]
mod device_tests;

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};
use crate::noise::DropMask;
use crate::ops::elementwise::{drop_scaled, residual};
use crate::ops::sums::column_sums::ColumnSums;
use crate::{Float, dispatch, multiversion, on_gpu, rows_and_sums, slice, sum_of, tensor, two_by_rows};

const EPSILON: f64 = 1e-5;

/// `x` (.., d) normalised; and mean and inverse deviation of every row, (rows, 2), for the backward pass.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<(Tensor, Tensor)> {
    layer_norm_in(x.dtype(), x, weight, bias)
}

/// The same, the result of type `dtype`. On a device that is f32 or bf16.
pub fn layer_norm_in(dtype: DType, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<(Tensor, Tensor)> {
    on_gpu!(x, cuda::layer_norm(dtype, x, weight, bias));
    let x = x.contiguous()?;
    let d = weight.elem_count();
    dispatch!(x.dtype(), T => {
        let (xs, weight, bias) = (slice::<T>(&x)?, slice::<T>(weight)?, slice::<T>(bias)?);
        let (xs, weight, bias): (&[T], &[T], &[T]) = (&xs, &weight[..d], &bias[..d]);
        let rows = xs.len() / d;
        let n = T::of(d as f64);
        let (out, statistics) = two_by_rows(rows, [d, 2], |first, out, statistics| multiversion!({
            let xs = xs[first * d..].chunks_exact(d);
            for ((out, statistics), x) in out.chunks_exact_mut(d).zip(statistics.chunks_exact_mut(2)).zip(xs) {
                let mean = sum_of([x], |[x]| x) / n;
                let variance = sum_of([x], |[x]| (x - mean) * (x - mean)) / n;
                let inverse = (variance + T::of(EPSILON)).sqrt().recip();
                statistics.copy_from_slice(&[mean, inverse]);
                for (((out, &x), &weight), &bias) in out.iter_mut().zip(x).zip(weight).zip(bias) {
                    *out = (x - mean) * inverse * weight + bias;
                }
            }
        }));
        Ok((tensor(out, x.shape())?.to_dtype(dtype)?, tensor(statistics, (rows, 2))?))
    })
}

/// `sum = x + factor * drop(y)`, for `x` and `y` (.., d); and [`layer_norm_in`] of the sum, with its statistics.
pub fn add_and_norm(
    dtype: DType,
    x: &Tensor,
    y: &Tensor,
    (factor, mask): (f64, Option<DropMask>),
    weight: &Tensor,
    bias: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    on_gpu!(x, cuda::add_and_norm(dtype, x, y, (factor, mask), weight, bias));
    let sum = residual(x, y, factor, mask)?;
    let (normalised, statistics) = layer_norm_in(dtype, &sum, weight, bias)?;
    Ok((sum, normalised, statistics))
}

/// What [`add_and_norm_twice`] gives, (.., d) each.
pub struct TwoNorms {
    pub sum: Tensor,
    /// The sum normalised.
    pub out: Tensor,
    /// That normalised again.
    pub next: Tensor,
    /// Of both normalisations, (rows, 2).
    pub statistics: [Tensor; 2],
}

/// [`add_and_norm`]; and [`layer_norm_in`] of what it gives, by other parameters. `by`: weight and bias of both, in order.
pub fn add_and_norm_twice(
    dtype: DType,
    x: &Tensor,
    y: &Tensor,
    drop: (f64, Option<DropMask>),
    by: [(&Tensor, &Tensor); 2],
) -> Result<TwoNorms> {
    on_gpu!(x, cuda::add_and_norm_twice(dtype, x, y, drop, by));
    let [(weight, bias), (next_weight, next_bias)] = by;
    let (sum, out, statistics) = add_and_norm(x.dtype(), x, y, drop, weight, bias)?;
    let (next, next_statistics) = layer_norm_in(dtype, &out, next_weight, next_bias)?;
    Ok(TwoNorms {
        sum,
        out,
        next,
        statistics: [statistics, next_statistics],
    })
}

/// What the backward pass of a normalisation needs.
#[derive(Clone, Copy)]
pub struct NormInput<'a> {
    pub x: &'a Tensor,
    /// (rows, 2)
    pub statistics: &'a Tensor,
    pub weight: &'a Tensor,
}

/// The way back through [`add_and_norm_twice`]: [`layer_norm_backward`] of the second, with the gradient of its result and the
/// residual, and [`layer_norm_backward_dropped`] of the first. The sums are those of the second and of the first; then the
/// gradient of the first one's input, and that dropped.
pub fn layer_norm_backward_twice(
    dtype: DType,
    next: NormInput,
    (dy, residual): (&Tensor, &Tensor),
    norm: NormInput,
    drop: (f64, Option<DropMask>),
) -> Result<([ColumnSums; 2], Tensor, Tensor)> {
    on_gpu!(
        dy,
        cuda::layer_norm_backward_twice(dtype, next, (dy, residual), norm, drop)
    );
    let (between, next_sums) = layer_norm_backward(next.x, next.statistics, next.weight, dy, Some(residual))?;
    let ((dx, sums), dropped) =
        layer_norm_backward_dropped(dtype, norm.x, norm.statistics, norm.weight, &between, None, drop)?;
    Ok(([next_sums, sums], dx, dropped))
}

/// Gradients of a layer normalisation: with respect to `x` (.., d), and to weight and bias, (2 d) sums.
pub type LayerNormGradients = (Tensor, ColumnSums);

/// [`layer_norm_backward`]; and `factor * drop(dx)` of the gradient dx with respect to `x`, of type `dtype`, which on a device
/// is f32 or bf16.
pub fn layer_norm_backward_dropped(
    dtype: DType,
    x: &Tensor,
    statistics: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    residual: Option<&Tensor>,
    (factor, mask): (f64, Option<DropMask>),
) -> Result<(LayerNormGradients, Tensor)> {
    if crate::is_gpu(x.device()) && (mask.is_some() || factor != 1.0 || dtype != x.dtype()) {
        let drop = Some((dtype, factor, mask));
        let (gradients, dropped) = cuda::layer_norm_backward(x, statistics, weight, dy, residual, drop)?;
        let dropped = dropped.ok_or_else(|| Error::Input("a gradient was not dropped".into()))?;
        return Ok((gradients, dropped));
    }
    let gradients = layer_norm_backward(x, statistics, weight, dy, residual)?;
    let dropped = drop_scaled(&gradients.0, factor, mask)?.to_dtype(dtype)?;
    Ok((gradients, dropped))
}

/// Gradients with respect to `x`, plus `residual` where given (the gradient that goes round the block), and to weight
/// and bias, (2 d) sums.
pub fn layer_norm_backward(
    x: &Tensor,
    statistics: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    residual: Option<&Tensor>,
) -> Result<LayerNormGradients> {
    if crate::is_gpu(x.device()) {
        return Ok(cuda::layer_norm_backward(x, statistics, weight, dy, residual, None)?.0);
    }
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let residual = residual.map(Tensor::contiguous).transpose()?;
    let d = weight.elem_count();
    dispatch!(x.dtype(), T => {
        let (xs, dys) = (slice::<T>(&x)?, slice::<T>(&dy)?);
        let (xs, dys): (&[T], &[T]) = (&xs, &dys);
        let (statistics, weight) = (slice::<T>(statistics)?, slice::<T>(weight)?);
        let (statistics, weight): (&[T], &[T]) = (&statistics, &weight[..d]);
        let residual = residual.as_ref().map(slice::<T>).transpose()?;
        let residual: Option<&[T]> = residual.as_deref();
        let n = T::of(d as f64);
        let (out, sums) = rows_and_sums(xs.len() / d, d, 2 * d, |rows, out: &mut [T], sums| multiversion!({
            let (dw, db) = sums.split_at_mut(d);
            if let Some(residual) = residual {
                out.copy_from_slice(&residual[rows.start * d..rows.end * d]);
            }
            for (row, out) in rows.zip(out.chunks_exact_mut(d)) {
                let (x, dy) = (&xs[row * d..][..d], &dys[row * d..][..d]);
                let (mean, inverse) = (statistics[2 * row], statistics[2 * row + 1]);
                let sum = sum_of([dy, weight], |[dy, w]| dy * w) / n;
                let along = sum_of([dy, weight, x], |[dy, w, x]| dy * w * (x - mean)) * inverse / n;
                // Short loops over few slices, as the compiler makes vector code of those only.
                for (out, (&x, (&dy, &w))) in out.iter_mut().zip(x.iter().zip(dy.iter().zip(weight))) {
                    *out += inverse * (dy * w - sum - (x - mean) * inverse * along);
                }
                for (((dw, db), &x), &dy) in dw.iter_mut().zip(&mut *db).zip(x).zip(dy) {
                    *dw += dy * ((x - mean) * inverse);
                    *db += dy;
                }
            }
        }));
        Ok((tensor(out, x.shape())?, ColumnSums::whole(tensor(sums, 2 * d)?)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::Noise;
    use crate::testing::{check_gradient, max_difference, normal};

    #[test]
    fn gradients_agree_with_finite_differences_with_and_without_residual() {
        let mut noise = Noise::new(41);
        for (rows, d) in [(3, 5), (40, 16), (2, 50)] {
            let x = normal(&[rows, d], &mut noise);
            let (weight, bias) = (normal(&[d], &mut noise), normal(&[d], &mut noise));
            let (factors, round) = (normal(&[rows, d], &mut noise), normal(&[rows, d], &mut noise));
            let (_, statistics) = layer_norm(&x, &weight, &bias).unwrap();
            let (dx, sums) = layer_norm_backward(&x, &statistics, &weight, &factors, None).unwrap();
            let sums = sums.total().unwrap();
            let (dw, db) = (sums.narrow(0, 0, d).unwrap(), sums.narrow(0, d, d).unwrap());
            let run = |x: &Tensor, w: &Tensor, b: &Tensor| layer_norm(x, w, b).map(|(y, _)| y);
            check_gradient("x", &x, &factors, &dx, |x| run(x, &weight, &bias));
            check_gradient("weight", &weight, &factors, &dw, |w| run(&x, w, &bias));
            check_gradient("bias", &bias, &factors, &db, |b| run(&x, &weight, b));
            let (with, _) = layer_norm_backward(&x, &statistics, &weight, &factors, Some(&round)).unwrap();
            assert!(max_difference(&with, &(dx + round).unwrap()) < 1e-13);
        }
    }
}
