//! The boxes of a timeline: the speakers over time in the reference and in the hypothesis, and the errors. The number
//! of boxes is bounded, however long a recording is.

use std::collections::{BTreeMap, BTreeSet};

use flow_speakers::error_stretches::ErrorStretch;

use crate::utterance::Utterance;

/// Speakers of a lane with their own row; all others share one more.
const ROWS: usize = 12;
/// The speaker of a box that was merged from several speakers.
const SEVERAL: &str = "several";
/// Characters of a text that are shown.
const SHOWN: usize = 300;

/// A recording with its reference, hypothesis and measures.
#[derive(Clone, Debug, Default)]
pub struct RecordingTimeline {
    pub name: String,
    /// Measures: names and values.
    pub figures: Vec<(String, String)>,
    /// Utterances; of turns without words the texts are empty.
    pub reference: Vec<Utterance>,
    pub hypothesis: Vec<Utterance>,
    /// The speaker of the reference for speakers of the hypothesis.
    pub mapping: BTreeMap<String, String>,
    pub errors: Vec<ErrorStretch>,
    /// Where a browser finds the recording: the value of a `src`.
    pub audio: Option<String>,
}

/// A row of a lane.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub label: String,
    /// A number of the palette.
    pub colour: usize,
}

/// A span of time in a row, in seconds, with its text.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineBox {
    pub start: f64,
    pub end: f64,
    pub row: usize,
    pub colour: usize,
    /// Number of boxes merged into this one.
    pub count: usize,
    /// The speaker, or the kind of error.
    pub who: String,
    pub text: String,
}

/// Rows one below the other, and their boxes in order of time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lane {
    pub rows: Vec<Row>,
    pub boxes: Vec<TimelineBox>,
}

/// The lanes of reference, hypothesis and errors, with at most `limit` boxes each (or one for each row). A mapped speaker
/// has the colour of the speaker of the reference; the rows of mapped speakers are in the order of those, all others below.
pub fn lanes(recording: &RecordingTimeline, limit: usize) -> [Lane; 3] {
    let said = in_order(&recording.reference);
    let heard = in_order(&recording.hypothesis);
    let places: BTreeMap<&str, usize> = said.iter().enumerate().map(|(place, name)| (*name, place)).collect();
    let ours: Vec<(&str, String, usize)> = (0..)
        .zip(&said)
        .map(|(n, name)| (*name, (*name).to_owned(), n))
        .collect();
    let mut theirs: Vec<(&str, String, usize)> = Vec::new();
    let mut more = said.len();
    for name in heard {
        let mapped = recording
            .mapping
            .get(name)
            .and_then(|ours| places.get_key_value(ours.as_str()));
        theirs.push(match mapped {
            Some((ours, place)) => (name, format!("{name} = {ours}"), *place),
            None => {
                more += 1;
                (name, name.to_owned(), more - 1)
            }
        });
    }
    theirs.sort_by_key(|(_, _, place)| *place);
    [
        speakers(&recording.reference, &ours, limit),
        speakers(&recording.hypothesis, &theirs, limit),
        errors(&recording.errors, limit),
    ]
}

/// The speakers in the order in which they begin.
fn in_order(utterances: &[Utterance]) -> Vec<&str> {
    let mut first: BTreeMap<&str, f64> = BTreeMap::new();
    for utterance in utterances {
        let start = first.entry(&utterance.turn.speaker).or_insert(f64::INFINITY);
        *start = start.min(utterance.turn.start);
    }
    let mut names: Vec<(&str, f64)> = first.into_iter().collect();
    names.sort_by(|a, b| a.1.total_cmp(&b.1));
    names.into_iter().map(|(name, _)| name).collect()
}

/// A lane of speakers: name, label and colour of each, in order of rows.
fn speakers(utterances: &[Utterance], order: &[(&str, String, usize)], limit: usize) -> Lane {
    let mut rows: Vec<Row> = order
        .iter()
        .take(ROWS)
        .map(|(_, label, colour)| Row {
            label: label.clone(),
            colour: *colour,
        })
        .collect();
    if order.len() > ROWS {
        rows.push(Row {
            label: format!("{} more", order.len() - ROWS),
            colour: ROWS,
        });
    }
    let places: BTreeMap<&str, (usize, usize)> = (0..)
        .zip(order)
        .map(|(row, (name, _, colour))| (*name, (ROWS.min(row), *colour)))
        .collect();
    let boxes = utterances.iter().filter_map(|utterance| {
        let (row, colour) = *places.get(utterance.turn.speaker.as_str())?;
        Some(TimelineBox {
            start: utterance.turn.start,
            end: utterance.turn.end,
            row,
            colour: if row == ROWS { ROWS } else { colour },
            count: 1,
            who: utterance.turn.speaker.clone(),
            text: clipped(&utterance.text),
        })
    });
    Lane {
        rows,
        boxes: joined(boxes.collect(), limit),
    }
}

/// The rows of errors: label, and how many speakers of a stretch it is about.
type Kind = (&'static str, fn(&ErrorStretch) -> usize);
const KINDS: [Kind; 3] = [
    ("missed", |stretch| stretch.missed),
    ("false alarm", |stretch| stretch.false_alarm),
    ("confusion", |stretch| stretch.confusion),
];

fn errors(stretches: &[ErrorStretch], limit: usize) -> Lane {
    let mut boxes = Vec::new();
    for stretch in stretches {
        for (row, (kind, count)) in KINDS.iter().enumerate() {
            if count(stretch) > 0 {
                boxes.push(TimelineBox {
                    start: stretch.start,
                    end: stretch.end,
                    row,
                    colour: row,
                    count: 1,
                    who: (*kind).to_owned(),
                    text: who_is_wrong(stretch),
                });
            }
        }
    }
    let row = |(colour, (label, _)): (usize, &Kind)| Row {
        label: (*label).to_owned(),
        colour,
    };
    Lane {
        rows: KINDS.iter().enumerate().map(row).collect(),
        boxes: joined(boxes, limit),
    }
}

fn who_is_wrong(stretch: &ErrorStretch) -> String {
    let said = stretch.reference.join(", ");
    let heard = stretch.hypothesis.join(", ");
    clipped(&match (said.is_empty(), heard.is_empty()) {
        (false, false) => format!("{said} heard as {heard}"),
        (false, true) => format!("{said} not heard"),
        _ => format!("{heard} heard, nobody speaks"),
    })
}

/// Merges boxes until there are at most `limit` (or one for each row): boxes of a row with the smallest gaps between
/// them. A box merged from several speakers, who share a row, belongs to [`SEVERAL`]; its text is the first one.
fn joined(mut boxes: Vec<TimelineBox>, limit: usize) -> Vec<TimelineBox> {
    boxes.sort_by(|a, b| a.row.cmp(&b.row).then(a.start.total_cmp(&b.start)));
    let mut gaps: Vec<(f64, usize)> = Vec::new();
    let mut end = f64::NEG_INFINITY;
    for (place, next) in boxes.iter().enumerate() {
        if place > 0 && boxes[place - 1].row == next.row {
            gaps.push((next.start - end, place));
            end = end.max(next.end);
        } else {
            end = next.end;
        }
    }
    gaps.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    gaps.truncate(boxes.len().saturating_sub(limit));
    let filled: BTreeSet<usize> = gaps.into_iter().map(|(_, place)| place).collect();
    let mut fewer: Vec<TimelineBox> = Vec::with_capacity(boxes.len() - filled.len());
    for (place, next) in boxes.into_iter().enumerate() {
        match fewer.last_mut() {
            Some(last) if filled.contains(&place) => {
                if last.who != next.who {
                    SEVERAL.clone_into(&mut last.who);
                }
                last.end = last.end.max(next.end);
                last.count += next.count;
            }
            _ => fewer.push(next),
        }
    }
    fewer.sort_by(|a, b| a.start.total_cmp(&b.start).then(a.row.cmp(&b.row)));
    fewer
}

/// A long text, truncated.
fn clipped(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::utterance::tests::utterance;

    #[test]
    fn mapped_speakers_share_row_order_and_colour() {
        let recording = RecordingTimeline {
            reference: vec![utterance(2.0, 3.0, "Bob", "yes"), utterance(0.0, 1.0, "Cy", "well")],
            hypothesis: vec![
                utterance(0.0, 0.5, "0", ""),
                utterance(0.5, 1.0, "1", "well"),
                utterance(2.0, 3.0, "2", "yes"),
            ],
            mapping: BTreeMap::from([("1".to_owned(), "Cy".to_owned()), ("2".to_owned(), "Bob".to_owned())]),
            errors: vec![ErrorStretch {
                start: 0.0,
                end: 0.5,
                missed: 0,
                false_alarm: 0,
                confusion: 1,
                reference: vec!["Cy".to_owned()],
                hypothesis: vec!["0".to_owned()],
            }],
            ..RecordingTimeline::default()
        };
        let [reference, hypothesis, errors] = lanes(&recording, 100);
        let rows = |lane: &Lane| -> Vec<(String, usize)> {
            lane.rows.iter().map(|row| (row.label.clone(), row.colour)).collect()
        };
        assert_eq!(rows(&reference), [("Cy".to_owned(), 0), ("Bob".to_owned(), 1)]);
        assert_eq!(
            rows(&hypothesis),
            [("1 = Cy".to_owned(), 0), ("2 = Bob".to_owned(), 1), ("0".to_owned(), 2)]
        );
        let of_0 = &hypothesis.boxes[0];
        assert_eq!((of_0.row, of_0.colour, of_0.who.as_str()), (2, 2, "0"));
        assert_eq!(errors.boxes.len(), 1);
        assert_eq!(
            (errors.boxes[0].row, errors.boxes[0].text.as_str()),
            (2, "Cy heard as 0")
        );
    }

    #[test]
    fn boxes_are_few_however_long_the_recording_is() {
        let mut reference = Vec::new();
        for turn in 0..20_000 {
            let start = f64::from(turn) * 1.8;
            let speaker = format!("s{}", turn % 40);
            reference.push(utterance(start, start + 1.0, &speaker, &"word ".repeat(100)));
        }
        let recording = RecordingTimeline {
            reference: reference.clone(),
            ..RecordingTimeline::default()
        };
        let [lane, none, _] = lanes(&recording, 500);
        assert_eq!((lane.boxes.len(), lane.rows.len(), none.rows.len()), (500, ROWS + 1, 0));
        assert_eq!(lane.boxes.iter().map(|b| b.count).sum::<usize>(), reference.len());
        assert!(
            lane.boxes
                .iter()
                .all(|b| b.row <= ROWS && b.text.chars().count() <= SHOWN + 2)
        );
        // One for each row at least.
        let [lane, ..] = lanes(&recording, 1);
        assert_eq!(lane.boxes.len(), ROWS + 1);
        let [lane, ..] = lanes(&recording, 100_000);
        assert_eq!(lane.boxes.len(), reference.len());
    }

    #[test]
    fn a_box_of_several_speakers_has_the_name_of_none() {
        let mut reference: Vec<Utterance> = (0..ROWS)
            .map(|n| utterance(n as f64, n as f64 + 0.5, &format!("s{n}"), ""))
            .collect();
        reference.extend([
            utterance(20.0, 21.0, "Ann", "well"),
            utterance(21.5, 22.0, "Bob", "yes"),
            utterance(30.0, 31.0, "Bob", "no"),
            utterance(31.25, 32.0, "Bob", "maybe"),
        ]);
        let recording = RecordingTimeline {
            reference,
            ..RecordingTimeline::default()
        };
        let shared = |limit: usize| -> Vec<(String, f64, usize)> {
            let [lane, ..] = lanes(&recording, limit);
            let shared = lane.boxes.into_iter().filter(|b| b.row == ROWS);
            shared.map(|b| (b.who, b.end, b.count)).collect()
        };
        let of = |who: &str, end, count| (who.to_owned(), end, count);
        let bobs = of("Bob", 32.0, 2);
        assert_eq!(shared(ROWS + 3), [of("Ann", 21.0, 1), of("Bob", 22.0, 1), bobs.clone()]);
        assert_eq!(shared(ROWS + 2), [of("several", 22.0, 2), bobs]);
        assert_eq!(shared(ROWS + 1), [of("several", 32.0, 4)]);
    }
}
