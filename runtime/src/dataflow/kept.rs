//! Rows of a port that is to be stored, while they come.

use arrow::array::{Array, RecordBatch};
use arrow::datatypes::{DataType, SchemaRef};

use super::collected::row_numbers;
use crate::kind::{ROW, StageError};
use crate::store::{ArtifactWriter, BegunFile, ROW_GROUP};

/// The rows of one port of one partition. As long as they come in the order of `_row`, what fills a row group is written
/// at once; a row that comes late brings all of them back into memory.
#[derive(Default)]
pub(crate) struct KeptRows {
    /// Where row groups are written; none in tests of bodies.
    writer: Option<ArtifactWriter>,
    batches: Vec<RecordBatch>,
    /// Rows and bytes that are in memory.
    rows: usize,
    bytes: usize,
    begun: Option<BegunFile>,
    last: u32,
    disordered: bool,
}

impl KeptRows {
    pub fn new(writer: Option<&ArtifactWriter>) -> Self {
        KeptRows {
            writer: writer.cloned(),
            ..KeptRows::default()
        }
    }

    /// Takes rows with the columns of `schema`.
    pub fn push(&mut self, schema: &SchemaRef, batch: RecordBatch) -> Result<(), StageError> {
        if !self.disordered && !follows(schema, &batch, &mut self.last)? {
            self.disordered = true;
            if let Some(begun) = self.begun.take() {
                self.batches = begun.read_back()?;
                self.rows = self.batches.iter().map(RecordBatch::num_rows).sum();
                self.bytes = self.batches.iter().map(bytes_of).sum();
            }
        }
        let (rows, bytes) = (batch.num_rows(), bytes_of(&batch));
        if let Some(begun) = &mut self.begun {
            self.bytes = bytes + if begun.push(batch)? { 0 } else { self.bytes };
            return Ok(());
        }
        self.batches.push(batch);
        self.rows += rows;
        self.bytes += bytes;
        if let (Some(writer), false, true) = (&self.writer, self.disordered, self.rows > ROW_GROUP) {
            let mut begun = writer.begin(schema)?;
            for batch in self.batches.drain(..) {
                begun.push(batch)?;
            }
            self.begun = Some(begun);
            (self.rows, self.bytes) = (0, bytes);
        }
        Ok(())
    }

    /// Bytes of memory that they take.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The file with all rows if one was begun, otherwise the rows.
    pub fn into_parts(self) -> (Option<BegunFile>, Vec<RecordBatch>) {
        (self.begun, self.batches)
    }
}

/// Whether the rows of `batch` are in order and come after `last`, which becomes the last of them. Without `_row`, the
/// order is that in which they come.
fn follows(schema: &SchemaRef, batch: &RecordBatch, last: &mut u32) -> Result<bool, StageError> {
    let Ok(position) = schema.index_of(ROW) else {
        return Ok(true);
    };
    let numbers = row_numbers(batch.column(position))?.values();
    let follows = numbers.first().is_none_or(|first| *last <= *first) && numbers.is_sorted();
    *last = numbers.last().copied().unwrap_or(*last);
    Ok(follows)
}

/// Bytes of a batch's rows; of a slice, those of the slice.
pub(crate) fn bytes_of(batch: &RecordBatch) -> usize {
    let of_column = |column: &dyn Array| {
        let whole = column.get_array_memory_size();
        match column.data_type() {
            // Their slices share texts with others.
            DataType::Utf8View | DataType::BinaryView => whole,
            _ => column
                .to_data()
                .get_slice_memory_size()
                .map_or(whole, |slice| slice.min(whole)),
        }
    };
    batch.columns().iter().map(|column| of_column(column.as_ref())).sum()
}
