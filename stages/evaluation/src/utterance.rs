//! Transcripts with speakers, which [`crate::cpwer`] and [`crate::wder`] compare.

use std::collections::{BTreeMap, HashMap};

use flow_speakers::turns::{Turn, joined, sort};
use flow_text::language_tag::split_tag;

use crate::normalize::Normalizer;
use crate::wer::words;

/// An utterance of one speaker, with its start and end.
#[derive(Clone, Debug, PartialEq)]
pub struct Utterance {
    pub turn: Turn,
    pub text: String,
}

impl Utterance {
    /// Times are seconds.
    pub fn new(start: f64, end: f64, speaker: impl Into<String>, text: impl Into<String>) -> Utterance {
        let turn = Turn {
            start,
            end,
            speaker: speaker.into(),
        };
        Utterance {
            turn,
            text: text.into(),
        }
    }
}

/// When each speaker speaks: turns of one speaker that overlap or touch are joined.
pub fn turns(utterances: &[Utterance]) -> Vec<Turn> {
    let mut by_speaker: BTreeMap<&str, Vec<Turn>> = BTreeMap::new();
    for utterance in utterances {
        let turns = by_speaker.entry(&utterance.turn.speaker).or_default();
        turns.push(utterance.turn.clone());
    }
    let mut all = Vec::new();
    for (_, mut turns) in by_speaker {
        sort(&mut turns);
        all.append(&mut joined(turns, 0.0));
    }
    sort(&mut all);
    all
}

/// The utterances that are scored where only parts of a recording are: those that overlap with one of the parts, as a
/// whole, as in meeteval.
pub fn within(utterances: &[Utterance], parts: &[(f64, f64)]) -> Vec<Utterance> {
    let counts = |utterance: &&Utterance| {
        let Turn { start, end, .. } = utterance.turn;
        parts
            .iter()
            .any(|&(part_start, part_end)| start < part_end && end > part_start)
    };
    utterances.iter().filter(counts).cloned().collect()
}

/// A recording's words with their speakers: utterances in order of their starts, as listed where these are equal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpeakerWords {
    /// Names of all who have an utterance, with words or without, in order.
    pub speakers: Vec<String>,
    /// Each word with the place of its speaker in `speakers`.
    pub words: Vec<(String, usize)>,
}

impl SpeakerWords {
    /// Words are separated by white space after normalisation. A language tag before a text is not a word.
    pub fn new(utterances: &[Utterance], normalizer: &Normalizer) -> Self {
        let mut speakers: Vec<String> = utterances.iter().map(|u| u.turn.speaker.clone()).collect();
        speakers.sort_unstable();
        speakers.dedup();
        let mut ordered: Vec<&Utterance> = utterances.iter().collect();
        ordered.sort_by(|a, b| a.turn.start.total_cmp(&b.turn.start));
        let mut said = Vec::new();
        for utterance in ordered {
            // Every name is there: they were collected from the same utterances.
            let Ok(speaker) = speakers.binary_search(&utterance.turn.speaker) else {
                continue;
            };
            let (_, text) = split_tag(&utterance.text);
            let text = normalizer.apply(text, "");
            said.extend(words(&text).into_iter().map(|word| (word.to_owned(), speaker)));
        }
        Self { speakers, words: said }
    }
}

/// The words of two recordings as numbers, equal where the words are, which are fast to compare.
pub(crate) fn numbered<'t>(reference: &'t SpeakerWords, hypothesis: &'t SpeakerWords) -> [Vec<u32>; 2] {
    let mut numbers: HashMap<&'t str, u32> = HashMap::new();
    [reference, hypothesis].map(|side| {
        let number = |(word, _): &'t (String, usize)| {
            let next = numbers.len() as u32;
            *numbers.entry(word.as_str()).or_insert(next)
        };
        side.words.iter().map(number).collect()
    })
}

/// More pairs of words than this are not compared: 200,000 on either side, some 20 hours of speech.
const MOST_PAIRS: u64 = 40_000_000_000;

/// An error where a recording has too many words to be compared in minutes.
pub(crate) fn check_length(reference: &SpeakerWords, hypothesis: &SpeakerWords) -> flow_speakers::Result<()> {
    let (said, heard) = (reference.words.len(), hypothesis.words.len());
    if (said as u64).saturating_mul(heard as u64) <= MOST_PAIRS {
        return Ok(());
    }
    Err(flow_speakers::Error::Input(format!(
        "{said} words against {heard} are too many to be compared: give the parts of the recording as recordings of their own"
    )))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::normalize::Normalization;

    pub fn utterance(start: f64, end: f64, speaker: &str, text: &str) -> Utterance {
        Utterance::new(start, end, speaker, text)
    }

    /// Utterances of a second each, one after the other.
    pub fn spoken(utterances: &[(&str, &str)]) -> SpeakerWords {
        let utterances = (0..).zip(utterances);
        let utterances: Vec<Utterance> = utterances
            .map(|(second, (speaker, text))| utterance(f64::from(second), f64::from(second) + 1.0, speaker, text))
            .collect();
        SpeakerWords::new(&utterances, &Normalizer::default())
    }

    #[test]
    fn words_stand_in_order_of_their_utterances() {
        let utterances = [
            utterance(5.0, 6.0, "b", "<|en|> Three, four"),
            utterance(1.0, 9.0, "a", " One\ttwo "),
            utterance(5.0, 5.5, "a", "five"),
            utterance(7.0, 8.0, "c", ""),
        ];
        let plain = SpeakerWords::new(&utterances, &Normalizer::default());
        let words = |spoken: &SpeakerWords| -> Vec<(String, usize)> { spoken.words.clone() };
        let expected = [("One", 0), ("two", 0), ("Three,", 1), ("four", 1), ("five", 0)];
        assert_eq!(
            words(&plain),
            expected.map(|(word, speaker)| (word.to_owned(), speaker))
        );
        assert_eq!(plain.speakers, ["a", "b", "c"]);
        let normalizer = Normalizer {
            normalization: Normalization::KeepMarks,
            ..Normalizer::default()
        };
        let normalized = SpeakerWords::new(&utterances, &normalizer);
        assert_eq!(
            (normalized.words[0].0.as_str(), normalized.words[2].0.as_str()),
            ("one", "three")
        );
        let [ours, theirs] = numbered(&plain, &normalized);
        assert_eq!((ours.len(), theirs.len()), (5, 5));
        assert!(ours[1] == theirs[1] && ours[0] != theirs[0]);
    }

    #[test]
    fn turns_of_one_speaker_do_not_overlap() {
        let utterances = [
            utterance(2.0, 4.0, "a", "x"),
            utterance(0.0, 3.0, "a", "y"),
            utterance(3.5, 5.0, "b", "z"),
            utterance(6.0, 7.0, "a", ""),
        ];
        let found: Vec<(f64, f64, String)> = turns(&utterances)
            .into_iter()
            .map(|turn| (turn.start, turn.end, turn.speaker))
            .collect();
        let expected = [(0.0, 4.0, "a"), (3.5, 5.0, "b"), (6.0, 7.0, "a")];
        assert_eq!(found, expected.map(|(start, end, name)| (start, end, name.to_owned())));
        assert_eq!(
            within(&utterances, &[(0.0, 2.0), (6.5, 9.0)]),
            [utterances[1].clone(), utterances[3].clone()]
        );
        // Middles outside of a part count as well; where utterances only touch it, they do not.
        assert_eq!(within(&utterances, &[(2.5, 2.75)]), utterances[..2]);
        assert!(within(&utterances, &[(5.0, 6.0)]).is_empty());
    }

    #[test]
    fn what_is_too_long_is_refused() {
        let long = SpeakerWords {
            speakers: vec!["a".to_owned()],
            words: vec![(String::new(), 0); 200_001],
        };
        assert!(check_length(&long, &long).is_err());
        assert!(check_length(&long, &SpeakerWords::default()).is_ok());
    }
}
