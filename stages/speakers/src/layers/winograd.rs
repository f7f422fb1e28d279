//! Convolutions 3 x 3 by Winograd's algorithm F(4 x 4, 3 x 3): a quarter of the multiplications.
//!
//! Tiles of 6 x 6 values, of which neighbours overlap by two, are transformed; at each of 36 places a matrix product
//! over the channels replaces the convolution; its results are transformed to 4 x 4 outputs. The matrices are those of
//! Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2015).
#![allow(
    clippy::needless_range_loop,
    clippy::manual_map,
    reason = "loops over lanes and places become vectors in this form, and a closure is not compiled for the vectors"
)]

use flow_kernels::multiversion;
use flow_kernels::product::PackedRhs;
use rayon::prelude::*;

use super::conv2d::Epilogue;
use super::{FeatureMap, LANES, product_error, rounded, with_scratch};
use crate::error::Result;

/// Values of a tile in each direction, and results.
pub const TILE: usize = 6;
pub const STEP: usize = 4;
const PLACES: usize = TILE * TILE;
/// Tiles that are transformed together, at least: the rows of a product.
const TILES: usize = 48;
/// Padding in floats between the rows of two places, so that they are not in the same set of the L1 cache.
pub const PADDING: usize = 16;

/// How a kernel's three taps become six values.
pub const KERNEL: [[f64; 3]; TILE] = [
    [1.0 / 4.0, 0.0, 0.0],
    [-1.0 / 6.0, -1.0 / 6.0, -1.0 / 6.0],
    [-1.0 / 6.0, 1.0 / 6.0, -1.0 / 6.0],
    [1.0 / 24.0, 1.0 / 12.0, 1.0 / 6.0],
    [1.0 / 24.0, -1.0 / 12.0, 1.0 / 6.0],
    [0.0, 0.0, 1.0],
];

/// The kernel of a convolution with padding 1, transformed: four times the memory of the weight.
pub struct Winograd {
    inputs: usize,
    outputs: usize,
    /// At place (frame, band) of a tile: (inputs, outputs).
    places: Vec<PackedRhs>,
}

impl Winograd {
    /// Whether there is a kernel for so many channels.
    pub fn fits(inputs: usize, outputs: usize) -> bool {
        inputs.is_multiple_of(LANES) && outputs.is_multiple_of(LANES)
    }

    /// From a weight (outputs, inputs, 3 bands, 3 frames), which errors call `name`.
    pub fn new(weight: &[f64], [inputs, outputs]: [usize; 2], name: &str) -> Result<Self> {
        let place = |place: usize| {
            let (frames, bands) = (KERNEL[place / TILE], KERNEL[place % TILE]);
            let transformed: Vec<f64> = weight
                .chunks_exact(9)
                .map(|weight| {
                    let rows = weight.chunks_exact(3).zip(bands);
                    rows.map(|(row, band)| {
                        band * row.iter().zip(frames).map(|(value, frame)| value * frame).sum::<f64>()
                    })
                    .sum()
                })
                .collect();
            PackedRhs::from_weight(&rounded(&transformed, name)?, outputs).map_err(product_error)
        };
        Ok(Self {
            inputs,
            outputs,
            places: (0..PLACES).map(place).collect::<Result<_>>()?,
        })
    }

    /// The convolution of `x` into `out`, which has its frames and bands.
    pub fn apply(&self, x: &FeatureMap, epilogue: &Epilogue, out: &mut FeatureMap) -> Result<()> {
        let (bands, in_row) = (out.bands, out.bands.div_ceil(STEP));
        let rows = TILES.div_ceil(in_row);
        let (frame_size, in_size) = (bands * self.outputs, bands * self.inputs);
        // Of a frame with a band of padding before it, and those behind that the last tile has.
        let padded_size = (in_row * STEP + TILE - STEP) * self.inputs;
        let block = |(number, out): (usize, &mut [f32])| {
            with_scratch(|[padded, values, sums]| -> Result<()> {
                let frames = out.len() / frame_size;
                let rows_here = frames.div_ceil(STEP);
                let tiles = rows_here * in_row;
                let first = number * rows * STEP;
                padded.resize((rows_here * STEP + TILE - STEP) * padded_size);
                for (at, to) in padded.chunks_exact_mut(padded_size).enumerate() {
                    match (first + at).checked_sub(1).filter(|frame| *frame < x.frames) {
                        Some(frame) => {
                            to[..self.inputs].fill(0.0);
                            to[self.inputs..][..in_size].copy_from_slice(&x.values[frame * in_size..][..in_size]);
                            to[self.inputs + in_size..].fill(0.0);
                        }
                        None => to.fill(0.0),
                    }
                }
                let strides = [self.inputs, self.outputs].map(|channels| tiles * channels + PADDING);
                values.resize(PLACES * strides[0]);
                sums.resize(PLACES * strides[1]);
                for tile in 0..tiles {
                    let from = tile / in_row * STEP * padded_size + tile % in_row * STEP * self.inputs;
                    let to = &mut values[tile * self.inputs..];
                    transform_input(&padded[from..], [padded_size, self.inputs], to, strides[0]);
                }
                let places = values.chunks_exact(strides[0]).zip(sums.chunks_exact_mut(strides[1]));
                for (kernel, (values, sums)) in self.places.iter().zip(places) {
                    kernel
                        .product_of_rows_into(values, tiles, self.inputs, &mut sums[..tiles * self.outputs])
                        .map_err(product_error)?;
                }
                let start = first * frame_size;
                for tile in 0..tiles {
                    let (frame, band) = (tile / in_row * STEP, tile % in_row * STEP);
                    let counts = [STEP.min(frames - frame), STEP.min(bands - band)];
                    let first = (frame * bands + band) * self.outputs;
                    let add = epilogue.add.map(|add| &add[start + first..]);
                    let finish = Epilogue { add, ..*epilogue };
                    let from = &sums[tile * self.outputs..];
                    transform_output(from, strides[1], &finish, &mut out[first..], counts, frame_size);
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

/// Channels that are transformed together. Loops over them, on arrays that nothing else points to, become vectors.
pub type Lanes = [f32; LANES];

#[inline(always)]
pub fn lanes(values: &[f32], at: usize) -> &Lanes {
    &values[at..at + LANES].as_chunks().0[0]
}

/// Six values of a tile, in one direction.
#[inline(always)]
pub fn input(from: [&Lanes; TILE], to: &mut [Lanes; TILE]) {
    for lane in 0..LANES {
        let d = [
            from[0][lane],
            from[1][lane],
            from[2][lane],
            from[3][lane],
            from[4][lane],
            from[5][lane],
        ];
        let (a, b) = (d[2].mul_add(-4.0, d[4]), d[1].mul_add(-4.0, d[3]));
        let (c, e) = (d[4] - d[2], d[3] - d[1]);
        to[0][lane] = d[0].mul_add(4.0, d[2].mul_add(-5.0, d[4]));
        to[1][lane] = a + b;
        to[2][lane] = a - b;
        to[3][lane] = e.mul_add(2.0, c);
        to[4][lane] = e.mul_add(-2.0, c);
        to[5][lane] = d[1].mul_add(4.0, d[3].mul_add(-5.0, d[5]));
    }
}

/// Four results of six sums, in one direction.
#[inline(always)]
pub fn output(from: [&Lanes; TILE], to: &mut [Lanes; STEP]) {
    for lane in 0..LANES {
        let m = [
            from[0][lane],
            from[1][lane],
            from[2][lane],
            from[3][lane],
            from[4][lane],
            from[5][lane],
        ];
        let (a, b) = (m[1] + m[2], m[1] - m[2]);
        let (c, d) = (m[3] + m[4], m[3] - m[4]);
        to[0][lane] = m[0] + a + c;
        to[1][lane] = d.mul_add(2.0, b);
        to[2][lane] = c.mul_add(4.0, a);
        to[3][lane] = d.mul_add(8.0, b) + m[5];
    }
}

/// Transforms the values of a tile, whose frames are `frame` floats apart in `from` and whose bands `channels`; those of
/// place `p` go to `p * stride` of `to`.
fn transform_input(from: &[f32], [frame, channels]: [usize; 2], to: &mut [f32], stride: usize) {
    multiversion!({
        let mut half = [[[0.0; LANES]; TILE]; TILE];
        let mut row = [[0.0; LANES]; TILE];
        for channel in (0..channels).step_by(LANES) {
            for band in 0..TILE {
                let at = band * channels + channel;
                let column = [
                    lanes(from, at),
                    lanes(from, frame + at),
                    lanes(from, 2 * frame + at),
                    lanes(from, 3 * frame + at),
                    lanes(from, 4 * frame + at),
                    lanes(from, 5 * frame + at),
                ];
                input(column, &mut half[band]);
            }
            for frame in 0..TILE {
                let values = [
                    &half[0][frame],
                    &half[1][frame],
                    &half[2][frame],
                    &half[3][frame],
                    &half[4][frame],
                    &half[5][frame],
                ];
                input(values, &mut row);
                for band in 0..TILE {
                    let at = (frame * TILE + band) * stride + channel;
                    to[at..at + LANES].copy_from_slice(&row[band]);
                }
            }
        }
    });
}

/// Transforms the sums of a tile, those of place `p` at `p * stride` of `from`, and finishes `counts` (frames, bands) of the
/// results, which begin at the start of `out` and of what is added.
fn transform_output(
    from: &[f32],
    stride: usize,
    epilogue: &Epilogue,
    out: &mut [f32],
    counts: [usize; 2],
    frame_size: usize,
) {
    multiversion!({
        let channels = epilogue.bias.len();
        let mut half = [[[0.0; LANES]; STEP]; TILE];
        let mut row = [[0.0; LANES]; STEP];
        for channel in (0..channels).step_by(LANES) {
            for band in 0..TILE {
                let at = band * stride + channel;
                let column = [
                    lanes(from, at),
                    lanes(from, TILE * stride + at),
                    lanes(from, 2 * TILE * stride + at),
                    lanes(from, 3 * TILE * stride + at),
                    lanes(from, 4 * TILE * stride + at),
                    lanes(from, 5 * TILE * stride + at),
                ];
                output(column, &mut half[band]);
            }
            let bias = lanes(epilogue.bias, channel);
            for frame in 0..counts[0] {
                let values = [
                    &half[0][frame],
                    &half[1][frame],
                    &half[2][frame],
                    &half[3][frame],
                    &half[4][frame],
                    &half[5][frame],
                ];
                output(values, &mut row);
                for (band, row) in row.iter().enumerate().take(counts[1]) {
                    let at = frame * frame_size + band * channels + channel;
                    let add = match epilogue.add {
                        Some(add) => Some(lanes(add, at)),
                        None => None,
                    };
                    epilogue.finish(row, bias, add, &mut out[at..at + LANES].as_chunks_mut().0[0]);
                }
            }
        }
    });
}
