//! The kind `transcription.write`: transcripts to files.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{AsArray, Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::compute::concat_batches;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_runtime::store::write_atomically;
use flow_runtime::{
    Artifact, Body, ColumnType, Conservation, Context, Digest, InputPort, Inputs, Kind, Operator, Out, OutputPort,
    Partition, Port, Progress, ROW, Shape, StageError,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::rows::{read_recording, read_segments};
use crate::{Format, LineLimits, Transcript};

/// Writes transcripts into a folder, in one or several formats.
///
/// # What it does
///
/// For each recording of a `transcription.transcribe`, `out` receives a file of its name for each format, as soon as it is
/// transcribed: `talks/monday.wav` below the folder that was transcribed becomes `OUT/talks/monday.txt`. Another format decodes
/// nothing again. Files are replaced as a whole; others in the folder are left alone, also those of recordings and formats that are
/// no longer asked for. A file that is gone, or another than the one that was written, is written again by the next run.
///
/// `txt` (a segment on a line), `json` (everything), `srt` and `vtt` (subtitles), `tsv` (start and end in milliseconds, text),
/// `ctm` (NIST's, a word on a line), `jsonl` (a line of a manifest as NeMo writes it); see docs/transcription.md.
///
/// The port `files` has one row per file: `_row, format, path, bytes`.
///
/// # Example
///
/// ```yaml
/// write:
///   uses: transcription.write
///   from: {segments: transcribe.segments, recordings: transcribe.recordings, timings: transcribe.timings}
///   with: {out: work/transcripts, formats: [txt, srt]}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteSettings {
    /// Folder that receives the files.
    pub out: PathBuf,
    /// Formats to write: `txt`, `json`, `srt`, `vtt`, `tsv`, `ctm`, `jsonl`.
    #[serde(default = "only_text")]
    pub formats: Vec<Format>,
    /// Subtitles: characters on a line at most, the speaker's name and spaces included; 0 for no limit.
    #[serde(default)]
    pub max_line_width: usize,
    /// Subtitles: lines at once at most, where lines have a width; 0 for no limit.
    #[serde(default)]
    pub max_line_count: usize,
}

fn only_text() -> Vec<Format> {
    vec![Format::Txt]
}

impl WriteSettings {
    /// Each once; their order does not matter.
    fn formats(&self) -> Vec<Format> {
        let mut formats = self.formats.clone();
        formats.sort_unstable();
        formats.dedup();
        formats
    }

    fn limits(&self) -> LineLimits {
        let limit = |lines: usize| Some(lines).filter(|&lines| lines > 0);
        LineLimits {
            max_line_width: limit(self.max_line_width),
            max_line_count: limit(self.max_line_count),
        }
    }
}

/// The kind `transcription.write`.
pub struct Write;

impl Kind for Write {
    const NAME: &'static str = "transcription.write";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("segments", "the port `segments` of a transcription.transcribe").columns(&[
            ("start", ColumnType::Float64),
            ("end", ColumnType::Float64),
            ("text", ColumnType::Text),
            ("confidence", ColumnType::Float64),
            ("words", ColumnType::Any),
        ]),
        InputPort::streamed("recordings", "the port `recordings` of the same stage").columns(&[
            ("recording", ColumnType::Text),
            ("duration", ColumnType::Float64),
            ("languages", ColumnType::Any),
            ("model", ColumnType::Text),
            ("model_digest", ColumnType::Text),
            ("damaged_at", ColumnType::Float64),
        ]),
        InputPort::streamed("timings", "the port `timings` of the same stage").columns(&[
            ("processed_at", ColumnType::Text),
            ("transcription_s", ColumnType::Float64),
            ("total_s", ColumnType::Float64),
        ]),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("files", "one row for each file that was written")];
    type Settings = WriteSettings;

    fn shape(settings: &WriteSettings, _: &Inputs) -> Result<Shape, StageError> {
        if settings.formats.is_empty() {
            return Err(StageError::setting(
                "formats",
                "`formats` is empty, so that nothing would be written",
            ));
        }
        if settings.out.as_os_str().is_empty() {
            return Err(StageError::setting("out", "`out` names no folder"));
        }
        let files = Port {
            name: "files".into(),
            schema: files_schema(),
        };
        Ok(Shape {
            expensive: true,
            conservation: Conservation::NewRows,
            ..Shape::local(vec![files])
        })
    }

    fn open(settings: &WriteSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(Writer {
            settings: settings.clone(),
            waiting: HashMap::new(),
        })))
    }

    fn identity(settings: &WriteSettings) -> Value {
        json!({
            "out": settings.out,
            "formats": settings.formats(),
            "max_line_width": settings.max_line_width,
            "max_line_count": settings.max_line_count,
        })
    }

    fn missing_outputs(
        _: &WriteSettings,
        committed: &Artifact,
        _: usize,
    ) -> Result<BTreeMap<Partition, String>, StageError> {
        let mut missing = BTreeMap::new();
        for partition in committed.partitions() {
            for batch in committed.read(partition, Some(&["path", "digest"]))? {
                if let Some(why) = missing_file(&batch?)? {
                    missing.entry(partition.clone()).or_insert(why);
                }
            }
        }
        Ok(missing)
    }
}

fn files_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("format", DataType::Utf8, false),
        Field::new("path", DataType::Utf8, false),
        Field::new("bytes", DataType::Int64, false),
        Field::new("digest", DataType::Utf8, false),
    ]))
}

/// What is wrong with the first file that is not as it was written: it may have been written anew by a run with other settings.
fn missing_file(files: &RecordBatch) -> Result<Option<String>, StageError> {
    let texts = |column: usize| files.column(column).as_string_opt::<i32>();
    let (Some(paths), Some(digests)) = (texts(0), texts(1)) else {
        return Err(StageError::failed("the rows of transcription.write have other columns"));
    };
    let mut files = paths.iter().zip(digests).filter_map(|(path, digest)| path.zip(digest));
    Ok(files.find_map(|(path, digest)| match std::fs::read(path) {
        Ok(text) if Digest::of(&text).to_hex() == digest => None,
        Ok(_) => Some(format!("{path} is another than the one that was written")),
        Err(_) => Some(format!("{path} is gone")),
    }))
}

/// Batches of a partition.
#[derive(Default)]
struct Waiting {
    segments: Vec<RecordBatch>,
    recordings: Vec<RecordBatch>,
    timings: Vec<RecordBatch>,
}

struct Writer {
    settings: WriteSettings,
    waiting: HashMap<Partition, Waiting>,
}

impl Operator for Writer {
    fn batch(&mut self, input: &str, partition: &Partition, batch: RecordBatch, _: &mut Out) -> Result<(), StageError> {
        let waiting = self.waiting.entry(partition.clone()).or_default();
        match input {
            "segments" => waiting.segments.push(batch),
            "recordings" => waiting.recordings.push(batch),
            _ => waiting.timings.push(batch),
        }
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, out: &mut Out) -> Result<Progress, StageError> {
        let waiting = self.waiting.remove(partition).unwrap_or_default();
        // A recording that was refused has no row.
        let (Some(recordings), Some(timings)) = (all(&waiting.recordings)?, all(&waiting.timings)?) else {
            return Ok(Progress::Done);
        };
        if recordings.num_rows() == 0 {
            return Ok(Progress::Done);
        }
        let (metadata, performance) = read_recording(&recordings, &timings)?;
        let mut segments = Vec::new();
        for batch in &waiting.segments {
            segments.extend(read_segments(batch)?);
        }
        let transcript = Transcript::from_segments(metadata, performance, segments);
        let (formats, limits) = (self.settings.formats(), self.settings.limits());
        let mut files = Vec::with_capacity(formats.len());
        for format in formats {
            let path = self.settings.out.join(format!("{partition}.{}", format.name()));
            let text = format.write(&transcript, &limits)?;
            write(&path, &text)?;
            files.push((format, path, text));
        }
        out.send(0, files_batch(&files)?);
        Ok(Progress::Done)
    }
}

fn all(batches: &[RecordBatch]) -> Result<Option<RecordBatch>, StageError> {
    let Some(first) = batches.first() else { return Ok(None) };
    Ok(Some(concat_batches(&first.schema(), batches)?))
}

fn write(path: &Path, text: &str) -> Result<(), StageError> {
    let help = "check the space and the permissions of the folder; a rerun goes on here";
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|error| {
            StageError::failed(format!("cannot make the folder {}: {error}", folder.display())).with_help(help)
        })?;
    }
    write_atomically(path, text.as_bytes()).map_err(|error| StageError::failed(error).with_help(help))
}

fn files_batch(files: &[(Format, PathBuf, String)]) -> Result<RecordBatch, StageError> {
    let rows = UInt32Array::from_iter_values((0..).take(files.len()));
    let formats = files.iter().map(|(format, _, _)| format.name());
    let paths = files.iter().map(|(_, path, _)| path.to_string_lossy());
    // Lengths of texts in memory are below 2^63.
    let sizes = files.iter().map(|(_, _, text)| text.len() as i64);
    let digests = files.iter().map(|(_, _, text)| Digest::of(text.as_bytes()).to_hex());
    Ok(RecordBatch::try_new(
        files_schema(),
        vec![
            Arc::new(rows),
            Arc::new(StringArray::from_iter_values(formats)),
            Arc::new(StringArray::from_iter_values(paths)),
            Arc::new(Int64Array::from_iter_values(sizes)),
            Arc::new(StringArray::from_iter_values(digests)),
        ],
    )?)
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
