//! The probability of speech for each frame of a recording.

use std::ops::Range;

use crate::{Result, TranscriptionError};

/// The probability of speech for each frame of a recording.
#[derive(Debug, Clone, Copy)]
pub struct SpeechFrames<'a> {
    /// One for each frame, the last one being shorter than the others if the recording ends in it. NaN counts as no
    /// speech.
    probabilities: &'a [f32],
    frame_samples: u64,
    samples: u64,
    sample_rate: u32,
}

impl<'a> SpeechFrames<'a> {
    /// `frame_samples` are those of a frame (512 for silero at 16 kHz), `samples` those of the recording.
    ///
    /// An error if the frames are not as many as the recording has.
    pub fn new(probabilities: &'a [f32], frame_samples: u64, samples: u64, sample_rate: u32) -> Result<Self> {
        if frame_samples == 0 || sample_rate == 0 {
            return Err(TranscriptionError::Input(
                "frames of no samples, or no samples in a second".to_owned(),
            ));
        }
        if samples.div_ceil(frame_samples) != probabilities.len() as u64 {
            return Err(TranscriptionError::Input(format!(
                "{} probabilities of speech do not fit {samples} samples in frames of {frame_samples}",
                probabilities.len()
            )));
        }
        Ok(Self {
            probabilities,
            frame_samples,
            samples,
            sample_rate,
        })
    }

    /// Samples of the recording.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Samples in a second.
    pub fn sample_rate(&self) -> u32 {
        self.sample_rate
    }

    /// Whole samples in this many seconds; a very large number for infinity.
    pub(crate) fn samples_in(&self, seconds: f64) -> u64 {
        (seconds * f64::from(self.sample_rate)).round() as u64
    }

    /// The first sample of each frame, and its probability of speech.
    fn frames(&self) -> impl Iterator<Item = (u64, f64)> {
        let starts = (0..).map(|index: u64| index * self.frame_samples);
        starts.zip(
            self.probabilities
                .iter()
                .map(|&probability| probability_or_none(probability)),
        )
    }

    /// The middle of the frame that is least likely to hold speech, the last of equal ones, among those whose middles
    /// are in `range`.
    pub(crate) fn quietest(&self, range: Range<u64>) -> Option<u64> {
        let middle = |start: u64| start + self.frame_samples / 2;
        let first = (range.start / self.frame_samples).saturating_sub(1) as usize;
        let frames = self
            .frames()
            .skip(first)
            .take_while(|&(start, _)| middle(start) < range.end);
        let within = frames.filter(|&(start, _)| middle(start) >= range.start);
        let quietest = within.min_by(|(at, a), (other, b)| a.total_cmp(b).then(other.cmp(at)));
        quietest.map(|(start, _)| middle(start))
    }
}

fn probability_or_none(probability: f32) -> f64 {
    if probability.is_nan() {
        0.0
    } else {
        f64::from(probability)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_an_error() {
        assert!(SpeechFrames::new(&[0.0; 3], 512, 1024, 16_000).is_err());
        assert!(SpeechFrames::new(&[0.0; 2], 512, 1025, 16_000).is_err());
        assert!(SpeechFrames::new(&[], 0, 0, 16_000).is_err());
        assert!(SpeechFrames::new(&[], 512, 0, 0).is_err());
        assert!(SpeechFrames::new(&[0.0; 2], 512, 1024, 16_000).is_ok());
    }
}
