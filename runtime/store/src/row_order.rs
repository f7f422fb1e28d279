//! Sorts the rows of a partition.

use arrow::array::RecordBatch;
use arrow::compute::interleave_record_batch;
use arrow::datatypes::SchemaRef;

use crate::ROW_GROUP;
use flow_base::error::StageError;
use flow_base::row_number::{ROW, row_numbers};

/// All rows, sorted by `_row` where the schema has it (a stable sort), otherwise in the order of arrival. Copies only
/// if the rows are not in order already.
pub fn in_row_order(schema: &SchemaRef, batches: Vec<RecordBatch>) -> Result<Vec<RecordBatch>, StageError> {
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

/// What to do about rows of one number.
const DOUBLED_HELP: &str = "rows of a partition are known by their numbers: a stage that makes new rows has to number \
    them anew (`sql`: with `rows: new`, select no `_row`), or to give each row once (`sql`: SELECT DISTINCT)";

/// The numbers that rows have, as runs of successive ones.
#[derive(Default)]
pub struct RowNumbers {
    /// First and last of each, in the order in which they came.
    runs: Vec<(u32, u32)>,
}

impl RowNumbers {
    /// Adds the numbers of a batch; one without the column `_row` has none.
    pub fn add(&mut self, batch: &RecordBatch) -> Result<(), StageError> {
        let Some(column) = batch.column_by_name(ROW) else {
            return Ok(());
        };
        for &number in row_numbers(column)?.values() {
            match self.runs.last_mut() {
                Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
                _ => self.runs.push((number, number)),
            }
        }
        Ok(())
    }

    /// Checks that no two rows have one number: decisions about rows, and their rejects, find them by it.
    pub fn check(self, port: &str) -> Result<(), StageError> {
        match self.doubled() {
            None => Ok(()),
            Some(number) => Err(StageError::Failed {
                message: format!("port `{port}`: two rows have the number {number} in `{ROW}`"),
                row: Some(number),
                help: Some(DOUBLED_HELP.into()),
            }),
        }
    }

    /// The least number that two rows have.
    fn doubled(mut self) -> Option<u32> {
        if !self.runs.is_sorted() {
            self.runs.sort_unstable();
        }
        let mut runs = self.runs.into_iter();
        let (_, mut last) = runs.next()?;
        for (first, end) in runs {
            if first <= last {
                return Some(first);
            }
            last = end;
        }
        None
    }
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
        #[test]
        fn a_number_that_comes_twice_is_found(rows in prop::collection::vec(prop_oneof![0u32..40, Just(u32::MAX)], 0..30), cut in 1usize..9) {
            let texts = vec![String::new(); rows.len()];
            let mut numbers = RowNumbers::default();
            for (rows, texts) in rows.chunks(cut).zip(texts.chunks(cut)) {
                numbers.add(&batch(rows, texts)).unwrap();
            }
            let mut sorted = rows.clone();
            sorted.sort_unstable();
            let doubled = sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
            prop_assert_eq!(numbers.doubled(), doubled);
        }

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
