//! The strided 3x3 convolutions of the sub-sampling (stride 2, padding 1 on both axes), channels last.
//!
//! Every tensor here is zero at or past a sequence's length, as NeMo's masks make it, so only valid frames are
//! computed. `lengths` are those of the output of each function.

mod cuda;
#[cfg(test)]
mod device_tests;

use candle_core::Tensor;
use rayon::prelude::*;

use crate::error::Result;
use crate::lengths::Lengths;
use crate::ops::sums::column_sums::ColumnSums;
use crate::{Float, by_chunks, dispatch, modify, multiversion, on_gpu, slice, sum_over_rows, tensor};

/// Elements per chunk of element-wise work.
const CHUNK: usize = 8192;

/// Size of an axis after a convolution of stride 2: half, rounded up.
pub fn halved(size: usize) -> usize {
    size.div_ceil(2)
}

/// A kernel (C, 1, 3, 3) as nine rows of (C).
fn by_tap<T: Float>(weight: &[T]) -> Vec<T> {
    let channels = weight.len() / 9;
    let mut out = vec![T::zero(); weight.len()];
    for c in 0..channels {
        for k in 0..9 {
            out[k * channels + c] = weight[c * 9 + k];
        }
    }
    out
}

/// Sums of nine taps and a bias, (10, C), as a kernel gradient (C, 1, 3, 3) and behind it a bias gradient (C).
fn weight_and_bias<T: Float>(sums: &[T], channels: usize) -> Result<ColumnSums> {
    let mut out = sums.to_vec();
    for c in 0..channels {
        for k in 0..9 {
            out[c * 9 + k] = sums[k * channels + c];
        }
    }
    Ok(ColumnSums::whole(tensor(out, 10 * channels)?))
}

/// NaN stays NaN, unlike with `max`.
#[inline(always)]
fn relu<T: Float>(x: T) -> T {
    if x < T::zero() { T::zero() } else { x }
}

/// Input index of tap `k` at output index `o`, if it is within `size`.
#[inline(always)]
fn input_index(o: usize, k: usize, size: usize) -> Option<usize> {
    (2 * o + k).checked_sub(1).filter(|&i| i < size)
}

/// First convolution, from one channel to C, with ReLU. `x` (B, F, T) has F bands, frames at or past
/// `input_lengths` count as 0; result (B, ceil(T/2), ceil(F/2), C). `weight` (C, 1, 3, 3): time, then frequency.
pub fn first(x: &Tensor, weight: &Tensor, bias: &Tensor, input_lengths: &Lengths, lengths: &Lengths) -> Result<Tensor> {
    on_gpu!(x, cuda::first(x, weight, bias, input_lengths, lengths));
    let x = x.contiguous()?;
    let (batch, bands, time) = x.dims3()?;
    let (time_out, bands_out, channels) = (halved(time), halved(bands), bias.elem_count());
    dispatch!(x.dtype(), T => {
        let (xs, bias) = (slice::<T>(&x)?, slice::<T>(bias)?);
        let (xs, bias): (&[T], &[T]) = (&xs, &bias);
        let taps = by_tap::<T>(&slice::<T>(weight)?);
        let out = by_chunks(batch * time_out * bands_out * channels, bands_out * channels, |row, out| multiversion!({
            let (b, t) = (row / time_out, row % time_out);
            if t >= lengths[b] {
                return;
            }
            let x = &xs[b * bands * time..][..bands * time];
            for (f, out) in out.chunks_exact_mut(channels).enumerate() {
                let x = patch(x, t, f, time, bands, input_lengths[b]);
                out.copy_from_slice(bias);
                for (k, &x) in x.iter().enumerate() {
                    for (out, &w) in out.iter_mut().zip(&taps[k * channels..][..channels]) {
                        *out = w.mul_add(x, *out);
                    }
                }
                for out in out {
                    *out = relu(*out);
                }
            }
        }));
        tensor(out, (batch, time_out, bands_out, channels))
    })
}

/// The nine inputs of one output of the first convolution; 0 outside the axes and in padding.
#[inline(always)]
fn patch<T: Float>(x: &[T], t: usize, f: usize, time: usize, bands: usize, valid: usize) -> [T; 9] {
    let mut values = [T::zero(); 9];
    for kt in 0..3 {
        let Some(ti) = input_index(t, kt, valid.min(time)) else {
            continue;
        };
        for kf in 0..3 {
            if let Some(fi) = input_index(f, kf, bands) {
                values[kt * 3 + kf] = x[fi * time + ti];
            }
        }
    }
    values
}

/// Gradients of kernel and bias of the first convolution, (9 C) and (C) sums, given that before its ReLU, `dz`.
pub fn first_backward(x: &Tensor, dz: &Tensor, input_lengths: &Lengths) -> Result<ColumnSums> {
    on_gpu!(x, cuda::first_backward(x, dz, input_lengths));
    let (x, dz) = (x.contiguous()?, dz.contiguous()?);
    let (_, bands, time) = x.dims3()?;
    let (batch, time_out, bands_out, channels) = dz.dims4()?;
    dispatch!(x.dtype(), T => {
        let (xs, dzs) = (slice::<T>(&x)?, slice::<T>(&dz)?);
        let (xs, dzs): (&[T], &[T]) = (&xs, &dzs);
        let sums = sum_over_rows::<T>(batch * time_out, 10 * channels, |rows, sums| multiversion!({
            for row in rows {
                let (b, t) = (row / time_out, row % time_out);
                if t >= halved(input_lengths[b]) {
                    continue;
                }
                let x = &xs[b * bands * time..][..bands * time];
                let dz = &dzs[row * bands_out * channels..][..bands_out * channels];
                for (f, dz) in dz.chunks_exact(channels).enumerate() {
                    let x = patch(x, t, f, time, bands, input_lengths[b]);
                    let (taps, bias) = sums.split_at_mut(9 * channels);
                    for (k, &x) in x.iter().enumerate() {
                        for (sum, &dz) in taps[k * channels..][..channels].iter_mut().zip(dz) {
                            *sum = dz.mul_add(x, *sum);
                        }
                    }
                    for (sum, &dz) in bias.iter_mut().zip(dz) {
                        *sum += dz;
                    }
                }
            }
        }));
        weight_and_bias::<T>(&sums, channels)
    })
}

/// Depthwise convolution: `x` (B, T, F, C), `weight` (C, 1, 3, 3), `bias` (C) -> (B, ceil(T/2), ceil(F/2), C).
pub fn depthwise(x: &Tensor, weight: &Tensor, bias: &Tensor, lengths: &Lengths) -> Result<Tensor> {
    on_gpu!(x, cuda::depthwise(x, weight, bias, lengths));
    let x = x.contiguous()?;
    let (batch, time, bands, channels) = x.dims4()?;
    let (time_out, bands_out) = (halved(time), halved(bands));
    dispatch!(x.dtype(), T => {
        let (xs, bias) = (slice::<T>(&x)?, slice::<T>(bias)?);
        let (xs, bias): (&[T], &[T]) = (&xs, &bias);
        let taps = by_tap::<T>(&slice::<T>(weight)?);
        let out = by_chunks(batch * time_out * bands_out * channels, bands_out * channels, |row, out| multiversion!({
            let (b, t) = (row / time_out, row % time_out);
            if t >= lengths[b] {
                return;
            }
            for (f, out) in out.chunks_exact_mut(channels).enumerate() {
                out.copy_from_slice(bias);
                for kt in 0..3 {
                    let Some(ti) = input_index(t, kt, time) else { continue };
                    for kf in 0..3 {
                        let Some(fi) = input_index(f, kf, bands) else { continue };
                        let x = &xs[((b * time + ti) * bands + fi) * channels..][..channels];
                        let w = &taps[(kt * 3 + kf) * channels..][..channels];
                        for ((out, &x), &w) in out.iter_mut().zip(x).zip(w) {
                            *out = w.mul_add(x, *out);
                        }
                    }
                }
            }
        }));
        tensor(out, (batch, time_out, bands_out, channels))
    })
}

/// Gradient with respect to the input of [`depthwise`] before its ReLU: zero where `x`, the ReLU's result, is 0.
/// `dy` must be zero in padding.
pub fn depthwise_backward(x: &Tensor, weight: &Tensor, dy: &Tensor) -> Result<Tensor> {
    on_gpu!(x, cuda::depthwise_backward(x, weight, dy));
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let (_, time, bands, channels) = x.dims4()?;
    let (time_out, bands_out) = (halved(time), halved(bands));
    dispatch!(x.dtype(), T => {
        let (xs, dys) = (slice::<T>(&x)?, slice::<T>(&dy)?);
        let (xs, dys): (&[T], &[T]) = (&xs, &dys);
        let taps = by_tap::<T>(&slice::<T>(weight)?);
        let out = by_chunks(xs.len(), bands * channels, |row, out| multiversion!({
                let x = &xs[row * bands * channels..][..bands * channels];
                let (b, t) = (row / time, row % time);
                for (f, (out, x)) in
                    out.chunks_exact_mut(channels).zip(x.chunks_exact(channels)).enumerate()
                {
                    for kt in 0..3 {
                        let Some(to) = output_index(t, kt, time_out) else { continue };
                        for kf in 0..3 {
                            let Some(fo) = output_index(f, kf, bands_out) else { continue };
                            let place = ((b * time_out + to) * bands_out + fo) * channels;
                            let dy = &dys[place..][..channels];
                            let w = &taps[(kt * 3 + kf) * channels..][..channels];
                            for ((out, &dy), &w) in out.iter_mut().zip(dy).zip(w) {
                                *out = w.mul_add(dy, *out);
                            }
                        }
                    }
                    for (out, &x) in out.iter_mut().zip(x) {
                        *out = if x > 0.0 { *out } else { 0.0 };
                    }
                }
            }));
        tensor(out, x.shape())
    })
}

/// Output index that reads input index `i` with tap `k`, if there is one.
#[inline(always)]
fn output_index(i: usize, k: usize, size: usize) -> Option<usize> {
    let twice = (i + 1).checked_sub(k)?;
    (twice % 2 == 0 && twice / 2 < size).then_some(twice / 2)
}

/// Gradients of kernel and bias of [`depthwise`], (9 C) and (C) sums. `dy` must be zero in padding.
pub fn depthwise_backward_weight(x: &Tensor, dy: &Tensor) -> Result<ColumnSums> {
    on_gpu!(x, cuda::depthwise_backward_weight(x, dy));
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let (batch, time, bands, channels) = x.dims4()?;
    let (time_out, bands_out) = (halved(time), halved(bands));
    dispatch!(x.dtype(), T => {
        let (xs, dys) = (slice::<T>(&x)?, slice::<T>(&dy)?);
        let (xs, dys): (&[T], &[T]) = (&xs, &dys);
        let sums = sum_over_rows::<T>(batch * time_out, 10 * channels, |rows, sums| multiversion!({
            for row in rows {
                let (b, t) = (row / time_out, row % time_out);
                let dy = &dys[row * bands_out * channels..][..bands_out * channels];
                for (f, dy) in dy.chunks_exact(channels).enumerate() {
                    for kt in 0..3 {
                        let Some(ti) = input_index(t, kt, time) else { continue };
                        for kf in 0..3 {
                            let Some(fi) = input_index(f, kf, bands) else { continue };
                            let x = &xs[((b * time + ti) * bands + fi) * channels..][..channels];
                            let sums = &mut sums[(kt * 3 + kf) * channels..][..channels];
                            for ((sum, &x), &dy) in sums.iter_mut().zip(x).zip(dy) {
                                *sum = dy.mul_add(x, *sum);
                            }
                        }
                    }
                    for (sum, &dy) in sums[9 * channels..].iter_mut().zip(dy) {
                        *sum += dy;
                    }
                }
            }
        }));
        weight_and_bias::<T>(&sums, channels)
    })
}

/// `relu(z + bias)` in place for `z` (B, T, F, C), zero at or past each length.
pub fn bias_relu(z: &Tensor, bias: &Tensor, lengths: &Lengths) -> Result<()> {
    on_gpu!(z, cuda::bias_relu(z, bias, lengths));
    let (_, time, bands, channels) = z.dims4()?;
    dispatch!(z.dtype(), T => {
        let bias = slice::<T>(bias)?;
        let bias: &[T] = &bias;
        modify::<T>(z, |z| {
            z.par_chunks_mut(bands * channels).enumerate().for_each(|(row, z)| {
                if row % time >= lengths[row / time] {
                    z.fill(0.0);
                    return;
                }
                for z in z.chunks_exact_mut(channels) {
                    for (z, &bias) in z.iter_mut().zip(bias) {
                        *z = relu(*z + bias);
                    }
                }
            });
        })
    })
}

/// `dy` where `y` is above 0, otherwise 0: the backward pass of a ReLU with result `y`.
pub fn relu_backward(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    on_gpu!(y, cuda::relu_backward(y, dy));
    let (y, dy) = (y.contiguous()?, dy.contiguous()?);
    dispatch!(y.dtype(), T => {
        let (ys, dys) = (slice::<T>(&y)?, slice::<T>(&dy)?);
        let (ys, dys): (&[T], &[T]) = (&ys, &dys);
        let out = by_chunks(ys.len(), CHUNK, |number, out: &mut [T]| multiversion!({
            let start = number * CHUNK;
            for ((out, &y), &dy) in out.iter_mut().zip(&ys[start..]).zip(&dys[start..]) {
                *out = if y <= 0.0 { 0.0 } else { dy };
            }
        }));
        tensor(out, y.shape())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::Noise;
    use crate::testing::{check_gradient, normal};

    /// Gradients of three kernels and biases.
    fn parts(sums: ColumnSums) -> (Tensor, Tensor) {
        let sums = sums.total().unwrap();
        let kernels = sums.narrow(0, 0, 27).unwrap().reshape((3, 1, 3, 3)).unwrap();
        (kernels, sums.narrow(0, 27, 3).unwrap())
    }

    #[test]
    fn depthwise_gradients_agree_with_finite_differences_for_odd_and_even_sizes() {
        let mut noise = Noise::new(21);
        for (time, bands) in [(5, 4), (4, 5), (1, 1), (2, 3)] {
            // Positive, so that the ReLU before it passes everything.
            let x = normal(&[2, time, bands, 3], &mut noise).sqr().unwrap();
            let kernel = normal(&[3, 1, 3, 3], &mut noise);
            let bias = normal(&[3], &mut noise);
            let lengths = Lengths::new([halved(time); 2]);
            let weight = normal(&[2, halved(time), halved(bands), 3], &mut noise);
            let dx = depthwise_backward(&x, &kernel, &weight).unwrap();
            check_gradient("x", &x, &weight, &dx, |x| depthwise(x, &kernel, &bias, &lengths));
            let (dk, db) = parts(depthwise_backward_weight(&x, &weight).unwrap());
            check_gradient("kernel", &kernel, &weight, &dk, |k| depthwise(&x, k, &bias, &lengths));
            check_gradient("bias", &bias, &weight, &db, |b| depthwise(&x, &kernel, b, &lengths));
        }
    }

    #[test]
    fn first_convolution_gradients_agree_with_finite_differences_and_ignore_padding() {
        let mut noise = Noise::new(22);
        let x = normal(&[2, 5, 7], &mut noise);
        let kernel = normal(&[3, 1, 3, 3], &mut noise);
        let bias = normal(&[3], &mut noise);
        let (input_lengths, lengths) = (Lengths::new([7, 4]), Lengths::new([4, 2]));
        let weight = normal(&[2, 4, 3, 3], &mut noise);
        let y = first(&x, &kernel, &bias, &input_lengths, &lengths).unwrap();
        let dz = relu_backward(&y, &weight).unwrap();
        let (dk, db) = parts(first_backward(&x, &dz, &input_lengths).unwrap());
        let run = |k: &Tensor, b: &Tensor| first(&x, k, b, &input_lengths, &lengths);
        check_gradient("kernel", &kernel, &weight, &dk, |k| run(k, &bias));
        check_gradient("bias", &bias, &weight, &db, |b| run(&kernel, b));
    }
}
