//! The forms of files with texts: NeMo's manifests, lines of text, CTM, STM and transcripts of `flow transcribe`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use flow_audio::row_times::STARTS;
use flow_corpus::column_names::{FILE_COLUMNS, ID_COLUMNS, TEXT_COLUMNS};
use flow_corpus::{json_line, lines::LANGUAGE_KEYS};
use flow_evaluation::speaker_transcripts::read_stm;
use flow_evaluation::utterance::Utterance;
use flow_kind::Storage;
use flow_speakers::stages::recording_name;
use flow_transcription::Transcript;
use serde_json::{Map, Value};

use crate::files::read;
use flow_cli::failure::Failure;

/// The key of a manifest line that names its recording, before all others that may.
const AUDIO_FILEPATH: &str = "audio_filepath";
/// Keys of a manifest line for what a system heard.
const HYPOTHESES: [&str; 2] = ["pred_text", "hypothesis"];

/// A file with texts.
#[derive(Clone, Debug)]
pub struct Form {
    pub path: PathBuf,
    pub content: Content,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Of a NeMo manifest.
    Manifest(Vec<Row>),
    /// One utterance to a line.
    Lines(Vec<String>),
    /// By the names of utterances.
    Named(BTreeMap<String, String>),
    /// By recording, each text with its time, in its order: utterances, or single words.
    Timed(BTreeMap<String, Vec<Utterance>>),
}

/// A line of a manifest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// Whether the line names its recording or itself; else its names are its number.
    pub is_named: bool,
    /// Its recording, and where in it.
    pub name: String,
    /// The same with the name of the file in place of its path.
    pub short: String,
    /// The recording's name, as CTM and STM have it.
    pub recording: String,
    /// Its file as the line names it.
    pub file: Option<String>,
    pub text: Option<String>,
    /// What a system heard.
    pub heard: Option<String>,
    /// There is the key of that, and it is null.
    pub heard_nothing: bool,
    pub lang: Option<String>,
    /// Where it begins in its recording.
    pub offset: f64,
    pub seconds: f64,
    /// The set of a report that it belongs to.
    pub set: Option<String>,
    /// Names its recording for certain: the whole path, and where it is in a tar.
    pub source: String,
    /// Values of the columns that were asked for; those that the line does not have are missing.
    pub columns: BTreeMap<String, String>,
}

impl Form {
    /// Reads a file. `ids`: lines of text begin with the name of their utterance. `columns`: keys of a manifest's lines whose
    /// values are kept.
    pub fn read(storage: &Storage, path: &Path, ids: bool, columns: &[&str]) -> Result<Form, Failure> {
        let mut content = read(storage, path, |text| content(path, text, ids, columns))?;
        if let Content::Timed(recordings) = &mut content {
            for texts in recordings.values_mut() {
                texts.sort_by(|one, other| one.turn.start.total_cmp(&other.turn.start));
            }
        }
        Ok(Form {
            path: path.to_path_buf(),
            content,
        })
    }
}

fn content(path: &Path, text: &str, ids: bool, columns: &[&str]) -> Result<Content, String> {
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
    match ending.as_deref() {
        Some("stm") => {
            one_channel(text)?;
            read_stm(text).map(Content::Timed).map_err(|error| error.to_string())
        }
        Some("ctm") => words_of_ctm(text).map(Content::Timed),
        Some("trn") => named(text, trn_line).map(Content::Named),
        Some("jsonl" | "ndjson" | "json") => json(text, columns),
        // As lines of text each of their lines would be an utterance.
        Some(other @ ("parquet" | "csv" | "tsv" | "srt" | "vtt" | "rttm" | "textgrid" | "eaf")) => Err(format!(
            "{other} is not read here; write JSON lines with `audio_filepath` and `text`, or CTM"
        )),
        _ if ids => named(text, |line| {
            Some(line.split_once(char::is_whitespace).unwrap_or((line, "")))
        })
        .map(Content::Named),
        // A text may begin with a brace, too: `{noise} one two`.
        _ if is_json_object(text) => json(text, columns),
        _ => Ok(Content::Lines(text.lines().map(str::to_owned).collect())),
    }
}

/// Whether a text begins as JSON objects do: with a brace, and then a key or the other brace.
fn is_json_object(text: &str) -> bool {
    let inner = text.trim_start().strip_prefix('{').map(str::trim_start);
    inner.is_some_and(|inner| inner.starts_with(['"', '}']))
}

/// `text of an utterance (name)`, as sclite has it.
fn trn_line(line: &str) -> Option<(&str, &str)> {
    let (text, name) = line.trim_end().strip_suffix(')')?.rsplit_once('(')?;
    Some((name.trim(), text))
}

fn named(text: &str, split: impl Fn(&str) -> Option<(&str, &str)>) -> Result<BTreeMap<String, String>, String> {
    let mut utterances = BTreeMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        let (name, text) = split(line).ok_or_else(|| format!("line {number} does not name its utterance"))?;
        if utterances.insert(name.to_owned(), text.trim().to_owned()).is_some() {
            return Err(format!("line {number}: {name} is the name of a line before it, too"));
        }
    }
    Ok(utterances)
}

/// Refuses a CTM or STM with several channels of a recording: their texts would be mixed.
fn one_channel(text: &str) -> Result<(), String> {
    let mut channels = BTreeMap::new();
    for line in text.lines().filter(|line| !line.trim_start().starts_with(';')) {
        let mut fields = line.split_whitespace();
        if let (Some(recording), Some(channel)) = (fields.next(), fields.next()) {
            let first = *channels.entry(recording).or_insert(channel);
            if first != channel {
                return Err(format!(
                    "{recording} has the channels {first} and {channel}; give each channel's recording a name of its own"
                ));
            }
        }
    }
    Ok(())
}

/// Words with their times, by recording: `recording channel start duration word`, and perhaps more. Comments begin with `;;`.
pub fn words_of_ctm(text: &str) -> Result<BTreeMap<String, Vec<Utterance>>, String> {
    one_channel(text)?;
    let mut recordings: BTreeMap<String, Vec<Utterance>> = BTreeMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if fields.is_empty() || line.trim_start().starts_with(";;") {
            continue;
        }
        let [recording, channel, start, duration, word, ..] = fields[..] else {
            return Err(format!(
                "line {number}: a line of CTM has at least 5 fields, not {}",
                fields.len()
            ));
        };
        let seconds = |field: &str, what: &str| {
            let seconds = field.parse::<f64>().ok();
            let seconds = seconds.filter(|seconds| seconds.is_finite() && *seconds >= 0.0);
            seconds.ok_or_else(|| format!("line {number}: {what} is {field:?}, which is not a number of seconds"))
        };
        let (start, duration) = (seconds(start, "start")?, seconds(duration, "duration")?);
        let utterance = Utterance::new(start, start + duration, channel, word);
        recordings.entry(recording.to_owned()).or_default().push(utterance);
    }
    Ok(recordings)
}

/// A transcript of `flow transcribe`, or lines of a manifest.
fn json(text: &str, columns: &[&str]) -> Result<Content, String> {
    if let Ok(whole) = serde_json::from_str::<Value>(text)
        && whole.get("segments").is_some()
    {
        let transcript = Transcript::from_json(text).map_err(|error| error.to_string())?;
        let name = recording_name(&transcript.metadata.source_file);
        let segments = transcript.segments.into_iter();
        let segments = segments.map(|segment| Utterance::new(segment.start, segment.end, "", segment.text));
        return Ok(Content::Timed(BTreeMap::from([(name, segments.collect())])));
    }
    let mut rows = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() {
            continue;
        }
        match json_line::parse(line) {
            Ok((Value::Object(fields), _)) => rows.push(row(&fields, number, columns)),
            Ok(_) => return Err(format!("line {number} is not a JSON object")),
            Err(error) => return Err(format!("line {number} is not JSON: {error}")),
        }
    }
    Ok(Content::Manifest(rows))
}

fn row(fields: &Map<String, Value>, number: usize, columns: &[&str]) -> Row {
    let text = |keys: &[&str]| keys.iter().find_map(|key| Some(fields.get(*key)?.as_str()?.to_owned()));
    let path = text(&[AUDIO_FILEPATH]).or_else(|| text(&FILE_COLUMNS));
    let file = path.clone();
    let id = text(&ID_COLUMNS);
    let offset = STARTS.iter().find_map(|key| fields.get(*key)?.as_f64());
    let in_tar = fields.get("tar_offset").and_then(Value::as_u64);
    let is_named = path.is_some() || id.is_some();
    let source = match (&path, in_tar) {
        (Some(tar), Some(place)) => Some(format!("{tar} {place}")),
        _ => path.clone(),
    };
    let value = |column: &str| match fields.get(column)? {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    };
    let name = path.or_else(|| id.clone()).unwrap_or_else(|| format!("line {number}"));
    let offset = offset.unwrap_or_default();
    let named = |name: String| match (in_tar, &id) {
        // Of a tar the name of the row tells more.
        (Some(_), Some(id)) => id.clone(),
        _ if offset > 0.0 => format!("{name} at {offset} s"),
        _ => name,
    };
    let recording = recording_name(&name);
    Row {
        is_named,
        short: named(recording.clone()),
        recording,
        file,
        name: named(name),
        text: text(&TEXT_COLUMNS),
        heard: text(&HYPOTHESES),
        heard_nothing: text(&HYPOTHESES).is_none()
            && HYPOTHESES
                .iter()
                .any(|key| fields.get(*key).is_some_and(Value::is_null)),
        lang: text(&LANGUAGE_KEYS).filter(|lang| !lang.is_empty()),
        offset,
        seconds: fields.get("duration").and_then(Value::as_f64).unwrap_or_default(),
        set: value("set"),
        source: source.or(id).unwrap_or_else(|| format!("line {number}")),
        columns: columns
            .iter()
            .filter_map(|column| Some(((*column).to_owned(), value(column)?)))
            .collect(),
    }
}
