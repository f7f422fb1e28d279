//! WeSpeaker's ResNet34 as pyannote runs it (`WeSpeakerResNet34`): one pass over a chunk, then embeddings of several of
//! its speakers, whose frames are given by masks.
//!
//! Weights are not bundled: those of `pyannote/wespeaker-voxceleb-resnet34-LM` are under CC-BY-4.0.

use flow_kernels::linear::Linear;
use rayon::prelude::*;

use crate::campplus::{check_features, finite};
use crate::error::{Error, Result};
use crate::fbank::BANDS;
use crate::layers::conv2d::{BasicBlock, Conv2d};
use crate::layers::pooling::{nearest, statistics, weighted_statistics};
use crate::layers::{FeatureMap, KeptSpare, Spare};
use crate::weights::Weights;

/// Values of an embedding.
pub const DIMENSION: usize = 256;
/// Least frames of features: the standard deviation needs two frames of an eighth of the rate.
pub const MIN_FRAMES: usize = 9;

/// Blocks of the four layers, and channels.
const BLOCKS: [usize; 4] = [3, 4, 6, 3];
const CHANNELS: [usize; 4] = [32, 64, 128, 256];
/// Values of a frame at the end: channels in bands.
const LAST_BANDS: usize = BANDS / 8;
const FRAME: usize = CHANNELS[3] * LAST_BANDS;

/// The network.
pub struct WeSpeakerResNet34 {
    stem: Conv2d,
    blocks: Vec<BasicBlock>,
    output: Linear,
    spare: KeptSpare,
}

impl WeSpeakerResNet34 {
    /// With the weights of a safetensors file: `conv1`, `bn1`, `layer{1..4}.*` and `seg_1`, all with `resnet.` before them
    /// (pyannote) or none (WeSpeaker). Other tensors, as WeSpeaker's `projection.weight`, are not read.
    ///
    /// # Errors
    /// If a tensor is missing, has another shape, or values that cannot be.
    pub fn from_safetensors(bytes: &[u8]) -> Result<Self> {
        Self::from_weights(&Weights::open(bytes)?)
    }

    /// The same with weights from elsewhere.
    pub(crate) fn from_weights(weights: &Weights) -> Result<Self> {
        let prefix = if weights.has("resnet.conv1.weight") {
            "resnet."
        } else {
            ""
        };
        let name = |name: &str| format!("{prefix}{name}");
        let stem = [name("conv1"), name("bn1")];
        let mut blocks = Vec::new();
        let mut inputs = CHANNELS[0];
        for (layer, (count, outputs)) in BLOCKS.into_iter().zip(CHANNELS).enumerate() {
            for block in 0..count {
                let stride = if layer > 0 && block == 0 { 2 } else { 1 };
                let block = name(&format!("layer{}.{block}", layer + 1));
                blocks.push(BasicBlock::read(weights, &block, [inputs, outputs], [stride, stride])?);
                inputs = outputs;
            }
        }
        let weight = weights.floats(&name("seg_1.weight"), &[DIMENSION, 2 * FRAME])?;
        // The original has channels outside of bands.
        let place = |at: usize| at % CHANNELS[3] * LAST_BANDS + at / CHANNELS[3];
        let weight: Vec<f32> = weight
            .chunks_exact(FRAME)
            .flat_map(|statistic| (0..FRAME).map(move |at| statistic[place(at)]))
            .collect();
        Ok(Self {
            stem: Conv2d::read(weights, [&stem[0], &stem[1]], [1, CHANNELS[0]], 3, [1, 1])?,
            blocks,
            output: Linear::new(&weight, weights.floats(&name("seg_1.bias"), &[DIMENSION])?),
            spare: KeptSpare::default(),
        })
    }

    /// The embedding, [`DIMENSION`] values of any length, of all of `features` (frames, 80): those of
    /// [`Fbank::wespeaker`](crate::fbank::Fbank::wespeaker) less their mean.
    ///
    /// # Errors
    /// If there are less than [`MIN_FRAMES`] whole frames, or a value is not finite or larger than
    /// [`MAX_FEATURE`](crate::campplus::MAX_FEATURE).
    pub fn embedding(&self, features: &[f32]) -> Result<Vec<f32>> {
        self.with_frames(features, |frames| self.project(&statistics(frames, FRAME)))
    }

    /// An embedding for each mask. Masks have any number of weights from 0 to 1, evenly over the frames; the nearest one counts
    /// for a frame. The network runs once. A mask of zeros gives an embedding that means nothing, of finite numbers.
    ///
    /// # Errors
    /// As [`embedding`](Self::embedding), and if a mask is empty or has another weight.
    pub fn embeddings(&self, features: &[f32], masks: &[&[f32]]) -> Result<Vec<Vec<f32>>> {
        for (number, mask) in masks.iter().enumerate() {
            if mask.is_empty() || mask.iter().any(|weight| !(0.0..=1.0).contains(weight)) {
                return Err(Error::Input(format!(
                    "mask {number} is empty, or has weights that are not from 0 to 1"
                )));
            }
        }
        self.with_frames(features, |frames| {
            let count = frames.len() / FRAME;
            masks
                .par_iter()
                .map(|mask| self.project(&weighted_statistics(frames, FRAME, &nearest(mask, count))))
                .collect()
        })
    }

    /// Gives `pool` its input: (frames / 8 rounded up, 10 bands, 256 channels).
    fn with_frames<R>(&self, features: &[f32], pool: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
        check_features(features, MIN_FRAMES)?;
        self.spare.lend(|spare| {
            let mut x = self.stem(features, spare)?;
            for block in &self.blocks {
                let next = block.apply(&x, spare)?;
                spare.give(std::mem::replace(&mut x, next));
            }
            let result = pool(&x.values);
            spare.give(x);
            result
        })
    }

    fn stem(&self, features: &[f32], spare: &mut Spare) -> Result<FeatureMap> {
        let x = FeatureMap::new(features.len() / BANDS, BANDS, 1, features);
        self.stem.apply(&x, None, true, spare)
    }

    fn project(&self, statistics: &[f32]) -> Result<Vec<f32>> {
        let mut embedding = vec![0.0; DIMENSION];
        self.output.apply(statistics, &mut embedding, 1, &|_| (0, 0));
        finite(embedding)
    }
}

#[cfg(test)]
#[path = "wespeaker_tests.rs"]
mod tests;
