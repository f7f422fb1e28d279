//! One Conformer layer: half a feed-forward, attention, convolution, half a feed-forward, each on a normalised input
//! and added to its residual; then a norm.

pub mod stream;

use candle_core::Tensor;
use flow_kernels::batch_norm::Gather;
use flow_kernels::noise::DropMask;

use super::attention::{self, Attention};
use super::convolution::{self, BatchNormPass, Convolution};
use super::feed_forward::{self, FeedForward};
use super::norm::{self, LayerNorm};
use super::{Frames, dropout};
use crate::config::EncoderConfig;
use crate::error::Result;
use crate::parameters::{Gradients, Mode, ParameterBuilder, Parameters};

/// Weight of a feed-forward module in the residual sum.
const HALF: f64 = 0.5;

/// One layer.
#[derive(Clone, Debug)]
pub struct ConformerLayer {
    norm_feed_forward1: LayerNorm,
    feed_forward1: FeedForward,
    norm_self_att: LayerNorm,
    self_attn: Attention,
    norm_conv: LayerNorm,
    conv: Convolution,
    norm_feed_forward2: LayerNorm,
    feed_forward2: FeedForward,
    norm_out: LayerNorm,
    dropout: f64,
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    feed_forward1: (norm::Saved, feed_forward::Saved),
    self_attn: (norm::Saved, attention::Saved),
    conv: (norm::Saved, convolution::Saved),
    feed_forward2: (norm::Saved, feed_forward::Saved),
    norm_out: norm::Saved,
    /// Dropout masks on the four residual branches, in order.
    masks: [Option<DropMask>; 4],
    /// Outputs of the four branches, for tests against golden activations.
    #[cfg(test)]
    pub branches: Vec<Tensor>,
}

impl Saved {
    /// Mean and inverse deviation of batch normalisation.
    pub fn batch_norm(&self) -> (Tensor, Tensor) {
        self.conv.1.statistics()
    }
}

impl ConformerLayer {
    /// The layer named `name` (`encoder.layers.0`, say).
    pub fn new(name: &str, config: &EncoderConfig, builder: &mut ParameterBuilder) -> Result<Self> {
        let d = config.d_model;
        let key = |part: &str| format!("{name}.{part}");
        Ok(Self {
            norm_feed_forward1: LayerNorm::new(&key("norm_feed_forward1"), d, builder)?,
            feed_forward1: FeedForward::new(&key("feed_forward1"), config, builder)?,
            norm_conv: LayerNorm::new(&key("norm_conv"), d, builder)?,
            conv: Convolution::new(&key("conv"), config, builder)?,
            norm_self_att: LayerNorm::new(&key("norm_self_att"), d, builder)?,
            self_attn: Attention::new(&key("self_attn"), config, builder)?,
            norm_feed_forward2: LayerNorm::new(&key("norm_feed_forward2"), d, builder)?,
            feed_forward2: FeedForward::new(&key("feed_forward2"), config, builder)?,
            norm_out: LayerNorm::new(&key("norm_out"), d, builder)?,
            dropout: config.dropout,
        })
    }

    /// `x` (rows, d), positional table (2T - 1, d) -> (rows, d).
    pub fn forward(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        positions: &Tensor,
        frames: &Frames,
        mode: &mut Mode,
        norm: &mut BatchNormPass,
    ) -> Result<(Tensor, Saved)> {
        let (n, n1) = self.norm_feed_forward1.forward(parameters, x)?;
        let (y1, s1) = self.feed_forward1.forward(parameters, &n, mode)?;
        let m1 = dropout::draw(self.dropout, mode);

        let (x, n, n2) = self.norm_self_att.forward_sum(parameters, x, &y1, (HALF, m1))?;
        let (y2, s2) = self.self_attn.forward(parameters, &n, positions, frames, mode)?;
        let m2 = dropout::draw(self.dropout, mode);

        let (x, n, n3) = self.norm_conv.forward_sum(parameters, &x, &y2, (1.0, m2))?;
        let (y3, s3) = self.conv.forward(parameters, &n, frames, mode, norm)?;
        let m3 = dropout::draw(self.dropout, mode);

        let (x, n, n4) = self.norm_feed_forward2.forward_sum(parameters, &x, &y3, (1.0, m3))?;
        let (y4, s4) = self.feed_forward2.forward(parameters, &n, mode)?;
        let m4 = dropout::draw(self.dropout, mode);

        let (_, y, norm_out) = self.norm_out.forward_sum(parameters, &x, &y4, (HALF, m4))?;
        let saved = Saved {
            feed_forward1: (n1, s1),
            self_attn: (n2, s2),
            conv: (n3, s3),
            feed_forward2: (n4, s4),
            norm_out,
            masks: [m1, m2, m3, m4],
            #[cfg(test)]
            branches: vec![y1, y2, y3, y4],
        };
        Ok((y, saved))
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
        let p = parameters;
        let [m1, m2, m3, m4] = saved.masks;
        let (dx, d) = self
            .norm_out
            .backward_dropped(p, &saved.norm_out, dy, None, (HALF, m4), gradients)?;

        let (norm, inner) = &saved.feed_forward2;
        let d = self.feed_forward2.backward(p, inner, &d, gradients)?;
        let (dx, d) = self
            .norm_feed_forward2
            .backward_dropped(p, norm, &d, Some(&dx), (1.0, m3), gradients)?;

        let (norm, inner) = &saved.conv;
        let d = self.conv.backward(p, inner, frames, &d, gather, gradients)?;
        let (dx, d) = self
            .norm_conv
            .backward_dropped(p, norm, &d, Some(&dx), (1.0, m2), gradients)?;

        let (norm, inner) = &saved.self_attn;
        let d = self.self_attn.backward(p, inner, frames, &d, gradients)?;
        let (dx, d) = self
            .norm_self_att
            .backward_dropped(p, norm, &d, Some(&dx), (HALF, m1), gradients)?;

        let (norm, inner) = &saved.feed_forward1;
        let d = self.feed_forward1.backward(p, inner, &d, gradients)?;
        self.norm_feed_forward1.backward(p, norm, &d, Some(&dx), gradients)
    }
}
