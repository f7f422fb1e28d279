//! PyanNet, pyannote's segmentation network: the activity of a few speakers in each frame of a chunk of some seconds.
//!
//! SincNet over the waveform, bidirectional LSTM layers, two linear layers with leaky ReLU and a classifier. For
//! pyannote/segmentation-3.0 (MIT), the source of the bundled weights, and other networks of this architecture
//! (`pyannote.audio.models.segmentation.PyanNet` with its default sizes and the classes of that one).

use std::fmt;

use flow_kernels::product::PackedRhs;
use flow_kernels::threads::install;
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::weights::{Weights, unpack};

mod lstm;
mod recording;
mod sinc;
mod sincnet;
#[cfg(test)]
mod tests;

pub use recording::RecordingChunks;

use lstm::{Lstm, WIDTH};
use sincnet::{CHANNELS, SincNet, leaky_relu};

/// Sample rate of the input, in Hz.
pub const SAMPLE_RATE: u32 = 16_000;
/// Samples that a frame is computed from, and from the start of one frame to that of the next; the first begins at 0.
pub const RECEPTIVE_FIELD: usize = 991;
pub const FRAME_STEP: usize = 270;
/// Largest size of a sample. Speech is in [-1, 1].
pub const MAX_SAMPLE: f32 = 1e9;

/// Classes of a frame: the sets of at most two of three speakers, as [`Powerset`](crate::powerset::Powerset) orders them.
pub const CLASSES: usize = 7;

/// Values of the linear layers.
const LINEAR: usize = 128;
/// Chunks that go through the LSTM together: its weights are read once for all of them.
const BATCH: usize = 24;

/// The weights that the crate carries; `THIRD_PARTY.md` says where they are from.
const BUNDLED: &[u8] = include_bytes!("../../weights/segmentation-3.0.safetensors.zst");

/// The network.
pub struct PyanNet {
    sincnet: SincNet,
    lstm: Lstm,
    linear: [Linear; 2],
    classifier: Linear,
}

impl fmt::Debug for PyanNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PyanNet")
            .field("lstm_layers", &self.lstm.layers())
            .finish_non_exhaustive()
    }
}

impl PyanNet {
    /// With the bundled weights, of pyannote/segmentation-3.0: chunks of 10 s, three speakers, seven sets.
    pub fn bundled() -> Result<Self> {
        Self::from_safetensors(&unpack(BUNDLED, 4)?)
    }

    /// With the weights of a safetensors file, under the names of pyannote: `sincnet.wav_norm1d`,
    /// `sincnet.conv1d.0.filterbank.{low_hz_,band_hz_}` (40, 1), `sincnet.conv1d.{1,2}`, `sincnet.norm1d.{0,1,2}`, `lstm` of
    /// 1 to 16 bidirectional layers of 128, `linear.{0,1}` of 128 and `classifier` of [`CLASSES`].
    ///
    /// # Errors
    /// [`Error::Weights`] if one is missing or of another shape.
    pub fn from_safetensors(bytes: &[u8]) -> Result<Self> {
        Self::from_weights(&Weights::open(bytes)?)
    }

    /// The same with weights from elsewhere.
    pub(crate) fn from_weights(weights: &Weights) -> Result<Self> {
        let linear = |name: &str, inputs: usize, outputs: usize| -> Result<Linear> {
            let weight = weights.floats(&format!("{name}.weight"), &[outputs, inputs])?;
            Ok(Linear {
                inputs,
                packed: PackedRhs::from_weight(&weight, outputs).map_err(kernel_error)?,
                bias: weights.floats(&format!("{name}.bias"), &[outputs])?,
            })
        };
        Ok(Self {
            sincnet: SincNet::new(weights)?,
            lstm: Lstm::new(weights, CHANNELS)?,
            linear: [linear("linear.0", WIDTH, LINEAR)?, linear("linear.1", LINEAR, LINEAR)?],
            classifier: linear("classifier", LINEAR, CLASSES)?,
        })
    }

    /// Frames of a chunk of this many samples: 589 of 10 s, 0 below [`RECEPTIVE_FIELD`].
    pub fn frames(&self, samples: usize) -> usize {
        sincnet::output_frames(samples)
    }

    /// Of each chunk (mono, 16 kHz, in [-1, 1], any length from [`RECEPTIVE_FIELD`]) the logarithms of probabilities, by
    /// frame and class: (frames, [`CLASSES`]), row-major. The result of a chunk is equal to the bit whether computed
    /// alone or with others, for any number of threads.
    ///
    /// # Errors
    /// If a chunk is too short, or has a sample that is not finite or larger than [`MAX_SAMPLE`].
    pub fn log_probabilities(&self, chunks: &[&[f32]]) -> Result<Vec<Vec<f32>>> {
        for (number, chunk) in chunks.iter().enumerate() {
            if self.frames(chunk.len()) == 0 {
                let samples = chunk.len();
                return Err(Error::Input(format!(
                    "chunk {number} has {samples} samples; a chunk has at least {RECEPTIVE_FIELD}"
                )));
            }
            check_samples(chunk)?;
        }
        install(|| {
            let features = chunks.par_iter().map(|chunk| self.sincnet.features(chunk));
            self.after_sincnet(&features.collect::<Result<Vec<_>>>()?)
        })
    }

    /// The layers after SincNet, whose output for each chunk is (frames, [`CHANNELS`]).
    fn after_sincnet(&self, features: &[Vec<f32>]) -> Result<Vec<Vec<f32>>> {
        let mut order: Vec<usize> = (0..features.len()).collect();
        order.sort_by_key(|&chunk| features[chunk].len());
        let together = features.len().div_ceil(rayon::current_num_threads()).clamp(1, BATCH);
        // Chunks of one length.
        let groups: Vec<&[usize]> = order
            .chunk_by(|&a, &b| features[a].len() == features[b].len())
            .flat_map(|chunks| chunks.chunks(together))
            .collect();
        let of_groups = groups.par_iter().map(|group| {
            let features: Vec<&[f32]> = group.iter().map(|&chunk| &features[chunk][..]).collect();
            self.of_one_length(&features)
        });
        let mut results = vec![Vec::new(); features.len()];
        for (group, found) in groups.iter().zip(of_groups.collect::<Result<Vec<_>>>()?) {
            for (&chunk, found) in group.iter().zip(found) {
                results[chunk] = found;
            }
        }
        Ok(results)
    }

    /// [`after_sincnet`](Self::after_sincnet) for chunks of as many frames.
    fn of_one_length(&self, features: &[&[f32]]) -> Result<Vec<Vec<f32>>> {
        let chunks = features.len();
        let frames = features[0].len() / CHANNELS;
        let mut x = Vec::with_capacity(frames * chunks * CHANNELS);
        for frame in 0..frames {
            for features in features {
                x.extend_from_slice(&features[frame * CHANNELS..(frame + 1) * CHANNELS]);
            }
        }
        let mut x = self.lstm.apply(x, chunks)?;
        for linear in &self.linear {
            x = linear.apply(&x)?;
            x.iter_mut().for_each(|value| *value = leaky_relu(*value));
        }
        let mut scores = self.classifier.apply(&x)?;
        log_softmax(&mut scores);
        if scores.iter().any(|score| !score.is_finite()) {
            return Err(Error::Weights(
                "the network's results are not finite: its weights are too large".into(),
            ));
        }
        let of_chunk = |chunk: usize| {
            let rows = scores.chunks_exact(CLASSES).skip(chunk).step_by(chunks);
            rows.flatten().copied().collect()
        };
        Ok((0..chunks).map(of_chunk).collect())
    }
}

/// Log-softmax of the classifier's outputs.
fn log_softmax(scores: &mut [f32]) {
    for frame in scores.chunks_exact_mut(CLASSES) {
        let largest = frame.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = frame.iter().map(|score| (score - largest).exp()).sum();
        let logarithm = sum.ln();
        frame.iter_mut().for_each(|score| *score = *score - largest - logarithm);
    }
}

/// A linear layer.
struct Linear {
    inputs: usize,
    packed: PackedRhs,
    bias: Vec<f32>,
}

impl Linear {
    fn apply(&self, x: &[f32]) -> Result<Vec<f32>> {
        let rows = x.len() / self.inputs;
        let mut y = self
            .packed
            .product_of_rows(x, rows, self.inputs)
            .map_err(kernel_error)?;
        for row in y.chunks_exact_mut(self.bias.len()) {
            row.iter_mut().zip(&self.bias).for_each(|(value, bias)| *value += bias);
        }
        Ok(y)
    }
}

fn check_samples(samples: &[f32]) -> Result<()> {
    match samples
        .iter()
        .position(|sample| sample.is_nan() || sample.abs() > MAX_SAMPLE)
    {
        None => Ok(()),
        Some(at) => Err(Error::Sample {
            at: at as u64,
            value: samples[at],
            limit: MAX_SAMPLE,
        }),
    }
}

fn kernel_error(error: flow_kernels::Error) -> Error {
    Error::Input(error.to_string())
}
