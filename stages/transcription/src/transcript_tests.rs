use proptest::prelude::*;

use super::*;

fn word(text: &str, start: f64, end: f64) -> Word {
    Word {
        word: text.to_owned(),
        start,
        end,
        ..Word::default()
    }
}

fn metadata() -> Metadata {
    Metadata {
        source_file: "talks/a.flac".to_owned(),
        channel: None,
        row: None,
        duration_s: 2.5,
        model: "small.nemo".to_owned(),
        model_digest: "00ff".to_owned(),
        damaged_at: None,
        languages: vec!["en".to_owned()],
        num_speakers: None,
        coverage: None,
        boosted: None,
        processed_at: "2026-01-02T03:04:05Z".to_owned(),
    }
}

#[test]
fn json_has_the_agreed_keys() {
    let segment = Segment {
        start: 0.08,
        end: 0.1 + 0.2,
        text: "hello there".to_owned(),
        confidence: Some(1.0 / 3.0),
        speaker: Some("SPEAKER_00".to_owned()),
        words: vec![
            Word {
                confidence: Some(0.75),
                speaker: Some("SPEAKER_00".to_owned()),
                ..word("hello", 0.08, 0.16)
            },
            word("there", 0.16, 0.1 + 0.2),
        ],
    };
    let transcript = Transcript::from_segments(metadata(), Performance::new(2.5, 0.25, 0.75, 1.25), vec![segment]);
    let expected = concat!(
        r#"{"version":1,"metadata":{"source_file":"talks/a.flac","duration_s":2.5,"model":"small.nemo","#,
        r#""model_digest":"00ff","languages":["en"],"num_speakers":1,"processed_at":"2026-01-02T03:04:05Z"},"#,
        r#""performance":{"transcription_s":0.25,"diarization_s":0.75,"total_s":1.25,"realtime_factor":2.0},"#,
        r#""text":"hello there","segments":[{"start":0.08,"end":0.3,"text":"hello there","confidence":0.333333,"#,
        r#""speaker":"SPEAKER_00","words":[{"word":"hello","start":0.08,"end":0.16,"confidence":0.75,"#,
        r#""speaker":"SPEAKER_00"},{"word":"there","start":0.16,"end":0.3,"confidence":null}]}],"#,
        r#""speakers":["SPEAKER_00"]}"#,
        "\n",
    );
    assert_eq!(transcript.to_json().unwrap(), expected);
}

#[test]
fn a_silent_recording_has_a_transcript() {
    let transcript = Transcript::from_segments(metadata(), Performance::new(2.5, 0.0, 0.0, 0.0), Vec::new());
    assert_eq!(transcript.performance.realtime_factor, None);
    let json = transcript.to_json().unwrap();
    assert!(!json.contains("speakers\":["), "{json}");
    assert_eq!(Transcript::from_json(&json).unwrap(), transcript);
}

fn refusal(change: impl FnOnce(&mut serde_json::Value)) -> String {
    let segment = Segment {
        end: 1.0,
        text: "a".to_owned(),
        words: vec![word("a", 0.25, 0.5)],
        ..Segment::default()
    };
    let transcript = Transcript::from_segments(metadata(), Performance::default(), vec![segment]);
    let mut json: serde_json::Value = serde_json::from_str(&transcript.to_json().unwrap()).unwrap();
    assert!(Transcript::from_json(&json.to_string()).is_ok());
    change(&mut json);
    Transcript::from_json(&json.to_string()).unwrap_err().to_string()
}

#[test]
fn what_is_wrong_in_a_file_is_named() {
    let said = [
        refusal(|json| json["version"] = 2.into()),
        refusal(|json| json["version"] = 0.into()),
        refusal(|json| json["version"] = serde_json::Value::Null),
        refusal(|json| json["segments"][0]["words"][0]["start"] = (-0.5).into()),
        refusal(|json| json["segments"][0]["words"][0]["end"] = 0.125.into()),
        refusal(|json| json["segments"][0]["end"] = 1e300.into()),
        refusal(|json| json["metadata"]["duration_s"] = (-1).into()),
    ];
    assert_eq!(
        said,
        [
            "the transcript has version 2; this program reads versions up to 1: use a newer one",
            "not a transcript: version: is 0; versions begin with 1",
            "not a transcript: version: is missing",
            "not a transcript: segments[0].words[0].start: -0.5 is not between 0 and 1000000000 seconds",
            "not a transcript: segments[0].words[0].end: 0.125 is before the start, 0.25",
            format!(
                "not a transcript: segments[0].end: {} is not between 0 and 1000000000 seconds",
                1e300
            )
            .as_str(),
            "not a transcript: metadata.duration_s: -1 is not between 0 and 1000000000 seconds",
        ]
    );
    let missing = refusal(|json| json["segments"][0]["words"][0]["start"] = "soon".into());
    assert!(
        missing.starts_with("not a transcript: segments[0].words[0].start: "),
        "{missing}"
    );
    assert!(Transcript::from_json("[1]").is_err());
    assert!(Transcript::from_json("").is_err());
}

#[test]
fn what_cannot_be_read_back_is_not_written() {
    for (start, end, confidence) in [
        (f64::NAN, 1.0, None),
        (0.0, f64::INFINITY, None),
        (-1.0, 1.0, None),
        (2.0, 1.0, None),
        (0.0, 1.0, Some(f64::NAN)),
    ] {
        let segment = Segment {
            start,
            end,
            confidence,
            ..Segment::default()
        };
        let transcript = Transcript::from_segments(metadata(), Performance::default(), vec![segment]);
        assert!(transcript.to_json().is_err(), "{start} {end} {confidence:?}");
    }
}

#[test]
fn words_of_stamps_have_times_in_seconds() {
    let stamp = |text: &str, start, end| Stamped {
        text: text.to_owned(),
        start,
        end,
    };
    let words = Word::from_stamps(&[stamp("one", 0, 3), stamp("two", 25, 25)], 0.08);
    assert_eq!(words, [word("one", 0.0, 0.24), word("two", 2.0, 2.0)]);
}

#[test]
fn a_segment_without_words_shares_its_time() {
    let segment = Segment {
        start: 1.0,
        end: 3.0,
        text: " ab\n\tcdef  gh ".to_owned(),
        ..Segment::default()
    };
    let words = [word("ab", 1.0, 1.5), word("cdef", 1.5, 2.5), word("gh", 2.5, 3.0)];
    assert_eq!(segment.timed_words(), words);
    assert_eq!(Segment::default().timed_words(), []);
}

prop_compose! {
    /// Times in whole microseconds, as they are read back.
    fn words()(
        parts in prop::collection::vec((".{0,6}", 0..4_000_000_000u64, 0..9_000_000u64, 0..1_000_001u64, any::<bool>()), 0..5)
    ) -> Vec<Word> {
        let micro = |number: u64| number as f64 / 1e6;
        parts.into_iter().map(|(text, start, length, confidence, known)| Word {
            word: text,
            start: micro(start),
            end: micro(start + length),
            confidence: known.then(|| micro(confidence)),
            speaker: known.then(|| format!("SPEAKER_{:02}", confidence % 3)),
        }).collect()
    }
}

proptest! {
    #[test]
    fn transcripts_are_read_as_they_were_written(segments in prop::collection::vec((words(), ".{0,20}"), 0..4)) {
        let segments = segments.into_iter().map(|(words, text)| Segment {
            start: words.first().map_or(0.0, |word| word.start),
            end: words.first().map_or(0.5, |word| word.end),
            text,
            confidence: words.first().and_then(|word| word.confidence),
            speaker: None,
            words,
        }).collect();
        let transcript = Transcript::from_segments(metadata(), Performance::default(), segments);
        let json = transcript.to_json().unwrap();
        prop_assert_eq!(json.lines().count(), 1);
        prop_assert_eq!(&Transcript::from_json(&json).unwrap(), &transcript);
    }

    #[test]
    fn damaged_files_are_errors_or_transcripts(position in 0..600usize, byte in 0..128u8) {
        let segment = Segment { end: 1.0, text: "a b".to_owned(), words: vec![word("a", 0.0, 1.0)], ..Segment::default() };
        let transcript = Transcript::from_segments(metadata(), Performance::default(), vec![segment]);
        let mut json = transcript.to_json().unwrap().into_bytes();
        let position = position % json.len();
        json[position] = byte;
        if let Ok(read) = Transcript::from_json(std::str::from_utf8(&json).unwrap()) {
            prop_assert!(read.to_json().is_ok());
        }
    }
}

#[test]
fn coverage_is_read_as_it_was_written_and_checked() {
    use crate::coverage::{Coverage, Hole};
    use crate::suspects::{Reason, Suspect};
    let coverage = Coverage {
        share: 0.75,
        speech_s: 2.0,
        holes: vec![Hole { start: 0.5, end: 1.0 }],
        recovered: 2,
        suspects: vec![Suspect {
            start: 1.5,
            end: 2.0,
            text: "way way".to_owned(),
            reason: Reason::Repetition,
            dropped: true,
        }],
    };
    let with = |coverage: Coverage| {
        let metadata = Metadata {
            coverage: Some(coverage),
            ..metadata()
        };
        Transcript::from_segments(metadata, Performance::default(), Vec::new())
    };
    let json = with(coverage.clone()).to_json().unwrap();
    assert!(
        json.contains(
            r#""coverage":{"share":0.75,"speech_s":2.0,"holes":[{"start":0.5,"end":1.0}],"recovered":2,"suspects":["#
        ),
        "{json}"
    );
    assert_eq!(Transcript::from_json(&json).unwrap(), with(coverage.clone()));
    let wrong = with(Coverage {
        share: f64::NAN,
        ..coverage
    });
    assert!(
        wrong
            .to_json()
            .unwrap_err()
            .to_string()
            .contains("metadata.coverage.share")
    );
    let text = json.replace(r#""end":1.0}"#, r#""end":0.25}"#);
    let error = Transcript::from_json(&text).unwrap_err().to_string();
    assert!(error.contains("metadata.coverage.holes"), "{error}");
}
