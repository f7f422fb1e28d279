//! Layer norm as a module.

use candle_core::{DType, Tensor};
use flow_kernels::layer_norm::{
    NormInput, add_and_norm, add_and_norm_twice, layer_norm_backward, layer_norm_backward_dropped,
    layer_norm_backward_twice, layer_norm_in,
};
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

    /// [`LayerNorm::forward_sum`], whose result is of the type of `x`; and [`LayerNorm::forward_in`] of that by `next`: the sum's
    /// norm and what its backward pass needs, and the same of the next norm.
    pub fn forward_sum_twice(
        &self,
        next: &LayerNorm,
        parameters: &Parameters,
        dtype: DType,
        (x, y): (&Tensor, &Tensor),
        drop: (f64, Option<DropMask>),
    ) -> Result<[(Tensor, Saved); 2]> {
        let of = |norm: &LayerNorm| (parameters.get(norm.weight), parameters.get(norm.bias));
        let found = add_and_norm_twice(dtype, x, y, drop, [of(self), of(next)])?;
        let [statistics, next_statistics] = found.statistics;
        let saved = |x: Tensor, statistics: Tensor| Saved { x, statistics };
        let next = (found.next, saved(found.out.clone(), next_statistics));
        Ok([(found.out, saved(found.sum, statistics)), next])
    }

    /// The way back through [`LayerNorm::forward_sum_twice`], given what the backward pass of `next` is given, dy and residual:
    /// gradient of the sum, and that dropped. `sums` are this norm's, `next_sums` those of `next`.
    pub fn backward_twice(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        next: (&LayerNorm, &Saved, &mut PendingSums),
        (dy, residual): (&Tensor, &Tensor),
        (dtype, drop): (DType, (f64, Option<DropMask>)),
        sums: &mut PendingSums,
    ) -> Result<(Tensor, Tensor)> {
        let (next, next_saved, next_sums) = next;
        fn input<'a>(norm: &LayerNorm, saved: &'a Saved, parameters: &'a Parameters) -> NormInput<'a> {
            NormInput {
                x: &saved.x,
                statistics: &saved.statistics,
                weight: parameters.get(norm.weight),
            }
        }
        let of_next = input(next, next_saved, parameters);
        let of_this = input(self, saved, parameters);
        let ([of_next, of_this], dx, dropped) =
            layer_norm_backward_twice(dtype, of_next, (dy, residual), of_this, drop)?;
        next_sums.add(&[next.weight, next.bias], of_next);
        sums.add(&[self.weight, self.bias], of_this);
        Ok((dx, dropped))
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
