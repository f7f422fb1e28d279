//! A Conformer layer for the next chunk of recordings that come in chunks.

use candle_core::Tensor;
use flow_kernels::elementwise::residual;

use super::ConformerLayer;
use crate::error::Result;
use crate::layers::attention::PositionTable;
use crate::layers::attention::step::{AttentionCache, ChunkPositions};
use crate::parameters::Parameters;

/// What a layer keeps of a recording between chunks.
#[derive(Debug)]
pub struct LayerCache {
    pub attention: AttentionCache,
    /// The last inputs of the depthwise convolution, (kernel - 1, d): NeMo's `cache_last_time`, transposed.
    pub convolution: Tensor,
}

impl ConformerLayer {
    /// Before the first chunk of a recording.
    pub fn cache(&self, parameters: &Parameters) -> Result<LayerCache> {
        Ok(LayerCache {
            attention: AttentionCache::default(),
            convolution: self.conv.cache(parameters)?,
        })
    }

    /// [`ChunkPositions::projected`] of the layer.
    pub fn chunk_positions(
        &self,
        parameters: &Parameters,
        table: &PositionTable,
        before: usize,
        right: usize,
    ) -> Result<Tensor> {
        self.self_attn.chunk_positions(parameters, table, before, right)
    }

    /// The layer, when evaluating, for the next chunk of each of several recordings, behind each other in `x`, (rows, d), so many
    /// rows of each.
    pub fn step(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        counts: &[usize],
        caches: &mut [&mut LayerCache],
        positions: ChunkPositions,
    ) -> Result<Tensor> {
        let (x, n) = self.before_attention(parameters, x)?;
        let mut attention: Vec<_> = caches.iter_mut().map(|cache| &mut cache.attention).collect();
        let y = self.self_attn.step(parameters, &n, counts, &mut attention, positions)?;
        let x = residual(&x, &y, 1.0, None)?;
        let n = self.norm_conv.forward(parameters, &x)?.0;
        let mut convolution: Vec<_> = caches.iter_mut().map(|cache| &mut cache.convolution).collect();
        let y = self.conv.step(parameters, &n, counts, &mut convolution)?;
        self.after_convolution(parameters, &residual(&x, &y, 1.0, None)?)
    }
}
