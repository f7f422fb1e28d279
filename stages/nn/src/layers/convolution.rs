//! Convolution module: pointwise to twice the width, GLU, depthwise over time, batch norm or layer norm, SiLU, pointwise.

use std::ops::Range;

use candle_core::{DType, Tensor};
use flow_kernels::Lengths;
use flow_kernels::batch_norm::{Gather, Normaliser, inverse_deviation, normalise_silu};
use flow_kernels::bias::column_sum;
use flow_kernels::column_sums::ColumnSums;
use flow_kernels::depthwise::{depthwise, depthwise_backward, depthwise_backward_weight};
use flow_kernels::elementwise::{silu, silu_backward, silu_in};
use flow_kernels::gated_convolution::{self, BackwardOutput, Output, Statistics, Wanted, Weights};
use flow_kernels::glu::{glu, glu_backward};
use flow_kernels::layer_norm::{layer_norm, layer_norm_backward};

use super::Frames;
use super::linear::Linear;
use crate::config::EncoderConfig;
use crate::error::{Error, Result};
use crate::parameters::{BufferUpdates, Gradients, Initialise, Mode, ParameterBuilder, ParameterId, Parameters};
use crate::pending_sums::PendingSums;

/// The convolution module.
#[derive(Clone, Debug)]
pub struct Convolution {
    pointwise1: Linear,
    depthwise_weight: ParameterId,
    depthwise_bias: Option<ParameterId>,
    norm_weight: ParameterId,
    norm_bias: ParameterId,
    /// What batch normalisation keeps; none in a module with layer normalisation.
    running: Option<Running>,
    pointwise2: Linear,
    kernel: usize,
    is_causal: bool,
}

/// Running statistics of batch normalisation.
#[derive(Clone, Copy, Debug)]
struct Running {
    mean: ParameterId,
    variance: ParameterId,
    batches: ParameterId,
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    x: Tensor,
    inner: Inner,
    activated: Tensor,
}

/// What is between the pointwise convolutions.
#[derive(Debug)]
enum Inner {
    WithBatchNorm(gated_convolution::Saved),
    WithLayerNorm {
        /// (B, T, 2 d)
        doubled: Tensor,
        /// The input of the depthwise convolution, (B, T, d), with the padding of a causal one.
        padded: Tensor,
        /// Its output, (B T, d), this normalised, and the statistics.
        convolved: Tensor,
        normalised: Tensor,
        statistics: Tensor,
    },
}

/// Which statistics batch normalisation uses in training. When evaluating they are the running ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BatchNorm {
    /// Those of the rows of the micro-batch.
    #[default]
    OwnRows,
    /// Those of the rows of the micro-batches that all ranks compute at the same time (`SyncBatchNorm`).
    AllRanks,
    /// The running ones, which stay as they are.
    Frozen,
}

/// The batch normalisation of one layer in one forward pass.
pub struct BatchNormPass<'a> {
    pub batch_norm: BatchNorm,
    /// With [`BatchNorm::AllRanks`]: mean and inverse deviation of an earlier pass over the same rows.
    pub known: Option<(Tensor, Tensor)>,
    /// Gathers what each rank has; without it this rank is the only one.
    pub gather: Option<Gather<'a>>,
    /// Gets the new running statistics.
    pub updates: &'a mut BufferUpdates,
}

impl Saved {
    /// Mean and inverse deviation of batch normalisation, if there is any.
    pub fn statistics(&self) -> Option<(Tensor, Tensor)> {
        match &self.inner {
            Inner::WithBatchNorm(saved) => Some(saved.statistics()),
            Inner::WithLayerNorm { .. } => None,
        }
    }
}

impl Convolution {
    /// `name.pointwise_conv1`, `name.depthwise_conv`, `name.batch_norm`, `name.pointwise_conv2`.
    pub fn new(name: &str, config: &EncoderConfig, builder: &mut ParameterBuilder) -> Result<Self> {
        let (d, kernel) = (config.d_model, config.conv_kernel_size);
        let bound = 1.0 / (d as f64).sqrt();
        let tap_bound = 1.0 / (kernel as f64).sqrt();
        let norm = |key: &str| format!("{name}.batch_norm.{key}");
        Ok(Self {
            pointwise1: Linear::with_shape(
                &format!("{name}.pointwise_conv1"),
                vec![2 * d, d, 1],
                config.use_bias,
                bound,
                builder,
            )?,
            depthwise_weight: builder.parameter(
                &format!("{name}.depthwise_conv.weight"),
                &[d, 1, kernel],
                Initialise::Uniform(tap_bound),
            )?,
            depthwise_bias: config
                .use_bias
                .then(|| {
                    let key = format!("{name}.depthwise_conv.bias");
                    builder.parameter(&key, &[d], Initialise::Uniform(tap_bound))
                })
                .transpose()?,
            norm_weight: builder.parameter(&norm("weight"), &[d], Initialise::Constant(1.0))?,
            norm_bias: builder.parameter(&norm("bias"), &[d], Initialise::Constant(0.0))?,
            running: match config.causal.layer_norm {
                true => None,
                false => Some(Running {
                    mean: builder.buffer(&norm("running_mean"), &[d], Initialise::Constant(0.0))?,
                    variance: builder.buffer(&norm("running_var"), &[d], Initialise::Constant(1.0))?,
                    batches: builder.counter(&norm("num_batches_tracked"))?,
                }),
            },
            pointwise2: Linear::with_shape(
                &format!("{name}.pointwise_conv2"),
                vec![d, d, 1],
                config.use_bias,
                bound,
                builder,
            )?,
            kernel,
            is_causal: config.causal.convolution,
        })
    }

    /// Whether what is between the products is in bf16, which only the kernels with batch normalisation read.
    fn rounds(&self, like: &Tensor) -> bool {
        self.running.is_some() && self.pointwise1.rounds(like) && self.pointwise2.rounds(like)
    }

    /// (rows, d) -> (rows, d); on a device with products in bf16 the result is rounded to bf16, unless something is added to a product.
    ///
    /// In training the statistics are those of all rows, padding included (as NeMo has it), of this
    /// rank or of all, and the new running statistics go to `norm.updates`.
    pub fn forward(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        frames: &Frames,
        mode: &Mode,
        norm: &mut BatchNormPass,
    ) -> Result<(Tensor, Saved)> {
        let (_, d) = x.dims2()?;
        let rounded = self.rounds(x);
        let doubled =
            self.pointwise1
                .forward_rounded(parameters, x, rounded)?
                .reshape((frames.batch, frames.time, 2 * d))?;
        let factors = self.pointwise2.factors(&doubled);
        let Some(running) = self.running else {
            let (activated, inner) = self.with_layer_norm(parameters, doubled, factors, frames)?;
            let x = x.clone();
            let saved = Saved { x, inner, activated };
            return Ok((self.pointwise2.forward(parameters, &saved.activated)?, saved));
        };
        let by = self.weights(parameters, running);
        let mut alone = |own: &Tensor| Ok(own.unsqueeze(0)?);
        let statistics = match norm.batch_norm {
            _ if !mode.is_training() => Statistics::Running,
            BatchNorm::Frozen => Statistics::Running,
            BatchNorm::OwnRows => Statistics::Own,
            BatchNorm::AllRanks => match (norm.known.take(), &mut norm.gather) {
                (Some((mean, inverse)), _) => Statistics::Known { mean, inverse },
                (None, Some(gather)) => Statistics::Joined(&mut **gather),
                (None, None) => Statistics::Joined(&mut alone),
            },
        };
        let Output { y, saved, moved } =
            gated_convolution::forward(factors, &doubled, &frames.lengths, by, statistics)?;
        if let Some([moved_mean, moved_variance]) = moved {
            norm.updates.push(running.mean, moved_mean);
            norm.updates.push(running.variance, moved_variance);
            let batches = parameters.get(running.batches);
            norm.updates.push(running.batches, (batches + 1.0)?);
        }
        let saved = Saved {
            x: x.clone(),
            inner: Inner::WithBatchNorm(saved),
            activated: y,
        };
        let y = self.pointwise2.forward_rounded(parameters, &saved.activated, rounded)?;
        Ok((y, saved))
    }

    /// What the depthwise convolution of [`Convolution::forward`] is over: (rows, d) -> (rows, d). Rows from `valid` on are 0.
    pub fn gate(&self, parameters: &Parameters, x: &Tensor, valid: usize) -> Result<Tensor> {
        let (rows, d) = x.dims2()?;
        let doubled = self.pointwise1.forward(parameters, x)?.reshape((1, rows, 2 * d))?;
        Ok(glu(&doubled, &Lengths::new([valid.min(rows)]))?.reshape((rows, d))?)
    }

    /// The rest of [`Convolution::forward`], when evaluating, for some of the rows of `gated`.
    pub fn convolve(&self, parameters: &Parameters, gated: &Tensor, rows: Range<usize>) -> Result<Tensor> {
        let convolved = self.depthwise_rows(parameters, gated, rows)?;
        self.after_depthwise(parameters, &convolved)
    }

    /// Some rows of the depthwise convolution over (rows, d), in which each is in the middle of its taps.
    fn depthwise_rows(&self, parameters: &Parameters, gated: &Tensor, rows: Range<usize>) -> Result<Tensor> {
        let (all, d) = gated.dims2()?;
        let bias = self.depthwise_bias.map(|id| parameters.get(id));
        let convolved = depthwise(
            &gated.reshape((1, all, d))?,
            parameters.get(self.depthwise_weight),
            bias,
        )?;
        let convolved = convolved.narrow(1, rows.start, rows.len())?.contiguous()?;
        Ok(convolved.reshape((rows.len(), d))?)
    }

    /// What is behind the depthwise convolution, when evaluating.
    fn after_depthwise(&self, parameters: &Parameters, convolved: &Tensor) -> Result<Tensor> {
        let activated = match self.running {
            Some(running) => {
                let (mean, inverse) = running_statistics(running, parameters)?;
                normalise_silu(convolved, &self.normaliser(parameters, &mean, &inverse))?
            }
            None => silu(&self.layer_norm(parameters, convolved)?.0, None)?,
        };
        self.pointwise2.forward(parameters, &activated)
    }

    fn layer_norm(&self, parameters: &Parameters, convolved: &Tensor) -> Result<(Tensor, Tensor)> {
        let (weight, bias) = (parameters.get(self.norm_weight), parameters.get(self.norm_bias));
        Ok(layer_norm(convolved, weight, bias)?)
    }

    /// Rows of zeros before a sequence with which the middle tap of the depthwise convolution is its last one.
    fn padding(&self) -> usize {
        if self.is_causal { self.kernel / 2 } else { 0 }
    }

    /// From (B, T, 2 d) to the input of the second pointwise convolution, (B T, d).
    fn with_layer_norm(
        &self,
        parameters: &Parameters,
        doubled: Tensor,
        factors: DType,
        frames: &Frames,
    ) -> Result<(Tensor, Inner)> {
        let gated = glu(&doubled, &frames.lengths)?;
        let (batch, time, d) = gated.dims3()?;
        let padded = gated.pad_with_zeros(1, self.padding(), 0)?;
        let bias = self.depthwise_bias.map(|id| parameters.get(id));
        let convolved = depthwise(&padded, parameters.get(self.depthwise_weight), bias)?;
        let convolved = convolved.narrow(1, 0, time)?.contiguous()?.reshape((batch * time, d))?;
        let (normalised, statistics) = self.layer_norm(parameters, &convolved)?;
        let activated = silu_in(factors, &normalised, None)?;
        let inner = Inner::WithLayerNorm {
            doubled,
            padded,
            convolved,
            normalised,
            statistics,
        };
        Ok((activated, inner))
    }

    /// Begins a recording of which rows come in steps.
    pub fn cache(&self, parameters: &Parameters) -> Result<Tensor> {
        let weight = parameters.get(self.depthwise_weight);
        let (d, rows) = (weight.dim(0)?, self.kernel - 1);
        Ok(Tensor::zeros((rows, d), weight.dtype(), weight.device())?)
    }

    /// [`Convolution::forward`], when evaluating, for the next rows of several recordings, behind each other in `x`, (rows, d), so
    /// many of each. `caches` are the rows before them in the input of the depthwise convolution, (kernel - 1, d) each, and get the
    /// last ones.
    pub fn step(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        counts: &[usize],
        caches: &mut [&mut Tensor],
    ) -> Result<Tensor> {
        let gated = self.gate(parameters, x, x.dim(0)?)?;
        let mut convolved = Vec::with_capacity(counts.len());
        let mut first = 0;
        for (&count, cache) in counts.iter().zip(caches) {
            let rows = Tensor::cat(&[&**cache, &gated.narrow(0, first, count)?], 0)?;
            // The last tap, which is of the row itself, is half the kernel behind the middle one.
            let middle = self.kernel / 2;
            convolved.push(self.depthwise_rows(parameters, &rows, middle..middle + count)?);
            **cache = rows.narrow(0, count, self.kernel - 1)?;
            first += count;
        }
        self.after_depthwise(parameters, &Tensor::cat(&convolved, 0)?)
    }

    /// Rows to either side that a row of the depthwise convolution is made of.
    pub fn reach(&self) -> usize {
        self.kernel / 2
    }

    fn normaliser<'a>(&self, parameters: &'a Parameters, mean: &'a Tensor, inverse: &'a Tensor) -> Normaliser<'a> {
        Normaliser {
            mean,
            inverse,
            weight: parameters.get(self.norm_weight),
            bias: parameters.get(self.norm_bias),
        }
    }

    fn weights<'a>(&self, parameters: &'a Parameters, running: Running) -> Weights<'a> {
        Weights {
            weight: parameters.get(self.depthwise_weight),
            bias: self.depthwise_bias.map(|id| parameters.get(id)),
            norm_weight: parameters.get(self.norm_weight),
            norm_bias: parameters.get(self.norm_bias),
            running: (parameters.get(running.mean), parameters.get(running.variance)),
        }
    }

    /// Adds the gradients of all parts, some of them by way of `sums`, and gives that of `x`. `gather` is for statistics of
    /// all ranks.
    pub fn backward(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        frames: &Frames,
        (dy, gather): (&Tensor, Gather),
        (gradients, sums): (&mut Gradients, &mut PendingSums),
    ) -> Result<Tensor> {
        let (rows, d) = saved.x.dims2()?;
        let rounded = self.rounds(dy);
        let d_activated =
            self.pointwise2
                .backward_rounded(parameters, &saved.activated, (dy, rounded), gradients, sums)?;
        let factors = self.pointwise1.factors(&d_activated);
        let wanted = Wanted {
            weight: gradients.wants(self.depthwise_weight),
            bias: self.depthwise_bias.is_some_and(|id| gradients.wants(id)),
        };
        let found = match (&saved.inner, self.running) {
            (Inner::WithBatchNorm(inner), Some(running)) => {
                let by = self.weights(parameters, running);
                gated_convolution::backward(factors, inner, &frames.lengths, by, (&d_activated, gather), wanted)?
            }
            (inner, _) => self.backward_layer_norm(parameters, inner, frames, (factors, d_activated), wanted)?,
        };
        sums.add(&[self.norm_weight, self.norm_bias], found.norm);
        if let Some(weight) = found.weight {
            sums.add(&[self.depthwise_weight], weight);
        }
        if let (Some(id), Some(bias)) = (self.depthwise_bias, found.bias) {
            sums.add(&[id], bias);
        }
        let d_doubled = found.doubled.reshape((rows, 2 * d))?;
        self.pointwise1
            .backward_rounded(parameters, &saved.x, (&d_doubled, rounded), gradients, sums)
    }

    /// The way back through what [`Convolution::with_layer_norm`] saved, given the gradient of its result; that of its input is of
    /// type `dtype`.
    fn backward_layer_norm(
        &self,
        parameters: &Parameters,
        inner: &Inner,
        frames: &Frames,
        (dtype, d_activated): (DType, Tensor),
        wanted: Wanted,
    ) -> Result<BackwardOutput> {
        let Inner::WithLayerNorm {
            doubled,
            padded,
            convolved,
            normalised,
            statistics,
        } = inner
        else {
            return Err(Error::Input(
                "a convolution was computed with batch normalisation".into(),
            ));
        };
        let d_normalised = silu_backward(normalised.dtype(), normalised, d_activated, None)?;
        let weight = parameters.get(self.norm_weight);
        let (d_convolved, norm) = layer_norm_backward(convolved, statistics, weight, &d_normalised, None)?;
        let bias = wanted.bias.then(|| column_sum(&d_convolved)).transpose()?;
        let (padding, taps) = (self.padding(), parameters.get(self.depthwise_weight));
        let d_convolved = d_convolved.reshape((frames.batch, frames.time, ()))?;
        let d_convolved = d_convolved.pad_with_zeros(1, 0, padding)?;
        let d_taps = match wanted.weight {
            true => Some(depthwise_backward_weight(padded, &d_convolved, self.kernel)?.flatten_all()?),
            false => None,
        };
        let d_gated = depthwise_backward(&d_convolved, taps)?.narrow(1, padding, frames.time)?;
        Ok(BackwardOutput {
            doubled: glu_backward(doubled, &d_gated, &frames.lengths)?.to_dtype(dtype)?,
            weight: d_taps.map(ColumnSums::whole),
            bias: bias.map(ColumnSums::whole),
            norm,
        })
    }
}

/// Mean and inverse deviation when evaluating.
fn running_statistics(running: Running, parameters: &Parameters) -> Result<(Tensor, Tensor)> {
    let inverse = inverse_deviation(parameters.get(running.variance))?;
    Ok((parameters.get(running.mean).clone(), inverse))
}
