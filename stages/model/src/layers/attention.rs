//! Multi-head self-attention with relative positions (Transformer-XL's, as NeMo has it).

use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};

use super::linear::Linear;
use super::{Frames, dropout};
use crate::config::{AttentionContext, EncoderConfig};
use crate::error::Result;
use crate::kernels::attention::{Scores, head_sum, merge_heads, split_heads, weights, weights_backward};
use crate::kernels::elementwise::drop_scaled;
use crate::noise::DropMask;
use crate::parameters::{Gradients, Initialise, Mode, ParameterBuilder, ParameterId, Parameters};

/// Sine and cosine rows for relative positions, made once and cut to size.
#[derive(Debug)]
pub struct PositionTable {
    width: usize,
    /// Frames for which the table is large enough, and the table on the CPU in f32.
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
        // A poisoned lock only means that another thread panicked between two whole values.
        let mut made = self.made.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (reach, table) = match made.take() {
            Some((reach, table)) if reach >= time => (reach, table),
            _ => {
                let reach = time.next_power_of_two().max(256);
                (reach, self.make(reach)?)
            }
        };
        let rows = table.narrow(0, reach - time, 2 * time - 1)?;
        *made = Some((reach, table));
        Ok(rows.to_dtype(dtype)?.to_device(device)?)
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
    band: Option<usize>,
    dropout: f64,
}

/// What the backward pass needs. Heads first: (H, B * T, k).
#[derive(Debug)]
pub struct Saved {
    x: Tensor,
    positions: Tensor,
    query_u: Tensor,
    query_v: Tensor,
    keys: Tensor,
    values: Tensor,
    /// (H, 2T - 1, k)
    projected: Tensor,
    /// (H, B, T, T), before dropout.
    weights: Tensor,
    mask: Option<DropMask>,
    context: Tensor,
}

impl Attention {
    /// `name.linear_{q,k,v,out,pos}`, `name.pos_bias_{u,v}`.
    pub fn new(name: &str, config: &EncoderConfig, builder: &mut ParameterBuilder) -> Result<Self> {
        let (d, heads) = (config.d_model, config.n_heads);
        let mut linear = |part: &str, bias: bool| Linear::new(&format!("{name}.linear_{part}"), d, d, bias, builder);
        let (query, key) = (linear("q", config.use_bias)?, linear("k", config.use_bias)?);
        let (value, output) = (linear("v", config.use_bias)?, linear("out", config.use_bias)?);
        let position = linear("pos", false)?;
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
            band: match config.attention_context {
                AttentionContext::Full => None,
                AttentionContext::Band(width) => Some(width),
            },
            dropout: config.dropout_att,
        })
    }

    /// `x` (rows, d) and the positional table (2T - 1, d) -> (rows, d).
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
        let query = self.query.forward(parameters, x)?;
        let query_u = split_heads(&query, heads, Some(parameters.get(self.bias_u)))?;
        let query_v = split_heads(&query, heads, Some(parameters.get(self.bias_v)))?;
        let keys = split_heads(&self.key.forward(parameters, x)?, heads, None)?;
        let values = split_heads(&self.value.forward(parameters, x)?, heads, None)?;
        let projected = split_heads(&self.position.forward(parameters, positions)?, heads, None)?;
        let per_utterance = (heads * batch, time, k);
        let content = query_u
            .reshape(per_utterance)?
            .matmul(&keys.reshape(per_utterance)?.t()?)?
            .reshape((heads, batch, time, time))?;
        let position = query_v
            .matmul(&projected.t()?)?
            .reshape((heads, batch, time, 2 * time - 1))?;
        let weights = weights(&content, &position, &self.scores(frames))?;
        let mask = dropout::draw(self.dropout, mode);
        let dropped = drop_scaled(&weights, 1.0, mask)?;
        let context = dropped
            .reshape((heads * batch, time, time))?
            .matmul(&values.reshape(per_utterance)?)?
            .reshape((heads, batch * time, k))?;
        let context = merge_heads(&context, None)?;
        let y = self.output.forward(parameters, &context)?;
        let saved = Saved {
            x: x.clone(),
            positions: positions.clone(),
            query_u,
            query_v,
            keys,
            values,
            projected,
            weights,
            mask,
            context,
        };
        Ok((y, saved))
    }

    fn scores<'a>(&self, frames: &'a Frames) -> Scores<'a> {
        Scores {
            lengths: &frames.lengths,
            scale: self.scale,
            band: self.band,
        }
    }

    /// Adds the gradients of all parts and gives that of `x`.
    pub fn backward(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        frames: &Frames,
        dy: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<Tensor> {
        let (heads, batch, time) = (self.heads, frames.batch, frames.time);
        let (_, rows, k) = saved.keys.dims3()?;
        let per_utterance = (heads * batch, time, k);
        let square = (heads * batch, time, time);

        let d_context = self.output.backward(parameters, &saved.context, dy, gradients)?;
        let d_context = split_heads(&d_context, heads, None)?.reshape(per_utterance)?;
        let dropped = drop_scaled(&saved.weights, 1.0, saved.mask)?.reshape(square)?;
        let d_values = dropped.t()?.matmul(&d_context)?.reshape((heads, rows, k))?;
        let d_weights = d_context
            .matmul(&saved.values.reshape(per_utterance)?.t()?)?
            .reshape((heads, batch, time, time))?;
        let d_weights = drop_scaled(&d_weights, 1.0, saved.mask)?;
        let (d_content, d_position) = weights_backward(&saved.weights, &d_weights, &self.scores(frames))?;
        let d_content = d_content.reshape(square)?;
        let d_position = d_position.reshape((heads, rows, 2 * time - 1))?;

        let d_query_u = d_content
            .matmul(&saved.keys.reshape(per_utterance)?)?
            .reshape((heads, rows, k))?;
        let d_keys = d_content
            .t()?
            .matmul(&saved.query_u.reshape(per_utterance)?)?
            .reshape((heads, rows, k))?;
        let d_query_v = d_position.matmul(&saved.projected)?;
        let d_projected = d_position.t()?.matmul(&saved.query_v)?;

        gradients.add(self.bias_u, head_sum(&d_query_u)?)?;
        gradients.add(self.bias_v, head_sum(&d_query_v)?)?;
        self.position
            .backward_weights(&saved.positions, &merge_heads(&d_projected, None)?, gradients)?;
        let d_query = merge_heads(&d_query_u, Some(&d_query_v))?;
        let dx = self.query.backward(parameters, &saved.x, &d_query, gradients)?;
        let d_keys = merge_heads(&d_keys, None)?;
        let from_keys = self.key.backward(parameters, &saved.x, &d_keys, gradients)?;
        crate::kernels::elementwise::add_in_place(&dx, &from_keys)?;
        let d_values = merge_heads(&d_values, None)?;
        let from_values = self.value.backward(parameters, &saved.x, &d_values, gradients)?;
        crate::kernels::elementwise::add_in_place(&dx, &from_values)?;
        Ok(dx)
    }
}
