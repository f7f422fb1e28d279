//! Parquet files whose bytes depend only on their rows, written on all cores.
//!
//! Each row group is encoded as a file of its own, in memory, and the file is put together from these, so that those
//! that are copied from another file ([`crate::pieces`]) go the same way.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use arrow::array::{ArrayRef, Float64Array, RecordBatch, StringArray};
use arrow::compute::BatchCoalescer;
use arrow::datatypes::{Schema, SchemaRef};
use bytes::Bytes;
use crossbeam_channel::bounded;
use flow_corpus::ManifestError;
use flow_kind::{Digest, StageError};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::{ArrowColumnWriter, ArrowLeafColumn, ArrowRowGroupWriterFactory, compute_leaves};
use parquet::basic::{Compression, ZstdLevel};
use parquet::column::writer::ColumnCloseResult;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, PageIndexPolicy, ParquetMetaDataOptions, ParquetMetaDataReader};
use parquet::file::page_index::column_index::ColumnIndexMetaData;
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterPropertiesPtr};
use parquet::file::statistics::Statistics;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::{ColumnPath, TypePtr};
use rayon::prelude::*;

use crate::pieces::{Piece, Taken, inputs_of_piece};

/// Rows to a row group, and rows that are handed to the encoder at a time: both fixed, so that the same rows
/// give the same bytes however they come.
pub(crate) const ROW_GROUP: usize = 65_536;
const CHUNK: usize = 8_192;

/// Runs are made on this many threads at most: each holds one in memory, some 30 MB of a manifest.
const MAKERS: usize = 8;

/// How a file begins.
pub(crate) const HEAD: [u8; 4] = *b"PAR1";

/// Bytes that are written to the disk at a time.
const WRITTEN_AT_ONCE: usize = 1 << 20;

/// Columns with few repeated values: a dictionary costs time and space.
const ONCE_EACH: [&str; 5] = ["segment_id", "text", "tar_member_name", "values", "detail"];

/// Columns without statistics: nothing filters by them, and every value is compared.
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

/// Encodes the rows of a run, which come in the order of the file.
pub(crate) struct RunRows<'e> {
    encoder: &'e Encoder,
    /// Digest of what the run is made from.
    inputs: Digest,
    chunks: BatchCoalescer,
    group: Vec<RecordBatch>,
    groups: Vec<Taken>,
}

impl<'e> RunRows<'e> {
    pub fn new(encoder: &'e Encoder, inputs: Digest) -> Self {
        RunRows {
            encoder,
            inputs,
            chunks: BatchCoalescer::new(Arc::clone(&encoder.schema), CHUNK),
            group: Vec::new(),
            groups: Vec::new(),
        }
    }

    pub fn push(&mut self, batch: RecordBatch) -> Result<(), StageError> {
        self.chunks.push_batch(batch)?;
        self.encode_full_groups()
    }

    fn encode_full_groups(&mut self) -> Result<(), StageError> {
        while let Some(chunk) = self.chunks.next_completed_batch() {
            self.group.push(chunk);
            if self.group.len() == ROW_GROUP / CHUNK {
                self.encode_group()?;
            }
        }
        Ok(())
    }

    fn encode_group(&mut self) -> Result<(), StageError> {
        let chunks = std::mem::take(&mut self.group);
        let bytes = self.encoder.encode(chunks).map_err(StageError::failed)?;
        self.groups.push(Taken {
            inputs: inputs_of_piece(&self.inputs, self.groups.len() as u64),
            content: Digest::of(&bytes),
            bytes,
        });
        Ok(())
    }

    /// The row groups of all rows.
    pub fn finish(mut self) -> Result<Vec<Taken>, StageError> {
        self.chunks.finish_buffered_batch()?;
        self.encode_full_groups()?;
        if !self.group.is_empty() {
            self.encode_group()?;
        }
        Ok(self.groups)
    }
}

/// What encodes row groups.
pub(crate) struct Encoder {
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
    fn encode(&self, chunks: Vec<RecordBatch>) -> Result<Bytes, ParquetError> {
        // The same wherever it lies.
        let writers = self.factory.create_column_writers(0)?;
        let mut leaves: Vec<Vec<ArrowLeafColumn>> = writers.iter().map(|_| Vec::new()).collect();
        for chunk in chunks {
            let mut columns = leaves.iter_mut();
            for (field, array) in self.schema.fields().iter().zip(chunk.columns()) {
                for leaf in compute_leaves(field, array)? {
                    let column = columns
                        .next()
                        .ok_or_else(|| ParquetError::General(format!("`{}` has no column writer", field.name())))?;
                    column.push(leaf);
                }
            }
        }
        // So that the last ones of a file use all cores.
        let encode = |(mut writer, leaves): (ArrowColumnWriter, Vec<ArrowLeafColumn>)| {
            for leaf in leaves {
                writer.write(&leaf)?;
            }
            writer.close()
        };
        let columns: Result<Vec<_>, _> = writers.into_par_iter().zip(leaves).map(encode).collect();
        let properties = Arc::clone(&self.properties);
        let mut file = SerializedFileWriter::new(Vec::new(), Arc::clone(&self.root), properties)?;
        let mut group = file.next_row_group()?;
        for column in columns? {
            column.append_to_row_group(&mut group)?;
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
        append(&mut file, &encoder.encode(vec![rows.clone()])?)?;
        Ok::<_, ParquetError>(Digest::of(&file.into_inner()?))
    };
    encode().map_err(StageError::failed)
}

/// What is made of a run of rows: its row groups, and something beside them.
pub(crate) struct MadeRun<T> {
    pub groups: Vec<Taken>,
    pub beside: T,
}

type MadeOrPanic<T> = thread::Result<Result<MadeRun<T>, StageError>>;

/// Writes a file of so many runs of rows into `to`. `make` makes the run at a place; it is called on all cores. `take` takes
/// what is made beside the row groups, in the order of the file. Gives where the row groups lie, and `to`. `path` is what errors
/// name.
///
/// # Errors
/// Those of `make` and `take`, and when the file cannot be written.
pub(crate) fn write_parquet<W: Write + Send, T: Send>(
    to: W,
    path: &Path,
    schema: SchemaRef,
    runs: usize,
    make: impl Fn(usize, &Encoder) -> Result<MadeRun<T>, StageError> + Sync,
    mut take: impl FnMut(T) -> Result<(), StageError>,
) -> Result<(Vec<Piece>, W), StageError> {
    let parquet = |source| ManifestError::parquet(path, source);
    let file = BufWriter::with_capacity(WRITTEN_AT_ONCE, to);
    let (mut file, encoder) = Encoder::new(file, &schema).map_err(parquet)?;
    let makers = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(MAKERS)
        .min(runs);
    let next = AtomicUsize::new(0);
    let mut pieces = Vec::new();
    thread::scope(|scope| -> Result<(), StageError> {
        let (made, to_write) = bounded::<(usize, MadeOrPanic<T>)>(makers);
        // Runs that are being made, and as many that wait for one that comes before them.
        let (unwritten, written) = bounded::<()>(2 * makers + 2);
        for _ in 0..makers {
            let (made, unwritten) = (made.clone(), unwritten.clone());
            let (next, make, encoder) = (&next, &make, &encoder);
            scope.spawn(move || {
                // In this order: of the runs that are not written, the first is always being made.
                while unwritten.send(()).is_ok() {
                    let place = next.fetch_add(1, Ordering::Relaxed);
                    if place >= runs {
                        return;
                    }
                    // A panic goes on where the file is written.
                    let run = catch_unwind(AssertUnwindSafe(|| make(place, encoder)));
                    if made.send((place, run)).is_err() {
                        return;
                    }
                }
            });
        }
        drop((made, unwritten));
        let mut early = BTreeMap::new();
        let mut place = 0;
        for (made, run) in to_write {
            early.insert(made, run.unwrap_or_else(|panic| resume_unwind(panic))?);
            while let Some(MadeRun { groups, beside }) = early.remove(&place) {
                place += 1;
                for group in groups {
                    pieces.push(append_piece(&mut file, &group).map_err(parquet)?);
                }
                take(beside)?;
                // It was sent before the run was made.
                let _ = written.try_recv();
            }
        }
        Ok(())
    })?;
    let file = file.into_inner().map_err(parquet)?;
    let to = file.into_inner().map_err(|e| ManifestError::io(path, e.into_error()))?;
    Ok((pieces, to))
}

/// Appends a row group, and gives where it lies.
fn append_piece<W: Write + Send>(file: &mut SerializedFileWriter<W>, group: &Taken) -> Result<Piece, ParquetError> {
    let (start, bytes) = append(file, &group.bytes)?;
    let tail = group.bytes.get(HEAD.len() + bytes..).unwrap_or_default();
    Ok(Piece {
        inputs: group.inputs,
        start: start as u64,
        bytes: bytes as u64,
        tail: hex::encode(tail),
        content: group.content,
    })
}

/// Appends the row group of a file of one row group. Gives where its columns are in the file: their start and length in bytes.
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
    use arrow::array::{Float64Array, StringArray};
    use arrow::datatypes::{DataType, Field};
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

    use std::fs::File;

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

    /// Writes runs of rows, each of which comes in pieces of this size.
    fn written(path: &Path, all: &RecordBatch, runs: &[usize], piece: usize) -> Result<Vec<usize>, StageError> {
        let starts: Vec<usize> = runs
            .iter()
            .scan(0, |end, rows| Some(std::mem::replace(end, *end + rows)))
            .collect();
        let make = |at: usize, encoder: &Encoder| {
            let mut rows = RunRows::new(encoder, Digest::of(b""));
            for start in (0..runs[at]).step_by(piece) {
                rows.push(all.slice(starts[at] + start, piece.min(runs[at] - start)))?;
            }
            let groups = rows.finish()?;
            Ok::<_, StageError>(MadeRun { groups, beside: at })
        };
        let mut order = Vec::new();
        let file = File::create(path).unwrap();
        write_parquet(file, path, all.schema(), runs.len(), make, |at| {
            order.push(at);
            Ok(())
        })?;
        Ok(order)
    }

    #[test]
    fn many_threads_write_what_one_would() {
        let folder = tempfile::tempdir().unwrap();
        let (ours, theirs) = (folder.path().join("ours.parquet"), folder.path().join("theirs.parquet"));
        for count in [0, 1, CHUNK, ROW_GROUP, 3 * ROW_GROUP + 5_000] {
            let all = rows(count);
            alone(&theirs, &all);
            // In one run, or in one for each row group.
            let groups: Vec<usize> = (0..count)
                .step_by(ROW_GROUP)
                .map(|start| ROW_GROUP.min(count - start))
                .collect();
            for (runs, piece) in [(vec![count], 997), (groups.clone(), 997), (groups, 70_000)] {
                let order = written(&ours, &all, &runs, piece).unwrap();
                assert_eq!(order, (0..runs.len()).collect::<Vec<_>>());
                assert!(
                    std::fs::read(&ours).unwrap() == std::fs::read(&theirs).unwrap(),
                    "{count} rows in runs of {runs:?} and pieces of {piece}"
                );
            }
        }
        let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(&ours).unwrap()).unwrap();
        let read: usize = reader.build().unwrap().map(|batch| batch.unwrap().num_rows()).sum();
        assert_eq!(read, 3 * ROW_GROUP + 5_000);
        // Many more runs than are in memory at a time, of very different sizes.
        let runs: Vec<usize> = (0..300).map(|at| 1 + at * 7_919 % 1_000).collect();
        let all = rows(runs.iter().sum());
        assert_eq!(written(&ours, &all, &runs, 500).unwrap(), (0..300).collect::<Vec<_>>());
    }

    #[test]
    fn the_error_of_what_makes_the_rows_comes_out() {
        let path = Path::new("out.parquet");
        let all = rows(ROW_GROUP + 1);
        let run = |encoder: &Encoder, batch: &RecordBatch| {
            let mut rows = RunRows::new(encoder, Digest::of(b""));
            rows.push(batch.clone())?;
            let groups = rows.finish()?;
            Ok::<_, StageError>(MadeRun { groups, beside: () })
        };
        let third = |at: usize, encoder: &Encoder| match at {
            2 => Err(StageError::failed("the third shard is gone")),
            _ => run(encoder, &all.slice(0, 10)),
        };
        let error = write_parquet(Vec::new(), path, all.schema(), 100, third, Ok);
        assert!(error.unwrap_err().to_string().contains("the third shard is gone"));
        let other = RecordBatch::try_new(
            Arc::new(Schema::new(vec![Field::new("text", DataType::Utf8, false)])),
            vec![Arc::clone(all.column(0))],
        )
        .unwrap();
        let wrong = |_: usize, encoder: &Encoder| run(encoder, &other);
        assert!(
            write_parquet(Vec::new(), path, all.schema(), 1, wrong, Ok).is_err(),
            "rows of another schema"
        );
        // A disk that takes nothing.
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = write_parquet(full, path, all.schema(), 9, |_, encoder| run(encoder, &all), Ok);
        assert!(error.unwrap_err().to_string().contains("out.parquet"));
    }

    #[test]
    fn a_panic_of_what_makes_the_rows_comes_out() {
        let written = catch_unwind(|| {
            let make = |at: usize, _: &Encoder| -> Result<MadeRun<()>, StageError> {
                assert!(at != 1, "the second run");
                Ok(MadeRun {
                    groups: Vec::new(),
                    beside: (),
                })
            };
            write_parquet(Vec::new(), Path::new("out.parquet"), rows(1).schema(), 50, make, Ok).is_ok()
        });
        assert!(written.is_err());
    }
}
