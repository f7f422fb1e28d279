//! What boosted phrases did: which were written, and how often the model alone would have chosen otherwise.

use std::collections::HashMap;
use std::ops::Range;

use flow_speakers::silero::SAMPLE_RATE;
use serde::{Deserialize, Serialize};

use crate::letter_case::Case;
use crate::recognizer::Heard;
use crate::transcript::{numbers, rounded};
use crate::word_key::word_key;

/// A boosted phrase that was written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BoostedPhrase {
    pub phrase: String,
    /// How often it was written.
    pub count: u64,
    /// How often a token of it was not the one that the model alone would have chosen after the tokens before.
    pub changed: u64,
    /// Where it begins, in seconds from the beginning of the recording, in order.
    #[serde(serialize_with = "numbers")]
    pub times: Vec<f64>,
}

/// What boosted phrases did in a recording.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Boosted {
    /// The phrases that were written, in the order in which they were given.
    pub phrases: Vec<BoostedPhrase>,
    /// Words that belong to no phrase and have a token that the model alone would not have chosen: such as longer words that begin as
    /// a phrase does.
    pub other_words: u64,
    /// Phrases with letters of a case of which the recording has none, though it has many of the other: the model writes one case
    /// alone, and these phrases have no effect as they are spelled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_case: Vec<String>,
}

impl Boosted {
    /// Adds what phrases did in another channel.
    pub fn add(&mut self, other: Boosted) {
        for phrase in other.phrases {
            match self.phrases.iter_mut().find(|known| known.phrase == phrase.phrase) {
                Some(known) => {
                    known.count += phrase.count;
                    known.changed += phrase.changed;
                    known.times.extend(phrase.times);
                    known.times.sort_by(f64::total_cmp);
                }
                None => self.phrases.push(phrase),
            }
        }
        self.other_words += other.other_words;
        for phrase in other.other_case {
            if !self.other_case.contains(&phrase) {
                self.other_case.push(phrase);
            }
        }
    }
}

/// Boosted phrases by their first words. They are compared by letters and digits alone.
#[derive(Debug, Clone, Default)]
pub struct PhraseIndex {
    /// Texts, and the keys of their words.
    phrases: Vec<(String, Vec<String>)>,
    /// The longest first.
    by_first: HashMap<String, Vec<usize>>,
}

impl PhraseIndex {
    pub fn of(texts: &[String]) -> Self {
        let mut index = PhraseIndex::default();
        for text in texts {
            let keys = text.split_whitespace().map(word_key).filter(|key| !key.is_empty());
            let keys: Vec<String> = keys.collect();
            let Some(first) = keys.first() else { continue };
            let of_first = index.by_first.entry(first.clone()).or_default();
            if of_first.iter().any(|&known| index.phrases[known].1 == keys) {
                continue;
            }
            let shorter = of_first.partition_point(|&known| index.phrases[known].1.len() >= keys.len());
            of_first.insert(shorter, index.phrases.len());
            index.phrases.push((text.clone(), keys));
        }
        index
    }

    /// What was written of them in the windows of a recording, whose words come `delay` seconds late. At each place the longest
    /// phrase counts; phrases that begin in one window and end in the next are not found.
    pub fn written(&self, windows: &[Range<u64>], heard: &[Heard], delay: f64) -> Boosted {
        let mut all: Vec<BoostedPhrase> = vec![BoostedPhrase::default(); self.phrases.len()];
        let mut other_words = 0;
        for (window, heard) in windows.iter().zip(heard) {
            let after = window.start as f64 / f64::from(SAMPLE_RATE) - delay;
            let keys: Vec<String> = heard.words.iter().map(|word| word_key(&word.word)).collect();
            let is_changed = |word: usize| {
                let tokens = heard.tokens.get(word);
                tokens.is_some_and(|tokens| tokens.iter().any(|token| !token.is_first_choice))
            };
            let mut at = 0;
            while at < keys.len() {
                let of_first = self.by_first.get(&keys[at]).into_iter().flatten();
                let mut here = of_first.filter(|&&phrase| keys[at..].starts_with(&self.phrases[phrase].1));
                let Some(&phrase) = here.next() else {
                    other_words += u64::from(is_changed(at));
                    at += 1;
                    continue;
                };
                let words = at..at + self.phrases[phrase].1.len();
                let written = &mut all[phrase];
                written.count += 1;
                written.times.push(rounded((after + heard.words[at].start).max(0.0)));
                written.changed += u64::from(words.clone().any(is_changed));
                at = words.end;
            }
        }
        let phrases = all
            .into_iter()
            .zip(&self.phrases)
            .filter(|(written, _)| written.count > 0);
        Boosted {
            phrases: phrases
                .map(|(written, (text, _))| BoostedPhrase {
                    phrase: text.clone(),
                    ..written
                })
                .collect(),
            other_words,
            other_case: self.in_other_case(heard),
        }
    }

    /// The phrases that are not in the one case in which all is written.
    fn in_other_case(&self, heard: &[Heard]) -> Vec<String> {
        let words = heard.iter().flat_map(|heard| &heard.words);
        let Some(case) = Case::of(words.map(|word| word.word.as_str())) else {
            return Vec::new();
        };
        let texts = self.phrases.iter().map(|(text, _)| text);
        texts.filter(|text| case.applied(text) != **text).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Word;
    use crate::tokens::Token;

    /// Words of a tenth of a second each; those with a star have a second token that is not the model's own choice.
    fn heard(text: &str) -> Heard {
        let (mut words, mut tokens) = (Vec::new(), Vec::new());
        for (index, word) in text.split_whitespace().enumerate() {
            let start = index as f64 / 10.0;
            words.push(Word {
                word: word.trim_end_matches('*').to_owned(),
                start,
                end: start + 0.1,
                ..Word::default()
            });
            let token = |is_first_choice: bool| Token {
                bytes: Vec::new(),
                logprob: -1.0,
                is_first_choice,
            };
            tokens.push(vec![token(true), token(!word.ends_with('*'))]);
        }
        Heard {
            words,
            tokens,
            ..Heard::default()
        }
    }

    #[test]
    fn the_longest_phrases_are_counted_with_what_they_changed() {
        let texts = ["New York", "north", "new york city", "NORTH", "—", "never"].map(str::to_owned);
        let index = PhraseIndex::of(&texts);
        let windows = [0..16_000, 32_000..48_000];
        let texts = ["to New* York, North* northern* York", "new york City north* a*"];
        let mut found = index.written(&windows, &texts.map(heard), 0.05);
        let phrase = |phrase: &str, changed: u64, times: &[f64]| BoostedPhrase {
            phrase: phrase.to_owned(),
            count: times.len() as u64,
            changed,
            times: times.to_vec(),
        };
        let expected = [
            phrase("New York", 1, &[0.05]),
            phrase("north", 2, &[0.25, 2.25]),
            phrase("new york city", 0, &[1.95]),
        ];
        assert_eq!((&found.phrases[..], found.other_words), (&expected[..], 2));
        found.add(Boosted {
            phrases: vec![phrase("north", 0, &[1.0]), phrase("never", 1, &[0.0])],
            other_words: 1,
            other_case: vec!["NORTH".to_owned()],
        });
        assert_eq!(found.other_case, ["NORTH"]);
        assert_eq!(found.phrases[1], phrase("north", 2, &[0.25, 1.0, 2.25]));
        assert_eq!((found.phrases.len(), found.other_words), (4, 3));
        // Where nothing is written in capitals, phrases with capitals have no effect; a recording of few letters tells nothing.
        for (text, expected) in [
            ("the trees of new york city", &["New York"][..]),
            (
                "THE TREES OF NEW YORK",
                &["New York", "north", "new york city", "never"],
            ),
            ("The trees of new york city", &[]),
            ("the trees", &[]),
        ] {
            let found = index.written(&windows[..1], &[heard(text)], 0.0);
            assert_eq!(found.other_case, expected, "{text}");
        }
        assert_eq!(
            PhraseIndex::default()
                .written(&windows, &[heard("north*")], 0.0)
                .other_words,
            1
        );
    }
}
