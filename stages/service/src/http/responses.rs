//! Transcripts as OpenAI's clients expect them.

use axum::Json;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use flow_transcription::speakers::UNKNOWN;
use flow_transcription::{Format, LineLimits, Segment, Transcript};
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::form::{Asked, ResponseFormat};
use crate::engine::Finished;
use crate::logprobs::logprobs;

/// The longest pause within a turn of a diarization, in seconds.
const MAX_PAUSE: f64 = 1.0;

/// The transcript in the requested format.
///
/// # Errors
/// If it cannot be serialised, which is a bug of the engine.
pub fn transcript(finished: &Finished, asked: &Asked) -> Result<Response, ApiError> {
    let transcript = &finished.transcript;
    let json = |value: Value| Ok(Json(value).into_response());
    match asked.format {
        ResponseFormat::Json => {
            let mut document = json!({"text": transcript.text, "usage": usage(transcript)});
            if asked.logprobs {
                document["logprobs"] = logprobs(&finished.tokens, true);
            }
            json(with_warnings(document, &finished.warnings))
        }
        ResponseFormat::VerboseJson => json(with_warnings(
            verbose(transcript, asked.words, asked.segments),
            &finished.warnings,
        )),
        ResponseFormat::DiarizedJson => json(with_warnings(diarized(transcript), &finished.warnings)),
        // With speakers, each line begins with one.
        ResponseFormat::Text if asked.diarize || asked.split_channels => {
            written(transcript, Format::Txt, "text/plain; charset=utf-8")
        }
        ResponseFormat::Text => {
            let text = format!("{}\n", transcript.text);
            Ok(([(CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response())
        }
        ResponseFormat::Srt => written(transcript, Format::Srt, "text/plain; charset=utf-8"),
        ResponseFormat::Vtt => written(transcript, Format::Vtt, "text/vtt; charset=utf-8"),
    }
}

fn written(transcript: &Transcript, format: Format, content_type: &'static str) -> Result<Response, ApiError> {
    let bytes = format
        .write(transcript, &LineLimits::default())
        .map_err(|error| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", error.to_string()))?;
    Ok(([(CONTENT_TYPE, content_type)], bytes).into_response())
}

/// The length of the recording, in whole seconds, as OpenAI counts them.
pub fn usage(transcript: &Transcript) -> Value {
    json!({"type": "duration", "seconds": transcript.metadata.duration_s.max(0.0).ceil() as u64})
}

/// OpenAI's `verbose_json`. Segments and words have their confidence, and their speaker where that is known; what Whisper
/// alone has (token ids, log probabilities, compression ratios) is left out.
fn verbose(transcript: &Transcript, words: bool, segments: bool) -> Value {
    let languages = &transcript.metadata.languages;
    let mut document = json!({
        "task": "transcribe",
        "language": languages.first().map_or("", String::as_str),
        "languages": languages,
        "duration": transcript.metadata.duration_s,
        "text": transcript.text,
        "usage": usage(transcript),
    });
    if let Some(at) = transcript.metadata.damaged_at {
        document["damaged_at"] = json!(at);
    }
    if let Some(coverage) = &transcript.metadata.coverage {
        document["coverage"] = json!(coverage);
    }
    if let Some(boosted) = &transcript.metadata.boosted {
        document["boosted"] = json!(boosted);
    }
    if segments {
        let all = (0..).zip(&transcript.segments);
        document["segments"] = all.map(|(id, segment)| verbose_segment(id, segment)).collect();
    }
    if words {
        let words = transcript.segments.iter().flat_map(Segment::timed_words);
        document["words"] = words.map(|word| json!(word)).collect();
    }
    document
}

/// The document with a list `warnings`, if there are any.
fn with_warnings(mut document: Value, warnings: &[String]) -> Value {
    if !warnings.is_empty() {
        document["warnings"] = json!(warnings);
    }
    document
}

fn verbose_segment(id: u64, segment: &Segment) -> Value {
    let mut object = Map::new();
    object.insert("id".to_owned(), json!(id));
    // In Whisper's frames of ten milliseconds.
    object.insert("seek".to_owned(), json!((segment.start.max(0.0) * 100.0) as u64));
    object.insert("temperature".to_owned(), json!(0.0));
    let fields = match json!(segment) {
        Value::Object(fields) => fields,
        _ => Map::new(),
    };
    // The words of all segments are one separate list.
    object.extend(fields.into_iter().filter(|(name, _)| name != "words"));
    Value::Object(object)
}

/// OpenAI's `diarized_json`.
fn diarized(transcript: &Transcript) -> Value {
    let segments = (1..).zip(&transcript.segments);
    json!({
        "task": "transcribe",
        "duration": transcript.metadata.duration_s,
        "text": transcript.text,
        "segments": segments.map(|(number, segment)| diarized_segment(number, segment)).collect::<Value>(),
        "usage": usage(transcript),
    })
}

/// A segment of `diarized_json`, which is an event of streams, too. Numbers begin with 1.
pub fn diarized_segment(number: u64, segment: &Segment) -> Value {
    json!({
        "type": "transcript.text.segment",
        "id": format!("seg_{number:03}"),
        "start": written_time(segment.start),
        "end": written_time(segment.end),
        "text": segment.text,
        "speaker": segment.speaker.as_deref().unwrap_or(UNKNOWN),
    })
}

/// Seconds as those of words are written: whole microseconds.
fn written_time(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

/// Turns: segments of the same speaker with a short gap between them are joined.
pub fn diarization(finished: &Finished) -> Value {
    with_warnings(turns(&finished.transcript), &finished.warnings)
}

fn turns(transcript: &Transcript) -> Value {
    let mut turns: Vec<(f64, f64, &str)> = Vec::new();
    for segment in &transcript.segments {
        let speaker = segment.speaker.as_deref().unwrap_or(UNKNOWN);
        match turns.last_mut() {
            Some((_, end, last)) if *last == speaker && segment.start - *end <= MAX_PAUSE => {
                *end = end.max(segment.end)
            }
            _ => turns.push((segment.start, segment.end, speaker)),
        }
    }
    let segments = turns.iter().enumerate();
    json!({
        "task": "diarize",
        "duration": transcript.metadata.duration_s,
        "num_speakers": transcript.speakers.len(),
        "speakers": transcript.speakers,
        "segments": segments
            .map(|(id, (start, end, speaker))| {
                json!({"id": id, "start": written_time(*start), "end": written_time(*end), "speaker": speaker})
            })
            .collect::<Value>(),
        "usage": usage(transcript),
    })
}

#[cfg(test)]
mod tests {
    use flow_transcription::{Metadata, Performance, Word};

    use super::*;

    #[test]
    fn all_times_are_written_alike() {
        let start = 1.7879999999999998;
        let transcript = Transcript::from_segments(
            Metadata::default(),
            Performance::default(),
            vec![segment("hello", start, start + 0.1, Some("A"))],
        );
        for document in [
            diarized(&transcript),
            turns(&transcript),
            verbose(&transcript, true, true),
        ] {
            let first = &document["segments"][0];
            assert_eq!(first["start"].to_string(), "1.788", "{document}");
            assert_eq!(first["end"].to_string(), "1.888", "{document}");
        }
    }

    fn segment(text: &str, start: f64, end: f64, speaker: Option<&str>) -> Segment {
        let speaker = speaker.map(str::to_owned);
        Segment {
            start,
            end,
            text: text.to_owned(),
            confidence: Some(0.5),
            speaker: speaker.clone(),
            words: vec![Word {
                word: text.to_owned(),
                start,
                end,
                confidence: Some(0.25),
                speaker,
            }],
        }
    }

    fn example(speakers: [Option<&str>; 3]) -> Transcript {
        let metadata = Metadata {
            duration_s: 9.25,
            languages: vec!["de".to_owned(), "en".to_owned()],
            ..Metadata::default()
        };
        let [a, b, c] = speakers;
        let segments = vec![
            segment("guten", 0.5, 1.0, a),
            segment("morgen", 1.5, 2.0, b),
            segment("hello", 5.0, 6.5, c),
        ];
        Transcript::from_segments(metadata, Performance::default(), segments)
    }

    #[test]
    fn verbose_json_holds_what_was_asked_for() {
        let both = verbose(&example([None; 3]), true, true);
        assert_eq!(both["task"], "transcribe");
        assert_eq!(both["language"], "de");
        assert_eq!(both["duration"], 9.25);
        assert_eq!(both["usage"], json!({"type": "duration", "seconds": 10}));
        assert_eq!(
            both["segments"][2],
            json!({"id": 2, "seek": 500, "temperature": 0.0, "start": 5.0, "end": 6.5, "text": "hello", "confidence": 0.5})
        );
        assert_eq!(
            both["words"][0],
            json!({"word": "guten", "start": 0.5, "end": 1.0, "confidence": 0.25})
        );
        let words = verbose(&example([Some("A"); 3]), true, false);
        assert_eq!(words.get("segments"), None);
        assert_eq!(words["words"][1]["speaker"], "A");
        assert_eq!(verbose(&example([None; 3]), false, true).get("words"), None);
        assert_eq!(verbose(&Transcript::default(), true, true)["segments"], json!([]));
    }

    #[test]
    fn diarized_json_names_a_speaker_for_each_segment() {
        let document = diarized(&example([Some("A"), None, Some("B")]));
        assert_eq!(document["text"], "guten morgen hello");
        let speakers: Vec<&Value> = document["segments"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| &one["speaker"])
            .collect();
        assert_eq!(speakers, ["A", UNKNOWN, "B"]);
        assert_eq!(document["segments"][0]["id"], "seg_001");
        assert_eq!(document["segments"][0]["type"], "transcript.text.segment");
    }

    #[test]
    fn turns_end_at_pauses_and_other_speakers() {
        let ends = |speakers| {
            let document = turns(&example(speakers));
            let segments = document["segments"].as_array().unwrap().clone();
            segments
                .iter()
                .map(|turn| (turn["start"].as_f64().unwrap(), turn["end"].as_f64().unwrap()))
                .collect::<Vec<_>>()
        };
        assert_eq!(ends([Some("A"); 3]), [(0.5, 2.0), (5.0, 6.5)]);
        assert_eq!(
            ends([Some("A"), Some("B"), Some("B")]),
            [(0.5, 1.0), (1.5, 2.0), (5.0, 6.5)]
        );
        assert_eq!(turns(&example([Some("A"), Some("B"), None]))["num_speakers"], 2);
        assert_eq!(turns(&Transcript::default())["segments"], json!([]));
    }
}
