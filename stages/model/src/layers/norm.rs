//! Layer norm as a module.

use candle_core::Tensor;
use flow_kernels::layer_norm::{add_and_norm, layer_norm, layer_norm_backward, layer_norm_backward_dropped};
use flow_kernels::noise::DropMask;

use crate::error::Result;
use crate::parameters::{Gradients, Initialise, ParameterBuilder, ParameterId, Parameters};

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
        let (y, statistics) = layer_norm(x, parameters.get(self.weight), parameters.get(self.bias))?;
        Ok((
            y,
            Saved {
                x: x.clone(),
                statistics,
            },
        ))
    }

    /// `sum = x + factor * drop(y)` and the norm of the sum.
    pub fn forward_sum(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        y: &Tensor,
        drop: (f64, Option<DropMask>),
    ) -> Result<(Tensor, Tensor, Saved)> {
        let (weight, bias) = (parameters.get(self.weight), parameters.get(self.bias));
        let (sum, normalised, statistics) = add_and_norm(x, y, drop, weight, bias)?;
        let saved = Saved {
            x: sum.clone(),
            statistics,
        };
        Ok((sum, normalised, saved))
    }

    /// As [`LayerNorm::backward`]; and `factor * drop(dx)` of the gradient dx that it gives.
    pub fn backward_dropped(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        dy: &Tensor,
        residual: Option<&Tensor>,
        drop: (f64, Option<DropMask>),
        gradients: &mut Gradients,
    ) -> Result<(Tensor, Tensor)> {
        let weight = parameters.get(self.weight);
        let ((dx, dw, db), dropped) =
            layer_norm_backward_dropped(&saved.x, &saved.statistics, weight, dy, residual, drop)?;
        gradients.add(self.weight, dw)?;
        gradients.add(self.bias, db)?;
        Ok((dx, dropped))
    }

    /// Adds the gradients of weight and bias; gives that of `x`, plus `residual` where given.
    pub fn backward(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        dy: &Tensor,
        residual: Option<&Tensor>,
        gradients: &mut Gradients,
    ) -> Result<Tensor> {
        let weight = parameters.get(self.weight);
        let (dx, dw, db) = layer_norm_backward(&saved.x, &saved.statistics, weight, dy, residual)?;
        gradients.add(self.weight, dw)?;
        gradients.add(self.bias, db)?;
        Ok(dx)
    }
}
