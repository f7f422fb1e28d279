//! What one stage made of one partition, until the partition is complete.

use std::collections::BTreeMap;

use arrow::array::{RecordBatch, RecordBatchOptions};

use super::in_flight::MemoryReservation;
use super::port_buffer::{KeepError, PortBuffer};
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_base::reject::packed::PackedRejects;
use flow_kind::kind::{Conservation, Port};
use flow_kind::out::Out;
use flow_store::row_order::RowNumbers;
use flow_store::{ArtifactWriter, RowRange};

/// Batches of the ports that are kept, rejects and counts of one (stage, partition).
#[derive(Default)]
pub(crate) struct PartitionOutput {
    /// Rows of the first streamed input.
    pub rows_in: u64,
    /// Rows given on all ports.
    pub rows_out: u64,
    pub read: u64,
    pub merged: u64,
    /// By port; none for ports that are not kept.
    pub buffers: Vec<Option<PortBuffer>>,
    /// By port, for stages that pass rows of their input on unchanged: the ranges of these rows in the input's
    /// partition.
    pub selected: Vec<Option<Vec<RowRange>>>,
    pub rejects: PackedRejects,
    /// By port.
    numbers: Vec<RowNumbers>,
    /// Says how much memory all of it takes.
    reserved: Option<MemoryReservation>,
}

impl PartitionOutput {
    /// `keep` says of each port whether it is kept; with a writer, row groups are written as they come.
    pub fn new(keep: &[bool], writer: Option<&ArtifactWriter>, reserved: Option<MemoryReservation>) -> Self {
        PartitionOutput {
            buffers: keep.iter().map(|keep| keep.then(|| PortBuffer::new(writer))).collect(),
            selected: vec![None; keep.len()],
            numbers: keep.iter().map(|_| RowNumbers::default()).collect(),
            reserved,
            ..PartitionOutput::default()
        }
    }

    fn resize_reservation(&mut self) {
        if let Some(reserved) = &mut self.reserved {
            let kept: usize = self.buffers.iter().flatten().map(PortBuffer::bytes).sum();
            reserved.resize((kept + self.rejects.bytes()) as u64);
        }
    }

    /// Checks that rows in = rows out + rejects + merged. `source`: the stage has no input, and the rows that it read
    /// are the rows in. The reject of a whole partition accounts for all rows that are missing.
    pub fn check_conservation(&self, conservation: Conservation, source: bool) -> Result<(), StageError> {
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

    /// Checks that no two rows of a port have one number.
    pub fn check_numbers(&mut self, ports: &[Port]) -> Result<(), StageError> {
        let numbers = std::mem::take(&mut self.numbers);
        ports
            .iter()
            .zip(numbers)
            .try_for_each(|(port, numbers)| numbers.check(&port.name))
    }
}

/// Moves the output of a body from `out` to the partitions in work. `forward` takes batches for the following stages.
pub(crate) fn drain(
    out: &mut Out,
    ports: &[Port],
    in_hand: &mut BTreeMap<Partition, PartitionOutput>,
    mut forward: impl FnMut(&Partition, usize, RecordBatch),
) -> Result<(), KeepError> {
    fn place<'a>(
        in_hand: &'a mut BTreeMap<Partition, PartitionOutput>,
        partition: &Partition,
    ) -> Result<&'a mut PartitionOutput, StageError> {
        in_hand.get_mut(partition).ok_or_else(|| {
            StageError::failed(format!(
                "the stage gave something for partition {partition}, which it does not have in hand"
            ))
        })
    }
    for (partition, port, batch) in out.batches.drain(..) {
        let Some(declared) = ports.get(port) else {
            let message = format!(
                "the stage gave a batch on port number {port}, but has {} ports",
                ports.len()
            );
            return Err(StageError::failed(message).into());
        };
        let batch = fit(batch, declared)?;
        let place = place(in_hand, &partition)?;
        place.rows_out += batch.num_rows() as u64;
        if batch.num_rows() == 0 {
            continue;
        }
        if let Some(numbers) = place.numbers.get_mut(port) {
            numbers.add(&batch)?;
        }
        if let Some(Some(kept)) = place.buffers.get_mut(port) {
            kept.push(&declared.schema, batch.clone())?;
            place.resize_reservation();
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
        place.resize_reservation();
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, StringArray, UInt32Array};
    use arrow::datatypes::{DataType, Field, Schema};

    use super::*;
    use flow_base::reject::{Reject, RejectClass};
    use flow_base::row_number::ROW;

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

    fn reject(row: Option<u32>) -> Reject {
        Reject {
            row,
            id: None,
            reason: "r".into(),
            class: RejectClass::Fault,
            detail: String::new(),
            values: String::new(),
        }
    }

    #[test]
    fn conservation_names_the_counts() {
        let mut collected = PartitionOutput::new(&[true], None, None);
        collected.rows_in = 5;
        collected.rows_out = 3;
        collected.rejects = vec![reject(Some(1))].into();
        let error = collected.check_conservation(Conservation::Rows, false).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("5 in, but 3 out + 1 rejected + 0 merged = 4"),
            "{error}"
        );
        collected.merged = 1;
        collected.check_conservation(Conservation::Rows, false).unwrap();
        collected.rows_out = 4;
        assert!(collected.check_conservation(Conservation::Rows, false).is_err());
        assert!(collected.check_conservation(Conservation::NewRows, false).is_ok());
    }

    #[test]
    fn a_refused_partition_stands_for_missing_rows_but_not_for_extra_ones() {
        let mut collected = PartitionOutput::new(&[true], None, None);
        collected.read = 5;
        collected.rejects = vec![reject(None)].into();
        collected.check_conservation(Conservation::Rows, true).unwrap();
        collected.rows_out = 6;
        assert!(collected.check_conservation(Conservation::Rows, true).is_err());
    }

    #[test]
    fn a_batch_of_another_schema_is_named() {
        let port = Port::new(
            "rows",
            Arc::new(Schema::new(vec![Field::new(ROW, DataType::UInt32, false)])),
        );
        let error = fit(batch(&[1], &["a".into()]), &port).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("declares the columns _row, but the batch has _row, text"),
            "{error}"
        );
    }
}
