//! What was said in a recording, when, by whom, and how sure the model was; and its JSON.

use std::collections::HashSet;

use flow_model::timestamps::Stamped;
use serde::{Deserialize, Serialize, Serializer};

use crate::lines::{one_line, width};
use crate::times::seconds;
use crate::{Result, TranscriptionError};

/// Version of the JSON. It is raised whenever a reader of the version before would misread the file.
pub const VERSION: u64 = 1;

/// Times beyond this many seconds (31 years) are refused: up to it, microseconds are read as they were written.
const MAX_SECONDS: f64 = 1e9;

/// A word. Times are seconds from the beginning of the recording.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Word {
    pub word: String,
    #[serde(serialize_with = "number")]
    pub start: f64,
    #[serde(serialize_with = "number")]
    pub end: f64,
    /// How sure the model was: 1 is certain, about 0 is a guess among all tokens ([`crate::confidence`]).
    #[serde(default, serialize_with = "optional_number")]
    pub confidence: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speaker: Option<String>,
}

/// Words that are shown together: a sentence, or a part of one. Times are seconds from the beginning of the recording.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Segment {
    #[serde(serialize_with = "number")]
    pub start: f64,
    #[serde(serialize_with = "number")]
    pub end: f64,
    pub text: String,
    #[serde(default, serialize_with = "optional_number")]
    pub confidence: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speaker: Option<String>,
    /// May be empty where only the times of the segment are known.
    #[serde(default)]
    pub words: Vec<Word>,
}

/// Where a transcript comes from.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Metadata {
    pub source_file: String,
    /// Length of the recording, in seconds.
    #[serde(serialize_with = "number")]
    pub duration_s: f64,
    pub model: String,
    pub model_digest: String,
    #[serde(default)]
    pub languages: Vec<String>,
    /// None where nobody asked who speaks.
    #[serde(default)]
    pub num_speakers: Option<u64>,
    /// RFC 3339.
    pub processed_at: String,
}

/// How long the work took, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Performance {
    #[serde(serialize_with = "number")]
    pub transcription_s: f64,
    #[serde(serialize_with = "number")]
    pub diarization_s: f64,
    #[serde(serialize_with = "number")]
    pub total_s: f64,
    /// Seconds of audio for each second of work; None where the work took no time.
    #[serde(default, serialize_with = "optional_number")]
    pub realtime_factor: Option<f64>,
}

impl Performance {
    /// `total_s` may be more than the two parts: reading and writing take time too.
    pub fn new(duration_s: f64, transcription_s: f64, diarization_s: f64, total_s: f64) -> Self {
        Self {
            transcription_s,
            diarization_s,
            total_s,
            realtime_factor: Some(duration_s / total_s).filter(|factor| factor.is_finite()),
        }
    }
}

/// The transcript of a recording.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct Transcript {
    pub metadata: Metadata,
    pub performance: Performance,
    /// All that was said, without line breaks of segments.
    pub text: String,
    pub segments: Vec<Segment>,
    /// Who speaks, in the order of their first words; empty without diarization.
    #[serde(default)]
    pub speakers: Vec<String>,
}

/// What stands in the JSON file.
#[derive(Serialize)]
struct Document<'a> {
    version: u64,
    metadata: &'a Metadata,
    performance: &'a Performance,
    text: &'a str,
    segments: &'a [Segment],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    speakers: &'a [String],
}

/// What is read of a file before the rest.
#[derive(Deserialize)]
struct Head {
    version: Option<u64>,
}

impl Transcript {
    /// Puts segments together: `text` is theirs with spaces between, `speakers` are those that they and their words
    /// name. `metadata.num_speakers` becomes the number of these if there are any, and stays as it is otherwise.
    pub fn from_segments(mut metadata: Metadata, performance: Performance, segments: Vec<Segment>) -> Self {
        let texts = segments.iter().map(|segment| segment.text.trim());
        let text = texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(" ");
        let mut seen = HashSet::new();
        let named = segments.iter().flat_map(|segment| {
            let words = segment.words.iter().map(|word| &word.speaker);
            std::iter::once(&segment.speaker).chain(words).flatten()
        });
        let speakers: Vec<String> = named.filter(|name| seen.insert(*name)).cloned().collect();
        if !speakers.is_empty() {
            metadata.num_speakers = Some(speakers.len() as u64);
        }
        Self {
            metadata,
            performance,
            text,
            segments,
            speakers,
        }
    }

    /// The JSON, on one line that ends in a line break. Numbers are written to six decimals: times to the microsecond.
    ///
    /// An error if a time is no number, is negative, is over 31 years, or if something ends before it starts.
    pub fn to_json(&self) -> Result<String> {
        self.check()?;
        let document = Document {
            version: VERSION,
            metadata: &self.metadata,
            performance: &self.performance,
            text: &self.text,
            segments: &self.segments,
            speakers: &self.speakers,
        };
        let json = serde_json::to_string(&document);
        let json = json.map_err(|error| TranscriptionError::transcript("the transcript", error.to_string()))?;
        Ok(json + "\n")
    }

    /// Reads what [`Transcript::to_json`] wrote. Keys that it does not know are left out; a version newer than
    /// [`VERSION`] is an error, as is what could not have been written.
    pub fn from_json(json: &str) -> Result<Self> {
        let whole = |error: serde_json::Error| TranscriptionError::transcript("the file", error.to_string());
        let head: Head = serde_json::from_str(json).map_err(whole)?;
        match head.version {
            None => return Err(TranscriptionError::transcript("version", "is missing")),
            Some(0) => return Err(TranscriptionError::transcript("version", "is 0; versions begin with 1")),
            Some(found) if found > VERSION => {
                return Err(TranscriptionError::Version { found, newest: VERSION });
            }
            Some(_) => {}
        }
        let read: std::result::Result<Self, _> =
            serde_path_to_error::deserialize(&mut serde_json::Deserializer::from_str(json));
        let transcript =
            read.map_err(|error| TranscriptionError::transcript(error.path().to_string(), error.inner().to_string()))?;
        transcript.check()?;
        Ok(transcript)
    }

    fn check(&self) -> Result<()> {
        check_time(&|| "metadata.duration_s".to_owned(), self.metadata.duration_s)?;
        let work = &self.performance;
        check_time(&|| "performance.transcription_s".to_owned(), work.transcription_s)?;
        check_time(&|| "performance.diarization_s".to_owned(), work.diarization_s)?;
        check_time(&|| "performance.total_s".to_owned(), work.total_s)?;
        check_number(&|| "performance.realtime_factor".to_owned(), work.realtime_factor)?;
        for (index, segment) in self.segments.iter().enumerate() {
            let place = |name: &str| format!("segments[{index}].{name}");
            check_span(&place, segment.start, segment.end, segment.confidence)?;
            for (number, word) in segment.words.iter().enumerate() {
                let place = |name: &str| format!("segments[{index}].words[{number}].{name}");
                check_span(&place, word.start, word.end, word.confidence)?;
            }
        }
        Ok(())
    }
}

fn check_span(place: &dyn Fn(&str) -> String, start: f64, end: f64, confidence: Option<f64>) -> Result<()> {
    check_time(&|| place("start"), start)?;
    check_time(&|| place("end"), end)?;
    if end < start {
        let why = format!("{end} is before the start, {start}");
        return Err(TranscriptionError::transcript(place("end"), why));
    }
    check_number(&|| place("confidence"), confidence)
}

fn check_time(place: &dyn Fn() -> String, time: f64) -> Result<()> {
    if (0.0..=MAX_SECONDS).contains(&time) {
        return Ok(());
    }
    let why = format!("{time} is not between 0 and {MAX_SECONDS} seconds");
    Err(TranscriptionError::transcript(place(), why))
}

fn check_number(place: &dyn Fn() -> String, number: Option<f64>) -> Result<()> {
    match number {
        Some(number) if !number.is_finite() => Err(TranscriptionError::transcript(
            place(),
            format!("{number} is not a number"),
        )),
        _ => Ok(()),
    }
}

/// A number to six decimals: with 15 digits at most, it is read as it was written, by any reader.
pub(crate) fn rounded(number: f64) -> f64 {
    if number.abs() <= MAX_SECONDS {
        // A negative zero becomes zero.
        (number * 1e6).round() / 1e6 + 0.0
    } else {
        number
    }
}

fn number<S: Serializer>(number: &f64, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    rounded(*number).serialize(serializer)
}

fn optional_number<S: Serializer>(number: &Option<f64>, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    number.map(rounded).serialize(serializer)
}

impl Word {
    /// The words of [`time_stamps`](flow_model::timestamps::time_stamps), where a frame of the encoder takes
    /// `frame_seconds` (0.08 for sub-sampling by 8). Times begin where the frames do.
    pub fn from_stamps(stamps: &[Stamped], frame_seconds: f64) -> Vec<Self> {
        let time = |frame: u32| f64::from(frame) * frame_seconds;
        let words = stamps.iter().map(|stamp| Word {
            word: stamp.text.clone(),
            start: time(stamp.start),
            end: time(stamp.end),
            ..Word::default()
        });
        words.collect()
    }
}

impl Segment {
    /// The words, each on one line, and none that ends before it starts; words without text are left out. Where there
    /// are no words, those of the segment's text get shares of its time by their length in grapheme clusters.
    pub fn timed_words(&self) -> Vec<Word> {
        let with_text = self.words.iter().map(|word| (one_line(&word.word), word));
        let words: Vec<Word> = with_text
            .filter(|(text, _)| !text.is_empty())
            .map(|(text, word)| Word {
                word: text,
                start: seconds(word.start),
                end: seconds(word.end).max(seconds(word.start)),
                ..word.clone()
            })
            .collect();
        if !words.is_empty() {
            return words;
        }
        let text = one_line(&self.text);
        let total: usize = text.split(' ').map(width).sum();
        let (start, end) = (seconds(self.start), seconds(self.end).max(seconds(self.start)));
        let time = |before: usize| {
            if before == total {
                return end;
            }
            start + (end - start) * (before as f64 / total as f64)
        };
        let mut before = 0;
        let words = text.split(' ').filter(|word| !word.is_empty()).map(|word| {
            let first = before;
            before += width(word);
            Word {
                word: word.to_owned(),
                start: time(first),
                end: time(before),
                confidence: self.confidence,
                speaker: self.speaker.clone(),
            }
        });
        words.collect()
    }
}

#[cfg(test)]
mod tests {
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
            duration_s: 2.5,
            model: "small.nemo".to_owned(),
            model_digest: "00ff".to_owned(),
            languages: vec!["en".to_owned()],
            num_speakers: None,
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
}
