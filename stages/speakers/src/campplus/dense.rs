//! Blocks of densely connected layers with context-aware masks.
//!
//! The frames of a block are in one buffer with room for the channels that all layers add, so nothing is concatenated.
//! The convolution of a layer reads overlapping rows; with dilation 2, even and odd frames are stored separately.

use flow_kernels::product::PackedRhs;

use crate::error::Result;
use crate::layers::{BatchNorm, normalized_relu, product_error, rounded};
use crate::linear::Linear;
use crate::weights::Weights;

/// Channels that a layer adds.
const GROWTH: usize = 32;
/// Channels within a layer.
const BOTTLENECK: usize = 128;
const CONTEXT: usize = BOTTLENECK / 2;
const TAPS: usize = 3;
/// Frames of a segment, whose mean is the local context.
const SEGMENT: usize = 100;
/// Frames that are normalised and multiplied together: at most 1024 channels of them lie in the second cache.
const BLOCK: usize = 48;

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
    pub fn dense(&self, x: &[f32]) -> Result<Vec<f32>> {
        let width = self.width();
        let mut buffer = vec![0.0; x.len() / self.inputs * width];
        for (to, x) in buffer.chunks_exact_mut(width).zip(x.chunks_exact(self.inputs)) {
            to[..self.inputs].copy_from_slice(x);
        }
        let mut scratch = Scratch::default();
        for layer in &self.layers {
            layer.apply(&mut buffer, width, &mut scratch)?;
        }
        Ok(buffer)
    }

    /// (frames, outputs) of (frames, width).
    pub fn transit(&self, x: &[f32]) -> Result<Vec<f32>> {
        let mut out = Vec::with_capacity(x.len() / 2);
        self.transit
            .apply(x, self.width(), &mut Vec::new(), |_, row| out.extend_from_slice(row))?;
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

    /// Gives the results of the first channels of `x`, whose frames have `width`, one by one with the number of the frame.
    fn apply(
        &self,
        x: &[f32],
        width: usize,
        scratch: &mut Vec<f32>,
        mut give: impl FnMut(usize, &[f32]),
    ) -> Result<()> {
        let inputs = self.scale.len();
        scratch.resize(BLOCK * inputs, 0.0);
        for (block, x) in x.chunks(BLOCK * width).enumerate() {
            normalized_relu(x, width, &self.scale, &self.shift, scratch);
            let rows = self.linear.product_of_rows(scratch, x.len() / width, inputs);
            let mut rows = rows.map_err(product_error)?;
            for (row, values) in rows.chunks_exact_mut(self.outputs).enumerate() {
                if let Some(bias) = &self.bias {
                    for (value, bias) in values.iter_mut().zip(bias) {
                        let sum = *value + bias;
                        *value = if sum > 0.0 { sum } else { 0.0 };
                    }
                }
                give(block * BLOCK + row, values);
            }
        }
        Ok(())
    }
}

/// Memory of the layers of a block, which all have as many frames.
#[derive(Default)]
struct Scratch {
    normalized: Vec<f32>,
    /// The frames within a layer; those of zeros, which no layer writes to, have the same places in all of them.
    hidden: Vec<f32>,
    local: Vec<f32>,
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
        // Frames of each remainder lie together, with a frame of zeros before, between and behind them.
        let mut starts = Vec::with_capacity(self.dilation);
        let mut next = 1;
        for phase in 0..self.dilation {
            starts.push(next);
            next += frames.saturating_sub(phase).div_ceil(self.dilation) + 1;
        }
        let place = |frame: usize| starts[frame % self.dilation] + frame / self.dilation;
        hidden.resize(next * BOTTLENECK, 0.0);
        let mut sums = vec![0.0; frames.div_ceil(SEGMENT) * BOTTLENECK];
        self.bottleneck.apply(buffer, width, normalized, |frame, row| {
            hidden[place(frame) * BOTTLENECK..][..BOTTLENECK].copy_from_slice(row);
            let sums = &mut sums[frame / SEGMENT * BOTTLENECK..][..BOTTLENECK];
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += value;
            }
        })?;
        let masks = self.masks(&sums, frames);
        local.resize((next - TAPS + 1) * GROWTH, 0.0);
        self.local
            .product_of_rows_into(hidden, next - TAPS + 1, BOTTLENECK, local)
            .map_err(product_error)?;
        for (frame, to) in buffer.chunks_exact_mut(width).enumerate() {
            let row = &local[(place(frame) - 1) * GROWTH..][..GROWTH];
            let mask = &masks[frame / SEGMENT * GROWTH..][..GROWTH];
            for ((to, value), mask) in to[self.inputs..][..GROWTH].iter_mut().zip(row).zip(mask) {
                *to = value * mask;
            }
        }
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
        self.context[0].apply(&context, &mut hidden, segments, |row| (row * BOTTLENECK, row * CONTEXT));
        hidden.iter_mut().for_each(|value| *value = value.max(0.0));
        let mut masks = vec![0.0; segments * GROWTH];
        self.context[1].apply(&hidden, &mut masks, segments, |row| (row * CONTEXT, row * GROWTH));
        masks
            .iter_mut()
            .for_each(|value| *value = 1.0 / (1.0 + (-*value).exp()));
        masks
    }
}
