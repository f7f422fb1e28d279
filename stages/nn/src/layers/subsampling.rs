//! Sub-sampling by 8 (`dw_striding`): three strided convolutions, two of them depthwise with a pointwise convolution
//! behind, and a linear layer over channels and bands.

use candle_core::Tensor;
use flow_kernels::Lengths;
use flow_kernels::bias::column_sums;
use flow_kernels::product::{product, product_with_bias_in};
use flow_kernels::subsample::{
    bias_relu, depthwise, depthwise_backward, depthwise_backward_weight, first, first_backward, halved, relu_backward,
};
use flow_kernels::{by_chunks, dispatch, is_gpu, slice, tensor};

use super::linear::Linear;
use crate::config::EncoderConfig;
use crate::error::{Error, Result};
use crate::parameters::{Gradients, Initialise, ParameterBuilder, ParameterId, Parameters};
use crate::pending_sums::PendingSums;

/// A strided convolution with its own kernel per channel (for the first one: per output channel).
#[derive(Clone, Debug)]
struct Strided {
    weight: ParameterId,
    bias: ParameterId,
}

/// Names in NeMo's Sequential: strided convolutions 0, 2, 5 and pointwise ones 3, 6.
#[derive(Clone, Debug)]
pub struct Subsampling {
    first: Strided,
    depthwise: [Strided; 2],
    pointwise: [Linear; 2],
    out_weight: ParameterId,
    out_bias: ParameterId,
    channels: usize,
    bands: usize,
    d_model: usize,
    is_causal: bool,
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    /// (B, F, T), with the padding of a causal convolution.
    features: Tensor,
    /// Valid frames of the features.
    lengths: Lengths,
    /// Input of each depthwise convolution, after ReLU and with such padding: (B, T, F, C).
    inputs: [Tensor; 2],
    /// Output of each depthwise convolution.
    filtered: [Tensor; 2],
    /// Output of the last pointwise convolution, after ReLU.
    last: Tensor,
    /// On a device, the linear layer's weight in our order.
    out_weight: Option<Tensor>,
}

impl Subsampling {
    /// `name.conv.{0,2,3,5,6}` and `name.out`.
    pub fn new(name: &str, config: &EncoderConfig, builder: &mut ParameterBuilder) -> Result<Self> {
        let (channels, d_model) = (config.subsampling_conv_channels, config.d_model);
        let bands = config.subsampled(config.feat_in);
        // NeMo's own bounds (`ConvSubsampling.reset_parameters`); only that of the linear layer differs from torch's.
        let out_bound = ((d_model * config.feat_in) as f64 / 3.0).sqrt().recip();
        let out_weight = builder.parameter(
            &format!("{name}.out.weight"),
            &[d_model, channels * bands],
            Initialise::Uniform(out_bound),
        )?;
        let out_bias = builder.parameter(&format!("{name}.out.bias"), &[d_model], Initialise::Uniform(out_bound))?;
        fn strided(key: String, channels: usize, builder: &mut ParameterBuilder) -> Result<Strided> {
            let bound = 1.0 / 3.0;
            Ok(Strided {
                weight: builder.parameter(
                    &format!("{key}.weight"),
                    &[channels, 1, 3, 3],
                    Initialise::Uniform(bound),
                )?,
                bias: builder.parameter(&format!("{key}.bias"), &[channels], Initialise::Uniform(bound))?,
            })
        }
        let pointwise = |key: String, builder: &mut ParameterBuilder| {
            let bound = 1.0 / (channels as f64).sqrt();
            Linear::with_shape(&key, vec![channels, channels, 1, 1], true, bound, builder)
        };
        let first = strided(format!("{name}.conv.0"), channels, builder)?;
        let depthwise0 = strided(format!("{name}.conv.2"), channels, builder)?;
        let pointwise0 = pointwise(format!("{name}.conv.3"), builder)?;
        let depthwise1 = strided(format!("{name}.conv.5"), channels, builder)?;
        let pointwise1 = pointwise(format!("{name}.conv.6"), builder)?;
        Ok(Self {
            first,
            depthwise: [depthwise0, depthwise1],
            pointwise: [pointwise0, pointwise1],
            out_weight,
            out_bias,
            channels,
            bands,
            d_model,
            is_causal: config.causal.subsampling,
        })
    }

    /// Features (B, mels, T) with `lengths` valid frames -> (B * T', d), T' and the valid frames of each utterance.
    /// Frames at or past a length count as 0, whatever they hold; rows past the new lengths hold the linear layer's
    /// bias.
    pub fn forward(
        &self,
        parameters: &Parameters,
        features: &Tensor,
        lengths: &[usize],
    ) -> Result<(Tensor, usize, Lengths, Saved)> {
        self.forward_with(parameters, features, lengths, None)
    }

    /// The same with an [`Subsampling::out_weight`] that was made before: to make it takes longer than a short chunk.
    pub fn forward_with(
        &self,
        parameters: &Parameters,
        features: &Tensor,
        lengths: &[usize],
        out_weight: Option<&Tensor>,
    ) -> Result<(Tensor, usize, Lengths, Saved)> {
        let (batch, _, time) = features.dims3()?;
        if lengths.len() != batch || lengths.iter().any(|&length| length > time) {
            return Err(Error::Input(format!(
                "feature lengths {lengths:?} do not fit a feature tensor of shape {:?}",
                features.dims()
            )));
        }
        let get = |id: ParameterId| parameters.get(id);
        // A row of zeros more before the axes: the convolution, which pads one row on either side, then pads two and one.
        let more = usize::from(self.is_causal);
        let padded = |x: &Tensor| -> Result<Tensor> {
            match self.is_causal {
                true => Ok(x.pad_with_zeros(1, 1, 0)?.pad_with_zeros(2, 1, 0)?),
                false => Ok(x.clone()),
            }
        };
        let halve = |lengths: &[usize]| lengths.iter().map(|&n| halved(n + more)).collect::<Vec<_>>();
        let half = halve(lengths);
        let quarter = halve(&half);
        let eighth = halve(&quarter);
        let all = lengths.iter().map(|&n| n + more).collect();
        let [lengths, half, quarter, valid] =
            Lengths::copied_together([all, half, quarter, eighth], features.device())?;
        let features = padded(features)?;
        let x0 = first(&features, get(self.first.weight), get(self.first.bias), &lengths, &half)?;
        let x0 = padded(&x0)?;
        let (x1, filtered0) = self.stage(parameters, 0, &x0, &quarter)?;
        let x1 = padded(&x1)?;
        let (last, filtered1) = self.stage(parameters, 1, &x1, &valid)?;
        let time_out = last.dims4()?.1;
        let rows = last.reshape((batch * time_out, self.bands * self.channels))?;
        let weight = out_weight.map_or_else(|| self.out_weight(parameters), |made| Ok(made.clone()))?;
        let y = product_with_bias_in(rows.dtype(), &rows, &weight.t()?, get(self.out_bias))?;
        let saved = Saved {
            features,
            lengths,
            inputs: [x0, x1],
            filtered: [filtered0, filtered1],
            last,
            out_weight: Some(weight).filter(|weight| is_gpu(weight.device())),
        };
        Ok((y, time_out, valid, saved))
    }

    /// Depthwise, pointwise, ReLU; the result and the depthwise convolution's output. `lengths` are those of the result.
    fn stage(&self, parameters: &Parameters, stage: usize, x: &Tensor, lengths: &Lengths) -> Result<(Tensor, Tensor)> {
        let Strided { weight, bias } = self.depthwise[stage];
        let filtered = depthwise(x, parameters.get(weight), parameters.get(bias), lengths)?;
        let (batch, time, bands, channels) = filtered.dims4()?;
        let pointwise = &self.pointwise[stage];
        let y = pointwise
            .product(parameters, &filtered.reshape((batch * time * bands, channels))?)?
            .reshape((batch, time, bands, channels))?;
        if let Some(bias) = pointwise.bias() {
            bias_relu(&y, parameters.get(bias), lengths)?;
        }
        Ok((y, filtered))
    }

    /// The linear layer's weight with columns in our order, band-major: (d, F * C). NeMo's is channel-major.
    pub fn out_weight(&self, parameters: &Parameters) -> Result<Tensor> {
        let weight = parameters.get(self.out_weight);
        let (channels, bands) = (self.channels, self.bands);
        if is_gpu(weight.device()) {
            let weight = weight.reshape((self.d_model, channels, bands))?.transpose(1, 2)?;
            return Ok(weight.contiguous()?.reshape((self.d_model, bands * channels))?);
        }
        dispatch!(weight.dtype(), T => {
            let weight = slice::<T>(weight)?;
            let weight: &[T] = &weight;
            let row = channels * bands;
            // Candle's copy of a transposed tensor takes longer than the product with few rows.
            let out = by_chunks(weight.len(), row, |number, out| {
                let weight = &weight[number * row..][..row];
                for (band, out) in out.chunks_exact_mut(channels.max(1)).enumerate() {
                    for (out, weight) in out.iter_mut().zip(weight.chunks_exact(bands.max(1))) {
                        *out = weight[band];
                    }
                }
            });
            Ok(tensor(out, (self.d_model, row))?)
        })
    }

    /// Adds the gradients of all parts, given that of the output, (B * T', d).
    pub fn backward(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        dy: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let mut sums = PendingSums::default();
        let (batch, time, bands, channels) = saved.last.dims4()?;
        let rows = saved.last.reshape((batch * time, bands * channels))?;
        if gradients.wants(self.out_weight) {
            let gradient = product(&dy.t()?, &rows)?
                .reshape((self.d_model, bands, channels))?
                .transpose(1, 2)?
                .reshape((self.d_model, channels * bands))?;
            gradients.add(self.out_weight, gradient)?;
        }
        sums.add(&[self.out_bias], column_sums(dy)?);
        let weight = match &saved.out_weight {
            Some(weight) => weight.clone(),
            None => self.out_weight(parameters)?,
        };
        let d_last = product(dy, &weight)?.reshape(saved.last.dims())?;
        // Also zero in padding, since the ReLU's result is zero there.
        let mut dz = relu_backward(&saved.last, &d_last)?;
        for stage in [1, 0] {
            let (batch, time, bands, channels) = dz.dims4()?;
            let shape = (batch * time * bands, channels);
            let filtered = &saved.filtered[stage];
            let d_filtered = self.pointwise[stage]
                .backward_pending(
                    parameters,
                    &filtered.reshape(shape)?,
                    &dz.reshape(shape)?,
                    gradients,
                    &mut sums,
                )?
                .reshape((batch, time, bands, channels))?;
            let Strided { weight, bias } = self.depthwise[stage];
            let input = &saved.inputs[stage];
            if gradients.wants(weight) || gradients.wants(bias) {
                sums.add(&[weight, bias], depthwise_backward_weight(input, &d_filtered)?);
            }
            dz = depthwise_backward(input, parameters.get(weight), &d_filtered)?;
            if self.is_causal {
                let (_, time, bands, _) = dz.dims4()?;
                dz = dz.narrow(1, 1, time - 1)?.narrow(2, 1, bands - 1)?.contiguous()?;
            }
        }
        if gradients.wants(self.first.weight) || gradients.wants(self.first.bias) {
            let found = first_backward(&saved.features, &dz, &saved.lengths)?;
            sums.add(&[self.first.weight, self.first.bias], found);
        }
        sums.complete(parameters, gradients)?;
        Ok(())
    }
}
