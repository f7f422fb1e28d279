//! SincNet: from the wave to 60 channels, a frame each 270 samples. Frames are one after the other, channels innermost.

use flow_kernels::multiversion;
use flow_kernels::product::PackedRhs;

use super::kernel_error;
use super::sinc::{FILTERS, PAIRS, SincFilters, WaveNorm, frames};
use crate::error::Result;
use crate::weights::Weights;

/// Added to variances.
pub const EPSILON: f64 = 1e-5;
/// Channels that come out.
pub const CHANNELS: usize = 60;
/// Taps of a convolution.
const TAPS: usize = 5;
/// Frames of which the largest value is taken.
const POOL: usize = 3;
/// Slope of the leaky ReLU below 0.
const SLOPE: f32 = 0.01;
/// Pooled frames of a convolution that are computed together: they stay in the second cache.
const BLOCK: usize = 128;
/// Frames that statistics are summed over in f32, before f64.
const SUMMED: usize = 16;

/// The layers.
pub struct SincNet {
    pub filters: SincFilters,
    wave_weight: f32,
    wave_bias: f32,
    pub norms: [InstanceNorm; 3],
    pub convolutions: [Convolution; 2],
}

impl SincNet {
    pub fn new(weights: &Weights) -> Result<Self> {
        let parameter = |name: &str| weights.floats(&format!("sincnet.conv1d.0.filterbank.{name}"), &[PAIRS, 1]);
        let norm = |layer: usize, channels: usize| -> Result<InstanceNorm> {
            Ok(InstanceNorm {
                weight: weights.floats(&format!("sincnet.norm1d.{layer}.weight"), &[channels])?,
                bias: weights.floats(&format!("sincnet.norm1d.{layer}.bias"), &[channels])?,
            })
        };
        let convolution = |layer: usize, inputs: usize| -> Result<Convolution> {
            let name = format!("sincnet.conv1d.{layer}");
            let weight = weights.floats(&format!("{name}.weight"), &[CHANNELS, inputs, TAPS])?;
            Convolution::new(&weight, inputs, weights.floats(&format!("{name}.bias"), &[CHANNELS])?)
        };
        Ok(Self {
            filters: SincFilters::new(&parameter("low_hz_")?, &parameter("band_hz_")?)?,
            wave_weight: weights.floats("sincnet.wav_norm1d.weight", &[1])?[0],
            wave_bias: weights.floats("sincnet.wav_norm1d.bias", &[1])?[0],
            norms: [norm(0, FILTERS)?, norm(1, CHANNELS)?, norm(2, CHANNELS)?],
            convolutions: [convolution(1, FILTERS)?, convolution(2, CHANNELS)?],
        })
    }

    /// Norm of a chunk that is followed by so many zeros.
    pub fn wave_norm(&self, chunk: &[f32], zeros: usize) -> WaveNorm {
        WaveNorm::new(chunk, zeros, self.wave_weight, self.wave_bias)
    }

    /// A chunk to (frames, [`CHANNELS`]).
    pub fn features(&self, chunk: &[f32]) -> Result<Vec<f32>> {
        let wave = self.wave_norm(chunk, 0).apply(chunk);
        let frames = self.filters.pooled::<POOL>(&wave)?;
        let mut statistics = Statistics::new(FILTERS);
        statistics.add(&frames);
        self.after_pooling(frames, statistics)
    }

    /// The layers after the filters, whose output is `filtered * gain + offsets` for `filtered` (frames, [`FILTERS`]).
    pub fn after_filters(&self, filtered: &[f32], gain: f32, offsets: &[f32; FILTERS]) -> Result<Vec<f32>> {
        let (frames, statistics) = pooled_filters(filtered, gain, offsets);
        self.after_pooling(frames, statistics)
    }

    /// The layers after the first pooling.
    fn after_pooling(&self, mut frames: Vec<f32>, mut statistics: Statistics) -> Result<Vec<f32>> {
        let [norm, ..] = &self.norms;
        let mut norm_before = norm;
        for (convolution, norm) in self.convolutions.iter().zip(&self.norms[1..]) {
            let scale = norm_before.scale(&statistics);
            (frames, statistics) = convolution.pooled(frames, &scale)?;
            norm_before = norm;
        }
        norm_before.scale(&statistics).apply(&mut frames);
        Ok(frames)
    }
}

/// Frames that come out for this many samples.
pub fn output_frames(samples: usize) -> usize {
    let convolved = |frames: usize| frames.saturating_sub(TAPS - 1) / POOL;
    convolved(convolved(frames(samples) / POOL))
}

/// Absolute values of `filtered * gain + offsets`, and of each three frames the largest.
pub fn pooled_filters(filtered: &[f32], gain: f32, offsets: &[f32; FILTERS]) -> (Vec<f32>, Statistics) {
    let mut out = Vec::with_capacity(filtered.len() / POOL);
    let mut statistics = Statistics::new(FILTERS);
    pool(
        filtered,
        offsets,
        &mut out,
        #[inline(always)]
        |value, offset| value.mul_add(gain, offset).abs(),
    );
    statistics.add(&out);
    (out, statistics)
}

/// Appends of each three frames the largest of `f(value, parameter of its channel)`; one or two frames at the end are left
/// out.
fn pool(frames: &[f32], parameters: &[f32], out: &mut Vec<f32>, f: impl Fn(f32, f32) -> f32) {
    let channels = parameters.len();
    let before = out.len();
    out.resize(before + frames.len() / (POOL * channels) * channels, 0.0);
    let out = &mut out[before..];
    multiversion!({
        for (three, out) in frames.chunks_exact(POOL * channels).zip(out.chunks_exact_mut(channels)) {
            let (first, rest) = three.split_at(channels);
            let (second, third) = rest.split_at(channels);
            for at in 0..channels {
                let parameter = parameters[at];
                let (a, b, c) = (
                    f(first[at], parameter),
                    f(second[at], parameter),
                    f(third[at], parameter),
                );
                let larger = if a > b { a } else { b };
                out[at] = if larger > c { larger } else { c };
            }
        }
    });
}

/// Sums for the mean and variance of each channel over all frames.
pub struct Statistics {
    frames: usize,
    /// The first frame: sums are of differences from it, so that a constant channel has variance 0.
    first: Vec<f32>,
    sums: Vec<f64>,
    squares: Vec<f64>,
}

impl Statistics {
    pub fn new(channels: usize) -> Self {
        Self {
            frames: 0,
            first: vec![0.0; channels],
            sums: vec![0.0; channels],
            squares: vec![0.0; channels],
        }
    }

    /// Counts frames of all channels.
    pub fn add(&mut self, frames: &[f32]) {
        let channels = self.first.len();
        if self.frames == 0 && frames.len() >= channels {
            self.first.copy_from_slice(&frames[..channels]);
        }
        self.frames += frames.len() / channels;
        let mut sums = vec![0.0f32; channels];
        let mut squares = vec![0.0f32; channels];
        multiversion!({
            for frames in frames.chunks(SUMMED * channels) {
                sums.fill(0.0);
                squares.fill(0.0);
                for frame in frames.chunks_exact(channels) {
                    let sums = sums.iter_mut().zip(&mut squares);
                    for ((sum, square), (&value, &first)) in sums.zip(frame.iter().zip(&self.first)) {
                        let difference = value - first;
                        *sum += difference;
                        *square = difference.mul_add(difference, *square);
                    }
                }
                for (sum, &of_these) in self.sums.iter_mut().zip(&sums) {
                    *sum += f64::from(of_these);
                }
                for (square, &of_these) in self.squares.iter_mut().zip(&squares) {
                    *square += f64::from(of_these);
                }
            }
        });
    }
}

/// Instance norm: each channel to mean 0 and variance 1 over the frames, then a weight and a bias.
pub struct InstanceNorm {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl InstanceNorm {
    pub fn scale(&self, statistics: &Statistics) -> Scale {
        let count = statistics.frames as f64;
        let channel = |channel: usize| {
            let difference = statistics.sums[channel] / count;
            let variance = (statistics.squares[channel] / count - difference * difference).max(0.0);
            let mean = f64::from(statistics.first[channel]) + difference;
            let factor = f64::from(self.weight[channel]) / (variance + EPSILON).sqrt();
            (mean as f32, factor as f32)
        };
        let (means, factors) = (0..self.weight.len()).map(channel).unzip();
        Scale {
            means,
            factors,
            biases: self.bias.clone(),
        }
    }
}

/// An instance norm with the statistics of a chunk, and the leaky ReLU after it.
pub struct Scale {
    means: Vec<f32>,
    factors: Vec<f32>,
    biases: Vec<f32>,
}

impl Scale {
    pub fn apply(&self, frames: &mut [f32]) {
        multiversion!({
            for frame in frames.chunks_exact_mut(self.means.len()) {
                let parameters = self.means.iter().zip(&self.factors).zip(&self.biases);
                for (value, ((&mean, &factor), &bias)) in frame.iter_mut().zip(parameters) {
                    *value = leaky_relu((*value - mean).mul_add(factor, bias));
                }
            }
        });
    }
}

#[inline(always)]
pub fn leaky_relu(x: f32) -> f32 {
    let below = SLOPE * x;
    if x > below { x } else { below }
}

/// A convolution in time over five frames, without padding.
pub struct Convolution {
    inputs: usize,
    packed: PackedRhs,
    bias: Vec<f32>,
}

impl Convolution {
    /// From a weight (outputs, inputs, 5).
    fn new(weight: &[f32], inputs: usize, bias: Vec<f32>) -> Result<Self> {
        // To (outputs, 5, inputs), as frames lie.
        let mut by_frames = Vec::with_capacity(weight.len());
        for weight in weight.chunks_exact(inputs * TAPS) {
            for tap in 0..TAPS {
                by_frames.extend(weight.iter().skip(tap).step_by(TAPS));
            }
        }
        Ok(Self {
            inputs,
            packed: PackedRhs::from_weight(&by_frames, bias.len()).map_err(kernel_error)?,
            bias,
        })
    }

    #[cfg(test)]
    pub fn bias(&self) -> &[f32] {
        &self.bias
    }

    /// The sums over `frames`, without the bias.
    pub fn apply(&self, frames: &[f32]) -> Result<Vec<f32>> {
        let rows = (frames.len() / self.inputs).saturating_sub(TAPS - 1);
        self.packed
            .product_of_rows(frames, rows, self.inputs)
            .map_err(kernel_error)
    }

    /// Scales frames, convolves them, and max-pools by three.
    pub fn pooled(&self, mut frames: Vec<f32>, scale: &Scale) -> Result<(Vec<f32>, Statistics)> {
        let pooled = (frames.len() / self.inputs).saturating_sub(TAPS - 1) / POOL;
        let mut statistics = Statistics::new(self.bias.len());
        let mut out = Vec::with_capacity(pooled * self.bias.len());
        let mut scaled = 0;
        for first in (0..pooled).step_by(BLOCK) {
            let last = pooled.min(first + BLOCK);
            let end = (POOL * last + TAPS - 1) * self.inputs;
            scale.apply(&mut frames[scaled..end]);
            scaled = end;
            let sums = self.apply(&frames[POOL * first * self.inputs..end])?;
            // The bias is the same for all three, and rounding keeps the order.
            pool(
                &sums,
                &self.bias,
                &mut out,
                #[inline(always)]
                |value, bias| value + bias,
            );
        }
        statistics.add(&out);
        Ok((out, statistics))
    }
}
