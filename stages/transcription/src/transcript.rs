//! The transcript of a recording (words, times, speakers, confidences), and its JSON format.

use std::collections::HashSet;

use flow_model::timestamps::Stamped;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::boosted::Boosted;
use crate::coverage::Coverage;
use crate::lines::{one_line, width};
use crate::speakers::UNKNOWN;
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
    /// Confidence: 1 is certain, about 0 is a guess among all tokens ([`flow_model::confidence`]).
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

/// Metadata of a transcript.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Metadata {
    pub source_file: String,
    /// Which channel of the recording this is, from 1; none where all are mixed, and where there is but one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel: Option<u32>,
    /// What the manifest says that named it: times are from the beginning of the row's part of its recording.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row: Option<Map<String, Value>>,
    /// Length of the recording, or of the row's part of it, in seconds.
    #[serde(serialize_with = "number")]
    pub duration_s: f64,
    /// Where the recording is damaged or cut off, in seconds: what comes after is not in the transcript.
    #[serde(default, serialize_with = "optional_number", skip_serializing_if = "Option::is_none")]
    pub damaged_at: Option<f64>,
    pub model: String,
    pub model_digest: String,
    #[serde(default)]
    pub languages: Vec<String>,
    /// None without diarization.
    #[serde(default)]
    pub num_speakers: Option<u64>,
    /// How much of the speech has words; none where that was not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coverage: Option<Coverage>,
    /// What boosted phrases did; none where none were boosted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boosted: Option<Boosted>,
    /// RFC 3339; empty where that was not noted.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub processed_at: String,
}

/// Processing times in seconds.
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
    /// The whole text, without line breaks between segments.
    pub text: String,
    pub segments: Vec<Segment>,
    /// Who speaks, in the order of their first words; empty without diarization.
    #[serde(default)]
    pub speakers: Vec<String>,
}

/// The layout of the JSON file.
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

/// The version, which is read before the rest.
#[derive(Deserialize)]
struct Head {
    version: Option<u64>,
}

impl Metadata {
    /// The id of the row of a manifest.
    pub(crate) fn row_id(&self) -> Option<&str> {
        self.row.as_ref()?.get("segment_id")?.as_str()
    }
}

impl Transcript {
    /// A transcript of segments: `text` joins theirs with spaces, `speakers` are those of the segments and their words,
    /// without [`UNKNOWN`]. `metadata.num_speakers` becomes the number of these if there are any, and stays as it is
    /// otherwise.
    pub fn from_segments(mut metadata: Metadata, performance: Performance, segments: Vec<Segment>) -> Self {
        let texts = segments.iter().map(|segment| segment.text.trim());
        let text = texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(" ");
        let mut seen = HashSet::new();
        let named = segments.iter().flat_map(|segment| {
            let words = segment.words.iter().map(|word| &word.speaker);
            std::iter::once(&segment.speaker).chain(words).flatten()
        });
        let known = named.filter(|name| *name != UNKNOWN);
        let speakers: Vec<String> = known.filter(|name| seen.insert(*name)).cloned().collect();
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
    /// An error if a time is not a number, is negative, is over 31 years, or if something ends before it starts.
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

    /// Reads what [`Transcript::to_json`] wrote. Unknown keys are ignored; a version newer than [`VERSION`] is an
    /// error, and so are values that cannot be written.
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
        if let Some(at) = self.metadata.damaged_at {
            check_time(&|| "metadata.damaged_at".to_owned(), at)?;
        }
        if let Some(coverage) = &self.metadata.coverage {
            check_coverage(coverage)?;
        }
        if let Some(boosted) = &self.metadata.boosted {
            for time in boosted.phrases.iter().flat_map(|phrase| &phrase.times) {
                check_time(&|| "metadata.boosted.phrases.times".to_owned(), *time)?;
            }
        }
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

fn check_coverage(coverage: &Coverage) -> Result<()> {
    if !(0.0..=1.0).contains(&coverage.share) {
        let why = format!("{} is not between 0 and 1", coverage.share);
        return Err(TranscriptionError::transcript("metadata.coverage.share", why));
    }
    check_time(&|| "metadata.coverage.speech_s".to_owned(), coverage.speech_s)?;
    let holes = coverage.holes.iter().map(|hole| ("holes", hole.start, hole.end));
    let suspects = coverage
        .suspects
        .iter()
        .map(|suspect| ("suspects", suspect.start, suspect.end));
    for (list, start, end) in holes.chain(suspects) {
        check_span(&|name| format!("metadata.coverage.{list}: {name}"), start, end, None)?;
    }
    Ok(())
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

pub(crate) fn number<S: Serializer>(number: &f64, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    rounded(*number).serialize(serializer)
}

pub(crate) fn numbers<S: Serializer>(numbers: &[f64], serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_seq(numbers.iter().map(|number| rounded(*number)))
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

    /// The same word `delay` seconds earlier, but not before the beginning of the recording.
    pub fn earlier(self, delay: f64) -> Self {
        let shifted = |time: f64| if delay > 0.0 { (time - delay).max(0.0) } else { time };
        Word {
            start: shifted(self.start),
            end: shifted(self.end),
            ..self
        }
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
#[path = "transcript_tests.rs"]
mod tests;
