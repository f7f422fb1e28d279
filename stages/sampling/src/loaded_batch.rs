//! The rows that `sampling.load` gives: one for each utterance of a micro-batch.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, Float32Builder, Float64Array, Int32Array, Int64Array, ListBuilder, RecordBatch, StringArray, UInt32Array,
};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_kind::{ROW, StageError};

use crate::curriculum::Stage;
use crate::dataset::Utterance;

/// An utterance with its samples, and the rank and micro-batch that it belongs to.
pub(crate) type Loaded<'a> = (u32, u32, Utterance<'a>, Vec<f32>);

/// Schema of the port `batches`.
pub fn loaded_schema() -> SchemaRef {
    let field = |name: &str, data_type| Field::new(name, data_type, false);
    Arc::new(Schema::new(vec![
        field(ROW, DataType::UInt32),
        field("rank", DataType::Int32),
        field("micro", DataType::Int32),
        field("epoch", DataType::Int32),
        field("segment_id", DataType::Utf8),
        field("lang", DataType::Utf8),
        field("duration", DataType::Float64),
        field("text", DataType::Utf8),
        field(
            "signal",
            DataType::List(Arc::new(Field::new_list_field(DataType::Float32, true))),
        ),
    ]))
}

/// Schema of the port `batches` with a curriculum.
pub fn staged_schema() -> SchemaRef {
    let mut fields = loaded_schema().fields().to_vec();
    fields.push(Arc::new(Field::new("stage", DataType::Utf8, false)));
    fields.push(Arc::new(Field::new("stage_end", DataType::Int64, false)));
    Arc::new(Schema::new(fields))
}

/// The batch with the columns of its stage.
pub(crate) fn staged(batch: &RecordBatch, stage: &Stage) -> Result<RecordBatch, StageError> {
    let (rows, name) = (batch.num_rows(), stage.size.to_string());
    let mut columns = batch.columns().to_vec();
    columns.push(Arc::new(StringArray::from_iter_values(std::iter::repeat_n(name, rows))));
    // At most 10^9 steps.
    columns.push(Arc::new(Int64Array::from_value(stage.end as i64, rows)));
    Ok(RecordBatch::try_new(staged_schema(), columns)?)
}

/// One micro-batch. Where there are no utterances, one row represents it, with `seconds` as its duration.
pub(crate) fn micro_batch(
    first_row: u32,
    rank: u32,
    micro: u32,
    epoch: u64,
    utterances: &[Loaded<'_>],
    seconds: f64,
) -> Result<RecordBatch, StageError> {
    let nothing = [(
        rank,
        micro,
        Utterance {
            segment_id: "",
            text: "",
            lang: "",
            duration: seconds,
            place: None,
            start: None,
            by_duration: false,
        },
        vec![0.0],
    )];
    let utterances = if utterances.is_empty() {
        &nothing[..]
    } else {
        utterances
    };
    let count = utterances.len();
    let samples = utterances.iter().map(|(.., signal)| signal.len()).sum();
    let mut signals = ListBuilder::new(Float32Builder::with_capacity(samples));
    for (.., signal) in utterances {
        signals.values().append_slice(signal);
        signals.append(true);
    }
    let constant = |number: i32| -> ArrayRef { Arc::new(Int32Array::from(vec![number; count])) };
    let text = |of: fn(&Utterance<'_>) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(
            utterances.iter().map(|(_, _, utterance, _)| of(utterance)),
        ))
    };
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(first_row..first_row + count as u32)),
        constant(rank as i32),
        constant(micro as i32),
        constant(i32::try_from(epoch).unwrap_or(i32::MAX)),
        text(|utterance| utterance.segment_id.to_owned()),
        text(|utterance| utterance.lang.to_owned()),
        Arc::new(Float64Array::from_iter_values(
            utterances.iter().map(|(_, _, utterance, _)| utterance.duration),
        )),
        text(|utterance| utterance.text.to_owned()),
        Arc::new(signals.finish()),
    ];
    Ok(RecordBatch::try_new(loaded_schema(), columns)?)
}
