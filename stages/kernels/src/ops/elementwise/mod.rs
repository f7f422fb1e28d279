//! Element-wise passes: sums in place, residual connections, dropout, SiLU.

mod cuda;
#[cfg(test)]
mod device_tests;
pub mod glu;

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use crate::error::Result;
use crate::noise::DropMask;
use crate::{Float, dispatch, mapped, modify, multiversion, on_gpu, slice, tensor};

/// Elements per chunk of parallel work.
const CHUNK: usize = 8192;

/// `sum += x`, in place.
pub fn add_in_place(sum: &Tensor, x: &Tensor) -> Result<()> {
    on_gpu!(sum, cuda::add_in_place(sum, x));
    let x = x.contiguous()?;
    dispatch!(sum.dtype(), T => {
        let x = slice::<T>(&x)?;
        let x: &[T] = &x;
        modify::<T>(sum, |sum| {
            sum.par_chunks_mut(CHUNK)
                .zip(x.par_chunks(CHUNK))
                .for_each(|(sum, x)| {
                    for (sum, &x) in sum.iter_mut().zip(x) {
                        *sum += x;
                    }
                });
        })
    })
}

/// `x *= factor`, in place.
pub fn scale_in_place(x: &Tensor, factor: f64) -> Result<()> {
    on_gpu!(x, cuda::scale_in_place(x, factor));
    dispatch!(x.dtype(), T => modify::<T>(x, |x| {
        let factor = T::of(factor);
        x.par_chunks_mut(CHUNK).for_each(|x| {
            for x in x {
                *x *= factor;
            }
        });
    }))
}

/// `sum += share * (x - sum)`, in place.
pub fn blend_in_place(sum: &Tensor, x: &Tensor, share: f64) -> Result<()> {
    on_gpu!(sum, cuda::blend_all_in_place(&[(sum, x)], share));
    let x = x.contiguous()?;
    dispatch!(sum.dtype(), T => {
        let x = slice::<T>(&x)?;
        let x: &[T] = &x;
        modify::<T>(sum, |sum| {
            let share = T::of(share);
            sum.par_chunks_mut(CHUNK)
                .zip(x.par_chunks(CHUNK))
                .for_each(|(sum, x)| {
                    for (sum, &x) in sum.iter_mut().zip(x) {
                        *sum += share * (x - *sum);
                    }
                });
        })
    })
}

/// The same of many tensors, on one device, with `x` in the type of its sum or in bf16: one launch for each type on a GPU.
pub fn blend_all_in_place(pairs: &[(&Tensor, &Tensor)], share: f64) -> Result<()> {
    if pairs.first().is_some_and(|(sum, _)| crate::is_gpu(sum.device())) {
        return cuda::blend_all_in_place(pairs, share);
    }
    for (sum, x) in pairs {
        blend_in_place(sum, &x.to_dtype(sum.dtype())?, share)?;
    }
    Ok(())
}

/// `factor * drop(y)` of one element.
#[inline(always)]
fn dropped<T: Float>(y: T, index: usize, factor: T, mask: &DropMask) -> T {
    if mask.keeps(index) { y * factor } else { T::zero() }
}

/// `x + factor * drop(y)`.
pub fn residual(x: &Tensor, y: &Tensor, factor: f64, mask: Option<DropMask>) -> Result<Tensor> {
    on_gpu!(x, cuda::residual(Some(x), y, factor, mask));
    let (x, y) = (x.contiguous()?, y.contiguous()?);
    dispatch!(x.dtype(), T => {
        let (xs, ys) = (slice::<T>(&x)?, slice::<T>(&y)?);
        let (xs, ys): (&[T], &[T]) = (&xs, &ys);
        let keep = T::of(factor * mask.map_or(1.0, |m| m.keep_factor));
        let out = match mask {
            None => mapped([xs, ys], CHUNK, |[x, y]: [T; 2]| x + keep * y, |_, _| {}),
            Some(mask) => mapped([ys], CHUNK, |[y]: [T; 1]| y, |first, out| {
                for (i, (out, &x)) in out.iter_mut().zip(&xs[first..]).enumerate() {
                    *out = x + dropped(*out, first + i, keep, &mask);
                }
            }),
        };
        tensor(out, x.shape())
    })
}

/// `factor * drop(x)`; with the mask of the forward pass it is also the backward pass of itself and of [`residual`].
/// The same tensor comes back if there is nothing to do.
pub fn drop_scaled(x: &Tensor, factor: f64, mask: Option<DropMask>) -> Result<Tensor> {
    if mask.is_none() && factor == 1.0 {
        return Ok(x.clone());
    }
    on_gpu!(x, cuda::residual(None, x, factor, mask));
    let x = x.contiguous()?;
    dispatch!(x.dtype(), T => {
        let xs = slice::<T>(&x)?;
        let keep = T::of(factor * mask.map_or(1.0, |m| m.keep_factor));
        let out = match mask {
            None => mapped([&xs], CHUNK, |[x]: [T; 1]| keep * x, |_, _| {}),
            Some(mask) => mapped([&xs], CHUNK, |[x]: [T; 1]| x, |first, out| drop_all(out, first, keep, &mask)),
        };
        tensor(out, x.shape())
    })
}

/// `factor * drop(x)` in place, for the elements from `first`.
#[inline(always)]
fn drop_all<T: Float>(x: &mut [T], first: usize, factor: T, mask: &DropMask) {
    for (i, x) in x.iter_mut().enumerate() {
        *x = dropped(*x, first + i, factor, mask);
    }
}

/// `drop(silu(h))`, where `silu(h) = h * sigmoid(h)`.
pub fn silu(h: &Tensor, mask: Option<DropMask>) -> Result<Tensor> {
    silu_in(h.dtype(), h, mask)
}

/// The same, of type `dtype`; on a device that is f32 or bf16.
pub fn silu_in(dtype: DType, h: &Tensor, mask: Option<DropMask>) -> Result<Tensor> {
    on_gpu!(h, cuda::silu(dtype, h, mask));
    let h = h.contiguous()?;
    dispatch!(h.dtype(), T => {
        let hs = slice::<T>(&h)?;
        let out = mapped([&hs], CHUNK, |[h]: [T; 1]| h.silu(), |first, out| {
            if let Some(mask) = &mask {
                drop_all(out, first, T::of(mask.keep_factor), mask);
            }
        });
        Ok(tensor(out, h.shape())?.to_dtype(dtype)?)
    })
}

/// Gradient of [`silu`] with respect to `h`, given `dy`, that of its result; of type `dtype`, which on a device is f32 or
/// bf16. On a CPU it is computed in the memory of `dy`, which must not be used afterwards.
pub fn silu_backward(dtype: DType, h: &Tensor, dy: Tensor, mask: Option<DropMask>) -> Result<Tensor> {
    on_gpu!(h, cuda::silu_backward(dtype, h, &dy, mask));
    let (h, dy) = (h.contiguous()?, dy.contiguous()?);
    dispatch!(h.dtype(), T => {
        let hs = slice::<T>(&h)?;
        let hs: &[T] = &hs;
        modify::<T>(&dy, |dy| {
            dy.par_chunks_mut(CHUNK).zip(hs.par_chunks(CHUNK)).enumerate().for_each(|(number, (dy, hs))| multiversion!({
                for (dy, &h) in dy.iter_mut().zip(hs) {
                    *dy *= silu_slope(h);
                }
                if let Some(mask) = &mask {
                    drop_all(dy, number * CHUNK, T::of(mask.keep_factor), mask);
                }
            }));
        })
    })?;
    Ok(dy.to_dtype(dtype)?)
}

/// Derivative of `h * sigmoid(h)`.
#[inline(always)]
pub(crate) fn silu_slope<T: Float>(h: T) -> T {
    let s = h.sigmoid();
    s * (T::one() + h * (T::one() - s))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::Noise;
    use crate::testing::{check_gradient, max_difference, normal};

    #[test]
    fn silu_gradient_agrees_with_finite_differences_with_and_without_dropout() {
        let mut noise = Noise::new(5);
        let h = normal(&[7, 13], &mut noise);
        let weight = normal(&[7, 13], &mut noise);
        for mask in [None, DropMask::draw(0.3, &mut noise)] {
            let gradient = silu_backward(DType::F64, &h, weight.copy().unwrap(), mask).unwrap();
            check_gradient("silu", &h, &weight, &gradient, |h| silu(h, mask));
        }
    }

    #[test]
    fn residual_adds_the_kept_elements_scaled() {
        let mut noise = Noise::new(6);
        let (x, y) = (normal(&[3, 5000], &mut noise), normal(&[3, 5000], &mut noise));
        let mask = DropMask::draw(0.25, &mut noise);
        let sum = residual(&x, &y, 0.5, mask).unwrap();
        let part = drop_scaled(&y, 0.5, mask).unwrap();
        assert!(max_difference(&sum, &(&x + &part).unwrap()) < 1e-15);
        let kept = crate::testing::values(&part).iter().filter(|v| **v != 0.0).count();
        assert!((kept as f64 / 15000.0 - 0.75).abs() < 0.02);
    }

    #[test]
    fn in_place_sum_and_scale() {
        let mut noise = Noise::new(7);
        let (a, b) = (normal(&[9000], &mut noise), normal(&[9000], &mut noise));
        let expected = ((&a + &b).unwrap() * 0.25).unwrap();
        let sum = a.copy().unwrap();
        add_in_place(&sum, &b).unwrap();
        scale_in_place(&sum, 0.25).unwrap();
        assert!(max_difference(&sum, &expected) < 1e-15);
        let between = ((&a * 0.75).unwrap() + (&b * 0.25).unwrap()).unwrap();
        let blended = a.copy().unwrap();
        blend_in_place(&blended, &b, 0.25).unwrap();
        assert!(max_difference(&blended, &between) < 1e-15);
    }
}
