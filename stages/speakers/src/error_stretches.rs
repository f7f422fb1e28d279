//! The intervals of a recording with diarization errors, which [`crate::error_rate`] sums up.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::error_rate::{Interval, Scoring, check, intervals, numbered};
use crate::turns::{PRECISION, Turn};

/// An interval with the same wrong speakers throughout. Times are seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct ErrorStretch {
    pub start: f64,
    pub end: f64,
    /// How many speakers are missed, false alarms and confused at each instant.
    pub missed: usize,
    pub false_alarm: usize,
    pub confusion: usize,
    /// Speakers of the reference whose mapped speaker is not active here.
    pub reference: Vec<String>,
    /// Speakers of the hypothesis whose mapped speaker is not active here.
    pub hypothesis: Vec<String>,
}

/// The stretches with errors, in order of time, under the mapping of speakers that [`crate::error_rate::errors`] gives:
/// duration times speakers, summed up, are its missed, false and confused seconds. Errors are those of that function.
pub fn error_stretches(
    reference: &[Turn],
    hypothesis: &[Turn],
    scoring: &Scoring,
    mapping: &BTreeMap<String, String>,
) -> Result<Vec<ErrorStretch>> {
    check(reference, hypothesis, scoring)?;
    let [reference, hypothesis] = [reference, hypothesis].map(numbered);
    // The speaker of the reference for each of the hypothesis.
    let mapped: Vec<Option<usize>> = hypothesis
        .names
        .iter()
        .map(|name| reference.names.binary_search(mapping.get(name)?).ok())
        .collect();
    let mut stretches: Vec<ErrorStretch> = Vec::new();
    for interval in intervals(&reference, &hypothesis, scoring) {
        let (said, heard) = unanswered(&interval, &mapped);
        if said.is_empty() && heard.is_empty() {
            continue;
        }
        let names = |numbers: &[usize], names: &[String]| numbers.iter().map(|&n| names[n].clone()).collect::<Vec<_>>();
        let (missing, wrong) = (names(&said, &reference.names), names(&heard, &hypothesis.names));
        let end = interval.start + interval.duration;
        match stretches.last_mut() {
            Some(last)
                if interval.start - last.end <= PRECISION && last.reference == missing && last.hypothesis == wrong =>
            {
                last.end = end;
            }
            _ => stretches.push(ErrorStretch {
                start: interval.start,
                end,
                missed: said.len().saturating_sub(heard.len()),
                false_alarm: heard.len().saturating_sub(said.len()),
                confusion: said.len().min(heard.len()),
                reference: missing,
                hypothesis: wrong,
            }),
        }
    }
    Ok(stretches)
}

/// Speakers of the reference and of the hypothesis who are not mapped to each other, each as often as there are turns.
fn unanswered(interval: &Interval, mapped: &[Option<usize>]) -> (Vec<usize>, Vec<usize>) {
    let times = |active: &[(usize, usize)], wanted: usize| {
        let found = active.iter().find(|(speaker, _)| *speaker == wanted);
        found.map_or(0, |(_, times)| *times)
    };
    let mut said = Vec::new();
    for &(speaker, turns) in &interval.reference {
        let answered = interval
            .hypothesis
            .iter()
            .find(|(theirs, _)| mapped[*theirs] == Some(speaker))
            .map_or(0, |(_, times)| *times);
        said.extend(std::iter::repeat_n(speaker, turns.saturating_sub(answered)));
    }
    let mut heard = Vec::new();
    for &(speaker, turns) in &interval.hypothesis {
        let answers = mapped[speaker].map_or(0, |ours| times(&interval.reference, ours));
        heard.extend(std::iter::repeat_n(speaker, turns.saturating_sub(answers)));
    }
    (said, heard)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_rate::errors;

    fn turn(start: f64, end: f64, speaker: &str) -> Turn {
        Turn {
            start,
            end,
            speaker: speaker.to_owned(),
        }
    }

    #[test]
    fn each_kind_of_error_has_its_place() {
        let reference = [turn(0.0, 10.0, "x"), turn(8.0, 14.0, "y")];
        let hypothesis = [turn(0.0, 6.0, "1"), turn(6.0, 8.0, "2"), turn(8.0, 16.0, "2")];
        let (_, mapping) = errors(&reference, &hypothesis, &Scoring::default()).unwrap();
        let found = error_stretches(&reference, &hypothesis, &Scoring::default(), &mapping).unwrap();
        let shown: Vec<(f64, f64, [usize; 3])> = found
            .iter()
            .map(|s| (s.start, s.end, [s.missed, s.false_alarm, s.confusion]))
            .collect();
        assert_eq!(
            shown,
            [(6.0, 8.0, [0, 0, 1]), (8.0, 10.0, [1, 0, 0]), (14.0, 16.0, [0, 1, 0])]
        );
        assert_eq!(
            (found[0].reference.as_slice(), found[0].hypothesis.as_slice()),
            (&["x".to_owned()][..], &["2".to_owned()][..])
        );
        assert_eq!(
            error_stretches(&[], &[], &Scoring::default(), &BTreeMap::new()),
            Ok(Vec::new())
        );
        let bad = [turn(2.0, 1.0, "x")];
        assert!(error_stretches(&bad, &[], &Scoring::default(), &BTreeMap::new()).is_err());
    }

    /// Summed up, stretches are the errors that are counted, with collars, overlaps and turns of one speaker that overlap.
    #[test]
    fn stretches_add_up_to_the_errors() {
        let mut state = 11u64;
        let mut next = |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let mut with_errors = 0;
        for round in 0..200 {
            let mut side = |letter: char| -> Vec<Turn> {
                let turns = 0..next(12);
                turns
                    .map(|_| {
                        let start = next(400) as f64 / 10.0;
                        turn(start, start + next(80) as f64 / 10.0, &format!("{letter}{}", next(4)))
                    })
                    .collect()
            };
            let (reference, hypothesis) = (side('r'), side('h'));
            let scoring = Scoring {
                collar: if round % 3 == 0 { 0.5 } else { 0.0 },
                skip_overlap: round % 4 == 0,
                uem: (round % 5 == 0).then(|| vec![(3.0, 30.0)]),
            };
            let (expected, mapping) = errors(&reference, &hypothesis, &scoring).unwrap();
            let found = error_stretches(&reference, &hypothesis, &scoring, &mapping).unwrap();
            let sum = |of: fn(&ErrorStretch) -> usize| -> f64 {
                found.iter().map(|s| (s.end - s.start) * of(s) as f64).sum()
            };
            // Sums of some hundred doubles below 1e3.
            let close = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-6, "{found}, not {expected}");
            close(sum(|s| s.missed), expected.missed);
            close(sum(|s| s.false_alarm), expected.false_alarm);
            close(sum(|s| s.confusion), expected.confusion);
            with_errors += usize::from(!found.is_empty());
        }
        assert!(with_errors > 100);
    }
}
