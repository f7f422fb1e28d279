//! Depthwise convolution over time, channels last: (B, T, C) with a kernel (C, 1, k), zero padding (k - 1) / 2 on both
//! sides.

mod cuda;
#[cfg(test)]
mod device_tests;

use candle_core::Tensor;

use crate::error::Result;
use crate::{Float, by_chunks, dispatch, multiversion, on_gpu, rows_per_chunk, slice, sum_over_rows, tensor};

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

/// Taps that are added in one pass over the channels: fewer passes over the sums, which a vector loop keeps in memory.
const TOGETHER: usize = 3;

/// `out[c] += sum over taps of weight[tap][c] * rows[t + tap - half][c]`, for one frame; with `flip`, of
/// `rows[t + half - tap]`. `outside` replaces rows before and after the sequence.
#[inline(always)]
fn frame<T: Float>(out: &mut [T], sequence: &[T], outside: &[T], t: usize, taps: &[T], flip: bool) {
    let channels = out.len();
    let count = taps.len() / channels;
    let half = count / 2;
    let time = sequence.len() / channels;
    let row = |k: usize| {
        let place = if flip {
            (t + half).checked_sub(k)
        } else {
            (t + k).checked_sub(half)
        };
        let place = place.filter(|&place| place < time && k < count);
        place.map_or(&outside[..channels], |place| &sequence[place * channels..][..channels])
    };
    let tap = |k: usize| {
        if k < count {
            &taps[k * channels..][..channels]
        } else {
            &outside[..channels]
        }
    };
    for k in (0..count).step_by(TOGETHER) {
        let (x0, x1, x2) = (row(k), row(k + 1), row(k + 2));
        let (w0, w1, w2) = (tap(k), tap(k + 1), tap(k + 2));
        for c in 0..channels {
            let sum = w0[c].mul_add(x0[c], out[c]);
            out[c] = w2[c].mul_add(x2[c], w1[c].mul_add(x1[c], sum));
        }
    }
}

/// The convolution. `x` (B, T, C), `weight` (C, 1, k) with odd k, `bias` (C).
pub fn depthwise(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    on_gpu!(x, cuda::depthwise(x, weight, bias));
    let x = x.contiguous()?;
    let (batch, time, channels) = x.dims3()?;
    dispatch!(x.dtype(), T => {
        let xs = slice::<T>(&x)?;
        let xs: &[T] = &xs;
        let taps = by_tap(&slice::<T>(weight)?, channels);
        let bias = bias.map(slice::<T>).transpose()?;
        let bias: Option<&[T]> = bias.as_deref();
        let outside = vec![0.0 as T; channels];
        let rows = rows_per_chunk(channels);
        let out = by_chunks(xs.len(), rows * channels, |number, out| multiversion!({
            for (row, out) in (number * rows..).zip(out.chunks_exact_mut(channels)) {
                if let Some(bias) = bias {
                    out.copy_from_slice(bias);
                }
                let sequence = &xs[row / time * time * channels..][..time * channels];
                frame(out, sequence, &outside, row % time, &taps, false);
            }
        }));
        tensor(out, (batch, time, channels))
    })
}

/// Gradient with respect to `x`.
pub fn depthwise_backward(dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
    on_gpu!(dy, cuda::depthwise_backward(dy, weight));
    let dy = dy.contiguous()?;
    let (batch, time, channels) = dy.dims3()?;
    dispatch!(dy.dtype(), T => {
        let dys = slice::<T>(&dy)?;
        let dys: &[T] = &dys;
        let taps = by_tap(&slice::<T>(weight)?, channels);
        let outside = vec![0.0 as T; channels];
        let rows = rows_per_chunk(channels);
        let out = by_chunks(dys.len(), rows * channels, |number, out| multiversion!({
            for (row, out) in (number * rows..).zip(out.chunks_exact_mut(channels)) {
                let sequence = &dys[row / time * time * channels..][..time * channels];
                frame(out, sequence, &outside, row % time, &taps, true);
            }
        }));
        tensor(out, (batch, time, channels))
    })
}

/// Gradient with respect to the kernel, (C, 1, k).
pub fn depthwise_backward_weight(x: &Tensor, dy: &Tensor, taps: usize) -> Result<Tensor> {
    on_gpu!(x, cuda::depthwise_backward_weight(x, dy, taps));
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let (batch, time, channels) = x.dims3()?;
    let half = taps / 2;
    dispatch!(x.dtype(), T => {
        let (xs, dys) = (slice::<T>(&x)?, slice::<T>(&dy)?);
        let (xs, dys): (&[T], &[T]) = (&xs, &dys);
        let outside = vec![0.0 as T; channels];
        let sums = sum_over_rows::<T>(batch * time, taps * channels, |rows, sums| multiversion!({
            // Four frames in one pass over the sums of a tap.
            for first in rows.clone().step_by(4) {
                let dy = |row: usize| {
                    if row < rows.end { &dys[row * channels..][..channels] } else { &outside[..] }
                };
                for k in 0..taps {
                    let x = |row: usize| {
                        let t = row % time;
                        if row >= rows.end || t + k < half || t + k - half >= time {
                            return &outside[..];
                        }
                        &xs[(row + k - half) * channels..][..channels]
                    };
                    let sums = &mut sums[k * channels..][..channels];
                    let (x0, x1, x2, x3) = (x(first), x(first + 1), x(first + 2), x(first + 3));
                    let (d0, d1, d2, d3) = (dy(first), dy(first + 1), dy(first + 2), dy(first + 3));
                    for c in 0..channels {
                        let sum = x1[c].mul_add(d1[c], x0[c].mul_add(d0[c], sums[c]));
                        sums[c] = x3[c].mul_add(d3[c], x2[c].mul_add(d2[c], sum));
                    }
                }
            }
        }));
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
    use crate::noise::Noise;
    use crate::testing::{check_gradient, normal};

    #[test]
    fn gradients_agree_with_finite_differences_also_where_the_kernel_is_wider_than_the_signal() {
        let mut noise = Noise::new(12);
        for (time, taps, channels) in [(7, 3, 3), (4, 9, 3), (1, 5, 3), (6, 3, 70)] {
            let x = normal(&[2, time, channels], &mut noise);
            let kernel = normal(&[channels, 1, taps], &mut noise);
            let weight = normal(&[2, time, channels], &mut noise);
            let dx = depthwise_backward(&weight, &kernel).unwrap();
            check_gradient("x", &x, &weight, &dx, |x| depthwise(x, &kernel, None));
            let dw = depthwise_backward_weight(&x, &weight, taps).unwrap();
            check_gradient("kernel", &kernel, &weight, &dw, |k| depthwise(&x, k, None));
        }
    }
}
