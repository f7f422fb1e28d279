//! A linear adapter of NeMo's: two thin linear layers and a norm, added to what a Conformer layer gives.

use candle_core::Tensor;
use flow_kernels::elementwise::{drop_scaled, residual, silu_backward, silu_in};
use flow_kernels::noise::DropMask;

use super::dropout;
use super::linear::Linear;
use super::norm::{self, LayerNorm};
use crate::config::{Activation, AdapterConfig, NormPosition};
use crate::error::Result;
use crate::parameters::{Gradients, Mode, ParameterBuilder, Parameters};
use crate::pending_sums::PendingSums;

/// `y + W2 f(W1 norm(y))`, or with the norm behind the layers `y + norm(W2 f(W1 y))`: width d, `dim` between, no biases. Names of
/// tensors are NeMo's, which number the steps: `module.0` to `module.3`.
#[derive(Clone, Debug)]
pub struct LinearAdapter {
    norm: LayerNorm,
    position: NormPosition,
    linear1: Linear,
    linear2: Linear,
    activation: Activation,
    dropout: f64,
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    norm: norm::Saved,
    /// Inputs of the first linear layer, the activation and the second linear layer.
    x: Tensor,
    hidden: Tensor,
    activated: Tensor,
    mask: Option<DropMask>,
}

impl LinearAdapter {
    /// The adapter whose tensors begin with `name`, over frames of this width.
    pub fn new(name: &str, width: usize, config: &AdapterConfig, builder: &mut ParameterBuilder) -> Result<Self> {
        let key = |number: usize| format!("{name}.module.{number}");
        let [norm, linear1, linear2] = match config.norm_position {
            NormPosition::Pre => [0, 1, 3],
            NormPosition::Post => [3, 0, 2],
        };
        Ok(Self {
            norm: LayerNorm::new(&key(norm), width, builder)?,
            position: config.norm_position,
            linear1: Linear::new(&key(linear1), width, config.dim, false, builder)?,
            linear2: Linear::new(&key(linear2), config.dim, width, false, builder)?,
            activation: config.activation,
            dropout: config.dropout,
        })
    }

    /// The mask of the adapter's dropout, if there is one.
    pub fn draw(&self, mode: &mut Mode) -> Option<DropMask> {
        dropout::draw(self.dropout, mode)
    }

    /// (rows, d) -> (rows, d).
    pub fn forward(&self, parameters: &Parameters, y: &Tensor, mask: Option<DropMask>) -> Result<(Tensor, Saved)> {
        let before = match self.position {
            NormPosition::Pre => Some(self.norm.forward_in(parameters, self.linear1.factors(y), y)?),
            NormPosition::Post => None,
        };
        let (x, before) = match before {
            Some((x, saved)) => (x, Some(saved)),
            None => (y.to_dtype(self.linear1.factors(y))?, None),
        };
        let hidden = self.linear1.forward(parameters, &x)?;
        let factors = self.linear2.factors(&hidden);
        let activated = match self.activation {
            Activation::Silu => silu_in(factors, &hidden, None)?,
            Activation::Relu => hidden.relu()?.to_dtype(factors)?,
            Activation::Identity => hidden.to_dtype(factors)?,
        };
        let out = self.linear2.forward(parameters, &activated)?;
        let (out, norm) = match before {
            Some(saved) => (out, saved),
            None => self.norm.forward(parameters, &out)?,
        };
        let sum = residual(y, &out, 1.0, mask)?;
        let saved = Saved {
            norm,
            x,
            hidden,
            activated,
            mask,
        };
        Ok((sum, saved))
    }

    /// Adds the gradients of both layers, leaves those of the norm in `sums`, and gives that of the input.
    pub fn backward(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        dy: &Tensor,
        gradients: &mut Gradients,
        sums: &mut PendingSums,
    ) -> Result<Tensor> {
        let d = drop_scaled(dy, 1.0, saved.mask)?;
        let d = match self.position {
            NormPosition::Pre => d,
            NormPosition::Post => self.norm.backward(parameters, &saved.norm, &d, None, sums)?,
        };
        let d = d.to_dtype(self.linear2.factors(&d))?;
        let d = self
            .linear2
            .backward_pending(parameters, &saved.activated, &d, gradients, sums)?;
        let factors = self.linear1.factors(&d);
        let d = match self.activation {
            Activation::Silu => silu_backward(factors, &saved.hidden, d, None)?,
            Activation::Relu => {
                let passes = saved.hidden.gt(&saved.hidden.zeros_like()?)?;
                d.mul(&passes.to_dtype(d.dtype())?)?.to_dtype(factors)?
            }
            Activation::Identity => d.to_dtype(factors)?,
        };
        let d = self
            .linear1
            .backward_pending(parameters, &saved.x, &d, gradients, sums)?;
        match self.position {
            NormPosition::Pre => self.norm.backward(parameters, &saved.norm, &d, Some(dy), sums),
            NormPosition::Post => Ok(residual(dy, &d, 1.0, None)?),
        }
    }
}
