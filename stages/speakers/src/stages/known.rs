//! The file of known speakers, with a recording or an embedding for each.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use flow_audio::samples::samples;
use flow_kind::{StageError, Storage, read_regular_file};
use flow_text::written_form::nfc;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::write::field;
use crate::diarizer::{Diarizer, KnownSpeakers};

/// The source of a voice.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Voice {
    /// A recording of only this person.
    Recording(PathBuf),
    /// As `speakers.write` writes it.
    Embedding(Vec<f32>),
}

/// A recording of a known speaker may last so long, in seconds.
const LONGEST: f64 = 600.0;

/// The members of a JSON object, with duplicates; a map would keep only the last.
struct Members(Vec<(String, Voice)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OfMap;
        impl<'de> Visitor<'de> for OfMap {
            type Value = Members;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(OfMap)
    }
}

fn wrong(path: &Path, why: impl std::fmt::Display) -> StageError {
    StageError::setting("known_speakers", format!("{}: {why}", path.display()))
}

/// Reads `{"NAME": "recording.wav", "NAME": [embedding], ...}`. Paths are relative to the folder of the file; a recording must be
/// there.
///
/// # Errors
/// What is wrong with the file or a name, as a mistake in the setting `known_speakers`.
pub fn read(storage: &Storage, path: &Path) -> Result<Vec<(String, Voice)>, StageError> {
    let bytes = read_regular_file(storage, path).map_err(|error| wrong(path, format!("cannot be read: {error}")))?;
    let json = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&bytes);
    let Members(mut voices) = serde_json::from_slice(json).map_err(|error| {
        let why =
            format!("is not a JSON object of names, each with the path of a recording or a list of numbers: {error}");
        wrong(path, why)
    })?;
    if voices.is_empty() {
        return Err(wrong(path, "names no speaker"));
    }
    let mut seen = BTreeSet::new();
    for (name, voice) in &mut voices {
        let wrong = |why: String| wrong(path, why);
        if let Some(fault) = KnownSpeakers::fault_of_name(name) {
            return Err(wrong(format!("`{name}` cannot be the name of a speaker: it {fault}")));
        }
        // RTTM has no spaces, and a letter with a mark may be one character or two.
        if !seen.insert(field(&nfc(name))) {
            return Err(wrong(format!(
                "`{name}` is there twice, perhaps with other spaces or in another Unicode form"
            )));
        }
        match voice {
            Voice::Recording(recording) => {
                let beside = path.parent().unwrap_or(Path::new("")).join(&recording);
                if !beside.is_file() {
                    return Err(wrong(format!(
                        "the recording of {name}, {}, does not exist",
                        beside.display()
                    )));
                }
                *recording = beside;
            }
            Voice::Embedding(values) if values.is_empty() || values.iter().any(|value| !value.is_finite()) => {
                return Err(wrong(format!(
                    "the embedding of {name} is not a list of finite numbers"
                )));
            }
            Voice::Embedding(_) => {}
        }
    }
    Ok(voices)
}

/// Their embeddings, which for recordings are those of the one speaker that is taken to be in them. None if `cancelled`.
///
/// # Errors
/// When a recording cannot be decoded or has no speech.
pub fn load(
    storage: &Storage,
    path: &Path,
    threshold: f64,
    diarizer: &Diarizer,
    cancelled: &dyn Fn() -> bool,
) -> Result<Option<KnownSpeakers>, StageError> {
    let mut known = Vec::new();
    for (name, voice) in read(storage, path)? {
        let embedding = match voice {
            Voice::Embedding(values) if values.len() != diarizer.dimension() => {
                let why = format!(
                    "the embedding of {name} has {} values, those of recordings have {}",
                    values.len(),
                    diarizer.dimension()
                );
                return Err(wrong(path, why));
            }
            Voice::Embedding(values) => values,
            Voice::Recording(recording) => {
                let decoded = samples(storage, &recording, LONGEST)?.map_err(|refusal| match refusal.reason {
                    "too_long" => {
                        let why = format!(
                            "the recording of {name}, {}, is longer than {LONGEST} s",
                            recording.display()
                        );
                        wrong(path, why)
                    }
                    _ => wrong(path, refusal.detail),
                })?;
                let voice = diarizer.voice(&decoded, cancelled);
                let voice = voice.map_err(|error| {
                    let why = format!("{}, the recording of {name}: {error}", recording.display());
                    wrong(path, why)
                })?;
                let Some(voice) = voice else { return Ok(None) };
                voice
            }
        };
        known.push((name, embedding));
    }
    let known = KnownSpeakers::new(known, threshold).map_err(|error| wrong(path, error))?;
    Ok(Some(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_recordings_beside_the_file_or_embeddings() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("known.json");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read(&Storage::default(), &path)
        };
        std::fs::write(folder.path().join("ann.wav"), b"x").unwrap();
        let text = r#"{"Ann Lee": "ann.wav", "Bob": [0.5, -1]}"#;
        let voices = read(text).unwrap();
        assert_eq!(read(&format!("\u{feff}{text}")).unwrap(), voices);
        assert_eq!(
            voices[0],
            ("Ann Lee".to_owned(), Voice::Recording(folder.path().join("ann.wav")))
        );
        assert_eq!(voices[1], ("Bob".to_owned(), Voice::Embedding(vec![0.5, -1.0])));
        for (text, said) in [
            ("{}", "names no speaker"),
            ("[]", "not a JSON object"),
            (r#"{"Ann": 1}"#, "not a JSON object"),
            (r#"{"Ann": []}"#, "embedding of Ann"),
            (r#"{"Ann": [1e300]}"#, "known.json"),
            (r#"{" ": [1]}"#, "cannot be the name"),
            (r#"{"SPEAKER_00": [1]}"#, "cannot be the name"),
            (r#"{"UNKNOWN": [1]}"#, "cannot be the name"),
            (r#"{"Ann": "gone.wav"}"#, "gone.wav, does not exist"),
            (r#"{"Ann": [1], "Ann": [2]}"#, "there twice"),
            (r#"{"Ann Lee": [1], "Ann_Lee": [2]}"#, "there twice"),
            ("{\"Ren\u{e9}\": [1], \"Rene\u{301}\": [2]}", "there twice"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
