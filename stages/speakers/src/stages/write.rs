//! The kind `speakers.write`: diarizations to files.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use arrow::array::RecordBatch;
use flow_kind::output_files::{self, OutputFile};
use flow_kind::{
    Artifact, Body, ColumnType, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Progress,
    Shape, StageError, Storage, UrlUse,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::rows::{TURN_COLUMNS, WrittenRecording, read_recording, read_speakers, read_turns};
use crate::diarizer::Speaker;
use crate::error::Result;
use crate::rttm::write_rttm;
use crate::turns::Turn;

/// A format of diarizations; its name is the extension of its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// NIST's Rich Transcription Time Marked: a turn on a line.
    Rttm,
    /// pyannote's layout, with speakers.
    Json,
}

impl Format {
    pub const ALL: [Self; 2] = [Self::Rttm, Self::Json];

    pub fn name(self) -> &'static str {
        match self {
            Self::Rttm => "rttm",
            Self::Json => "json",
        }
    }
}

/// Writes diarizations into a folder, in one or two formats.
///
/// # What it does
///
/// For each recording of a `speakers.diarize`, `out` receives a file of its name for each format, as soon as it is diarized:
/// `talks/monday.wav` below the folder that was diarized becomes `OUT/talks/monday.rttm`. Another format does not
/// diarize again. Files are replaced as a whole; others in the folder are left alone, also those of recordings and
/// formats that are no longer asked for. A file that is missing or was changed is written again by the next run.
///
/// `rttm`: the turns, in NIST's format, which scoring tools read; the recording is called by its name without folder and extension, and
/// white space in names becomes `_`. `json`: `diarization` and `exclusive_diarization`, lists of `start`, `end`, `speaker`, as
/// pyannote writes them, and `speakers`, a list of `speaker`, `seconds`, `embedding`, which `known_speakers` takes; of a recording
/// that is damaged also `damaged_at`, where that begins. Times are seconds to the millisecond.
///
/// The port `files` has one row per file: `_row, format, path, bytes, digest`.
///
/// # Example
///
/// ```yaml
/// write:
///   uses: speakers.write
///   from: {turns: diarize.turns, exclusive: diarize.exclusive, speakers: diarize.speakers, recordings: diarize.recordings}
///   with: {out: work/diarizations, formats: [rttm, json]}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteSettings {
    /// Folder that receives the files; may be in object storage (`s3://bucket/folder`, see docs/storage.md).
    pub out: PathBuf,
    /// Formats to write: `rttm`, `json`.
    #[serde(default = "only_rttm")]
    pub formats: Vec<Format>,
    /// Files below `out` that are left as they are, though they would be written: `flow transcribe` and `flow diarize` name those that
    /// were edited.
    #[serde(default)]
    pub keep: BTreeSet<PathBuf>,
}

fn only_rttm() -> Vec<Format> {
    vec![Format::Rttm]
}

impl WriteSettings {
    /// Each once; their order does not matter.
    fn formats(&self) -> Vec<Format> {
        let mut formats = self.formats.clone();
        formats.sort_unstable();
        formats.dedup();
        formats
    }
}

/// The kind `speakers.write`.
pub struct Write;

impl Kind for Write {
    const NAME: &'static str = "speakers.write";
    const VERSION: u32 = 2;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("turns", "the port `turns` of a speakers.diarize").columns(TURN_COLUMNS),
        InputPort::streamed("exclusive", "the port `exclusive` of the same stage").columns(TURN_COLUMNS),
        InputPort::streamed("speakers", "the port `speakers` of the same stage").columns(&[
            ("name", ColumnType::Text),
            ("seconds", ColumnType::Float64),
            ("embedding", ColumnType::Any),
        ]),
        InputPort::streamed("recordings", "the port `recordings` of the same stage")
            .columns(&[("recording", ColumnType::Text), ("damaged_at", ColumnType::Float64)]),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("files", "one row for each file that was written")];
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[("out", UrlUse::Write)];
    type Settings = WriteSettings;

    fn shape(settings: &WriteSettings, _: &Inputs) -> Result<Shape, StageError> {
        output_files::shape(&settings.formats, &settings.out)
    }

    fn open(settings: &WriteSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(Writer {
            settings: settings.clone(),
            storage: context.storage.clone(),
            scratch: context.scratch.clone(),
            waiting: HashMap::new(),
        })))
    }

    fn identity(settings: &WriteSettings) -> Value {
        json!({"out": settings.out, "formats": settings.formats()})
    }

    fn missing_outputs(
        settings: &WriteSettings,
        storage: &Storage,
        committed: &Artifact,
        threads: usize,
    ) -> Result<BTreeMap<Partition, String>, StageError> {
        output_files::missing(storage, &settings.keep, committed, &settings.out, threads)
    }
}

/// What is known of a partition.
#[derive(Default)]
struct Waiting {
    turns: Vec<Turn>,
    exclusive: Vec<Turn>,
    speakers: Vec<Speaker>,
    recording: Option<WrittenRecording>,
}

struct Writer {
    settings: WriteSettings,
    storage: Storage,
    scratch: PathBuf,
    waiting: HashMap<Partition, Waiting>,
}

impl Operator for Writer {
    fn batch(&mut self, input: &str, partition: &Partition, batch: RecordBatch, _: &mut Out) -> Result<(), StageError> {
        let waiting = self.waiting.entry(partition.clone()).or_default();
        match input {
            "turns" => waiting.turns.extend(read_turns(&batch)?),
            "exclusive" => waiting.exclusive.extend(read_turns(&batch)?),
            "speakers" => waiting.speakers.extend(read_speakers(&batch)?),
            _ => waiting.recording = read_recording(&batch)?.or(waiting.recording.take()),
        }
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, out: &mut Out) -> Result<Progress, StageError> {
        let found = self.waiting.remove(partition).unwrap_or_default();
        // A recording that was refused has no row.
        let Some(recording) = &found.recording else {
            return Ok(Progress::Done);
        };
        let mut files = Vec::new();
        for format in self.settings.formats() {
            let text = match format {
                Format::Rttm => rttm(&recording.file, &found.turns).map_err(StageError::failed)?,
                Format::Json => json(&found, recording.damaged_at),
            };
            files.push(OutputFile {
                format: format.name(),
                path: self.settings.out.join(format!("{partition}.{}", format.name())),
                bytes: text.into_bytes(),
            });
        }
        let WriteSettings { out: folder, keep, .. } = &self.settings;
        out.send(
            0,
            output_files::write(&self.storage, keep, &files, folder, &self.scratch)?,
        );
        Ok(Progress::Done)
    }
}

/// A name as RTTM can hold it: white space sets its fields apart.
pub(crate) fn field(name: &str) -> String {
    let name = name.split_whitespace().collect::<Vec<_>>().join("_");
    if name.is_empty() { "_".to_owned() } else { name }
}

/// The name of a recording in RTTM: without folder and ending, `_` for white space.
pub fn recording_name(recording: &str) -> String {
    let stem = Path::new(recording).file_stem().unwrap_or_default();
    field(&stem.to_string_lossy())
}

pub(crate) fn rttm(recording: &str, turns: &[Turn]) -> Result<String> {
    let turns: Vec<Turn> = turns
        .iter()
        .map(|turn| Turn {
            speaker: field(&turn.speaker),
            ..turn.clone()
        })
        .collect();
    write_rttm(&recording_name(recording), &turns)
}

/// Seconds to the millisecond.
fn milliseconds(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
}

/// pyannote's layout, with `damaged_at` in seconds for a damaged recording.
fn json(found: &Waiting, damaged_at: Option<f64>) -> String {
    let turns = |turns: &[Turn]| -> Value {
        turns
            .iter()
            .map(|turn| {
                let (start, end) = (milliseconds(turn.start), milliseconds(turn.end));
                json!({"start": start, "end": end, "speaker": turn.speaker})
            })
            .collect()
    };
    let speakers = found.speakers.iter().map(|speaker| {
        json!({
            "speaker": speaker.name,
            "seconds": milliseconds(speaker.seconds),
            "embedding": speaker.embedding,
        })
    });
    let mut document = json!({
        "diarization": turns(&found.turns),
        "exclusive_diarization": turns(&found.exclusive),
        "speakers": speakers.collect::<Value>(),
    });
    if let Some(at) = damaged_at {
        document["damaged_at"] = json!(milliseconds(at));
    }
    format!("{document}\n")
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
