//! Whether a value fits the type of a default.

use crate::substitute;
use crate::yaml::{self, Steps, Value};
use flow_base::suggest::nearest;

pub(super) fn has_reference(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains("${"),
        Value::Sequence(items) => items.iter().any(has_reference),
        Value::Mapping(map) => map.values().any(has_reference),
        _ => false,
    }
}

/// The whole number that `1e5` or `100k` represents.
fn exactly_whole(given: &Value) -> Option<Value> {
    match given {
        Value::Number(number) => whole(number).map(Value::from),
        Value::String(text) => with_unit(text).map(Value::from),
        _ => None,
    }
}

/// A number such as 1e5 as the whole number that it is; none where it has a fraction, or is too large to be exact.
fn whole(number: &yaml::Number) -> Option<i64> {
    // Above, not every whole number is one in 64 bits of floating point.
    const EXACT: f64 = (1u64 << 53) as f64;
    let number = number.as_f64()?;
    (number.fract() == 0.0 && number.abs() <= EXACT).then_some(number as i64)
}

/// The whole number that `100k`, `1.5k` or `2M` represents; none for another text, or where it has a fraction.
fn with_unit(text: &str) -> Option<i64> {
    let (digits, zeros) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 3),
        None => (text.strip_suffix('M')?, 6),
    };
    let (whole, part) = digits.split_once('.').unwrap_or((digits, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let part = match part.trim_end_matches('0') {
        "" if is_number(part) => "",
        rest if is_number(rest) => rest,
        _ => return None,
    };
    if !is_number(whole) || part.len() > zeros {
        return None;
    }
    format!("{whole}{part:0<zeros$}").parse().ok()
}

fn is_list_of_scalars(list: &[Value]) -> bool {
    let is_scalar = |item: &Value| matches!(item, Value::String(_) | Value::Number(_) | Value::Bool(_));
    let same_type = |item: &Value| yaml::describe(item) == yaml::describe(&list[0]);
    !list.is_empty() && list.iter().all(|item| is_scalar(item) && same_type(item))
}

/// The first number of a value that is infinite or NaN, and where it is below `steps`.
pub(crate) fn place_of_not_finite<'v>(value: &'v Value, steps: &Steps) -> Option<(Steps, &'v Value)> {
    match value {
        Value::Number(number) => number
            .as_f64()
            .is_some_and(|number| !number.is_finite())
            .then(|| (steps.clone(), value)),
        Value::Sequence(items) => {
            let mut items = items.iter().enumerate();
            items.find_map(|(index, item)| place_of_not_finite(item, &steps.index(index)))
        }
        Value::Mapping(map) => map
            .iter()
            .find_map(|(key, value)| place_of_not_finite(value, &steps.key(key.as_str().unwrap_or_default()))),
        _ => None,
    }
}

fn not_finite(value: &Value) -> Option<&Value> {
    place_of_not_finite(value, &Steps::default()).map(|(_, number)| number)
}

/// Checks that numbers are finite, unless the default has one that is not.
pub(super) fn check_finite(declared: Option<&Value>, given: &Value) -> Result<(), String> {
    match not_finite(given) {
        Some(number) if declared.and_then(not_finite).is_none() => {
            Err(format!("expected a finite number, found {}", brief(number)))
        }
        _ => Ok(()),
    }
}

/// `given` in the type of `declared`; a map is merged into `standing`. A whole number fits a number; a number that is
/// whole (`1e5`, and the texts `100k` and `2M`) fits a whole number; a text, number or boolean fits a list of such, as
/// its only item.
pub(super) fn fit(declared: &Value, standing: &Value, given: Value) -> Result<Value, String> {
    match (declared, given) {
        (Value::Null, given) => Ok(merged(Some(standing), given)),
        (Value::String(default), given) if substitute::is_lone_reference(default) => Ok(given),
        (Value::Bool(_), given @ Value::Bool(_)) | (Value::String(_), given @ Value::String(_)) => Ok(given),
        (Value::Number(default), Value::Number(given)) if default.is_f64() => {
            Ok(Value::from(given.as_f64().unwrap_or(f64::NAN)))
        }
        (Value::Number(_), Value::Number(given)) if !given.is_f64() => Ok(Value::Number(given)),
        (Value::Number(default), given) if !default.is_f64() && exactly_whole(&given).is_some() => {
            Ok(exactly_whole(&given).unwrap_or(given))
        }
        (Value::Sequence(defaults), Value::Sequence(given)) => {
            let same_type = |a: &Value, b: &Value| yaml::describe(a) == yaml::describe(b);
            match defaults.first() {
                Some(first) if defaults.iter().all(|item| same_type(first, item)) => {
                    let items = given.into_iter().enumerate().map(|(index, item)| {
                        fit(first, first, item).map_err(|message| format!("item {}: {message}", index + 1))
                    });
                    Ok(Value::Sequence(items.collect::<Result<_, _>>()?))
                }
                _ => Ok(Value::Sequence(given)),
            }
        }
        // `input=talks` for a list of texts.
        (Value::Sequence(defaults), given @ (Value::String(_) | Value::Number(_) | Value::Bool(_)))
            if is_list_of_scalars(defaults) =>
        {
            fit(&defaults[0], &defaults[0], given).map(|item| Value::Sequence(vec![item]))
        }
        (Value::Mapping(defaults), Value::Mapping(given)) if defaults.is_empty() => {
            Ok(merged(Some(standing), Value::Mapping(given)))
        }
        (Value::Mapping(defaults), Value::Mapping(given)) => {
            let mut merged = standing.as_mapping().cloned().unwrap_or_default();
            for (key, value) in given {
                let Some(default) = defaults.get(&key) else {
                    let name = key.as_str().unwrap_or("?");
                    let near = nearest(name, defaults.keys().filter_map(Value::as_str));
                    return Err(format!(
                        "unknown key `{name}`{}",
                        near.map_or(String::new(), |near| format!("; did you mean `{near}`?"))
                    ));
                };
                let below = merged.get(&key).unwrap_or(default).clone();
                let name = key.as_str().unwrap_or("?").to_string();
                merged.insert(
                    key,
                    fit(default, &below, value).map_err(|message| format!("`{name}`: {message}"))?,
                );
            }
            Ok(Value::Mapping(merged))
        }
        (declared, given) => Err(format!(
            "expected {} like its default {}, found {}",
            yaml::describe(declared),
            brief(declared),
            brief(&given)
        )),
    }
}

/// A value on one line, for a message.
pub(crate) fn brief(value: &Value) -> String {
    // The longest text that still leaves a message readable.
    const SHOWN: usize = 60;
    let text = match value {
        Value::Null => "nothing".to_string(),
        Value::String(text) => format!("{text:?}"),
        Value::Sequence(_) | Value::Mapping(_) => {
            serde_json::to_string(value).unwrap_or_else(|_| yaml::describe(value).to_string())
        }
        other => yaml::to_text(other).trim_end().to_string(),
    };
    if text.chars().count() <= SHOWN {
        text
    } else {
        text.chars().take(SHOWN).chain("...".chars()).collect()
    }
}

/// `value` on top of the present one: maps key by key, others in its place.
fn merged(present: Option<&Value>, value: Value) -> Value {
    match (present, value) {
        (Some(Value::Mapping(present)), Value::Mapping(value)) => {
            let mut all = present.clone();
            for (key, value) in value {
                let value = merged(all.get(&key), value);
                all.insert(key, value);
            }
            Value::Mapping(all)
        }
        (_, value) => value,
    }
}
