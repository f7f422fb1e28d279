//! The columns of a data set's files, by their names and the metadata of the library `datasets`, and the values in them.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Float64Type, Int64Type, Schema};
use serde_json::{Map, Value};

use flow_corpus::ReadSettings;
use flow_corpus::column_names::{FILE_COLUMNS, ID_COLUMNS, LANGUAGE_COLUMNS, TEXT_COLUMNS, renamed};
use flow_corpus::times::DURATION;

/// Further names of the text, after those that tables have.
const FURTHER_TEXTS: [&str; 4] = ["raw_transcription", "raw_text", "target", "label"];
/// Further names of the language.
const FURTHER_LANGUAGES: [&str; 1] = ["lang_id"];
/// Columns that say how long a recording is, and in how many parts of a second.
const DURATIONS: [(&str, f64); 4] = [
    (DURATION, 1.0),
    ("audio_duration", 1.0),
    ("audio_length_s", 1.0),
    ("duration_ms", 1e3),
];
/// Columns of bytes that are recordings. Others may be texts, as old programs write them.
const OF_RECORDINGS: [&str; 6] = ["audio", "audio_bytes", "speech", "wav", "flac", "mp3"];
/// The key of the metadata.
const METADATA: &str = "huggingface";

/// The columns of a file.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    pub(super) audio: String,
    pub(super) text: String,
    pub(super) lang: Option<String>,
    pub(super) id: Option<String>,
    pub(super) duration: Option<(String, f64)>,
    /// Names of classes, by column.
    pub(super) classes: HashMap<String, Vec<String>>,
    /// Columns of single values for `extra`.
    pub(super) further: Vec<String>,
}

/// Whether a column holds recordings: a struct with `bytes`, or bytes in a column that is called so.
pub(super) fn is_audio(field: &Field) -> bool {
    let is_bytes = |data_type: &DataType| {
        matches!(
            data_type,
            DataType::Binary | DataType::LargeBinary | DataType::BinaryView
        )
    };
    match field.data_type() {
        DataType::Struct(fields) => fields
            .iter()
            .any(|field| field.name() == "bytes" && is_bytes(field.data_type())),
        data_type => is_bytes(data_type) && OF_RECORDINGS.contains(&field.name().as_str()),
    }
}

/// The features of a data set, by column.
pub(super) fn features(schema: &Schema) -> Map<String, Value> {
    let parsed: Option<Value> = schema
        .metadata()
        .get(METADATA)
        .and_then(|text| serde_json::from_str(text).ok());
    let features = parsed.and_then(|mut parsed| Some(parsed.get_mut("info")?.get_mut("features")?.take()));
    match features {
        Some(Value::Object(features)) => features,
        _ => Map::new(),
    }
}

impl Columns {
    pub(super) fn of(schema: &Schema, settings: &ReadSettings) -> Result<Columns, String> {
        let features = features(schema);
        let pairs = renamed(&settings.columns)?;
        let all = schema
            .fields()
            .iter()
            .map(|field| field.name().as_str())
            .collect::<Vec<_>>()
            .join(", ");
        let has = |name: &str| schema.field_with_name(name).is_ok();
        if let Some((theirs, _)) = pairs.iter().find(|(theirs, _)| !has(theirs)) {
            return Err(format!(
                "it has no column {theirs:?}, which `columns` names; its columns are {all}"
            ));
        }
        let given = |names: &[&str]| {
            pairs
                .iter()
                .find(|(_, ours)| names.contains(ours))
                .map(|(theirs, _)| theirs.to_string())
        };
        let is_single = |name: &str| {
            schema
                .field_with_name(name)
                .is_ok_and(|field| !field.data_type().is_nested())
        };
        let kept = |name: &str| {
            pairs
                .iter()
                .any(|(theirs, ours)| *theirs == name && *ours == flow_corpus::extra::EXTRA)
        };
        let find = |names: &[&str]| {
            names
                .iter()
                .find(|name| is_single(name) && !kept(name))
                .map(|name| name.to_string())
        };
        let audio: Vec<&Arc<Field>> = schema.fields().iter().filter(|field| is_audio(field)).collect();
        let audio = match (given(&FILE_COLUMNS), audio.as_slice()) {
            (Some(named), _) => named,
            (None, [only]) => only.name().clone(),
            (None, []) => return Err(format!("it has no column with recordings; its columns are {all}")),
            (None, several) => match several
                .iter()
                .find(|field| FILE_COLUMNS.contains(&field.name().as_str()))
            {
                Some(field) => field.name().clone(),
                None => {
                    let names: Vec<&str> = several.iter().map(|field| field.name().as_str()).collect();
                    return Err(format!(
                        "the columns {} hold recordings; `columns` says which one is read: [{}=audio]",
                        names.join(", "),
                        names[0]
                    ));
                }
            },
        };
        let text = given(&TEXT_COLUMNS)
            .or_else(|| find(&TEXT_COLUMNS))
            .or_else(|| find(&FURTHER_TEXTS))
            .ok_or_else(|| {
                format!(
                    "it has no column for the text (one of {}, {}; `columns` maps other names: [theirs=text]); its \
                 columns are {all}",
                    TEXT_COLUMNS.join(", "),
                    FURTHER_TEXTS.join(", ")
                )
            })?;
        let lang = given(&LANGUAGE_COLUMNS)
            .or_else(|| find(&LANGUAGE_COLUMNS))
            .or_else(|| find(&FURTHER_LANGUAGES));
        let duration = match given(&[DURATION]) {
            Some(named) => Some((named, 1.0)),
            None => {
                let found = DURATIONS.iter().find(|(name, _)| is_single(name) && !kept(name));
                found.map(|(name, parts)| (name.to_string(), *parts))
            }
        };
        let classes = features.iter().filter_map(|(name, feature)| {
            let is_label = feature.get("_type").and_then(Value::as_str) == Some("ClassLabel");
            let names = feature.get("names").filter(|_| is_label)?.as_array()?;
            let names = names
                .iter()
                .map(|name| name.as_str().map(str::to_string))
                .collect::<Option<_>>()?;
            Some((name.clone(), names))
        });
        let mut columns = Columns {
            classes: classes.collect(),
            further: Vec::new(),
            id: given(&ID_COLUMNS),
            audio,
            text,
            lang,
            duration,
        };
        let used = [
            Some(&columns.text),
            columns.lang.as_ref(),
            columns.id.as_ref(),
            Some(&columns.audio),
        ];
        let used: Vec<&String> = used
            .into_iter()
            .flatten()
            .chain(columns.duration.iter().map(|(name, _)| name))
            .collect();
        let others = schema.fields().iter().filter(|field| !used.contains(&field.name()));
        let is_plain = |field: &&Arc<Field>| {
            let data_type = match field.data_type() {
                DataType::Dictionary(_, values) => values.as_ref(),
                other => other,
            };
            data_type.is_numeric()
                || matches!(
                    data_type,
                    DataType::Boolean | DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View
                )
        };
        columns.further = others.filter(is_plain).map(|field| field.name().clone()).collect();
        Ok(columns)
    }

    /// What a column says of a row; null where there is no such column.
    pub(super) fn value(&self, batch: &RecordBatch, name: &str, row: usize) -> Value {
        let Some(column) = batch.column_by_name(name).filter(|column| column.is_valid(row)) else {
            return Value::Null;
        };
        match (self.classes.get(name), column.data_type()) {
            (Some(names), data_type) if data_type.is_integer() => {
                let number = whole(column, row).and_then(|number| usize::try_from(number).ok());
                number
                    .and_then(|number| names.get(number))
                    .map_or(Value::Null, |name| Value::from(name.as_str()))
            }
            (_, DataType::Boolean) => column.as_boolean().value(row).into(),
            (_, data_type) if data_type.is_integer() => whole(column, row).map_or(Value::Null, Value::from),
            (_, data_type) if data_type.is_numeric() => float(column, row).map_or(Value::Null, Value::from),
            _ => text(column, row).map_or(Value::Null, Value::from),
        }
    }

    pub(super) fn text_value(&self, batch: &RecordBatch, name: &str, row: usize) -> Option<String> {
        match self.value(batch, name, row) {
            Value::Null => None,
            Value::String(text) => Some(text),
            other => Some(other.to_string()),
        }
    }
}

pub(super) fn one(column: &ArrayRef, row: usize, to: &DataType) -> Option<ArrayRef> {
    cast(&column.slice(row, 1), to).ok().filter(|value| value.is_valid(0))
}

pub(super) fn whole(column: &ArrayRef, row: usize) -> Option<i64> {
    Some(one(column, row, &DataType::Int64)?.as_primitive::<Int64Type>().value(0))
}

pub(super) fn float(column: &ArrayRef, row: usize) -> Option<f64> {
    Some(
        one(column, row, &DataType::Float64)?
            .as_primitive::<Float64Type>()
            .value(0),
    )
}

pub(super) fn text(column: &ArrayRef, row: usize) -> Option<String> {
    Some(
        one(column, row, &DataType::Utf8)?
            .as_string::<i32>()
            .value(0)
            .to_string(),
    )
}

/// The bytes of a row of a column of recordings, and what it says of the path.
pub(super) fn recording(audio: &ArrayRef, row: usize) -> (Option<&[u8]>, Option<String>) {
    fn bytes(column: &ArrayRef, row: usize) -> Option<&[u8]> {
        if column.is_null(row) {
            return None;
        }
        match column.data_type() {
            DataType::Binary => Some(column.as_binary::<i32>().value(row)),
            DataType::LargeBinary => Some(column.as_binary::<i64>().value(row)),
            DataType::BinaryView => Some(column.as_binary_view().value(row)),
            _ => None,
        }
    }
    if audio.is_null(row) {
        return (None, None);
    }
    match audio.as_struct_opt() {
        Some(fields) => {
            let path = fields
                .column_by_name("path")
                .filter(|path| path.is_valid(row))
                .and_then(|path| text(path, row));
            (
                fields.column_by_name("bytes").and_then(|column| bytes(column, row)),
                path,
            )
        }
        None => (bytes(audio, row), None),
    }
}
