//! Formats of one line for each segment, word or recording: text, TSV, CTM, and manifest lines.

use std::fmt::Write;

use serde::Serialize;
use serde_json::Value;

use crate::lines::one_line;
use crate::times::{decimal_seconds, milliseconds};
use crate::transcript::{Segment, Transcript, rounded};
use crate::{Result, TranscriptionError};

/// Each segment on a line, after the name of its speaker: `[SPEAKER_00]: text`, as WhisperX writes it.
pub fn txt(transcript: &Transcript) -> String {
    let mut file = String::new();
    for (segment, text) in with_text(transcript) {
        match segment.speaker.as_deref().map(one_line).filter(|name| !name.is_empty()) {
            Some(name) => {
                let _ = writeln!(file, "[{name}]: {text}");
            }
            None => {
                let _ = writeln!(file, "{text}");
            }
        }
    }
    file
}

/// Start and end in whole milliseconds and text of each segment, below a header, as Whisper and WhisperX write it.
pub fn tsv(transcript: &Transcript) -> String {
    let mut file = "start\tend\ttext\n".to_owned();
    for (segment, text) in with_text(transcript) {
        let start = milliseconds(segment.start);
        let end = milliseconds(segment.end).max(start);
        let _ = writeln!(file, "{start}\t{end}\t{text}");
    }
    file
}

fn with_text(transcript: &Transcript) -> impl Iterator<Item = (&Segment, String)> {
    let segments = transcript.segments.iter();
    let segments = segments.map(|segment| (segment, one_line(&segment.text)));
    segments.filter(|(_, text)| !text.is_empty())
}

/// NIST's CTM: `recording channel start duration word confidence` for each word, in the order of their starts. The channel is 1
/// where the recording was not split into its channels. The confidence is left out where it is not known, as NIST's tools allow.
/// Times are seconds with three decimals, so that a start and its duration add up to the end without an error. White space
/// within a name or a word becomes `_`.
pub fn ctm(transcript: &Transcript, recording: &str) -> String {
    let mut name = one_line(recording).replace(' ', "_");
    if name.is_empty() {
        name.push('-');
    } else if name.starts_with(";;") {
        // That would be a comment.
        name.replace_range(..1, "_");
    }
    let mut words: Vec<_> = transcript.segments.iter().flat_map(Segment::timed_words).collect();
    words.sort_by(|a, b| a.start.total_cmp(&b.start));
    let channel = transcript.metadata.channel.unwrap_or(1);
    let mut file = String::new();
    for word in words {
        let start = milliseconds(word.start);
        let duration = milliseconds(word.end).saturating_sub(start);
        let (start, duration) = (decimal_seconds(start), decimal_seconds(duration));
        let _ = write!(
            file,
            "{name} {channel} {start} {duration} {}",
            word.word.replace(' ', "_")
        );
        match word.confidence {
            Some(confidence) if confidence.is_finite() => {
                let _ = writeln!(file, " {confidence:.4}");
            }
            _ => file.push('\n'),
        }
    }
    file
}

/// A line of a manifest as NeMo's `transcribe_speech.py` writes it.
#[derive(Serialize)]
struct ManifestLine<'a> {
    audio_filepath: &'a str,
    duration: f64,
    pred_text: &'a str,
    word: Vec<TimedText<'a>>,
    segment: Vec<TimedText<'a>>,
}

#[derive(Serialize)]
struct TimedText<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    word: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    segment: Option<&'a str>,
    start: f64,
    end: f64,
}

/// One line of JSON for the recording, as NeMo's `transcribe_speech.py` writes with time stamps: `audio_filepath`,
/// `duration`, `pred_text`, and in `word` and `segment` lists of texts with `start` and `end` in seconds. The lines of
/// several recordings are a manifest. For the row of a manifest it is that row, with all of its keys, and `pred_text`, `word`
/// and `segment`; times are from the beginning of the row's part of its recording.
///
/// An error if a time is not a number.
pub fn jsonl(transcript: &Transcript) -> Result<String> {
    let timed = |start: f64, end: f64| TimedText {
        word: None,
        segment: None,
        start: rounded(start),
        end: rounded(end),
    };
    let words = transcript.segments.iter().flat_map(|segment| &segment.words);
    let line = ManifestLine {
        audio_filepath: &transcript.metadata.source_file,
        duration: rounded(transcript.metadata.duration_s),
        pred_text: &transcript.text,
        word: words
            .map(|word| TimedText {
                word: Some(&word.word),
                ..timed(word.start, word.end)
            })
            .collect(),
        segment: transcript
            .segments
            .iter()
            .map(|segment| TimedText {
                segment: Some(&segment.text),
                ..timed(segment.start, segment.end)
            })
            .collect(),
    };
    let times = line
        .word
        .iter()
        .chain(&line.segment)
        .flat_map(|one| [one.start, one.end]);
    if let Some(time) = times.chain([line.duration]).find(|time| !time.is_finite()) {
        return Err(TranscriptionError::transcript(
            "a time",
            format!("{time} is not a number"),
        ));
    }
    let failed = |error: serde_json::Error| TranscriptionError::transcript("the transcript", error.to_string());
    let json = match &transcript.metadata.row {
        None => serde_json::to_string(&line),
        Some(row) => {
            let mut row = row.clone();
            if let Value::Object(line) = serde_json::to_value(&line).map_err(failed)? {
                for (key, value) in line {
                    if matches!(key.as_str(), "audio_filepath" | "duration") {
                        row.entry(key).or_insert(value);
                    } else {
                        row.insert(key, value);
                    }
                }
            }
            serde_json::to_string(&row)
        }
    };
    Ok(json.map_err(failed)? + "\n")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Metadata, Word};

    fn word(text: &str, start: f64, end: f64, confidence: Option<f64>) -> Word {
        Word {
            word: text.to_owned(),
            start,
            end,
            confidence,
            speaker: None,
        }
    }

    fn example() -> Transcript {
        let metadata = Metadata {
            source_file: "talks/a b.flac".to_owned(),
            duration_s: 12.5,
            ..Metadata::default()
        };
        let segments = vec![
            Segment {
                start: 0.08,
                end: 0.96,
                text: "good\tmorning".to_owned(),
                speaker: Some("SPEAKER_00".to_owned()),
                words: vec![word("good", 0.08, 0.4, Some(0.98766)), word("morning", 0.4, 0.96, None)],
                ..Segment::default()
            },
            Segment {
                start: 1.0,
                end: 1.0,
                text: " \n".to_owned(),
                ..Segment::default()
            },
            Segment {
                start: 10.0,
                end: 12.0,
                text: "to you".to_owned(),
                confidence: Some(0.5),
                ..Segment::default()
            },
        ];
        Transcript {
            metadata,
            text: "good morning to you".to_owned(),
            segments,
            ..Transcript::default()
        }
    }

    #[test]
    fn segments_are_lines() {
        assert_eq!(txt(&example()), "[SPEAKER_00]: good morning\nto you\n");
        assert_eq!(
            tsv(&example()),
            "start\tend\ttext\n80\t960\tgood morning\n10000\t12000\tto you\n"
        );
        assert_eq!(txt(&Transcript::default()), "");
        assert_eq!(tsv(&Transcript::default()), "start\tend\ttext\n");
    }

    #[test]
    fn words_are_lines_of_ctm() {
        insta::assert_snapshot!(ctm(&example(), "a b"), @r"
        a_b 1 0.080 0.320 good 0.9877
        a_b 1 0.400 0.560 morning
        a_b 1 10.000 0.800 to 0.5000
        a_b 1 10.800 1.200 you 0.5000
        ");
        let odd = Transcript {
            segments: vec![Segment {
                words: vec![word("new\nyork", f64::NAN, -1.0, Some(f64::NAN))],
                ..Segment::default()
            }],
            ..Transcript::default()
        };
        assert_eq!(ctm(&odd, ";;x"), "_;x 1 0.000 0.000 new_york\n");
        assert_eq!(ctm(&odd, " "), "- 1 0.000 0.000 new_york\n");
        let second = Transcript {
            metadata: Metadata {
                channel: Some(2),
                ..Metadata::default()
            },
            ..example()
        };
        assert!(ctm(&second, "call").starts_with("call 2 0.080 0.320 good 0.9877\n"));
    }

    #[test]
    fn a_recording_is_a_line_of_a_manifest() {
        let line = jsonl(&example()).unwrap();
        let expected = concat!(
            r#"{"audio_filepath":"talks/a b.flac","duration":12.5,"pred_text":"good morning to you","word":["#,
            r#"{"word":"good","start":0.08,"end":0.4},{"word":"morning","start":0.4,"end":0.96}],"segment":["#,
            r#"{"segment":"good\tmorning","start":0.08,"end":0.96},{"segment":" \n","start":1.0,"end":1.0},"#,
            r#"{"segment":"to you","start":10.0,"end":12.0}]}"#,
            "\n"
        );
        assert_eq!(line, expected);
        // The row of a manifest keeps what it has.
        let mut row = example();
        let Value::Object(values) =
            serde_json::json!({"segment_id": "s", "audio_filepath": "/a b.flac", "offset": 2, "pred_text": "old"})
        else {
            unreachable!()
        };
        row.metadata.row = Some(values);
        let line: Value = serde_json::from_str(&jsonl(&row).unwrap()).unwrap();
        let keys = ["segment_id", "audio_filepath", "offset", "duration", "pred_text"].map(|key| &line[key]);
        assert_eq!(
            serde_json::json!(keys),
            serde_json::json!(["s", "/a b.flac", 2, 12.5, "good morning to you"])
        );
        assert_eq!(line["word"].as_array().unwrap().len(), 2);
        let mut broken = example();
        broken.segments[0].end = f64::NAN;
        assert!(jsonl(&broken).is_err());
    }

    #[test]
    fn layout_is_whisperxs() {
        let mut compared = 0;
        for (transcript, written) in crate::test_data::whisperx_cases() {
            for (format, expected) in written {
                let found = match format.as_str() {
                    "txt" => txt(&transcript),
                    "tsv" => tsv(&transcript),
                    _ => continue,
                };
                assert_eq!(found, expected, "{format}");
                compared += 1;
            }
        }
        assert!(compared > 0);
    }

    proptest! {
        #[test]
        fn ctm_lines_have_their_fields_and_do_not_overlap(
            words in prop::collection::vec((".{0,8}", 0.0..0.3f64, 0.0..0.3f64), 0..12), name in ".{0,8}",
        ) {
            let mut at = 0.0;
            let words = words.into_iter().map(|(text, gap, length)| {
                let start = at + gap;
                at = start + length;
                word(&text, start, at, Some(length))
            });
            let segment = Segment { words: words.collect(), ..Segment::default() };
            let spoken = segment.timed_words().len();
            let file = ctm(&Transcript { segments: vec![segment], ..Transcript::default() }, &name);
            prop_assert_eq!(file.lines().count(), spoken);
            let thousandths = |text: &str| text.replace('.', "").parse::<u64>().unwrap();
            let mut last = 0;
            for line in file.lines() {
                let fields: Vec<&str> = line.split_whitespace().collect();
                prop_assert_eq!(fields.len(), 6, "{}", line);
                prop_assert!(!line.starts_with(";;"));
                prop_assert!(thousandths(fields[2]) >= last);
                last = thousandths(fields[2]) + thousandths(fields[3]);
            }
        }
    }
}
