//! Diarization error rate (DER), Jaccard error rate (JER) and the error rate of speech detection, as pyannote.metrics 4
//! counts them; DER is also that of NIST's `md-eval`, except for the definition of collars.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use crate::assignment::least_cost;
use crate::error::{Error, Result};
use crate::turns::{PRECISION, Turn};

/// What of a recording is scored.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scoring {
    /// Seconds that are excluded around each boundary of the reference, half before it and half after it. (`md-eval`
    /// takes the half: its 0.25 is 0.5 here.)
    pub collar: f64,
    /// Leaves out where turns of the reference overlap.
    pub skip_overlap: bool,
    /// The parts that are scored, from and to; without them all from the first to the last turn of both.
    pub uem: Option<Vec<(f64, f64)>>,
}

/// Times in speaker-seconds: at an instant with R speakers in the reference and H in the hypothesis, K of them mapped to
/// each other, max(0, R-H) are missed, max(0, H-R) false alarms, and min(R, H)-K confused.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Errors {
    pub total: f64,
    pub correct: f64,
    pub missed: f64,
    pub false_alarm: f64,
    pub confusion: f64,
    /// Speech without regard to speakers, in seconds: of the reference, missed, and false alarms.
    pub speech: f64,
    pub missed_speech: f64,
    pub false_speech: f64,
    /// Speakers of the reference, and the sum of their Jaccard errors.
    pub speakers: usize,
    pub jaccard: f64,
}

impl Errors {
    /// Missed, false and confused speech per speech of the reference. Without any of that 1, or 0 if there is no error.
    pub fn der(&self) -> f64 {
        rate(self.missed + self.false_alarm + self.confusion, self.total)
    }

    /// Mean over the reference's speakers of the Jaccard distance to their mapped speaker: 1 - intersection / union of
    /// their times. Without a mapped speaker 1.
    pub fn jer(&self) -> f64 {
        if self.speakers == 0 {
            1.0
        } else {
            self.jaccard / self.speakers as f64
        }
    }

    /// Missed and false speech per speech of the reference, without regard to speakers.
    pub fn detection(&self) -> f64 {
        rate(self.missed_speech + self.false_speech, self.speech)
    }
}

fn rate(errors: f64, total: f64) -> f64 {
    match total > 0.0 {
        true => errors / total,
        false if errors > 0.0 => 1.0,
        false => 0.0,
    }
}

/// Errors of several recordings together.
impl AddAssign for Errors {
    fn add_assign(&mut self, other: Self) {
        self.total += other.total;
        self.correct += other.correct;
        self.missed += other.missed;
        self.false_alarm += other.false_alarm;
        self.confusion += other.confusion;
        self.speech += other.speech;
        self.missed_speech += other.missed_speech;
        self.false_speech += other.false_speech;
        self.speakers += other.speakers;
        self.jaccard += other.jaccard;
    }
}

/// Errors of a recording's hypothesis, and the speaker of the reference that each of its speakers is mapped to: so that
/// they have most time in common. Times that are not finite, turns or parts that end before they start, and a collar below
/// 0 are errors.
pub fn errors(
    reference: &[Turn],
    hypothesis: &[Turn],
    scoring: &Scoring,
) -> Result<(Errors, BTreeMap<String, String>)> {
    check(reference, hypothesis, scoring)?;
    let [reference, hypothesis] = [reference, hypothesis].map(numbered);
    let intervals = intervals(&reference, &hypothesis, scoring);
    let (rows, columns) = (hypothesis.names.len(), reference.names.len());

    let mut common = vec![0.0; rows * columns];
    for interval in &intervals {
        for &(theirs, times) in &interval.hypothesis {
            for &(ours, also) in &interval.reference {
                common[theirs * columns + ours] += interval.duration * (times * also) as f64;
            }
        }
    }
    let mut mapped: Vec<Option<usize>> = vec![None; rows];
    if columns > 0 {
        let costs: Vec<f64> = common.iter().map(|common| -common).collect();
        mapped = least_cost(&costs, columns)?;
        for (row, column) in mapped.iter_mut().enumerate() {
            *column = column.filter(|column| common[row * columns + column] > 0.0);
        }
    }

    let mut sum = Errors::default();
    // For each speaker of the reference: union and intersection with the mapped speaker.
    let mut jaccard = vec![(0.0, 0.0); columns];
    let mut mapped_to = vec![None; columns];
    for (theirs, ours) in mapped.iter().enumerate() {
        if let Some(ours) = *ours {
            mapped_to[ours] = Some(theirs);
        }
    }
    for Interval {
        duration,
        reference,
        hypothesis,
        ..
    } in &intervals
    {
        let count = |active: &[(usize, usize)]| active.iter().map(|(_, times)| times).sum::<usize>();
        let times = |active: &[(usize, usize)], wanted: usize| {
            active
                .iter()
                .find(|(speaker, _)| *speaker == wanted)
                .map_or(0, |(_, times)| *times)
        };
        let (ours, theirs) = (count(reference), count(hypothesis));
        let correct: usize = hypothesis
            .iter()
            .map(|&(speaker, heard)| mapped[speaker].map_or(0, |ours| heard.min(times(reference, ours))))
            .sum();
        sum.total += duration * ours as f64;
        sum.correct += duration * correct as f64;
        sum.missed += duration * ours.saturating_sub(theirs) as f64;
        sum.false_alarm += duration * theirs.saturating_sub(ours) as f64;
        sum.confusion += duration * (ours.min(theirs) - correct) as f64;
        sum.speech += if ours > 0 { *duration } else { 0.0 };
        sum.missed_speech += if ours > 0 && theirs == 0 { *duration } else { 0.0 };
        sum.false_speech += if ours == 0 && theirs > 0 { *duration } else { 0.0 };
        for (ours, (either, both)) in jaccard.iter_mut().enumerate() {
            let here = times(reference, ours) > 0;
            let there = mapped_to[ours].is_some_and(|theirs| times(hypothesis, theirs) > 0);
            *either += if here || there { *duration } else { 0.0 };
            *both += if here && there { *duration } else { 0.0 };
        }
    }
    for (either, both) in jaccard {
        // A speaker without scored time does not count.
        if either > 0.0 {
            sum.speakers += 1;
            sum.jaccard += 1.0 - both / either;
        }
    }
    let names = mapped.iter().enumerate().filter_map(|(theirs, ours)| {
        let ours = (*ours)?;
        Some((hypothesis.names[theirs].clone(), reference.names[ours].clone()))
    });
    Ok((sum, names.collect()))
}

pub(crate) fn check(reference: &[Turn], hypothesis: &[Turn], scoring: &Scoring) -> Result<()> {
    let parts = scoring.uem.iter().flatten().map(|&(start, end)| ("UEM", start, end));
    let turns = |what: &'static str, turns: &[Turn]| -> Vec<(&'static str, f64, f64)> {
        turns.iter().map(|turn| (what, turn.start, turn.end)).collect()
    };
    let turns = turns("reference", reference)
        .into_iter()
        .chain(turns("hypothesis", hypothesis));
    for (what, start, end) in turns.chain(parts) {
        if !start.is_finite() || !end.is_finite() || end < start {
            return Err(Error::Input(format!(
                "the {what} has a stretch from {start} to {end} s"
            )));
        }
    }
    if !(scoring.collar >= 0.0 && scoring.collar.is_finite()) {
        let collar = scoring.collar;
        return Err(Error::Input(format!(
            "the collar is {collar}; it must be a number of seconds, 0 or more"
        )));
    }
    Ok(())
}

/// Turns with their speakers as numbers.
pub(crate) struct Numbered {
    pub names: Vec<String>,
    turns: Vec<(f64, f64, usize)>,
}

/// Without turns that are empty. Speakers are numbered by their names in order.
pub(crate) fn numbered(turns: &[Turn]) -> Numbered {
    let turns: Vec<&Turn> = turns.iter().filter(|turn| turn.duration() > PRECISION).collect();
    let mut names: Vec<String> = turns.iter().map(|turn| turn.speaker.clone()).collect();
    names.sort_unstable();
    names.dedup();
    let number = |turn: &&Turn| {
        let speaker = names.binary_search(&turn.speaker).expect("all names are there");
        (turn.start, turn.end, speaker)
    };
    let turns = turns.iter().map(number).collect();
    Numbered { names, turns }
}

/// A scored interval without boundaries: the active speakers, each with the number of its concurrent turns.
pub(crate) struct Interval {
    pub start: f64,
    pub duration: f64,
    pub reference: Vec<(usize, usize)>,
    pub hypothesis: Vec<(usize, usize)>,
}

/// What begins or ends.
#[derive(Clone, Copy)]
enum Change {
    Scored,
    Collar,
    Reference(usize),
    Hypothesis(usize),
}

pub(crate) fn intervals(reference: &Numbered, hypothesis: &Numbered, scoring: &Scoring) -> Vec<Interval> {
    // Each with its time and what it adds.
    let mut changes: Vec<(f64, i64, Change)> = Vec::new();
    let mut stretch = |start: f64, end: f64, what: Change| {
        changes.push((start, 1, what));
        changes.push((end, -1, what));
    };
    match &scoring.uem {
        Some(parts) => parts
            .iter()
            .for_each(|&(start, end)| stretch(start, end, Change::Scored)),
        None => {
            let all = || reference.turns.iter().chain(&hypothesis.turns);
            let first = all().map(|turn| turn.0).min_by(f64::total_cmp);
            let last = all().map(|turn| turn.1).max_by(f64::total_cmp);
            if let (Some(first), Some(last)) = (first, last) {
                stretch(first, last, Change::Scored);
            }
        }
    }
    for &(start, end, speaker) in &reference.turns {
        stretch(start, end, Change::Reference(speaker));
        if scoring.collar > 0.0 {
            let half = 0.5 * scoring.collar;
            stretch(start - half, start + half, Change::Collar);
            stretch(end - half, end + half, Change::Collar);
        }
    }
    for &(start, end, speaker) in &hypothesis.turns {
        stretch(start, end, Change::Hypothesis(speaker));
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));

    let mut intervals = Vec::new();
    let (mut scored, mut collars) = (0i64, 0i64);
    let mut active = [BTreeMap::<usize, i64>::new(), BTreeMap::new()];
    for (index, &(time, adds, what)) in changes.iter().enumerate() {
        match what {
            Change::Scored => scored += adds,
            Change::Collar => collars += adds,
            Change::Reference(speaker) | Change::Hypothesis(speaker) => {
                let side = usize::from(matches!(what, Change::Hypothesis(_)));
                let turns = active[side].entry(speaker).or_default();
                *turns += adds;
                if *turns == 0 {
                    active[side].remove(&speaker);
                }
            }
        }
        let Some(&(next, ..)) = changes.get(index + 1) else {
            break;
        };
        let overlap = active[0].values().sum::<i64>() > 1;
        let silent = active.iter().all(BTreeMap::is_empty);
        if next - time > PRECISION && scored > 0 && collars == 0 && !silent && !(scoring.skip_overlap && overlap) {
            // Turns are counted from their starts on, so no count is below 0 after the changes of one time, and what is
            // between two times is never empty.
            let [reference, hypothesis] = [0, 1].map(|side| {
                active[side]
                    .iter()
                    .map(|(&speaker, &turns)| (speaker, turns as usize))
                    .collect()
            });
            intervals.push(Interval {
                start: time,
                duration: next - time,
                reference,
                hypothesis,
            });
        }
    }
    intervals
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::golden;

    fn turns(value: &Value) -> Vec<Turn> {
        let turn = |turn: &Value| Turn {
            start: turn[0].as_f64().unwrap(),
            end: turn[1].as_f64().unwrap(),
            speaker: turn[2].as_str().unwrap().to_owned(),
        };
        value.as_array().unwrap().iter().map(turn).collect()
    }

    fn scoring(case: &Value) -> Scoring {
        let part = |part: &Value| (part[0].as_f64().unwrap(), part[1].as_f64().unwrap());
        Scoring {
            collar: case["collar"].as_f64().unwrap(),
            skip_overlap: case["skip_overlap"].as_bool().unwrap(),
            uem: case["uem"].as_array().map(|parts| parts.iter().map(part).collect()),
        }
    }

    #[test]
    fn error_rates_are_those_of_the_original() {
        let golden = golden::json("der.json");
        let cases = golden["cases"].as_array().unwrap();
        assert!(!cases.is_empty());
        let mut together = Errors::default();
        for (index, case) in cases.iter().enumerate() {
            let scoring = scoring(case);
            let (found, mapping) = errors(&turns(&case["reference"]), &turns(&case["hypothesis"]), &scoring).unwrap();
            // Sums of some hundred doubles below 1e3, and pieces of less than a microsecond.
            let close = |what: &str, found: f64, expected: &Value| {
                let expected = expected.as_f64().unwrap();
                assert!(
                    (found - expected).abs() < 1e-6,
                    "case {index}, {what}: {found}, not {expected}"
                );
            };
            let der = &case["der"];
            close("total", found.total, &der["total"]);
            close("correct", found.correct, &der["correct"]);
            close("missed", found.missed, &der["missed detection"]);
            close("false alarm", found.false_alarm, &der["false alarm"]);
            close("confusion", found.confusion, &der["confusion"]);
            close("DER", found.der(), &der["diarization error rate"]);
            let detection = &case["detection"];
            close("speech", found.speech, &detection["total"]);
            close("missed speech", found.missed_speech, &detection["miss"]);
            close("false speech", found.false_speech, &detection["false alarm"]);
            close("detection", found.detection(), &detection["detection error rate"]);
            if !case["jer"].is_null() {
                close("JER", found.jer(), &case["jer"]);
            }
            let plain = scoring.collar == 0.0 && !scoring.skip_overlap;
            if !plain {
                continue;
            }
            // The mapping of the golden data is that before collars and overlaps are left out.
            let expected = case["mapping"].as_object().unwrap();
            let expected: BTreeMap<String, String> = expected
                .iter()
                .map(|(theirs, ours)| (theirs.clone(), ours.as_str().unwrap().to_owned()))
                .collect();
            assert_eq!(mapping, expected, "case {index}");
            if scoring.uem.is_some_and(|parts| parts.len() == 1) {
                together += found;
            }
        }
        let expected = golden["accumulated_over_the_one_piece_uem_cases_without_collar"]
            .as_f64()
            .unwrap();
        assert!(
            (together.der() - expected).abs() < 1e-6,
            "{}, not {expected}",
            together.der()
        );
    }

    #[test]
    fn edges_are_counted_by_the_formula() {
        let turn = |start: f64, end: f64, speaker: &str| Turn {
            start,
            end,
            speaker: speaker.to_owned(),
        };
        let plain = Scoring::default();
        let of = |reference: &[Turn], hypothesis: &[Turn]| errors(reference, hypothesis, &plain).unwrap().0;
        assert_eq!((of(&[], &[]).der(), of(&[], &[]).jer()), (0.0, 1.0));
        assert_eq!(of(&[], &[turn(0.0, 1.0, "a")]).der(), 1.0);
        // A speaker may be given by two turns at once.
        let double = of(&[turn(0.0, 2.0, "a"), turn(1.0, 3.0, "a")], &[turn(0.0, 3.0, "x")]);
        assert_eq!((double.total, double.missed, double.speech), (4.0, 1.0, 3.0));
        // Empty turns are none.
        assert_eq!(of(&[turn(1.0, 1.0, "a")], &[]), Errors::default());
        let refused = |reference: &[Turn], scoring: &Scoring| errors(reference, &[], scoring).is_err();
        assert!(refused(&[turn(2.0, 1.0, "a")], &plain));
        assert!(refused(&[turn(f64::NAN, 1.0, "a")], &plain));
        let collar = Scoring {
            collar: -0.1,
            ..Scoring::default()
        };
        assert!(refused(&[], &collar));
    }
}
