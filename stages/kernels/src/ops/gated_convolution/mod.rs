//! The convolution module between its matrix products: gated linear unit, depthwise convolution over time, batch
//! normalisation and SiLU.

mod cuda;
#[cfg(test)]
mod device_tests;

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};
use crate::lengths::Lengths;
use crate::on_gpu;
use crate::ops::batch_norm::{
    self, Gather, Normaliser, batch_statistics, column_moments, inverse_deviation, joined_statistics, normalise_silu,
    normalise_silu_backward,
};
use crate::ops::depthwise::{depthwise, depthwise_backward, depthwise_backward_weight};
use crate::ops::elementwise::glu::{glu, glu_backward};
use crate::ops::sums::bias::column_sum;
use crate::ops::sums::column_sums::ColumnSums;

/// The module's parameters for `C` channels.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// Of the depthwise convolution, (C, 1, k) with odd k.
    pub weight: &'a Tensor,
    /// (C)
    pub bias: Option<&'a Tensor>,
    /// Of the batch normalisation, (C) each.
    pub norm_weight: &'a Tensor,
    pub norm_bias: &'a Tensor,
    /// Running mean and variance, (C) each.
    pub running: (&'a Tensor, &'a Tensor),
}

/// The statistics that batch normalisation uses.
pub enum Statistics<'a> {
    /// The running ones.
    Running,
    /// Those of all B T rows.
    Own,
    /// Those of the rows of several parts, of which this is one: the function is given the
    /// [moments](batch_norm::column_moments) of this part and gives those of all parts.
    Joined(Gather<'a>),
    /// Those of the rows of several parts, as an earlier pass found them: mean and inverse deviation, (C) each.
    Known { mean: Tensor, inverse: Tensor },
}

/// Of which rows the statistics of a forward pass were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Running,
    Own,
    Joined,
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    /// (B, T, 2 C)
    pub(crate) doubled: Tensor,
    /// (B, T, C); on a device it is computed again, but for statistics of several parts.
    pub(crate) gated: Option<Tensor>,
    /// (B T, C)
    pub(crate) convolved: Tensor,
    pub(crate) mean: Tensor,
    /// `1 / sqrt(variance + 1e-5)`.
    pub(crate) inverse: Tensor,
    pub(crate) origin: Origin,
}

impl Saved {
    /// Mean and inverse deviation, (C) each.
    pub fn statistics(&self) -> (Tensor, Tensor) {
        (self.mean.clone(), self.inverse.clone())
    }
}

/// What a forward pass gives.
pub struct Output {
    /// (B T, C)
    pub y: Tensor,
    pub saved: Saved,
    /// With statistics that are new, [`Statistics::Own`] and [`Statistics::Joined`], the running mean and variance, moved by a
    /// tenth towards them.
    pub moved: Option<[Tensor; 2]>,
}

/// Which gradients of the depthwise convolution are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub weight: bool,
    pub bias: bool,
}

/// Gradients of the module.
pub struct BackwardOutput {
    /// Of the input, (B, T, 2 C).
    pub doubled: Tensor,
    /// Of the depthwise convolution's weight, C k sums, and of its bias, where they are wanted.
    pub weight: Option<ColumnSums>,
    pub bias: Option<ColumnSums>,
    /// Of the normalisation's weight and bias, 2 C sums.
    pub norm: ColumnSums,
}

/// From values and gates `doubled` (B, T, 2 C) to (B T, C), of type `dtype`, which on a device is f32 or bf16. Gated values at
/// or past a length are 0. Statistics of several parts are not computed within a kernel: these are several then.
///
/// On a device `doubled` may be in bf16. The convolution's result is rounded to bf16 then, and statistics are those of the rounded
/// numbers.
pub fn forward(
    dtype: DType,
    doubled: &Tensor,
    lengths: &Lengths,
    by: Weights,
    statistics: Statistics,
) -> Result<Output> {
    if let Statistics::Running | Statistics::Own = statistics {
        let of_batch = matches!(statistics, Statistics::Own);
        on_gpu!(doubled, cuda::forward(dtype, doubled, lengths, by, of_batch));
    }
    let doubled = &wide(doubled)?;
    let (batch, time, double) = doubled.dims3()?;
    let gated = glu(doubled, lengths)?;
    let convolved = depthwise(&gated, by.weight, by.bias)?.reshape((batch * time, double / 2))?;
    let of_new = |(mean, inverse, moved)| (mean, inverse, Some(moved));
    let (origin, (mean, inverse, moved)) = match statistics {
        Statistics::Running => {
            let inverse = inverse_deviation(by.running.1)?;
            (Origin::Running, (by.running.0.clone(), inverse, None))
        }
        Statistics::Own => (Origin::Own, of_new(batch_statistics(&convolved, by.running)?)),
        Statistics::Joined(gather) => {
            let moments = gather(&column_moments(&convolved, double / 2)?)?;
            (Origin::Joined, of_new(joined_statistics(&moments, by.running)?))
        }
        Statistics::Known { mean, inverse } => (Origin::Joined, (mean, inverse, None)),
    };
    let y = normalise_silu(&convolved, &normaliser(&by, &mean, &inverse))?.to_dtype(dtype)?;
    let saved = Saved {
        doubled: doubled.clone(),
        gated: Some(gated),
        convolved,
        mean,
        inverse,
        origin,
    };
    Ok(Output { y, saved, moved })
}

/// Kernels that are composed take no bf16.
fn wide(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::BF16 => Ok(x.to_dtype(DType::F32)?),
        _ => Ok(x.clone()),
    }
}

fn normaliser<'a>(by: &Weights<'a>, mean: &'a Tensor, inverse: &'a Tensor) -> Normaliser<'a> {
    Normaliser {
        mean,
        inverse,
        weight: by.norm_weight,
        bias: by.norm_bias,
    }
}

/// Gradients of [`forward`], given that of its result, `dy` (B T, C). The gradient of its input is of type `dtype`, which on a
/// device is f32 or bf16; `dy` is of the type that `doubled` was of. `gather` gives the [sums](batch_norm::Statistics::Joined) of all parts, where the statistics were
/// theirs; otherwise it is not called.
pub fn backward(
    dtype: DType,
    saved: &Saved,
    lengths: &Lengths,
    by: Weights,
    (dy, gather): (&Tensor, Gather),
    wanted: Wanted,
) -> Result<BackwardOutput> {
    let statistics = match saved.origin {
        Origin::Running => batch_norm::Statistics::Constant,
        Origin::Own => batch_norm::Statistics::Own,
        Origin::Joined => batch_norm::Statistics::Joined(gather),
    };
    if saved.origin != Origin::Joined {
        on_gpu!(dy, cuda::backward(dtype, saved, lengths, by, dy, wanted));
    }
    let Some(gated) = &saved.gated else {
        return Err(Error::Input("a convolution was computed on another device".into()));
    };
    let normaliser = normaliser(&by, &saved.mean, &saved.inverse);
    let (d_convolved, norm_weight, norm_bias) =
        normalise_silu_backward(&saved.convolved, &normaliser, &wide(dy)?, statistics)?;
    let bias = by.bias.filter(|_| wanted.bias);
    let bias = bias.map(|_| column_sum(&d_convolved)).transpose()?;
    let d_convolved = d_convolved.reshape(gated.shape())?;
    let taps = by.weight.dim(2)?;
    let weight = match wanted.weight {
        true => Some(depthwise_backward_weight(gated, &d_convolved, taps)?.flatten_all()?),
        false => None,
    };
    let d_gated = depthwise_backward(&d_convolved, by.weight)?;
    Ok(BackwardOutput {
        doubled: glu_backward(&saved.doubled, &d_gated, lengths)?.to_dtype(dtype)?,
        weight: weight.map(ColumnSums::whole),
        bias: bias.map(ColumnSums::whole),
        norm: ColumnSums::whole(Tensor::cat(&[norm_weight, norm_bias], 0)?),
    })
}
