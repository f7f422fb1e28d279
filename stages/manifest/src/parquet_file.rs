//! Parquet files whose bytes depend only on their rows, written on all cores.
//!
//! Each row group is encoded as a file of its own, in memory, and the file is put together from these, so that row groups
//! that are copied from another file ([`crate::pieces`]) go the same way.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use arrow::array::{ArrayRef, Float64Array, RecordBatch, StringArray};
use arrow::compute::BatchCoalescer;
use arrow::datatypes::{Schema, SchemaRef};
use bytes::Bytes;
use crossbeam_channel::{Receiver, Sender, bounded};
use flow_runtime::{Digest, StageError};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::{ArrowRowGroupWriterFactory, compute_leaves};
use parquet::basic::{Compression, ZstdLevel};
use parquet::column::writer::ColumnCloseResult;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, PageIndexPolicy, ParquetMetaDataOptions, ParquetMetaDataReader};
use parquet::file::page_index::column_index::ColumnIndexMetaData;
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterPropertiesPtr};
use parquet::file::statistics::Statistics;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::{ColumnPath, TypePtr};

use crate::error::ManifestError;
use crate::pieces::{Piece, Taken, inputs_of_piece};

/// Rows to a row group, and rows that are handed to the encoder at a time: both fixed, so that the same rows
/// give the same bytes however they come.
pub(crate) const ROW_GROUP: usize = 65_536;
const CHUNK: usize = 8_192;

/// Row groups are encoded on this many threads at most: each holds one in memory, some 30 MB of a manifest.
const ENCODERS: usize = 8;

/// How a file begins.
pub(crate) const HEAD: [u8; 4] = *b"PAR1";

/// Bytes that are written to the disk at a time.
const WRITTEN_AT_ONCE: usize = 1 << 20;

/// A row group and its place in the file.
struct Group {
    place: usize,
    inputs: Digest,
    chunks: Vec<RecordBatch>,
}

/// A row group as a file of its own, and its place in the file.
struct Encoded {
    place: usize,
    group: Taken,
}

type EncodedOrError = Result<Encoded, ParquetError>;

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
    /// Digest of what the rows of the current run are made from, and how many of its row groups were sent.
    run: (Digest, u64),
    groups: Sender<Group>,
    encoded: Sender<EncodedOrError>,
    /// One for each row group that is not written yet: it bounds their number.
    unwritten: Sender<()>,
}

impl Rows {
    /// Begins a run of rows, which gets row groups of its own. `inputs` is the digest of what they are made from.
    pub fn begin(&mut self, inputs: Digest) -> Result<(), StageError> {
        self.finish()?;
        self.run = (inputs, 0);
        Ok(())
    }

    pub fn push(&mut self, batch: RecordBatch) -> Result<(), StageError> {
        self.chunks.push_batch(batch)?;
        self.send_full_groups()
    }

    /// Takes over a row group that was encoded before.
    pub fn push_encoded(&mut self, group: Taken) -> Result<(), StageError> {
        self.finish()?;
        let place = self.next_place()?;
        self.encoded.send(Ok(Encoded { place, group })).map_err(not_written)
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
        let place = self.next_place()?;
        let (run, piece) = &mut self.run;
        let inputs = inputs_of_piece(run, *piece);
        *piece += 1;
        let group = Group {
            place,
            inputs,
            chunks: std::mem::take(&mut self.group),
        };
        self.groups.send(group).map_err(not_written)
    }

    /// Waits until there is room for one more row group.
    fn next_place(&mut self) -> Result<usize, StageError> {
        self.unwritten.send(()).map_err(not_written)?;
        self.place += 1;
        Ok(self.place - 1)
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

/// The receiver is closed only after an encoder or the file has failed; that error is reported.
fn not_written<T>(_: crossbeam_channel::SendError<T>) -> StageError {
    StageError::failed("the file could not be written")
}

/// What encodes row groups.
struct Encoder {
    factory: ArrowRowGroupWriterFactory,
    schema: SchemaRef,
    root: TypePtr,
    properties: WriterPropertiesPtr,
}

impl Encoder {
    /// The writer of a file, and the encoder of its row groups.
    fn new<W: Write + Send>(to: W, schema: &SchemaRef) -> Result<(SerializedFileWriter<W>, Encoder), ParquetError> {
        let writer = ArrowWriter::try_new(to, Arc::clone(schema), Some(properties(schema)?))?;
        let (file, factory) = writer.into_serialized_writer()?;
        let encoder = Encoder {
            factory,
            schema: Arc::clone(schema),
            root: file.schema_descr().root_schema_ptr(),
            // Without the schema that Arrow's writer puts into files.
            properties: Arc::new(properties(schema)?),
        };
        Ok((file, encoder))
    }

    /// A file of one row group.
    fn encode(&self, place: usize, chunks: Vec<RecordBatch>) -> Result<Bytes, ParquetError> {
        let mut columns = self.factory.create_column_writers(place)?;
        for chunk in chunks {
            let mut writers = columns.iter_mut();
            for (field, array) in self.schema.fields().iter().zip(chunk.columns()) {
                for leaf in compute_leaves(field, array)? {
                    let writer = writers
                        .next()
                        .ok_or_else(|| ParquetError::General(format!("`{}` has no column writer", field.name())))?;
                    writer.write(&leaf)?;
                }
            }
        }
        let properties = Arc::clone(&self.properties);
        let mut file = SerializedFileWriter::new(Vec::new(), Arc::clone(&self.root), properties)?;
        let mut group = file.next_row_group()?;
        for column in columns {
            column.close()?.append_to_row_group(&mut group)?;
        }
        group.close()?;
        Ok(file.into_inner()?.into())
    }
}

/// Digest of what the encoder makes of some rows: another version of it gives another one.
pub(crate) fn encoder_digest() -> Result<Digest, StageError> {
    const SOME: usize = 3_000;
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values((0..SOME).map(|at| format!("words {at}"))));
    let langs: ArrayRef = Arc::new(StringArray::from_iter_values(
        (0..SOME).map(|at| format!("lang {}", at / 7 % 5)),
    ));
    let seconds: ArrayRef = Arc::new(Float64Array::from_iter(
        (0..SOME).map(|at| (at % 11 > 0).then_some(at as f64 / 3.0)),
    ));
    let rows = RecordBatch::try_from_iter_with_nullable([
        ("text", texts, true),
        ("lang", langs, true),
        ("duration", seconds, true),
    ])?;
    let encode = || {
        let (mut file, encoder) = Encoder::new(Vec::new(), &rows.schema())?;
        append(&mut file, &encoder.encode(0, vec![rows.clone()])?)?;
        Ok::<_, ParquetError>(Digest::of(&file.into_inner()?))
    };
    encode().map_err(StageError::failed)
}

/// Writes a file with the rows that `produce` pushes. They are produced, encoded and written at the same time. Gives what
/// `produce` gave, and where the row groups lie.
///
/// # Errors
/// Those of `produce`, and when the file cannot be written.
pub(crate) fn write_parquet<T: Send>(
    path: &Path,
    schema: SchemaRef,
    produce: impl FnOnce(&mut Rows) -> Result<T, StageError> + Send,
) -> Result<(T, Vec<Piece>), StageError> {
    let parquet = |source| ManifestError::Parquet {
        path: PathBuf::from(path),
        source,
    };
    let file = File::create(path).map_err(|e| ManifestError::io(path, e))?;
    let file = BufWriter::with_capacity(WRITTEN_AT_ONCE, file);
    let (mut file, encoder) = Encoder::new(file, &schema).map_err(parquet)?;
    let encoders = thread::available_parallelism().map_or(1, usize::from).min(ENCODERS);

    let (made, pieces) = thread::scope(|scope| -> Result<_, StageError> {
        let (groups, to_encode) = bounded::<Group>(1);
        let (encoded, to_write) = bounded::<EncodedOrError>(encoders);
        // Those that are encoded, and as many that wait for one that comes before them.
        let (unwritten, written) = bounded::<()>(2 * encoders + 2);
        let rows = Rows {
            chunks: BatchCoalescer::new(Arc::clone(&schema), CHUNK),
            group: Vec::new(),
            place: 0,
            run: (Digest::of(b""), 0),
            groups,
            encoded: encoded.clone(),
            unwritten,
        };
        let producer = scope.spawn(move || {
            let mut rows = rows;
            let made = produce(&mut rows)?;
            rows.finish()?;
            Ok::<T, StageError>(made)
        });
        for _ in 0..encoders {
            let (groups, encoded) = (to_encode.clone(), encoded.clone());
            let encoder = &encoder;
            scope.spawn(move || encode_groups(&groups, encoder, &encoded));
        }
        drop((to_encode, encoded));
        let pieces = append_in_order(&mut file, to_write, written);
        // A panic of the producer goes on here.
        let produced = producer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let pieces = pieces.map_err(parquet)?;
        Ok((produced?, pieces))
    })?;
    file.close().map_err(parquet)?;
    Ok((made, pieces))
}

fn encode_groups(groups: &Receiver<Group>, encoder: &Encoder, encoded: &Sender<EncodedOrError>) {
    for Group { place, inputs, chunks } in groups {
        let result = encoder.encode(place, chunks).map(|bytes| {
            let content = Digest::of(&bytes);
            let group = Taken { inputs, content, bytes };
            Encoded { place, group }
        });
        let failed = result.is_err();
        if encoded.send(result).is_err() || failed {
            return;
        }
    }
}

/// Writes row groups in the order of their places as they come, and gives where they lie.
fn append_in_order<W: Write + Send>(
    file: &mut SerializedFileWriter<W>,
    encoded: Receiver<EncodedOrError>,
    written: Receiver<()>,
) -> Result<Vec<Piece>, ParquetError> {
    let mut early = BTreeMap::new();
    let mut pieces = Vec::new();
    for result in encoded {
        let Encoded { place, group } = result?;
        early.insert(place, group);
        while let Some(group) = early.remove(&pieces.len()) {
            let range = append(file, &group.bytes)?;
            let tail = group.bytes.get(HEAD.len() + range.1..).unwrap_or_default();
            pieces.push(Piece {
                inputs: group.inputs,
                start: range.0 as u64,
                bytes: range.1 as u64,
                tail: hex::encode(tail),
                content: group.content,
            });
            // It was sent before the group.
            let _ = written.try_recv();
        }
    }
    Ok(pieces)
}

/// Appends the row group of a file of one row group. Gives where its columns lie in the file: their start and length in bytes.
fn append<W: Write + Send>(file: &mut SerializedFileWriter<W>, one: &Bytes) -> Result<(usize, usize), ParquetError> {
    let options = ParquetMetaDataOptions::new().with_encoding_stats_as_mask(false);
    let metadata = ParquetMetaDataReader::new()
        .with_page_index_policy(PageIndexPolicy::Required)
        .with_metadata_options(Some(options))
        .parse_and_finish(one)?;
    let [rows] = metadata.row_groups() else {
        return Err(ParquetError::General("it is not one row group".into()));
    };
    let ranges = metadata.column_index().and_then(|groups| groups.first());
    let pages = metadata.offset_index().and_then(|groups| groups.first());
    let start = file.bytes_written();
    let mut group = file.next_row_group()?;
    for (at, column) in rows.columns().iter().enumerate() {
        let range = ranges.and_then(|columns| columns.get(at)).cloned();
        let close = ColumnCloseResult {
            bytes_written: column.compressed_size().unsigned_abs(),
            rows_written: rows.num_rows().unsigned_abs(),
            metadata: with_old_range(column)?,
            bloom_filter: None,
            column_index: range.filter(|range| !matches!(range, ColumnIndexMetaData::NONE)),
            offset_index: pages.and_then(|columns| columns.get(at)).cloned(),
        };
        group.append_column(one, close)?;
    }
    group.close()?;
    Ok((start, file.bytes_written() - start))
}

/// The encoder writes the range of signed numbers in fields for old readers, too, which is not seen when it is read.
fn with_old_range(column: &ColumnChunkMetaData) -> Result<ColumnChunkMetaData, ParquetError> {
    let is_signed = column.column_descr().sort_order().is_signed();
    let statistics = match column.statistics() {
        Some(statistics) if is_signed => statistics.clone(),
        _ => return Ok(column.clone()),
    };
    let statistics = match statistics {
        Statistics::Int32(range) => Statistics::Int32(range.with_backwards_compatible_min_max(true)),
        Statistics::Int64(range) => Statistics::Int64(range.with_backwards_compatible_min_max(true)),
        Statistics::Float(range) => Statistics::Float(range.with_backwards_compatible_min_max(true)),
        Statistics::Double(range) => Statistics::Double(range.with_backwards_compatible_min_max(true)),
        other => other,
    };
    column.clone().into_builder().set_statistics(statistics).build()
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
        let error = write_parquet::<()>(&folder.path().join("out.parquet"), all.schema(), |rows| {
            rows.push(all.clone())?;
            Err(StageError::failed("the third shard is gone"))
        });
        let error = error.map(|_| ());
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
