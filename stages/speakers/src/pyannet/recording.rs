//! A recording in chunks that overlap. The filters of SincNet, half of the computation of a chunk, are applied once to
//! each sample: they are linear, and the instance norm of a chunk's waveform before them is a factor and an offset.

use std::collections::VecDeque;
use std::ops::Range;

use flow_kernels::threads::install;
use rayon::prelude::*;

use super::sinc::{FILTERS, STRIDE, TAPS, frames, sum};
use super::{BATCH, PyanNet, RECEPTIVE_FIELD, check_samples};
use crate::error::{Error, Result};

/// Most samples of a chunk: 17 minutes.
const MOST_SAMPLES: usize = 1 << 24;
/// Most chunks that are computed together, whatever the number of threads.
const MOST_TOGETHER: usize = 192;

/// The network's output for each chunk of a recording, in order: (frames, classes) as [`PyanNet::log_probabilities`]
/// gives it. The results are equal to the bit for any number of threads; they differ from those of single chunks by
/// rounding. A few chunks per thread are computed together, and only their data is kept.
pub struct RecordingChunks<'a> {
    network: &'a PyanNet,
    samples: &'a [f32],
    chunk: usize,
    step: usize,
    chunks: usize,
    /// The first chunk that is not computed yet, and results before it that were not taken yet.
    next: usize,
    ready: VecDeque<Vec<f32>>,
    /// Mean of the recording, which is subtracted before the filters to reduce rounding errors.
    level: f32,
    /// Outputs of the filters, from a frame of the recording on: (frames, [`FILTERS`]).
    filtered: Vec<f32>,
    first_frame: usize,
}

impl PyanNet {
    /// A recording (mono, 16 kHz, in [-1, 1]) in chunks of `chunk` samples each `step` samples. As pyannote cuts it: a
    /// recording that is shorter than a chunk, and what is left behind the last whole chunk, become one more chunk that is
    /// filled up with zeros; an empty recording has no chunk.
    ///
    /// # Errors
    /// If a chunk is shorter than [`RECEPTIVE_FIELD`] or longer than 2^24 samples, `step` is 0, or a sample is not finite or
    /// larger than [`MAX_SAMPLE`](super::MAX_SAMPLE).
    pub fn recording<'a>(&'a self, samples: &'a [f32], chunk: usize, step: usize) -> Result<RecordingChunks<'a>> {
        if !(RECEPTIVE_FIELD..=MOST_SAMPLES).contains(&chunk) || step == 0 {
            return Err(Error::Input(format!(
                "chunks of {chunk} samples each {step}; a chunk has {RECEPTIVE_FIELD} to {MOST_SAMPLES} samples, a step at \
                 least one"
            )));
        }
        check_samples(samples)?;
        let chunks = match samples.len().checked_sub(chunk) {
            Some(rest) => rest / step + 1 + usize::from(!rest.is_multiple_of(step)),
            None => usize::from(!samples.is_empty()),
        };
        let level = sum(samples, |x| x) / samples.len().max(1) as f64;
        Ok(RecordingChunks {
            network: self,
            samples,
            chunk,
            step,
            chunks,
            next: 0,
            ready: VecDeque::new(),
            level: level as f32,
            filtered: Vec::new(),
            first_frame: 0,
        })
    }
}

impl RecordingChunks<'_> {
    /// Samples of a chunk that the recording has; the others are zeros.
    fn samples_of(&self, chunk: usize) -> &[f32] {
        let start = (chunk * self.step).min(self.samples.len());
        &self.samples[start..self.samples.len().min(start + self.chunk)]
    }

    /// Computes the next chunks.
    fn compute(&mut self) -> Result<()> {
        let together = (BATCH * rayon::current_num_threads()).min(MOST_TOGETHER);
        let chunks = self.next..self.chunks.min(self.next + together);
        let features = if self.step.is_multiple_of(STRIDE) && self.step < self.chunk {
            self.filter(&chunks)?;
            let of_chunks = chunks.clone().into_par_iter().map(|chunk| self.features(chunk));
            of_chunks.collect::<Result<Vec<_>>>()?
        } else {
            let of_chunks = chunks.clone().into_par_iter().map(|chunk| {
                let mut samples = self.samples_of(chunk).to_vec();
                samples.resize(self.chunk, 0.0);
                self.network.sincnet.features(&samples)
            });
            of_chunks.collect::<Result<Vec<_>>>()?
        };
        self.ready.extend(self.network.after_sincnet(&features)?);
        self.next = chunks.end;
        Ok(())
    }

    /// Computes the filters' frames for these chunks, and drops those before them.
    fn filter(&mut self, chunks: &Range<usize>) -> Result<()> {
        let first = chunks.start * self.step / STRIDE;
        let end = (chunks.end - 1) * self.step / STRIDE + frames(self.chunk);
        self.filtered.drain(..(first - self.first_frame) * FILTERS);
        self.first_frame = first;
        let from = first + self.filtered.len() / FILTERS;
        let level = self.level;
        let given = self.samples.get(from * STRIDE..).unwrap_or_default();
        let mut wave = Vec::with_capacity((end - from - 1) * STRIDE + TAPS);
        wave.extend(given.iter().take(wave.capacity()).map(|sample| sample - level));
        wave.resize((end - from - 1) * STRIDE + TAPS, -level);
        self.filtered.extend(self.network.sincnet.filters.apply(&wave)?);
        Ok(())
    }

    /// SincNet's output for a chunk whose frames were computed.
    fn features(&self, chunk: usize) -> Result<Vec<f32>> {
        let sincnet = &self.network.sincnet;
        let samples = self.samples_of(chunk);
        let norm = sincnet.wave_norm(samples, self.chunk - samples.len());
        let offset = norm.bias - (norm.mean - f64::from(self.level)) * norm.gain;
        let mut offsets = [0.0; FILTERS];
        for (of_filter, &sum) in offsets.iter_mut().zip(sincnet.filters.sums()) {
            *of_filter = (offset * f64::from(sum)) as f32;
        }
        let first = chunk * self.step / STRIDE - self.first_frame;
        let filtered = &self.filtered[first * FILTERS..(first + frames(self.chunk)) * FILTERS];
        sincnet.after_filters(filtered, norm.gain as f32, &offsets)
    }
}

impl Iterator for RecordingChunks<'_> {
    type Item = Result<Vec<f32>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ready.is_empty()
            && self.next < self.chunks
            && let Err(error) = install(|| self.compute())
        {
            // The iterator ends after an error.
            self.next = self.chunks;
            return Some(Err(error));
        }
        self.ready.pop_front().map(Ok)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.chunks - self.next + self.ready.len();
        (left, Some(left))
    }
}

impl ExactSizeIterator for RecordingChunks<'_> {}
