//! What one stage made of one partition, until the partition is complete.

use std::collections::BTreeMap;

use arrow::array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, UInt32Array};
use arrow::compute::interleave_record_batch;
use arrow::datatypes::SchemaRef;

use super::in_flight::Held;
use super::kept::KeptRows;
use crate::kind::{Conservation, Port, ROW, StageError};
use crate::out::Out;
use crate::partition::Partition;
use crate::reject::packed::PackedRejects;
use crate::store::{ArtifactWriter, ROW_GROUP, RowRange};

/// Batches of the ports that are kept, rejects and counts of one (stage, partition).
#[derive(Default)]
pub(crate) struct Collected {
    /// Rows of the first streamed input.
    pub rows_in: u64,
    /// Rows given on all ports.
    pub rows_out: u64,
    pub read: u64,
    pub merged: u64,
    /// By port; none for ports that are not kept.
    pub kept: Vec<Option<KeptRows>>,
    /// By port, where rows of the input go on as they are: ranges of their places in its partition.
    pub selected: Vec<Option<Vec<RowRange>>>,
    pub rejects: PackedRejects,
    /// Says how much memory all of it takes.
    held: Option<Held>,
}

impl Collected {
    /// `keep` says of each port whether it is kept; with a writer, row groups are written as they come.
    pub fn new(keep: &[bool], writer: Option<&ArtifactWriter>, held: Option<Held>) -> Self {
        Collected {
            kept: keep.iter().map(|keep| keep.then(|| KeptRows::new(writer))).collect(),
            selected: vec![None; keep.len()],
            held,
            ..Collected::default()
        }
    }

    fn weigh(&mut self) {
        if let Some(held) = &mut self.held {
            let kept: usize = self.kept.iter().flatten().map(KeptRows::bytes).sum();
            held.set((kept + self.rejects.bytes()) as u64);
        }
    }

    /// Checks that no row vanished or came from nowhere. `source` says that the stage has no input and
    /// counts what it reads itself. A rejected partition stands for all the rows that are missing.
    pub fn conserved(&self, conservation: Conservation, source: bool) -> Result<(), StageError> {
        if conservation == Conservation::NewRows {
            return Ok(());
        }
        let rows_in = if source { self.read } else { self.rows_in };
        let refused = self.rejects.rows();
        let accounted = self.rows_out + refused + self.merged;
        if accounted == rows_in || (self.rejects.refuses_partition() && accounted <= rows_in) {
            return Ok(());
        }
        Err(StageError::failed(format!(
            "rows do not come out even: {rows_in} in, but {} out + {refused} rejected + {} merged = {accounted}",
            self.rows_out, self.merged
        ))
        .with_help("a stage must pass on, reject or merge every row: this is a fault of the stage, not of the data"))
    }
}

/// Moves what a body put into `out` to the partitions in hand. `forward` takes batches for the stages
/// that follow.
pub(crate) fn drain(
    out: &mut Out,
    ports: &[Port],
    in_hand: &mut BTreeMap<Partition, Collected>,
    mut forward: impl FnMut(&Partition, usize, RecordBatch),
) -> Result<(), StageError> {
    fn place<'a>(
        in_hand: &'a mut BTreeMap<Partition, Collected>,
        partition: &Partition,
    ) -> Result<&'a mut Collected, StageError> {
        in_hand.get_mut(partition).ok_or_else(|| {
            StageError::failed(format!(
                "the stage gave something for partition {partition}, which it does not have in hand"
            ))
        })
    }
    for (partition, port, batch) in out.batches.drain(..) {
        let Some(declared) = ports.get(port) else {
            return Err(StageError::failed(format!(
                "the stage gave a batch on port number {port}, but has {} ports",
                ports.len()
            )));
        };
        let batch = fit(batch, declared)?;
        let place = place(in_hand, &partition)?;
        place.rows_out += batch.num_rows() as u64;
        if batch.num_rows() == 0 {
            continue;
        }
        if let Some(Some(kept)) = place.kept.get_mut(port) {
            kept.push(&declared.schema, batch.clone())?;
            place.weigh();
        }
        forward(&partition, port, batch);
    }
    for (partition, port, ranges) in out.selected.drain(..) {
        let place = place(in_hand, &partition)?;
        place.rows_out += ranges.iter().map(|(_, length)| u64::from(*length)).sum::<u64>();
        if let Some(selected) = place.selected.get_mut(port) {
            *selected = Some(ranges);
        }
    }
    for (partition, rejects) in out.rejects.drain(..) {
        let place = place(in_hand, &partition)?;
        place.rejects.append(rejects);
        place.weigh();
    }
    for (partition, rows) in out.read.drain(..) {
        place(in_hand, &partition)?.read += rows;
    }
    for (partition, rows) in out.merged.drain(..) {
        place(in_hand, &partition)?.merged += rows;
    }
    Ok(())
}

/// The batch under the schema that the port declares (nullability and metadata are the port's), or an
/// error that shows the column that differs.
fn fit(batch: RecordBatch, port: &Port) -> Result<RecordBatch, StageError> {
    if batch.schema_ref() == &port.schema {
        return Ok(batch);
    }
    let declared = port.schema.fields();
    let schema = batch.schema();
    let given = schema.fields();
    let differs = |what: String| StageError::failed(format!("port `{}`: {what}", port.name));
    if given.len() != declared.len() {
        let names = |fields: &arrow::datatypes::Fields| {
            fields
                .iter()
                .map(|field| field.name().as_str())
                .collect::<Vec<_>>()
                .join(", ")
        };
        return Err(differs(format!(
            "declares the columns {}, but the batch has {}",
            names(declared),
            names(given)
        )));
    }
    for (want, have) in declared.iter().zip(given) {
        if want.name() != have.name() || want.data_type() != have.data_type() {
            return Err(differs(format!(
                "declares the column `{}: {}`, but the batch has `{}: {}`",
                want.name(),
                want.data_type(),
                have.name(),
                have.data_type()
            )));
        }
    }
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(port.schema.clone(), batch.columns().to_vec(), &options)
        .map_err(|error| differs(error.to_string()))
}

/// All rows by `_row` where the schema has it (rows of one number stay in the order in which they came),
/// else in the order in which they came. Copies only if the rows do not come in order already.
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
    // Piece by piece: the texts of a whole partition may be more than one array can hold.
    let piece = |rows: &[(u32, usize, usize)]| {
        let places: Vec<(usize, usize)> = rows.iter().map(|(_, which, at)| (*which, *at)).collect();
        Ok(interleave_record_batch(&batches, &places)?)
    };
    order.chunks(ROW_GROUP).map(piece).collect()
}

/// `_row` as numbers, or what is wrong with it.
pub(super) fn row_numbers(column: &ArrayRef) -> Result<&UInt32Array, StageError> {
    let rows = column
        .as_any()
        .downcast_ref::<UInt32Array>()
        .ok_or_else(|| StageError::failed(format!("column `{ROW}` is {}, it must be UInt32", column.data_type())))?;
    if rows.null_count() > 0 {
        return Err(StageError::failed(format!(
            "column `{ROW}` has nulls; every row carries its number"
        )));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::StringArray;
    use arrow::compute::concat_batches;
    use arrow::datatypes::{DataType, Field, Schema};
    use proptest::prelude::*;

    use super::*;
    use crate::reject::{Reject, RejectClass};

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

    fn reject(row: Option<u32>) -> Reject {
        Reject {
            row,
            segment_id: None,
            reason: "r".into(),
            class: RejectClass::Fault,
            detail: String::new(),
            values: String::new(),
        }
    }

    #[test]
    fn conservation_names_the_counts() {
        let mut collected = Collected::new(&[true], None, None);
        collected.rows_in = 5;
        collected.rows_out = 3;
        collected.rejects = vec![reject(Some(1))].into();
        let error = collected.conserved(Conservation::Rows, false).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("5 in, but 3 out + 1 rejected + 0 merged = 4"),
            "{error}"
        );
        collected.merged = 1;
        collected.conserved(Conservation::Rows, false).unwrap();
        collected.rows_out = 4;
        assert!(collected.conserved(Conservation::Rows, false).is_err());
        assert!(collected.conserved(Conservation::NewRows, false).is_ok());
    }

    #[test]
    fn a_refused_partition_stands_for_missing_rows_but_not_for_extra_ones() {
        let mut collected = Collected::new(&[true], None, None);
        collected.read = 5;
        collected.rejects = vec![reject(None)].into();
        collected.conserved(Conservation::Rows, true).unwrap();
        collected.rows_out = 6;
        assert!(collected.conserved(Conservation::Rows, true).is_err());
    }

    #[test]
    fn a_batch_of_another_schema_is_named() {
        let port = Port {
            name: "rows".into(),
            schema: Arc::new(Schema::new(vec![Field::new(ROW, DataType::UInt32, false)])),
        };
        let error = fit(batch(&[1], &["a".into()]), &port).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("declares the columns _row, but the batch has _row, text"),
            "{error}"
        );
    }
}
