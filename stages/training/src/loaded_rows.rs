//! From the rows of `sampling.load` to micro-batches: tokens instead of text, grouped by rank and place.

use std::collections::BTreeMap;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float32Type, Float64Type, Int64Type};
use flow_kind::ColumnType;
use flow_model::tokenizer::Tokenizer;

use crate::error::TrainingError;
use crate::long_texts::{OverLimit, TextLimit};
use crate::trainer::LoadedBatch;

/// Columns that the rows must have; one row is one utterance, `signal` is a list of float32.
pub const BATCH_COLUMNS: &[(&str, ColumnType)] = &[
    ("rank", ColumnType::Any),
    ("micro", ColumnType::Any),
    ("epoch", ColumnType::Any),
    ("segment_id", ColumnType::AnyText),
    ("text", ColumnType::AnyText),
    ("signal", ColumnType::Any),
];

/// The stage of a curriculum that a step belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageMark {
    pub name: String,
    /// Steps that are done when it ends.
    pub end: u64,
}

/// The stage that the rows of a step name; none without a curriculum.
pub fn stage_mark(batches: &[RecordBatch]) -> Result<Option<StageMark>, TrainingError> {
    let Some(batch) = batches.iter().find(|batch| batch.num_rows() > 0) else {
        return Ok(None);
    };
    if batch.column_by_name("stage").is_none() {
        return Ok(None);
    }
    let name = texts(batch, "stage")?.value(0).to_owned();
    let end = numbers(batch, "stage_end")?[0] as u64;
    Ok(Some(StageMark { name, end }))
}

/// The micro-batches of one optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedStep {
    /// Ordered by rank and place; those without an utterance are left out.
    pub batches: Vec<LoadedBatch>,
    /// The number of planned micro-batches, empty ones included.
    pub planned: u32,
    /// The seconds of each of these by the durations of its rows (0 where they have none), those of other processes
    /// included.
    pub seconds: Vec<f64>,
    /// Segments whose recordings could not be loaded.
    pub lost: Vec<String>,
    /// Segments that were left out because their audio holds samples that are not numbers.
    pub dropped: Vec<String>,
    /// Segments that were left out because their texts have too many tokens.
    pub too_long: Vec<String>,
}

/// Converts the rows of one optimizer step to micro-batches. A row with more tokens than the limit is left out, or its
/// target is cut to so many.
pub fn micro_batches(
    batches: &[RecordBatch],
    tokenizer: &Tokenizer,
    limit: TextLimit,
) -> Result<LoadedStep, TrainingError> {
    own_micro_batches(batches, tokenizer, limit, |_, _| true)
}

/// As [`micro_batches`], of those for which `is_own` is true: it is given the place of a micro-batch and the number of
/// planned ones.
pub fn own_micro_batches(
    batches: &[RecordBatch],
    tokenizer: &Tokenizer,
    limit: TextLimit,
    is_own: impl Fn(u32, u32) -> bool,
) -> Result<LoadedStep, TrainingError> {
    let TextLimit { max_tokens, rule } = limit;
    let planned = planned_seconds(batches)?;
    let count = planned.len() as u32;
    let places: BTreeMap<(u32, u32), u32> = planned.keys().copied().zip(0..).collect();
    let mut groups: BTreeMap<(u32, u32), LoadedBatch> = BTreeMap::new();
    let (mut lost, mut dropped, mut too_long) = (Vec::new(), Vec::new(), Vec::new());
    for batch in batches {
        let (ranks, micros, epochs) = (
            numbers(batch, "rank")?,
            numbers(batch, "micro")?,
            numbers(batch, "epoch")?,
        );
        let (segments, texts) = (texts(batch, "segment_id")?, texts(batch, "text")?);
        let signals = column(batch, "signal")?;
        let signals = signals.as_list_opt::<i32>().ok_or_else(|| wrong("signal"))?;
        for row in 0..batch.num_rows() {
            let key = (ranks[row] as u32, micros[row] as u32);
            let place = places.get(&key).copied().unwrap_or(0);
            if !is_own(place, count) {
                continue;
            }
            let segment = if segments.is_null(row) {
                String::new()
            } else {
                segments.value(row).to_owned()
            };
            let signal = signals.value(row);
            let signal = signal
                .as_primitive_opt::<Float32Type>()
                .ok_or_else(|| wrong("signal"))?
                .values()
                .to_vec();
            let group = groups.entry(key).or_insert_with(|| LoadedBatch {
                rank: key.0,
                micro: key.1,
                place,
                ..LoadedBatch::default()
            });
            if segment.is_empty() && signal.len() <= 1 {
                // The row that `sampling.load` gives for a micro-batch without any utterance.
                continue;
            }
            if signal.is_empty() {
                lost.push(segment);
                continue;
            }
            if signal.iter().any(|sample| !sample.is_finite()) {
                dropped.push(segment);
                continue;
            }
            let mut tokens = if texts.is_null(row) {
                Vec::new()
            } else {
                tokenizer.encode(texts.value(row))
            };
            if tokens.len() > max_tokens && rule == OverLimit::Reject {
                too_long.push(segment);
                continue;
            }
            tokens.truncate(max_tokens);
            group.epoch = group.epoch.max(epochs[row] as u64);
            group.segments.push(segment);
            group.batch.signals.push(signal);
            group.batch.tokens.push(tokens);
        }
    }
    Ok(LoadedStep {
        batches: groups
            .into_values()
            .filter(|batch| !batch.segments.is_empty())
            .collect(),
        planned: count,
        seconds: planned.into_values().collect(),
        lost,
        dropped,
        too_long,
    })
}

/// The planned micro-batches, by rank and number, with the sums of their rows' durations.
fn planned_seconds(batches: &[RecordBatch]) -> Result<BTreeMap<(u32, u32), f64>, TrainingError> {
    let mut planned: BTreeMap<(u32, u32), f64> = BTreeMap::new();
    for batch in batches {
        let (ranks, micros) = (numbers(batch, "rank")?, numbers(batch, "micro")?);
        let durations = match batch.column_by_name("duration") {
            Some(durations) => Some(cast(durations, &DataType::Float64).map_err(|_| wrong("duration"))?),
            None => None,
        };
        let durations = durations
            .as_ref()
            .and_then(|durations| durations.as_primitive_opt::<Float64Type>());
        for row in 0..batch.num_rows() {
            let seconds = durations.filter(|durations| durations.is_valid(row));
            *planned.entry((ranks[row] as u32, micros[row] as u32)).or_default() +=
                seconds.map_or(0.0, |durations| durations.value(row));
        }
    }
    Ok(planned)
}

fn column(batch: &RecordBatch, name: &str) -> Result<ArrayRef, TrainingError> {
    batch.column_by_name(name).cloned().ok_or_else(|| wrong(name))
}

fn wrong(name: &str) -> TrainingError {
    TrainingError::data(format!(
        "column {name} of the loaded rows is missing or has another type than sampling.load gives"
    ))
}

fn texts(batch: &RecordBatch, name: &str) -> Result<StringArray, TrainingError> {
    column(batch, name)?
        .as_string_opt::<i32>()
        .cloned()
        .ok_or_else(|| wrong(name))
}

/// Whole numbers of any width, none of them null or negative.
fn numbers(batch: &RecordBatch, name: &str) -> Result<Vec<i64>, TrainingError> {
    let array = cast(&column(batch, name)?, &DataType::Int64).map_err(|_| wrong(name))?;
    let array = array.as_primitive_opt::<Int64Type>().ok_or_else(|| wrong(name))?;
    if array.null_count() > 0 || array.values().iter().any(|&n| n < 0 || n > i64::from(u32::MAX)) {
        return Err(wrong(name));
    }
    Ok(array.values().to_vec())
}
