//! A cache-aware encoder over recordings that come in chunks: each frame goes through the encoder once, and what later frames need
//! of it is kept in bounded memory. The chunks are NeMo's:
//!
//! - The first step takes `1 + 8 right` feature frames, each later one `8 + 8 right`; each gives `right + 1` encoded frames.
//! - Sub-sampling takes, of each later step, the nine feature frames before it once more, and its first two frames are dropped.
//!   Where there are not so many (`right` 0, step 1) the first ones are zeros, as in NeMo. There, and in what follows from it, a
//!   stream differs from the whole recording encoded at once; everywhere else the two are equal.
//! - Each layer keeps keys and values of `left` rows, or of the last 10,000 ones where `left` has no limit, and `kernel - 1` rows for
//!   its convolution. Past 10,000 rows a chunk of several frames sees less than in the whole recording, which has a limit of 10,000
//!   chunks there. (NeMo's chunks are moreover shifted there, unless their length divides 10,000.)

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Tensor};
use flow_kernels::elementwise::drop_scaled;

use super::Encoder;
use crate::config::{ChunkContext, EncoderConfig};
use crate::{Error, Result};
use flow_nn::layers::attention::step::{AttentionCache, ChunkPositions};
use flow_nn::layers::conformer_layer::step::LayerCache;
use flow_nn::parameters::Parameters;

/// Feature frames before a chunk that sub-sampling takes once more, and encoded frames that are dropped for them.
const FEATURES_BEFORE: usize = EncoderConfig::SUBSAMPLING + 1;
const DROPPED: usize = 2;

/// Rows that the first projected positions are for; more are made as recordings get longer.
const FIRST_POSITIONS: usize = 256;

/// What the steps of all recordings in one context have in common.
#[derive(Debug)]
pub struct ChunkPlan {
    pub context: ChunkContext,
    /// Encoded frames of a chunk.
    chunk: usize,
    positions: Mutex<Arc<Positions>>,
    /// The weight of the sub-sampling's linear layer.
    out_weight: Tensor,
}

/// The projected positions of each layer, from those `before` rows before a query to the last row of its chunk.
#[derive(Debug)]
struct Positions {
    before: usize,
    layers: Vec<Tensor>,
}

impl ChunkPlan {
    /// Feature frames that make the next chunk of a recording.
    pub fn next_chunk(&self, cache: &EncoderCache) -> usize {
        let first = usize::from(cache.features.is_none());
        EncoderConfig::SUBSAMPLING * self.chunk - (EncoderConfig::SUBSAMPLING - 1) * first
    }
}

/// What is kept of a recording between its chunks.
#[derive(Debug)]
pub struct EncoderCache {
    /// The last feature frames, (9, mels) row-major; none before the first chunk.
    features: Option<Vec<f32>>,
    layers: Vec<LayerCache>,
    /// Encoded frames so far.
    frames: usize,
}

impl EncoderCache {
    #[cfg(test)]
    pub fn layers(&self) -> &[LayerCache] {
        &self.layers
    }
}

/// Bytes that recordings take in a context, by their shapes in f32: at most what is kept of each, and at most the positions that
/// all of them share.
///
/// # Errors
/// Where a recording is not encoded chunk by chunk in it.
pub fn stream_bytes(config: &EncoderConfig, context: ChunkContext) -> Result<(u64, u64)> {
    let (chunk, most) = (config.check_streamed(context)?, context.rows_kept());
    // The convolution's rows are the end of a tensor with those of the last chunk.
    let rows = 2 * AttentionCache::room(most, chunk) + config.conv_kernel_size - 1 + chunk;
    let of_rows = |rows: usize| (rows * config.n_layers * config.d_model * 4) as u64;
    let features = (FEATURES_BEFORE * config.feat_in * 4) as u64;
    Ok((of_rows(rows) + features, of_rows(most + 2 * chunk - 1)))
}

impl Encoder {
    /// Prepares steps in a context.
    ///
    /// # Errors
    /// Where the encoder is not cache-aware, was not trained with this context, or sees all that follows in it.
    pub fn chunk_plan(&self, parameters: &Parameters, context: ChunkContext) -> Result<ChunkPlan> {
        let chunk = self.config.check_streamed(context)?;
        let first = Self::positions_before(context, chunk, 0);
        Ok(ChunkPlan {
            context,
            chunk,
            positions: Mutex::new(Arc::new(self.positions(parameters, first, chunk)?)),
            out_weight: self.subsampling.out_weight(parameters)?,
        })
    }

    /// How many rows before a query positions are made for where `needed` are needed: not for all at once where the context has no
    /// limit.
    fn positions_before(context: ChunkContext, chunk: usize, needed: usize) -> usize {
        let most = context.rows_kept() + chunk - 1;
        needed.max(FIRST_POSITIONS).next_power_of_two().min(most)
    }

    fn positions(&self, parameters: &Parameters, before: usize, chunk: usize) -> Result<Positions> {
        let layers = self.layers.iter();
        let layers = layers.map(|layer| layer.chunk_positions(parameters, &self.table, before, chunk - 1));
        Ok(Positions {
            before,
            layers: layers.collect::<Result<_>>()?,
        })
    }

    /// The positions of a plan for `needed` rows before a query. Two threads may compute the same: with the lock held, a thread
    /// that computes could take up work that waits for it.
    fn positions_of(&self, parameters: &Parameters, plan: &ChunkPlan, needed: usize) -> Result<Arc<Positions>> {
        let current = || plan.positions.lock().unwrap_or_else(PoisonError::into_inner);
        let found = Arc::clone(&current());
        if found.before >= needed {
            return Ok(found);
        }
        let before = Self::positions_before(plan.context, plan.chunk, needed);
        let made = Arc::new(self.positions(parameters, before, plan.chunk)?);
        let mut current = current();
        if current.before < before {
            *current = Arc::clone(&made);
        }
        Ok(made)
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
            frames: 0,
        })
    }

    /// Encodes the next chunk of each of several recordings: feature frames, (frames, mels) row-major, not normalised, as many as
    /// [`ChunkPlan::next_chunk`] says, or from 1 on at a recording's end. Gives encoded frames, (frames, d), of each. They do
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
            let most = plan.next_chunk(cache) * bands;
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
        let most = plan.context.rows_kept();
        let rows = chunks
            .iter()
            .zip(&counts)
            .map(|((cache, _), count)| cache.frames.min(most) + count);
        let positions = self.positions_of(parameters, plan, rows.max().unwrap_or(1) - 1)?;
        for (number, (layer, projected)) in self.layers.iter().zip(&positions.layers).enumerate() {
            let mut caches: Vec<_> = chunks.iter_mut().map(|(cache, _)| &mut cache.layers[number]).collect();
            let positions = ChunkPositions {
                projected,
                before: positions.before,
                most,
            };
            x = layer.step(parameters, &x, &counts, &mut caches, positions)?;
        }
        for ((cache, _), count) in chunks.iter_mut().zip(&counts) {
            cache.frames += count;
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
