//! From the rows of `sampling.load` to micro-batches: tokens instead of text, grouped by rank and place.

use std::collections::BTreeMap;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float32Type, Float64Type, Int64Type};
use flow_kind::ColumnType;
use flow_model::tokenizer::Tokenizer;

use crate::concatenate::Concatenate;
use crate::error::TrainingError;
use crate::long_texts::{OverLimit, TextLimit};
use crate::prompts::RowPrompts;
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

/// How rows become the clips of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowRules {
    pub limit: TextLimit,
    /// How clips are joined; none: each row is a clip.
    pub concatenate: Option<Concatenate>,
}

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
    let name = texts_of(batch, "stage")?.value(0).to_owned();
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

/// The prompts of the rows of a step; none where the model has no prompts.
pub type StepPrompts<'a> = Option<(&'a RowPrompts, u64)>;

/// Converts the rows of one optimizer step to micro-batches. A row with more tokens than the limit is left out, or its
/// target is cut to so many.
pub fn micro_batches(
    batches: &[RecordBatch],
    tokenizer: &Tokenizer,
    rules: RowRules,
    prompts: StepPrompts,
) -> Result<LoadedStep, TrainingError> {
    own_micro_batches(batches, tokenizer, rules, prompts, |_, _| true)
}

/// As [`micro_batches`], of those for which `is_own` is true: it is given the place of a micro-batch and the number of
/// planned ones.
pub fn own_micro_batches(
    batches: &[RecordBatch],
    tokenizer: &Tokenizer,
    rules: RowRules,
    prompts: StepPrompts,
    is_own: impl Fn(u32, u32) -> bool,
) -> Result<LoadedStep, TrainingError> {
    let RowRules {
        limit: TextLimit { max_tokens, rule },
        concatenate,
    } = rules;
    let planned = planned_seconds(batches)?;
    let count = planned.len() as u32;
    let places: BTreeMap<(u32, u32), u32> = planned.keys().copied().zip(0..).collect();
    let mut groups: BTreeMap<(u32, u32), LoadedBatch> = BTreeMap::new();
    // Of the rows of each group, where clips are joined.
    let mut group_texts: BTreeMap<(u32, u32), Vec<String>> = BTreeMap::new();
    let (mut lost, mut dropped, mut too_long) = (Vec::new(), Vec::new(), Vec::new());
    for batch in batches {
        let (ranks, micros, epochs) = (
            numbers(batch, "rank")?,
            numbers(batch, "micro")?,
            numbers(batch, "epoch")?,
        );
        let (segments, texts) = (texts_of(batch, "segment_id")?, texts_of(batch, "text")?);
        let languages = prompts.map(|_| texts_of(batch, "lang")).transpose()?;
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
            let text = if texts.is_null(row) { "" } else { texts.value(row) };
            let mut tokens = tokenizer.encode(text);
            if tokens.len() > max_tokens && rule == OverLimit::Reject {
                too_long.push(segment);
                continue;
            }
            tokens.truncate(max_tokens);
            if concatenate.is_some() {
                group_texts.entry(key).or_default().push(text.to_owned());
            }
            if let (Some((prompts, step)), Some(languages)) = (prompts, &languages) {
                let language = if languages.is_null(row) {
                    ""
                } else {
                    languages.value(row)
                };
                let prompt = prompts.trained(step, &segment, language);
                let prompt = prompt.map_err(|why| TrainingError::data(format!("row {segment}: {why}")))?;
                group.batch.prompts.push(prompt);
            }
            group.epoch = group.epoch.max(epochs[row] as u64);
            group.segments.push(segment);
            group.batch.signals.push(signal);
            group.batch.tokens.push(tokens);
        }
    }
    let joined = |(key, batch): ((u32, u32), LoadedBatch)| match (concatenate, group_texts.get(&key)) {
        (Some(concatenate), Some(texts)) => concatenate.join(batch, texts, tokenizer, max_tokens),
        _ => batch,
    };
    Ok(LoadedStep {
        batches: groups
            .into_iter()
            .filter(|(_, batch)| !batch.segments.is_empty())
            .map(joined)
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

fn texts_of(batch: &RecordBatch, name: &str) -> Result<StringArray, TrainingError> {
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
