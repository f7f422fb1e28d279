//! Where a recording that is spoken has speech, so that phrases are boosted there alone.

use std::collections::VecDeque;
use std::ops::Range;

use flow_model::model::chunks;
use flow_speakers::silero::{SAMPLE_RATE, SileroStream, SileroVad, WINDOW};

use super::windows_of_speech::THRESHOLD;
use crate::coverage::REACH;
use crate::{Result, TranscriptionError};

/// Speech goes on down to this probability.
const LEAST: f64 = THRESHOLD - 0.15;

/// The voice activity of a recording so far.
pub(super) struct SpokenSpeech {
    /// None once the recording has ended.
    network: Option<SileroStream<'static>>,
    /// Whether each of its windows has speech, from the window of this number on.
    windows: VecDeque<bool>,
    first: usize,
    /// Whether the last window has.
    is_speech: bool,
    /// Samples of a frame of the encoder.
    frame: usize,
}

impl SpokenSpeech {
    /// `frame`: seconds of a frame of the encoder.
    pub fn new(network: &'static SileroVad, frame: f64) -> Self {
        SpokenSpeech {
            network: Some(network.stream()),
            windows: VecDeque::new(),
            first: 0,
            is_speech: false,
            frame: (frame * f64::from(SAMPLE_RATE)).round() as usize,
        }
    }

    /// Takes the next samples (mono, 16 kHz, in [-1, 1]).
    ///
    /// # Errors
    /// If one is not a number, or far too large.
    pub fn feed(&mut self, samples: &[f32], is_last: bool) -> Result<()> {
        let mut probabilities = Vec::new();
        let wrong = |error: flow_speakers::error::Error| TranscriptionError::Input(error.to_string());
        if let Some(network) = &mut self.network {
            network.feed(samples, &mut probabilities).map_err(wrong)?;
        }
        if is_last && let Some(network) = self.network.take() {
            network.finish(&mut probabilities);
        }
        for probability in probabilities {
            let least = if self.is_speech { LEAST } else { THRESHOLD };
            self.is_speech = f64::from(probability) >= least;
            self.windows.push_back(self.is_speech);
        }
        Ok(())
    }

    /// Forgets what no frame from this one on needs.
    pub fn forget(&mut self, frame: usize) {
        let needed = (frame * self.frame).saturating_sub(reach()) / WINDOW;
        let forgotten = needed.saturating_sub(self.first).min(self.windows.len());
        self.windows.drain(..forgotten);
        self.first += forgotten;
    }

    #[cfg(test)]
    pub fn end(&mut self) {
        self.network = None;
    }

    #[cfg(test)]
    pub fn kept(&self) -> usize {
        self.windows.len()
    }

    /// Whether a window that begins with one of these samples has speech.
    fn has_speech(&self, samples: Range<usize>) -> bool {
        let place = |sample: usize| (sample / WINDOW).saturating_sub(self.first).min(self.windows.len());
        let (start, end) = (place(samples.start), place(samples.end));
        start < end && self.windows.range(start..end).any(|is_speech| *is_speech)
    }
}

/// Samples up to which speech reaches.
fn reach() -> usize {
    (REACH * f64::from(SAMPLE_RATE)) as usize
}

/// Speech reaches [`REACH`] seconds, as in recordings, but no sample behind the chunk's last frame counts: what is heard does not depend
/// on how many samples are there already.
impl chunks::SpokenSpeech for SpokenSpeech {
    fn of_chunk(&self, chunk: Range<usize>) -> Vec<Range<usize>> {
        let heard = chunk.end.saturating_sub(1) * self.frame;
        let has_speech = |frame: &usize| {
            let start = frame * self.frame;
            self.has_speech(start.saturating_sub(reach())..(start + self.frame + reach()).min(heard))
        };
        let frames = chunk.clone().filter(has_speech);
        frames
            .map(|frame| frame - chunk.start..frame - chunk.start + 1)
            .collect()
    }
}
