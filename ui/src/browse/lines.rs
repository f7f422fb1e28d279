//! Files of JSON lines as rows: a column for each key of the first lines.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Builder, RecordBatch, StringBuilder};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_kind::open_regular_file;
use flow_manifest::ManifestError;
use serde_json::{Map, Value};

/// Lines that are read to determine the columns.
const FIRST_LINES: usize = 1000;
const MAX_COLUMNS: usize = 256;
/// The longest line that is read.
const MAX_LINE: u64 = 16 << 20;
/// Limits of a batch, whichever is reached first.
const BATCH_ROWS: usize = 1024;
const BATCH_BYTES: usize = 8 << 20;

/// A row, and how long its line is.
type Line = (Map<String, Value>, usize);

struct Lines {
    path: PathBuf,
    reader: BufReader<File>,
    number: u64,
    line: Vec<u8>,
}

impl Lines {
    fn open(path: &Path) -> Result<Lines, ManifestError> {
        let file = open_regular_file(path).map_err(|error| ManifestError::io(path, error))?;
        Ok(Lines {
            path: path.to_owned(),
            reader: BufReader::new(file),
            number: 0,
            line: Vec::new(),
        })
    }

    /// The next line that is not blank.
    fn next(&mut self) -> Result<Option<Line>, ManifestError> {
        loop {
            self.line.clear();
            self.number += 1;
            let read = (&mut self.reader).take(MAX_LINE).read_until(b'\n', &mut self.line);
            let length = read.map_err(|error| ManifestError::io(&self.path, error))?;
            if length == 0 {
                return Ok(None);
            }
            let wrong = |why: String| ManifestError::manifest(&self.path, format!("line {}: {why}", self.number));
            if length as u64 == MAX_LINE && self.line.last() != Some(&b'\n') {
                return Err(wrong(format!("it is longer than {} MiB", MAX_LINE >> 20)));
            }
            let text = self
                .line
                .strip_prefix(b"\xef\xbb\xbf")
                .unwrap_or(&self.line)
                .trim_ascii();
            if text.is_empty() {
                continue;
            }
            return match serde_json::from_slice(text) {
                Ok(Value::Object(values)) => Ok(Some((values, length))),
                Ok(_) => Err(wrong("it is not a JSON object".into())),
                Err(error) => Err(wrong(format!("it is not JSON: {error}"))),
            };
        }
    }
}

/// The columns of a file: numbers where the first lines have only numbers, else text.
pub fn schema(path: &Path) -> Result<SchemaRef, ManifestError> {
    let mut lines = Lines::open(path)?;
    let mut columns: Vec<(String, Option<bool>)> = Vec::new();
    let mut bytes = 0;
    for _ in 0..FIRST_LINES {
        let Some((values, length)) = lines.next()? else { break };
        bytes += length;
        for (name, value) in values {
            let is_number = match value {
                Value::Null => None,
                Value::Number(_) => Some(true),
                _ => Some(false),
            };
            let known = columns.iter().position(|(known, _)| *known == name);
            if let Some(at) = known {
                let known = &mut columns[at].1;
                *known = match (*known, is_number) {
                    (Some(a), Some(b)) => Some(a && b),
                    (a, b) => a.or(b),
                };
            } else if columns.len() < MAX_COLUMNS {
                columns.push((name, is_number));
            }
        }
        if bytes > BATCH_BYTES {
            break;
        }
    }
    if columns.is_empty() {
        return Err(ManifestError::manifest(
            path,
            "it is neither Parquet nor JSON lines: it holds no row",
        ));
    }
    let fields = columns.into_iter().map(|(name, is_number)| {
        let data_type = if is_number == Some(true) {
            DataType::Float64
        } else {
            DataType::Utf8
        };
        Field::new(name, data_type, true)
    });
    Ok(Arc::new(Schema::new(fields.collect::<Vec<_>>())))
}

/// The rows of a file as batches of `schema`. A value that is not a number in a column of numbers is null.
pub fn batches(
    path: &Path,
    schema: SchemaRef,
) -> Result<impl Iterator<Item = Result<RecordBatch, ManifestError>> + Send + use<>, ManifestError> {
    let mut lines = Lines::open(path)?;
    let mut ended = false;
    Ok(std::iter::from_fn(move || {
        if ended {
            return None;
        }
        let mut rows = Vec::new();
        let mut bytes = 0;
        while rows.len() < BATCH_ROWS && bytes < BATCH_BYTES {
            match lines.next() {
                Ok(Some((values, length))) => {
                    bytes += length;
                    rows.push(values);
                }
                Ok(None) => {
                    ended = true;
                    break;
                }
                Err(error) => {
                    ended = true;
                    return Some(Err(error));
                }
            }
        }
        (!rows.is_empty()).then(|| batch(&schema, &rows))
    }))
}

fn batch(schema: &SchemaRef, rows: &[Map<String, Value>]) -> Result<RecordBatch, ManifestError> {
    let column = |field: &Arc<Field>| -> ArrayRef {
        let values = rows
            .iter()
            .map(|row| row.get(field.name()).filter(|value| !value.is_null()));
        if field.data_type() == &DataType::Float64 {
            let mut builder = Float64Builder::with_capacity(rows.len());
            values.for_each(|value| builder.append_option(value.and_then(Value::as_f64)));
            return Arc::new(builder.finish());
        }
        let mut builder = StringBuilder::new();
        for value in values {
            match value {
                None => builder.append_null(),
                Some(Value::String(text)) => builder.append_value(text),
                Some(other) => builder.append_value(other.to_string()),
            }
        }
        Arc::new(builder.finish())
    };
    let columns = schema.fields().iter().map(column).collect();
    Ok(RecordBatch::try_new(Arc::clone(schema), columns)?)
}
