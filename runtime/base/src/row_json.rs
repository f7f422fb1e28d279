//! Rejected rows with their values as JSON.

use std::fmt::Write;

use arrow::array::{Array, AsArray, RecordBatch, StringArray};
use arrow::datatypes::{
    DataType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow::util::display::{ArrayFormatter, FormatOptions};

use crate::error::StageError;
use crate::reject::{Reject, RejectClass};
use crate::row_number::ROW;

/// Gives rejects of the rows at `positions`, one at a time: `_row` and `id_column` where the batch has them, and all other
/// columns as a JSON object, in the order of the schema.
///
/// Numbers that JSON does not have are strings (`"NaN"`, `"inf"`, `"-inf"`), binary is hexadecimal, and lists of floats
/// (signals, features) are left out because of their size.
pub fn rejects(
    batch: &RecordBatch,
    id_column: &str,
    positions: &[usize],
    reason: &str,
    class: RejectClass,
    detail: &str,
    mut give: impl FnMut(Reject),
) -> Result<(), StageError> {
    let rows = match batch.column_by_name(ROW) {
        Some(column) => Some(
            column
                .as_primitive_opt::<UInt32Type>()
                .ok_or_else(|| StageError::failed(format!("column `{ROW}` is {}, not UInt32", column.data_type())))?,
        ),
        None => None,
    };
    let ids = match batch.column_by_name(id_column) {
        Some(column) => Some(arrow::compute::cast(column, &DataType::Utf8)?),
        None => None,
    };
    let ids: Option<&StringArray> = ids.as_ref().and_then(|column| column.as_string_opt());
    // Dictionaries are looked up once and not for each row.
    let mut columns = Vec::with_capacity(batch.num_columns());
    for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        if field.name() == ROW || field.name() == id_column || is_signal(column.data_type()) {
            continue;
        }
        let column = match column.data_type() {
            DataType::Dictionary(_, values) => arrow::compute::cast(column, values)?,
            _ => column.clone(),
        };
        columns.push((field.name(), column));
    }
    for &at in positions {
        if at >= batch.num_rows() {
            return Err(StageError::failed(format!(
                "row {at} of a batch of {} rows was refused",
                batch.num_rows()
            )));
        }
        let mut values = String::from("{");
        for (name, column) in &columns {
            if values.len() > 1 {
                values.push(',');
            }
            write_text(&mut values, name);
            values.push(':');
            write_value(&mut values, column.as_ref(), at)?;
        }
        values.push('}');
        give(Reject {
            row: rows.filter(|rows| rows.is_valid(at)).map(|rows| rows.value(at)),
            id: ids
                .filter(|column| column.is_valid(at))
                .map(|column| column.value(at).to_string()),
            reason: reason.to_string(),
            class,
            detail: detail.to_string(),
            values,
        });
    }
    Ok(())
}

/// One value as JSON, in the form that [`rejects`] has.
pub fn value_text(column: &dyn Array, at: usize) -> Result<String, StageError> {
    let mut text = String::new();
    write_value(&mut text, column, at)?;
    Ok(text)
}

/// Whether a column holds lists of floats.
pub fn is_signal(data_type: &DataType) -> bool {
    match data_type {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            item.data_type().is_floating() || is_signal(item.data_type())
        }
        _ => false,
    }
}

fn write_text(out: &mut String, text: &str) {
    // Serialising a string cannot fail.
    out.push_str(&serde_json::to_string(text).unwrap_or_default());
}

fn write_hex(out: &mut String, bytes: &[u8]) {
    write_text(out, &hex::encode(bytes));
}

/// The shortest number that reads back as the same; `NaN` and infinities as strings.
fn write_float(out: &mut String, value: f64, number: impl serde::Serialize) {
    match value {
        v if v.is_nan() => write_text(out, "NaN"),
        f64::INFINITY => write_text(out, "inf"),
        f64::NEG_INFINITY => write_text(out, "-inf"),
        // Serialising a finite number cannot fail.
        _ => out.push_str(&serde_json::to_string(&number).unwrap_or_default()),
    }
}

fn write_value(out: &mut String, column: &dyn Array, at: usize) -> Result<(), StageError> {
    macro_rules! number {
        ($kind:ty) => {{
            let _ = write!(out, "{}", column.as_primitive::<$kind>().value(at));
        }};
    }
    if column.is_null(at) {
        out.push_str("null");
        return Ok(());
    }
    match column.data_type() {
        DataType::Null => out.push_str("null"),
        DataType::Boolean => out.push_str(if column.as_boolean().value(at) { "true" } else { "false" }),
        DataType::Int8 => number!(Int8Type),
        DataType::Int16 => number!(Int16Type),
        DataType::Int32 => number!(Int32Type),
        DataType::Int64 => number!(Int64Type),
        DataType::UInt8 => number!(UInt8Type),
        DataType::UInt16 => number!(UInt16Type),
        DataType::UInt32 => number!(UInt32Type),
        DataType::UInt64 => number!(UInt64Type),
        DataType::Float16 => {
            let value = column.as_primitive::<Float16Type>().value(at).to_f32();
            write_float(out, value.into(), value);
        }
        DataType::Float32 => {
            let value = column.as_primitive::<Float32Type>().value(at);
            write_float(out, value.into(), value);
        }
        DataType::Float64 => {
            let value = column.as_primitive::<Float64Type>().value(at);
            write_float(out, value, value);
        }
        DataType::Utf8 => write_text(out, column.as_string::<i32>().value(at)),
        DataType::LargeUtf8 => write_text(out, column.as_string::<i64>().value(at)),
        DataType::Utf8View => write_text(out, column.as_string_view().value(at)),
        DataType::Binary => write_hex(out, column.as_binary::<i32>().value(at)),
        DataType::LargeBinary => write_hex(out, column.as_binary::<i64>().value(at)),
        DataType::BinaryView => write_hex(out, column.as_binary_view().value(at)),
        DataType::FixedSizeBinary(_) => write_hex(out, column.as_fixed_size_binary().value(at)),
        DataType::List(_) => write_list(out, column.as_list::<i32>().value(at).as_ref())?,
        DataType::LargeList(_) => write_list(out, column.as_list::<i64>().value(at).as_ref())?,
        DataType::FixedSizeList(_, _) => write_list(out, column.as_fixed_size_list().value(at).as_ref())?,
        DataType::Struct(fields) => {
            out.push('{');
            for (i, (field, values)) in fields.iter().zip(column.as_struct().columns()).enumerate() {
                if i > 0 {
                    out.push(',');
                }
                write_text(out, field.name());
                out.push(':');
                write_value(out, values.as_ref(), at)?;
            }
            out.push('}');
        }
        DataType::Dictionary(_, _) => {
            let dictionary = column.as_any_dictionary();
            let key = dictionary.normalized_keys().get(at).copied();
            match key {
                Some(key) if key < dictionary.values().len() => write_value(out, dictionary.values().as_ref(), key)?,
                _ => out.push_str("null"),
            }
        }
        // Times, decimals and the like: as Arrow writes them.
        _ => {
            let formatter = ArrayFormatter::try_new(column, &FormatOptions::default())?;
            write_text(out, &formatter.value(at).try_to_string()?);
        }
    }
    Ok(())
}

fn write_list(out: &mut String, items: &dyn Array) -> Result<(), StageError> {
    out.push('[');
    for at in 0..items.len() {
        if at > 0 {
            out.push(',');
        }
        write_value(out, items, at)?;
    }
    out.push(']');
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::*;
    use arrow::datatypes::{Field, Schema};
    use proptest::prelude::*;

    use super::*;

    fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
        let fields: Vec<Field> = columns
            .iter()
            .map(|(n, c)| Field::new(*n, c.data_type().clone(), true))
            .collect();
        RecordBatch::try_new(
            Arc::new(Schema::new(fields)),
            columns.into_iter().map(|(_, c)| c).collect(),
        )
        .unwrap()
    }

    fn of(batch: &RecordBatch, at: usize) -> Reject {
        let mut given = Vec::new();
        rejects(batch, "name", &[at], "reason", RejectClass::Fault, "detail", |reject| {
            given.push(reject)
        })
        .unwrap();
        given.remove(0)
    }

    #[test]
    fn values_are_written_in_the_order_of_the_schema() {
        let tokens = ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(1), None]), None]);
        let signal = ListArray::from_iter_primitive::<Float32Type, _, _>([Some(vec![Some(0.5)]), None]);
        let words: DictionaryArray<Int32Type> = ["b", "a"].into_iter().collect();
        let pair = StructArray::from(vec![
            (
                Arc::new(Field::new("x", DataType::Float32, true)),
                Arc::new(Float32Array::from(vec![0.1, f32::NEG_INFINITY])) as ArrayRef,
            ),
            (
                Arc::new(Field::new("y", DataType::Boolean, true)),
                Arc::new(BooleanArray::from(vec![Some(true), None])) as ArrayRef,
            ),
        ]);
        let batch = batch(vec![
            ("zulu", Arc::new(Float64Array::from(vec![f64::NAN, 1e300]))),
            ("_row", Arc::new(UInt32Array::from(vec![7, 8]))),
            ("name", Arc::new(StringViewArray::from(vec![Some("s"), None]))),
            ("text", Arc::new(StringArray::from(vec![Some("a \"b\"\n\u{1}"), None]))),
            ("count", Arc::new(Int64Array::from(vec![i64::MIN, 0]))),
            ("big", Arc::new(UInt64Array::from(vec![u64::MAX, 0]))),
            ("tokens", Arc::new(tokens)),
            ("signal", Arc::new(signal)),
            ("hash", Arc::new(BinaryArray::from(vec![b"\x00\xff".as_slice(), b""]))),
            ("word", Arc::new(words)),
            ("pair", Arc::new(pair)),
            ("at", Arc::new(TimestampSecondArray::from(vec![0, 1]))),
            ("score", Arc::new(Float64Array::from(vec![f64::INFINITY, 2.0]))),
        ]);
        let first = of(&batch, 0);
        assert_eq!((first.row, first.id.as_deref()), (Some(7), Some("s")));
        assert_eq!(
            first.values,
            r#"{"zulu":"NaN","text":"a \"b\"\n\u0001","count":-9223372036854775808,"big":18446744073709551615,"tokens":[1,null],"hash":"00ff","word":"b","pair":{"x":0.1,"y":true},"at":"1970-01-01T00:00:00","score":"inf"}"#
        );
        let second = of(&batch, 1);
        assert_eq!((second.row, second.id), (Some(8), None));
        assert_eq!(
            second.values,
            r#"{"zulu":1e+300,"text":null,"count":0,"big":0,"tokens":null,"hash":"","word":"a","pair":{"x":"-inf","y":null},"at":"1970-01-01T00:00:01","score":2.0}"#
        );
    }

    #[test]
    fn what_is_not_there_is_no_panic() {
        let plain = batch(vec![("a", Arc::new(Int8Array::from(vec![1])))]);
        let reject = of(&plain, 0);
        assert_eq!(
            (reject.row, reject.id, reject.values.as_str()),
            (None, None, r#"{"a":1}"#)
        );
        assert!(rejects(&plain, "name", &[1], "r", RejectClass::Rule, "", drop).is_err());
        let wrong = batch(vec![("_row", Arc::new(Int64Array::from(vec![1])))]);
        let error = rejects(&wrong, "name", &[0], "r", RejectClass::Rule, "", drop)
            .unwrap_err()
            .to_string();
        assert!(error.contains("_row") && error.contains("Int64"), "{error}");
    }

    proptest! {
        #[test]
        fn any_text_and_number_reads_back(name in any::<String>(), text in any::<String>(), number in any::<f64>(), narrow in any::<f32>()) {
            prop_assume!(!["_row", "name", "n", "f"].contains(&name.as_str()));
            let batch = batch(vec![
                (name.as_str(), Arc::new(StringArray::from(vec![text.clone()]))),
                ("n", Arc::new(Float64Array::from(vec![number]))),
                ("f", Arc::new(Float32Array::from(vec![narrow]))),
            ]);
            let written = of(&batch, 0).values;
            let value: serde_json::Value = serde_json::from_str(&written).unwrap();
            prop_assert_eq!(value[&name].as_str(), Some(text.as_str()));
            // Read from the text: serde_json itself reads numbers to the last digit but one.
            let (rest, narrow_text) = written.trim_end_matches('}').rsplit_once(",\"f\":").unwrap();
            let (_, number_text) = rest.rsplit_once(",\"n\":").unwrap();
            if number.is_finite() {
                prop_assert_eq!(number_text.parse::<f64>().unwrap(), number);
            }
            if narrow.is_finite() {
                prop_assert_eq!(narrow_text.parse::<f32>().unwrap(), narrow);
            }
        }
    }
}
