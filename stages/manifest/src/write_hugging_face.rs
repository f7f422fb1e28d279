//! Datasets of Hugging Face: Parquet files that hold the recordings, and README.md, as the library `datasets` loads them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, BinaryArray, Float64Array, Int64Array, RecordBatch, StringArray, StructArray, UInt32Array,
};
use arrow::compute::take_record_batch;
use arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef};
use flow_audio::AudioError;
use flow_audio::decode::{SAMPLE_RATE, read_file, read_range};
use flow_audio::embedded;
use flow_audio::flac::{Samples, StreamInfo};
use flow_audio::flac_encode;
use flow_audio::format::recognise;
use flow_audio::part::{TOLERANCE_SECONDS, decode_rows, stated_seconds};
use flow_audio::recording_reader::{Channels, RecordingReader};
use flow_kind::event::{Event, Events};
use flow_kind::reject::of_rows;
use flow_kind::{
    Artifact, ExportFile, ExportSet, Input, Inputs, Partition, Reject, RejectClass, StageError, UNREADABLE,
};
use flow_storage::is_url;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;
use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::columns::{self, MANIFEST_COLUMNS};
use crate::place_columns::prefixed;
use crate::statistics::{Durations, Figures, Languages};
use crate::write::{AudioOfRows, REJECTS, WriteSettings, parts_of, rejects_schema};

/// Columns of a dataset, after `audio`, that every row has.
const COLUMNS: [&str; 6] = ["text", "duration", "lang", "segment_id", "shard_id", "source"];
/// Columns by which rows say where their recordings are, and their types.
const PLACES: [(&str, DataType); 4] = [
    ("audio_path", DataType::Utf8),
    ("start", DataType::Float64),
    ("offset", DataType::Int64),
    ("size", DataType::Int64),
];
/// The language of rows whose language is not known.
const UNDETERMINED: &str = "und";

/// How much goes together.
#[derive(Clone, Copy)]
struct Limits {
    /// Seconds of audio in a file: 460 MB of 16-bit samples.
    file_seconds: f64,
    /// Rows of a row group, and bytes of its recordings. A recording that is larger has one of its own.
    group_rows: usize,
    group_bytes: usize,
    /// Rows whose recordings are read at once, and their seconds.
    read_rows: usize,
    read_seconds: f64,
}

const LIMITS: Limits = Limits {
    file_seconds: 14_400.0,
    group_rows: 100,
    group_bytes: 100 << 20,
    read_rows: 16,
    read_seconds: 240.0,
};

/// Checks, before a run, that rows say where their recordings are, and that their further columns can be written.
///
/// # Errors
/// Where they do not, or cannot.
pub(crate) fn check(settings: &WriteSettings, inputs: &Inputs) -> Result<(), StageError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    if !settings.license.chars().all(is_plain) {
        return Err(StageError::setting(
            "license",
            "it is an identifier of the hub, such as cc-by-4.0",
        ));
    }
    for input in inputs.iter() {
        check_places(input)?;
        dataset_schema(&input.schema, &settings.extra_columns)?;
    }
    Ok(())
}

fn check_places(input: &Input) -> Result<(), StageError> {
    let has = |name: &str| input.schema.field_with_name(name).is_ok();
    for (name, data_type) in PLACES.iter().filter(|(name, _)| has(name)) {
        columns::expect(input, name, data_type)?;
    }
    if has("audio_path") || (has("offset") && has("size")) {
        return Ok(());
    }
    Err(StageError::Input {
        name: input.name.clone(),
        message: format!(
            "the rows of `{}` do not say where their recordings are, which `format: huggingface` puts into the dataset",
            input.name
        ),
        help: Some("rows of manifest.read have `audio_path, start, \"offset\", size`; audio.extract gives them to rows of shards".into()),
    })
}

/// The columns of a dataset's files, with the metadata by which `datasets` knows their features.
fn dataset_schema(rows: &Schema, further: &[String]) -> Result<SchemaRef, StageError> {
    let audio = Field::new("audio", DataType::Struct(audio_fields()), true);
    let mut fields = vec![audio];
    let mut features = Map::new();
    features.insert(
        "audio".into(),
        json!({ "sampling_rate": SAMPLE_RATE, "_type": "Audio" }),
    );
    for name in COLUMNS.into_iter().chain(further.iter().map(String::as_str)) {
        // That it is there was checked before.
        let Ok(field) = rows.field_with_name(name) else {
            continue;
        };
        let Some(dtype) = dtype_of(field.data_type()) else {
            let message = format!(
                "`{name}` is {}, which datasets have not; cast it in SQL",
                field.data_type()
            );
            return Err(StageError::setting("extra_columns", message));
        };
        if name == "audio" || features.contains_key(name) {
            return Err(StageError::setting(
                "extra_columns",
                format!("`{name}` is a column that datasets have anyway"),
            ));
        }
        features.insert(name.into(), json!({ "dtype": dtype, "_type": "Value" }));
        fields.push(Field::new(name, field.data_type().clone(), true));
    }
    let metadata = json!({ "info": { "features": features } }).to_string();
    let metadata = HashMap::from([("huggingface".to_owned(), metadata)]);
    Ok(Arc::new(Schema::new_with_metadata(fields, metadata)))
}

fn audio_fields() -> Fields {
    Fields::from(vec![
        Field::new("bytes", DataType::Binary, true),
        Field::new("path", DataType::Utf8, true),
    ])
}

/// What `datasets` calls a type; none for those that it has not.
fn dtype_of(data_type: &DataType) -> Option<&'static str> {
    Some(match data_type {
        DataType::Utf8 => "string",
        DataType::LargeUtf8 => "large_string",
        DataType::Boolean => "bool",
        DataType::Int8 => "int8",
        DataType::Int16 => "int16",
        DataType::Int32 => "int32",
        DataType::Int64 => "int64",
        DataType::UInt8 => "uint8",
        DataType::UInt16 => "uint16",
        DataType::UInt32 => "uint32",
        DataType::UInt64 => "uint64",
        DataType::Float32 => "float32",
        DataType::Float64 => "float64",
        _ => return None,
    })
}

/// What a dataset is written for: the stage, where its messages go, and whether to give up.
pub(crate) struct Writing<'w> {
    pub stage: &'w str,
    pub events: &'w Events,
    pub stop: &'w (dyn Fn() -> bool + Sync),
}

/// Writes the splits into `data/` of a set, its README.md, and `rejects.parquet` with the rows whose recordings cannot be
/// read, if there are any.
///
/// # Errors
/// When a value is null, more rows than `max_unreadable` allows have no readable recording, or a file cannot be written.
pub(crate) fn write_dataset(
    settings: &WriteSettings,
    splits: &[(&'static str, &Artifact)],
    set: &mut ExportSet,
    writing: &Writing<'_>,
) -> Result<(), StageError> {
    write_with_limits(settings, splits, set, writing, LIMITS)
}

fn write_with_limits(
    settings: &WriteSettings,
    splits: &[(&'static str, &Artifact)],
    set: &mut ExportSet,
    writing: &Writing<'_>,
    limits: Limits,
) -> Result<(), StageError> {
    let mut written = Vec::new();
    let mut refused = Refused::of(writing.stage);
    for (split, artifact) in splits {
        let writer = SplitWriter {
            settings,
            split,
            artifact,
            schema: dataset_schema(artifact.schema(), &settings.extra_columns)?,
            stop: writing.stop,
            limits,
        };
        written.push(writer.write(set, &mut refused)?);
    }
    let rows = splits.iter().map(|(_, artifact)| artifact.rows()).sum();
    if let Some(told) = refused.finish(rows, settings, set)? {
        writing
            .events
            .send(Event::warning(Some(writing.stage.to_owned()), told));
    }
    let card = set.file("README.md")?;
    std::fs::write(&card, dataset_card(settings, &written)?).map_err(|error| failed_to_write(&card, &error))
}

fn failed_to_write(path: &Path, error: &dyn std::fmt::Display) -> StageError {
    StageError::failed(format!("{}: {error}", path.display()))
}

/// What was written of a split.
struct WrittenSplit {
    name: &'static str,
    schema: SchemaRef,
    rows: u64,
    /// Of values, and of files.
    bytes: u64,
    file_bytes: u64,
    figures: Languages<Figures>,
}

/// Writes one split.
struct SplitWriter<'s> {
    settings: &'s WriteSettings,
    split: &'static str,
    artifact: &'s Artifact,
    schema: SchemaRef,
    stop: &'s (dyn Fn() -> bool + Sync),
    limits: Limits,
}

/// A file that is being written, and what its last row group has.
struct OpenFile {
    writer: ArrowWriter<ExportFile>,
    path: PathBuf,
    /// Rows of the input that are still to come for it.
    left: u64,
    rows: usize,
    bytes: usize,
}

impl SplitWriter<'_> {
    fn write(&self, set: &mut ExportSet, refused: &mut Refused<'_>) -> Result<WrittenSplit, StageError> {
        let (partitions, _) = parts_of(self.artifact);
        let files = self.rows_of_files(&partitions)?;
        let name = |at: usize| format!("data/{}-{at:05}-of-{:05}.parquet", self.split, files.len());
        let names: Vec<String> = (0..files.len()).map(name).collect();
        let mut guarded = names.clone();
        guarded.extend(standing_files(set.folder(), self.split));
        guarded.sort();
        guarded.dedup();
        let mut written = WrittenSplit {
            name: self.split,
            schema: Arc::clone(&self.schema),
            rows: 0,
            bytes: 0,
            file_bytes: 0,
            figures: Durations::default().figures(),
        };
        let mut durations = Durations::default();
        let mut next = names.iter().zip(&files);
        let mut open: Option<OpenFile> = None;
        for partition in partitions {
            for batch in self.artifact.read(partition, Some(&self.wanted()))? {
                let batch = batch?;
                let mut from = 0;
                while from < batch.num_rows() {
                    if (self.stop)() {
                        return Err(StageError::failed("stopped"));
                    }
                    if open.as_ref().is_none_or(|file| file.left == 0) {
                        close(open.take(), &mut written)?;
                        open = next
                            .next()
                            .map(|(name, rows)| self.open(set, name, *rows))
                            .transpose()?;
                    }
                    let Some(file) = &mut open else {
                        return Err(StageError::failed(format!("{partition}: more rows than were counted")));
                    };
                    let count = self.read_together(&batch, from, file)?;
                    let rows = self.rows(&batch.slice(from, count), partition, set, refused)?;
                    durations.add(&rows)?;
                    written.rows += rows.num_rows() as u64;
                    written.bytes += self.push(file, &rows)?;
                    file.left = file.left.saturating_sub(count as u64);
                    from += count;
                }
            }
        }
        // A split without rows is a file without rows.
        if open.is_none() {
            open = next
                .next()
                .map(|(name, rows)| self.open(set, name, *rows))
                .transpose()?;
        }
        close(open, &mut written)?;
        set.guard_rows(self.split, guarded, written.rows, self.settings.max_shrink);
        written.figures = durations.figures();
        Ok(written)
    }

    /// The columns that are read: those of a manifest, where the recordings are, and further ones.
    fn wanted(&self) -> Vec<&str> {
        let schema = self.artifact.schema();
        let places = PLACES.iter().map(|(name, _)| *name);
        let places = places.filter(|name| schema.field_with_name(name).is_ok());
        let further = self.settings.extra_columns.iter().map(String::as_str);
        MANIFEST_COLUMNS.into_iter().chain(places).chain(further).collect()
    }

    /// How many rows each file gets; at least one file.
    fn rows_of_files(&self, partitions: &[&Partition]) -> Result<Vec<u64>, StageError> {
        let (mut files, mut rows, mut seconds) = (Vec::new(), 0, 0.0);
        for partition in partitions {
            for batch in self.artifact.read(partition, Some(&["segment_id", "duration"]))? {
                let batch = batch?;
                let durations = columns::number(&batch, "duration")?;
                for row in 0..batch.num_rows() {
                    let duration = durations.value(row);
                    if durations.is_null(row) || !(duration.is_finite() && duration >= 0.0) {
                        let id = columns::text(&batch, "segment_id")?.value(row);
                        return Err(StageError::failed(format!(
                            "{partition}: the duration of {id:?} is no number of seconds"
                        )));
                    }
                    if rows > 0 && seconds + duration > self.limits.file_seconds {
                        files.push(rows);
                        (rows, seconds) = (0, 0.0);
                    }
                    rows += 1;
                    seconds += duration;
                }
            }
        }
        if rows > 0 || files.is_empty() {
            files.push(rows);
        }
        Ok(files)
    }

    fn open(&self, set: &mut ExportSet, name: &str, rows: u64) -> Result<OpenFile, StageError> {
        let file = set.create(name)?;
        let path = file.path().to_path_buf();
        let bytes = ColumnPath::from(vec!["audio".to_owned(), "bytes".to_owned()]);
        let zstd = ZstdLevel::try_new(1).map_err(StageError::failed)?;
        let properties = WriterProperties::builder()
            .set_created_by("flow".into())
            .set_compression(Compression::ZSTD(zstd))
            .set_max_row_group_row_count(Some(self.limits.group_rows))
            // Recordings do not get smaller, and their pages end at a megabyte: one row is read without the others.
            .set_column_compression(bytes.clone(), Compression::UNCOMPRESSED)
            .set_column_dictionary_enabled(bytes.clone(), false)
            .set_column_statistics_enabled(bytes, EnabledStatistics::None)
            .set_write_batch_size(1)
            .build();
        let writer = ArrowWriter::try_new(file, Arc::clone(&self.schema), Some(properties));
        Ok(OpenFile {
            writer: writer.map_err(|error| failed_to_write(&path, &error))?,
            path,
            left: rows,
            rows: 0,
            bytes: 0,
        })
    }

    /// How many rows of a batch are read at once, from a row on.
    fn read_together(&self, batch: &RecordBatch, from: usize, file: &OpenFile) -> Result<usize, StageError> {
        let durations = columns::number(batch, "duration")?;
        let left = usize::try_from(file.left).unwrap_or(usize::MAX);
        let most = (batch.num_rows() - from).min(left).min(self.limits.read_rows);
        let most = most.min(self.limits.group_rows - file.rows % self.limits.group_rows);
        let mut seconds = 0.0;
        let fit = (from..from + most).take_while(|row| {
            seconds += durations.value(*row);
            seconds <= self.limits.read_seconds
        });
        Ok(fit.count().max(1))
    }

    /// Rows of the dataset, with their recordings; without those that are refused.
    fn rows(
        &self,
        batch: &RecordBatch,
        partition: &Partition,
        set: &mut ExportSet,
        refused: &mut Refused<'_>,
    ) -> Result<RecordBatch, StageError> {
        for name in COLUMNS {
            let nulls = batch.column_by_name(name).map_or(0, |column| column.null_count());
            if nulls > 0 {
                return Err(StageError::failed(format!(
                    "`{name}` is null in rows of {partition}; a manifest has no nulls"
                )));
            }
        }
        let places = RecordingPlaces::of(batch, &self.settings.shards)?;
        let (ids, durations) = (columns::text(batch, "segment_id")?, columns::number(batch, "duration")?);
        let named = |row: usize, why: String| {
            StageError::failed(format!("{partition}: the recording of {:?}: {why}", ids.value(row)))
        };
        let places: Vec<RowPlace> = (0..batch.num_rows())
            .map(|row| places.of_row(row).map_err(|why| named(row, why)))
            .collect::<Result<_, StageError>>()?;
        // Rows of one recording follow each other.
        let mut next = 0;
        let groups = places.chunk_by(RowPlace::is_of_same_recording).map(|group| {
            next += group.len();
            (next - group.len(), group)
        });
        let groups: Vec<(usize, &[RowPlace])> = groups.collect();
        let read = |(first, group): (usize, &[RowPlace])| {
            let seconds = &durations.values()[first..first + group.len()];
            audio_of_rows(group, seconds, self.settings.audio_of_rows)
        };
        let recordings: Vec<Vec<Result<Audio, AudioError>>> = groups.into_par_iter().map(read).collect();
        let (mut kept, mut audio) = (Vec::new(), Vec::new());
        for (row, recording) in recordings.into_iter().flatten().enumerate() {
            match recording {
                Ok(recording) => {
                    kept.push(u32::try_from(row).map_err(StageError::failed)?);
                    audio.push(recording);
                }
                Err(error) => {
                    let (reason, detail) = refusal(error).map_err(|error| named(row, error.to_string()))?;
                    refused.add(batch, row, partition, (reason, &detail), set)?;
                }
            }
        }
        let together: usize = audio.iter().map(Audio::len).sum();
        if i32::try_from(together).is_err() {
            let why = format!("it and the next rows have {together} bytes, more than fit into a column (2 GiB)");
            return Err(named(0, why));
        }
        let batch = match kept.len() == batch.num_rows() {
            true => batch.clone(),
            false => take_record_batch(batch, &UInt32Array::from(kept))?,
        };
        let ids = columns::text(&batch, "segment_id")?;
        let bytes: BinaryArray = audio.iter().map(Audio::bytes).collect();
        let names =
            StringArray::from_iter_values(audio.iter().enumerate().map(|(row, audio)| audio.name(ids.value(row))));
        let audio = StructArray::try_new(audio_fields(), vec![Arc::new(bytes), Arc::new(names)], None)?;
        let mut arrays: Vec<ArrayRef> = vec![Arc::new(audio)];
        let others = self.schema.fields().iter().skip(1);
        arrays.extend(others.filter_map(|field| batch.column_by_name(field.name()).cloned()));
        Ok(RecordBatch::try_new(Arc::clone(&self.schema), arrays)?)
    }

    /// Writes rows, and gives the bytes of their values.
    fn push(&self, file: &mut OpenFile, rows: &RecordBatch) -> Result<u64, StageError> {
        let bytes: usize = rows.columns().iter().map(value_bytes).sum();
        let failed = |error| failed_to_write(&file.path, &error);
        if file.rows > 0 && file.bytes + bytes > self.limits.group_bytes {
            file.writer.flush().map_err(failed)?;
            (file.rows, file.bytes) = (0, 0);
        }
        file.writer.write(rows).map_err(failed)?;
        file.rows += rows.num_rows();
        file.bytes += bytes;
        if file.rows >= self.limits.group_rows {
            // The writer has ended the row group by itself.
            (file.rows, file.bytes) = (0, 0);
        }
        Ok(bytes as u64)
    }
}

fn close(file: Option<OpenFile>, written: &mut WrittenSplit) -> Result<(), StageError> {
    let Some(OpenFile { writer, path, .. }) = file else {
        return Ok(());
    };
    let file = writer.into_inner().map_err(|error| failed_to_write(&path, &error))?;
    file.close();
    let metadata = std::fs::metadata(&path).map_err(|error| failed_to_write(&path, &error))?;
    written.file_bytes += metadata.len();
    Ok(())
}

/// Bytes of the values of a column, without what says where they begin.
fn value_bytes(column: &ArrayRef) -> usize {
    match column.data_type() {
        DataType::Struct(_) => {
            let fields = column.as_any().downcast_ref::<StructArray>();
            fields.map_or(0, |fields| fields.columns().iter().map(value_bytes).sum())
        }
        DataType::Binary => {
            let values = column.as_any().downcast_ref::<BinaryArray>();
            values.map_or(0, |values| values.iter().flatten().map(<[u8]>::len).sum())
        }
        DataType::Utf8 => {
            let values = column.as_any().downcast_ref::<StringArray>();
            values.map_or(0, |values| values.iter().flatten().map(str::len).sum())
        }
        other => column.len() * other.primitive_width().unwrap_or(1),
    }
}

/// Files of a split in the folder of a set, by their names in it; none in object storage.
fn standing_files(folder: &Path, split: &str) -> Vec<String> {
    if is_url(folder) {
        return Vec::new();
    }
    let entries = std::fs::read_dir(folder.join("data")).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let prefix = format!("{split}-");
    let ours = names.filter(|name| name.starts_with(&prefix) && name.ends_with(".parquet"));
    ours.map(|name| format!("data/{name}")).collect()
}

/// The name that a recording has in the dataset: nothing is read by it.
fn file_name(id: &str, bytes: &[u8]) -> String {
    let plain = |c: char| if c.is_control() || "/\\:".contains(c) { '_' } else { c };
    let stem: String = id.chars().map(plain).collect();
    match recognise(bytes) {
        Ok(format) => format!("{stem}.{}", format.as_str()),
        Err(_) => stem,
    }
}

/// Where the recordings of a batch are.
struct RecordingPlaces<'b> {
    paths: Option<&'b StringArray>,
    starts: Option<&'b Float64Array>,
    ranges: Option<[&'b Int64Array; 2]>,
    tars: &'b StringArray,
    shards: &'b str,
}

/// Where the recording of a row is.
struct RowPlace {
    path: PathBuf,
    /// Offset and size in bytes.
    range: Option<(u64, u64)>,
    /// Where the row begins in it, in seconds.
    start: Option<f64>,
}

impl<'b> RecordingPlaces<'b> {
    fn of(batch: &'b RecordBatch, shards: &'b str) -> Result<Self, StageError> {
        let has = |name: &str| batch.column_by_name(name).is_some();
        let ranges = match has("offset") && has("size") {
            true => Some([columns::whole(batch, "offset")?, columns::whole(batch, "size")?]),
            false => None,
        };
        Ok(RecordingPlaces {
            paths: has("audio_path")
                .then(|| columns::text(batch, "audio_path"))
                .transpose()?,
            starts: has("start").then(|| columns::number(batch, "start")).transpose()?,
            ranges,
            tars: columns::text(batch, "tar_path")?,
            shards,
        })
    }

    fn of_row(&self, row: usize) -> Result<RowPlace, String> {
        let range = match self.ranges {
            Some([offsets, sizes]) if offsets.is_valid(row) && sizes.is_valid(row) => {
                let range = (u64::try_from(offsets.value(row)), u64::try_from(sizes.value(row)));
                match range {
                    (Ok(offset), Ok(size)) => Some((offset, size)),
                    _ => return Err("`offset` or `size` is negative".into()),
                }
            }
            _ => None,
        };
        let named = self
            .paths
            .filter(|paths| paths.is_valid(row) && !paths.value(row).is_empty());
        let path = match named {
            Some(paths) => paths.value(row).into(),
            None if range.is_some() && self.tars.is_valid(row) && !self.tars.value(row).is_empty() => {
                prefixed(self.tars.value(row), self.shards).into()
            }
            None => return Err("the row has neither `audio_path` nor a place in `tar_path`".into()),
        };
        let start = self
            .starts
            .filter(|starts| starts.is_valid(row))
            .map(|starts| starts.value(row));
        Ok(RowPlace { path, range, start })
    }
}

impl RowPlace {
    fn is_of_same_recording(&self, other: &RowPlace) -> bool {
        (&self.path, self.range) == (&other.path, other.range)
    }

    /// Whether the row is all of the recording. Where its header does not say how long it is, a row without `start` is.
    fn is_whole(&self, seconds: f64) -> Result<bool, AudioError> {
        if self.start.is_some_and(|start| start != 0.0) {
            return Ok(false);
        }
        let length = match stated_seconds(&self.path, self.range) {
            Some(length) => Some(length),
            None => RecordingReader::open(&self.path, self.range, Channels::Mix)?.stated_seconds(),
        };
        Ok(length.map_or(self.start.is_none(), |length| {
            (length - seconds).abs() <= TOLERANCE_SECONDS
        }))
    }

    /// The absolute path of its file, where that holds this recording alone and is on this machine.
    fn own_file(&self) -> Option<String> {
        if self.range.is_some() || is_url(&self.path) || embedded::parse(&self.path).is_some() {
            return None;
        }
        Some(std::path::absolute(&self.path).ok()?.to_str()?.to_owned())
    }

    fn stored_bytes(&self) -> Result<Vec<u8>, AudioError> {
        let size = match self.range {
            Some((_, size)) => Some(size),
            None => std::fs::metadata(&self.path).ok().map(|metadata| metadata.len()),
        };
        if let Some(size) = size.filter(|size| i32::try_from(*size).is_err()) {
            let why = format!("{size} bytes; a row of a dataset has less than 2 GiB");
            return Err(AudioError::Decode(why));
        }
        match self.range {
            Some((offset, size)) => read_range(&self.path, offset, size),
            None => read_file(&self.path),
        }
    }
}

/// The recording of a row, as a dataset has it.
enum Audio {
    Bytes(Vec<u8>),
    /// An absolute path, where its file stays.
    File(String),
}

impl Audio {
    fn bytes(&self) -> Option<&[u8]> {
        match self {
            Audio::Bytes(bytes) => Some(bytes),
            Audio::File(_) => None,
        }
    }

    fn len(&self) -> usize {
        self.bytes().map_or(0, <[u8]>::len)
    }

    /// The path in the dataset of the row called `id`. Nothing is read by that of bytes.
    fn name(&self, id: &str) -> String {
        match self {
            Audio::Bytes(bytes) => file_name(id, bytes),
            Audio::File(path) => path.clone(),
        }
    }
}

/// The recordings of several rows of one recording. Of a row that is the whole recording: its path, if `mode` says so and it is
/// a file of its own, else its bytes as they are stored. Of other rows: FLAC of their samples at 16 kHz, 16 bits wide. `seconds` are
/// the durations of the rows.
fn audio_of_rows(rows: &[RowPlace], seconds: &[f64], mode: AudioOfRows) -> Vec<Result<Audio, AudioError>> {
    let mut parts = Vec::new();
    let stored = |row: &RowPlace| match row.own_file().filter(|_| mode == AudioOfRows::Path) {
        Some(path) => Ok(Audio::File(path)),
        None => row.stored_bytes().map(Audio::Bytes),
    };
    let whole: Vec<Option<Result<Audio, AudioError>>> = (rows.iter().zip(seconds))
        .map(|(row, seconds)| match row.is_whole(*seconds) {
            Ok(true) => Some(stored(row)),
            Ok(false) => {
                parts.push((row.start.unwrap_or(0.0), *seconds));
                None
            }
            Err(error) => Some(Err(error)),
        })
        .collect();
    let Some(first) = rows.first().filter(|_| !parts.is_empty()) else {
        return whole.into_iter().flatten().collect();
    };
    let mut cut = decode_rows(&first.path, first.range, &parts, f64::INFINITY).into_iter();
    let mut next = || {
        let signal = cut
            .next()
            .unwrap_or_else(|| Err(AudioError::Decode("no samples".into())))?;
        flac_of(&signal).map(Audio::Bytes)
    };
    let audio = |whole: Option<_>| whole.unwrap_or_else(&mut next);
    whole.into_iter().map(audio).collect()
}

/// The reason and detail of the reject for a recording that cannot be read. Other errors are those of this process.
fn refusal(error: AudioError) -> Result<(&'static str, String), AudioError> {
    let reason = match &error {
        AudioError::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound => "missing_audio",
        error if error.is_unreadable() => UNREADABLE,
        AudioError::Decode(_)
        | AudioError::Unsupported(_)
        | AudioError::SampleRate(_)
        | AudioError::TooLong { .. }
        | AudioError::TooLarge { .. }
        | AudioError::PastEnd { .. } => "decode_error",
        _ => return Err(error),
    };
    Ok((reason, error.to_string()))
}

/// Rows whose recordings cannot be read: a file that is made when the first one comes.
struct Refused<'s> {
    stage: &'s str,
    file: Option<(ArrowWriter<ExportFile>, PathBuf)>,
    by_reason: BTreeMap<&'static str, u64>,
}

impl<'s> Refused<'s> {
    fn of(stage: &'s str) -> Refused<'s> {
        Refused {
            stage,
            file: None,
            by_reason: BTreeMap::new(),
        }
    }

    fn add(
        &mut self,
        batch: &RecordBatch,
        row: usize,
        partition: &Partition,
        (reason, detail): (&'static str, &str),
        set: &mut ExportSet,
    ) -> Result<(), StageError> {
        let mut rejects = Vec::new();
        of_rows(
            batch,
            "segment_id",
            &[row],
            reason,
            RejectClass::Fault,
            detail,
            |reject| {
                rejects.push(reject);
            },
        )?;
        if self.file.is_none() {
            let file = set.create(REJECTS)?;
            let path = file.path().to_path_buf();
            let writer = ArrowWriter::try_new(file, rejects_schema(), None);
            self.file = Some((writer.map_err(|error| failed_to_write(&path, &error))?, path));
        }
        if let Some((writer, path)) = &mut self.file {
            let rows = reject_rows(&rejects, partition, self.stage)?;
            writer.write(&rows).map_err(|error| failed_to_write(path, &error))?;
        }
        *self.by_reason.entry(reason).or_default() += 1;
        Ok(())
    }

    /// Ends the file, and gives what to say of `rows`, of which these were refused; nothing where none was.
    fn finish(self, rows: u64, settings: &WriteSettings, set: &mut ExportSet) -> Result<Option<String>, StageError> {
        let Some((writer, path)) = self.file else {
            return Ok(None);
        };
        let file = writer.into_inner().map_err(|error| failed_to_write(&path, &error))?;
        file.close();
        let refused: u64 = self.by_reason.values().sum();
        let reasons: Vec<String> = self
            .by_reason
            .iter()
            .map(|(reason, rows)| format!("{rows} {reason}"))
            .collect();
        let told = format!(
            "the recordings of {refused} of {rows} rows cannot be read: {}",
            reasons.join(", ")
        );
        if refused as f64 > rows as f64 * settings.max_unreadable {
            return Err(StageError::refused(
                told,
                "look whether all recordings are there (a disk that is not mounted?); `max_unreadable` is the share that may be missing",
            ));
        }
        if refused == rows && !settings.allow_empty {
            set.guard_empty(told.clone());
        }
        Ok(Some(format!("{told}; {REJECTS} of the dataset lists them")))
    }
}

/// Rejects of a partition as `rejects.parquet` has them.
fn reject_rows(rejects: &[Reject], partition: &Partition, stage: &str) -> Result<RecordBatch, StageError> {
    let text = |value: &dyn Fn(&Reject) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(rejects.iter().map(value)))
    };
    let rows: UInt32Array = rejects.iter().map(|reject| reject.row).collect();
    let ids: StringArray = rejects.iter().map(|reject| reject.id.as_deref()).collect();
    let columns = vec![
        text(&|_| partition.to_string()),
        Arc::new(rows),
        Arc::new(ids),
        text(&|_| stage.to_owned()),
        text(&|reject| reject.reason.clone()),
        text(&|reject| reject.class.as_str().to_owned()),
        text(&|reject| reject.detail.clone()),
        text(&|reject| reject.values.clone()),
    ];
    Ok(RecordBatch::try_new(rejects_schema(), columns)?)
}

fn flac_of(signal: &[f32]) -> Result<Vec<u8>, AudioError> {
    // Samples are left-justified, and have as many steps below zero as 16 bits have.
    let sample = |value: &f32| (f64::from(*value) * 32_768.0).round().clamp(-32_768.0, 32_767.0) as i32;
    let samples = Samples {
        info: StreamInfo {
            sample_rate: SAMPLE_RATE,
            channels: 1,
            bits: 16,
            total_frames: signal.len() as u64,
            md5: [0; 16],
        },
        interleaved: signal.iter().map(|value| sample(value) << 16).collect(),
    };
    flac_encode::encode(&samples).ok_or_else(|| AudioError::Decode("the row has no samples".into()))
}

/// README.md of a dataset: what the hub and `datasets` read of it, and a table for people.
fn dataset_card(settings: &WriteSettings, splits: &[WrittenSplit]) -> Result<String, StageError> {
    let languages: BTreeSet<&String> = splits.iter().flat_map(|split| split.figures.languages.keys()).collect();
    let known: Vec<&&String> = languages.iter().filter(|language| **language != UNDETERMINED).collect();
    // JSON is YAML, and with its quotes `no` is a language to every reader.
    let language = match known.is_empty() {
        true => String::new(),
        false => format!("language: {}\n", json!(known)),
    };
    let feature = |field: &Arc<Field>| Feature {
        name: field.name().clone(),
        dtype: match dtype_of(field.data_type()) {
            Some(dtype) => json!(dtype),
            None => json!({ "audio": { "sampling_rate": SAMPLE_RATE } }),
        },
    };
    let features = splits
        .first()
        .map_or(Vec::new(), |split| split.schema.fields().iter().map(feature).collect());
    let header = Header {
        license: Some(settings.license.clone()).filter(|license| !license.is_empty()),
        task_categories: ["automatic-speech-recognition"],
        configs: [Config {
            config_name: "default",
            data_files: splits
                .iter()
                .map(|split| DataFiles {
                    split: split.name,
                    path: format!("data/{}-*", split.name),
                })
                .collect(),
        }],
        dataset_info: Info {
            features,
            splits: splits
                .iter()
                .map(|split| SplitInfo {
                    name: split.name,
                    num_bytes: split.bytes,
                    num_examples: split.rows,
                })
                .collect(),
            download_size: splits.iter().map(|split| split.file_bytes).sum(),
            dataset_size: splits.iter().map(|split| split.bytes).sum(),
        },
    };
    let header = serde_yaml::to_string(&header).map_err(StageError::failed)?;
    let mut card = format!("---\n{language}{header}---\n\n| split | language | rows | hours |\n|---|---|---|---|\n");
    for split in splits {
        for (language, figures) in &split.figures.languages {
            let language = language.replace('|', "\\|");
            card += &format!(
                "| {} | {language} | {} | {:.2} |\n",
                split.name, figures.rows, figures.hours
            );
        }
    }
    card += match settings.audio_of_rows {
        AudioOfRows::Embed => "\n`audio` holds each recording as it was stored",
        AudioOfRows::Path => {
            "\n`audio` has the path of each recording on the machine that wrote the dataset, and holds what is within a larger file"
        }
    };
    card += "; a part of a longer recording is FLAC of 16 kHz. `duration` is in seconds.\n";
    Ok(card)
}

#[derive(Serialize)]
struct Header {
    #[serde(skip_serializing_if = "Option::is_none")]
    license: Option<String>,
    task_categories: [&'static str; 1],
    configs: [Config; 1],
    dataset_info: Info,
}

#[derive(Serialize)]
struct Config {
    config_name: &'static str,
    data_files: Vec<DataFiles>,
}

#[derive(Serialize)]
struct DataFiles {
    split: &'static str,
    path: String,
}

#[derive(Serialize)]
struct Info {
    features: Vec<Feature>,
    splits: Vec<SplitInfo>,
    download_size: u64,
    dataset_size: u64,
}

#[derive(Serialize)]
struct Feature {
    name: String,
    dtype: Value,
}

#[derive(Serialize)]
struct SplitInfo {
    name: &'static str,
    num_bytes: u64,
    num_examples: u64,
}

#[cfg(test)]
#[path = "write_hugging_face_tests.rs"]
mod tests;
