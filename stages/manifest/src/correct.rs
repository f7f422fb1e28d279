//! The kinds `manifest.match_corrections` and `manifest.correct`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, RecordBatch, StringArray, UInt32Array};
use arrow::compute::{cast, take_record_batch};
use arrow::datatypes::{DataType, Field, Float64Type, Int64Type, Schema, SchemaRef};
use flow_corpus::columns::{self, expect};
use flow_kind::{
    Artifact, Body, ColumnType, Conservation, Context, InputCount, InputPort, Inputs, Kind, Operator, Out, OutputPort,
    Partition, Port, Progress, ROW, ReadOnce, RejectClass, Shape, Source, SourcePartition, StageError, WithShared,
};
use flow_text::language_tag::tag_of;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The one partition of corrections that count.
const ALL: &str = "all";
/// The value of `what` in corrections of texts, and in those of names of speakers.
const TEXT: &str = "text";
const SPEAKER: &str = "speaker";

const OF_CORRECTIONS: &[(&str, ColumnType)] = &[
    (ROW, ColumnType::UInt32),
    ("what", ColumnType::Text),
    ("segment_id", ColumnType::Text),
    ("new_text", ColumnType::Text),
    ("bad", ColumnType::Any),
];
const BAD: (&str, DataType) = ("bad", DataType::Boolean);
/// Columns that say which recording a row is of, and which part of it.
const OF_PLACES: [&str; 3] = ["audio_path", "offset", "start"];

/// Gives the corrections that are of some row.
///
/// # What it does
///
/// `corrections` are those that `flow ui --allow-edit` keeps, read by `manifest.table`. All other inputs are rows with a
/// `segment_id`; they are read batch by batch, and memory goes with the corrections alone. Of several corrections of a text the
/// last one of its segment counts, and the others are left out, as are names of speakers (`what: speaker`). Refused (class
/// `fault`) are
///
/// - `no_such_segment`: no row has its `segment_id`,
/// - `several_recordings`: rows of several recordings, or of several parts of one (`audio_path, "offset", start`), have it, so
///   that it cannot be determined which one is meant; not with `all_recordings`,
/// - `unknown_correction`: its `what` is neither `text` nor `speaker`.
///
/// That there are corrections of texts and not one of them counts is an error.
///
/// # Example
///
/// ```yaml
/// corrections:
///   uses: manifest.table
///   with: {path: corrections.parquet, columns: {what: text, segment_id: text, new_text: text, bad: bool}}
/// usable_corrections:
///   uses: manifest.match_corrections
///   from: {corrections: corrections, train: train_rows, val: val_rows}
/// train_corrected:
///   uses: manifest.correct
///   from: {rows: train_rows, corrections: usable_corrections}
/// ```
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MatchSettings {
    /// Corrections count for all recordings whose rows have their `segment_id`.
    pub all_recordings: bool,
}

pub struct MatchCorrections;

impl Kind for MatchCorrections {
    const NAME: &'static str = "manifest.match_corrections";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::whole("corrections", "corrections of texts, the last of a segment last").columns(OF_CORRECTIONS),
        InputPort::whole("rows", "rows that they may be of")
            .columns(&[("segment_id", ColumnType::Text)])
            .count(InputCount::Many),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("corrections", "the corrections that count")];
    type Settings = MatchSettings;

    fn shape(_: &MatchSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        let corrections = inputs.required("corrections")?;
        expect(corrections, BAD.0, &BAD.1)?;
        let port = Port::new("corrections", corrections.schema.clone());
        Ok(Shape {
            conservation: Conservation::Rows,
            ..Shape::source(vec![port])
        })
    }

    fn open(settings: &MatchSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(Matcher {
            all_recordings: settings.all_recordings,
            context: context.clone(),
        })))
    }
}

struct Matcher {
    all_recordings: bool,
    context: Context,
}

/// Where the rows of a segment are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Named {
    ByNone,
    /// By rows of one recording, whose place has this digest.
    By(blake3::Hash),
    BySeveral,
}

impl Source for Matcher {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        Ok(vec![SourcePartition::new(Partition::new(ALL), Vec::new(), "")])
    }

    fn read(&mut self, _: &Partition, out: &mut Out) -> Result<(), StageError> {
        let corrections = self.context.required("corrections")?;
        let mut named: HashMap<String, (u64, Named)> = HashMap::new();
        each_text(corrections, |number, id, _, _| {
            named.insert(id.to_string(), (number, Named::ByNone));
        })?;
        let mut seen = Vec::new();
        for (_, rows) in self.context.whole("rows") {
            // A stage may replace another one that is switched off.
            if !seen.contains(&rows.digest()) {
                find(rows, &mut named)?;
                seen.push(rows.digest());
            }
        }
        let mut refused = BTreeMap::<&'static str, u64>::new();
        let (mut number, mut kept, mut names_of_speakers) = (0, 0u32, 0);
        for batch in corrections.batches(None) {
            let (_, batch) = batch?;
            out.read(batch.num_rows() as u64);
            let whats = columns::text(&batch, "what")?;
            let ids = columns::text(&batch, "segment_id")?;
            let (mut taken, mut left_out) = (Vec::new(), 0);
            for row in 0..batch.num_rows() {
                let id = if ids.is_valid(row) { ids.value(row) } else { "" };
                let reason = match whats.is_valid(row).then(|| whats.value(row)) {
                    Some(SPEAKER) => {
                        names_of_speakers += 1;
                        None
                    }
                    Some(TEXT) => match named.get(id) {
                        _ if ids.is_null(row) => Some("no_such_segment"),
                        Some((last, _)) if *last != number => None,
                        Some((_, Named::By(_))) => Some(""),
                        Some((_, Named::BySeveral)) if self.all_recordings => Some(""),
                        Some((_, Named::BySeveral)) => Some("several_recordings"),
                        _ => Some("no_such_segment"),
                    },
                    _ => Some("unknown_correction"),
                };
                match reason {
                    None => left_out += 1,
                    Some("") => taken.push(row as u32),
                    Some(reason) => {
                        out.reject_rows(&batch, &[row], reason, RejectClass::Fault, "")?;
                        *refused.entry(reason).or_default() += 1;
                    }
                }
                number += 1;
            }
            out.merged(left_out);
            if !taken.is_empty() {
                let rows = kept..kept + taken.len() as u32;
                kept = rows.end;
                out.send(
                    0,
                    numbered(&take_record_batch(&batch, &UInt32Array::from(taken))?, rows)?,
                );
            }
        }
        let of_texts = number - names_of_speakers;
        if kept == 0 && of_texts > 0 {
            let reasons: Vec<String> = refused
                .iter()
                .map(|(reason, rows)| format!("{rows} {reason}"))
                .collect();
            let why = reasons.join(", ");
            return Err(
                StageError::failed(format!("none of the {of_texts} corrections is of a row here: {why}")).with_help(
                    "`segment_id` of the corrections must be that of rows; `corrections` may be of other data",
                ),
            );
        }
        Ok(())
    }
}

/// A batch whose rows have these numbers.
fn numbered(batch: &RecordBatch, rows: std::ops::Range<u32>) -> Result<RecordBatch, StageError> {
    let place = batch.schema().index_of(ROW)?;
    let mut columns = batch.columns().to_vec();
    columns[place] = Arc::new(UInt32Array::from_iter_values(rows));
    Ok(RecordBatch::try_new(batch.schema(), columns)?)
}

/// Looks for the rows that corrections name.
fn find(rows: &Artifact, named: &mut HashMap<String, (u64, Named)>) -> Result<(), StageError> {
    let has = |name: &&str| rows.schema().field_with_name(name).is_ok();
    let wanted: Vec<&str> = ["segment_id"]
        .into_iter()
        .chain(OF_PLACES.into_iter().filter(has))
        .collect();
    for batch in rows.batches(Some(&wanted)) {
        let (_, batch) = batch?;
        let ids = columns::text(&batch, "segment_id")?;
        let column = |name: &str, data_type: &DataType| {
            batch
                .column_by_name(name)
                .map(|column| cast(column, data_type))
                .transpose()
        };
        let [path, offset, start] = [
            column(OF_PLACES[0], &DataType::Utf8)?,
            column(OF_PLACES[1], &DataType::Int64)?,
            column(OF_PLACES[2], &DataType::Float64)?,
        ];
        let valid = |column: &Option<ArrayRef>, row: usize| column.clone().filter(|column| column.is_valid(row));
        for row in (0..batch.num_rows()).filter(|row| ids.is_valid(*row)) {
            let Some((_, found)) = named.get_mut(ids.value(row)) else {
                continue;
            };
            let mut place = blake3::Hasher::new();
            if let Some(path) = valid(&path, row) {
                place.update(path.as_string::<i32>().value(row).as_bytes());
            }
            let offset = valid(&offset, row).map(|offset| offset.as_primitive::<Int64Type>().value(row));
            let start = valid(&start, row).map(|start| start.as_primitive::<Float64Type>().value(row));
            place.update(format!("\n{offset:?} {start:?}").as_bytes());
            let place = Named::By(place.finalize());
            match *found {
                Named::ByNone => *found = place,
                other if other != place => *found = Named::BySeveral,
                _ => {}
            }
        }
    }
    Ok(())
}

/// Gives each correction of a text: its number among all corrections, its segment, the new text (none: it stays), and whether
/// the row is bad.
fn each_text(corrections: &Artifact, mut each: impl FnMut(u64, &str, Option<&str>, bool)) -> Result<(), StageError> {
    let wanted = ["what", "segment_id", "new_text", "bad"];
    let mut number = 0;
    for batch in corrections.batches(Some(&wanted)) {
        let (_, batch) = batch?;
        let [whats, ids, texts] = ["what", "segment_id", "new_text"].map(|name| columns::text(&batch, name));
        let (whats, ids, texts) = (whats?, ids?, texts?);
        let bad = batch.column(3).as_boolean();
        for row in 0..batch.num_rows() {
            if whats.is_valid(row) && whats.value(row) == TEXT && ids.is_valid(row) {
                let text = texts.is_valid(row).then(|| texts.value(row));
                each(number, ids.value(row), text, bad.is_valid(row) && bad.value(row));
            }
            number += 1;
        }
    }
    Ok(())
}

/// Puts the texts of corrections in the place of those of rows, and refuses rows that they mark as bad.
///
/// # What it does
///
/// `corrections` are those that `flow ui --allow-edit` keeps, read by `manifest.table`: of several of a segment the last one
/// counts. They are kept in memory; rows come and go batch by batch. A row is found by its `segment_id`. Its text begins with
/// the tag of its language (`<|hi|> ...`) where it did before, unless the new one has a tag itself. Bad rows are refused as
/// `marked_bad` (class `rule`), with the correction among their values. The column of the text comes last; nothing else of a
/// row changes. Corrections of no row change nothing: `manifest.match_corrections` finds them.
///
/// # Example
///
/// ```yaml
/// corrected:
///   uses: manifest.correct
///   from: {rows: scan, corrections: corrections}
///   with: {column: transcription_native}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CorrectSettings {
    /// The column of the text.
    pub column: String,
}

impl Default for CorrectSettings {
    fn default() -> Self {
        CorrectSettings { column: TEXT.into() }
    }
}

/// The new text of a segment (none: it stays), and whether its row is bad.
pub type BySegment = HashMap<String, (Option<String>, bool)>;

pub struct Correct;

impl Kind for Correct {
    const NAME: &'static str = "manifest.correct";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("rows", "rows with texts").columns(&[("segment_id", ColumnType::Text)]),
        InputPort::whole("corrections", "corrections of texts, the last of a segment last").columns(OF_CORRECTIONS),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "the rows that are not bad, with the new texts")];
    /// Shared: the corrections.
    type Settings = WithShared<CorrectSettings, ReadOnce<BySegment>>;

    fn shape(settings: &Self::Settings, inputs: &Inputs) -> Result<Shape, StageError> {
        let rows = inputs.required("rows")?;
        expect(rows, &settings.column, &DataType::Utf8)?;
        expect(inputs.required("corrections")?, BAD.0, &BAD.1)?;
        let port = Port::new("rows", text_last(&rows.schema, &settings.column));
        Ok(Shape::local(vec![port]))
    }

    fn open(settings: &Self::Settings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(Corrector {
            schema: text_last(&context.inputs.required("rows")?.schema, &settings.column),
            settings: settings.clone(),
            context: context.clone(),
            corrections: None,
        })))
    }
}

/// The columns of rows with that of the text last.
fn text_last(schema: &SchemaRef, column: &str) -> SchemaRef {
    let others = schema.fields().iter().filter(|field| field.name() != column).cloned();
    let text = Arc::new(Field::new(column, DataType::Utf8, true));
    Arc::new(Schema::new(others.chain([text]).collect::<Vec<_>>()))
}

struct Corrector {
    schema: SchemaRef,
    settings: WithShared<CorrectSettings, ReadOnce<BySegment>>,
    context: Context,
    corrections: Option<Arc<BySegment>>,
}

impl Corrector {
    /// Read once for all workers.
    fn corrections(&mut self) -> Result<Arc<BySegment>, StageError> {
        if let Some(corrections) = &self.corrections {
            return Ok(Arc::clone(corrections));
        }
        let corrections = self.context.required("corrections")?;
        let by_segment = self.settings.shared.get(&corrections.digest().to_hex(), || {
            let mut by_segment = BySegment::new();
            each_text(corrections, |_, id, text, bad| {
                by_segment.insert(id.to_string(), (text.map(str::to_string), bad));
            })?;
            Ok::<_, StageError>(by_segment)
        })?;
        Ok(Arc::clone(self.corrections.insert(by_segment)))
    }
}

impl Operator for Corrector {
    fn batch(&mut self, _: &str, _: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        let corrections = self.corrections()?;
        let ids = columns::text(&batch, "segment_id")?;
        let texts = columns::text(&batch, &self.settings.column)?;
        let of = |row: usize| ids.is_valid(row).then(|| corrections.get(ids.value(row))).flatten();
        let new_texts: StringArray = (0..batch.num_rows())
            .map(|row| of(row).and_then(|(text, _)| text.as_deref()))
            .collect();
        let (bad, good): (Vec<usize>, Vec<usize>) =
            (0..batch.num_rows()).partition(|row| of(*row).is_some_and(|(_, bad)| *bad));
        if !bad.is_empty() {
            // With the columns of the correction.
            let is_bad: BooleanArray = (0..batch.num_rows()).map(|row| of(row).map(|(_, bad)| *bad)).collect();
            let mut fields: Vec<(String, ArrayRef)> = batch
                .schema()
                .fields()
                .iter()
                .map(|field| field.name().clone())
                .zip(batch.columns().iter().cloned())
                .collect();
            fields.push(("new_text".into(), Arc::new(new_texts.clone())));
            fields.push(("bad".into(), Arc::new(is_bad)));
            let refused = RecordBatch::try_from_iter(fields)?;
            out.reject_rows(&refused, &bad, "marked_bad", RejectClass::Rule, "")?;
        }
        let corrected = |row: usize| {
            let old = texts.is_valid(row).then(|| texts.value(row));
            match (old, new_texts.is_valid(row).then(|| new_texts.value(row))) {
                (old, None) => old.map(str::to_string),
                (old, Some(new)) => Some(with_tag_of(old.unwrap_or_default(), new)),
            }
        };
        let corrected: StringArray = (0..batch.num_rows()).map(corrected).collect();
        let others = batch.schema();
        let others = others.fields().iter().zip(batch.columns());
        let mut all: Vec<ArrayRef> = others
            .filter(|(field, _)| field.name() != &self.settings.column)
            .map(|(_, column)| Arc::clone(column))
            .collect();
        all.push(Arc::new(corrected));
        let all = RecordBatch::try_new(Arc::clone(&self.schema), all)?;
        let good: UInt32Array = good.into_iter().map(|row| row as u32).collect();
        if !good.is_empty() {
            out.send(0, take_record_batch(&all, &good)?);
        }
        Ok(())
    }

    fn partition_complete(&mut self, _: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        Ok(Progress::Done)
    }
}

/// A new text with the tag that the old one begins with.
fn with_tag_of(old: &str, new: &str) -> String {
    match (tag_of(old), tag_of(new)) {
        (Some(tag), None) => format!("<|{tag}|> {new}"),
        _ => new.to_string(),
    }
}

#[cfg(test)]
#[path = "correct_tests.rs"]
mod tests;
