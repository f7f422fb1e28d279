//! Our own manifests, and other parquet files with their columns.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use arrow::array::{Array, ArrayRef, AsArray, Float64Array, RecordBatch, StringArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type};
use flow_runtime::store::ForeignParquet;
use flow_runtime::{Partition, SourcePartition, StageError};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReader, RowSelection, RowSelector};

use super::files::label;
use super::lines::tag_of;
use super::places::{Places, shard_folders};
use super::recordings::Wanted;
use super::rows::{ManifestRow, Refusal, Rows, refuse};
use super::{ReadSettings, file_stem};
use crate::error::ManifestError;

const TEXTS: [&str; 9] = [
    "segment_id",
    "shard_id",
    "text",
    "lang",
    "tar_member_name",
    "tar_path",
    "source",
    "audio_path",
    "audio_filepath",
];
const NUMBERS: [&str; 1] = ["duration"];
/// A row cannot be without these columns.
const REQUIRED: [&str; 3] = ["segment_id", "text", "duration"];

/// Rows of a file without shards that make a partition.
const BLOCK_ROWS: usize = 65_536;

/// Rows of a file: first and number.
type Run = (usize, usize);

/// Parquet manifests, cut into shards.
pub struct TableManifest {
    files: Vec<Table>,
    /// By partition, runs of rows in files.
    shards: BTreeMap<Partition, Shard>,
    places: Vec<Places>,
    lang: String,
    source: String,
    look: bool,
}

struct Table {
    path: PathBuf,
    metadata: ArrowReaderMetadata,
}

#[derive(Default)]
struct Shard {
    runs: Vec<(usize, Vec<Run>)>,
    tar_path: String,
}

impl TableManifest {
    /// # Errors
    /// When a file cannot be read or lacks a column.
    pub fn open(files: Vec<PathBuf>, settings: &ReadSettings) -> Result<Self, ManifestError> {
        let mut manifest = TableManifest {
            places: files
                .iter()
                .map(|file| settings.places(file.parent().unwrap_or(Path::new(""))))
                .collect(),
            files: Vec::new(),
            shards: BTreeMap::new(),
            lang: settings.lang.clone(),
            source: settings.source.clone(),
            look: settings.check_audio,
        };
        for (number, path) in files.into_iter().enumerate() {
            let table = Table::open(&path)?;
            let runs = sheltered(&path, || table.shards(number))?;
            for (name, (tar_path, runs)) in runs {
                let shard = manifest.shards.entry(Partition::from(name)).or_default();
                shard.runs.push((number, runs));
                if shard.tar_path.is_empty() {
                    shard.tar_path = tar_path;
                }
            }
            manifest.files.push(table);
        }
        Ok(manifest)
    }

    pub fn partitions(&self) -> Vec<SourcePartition> {
        let partition = |(name, shard): (&Partition, &Shard)| SourcePartition {
            name: name.clone(),
            files: shard
                .runs
                .iter()
                .map(|(file, _)| self.files[*file].path.clone())
                .collect(),
            extra: match shard.runs.first() {
                Some((file, _)) if self.look && !shard.tar_path.is_empty() => {
                    self.places[*file].folders_there(&shard.tar_path)
                }
                _ => String::new(),
            },
        };
        self.shards.iter().map(partition).collect()
    }

    pub fn read(&self, partition: &Partition, rows: &mut Rows<'_>) -> Result<(), StageError> {
        let shard = self.shards.get(partition);
        let shard = shard.ok_or_else(|| StageError::failed(format!("the manifest has no shard {partition}")))?;
        for (file, runs) in &shard.runs {
            let table = &self.files[*file];
            let mut reader = sheltered(&table.path, || {
                table.rows(&[&TEXTS[..], &NUMBERS[..]].concat(), Some(runs))
            })?;
            while let Some(batch) = sheltered(&table.path, || table.next(&mut reader))? {
                let columns = Columns::of(&batch)?;
                for row in 0..batch.num_rows() {
                    let read = columns.row(row, &self.places[*file], &self.lang, &self.source, &table.path);
                    rows.push(read, || columns.values(row))?;
                }
            }
        }
        Ok(())
    }
}

/// The decoder is not ours and a file may be anything: a panic in it is one more way to be damaged.
fn sheltered<T>(path: &Path, work: impl FnOnce() -> Result<T, ManifestError>) -> Result<T, ManifestError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(ManifestError::Manifest {
            path: path.to_path_buf(),
            why: "the file is damaged: the parquet reader broke down on it".into(),
        })
    })
}

impl Table {
    fn open(path: &Path) -> Result<Table, ManifestError> {
        let file = ForeignParquet::open(path).map_err(|e| ManifestError::io(path, e))?;
        let metadata = sheltered(path, || {
            file.metadata().map_err(|source| ManifestError::Parquet {
                path: path.to_path_buf(),
                source,
            })
        })?;
        let table = Table {
            path: path.to_path_buf(),
            metadata,
        };
        let schema = table.metadata.schema();
        for name in REQUIRED {
            if schema.field_with_name(name).is_err() {
                let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
                return Err(table.wrong(format!(
                    "it has no column `{name}`; its columns are {}",
                    names.join(", ")
                )));
            }
        }
        for name in TEXTS.into_iter().chain(NUMBERS) {
            if let Ok(field) = schema.field_with_name(name)
                && !accepted(name, field.data_type())
            {
                let wanted = if NUMBERS.contains(&name) { "a number" } else { "text" };
                return Err(table.wrong(format!("column `{name}` is {}, not {wanted}", field.data_type())));
            }
        }
        Ok(table)
    }

    fn wrong(&self, why: String) -> ManifestError {
        ManifestError::Manifest {
            path: self.path.clone(),
            why,
        }
    }

    fn rows(&self, columns: &[&str], runs: Option<&[Run]>) -> Result<ParquetRecordBatchReader, ManifestError> {
        let parquet = |source| ManifestError::Parquet {
            path: self.path.clone(),
            source,
        };
        let file = ForeignParquet::open(&self.path).map_err(|e| ManifestError::io(&self.path, e))?;
        let schema = self.metadata.schema();
        let roots = schema
            .fields()
            .iter()
            .enumerate()
            .filter(|(_, field)| columns.contains(&field.name().as_str()))
            .map(|(root, _)| root);
        let mask = ProjectionMask::roots(self.metadata.parquet_schema(), roots);
        let selection = runs.map(|runs| {
            let (mut selectors, mut at) = (Vec::new(), 0);
            for &(first, count) in runs {
                selectors.push(RowSelector::skip(first - at));
                selectors.push(RowSelector::select(count));
                at = first + count;
            }
            RowSelection::from(selectors)
        });
        file.rows(&self.metadata, mask, 8_192, selection).map_err(parquet)
    }

    fn next(&self, reader: &mut ParquetRecordBatchReader) -> Result<Option<RecordBatch>, ManifestError> {
        Ok(reader.next().transpose()?)
    }

    /// The shards in this file by name: the tar, and where the rows are, in order.
    fn shards(&self, number: usize) -> Result<BTreeMap<String, (String, Vec<Run>)>, ManifestError> {
        let mut reader = self.rows(&["shard_id", "tar_path", "lang"], None)?;
        let label = label(number, &self.path);
        let mut shards: BTreeMap<String, (String, Vec<Run>)> = BTreeMap::new();
        let mut at = 0;
        let mut current: Option<([String; 3], usize)> = None;
        let mut close = |current: Option<([String; 3], usize)>, end: usize| {
            let Some(([shard_id, tar_path, lang], mut start)) = current else {
                return;
            };
            if !shard_id.is_empty() {
                let name = match shard_folders(&tar_path) {
                    Some((lang, folder)) if folder == shard_id => format!("{lang}/{shard_id}"),
                    _ if lang.is_empty() => format!("und/{shard_id}"),
                    _ => format!("{lang}/{shard_id}"),
                };
                let entry = shards.entry(name).or_insert_with(|| (tar_path, Vec::new()));
                match entry.1.last_mut() {
                    Some((first, count)) if *first + *count == start => *count = end - *first,
                    _ => entry.1.push((start, end - start)),
                }
                return;
            }
            while start < end {
                let block = start / BLOCK_ROWS;
                let until = end.min((block + 1) * BLOCK_ROWS);
                let entry = shards.entry(format!("{label}/{block:06}")).or_default();
                entry.1.push((start, until - start));
                start = until;
            }
        };
        while let Some(batch) = self.next(&mut reader)? {
            let rows = batch.num_rows();
            let columns = ["shard_id", "tar_path", "lang"].map(|name| text_column(&batch, name));
            let [shard_ids, tars, langs] = columns;
            let (shard_ids, tars, langs) = (shard_ids?, tars?, langs?);
            for row in 0..rows {
                let values = [&shard_ids, &tars, &langs].map(|column| value(column, row));
                // The language is part of the name only where the tar does not tell the folder.
                let same = current.as_ref().is_some_and(|(held, _)| {
                    held[0] == values[0] && held[1] == values[1] && (held[2] == values[2] || !held[1].is_empty())
                });
                if !same {
                    close(current.take(), at);
                    current = Some((values.map(str::to_string), at));
                }
                at += 1;
            }
        }
        close(current, at);
        Ok(shards)
    }
}

fn accepted(name: &str, data_type: &DataType) -> bool {
    match data_type {
        DataType::Dictionary(_, values) => !matches!(**values, DataType::Dictionary(..)) && accepted(name, values),
        DataType::Null => true,
        other if NUMBERS.contains(&name) => other.is_integer() || other.is_floating(),
        other => matches!(other, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View),
    }
}

/// All null where the file has no such column.
fn text_column(batch: &RecordBatch, name: &str) -> Result<StringArray, ManifestError> {
    match batch.column_by_name(name) {
        Some(column) => Ok(cast(column, &DataType::Utf8)?.as_string::<i32>().clone()),
        None => Ok(StringArray::new_null(batch.num_rows())),
    }
}

/// Empty where it is null.
fn value(column: &StringArray, row: usize) -> &str {
    if column.is_null(row) { "" } else { column.value(row) }
}

struct Columns {
    texts: Vec<StringArray>,
    duration: Float64Array,
}

impl Columns {
    fn of(batch: &RecordBatch) -> Result<Columns, ManifestError> {
        let duration: ArrayRef = match batch.column_by_name("duration") {
            Some(column) => cast(column, &DataType::Float64)?,
            None => arrow::array::new_null_array(&DataType::Float64, batch.num_rows()),
        };
        Ok(Columns {
            texts: TEXTS
                .iter()
                .map(|name| text_column(batch, name))
                .collect::<Result<_, _>>()?,
            duration: duration.as_primitive::<Float64Type>().clone(),
        })
    }

    fn row(&self, row: usize, places: &Places, lang: &str, source: &str, file: &Path) -> Result<ManifestRow, Refusal> {
        for (name, column) in TEXTS.iter().zip(&self.texts) {
            if REQUIRED.contains(name) && column.is_null(row) {
                return Err(refuse("missing_field", *name));
            }
        }
        if self.duration.is_null(row) {
            return Err(refuse("missing_field", "duration"));
        }
        let of = |place: usize| value(&self.texts[place], row).to_string();
        let or = |text: String, otherwise: &str| if text.is_empty() { otherwise.to_string() } else { text };
        let (member, tar_path, path) = (of(4), of(5), or(of(7), &of(8)));
        let text = of(2);
        let shard_id = or(of(1), &file_stem(file));
        let mut wanted = Wanted::default();
        if !path.is_empty() {
            wanted = places.of_path(&path);
        }
        if !tar_path.is_empty() && !member.is_empty() {
            let in_shard = places.of_member(&tar_path, &member, &shard_id)?;
            wanted.files.extend(in_shard.files);
            wanted.member = in_shard.member;
        }
        if wanted == Wanted::default() {
            return Err(refuse(
                "missing_field",
                "neither audio_path, nor tar_path and tar_member_name",
            ));
        }
        Ok(ManifestRow {
            segment_id: of(0),
            shard_id,
            lang: or(or(of(3), lang), tag_of(&text).unwrap_or_default()),
            text,
            duration: Some(self.duration.value(row)),
            tar_member_name: member,
            tar_path,
            source: or(of(6), source),
            start: None,
            wanted,
        })
    }

    fn values(&self, row: usize) -> String {
        let mut values = serde_json::Map::new();
        for (name, column) in TEXTS.iter().zip(&self.texts) {
            if column.is_valid(row) {
                values.insert((*name).into(), column.value(row).into());
            }
        }
        if self.duration.is_valid(row) {
            let seconds = self.duration.value(row);
            let number = serde_json::Number::from_f64(seconds);
            values.insert(
                "duration".into(),
                number.map_or_else(|| seconds.to_string().into(), serde_json::Value::Number),
            );
        }
        serde_json::Value::Object(values).to_string()
    }
}
