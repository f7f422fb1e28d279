//! CAM++, 3D-Speaker's network of speaker embeddings (Wang and others, "CAM++: A Fast and Efficient Network for Speaker
//! Verification Using Context-Aware Masking", 2023; <https://github.com/modelscope/3D-Speaker>).
//!
//! A convolutional head over time and frequency divides the bands by eight; a time-delay layer halves the frames; three
//! blocks of densely connected layers follow, each of which masks what it adds by the context; mean and standard
//! deviation over time; a linear layer.

mod dense;

use flow_kernels::Aligned;
use flow_kernels::linear::Linear;
use flow_kernels::product::PackedRhs;
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::fbank::BANDS;
use crate::layers::conv2d::{BasicBlock, Conv2d};
use crate::layers::pooling::statistics;
use crate::layers::{BatchNorm, FeatureMap, KeptSpare, Spare, product_error, rounded};
use crate::weights::{Weights, unpack};
use dense::{DenseBlock, biased_relu};

/// Values of an embedding.
pub const DIMENSION: usize = 192;
/// Least frames of features: the standard deviation needs two frames of half the rate. An embedding of less than about
/// 30 frames is unreliable.
pub const MIN_FRAMES: usize = 3;
/// Largest size of a feature. They are logarithms of energies.
pub const MAX_FEATURE: f32 = 1e3;

/// Channels of the head, and its bands at the end.
const CHANNELS: usize = 32;
const HEAD_BANDS: usize = BANDS / 8;
/// Channels of a frame of the head.
const HEAD: usize = CHANNELS * HEAD_BANDS;
/// The layer that halves the frames.
const TDNN: usize = 128;
const TDNN_TAPS: usize = 5;
const TDNN_STRIDE: usize = 2;
/// Layers and dilation of the dense blocks.
const BLOCKS: [(usize, usize); 3] = [(12, 1), (24, 2), (16, 2)];

/// The weights that the crate carries, rounded to f16; `THIRD_PARTY.md` says where they are from.
const BUNDLED: &[u8] = include_bytes!("../../weights/campplus-zh-en-common.f16.safetensors.zst");

/// The network.
pub struct CamPlusPlus {
    stem: Conv2d,
    residual: Vec<BasicBlock>,
    last: Conv2d,
    tdnn: PackedRhs,
    tdnn_bias: Vec<f32>,
    blocks: Vec<DenseBlock>,
    output: Linear,
    spare: KeptSpare,
}

impl CamPlusPlus {
    /// With the bundled weights (`iic/speech_campplus_sv_zh_en_16k-common_advanced` of ModelScope).
    pub fn bundled() -> Result<Self> {
        Self::from_safetensors(&unpack(BUNDLED, 2)?)
    }

    /// With the weights of a safetensors file under the names of 3D-Speaker's class, `head.*` and `xvector.*`.
    ///
    /// # Errors
    /// If a tensor is missing, has another shape, or values that cannot be.
    pub fn from_safetensors(bytes: &[u8]) -> Result<Self> {
        let weights = &Weights::open(bytes)?;
        let head = |convolution: &str, norm: &str, inputs: usize, strides: [usize; 2]| {
            let names = [convolution, norm].map(|name| format!("head.{name}"));
            Conv2d::read(weights, [&names[0], &names[1]], [inputs, CHANNELS], 3, strides)
        };
        let residual = [(1, 0, 2), (1, 1, 1), (2, 0, 2), (2, 1, 1)]
            .into_iter()
            .map(|(layer, block, stride)| {
                // Strides are those of bands. A block with a stride of one has an identity shortcut.
                let name = format!("head.layer{layer}.{block}");
                BasicBlock::read(weights, &name, [CHANNELS, CHANNELS], [stride, 1])
            });
        let (tdnn, tdnn_bias) = read_tdnn(weights)?;
        let mut blocks = Vec::with_capacity(BLOCKS.len());
        let mut inputs = TDNN;
        for (block, (layers, dilation)) in BLOCKS.into_iter().enumerate() {
            let block = DenseBlock::read(weights, block + 1, inputs, layers, dilation, block + 1 == BLOCKS.len())?;
            inputs = block.outputs();
            blocks.push(block);
        }
        let name = "xvector.dense.linear.weight";
        let dense = weights.floats(name, &[DIMENSION, 2 * inputs, 1])?;
        let norm = BatchNorm::read(weights, "xvector.dense.nonlinear.batchnorm", DIMENSION, false)?;
        Ok(Self {
            stem: head("conv1", "bn1", 1, [1, 1])?,
            residual: residual.collect::<Result<_>>()?,
            last: head("conv2", "bn2", CHANNELS, [2, 1])?,
            tdnn,
            tdnn_bias,
            blocks,
            output: Linear::new(&rounded(&norm.fold(&dense), name)?, rounded(&norm.shift, name)?),
            spare: KeptSpare::default(),
        })
    }

    /// The embedding, [`DIMENSION`] values of any length, of `features` (frames, 80): those of
    /// [`Fbank::three_d_speaker`](crate::fbank::Fbank::three_d_speaker) less their mean.
    ///
    /// # Errors
    /// If there are less than [`MIN_FRAMES`] whole frames, or a value is not finite or larger than [`MAX_FEATURE`].
    pub fn embedding(&self, features: &[f32]) -> Result<Vec<f32>> {
        check_features(features, MIN_FRAMES)?;
        let statistics = self.spare.lend(|spare| {
            let head = self.head(features, spare)?;
            let mut hidden = self.tdnn(&head, spare)?;
            spare.give(head);
            let mut channels = TDNN;
            for block in &self.blocks {
                let dense = block.dense(&hidden, spare)?;
                spare.give_values(hidden);
                hidden = block.transit(&dense, spare)?;
                spare.give_values(dense);
                channels = block.outputs();
            }
            let statistics = statistics(&hidden, channels);
            spare.give_values(hidden);
            Ok(statistics)
        })?;
        let mut embedding = vec![0.0; DIMENSION];
        self.output.apply(&statistics, &mut embedding, 1, &|_| (0, 0));
        finite(embedding)
    }

    /// [`embedding`](Self::embedding) of each, on all threads. The values are equal to the bit to those of single
    /// calls.
    pub fn embeddings(&self, features: &[Vec<f32>]) -> Vec<Result<Vec<f32>>> {
        features.par_iter().map(|features| self.embedding(features)).collect()
    }

    /// (frames, 10 bands, 32 channels).
    fn head(&self, features: &[f32], spare: &mut Spare) -> Result<FeatureMap> {
        let x = FeatureMap::new(features.len() / BANDS, BANDS, 1, features);
        let mut x = self.stem.apply(&x, None, true, spare)?;
        for block in &self.residual {
            let next = block.apply(&x, spare)?;
            spare.give(std::mem::replace(&mut x, next));
        }
        let last = self.last.apply(&x, None, true, spare);
        spare.give(x);
        last
    }

    /// (frames / 2 rounded up, 128) of what the head gives.
    fn tdnn(&self, head: &FeatureMap, spare: &mut Spare) -> Result<Aligned<f32>> {
        let frames = head.frames.div_ceil(TDNN_STRIDE);
        let mut rows = spare.take_values(frames * TDNN);
        let padding = TDNN_TAPS / 2;
        // Results whose taps are all frames of the head.
        let inner = 1..(head.frames.saturating_sub(padding)).div_ceil(TDNN_STRIDE).max(1);
        let product = |values: &[f32], rows: &mut [f32]| {
            let count = rows.len() / TDNN;
            self.tdnn
                .product_of_rows_into(values, count, TDNN_STRIDE * HEAD, rows)
                .map_err(product_error)
        };
        let mut padded = Vec::new();
        for frame in (0..frames).filter(|frame| !inner.contains(frame)) {
            padded.clear();
            for tap in 0..TDNN_TAPS {
                match (frame * TDNN_STRIDE + tap)
                    .checked_sub(padding)
                    .filter(|from| *from < head.frames)
                {
                    Some(from) => padded.extend_from_slice(&head.values[from * HEAD..][..HEAD]),
                    None => padded.resize(padded.len() + HEAD, 0.0),
                }
            }
            product(&padded, &mut rows[frame * TDNN..][..TDNN])?;
        }
        if !inner.is_empty() {
            let first = &head.values[(inner.start * TDNN_STRIDE - padding) * HEAD..];
            product(first, &mut rows[inner.start * TDNN..inner.end * TDNN])?;
        }
        biased_relu(&mut rows, &self.tdnn_bias);
        Ok(rows)
    }
}

/// The weight of the layer that halves the frames, and its bias. A row of its input is five frames of the head.
fn read_tdnn(weights: &Weights) -> Result<(PackedRhs, Vec<f32>)> {
    let name = "xvector.tdnn.linear.weight";
    let weight = weights.floats(name, &[TDNN, HEAD, TDNN_TAPS])?;
    let norm = BatchNorm::read(weights, "xvector.tdnn.nonlinear.batchnorm", TDNN, true)?;
    let folded = rounded(&norm.fold(&weight), name)?;
    let mut rows = Vec::with_capacity(folded.len());
    for weight in folded.chunks_exact(HEAD * TDNN_TAPS) {
        for tap in 0..TDNN_TAPS {
            for band in 0..HEAD_BANDS {
                // The original has channels outside of bands.
                let channel = |channel: usize| weight[(channel * HEAD_BANDS + band) * TDNN_TAPS + tap];
                rows.extend((0..CHANNELS).map(channel));
            }
        }
    }
    let rows = PackedRhs::from_weight(&rows, TDNN).map_err(product_error)?;
    Ok((rows, rounded(&norm.shift, name)?))
}

/// Whether `features` are whole frames, `least` of them or more, of finite values in range.
pub(crate) fn check_features(features: &[f32], least: usize) -> Result<()> {
    let frames = features.len() / BANDS;
    if !features.len().is_multiple_of(BANDS) || frames < least {
        return Err(Error::Input(format!(
            "{} features are not at least {least} frames of {BANDS}",
            features.len()
        )));
    }
    match features
        .iter()
        .position(|value| value.is_nan() || value.abs() > MAX_FEATURE)
    {
        Some(at) => Err(Error::Input(format!(
            "feature {at} is {}; features are finite numbers, at most {MAX_FEATURE} in size",
            features[at]
        ))),
        None => Ok(()),
    }
}

/// `embedding`, if its values are finite; an error otherwise (caused by unusual weights).
pub(crate) fn finite(embedding: Vec<f32>) -> Result<Vec<f32>> {
    if embedding.iter().all(|value| value.is_finite()) {
        Ok(embedding)
    } else {
        Err(Error::Input("the embedding has values that are not finite".into()))
    }
}

#[cfg(test)]
mod tests;
