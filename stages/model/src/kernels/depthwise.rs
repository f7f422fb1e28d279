//! Depthwise convolution over time, channels last: (B, T, C) with a kernel (C, 1, k), zero padding (k - 1) / 2 on both
//! sides.

use candle_core::Tensor;
use rayon::prelude::*;

use super::{Float, dispatch, slice, sum_over_rows, tensor};
use crate::error::Result;

/// The kernel (C, 1, k) as rows of taps (k, C).
fn by_tap<T: Float>(weight: &[T], channels: usize) -> Vec<T> {
    let taps = weight.len() / channels;
    let mut out = vec![T::zero(); weight.len()];
    for c in 0..channels {
        for k in 0..taps {
            out[k * channels + c] = weight[c * taps + k];
        }
    }
    out
}

/// `out[c] += sum over taps of weight[tap][c] * rows[t + sign * (tap - half)][c]`, for one frame.
#[inline(always)]
fn frame<T: Float>(out: &mut [T], utterance: &[T], t: usize, taps: &[T], flip: bool) {
    let channels = out.len();
    let count = taps.len() / channels;
    let half = count / 2;
    let time = utterance.len() / channels;
    for k in 0..count {
        let shifted = if flip { t + half } else { t + k };
        let back = if flip { k } else { half };
        if shifted < back || shifted - back >= time {
            continue;
        }
        let x = &utterance[(shifted - back) * channels..][..channels];
        let w = &taps[k * channels..][..channels];
        for ((out, &x), &w) in out.iter_mut().zip(x).zip(w) {
            *out = w.mul_add(x, *out);
        }
    }
}

/// The convolution. `x` (B, T, C), `weight` (C, 1, k) with odd k, `bias` (C).
pub fn depthwise(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let x = x.contiguous()?;
    let (batch, time, channels) = x.dims3()?;
    dispatch!(x.dtype(), T => {
        let xs = slice::<T>(&x)?;
        let xs: &[T] = &xs;
        let taps = by_tap(&slice::<T>(weight)?, channels);
        let bias = bias.map(slice::<T>).transpose()?;
        let bias: Option<&[T]> = bias.as_deref();
        let mut out = vec![0.0 as T; xs.len()];
        out.par_chunks_mut(channels).enumerate().with_min_len(8).for_each(|(row, out)| {
            if let Some(bias) = bias {
                out.copy_from_slice(bias);
            }
            let utterance = &xs[row / time * time * channels..][..time * channels];
            frame(out, utterance, row % time, &taps, false);
        });
        tensor(out, (batch, time, channels))
    })
}

/// Gradient with respect to `x`.
pub fn depthwise_backward(dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let dy = dy.contiguous()?;
    let (batch, time, channels) = dy.dims3()?;
    dispatch!(dy.dtype(), T => {
        let dys = slice::<T>(&dy)?;
        let dys: &[T] = &dys;
        let taps = by_tap(&slice::<T>(weight)?, channels);
        let mut out = vec![0.0 as T; dys.len()];
        out.par_chunks_mut(channels).enumerate().with_min_len(8).for_each(|(row, out)| {
            let utterance = &dys[row / time * time * channels..][..time * channels];
            frame(out, utterance, row % time, &taps, true);
        });
        tensor(out, (batch, time, channels))
    })
}

/// Gradient with respect to the kernel, (C, 1, k).
pub fn depthwise_backward_weight(x: &Tensor, dy: &Tensor, taps: usize) -> Result<Tensor> {
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let (batch, time, channels) = x.dims3()?;
    let half = taps / 2;
    dispatch!(x.dtype(), T => {
        let (xs, dys) = (slice::<T>(&x)?, slice::<T>(&dy)?);
        let (xs, dys): (&[T], &[T]) = (&xs, &dys);
        let sums = sum_over_rows::<T>(batch * time, taps * channels, |rows, sums| {
            for row in rows {
                let (first, t) = (row / time * time, row % time);
                let dy = &dys[row * channels..][..channels];
                for k in 0..taps {
                    if t + k < half || t + k - half >= time {
                        continue;
                    }
                    let x = &xs[(first + t + k - half) * channels..][..channels];
                    let sums = &mut sums[k * channels..][..channels];
                    for ((sum, &x), &dy) in sums.iter_mut().zip(x).zip(dy) {
                        *sum = x.mul_add(dy, *sum);
                    }
                }
            }
        });
        let mut out = vec![0.0 as T; taps * channels];
        for c in 0..channels {
            for k in 0..taps {
                out[c * taps + k] = sums[k * channels + c];
            }
        }
        tensor(out, (channels, 1, taps))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{check_gradient, normal};
    use crate::noise::Noise;

    #[test]
    fn gradients_agree_with_finite_differences_also_where_the_kernel_is_wider_than_the_signal() {
        let mut noise = Noise::new(12);
        for (time, taps) in [(7, 3), (4, 9), (1, 5)] {
            let x = normal(&[2, time, 3], &mut noise);
            let kernel = normal(&[3, 1, taps], &mut noise);
            let weight = normal(&[2, time, 3], &mut noise);
            let dx = depthwise_backward(&weight, &kernel).unwrap();
            check_gradient("x", &x, &weight, &dx, |x| depthwise(x, &kernel, None));
            let dw = depthwise_backward_weight(&x, &weight, taps).unwrap();
            check_gradient("kernel", &kernel, &weight, &dw, |k| depthwise(&x, k, None));
        }
    }
}
