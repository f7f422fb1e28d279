//! Converts values of a pipeline file to cells of Arrow columns.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, BinaryArray, BinaryViewArray, BooleanArray, FixedSizeBinaryArray, FixedSizeListArray,
    Float32Array, Float64Array, Int8Array, Int16Array, Int32Array, Int64Array, LargeBinaryArray, LargeListArray,
    LargeStringArray, ListArray, StringArray, StringViewArray, StructArray, UInt8Array, UInt16Array, UInt32Array,
    UInt64Array, new_empty_array, new_null_array,
};
use arrow::buffer::OffsetBuffer;
use arrow::compute::{CastOptions, cast, cast_with_options, concat};
use arrow::datatypes::{DataType, FieldRef};
use arrow::error::ArrowError;

use flow_spec::did_you_mean;
use flow_spec::yaml::{self, Mapping, Part, Steps, Value};

/// A value that does not fit its column.
pub(super) struct Unfit {
    /// From the value on.
    pub steps: Steps,
    pub part: Part,
    pub message: String,
    pub help: Option<String>,
}

impl Unfit {
    fn new(message: impl Into<String>) -> Unfit {
        Unfit {
            steps: Steps::default(),
            part: Part::Value,
            message: message.into(),
            help: None,
        }
    }

    /// The same with the path relative to the enclosing value.
    fn below(mut self, above: Steps) -> Unfit {
        self.steps = above.join(&self.steps);
        self
    }
}

impl From<ArrowError> for Unfit {
    fn from(error: ArrowError) -> Unfit {
        Unfit::new(error.to_string())
    }
}

/// One value as an array of one row. A missing value is null, or the default of its type where null is not allowed: 0,
/// false, an empty text, an empty list.
pub(super) fn cell(data_type: &DataType, nullable: bool, value: Option<&Value>) -> Result<ArrayRef, Unfit> {
    match value {
        None | Some(Value::Null) if nullable => Ok(new_null_array(data_type, 1)),
        None => empty(data_type),
        Some(Value::Null) => Err(Unfit::new("null is not allowed in this column")),
        Some(value) => filled(data_type, value),
    }
}

fn empty(data_type: &DataType) -> Result<ArrayRef, Unfit> {
    let value = match data_type {
        DataType::Boolean => Value::from(false),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Value::from(""),
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView => Value::from(""),
        DataType::FixedSizeBinary(length) => Value::from("00".repeat(usize::try_from(*length).unwrap_or_default())),
        DataType::List(_) | DataType::LargeList(_) => Value::Sequence(Vec::new()),
        DataType::Struct(_) => Value::Mapping(Mapping::new()),
        DataType::Dictionary(_, values) => return Ok(cast(&empty(values)?, data_type)?),
        other if other.is_numeric() => Value::from(0),
        other => {
            return Err(Unfit::new(format!(
                "a column of type {other} that allows no null has to be given"
            )));
        }
    };
    filled(data_type, &value)
}

fn filled(data_type: &DataType, value: &Value) -> Result<ArrayRef, Unfit> {
    let unfit = || Unfit::new(format!("expected {}, found {}", wanted(data_type), shown(value)));
    macro_rules! whole {
        ($array:ty, $number:ty) => {
            Arc::new(<$array>::from(vec![
                whole_number::<$number>(value).ok_or_else(unfit)?,
            ]))
        };
    }
    let text = || value.as_str().ok_or_else(unfit);
    let bytes = || hex::decode(value.as_str().ok_or_else(unfit)?).map_err(|_| unfit());
    Ok(match data_type {
        DataType::Boolean => Arc::new(BooleanArray::from(vec![value.as_bool().ok_or_else(unfit)?])),
        DataType::Int8 => whole!(Int8Array, i8),
        DataType::Int16 => whole!(Int16Array, i16),
        DataType::Int32 => whole!(Int32Array, i32),
        DataType::Int64 => whole!(Int64Array, i64),
        DataType::UInt8 => whole!(UInt8Array, u8),
        DataType::UInt16 => whole!(UInt16Array, u16),
        DataType::UInt32 => whole!(UInt32Array, u32),
        DataType::UInt64 => whole!(UInt64Array, u64),
        DataType::Float32 => Arc::new(Float32Array::from(vec![float(value).ok_or_else(unfit)? as f32])),
        DataType::Float64 => Arc::new(Float64Array::from(vec![float(value).ok_or_else(unfit)?])),
        DataType::Utf8 => Arc::new(StringArray::from(vec![text()?])),
        DataType::LargeUtf8 => Arc::new(LargeStringArray::from(vec![text()?])),
        DataType::Utf8View => Arc::new(StringViewArray::from(vec![text()?])),
        DataType::Binary => Arc::new(BinaryArray::from(vec![bytes()?.as_slice()])),
        DataType::LargeBinary => Arc::new(LargeBinaryArray::from(vec![bytes()?.as_slice()])),
        DataType::BinaryView => Arc::new(BinaryViewArray::from(vec![bytes()?.as_slice()])),
        DataType::FixedSizeBinary(length) => {
            let bytes = bytes()?;
            if usize::try_from(*length) != Ok(bytes.len()) {
                return Err(unfit());
            }
            Arc::new(FixedSizeBinaryArray::try_from_iter(std::iter::once(bytes))?)
        }
        DataType::List(item) => {
            let items = items(item, value.as_sequence().ok_or_else(unfit)?)?;
            let offsets = OffsetBuffer::from_lengths([items.len()]);
            Arc::new(ListArray::try_new(Arc::clone(item), offsets, items, None)?)
        }
        DataType::LargeList(item) => {
            let items = items(item, value.as_sequence().ok_or_else(unfit)?)?;
            let offsets = OffsetBuffer::from_lengths([items.len()]);
            Arc::new(LargeListArray::try_new(Arc::clone(item), offsets, items, None)?)
        }
        DataType::FixedSizeList(item, length) => {
            let items = items(item, value.as_sequence().ok_or_else(unfit)?)?;
            if usize::try_from(*length) != Ok(items.len()) {
                return Err(unfit());
            }
            Arc::new(FixedSizeListArray::try_new(Arc::clone(item), *length, items, None)?)
        }
        DataType::Struct(fields) => {
            let map = value.as_mapping().ok_or_else(unfit)?;
            known_columns(map, fields.iter().map(|field| field.name().as_str()))?;
            let columns: Result<Vec<ArrayRef>, Unfit> = fields
                .iter()
                .map(|field| {
                    let value = map.get(field.name().as_str());
                    let column = cell(field.data_type(), field.is_nullable(), value);
                    column.map_err(|unfit| unfit.below(Steps::default().key(field.name())))
                })
                .collect();
            Arc::new(StructArray::try_new(fields.clone(), columns?, None)?)
        }
        DataType::Dictionary(_, values) => cast(&filled(values, value)?, data_type)?,
        // Times, decimals and the like: from the text that Arrow reads.
        other => {
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Number(number) => number.to_string(),
                _ => return Err(unfit()),
            };
            let options = CastOptions {
                safe: false,
                ..CastOptions::default()
            };
            cast_with_options(&StringArray::from(vec![text]), other, &options).map_err(|_| unfit())?
        }
    })
}

/// Refuses the first key that names no column.
pub(super) fn known_columns<'a>(row: &Mapping, columns: impl Iterator<Item = &'a str> + Clone) -> Result<(), Unfit> {
    for key in row.keys() {
        let Some(name) = key.as_str() else {
            return Err(Unfit::new(format!("names of columns are text, found {}", shown(key))));
        };
        if !columns.clone().any(|column| column == name) {
            return Err(Unfit {
                steps: Steps::default().key(name),
                part: Part::Key,
                message: format!("there is no column `{name}`"),
                help: Some(did_you_mean(name, columns, "columns")),
            });
        }
    }
    Ok(())
}

/// The items of a list as one array.
fn items(item: &FieldRef, values: &[Value]) -> Result<ArrayRef, Unfit> {
    let cells: Result<Vec<ArrayRef>, Unfit> = values
        .iter()
        .enumerate()
        .map(|(index, value)| {
            let cell = cell(item.data_type(), item.is_nullable(), Some(value));
            cell.map_err(|unfit| unfit.below(Steps::default().index(index)))
        })
        .collect();
    Ok(joined(item.data_type(), &cells?)?)
}

/// Concatenates cells to a column.
pub(super) fn joined(data_type: &DataType, cells: &[ArrayRef]) -> Result<ArrayRef, ArrowError> {
    if cells.is_empty() {
        return Ok(new_empty_array(data_type));
    }
    let cells: Vec<&dyn Array> = cells.iter().map(AsRef::as_ref).collect();
    concat(&cells)
}

fn whole_number<N: TryFrom<i64> + TryFrom<u64>>(value: &Value) -> Option<N> {
    let signed = value.as_i64().and_then(|number| N::try_from(number).ok());
    signed.or_else(|| value.as_u64().and_then(|number| N::try_from(number).ok()))
}

/// A number, or one that has no digits, as `flow test --record` writes it.
fn float(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some("NaN") => Some(f64::NAN),
        Some("inf") => Some(f64::INFINITY),
        Some("-inf") => Some(f64::NEG_INFINITY),
        Some(_) => None,
        None => value.as_f64(),
    }
}

fn wanted(data_type: &DataType) -> String {
    match data_type {
        DataType::Boolean => "true or false".to_string(),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => "text".to_string(),
        DataType::Float32 | DataType::Float64 => "a number".to_string(),
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView => "bytes as hexadecimal text".to_string(),
        DataType::FixedSizeBinary(length) => format!("{length} bytes as hexadecimal text"),
        DataType::List(_) | DataType::LargeList(_) => "a list".to_string(),
        DataType::FixedSizeList(_, length) => format!("a list of {length}"),
        DataType::Struct(_) => "a map".to_string(),
        DataType::Dictionary(_, values) => wanted(values),
        other if other.is_integer() => format!("a whole number ({other})"),
        other => format!("a text that is a {other}"),
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        Value::Bool(value) => value.to_string(),
        Value::String(text) if text.chars().count() <= 40 => format!("the text {text:?}"),
        other => yaml::describe(other).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::{Field, TimeUnit};

    use super::*;
    use flow_base::row_json::value_text;

    fn json(data_type: &DataType, text: &str) -> Result<String, String> {
        let value = yaml::parse_text(text).unwrap();
        match cell(data_type, false, Some(&value)) {
            Ok(cell) => {
                assert_eq!((cell.len(), cell.data_type()), (1, data_type), "{text}");
                Ok(value_text(cell.as_ref(), 0).unwrap())
            }
            Err(unfit) => Err(format!("{}: {}", unfit.steps, unfit.message)),
        }
    }

    fn list(item: DataType) -> DataType {
        DataType::List(Arc::new(Field::new("item", item, false)))
    }

    #[test]
    fn values_become_cells_of_their_type() {
        let dictionary = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
        let pair = DataType::Struct(
            vec![
                Field::new("x", DataType::Float32, false),
                Field::new("y", DataType::Utf8, true),
            ]
            .into(),
        );
        for (data_type, text, expected) in [
            (DataType::Boolean, "true", "true"),
            (DataType::Int8, "-128", "-128"),
            (DataType::UInt64, "18446744073709551615", "18446744073709551615"),
            (DataType::Float64, "2", "2.0"),
            (DataType::Float64, ".nan", "\"NaN\""),
            (DataType::Float64, "'-inf'", "\"-inf\""),
            (DataType::Float32, "0.1", "0.1"),
            (DataType::Utf8, "'2'", "\"2\""),
            (DataType::LargeUtf8, "a", "\"a\""),
            (DataType::Utf8View, "a", "\"a\""),
            (DataType::Binary, "00ff", "\"00ff\""),
            (DataType::FixedSizeBinary(2), "00ff", "\"00ff\""),
            (list(DataType::Int32), "[1, 2]", "[1,2]"),
            (list(list(DataType::Int32)), "[[], [3]]", "[[],[3]]"),
            (dictionary, "a", "\"a\""),
            (pair, "{x: 1.5}", r#"{"x":1.5,"y":null}"#),
            (
                DataType::Timestamp(TimeUnit::Second, None),
                "'1970-01-01T00:00:01'",
                "\"1970-01-01T00:00:01\"",
            ),
        ] {
            assert_eq!(json(&data_type, text).as_deref(), Ok(expected), "{data_type}: {text}");
        }
    }

    #[test]
    fn values_that_do_not_fit_are_named() {
        for (data_type, text, expected) in [
            (DataType::Int8, "128", ": expected a whole number (Int8), found 128"),
            (DataType::UInt32, "-1", ": expected a whole number (UInt32), found -1"),
            (DataType::Int64, "1.0", ": expected a whole number (Int64), found 1.0"),
            (
                DataType::Float64,
                "much",
                ": expected a number, found the text \"much\"",
            ),
            (DataType::Utf8, "2", ": expected text, found 2"),
            (DataType::Utf8, "~", ": null is not allowed in this column"),
            (
                DataType::Binary,
                "xy",
                ": expected bytes as hexadecimal text, found the text \"xy\"",
            ),
            (
                DataType::FixedSizeBinary(2),
                "00",
                ": expected 2 bytes as hexadecimal text, found the text \"00\"",
            ),
            (list(DataType::Utf8), "[a, 1]", "[1]: expected text, found 1"),
            (list(DataType::Utf8), "a", ": expected a list, found the text \"a\""),
            (
                DataType::Timestamp(TimeUnit::Second, None),
                "soon",
                ": expected a text that is a Timestamp(s), found the text \"soon\"",
            ),
        ] {
            assert_eq!(json(&data_type, text), Err(expected.to_string()), "{data_type}: {text}");
        }
    }

    #[test]
    fn what_is_left_out_is_null_or_empty() {
        let left_out = |data_type: &DataType, nullable| {
            let cell = cell(data_type, nullable, None).ok().unwrap();
            value_text(cell.as_ref(), 0).unwrap()
        };
        assert_eq!(left_out(&DataType::Utf8, true), "null");
        for (data_type, expected) in [
            (DataType::Utf8, "\"\""),
            (DataType::Float64, "0.0"),
            (DataType::Boolean, "false"),
            (DataType::FixedSizeBinary(2), "\"0000\""),
            (list(DataType::Utf8), "[]"),
        ] {
            assert_eq!(left_out(&data_type, false), expected, "{data_type}");
        }
        assert!(cell(&DataType::Date32, false, None).is_err());
    }
}
