//! The files that are scored, turns or transcripts with speakers; and how the path of a page is checked.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use flow_evaluation::speaker_transcripts::{read_seglst, read_stm};
use flow_evaluation::utterance::{Utterance, turns};
use flow_kind::{Storage, open_regular_file_or_open_pipe};
use flow_speakers::rttm::read_rttm;
use flow_speakers::stages::recording_name;
use flow_speakers::turns::Turn;
use flow_transcription::speakers::UNKNOWN;
use flow_transcription::{Segment, Transcript};
use serde_json::Value;

use flow_cli::failure::Failure;

/// Turns of recordings, by their names.
pub type Recordings = BTreeMap<String, Vec<Turn>>;

/// The reference or the hypothesis, from all of its files.
#[derive(Debug, Default)]
pub struct Side {
    pub turns: Recordings,
    /// Utterances of recordings whose file has words.
    utterances: BTreeMap<String, Vec<Utterance>>,
    /// Whether one of the files has words.
    has_words: bool,
}

impl Side {
    /// Reads files, each in its own format. A recording may be in one of them only.
    pub fn read(storage: &Storage, paths: &[PathBuf]) -> Result<Self, Failure> {
        let mut side = Side::default();
        let mut files: BTreeMap<String, &Path> = BTreeMap::new();
        for path in paths {
            let (named, utterances) = match read(storage, path, |text| parse(path, text))? {
                Content::Turns(recordings) => (recordings, None),
                Content::Utterances(recordings) => {
                    let turns = recordings.iter().map(|(name, said)| (name.clone(), turns(said)));
                    (turns.collect(), Some(recordings))
                }
            };
            for name in named.keys() {
                if let Some(other) = files.insert(name.clone(), path) {
                    return Err(Failure::usage(
                        format!("{name} is in {} and in {}", other.display(), path.display()),
                        "a recording is read from one file: give one of the two",
                    ));
                }
            }
            side.turns.extend(named);
            side.has_words |= utterances.is_some();
            side.utterances.extend(utterances.into_iter().flatten());
        }
        Ok(side)
    }

    /// The utterances of a recording. Empty where other recordings of this side have words and this one is missing;
    /// None where words are not known.
    pub fn words(&self, recording: &str) -> Option<&[Utterance]> {
        match self.utterances.get(recording) {
            Some(utterances) => Some(utterances),
            None => (self.has_words && !self.turns.contains_key(recording)).then_some(&[]),
        }
    }

    /// Utterances, or turns as utterances without words.
    pub fn shown(&self, recording: &str) -> Vec<Utterance> {
        if let Some(utterances) = self.utterances.get(recording) {
            return utterances.clone();
        }
        let silent = |turn: &Turn| Utterance {
            turn: turn.clone(),
            text: String::new(),
        };
        self.turns.get(recording).into_iter().flatten().map(silent).collect()
    }
}

/// What makes transcripts in JSON.
pub const TRANSCRIBE: &str = "flow transcribe MANIFEST --format json --out FOLDER";

/// The content of a file, by recording.
enum Content {
    Turns(Recordings),
    Utterances(BTreeMap<String, Vec<Utterance>>),
}

/// Reads a file, skipping a byte-order mark. Errors name the file.
pub fn read<T, E: Display>(
    storage: &Storage,
    path: &Path,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<T, Failure> {
    let wrong = |error: &dyn Display| {
        Failure::usage(
            format!("{}: {error}", path.display()),
            "`flow help evaluate` and docs/speakers.md tell the forms of files",
        )
    };
    let mut bytes = Vec::new();
    let read = open_regular_file_or_open_pipe(storage, path).and_then(|mut file| file.read_to_end(&mut bytes));
    read.map_err(|error| wrong(&error))?;
    let text = String::from_utf8(bytes).map_err(|error| wrong(&error))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    parse(text).map_err(|error| wrong(&error))
}

/// STM is recognised by the extension of its name, JSON by that or by its first character, all else is RTTM.
fn parse(path: &Path, text: &str) -> Result<Content, String> {
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
    if ending.as_deref() == Some("stm") {
        return read_stm(text)
            .map(Content::Utterances)
            .map_err(|error| error.to_string());
    }
    if ending.as_deref() != Some("json") && !text.trim_start().starts_with(['[', '{']) {
        return read_rttm(text).map(Content::Turns).map_err(|error| error.to_string());
    }
    let json: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if json.is_array() {
        return read_seglst(&json)
            .map(Content::Utterances)
            .map_err(|error| error.to_string());
    }
    if json.get("segments").is_none() {
        let known = "it is neither SegLST (a list) nor a transcript of `flow transcribe` (which has `segments`)";
        return Err(match json.get("diarization") {
            Some(_) => format!("{known}; of `flow diarize`, RTTM is read"),
            None => known.to_owned(),
        });
    }
    let transcript = Transcript::from_json(text).map_err(|error| error.to_string())?;
    let has_speaker =
        |segment: &Segment| segment.speaker.is_some() || segment.words.iter().any(|word| word.speaker.is_some());
    if !transcript.segments.is_empty() && !transcript.segments.iter().any(has_speaker) {
        return Err("it does not say who speaks: transcribe with --diarize".to_owned());
    }
    let name = recording_name(&transcript.metadata.source_file);
    let utterances = transcript.segments.iter().flat_map(utterances_of).collect();
    Ok(Content::Utterances(BTreeMap::from([(name, utterances)])))
}

/// Utterances of consecutive words of one speaker; a segment without words is one utterance. Words without speaker have
/// [`UNKNOWN`].
fn utterances_of(segment: &Segment) -> Vec<Utterance> {
    let utterance = |start: f64, end: f64, speaker: &Option<String>, text: &str| {
        Utterance::new(start, end, speaker.as_deref().unwrap_or(UNKNOWN), text)
    };
    if segment.words.is_empty() {
        return vec![utterance(segment.start, segment.end, &segment.speaker, &segment.text)];
    }
    let mut utterances: Vec<Utterance> = Vec::new();
    for word in &segment.words {
        let next = utterance(word.start, word.end, &word.speaker, &word.word);
        match utterances.last_mut() {
            Some(last) if last.turn.speaker == next.turn.speaker => {
                last.turn.end = last.turn.end.max(next.turn.end);
                last.text = format!("{} {}", last.text, next.text);
            }
            _ => utterances.push(next),
        }
    }
    utterances
}

/// The beginning of a page, case-insensitive.
const DOCTYPE: &[u8] = b"<!DOCTYPE html>";

/// An error where the page would replace one of the inputs, or a file that is no page.
pub fn check_page<'a>(path: &Path, inputs: impl IntoIterator<Item = &'a PathBuf>) -> Result<(), Failure> {
    let Ok(metadata) = fs::metadata(path) else {
        return Ok(());
    };
    let refused = |why: &str| {
        let message = format!("--page {}: {why}", path.display());
        Failure::usage(message, "give the name of a new file, or of a page")
    };
    let wrong = |error: io::Error| refused(&error.to_string());
    let real = path.canonicalize().map_err(wrong)?;
    let mut inputs = inputs.into_iter();
    if inputs.any(|input| input.canonicalize().is_ok_and(|input| input == real)) {
        return Err(refused("this is one of the files that are read"));
    }
    let mut start = Vec::new();
    if metadata.is_file() {
        let file = fs::File::open(path).map_err(wrong)?;
        file.take(DOCTYPE.len() as u64).read_to_end(&mut start).map_err(wrong)?;
    }
    match start.eq_ignore_ascii_case(DOCTYPE) {
        true => Ok(()),
        false => Err(refused("what is there is no HTML page, and is not replaced")),
    }
}

#[cfg(test)]
mod tests {
    use flow_transcription::{Metadata, Performance, Word};

    use super::*;

    fn written(files: &[(&str, &str)]) -> (tempfile::TempDir, Vec<PathBuf>) {
        let folder = tempfile::tempdir().unwrap();
        let paths = files.iter().map(|(name, text)| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        });
        let paths = paths.collect();
        (folder, paths)
    }

    #[test]
    fn a_named_pipe_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("a.rttm");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let failure = read(&Storage::default(), &pipe, |_| Ok::<_, String>(())).unwrap_err();
        assert!(
            failure.to_string().contains("it is a pipe, not a regular file"),
            "{failure}"
        );
    }

    fn transcript(speakers: [Option<&str>; 3]) -> String {
        let word = |(at, (text, speaker)): (i32, (&str, Option<&str>))| Word {
            word: text.to_owned(),
            start: f64::from(at),
            end: f64::from(at) + 0.5,
            speaker: speaker.map(str::to_owned),
            ..Word::default()
        };
        let segment = Segment {
            start: 0.0,
            end: 2.5,
            text: "well yes no".to_owned(),
            words: (0..)
                .zip(["well", "yes", "no"].into_iter().zip(speakers))
                .map(word)
                .collect(),
            ..Segment::default()
        };
        let metadata = Metadata {
            source_file: "talks/my talk.flac".to_owned(),
            ..Metadata::default()
        };
        Transcript::from_segments(metadata, Performance::default(), vec![segment])
            .to_json()
            .unwrap()
    }

    #[test]
    fn files_of_all_formats_are_read() {
        let json = transcript([Some("A"), Some("A"), None]);
        let (_folder, paths) = written(&[
            ("a.rttm", "SPEAKER a 1 0 1 <NA> <NA> x <NA> <NA>\n"),
            ("b.stm", "b 1 x 0 1 one two\n"),
            (
                "c.json",
                r#"[{"session_id": "c", "speaker": "x", "start_time": 0, "end_time": 1, "words": "one"}]"#,
            ),
            ("d.json", &json),
        ]);
        let side = Side::read(&Storage::default(), &paths).unwrap();
        assert_eq!(side.turns.keys().collect::<Vec<_>>(), ["a", "b", "c", "my_talk"]);
        assert_eq!(side.words("a"), None);
        assert_eq!(side.words("b").unwrap()[0].text, "one two");
        assert_eq!(side.words("c").unwrap()[0].text, "one");
        let said: Vec<(&str, &str, f64, f64)> = side
            .words("my_talk")
            .unwrap()
            .iter()
            .map(|u| (u.turn.speaker.as_str(), u.text.as_str(), u.turn.start, u.turn.end))
            .collect();
        assert_eq!(said, [("A", "well yes", 0.0, 1.5), (UNKNOWN, "no", 2.0, 2.5)]);
        // Others have words, so nothing was said in one that is missing; without words nothing is known of it.
        assert_eq!(side.words("gone"), Some(&[][..]));
        assert_eq!(
            Side::read(&Storage::default(), &paths[..1]).unwrap().words("gone"),
            None
        );
        assert_eq!(side.shown("a")[0].text, "");
        assert!(side.shown("gone").is_empty());
    }

    #[test]
    fn a_byte_order_mark_is_passed_over() {
        let json = transcript([Some("A"), Some("A"), None]);
        for (name, text, recording) in [
            ("x.rttm", "SPEAKER a 1 0 1 <NA> <NA> x <NA> <NA>\n", "a"),
            ("x.stm", "a 1 x 0 1 one", "a"),
            ("x.json", json.as_str(), "my_talk"),
            ("x.txt", json.as_str(), "my_talk"),
        ] {
            let (_folder, paths) = written(&[(name, &format!("\u{feff}{text}"))]);
            let side = Side::read(&Storage::default(), &paths).unwrap();
            assert_eq!(side.turns.keys().collect::<Vec<_>>(), [recording], "{name}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_file_is_told() {
        let anonymous = transcript([None, None, None]);
        for (name, text, said) in [
            ("x.json", anonymous.as_str(), "does not say who speaks"),
            ("x.json", "{\"diarization\": []}", "RTTM is read"),
            ("x.json", "{\"a\": 1}", "neither SegLST"),
            ("x.json", "", "x.json"),
            ("x.json", "[{}]", "[0]: `start_time` is missing"),
            ("x.stm", "a 1", "line 1"),
            ("x.txt", "[1", "x.txt"),
            ("x.txt", "a 1 x 0 1 one", "x.txt: no SPEAKER line of RTTM"),
        ] {
            let (_folder, paths) = written(&[(name, text)]);
            let error = Side::read(&Storage::default(), &paths).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        let (_folder, paths) = written(&[("x.stm", "a 1 x 0 1 one"), ("y.stm", "a 1 x 0 1 one")]);
        assert!(
            Side::read(&Storage::default(), &paths)
                .unwrap_err()
                .to_string()
                .contains("a is in ")
        );
    }
}
