//! Parquet files, of which only row groups that may have matching rows are read.

use std::io::Read;
use std::path::{Path, PathBuf};

use arrow::array::{Array, RecordBatch};
use arrow::datatypes::{DataType, SchemaRef};
use flow_kind::open_regular_file;
use flow_manifest::ManifestError;
use flow_parquet::{CountedRows, ForeignParquet};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions, RowSelection};
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::statistics::Statistics;

use super::condition::{Bound, Test};

const BATCH_ROWS: usize = 2048;
/// Bytes of a batch in memory, estimated from the first rows of the row group.
pub(super) const BATCH_BYTES: usize = 16 << 20;
/// Rows from which the size of a row is estimated.
const FIRST_ROWS: usize = 16;

/// Whether the file begins as Parquet files do.
pub fn is_parquet(path: &Path) -> Result<bool, ManifestError> {
    let mut magic = Vec::new();
    let read = open_regular_file(path).and_then(|file| file.take(4).read_to_end(&mut magic));
    read.map_err(|error| ManifestError::io(path, error))?;
    Ok(magic == b"PAR1")
}

fn damaged(path: &Path) -> impl Fn(ParquetError) -> ManifestError + use<> {
    let path = path.to_owned();
    move |source| ManifestError::parquet(&path, source)
}

fn opened(path: &Path) -> Result<(ForeignParquet, ArrowReaderMetadata), ManifestError> {
    let file = ForeignParquet::open_local(path).map_err(|error| ManifestError::io(path, error))?;
    // The file's Parquet types; the Arrow schema that a writer may have embedded is ignored.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let metadata = file.metadata_with(options).map_err(damaged(path))?;
    Ok((file, metadata))
}

/// The columns of a file, and how many rows it says it has.
pub fn schema(path: &Path) -> Result<(SchemaRef, u64), ManifestError> {
    let (_, metadata) = opened(path)?;
    let rows = metadata.metadata().file_metadata().num_rows();
    Ok((metadata.schema().clone(), u64::try_from(rows).unwrap_or(0)))
}

/// The row at `row`, with all columns.
pub fn row(path: &Path, row: u64) -> Result<Option<RecordBatch>, ManifestError> {
    let (file, metadata) = opened(path)?;
    let mut first = 0u64;
    for (group, of_group) in metadata.metadata().row_groups().iter().enumerate() {
        let rows = u64::try_from(of_group.num_rows()).unwrap_or(0);
        if row < first + rows {
            let place = (row - first) as usize;
            let only = RowSelection::from_consecutive_ranges(std::iter::once(place..place + 1), rows as usize);
            let reader = file.rows_of(&metadata, &[group], ProjectionMask::all(), 1, Some(only));
            for batch in reader.map_err(damaged(path))? {
                let batch = batch?;
                if batch.num_rows() > 0 {
                    return Ok(Some(batch.slice(0, 1)));
                }
            }
            return Ok(None);
        }
        first += rows;
    }
    Ok(None)
}

/// The batches of the columns `named` (those that are there), with the places of their first rows.
pub fn batches(path: &Path, named: &[&str], bounds: &[Bound]) -> Result<Groups, ManifestError> {
    let (file, metadata) = opened(path)?;
    let bounds: Vec<&Bound> = bounds
        .iter()
        .filter(|bound| is_told(metadata.schema(), bound))
        .collect();
    let mut groups = Vec::new();
    let mut first = 0u64;
    for (group, of_group) in metadata.metadata().row_groups().iter().enumerate() {
        if bounds.iter().all(|bound| may_pass(of_group, bound)) {
            groups.push((group, first));
        }
        first += u64::try_from(of_group.num_rows()).unwrap_or(0);
    }
    let wanted: Vec<usize> = metadata
        .schema()
        .fields()
        .iter()
        .enumerate()
        .filter(|(_, field)| named.contains(&field.name().as_str()))
        .map(|(index, _)| index)
        .collect();
    Ok(Groups {
        path: path.to_owned(),
        file,
        metadata,
        columns: wanted,
        groups: groups.into_iter(),
        reader: None,
    })
}

/// The batches of some row groups.
pub struct Groups {
    path: PathBuf,
    file: ForeignParquet,
    metadata: ArrowReaderMetadata,
    columns: Vec<usize>,
    groups: std::vec::IntoIter<(usize, u64)>,
    /// Of the row group that is read, and the place of its next row.
    reader: Option<(CountedRows, u64)>,
}

impl Groups {
    /// A small file may expand to long values (dictionaries): a batch has fewer rows where they are long.
    fn reader_of(&self, group: usize) -> Result<CountedRows, ManifestError> {
        let mut of_row = 1;
        for batch in self.reader(group, FIRST_ROWS)?.take(1) {
            let batch = batch?;
            let sizes = batch
                .columns()
                .iter()
                .map(|column| column.to_data().get_slice_memory_size());
            let bytes: usize = sizes.map(|size| size.unwrap_or(0)).sum();
            of_row = of_row.max(bytes / batch.num_rows().max(1));
        }
        self.reader(group, (BATCH_BYTES / of_row).clamp(1, BATCH_ROWS))
    }

    fn reader(&self, group: usize, rows: usize) -> Result<CountedRows, ManifestError> {
        let mask = ProjectionMask::roots(self.metadata.parquet_schema(), self.columns.iter().copied());
        let reader = self.file.rows_of(&self.metadata, &[group], mask, rows, None);
        reader.map_err(damaged(&self.path))
    }
}

impl Iterator for Groups {
    type Item = Result<(u64, RecordBatch), ManifestError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some((reader, next)) = &mut self.reader {
                match reader.next() {
                    Some(Ok(batch)) => {
                        let first = *next;
                        *next += batch.num_rows() as u64;
                        return Some(Ok((first, batch)));
                    }
                    Some(Err(error)) => {
                        let message = format!("{}: {error}", self.path.display());
                        return Some(Err(ManifestError::rows(message, None)));
                    }
                    None => self.reader = None,
                }
            }
            let (group, first) = self.groups.next()?;
            match self.reader_of(group) {
                Ok(reader) => self.reader = Some((reader, first)),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

/// Whether the statistics of a column can be compared with filters. Those of decimals have no scale, those of unsigned
/// numbers may appear negative.
fn is_told(schema: &SchemaRef, bound: &Bound) -> bool {
    let Ok(field) = schema.field_with_name(&bound.column) else {
        return false;
    };
    match bound.test {
        Test::AtLeast(_) | Test::AtMost(_) => field.data_type().is_signed_integer() || field.data_type().is_floating(),
        Test::Equals(_) => field.data_type() == &DataType::Utf8,
        Test::OneOf(_) | Test::Contains(_) | Test::IsNull => false,
    }
}

/// False where the statistics of a row group show that none of its rows passes.
fn may_pass(group: &RowGroupMetaData, bound: &Bound) -> bool {
    let column = group.columns().iter().find(|column| {
        let parts = column.column_path().parts();
        parts.len() == 1 && parts[0] == bound.column
    });
    let Some(statistics) = column.and_then(|column| column.statistics()) else {
        return true;
    };
    // Old writers compared bytes above ASCII as signed.
    if statistics.is_min_max_deprecated() {
        return true;
    }
    match &bound.test {
        Test::AtLeast(least) => numbers(statistics).is_none_or(|(_, most)| most >= *least),
        Test::AtMost(most) => numbers(statistics).is_none_or(|(least, _)| least <= *most),
        Test::Equals(text) => {
            let Statistics::ByteArray(_) = statistics else {
                return true;
            };
            let (Some(least), Some(most)) = (statistics.min_bytes_opt(), statistics.max_bytes_opt()) else {
                return true;
            };
            // Truncated statistics are still bounds.
            least <= text.as_bytes() && text.as_bytes() <= most
        }
        Test::OneOf(_) | Test::Contains(_) | Test::IsNull => true,
    }
}

/// The least and the largest value.
fn numbers(statistics: &Statistics) -> Option<(f64, f64)> {
    let (least, most) = match statistics {
        Statistics::Int32(values) => (f64::from(*values.min_opt()?), f64::from(*values.max_opt()?)),
        Statistics::Int64(values) => (*values.min_opt()? as f64, *values.max_opt()? as f64),
        Statistics::Float(values) => (f64::from(*values.min_opt()?), f64::from(*values.max_opt()?)),
        Statistics::Double(values) => (*values.min_opt()?, *values.max_opt()?),
        _ => return None,
    };
    (least.is_finite() && most.is_finite() && least <= most).then_some((least, most))
}
