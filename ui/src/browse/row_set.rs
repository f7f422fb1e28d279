//! Rows in parts, read part by part.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, RecordBatch, StringArray, new_null_array};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_kind::{Artifact, Partition, RejectSet, StageError};
use flow_manifest::ManifestError;

use super::condition::{Bound, Test};
use super::{lines, parquet_part};

/// The column with the partition of a row of an artifact.
pub const PARTITION: &str = "partition";

/// Rows per batch when one row is looked up and all before it have to be read.
const ROW_TIME: Duration = Duration::from_secs(30);

/// Rows in parts: partitions of an artifact, or files. Cheap to clone.
#[derive(Clone)]
pub struct RowSet {
    inner: Arc<Inner>,
}

struct Inner {
    schema: SchemaRef,
    parts: Vec<Part>,
}

struct Part {
    name: String,
    /// Where that is known without reading the rows.
    rows: Option<u64>,
    /// Columns of which every row of the part has the same text.
    constants: Vec<(&'static str, String)>,
    source: PartSource,
}

enum PartSource {
    Artifact(Artifact, Partition),
    /// Of one partition of one stage.
    Rejects(RejectSet),
    Parquet(PathBuf),
    Lines(PathBuf),
}

/// Batches with the place in the part of their first row.
pub type PlacedBatches = Box<dyn Iterator<Item = Result<(u64, RecordBatch), ManifestError>> + Send>;

impl Part {
    /// False where a constant column shows that no row of the part passes.
    fn may_pass(&self, bounds: &[Bound]) -> bool {
        let of = |column: &str| self.constants.iter().find(|(name, _)| *name == column);
        bounds.iter().all(|bound| match (of(&bound.column), &bound.test) {
            (Some((_, text)), Test::Equals(wanted)) => text == wanted,
            (Some((_, text)), Test::OneOf(wanted)) => wanted.contains(text),
            _ => true,
        })
    }
}

impl RowSet {
    /// The rows of an artifact, with the column `partition` before theirs.
    pub fn of_artifact(artifact: &Artifact) -> RowSet {
        let parts = artifact.partitions().map(|partition| Part {
            name: partition.to_string(),
            rows: artifact.rows_of(partition),
            constants: vec![(PARTITION, partition.to_string())],
            source: PartSource::Artifact(artifact.clone(), partition.clone()),
        });
        RowSet::new(artifact.schema(), parts.collect())
    }

    /// Rejects, each set those of one partition of one stage, with the columns `stage` and `partition` before theirs.
    ///
    /// # Errors
    /// If the first rejects cannot be read.
    pub fn of_rejects(sets: Vec<(String, Partition, RejectSet)>) -> Result<RowSet, ManifestError> {
        let first = sets.iter().find_map(|(_, _, set)| set.batches().next());
        let schema = match first {
            Some(batch) => batch.map_err(unreadable)?.2.schema(),
            None => Arc::new(Schema::empty()),
        };
        let parts = sets.into_iter().map(|(stage, partition, set)| Part {
            name: format!("{stage}: {partition}"),
            rows: Some(set.rows()),
            constants: vec![("stage", stage), (PARTITION, partition.to_string())],
            source: PartSource::Rejects(set),
        });
        Ok(RowSet::new(&schema, parts.collect()))
    }

    /// The rows of Parquet files or files of JSON lines. The first file determines the columns; those that another file
    /// lacks are null there.
    ///
    /// # Errors
    /// If one of the files cannot be read, or is neither; it is named.
    pub fn of_files(paths: &[PathBuf]) -> Result<RowSet, ManifestError> {
        let mut schema = None;
        let mut parts = Vec::with_capacity(paths.len());
        for path in paths {
            let is_parquet = parquet_part::is_parquet(path)?;
            let (of_file, rows) = if is_parquet {
                let (schema, rows) = parquet_part::schema(path)?;
                (schema, Some(rows))
            } else {
                (lines::schema(path)?, None)
            };
            schema.get_or_insert(of_file);
            parts.push(Part {
                name: path.display().to_string(),
                rows,
                constants: Vec::new(),
                source: if is_parquet {
                    PartSource::Parquet(path.clone())
                } else {
                    PartSource::Lines(path.clone())
                },
            });
        }
        Ok(RowSet::new(&schema.unwrap_or_else(|| Arc::new(Schema::empty())), parts))
    }

    fn new(schema: &SchemaRef, mut parts: Vec<Part>) -> RowSet {
        for part in &mut parts {
            // A column of the rows takes precedence over a constant of this name.
            part.constants
                .retain(|(name, _)| schema.column_with_name(name).is_none());
        }
        let constants = parts.first().map(|part| part.constants.as_slice()).unwrap_or_default();
        let before = constants
            .iter()
            .map(|(name, _)| Field::new(*name, DataType::Utf8, true));
        let fields: Vec<Field> = before
            .chain(
                schema
                    .fields()
                    .iter()
                    .map(|field| field.as_ref().clone().with_nullable(true)),
            )
            .collect();
        RowSet {
            inner: Arc::new(Inner {
                schema: Arc::new(Schema::new(fields)),
                parts,
            }),
        }
    }

    /// All columns; any may be null.
    pub fn schema(&self) -> &SchemaRef {
        &self.inner.schema
    }

    /// How many rows there are, where that is known without reading them.
    pub fn rows(&self) -> Option<u64> {
        self.inner.parts.iter().map(|part| part.rows).sum()
    }

    /// How many rows the part at `part` has, where that is known without reading them.
    pub fn rows_of_part(&self, part: usize) -> Option<u64> {
        self.inner.parts.get(part)?.rows
    }

    /// The row at `row` of the part at `part`, with all columns; none if there is no such row.
    ///
    /// # Errors
    /// If the part cannot be read.
    pub fn row(&self, part: usize, row: u64) -> Result<Option<RecordBatch>, ManifestError> {
        let Some(source) = self.inner.parts.get(part).map(|part| &part.source) else {
            return Ok(None);
        };
        let all: Vec<usize> = (0..self.schema().fields().len()).collect();
        if let PartSource::Parquet(path) = source {
            let found = parquet_part::row(path, row)?;
            return found.map(|batch| self.fitted(part, &batch, &all)).transpose();
        }
        let deadline = Instant::now() + ROW_TIME;
        for placed in self.batches(part, &all, &[])? {
            let (first, batch) = placed?;
            if Instant::now() > deadline {
                return Err(too_slow());
            }
            if row < first + batch.num_rows() as u64 {
                let at = usize::try_from(row.saturating_sub(first)).unwrap_or(usize::MAX);
                return Ok(Some(batch.slice(at, 1)));
            }
        }
        Ok(None)
    }

    /// How many parts there are.
    pub fn parts(&self) -> usize {
        self.inner.parts.len()
    }

    /// False where no row of the part at `part` passes, as one of its columns has another value in all of them.
    pub fn may_pass(&self, part: usize, bounds: &[Bound]) -> bool {
        self.inner.parts[part].may_pass(bounds)
    }

    /// The batches of a part, of these columns of the schema. Rows that do not pass `bounds` may be left out.
    pub fn batches(&self, part: usize, columns: &[usize], bounds: &[Bound]) -> Result<PlacedBatches, ManifestError> {
        let named: Vec<&str> = columns
            .iter()
            .map(|&column| self.schema().field(column).name().as_str())
            .collect();
        let set = self.clone();
        let columns = columns.to_vec();
        let fit = move |batch: &RecordBatch| set.fitted(part, batch, &columns);
        let mut next = 0u64;
        let mut numbered = move |batch: RecordBatch| {
            let first = next;
            next += batch.num_rows() as u64;
            (first, batch)
        };
        Ok(match &self.inner.parts[part].source {
            PartSource::Artifact(artifact, partition) => {
                let has = |name: &&str| artifact.schema().column_with_name(name).is_some();
                let mut own: Vec<&str> = named.iter().copied().filter(has).collect();
                if own.is_empty() {
                    // At least one column is read: a batch without columns would lose its number of rows.
                    own.extend(artifact.schema().fields().first().map(|field| field.name().as_str()));
                }
                let batches = artifact.read(partition, Some(&own)).map_err(unreadable)?;
                Box::new(batches.map(move |batch| {
                    let (first, batch) = numbered(batch.map_err(unreadable)?);
                    Ok((first, fit(&batch)?))
                }))
            }
            PartSource::Rejects(rejects) => {
                // Those of one partition: as many as a run held at once, too.
                let batches: Vec<_> = rejects
                    .batches()
                    .map(|batch| batch.map(|(_, _, batch)| batch))
                    .collect();
                Box::new(batches.into_iter().map(move |batch| {
                    let (first, batch) = numbered(batch.map_err(unreadable)?);
                    Ok((first, fit(&batch)?))
                }))
            }
            PartSource::Parquet(path) => {
                let batches = parquet_part::batches(path, &named, bounds)?;
                Box::new(batches.map(move |placed| {
                    let (first, batch) = placed?;
                    Ok((first, fit(&batch)?))
                }))
            }
            PartSource::Lines(path) => {
                let batches = lines::batches(path, Arc::clone(self.schema()))?;
                Box::new(batches.map(move |batch| {
                    let (first, batch) = numbered(batch?);
                    Ok((first, fit(&batch)?))
                }))
            }
        })
    }

    /// A batch of a part with these columns of the schema: constants are put in, and what the part lacks is null.
    fn fitted(&self, part: usize, batch: &RecordBatch, columns: &[usize]) -> Result<RecordBatch, ManifestError> {
        let part = &self.inner.parts[part];
        let rows = batch.num_rows();
        let mut arrays: Vec<ArrayRef> = Vec::with_capacity(columns.len());
        for &column in columns {
            let field = self.schema().field(column);
            let constant = part.constants.iter().find(|(name, _)| name == field.name());
            arrays.push(match (batch.column_by_name(field.name()), constant) {
                (Some(array), _) if array.data_type() == field.data_type() => Arc::clone(array),
                (Some(array), _) => cast(array, field.data_type()).map_err(|error| {
                    ManifestError::rows(format!("{}: the column `{}`: {error}", part.name, field.name()), None)
                })?,
                (None, Some((_, text))) => Arc::new(StringArray::from_iter_values(std::iter::repeat_n(text, rows))),
                (None, None) => new_null_array(field.data_type(), rows),
            });
        }
        let options = arrow::array::RecordBatchOptions::new().with_row_count(Some(rows));
        let schema = Arc::new(self.schema().project(columns)?);
        Ok(RecordBatch::try_new_with_options(schema, arrays, &options)?)
    }
}

fn unreadable(error: StageError) -> ManifestError {
    ManifestError::rows(error.to_string(), None)
}

/// The message for a query past its deadline.
pub fn too_slow() -> ManifestError {
    ManifestError::rows(
        "there are too many rows to answer this in time: narrow the filters",
        None,
    )
}
