//! A cache-aware encoder over recordings that come in chunks: each frame goes through the encoder once, and what later frames need
//! of it is kept in bounded memory. The chunks are NeMo's:
//!
//! - The first step takes `1 + 8 right` feature frames, each later one `8 + 8 right`; each gives `right + 1` encoded frames.
//! - Sub-sampling takes, of each later step, the nine feature frames before it once more, and its first two frames are dropped.
//!   Where there are not so many (`right` 0, step 1) the first ones are zeros, as in NeMo. There, and in what follows from it, a
//!   stream differs from the whole recording encoded at once; everywhere else the two are equal.
//! - Each layer keeps keys and values of `left` rows, and `kernel - 1` rows for its convolution.

use candle_core::{Device, Tensor};
use flow_kernels::elementwise::drop_scaled;

use super::Encoder;
use crate::config::{ChunkContext, EncoderConfig};
use crate::{Error, Result};
use flow_nn::layers::conformer_layer::step::LayerCache;
use flow_nn::parameters::Parameters;

/// Feature frames before a chunk that sub-sampling takes once more, and encoded frames that are dropped for them.
const FEATURES_BEFORE: usize = EncoderConfig::SUBSAMPLING + 1;
const DROPPED: usize = 2;

/// What the steps of all recordings in one context have in common.
#[derive(Debug)]
pub struct ChunkPlan {
    pub context: ChunkContext,
    /// The projected positions of each layer.
    positions: Vec<Tensor>,
    /// The weight of the sub-sampling's linear layer.
    out_weight: Tensor,
}

/// What is kept of a recording between its chunks.
#[derive(Clone, Debug)]
pub struct EncoderCache {
    /// The last feature frames, (9, mels) row-major; none before the first chunk.
    features: Option<Vec<f32>>,
    layers: Vec<LayerCache>,
}

impl EncoderCache {
    /// Feature frames that make the next chunk.
    pub fn next_chunk(&self, context: ChunkContext) -> usize {
        let first = usize::from(self.features.is_none());
        EncoderConfig::SUBSAMPLING * context.size() - (EncoderConfig::SUBSAMPLING - 1) * first
    }

    #[cfg(test)]
    pub fn layers(&self) -> &[LayerCache] {
        &self.layers
    }
}

impl Encoder {
    /// Prepares steps in a context.
    ///
    /// # Errors
    /// Where the encoder is not cache-aware, or was not trained with this context.
    pub fn chunk_plan(&self, parameters: &Parameters, context: ChunkContext) -> Result<ChunkPlan> {
        let config = &self.config;
        if !config.is_cache_aware() {
            return Err(Error::Input("the encoder is not cache-aware".into()));
        }
        config.check_context(context)?;
        let layers = self.layers.iter();
        let positions = layers.map(|layer| layer.chunk_positions(parameters, &self.table, context));
        Ok(ChunkPlan {
            context,
            positions: positions.collect::<Result<_>>()?,
            out_weight: self.subsampling.out_weight(parameters)?,
        })
    }

    /// Before the first chunk of a recording.
    ///
    /// # Errors
    /// If the device fails.
    pub fn cache(&self, parameters: &Parameters) -> Result<EncoderCache> {
        let layers = self.layers.iter().map(|layer| layer.cache(parameters));
        Ok(EncoderCache {
            features: None,
            layers: layers.collect::<Result<_>>()?,
        })
    }

    /// Encodes the next chunk of each of several recordings: feature frames, (frames, mels) row-major, not normalised, as many as
    /// [`EncoderCache::next_chunk`] says, or from 1 on at a recording's end. Gives encoded frames, (frames, d), of each. They do
    /// not depend on the other recordings, where an element of a matrix product does not depend on the other rows.
    ///
    /// # Errors
    /// Where a chunk is empty, too long or no whole frames, or the device fails. The caches are then no longer of use.
    pub fn step(
        &self,
        parameters: &Parameters,
        plan: &ChunkPlan,
        chunks: &mut [(&mut EncoderCache, &[f32])],
    ) -> Result<Vec<Tensor>> {
        let bands = self.config.feat_in;
        for (cache, features) in chunks.iter() {
            let most = cache.next_chunk(plan.context) * bands;
            if features.is_empty() || features.len() > most || !features.len().is_multiple_of(bands) {
                return Err(Error::Input(format!(
                    "{} features are not frames of {bands} each, at most {most} in all",
                    features.len()
                )));
            }
        }
        if chunks.is_empty() {
            return Ok(Vec::new());
        }
        let (mut x, counts) = self.subsample_chunks(parameters, plan, chunks)?;
        let scale = self.input_scale();
        x = drop_scaled(&x, scale, None)?;
        for (number, (layer, positions)) in self.layers.iter().zip(&plan.positions).enumerate() {
            let mut caches: Vec<_> = chunks.iter_mut().map(|(cache, _)| &mut cache.layers[number]).collect();
            x = layer.step(parameters, &x, &counts, &mut caches, (positions, plan.context))?;
        }
        let mut first = 0;
        let parts = counts.into_iter().map(|count| {
            first += count;
            Ok(x.narrow(0, first - count, count)?)
        });
        parts.collect()
    }

    /// The frames of all chunks after sub-sampling behind each other, (rows, d), and how many rows each has.
    fn subsample_chunks(
        &self,
        parameters: &Parameters,
        plan: &ChunkPlan,
        chunks: &mut [(&mut EncoderCache, &[f32])],
    ) -> Result<(Tensor, Vec<usize>)> {
        let bands = self.config.feat_in;
        let inputs: Vec<(Vec<f32>, usize)> = chunks
            .iter_mut()
            .map(|(cache, features)| {
                let (mut all, dropped) = match cache.features.take() {
                    Some(before) => (before, DROPPED),
                    None => (Vec::new(), 0),
                };
                all.extend_from_slice(features);
                // The last frames, behind zeros where there are not so many.
                let mut kept = vec![0.0; (FEATURES_BEFORE * bands).saturating_sub(all.len())];
                kept.extend_from_slice(&all[all.len().saturating_sub(FEATURES_BEFORE * bands)..]);
                cache.features = Some(kept);
                (all, dropped)
            })
            .collect();
        let lengths: Vec<usize> = inputs.iter().map(|(features, _)| features.len() / bands).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut by_band = vec![0.0f32; inputs.len() * bands * longest];
        for ((features, _), to) in inputs.iter().zip(by_band.chunks_exact_mut(bands * longest)) {
            for (t, frame) in features.chunks_exact(bands).enumerate() {
                for (band, value) in frame.iter().enumerate() {
                    to[band * longest + t] = *value;
                }
            }
        }
        let tensor = Tensor::from_vec(by_band, (inputs.len(), bands, longest), &Device::Cpu)?;
        let tensor = tensor.to_dtype(parameters.dtype())?.to_device(parameters.device())?;
        let (x, time, valid, _) =
            (self.subsampling).forward_with(parameters, &tensor, &lengths, Some(&plan.out_weight))?;
        let (mut parts, mut counts) = (Vec::with_capacity(inputs.len()), Vec::with_capacity(inputs.len()));
        for (number, (_, dropped)) in inputs.iter().enumerate() {
            let count = valid[number].saturating_sub(*dropped);
            parts.push(x.narrow(0, number * time + dropped, count)?);
            counts.push(count);
        }
        Ok((Tensor::cat(&parts, 0)?, counts))
    }
}
