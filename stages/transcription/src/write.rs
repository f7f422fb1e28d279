//! The kind `transcription.write`: transcripts to files.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;

use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use flow_kind::output_files::{self, OutputFile};
use flow_kind::{
    Artifact, Body, ColumnType, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Progress,
    Shape, StageError, Storage, UrlUse,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::rows::{SEGMENT_COLUMNS, read_num_speakers, read_recording, read_segments, with_diarization};
use crate::{Format, LineLimits, Transcript};

/// Writes transcripts into a folder, in one or several formats.
///
/// # What it does
///
/// For each recording of a `transcription.transcribe`, `out` receives a file of its name for each format, once all are
/// transcribed: `talks/monday.wav` below the folder that was transcribed becomes `OUT/talks/monday.txt`. Another format
/// does not decode again. Files are replaced as a whole; others in the folder are left alone, also those of recordings
/// and formats that are no longer asked for. A file that is missing or was changed is written again by the next run.
///
/// `txt` (a segment on a line), `json` (everything), `srt` and `vtt` (subtitles), `tsv` (start and end in milliseconds, text),
/// `ctm` (NIST's, a word on a line), `jsonl` (a line of a manifest as NeMo writes it), `parquet` (the same as a table of one
/// row); see docs/transcription.md.
///
/// With `assigned`, the segments of a `transcription.assign_speakers`, the speaker precedes each segment (`txt`, `srt`,
/// `vtt`) and is given for each word (`json`). `diarized` and `diarization_timings`, of a `speakers.diarize`, add the
/// number of speakers and the time of diarization to the JSON.
///
/// The port `files` has one row per file: `_row, format, path, bytes, digest`.
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
    /// Folder that receives the files; may be in object storage (`s3://bucket/folder`, see docs/storage.md).
    pub out: PathBuf,
    /// Formats to write: `txt`, `json`, `srt`, `vtt`, `tsv`, `ctm`, `jsonl`, `parquet`.
    #[serde(default = "only_text")]
    pub formats: Vec<Format>,
    /// Subtitles: characters on a line at most, the speaker's name and spaces included; 0 for no limit.
    #[serde(default = "max_line_width")]
    pub max_line_width: usize,
    /// Subtitles: lines at once at most, where lines have a width; 0 for no limit.
    #[serde(default = "max_line_count")]
    pub max_line_count: usize,
    /// Files below `out` that are left as they are, though they would be written: `flow transcribe` and `flow diarize` name those that
    /// were edited.
    #[serde(default)]
    pub keep: BTreeSet<PathBuf>,
}

/// Usual of subtitles, and what whisperX and broadcasters ask for.
fn max_line_width() -> usize {
    42
}

fn max_line_count() -> usize {
    2
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
        InputPort::streamed("segments", "the port `segments` of a transcription.transcribe").columns(SEGMENT_COLUMNS),
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
        InputPort::streamed(
            "assigned",
            "the port `segments` of a transcription.assign_speakers: these segments, with their speakers, are written",
        )
        .optional()
        .columns(&[
            ("start", ColumnType::Float64),
            ("end", ColumnType::Float64),
            ("text", ColumnType::Text),
            ("confidence", ColumnType::Float64),
            ("words", ColumnType::Any),
            ("speaker", ColumnType::Text),
        ]),
        InputPort::streamed(
            "diarized",
            "the port `recordings` of a speakers.diarize: how many speakers there are",
        )
        .optional()
        .columns(&[("num_speakers", ColumnType::Int64)]),
        InputPort::streamed("diarization_timings", "the port `timings` of the same stage")
            .optional()
            .columns(&[("diarization_s", ColumnType::Float64), ("total_s", ColumnType::Float64)]),
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
            has_speakers: context.inputs.has("assigned"),
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
        settings: &WriteSettings,
        storage: &Storage,
        committed: &Artifact,
        threads: usize,
    ) -> Result<BTreeMap<Partition, String>, StageError> {
        output_files::missing(storage, &settings.keep, committed, &settings.out, threads)
    }
}

/// Batches of a partition.
#[derive(Default)]
struct Waiting {
    segments: Vec<RecordBatch>,
    recordings: Vec<RecordBatch>,
    timings: Vec<RecordBatch>,
    assigned: Vec<RecordBatch>,
    diarized: Vec<RecordBatch>,
    diarization_timings: Vec<RecordBatch>,
}

struct Writer {
    settings: WriteSettings,
    storage: Storage,
    scratch: PathBuf,
    /// Whether segments come with their speakers.
    has_speakers: bool,
    waiting: HashMap<Partition, Waiting>,
}

impl Operator for Writer {
    fn batch(&mut self, input: &str, partition: &Partition, batch: RecordBatch, _: &mut Out) -> Result<(), StageError> {
        let waiting = self.waiting.entry(partition.clone()).or_default();
        match input {
            "segments" => waiting.segments.push(batch),
            "recordings" => waiting.recordings.push(batch),
            "assigned" => waiting.assigned.push(batch),
            "diarized" => waiting.diarized.push(batch),
            "diarization_timings" => waiting.diarization_timings.push(batch),
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
        let (metadata, mut performance) = read_recording(&recordings, &timings)?;
        let written = if self.has_speakers {
            &waiting.assigned
        } else {
            &waiting.segments
        };
        let mut segments = Vec::new();
        for batch in written {
            segments.extend(read_segments(batch)?);
        }
        if let Some(timings) = all(&waiting.diarization_timings)? {
            performance = with_diarization(&performance, metadata.duration_s, &timings)?;
        }
        let mut transcript = Transcript::from_segments(metadata, performance, segments);
        // There may be speakers without words.
        if let Some(diarized) = all(&waiting.diarized)? {
            transcript.metadata.num_speakers = read_num_speakers(&diarized)?.or(transcript.metadata.num_speakers);
        }
        let (formats, limits) = (self.settings.formats(), self.settings.limits());
        let mut files = Vec::with_capacity(formats.len());
        for format in formats {
            files.push(OutputFile {
                format: format.name(),
                path: self.settings.out.join(format!("{partition}.{}", format.name())),
                bytes: format.write(&transcript, &limits)?,
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

fn all(batches: &[RecordBatch]) -> Result<Option<RecordBatch>, StageError> {
    let Some(first) = batches.first() else { return Ok(None) };
    Ok(Some(concat_batches(&first.schema(), batches)?))
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
