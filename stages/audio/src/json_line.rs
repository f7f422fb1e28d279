//! Lines of JSON as Python writes them: with NaN and Infinity, which JSON does not have.

use std::borrow::Cow;

use serde_json::Value;

const NOT_FINITE: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

/// Parses a line, and gives it as it was parsed: numbers that JSON does not have are null in it.
///
/// # Errors
/// Where the line is no JSON even so; the error is that of the line as it is.
pub fn parse(line: &str) -> Result<(Value, Cow<'_, str>), serde_json::Error> {
    let error = match serde_json::from_str(line) {
        Ok(value) => return Ok((value, Cow::Borrowed(line))),
        Err(error) => error,
    };
    let Some(changed) = with(line, |_| "null".to_owned()) else {
        return Err(error);
    };
    match serde_json::from_str(&changed) {
        Ok(value) => Ok((value, Cow::Owned(changed))),
        Err(_) => Err(error),
    }
}

/// Parses a line, in which numbers that JSON does not have are read as text: `"NaN"`.
///
/// # Errors
/// Where the line is no JSON even so; the error is that of the line as it is.
pub fn parse_with_words(line: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str(line).or_else(|error| {
        let changed = with(line, |word| format!("\"{word}\"")).ok_or(());
        changed
            .and_then(|changed| serde_json::from_str(&changed).map_err(|_| ()))
            .map_err(|()| error)
    })
}

/// The line with something else for each number that JSON does not have; none where there is no such number.
fn with(line: &str, instead: impl Fn(&str) -> String) -> Option<String> {
    let bytes = line.as_bytes();
    let (mut changed, mut copied, mut at) = (String::new(), 0, 0);
    // Whether a value may begin here.
    let mut expected = false;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                at += 1;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                expected = false;
            }
            b':' | b',' | b'[' => expected = true,
            byte if byte.is_ascii_whitespace() => {}
            b'N' | b'I' | b'-' if expected => {
                expected = false;
                let found = NOT_FINITE
                    .into_iter()
                    .find(|word| bytes[at..].starts_with(word.as_bytes()));
                if let Some(word) = found {
                    // The word is ASCII, so both ends are those of letters.
                    changed.push_str(line.get(copied..at)?);
                    changed.push_str(&instead(word));
                    at += word.len();
                    copied = at;
                    continue;
                }
            }
            _ => expected = false,
        }
        at += 1;
    }
    (copied > 0).then(|| changed + line.get(copied..).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn changed(line: &str) -> Option<String> {
        parse(line).ok().map(|(_, changed)| changed.into_owned())
    }

    #[test]
    fn numbers_that_json_does_not_have_are_null() {
        for (line, read) in [
            (
                r#"{"a": NaN, "b": [-Infinity,Infinity , 1]}"#,
                r#"{"a": null, "b": [null,null , 1]}"#,
            ),
            (
                r#"{"a": "NaN, \": NaN", "b":NaN}"#,
                r#"{"a": "NaN, \": NaN", "b":null}"#,
            ),
            (r#"{"a": "x: NaN"}"#, r#"{"a": "x: NaN"}"#),
        ] {
            assert_eq!(changed(line).as_deref(), Some(read));
        }
        let read = parse_with_words(r#"{"a": [NaN, 1], "b": -Infinity}"#).unwrap();
        assert_eq!(read, serde_json::json!({"a": ["NaN", 1], "b": "-Infinity"}));
        assert!(parse_with_words(r#"{"a": -NaN}"#).is_err());
        for line in [
            r#"{"a": NaNa}"#,
            r#"{NaN: 1}"#,
            r#"{"a": -NaN}"#,
            r#"{"a": nan}"#,
            r#"{"a": NaN"#,
        ] {
            assert_eq!(changed(line), None, "{line}");
        }
    }

    proptest! {
        #[test]
        fn any_line_is_read_or_refused(line in r#"([{}\[\]":,a\\ é]|NaN|-|Infinity|"a"|1){0,20}"#) {
            let _ = parse(&line);
        }
    }
}
