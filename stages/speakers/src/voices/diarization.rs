//! The JSON of `flow diarize`.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::Value;

use super::Appearance;
use crate::error::{Error, Result};
use crate::stages::write::rttm;
use crate::turns::Turn;

/// Most speakers of a recording.
const MOST: usize = 1_000;
/// Longest speech of a speaker, in seconds.
const MOST_SECONDS: f64 = 1e7;
/// Stretches of each speaker to listen to.
const STRETCHES: usize = 3;

/// A speaker as the diarization has it.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundSpeaker {
    pub label: String,
    pub appearance: Appearance,
}

/// A diarization of a recording.
#[derive(Debug, Clone, PartialEq)]
pub struct Diarization {
    /// Those with a voice, in the order of the file.
    pub speakers: Vec<FoundSpeaker>,
    /// Labels of speakers whose embedding is zeros: they spoke too little.
    pub voiceless: Vec<String>,
    turns: Vec<Turn>,
    json: Value,
}

#[derive(Deserialize)]
struct Document {
    diarization: Vec<WrittenTurn>,
    #[serde(default)]
    exclusive_diarization: Vec<WrittenTurn>,
    speakers: Vec<WrittenSpeaker>,
}

#[derive(Deserialize)]
struct WrittenTurn {
    start: f64,
    end: f64,
    speaker: String,
}

#[derive(Deserialize)]
struct WrittenSpeaker {
    speaker: String,
    seconds: f64,
    embedding: Vec<f32>,
}

impl Diarization {
    /// Reads a file's bytes.
    ///
    /// # Errors
    /// If they are not the JSON of a diarization, a label is missing or is there twice, or a number is not finite.
    pub fn read(bytes: &[u8]) -> Result<Self> {
        let bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes);
        let json: Value =
            serde_json::from_slice(bytes).map_err(|error| Error::Input(format!("it is not JSON: {error}")))?;
        if !json.is_object() {
            return Err(Error::Input(
                "it is not a diarization, as `flow diarize --format json` writes it: expected a JSON object".to_owned(),
            ));
        }
        if json.get("segments").is_some() {
            return Err(Error::Input(
                "it is a transcript, which has no embeddings: give what `flow diarize --format json` writes".to_owned(),
            ));
        }
        let document = Document::deserialize(&json).map_err(|error| {
            Error::Input(format!(
                "it is not a diarization, as `flow diarize --format json` writes it: {error}"
            ))
        })?;
        let turns = checked(document.diarization)?;
        let exclusive = checked(document.exclusive_diarization)?;
        if document.speakers.len() > MOST {
            return Err(Error::Input(format!(
                "it has {} speakers, and at most {MOST} are read",
                document.speakers.len()
            )));
        }
        let mut labels = BTreeSet::new();
        let (mut speakers, mut voiceless) = (Vec::new(), Vec::new());
        let dimension = document.speakers.first().map_or(0, |first| first.embedding.len());
        for found in document.speakers {
            let wrong = |why: &str| Error::Input(format!("the speaker {:?} {why}", found.speaker));
            if found.speaker.trim().is_empty() || found.speaker.chars().any(char::is_control) {
                return Err(wrong("has an empty label, or one with control characters"));
            }
            if !labels.insert(found.speaker.clone()) {
                return Err(wrong("is there twice"));
            }
            if !(0.0..=MOST_SECONDS).contains(&found.seconds) {
                return Err(wrong("has no number of seconds from 0 to 10,000,000"));
            }
            // A mean of larger ones would not be finite.
            if found.embedding.is_empty()
                || found
                    .embedding
                    .iter()
                    .any(|value| !value.is_finite() || value.abs() > 1e15)
            {
                return Err(wrong("has an embedding that is not a list of finite numbers"));
            }
            if found.embedding.len() != dimension {
                return Err(wrong("has an embedding of another length than the first"));
            }
            let appearance = Appearance {
                seconds: found.seconds,
                embedding: found.embedding,
                stretches: stretches(&found.speaker, [&exclusive, &turns]),
            };
            match appearance.unit().iter().all(|&value| value == 0.0) {
                true => voiceless.push(found.speaker),
                false => speakers.push(FoundSpeaker {
                    label: found.speaker,
                    appearance,
                }),
            }
        }
        Ok(Self {
            speakers,
            voiceless,
            turns,
            json,
        })
    }

    /// All labels: of turns, and of speakers with or without a voice.
    pub fn labels(&self) -> BTreeSet<&str> {
        ["diarization", "exclusive_diarization", "speakers"]
            .into_iter()
            .filter_map(|list| self.json.get(list)?.as_array())
            .flatten()
            .filter_map(|entry| entry.get("speaker")?.as_str())
            .collect()
    }

    /// The same document with other labels; `name` gives that of a label, if it has another one. What else is in it stays.
    pub fn renamed_json(&self, name: &dyn Fn(&str) -> Option<String>) -> String {
        let mut json = self.json.clone();
        for list in ["diarization", "exclusive_diarization", "speakers"] {
            for entry in json.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
                if let Some(label) = entry.get_mut("speaker")
                    && let Some(name) = label.as_str().and_then(name)
                {
                    *label = Value::from(name);
                }
            }
        }
        format!("{json}\n")
    }

    /// The turns as RTTM with other labels. `recording` is a path, whose stem names the recording; white space in names becomes `_`.
    ///
    /// # Errors
    /// If a turn ends before it starts.
    pub fn renamed_rttm(&self, recording: &str, name: &dyn Fn(&str) -> Option<String>) -> Result<String> {
        let mut turns = self.turns.clone();
        for turn in &mut turns {
            if let Some(name) = name(&turn.speaker) {
                turn.speaker = name;
            }
        }
        // The name in RTTM is without an ending, and that of a recording has none.
        rttm(&format!("{recording}.wav"), &turns)
    }
}

fn checked(turns: Vec<WrittenTurn>) -> Result<Vec<Turn>> {
    let turn = |turn: WrittenTurn| {
        let WrittenTurn { start, end, speaker } = turn;
        match start.is_finite() && end.is_finite() && 0.0 <= start && start <= end {
            true => Ok(Turn { start, end, speaker }),
            false => Err(Error::Input(format!(
                "a turn of {speaker:?} is from {start} to {end} s"
            ))),
        }
    };
    turns.into_iter().map(turn).collect()
}

/// The longest turns of a speaker in the first list that has some, in order of time.
fn stretches(label: &str, lists: [&Vec<Turn>; 2]) -> Vec<[f64; 2]> {
    let of = |turns: &Vec<Turn>| -> Vec<[f64; 2]> {
        let own = turns.iter().filter(|turn| turn.speaker == label);
        own.map(|turn| [turn.start, turn.end]).collect()
    };
    let mut own = lists
        .into_iter()
        .map(of)
        .find(|own| !own.is_empty())
        .unwrap_or_default();
    own.sort_by(|a, b| (b[1] - b[0]).total_cmp(&(a[1] - a[0])).then(a[0].total_cmp(&b[0])));
    own.truncate(STRETCHES);
    own.sort_by(|a, b| a[0].total_cmp(&b[0]));
    own
}
