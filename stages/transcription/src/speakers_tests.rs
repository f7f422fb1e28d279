use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::test_data::speakers_json;

fn turn(start: f64, end: f64, speaker: &str) -> Turn {
    Turn {
        start,
        end,
        speaker: speaker.to_owned(),
    }
}

fn word(text: &str, start: f64, end: f64) -> Word {
    Word {
        word: text.to_owned(),
        start,
        end,
        ..Word::default()
    }
}

fn segment(words: Vec<Word>) -> Segment {
    let texts: Vec<&str> = words.iter().map(|word| word.word.as_str()).collect();
    Segment {
        start: words[0].start,
        end: words[words.len() - 1].end,
        text: texts.join(" "),
        words,
        ..Segment::default()
    }
}

fn shown(segments: &[Segment]) -> Vec<(&str, &str)> {
    let shown = segments
        .iter()
        .map(|segment| (segment.speaker.as_deref().unwrap_or("-"), segment.text.as_str()));
    shown.collect()
}

fn words_of(segment: &Segment) -> Vec<&str> {
    let speakers = segment.words.iter().map(|word| word.speaker.as_deref().unwrap_or("-"));
    speakers.collect()
}

/// A segment of WhisperX's, less the words that it could not align: ours all have times.
fn whisperx_segment(value: &Value) -> Segment {
    let words = value["words"].as_array().map_or(&[][..], Vec::as_slice);
    let timed = words.iter().filter(|word| word.get("start").is_some());
    let speaker = |value: &Value| value["speaker"].as_str().map(str::to_owned);
    Segment {
        start: value["start"].as_f64().unwrap(),
        end: value["end"].as_f64().unwrap(),
        text: value["text"].as_str().unwrap().to_owned(),
        speaker: speaker(value),
        words: timed
            .map(|value| Word {
                speaker: speaker(value),
                confidence: value["score"].as_f64(),
                ..word(
                    value["word"].as_str().unwrap(),
                    value["start"].as_f64().unwrap(),
                    value["end"].as_f64().unwrap(),
                )
            })
            .collect(),
        ..Segment::default()
    }
}

#[test]
fn whisperx_rules_are_whisperxs() {
    let cases = speakers_json("words_to_speakers.json");
    let cases = cases.as_array().unwrap();
    let (mut filled, mut assigned, mut without) = (0, 0, 0);
    for (number, case) in cases.iter().enumerate() {
        let turns: Vec<Turn> = case["diarization"]
            .as_array()
            .unwrap()
            .iter()
            .map(|of| {
                turn(
                    of[0].as_f64().unwrap(),
                    of[1].as_f64().unwrap(),
                    of[2].as_str().unwrap(),
                )
            })
            .collect();
        let segments = |key: &str| -> Vec<Segment> {
            let segments = case[key]["segments"].as_array().unwrap();
            segments.iter().map(whisperx_segment).collect()
        };
        let rules = AssignmentRules {
            rule: Rule::Whisperx,
            fill_nearest: case["fill_nearest"].as_bool().unwrap(),
            ..AssignmentRules::default()
        };
        let given = segments("transcript");
        assert!(given.iter().all(|segment| segment.speaker.is_none()));
        let found = assign_speakers(given, &turns, &rules);
        let expected = segments("result");
        assert_eq!(found, expected, "case {number}");
        filled += usize::from(rules.fill_nearest);
        for segment in &expected {
            let speakers = segment.words.iter().map(|word| &word.speaker).chain([&segment.speaker]);
            assigned += speakers.clone().filter(|speaker| speaker.is_some()).count();
            without += speakers.filter(|speaker| speaker.is_none()).count();
        }
    }
    assert!(filled > 0 && filled < cases.len() && assigned > 0 && without > 0);
}

#[test]
fn words_take_the_speaker_of_most_of_their_time_and_segments_are_cut() {
    let turns = [turn(0.0, 2.0, "A"), turn(2.0, 4.0, "B"), turn(6.0, 7.0, "A")];
    let words = vec![
        word("one", 0.2, 1.0),
        // More of it is B's.
        word("two", 1.8, 2.5),
        word("three", 3.0, 3.5),
        // In a pause: nearer to the end of B, then nearer to A; the last one is too far from both.
        word("four", 4.5, 4.75),
        word("five", 5.0, 5.25),
        // No time, as marks of punctuation.
        word("?", 6.5, 6.5),
        word("six", 8.5, 9.0),
    ];
    let found = assign_speakers(vec![segment(words)], &turns, &AssignmentRules::default());
    assert_eq!(
        shown(&found),
        [("A", "one"), ("B", "two three four"), ("A", "five ?"), (UNKNOWN, "six")]
    );
    assert_eq!(words_of(&found[1]), ["B", "B", "B"]);
    assert_eq!((found[1].start, found[1].end), (1.8, 4.75));

    let near = AssignmentRules {
        max_gap: 0.1,
        ..AssignmentRules::default()
    };
    let words = vec![word("a", 4.05, 4.5), word("b", 4.5, 5.0)];
    let found = assign_speakers(vec![segment(words)], &turns, &near);
    assert_eq!(shown(&found), [("B", "a"), (UNKNOWN, "b")]);
}

#[test]
fn a_segment_of_one_speaker_stays_as_it_is() {
    let mut whole = segment(vec![word(" a", 0.0, 0.5), word("b ", 0.5, 1.0)]);
    whole.text = "a b, as it was".to_owned();
    whole.confidence = Some(0.25);
    let found = assign_speakers(vec![whole.clone()], &[turn(0.0, 5.0, "A")], &AssignmentRules::default());
    assert_eq!(shown(&found), [("A", "a b, as it was")]);
    assert_eq!(found[0].confidence, Some(0.25));
    // Without words its own times count; without turns nobody is known.
    whole.words.clear();
    let found = assign_speakers(vec![whole.clone()], &[turn(0.0, 5.0, "A")], &AssignmentRules::default());
    assert_eq!(found[0].speaker.as_deref(), Some("A"));
    let found = assign_speakers(vec![whole], &[], &AssignmentRules::default());
    assert_eq!(found[0].speaker.as_deref(), Some(UNKNOWN));
}

#[test]
fn the_majority_has_the_whole_segment() {
    let turns = [turn(0.0, 1.0, "A"), turn(1.0, 3.0, "B")];
    let words = vec![
        word("a", 0.0, 0.9),
        word("b", 1.0, 1.2),
        word("c", 1.5, 1.7),
        word("d", 9.0, 9.5),
        word("e", 9.5, 9.6),
        word("f", 9.7, 9.8),
    ];
    let rules = AssignmentRules {
        rule: Rule::Majority,
        ..AssignmentRules::default()
    };
    // Three words are nobody's: these do not count against others.
    let found = assign_speakers(vec![segment(words.clone())], &turns, &rules);
    assert_eq!(shown(&found), [("B", "a b c d e f")]);
    assert_eq!(words_of(&found[0]), ["B"; 6]);
    // Of equal ones the first.
    let found = assign_speakers(vec![segment(words[..2].to_vec())], &turns, &rules);
    assert_eq!(shown(&found), [("A", "a b")]);
    let found = assign_speakers(vec![segment(words[3..].to_vec())], &turns, &rules);
    assert_eq!(shown(&found), [(UNKNOWN, "d e f")]);
}

/// The rule as it is reported, with a look at all turns.
fn told(turns: &[Turn], start: f64, end: f64, max_gap: f64) -> Option<String> {
    let mut turns = turns.to_vec();
    turns.sort_by(|a, b| a.start.total_cmp(&b.start));
    let mut names: Vec<&str> = Vec::new();
    for turn in &turns {
        if !names.contains(&turn.speaker.as_str()) {
            names.push(&turn.speaker);
        }
    }
    let common = |turn: &Turn| (turn.end.min(end) - turn.start.max(start)).max(0.0);
    let of = |name: &str| -> f64 {
        let own = turns.iter().filter(|turn| turn.speaker == name);
        own.map(common).sum()
    };
    let longest = names.iter().map(|name| of(name)).fold(0.0, f64::max);
    if longest > 0.0 {
        // Times are whole numbers of eighths, so that sums are exact. Equal ones: whose turn in common begins first.
        let first = turns
            .iter()
            .find(|turn| common(turn) > 0.0 && of(&turn.speaker) == longest);
        return first.map(|turn| turn.speaker.clone());
    }
    let gap = |turn: &Turn| (turn.start - end).max(start - turn.end).max(0.0);
    let least = turns.iter().map(gap).fold(f64::INFINITY, f64::min);
    (least > max_gap).then(|| UNKNOWN.to_owned())
}

proptest! {
    #[test]
    fn every_word_has_the_speaker_that_the_rule_says(
        turns in prop::collection::vec((0..80u32, 1..40u32, 0..4u8), 0..12),
        words in prop::collection::vec((0..10u32, 0..16u32), 1..20),
        max_gap in 0..24u32,
    ) {
        let eighths = |number: u32| f64::from(number) / 8.0;
        let turns: Vec<Turn> = turns
            .into_iter()
            .map(|(start, length, speaker)| turn(eighths(start), eighths(start + length), &speaker.to_string()))
            .collect();
        let mut at = 0;
        let words: Vec<Word> = words
            .into_iter()
            .map(|(gap, length)| {
                let start = at + gap;
                at = start + length;
                word("x", eighths(start), eighths(at))
            })
            .collect();
        let max_gap = eighths(max_gap);
        let rules = AssignmentRules { max_gap, ..AssignmentRules::default() };
        let found = assign_speakers(vec![segment(words.clone())], &turns, &rules);
        let again: Vec<&Word> = found.iter().flat_map(|segment| &segment.words).collect();
        prop_assert_eq!(again.len(), words.len());
        for (found, given) in again.iter().zip(&words) {
            let speaker = found.speaker.clone().unwrap();
            prop_assert_eq!(&Word { speaker: None, ..(*found).clone() }, given);
            match told(&turns, given.start, given.end, max_gap) {
                Some(told) => prop_assert_eq!(speaker, told),
                // The nearest turn's; several may be as near.
                None => {
                    let gap = |turn: &Turn| (turn.start - given.end).max(given.start - turn.end).max(0.0);
                    let least = turns.iter().map(gap).fold(f64::INFINITY, f64::min);
                    prop_assert!(turns.iter().any(|turn| turn.speaker == speaker && gap(turn) == least));
                }
            }
        }
        for segment in &found {
            prop_assert!(segment.words.iter().all(|word| word.speaker == segment.speaker));
        }
        prop_assert!(found.windows(2).all(|pair| pair[0].speaker != pair[1].speaker));
    }
}
