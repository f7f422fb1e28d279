//! Concatenated minimum-permutation word error rate (cpWER; Watanabe et al. 2020, CHiME-6), as meeteval computes it:
//! the words of each speaker are concatenated in order of time, and each speaker of the hypothesis is assigned to at
//! most one of the reference such that the total number of errors is minimal. All words of an unassigned speaker of the
//! reference are deletions, all words of an unassigned speaker of the hypothesis are insertions.

use std::ops::AddAssign;

use flow_speakers::assignment::least_cost;
use flow_speakers::{Error, Result};

use crate::alignment::distances;
use crate::utterance::{SpeakerWords, check_length, numbered};
use crate::wer::{EditCounts, edits};

/// More speakers than this on one side are refused: the time of the assignment grows with the third power.
const MOST_SPEAKERS: usize = 1000;

/// The errors of one recording, or of several added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpErrors {
    /// Words of the reference, and the errors; the rate of both is the cpWER.
    pub words: EditCounts,
    /// By how many the reference has more speakers than the hypothesis, and the other way around.
    pub missed_speakers: u64,
    pub extra_speakers: u64,
    /// Speakers of the reference.
    pub speakers: u64,
}

impl AddAssign for CpErrors {
    fn add_assign(&mut self, other: Self) {
        self.words.add(&other.words);
        self.missed_speakers += other.missed_speakers;
        self.extra_speakers += other.extra_speakers;
        self.speakers += other.speakers;
    }
}

/// The errors of an optimal assignment. Where several are optimal it is one of them, on which the split of the errors
/// into kinds depends. Too many speakers or words are an error.
pub fn cp_errors(reference: &SpeakerWords, hypothesis: &SpeakerWords) -> Result<CpErrors> {
    let (rows, columns) = (reference.speakers.len(), hypothesis.speakers.len());
    if rows.max(columns) > MOST_SPEAKERS {
        return Err(Error::Input(format!(
            "there are {} speakers; more than {MOST_SPEAKERS} are not assigned to each other",
            rows.max(columns)
        )));
    }
    check_length(reference, hypothesis)?;
    let [said, heard] = numbered(reference, hypothesis);
    let (said, heard) = (by_speaker(reference, &said), by_speaker(hypothesis, &heard));
    let mut assigned: Vec<Option<usize>> = vec![None; rows];
    if columns > 0 {
        let mut costs = Vec::with_capacity(rows * columns);
        for ours in &said {
            for theirs in &heard {
                let distance = distances(ours.iter(), || theirs.iter()).last().copied().unwrap_or(0);
                // The errors saved compared with leaving both unassigned (all deleted, all inserted).
                costs.push(f64::from(distance) - (ours.len() + theirs.len()) as f64);
            }
        }
        assigned = least_cost(&costs, columns)?;
    }
    let mut errors = CpErrors {
        missed_speakers: rows.saturating_sub(columns) as u64,
        extra_speakers: columns.saturating_sub(rows) as u64,
        speakers: rows as u64,
        ..CpErrors::default()
    };
    let mut left = vec![true; columns];
    for (ours, theirs) in said.iter().zip(assigned) {
        let theirs = theirs.map_or(&[][..], |theirs| {
            left[theirs] = false;
            &heard[theirs][..]
        });
        errors.words.add(&edits(ours, theirs));
    }
    for (theirs, _) in heard.iter().zip(left).filter(|(_, left)| *left) {
        errors.words.add(&edits(&[], theirs));
    }
    Ok(errors)
}

fn by_speaker(side: &SpeakerWords, numbers: &[u32]) -> Vec<Vec<u32>> {
    let mut words = vec![Vec::new(); side.speakers.len()];
    for (&(_, speaker), &number) in side.words.iter().zip(numbers) {
        words[speaker].push(number);
    }
    words
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::utterance::tests::spoken;

    /// Substitutions, insertions, deletions, words, speakers missed and extra.
    fn counts(reference: &[(&str, &str)], hypothesis: &[(&str, &str)]) -> [u64; 6] {
        let errors = cp_errors(&spoken(reference), &spoken(hypothesis)).unwrap();
        let words = errors.words;
        [
            words.substitutions,
            words.insertions,
            words.deletions,
            words.units,
            errors.missed_speakers,
            errors.extra_speakers,
        ]
    }

    /// Counted by hand; they are examples of meeteval's documentation, too.
    #[test]
    fn errors_are_those_counted_by_hand() {
        let abc = [("A", "a b c"), ("B", "d e f")];
        assert_eq!(counts(&abc, &[("1", "d e f"), ("2", "a b c")]), [0, 0, 0, 6, 0, 0]);
        assert_eq!(
            counts(
                &[("A", "a b"), ("B", "c d")],
                &[("1", "a b"), ("2", "c d"), ("3", "e f")]
            ),
            [0, 2, 0, 4, 0, 1]
        );
        assert_eq!(
            counts(&[("A", "a"), ("B", "b"), ("C", "c d")], &[("1", "a"), ("2", "b")]),
            [0, 0, 2, 4, 1, 0]
        );
        // The one with more words is assigned, though both have no more than two edits: those of the other are insertions.
        assert_eq!(
            counts(&[("A", "a b")], &[("1", "z"), ("2", "a e f")]),
            [1, 2, 0, 2, 0, 1]
        );
        // A speaker without words is a speaker.
        assert_eq!(
            counts(&[("A", "a b"), ("B", "k")], &[("1", " "), ("2", "a e f")]),
            [1, 1, 1, 3, 0, 0]
        );
        // Words that a wrong speaker has are an error twice.
        assert_eq!(
            counts(&[("A", "a b c"), ("B", "d e f")], &[("1", "a b"), ("2", "c d e f")]),
            [0, 1, 1, 6, 0, 0]
        );
        // The speaker's words are in order of time, whoever speaks in between.
        assert_eq!(
            counts(&[("A", "a"), ("B", "x"), ("A", "b")], &[("1", "a b"), ("2", "x")]),
            [0, 0, 0, 3, 0, 0]
        );
    }

    #[test]
    fn a_side_may_be_empty() {
        assert_eq!(counts(&[], &[]), [0; 6]);
        assert_eq!(counts(&[("A", "a b")], &[]), [0, 0, 2, 2, 1, 0]);
        assert_eq!(counts(&[], &[("1", "a b"), ("2", "c")]), [0, 3, 0, 0, 0, 2]);
        let errors = cp_errors(&spoken(&[]), &spoken(&[("1", "a")])).unwrap();
        assert_eq!(errors.words.rate(), f64::INFINITY);
    }

    #[test]
    fn too_many_speakers_are_refused() {
        let many = SpeakerWords {
            speakers: (0..=MOST_SPEAKERS).map(|n| format!("{n:05}")).collect(),
            words: Vec::new(),
        };
        assert!(cp_errors(&many, &spoken(&[("A", "a")])).is_err());
        assert!(cp_errors(&spoken(&[("A", "a")]), &many).is_err());
    }

    /// The fewest errors of all ways to give each speaker of the reference another one of the hypothesis, or none.
    fn fewest(reference: &[Vec<String>], hypothesis: &[Vec<String>], used: &mut [bool]) -> u64 {
        let Some((ours, rest)) = reference.split_first() else {
            let left = hypothesis.iter().zip(used.iter()).filter(|(_, used)| !**used);
            return left.map(|(words, _)| words.len() as u64).sum();
        };
        let mut least = ours.len() as u64 + fewest(rest, hypothesis, used);
        for theirs in 0..hypothesis.len() {
            if !used[theirs] {
                used[theirs] = true;
                let errors = edits(ours, &hypothesis[theirs]).errors();
                least = least.min(errors + fewest(rest, hypothesis, used));
                used[theirs] = false;
            }
        }
        least
    }

    fn sides() -> impl Strategy<Value = Vec<Vec<String>>> {
        prop::collection::vec(prop::collection::vec("[abcd]", 0..7), 0..=5)
    }

    proptest! {
        #[test]
        fn no_other_assignment_has_fewer_errors(reference in sides(), hypothesis in sides()) {
            let names = ["s0", "s1", "s2", "s3", "s4"];
            let side = |words: &[Vec<String>]| {
                let texts: Vec<String> = words.iter().map(|words| words.join(" ")).collect();
                let utterances: Vec<(&str, &str)> = names.iter().copied().zip(texts.iter().map(String::as_str)).collect();
                spoken(&utterances)
            };
            let errors = cp_errors(&side(&reference), &side(&hypothesis)).unwrap();
            let least = fewest(&reference, &hypothesis, &mut vec![false; hypothesis.len()]);
            prop_assert_eq!(errors.words.errors(), least);
            // Each word of either side is counted once.
            let [said, heard] = [&reference, &hypothesis].map(|side| side.concat().len() as u64);
            let words = errors.words;
            prop_assert_eq!((words.units, words.units - words.deletions), (said, heard - words.insertions));
            prop_assert_eq!(errors.speakers, reference.len() as u64);
            prop_assert_eq!(errors.speakers + errors.extra_speakers, hypothesis.len() as u64 + errors.missed_speakers);
            prop_assert!(errors.missed_speakers == 0 || errors.extra_speakers == 0);
            // Who is named how does not matter.
            let turned = cp_errors(&side(&hypothesis), &side(&reference)).unwrap();
            prop_assert_eq!(turned.words.errors(), least);
            prop_assert_eq!(turned.missed_speakers, errors.extra_speakers);
        }
    }
}
