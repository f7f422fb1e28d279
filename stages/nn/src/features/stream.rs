//! Features of a signal that comes in blocks, so that no more than a window of it is in memory. Normalisation needs the
//! mean and the standard deviation of the whole signal, each of which takes one pass over it. The sums have the order
//! of [`LogMel::compute`], so that features are equal to the bit.

use super::{DEVIATION_GUARD, LogMel, Spectrum, band_log_mel};
use crate::error::{Error, Result};

/// Log-mel frames, not normalised, of a signal whose samples come in blocks.
pub struct LogMelStream {
    front_end: LogMel,
    spectrum: Spectrum,
    /// Samples after pre-emphasis that a frame still needs, and the index of the first of them.
    held: Vec<f32>,
    from: usize,
    /// The sample before the next one.
    before: Option<f32>,
    /// The next frame.
    next: usize,
}

impl LogMelStream {
    pub fn new(front_end: &LogMel) -> Self {
        LogMelStream {
            front_end: front_end.clone(),
            spectrum: Spectrum::new(front_end),
            held: Vec::new(),
            from: 0,
            before: None,
            next: 0,
        }
    }

    /// Takes the next samples (mono, in [-1, 1]) and appends the frames that are complete by them to `frames`, (frames,
    /// bands) row-major.
    ///
    /// # Errors
    /// If the Fourier transform fails.
    pub fn feed(&mut self, samples: &[f32], frames: &mut Vec<f32>) -> Result<()> {
        for &sample in samples {
            let emphasised = self
                .before
                .map_or(sample, |before| sample - self.front_end.preemphasis * before);
            self.held.push(emphasised);
            self.before = Some(sample);
        }
        let LogMel {
            hop, n_fft, ref window, ..
        } = self.front_end;
        let end = self.from + self.held.len();
        // A frame has all its samples once the last one of its window is there.
        let reach = window.len() + (n_fft - window.len()) / 2;
        while self.next < self.front_end.frames(end) && self.next * hop + reach <= end + n_fft / 2 {
            self.frame(frames)?;
        }
        let unused = (self.next * hop).saturating_sub(n_fft / 2).saturating_sub(self.from);
        let unused = unused.min(self.held.len());
        // Not after each frame, since the remaining samples are moved.
        if unused > self.held.len() / 2 {
            self.held.drain(..unused);
            self.from += unused;
        }
        Ok(())
    }

    /// Appends the last frames, whose windows reach beyond the end of the signal.
    ///
    /// # Errors
    /// As [`LogMelStream::feed`].
    pub fn finish(mut self, frames: &mut Vec<f32>) -> Result<()> {
        let valid = self.front_end.frames(self.from + self.held.len());
        while self.next < valid {
            self.frame(frames)?;
        }
        Ok(())
    }

    fn frame(&mut self, frames: &mut Vec<f32>) -> Result<()> {
        let power = self.spectrum.power(&self.front_end, &self.held, self.from, self.next)?;
        frames.extend(self.front_end.bands.iter().map(|band| band_log_mel(band, power)));
        self.next += 1;
        Ok(())
    }
}

/// Mean and standard deviation (with n - 1) of each band over all frames of a signal. Frames are added twice: all of them for
/// the means, and then all again for the deviations.
#[derive(Debug, Clone)]
pub struct Moments {
    frames: usize,
    sums: Vec<f64>,
    /// Once all frames were added: means, and frames that were added again.
    means: Option<(Vec<f32>, usize)>,
    squares: Vec<f64>,
}

impl Moments {
    pub fn new(bands: usize) -> Self {
        Moments {
            frames: 0,
            sums: vec![0.0; bands],
            means: None,
            squares: vec![0.0; bands],
        }
    }

    /// Frames that were added, the first time.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Adds frames, (frames, bands) row-major.
    pub fn add(&mut self, frames: &[f32]) {
        let bands = self.sums.len().max(1);
        for frame in frames.chunks_exact(bands) {
            match &mut self.means {
                None => {
                    for (sum, value) in self.sums.iter_mut().zip(frame) {
                        *sum += f64::from(*value);
                    }
                    self.frames += 1;
                }
                Some((means, again)) => {
                    for ((square, value), mean) in self.squares.iter_mut().zip(frame).zip(means) {
                        *square += f64::from(value - *mean).powi(2);
                    }
                    *again += 1;
                }
            }
        }
    }

    /// All frames were added once: the next ones are the same again.
    pub fn begin_again(&mut self) {
        let n = self.frames as f64;
        let means = self.sums.iter().map(|sum| (sum / n) as f32).collect();
        self.means = Some((means, 0));
    }

    /// What normalises the frames.
    ///
    /// # Errors
    /// If the frames were not all added twice.
    pub fn finish(self) -> Result<Normalisation> {
        let frames = self.frames;
        match self.means {
            Some((means, again)) if again == frames => {
                let deviation = |square: f64| match frames {
                    0 | 1 => 0.0,
                    n => (square / (n as f64 - 1.0)).sqrt() as f32,
                };
                Ok(Normalisation {
                    means,
                    deviations: self.squares.into_iter().map(deviation).collect(),
                })
            }
            _ => Err(Error::Input(format!(
                "the signal had {frames} frames the first time, and others the second"
            ))),
        }
    }
}

/// Mean and deviation of each band.
#[derive(Debug, Clone)]
pub struct Normalisation {
    means: Vec<f32>,
    deviations: Vec<f32>,
}

impl Normalisation {
    /// Frames, (frames, bands) row-major, to mean 0 and deviation 1.
    pub fn apply(&self, frames: &mut [f32]) {
        for frame in frames.chunks_exact_mut(self.means.len().max(1)) {
            for ((value, mean), deviation) in frame.iter_mut().zip(&self.means).zip(&self.deviations) {
                *value = (*value - mean) / (deviation + DEVIATION_GUARD);
            }
        }
    }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::testing::golden;

    #[test]
    fn blocks_of_any_size_give_the_bits_of_the_whole() {
        let front_end = super::super::tests::front_end();
        let wave = golden::wave("eval", 0);
        for samples in [
            &wave[..],
            &wave[..1],
            &wave[..159],
            &wave[..160],
            &wave[..321],
            &wave[..5_000],
            &[],
        ] {
            let whole = front_end.compute(&[samples], None).unwrap();
            let valid = whole.lengths[0];
            for size in [1, 159, 160, 1_000, 100_000] {
                let frames = || {
                    let (mut stream, mut frames) = (LogMelStream::new(&front_end), Vec::new());
                    for block in samples.chunks(size) {
                        stream.feed(block, &mut frames).unwrap();
                        assert!(
                            stream.held.len() <= 2 * (2 * front_end.n_fft + size),
                            "{}",
                            stream.held.len()
                        );
                    }
                    stream.finish(&mut frames).unwrap();
                    frames
                };
                let mut found = frames();
                let mut moments = Moments::new(whole.bands);
                moments.add(&found);
                assert_eq!(moments.frames(), valid, "{} samples", samples.len());
                moments.begin_again();
                if valid > 0 {
                    assert!(moments.clone().finish().is_err());
                }
                moments.add(&frames());
                moments.finish().unwrap().apply(&mut found);
                for (t, frame) in found.chunks_exact(whole.bands).enumerate() {
                    for (band, value) in frame.iter().enumerate() {
                        let expected = whole.values[band * whole.frames + t];
                        assert_eq!(
                            value.to_bits(),
                            expected.to_bits(),
                            "{} samples, frame {t}",
                            samples.len()
                        );
                    }
                }
            }
        }
    }
}
