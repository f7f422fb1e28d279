//! Self-attention for the next chunk of recordings that come in chunks.

use candle_core::Tensor;
use flow_kernels::Lengths;
use flow_kernels::attention::{Context, Scores, merge_heads, split_heads, split_projections};
use flow_kernels::product::product;

use super::{Attention, PositionTable, block_weights};
use crate::config::ChunkContext;
use crate::error::Result;
use crate::parameters::Parameters;

/// Keys and values of the last rows of a recording, at most as many as the context has before a chunk: (H, rows, k) each. NeMo
/// keeps the rows that they are projected from (`cache_last_channel`).
#[derive(Clone, Debug, Default)]
pub struct AttentionCache(Option<[Tensor; 2]>);

impl AttentionCache {
    /// Keys, (H, rows, k).
    pub fn keys(&self) -> Option<&Tensor> {
        self.0.as_ref().map(|[keys, _]| keys)
    }
}

impl Attention {
    /// Projected positions for chunks of this context, (H, 2 * (left + right) + 1, k).
    pub fn chunk_positions(
        &self,
        parameters: &Parameters,
        table: &PositionTable,
        context: ChunkContext,
    ) -> Result<Tensor> {
        let reach = context.left + context.right;
        let positions = table.rows(reach + 1, parameters.dtype(), parameters.device())?;
        Ok(split_heads(
            &self.position.forward(parameters, &positions)?,
            self.heads,
            None,
        )?)
    }

    /// [`Attention::forward`], when evaluating, for the next chunk of each of several recordings, behind each other in `x`,
    /// (rows, d), with `counts` rows of each. A chunk sees itself and all that its cache holds, which is its context.
    pub fn step(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        counts: &[usize],
        caches: &mut [&mut AttentionCache],
        (positions, context): (&Tensor, ChunkContext),
    ) -> Result<Tensor> {
        let query = self.query.forward(parameters, x)?;
        let (key, value) = (self.key.forward(parameters, x)?, self.value.forward(parameters, x)?);
        let biases = (parameters.get(self.bias_u), parameters.get(self.bias_v));
        let [query_u, query_v, keys, values] = split_projections([&query, &key, &value], self.heads, biases)?;
        let mut contexts = Vec::with_capacity(counts.len());
        let mut first = 0;
        for (&count, cache) in counts.iter().zip(caches) {
            let part = |x: &Tensor| x.narrow(1, first, count)?.contiguous();
            let (mut keys, mut values) = (part(&keys)?, part(&values)?);
            if let Some([old_keys, old_values]) = &cache.0 {
                keys = Tensor::cat(&[old_keys, &keys], 1)?;
                values = Tensor::cat(&[old_values, &values], 1)?;
            }
            let rows = keys.dim(1)?;
            let scores = Scores {
                lengths: &Lengths::new([rows]),
                scale: self.scale,
                context: Context::All,
                queries: rows - count..rows,
                keys: 0..rows,
                reach: context.left + context.right,
            };
            let query = (&part(&query_u)?, &part(&query_v)?);
            let (weights, _) = block_weights(query, &keys, positions, &scores, None)?;
            contexts.push(product(&weights.reshape((self.heads, count, rows))?, &values)?);
            let kept = rows.min(context.left);
            cache.0 = match kept {
                0 => None,
                _ => Some([keys.narrow(1, rows - kept, kept)?, values.narrow(1, rows - kept, kept)?]),
            };
            first += count;
        }
        self.output
            .forward(parameters, &merge_heads(&Tensor::cat(&contexts, 1)?, None)?)
    }
}
