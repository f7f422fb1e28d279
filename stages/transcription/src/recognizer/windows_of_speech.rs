//! The windows of a recording, from its voice activity.

use std::ops::Range;

use flow_speakers::silero::{SAMPLE_RATE, WINDOW};
use flow_speakers::speech::{SpeechSettings, speech};

use super::{RecognitionSettings, VoiceActivity};
use crate::activity::{Activity, SpeechActivity};
use crate::coverage::stretches;
use crate::speech_frames::SpeechFrames;
use crate::windows::{windows, windows_of_turns};
use crate::{Result, TranscriptionError};

/// Threshold of the probability of speech.
pub(super) const THRESHOLD: f64 = 0.5;
/// Shorter speech is left out, in seconds: silero's default.
const MIN_SPEECH: f64 = 0.25;
/// Padding of silence at either end of a window, in seconds, as far as there is silence.
const PADDING: f64 = 0.1;

/// Rules that leave out no speech, and find the shortest pauses.
const ALL_SPEECH: SpeechSettings = SpeechSettings {
    threshold: THRESHOLD,
    neg_threshold: None,
    min_speech_duration_ms: 0.0,
    max_speech_duration_s: f64::INFINITY,
    min_silence_duration_ms: 0.0,
    speech_pad_ms: 0.0,
    min_silence_at_max_speech: 98.0,
    use_max_poss_sil_at_max_speech: true,
};

/// The windows of a recording, and the speech in them. All are samples from its beginning.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpeechWindows {
    /// In order, not overlapping.
    pub windows: Vec<Range<u64>>,
    /// Speech without its shortest pauses, in order.
    pub speech: Vec<Range<u64>>,
    /// Whether voice activity looked for speech; otherwise all is speech.
    pub is_heard: bool,
    /// Samples of the recording.
    pub samples: u64,
}

impl SpeechWindows {
    /// From what voice activity found.
    pub(super) fn of(activity: Activity<'_>, settings: &RecognitionSettings) -> Result<Self> {
        let found = activity.finish()?;
        windows_by(&found, settings)
    }

    /// The speech of the recording in stretches, in seconds.
    pub(super) fn all_stretches(&self) -> Vec<Range<f64>> {
        let seconds = |samples: u64| samples as f64 / f64::from(SAMPLE_RATE);
        let parts: Vec<Range<f64>> = (self.speech.iter())
            .map(|part| seconds(part.start)..seconds(part.end))
            .collect();
        stretches(&parts, seconds(self.samples))
    }

    /// The speech of a window in stretches, in seconds from its beginning.
    pub fn stretches(&self, index: usize) -> Vec<Range<f64>> {
        let Some(window) = self.windows.get(index) else {
            return Vec::new();
        };
        let seconds = |samples: u64| samples as f64 / f64::from(SAMPLE_RATE);
        let first = self.speech.partition_point(|part| part.end <= window.start);
        let near = self.speech[first..].iter().take_while(|part| part.start < window.end);
        let parts: Vec<Range<f64>> = near
            .map(|part| {
                let (start, end) = (part.start.max(window.start), part.end.min(window.end));
                seconds(start - window.start)..seconds(end - window.start)
            })
            .collect();
        stretches(&parts, seconds(window.end - window.start))
    }
}

/// The speech of a window of a live session in stretches, in seconds from its beginning, by the probability of speech of each
/// [`WINDOW`] samples. Speech begins at `threshold`.
///
/// # Errors
/// If the threshold is not a probability.
pub fn speech_of_window(probabilities: &[f32], threshold: f64) -> Result<Vec<Range<f64>>> {
    let samples = probabilities.len() * WINDOW;
    let settings = SpeechSettings {
        threshold,
        ..ALL_SPEECH
    };
    let found = speech(probabilities, samples, &settings);
    let found = found.map_err(|error| TranscriptionError::Input(error.to_string()))?;
    let seconds = |samples: usize| samples as f64 / f64::from(SAMPLE_RATE);
    let parts: Vec<Range<f64>> = (found.iter())
        .map(|part| seconds(part.start)..seconds(part.end))
        .collect();
    Ok(stretches(&parts, seconds(samples)))
}

/// The windows of a recording, in order.
fn windows_by(found: &SpeechActivity, settings: &RecognitionSettings) -> Result<SpeechWindows> {
    let SpeechActivity {
        probabilities,
        tones,
        samples,
    } = found;
    let samples = *samples;
    let frames = SpeechFrames::new(probabilities, WINDOW as u64, samples, SAMPLE_RATE)?;
    if settings.voice_activity == VoiceActivity::Off {
        let whole = 0..samples;
        let all = std::slice::from_ref(&whole);
        return Ok(SpeechWindows {
            windows: windows(&frames, all, settings.max_window)?,
            speech: all.to_vec(),
            is_heard: false,
            samples,
        });
    }
    let turns = |settings: &SpeechSettings| -> Result<Vec<Range<u64>>> {
        let found = speech(probabilities, samples as usize, settings);
        let found = found.map_err(|error| TranscriptionError::Input(error.to_string()))?;
        Ok(found
            .into_iter()
            .map(|turn| turn.start as u64..turn.end as u64)
            .collect())
    };
    let mut between_pauses = turns(&SpeechSettings {
        threshold: THRESHOLD,
        neg_threshold: Some(THRESHOLD),
        min_speech_duration_ms: 1000.0 * MIN_SPEECH,
        min_silence_duration_ms: 1000.0 * settings.min_pause,
        speech_pad_ms: 1000.0 * PADDING,
        ..SpeechSettings::default()
    })?;
    // A tone next to speech is no padding.
    let is_tone = |sample: u64| tones.get(sample as usize / WINDOW).is_some_and(|tone| *tone);
    for turn in &mut between_pauses {
        while turn.start < turn.end && is_tone(turn.start) {
            turn.start = (turn.start / WINDOW as u64 + 1) * WINDOW as u64;
        }
        while turn.end > turn.start && is_tone(turn.end - 1) {
            turn.end = (turn.end - 1) / WINDOW as u64 * WINDOW as u64;
        }
    }
    between_pauses.retain(|turn| turn.start < turn.end);
    // Short pauses, for windows that are too long.
    let shorter = turns(&ALL_SPEECH)?;
    Ok(SpeechWindows {
        windows: windows_of_turns(&frames, &between_pauses, &shorter, settings.max_window)?,
        speech: shorter,
        is_heard: true,
        samples,
    })
}
