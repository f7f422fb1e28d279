//! Parquet files whose bytes depend only on their rows, written on all cores.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use arrow::array::RecordBatch;
use arrow::compute::BatchCoalescer;
use arrow::datatypes::{Schema, SchemaRef};
use crossbeam_channel::{Receiver, Sender, bounded};
use flow_runtime::StageError;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::{ArrowColumnChunk, ArrowRowGroupWriterFactory, compute_leaves};
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::ColumnPath;

use crate::error::ManifestError;

/// Rows to a row group, and rows that are handed to the encoder at a time: both fixed, so that the same rows
/// give the same bytes however they come.
pub(crate) const ROW_GROUP: usize = 65_536;
const CHUNK: usize = 8_192;

/// Row groups are encoded on this many threads at most: each holds one in memory, some 30 MB of a manifest.
const ENCODERS: usize = 8;

/// A row group and its place in the file.
struct Group {
    place: usize,
    chunks: Vec<RecordBatch>,
}

type Encoded = Result<(usize, Vec<ArrowColumnChunk>), ParquetError>;

/// Columns with few repeated values: a dictionary of them costs time and space.
const ONCE_EACH: [&str; 5] = ["segment_id", "text", "tar_member_name", "values", "detail"];

/// Columns without statistics: nothing filters by them, and computing them compares every value.
const NO_RANGE: [&str; 4] = ["text", "tar_member_name", "values", "detail"];

fn properties(schema: &Schema) -> Result<WriterProperties, ParquetError> {
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(1)?))
        .set_max_row_group_row_count(Some(ROW_GROUP))
        .set_created_by("flow".into());
    for field in schema.fields() {
        let (name, path) = (field.name().as_str(), ColumnPath::from(field.name().as_str()));
        if NO_RANGE.contains(&name) {
            properties = properties.set_column_statistics_enabled(path.clone(), EnabledStatistics::None);
        }
        if ONCE_EACH.contains(&name) {
            properties = properties.set_column_dictionary_enabled(path, false);
        }
    }
    Ok(properties.build())
}

/// Takes rows in the order of the file.
pub(crate) struct Rows {
    chunks: BatchCoalescer,
    group: Vec<RecordBatch>,
    place: usize,
    groups: Sender<Group>,
}

impl Rows {
    pub fn push(&mut self, batch: RecordBatch) -> Result<(), StageError> {
        self.chunks.push_batch(batch)?;
        self.send_full_groups()
    }

    fn send_full_groups(&mut self) -> Result<(), StageError> {
        while let Some(chunk) = self.chunks.next_completed_batch() {
            self.group.push(chunk);
            if self.group.len() == ROW_GROUP / CHUNK {
                self.send_group()?;
            }
        }
        Ok(())
    }

    fn send_group(&mut self) -> Result<(), StageError> {
        let group = Group {
            place: self.place,
            chunks: std::mem::take(&mut self.group),
        };
        self.place += 1;
        // The receiver is closed only after an encoder or the file has failed; that error is reported.
        self.groups
            .send(group)
            .map_err(|_| StageError::failed("the file could not be written"))
    }

    /// Passes the last rows to the encoders. Called after the last row in any case; a producer with more work to do
    /// after its last row calls it before.
    pub fn finish(&mut self) -> Result<(), StageError> {
        self.chunks.finish_buffered_batch()?;
        self.send_full_groups()?;
        if self.group.is_empty() {
            return Ok(());
        }
        self.send_group()
    }
}

/// Writes a file with the rows that `produce` pushes. They are produced, encoded and written at the same time.
///
/// # Errors
/// Those of `produce`, and when the file cannot be written.
pub(crate) fn write_parquet<T: Send>(
    path: &Path,
    schema: SchemaRef,
    produce: impl FnOnce(&mut Rows) -> Result<T, StageError> + Send,
) -> Result<T, StageError> {
    let parquet = |source| ManifestError::Parquet {
        path: PathBuf::from(path),
        source,
    };
    let properties = properties(&schema).map_err(parquet)?;
    let file = File::create(path).map_err(|e| ManifestError::io(path, e))?;
    let writer = ArrowWriter::try_new(file, Arc::clone(&schema), Some(properties)).map_err(parquet)?;
    let (mut file, factory) = writer.into_serialized_writer().map_err(parquet)?;
    let encoders = thread::available_parallelism().map_or(1, usize::from).min(ENCODERS);

    let made = thread::scope(|scope| -> Result<T, StageError> {
        let (groups, to_encode) = bounded::<Group>(1);
        let (encoded, to_write) = bounded::<Encoded>(encoders);
        let rows = Rows {
            chunks: BatchCoalescer::new(Arc::clone(&schema), CHUNK),
            group: Vec::new(),
            place: 0,
            groups,
        };
        let producer = scope.spawn(move || {
            let mut rows = rows;
            let made = produce(&mut rows)?;
            rows.finish()?;
            Ok::<T, StageError>(made)
        });
        for _ in 0..encoders {
            let (groups, encoded) = (to_encode.clone(), encoded.clone());
            let (factory, schema) = (&factory, &schema);
            scope.spawn(move || encode_groups(&groups, factory, schema, &encoded));
        }
        drop((to_encode, encoded));
        let written = append_in_order(&mut file, to_write);
        // A panic of the producer goes on here.
        let produced = producer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        written.map_err(parquet)?;
        produced
    })?;
    file.close().map_err(parquet)?;
    Ok(made)
}

fn encode_groups(
    groups: &Receiver<Group>,
    factory: &ArrowRowGroupWriterFactory,
    schema: &SchemaRef,
    encoded: &Sender<Encoded>,
) {
    for group in groups {
        let place = group.place;
        let result = encode(group, factory, schema).map(|chunks| (place, chunks));
        let failed = result.is_err();
        if encoded.send(result).is_err() || failed {
            return;
        }
    }
}

fn encode(
    group: Group,
    factory: &ArrowRowGroupWriterFactory,
    schema: &SchemaRef,
) -> Result<Vec<ArrowColumnChunk>, ParquetError> {
    let mut columns = factory.create_column_writers(group.place)?;
    for chunk in group.chunks {
        let mut writers = columns.iter_mut();
        for (field, array) in schema.fields().iter().zip(chunk.columns()) {
            for leaf in compute_leaves(field, array)? {
                let writer = writers
                    .next()
                    .ok_or_else(|| ParquetError::General(format!("`{}` has no column writer", field.name())))?;
                writer.write(&leaf)?;
            }
        }
    }
    columns.into_iter().map(|column| column.close()).collect()
}

fn append_in_order(file: &mut SerializedFileWriter<File>, encoded: Receiver<Encoded>) -> Result<(), ParquetError> {
    let mut early = BTreeMap::new();
    let mut next = 0;
    for result in encoded {
        let (place, chunks) = result?;
        early.insert(place, chunks);
        while let Some(chunks) = early.remove(&next) {
            let mut group = file.next_row_group()?;
            for chunk in chunks {
                chunk.append_to_row_group(&mut group)?;
            }
            group.close()?;
            next += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use arrow::array::{Array, Float64Array, StringArray};
    use arrow::datatypes::{DataType, Field};
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

    use super::*;

    fn rows(count: usize) -> RecordBatch {
        let schema = Schema::new(vec![
            Field::new("text", DataType::Utf8, false),
            Field::new("duration", DataType::Float64, true),
        ]);
        let texts = StringArray::from_iter_values((0..count).map(|i| format!("words {} of {i}", i % 7)));
        let durations: Float64Array = (0..count).map(|i| (i % 11 > 0).then_some(i as f64 / 3.0)).collect();
        RecordBatch::try_new(Arc::new(schema), vec![Arc::new(texts), Arc::new(durations)]).unwrap()
    }

    /// The file as one thread writes it that is handed the same chunks.
    fn alone(path: &Path, all: &RecordBatch) {
        let properties = properties(&all.schema()).unwrap();
        let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), all.schema(), Some(properties)).unwrap();
        for start in (0..all.num_rows()).step_by(CHUNK) {
            writer
                .write(&all.slice(start, CHUNK.min(all.num_rows() - start)))
                .unwrap();
        }
        writer.close().unwrap();
    }

    #[test]
    fn many_threads_write_what_one_would() {
        let folder = tempfile::tempdir().unwrap();
        let (ours, theirs) = (folder.path().join("ours.parquet"), folder.path().join("theirs.parquet"));
        for count in [0, 1, CHUNK, ROW_GROUP, 3 * ROW_GROUP + 5_000] {
            let all = rows(count);
            alone(&theirs, &all);
            for piece in [997, 70_000] {
                write_parquet(&ours, all.schema(), |rows| {
                    for start in (0..count).step_by(piece) {
                        rows.push(all.slice(start, piece.min(count - start)))?;
                    }
                    Ok(())
                })
                .unwrap();
                assert!(
                    std::fs::read(&ours).unwrap() == std::fs::read(&theirs).unwrap(),
                    "{count} rows in pieces of {piece}"
                );
            }
        }
        let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(&ours).unwrap()).unwrap();
        let read: usize = reader.build().unwrap().map(|batch| batch.unwrap().num_rows()).sum();
        assert_eq!(read, 3 * ROW_GROUP + 5_000);
    }

    #[test]
    fn the_error_of_what_makes_the_rows_comes_out() {
        let folder = tempfile::tempdir().unwrap();
        let all = rows(ROW_GROUP + 1);
        let error: Result<(), _> = write_parquet(&folder.path().join("out.parquet"), all.schema(), |rows| {
            rows.push(all.clone())?;
            Err(StageError::failed("the third shard is gone"))
        });
        assert!(error.unwrap_err().to_string().contains("the third shard is gone"));
        let other = RecordBatch::try_new(
            Arc::new(Schema::new(vec![Field::new("text", DataType::Utf8, false)])),
            vec![Arc::clone(all.column(0))],
        )
        .unwrap();
        assert!(other.column(0).null_count() == 0);
        let error = write_parquet(&folder.path().join("out.parquet"), all.schema(), |rows| {
            rows.push(other.clone())
        });
        assert!(error.is_err(), "rows of another schema");
        assert!(write_parquet(&folder.path().join("no/folder.parquet"), all.schema(), |_| Ok(())).is_err());
    }
}
