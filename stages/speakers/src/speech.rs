//! Where speech is, from the probabilities of a voice activity detector: Silero's `get_speech_timestamps`, by its
//! version 6.2, whose names and defaults the settings have.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::silero::{SAMPLE_RATE, WINDOW};

/// Settings for turning probabilities into intervals of speech.
#[derive(Debug, Clone, PartialEq)]
pub struct SpeechSettings {
    /// Speech begins at a window of this probability or more.
    pub threshold: f64,
    /// Silence begins below this probability; without it `max(threshold - 0.15, 0.01)`.
    pub neg_threshold: Option<f64>,
    /// Speech that is not longer than this is dropped, in milliseconds.
    pub min_speech_duration_ms: f64,
    /// Speech that is longer is cut, in seconds; may be infinite.
    pub max_speech_duration_s: f64,
    /// Silence that is shorter does not end speech, in milliseconds.
    pub min_silence_duration_ms: f64,
    /// Added at both ends of speech, in milliseconds; half of the silence where that is shorter than twice this.
    pub speech_pad_ms: f64,
    /// Speech that is too long is cut in a silence that is longer than this, in milliseconds, if there is one.
    pub min_silence_at_max_speech: f64,
    /// Of several such silences the longest is taken; otherwise the last.
    pub use_max_poss_sil_at_max_speech: bool,
}

impl Default for SpeechSettings {
    fn default() -> Self {
        Self {
            threshold: 0.5,
            neg_threshold: None,
            min_speech_duration_ms: 250.0,
            max_speech_duration_s: f64::INFINITY,
            min_silence_duration_ms: 100.0,
            speech_pad_ms: 30.0,
            min_silence_at_max_speech: 98.0,
            use_max_poss_sil_at_max_speech: true,
        }
    }
}

impl SpeechSettings {
    fn check(&self) -> Result<()> {
        let refuse =
            |name: &str, value: f64, rule: &str| Err(Error::Input(format!("{name} is {value}; it must {rule}")));
        let probabilities = [
            ("threshold", self.threshold),
            ("neg_threshold", self.neg_threshold.unwrap_or(0.0)),
        ];
        for (name, value) in probabilities {
            if !(0.0..=1.0).contains(&value) {
                return refuse(name, value, "be between 0 and 1");
            }
        }
        if let Some(below) = self.neg_threshold.filter(|below| *below > self.threshold) {
            return refuse("neg_threshold", below, "not be above the threshold");
        }
        let durations = [
            ("min_speech_duration_ms", self.min_speech_duration_ms),
            ("min_silence_duration_ms", self.min_silence_duration_ms),
            ("speech_pad_ms", self.speech_pad_ms),
            ("min_silence_at_max_speech", self.min_silence_at_max_speech),
        ];
        for (name, value) in durations {
            if !(value >= 0.0 && value.is_finite()) {
                return refuse(name, value, "be a finite number, 0 or more");
            }
        }
        if self.max_speech_duration_s.is_nan() || self.max_speech_duration_s <= 0.0 {
            return refuse("max_speech_duration_s", self.max_speech_duration_s, "be more than 0");
        }
        Ok(())
    }
}

/// Stretches of speech in samples of 16 kHz, in order, from a probability for each [`WINDOW`] samples of a recording of
/// `samples` samples. Settings out of range are an error, and so is a number of probabilities that does not fit.
pub fn speech(probabilities: &[f32], samples: usize, settings: &SpeechSettings) -> Result<Vec<Range<usize>>> {
    settings.check()?;
    if probabilities.len() != samples.div_ceil(WINDOW) {
        return Err(Error::Input(format!(
            "{} probabilities do not fit {samples} samples, one for {WINDOW}",
            probabilities.len()
        )));
    }
    let in_samples = |milliseconds: f64| f64::from(SAMPLE_RATE) * milliseconds / 1000.0;
    let pad = in_samples(settings.speech_pad_ms);
    let found = stretches(probabilities, samples, settings, pad);
    Ok(padded(found, samples, pad))
}

fn stretches(probabilities: &[f32], samples: usize, settings: &SpeechSettings, pad: f64) -> Vec<Range<usize>> {
    let in_samples = |milliseconds: f64| f64::from(SAMPLE_RATE) * milliseconds / 1000.0;
    let min_speech = in_samples(settings.min_speech_duration_ms);
    let min_silence = in_samples(settings.min_silence_duration_ms);
    let min_silence_at_max = in_samples(settings.min_silence_at_max_speech);
    let max_speech = f64::from(SAMPLE_RATE) * settings.max_speech_duration_s - WINDOW as f64 - 2.0 * pad;
    let threshold = settings.threshold;
    let neg_threshold = settings.neg_threshold.unwrap_or((threshold - 0.15).max(0.01));
    let longest = settings.use_max_poss_sil_at_max_speech;

    let mut found = Vec::new();
    // Start of the current speech, and of the silence that may end it.
    let mut begun: Option<usize> = None;
    let mut silence: Option<usize> = None;
    // Silences of the speech that goes on, long enough to cut in: where each begins, and its length.
    let mut silences: Vec<(usize, usize)> = Vec::new();
    // Start of the last such silence, and of the speech after it, if that has begun.
    let mut last: Option<(usize, Option<usize>)> = None;
    for (window, &probability) in probabilities.iter().enumerate() {
        let (now, probability) = (window * WINDOW, f64::from(probability));
        if probability >= threshold
            && let Some(from) = silence.take()
        {
            if (now - from) as f64 > min_silence_at_max {
                silences.push((from, now - from));
            }
            if let Some((_, after @ None)) = &mut last {
                *after = Some(now);
            }
        }
        let Some(start) = begun else {
            if probability >= threshold {
                begun = Some(now);
            }
            continue;
        };
        let mut start = start;
        if (now - start) as f64 > max_speech {
            let cut = std::mem::take(&mut silences);
            // The first of the longest.
            let cut = cut.into_iter().rev().max_by_key(|&(_, length)| length);
            silence = None;
            match (longest, cut, last.take()) {
                (true, Some((end, length)), _) => {
                    found.push(start..end);
                    start = end + length;
                    begun = Some(start);
                }
                (false, _, Some((end, after))) => {
                    found.push(start..end);
                    begun = after;
                    match after {
                        Some(after) => start = after,
                        None => continue,
                    }
                }
                _ => {
                    found.push(start..now);
                    begun = None;
                    continue;
                }
            }
        }
        if probability < neg_threshold {
            let from = *silence.get_or_insert(now);
            let length = (now - from) as f64;
            if !longest && length > min_silence_at_max {
                // A continuing silence keeps its start; a new one has no end yet.
                if last.is_none_or(|(end, _)| end != from) {
                    last = Some((from, None));
                }
            }
            if length >= min_silence {
                if (from - start) as f64 > min_speech {
                    found.push(start..from);
                }
                (begun, silence, last) = (None, None, None);
                silences.clear();
            }
        }
    }
    if let Some(start) = begun
        && samples.saturating_sub(start) as f64 > min_speech
    {
        found.push(start..samples);
    }
    found
}

/// Adds `pad` at both ends, up to the middle of a silence between.
fn padded(mut found: Vec<Range<usize>>, samples: usize, pad: f64) -> Vec<Range<usize>> {
    let earlier = |start: usize| (start as f64 - pad).max(0.0) as usize;
    let later = |end: usize| (end as f64 + pad).min(samples as f64) as usize;
    if let Some(first) = found.first_mut() {
        first.start = earlier(first.start);
    }
    for next in 1..found.len() {
        let silence = found[next].start - found[next - 1].end;
        if (silence as f64) < 2.0 * pad {
            found[next - 1].end += silence / 2;
            found[next].start -= silence / 2;
        } else {
            found[next - 1].end = later(found[next - 1].end);
            found[next].start = earlier(found[next].start);
        }
    }
    if let Some(last) = found.last_mut() {
        last.end = later(last.end);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    fn settings(arguments: &serde_json::Value) -> SpeechSettings {
        let mut settings = SpeechSettings::default();
        for (name, value) in arguments.as_object().unwrap() {
            let number = || value.as_f64().unwrap();
            match name.as_str() {
                "threshold" => settings.threshold = number(),
                "neg_threshold" => settings.neg_threshold = Some(number()),
                "min_speech_duration_ms" => settings.min_speech_duration_ms = number(),
                "max_speech_duration_s" => settings.max_speech_duration_s = number(),
                "min_silence_duration_ms" => settings.min_silence_duration_ms = number(),
                "speech_pad_ms" => settings.speech_pad_ms = number(),
                "min_silence_at_max_speech" => settings.min_silence_at_max_speech = number(),
                "use_max_poss_sil_at_max_speech" => {
                    settings.use_max_poss_sil_at_max_speech = value.as_bool().unwrap();
                }
                other => panic!("argument {other} is not known"),
            }
        }
        settings
    }

    #[test]
    fn speech_is_where_the_original_finds_it() {
        let (json, tensors) = (
            golden::json("silero_vad.json"),
            golden::Tensors::load("silero_vad.safetensors"),
        );
        let mut compared = 0;
        let lengths: Vec<(String, usize)> = golden::recordings()
            .iter()
            .map(|(name, samples)| (name.clone(), samples.len()))
            .collect();
        for (name, cases) in json["timestamps"].as_object().unwrap() {
            let (_, probabilities) = tensors.floats(&format!("{name}.prob"));
            let Some(&(_, samples)) = lengths.iter().find(|(recording, _)| recording == name) else {
                continue;
            };
            for case in cases.as_array().unwrap() {
                let expected: Vec<Range<usize>> = case["samples"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|pair| pair[0].as_u64().unwrap() as usize..pair[1].as_u64().unwrap() as usize)
                    .collect();
                let found = speech(&probabilities, samples, &settings(&case["arguments"])).unwrap();
                assert_eq!(found, expected, "{name} {}", case["arguments"]);
                compared += 1;
            }
        }
        assert!(compared > 0);
    }

    #[test]
    fn long_speech_is_cut_in_its_longest_or_last_silence() {
        // Speech of 40 windows with silences of 6 and 5 windows, too short to end it.
        let mut probabilities = vec![0.9f32; 40];
        probabilities[8..14].fill(0.0);
        probabilities[20..25].fill(0.0);
        let settings = |longest| SpeechSettings {
            max_speech_duration_s: 1.0,
            min_silence_duration_ms: 1000.0,
            speech_pad_ms: 0.0,
            use_max_poss_sil_at_max_speech: longest,
            ..SpeechSettings::default()
        };
        let found = |longest| speech(&probabilities, 40 * WINDOW - 7, &settings(longest)).unwrap();
        assert_eq!(found(true), [0..8 * WINDOW, 14 * WINDOW..40 * WINDOW - 7]);
        assert_eq!(found(false), [0..20 * WINDOW, 25 * WINDOW..40 * WINDOW - 7]);
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let refused = |change: fn(&mut SpeechSettings)| {
            let mut settings = SpeechSettings::default();
            change(&mut settings);
            speech(&[0.5], 512, &settings).unwrap_err().to_string()
        };
        assert!(refused(|s| s.threshold = 1.5).contains("threshold is 1.5"));
        assert!(refused(|s| s.neg_threshold = Some(f64::NAN)).contains("neg_threshold is NaN"));
        assert!(refused(|s| s.neg_threshold = Some(0.6)).contains("above the threshold"));
        assert!(refused(|s| s.speech_pad_ms = f64::INFINITY).contains("speech_pad_ms"));
        assert!(refused(|s| s.max_speech_duration_s = 0.0).contains("max_speech_duration_s"));
        assert!(speech(&[0.5], 513, &SpeechSettings::default()).is_err());
        assert_eq!(speech(&[], 0, &SpeechSettings::default()), Ok(Vec::new()));
    }
}

#[cfg(test)]
#[path = "speech_rules_tests.rs"]
mod rules_tests;
