//! How much of the speech has words: what voice activity hears and no word covers is a hole.

use std::ops::Range;

use flow_speakers::silero::SAMPLE_RATE;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::long_audio::LongAudio;
use crate::recognizer::{Heard, VoiceActivity};
use crate::suspects::{Suspect, suspects};
use crate::transcript::{number, rounded};

/// What is done about speech without words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CoverageMode {
    /// Nothing: it is not looked for.
    #[default]
    Off,
    /// It is measured and told.
    Measure,
    /// It is decoded again, and what then still has no words is reported.
    Recover,
}

/// What is done about words that are probably invented.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SuspectUse {
    /// They stay and are reported.
    #[default]
    Keep,
    /// They are left out.
    Drop,
}

/// Settings of coverage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoverageSettings {
    pub mode: CoverageMode,
    pub suspects: SuspectUse,
}

impl CoverageSettings {
    /// Whether it can be done: where voice activity finds windows of speech.
    ///
    /// # Errors
    /// The setting that is at fault, why, and what to do.
    pub fn check(
        &self,
        long_audio: LongAudio,
        voice_activity: VoiceActivity,
    ) -> Result<(), (&'static str, &'static str, &'static str)> {
        if self.is_off() {
            return match self.suspects {
                SuspectUse::Keep => Ok(()),
                SuspectUse::Drop => Err((
                    "suspects",
                    "suspect words are looked for with `coverage` alone",
                    "set `coverage: measure` or `coverage: recover`",
                )),
            };
        }
        if long_audio != LongAudio::Vad {
            let why = "speech without words is looked for in windows of voice activity, which other modes do not have";
            return Err(("coverage", why, "use `window: vad`, or `coverage: off`"));
        }
        if voice_activity == VoiceActivity::Off {
            let why = "without voice activity nobody knows where speech is";
            return Err(("coverage", why, "use `vad: neural`, or `coverage: off`"));
        }
        Ok(())
    }

    pub fn is_off(&self) -> bool {
        self.mode == CoverageMode::Off
    }
}

/// A word covers the speech of its window up to this many seconds before and after it: word times of TDT come some frames late, and
/// end with the duration of the last token.
pub const REACH: f64 = 0.4;
/// Speech on both sides of a shorter pause is one stretch, in seconds.
pub const SHORT_PAUSE: f64 = 0.2;
/// A shorter stretch without a word is no hole, in seconds.
pub const LEAST_HOLE: f64 = 0.25;

/// Blank is a narrow choice if its logit is above that of the best token by less than this.
pub const NARROW: f32 = 8.0;
/// Speech farther than this from all words is a hole, too, if blank was a narrow choice there: a word is missing between others, in
/// seconds.
pub const NEAR: f64 = 0.08;
/// Such a hole is as long as this at least, in seconds.
pub const LEAST_GAP: f64 = 0.16;

/// A stretch of speech without words, in seconds from the beginning of the recording.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Hole {
    #[serde(serialize_with = "number")]
    pub start: f64,
    #[serde(serialize_with = "number")]
    pub end: f64,
}

/// How much of the speech of a recording has words.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Coverage {
    /// Share of the speech that has words, from 0 to 1; 1 where there is no speech.
    #[serde(serialize_with = "number")]
    pub share: f64,
    /// Speech that voice activity hears, in seconds, without pauses of [`SHORT_PAUSE`] or more.
    #[serde(serialize_with = "number")]
    pub speech_s: f64,
    /// In order.
    pub holes: Vec<Hole>,
    /// Words that were found when holes were decoded again.
    pub recovered: u64,
    /// Words that are probably invented, in order, also those that were left out.
    pub suspects: Vec<Suspect>,
}

impl Coverage {
    /// With that of another channel of the recording: the share is that of the speech of both.
    pub fn add(&mut self, other: Coverage) {
        let speech = self.speech_s + other.speech_s;
        if speech > 0.0 {
            self.share = rounded((self.share * self.speech_s + other.share * other.speech_s) / speech);
        }
        self.speech_s = rounded(speech);
        self.holes.extend(other.holes);
        self.holes.sort_by(|a, b| a.start.total_cmp(&b.start));
        self.recovered += other.recovered;
        self.suspects.extend(other.suspects);
        self.suspects.sort_by(|a, b| a.start.total_cmp(&b.start));
    }
}

/// The speech of a window in stretches: in order, apart by [`SHORT_PAUSE`] or more, and within `length`. All are seconds from its
/// beginning.
pub fn stretches(speech: &[Range<f64>], length: f64) -> Vec<Range<f64>> {
    let mut parts: Vec<Range<f64>> = speech
        .iter()
        .map(|part| part.start.max(0.0)..part.end.min(length))
        .filter(|part| part.start < part.end)
        .collect();
    parts.sort_by(|a, b| a.start.total_cmp(&b.start));
    let mut joined: Vec<Range<f64>> = Vec::with_capacity(parts.len());
    for part in parts {
        match joined.last_mut() {
            Some(last) if part.start - last.end < SHORT_PAUSE => last.end = last.end.max(part.end),
            _ => joined.push(part),
        }
    }
    joined
}

/// Stretches of speech by a clock that this many seconds were added to.
pub(crate) fn later(stretches: &[Range<f64>], seconds: f64) -> Vec<Range<f64>> {
    stretches
        .iter()
        .map(|part| part.start + seconds..part.end + seconds)
        .collect()
}

/// The holes in the speech of a window: what of the `stretches` lies farther than [`REACH`] from all `words` and is as long as
/// [`LEAST_HOLE`]. Times are seconds from the beginning of the window; words may overlap and come in any order. Words whose times
/// are not numbers cover nothing.
pub fn holes(stretches: &[Range<f64>], words: &[Range<f64>]) -> Vec<Range<f64>> {
    uncovered(stretches, words, REACH, LEAST_HOLE)
}

/// Gaps between the words of a window in which the decoder chose blank by less than `most` logits, in order: with [`NARROW`], words are
/// probably missing there.
pub(crate) fn narrow_gaps(stretches: &[Range<f64>], heard: &Heard, most: f32) -> Vec<Range<f64>> {
    if heard.blanks.is_empty() {
        return Vec::new();
    }
    let mut found = uncovered(stretches, &spans(heard), NEAR, LEAST_GAP);
    found.retain(|gap| {
        let mut blanks = heard.blanks.iter();
        blanks.any(|&(time, lead)| lead < most && (gap.start - NEAR..gap.end).contains(&time))
    });
    found
}

/// Holes of a window and gaps of [`narrow_gaps`], those that overlap as one.
fn all_holes(stretches: &[Range<f64>], heard: &Heard) -> Vec<Range<f64>> {
    let mut found = holes(stretches, &spans(heard));
    found.extend(narrow_gaps(stretches, heard, NARROW));
    found.sort_by(|a, b| a.start.total_cmp(&b.start));
    found.dedup_by(|next, last| {
        let overlaps = next.start <= last.end;
        if overlaps {
            last.end = last.end.max(next.end);
        }
        overlaps
    });
    found
}

/// What of the `stretches` lies farther than `reach` from all `words` and is as long as `least`, in seconds.
fn uncovered(stretches: &[Range<f64>], words: &[Range<f64>], reach: f64, least: f64) -> Vec<Range<f64>> {
    let mut covered: Vec<Range<f64>> = words
        .iter()
        .map(|word| word.start - reach..word.end.max(word.start) + reach)
        .filter(|word| word.start < word.end)
        .collect();
    covered.sort_by(|a, b| a.start.total_cmp(&b.start));
    let mut found = Vec::new();
    for stretch in stretches {
        let mut at = stretch.start;
        for word in &covered {
            if word.end <= at {
                continue;
            }
            if word.start >= stretch.end {
                break;
            }
            found.push(at..word.start);
            at = word.end;
        }
        found.push(at..stretch.end);
    }
    // Rounding of times must not decide about a hole that is exactly as long.
    found.retain(|hole| hole.end - hole.start >= least - 1e-9);
    found
}

/// The times of the words of a window.
pub(crate) fn spans(heard: &Heard) -> Vec<Range<f64>> {
    heard.words.iter().map(|word| word.start..word.end).collect()
}

/// The coverage of a recording from what was heard in its windows, in order. `speech`: the stretches of each window.
pub fn coverage(windows: &[Range<u64>], speech: &[Vec<Range<f64>>], heard: &[Heard]) -> Coverage {
    let (mut total, mut missing) = (0.0, 0.0);
    let mut found = Coverage::default();
    for ((window, stretches), heard) in windows.iter().zip(speech).zip(heard) {
        let after = window.start as f64 / f64::from(SAMPLE_RATE);
        total += stretches.iter().map(|part| part.end - part.start).sum::<f64>();
        for hole in all_holes(stretches, heard) {
            missing += hole.end - hole.start;
            found.holes.push(Hole {
                start: rounded(after + hole.start),
                end: rounded(after + hole.end),
            });
        }
        found.recovered += heard.recovered as u64;
        let kept = suspects(&heard.words, stretches).into_iter();
        let first = found.suspects.len();
        found
            .suspects
            .extend(kept.map(|suspect| suspect.of(&heard.words, after)));
        // Words that were found again are in the transcript.
        let dropped = heard.dropped.iter().filter(|suspect| !suspect.is_among(&heard.words));
        found.suspects.extend(dropped.map(|suspect| Suspect {
            start: rounded(after + suspect.start),
            end: rounded(after + suspect.end),
            ..suspect.clone()
        }));
        found.suspects[first..].sort_by(|a, b| a.start.total_cmp(&b.start));
    }
    found.speech_s = rounded(total);
    found.share = if total > 0.0 {
        rounded((1.0 - missing / total).clamp(0.0, 1.0))
    } else {
        1.0
    };
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Word;

    #[test]
    fn what_no_word_reaches_is_a_hole() {
        let speech = stretches(&[0.0..2.0, 2.1..6.0, 8.0..8.5], 10.0);
        assert_eq!(speech, [0.0..6.0, 8.0..8.5]);
        // Words come in any order.
        let words = [5.0..5.5, 1.0..1.25, 1.1..1.2];
        let found = holes(&speech, &words);
        assert_eq!(found, [0.0..0.6, 1.65..4.6, 8.0..8.5]);
        assert_eq!(holes(&speech, &[]), speech);
        assert_eq!(holes(&[0.0..0.2], &[]), []);
        // A pause is no hole, however long.
        assert_eq!(holes(&[0.0..1.0, 5.0..6.0], &[0.3..0.7, 5.3..5.7]), []);
        let nan = f64::NAN..f64::NAN;
        assert_eq!(holes(&speech, std::slice::from_ref(&nan)), speech);
    }

    #[test]
    fn words_of_a_window_do_not_cover_another() {
        let heard = |words: &[(f64, f64)], recovered: usize| Heard {
            words: words
                .iter()
                .map(|(start, end)| Word {
                    word: "word".to_owned(),
                    start: *start,
                    end: *end,
                    ..Word::default()
                })
                .collect(),
            recovered,
            ..Heard::default()
        };
        let windows = [0..16_000, 16_000..24_000, 40_000..56_000];
        let speech = [vec![0.0..1.0], vec![0.0..0.5], vec![0.1..0.9]];
        let found = coverage(
            &windows,
            &speech,
            &[heard(&[(0.3, 0.9)], 0), heard(&[], 0), heard(&[(0.2, 0.6)], 1)],
        );
        assert_eq!(found.holes, [Hole { start: 1.0, end: 1.5 }]);
        assert_eq!((found.speech_s, found.recovered), (2.3, 1));
        assert!((found.share - 1.8 / 2.3).abs() < 1e-6);
        assert_eq!(coverage(&[], &[], &[]).share, 1.0);
    }

    proptest! {
        /// Holes and what is covered are the speech; more words never make more holes; no hole is near a word.
        #[test]
        fn holes_are_the_speech_without_words(
            parts in prop::collection::vec((0.0..2.0f64, 0.01..4.0f64), 0..8),
            words in prop::collection::vec((0.0..20.0f64, -0.1..1.0f64), 0..20),
        ) {
            let mut at = 0.0;
            let speech: Vec<Range<f64>> = parts.iter().map(|(gap, length)| {
                let start = at + gap;
                at = start + length;
                start..at
            }).collect();
            let speech = stretches(&speech, at);
            prop_assert!(speech.windows(2).all(|pair| pair[1].start - pair[0].end >= SHORT_PAUSE));
            let words: Vec<Range<f64>> = words.iter().map(|(start, length)| *start..start + length).collect();
            let seconds = |parts: &[Range<f64>]| parts.iter().map(|part| part.end - part.start).sum::<f64>();
            let mut before = holes(&speech, &[]);
            for count in 0..=words.len() {
                let found = holes(&speech, &words[..count]);
                prop_assert!(seconds(&found) <= seconds(&before) + 1e-9);
                for hole in &found {
                    prop_assert!(speech.iter().any(|part| part.start <= hole.start && hole.end <= part.end));
                    for word in &words[..count] {
                        let end = word.end.max(word.start);
                        prop_assert!(hole.end <= word.start - REACH + 1e-9 || hole.start >= end + REACH - 1e-9);
                    }
                }
                prop_assert!(found.windows(2).all(|pair| pair[0].end <= pair[1].start));
                before = found;
            }
        }
    }
}
