//! Self-attention for the next chunk of recordings that come in chunks.

use std::ops::Range;

use candle_core::Tensor;
use flow_kernels::Lengths;
use flow_kernels::attention::{Context, Scores, merge_heads, split_heads, split_projections};
use flow_kernels::product::product;

use super::{Attention, PositionTable, block_weights};
use crate::error::Result;
use crate::parameters::Parameters;

/// Keys and values of the last rows of a recording, at most as many as the context has before a chunk: (H, rows, k) each. NeMo
/// keeps the rows that they are projected from (`cache_last_channel`).
#[derive(Debug, Default)]
pub struct AttentionCache {
    keys: LastRows,
    values: LastRows,
}

impl AttentionCache {
    /// Rows of keys, and as many of values, that memory is taken for at most: where `most` rows are kept before chunks of `chunk`.
    pub fn room(most: usize, chunk: usize) -> usize {
        LastRows::room_for(most + chunk, most + chunk)
    }

    /// The last keys, at most `most`, (H, rows, k); none before the first chunk.
    pub fn keys(&self, most: usize) -> Result<Option<Tensor>> {
        self.keys.last(most)
    }
}

/// Rows in a tensor with room for more, (H, room, k): what is kept is copied only when the room is used up.
#[derive(Debug, Default)]
struct LastRows {
    room: Option<Tensor>,
    rows: Range<usize>,
}

impl LastRows {
    /// Rows of room beyond those that are ever kept.
    const SPARE: usize = 256;

    /// Room for `needed` rows that may become `most`.
    fn room_for(needed: usize, most: usize) -> usize {
        (2 * needed).min(most.saturating_add(Self::SPARE))
    }

    /// Appends rows, (H, count, k), to the last `most` ones of those that are there, and gives all of these.
    fn append(&mut self, new: &Tensor, most: usize) -> Result<Tensor> {
        let (heads, count, k) = new.dims3()?;
        let held = self.rows.len().min(most);
        let begin = self.rows.end - held;
        let room = match self.room.take() {
            Some(room) if self.rows.end + count <= room.dim(1)? => {
                self.rows.start = begin;
                room
            }
            full => {
                let needed = held + count;
                let size = Self::room_for(needed, most.saturating_add(count));
                let room = Tensor::zeros((heads, size, k), new.dtype(), new.device())?;
                if let (Some(full), 1..) = (full, held) {
                    room.slice_set(&full.narrow(1, begin, held)?.contiguous()?, 1, 0)?;
                }
                self.rows = 0..held;
                room
            }
        };
        room.slice_set(&new.contiguous()?, 1, self.rows.end)?;
        self.rows.end += count;
        let all = room.narrow(1, self.rows.start, self.rows.len())?;
        self.room = Some(room);
        Ok(all)
    }

    fn last(&self, most: usize) -> Result<Option<Tensor>> {
        let held = self.rows.len().min(most);
        let room = self.room.as_ref().filter(|_| held > 0);
        Ok(room
            .map(|room| room.narrow(1, self.rows.end - held, held))
            .transpose()?)
    }
}

/// Projected positions for chunks, (H, `before + 1 + right`, k): the first one is that of a key `before` rows before its query, the
/// last one that of a key `right` rows behind it.
#[derive(Clone, Copy, Debug)]
pub struct ChunkPositions<'a> {
    pub projected: &'a Tensor,
    pub before: usize,
    /// Rows before a chunk that it sees at most.
    pub most: usize,
}

impl Attention {
    /// [`ChunkPositions::projected`].
    pub fn chunk_positions(
        &self,
        parameters: &Parameters,
        table: &PositionTable,
        before: usize,
        right: usize,
    ) -> Result<Tensor> {
        let positions = table.rows(before.max(right) + 1, parameters.dtype(), parameters.device())?;
        let positions = positions.narrow(0, before.max(right) - before, before + 1 + right)?;
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
        positions: ChunkPositions,
    ) -> Result<Tensor> {
        let query = self.query.forward(parameters, x)?;
        let (key, value) = (self.key.forward(parameters, x)?, self.value.forward(parameters, x)?);
        let biases = (parameters.get(self.bias_u), parameters.get(self.bias_v));
        let [query_u, query_v, keys, values] = split_projections([&query, &key, &value], self.heads, biases)?;
        let mut contexts = Vec::with_capacity(counts.len());
        let mut first = 0;
        for (&count, cache) in counts.iter().zip(caches) {
            let part = |x: &Tensor| x.narrow(1, first, count)?.contiguous();
            let keys = cache.keys.append(&part(&keys)?, positions.most)?;
            let values = cache.values.append(&part(&values)?, positions.most)?;
            let rows = keys.dim(1)?;
            let scores = Scores {
                lengths: &Lengths::new([rows]),
                scale: self.scale,
                context: Context::All,
                queries: rows - count..rows,
                keys: 0..rows,
                reach: rows - 1,
            };
            // Of the last row's first key to the first row's last one.
            let farthest = positions.before + 1 - rows;
            let projected = positions.projected.narrow(1, farthest, rows - 1 + count)?;
            let query = (&part(&query_u)?, &part(&query_v)?);
            let (weights, _) = block_weights(query, &keys, &projected, &scores, None)?;
            contexts.push(product(&weights.reshape((self.heads, count, rows))?, &values)?);
            first += count;
        }
        self.output
            .forward(parameters, &merge_heads(&Tensor::cat(&contexts, 1)?, None)?)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::config::ChunkContext;

    #[test]
    fn as_many_rows_are_kept_as_a_context_without_limit_has() {
        let most = ChunkContext {
            left: None,
            right: Some(6),
        };
        let most = most.rows_kept();
        assert_eq!(most, 10_000);
        let mut kept = LastRows::default();
        let mut end = 0u32;
        while end < 21_000 {
            let new = Tensor::arange(end, end + 7, &Device::Cpu).unwrap();
            let all = kept.append(&new.reshape((1, 7, 1)).unwrap(), most).unwrap();
            end += 7;
            let all = all.flatten_all().unwrap().to_vec1::<u32>().unwrap();
            assert_eq!(all.last(), Some(&(end - 1)));
            assert_eq!(
                (all.len(), all[0]),
                (most.min(end as usize - 7) + 7, end - all.len() as u32)
            );
            let room = kept.room.as_ref().unwrap().dim(1).unwrap();
            assert!(room <= most + 7 + LastRows::SPARE && room < 2 * all.len() + 1, "{room}");
            // Nobody looks at all of them each time.
            assert!(!end.is_multiple_of(700) || all.windows(2).all(|two| two[0] + 1 == two[1]));
        }
        let last = kept.last(3).unwrap().unwrap().flatten_all().unwrap();
        assert_eq!(last.to_vec1::<u32>().unwrap(), [end - 3, end - 2, end - 1]);
    }
}
