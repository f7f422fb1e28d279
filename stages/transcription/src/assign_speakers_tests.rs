use flow_runtime::harness::{Harness, Output};
use flow_speakers::stages::rows::{turns_batch, turns_schema};

use super::*;
use crate::Word;

fn segment() -> Segment {
    let word = |text: &str, start: f64| Word {
        word: text.to_owned(),
        start,
        end: start + 0.5,
        ..Word::default()
    };
    Segment {
        start: 0.0,
        end: 1.5,
        text: "good morning all".to_owned(),
        words: vec![word("good", 0.0), word("morning", 0.5), word("all", 1.0)],
        ..Segment::default()
    }
}

fn turn(start: f64, end: f64, speaker: &str) -> Turn {
    Turn {
        start,
        end,
        speaker: speaker.to_owned(),
    }
}

fn with(settings: &str) -> Harness<AssignSpeakers> {
    Harness::<AssignSpeakers>::from_yaml(settings)
        .unwrap()
        .input("segments", segments_schema(Speakers::Unasked))
        .feed(
            "segments",
            "a",
            segments_batch(&[segment()], Speakers::Unasked).unwrap(),
        )
        .empty_partition("segments", "silence")
}

fn with_turns(settings: &str) -> Output {
    // Overlapping: Ann is there all the time, and longer than Bob before 1.0.
    let turns = [turn(0.0, 1.5, "Ann"), turn(0.75, 1.5, "Bob")];
    let exclusive = [turn(0.0, 1.0, "Ann"), turn(1.0, 1.5, "Bob")];
    with(settings)
        .input("turns", turns_schema())
        .input("exclusive", turns_schema())
        .feed("turns", "a", turns_batch(&turns).unwrap())
        .feed("exclusive", "a", turns_batch(&exclusive).unwrap())
        .empty_partition("turns", "silence")
        .empty_partition("exclusive", "silence")
        .run()
        .unwrap()
}

fn shown(output: &Output) -> Vec<(Option<String>, String)> {
    let segments = read_segments(&output.rows("segments", "a")).unwrap();
    let shown = segments.into_iter().map(|segment| (segment.speaker, segment.text));
    shown.collect()
}

#[test]
fn the_default_goes_by_exclusive_turns_and_cuts_segments() {
    let output = with_turns("{}");
    let of = |speaker: &str, text: &str| (Some(speaker.to_owned()), text.to_owned());
    assert_eq!(shown(&output), [of("Ann", "good morning"), of("Bob", "all")]);
    let segments = read_segments(&output.rows("segments", "a")).unwrap();
    assert!(
        segments
            .iter()
            .all(|segment| segment.words.iter().all(|word| word.speaker == segment.speaker))
    );
    assert_eq!(output.rows("segments", "silence").num_rows(), 0);
    assert_eq!(shown(&with_turns("{rule: majority}")), [of("Ann", "good morning all")]);
    // By turns that overlap "all" is Ann's and Bob's alike, and hers began first.
    let output = with_turns("{rule: whisperx}");
    assert_eq!(shown(&output), [of("Ann", "good morning all")]);
}

#[test]
fn without_turns_nobody_has_a_name() {
    let output = with("{}").run().unwrap();
    assert_eq!(shown(&output), [(None, "good morning all".to_owned())]);
    assert_eq!(read_segments(&output.rows("segments", "a")).unwrap(), [segment()]);
    // Nobody was heard: that is another thing.
    let output = with("{}")
        .input("exclusive", turns_schema())
        .empty_partition("exclusive", "a")
        .run()
        .unwrap();
    assert_eq!(
        shown(&output),
        [(Some("UNKNOWN".to_owned()), "good morning all".to_owned())]
    );
}

#[test]
fn settings_that_cannot_be_are_named() {
    let refused = |settings: &str| with(settings).shape().unwrap_err().to_string();
    assert!(refused("{max_gap: -1}").contains("`max_gap` is -1"));
    assert!(refused("{fill_nearest: true}").contains("`whisperx`"));
    let harness = with("{rule: whisperx}").input("exclusive", turns_schema());
    assert!(harness.shape().unwrap_err().to_string().contains("`turns`"));
    assert!(with("{rule: whisperx, fill_nearest: true}").shape().is_ok());
}
