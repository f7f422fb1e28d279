//! Functions of this crate that SQL may call.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BooleanBuilder, StringArray};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, Float64Type};
use datafusion::common::{DataFusionError, Result, ScalarValue};
use datafusion::logical_expr::{ColumnarValue, Volatility, create_udf};
use datafusion::prelude::SessionContext;
use flow_corpus::extra::value_of;
use flow_corpus::names::{names_shard_file, strip_dot_slash, unsafe_name};
use flow_text::language_tag::untagged;
use flow_text::normalize::{TextRules, is_blank, norm_into, python_strip, text_into};
use flow_text::written_form::{nfc, strip_zero_width};

use crate::identify::identify_language;
use crate::language::Languages;

/// The functions, and the settings that they depend on. Each gives null where an argument is null.
///
/// - `clean_text(text)`, `norm_text(clean)`, `tagged_text(clean, lang)`, `untagged_text(text)`, `py_strip(text)`, `is_blank(text)`
/// - `nfc(text)`, `strip_zero_width(text)`
/// - `correct_language(clean, tag, path_lang)`, `identify_language(clean, lang, least)`
/// - `unsafe_name(name)`, `names_shard_file(name, shard_id)`, `strip_dot_slash(name)`
/// - `json_text(object, key)`, which is null, too, where the object has no such key
#[derive(Clone)]
pub struct Functions {
    pub text: Arc<TextRules>,
    pub languages: Arc<Languages>,
}

impl Default for Functions {
    fn default() -> Self {
        Functions {
            text: Arc::new(TextRules::default()),
            languages: Languages::shipped(),
        }
    }
}

impl Functions {
    pub(super) fn register(&self, context: &SessionContext) {
        let text = Arc::clone(&self.text);
        texts(context, "clean_text", move |[t], out| text.clean_into(t, out));
        texts(context, "norm_text", |[t], out| norm_into(t, out));
        texts(context, "py_strip", |[t], out| out.push_str(python_strip(t)));
        texts(context, "nfc", |[t], out| out.push_str(&nfc(t)));
        texts(context, "strip_zero_width", |[t], out| {
            out.push_str(&strip_zero_width(t))
        });
        texts(context, "strip_dot_slash", |[n], out| out.push_str(strip_dot_slash(n)));
        texts(context, "tagged_text", |[clean, lang], out| text_into(clean, lang, out));
        texts(context, "untagged_text", |[t], out| out.push_str(untagged(t)));
        let languages = Arc::clone(&self.languages);
        texts(context, "correct_language", move |[clean, tag, path], out| {
            out.push_str(&languages.correct(clean, tag, path))
        });
        identification(context);
        values_of_objects(context);
        truths(context, "is_blank", |[t]| is_blank(t));
        truths(context, "unsafe_name", |[n]| unsafe_name(n));
        truths(context, "names_shard_file", |[n, shard_id]| {
            names_shard_file(n, shard_id)
        });
    }
}

/// Registers `identify_language(clean, lang, least)`.
fn identification(context: &SessionContext) {
    let call = |args: &[ColumnarValue]| -> Result<ColumnarValue> {
        let arrays = ColumnarValue::values_to_arrays(args)?;
        let [clean, lang, least] = &arrays[..] else {
            return Err(DataFusionError::Internal(format!(
                "{} arguments instead of 3",
                arrays.len()
            )));
        };
        let (clean, lang) = (clean.as_string::<i32>(), lang.as_string::<i32>());
        let identified: StringArray = clean
            .iter()
            .zip(lang)
            .zip(least.as_primitive::<Float64Type>())
            .map(|((clean, lang), least)| Some(identify_language(clean?, lang?, least?)))
            .collect();
        Ok(ColumnarValue::Array(Arc::new(identified)))
    };
    context.register_udf(create_udf(
        "identify_language",
        vec![DataType::Utf8, DataType::Utf8, DataType::Float64],
        DataType::Utf8,
        Volatility::Immutable,
        Arc::new(call),
    ));
}

/// Registers `json_text(object, key)`.
fn values_of_objects(context: &SessionContext) {
    let call = |args: &[ColumnarValue]| -> Result<ColumnarValue> {
        let arrays = ColumnarValue::values_to_arrays(args)?;
        let [objects, keys] = &arrays[..] else {
            return Err(DataFusionError::Internal(format!(
                "{} arguments instead of 2",
                arrays.len()
            )));
        };
        let (objects, keys) = (objects.as_string::<i32>(), keys.as_string::<i32>());
        let values: StringArray = objects
            .iter()
            .zip(keys)
            .map(|(object, key)| value_of(object?, key?))
            .collect();
        Ok(ColumnarValue::Array(Arc::new(values)))
    };
    context.register_udf(create_udf(
        "json_text",
        vec![DataType::Utf8, DataType::Utf8],
        DataType::Utf8,
        Volatility::Immutable,
        Arc::new(call),
    ));
}

/// Registers a function of N texts that gives a text.
fn texts<const N: usize>(
    context: &SessionContext,
    name: &str,
    f: impl Fn([&str; N], &mut String) + Send + Sync + 'static,
) {
    let call = move |columns: [&StringArray; N], rows: usize| {
        // Texts are added to the end of one string: copied once, and not through a text of their own.
        let longest = columns.iter().map(|c| c.value_data().len()).max().unwrap_or(0);
        let mut texts = String::with_capacity(longest + 16 * rows);
        let mut ends: Vec<i32> = Vec::with_capacity(rows + 1);
        ends.push(0);
        for row in 0..rows {
            if !columns.iter().any(|c| c.is_null(row)) {
                f(columns.map(|c| c.value(row)), &mut texts);
            }
            let end = i32::try_from(texts.len());
            ends.push(
                end.map_err(|_| DataFusionError::Execution("the texts of a batch are longer than 2 GiB".into()))?,
            );
        }
        let nulls = columns
            .iter()
            .fold(None, |all, c| NullBuffer::union(all.as_ref(), c.nulls()));
        Ok(Arc::new(cut(texts, ends, nulls)?) as ArrayRef)
    };
    register(context, name, DataType::Utf8, call);
}

/// The pieces of `texts` between `ends`, the first of which is where the first piece begins. `nulls` is as long as there
/// are pieces.
fn cut(texts: String, ends: Vec<i32>, nulls: Option<NullBuffer>) -> Result<StringArray> {
    let between_characters = |&end: &i32| usize::try_from(end).is_ok_and(|end| texts.is_char_boundary(end));
    let pieces = ends.len().saturating_sub(1);
    if ends.is_empty()
        || !ends.is_sorted()
        || !ends.iter().all(between_characters)
        || nulls.as_ref().is_some_and(|nulls| nulls.len() != pieces)
    {
        return Err(DataFusionError::Internal(
            "texts are cut where no character ends".into(),
        ));
    }
    let ends = OffsetBuffer::new(ends.into());
    // SAFETY: a `String` is UTF-8, and so is each piece of it between two ends of characters, which was checked, as was
    // that the ends ascend within it and that there is one null bit to a piece. (Checking the bytes once more, as the
    // safe way does, costs a third of what the functions do.)
    Ok(unsafe { StringArray::new_unchecked(ends, texts.into_bytes().into(), nulls) })
}

/// Registers a function of N texts that gives a boolean.
fn truths<const N: usize>(context: &SessionContext, name: &str, f: impl Fn([&str; N]) -> bool + Send + Sync + 'static) {
    let call = move |columns: [&StringArray; N], rows: usize| {
        let mut out = BooleanBuilder::with_capacity(rows);
        for row in 0..rows {
            out.append_option((!columns.iter().any(|c| c.is_null(row))).then(|| f(columns.map(|c| c.value(row)))));
        }
        Ok(Arc::new(out.finish()) as ArrayRef)
    };
    register(context, name, DataType::Boolean, call);
}

fn register<const N: usize>(
    context: &SessionContext,
    name: &str,
    returns: DataType,
    call: impl Fn([&StringArray; N], usize) -> Result<ArrayRef> + Send + Sync + 'static,
) {
    let function =
        move |args: &[ColumnarValue]| -> Result<ColumnarValue> {
            let constant = args.iter().all(|arg| matches!(arg, ColumnarValue::Scalar(_)));
            let arrays = ColumnarValue::values_to_arrays(args)?;
            let mut columns = Vec::with_capacity(N);
            for array in &arrays {
                let text = array.as_any().downcast_ref::<StringArray>();
                columns.push(text.ok_or_else(|| {
                    DataFusionError::Internal(format!("an argument is {}, not text", array.data_type()))
                })?);
            }
            let columns: [&StringArray; N] = columns
                .try_into()
                .map_err(|_| DataFusionError::Internal(format!("{} arguments instead of {N}", arrays.len())))?;
            let rows = arrays.first().map_or(0, |array| array.len());
            let result = call(columns, rows)?;
            if constant {
                Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&result, 0)?))
            } else {
                Ok(ColumnarValue::Array(result))
            }
        };
    context.register_udf(create_udf(
        name,
        vec![DataType::Utf8; N],
        returns,
        Volatility::Immutable,
        Arc::new(function),
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters_alone() {
        let nulls = NullBuffer::from(vec![true, false, true]);
        let pieces = cut("कल ab".into(), vec![0, 3, 3, 9], Some(nulls.clone())).unwrap();
        assert_eq!(pieces.iter().collect::<Vec<_>>(), [Some("क"), None, Some("ल ab")]);
        assert!(pieces.to_data().validate_full().is_ok());
        for ends in [
            vec![],
            vec![0, 1, 3, 9],
            vec![0, 3, 0, 9],
            vec![0, 3, 3, 10],
            vec![-3, 0, 3, 9],
        ] {
            assert!(
                cut("कल ab".into(), ends.clone(), Some(nulls.clone())).is_err(),
                "{ends:?}"
            );
        }
        assert!(cut("कल ab".into(), vec![0, 9], Some(nulls)).is_err());
    }
}
