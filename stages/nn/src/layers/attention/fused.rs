//! Attention by one kernel, on a device.

use candle_core::{DType, Tensor};
use flow_kernels::attention::Context;
use flow_kernels::elementwise::add_in_place;
use flow_kernels::noise::DropMask;
use flow_kernels::product::{add_product_in, product_in, product_rounded_in};
use flow_kernels::relative_attention::{self, Positions, Projections};

use super::{Attention, Saved, Way, queries_together, query_blocks};
use crate::error::Result;
use crate::layers::linear::Linear;
use crate::layers::{Frames, dropout};
use crate::parameters::{Gradients, Mode, ParameterId, Parameters};
use crate::pending_sums::PendingSums;

/// What [`Way::Fused`] has.
type Fused<'a> = (&'a Projections, &'a Tensor, &'a [Option<DropMask>]);

impl Attention {
    /// [`Attention::forward`] by one kernel, on a device.
    pub fn forward_fused(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        positions: Tensor,
        frames: &Frames,
        mode: &mut Mode,
    ) -> Result<(Tensor, Saved)> {
        let rounded = self.rounds(x);
        let projections = match self.stacked_weights(parameters) {
            Some(weights) if rounded => Projections::Together(product_rounded_in(weights.dtype(), x, &weights.t()?)?),
            Some(weights) => Projections::Together(product_in(weights.dtype(), x, &weights.t()?)?),
            None => Projections::Apart([
                self.query.forward_rounded(parameters, x, rounded)?,
                self.key.forward_rounded(parameters, x, rounded)?,
                self.value.forward_rounded(parameters, x, rounded)?,
            ]),
        };
        let projected = self.position.forward_rounded(parameters, &positions, rounded)?;
        let masks: Vec<_> = query_blocks(frames.context, frames.time)
            .iter()
            .map(|_| dropout::draw(self.dropout, mode))
            .collect();
        let factors = self.output.factors(&projected);
        let (context, logs) = relative_attention::forward(
            factors,
            &projections,
            self.positions(parameters, &projected),
            &self.fused(frames, &masks, factors),
        )?;
        let y = self.output.forward_rounded(parameters, &context, rounded)?;
        let saved = Saved {
            x: x.clone(),
            positions,
            projected,
            way: Way::Fused {
                projections,
                logs,
                masks,
            },
            context,
        };
        Ok((y, saved))
    }

    /// Whether what is between the products is in bf16: all layers have to round, as the kernel reads one type.
    pub fn rounds(&self, like: &Tensor) -> bool {
        let all = [&self.query, &self.key, &self.value, &self.output, &self.position];
        all.iter().all(|linear| linear.rounds(like))
    }

    /// The weights of query, key and value below each other, where they lie so and there is nothing to add to the product.
    fn stacked_weights<'a>(&self, parameters: &'a Parameters) -> Option<&'a Tensor> {
        let more = [&self.query, &self.key, &self.value]
            .iter()
            .any(|linear| linear.bias().is_some() || linear.is_adapted());
        parameters.stacked(&self.projection_ids()).filter(|_| !more)
    }

    fn projection_ids(&self) -> [ParameterId; 3] {
        [&self.query, &self.key, &self.value].map(Linear::weight_id)
    }

    fn positions<'a>(&self, parameters: &'a Parameters, projected: &'a Tensor) -> Positions<'a> {
        Positions {
            projected,
            biases: (parameters.get(self.bias_u), parameters.get(self.bias_v)),
        }
    }

    fn fused<'a>(
        &self,
        frames: &'a Frames,
        masks: &'a [Option<DropMask>],
        factors: DType,
    ) -> relative_attention::Attention<'a> {
        relative_attention::Attention {
            lengths: &frames.lengths,
            time: frames.time,
            heads: self.heads,
            scale: self.scale,
            band: match frames.context {
                Context::Band(width) => Some(width),
                _ => None,
            },
            reach: frames.context.reach(frames.time),
            masks,
            block: match masks.len() {
                0 | 1 => frames.time,
                _ => queries_together(frames.context),
            },
            factors,
        }
    }

    /// The way back, given the gradient of the context.
    pub fn backward_fused(
        &self,
        parameters: &Parameters,
        (saved, (projections, logs, masks)): (&Saved, Fused),
        frames: &Frames,
        d_context: &Tensor,
        gradients: &mut Gradients,
        sums: &mut PendingSums,
    ) -> Result<Tensor> {
        let factors = self.query.factors(d_context);
        let found = relative_attention::backward(
            factors,
            projections,
            self.positions(parameters, &saved.projected),
            &self.fused(frames, masks, factors),
            (&saved.context, logs),
            d_context,
        )?;
        sums.add(&[self.bias_u, self.bias_v], found.biases);
        sums.keep(found.positions);
        let d = found.projections;
        let Some(weights) = self.stacked_weights(parameters) else {
            let d = |at: usize| d.chunk(3, 1)?[at].contiguous();
            let dx = self.query.backward(parameters, &saved.x, &d(0)?, gradients)?;
            for (linear, d) in [(&self.key, d(1)?), (&self.value, d(2)?)] {
                add_in_place(&dx, &linear.backward(parameters, &saved.x, &d, gradients)?)?;
            }
            return Ok(dx);
        };
        let rounded = self.rounds(&d);
        let ids = self.projection_ids();
        let stored = weights.dtype();
        if ids.iter().any(|&id| gradients.wants(id)) {
            match gradients.stacked(&ids) {
                Some(sum) => add_product_in(stored, sum, &d.t()?, &saved.x)?,
                None => {
                    let gradient = product_in(stored, &d.t()?, &saved.x)?;
                    gradients.add_stacked(&ids, gradient)?;
                }
            }
        }
        match rounded {
            true => Ok(product_rounded_in(stored, &d, weights)?),
            false => Ok(product_in(stored, &d, weights)?),
        }
    }
}
