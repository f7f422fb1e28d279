//! Convolution module: pointwise to twice the width, GLU, depthwise over time, batch norm, SiLU, pointwise.

use std::ops::Range;

use candle_core::Tensor;
use flow_kernels::Lengths;
use flow_kernels::batch_norm::{Gather, Normaliser, inverse_deviation, normalise_silu};
use flow_kernels::depthwise::depthwise;
use flow_kernels::gated_convolution::{self, Output, Statistics, Wanted, Weights};
use flow_kernels::glu::glu;

use super::Frames;
use super::linear::Linear;
use crate::config::EncoderConfig;
use crate::error::Result;
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
    running_mean: ParameterId,
    running_variance: ParameterId,
    batches: ParameterId,
    pointwise2: Linear,
    kernel: usize,
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    x: Tensor,
    convolution: gated_convolution::Saved,
    activated: Tensor,
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
    /// Mean and inverse deviation.
    pub fn statistics(&self) -> (Tensor, Tensor) {
        self.convolution.statistics()
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
            running_mean: builder.buffer(&norm("running_mean"), &[d], Initialise::Constant(0.0))?,
            running_variance: builder.buffer(&norm("running_var"), &[d], Initialise::Constant(1.0))?,
            batches: builder.counter(&norm("num_batches_tracked"))?,
            pointwise2: Linear::with_shape(
                &format!("{name}.pointwise_conv2"),
                vec![d, d, 1],
                config.use_bias,
                bound,
                builder,
            )?,
            kernel,
        })
    }

    /// (rows, d) -> (rows, d). In training the statistics are those of all rows, padding included (as NeMo has it), of this
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
        let doubled = self
            .pointwise1
            .forward(parameters, x)?
            .reshape((frames.batch, frames.time, 2 * d))?;
        let factors = self.pointwise2.factors(&doubled);
        let by = self.weights(parameters);
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
            norm.updates.push(self.running_mean, moved_mean);
            norm.updates.push(self.running_variance, moved_variance);
            let batches = parameters.get(self.batches);
            norm.updates.push(self.batches, (batches + 1.0)?);
        }
        let saved = Saved {
            x: x.clone(),
            convolution: saved,
            activated: y,
        };
        Ok((self.pointwise2.forward(parameters, &saved.activated)?, saved))
    }

    /// What the depthwise convolution of [`Convolution::forward`] is over: (rows, d) -> (rows, d). Rows from `valid` on are 0.
    pub fn gate(&self, parameters: &Parameters, x: &Tensor, valid: usize) -> Result<Tensor> {
        let (rows, d) = x.dims2()?;
        let doubled = self.pointwise1.forward(parameters, x)?.reshape((1, rows, 2 * d))?;
        Ok(glu(&doubled, &Lengths::new([valid.min(rows)]))?.reshape((rows, d))?)
    }

    /// The rest of [`Convolution::forward`], when evaluating, for some of the rows of `gated`.
    pub fn convolve(&self, parameters: &Parameters, gated: &Tensor, rows: Range<usize>) -> Result<Tensor> {
        let (all, d) = gated.dims2()?;
        let bias = self.depthwise_bias.map(|id| parameters.get(id));
        let convolved = depthwise(
            &gated.reshape((1, all, d))?,
            parameters.get(self.depthwise_weight),
            bias,
        )?;
        let convolved = convolved.narrow(1, rows.start, rows.len())?.contiguous()?;
        let convolved = convolved.reshape((rows.len(), d))?;
        let (mean, inverse) = self.running_statistics(parameters)?;
        let activated = normalise_silu(&convolved, &self.normaliser(parameters, &mean, &inverse))?;
        self.pointwise2.forward(parameters, &activated)
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

    /// Mean and inverse deviation when evaluating.
    fn running_statistics(&self, parameters: &Parameters) -> Result<(Tensor, Tensor)> {
        let inverse = inverse_deviation(parameters.get(self.running_variance))?;
        Ok((parameters.get(self.running_mean).clone(), inverse))
    }

    fn weights<'a>(&self, parameters: &'a Parameters) -> Weights<'a> {
        Weights {
            weight: parameters.get(self.depthwise_weight),
            bias: self.depthwise_bias.map(|id| parameters.get(id)),
            norm_weight: parameters.get(self.norm_weight),
            norm_bias: parameters.get(self.norm_bias),
            running: (parameters.get(self.running_mean), parameters.get(self.running_variance)),
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
        let d_activated = self
            .pointwise2
            .backward_pending(parameters, &saved.activated, dy, gradients, sums)?;
        let factors = self.pointwise1.factors(&d_activated);
        let by = self.weights(parameters);
        let wanted = Wanted {
            weight: gradients.wants(self.depthwise_weight),
            bias: self.depthwise_bias.is_some_and(|id| gradients.wants(id)),
        };
        let given = (&d_activated, gather);
        let found = gated_convolution::backward(factors, &saved.convolution, &frames.lengths, by, given, wanted)?;
        sums.add(&[self.norm_weight, self.norm_bias], found.norm);
        if let Some(weight) = found.weight {
            sums.add(&[self.depthwise_weight], weight);
        }
        if let (Some(id), Some(bias)) = (self.depthwise_bias, found.bias) {
            sums.add(&[id], bias);
        }
        let d_doubled = found.doubled.reshape((rows, 2 * d))?;
        self.pointwise1
            .backward_pending(parameters, &saved.x, &d_doubled, gradients, sums)
    }
}
