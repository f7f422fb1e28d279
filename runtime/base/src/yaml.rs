//! Reading YAML: documents, paths into them, and the place of a path in the text.

mod locate;
mod place_index;

use std::fmt;

/// Methods of a visitor that treats all scalars alike, by its method `scalar`.
macro_rules! visit_scalars {
    () => { visit_scalars!(visit_bool bool, visit_i64 i64, visit_u64 u64, visit_i128 i128, visit_u128 u128, visit_f64 f64, visit_str &str); };
    ($($visit:ident $scalar:ty),+) => {
        $(fn $visit<E: de::Error>(self, _: $scalar) -> Result<Self::Value, E> {
            self.scalar()
        })+

        fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
            self.scalar()
        }
    };
}
use visit_scalars;

pub use locate::{Part, locate};
pub use place_index::{Indexed, PlaceIndex};
use serde::de::DeserializeOwned;
pub use serde_yaml::{Mapping, Number, Value};

use crate::suggest::did_you_mean;

/// One step of a path into a document.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    Key(String),
    Index(usize),
}

/// A path into a document, written `rejects[1].when`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Steps(pub Vec<Step>);

impl Steps {
    pub fn key(&self, key: &str) -> Steps {
        let mut steps = self.clone();
        steps.0.push(Step::Key(key.to_string()));
        steps
    }

    pub fn index(&self, index: usize) -> Steps {
        let mut steps = self.clone();
        steps.0.push(Step::Index(index));
        steps
    }

    pub fn join(&self, more: &Steps) -> Steps {
        Steps(self.0.iter().chain(&more.0).cloned().collect())
    }

    /// Reads `rejects[1].when`. What is not of that form is taken as a key.
    pub fn parse(text: &str) -> Steps {
        let mut steps = Vec::new();
        for part in text.split('.').filter(|part| !part.is_empty()) {
            let mut rest = part;
            let mut indexes = Vec::new();
            while let Some((before, index)) = rest
                .strip_suffix(']')
                .and_then(|open| open.rsplit_once('['))
                .and_then(|(before, digits)| Some((before, digits.parse::<usize>().ok()?)))
            {
                indexes.push(index);
                rest = before;
            }
            if !rest.is_empty() {
                steps.push(Step::Key(rest.to_string()));
            }
            steps.extend(indexes.into_iter().rev().map(Step::Index));
        }
        Steps(steps)
    }

    /// The value at this path, if there is one.
    pub fn of<'v>(&self, mut value: &'v Value) -> Option<&'v Value> {
        for step in &self.0 {
            value = match (step, value) {
                (Step::Key(key), Value::Mapping(map)) => map.get(key.as_str())?,
                (Step::Index(index), Value::Sequence(items)) => items.get(*index)?,
                _ => return None,
            };
        }
        Some(value)
    }
}

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, step) in self.0.iter().enumerate() {
            match step {
                Step::Key(key) if position == 0 => f.write_str(key)?,
                Step::Key(key) => write!(f, ".{key}")?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

/// A document that is not YAML.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct SyntaxError {
    pub message: String,
    /// Line and column, both from 1, the column in characters.
    pub at: Option<(usize, usize)>,
    /// It is YAML, but a map has a key twice.
    pub is_doubled_key: bool,
}

/// The text without the byte order mark that some editors put at the head of a file.
pub fn without_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

/// Reads one YAML document. An empty one is null.
pub fn parse_text(text: &str) -> Result<Value, SyntaxError> {
    let text = without_mark(text);
    if text.trim().is_empty() {
        return Ok(Value::Null);
    }
    if let Err(place) = flow_yaml_guard::check(text) {
        return Err(SyntaxError {
            message: flow_yaml_guard::TOO_DEEP.to_string(),
            at: Some((place.line, place.column)),
            is_doubled_key: false,
        });
    }
    serde_yaml::from_str::<Value>(text).map_err(|error| {
        if let Some((key, at)) = place_index::doubled_key(text) {
            return SyntaxError {
                message: format!("duplicate key: `{key}` is given twice in one map"),
                at: Some(at),
                is_doubled_key: true,
            };
        }
        let at = error.location().map(|location| (location.line(), location.column()));
        SyntaxError {
            message: without_place(&error.to_string()),
            at,
            is_doubled_key: false,
        }
    })
}

/// Reads a file of a form of its own, such as a table of names. The message of an error says where in the text the
/// mistake is.
///
/// # Errors
/// When the text is not YAML, or does not fit the type.
pub fn from_text<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let text = without_mark(text);
    flow_yaml_guard::check(text).map_err(|error| error.to_string())?;
    serde_yaml::from_str(text).map_err(|error| error.to_string())
}

/// Writes a document.
pub fn to_text(value: &Value) -> String {
    // A value that was read from YAML can be written as YAML; nested tags, the one exception, are refused
    // when a pipeline is read.
    serde_yaml::to_string(value).unwrap_or_default()
}

/// The type of a value, for messages: `a whole number`.
pub fn describe(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(number) if number.is_f64() => "a number",
        Value::Number(_) => "a whole number",
        Value::String(_) => "text",
        Value::Sequence(_) => "a list",
        Value::Mapping(_) => "a map",
        Value::Tagged(_) => "a tagged value",
    }
}

/// The message without serde_yaml's `at line 3 column 4`, which our own diagnostics show better.
fn without_place(message: &str) -> String {
    let mut parts = message.split(" at line ");
    let mut text = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let is_place = |c: char| c.is_ascii_digit() || " column".contains(c);
        let rest = part.trim_start_matches(is_place);
        // The blank before a word that follows was taken with the place.
        text.push_str(if rest.starts_with(char::is_alphabetic) { " " } else { "" });
        text.push_str(rest);
    }
    text
}

/// A value that does not fit the type it should have.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{steps}: {message}")]
pub struct TypedError {
    pub steps: Steps,
    /// Whether the key or the value is wrong.
    pub part: Part,
    pub message: String,
    pub help: Option<String>,
}

/// Reads a value into a type.
pub fn typed<T: DeserializeOwned>(value: &Value) -> Result<T, TypedError> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        use serde_path_to_error::Segment;
        let steps = error.path().iter().filter_map(|segment| match segment {
            Segment::Map { key } => Some(Step::Key(key.clone())),
            Segment::Seq { index } => Some(Step::Index(*index)),
            Segment::Enum { .. } | Segment::Unknown => None,
        });
        let (message, help) = plain_words(&error.inner().to_string());
        let part = if message.starts_with("unknown setting") {
            Part::Key
        } else {
            Part::Value
        };
        TypedError {
            steps: Steps(steps.collect()),
            part,
            message,
            help,
        }
    })
}

/// Serde's messages in the terms of the other messages.
fn plain_words(message: &str) -> (String, Option<String>) {
    let names: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    match names.split_first() {
        Some((name, known)) if message.starts_with("unknown field") => {
            return (
                format!("unknown setting `{name}`"),
                Some(did_you_mean(name, known.iter().copied(), "settings")),
            );
        }
        Some((name, known)) if message.starts_with("unknown variant") => {
            return (
                format!("`{name}` is not a valid value here"),
                Some(did_you_mean(name, known.iter().copied(), "values")),
            );
        }
        Some((name, _)) if message.starts_with("missing field") => {
            return (format!("the setting `{name}` is missing"), None);
        }
        Some((name, _)) if message.starts_with("duplicate field") => {
            return (format!("the setting `{name}` appears twice"), None);
        }
        _ => {}
    }
    let Some((found, expected)) = message
        .strip_prefix("invalid type: ")
        .or_else(|| message.strip_prefix("invalid value: "))
        .and_then(|rest| rest.rsplit_once(", expected "))
    else {
        return (message.to_string(), None);
    };
    let expected = match expected {
        "f64" | "f32" => "a number",
        "u8" | "u16" | "u32" | "u64" | "usize" | "u128" => "a whole number, 0 or more",
        "i8" | "i16" | "i32" | "i64" | "isize" | "i128" => "a whole number",
        "a string" | "string" | "str" | "path string" => "text",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        other if other.starts_with("struct ") => "a map of settings",
        other => other,
    };
    let found = match found {
        "unit value" => "nothing".to_string(),
        "sequence" => "a list".to_string(),
        "map" => "a map".to_string(),
        other => other
            .replacen("string ", "text ", 1)
            .replacen("integer ", "", 1)
            .replacen("floating point ", "", 1)
            .replacen("boolean ", "", 1),
    };
    (format!("expected {expected}, found {found}"), None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn paths_read_and_write() {
        for text in ["a", "rejects[2].when", "a.b[0][1].c", "[3]"] {
            assert_eq!(Steps::parse(text).to_string(), text);
        }
        assert_eq!(Steps::parse("a[x]").0, [Step::Key("a[x]".into())]);
        assert_eq!(Steps::parse("").0, []);
    }

    #[test]
    fn places_of_keys_and_values() {
        let text = "# head\nstages:\n  scan:\n    with: {shards: \"x\", ü: [1, 2.5]}\n    list:\n      - a\n      - {k: ~}\n    empty:\n";
        let at = |path: &str, part| locate(text, &Steps::parse(path), part);
        assert_eq!(at("stages", Part::Key), Some((2, 1)));
        assert_eq!(at("stages.scan", Part::Key), Some((3, 3)));
        assert_eq!(at("stages.scan.with.shards", Part::Value), Some((4, 20)));
        assert_eq!(at("stages.scan.with.ü[1]", Part::Value), Some((4, 32)));
        assert_eq!(at("stages.scan.list[0]", Part::Value), Some((6, 9)));
        assert_eq!(at("stages.scan.list[1].k", Part::Key), Some((7, 10)));
        assert_eq!(at("stages.scan.list[2]", Part::Value), None);
        assert_eq!(at("stages.none", Part::Key), None);
        assert!(at("stages.scan.empty", Part::Value).is_some());
        let index = PlaceIndex::of(text).expect("an index");
        for (path, part) in [
            ("stages", Part::Key),
            ("stages.scan", Part::Key),
            ("stages.scan.with.shards", Part::Value),
            ("stages.scan.with.ü[1]", Part::Value),
            ("stages.scan.list[0]", Part::Key),
            ("stages.scan.list[1].k", Part::Key),
            ("stages.scan.list[1].k", Part::Value),
            ("stages.scan.empty", Part::Value),
        ] {
            let place = at(path, part).expect("a place");
            assert_eq!(index.get(&Steps::parse(path), part), Indexed::At(place), "{path}");
        }
        let with = index.get(&Steps::parse("stages.scan.with"), Part::Value);
        assert_eq!(with, Indexed::Container);
        assert_eq!(index.get(&Steps::parse("stages.none"), Part::Key), Indexed::Absent);
    }

    #[test]
    fn messages_are_in_plain_words() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        #[allow(dead_code)]
        struct Settings {
            share: f64,
            count: Option<u32>,
            names: Option<Vec<String>>,
        }
        let error = |text: &str| {
            let error = typed::<Settings>(&parse_text(text).unwrap()).unwrap_err();
            format!(
                "{}: {} ({})",
                error.steps,
                error.message,
                error.help.unwrap_or_default()
            )
        };
        assert_eq!(
            error("{share: high}"),
            "share: expected a number, found text \"high\" ()"
        );
        assert_eq!(
            error("{share: 1, count: -1}"),
            "count: expected a whole number, 0 or more, found `-1` ()"
        );
        assert_eq!(
            error("{share: 1, names: [a, [b]]}"),
            "names[1]: expected text, found a list ()"
        );
        assert_eq!(
            error("{share: 1, cuont: 1}"),
            "cuont: unknown setting `cuont` (did you mean `count`?)"
        );
        assert_eq!(error("{}"), ": the setting `share` is missing ()");
        assert_eq!(error("[]"), ": expected a map of settings, found a list ()");
    }

    #[test]
    fn syntax_errors_have_a_place() {
        let error = parse_text("a: 1\nb: [1, 2\nc: 3\n").unwrap_err();
        assert!(error.at.is_some_and(|(line, _)| line >= 2), "{error:?}");
        assert!(parse_text("a: 1\na: 2\n").unwrap_err().message.contains("duplicate"));
        for (text, key, at) in [
            ("a: 1\nb: {c: [1, {d: 1, e: 2, d: 3}]}\n", "d", (2, 25)),
            ("a:\n  b: 1\n  c: 2\n\"a\": 3\n", "a", (4, 1)),
        ] {
            let error = parse_text(text).unwrap_err();
            assert_eq!((error.at, error.is_doubled_key), (Some(at), true), "{error:?}");
            assert!(error.message.contains(&format!("`{key}` is given twice")), "{error:?}");
        }
        // The same key in another map is no double, and what is not YAML is still that.
        assert!(parse_text("a: {b: 1}\nc: {b: 2}\n").is_ok());
        assert!(!parse_text("a: 1\nb: [1, 2\n").unwrap_err().is_doubled_key);
        assert_eq!(parse_text("  \n"), Ok(Value::Null));
    }

    /// A document with keys and lists nested at random, and all paths in it.
    fn document() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            "[a-z #:'\"\\[\\{\n-]{0,8}".prop_map(Value::from)
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Sequence),
                prop::collection::btree_map("[a-zé][a-z ]{0,5}[a-z]", inner, 0..4)
                    .prop_map(|map| Value::Mapping(map.into_iter().map(|(k, v)| (Value::from(k), v)).collect())),
            ]
        })
    }

    fn paths(value: &Value, at: Steps, into: &mut Vec<Steps>) {
        into.push(at.clone());
        match value {
            Value::Sequence(items) => items
                .iter()
                .enumerate()
                .for_each(|(index, item)| paths(item, at.index(index), into)),
            Value::Mapping(map) => map
                .iter()
                .for_each(|(key, inner)| paths(inner, at.key(key.as_str().unwrap()), into)),
            _ => {}
        }
    }

    proptest! {
        #[test]
        fn every_path_of_a_document_has_a_place_in_its_text(value in document()) {
            let text = to_text(&value);
            let mut all = Vec::new();
            paths(&value, Steps::default(), &mut all);
            let index = PlaceIndex::of(&text).expect("an index");
            for steps in all {
                for part in [Part::Key, Part::Value] {
                    match index.get(&steps, part) {
                        Indexed::At(place) => prop_assert_eq!(locate(&text, &steps, part), Some(place), "{}", steps),
                        Indexed::Container => {}
                        Indexed::Absent => prop_assert!(false, "{} is absent", steps),
                    }
                }
                let (line, column) = locate(&text, &steps, Part::Value).expect("a place");
                let length = text.lines().nth(line - 1).map_or(0, |line| line.chars().count());
                prop_assert!(column <= length + 1, "{steps} at {line}:{column} in {text:?}");
                if let Some(Step::Key(key)) = steps.0.last() {
                    let (line, column) = locate(&text, &steps, Part::Key).expect("a place");
                    let rest: String = text.lines().nth(line - 1).unwrap().chars().skip(column - 1).collect();
                    prop_assert!(rest.trim_start_matches(['\'', '"', '?', ' ']).starts_with(key.as_str()), "{key} at {rest:?}");
                }
            }
        }

        #[test]
        fn hostile_text_never_panics(text in "[ -~\n\t{}\\[\\]:&*!|>%@`-]{0,60}", path in "[a-z.\\[\\]0-9]{0,12}") {
            let _ = parse_text(&text);
            let _ = locate(&text, &Steps::parse(&path), Part::Key);
            let _ = PlaceIndex::of(&text);
        }
    }
}
