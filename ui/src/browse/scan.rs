//! A DataFusion table over a [`RowSet`], which reads part after part until a deadline.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, RecordBatch, UInt32Array, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::error::DataFusionError;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use flow_manifest::ManifestError;

use super::condition::Bound;
use super::row_set::{PlacedBatches, RowSet, too_slow};

/// The columns with the part of a row, and its position in it. Names that no file's column has.
pub const PART: &str = "\u{1}part";
pub const PLACE: &str = "\u{1}place";

/// Chosen columns of the rows, with [`PART`] and [`PLACE`] behind them.
pub struct Scan {
    set: RowSet,
    columns: Vec<usize>,
    bounds: Vec<Bound>,
    deadline: Instant,
    schema: SchemaRef,
}

impl Scan {
    pub fn new(
        set: &RowSet,
        columns: Vec<usize>,
        bounds: Vec<Bound>,
        deadline: Instant,
    ) -> Result<Scan, ManifestError> {
        let chosen = set.schema().project(&columns)?;
        let placed = [(PART, DataType::UInt32), (PLACE, DataType::UInt64)];
        let placed = placed.map(|(name, data_type)| Arc::new(Field::new(name, data_type, true)));
        let fields: Vec<Arc<Field>> = chosen.fields().iter().cloned().chain(placed).collect();
        Ok(Scan {
            set: set.clone(),
            columns,
            bounds,
            deadline,
            schema: Arc::new(Schema::new(fields)),
        })
    }
}

impl fmt::Debug for Scan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scan")
            .field("schema", &self.schema)
            .finish_non_exhaustive()
    }
}

impl PartitionStream for Scan {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _context: Arc<TaskContext>) -> SendableRecordBatchStream {
        let rows = Rows {
            set: self.set.clone(),
            columns: self.columns.clone(),
            bounds: self.bounds.clone(),
            deadline: self.deadline,
            schema: Arc::clone(&self.schema),
            part: 0,
            batches: None,
        };
        let batches = rows.map(|batch| batch.map_err(|error| DataFusionError::External(Box::new(error))));
        Box::pin(RecordBatchStreamAdapter::new(
            Arc::clone(&self.schema),
            futures::stream::iter(batches),
        ))
    }
}

struct Rows {
    set: RowSet,
    columns: Vec<usize>,
    bounds: Vec<Bound>,
    deadline: Instant,
    schema: SchemaRef,
    part: usize,
    batches: Option<PlacedBatches>,
}

impl Rows {
    fn next_batch(&mut self) -> Result<Option<RecordBatch>, ManifestError> {
        loop {
            if Instant::now() > self.deadline {
                return Err(too_slow());
            }
            let Some(batches) = &mut self.batches else {
                if self.part == self.set.parts() {
                    return Ok(None);
                }
                if !self.set.may_pass(self.part, &self.bounds) {
                    self.part += 1;
                    continue;
                }
                self.batches = Some(self.set.batches(self.part, &self.columns, &self.bounds)?);
                continue;
            };
            let Some(placed) = batches.next() else {
                self.batches = None;
                self.part += 1;
                continue;
            };
            let (first, batch) = placed?;
            let rows = batch.num_rows();
            let part = u32::try_from(self.part).unwrap_or(u32::MAX);
            let mut columns: Vec<ArrayRef> = batch.columns().to_vec();
            columns.push(Arc::new(UInt32Array::from_value(part, rows)));
            columns.push(Arc::new(UInt64Array::from_iter_values(first..first + rows as u64)));
            return Ok(Some(RecordBatch::try_new(Arc::clone(&self.schema), columns)?));
        }
    }
}

impl Iterator for Rows {
    type Item = Result<RecordBatch, ManifestError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_batch().transpose()
    }
}
