//! Convolutions 3 x 3 that skip bands but no frames, by Winograd's algorithm F(4, 3) in the direction of the frames: half of
//! the multiplications.
//!
//! Six frames, of which neighbours overlap by two, become six transformed ones; for each of these a matrix product over three
//! bands and all channels replaces the convolution; its results are transformed to four frames.

#![allow(
    clippy::manual_map,
    reason = "a closure is not compiled for the vectors of its surroundings"
)]

use flow_kernels::multiversion;
use flow_kernels::product::PackedRhs;
use rayon::prelude::*;

use super::conv2d::Epilogue;
use super::winograd::{KERNEL, PADDING, STEP, TILE, input, lanes, output};
use super::{FeatureMap, LANES, product_error, rounded, with_scratch};
use crate::error::Result;

const BANDS: usize = 3;
/// Rows of a product, at least.
const ROWS: usize = 160;

/// The kernel of a convolution with padding 1, transformed: twice the memory of the weight.
pub struct WinogradFrames {
    inputs: usize,
    outputs: usize,
    band_stride: usize,
    /// At each place: (bands and in them inputs, outputs).
    places: Vec<PackedRhs>,
}

impl WinogradFrames {
    /// From a weight (outputs, inputs, 3 bands, 3 frames), which errors call `name`, of channels that `Winograd::fits`.
    pub fn new(weight: &[f64], [inputs, outputs]: [usize; 2], band_stride: usize, name: &str) -> Result<Self> {
        let place = |factors: &[f64; 3]| {
            let mut transformed = Vec::with_capacity(outputs * BANDS * inputs);
            for weight in weight.chunks_exact(inputs * BANDS * factors.len()) {
                for band in 0..BANDS {
                    for weight in weight.chunks_exact(BANDS * factors.len()) {
                        let frames = weight[band * factors.len()..].iter().zip(factors);
                        transformed.push(frames.map(|(weight, factor)| weight * factor).sum::<f64>());
                    }
                }
            }
            PackedRhs::from_weight(&rounded(&transformed, name)?, outputs).map_err(product_error)
        };
        Ok(Self {
            inputs,
            outputs,
            band_stride,
            places: KERNEL.iter().map(place).collect::<Result<_>>()?,
        })
    }

    /// The convolution of `x` into `out`, which has its frames and the bands that are left.
    pub fn apply(&self, x: &FeatureMap, epilogue: &Epilogue, out: &mut FeatureMap) -> Result<()> {
        // A band of padding before the first one, and what fills the last step behind the last one.
        let width = (x.bands + 2).next_multiple_of(self.band_stride);
        let grid = width / self.band_stride;
        let rows = ROWS.div_ceil(grid);
        let (in_size, frame_size) = (x.bands * self.inputs, out.bands * self.outputs);
        let (width, zeros) = (width * self.inputs, vec![0.0; in_size]);
        let (bands, frame_outputs) = (out.bands, grid * self.outputs);
        let block = |(number, out): (usize, &mut [f32])| {
            with_scratch(|[values, sums, _]| -> Result<()> {
                let first = number * rows * STEP;
                let count = (out.len() / frame_size).div_ceil(STEP);
                let strides = [count * width + PADDING, count * frame_outputs + PADDING];
                values.resize(TILE * strides[0]);
                sums.resize(TILE * strides[1]);
                for row in 0..count {
                    let from: [&[f32]; TILE] = std::array::from_fn(|at| {
                        let frame = (first + row * STEP + at).checked_sub(1);
                        let frame = frame.filter(|frame| *frame < x.frames);
                        frame.map_or(&zeros[..], |frame| &x.values[frame * in_size..][..in_size])
                    });
                    for place in 0..TILE {
                        let to = &mut values[place * strides[0] + row * width..][..width];
                        to[..self.inputs].fill(0.0);
                        to[self.inputs + in_size..].fill(0.0);
                    }
                    transform_input(&from, &mut values[row * width + self.inputs..], strides[0]);
                }
                // Rows behind the last band of a frame do not count.
                let rows_of_product = (count - 1) * grid + bands;
                let places = values.chunks_exact(strides[0]).zip(sums.chunks_exact_mut(strides[1]));
                for (kernel, (values, sums)) in self.places.iter().zip(places) {
                    let sums = &mut sums[..rows_of_product * self.outputs];
                    kernel
                        .product_of_rows_into(values, rows_of_product, self.band_stride * self.inputs, sums)
                        .map_err(product_error)?;
                }
                for (row, out) in out.chunks_mut(STEP * frame_size).enumerate() {
                    let add = epilogue.add.map(|add| &add[(first + row * STEP) * frame_size..]);
                    let finish = Epilogue { add, ..*epilogue };
                    transform_output(&sums[row * frame_outputs..], strides[1], &finish, out, frame_size);
                }
                Ok(())
            })
        };
        out.values
            .par_chunks_mut(rows * STEP * frame_size)
            .enumerate()
            .try_for_each(block)
    }
}

/// Transforms six frames; what belongs to place `p` begins at `p * stride` of `to`.
fn transform_input(from: &[&[f32]; TILE], to: &mut [f32], stride: usize) {
    multiversion!({
        let mut values = [[0.0; LANES]; TILE];
        for at in (0..from[0].len()).step_by(LANES) {
            let frames = [
                lanes(from[0], at),
                lanes(from[1], at),
                lanes(from[2], at),
                lanes(from[3], at),
                lanes(from[4], at),
                lanes(from[5], at),
            ];
            input(frames, &mut values);
            for (place, values) in values.iter().enumerate() {
                to[place * stride + at..][..LANES].copy_from_slice(values);
            }
        }
    });
}

/// Transforms the sums of a row of tiles, those of place `p` at `p * stride` of `from`, and finishes the frames of `out`, as
/// many as it has; what is added to them begins with their start.
fn transform_output(from: &[f32], stride: usize, epilogue: &Epilogue, out: &mut [f32], frame_size: usize) {
    multiversion!({
        let channels = epilogue.bias.len();
        let mut results = [[0.0; LANES]; STEP];
        for at in (0..frame_size).step_by(LANES) {
            let places = [
                lanes(from, at),
                lanes(from, stride + at),
                lanes(from, 2 * stride + at),
                lanes(from, 3 * stride + at),
                lanes(from, 4 * stride + at),
                lanes(from, 5 * stride + at),
            ];
            output(places, &mut results);
            let bias = lanes(epilogue.bias, at % channels);
            for (result, start) in results.iter().zip((0..out.len()).step_by(frame_size)) {
                let add = match epilogue.add {
                    Some(add) => Some(lanes(add, start + at)),
                    None => None,
                };
                epilogue.finish(result, bias, add, &mut out[start + at..][..LANES].as_chunks_mut().0[0]);
            }
        }
    });
}
