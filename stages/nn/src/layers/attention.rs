//! Multi-head self-attention with relative positions (Transformer-XL's, as NeMo has it).

mod fused;
pub mod step;
pub mod stream;

use std::ops::Range;
use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};
use flow_kernels::attention::{
    Context, Scores, add_rows_in_place, head_sums, merge_heads, merge_projections, rows_of, split_heads,
    split_projections, weights_dropped, weights_dropped_backward,
};
use flow_kernels::device::to_device;
use flow_kernels::elementwise::add_in_place;
use flow_kernels::noise::DropMask;
use flow_kernels::product::product;
use flow_kernels::relative_attention::{self, Projections};

use super::linear::Linear;
use super::{Frames, dropout};
use crate::config::{AttentionContext, ChunkContext, EncoderConfig};
use crate::error::{Error, Result};
use crate::parameters::{Gradients, Initialise, Mode, ParameterBuilder, ParameterId, Parameters};
use crate::pending_sums::PendingSums;

/// Sine and cosine rows for relative positions, made once and cut to size.
#[derive(Debug)]
pub struct PositionTable {
    width: usize,
    /// Frames for which the table is large enough, and the table as it was last asked for.
    made: Mutex<Option<(usize, Tensor)>>,
}

impl PositionTable {
    /// A table of rows of `width` (even) elements.
    pub fn new(width: usize) -> Self {
        Self {
            width,
            made: Mutex::new(None),
        }
    }

    /// Rows for positions `time - 1` down to `-(time - 1)`: (2 * time - 1, width). Row of position p: even columns
    /// `sin(p * w_i)`, odd columns `cos(p * w_i)`, `w_i = exp(-2i * ln(10000) / width)`, all in f32 as in NeMo.
    pub fn rows(&self, time: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        // The table is replaced as a whole, so it is valid also after a panic of another thread.
        let mut made = self.made.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (reach, table) = match made.take() {
            Some((reach, table)) if reach >= time && table.dtype() == dtype && table.device().same_device(device) => {
                (reach, table)
            }
            _ => {
                let reach = time.next_power_of_two().max(256);
                (reach, to_device(&self.make(reach)?.to_dtype(dtype)?, device)?)
            }
        };
        let rows = table.narrow(0, reach - time, 2 * time - 1)?;
        *made = Some((reach, table));
        Ok(rows)
    }

    fn make(&self, reach: usize) -> Result<Tensor> {
        let step = -(10000f64.ln() / self.width as f64) as f32;
        let rates: Vec<f32> = (0..self.width / 2).map(|i| ((2 * i) as f32 * step).exp()).collect();
        let mut values = Vec::with_capacity((2 * reach - 1) * self.width);
        for row in 0..2 * reach - 1 {
            let position = (reach - 1) as f32 - row as f32;
            for rate in &rates {
                let (sin, cos) = (position * rate).sin_cos();
                values.push(sin);
                values.push(cos);
            }
        }
        Ok(Tensor::from_vec(values, (2 * reach - 1, self.width), &Device::Cpu)?)
    }
}

/// The attention module.
#[derive(Clone, Debug)]
pub struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    position: Linear,
    bias_u: ParameterId,
    bias_v: ParameterId,
    heads: usize,
    scale: f64,
    dropout: f64,
    /// All queries are computed together, whatever their context.
    #[cfg(test)]
    whole: bool,
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    x: Tensor,
    /// (2 * reach + 1, d)
    positions: Tensor,
    projected: Tensor,
    way: Way,
    /// (rows, d)
    context: Tensor,
}

/// How the context was computed.
#[derive(Debug)]
enum Way {
    /// Of a matrix of scores for each block of queries. Heads first: (H, B * T, k); so are the projected positions, (H, 2 * reach
    /// + 1, k).
    Blocks {
        query_u: Tensor,
        query_v: Tensor,
        keys: Tensor,
        values: Tensor,
        blocks: Vec<SavedBlock>,
    },
    /// By one kernel. The projected positions are (2 * reach + 1, d).
    Fused {
        projections: Projections,
        /// The logarithms of the sums of weights, (H, B * T).
        logs: Tensor,
        masks: Vec<Option<DropMask>>,
    },
}

#[derive(Debug)]
struct SavedBlock {
    queries: Range<usize>,
    keys: Range<usize>,
    /// (H, B, Q, K), before dropout.
    weights: Tensor,
    mask: Option<DropMask>,
}

impl Attention {
    /// `name.linear_{q,k,v,out,pos}`, `name.pos_bias_{u,v}`.
    pub fn new(name: &str, config: &EncoderConfig, builder: &mut ParameterBuilder) -> Result<Self> {
        let (d, heads) = (config.d_model, config.n_heads);
        let mut linear = |part: &str, bias: bool| Linear::new(&format!("{name}.linear_{part}"), d, d, bias, builder);
        let (query, key) = (linear("q", config.use_bias)?, linear("k", config.use_bias)?);
        let (value, output) = (linear("v", config.use_bias)?, linear("out", config.use_bias)?);
        let position = linear("pos", false)?;
        builder.stack(&[query.weight_id(), key.weight_id(), value.weight_id()])?;
        let mut bias = |part: &str| {
            builder.parameter(
                &format!("{name}.pos_bias_{part}"),
                &[heads, d / heads],
                Initialise::Constant(0.0),
            )
        };
        Ok(Self {
            query,
            key,
            value,
            output,
            position,
            bias_u: bias("u")?,
            bias_v: bias("v")?,
            heads,
            scale: 1.0 / ((d / heads) as f64).sqrt(),
            dropout: config.dropout_att,
            #[cfg(test)]
            whole: false,
        })
    }

    /// `x` (rows, d) and the positional table (2T - 1, d) -> (rows, d). The result of one kernel with products in bf16 is rounded to
    /// bf16, unless something is added to a product.
    ///
    /// With limited context, queries are taken in blocks, each with the keys that its queries see: time and memory grow
    /// with the number of frames, not with its square.
    pub fn forward(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        positions: &Tensor,
        frames: &Frames,
        mode: &mut Mode,
    ) -> Result<(Tensor, Saved)> {
        let d = x.dims2()?.1;
        let (heads, k) = (self.heads, d / self.heads);
        let (batch, time) = (frames.batch, frames.time);
        let reach = frames.context.reach(time);
        let positions = positions.narrow(0, positions.dim(0)? / 2 - reach, 2 * reach + 1)?;
        let has_kernel = matches!(frames.context, Context::All | Context::Band(_));
        if has_kernel && relative_attention::is_for(parameters.get(self.bias_u), k) {
            return self.forward_fused(parameters, x, positions, frames, mode);
        }
        let query = self.query.forward(parameters, x)?;
        let (key, value) = (self.key.forward(parameters, x)?, self.value.forward(parameters, x)?);
        let biases = (parameters.get(self.bias_u), parameters.get(self.bias_v));
        let [query_u, query_v, keys, values] = split_projections([&query, &key, &value], heads, biases)?;
        drop((query, key, value));
        let projected = split_heads(&self.position.forward(parameters, &positions)?, heads, None)?;
        let (mut blocks, mut contexts) = (Vec::new(), Vec::new());
        for (q, s) in self.blocks(frames) {
            let part = |x: &Tensor, range: &Range<usize>| -> Result<Tensor> {
                Ok(rows_of(x, batch, range)?.reshape((heads * batch, range.len(), k))?)
            };
            let query = (&part(&query_u, &q)?, &rows_of(&query_v, batch, &q)?);
            let scores = self.scores(frames, &q, &s);
            let mask = dropout::draw(self.dropout, mode);
            let (weights, dropped) = block_weights(query, &part(&keys, &s)?, &projected, &scores, mask)?;
            let dropped = dropped.reshape((heads * batch, q.len(), s.len()))?;
            let context = product(&dropped, &part(&values, &s)?)?;
            contexts.push(context.reshape((heads, batch, q.len(), k))?);
            blocks.push(SavedBlock {
                queries: q,
                keys: s,
                weights,
                mask,
            });
        }
        let context = merge_heads(&join(contexts)?.reshape((heads, batch * time, k))?, None)?;
        let y = self.output.forward(parameters, &context)?;
        let saved = Saved {
            x: x.clone(),
            positions,
            projected,
            way: Way::Blocks {
                query_u,
                query_v,
                keys,
                values,
                blocks,
            },
            context,
        };
        Ok((y, saved))
    }

    fn blocks(&self, frames: &Frames) -> Vec<AttentionBlock> {
        #[cfg(test)]
        if self.whole {
            return vec![(0..frames.time, 0..frames.time)];
        }
        query_blocks(frames.context, frames.time)
    }

    fn scores<'a>(&self, frames: &'a Frames, queries: &Range<usize>, keys: &Range<usize>) -> Scores<'a> {
        Scores {
            lengths: &frames.lengths,
            scale: self.scale,
            context: frames.context,
            queries: queries.clone(),
            keys: keys.clone(),
            reach: frames.context.reach(frames.time),
        }
    }

    /// Adds the gradients of all parts, some of them by way of `sums`, and gives that of `x`. What is to be done with sums that are
    /// kept is [`Attention::backward_positions`].
    pub fn backward(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        frames: &Frames,
        dy: &Tensor,
        gradients: &mut Gradients,
        sums: &mut PendingSums,
    ) -> Result<Tensor> {
        let rounded = matches!(&saved.way, Way::Fused { .. }) && self.rounds(dy);
        let d_context = self
            .output
            .backward_rounded(parameters, &saved.context, (dy, rounded), gradients, sums)?;
        let Way::Fused {
            projections,
            logs,
            masks,
        } = &saved.way
        else {
            return self.backward_blocks(parameters, saved, frames, &d_context, gradients);
        };
        let how = (projections, logs, &masks[..]);
        self.backward_fused(parameters, (saved, how), frames, &d_context, gradients, sums)
    }

    /// Adds the gradient of the positions' weight, of the sums that [`Attention::backward`] keeps, if any.
    pub fn backward_positions(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        kept: &[Tensor],
        gradients: &mut Gradients,
    ) -> Result<()> {
        for sums in kept {
            let d_projected = sums.reshape(saved.projected.shape())?;
            self.position
                .backward_weights(parameters, &saved.positions, &d_projected, gradients)?;
        }
        Ok(())
    }

    fn backward_blocks(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        frames: &Frames,
        d_context: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<Tensor> {
        let Way::Blocks {
            query_u,
            query_v,
            keys,
            values,
            blocks,
        } = &saved.way
        else {
            return Err(Error::Input("attention was computed by one kernel".into()));
        };
        let (heads, batch, time) = (self.heads, frames.batch, frames.time);
        let (_, rows, k) = keys.dims3()?;
        let d_context = split_heads(d_context, heads, None)?;
        let (mut d_query_u, mut d_query_v) = (Vec::new(), Vec::new());
        let (mut d_keys, mut d_values, mut d_projected) = (None, None, None);
        for block in blocks {
            let (q, s) = (&block.queries, &block.keys);
            let part = |x: &Tensor, range: &Range<usize>| -> Result<Tensor> {
                Ok(rows_of(x, batch, range)?.reshape((heads * batch, range.len(), k))?)
            };
            let square = (heads * batch, q.len(), s.len());
            let d_context = part(&d_context, q)?;
            let d_dropped = product(&d_context, &part(values, s)?.t()?)?.reshape((heads, batch, q.len(), s.len()))?;
            let scores = self.scores(frames, q, s);
            let ((d_content, d_position), dropped) =
                weights_dropped_backward(&block.weights, &d_dropped, &scores, block.mask)?;
            let from_values = product(&dropped.reshape(square)?.t()?, &d_context)?;
            let d_content = d_content.reshape(square)?;
            let d_position = d_position.reshape((heads, batch * q.len(), ()))?;
            let from_keys = product(&d_content.t()?, &part(query_u, q)?)?;
            for (sum, part) in [(&mut d_values, from_values), (&mut d_keys, from_keys)] {
                let part = part.reshape((heads, batch * s.len(), k))?;
                if s.len() == time {
                    *sum = Some(part);
                    continue;
                }
                let sum = match sum {
                    Some(sum) => sum,
                    None => sum.insert(Tensor::zeros((heads, rows, k), part.dtype(), part.device())?),
                };
                add_rows_in_place(sum, &part, batch, s.start)?;
            }
            let shape = (heads, batch, q.len(), k);
            d_query_u.push(product(&d_content, &part(keys, s)?)?.reshape(shape)?);
            d_query_v.push(product(&d_position, &saved.projected)?.reshape(shape)?);
            let part = product(&d_position.t()?, &rows_of(query_v, batch, q)?)?;
            match &d_projected {
                None => d_projected = Some(part),
                Some(sum) => add_in_place(sum, &part)?,
            }
        }
        let d_query_u = join(d_query_u)?.reshape((heads, rows, k))?;
        let d_query_v = join(d_query_v)?.reshape((heads, rows, k))?;
        let (d_bias_u, d_bias_v) = head_sums(&d_query_u, &d_query_v)?;
        gradients.add(self.bias_u, d_bias_u)?;
        gradients.add(self.bias_v, d_bias_v)?;
        if let Some(d_projected) = d_projected {
            self.position.backward_weights(
                parameters,
                &saved.positions,
                &merge_heads(&d_projected, None)?,
                gradients,
            )?;
        }
        let (Some(d_keys), Some(d_values)) = (d_keys, d_values) else {
            return Err(Error::Input("attention over no frames".into()));
        };
        let [d_query, d_key, d_value] = merge_projections([&d_query_u, &d_query_v, &d_keys, &d_values])?;
        let dx = self.query.backward(parameters, &saved.x, &d_query, gradients)?;
        for (linear, d) in [(&self.key, d_key), (&self.value, d_value)] {
            add_in_place(&dx, &linear.backward(parameters, &saved.x, &d, gradients)?)?;
        }
        Ok(dx)
    }
}

/// Queries that are computed together where the context is limited.
fn queries_together(context: Context) -> usize {
    // As many queries as keys beside them: the matrix products are large, and half of their elements is used.
    match context {
        Context::All | Context::From(_) => 16,
        Context::Band(width) => width.saturating_mul(2).clamp(16, 512),
        Context::Chunks { size, left } => {
            let queries = left.saturating_mul(size).clamp(16, 512);
            queries.div_ceil(size.max(1)).saturating_mul(size)
        }
    }
}

/// Queries that are computed together, and the keys that one of them may see.
pub type AttentionBlock = (Range<usize>, Range<usize>);

/// The blocks of an encoder with this context over this many frames, and how many positions a query is scored against.
pub fn attention_blocks(context: AttentionContext, time: usize) -> (Vec<AttentionBlock>, usize) {
    let context = Context::from(context);
    (query_blocks(context, time), 2 * context.reach(time) + 1)
}

impl From<AttentionContext> for Context {
    fn from(context: AttentionContext) -> Context {
        match context {
            AttentionContext::Full => Context::All,
            AttentionContext::Band(width) => Context::Band(width),
            AttentionContext::Chunks(context) => match (context.left, context.chunk()) {
                (None, None) => Context::All,
                (Some(left), None) => Context::From(left),
                (left, Some(size)) => Context::Chunks {
                    size,
                    left: left.map_or(ChunkContext::MOST_LEFT, |left| left / size),
                },
            },
        }
    }
}

/// Queries that are computed together, with the keys that one of them may see.
fn query_blocks(context: Context, time: usize) -> Vec<AttentionBlock> {
    let block = queries_together(context);
    let beside = match context {
        Context::All | Context::From(_) => usize::MAX,
        Context::Band(width) => width,
        Context::Chunks { size, left } => left.saturating_mul(size),
    };
    if block.saturating_add(beside) >= time {
        return vec![(0..time, 0..time)];
    }
    let blocks = (0..time).step_by(block).map(|first| {
        let queries = first..time.min(first + block);
        let keys = context.seen(first, time).start..context.seen(queries.end - 1, time).end;
        (queries, keys)
    });
    blocks.collect()
}

/// Attention weights (H, B, Q, K) of queries with the biases u, (H * B, Q, k), and v, (H, B * Q, k), for keys (H * B, K, k)
/// and projected positions (H, S, k); and these after dropout.
fn block_weights(
    query: (&Tensor, &Tensor),
    keys: &Tensor,
    projected: &Tensor,
    scores: &Scores,
    mask: Option<DropMask>,
) -> Result<(Tensor, Tensor)> {
    let (query_u, query_v) = query;
    let (heads, batch) = (query_v.dim(0)?, scores.lengths.len());
    let (queries, width) = (scores.queries.len(), scores.keys.len());
    let content = product(query_u, &keys.t()?)?.reshape((heads, batch, queries, width))?;
    let position = product(query_v, &projected.t()?)?.reshape((heads, batch, queries, projected.dim(1)?))?;
    Ok(weights_dropped(&content, &position, scores, mask)?)
}

/// Blocks of queries, (H, B, Q, k), behind each other.
fn join(mut blocks: Vec<Tensor>) -> Result<Tensor> {
    match blocks.len() {
        1 => Ok(blocks.remove(0)),
        _ => Ok(Tensor::cat(&blocks, 2)?),
    }
}

#[cfg(test)]
mod device_tests;
#[cfg(test)]
mod tests;
