//! Turns of speech from probabilities of speech, by the rules of silero-vad's `get_speech_timestamps` (6.2).

use std::ops::Range;

use crate::{Result, TranscriptionError};

/// How likely each frame of a recording is to hold speech.
#[derive(Debug, Clone, Copy)]
pub struct SpeechFrames<'a> {
    /// One for each frame, the last one being shorter than the others if the recording ends in it. What is no number
    /// counts as no speech.
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

    /// Whole samples in so many seconds; a very large number for infinity.
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
    /// lie in `range`.
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

/// What counts as speech. The defaults are silero's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpeechRules {
    /// Speech begins at a frame of at least this probability.
    pub threshold: f64,
    /// Speech may end at a frame below this one. None: `threshold - 0.15`, but 0.01 at least.
    pub leave_threshold: Option<f64>,
    /// Shorter turns are dropped, in seconds.
    pub min_speech: f64,
    /// Shorter pauses are speech, in seconds.
    pub min_silence: f64,
    /// What is added at both ends of a turn, in seconds, where the next turn leaves room.
    pub padding: f64,
    /// Longer turns are cut at their longest pause, or where they become too long, in seconds; may be infinite.
    pub max_speech: f64,
}

impl Default for SpeechRules {
    fn default() -> Self {
        Self {
            threshold: 0.5,
            leave_threshold: None,
            min_speech: 0.25,
            min_silence: 0.1,
            padding: 0.03,
            max_speech: f64::INFINITY,
        }
    }
}

/// The shortest pause at which a turn that is too long is cut, in seconds.
const MIN_SILENCE_AT_MAX_SPEECH: f64 = 0.098;

impl SpeechRules {
    fn check(&self) -> Result<()> {
        let leave = self.leave_threshold.unwrap_or(0.0);
        for (setting, value) in [("threshold", self.threshold), ("leave_threshold", leave)] {
            if !(0.0..=1.0).contains(&value) {
                let why = format!("{value} is not between 0 and 1");
                return Err(TranscriptionError::setting(setting, why));
            }
        }
        if leave > self.threshold {
            let why = format!("{leave} is above the threshold, {}", self.threshold);
            return Err(TranscriptionError::setting("leave_threshold", why));
        }
        for (setting, seconds) in [
            ("min_speech", self.min_speech),
            ("min_silence", self.min_silence),
            ("padding", self.padding),
        ] {
            if !(0.0..1e6).contains(&seconds) {
                let why = format!("{seconds} s is not a duration");
                return Err(TranscriptionError::setting(setting, why));
            }
        }
        Ok(())
    }
}

/// The turns of speech, in samples: in order, not overlapping (two may touch where a long one was cut), within the
/// recording.
///
/// An error if a rule is out of its range, or if `max_speech` is not longer than a frame and the padding.
pub fn speech_turns(frames: &SpeechFrames, rules: &SpeechRules) -> Result<Vec<Range<u64>>> {
    rules.check()?;
    let padding = frames.samples_in(rules.padding);
    let margin = frames.frame_samples + 2 * padding;
    let max_speech = frames.samples_in(rules.max_speech);
    if rules.max_speech.is_nan() || max_speech <= margin {
        let why = format!("{} s is not longer than a frame and the padding", rules.max_speech);
        return Err(TranscriptionError::setting("max_speech", why));
    }
    let mut turns = unpadded(frames, rules, max_speech - margin);
    pad(&mut turns, padding, frames.samples);
    Ok(turns)
}

/// Turns without padding, of which those longer than `max_speech` samples are cut.
fn unpadded(frames: &SpeechFrames, rules: &SpeechRules, max_speech: u64) -> Vec<Range<u64>> {
    let leave = rules.leave_threshold.unwrap_or((rules.threshold - 0.15).max(0.01));
    let min_speech = frames.samples_in(rules.min_speech);
    let min_silence = frames.samples_in(rules.min_silence);
    let min_cut = frames.samples_in(MIN_SILENCE_AT_MAX_SPEECH);
    let mut turns: Vec<Range<u64>> = Vec::new();
    let mut turn: Option<u64> = None;
    // Where the pause began that the turn may end in, and pauses of the turn that were too short for that.
    let mut silence: Option<u64> = None;
    let mut pauses: Vec<Range<u64>> = Vec::new();
    for (at, probability) in frames.frames() {
        let speech = probability >= rules.threshold;
        if speech
            && let Some(from) = silence.take()
            && at - from > min_cut
        {
            pauses.push(from..at);
        }
        let Some(mut start) = turn else {
            turn = speech.then_some(at);
            continue;
        };
        if at - start > max_speech {
            // The first of equal ones, as Python's `max` has it.
            let longest = pauses.iter().rev().max_by_key(|pause| pause.end - pause.start).cloned();
            let Some(pause) = longest else {
                turns.push(start..at);
                turn = None;
                silence = None;
                continue;
            };
            turns.push(start..pause.start);
            start = pause.end;
            turn = Some(start);
            pauses.retain(|later| later.start > start);
            silence = None;
        }
        if probability < leave {
            let from = *silence.get_or_insert(at);
            if at - from >= min_silence {
                if from - start > min_speech {
                    turns.push(start..from);
                }
                turn = None;
                silence = None;
                pauses.clear();
            }
        }
    }
    if let Some(start) = turn
        && frames.samples - start > min_speech
    {
        turns.push(start..frames.samples);
    }
    turns
}

/// Adds `padding` samples on both sides of each turn; two turns share a pause that is too short for both.
fn pad(turns: &mut [Range<u64>], padding: u64, samples: u64) {
    let Some(first) = turns.first_mut() else { return };
    first.start = first.start.saturating_sub(padding);
    for index in 1..turns.len() {
        let silence = turns[index].start - turns[index - 1].end;
        let padding = if silence < 2 * padding { silence / 2 } else { padding };
        turns[index - 1].end += padding;
        turns[index].start -= padding;
    }
    let last = turns.len() - 1;
    turns[last].end = samples.min(turns[last].end + padding);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
    use crate::test_data;

    /// None where silero was told something that has no rule here: to cut at the last pause instead of the longest.
    fn rules(arguments: &Value) -> Option<SpeechRules> {
        let mut rules = SpeechRules::default();
        for (name, value) in arguments.as_object().unwrap() {
            let number = value.as_f64();
            match name.as_str() {
                "threshold" => rules.threshold = number?,
                "neg_threshold" => rules.leave_threshold = Some(number?),
                "min_speech_duration_ms" => rules.min_speech = number? / 1000.0,
                "min_silence_duration_ms" => rules.min_silence = number? / 1000.0,
                "speech_pad_ms" => rules.padding = number? / 1000.0,
                "max_speech_duration_s" => rules.max_speech = number?,
                _ => return None,
            }
        }
        Some(rules)
    }

    #[test]
    fn turns_are_sileros() {
        let golden = test_data::speakers_json("silero_vad.json");
        let probabilities = test_data::tensors(&test_data::speakers("silero_vad.safetensors"), |name| {
            golden["timestamps"].get(name.trim_end_matches(".prob")).is_some()
        });
        let mut compared = 0;
        for (name, _, probabilities) in &probabilities {
            for case in golden["timestamps"][name.trim_end_matches(".prob")].as_array().unwrap() {
                let expected: Vec<(u64, u64)> = serde_json::from_value(case["samples"].clone()).unwrap();
                let Some(rules) = rules(&case["arguments"]) else {
                    continue;
                };
                // The recording ends within the last frame: where in it, shows in a turn that lasts to the end.
                let frames = probabilities.len() as u64;
                let last = expected.last().map_or(0, |&(_, end)| end);
                let samples = if last > (frames - 1) * 512 { last } else { frames * 512 };
                let frames = SpeechFrames::new(probabilities, 512, samples, 16_000).unwrap();
                let found = speech_turns(&frames, &rules).unwrap();
                let found: Vec<(u64, u64)> = found.into_iter().map(|turn| (turn.start, turn.end)).collect();
                assert_eq!(found, expected, "{name}: {}", case["arguments"]);
                compared += 1;
            }
        }
        assert!(compared > 0);
    }

    /// First samples of turns and those after their last, of frames of 100 samples at 1 kHz.
    fn turns(probabilities: &[f32], rules: &SpeechRules) -> Vec<(u64, u64)> {
        let frames = SpeechFrames::new(probabilities, 100, probabilities.len() as u64 * 100, 1000).unwrap();
        let turns = speech_turns(&frames, rules).unwrap();
        turns.into_iter().map(|turn| (turn.start, turn.end)).collect()
    }

    fn bare() -> SpeechRules {
        SpeechRules {
            padding: 0.0,
            ..SpeechRules::default()
        }
    }

    #[test]
    fn speech_begins_above_one_threshold_and_ends_below_the_other() {
        let speech = [0.4, 0.5, 0.4, 0.36, 0.4, 0.3, 0.3, 0.4, 0.9];
        // The last frame alone is too short.
        assert_eq!(turns(&speech, &bare()), [(100, 500)]);
        assert_eq!(turns(&[f32::NAN, 0.49], &bare()), []);
        assert_eq!(turns(&[], &bare()), []);
        assert_eq!(turns(&[1.0; 5], &SpeechRules::default()), [(0, 500)]);
    }

    #[test]
    fn padding_is_shared_where_there_is_little_room() {
        let rules = SpeechRules {
            padding: 0.15,
            ..SpeechRules::default()
        };
        let mut speech = [1.0; 14];
        speech[4..6].fill(0.0);
        speech[0] = 0.0;
        assert_eq!(turns(&speech, &rules), [(0, 500), (500, 1400)]);
    }

    #[test]
    fn long_turns_are_cut_at_their_longest_pause() {
        let rules = SpeechRules {
            min_silence: 0.5,
            max_speech: 1.1,
            ..bare()
        };
        let mut speech = [1.0; 16];
        speech[2] = 0.0;
        speech[4..7].fill(0.0);
        assert_eq!(turns(&speech, &rules), [(0, 400), (700, 1600)]);
        assert_eq!(turns(&[1.0; 16], &rules), [(0, 1100), (1200, 1600)]);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        assert!(SpeechFrames::new(&[0.0; 3], 512, 1024, 16_000).is_err());
        assert!(SpeechFrames::new(&[0.0; 2], 512, 1025, 16_000).is_err());
        assert!(SpeechFrames::new(&[], 0, 0, 16_000).is_err());
        assert!(SpeechFrames::new(&[], 512, 0, 0).is_err());
        let frames = SpeechFrames::new(&[0.0; 2], 512, 1024, 16_000).unwrap();
        for rules in [
            SpeechRules {
                threshold: 1.5,
                ..bare()
            },
            SpeechRules {
                leave_threshold: Some(0.6),
                ..bare()
            },
            SpeechRules {
                padding: -1.0,
                ..bare()
            },
            SpeechRules {
                min_silence: f64::NAN,
                ..bare()
            },
            SpeechRules {
                max_speech: 0.03,
                ..bare()
            },
            SpeechRules {
                max_speech: f64::NAN,
                ..bare()
            },
        ] {
            assert!(speech_turns(&frames, &rules).is_err(), "{rules:?}");
        }
    }

    proptest! {
        #[test]
        fn turns_are_in_order_and_long_enough(
            probabilities in prop::collection::vec(prop_oneof![0.0..1.0f32, Just(0.0), Just(1.0)], 0..200), cut in 0..512u64,
            padding in 0.0..0.3f64, min_speech in 0.0..0.5f64, min_silence in 0.0..0.5f64, max_speech in 1.0..10.0f64,
        ) {
            let samples = (probabilities.len() as u64 * 512).saturating_sub(cut);
            let frames = SpeechFrames::new(&probabilities, 512, samples, 16_000).unwrap();
            let rules = SpeechRules { padding, min_speech, min_silence, max_speech, ..SpeechRules::default() };
            let found = speech_turns(&frames, &rules).unwrap();
            prop_assert!(found.iter().all(|turn| turn.start < turn.end && turn.end <= samples));
            prop_assert!(found.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }
}
