//! Sorts the rows of a partition.

use arrow::array::RecordBatch;
use arrow::compute::interleave_record_batch;
use arrow::datatypes::SchemaRef;

use crate::error::StageError;
use crate::row_number::{ROW, row_numbers};
use crate::store::ROW_GROUP;

/// All rows, sorted by `_row` where the schema has it (a stable sort), otherwise in the order of arrival. Copies only
/// if the rows are not in order already.
pub(crate) fn in_row_order(schema: &SchemaRef, batches: Vec<RecordBatch>) -> Result<Vec<RecordBatch>, StageError> {
    let Ok(position) = schema.index_of(ROW) else {
        return Ok(batches);
    };
    let mut last = 0;
    let mut sorted = true;
    for batch in &batches {
        let numbers = row_numbers(batch.column(position))?.values();
        sorted &= numbers.first().is_none_or(|first| last <= *first) && numbers.is_sorted();
        last = numbers.last().copied().unwrap_or(last);
    }
    if sorted {
        return Ok(batches);
    }
    // Row, batch, place in the batch.
    let mut order: Vec<(u32, usize, usize)> = Vec::new();
    for (which, batch) in batches.iter().enumerate() {
        let numbers = row_numbers(batch.column(position))?.values();
        order.extend(numbers.iter().enumerate().map(|(at, row)| (*row, which, at)));
    }
    order.sort_unstable();
    let batches: Vec<&RecordBatch> = batches.iter().collect();
    // In chunks: the texts of a whole partition may exceed what one array can hold.
    let piece = |rows: &[(u32, usize, usize)]| {
        let places: Vec<(usize, usize)> = rows.iter().map(|(_, which, at)| (*which, *at)).collect();
        Ok(interleave_record_batch(&batches, &places)?)
    };
    order.chunks(ROW_GROUP).map(piece).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, StringArray, UInt32Array};
    use arrow::compute::concat_batches;
    use arrow::datatypes::{DataType, Field, Schema};
    use proptest::prelude::*;

    use super::*;

    fn batch(rows: &[u32], texts: &[String]) -> RecordBatch {
        let schema = Schema::new(vec![
            Field::new(ROW, DataType::UInt32, false),
            Field::new("text", DataType::Utf8, true),
        ]);
        let columns: Vec<ArrayRef> = vec![
            Arc::new(UInt32Array::from(rows.to_vec())),
            Arc::new(StringArray::from(texts.to_vec())),
        ];
        RecordBatch::try_new(Arc::new(schema), columns).unwrap()
    }

    proptest! {
        /// However the rows are cut into batches, and in whatever order the batches come, the same rows
        /// give the same batch.
        #[test]
        fn row_order_does_not_depend_on_batches(mut rows in prop::collection::hash_set(0u32..10_000, 0..60), cut in 1usize..9) {
            let rows: Vec<u32> = rows.drain().collect();
            let texts: Vec<String> = rows.iter().map(|row| format!("t{row}")).collect();
            let mut sorted = rows.clone();
            sorted.sort_unstable();
            let want = batch(&sorted, &sorted.iter().map(|row| format!("t{row}")).collect::<Vec<_>>());
            let pieces: Vec<RecordBatch> =
                rows.chunks(cut).zip(texts.chunks(cut)).map(|(rows, texts)| batch(rows, texts)).collect();
            let ordered = in_row_order(&want.schema(), pieces).unwrap();
            prop_assert_eq!(concat_batches(&want.schema(), &ordered).unwrap(), want);
        }
    }
}
