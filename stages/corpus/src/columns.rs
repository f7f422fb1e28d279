//! Columns of a batch by name and type, and those of a manifest.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Float64Array, Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::buffer::OffsetBuffer;
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_kind::{Input, ROW, StageError};

use crate::ManifestError;
use crate::extra::EXTRA;

/// The columns of a manifest, in the order of its files.
pub const MANIFEST_COLUMNS: [&str; 8] = [
    "segment_id",
    "shard_id",
    "text",
    "duration",
    "lang",
    "tar_member_name",
    "tar_path",
    "source",
];

/// Schema of a manifest file: `duration` in seconds as float64, the rest text.
pub fn manifest_schema() -> SchemaRef {
    let fields = MANIFEST_COLUMNS.map(|name| {
        Field::new(
            name,
            if name == "duration" {
                DataType::Float64
            } else {
                DataType::Utf8
            },
            true,
        )
    });
    Arc::new(Schema::new(fields.to_vec()))
}

/// Checks, before a run, that an input has a column of a type.
pub fn expect(input: &Input, name: &str, data_type: &DataType) -> Result<(), StageError> {
    let message = match input.schema.field_with_name(name) {
        Ok(field) if field.data_type() == data_type => return Ok(()),
        Ok(field) => format!(
            "column `{name}` of input `{}` is {}, not {data_type}",
            input.name,
            field.data_type()
        ),
        Err(_) => format!("input `{}` has no column `{name}`", input.name),
    };
    let names: Vec<&str> = input.schema.fields().iter().map(|f| f.name().as_str()).collect();
    Err(StageError::input(input.name.clone(), message).with_help(format!("its columns are {}", names.join(", "))))
}

fn column<'a, A: Array + 'static>(batch: &'a RecordBatch, name: &str, kind: &str) -> Result<&'a A, ManifestError> {
    let array = batch
        .column_by_name(name)
        .ok_or_else(|| ManifestError::rows(format!("the rows have no column `{name}`"), None))?;
    array
        .as_any()
        .downcast_ref()
        .ok_or_else(|| ManifestError::rows(format!("column `{name}` is {}, not {kind}", array.data_type()), None))
}

pub fn text<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a StringArray, ManifestError> {
    column(batch, name, "text")
}

pub fn number<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a Float64Array, ManifestError> {
    column(batch, name, "float64")
}

pub fn whole<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a Int64Array, ManifestError> {
    column(batch, name, "int64")
}

/// The `_row` column, which must not have nulls.
pub fn rows(batch: &RecordBatch) -> Result<&UInt32Array, ManifestError> {
    let rows: &UInt32Array = column(batch, ROW, "uint32")?;
    if rows.null_count() > 0 {
        return Err(ManifestError::rows("`_row` is null in some rows", None));
    }
    Ok(rows)
}

/// `batch` with `schema` in place of its own; an error where a column has another type, or nulls that the schema
/// forbids.
pub fn with_schema(batch: RecordBatch, schema: &SchemaRef) -> Result<RecordBatch, ManifestError> {
    let options = arrow::array::RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    let columns: Vec<ArrayRef> = batch.columns().to_vec();
    Ok(RecordBatch::try_new_with_options(
        Arc::clone(schema),
        columns,
        &options,
    )?)
}

/// One text in each row of a batch.
pub fn constant(text: &str, rows: usize) -> Result<ArrayRef, ManifestError> {
    let lengths = OffsetBuffer::from_lengths(std::iter::repeat_n(text.len(), rows));
    let texts = StringArray::try_new(lengths, text.repeat(rows).into_bytes().into(), None)?;
    Ok(Arc::new(texts))
}

/// Whether rows have the column `extra`.
pub fn with_extra(schema: &Schema) -> bool {
    schema
        .field_with_name(EXTRA)
        .is_ok_and(|field| field.data_type() == &DataType::Utf8)
}

/// Values of a column as JSON; null where a row has none.
///
/// # Errors
/// Where a number is infinite or none, which JSON has not.
pub fn as_json(batch: &RecordBatch, name: &str) -> Result<StringArray, StageError> {
    let failed = |message: String| StageError::failed(format!("column `{name}`: {message}"));
    let column = batch
        .column_by_name(name)
        .ok_or_else(|| failed("it does not exist".into()))?;
    let as_is = matches!(column.data_type(), DataType::Boolean) || column.data_type().is_integer();
    let texts = cast(column, &DataType::Utf8)?;
    let texts = texts.as_string::<i32>();
    let json = |text: &str| match column.data_type() {
        _ if as_is => Ok(text.to_string()),
        data_type if data_type.is_numeric() => {
            let number: serde_json::Number = text
                .parse()
                .map_err(|_| failed(format!("{text} is not a number that JSON has")))?;
            Ok(number.to_string())
        }
        _ => serde_json::to_string(text).map_err(StageError::failed),
    };
    texts.iter().map(|text| text.map(json).transpose()).collect()
}
