//! Self-attention over frames that come in blocks.

use std::ops::Range;

use candle_core::Tensor;
use flow_kernels::attention::{Context, merge_heads, split_heads};
use flow_kernels::product::product;

use super::{Attention, PositionTable, block_weights, query_blocks};
use crate::error::Result;
use crate::layers::Frames;
use crate::layers::held_rows::HeldRows;
use crate::parameters::Parameters;

/// Queries that are computed together where the context is not limited.
pub const QUERIES: usize = 512;

/// Self-attention over one utterance whose frames come in blocks. A block of queries is computed once all keys that it sees
/// are there; with limited context, no more keys than these are held.
#[derive(Debug)]
pub struct AttentionStream {
    frames: Frames,
    /// Blocks of queries and the keys that they see, from the last to the first.
    blocks: Vec<(Range<usize>, Range<usize>)>,
    /// (H, 2 * reach + 1, k)
    projected: Tensor,
    /// (H, rows, k)
    query_u: HeldRows,
    query_v: HeldRows,
    keys: HeldRows,
    values: HeldRows,
}

impl AttentionStream {
    /// Rows that are held.
    pub fn held(&self) -> usize {
        let rows = [&self.query_u, &self.query_v, &self.keys, &self.values].map(HeldRows::held);
        rows.into_iter().max().unwrap_or(0)
    }
}

impl Attention {
    /// Begins an utterance of `frames`.
    pub fn stream(&self, parameters: &Parameters, table: &PositionTable, frames: Frames) -> Result<AttentionStream> {
        let reach = frames.context.reach(frames.time);
        let positions = table.rows(reach + 1, parameters.dtype(), parameters.device())?;
        let projected = split_heads(&self.position.forward(parameters, &positions)?, self.heads, None)?;
        let mut blocks = match frames.context {
            // Each query sees all keys. Taken in parts, memory does not grow with the square of the frames.
            Context::All => (0..frames.time)
                .step_by(QUERIES)
                .map(|first| (first..frames.time.min(first + QUERIES), 0..frames.time))
                .collect(),
            context => query_blocks(context, frames.time),
        };
        blocks.reverse();
        Ok(AttentionStream {
            frames,
            blocks,
            projected,
            query_u: HeldRows::new(1),
            query_v: HeldRows::new(1),
            keys: HeldRows::new(1),
            values: HeldRows::new(1),
        })
    }

    /// Takes the next frames, (rows, d).
    pub fn feed(&self, parameters: &Parameters, stream: &mut AttentionStream, x: &Tensor) -> Result<()> {
        let query = self.query.forward(parameters, x)?;
        for (held, bias) in [(&mut stream.query_u, self.bias_u), (&mut stream.query_v, self.bias_v)] {
            held.push(split_heads(&query, self.heads, Some(parameters.get(bias)))?)?;
        }
        for (held, linear) in [(&mut stream.keys, &self.key), (&mut stream.values, &self.value)] {
            held.push(split_heads(&linear.forward(parameters, x)?, self.heads, None)?)?;
        }
        Ok(())
    }

    /// The output for the next frames, (rows, d); none if these need frames that are still to come, or there are none left.
    pub fn next(&self, parameters: &Parameters, stream: &mut AttentionStream) -> Result<Option<Tensor>> {
        match stream.blocks.last() {
            Some((_, keys)) if keys.end <= stream.keys.end() => {}
            _ => return Ok(None),
        }
        let Some((q, s)) = stream.blocks.pop() else {
            return Ok(None);
        };
        let query = (&stream.query_u.get(&q)?, &stream.query_v.get(&q)?);
        let scores = self.scores(&stream.frames, &q, &s);
        let (weights, _) = block_weights(query, &stream.keys.get(&s)?, &stream.projected, &scores, None)?;
        let context = product(
            &weights.reshape((self.heads, q.len(), s.len()))?,
            &stream.values.get(&s)?,
        )?;
        let y = self.output.forward(parameters, &merge_heads(&context, None)?)?;
        for held in [&mut stream.query_u, &mut stream.query_v] {
            held.drop_before(q.end)?;
        }
        let needed = stream.blocks.last().map_or(stream.frames.time, |(_, keys)| keys.start);
        for held in [&mut stream.keys, &mut stream.values] {
            held.drop_before(needed)?;
        }
        Ok(Some(y))
    }
}
