//! Feed-forward module: linear, SiLU, dropout, linear.

use candle_core::{DType, Tensor};
use flow_kernels::elementwise::{silu_backward, silu_in};
use flow_kernels::noise::DropMask;

use super::dropout;
use super::linear::Linear;
use crate::config::EncoderConfig;
use crate::error::Result;
use crate::parameters::{Gradients, Mode, ParameterBuilder, Parameters};
use crate::pending_sums::PendingSums;

/// d -> factor * d -> d.
#[derive(Clone, Debug)]
pub struct FeedForward {
    linear1: Linear,
    linear2: Linear,
    dropout: f64,
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    x: Tensor,
    hidden: Tensor,
    activated: Tensor,
    mask: Option<DropMask>,
}

impl FeedForward {
    /// `name.linear1` and `name.linear2`.
    pub fn new(name: &str, config: &EncoderConfig, builder: &mut ParameterBuilder) -> Result<Self> {
        let (d, hidden) = (config.d_model, config.d_model * config.ff_expansion_factor);
        Ok(Self {
            linear1: Linear::new(&format!("{name}.linear1"), d, hidden, config.use_bias, builder)?,
            linear2: Linear::new(&format!("{name}.linear2"), hidden, d, config.use_bias, builder)?,
            dropout: config.dropout,
        })
    }

    /// The type in which [`FeedForward::forward`] multiplies its input, and [`FeedForward::backward`] the gradient.
    pub fn factors(&self, x: &Tensor) -> DType {
        self.linear1.factors(x)
    }

    /// Whether what is between the products is in bf16: both layers have to round, as SiLU reads one type.
    fn rounds(&self, like: &Tensor) -> bool {
        self.linear1.rounds(like) && self.linear2.rounds(like)
    }

    /// (rows, d) -> (rows, d). On a device with products in bf16 the result is rounded to bf16, unless something is added to a product.
    pub fn forward(&self, parameters: &Parameters, x: &Tensor, mode: &mut Mode) -> Result<(Tensor, Saved)> {
        let rounded = self.rounds(x);
        let hidden = self.linear1.forward_rounded(parameters, x, rounded)?;
        let mask = dropout::draw(self.dropout, mode);
        let activated = silu_in(self.linear2.factors(&hidden), &hidden, mask)?;
        let y = self.linear2.forward_rounded(parameters, &activated, rounded)?;
        let x = x.clone();
        Ok((
            y,
            Saved {
                x,
                hidden,
                activated,
                mask,
            },
        ))
    }

    /// Adds the gradients of both layers, those of biases by way of `sums`, and gives that of `x`, rounded as the result was.
    pub fn backward(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        dy: &Tensor,
        gradients: &mut Gradients,
        sums: &mut PendingSums,
    ) -> Result<Tensor> {
        let rounded = self.rounds(dy);
        let d = self
            .linear2
            .backward_rounded(parameters, &saved.activated, (dy, rounded), gradients, sums)?;
        let d = silu_backward(self.linear1.factors(&d), &saved.hidden, d, saved.mask)?;
        self.linear1
            .backward_rounded(parameters, &saved.x, (&d, rounded), gradients, sums)
    }
}
