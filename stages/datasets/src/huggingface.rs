//! Datasets of Hugging Face: Parquet files that hold the recordings, and README.md, as the library `datasets` loads them.

mod card;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BinaryArray, RecordBatch, StringArray, StructArray};
use arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef};
use flow_audio::decode::SAMPLE_RATE;
use flow_corpus::columns;
use flow_corpus::partitions::with_rows;
use flow_kind::{Artifact, ExportFile, ExportSet, Inputs, Partition, StageError};
use flow_storage::is_url;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;
use serde_json::{Map, json};

use self::card::{WrittenSplit, dataset_card, dtype_of};
use crate::recordings::{Audio, RowPlace, Whole, audio_of_rows};
use crate::refused::Refused;
use crate::rows::{COLUMNS, RowsOfPartition, Unusable, read_together, wanted_columns};
use crate::settings::{AudioOfRows, DatasetSettings};
use crate::writing::{Writing, failed_to_write};

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

/// Checks, before a run, the licence, and that further columns can be written.
///
/// # Errors
/// For others.
pub(crate) fn check(settings: &DatasetSettings, inputs: &Inputs) -> Result<(), StageError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    if !settings.license.chars().all(is_plain) {
        return Err(StageError::setting(
            "license",
            "it is an identifier of the hub, such as cc-by-4.0",
        ));
    }
    for input in inputs.iter() {
        dataset_schema(&input.schema, &settings.extra_columns)?;
    }
    Ok(())
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
                "`{name}` is {}, which datasets do not have; cast it in SQL",
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

/// Writes the splits into `data/` of a set, its README.md, and `rejects.parquet` with the rows whose recordings cannot be
/// read, if there are any.
///
/// # Errors
/// When a value is null, more rows than `max_unreadable` allows have no readable recording, or a file cannot be written.
pub(crate) fn write_dataset(
    settings: &DatasetSettings,
    splits: &[(&'static str, &Artifact)],
    set: &mut ExportSet,
    writing: &Writing<'_>,
) -> Result<(), StageError> {
    write_with_limits(settings, splits, set, writing, LIMITS)
}

fn write_with_limits(
    settings: &DatasetSettings,
    splits: &[(&'static str, &Artifact)],
    set: &mut ExportSet,
    writing: &Writing<'_>,
    limits: Limits,
) -> Result<(), StageError> {
    set.refuse_others(["data", "README.md"].map(String::from))?;
    let mut written = Vec::new();
    let mut refused = Refused::of(writing.stage);
    for (split, artifact) in splits {
        let writer = SplitWriter {
            settings,
            split,
            artifact,
            schema: dataset_schema(artifact.schema(), &settings.extra_columns)?,
            writing,
            limits,
        };
        written.push(writer.write(set, &mut refused)?);
    }
    refused.finish(splits, settings, set, writing)?;
    let card = set.file("README.md")?;
    std::fs::write(&card, dataset_card(settings, &written)?).map_err(|error| failed_to_write(&card, &error))
}

/// Writes one split.
struct SplitWriter<'s> {
    settings: &'s DatasetSettings,
    split: &'static str,
    artifact: &'s Artifact,
    schema: SchemaRef,
    writing: &'s Writing<'s>,
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
        let partitions = with_rows(self.artifact);
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
            languages: BTreeMap::new(),
        };
        let mut next = names.iter().zip(&files);
        let mut open: Option<OpenFile> = None;
        let wanted = wanted_columns(self.artifact.schema(), &self.settings.extra_columns);
        for partition in partitions {
            for batch in self.artifact.read(partition, Some(&wanted))? {
                let batch = batch?;
                let mut from = 0;
                while from < batch.num_rows() {
                    self.writing.go_on()?;
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
                    let left = usize::try_from(file.left).unwrap_or(usize::MAX);
                    let most = left.min(self.limits.read_rows);
                    let most = most.min(self.limits.group_rows - file.rows % self.limits.group_rows);
                    let count = read_together(&batch, from, most, self.limits.read_seconds)?;
                    let rows = self.rows(&batch.slice(from, count), partition, set, refused)?;
                    written.add(&rows)?;
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
        Ok(written)
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
                            "{partition}: the duration of {id:?} is not a number of seconds"
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

    /// Rows of the dataset, with their recordings; without those that are refused.
    fn rows(
        &self,
        batch: &RecordBatch,
        partition: &Partition,
        set: &mut ExportSet,
        refused: &mut Refused<'_>,
    ) -> Result<RecordBatch, StageError> {
        let whole = match self.settings.audio_of_rows {
            AudioOfRows::Embed => Whole::Checked,
            AudioOfRows::Path => Whole::Path,
        };
        let read = |group: &[RowPlace], seconds: &[f64]| {
            let audio = audio_of_rows(self.writing.storage, group, seconds, whole).into_iter();
            audio.map(|audio| audio.map_err(Unusable::from)).collect()
        };
        let rows = RowsOfPartition {
            batch,
            partition,
            shards: &self.settings.shards,
        };
        let (batch, audio) = rows.with_recordings(set, refused, read)?;
        let together: usize = audio.iter().map(Audio::len).sum();
        if i32::try_from(together).is_err() {
            let why = format!("it and the next rows have {together} bytes, more than fit into a column (2 GiB)");
            let id = columns::text(&batch, "segment_id")?.value(0).to_owned();
            return Err(StageError::failed(format!(
                "{partition}: the recording of {id:?}: {why}"
            )));
        }
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

#[cfg(test)]
#[path = "huggingface_tests.rs"]
mod tests;
