//! Keys of manifest lines that rows have no column for: kept as one JSON object, each value as it is written.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// The column that holds it.
pub const EXTRA: &str = "extra";

/// Keys of a line that rows have columns for.
const OF_COLUMNS: [&str; 10] = [
    "audio_filepath",
    "offset",
    "duration",
    "text",
    "lang",
    "segment_id",
    "shard_id",
    "tar_member_name",
    "tar_path",
    "source",
];

/// Keys and values of a JSON object, without those that rows have columns for.
///
/// # Errors
/// Where `text` is not a JSON object.
pub fn members(text: &str) -> Result<BTreeMap<String, &str>, serde_json::Error> {
    let mut members = all_members(text)?;
    members.retain(|key, _| !OF_COLUMNS.contains(&key.as_str()));
    Ok(members)
}

/// Keys of a JSON object, and each value as it is written; the last one of those with the same key.
fn all_members(text: &str) -> Result<BTreeMap<String, &str>, serde_json::Error> {
    let members: BTreeMap<String, &RawValue> = serde_json::from_str(text)?;
    Ok(members.into_iter().map(|(key, value)| (key, value.get())).collect())
}

/// Whether rows have a column for a key of a line.
pub fn has_column(key: &str) -> bool {
    OF_COLUMNS.contains(&key)
}

/// The members of a line's `fields` that are neither columns nor among the keys `used`; none where there are none.
pub fn of_line(line: &str, fields: &Map<String, Value>, used: &[&str]) -> Option<String> {
    let has_place = |key: &str| has_column(key) || used.contains(&key);
    if fields.keys().all(|key| has_place(key)) {
        return None;
    }
    let mut members = members(line).ok()?;
    members.retain(|key, _| !has_place(key));
    Some(object(&members))
}

/// A column of this name in a table of others: a JSON object as it is, any other text as the value of that key; none where
/// there is nothing.
pub fn of_column(text: &str) -> Option<String> {
    match members(text) {
        Ok(members) => (!members.is_empty()).then(|| text.to_string()),
        Err(_) if text.is_empty() => None,
        Err(_) => Some(serde_json::json!({ EXTRA: text }).to_string()),
    }
}

/// Members as one JSON object.
pub fn object(members: &BTreeMap<String, &str>) -> String {
    let member = |(key, value): (&String, &&str)| format!("{}:{value}", Value::from(key.as_str()));
    let members: Vec<String> = members.iter().map(member).collect();
    format!("{{{}}}", members.join(","))
}

/// The value of a key of a JSON object: a text as it is, anything else as it is written. None where the object has no such
/// key or the value is null, and where `object` is none.
pub fn value_of(object: &str, key: &str) -> Option<String> {
    let members = all_members(object).ok()?;
    let value = *members.get(key)?;
    match serde_json::from_str(value) {
        Ok(Value::Null) => None,
        Ok(Value::String(text)) => Some(text),
        _ => Some(value.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extra(line: &str) -> Option<String> {
        of_line(line, &serde_json::from_str(line).unwrap(), &[])
    }

    #[test]
    fn keys_that_are_used_are_not_kept() {
        let line = r#"{"file_name": "a.wav", "transcription": "x", "speaker": 7}"#;
        let fields = serde_json::from_str(line).unwrap();
        let used = ["file_name", "transcription"];
        assert_eq!(of_line(line, &fields, &used).as_deref(), Some(r#"{"speaker":7}"#));
        assert_eq!(of_line(line, &fields, &["speaker", used[0], used[1]]), None);
    }

    #[test]
    fn a_column_of_others_that_is_no_object_is_kept_as_text() {
        assert_eq!(of_column(r#"{"a": 1}"#).as_deref(), Some(r#"{"a": 1}"#));
        assert_eq!(of_column("noisy \"x\"").as_deref(), Some(r#"{"extra":"noisy \"x\""}"#));
        assert_eq!(of_column("[1]").as_deref(), Some(r#"{"extra":"[1]"}"#));
        assert_eq!((of_column(""), of_column("{}")), (None, None));
        let kept = of_column("noisy").unwrap();
        assert_eq!(value_of(&kept, EXTRA).as_deref(), Some("noisy"));
    }

    #[test]
    fn values_stay_as_they_are_written() {
        assert_eq!(extra(r#"{"text": "x", "duration": 1, "lang": "hi"}"#), None);
        // A number that floating point does not have, and one that 64 bits do not hold.
        let line = r#"{"text": "x", "snr": 0.10000000000000000001, "b": [1,  {"c": "\u0928"}], "id": 123456789012345678901, "snr": 1.50}"#;
        assert_eq!(
            extra(line).unwrap(),
            r#"{"b":[1,  {"c": "\u0928"}],"id":123456789012345678901,"snr":1.50}"#
        );
        assert_eq!(
            extra(r#"{"text": "x", "extra": {"a": 1}}"#).unwrap(),
            r#"{"extra":{"a": 1}}"#
        );
    }

    #[test]
    fn values_are_found_by_their_key() {
        let object = r#"{"speaker": "s\u0031", "age": 30, "tags": ["a"], "none": null}"#;
        let value = |key| value_of(object, key);
        assert_eq!(value("speaker").as_deref(), Some("s1"));
        assert_eq!(value("age").as_deref(), Some("30"));
        assert_eq!(value("tags").as_deref(), Some(r#"["a"]"#));
        assert_eq!((value("none"), value("other")), (None, None));
        assert_eq!(value_of("no object", "a"), None);
        assert!(members("[1]").is_err());
    }
}
