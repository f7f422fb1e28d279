//! `${param}` and `${env:NAME:-default}` in values, and as bound values in SQL.

mod sql;

pub(super) use sql::in_sql;

use super::params::FILE_DIR;
use super::yaml::{self, Mapping, Number, Steps, Value};
use flow_base::secret::REFERENCE;

/// Where references find their values.
pub(super) trait Lookup {
    /// The error is the help text; `None` when the parameter is itself wrong and was reported.
    fn param(&mut self, name: &str) -> Result<Value, Option<String>>;
    fn environment(&mut self, name: &str) -> Option<String>;
    /// Counts bytes that references add; false where they have become too many.
    fn spend(&mut self, bytes: usize) -> bool;
}

/// A reference that cannot be put in.
#[derive(Debug, PartialEq)]
pub(super) struct Problem {
    pub steps: Steps,
    /// Line and column (from 1) within the text.
    pub offset: (usize, usize),
    /// None where the cause was reported already.
    pub message: Option<String>,
    pub help: Option<String>,
}

/// A value that was taken over whole: `key: ${name}`.
#[derive(Debug, PartialEq)]
pub(super) struct Taken {
    pub steps: Steps,
    pub param: String,
}

#[derive(Debug, PartialEq)]
enum Piece<'t> {
    Text(&'t str),
    /// `$${`, which represents `${`.
    Escaped,
    Param(&'t str),
    Environment {
        name: &'t str,
        default: Option<&'t str>,
    },
}

/// A name as allowed between `${` and `}`, without dots.
pub(super) fn is_param_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Whether the text is one reference and nothing else, and so takes the referenced value's type.
pub(super) fn is_lone_reference(text: &str) -> bool {
    matches!(
        pieces(text).as_deref(),
        Ok([(_, Piece::Param(_) | Piece::Environment { .. })])
    )
}

/// Whether the text is one reference to an environment variable and nothing else, without a text for where that is not set.
pub(super) fn is_lone_environment(text: &str) -> bool {
    let pieces = pieces(text);
    matches!(
        pieces.as_deref(),
        Ok([(
            _,
            Piece::Environment {
                default: None | Some(""),
                ..
            }
        )])
    )
}

/// The reference to a secret parameter that takes the place of its value.
pub(super) fn secret_reference(name: String) -> Value {
    Value::Mapping(Mapping::from_iter([(Value::from(REFERENCE), Value::from(name))]))
}

/// Whether a value is a reference to a secret.
pub(super) fn is_secret(value: &Value) -> bool {
    value
        .as_mapping()
        .is_some_and(|map| map.len() == 1 && map.contains_key(REFERENCE))
}

/// A value given to a secret parameter.
pub(super) enum SecretText {
    Text(String),
    /// Another secret parameter.
    Reference(Value),
    /// A secret parameter that has no value.
    NotGiven,
}

/// The text of a secret parameter. Only a text that is one reference and nothing else is a reference: passwords may hold
/// any characters.
pub(super) fn secret_text(text: &str, lookup: &mut impl Lookup) -> Result<SecretText, Refused> {
    match pieces(text).as_deref() {
        // As text, also where it looks like a number.
        Ok([(_, Piece::Environment { name, default })]) => {
            let text = lookup.environment(name).or(default.map(str::to_string));
            text.map(SecretText::Text).ok_or_else(|| {
                let (message, help) = unset(name);
                (Some(message), help)
            })
        }
        Ok([(_, only @ Piece::Param(name))]) => match referenced(only, lookup)? {
            value if is_secret(&value) => Ok(SecretText::Reference(value)),
            Value::Null => Ok(SecretText::NotGiven),
            _ => {
                let message = format!("`${{{name}}}` is not secret itself");
                Err((Some(message), Some("mark it with `secret: true` too".to_string())))
            }
        },
        _ => Ok(SecretText::Text(text.to_string())),
    }
}

/// The value of a text that is one reference and nothing else.
pub(super) fn lone_reference(text: &str, lookup: &mut impl Lookup) -> Result<Value, Refused> {
    match pieces(text).map_err(|(_, message)| (Some(message), None))?.as_slice() {
        [(_, only @ (Piece::Param(_) | Piece::Environment { .. }))] => referenced(only, lookup),
        _ => Err((Some(format!("`{text}` is not a reference to a parameter")), None)),
    }
}

/// Byte offset and kind of each piece; the error is where and what.
fn pieces(text: &str) -> Result<Vec<(usize, Piece<'_>)>, (usize, String)> {
    let mut pieces = Vec::new();
    let mut start = 0;
    while let Some(dollar) = text[start..].find("${").map(|found| start + found) {
        // Of `$${` the first `$` belongs to the escape.
        let escaped = dollar > start && text[..dollar].ends_with('$');
        let before = if escaped { dollar - 1 } else { dollar };
        if before > start {
            pieces.push((start, Piece::Text(&text[start..before])));
        }
        if escaped {
            pieces.push((before, Piece::Escaped));
            start = dollar + 2;
            continue;
        }
        let Some(length) = text[dollar..].find('}') else {
            return Err((dollar, "`${` is not closed with `}`".to_string()));
        };
        let inner = &text[dollar + 2..dollar + length];
        pieces.push((dollar, piece(inner).map_err(|message| (dollar, message))?));
        start = dollar + length + 1;
    }
    if start < text.len() {
        pieces.push((start, Piece::Text(&text[start..])));
    }
    Ok(pieces)
}

fn piece(inner: &str) -> Result<Piece<'_>, String> {
    if let Some(environment) = inner.strip_prefix("env:") {
        let (name, default) = match environment.split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (environment, None),
        };
        if !is_param_name(name) {
            return Err(format!(
                "`${{{inner}}}` names no environment variable: write `${{env:NAME}}` or `${{env:NAME:-default}}`"
            ));
        }
        return Ok(Piece::Environment { name, default });
    }
    if inner.split('.').all(is_param_name) {
        return Ok(Piece::Param(inner));
    }
    Err(format!(
        "`${{{inner}}}` is not a reference to a parameter: write `${{name}}`"
    ))
}

/// Puts references into all texts of a value. Keys of maps are left as they are.
pub(super) fn in_value(
    value: &Value,
    steps: &Steps,
    lookup: &mut impl Lookup,
    problems: &mut Vec<Problem>,
    taken: &mut Vec<Taken>,
) -> Value {
    let mut expansion = Expansion {
        lookup,
        problems,
        taken,
        left: LARGEST,
        too_large: false,
    };
    expansion.value(value, steps, 0)
}

/// A value while references are put into it.
struct Expansion<'a, L> {
    lookup: &'a mut L,
    problems: &'a mut Vec<Problem>,
    taken: &'a mut Vec<Taken>,
    /// Remaining size that references may add to this value.
    left: usize,
    too_large: bool,
}

impl<L: Lookup> Expansion<'_, L> {
    /// The value `depth` levels down.
    fn value(&mut self, value: &Value, steps: &Steps, depth: usize) -> Value {
        match value {
            // The value is refused already, so the rest of it is skipped.
            _ if self.too_large => Value::Null,
            Value::String(text) => self.text(text, steps, depth),
            Value::Sequence(items) => Value::Sequence(
                items
                    .iter()
                    .enumerate()
                    .map(|(index, item)| self.value(item, &steps.index(index), depth + 1))
                    .collect(),
            ),
            Value::Mapping(map) => {
                let entries = map.iter().map(|(key, inner)| {
                    let below = steps.key(key.as_str().unwrap_or_default());
                    (key.clone(), self.value(inner, &below, depth + 1))
                });
                Value::Mapping(entries.collect::<Mapping>())
            }
            other => other.clone(),
        }
    }

    fn text(&mut self, text: &str, steps: &Steps, depth: usize) -> Value {
        let problem = |at, message: Option<String>, help| Problem {
            steps: steps.clone(),
            offset: position(text, at),
            message,
            help,
        };
        let pieces = match pieces(text) {
            Ok(pieces) => pieces,
            Err((at, message)) => {
                let help = Some("for a literal `${` write `$${`".to_string());
                self.problems.push(problem(at, Some(message), help));
                return Value::Null;
            }
        };
        if let [(at, only @ (Piece::Param(_) | Piece::Environment { .. }))] = pieces.as_slice() {
            if let Piece::Param(name) = only {
                self.taken.push(Taken {
                    steps: steps.clone(),
                    param: (*name).to_string(),
                });
            }
            let value = referenced(only, self.lookup).and_then(|value| self.admit(value, depth));
            return value.unwrap_or_else(|(message, help)| {
                self.problems.push(problem(*at, message, help));
                Value::Null
            });
        }
        let mut whole = String::new();
        for (at, piece) in &pieces {
            let value = match piece {
                Piece::Text(text) => {
                    whole.push_str(text);
                    continue;
                }
                Piece::Escaped => {
                    whole.push_str("${");
                    continue;
                }
                // As text, whatever it looks like.
                Piece::Environment { name, default } => {
                    let text = self.lookup.environment(name).or(default.map(str::to_string));
                    text.map(Value::String).ok_or_else(|| {
                        let (message, help) = unset(name);
                        (Some(message), help)
                    })
                }
                Piece::Param(_) => referenced(piece, self.lookup),
            };
            let name = &text[*at..].split_inclusive('}').next().unwrap_or_default();
            match value
                .and_then(|value| self.admit(value, depth))
                .map(|value| as_text(&value))
            {
                Ok(Ok(text)) => whole.push_str(&text),
                Ok(Err(what)) => {
                    let message = format!("`{name}` is {what}, which cannot be part of a text");
                    self.problems.push(problem(*at, Some(message), None));
                }
                Err((message, help)) => self.problems.push(problem(*at, message, help)),
            }
            if self.too_large {
                return Value::Null;
            }
        }
        if let [(_, Piece::Param(FILE_DIR)), ..] = pieces.as_slice() {
            whole = without_parents(&whole);
        }
        Value::String(whole)
    }

    /// Counts the size that a reference adds, and refuses what is too much.
    fn admit(&mut self, value: Value, depth: usize) -> Result<Value, Refused> {
        let Some(size) = size(&value, self.left, DEEPEST.saturating_sub(depth)) else {
            self.too_large = true;
            let message = format!(
                "with this reference the value has more than {} MiB, or more than {DEEPEST} levels of lists and maps",
                LARGEST >> 20
            );
            let help = "parameters that refer to each other several times grow with each step";
            return Err((Some(message), Some(help.to_string())));
        };
        self.left -= size;
        if !self.lookup.spend(size) {
            self.too_large = true;
            let message = format!("references bring more than {} MiB into this pipeline", ALL >> 20);
            return Err((Some(message), None));
        }
        Ok(value)
    }
}

/// Message and help; no message where the cause was reported already.
pub(super) type Refused = (Option<String>, Option<String>);

/// Most that references may bring into one value, in bytes of its texts and [`ENTRY`] for each entry.
const LARGEST: usize = 1 << 20;

/// Most that references may bring into all values of a pipeline.
pub(super) const ALL: usize = 64 << 20;

/// What an entry of a list or map counts, whatever it holds.
const ENTRY: usize = 16;

/// Most levels of lists and maps within each other.
const DEEPEST: usize = 128;

/// Bytes of a value; none if it has more than `left`, or more levels than `levels`.
fn size(value: &Value, left: usize, levels: usize) -> Option<usize> {
    let mut sum = 0;
    let mut add = |key: usize, value: &Value| {
        sum += ENTRY + key;
        sum += size(value, left.checked_sub(sum)?, levels.checked_sub(1)?)?;
        Some(())
    };
    match value {
        Value::String(text) => sum = text.len(),
        Value::Sequence(items) => items.iter().try_for_each(|item| add(0, item))?,
        Value::Mapping(map) => map
            .iter()
            .try_for_each(|(key, value)| add(key.as_str().map_or(0, str::len), value))?,
        _ => {}
    }
    (sum <= left).then_some(sum)
}

/// The text with `folder` in place of `${file_dir}`, and all other references unchanged; none where nothing changes.
pub(super) fn with_file_dir(text: &str, folder: &str) -> Option<String> {
    let pieces = pieces(text).ok()?;
    if !pieces.iter().any(|(_, piece)| *piece == Piece::Param(FILE_DIR)) {
        return None;
    }
    let folder = folder.replace("${", "$${");
    let ends = pieces.iter().skip(1).map(|(at, _)| *at).chain([text.len()]);
    let parts = pieces.iter().zip(ends).map(|((at, piece), end)| match piece {
        Piece::Param(FILE_DIR) => folder.as_str(),
        _ => &text[*at..end],
    });
    let whole: String = parts.collect();
    Some(match pieces.first() {
        Some((_, Piece::Param(FILE_DIR))) => without_parents(&whole),
        _ => whole,
    })
}

/// A path without `.` and with each `..` taken together with the folder before it, where there is one.
pub(super) fn without_parents(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/').skip(usize::from(path.starts_with('/'))) {
        match (part, parts.last()) {
            ("." | "", _) => {}
            ("..", Some(&before)) if before != ".." => drop(parts.pop()),
            ("..", None) if path.starts_with('/') => {}
            _ => parts.push(part),
        }
    }
    let root = if path.starts_with('/') { "/" } else { "" };
    match parts.is_empty() && root.is_empty() {
        true => ".".to_string(),
        false => format!("{root}{}", parts.join("/")),
    }
}

fn unset(name: &str) -> (String, Option<String>) {
    (
        format!("the environment variable `{name}` is not set"),
        Some(format!("set it, or give a default: `${{env:{name}:-default}}`")),
    )
}

fn referenced(piece: &Piece<'_>, lookup: &mut impl Lookup) -> Result<Value, Refused> {
    match piece {
        Piece::Param(name) => lookup
            .param(name)
            .map_err(|help| (help.is_some().then(|| format!("unknown parameter `{name}`")), help)),
        Piece::Environment { name, default } => match lookup.environment(name).or(default.map(str::to_string)) {
            Some(text) => Ok(scalar(text)),
            None => {
                let (message, help) = unset(name);
                Err((Some(message), help))
            }
        },
        Piece::Text(text) => Ok(Value::String((*text).to_string())),
        Piece::Escaped => Ok(Value::String("${".to_string())),
    }
}

/// A number, true or false where the text is one; otherwise the text. A lone `${env:RANKS}` can so be given
/// to a setting that takes a number.
fn scalar(text: String) -> Value {
    match yaml::parse_text(&text) {
        Ok(value @ (Value::Bool(_) | Value::Number(_))) => value,
        _ => Value::String(text),
    }
}

fn as_text(value: &Value) -> Result<String, &'static str> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Bool(flag) => Ok(flag.to_string()),
        Value::Number(number) => Ok(Number::to_string(number)),
        other if is_secret(other) => Err("a secret"),
        other => Err(yaml::describe(other)),
    }
}

/// Line and column (from 1, in characters) of a byte offset.
pub(super) fn position(text: &str, offset: usize) -> (usize, usize) {
    let before = &text[..offset];
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    (
        before.matches('\n').count() + 1,
        before[line_start..].chars().count() + 1,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Fixed;

    impl Lookup for Fixed {
        fn param(&mut self, name: &str) -> Result<Value, Option<String>> {
            match name {
                "min" => Ok(Value::from(0.5)),
                "out" => Ok(Value::from("a b")),
                "train.steps" => Ok(Value::from(7)),
                "train_steps" => Ok(Value::from(8)),
                "list" => Ok(Value::Sequence(vec![Value::from(1)])),
                "broken" => Err(None),
                _ => Err(Some("no such thing".into())),
            }
        }

        fn environment(&mut self, name: &str) -> Option<String> {
            (name == "HOME").then(|| "/root".to_string())
        }

        fn spend(&mut self, _: usize) -> bool {
            true
        }
    }

    fn put(text: &str) -> Result<Value, Vec<String>> {
        let mut problems = Vec::new();
        let value = in_value(
            &Value::from(text),
            &Steps::default(),
            &mut Fixed,
            &mut problems,
            &mut Vec::new(),
        );
        if problems.is_empty() {
            Ok(value)
        } else {
            Err(problems
                .into_iter()
                .map(|p| format!("{:?} {}", p.offset, p.message.unwrap_or_default()))
                .collect())
        }
    }

    fn sql(text: &str) -> Result<(String, String), Vec<String>> {
        let (mut bound, mut problems) = (Mapping::new(), Vec::new());
        let sql = in_sql(text, &Steps::default(), &mut Fixed, &mut bound, &mut problems);
        let bound = serde_json::to_string(&bound).unwrap();
        if problems.is_empty() {
            Ok((sql, bound))
        } else {
            Err(problems
                .into_iter()
                .map(|p| format!("{:?} {}", p.offset, p.message.unwrap_or_default()))
                .collect())
        }
    }

    #[test]
    fn the_folder_of_a_file_takes_the_place_of_its_reference_alone() {
        for (text, expected) in [
            ("${file_dir}/../a", Some("b/a")),
            ("x=${file_dir}/${min}", Some("x=b/c/${min}")),
            (
                "${env:HOME}/${file_dir}$${file_dir}",
                Some("${env:HOME}/b/c$${file_dir}"),
            ),
            ("$${file_dir}/a", None),
            ("${min}", None),
            ("${file_dir", None),
        ] {
            assert_eq!(with_file_dir(text, "b/c").as_deref(), expected, "{text}");
        }
        assert_eq!(with_file_dir("${file_dir}/a", "b${c}").as_deref(), Some("b$${c}/a"));
    }

    #[test]
    fn a_path_without_parents_is_the_same_path() {
        for (path, expected) in [
            ("pipelines/../configs/a", "configs/a"),
            ("./../a", "../a"),
            ("./../../a", "../../a"),
            ("/a/b/../../../c", "/c"),
            ("a/..", "."),
            ("a//b/./c/", "a/b/c"),
            ("/", "/"),
        ] {
            assert_eq!(without_parents(path), expected, "{path}");
        }
    }

    #[test]
    fn references_take_types_alone_and_become_text_within() {
        assert_eq!(put("${min}"), Ok(Value::from(0.5)));
        assert_eq!(put("${list}"), Ok(Value::Sequence(vec![Value::from(1)])));
        assert_eq!(put("x/${out}/${train.steps}"), Ok(Value::from("x/a b/7")));
        assert_eq!(put("${env:HOME}/x"), Ok(Value::from("/root/x")));
        assert_eq!(put("${env:NONE:-3}"), Ok(Value::from(3)));
        assert_eq!(put("${env:NONE:-}"), Ok(Value::from("")));
        assert_eq!(put("$${min} $$${min} $5"), Ok(Value::from("${min} $${min} $5")));
    }

    #[test]
    fn bad_references_are_named_with_their_place() {
        assert_eq!(put("a\nb ${nine}").unwrap_err(), ["(2, 3) unknown parameter `nine`"]);
        assert_eq!(put("${min").unwrap_err(), ["(1, 1) `${` is not closed with `}`"]);
        assert_eq!(
            put("x ${list}").unwrap_err(),
            ["(1, 3) `${list}` is a list, which cannot be part of a text"]
        );
        assert_eq!(
            put("${ min}").unwrap_err(),
            ["(1, 1) `${ min}` is not a reference to a parameter: write `${name}`"]
        );
        assert_eq!(
            put("${env:NONE}").unwrap_err(),
            ["(1, 1) the environment variable `NONE` is not set"]
        );
        assert_eq!(put("${broken}").unwrap_err(), ["(1, 1) "]);
    }

    #[test]
    fn sql_binds_values_and_keeps_columns() {
        let (text, bound) =
            sql("q < ${min} -- ${min}'\nAND s = ${train.steps} /* '${x} */ AND e = ${env:NONE:-abc};").unwrap();
        assert_eq!(
            text,
            "q < $p_min -- ${min}'\nAND s = $p_train_steps /* '${x} */ AND e = $p_env_NONE     ;"
        );
        assert_eq!(bound, r#"{"p_min":0.5,"p_train_steps":7,"p_env_NONE":"abc"}"#);
    }

    #[test]
    fn sql_never_takes_a_reference_as_text() {
        assert_eq!(
            sql("a = '${min}'").unwrap_err(),
            ["(1, 6) `${min}` is inside quotes, where it would be plain text"]
        );
        assert_eq!(
            sql("a = 'it''s' AND b = ${min}x").unwrap_err(),
            ["(1, 21) `${min}` is a whole value and cannot be part of a word"]
        );
        assert_eq!(sql("${train.steps} ${train_steps}").unwrap_err().len(), 1);
        assert_eq!(sql("a = ${").unwrap_err(), ["(1, 5) `${` is not closed with `}`"]);
    }

    proptest! {
        #[test]
        fn text_without_references_stays(text in "[^$]{0,40}") {
            prop_assert_eq!(put(&text), Ok(Value::from(text.clone())));
            prop_assert_eq!(sql(&text).map(|(sql, _)| sql), Ok(text));
        }

        #[test]
        fn hostile_references_never_panic(text in "[$${}a-z:.'\"/*\n é-]{0,40}") {
            let _ = put(&text);
            if let Ok((sql, _)) = sql(&text) {
                prop_assert!(sql.chars().count() <= text.chars().count());
            }
        }
    }
}
