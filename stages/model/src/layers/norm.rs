//! Layer norm as a module.

use candle_core::{DType, Tensor};
use flow_kernels::layer_norm::{add_and_norm, layer_norm_backward, layer_norm_backward_dropped, layer_norm_in};
use flow_kernels::noise::DropMask;

use crate::error::Result;
use crate::parameters::{Initialise, ParameterBuilder, ParameterId, Parameters};
use crate::pending_sums::PendingSums;

/// Layer norm over the last dimension.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: ParameterId,
    bias: ParameterId,
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    x: Tensor,
    statistics: Tensor,
}

impl LayerNorm {
    /// `name.weight` and `name.bias`, each (width).
    pub fn new(name: &str, width: usize, builder: &mut ParameterBuilder) -> Result<Self> {
        Ok(Self {
            weight: builder.parameter(&format!("{name}.weight"), &[width], Initialise::Constant(1.0))?,
            bias: builder.parameter(&format!("{name}.bias"), &[width], Initialise::Constant(0.0))?,
        })
    }

    /// (rows, width) -> the same shape.
    pub fn forward(&self, parameters: &Parameters, x: &Tensor) -> Result<(Tensor, Saved)> {
        self.forward_in(parameters, x.dtype(), x)
    }

    /// The same, the result of type `dtype`.
    pub fn forward_in(&self, parameters: &Parameters, dtype: DType, x: &Tensor) -> Result<(Tensor, Saved)> {
        let (y, statistics) = layer_norm_in(dtype, x, parameters.get(self.weight), parameters.get(self.bias))?;
        Ok((
            y,
            Saved {
                x: x.clone(),
                statistics,
            },
        ))
    }

    /// `sum = x + factor * drop(y)` and the norm of the sum, of type `dtype`.
    pub fn forward_sum(
        &self,
        parameters: &Parameters,
        dtype: DType,
        x: &Tensor,
        y: &Tensor,
        drop: (f64, Option<DropMask>),
    ) -> Result<(Tensor, Tensor, Saved)> {
        let (weight, bias) = (parameters.get(self.weight), parameters.get(self.bias));
        let (sum, normalised, statistics) = add_and_norm(dtype, x, y, drop, weight, bias)?;
        let saved = Saved {
            x: sum.clone(),
            statistics,
        };
        Ok((sum, normalised, saved))
    }

    /// As [`LayerNorm::backward`]; and `factor * drop(dx)` of the gradient dx that it gives, of type `dtype`.
    pub fn backward_dropped(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        dy: &Tensor,
        residual: Option<&Tensor>,
        (dtype, drop): (DType, (f64, Option<DropMask>)),
        sums: &mut PendingSums,
    ) -> Result<(Tensor, Tensor)> {
        let weight = parameters.get(self.weight);
        let ((dx, of_weights), dropped) =
            layer_norm_backward_dropped(dtype, &saved.x, &saved.statistics, weight, dy, residual, drop)?;
        sums.add(&[self.weight, self.bias], of_weights);
        Ok((dx, dropped))
    }

    /// Notes the gradients of weight and bias; gives that of `x`, plus `residual` where given.
    pub fn backward(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        dy: &Tensor,
        residual: Option<&Tensor>,
        sums: &mut PendingSums,
    ) -> Result<Tensor> {
        let weight = parameters.get(self.weight);
        let (dx, of_weights) = layer_norm_backward(&saved.x, &saved.statistics, weight, dy, residual)?;
        sums.add(&[self.weight, self.bias], of_weights);
        Ok(dx)
    }
}
