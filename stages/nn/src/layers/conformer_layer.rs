//! One Conformer layer: half a feed-forward, attention, convolution, half a feed-forward, each on a normalised input
//! and added to its residual; then a norm.

pub mod step;
pub mod stream;

use candle_core::{DType, Tensor};
use flow_kernels::batch_norm::Gather;
use flow_kernels::noise::DropMask;

use super::adapter::{self, LinearAdapter};
use super::attention::{self, Attention};
use super::convolution::{self, BatchNormPass, Convolution};
use super::feed_forward::{self, FeedForward};
use super::norm::{self, LayerNorm};
use super::{Frames, dropout};
use crate::config::{AdapterConfig, EncoderConfig};
use crate::error::Result;
use crate::parameters::{Gradients, Mode, ParameterBuilder, Parameters};
use crate::pending_sums::PendingSums;

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
    /// What follows the last norm, one after another.
    adapters: Vec<LinearAdapter>,
    dropout: f64,
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    body: SavedBody,
    norm_out: norm::Saved,
    adapters: Vec<adapter::Saved>,
}

#[derive(Debug)]
struct SavedBody {
    feed_forward1: (norm::Saved, feed_forward::Saved),
    self_attn: (norm::Saved, attention::Saved),
    conv: (norm::Saved, convolution::Saved),
    feed_forward2: (norm::Saved, feed_forward::Saved),
    /// Dropout masks on the four residual branches, in order.
    masks: [Option<DropMask>; 4],
    adapter_masks: Vec<Option<DropMask>>,
}

/// A layer's input, normalised.
#[derive(Debug)]
pub struct Normalised {
    x: Tensor,
    saved: norm::Saved,
}

/// A layer before its last norm: the residual sum, and what the last branch adds to it.
#[derive(Debug)]
pub struct Body {
    x: Tensor,
    y4: Tensor,
    saved: SavedBody,
}

/// The gradient of a residual sum: what goes around a branch, and what goes into it.
#[derive(Debug)]
pub struct BranchGradients {
    around: Tensor,
    branch: Tensor,
}

impl Saved {
    /// Mean and inverse deviation of batch normalisation, if there is any.
    pub fn batch_norm(&self) -> Option<(Tensor, Tensor)> {
        self.body.conv.1.statistics()
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
            adapters: Vec::new(),
            dropout: config.dropout,
        })
    }

    /// Adds a linear adapter behind the others: `name.adapter_layer.` and its own name. One that is not enabled only gets its
    /// parameters.
    pub fn add_adapter(
        &mut self,
        name: &str,
        width: usize,
        config: &AdapterConfig,
        builder: &mut ParameterBuilder,
    ) -> Result<()> {
        let adapter = LinearAdapter::new(&format!("{name}.adapter_layer.{}", config.name), width, config, builder)?;
        if config.enabled {
            self.adapters.push(adapter);
        }
        Ok(())
    }

    /// Whether something follows the last norm.
    pub fn has_adapters(&self) -> bool {
        !self.adapters.is_empty()
    }

    /// The type in which the layer multiplies what is like `x` with its weights.
    pub fn factors(&self, x: &Tensor) -> DType {
        self.feed_forward1.factors(x)
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
        let normalised = self.begin(parameters, x)?;
        let body = self.body(parameters, (x, normalised), positions, frames, mode, norm)?;
        self.end(parameters, body)
    }

    /// The norm that the layer begins with, of its input (rows, d).
    pub fn begin(&self, parameters: &Parameters, x: &Tensor) -> Result<Normalised> {
        let (x, saved) = self.norm_feed_forward1.forward_in(parameters, self.factors(x), x)?;
        Ok(Normalised { x, saved })
    }

    /// All of the layer between its first and its last norm, for its input, as it is and normalised.
    pub fn body(
        &self,
        parameters: &Parameters,
        (x, normalised): (&Tensor, Normalised),
        positions: &Tensor,
        frames: &Frames,
        mode: &mut Mode,
        norm: &mut BatchNormPass,
    ) -> Result<Body> {
        self.observed_body(
            parameters,
            (x, normalised),
            (positions, frames),
            mode,
            norm,
            &mut |_| (),
        )
    }

    /// [`ConformerLayer::body`]; `observe` is given the outputs of the four branches, (rows, d), in their order.
    pub fn observed_body(
        &self,
        parameters: &Parameters,
        (x, normalised): (&Tensor, Normalised),
        (positions, frames): (&Tensor, &Frames),
        mode: &mut Mode,
        norm: &mut BatchNormPass,
        observe: &mut dyn FnMut(&Tensor),
    ) -> Result<Body> {
        // What the modules multiply with their weights comes in this type.
        let factors = self.factors(x);
        let (y1, s1) = self.feed_forward1.forward(parameters, &normalised.x, mode)?;
        observe(&y1);
        let m1 = dropout::draw(self.dropout, mode);

        let (x, n, n2) = self
            .norm_self_att
            .forward_sum(parameters, factors, x, &y1, (HALF, m1))?;
        let (y2, s2) = self.self_attn.forward(parameters, &n, positions, frames, mode)?;
        observe(&y2);
        let m2 = dropout::draw(self.dropout, mode);

        let (x, n, n3) = self.norm_conv.forward_sum(parameters, factors, &x, &y2, (1.0, m2))?;
        let (y3, s3) = self.conv.forward(parameters, &n, frames, mode, norm)?;
        observe(&y3);
        let m3 = dropout::draw(self.dropout, mode);

        let (x, n, n4) = self
            .norm_feed_forward2
            .forward_sum(parameters, factors, &x, &y3, (1.0, m3))?;
        let (y4, s4) = self.feed_forward2.forward(parameters, &n, mode)?;
        observe(&y4);
        let m4 = dropout::draw(self.dropout, mode);
        let adapter_masks = self.adapters.iter().map(|adapter| adapter.draw(mode)).collect();
        Ok(Body {
            x,
            saved: SavedBody {
                feed_forward1: (normalised.saved, s1),
                self_attn: (n2, s2),
                conv: (n3, s3),
                feed_forward2: (n4, s4),
                masks: [m1, m2, m3, m4],
                adapter_masks,
            },
            y4,
        })
    }

    /// The norm that the layer ends with, and adapters: its output.
    pub fn end(&self, parameters: &Parameters, body: Body) -> Result<(Tensor, Saved)> {
        let drop = (HALF, body.saved.masks[3]);
        let (_, mut y, norm_out) = self
            .norm_out
            .forward_sum(parameters, body.x.dtype(), &body.x, &body.y4, drop)?;
        let mut adapters = Vec::with_capacity(self.adapters.len());
        for (adapter, mask) in self.adapters.iter().zip(&body.saved.adapter_masks) {
            let (sum, saved) = adapter.forward(parameters, &y, *mask)?;
            adapters.push(saved);
            y = sum;
        }
        let saved = Saved {
            body: body.saved,
            norm_out,
            adapters,
        };
        Ok((y, saved))
    }

    /// [`ConformerLayer::end`] of a layer without adapters, and [`ConformerLayer::begin`] of the next one.
    pub fn end_and_begin(
        &self,
        parameters: &Parameters,
        body: Body,
        next: &ConformerLayer,
    ) -> Result<(Tensor, Saved, Normalised)> {
        let factors = next.factors(&body.x);
        let drop = (HALF, body.saved.masks[3]);
        let [(y, norm_out), (x, saved)] = self.norm_out.forward_sum_twice(
            &next.norm_feed_forward1,
            parameters,
            factors,
            (&body.x, &body.y4),
            drop,
        )?;
        let of_this = Saved {
            body: body.saved,
            norm_out,
            adapters: Vec::new(),
        };
        Ok((y, of_this, Normalised { x, saved }))
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
        let mut sums = PendingSums::default();
        let dy = self.backward_adapters(parameters, saved, dy, gradients, &mut sums)?;
        let d = self.backward_end(parameters, saved, &dy, &mut sums)?;
        let d = self.backward_body(parameters, saved, frames, (d, gather), (gradients, &mut sums))?;
        let dx = self.backward_begin(parameters, saved, &d, &mut sums)?;
        self.complete(parameters, saved, sums, gradients)?;
        Ok(dx)
    }

    /// The way back through the adapters, from the gradient of the layer's output to that of its last norm's.
    pub fn backward_adapters(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        dy: &Tensor,
        gradients: &mut Gradients,
        sums: &mut PendingSums,
    ) -> Result<Tensor> {
        let mut adapters = self.adapters.iter().zip(&saved.adapters).rev();
        adapters.try_fold(dy.clone(), |dy, (adapter, saved)| {
            adapter.backward(parameters, saved, &dy, gradients, sums)
        })
    }

    /// The way back through the norm of [`ConformerLayer::end`].
    pub fn backward_end(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        dy: &Tensor,
        sums: &mut PendingSums,
    ) -> Result<BranchGradients> {
        let dropped = (self.factors(dy), (HALF, saved.body.masks[3]));
        let (around, branch) = self
            .norm_out
            .backward_dropped(parameters, &saved.norm_out, dy, None, dropped, sums)?;
        Ok(BranchGradients { around, branch })
    }

    /// The way back through [`ConformerLayer::body`]. Some gradients are left in `sums`. `gather` is for statistics of all ranks.
    pub fn backward_body(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        frames: &Frames,
        (d, gather): (BranchGradients, Gather),
        (gradients, sums): (&mut Gradients, &mut PendingSums),
    ) -> Result<BranchGradients> {
        let (p, saved) = (parameters, &saved.body);
        let [m1, m2, m3, _] = saved.masks;
        let BranchGradients { around: dx, branch: d } = d;
        let factors = self.factors(&dx);
        let dropped = |factor: f64, mask: Option<DropMask>| (factors, (factor, mask));

        let (norm, inner) = &saved.feed_forward2;
        let d = self.feed_forward2.backward(p, inner, &d, gradients, sums)?;
        let (dx, d) = self
            .norm_feed_forward2
            .backward_dropped(p, norm, &d, Some(&dx), dropped(1.0, m3), sums)?;

        let (norm, inner) = &saved.conv;
        let d = self.conv.backward(p, inner, frames, (&d, gather), (gradients, sums))?;
        let (dx, d) = self
            .norm_conv
            .backward_dropped(p, norm, &d, Some(&dx), dropped(1.0, m2), sums)?;

        let (norm, inner) = &saved.self_attn;
        let d = self.self_attn.backward(p, inner, frames, &d, gradients, sums)?;
        let (around, d) = self
            .norm_self_att
            .backward_dropped(p, norm, &d, Some(&dx), dropped(HALF, m1), sums)?;

        let (_, inner) = &saved.feed_forward1;
        let branch = self.feed_forward1.backward(p, inner, &d, gradients, sums)?;
        Ok(BranchGradients { around, branch })
    }

    /// The way back through [`ConformerLayer::begin`]: the gradient of the layer's input.
    pub fn backward_begin(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        d: &BranchGradients,
        sums: &mut PendingSums,
    ) -> Result<Tensor> {
        let (norm, _) = &saved.body.feed_forward1;
        self.norm_feed_forward1
            .backward(parameters, norm, &d.branch, Some(&d.around), sums)
    }

    /// [`ConformerLayer::backward_begin`], and [`ConformerLayer::backward_end`] of the layer before, which has no adapters.
    pub fn backward_begin_and_end(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        d: &BranchGradients,
        sums: &mut PendingSums,
        before: (&ConformerLayer, &Saved, &mut PendingSums),
    ) -> Result<BranchGradients> {
        let (layer, saved_before, sums_before) = before;
        let dropped = (layer.factors(&d.around), (HALF, saved_before.body.masks[3]));
        let (norm, _) = &saved.body.feed_forward1;
        let (around, branch) = layer.norm_out.backward_twice(
            parameters,
            &saved_before.norm_out,
            (&self.norm_feed_forward1, norm, sums),
            (&d.branch, &d.around),
            dropped,
            sums_before,
        )?;
        Ok(BranchGradients { around, branch })
    }

    /// Adds the gradients that were left in `sums`.
    pub fn complete(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        sums: PendingSums,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let kept = sums.complete(parameters, gradients)?;
        self.self_attn
            .backward_positions(parameters, &saved.body.self_attn.1, &kept, gradients)
    }
}
