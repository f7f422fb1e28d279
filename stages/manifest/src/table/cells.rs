//! Values of a table, and the builders of its columns.

use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanBuilder, Float64Builder, Int64Builder, RecordBatch, StringBuilder, UInt32Builder};
use arrow::datatypes::{DataType, SchemaRef};
use arrow::error::ArrowError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CellType {
    /// Text.
    Text,
    /// Whole numbers of 64 bits.
    Int64,
    /// Numbers of 64 bits, with a fraction.
    Float64,
    /// True or false.
    Bool,
}

impl CellType {
    pub fn data_type(self) -> DataType {
        match self {
            CellType::Text => DataType::Utf8,
            CellType::Int64 => DataType::Int64,
            CellType::Float64 => DataType::Float64,
            CellType::Bool => DataType::Boolean,
        }
    }
}

/// Names and types.
pub type Columns = Vec<(String, CellType)>;

/// A value of a row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    Null,
    Text(String),
    Int64(i64),
    Float64(f64),
    Bool(bool),
}

/// The value that a field of text represents; none where it is of another type.
pub(super) fn of_text(cell: CellType, text: &str) -> Option<Cell> {
    if cell == CellType::Text {
        return Some(Cell::Text(text.to_string()));
    }
    let text = text.trim();
    if text.is_empty() {
        return Some(Cell::Null);
    }
    match cell {
        CellType::Text => None,
        CellType::Int64 => text.parse().ok().map(Cell::Int64),
        CellType::Float64 => text
            .parse()
            .ok()
            .filter(|number: &f64| number.is_finite())
            .map(Cell::Float64),
        CellType::Bool => match text.to_ascii_lowercase().as_str() {
            "true" => Some(Cell::Bool(true)),
            "false" => Some(Cell::Bool(false)),
            _ => None,
        },
    }
}

/// The value that a member of a JSON object represents; none where it is of another type.
pub(super) fn of_json(cell: CellType, value: &Value) -> Option<Cell> {
    match (cell, value) {
        (_, Value::Null) => Some(Cell::Null),
        (CellType::Text, Value::String(text)) => Some(Cell::Text(text.clone())),
        (CellType::Text, other) => Some(Cell::Text(other.to_string())),
        (_, Value::String(text)) => of_text(cell, text),
        (CellType::Int64, Value::Number(number)) => number.as_i64().map(Cell::Int64),
        (CellType::Float64, Value::Number(number)) => number.as_f64().map(Cell::Float64),
        (CellType::Bool, Value::Bool(flag)) => Some(Cell::Bool(*flag)),
        _ => None,
    }
}

/// The type of a value of JSON.
pub(super) fn type_of(value: &Value) -> CellType {
    match value {
        Value::Bool(_) => CellType::Bool,
        Value::Number(number) if number.is_i64() => CellType::Int64,
        Value::Number(_) => CellType::Float64,
        Value::Null | Value::String(_) | Value::Array(_) | Value::Object(_) => CellType::Text,
    }
}

enum Column {
    Text(StringBuilder),
    Int64(Int64Builder),
    Float64(Float64Builder),
    Bool(BooleanBuilder),
}

/// Rows that wait to be sent.
pub(super) struct Rows {
    numbers: UInt32Builder,
    columns: Vec<Column>,
    schema: SchemaRef,
    bytes: usize,
    waiting: usize,
}

/// Rows of a batch at most, and bytes of text after which it is fewer.
const CHUNK: usize = 8192;
const CHUNK_BYTES: usize = 16 << 20;

impl Rows {
    pub fn new(columns: &Columns, schema: &SchemaRef) -> Self {
        let column = |cell: &CellType| match cell {
            CellType::Text => Column::Text(StringBuilder::new()),
            CellType::Int64 => Column::Int64(Int64Builder::new()),
            CellType::Float64 => Column::Float64(Float64Builder::new()),
            CellType::Bool => Column::Bool(BooleanBuilder::new()),
        };
        Rows {
            numbers: UInt32Builder::new(),
            columns: columns.iter().map(|(_, cell)| column(cell)).collect(),
            schema: SchemaRef::clone(schema),
            bytes: 0,
            waiting: 0,
        }
    }

    /// Adds a row. A value that is not of its column's type would become null; there is none, since values are parsed
    /// by the column's type.
    pub fn push(&mut self, number: u32, cells: Vec<Cell>) {
        self.numbers.append_value(number);
        self.waiting += 1;
        for (column, cell) in self.columns.iter_mut().zip(cells) {
            match (column, cell) {
                (Column::Text(builder), Cell::Text(text)) => {
                    self.bytes += text.len();
                    builder.append_value(text);
                }
                (Column::Int64(builder), Cell::Int64(number)) => builder.append_value(number),
                (Column::Float64(builder), Cell::Float64(number)) => builder.append_value(number),
                (Column::Bool(builder), Cell::Bool(flag)) => builder.append_value(flag),
                (Column::Text(builder), _) => builder.append_null(),
                (Column::Int64(builder), _) => builder.append_null(),
                (Column::Float64(builder), _) => builder.append_null(),
                (Column::Bool(builder), _) => builder.append_null(),
            }
        }
    }

    /// Whether the waiting rows fill a batch.
    pub fn is_full(&self) -> bool {
        self.waiting >= CHUNK || self.bytes >= CHUNK_BYTES
    }

    /// The waiting rows as a batch.
    pub fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        (self.bytes, self.waiting) = (0, 0);
        let mut columns: Vec<ArrayRef> = vec![Arc::new(self.numbers.finish())];
        columns.extend(self.columns.iter_mut().map(|column| match column {
            Column::Text(builder) => Arc::new(builder.finish()) as ArrayRef,
            Column::Int64(builder) => Arc::new(builder.finish()) as ArrayRef,
            Column::Float64(builder) => Arc::new(builder.finish()) as ArrayRef,
            Column::Bool(builder) => Arc::new(builder.finish()) as ArrayRef,
        }));
        RecordBatch::try_new(SchemaRef::clone(&self.schema), columns)
    }
}
