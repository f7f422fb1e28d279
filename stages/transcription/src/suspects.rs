//! Words that are probably invented: decoders go on over silence, repeat themselves, and say more than the audio has time for.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Word;
use crate::transcript::{number, rounded};
use crate::word_key::word_key;

/// Why words are suspect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// They are farther than [`FAR`] from all speech.
    NoSpeech,
    /// The same word or words are there again and again.
    Repetition,
    /// Nobody speaks so fast.
    TooFast,
}

impl Reason {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Reason::NoSpeech => "no_speech",
            Reason::Repetition => "repetition",
            Reason::TooFast => "too_fast",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        let all = [Reason::NoSpeech, Reason::Repetition, Reason::TooFast];
        all.into_iter().find(|reason| reason.name() == name)
    }
}

/// Words that are probably invented, with times from the beginning of the recording in seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Suspect {
    #[serde(serialize_with = "number")]
    pub start: f64,
    #[serde(serialize_with = "number")]
    pub end: f64,
    pub text: String,
    pub reason: Reason,
    /// Whether the words were left out of the transcript.
    #[serde(default, skip_serializing_if = "is_false")]
    pub dropped: bool,
}

/// How far after a suspect the middle of one of its words may be that was found again, in seconds: a frame of the encoder. Before it,
/// the first word of a repetition stands.
const AFTER: f64 = 0.08;

impl Suspect {
    /// Whether its words are all among those of the recording or window that its times are of, in their order and at its time: they were
    /// left out, and another decoding found them.
    pub(crate) fn is_among(&self, words: &[Word]) -> bool {
        let time = self.start..=self.end + AFTER;
        let there = words
            .iter()
            .filter(|word| time.contains(&((word.start + word.end) / 2.0)));
        let mut there = there.map(|word| word_key(&word.word));
        self.text
            .split_whitespace()
            .map(word_key)
            .all(|word| there.any(|other| other == word))
    }
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// Words of a window that are suspect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SuspectWords {
    pub words: Range<usize>,
    pub reason: Reason,
}

impl SuspectWords {
    /// With texts and times, where the window begins `after` seconds.
    pub fn of(self, words: &[Word], after: f64) -> Suspect {
        let words = &words[self.words];
        let texts: Vec<&str> = words.iter().map(|word| word.word.as_str()).collect();
        let start = words.first().map_or(0.0, |word| word.start);
        let end = words.iter().map(|word| word.end).fold(start, f64::max);
        Suspect {
            start: rounded(after + start),
            end: rounded(after + end),
            text: texts.join(" "),
            reason: self.reason,
            dropped: false,
        }
    }
}

/// Words farther than this from all speech were not spoken, in seconds.
pub const FAR: f64 = 0.5;
/// The longest sequence of words whose repetitions are looked for.
const LONGEST: usize = 8;
/// How often a word is there in a row at least, and how often several words are, to be suspect if nobody said them so.
const REPEATS: (usize, usize) = (4, 3);
/// A word that is said three times in a row is suspect, too, where each takes less than this, in seconds.
const QUICK: f64 = 0.12;
/// Repetitions that were said take so long for each word at least, in seconds, and no more than [`SPOKEN`] letters a second. Half of
/// that time is speech.
const PACE: f64 = 0.2;
const SPOKEN: f64 = 25.0;
/// The mean confidence of repetitions that were said is this share of that of the first words at least.
const AS_SURE: f64 = 0.5;
/// This many words in a row that have more than [`LETTERS`] letters a second are too fast.
const RUN: usize = 5;
/// Fast speakers have some 25 letters a second.
const LETTERS: f64 = 45.0;

/// Which words of a window are suspect, in order and not overlapping. Of repeated words the first are not. `stretches`: its speech, in
/// seconds from its beginning, as are the times of words.
pub(crate) fn suspects(words: &[Word], stretches: &[Range<f64>]) -> Vec<SuspectWords> {
    let mut reasons: Vec<Option<Reason>> = words
        .iter()
        .map(|word| {
            let is_near = |part: &Range<f64>| word.start < part.end + FAR && word.end > part.start - FAR;
            (!stretches.iter().any(is_near)).then_some(Reason::NoSpeech)
        })
        .collect();
    let texts: Vec<String> = words.iter().map(|word| word_key(&word.word)).collect();
    for length in 1..=LONGEST {
        let mut at = 0;
        while at + length < texts.len() {
            let same = (at..texts.len() - length)
                .take_while(|&at| texts[at] == texts[at + length])
                .count();
            let repeats = same / length + 1;
            let range = at + length..at + same / length * length + length;
            let is_suspect = match length {
                1 => {
                    let seconds = words[range.end - 1].end - words[at].start;
                    repeats >= REPEATS.0 || (repeats == 3 && seconds < 3.0 * QUICK)
                }
                _ => repeats >= REPEATS.1,
            };
            let is_suspect = is_suspect && !were_said(&words[at..range.end], length, stretches);
            if is_suspect && !texts[at].is_empty() {
                for reason in &mut reasons[range] {
                    reason.get_or_insert(Reason::Repetition);
                }
            }
            at += same.max(1);
        }
    }
    for run in 0..(words.len() + 1).saturating_sub(RUN) {
        let range = run..run + RUN;
        let letters: usize = texts[range.clone()].iter().map(|text| text.chars().count()).sum();
        let end = words[range.clone()].iter().map(|word| word.end).fold(0.0, f64::max);
        let seconds = end - words[run].start;
        if letters as f64 > LETTERS * seconds {
            for reason in &mut reasons[range] {
                reason.get_or_insert(Reason::TooFast);
            }
        }
    }
    let mut found: Vec<SuspectWords> = Vec::new();
    for (index, reason) in reasons.into_iter().enumerate() {
        let Some(reason) = reason else { continue };
        match found.last_mut() {
            Some(last) if last.words.end == index && last.reason == reason => last.words.end += 1,
            _ => found.push(SuspectWords {
                words: index..index + 1,
                reason,
            }),
        }
    }
    found
}

/// Whether words that repeat the first `length` ones were spoken: at a pace of speech, each time over speech, and as surely as the
/// first ones. Loops of a decoder come faster or go on over silence.
fn were_said(words: &[Word], length: usize, stretches: &[Range<f64>]) -> bool {
    let copies: Vec<&[Word]> = words.chunks_exact(length).collect();
    let [first, repeats @ ..] = &copies[..] else {
        return false;
    };
    let letters: usize = first.iter().map(|word| word_key(&word.word).chars().count()).sum();
    let least = (PACE * length as f64).max(letters as f64 / SPOKEN);
    // Times of words are multiples of a frame, so the pace is that of all copies.
    let seconds = words[words.len() - length].start - words[0].start;
    let end = |copy: &[Word]| copy.last().map_or(0.0, |word| word.end.max(word.start));
    // Words come late, so a copy is over the speech since the end of the one before.
    let is_spoken = |pair: &[&[Word]]| {
        let slot = end(pair[0])..end(pair[1]);
        let speech = stretches
            .iter()
            .map(|part| part.end.min(slot.end) - part.start.max(slot.start));
        speech.filter(|seconds| *seconds > 0.0).sum::<f64>() >= 0.5 * least
    };
    let sure = |copies: &[&[Word]]| {
        let confidences = copies
            .iter()
            .copied()
            .flatten()
            .map(|word| word.confidence.unwrap_or(1.0));
        confidences.sum::<f64>() / copies.len().max(1) as f64
    };
    seconds >= least * repeats.len() as f64 - 1e-9
        && copies.windows(2).all(is_spoken)
        && sure(repeats) >= AS_SURE * sure(&copies[..1])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Words that take this many seconds each, one after the other.
    fn said(text: &str, seconds: f64) -> Vec<Word> {
        let words = text.split_whitespace().enumerate().map(|(index, word)| Word {
            word: word.to_owned(),
            start: index as f64 * seconds,
            end: (index + 1) as f64 * seconds,
            ..Word::default()
        });
        words.collect()
    }

    fn found(words: &[Word], speech: &[Range<f64>]) -> Vec<(String, Reason)> {
        let found = suspects(words, speech);
        found
            .into_iter()
            .map(|suspect| {
                let suspect = suspect.of(words, 0.0);
                (suspect.text, suspect.reason)
            })
            .collect()
    }

    #[test]
    fn repetitions_are_suspect_but_for_the_first() {
        let all = std::slice::from_ref(&(0.0..60.0));
        let of = |text: &str, seconds: f64| found(&said(text, seconds), all);
        let repeated = |text: &str| vec![(text.to_owned(), Reason::Repetition)];
        assert_eq!(of("on the way, Way way way home", 0.16), repeated("Way way way"));
        assert_eq!(of("no no no, that is it", 0.16), []);
        assert_eq!(of("way way way home", 0.1), repeated("way way"));
        assert_eq!(
            of("to be or to be or to be or not", 0.16),
            repeated("to be or to be or")
        );
        assert_eq!(of("it is so it is so", 0.16), []);
        assert_eq!(of("वह वह वह वह गया।", 0.16), repeated("वह वह वह"));
        assert_eq!(of("कि की के का", 0.16), []);
        assert_eq!(of("", 0.16), []);
        let long = "extraordinary extraordinary extraordinary extraordinary";
        assert_eq!(of(long, 0.32), repeated("extraordinary extraordinary extraordinary"));
    }

    #[test]
    fn dropped_words_that_are_found_again_are_there() {
        let words = said("on the way way way home", 0.16);
        let suspect = SuspectWords {
            words: 3..5,
            reason: Reason::Repetition,
        };
        let suspect = suspect.of(&words, 0.0);
        assert!(suspect.is_among(&words) && suspect.is_among(&said("on the way Way, way home", 0.16)));
        let without = |left_out: usize| {
            let mut words = words.clone();
            words.remove(left_out);
            words
        };
        // The first of the three stands, but not at this time.
        assert!(!suspect.is_among(&without(3)) && !suspect.is_among(&without(4)) && suspect.is_among(&without(2)));
        assert!(!suspect.is_among(&said("on the way way way home", 0.3)) && !suspect.is_among(&[]));
    }

    /// What a speech synthesizer said, as a model heard it.
    #[test]
    fn repetitions_that_were_said_are_not_suspect() {
        let of = |text: &str, times: &[(f64, f64, f64)], speech: Range<f64>| {
            let words = text
                .split(' ')
                .zip(times)
                .map(|(word, &(start, end, confidence))| Word {
                    word: word.to_owned(),
                    start,
                    end,
                    confidence: Some(confidence),
                    ..Word::default()
                });
            found(&words.collect::<Vec<_>>(), std::slice::from_ref(&speech))
        };
        let mut sevens = [
            (0.16, 0.48, 0.59),
            (0.64, 0.96, 0.64),
            (1.12, 1.44, 0.6),
            (1.68, 1.92, 0.83),
            (2.16, 2.48, 0.69),
            (2.72, 2.88, 0.48),
        ];
        let text = "seven seven seven seven seven two";
        assert_eq!(of(text, &sevens, 0.05..3.0), []);
        let ones = [
            (0.16, 0.4, 0.25),
            (0.48, 0.72, 0.18),
            (0.8, 1.12, 0.05),
            (1.2, 1.36, 0.34),
        ];
        assert_eq!(of("one one one one", &ones, 0.0..1.35), []);
        let doors: Vec<_> = (0..6)
            .map(|index| (0.3 * f64::from(index), 0.3 * f64::from(index) + 0.2, 0.5))
            .collect();
        assert_eq!(of("the door the door the door", &doors, 0.0..1.8), []);
        // The same over silence, and repetitions that are much less sure than the first.
        let suspect = vec![("seven seven seven seven".to_owned(), Reason::Repetition)];
        let over_silence = of(text, &sevens, 0.05..1.75);
        assert_eq!(
            over_silence,
            [suspect.clone(), vec![("two".to_owned(), Reason::NoSpeech)]].concat()
        );
        sevens[1..5].iter_mut().for_each(|word| word.2 = 0.1);
        assert_eq!(of(text, &sevens, 0.05..3.0), suspect);
    }

    #[test]
    fn words_far_from_speech_and_words_without_time_are_suspect() {
        let words = said("one two three four", 1.0);
        let speech = [0.0..0.5, 3.2..4.0];
        assert_eq!(found(&words, &speech), [("two".to_owned(), Reason::NoSpeech)]);
        assert_eq!(found(&words, &[]).len(), 1);
        let mut fast = said("all of these cannot be said here", 0.04);
        assert_eq!(
            found(&fast, &speech),
            [("all of these cannot be said here".to_owned(), Reason::TooFast)]
        );
        fast.truncate(4);
        assert_eq!(found(&fast, &speech), []);
    }

    proptest! {
        #[test]
        fn what_is_suspect_is_in_order_and_ordinary_speech_is_not(
            words in prop::collection::vec("[a-c]{1,2}[.,]?", 0..30), seconds in 0.0..0.6f64,
        ) {
            let words = said(&words.join(" "), seconds);
            let found = suspects(&words, std::slice::from_ref(&(0.0..100.0)));
            prop_assert!(found.windows(2).all(|pair| pair[0].words.end <= pair[1].words.start));
            prop_assert!(found.iter().all(|found| found.words.start < found.words.end && found.words.end <= words.len()));
            let different = said("every word of this differs from all before it", 0.2);
            prop_assert_eq!(suspects(&different, std::slice::from_ref(&(0.0..2.0))), []);
        }
    }
}
