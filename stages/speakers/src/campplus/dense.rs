//! Blocks of densely connected layers with context-aware masks.
//!
//! The frames of a block are in one buffer with room for the channels that all layers add, so nothing is concatenated.
//! The convolution of a layer reads its taps where they lie.

#![allow(clippy::needless_range_loop, reason = "loops over lanes become vectors in this form")]

use flow_kernels::linear::Linear;
use flow_kernels::product::PackedRhs;
use flow_kernels::{Aligned, multiversion};

use crate::error::Result;
use crate::layers::{BatchNorm, LANES, Spare, normalized_relu, product_error, rounded};
use crate::weights::Weights;

/// Channels that a layer adds.
const GROWTH: usize = 32;
/// Channels within a layer.
const BOTTLENECK: usize = 128;
const CONTEXT: usize = BOTTLENECK / 2;
const TAPS: usize = 3;
/// Frames of a segment, whose mean is the local context.
const SEGMENT: usize = 100;
/// Frames that are normalised and multiplied together: at most 1024 channels of them are in the second cache.
const BLOCK: usize = 48;
/// Padding in floats between normalised frames, so that they are not in the same set of the L1 cache.
const PADDING: usize = 16;

/// Dense layers, then one that halves the channels.
pub struct DenseBlock {
    inputs: usize,
    layers: Vec<DenseLayer>,
    transit: Normalized,
}

impl DenseBlock {
    /// Reads `xvector.block{number}.*` and `xvector.transit{number}.*`; of the last block also the norm
    /// `xvector.out_nonlinear`, which is folded, with ReLU.
    pub fn read(
        weights: &Weights,
        number: usize,
        inputs: usize,
        layers: usize,
        dilation: usize,
        last: bool,
    ) -> Result<Self> {
        let width = inputs + layers * GROWTH;
        let layer = |layer: usize| {
            let name = format!("xvector.block{number}.tdnnd{}", layer + 1);
            DenseLayer::read(weights, &name, inputs + layer * GROWTH, dilation)
        };
        let name = format!("xvector.transit{number}");
        let norm = format!("{name}.nonlinear.batchnorm");
        let linear = format!("{name}.linear.weight");
        let after = last.then_some("xvector.out_nonlinear.batchnorm");
        Ok(Self {
            inputs,
            layers: (0..layers).map(layer).collect::<Result<_>>()?,
            transit: Normalized::read(weights, [&norm, &linear], after, [width, width / 2])?,
        })
    }

    /// Channels with those that the layers add.
    pub fn width(&self) -> usize {
        self.inputs + self.layers.len() * GROWTH
    }

    /// Channels of what [`transit`](Self::transit) gives.
    pub fn outputs(&self) -> usize {
        self.width() / 2
    }

    /// `x` (frames, inputs) with what the layers add, (frames, width).
    pub fn dense(&self, x: &[f32], spare: &mut Spare) -> Result<Aligned<f32>> {
        let width = self.width();
        let frames = x.len() / self.inputs;
        let mut buffer = spare.take_values(frames * width);
        for (to, x) in buffer.chunks_exact_mut(width).zip(x.chunks_exact(self.inputs)) {
            to[..self.inputs].copy_from_slice(x);
        }
        let mut scratch = Scratch {
            normalized: spare.take_values(BLOCK * (width + PADDING)),
            hidden: spare.take_values(frames * BOTTLENECK),
            local: spare.take_values(frames * GROWTH),
        };
        for layer in &self.layers {
            layer.apply(&mut buffer, width, &mut scratch)?;
        }
        let Scratch {
            normalized,
            hidden,
            local,
        } = scratch;
        for values in [normalized, hidden, local] {
            spare.give_values(values);
        }
        Ok(buffer)
    }

    /// (frames, outputs) of (frames, width).
    pub fn transit(&self, x: &[f32], spare: &mut Spare) -> Result<Aligned<f32>> {
        let mut out = spare.take_values(x.len() / self.width() * self.outputs());
        let mut scratch = spare.take_values(BLOCK * (self.width() + PADDING));
        self.transit.apply(x, self.width(), &mut scratch, &mut out, |_, _| ())?;
        spare.give_values(scratch);
        Ok(out)
    }
}

/// Batch norm, ReLU and a linear layer, optionally followed by a folded batch norm with ReLU.
struct Normalized {
    scale: Vec<f32>,
    shift: Vec<f32>,
    linear: PackedRhs,
    outputs: usize,
    /// With ReLU.
    bias: Option<Vec<f32>>,
}

impl Normalized {
    fn read(
        weights: &Weights,
        [norm, linear]: [&str; 2],
        after: Option<&str>,
        [inputs, outputs]: [usize; 2],
    ) -> Result<Self> {
        let before = BatchNorm::read(weights, norm, inputs, true)?;
        let weight = weights.floats(linear, &[outputs, inputs, 1])?;
        let (weight, bias) = match after {
            Some(after) => {
                let after = BatchNorm::read(weights, after, outputs, true)?;
                let bias = rounded(&after.shift, linear)?;
                (rounded(&after.fold(&weight), linear)?, Some(bias))
            }
            None => (weight, None),
        };
        Ok(Self {
            scale: rounded(&before.scale, norm)?,
            shift: rounded(&before.shift, norm)?,
            linear: PackedRhs::from_weight(&weight, outputs).map_err(product_error)?,
            outputs,
            bias,
        })
    }

    /// Writes to `out` (frames, outputs) the results of the first channels of `x`, whose frames have `width`. Blocks of them
    /// go to `done` as soon as they are there, with the number of their first frame.
    fn apply(
        &self,
        x: &[f32],
        width: usize,
        scratch: &mut Aligned<f32>,
        out: &mut [f32],
        mut done: impl FnMut(usize, &mut [f32]),
    ) -> Result<()> {
        let step = self.scale.len() + PADDING;
        scratch.resize(BLOCK * step);
        let blocks = x.chunks(BLOCK * width).zip(out.chunks_mut(BLOCK * self.outputs));
        for (block, (x, out)) in blocks.enumerate() {
            normalized_relu(x, width, [&self.scale, &self.shift], scratch, step);
            self.linear
                .product_of_rows_into(scratch, x.len() / width, step, out)
                .map_err(product_error)?;
            if let Some(bias) = &self.bias {
                biased_relu(out, bias);
            }
            done(block * BLOCK, out);
        }
        Ok(())
    }
}

/// Memory of the layers of a block, which all have as many frames.
struct Scratch {
    normalized: Aligned<f32>,
    /// The frames within a layer, with as many frames of zeros before and behind them as the dilation is.
    hidden: Aligned<f32>,
    local: Aligned<f32>,
}

/// ReLU of rows with a bias.
pub fn biased_relu(rows: &mut [f32], bias: &[f32]) {
    multiversion!({
        for row in rows.chunks_exact_mut(bias.len()) {
            for (value, bias) in row.iter_mut().zip(bias) {
                let sum = *value + bias;
                *value = if sum > 0.0 { sum } else { 0.0 };
            }
        }
    });
}

/// Adds the rows to `sums`, one after another.
fn add_rows(rows: &[f32], sums: &mut [f32]) {
    let channels = sums.len();
    multiversion!({
        for (part, sums) in sums.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let mut sum = *sums;
            for row in rows.chunks_exact(channels) {
                let row = &row.as_chunks::<LANES>().0[part];
                for lane in 0..LANES {
                    sum[lane] += row[lane];
                }
            }
            *sums = sum;
        }
    });
}

/// The first rows of `local` times the masks of their segments, to the channels of `frames` from `place` on.
fn masked(local: &[f32], masks: &[f32], frames: &mut [f32], width: usize, place: usize) {
    multiversion!({
        let rows = local.as_chunks::<GROWTH>().0;
        for ((frames, rows), mask) in frames
            .chunks_mut(SEGMENT * width)
            .zip(rows.chunks(SEGMENT))
            .zip(masks.as_chunks::<GROWTH>().0)
        {
            for (frame, row) in frames.chunks_exact_mut(width).zip(rows) {
                let to = &mut frame[place..].as_chunks_mut::<GROWTH>().0[0];
                for channel in 0..GROWTH {
                    to[channel] = row[channel] * mask[channel];
                }
            }
        }
    });
}

/// Adds [`GROWTH`] channels.
struct DenseLayer {
    dilation: usize,
    inputs: usize,
    bottleneck: Normalized,
    /// The convolution; of the depth of the product the tap is outermost.
    local: PackedRhs,
    context: [Linear; 2],
}

impl DenseLayer {
    fn read(weights: &Weights, name: &str, inputs: usize, dilation: usize) -> Result<Self> {
        let [norm, linear, after] =
            ["nonlinear1.batchnorm", "linear1.weight", "nonlinear2.batchnorm"].map(|part| format!("{name}.{part}"));
        let cam = format!("{name}.cam_layer");
        let weight = weights.floats(&format!("{cam}.linear_local.weight"), &[GROWTH, BOTTLENECK, TAPS])?;
        let mut local = Vec::with_capacity(weight.len());
        for weight in weight.chunks_exact(BOTTLENECK * TAPS) {
            for tap in 0..TAPS {
                local.extend(weight.iter().skip(tap).step_by(TAPS));
            }
        }
        let context = |part: &str, inputs: usize, outputs: usize| -> Result<Linear> {
            let weight = weights.floats(&format!("{cam}.{part}.weight"), &[outputs, inputs, 1])?;
            Ok(Linear::new(
                &weight,
                weights.floats(&format!("{cam}.{part}.bias"), &[outputs])?,
            ))
        };
        Ok(Self {
            dilation,
            inputs,
            bottleneck: Normalized::read(weights, [&norm, &linear], Some(&after), [inputs, BOTTLENECK])?,
            local: PackedRhs::from_weight(&local, GROWTH).map_err(product_error)?,
            context: [
                context("linear1", BOTTLENECK, CONTEXT)?,
                context("linear2", CONTEXT, GROWTH)?,
            ],
        })
    }

    /// Reads the first channels of the frames of `buffer` and writes those behind them.
    fn apply(&self, buffer: &mut [f32], width: usize, scratch: &mut Scratch) -> Result<()> {
        let Scratch {
            normalized,
            hidden,
            local,
        } = scratch;
        let frames = buffer.len() / width;
        let padding = self.dilation * BOTTLENECK;
        hidden.resize(frames * BOTTLENECK + 2 * padding);
        let (before, rest) = hidden.split_at_mut(padding);
        let (within, behind) = rest.split_at_mut(frames * BOTTLENECK);
        before.fill(0.0);
        behind.fill(0.0);
        let mut sums = vec![0.0; frames.div_ceil(SEGMENT) * BOTTLENECK];
        self.bottleneck
            .apply(buffer, width, normalized, within, |mut first, mut rows| {
                while !rows.is_empty() {
                    let left = (SEGMENT - first % SEGMENT) * BOTTLENECK;
                    let (part, next) = rows.split_at_mut(left.min(rows.len()));
                    add_rows(part, &mut sums[first / SEGMENT * BOTTLENECK..][..BOTTLENECK]);
                    (first, rows) = (first + part.len() / BOTTLENECK, next);
                }
            })?;
        let masks = self.masks(&sums, frames);
        local.resize(frames * GROWTH);
        let taps: [usize; TAPS] = std::array::from_fn(|tap| tap * padding);
        self.local
            .product_of_taps_into(hidden, frames, BOTTLENECK, &taps, local)
            .map_err(product_error)?;
        masked(local, &masks, buffer, width, self.inputs);
        Ok(())
    }

    /// The mask of each segment, by which its channels are multiplied, from the sums of the hidden channels in each
    /// segment.
    fn masks(&self, sums: &[f32], frames: usize) -> Vec<f32> {
        let segments = sums.len() / BOTTLENECK;
        let mut total = vec![0.0; BOTTLENECK];
        for sums in sums.chunks_exact(BOTTLENECK) {
            for (total, sum) in total.iter_mut().zip(sums) {
                *total += sum;
            }
        }
        let mut context = Vec::with_capacity(sums.len());
        for (segment, sums) in sums.chunks_exact(BOTTLENECK).enumerate() {
            // The last one is shorter.
            let length = SEGMENT.min(frames - segment * SEGMENT) as f32;
            let means = total.iter().zip(sums);
            context.extend(means.map(|(total, sum)| total / frames as f32 + sum / length));
        }
        let mut hidden = vec![0.0; segments * CONTEXT];
        self.context[0].apply(&context, &mut hidden, segments, &|row| {
            (row * BOTTLENECK, row * CONTEXT)
        });
        hidden.iter_mut().for_each(|value| *value = value.max(0.0));
        let mut masks = vec![0.0; segments * GROWTH];
        self.context[1].apply(&hidden, &mut masks, segments, &|row| (row * CONTEXT, row * GROWTH));
        masks
            .iter_mut()
            .for_each(|value| *value = 1.0 / (1.0 + (-*value).exp()));
        masks
    }
}
