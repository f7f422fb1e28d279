//! Word diarization error rate (WDER; Shafey, Soltau and Shafran 2019, "Joint speech recognition and speaker diarization
//! via sequence transduction"): of the words of the hypothesis that are aligned to words of the reference, the share whose
//! speaker is wrong, `(S_IS + C_IS) / (S + C)` for substituted and correct words and those of them with an incorrect
//! speaker. Insertions and deletions do not count: see cpWER for these.

use std::ops::AddAssign;

use flow_speakers::Result;
use flow_speakers::assignment::least_cost;

use crate::alignment::aligned;
use crate::utterance::{SpeakerWords, check_length, numbered};

/// The words of one recording, or of several added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WordSpeakerErrors {
    /// Words of the hypothesis that are correct or substituted.
    pub aligned: u64,
    /// Those of them whose speaker is not mapped to that of the word of the reference.
    pub wrong_speaker: u64,
}

impl WordSpeakerErrors {
    /// The WDER. Without aligned words there is none.
    pub fn rate(&self) -> Option<f64> {
        (self.aligned > 0).then(|| self.wrong_speaker as f64 / self.aligned as f64)
    }
}

impl AddAssign for WordSpeakerErrors {
    fn add_assign(&mut self, other: Self) {
        self.aligned += other.aligned;
        self.wrong_speaker += other.wrong_speaker;
    }
}

/// The words of all speakers, in order of their utterances, are aligned without regard to who speaks, with the fewest
/// errors. Speakers of the hypothesis are then mapped one to one to those of the reference so that the most aligned words
/// have the right speaker. Too many words are an error.
pub fn word_speaker_errors(reference: &SpeakerWords, hypothesis: &SpeakerWords) -> Result<WordSpeakerErrors> {
    check_length(reference, hypothesis)?;
    let [said, heard] = numbered(reference, hypothesis);
    let pairs = aligned(&said, &heard);
    let columns = hypothesis.speakers.len();
    // Aligned words by speaker of the reference and of the hypothesis.
    let mut common = vec![0u32; reference.speakers.len() * columns];
    for &(ours, theirs) in &pairs {
        common[reference.words[ours].1 * columns + hypothesis.words[theirs].1] += 1;
    }
    let mut right = 0;
    if !pairs.is_empty() {
        let costs: Vec<f64> = common.iter().map(|&words| -f64::from(words)).collect();
        let mapped = least_cost(&costs, columns)?;
        for (ours, theirs) in mapped.into_iter().enumerate() {
            right += theirs.map_or(0, |theirs| u64::from(common[ours * columns + theirs]));
        }
    }
    let aligned = pairs.len() as u64;
    Ok(WordSpeakerErrors {
        aligned,
        wrong_speaker: aligned - right,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::utterance::tests::spoken;
    use crate::wer::edits;

    fn counts(reference: &[(&str, &str)], hypothesis: &[(&str, &str)]) -> (u64, u64) {
        let errors = word_speaker_errors(&spoken(reference), &spoken(hypothesis)).unwrap();
        (errors.wrong_speaker, errors.aligned)
    }

    #[test]
    fn errors_are_those_counted_by_hand() {
        let reference = [("A", "how are you today"), ("B", "fine thanks"), ("A", "good")];
        assert_eq!(
            counts(
                &reference,
                &[("2", "how are you today"), ("1", "fine thanks"), ("2", "good")]
            ),
            (0, 7)
        );
        // `today` is given to the other speaker.
        assert_eq!(
            counts(
                &reference,
                &[("2", "how are you"), ("1", "today fine thanks"), ("2", "good")]
            ),
            (1, 7)
        );
        // Substituted with the wrong speaker: an error. Deleted and inserted: not counted.
        assert_eq!(
            counts(
                &reference,
                &[("2", "how you"), ("1", "tomorrow fine thanks well"), ("2", "good")]
            ),
            (1, 6)
        );
        // One speaker for all: the four words of B, the smaller part, are wrong.
        let two = [("A", "a b c d e"), ("B", "f g h i")];
        assert_eq!(counts(&two, &[("1", "a b c d e f g h i")]), (4, 9));
        // A speaker who is cut in two: the smaller part is wrong.
        assert_eq!(counts(&[("A", "a b c d e")], &[("1", "a b"), ("2", "c d e")]), (2, 5));
    }

    #[test]
    fn a_side_may_be_empty() {
        for (reference, hypothesis) in [
            (&[][..], &[][..]),
            (&[("A", "a")], &[]),
            (&[], &[("1", "a")]),
            (&[("A", "")], &[("1", "a")]),
        ] {
            assert_eq!(counts(reference, hypothesis), (0, 0));
            let errors = word_speaker_errors(&spoken(reference), &spoken(hypothesis)).unwrap();
            assert_eq!(errors.rate(), None);
        }
        let errors = WordSpeakerErrors {
            aligned: 4,
            wrong_speaker: 1,
        };
        assert_eq!(errors.rate(), Some(0.25));
    }

    fn side() -> impl Strategy<Value = Vec<(usize, String)>> {
        prop::collection::vec((0..4usize, "[abc]"), 0..12)
    }

    const NAMES: [&str; 4] = ["s0", "s1", "s2", "s3"];

    fn words_of(side: &[(usize, String)]) -> SpeakerWords {
        let utterances: Vec<(&str, &str)> = side
            .iter()
            .map(|(speaker, word)| (NAMES[*speaker], word.as_str()))
            .collect();
        spoken(&utterances)
    }

    /// The most words that are right under any one-to-one mapping, tried one by one.
    fn most_right(pairs: &[(usize, usize)], speaker: usize, mapped: &mut Vec<Option<usize>>) -> u64 {
        if speaker == NAMES.len() {
            return pairs
                .iter()
                .filter(|(ours, theirs)| mapped[*ours] == Some(*theirs))
                .count() as u64;
        }
        let mut most = 0;
        for theirs in 0..NAMES.len() {
            if !mapped.contains(&Some(theirs)) {
                mapped.push(Some(theirs));
                most = most.max(most_right(pairs, speaker + 1, mapped));
                mapped.pop();
            }
        }
        most
    }

    proptest! {
        #[test]
        fn no_other_mapping_has_fewer_errors(reference in side(), hypothesis in side()) {
            let errors = word_speaker_errors(&words_of(&reference), &words_of(&hypothesis)).unwrap();
            let words = |side: &[(usize, String)]| -> Vec<String> { side.iter().map(|(_, word)| word.clone()).collect() };
            let (said, heard) = (words(&reference), words(&hypothesis));
            let counted = edits(&said, &heard);
            prop_assert_eq!(errors.aligned, counted.units - counted.deletions);
            let pairs: Vec<(usize, usize)> = aligned(&said, &heard)
                .into_iter()
                .map(|(ours, theirs)| (reference[ours].0, hypothesis[theirs].0))
                .collect();
            let right = most_right(&pairs, 0, &mut Vec::new());
            prop_assert_eq!(errors.aligned - errors.wrong_speaker, right);
        }
    }
}
