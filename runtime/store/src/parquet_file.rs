//! Data files: parquet, always with the same bytes for the same rows.

use std::collections::HashSet;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, StringArray};
use arrow::compute::BatchCoalescer;
use arrow::datatypes::{DataType, Schema, SchemaRef};
use arrow::error::ArrowError;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder, RowSelection};
use parquet::arrow::{ArrowWriter, ProjectionMask};
use parquet::basic::{Compression, Encoding};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::reader::Length;
use parquet::schema::types::ColumnPath;

use super::StoreError;
use super::atomic::Files;
use super::record::Selection;
use super::verified;
use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_base::row_number::ROW;
use flow_parquet::{ColumnChunks, CountedRows, ForeignParquet, checked_metadata, rows_of_file, without_panic};

/// Rows of a row group. Part of the format: another number gives other bytes.
pub const ROW_GROUP: usize = 65_536;

/// Rows of a batch when reading.
const READ_ROWS: usize = 8_192;

/// Values that are sampled to decide whether a text column has repeated values, and how many distinct ones mean that it
/// has not.
const SAMPLE: usize = 512;
const ALL_DIFFERENT: usize = 64;

/// Bytes per write and per update of the digest: few system calls, and BLAKE3 is fast on large inputs.
const PIECE: usize = 1 << 20;

/// Artifacts are written once and read a few times on the same machine: LZ4, which costs a fraction of Zstandard (for
/// which the library makes a new context for every page), no compression for digests, which are incompressible, and
/// dictionaries only where texts repeat.
fn properties(schema: &Schema, first: Option<&RecordBatch>) -> WriterProperties {
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::LZ4_RAW)
        .set_dictionary_enabled(false)
        .set_max_row_group_row_count(Some(ROW_GROUP))
        .set_statistics_enabled(EnabledStatistics::None)
        // Without the version: an update of the parquet library alone must not change a digest.
        .set_created_by("flow".to_string());
    for (position, field) in schema.fields().iter().enumerate() {
        let path = ColumnPath::from(field.name().as_str());
        if field.name() == ROW {
            properties = properties.set_column_encoding(path, Encoding::DELTA_BINARY_PACKED);
        } else if let Some(batch) = first {
            let column = batch.column(position);
            if repeats(column) {
                properties = properties.set_column_dictionary_enabled(path, true);
            } else if digests(column) {
                properties = properties.set_column_compression(path, Compression::UNCOMPRESSED);
            }
        }
    }
    properties.build()
}

/// Whether the first texts of a column repeat.
fn repeats(column: &ArrayRef) -> bool {
    let Some(texts) = column.as_any().downcast_ref::<StringArray>() else {
        return false;
    };
    let sample = texts.len().min(SAMPLE);
    let mut distinct = HashSet::with_capacity(sample / 2 + 1);
    texts.iter().take(sample).enumerate().all(|(before, text)| {
        distinct.insert(text);
        distinct.len() * 2 <= sample && (before + 1 != ALL_DIFFERENT || distinct.len() < ALL_DIFFERENT)
    })
}

/// Whether a column holds digests or keys made of them: bytes of one length, or texts of hexadecimal digits.
fn digests(column: &ArrayRef) -> bool {
    let Some(texts) = column.as_any().downcast_ref::<StringArray>() else {
        return matches!(column.data_type(), DataType::FixedSizeBinary(_));
    };
    let digest = |text: &str| text.len() >= 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    texts.null_count() < texts.len() && texts.iter().take(SAMPLE).flatten().all(digest)
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrittenFile {
    pub digest: Digest,
    pub rows: u64,
    pub bytes: u64,
}

/// Writes bytes through, and digests and counts them.
struct Hashing<W> {
    inner: W,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let taken = self.inner.write(buffer)?;
        self.hasher.update(&buffer[..taken]);
        self.bytes += taken as u64;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Writes rows as parquet, a row group whenever there are enough of them. How the rows are cut into batches changes
/// nothing in the file.
pub(crate) struct Encoder<W: Write + Send> {
    schema: SchemaRef,
    /// Pages end where a batch ends, so the writer must see the same batches whatever came in.
    coalescer: BatchCoalescer,
    /// None until the first row group: its rows say how columns are written.
    writer: Option<ArrowWriter<BufWriter<Hashing<W>>>>,
    sink: Option<W>,
    rows: u64,
}

impl<W: Write + Send> Encoder<W> {
    pub fn new(sink: W, schema: &SchemaRef) -> Self {
        Encoder {
            schema: schema.clone(),
            coalescer: BatchCoalescer::new(schema.clone(), ROW_GROUP),
            writer: None,
            sink: Some(sink),
            rows: 0,
        }
    }

    /// Takes rows with the columns of the schema. True: all that were taken before this batch are written.
    pub fn push(&mut self, batch: RecordBatch) -> Result<bool, ParquetError> {
        self.rows += batch.num_rows() as u64;
        self.coalescer.push_batch(batch)?;
        let mut wrote = false;
        while let Some(group) = self.coalescer.next_completed_batch() {
            self.write(&group)?;
            wrote = true;
        }
        Ok(wrote)
    }

    fn write(&mut self, group: &RecordBatch) -> Result<(), ParquetError> {
        self.begun(Some(group))?.write(group)
    }

    fn begun(&mut self, first: Option<&RecordBatch>) -> Result<&mut ArrowWriter<BufWriter<Hashing<W>>>, ParquetError> {
        if let Some(inner) = self.sink.take() {
            let hashing = Hashing {
                inner,
                hasher: blake3::Hasher::new(),
                bytes: 0,
            };
            let buffered = BufWriter::with_capacity(PIECE, hashing);
            let properties = properties(&self.schema, first);
            self.writer = Some(ArrowWriter::try_new(buffered, self.schema.clone(), Some(properties))?);
        }
        let failed = || ParquetError::General("the file could not be begun".into());
        self.writer.as_mut().ok_or_else(failed)
    }

    /// Writes what is left, and the end of the file.
    pub fn finish(mut self) -> Result<WrittenFile, ParquetError> {
        self.coalescer.finish_buffered_batch()?;
        while let Some(group) = self.coalescer.next_completed_batch() {
            self.write(&group)?;
        }
        self.begun(None)?;
        let failed = || ParquetError::General("the file could not be begun".into());
        let writer = self.writer.ok_or_else(failed)?;
        let hashing = writer.into_inner()?.into_inner().map_err(|error| error.into_error())?;
        Ok(WrittenFile {
            digest: Digest::from_bytes(*hashing.hasher.finalize().as_bytes()),
            rows: self.rows,
            bytes: hashing.bytes,
        })
    }
}

/// Writes rows as parquet; each batch is dropped as soon as it is written. The batches must have the columns of
/// `schema`.
pub fn encode<W: Write + Send>(
    sink: W,
    schema: &SchemaRef,
    batches: Vec<RecordBatch>,
) -> Result<WrittenFile, ParquetError> {
    let mut encoder = Encoder::new(sink, schema);
    if let [only] = batches.as_slice() {
        // Sliced without a copy.
        encoder.rows = only.num_rows() as u64;
        for start in (0..only.num_rows()).step_by(ROW_GROUP) {
            encoder.write(&only.slice(start, ROW_GROUP.min(only.num_rows() - start)))?;
        }
    } else {
        for batch in batches {
            encoder.push(batch)?;
        }
    }
    encoder.finish()
}

/// Gives batches the declared schema: metadata and nullability are those of the declaration, names and types must
/// agree, and nulls may occur only in nullable columns.
pub(crate) fn conform(schema: &SchemaRef, batches: Vec<RecordBatch>) -> Result<Vec<RecordBatch>, ArrowError> {
    let mut conformed = Vec::with_capacity(batches.len());
    for batch in batches {
        if batch.schema_ref() == schema {
            conformed.push(batch);
            continue;
        }
        let found = batch.schema();
        let names = |schema: &Schema| schema.fields().iter().map(|f| f.name().clone()).collect::<Vec<_>>();
        if names(&found) != names(schema) {
            return Err(ArrowError::SchemaError(format!(
                "has columns {}, but {} were declared",
                names(&found).join(", "),
                names(schema).join(", ")
            )));
        }
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        conformed.push(RecordBatch::try_new_with_options(
            schema.clone(),
            batch.columns().to_vec(),
            &options,
        )?);
    }
    Ok(conformed)
}

/// Writes a data file under a temporary name in `folder`. It is not brought to the disk yet.
pub fn write(
    files: &Files,
    folder: &Path,
    schema: &SchemaRef,
    batches: Vec<RecordBatch>,
) -> Result<(PathBuf, WrittenFile), StoreError> {
    let (temporary, file) = files.create_temporary(folder)?;
    match encode(file, schema, batches) {
        Ok(written) => Ok((temporary, written)),
        Err(error) => {
            let _ = files.remove(&temporary);
            Err(StoreError::parquet_written(&temporary, error))
        }
    }
}

/// The rows of a data file, batch by batch.
pub struct Rows {
    reader: CountedRows,
    file: ForeignParquet,
    path: PathBuf,
    /// Of the chosen columns, in the chosen order.
    schema: SchemaRef,
    /// Where each chosen column is among those read.
    order: Vec<usize>,
}

/// Opens a data file that should have `bytes` bytes and the columns of `schema`. With a selection, only its rows
/// are read, and the size is that which the selection knows.
pub fn open(
    path: &Path,
    bytes: u64,
    schema: &SchemaRef,
    columns: Option<&[&str]>,
    selection: Option<&Selection>,
) -> Result<Rows, StoreError> {
    let bytes = selection.map_or(bytes, |selection| selection.file_bytes);
    let (chosen, positions) =
        project(schema, columns).map_err(|detail| StoreError::io("read", path, io::Error::other(detail)))?;
    let file = ForeignParquet::open_local(path).map_err(|e| StoreError::io("read", path, e))?;
    let found = file.len();
    if found != bytes {
        let detail = format!("it has {found} bytes, its record says {bytes}");
        return Err(StoreError::damaged(path, detail));
    }
    verified::verify(path)?;
    let noting = file.clone();
    let failed = |error| read_error(&noting, path, error);
    let mut chunks = ColumnChunks::new(file).map_err(failed)?;
    let metadata = checked_metadata(&chunks, ArrowReaderOptions::new()).map_err(failed)?;
    let stored = metadata.schema();
    // Columns are looked up by name: the file says where each one is.
    let mut roots = Vec::with_capacity(positions.len());
    for field in chosen.fields() {
        let Some((root, _)) = stored.column_with_name(field.name()) else {
            let detail = format!("it has no column `{}`", field.name());
            return Err(StoreError::damaged(path, detail));
        };
        roots.push(root);
    }
    let mut read: Vec<usize> = roots.clone();
    read.sort_unstable();
    read.dedup();
    let order = roots
        .iter()
        .map(|root| read.binary_search(root).unwrap_or_default())
        .collect();
    let mask = ProjectionMask::roots(metadata.metadata().file_metadata().schema_descr(), read);
    let read = chunks.read_leaves(metadata.metadata(), |leaf| mask.leaf_included(leaf));
    read.map_err(failed)?;
    let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(chunks, metadata);
    let mut builder = builder.with_projection(mask).with_batch_size(READ_ROWS);
    let mut expected = rows_of_file(builder.metadata()).map_err(failed)?;
    if let Some(selection) = selection {
        let rows = usize::try_from(expected).unwrap_or_default();
        if expected != selection.file_rows {
            let detail = format!("it has {rows} rows, a selection says {}", selection.file_rows);
            return Err(StoreError::damaged(path, detail));
        }
        let ranges = selection
            .ranges
            .iter()
            .map(|&(start, length)| start as usize..(start + length) as usize);
        builder = builder.with_row_selection(RowSelection::from_consecutive_ranges(ranges, rows));
        expected = selection.rows();
    }
    let reader = without_panic(|| builder.build()).map_err(failed)?;
    Ok(Rows {
        reader: CountedRows::new(reader, expected),
        file: noting,
        path: path.to_path_buf(),
        schema: chosen,
        order,
    })
}

/// What to say of a data file that the decoder cannot read: an I/O error is none of damage.
fn read_error(file: &ForeignParquet, path: &Path, error: ParquetError) -> StoreError {
    match file.unreadable() {
        Some(said) => StoreError::io("read", path, io::Error::other(said)),
        None => StoreError::parquet_read(path, error),
    }
}

/// The schema that a data file has.
pub fn schema_of(path: &Path) -> Result<SchemaRef, StoreError> {
    verified::verify(path)?;
    let file = ForeignParquet::open_local(path).map_err(|e| StoreError::io("read", path, e))?;
    let metadata = file.metadata().map_err(|error| read_error(&file, path, error))?;
    Ok(metadata.schema().clone())
}

/// The schema of the chosen columns, and their positions.
pub fn project(schema: &SchemaRef, columns: Option<&[&str]>) -> Result<(SchemaRef, Vec<usize>), String> {
    let Some(columns) = columns else {
        return Ok((schema.clone(), (0..schema.fields().len()).collect()));
    };
    let mut positions = Vec::with_capacity(columns.len());
    for column in columns {
        match schema.column_with_name(column) {
            Some((position, _)) => positions.push(position),
            None => return Err(format!("there is no column `{column}`")),
        }
    }
    let chosen = schema.project(&positions).map_err(|e| e.to_string())?;
    Ok((Arc::new(chosen), positions))
}

impl Iterator for Rows {
    type Item = Result<RecordBatch, StageError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.reader.next()?;
        let shaped = batch.and_then(|batch| {
            let columns = self.order.iter().map(|&i| batch.column(i).clone()).collect();
            let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
            RecordBatch::try_new_with_options(self.schema.clone(), columns, &options)
        });
        Some(shaped.map_err(|error| read_error(&self.file, &self.path, error.into()).into()))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use arrow::array::Int64Array;
    use arrow::datatypes::Field;

    use super::*;

    /// A state directory on a bad disk: whatever byte of a file's metadata is wrong, the file is read or is an error.
    #[test]
    fn any_damage_of_the_metadata_is_an_error_at_most() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.parquet");
        let fields = vec![
            Field::new("n", DataType::Int64, false),
            Field::new("t", DataType::Utf8, true),
        ];
        let schema: SchemaRef = Arc::new(Schema::new(fields));
        let columns: Vec<ArrayRef> = vec![
            Arc::new(Int64Array::from_iter_values(0..100)),
            Arc::new(StringArray::from_iter(
                (0..100).map(|n| (n % 3 > 0).then(|| n.to_string())),
            )),
        ];
        let batch = RecordBatch::try_new(schema.clone(), columns).unwrap();
        let mut bytes = Vec::new();
        let written = encode(&mut bytes, &schema, vec![batch.clone()]).unwrap();
        assert_eq!(written.bytes, bytes.len() as u64);
        let read = |bytes: &[u8]| -> Result<RecordBatch, StageError> {
            fs::write(&path, bytes).unwrap();
            let rows = open(&path, bytes.len() as u64, &schema, None, None)?;
            let batches = rows.collect::<Result<Vec<_>, _>>()?;
            Ok(arrow::compute::concat_batches(&schema, &batches).unwrap())
        };
        assert_eq!(read(&bytes).unwrap(), batch);
        let tail = bytes.len() - 8;
        let length = u32::from_le_bytes(bytes[tail..tail + 4].try_into().unwrap()) as usize;
        let mut errors = 0;
        for place in tail - length..bytes.len() {
            for flipped in [0x01, 0x10, 0x80, 0xFF] {
                let mut damaged = bytes.clone();
                damaged[place] ^= flipped;
                if let Err(error) = read(&damaged) {
                    assert!(error.to_string().contains("x.parquet"), "{error}");
                    errors += 1;
                }
            }
        }
        assert!(errors > length, "{errors} errors of {length} bytes");
    }
}
