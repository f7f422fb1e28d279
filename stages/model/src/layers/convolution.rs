//! Convolution module: pointwise to twice the width, GLU, depthwise over time, batch norm, SiLU, pointwise.

use std::ops::Range;

use candle_core::Tensor;
use flow_kernels::Lengths;
use flow_kernels::batch_norm::{
    Gather, Normaliser, Statistics, batch_statistics, column_moments, inverse_deviation, joined_statistics,
    normalise_silu, normalise_silu_backward,
};
use flow_kernels::bias::column_sum;
use flow_kernels::depthwise::{depthwise, depthwise_backward, depthwise_backward_weight};
use flow_kernels::glu::{glu, glu_backward};

use super::Frames;
use super::linear::Linear;
use crate::config::EncoderConfig;
use crate::error::Result;
use crate::parameters::{BufferUpdates, Gradients, Initialise, Mode, ParameterBuilder, ParameterId, Parameters};

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
    doubled: Tensor,
    gated: Tensor,
    convolved: Tensor,
    mean: Tensor,
    inverse: Tensor,
    /// None where the statistics were the running ones.
    statistics: Option<BatchNorm>,
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
        (self.mean.clone(), self.inverse.clone())
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
        let (rows, d) = x.dims2()?;
        let doubled = self
            .pointwise1
            .forward(parameters, x)?
            .reshape((frames.batch, frames.time, 2 * d))?;
        let gated = glu(&doubled, &frames.lengths)?;
        let convolved = depthwise(
            &gated,
            parameters.get(self.depthwise_weight),
            self.depthwise_bias.map(|id| parameters.get(id)),
        )?
        .reshape((rows, d))?;
        let statistics = Some(norm.batch_norm).filter(|norm| mode.is_training() && *norm != BatchNorm::Frozen);
        let (mean, inverse) = match (statistics, norm.known.take()) {
            (None, _) => self.running_statistics(parameters)?,
            (Some(BatchNorm::AllRanks), Some(known)) => known,
            (Some(kind), _) => {
                let running = (parameters.get(self.running_mean), parameters.get(self.running_variance));
                let (mean, inverse, [moved_mean, moved_variance]) = match kind {
                    BatchNorm::AllRanks => {
                        let own = column_moments(&convolved, d)?;
                        let moments = match &mut norm.gather {
                            Some(gather) => gather(&own)?,
                            None => own.unsqueeze(0)?,
                        };
                        joined_statistics(&moments, running)?
                    }
                    _ => batch_statistics(&convolved, running)?,
                };
                norm.updates.push(self.running_mean, moved_mean);
                norm.updates.push(self.running_variance, moved_variance);
                let batches = parameters.get(self.batches);
                norm.updates.push(self.batches, (batches + batches.ones_like()?)?);
                (mean, inverse)
            }
        };
        let activated = normalise_silu(&convolved, &self.normaliser(parameters, &mean, &inverse))?;
        let y = self.pointwise2.forward(parameters, &activated)?;
        let saved = Saved {
            x: x.clone(),
            doubled,
            gated,
            convolved,
            mean,
            inverse,
            statistics,
            activated,
        };
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

    /// Adds the gradients of all parts and gives that of `x`. `gather` is for statistics of all ranks.
    pub fn backward(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        frames: &Frames,
        dy: &Tensor,
        gather: Gather,
        gradients: &mut Gradients,
    ) -> Result<Tensor> {
        let (rows, d) = saved.x.dims2()?;
        let d_activated = self.pointwise2.backward(parameters, &saved.activated, dy, gradients)?;
        let (d_convolved, d_weight, d_bias) = normalise_silu_backward(
            &saved.convolved,
            &self.normaliser(parameters, &saved.mean, &saved.inverse),
            &d_activated,
            match saved.statistics {
                None | Some(BatchNorm::Frozen) => Statistics::Constant,
                Some(BatchNorm::OwnRows) => Statistics::Own,
                Some(BatchNorm::AllRanks) => Statistics::Joined(gather),
            },
        )?;
        gradients.add(self.norm_weight, d_weight)?;
        gradients.add(self.norm_bias, d_bias)?;
        if let Some(bias) = self.depthwise_bias {
            gradients.add(bias, column_sum(&d_convolved)?)?;
        }
        let d_convolved = d_convolved.reshape((frames.batch, frames.time, d))?;
        if gradients.wants(self.depthwise_weight) {
            let gradient = depthwise_backward_weight(&saved.gated, &d_convolved, self.kernel)?;
            gradients.add(self.depthwise_weight, gradient)?;
        }
        let d_gated = depthwise_backward(&d_convolved, parameters.get(self.depthwise_weight))?;
        let d_doubled = glu_backward(&saved.doubled, &d_gated, &frames.lengths)?.reshape((rows, 2 * d))?;
        self.pointwise1.backward(parameters, &saved.x, &d_doubled, gradients)
    }
}
