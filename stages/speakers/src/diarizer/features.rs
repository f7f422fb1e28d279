//! Features of the chunks of a recording. Chunks overlap by nine tenths and share a frame grid, so each frame is
//! computed once.

use std::collections::VecDeque;
use std::ops::Range;

use rayon::prelude::*;

use super::{CHUNK, CHUNK_STEP};
use crate::error::Result;
use crate::fbank::{BANDS, FRAME, Fbank, SHIFT, subtract_mean};

/// Frames from the start of one chunk to that of the next, and the samples they are computed of.
const STEP_FRAMES: usize = CHUNK_STEP / SHIFT;
const STEP_SAMPLES: usize = (STEP_FRAMES - 1) * SHIFT + FRAME;
/// Frames of a chunk.
const CHUNK_FRAMES: usize = 1 + (CHUNK - FRAME) / SHIFT;
/// Steps of a chunk.
const STEPS: usize = CHUNK_FRAMES.div_ceil(STEP_FRAMES);

/// The features that the current chunks need.
pub struct ChunkFeatures<'a> {
    fbank: Fbank,
    samples: &'a [f32],
    /// Features of steps: [`STEP_FRAMES`] frames each, from the step `first` on.
    steps: VecDeque<Vec<f32>>,
    first: usize,
}

impl<'a> ChunkFeatures<'a> {
    pub fn new(fbank: Fbank, samples: &'a [f32]) -> Self {
        Self {
            fbank,
            samples,
            steps: VecDeque::new(),
            first: 0,
        }
    }

    /// Computes the frames that these chunks need, and drops those before them. Chunks must come in order.
    pub fn load(&mut self, chunks: Range<usize>) -> Result<()> {
        self.steps.drain(..self.steps.len().min(chunks.start - self.first));
        self.first = chunks.start;
        let missing = self.first + self.steps.len()..chunks.end + STEPS - 1;
        let of_step = |step: usize| {
            let from = (step * CHUNK_STEP).min(self.samples.len());
            let given = &self.samples[from..self.samples.len().min(from + STEP_SAMPLES)];
            match given.len() == STEP_SAMPLES {
                true => self.fbank.compute(given),
                // Zeros follow the end.
                false => {
                    let mut filled = given.to_vec();
                    filled.resize(STEP_SAMPLES, 0.0);
                    self.fbank.compute(&filled)
                }
            }
        };
        let found = missing.into_par_iter().map(of_step).collect::<Result<Vec<_>>>()?;
        self.steps.extend(found);
        Ok(())
    }

    /// Features (frames, [`BANDS`]) of a loaded chunk, less their mean.
    pub fn of(&self, chunk: usize) -> Vec<f32> {
        let steps = self.steps.iter().skip(chunk - self.first).take(STEPS);
        let mut features: Vec<f32> = steps.flatten().copied().collect();
        features.truncate(CHUNK_FRAMES * BANDS);
        subtract_mean(&mut features);
        features
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_have_the_features_they_have_alone() {
        // The last chunk is incomplete.
        let samples: Vec<f32> = (0..12 * CHUNK_STEP + 5_001)
            .map(|at| (at as f32 * 0.05).sin() * (at as f32 * 0.000_3).cos() + (at % 97) as f32 * 1e-3)
            .collect();
        for fbank in [Fbank::three_d_speaker(), Fbank::wespeaker()] {
            let mut features = ChunkFeatures::new(fbank.clone(), &samples);
            for chunks in [0..1, 1..3, 3..4] {
                features.load(chunks.clone()).unwrap();
                assert_eq!(features.steps.len(), chunks.len() + STEPS - 1);
                for chunk in chunks {
                    let start = chunk * CHUNK_STEP;
                    let mut alone = samples[start..samples.len().min(start + CHUNK)].to_vec();
                    alone.resize(CHUNK, 0.0);
                    let mut alone = fbank.compute(&alone).unwrap();
                    subtract_mean(&mut alone);
                    assert!(features.of(chunk) == alone, "{chunk}");
                }
            }
        }
    }
}
