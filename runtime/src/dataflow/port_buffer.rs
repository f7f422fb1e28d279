//! Buffers the rows of a port that is to be stored.

use arrow::array::{Array, RecordBatch};
use arrow::datatypes::{DataType, SchemaRef};

use flow_base::error::StageError;
use flow_base::row_number::{ROW, row_numbers};
use flow_store::{ArtifactWriter, DataFileWriter, ROW_GROUP, StoreError};

/// The rows of one port of one partition. As long as they arrive in the order of `_row`, each full row group is written
/// at once; after a row out of order, all are read back into memory.
#[derive(Default)]
pub(crate) struct PortBuffer {
    /// Where row groups are written; none in tests of bodies.
    writer: Option<ArtifactWriter>,
    batches: Vec<RecordBatch>,
    /// Rows and bytes that are in memory.
    rows: usize,
    bytes: usize,
    file: Option<DataFileWriter>,
    last: u32,
    disordered: bool,
}

/// Why rows cannot be kept.
#[derive(Debug)]
pub(crate) enum KeepError {
    /// The stage gave what does not fit.
    Stage(StageError),
    Store(StoreError),
}

impl From<StageError> for KeepError {
    fn from(error: StageError) -> Self {
        KeepError::Stage(error)
    }
}

impl From<StoreError> for KeepError {
    fn from(error: StoreError) -> Self {
        KeepError::Store(error)
    }
}

impl From<KeepError> for StageError {
    fn from(error: KeepError) -> Self {
        match error {
            KeepError::Stage(error) => error,
            KeepError::Store(error) => error.into(),
        }
    }
}

impl PortBuffer {
    pub fn new(writer: Option<&ArtifactWriter>) -> Self {
        PortBuffer {
            writer: writer.cloned(),
            ..PortBuffer::default()
        }
    }

    /// Takes rows with the columns of `schema`.
    pub fn push(&mut self, schema: &SchemaRef, batch: RecordBatch) -> Result<(), KeepError> {
        if !self.disordered && !follows(schema, &batch, &mut self.last)? {
            self.disordered = true;
            if let Some(file) = self.file.take() {
                self.batches = file.read_back()?;
                self.rows = self.batches.iter().map(RecordBatch::num_rows).sum();
                self.bytes = self.batches.iter().map(bytes_of).sum();
            }
        }
        let (rows, bytes) = (batch.num_rows(), bytes_of(&batch));
        if let Some(file) = &mut self.file {
            self.bytes = bytes + if file.push(batch)? { 0 } else { self.bytes };
            return Ok(());
        }
        self.batches.push(batch);
        self.rows += rows;
        self.bytes += bytes;
        if let (Some(writer), false, true) = (&self.writer, self.disordered, self.rows > ROW_GROUP) {
            let mut file = writer.begin(schema)?;
            for batch in self.batches.drain(..) {
                file.push(batch)?;
            }
            self.file = Some(file);
            (self.rows, self.bytes) = (0, bytes);
        }
        Ok(())
    }

    /// Bytes of memory that they take.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The file with all rows if one was begun, otherwise the rows.
    pub fn into_parts(self) -> (Option<DataFileWriter>, Vec<RecordBatch>) {
        (self.file, self.batches)
    }
}

/// Whether the rows of `batch` are in order and come after `last`, which becomes the last of them. Rows without the
/// column `_row` are always in order.
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
            // Slices share their data buffers with other arrays.
            DataType::Utf8View | DataType::BinaryView => whole,
            _ => column
                .to_data()
                .get_slice_memory_size()
                .map_or(whole, |slice| slice.min(whole)),
        }
    };
    batch.columns().iter().map(|column| of_column(column.as_ref())).sum()
}

#[cfg(test)]
mod tests {
    use flow_storage::Storage;
    use std::sync::Arc;

    use arrow::array::{ArrayRef, StringArray, UInt32Array};
    use arrow::datatypes::{Field, Schema};

    use super::*;
    use flow_base::digest::Digest;
    use flow_base::reject::Reject;
    use flow_store::row_order::in_row_order;
    use flow_store::{Access, Counts, PortRows, Store};

    fn batches(rows: u32) -> Vec<RecordBatch> {
        let schema = Arc::new(Schema::new(vec![
            Field::new(ROW, DataType::UInt32, false),
            Field::new("text", DataType::Utf8, false),
        ]));
        let numbers: Vec<u32> = (0..rows).collect();
        let batch = |numbers: &[u32]| {
            let texts = numbers
                .iter()
                .map(|row| format!("{:x}", row.wrapping_mul(2_654_435_761)));
            let columns: Vec<ArrayRef> = vec![
                Arc::new(UInt32Array::from(numbers.to_vec())),
                Arc::new(StringArray::from_iter_values(texts)),
            ];
            RecordBatch::try_new(schema.clone(), columns).unwrap()
        };
        numbers.chunks(7_000).map(batch).collect()
    }

    /// Rows written as they arrive, read back after a row out of order, or written at the end give the same file.
    #[test]
    fn what_is_written_as_it_comes_has_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let run_id = "test".to_string();
        let store = Store::open(&Storage::default(), dir.path(), Access::Run { run_id }).unwrap();
        let recipe = Digest::of(b"recipe");
        let writer = store.writer(&recipe, &serde_json::Value::Null).unwrap();
        for rows in [10, ROW_GROUP as u32, ROW_GROUP as u32 + 1, 150_000] {
            let in_order = batches(rows);
            let schema = in_order[0].schema();
            let mut late = in_order.clone();
            let last = late.len() - 1;
            late.swap(last, last / 2);
            let mut written = Vec::new();
            for (batches, writer_of, streams) in [
                (in_order.clone(), Some(&writer), rows > ROW_GROUP as u32),
                (late.clone(), Some(&writer), false),
                (in_order, None, false),
                (late, None, false),
            ] {
                let mut kept = PortBuffer::new(writer_of);
                for batch in batches {
                    kept.push(&schema, batch).unwrap();
                }
                let (file, batches) = kept.into_parts();
                assert_eq!(file.is_some(), streams && rows > 7_000, "{rows} rows");
                let mut port = PortRows::new("rows", schema.clone(), in_row_order(&schema, batches).unwrap());
                port.file = file;
                let pending = writer
                    .write_partition(
                        &"p".into(),
                        Digest::of(b"key"),
                        Vec::new(),
                        vec![port],
                        Vec::<Reject>::new(),
                        Counts::default(),
                    )
                    .unwrap();
                let port = &pending.record().unwrap().ports["rows"];
                assert_eq!(port.rows, u64::from(rows));
                written.push((port.digest, port.bytes));
            }
            assert!(written.iter().all(|one| *one == written[0]), "{rows} rows: {written:?}");
        }
        // What was not committed is gone.
        let data = dir.path().join("artifacts").join(recipe.short()).join("data");
        assert_eq!(std::fs::read_dir(data).unwrap().count(), 0);
    }
}
