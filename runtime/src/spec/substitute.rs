//! `${param}` and `${env:NAME:-default}` in values, and as bound values in SQL.

mod sql;

pub(super) use sql::in_sql;

use super::yaml::{self, Mapping, Number, Steps, Value};

/// Where references find their values.
pub(super) trait Lookup {
    /// The error is what to say as help; `None` when the parameter is itself wrong and that was said.
    fn param(&mut self, name: &str) -> Result<Value, Option<String>>;
    fn environment(&mut self, name: &str) -> Option<String>;
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
    /// `$${`, which stands for `${`.
    Escaped,
    Param(&'t str),
    Environment {
        name: &'t str,
        default: Option<&'t str>,
    },
}

/// A name as it may stand between `${` and `}`, without dots.
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
        "`${{{inner}}}` is no reference to a parameter: write `${{name}}`"
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
    match value {
        Value::String(text) => in_text(text, steps, lookup, problems, taken),
        Value::Sequence(items) => Value::Sequence(
            items
                .iter()
                .enumerate()
                .map(|(index, item)| in_value(item, &steps.index(index), lookup, problems, taken))
                .collect(),
        ),
        Value::Mapping(map) => {
            let entries = map.iter().map(|(key, inner)| {
                let below = steps.key(key.as_str().unwrap_or_default());
                (key.clone(), in_value(inner, &below, lookup, problems, taken))
            });
            Value::Mapping(entries.collect::<Mapping>())
        }
        other => other.clone(),
    }
}

fn in_text(
    text: &str,
    steps: &Steps,
    lookup: &mut impl Lookup,
    problems: &mut Vec<Problem>,
    taken: &mut Vec<Taken>,
) -> Value {
    let problem = |at, message: Option<String>, help| Problem {
        steps: steps.clone(),
        offset: position(text, at),
        message,
        help,
    };
    let pieces = match pieces(text) {
        Ok(pieces) => pieces,
        Err((at, message)) => {
            problems.push(problem(
                at,
                Some(message),
                Some("for a literal `${` write `$${`".to_string()),
            ));
            return Value::Null;
        }
    };
    if let [(at, only @ (Piece::Param(_) | Piece::Environment { .. }))] = pieces.as_slice() {
        if let Piece::Param(name) = only {
            taken.push(Taken {
                steps: steps.clone(),
                param: (*name).to_string(),
            });
        }
        return referenced(only, lookup).unwrap_or_else(|(message, help)| {
            problems.push(problem(*at, message, help));
            Value::Null
        });
    }
    let mut whole = String::new();
    for (at, piece) in &pieces {
        match piece {
            Piece::Text(text) => whole.push_str(text),
            Piece::Escaped => whole.push_str("${"),
            Piece::Environment { name, default } => match lookup.environment(name).or(default.map(str::to_string)) {
                Some(text) => whole.push_str(&text),
                None => {
                    let (message, help) = unset(name);
                    problems.push(problem(*at, Some(message), help));
                }
            },
            Piece::Param(name) => match referenced(piece, lookup).map(|value| as_text(&value)) {
                Ok(Ok(text)) => whole.push_str(&text),
                Ok(Err(what)) => problems.push(problem(
                    *at,
                    Some(format!("`${{{name}}}` is {what}, which cannot stand inside a text")),
                    None,
                )),
                Err((message, help)) => problems.push(problem(*at, message, help)),
            },
        }
    }
    Value::String(whole)
}

fn unset(name: &str) -> (String, Option<String>) {
    (
        format!("the environment variable `{name}` is not set"),
        Some(format!("set it, or give a default: `${{env:{name}:-default}}`")),
    )
}

fn referenced(piece: &Piece<'_>, lookup: &mut impl Lookup) -> Result<Value, (Option<String>, Option<String>)> {
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
        other => Err(yaml::describe(other)),
    }
}

/// Line and column (from 1, in characters) of a byte offset.
fn position(text: &str, offset: usize) -> (usize, usize) {
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
            ["(1, 3) `${list}` is a list, which cannot stand inside a text"]
        );
        assert_eq!(
            put("${ min}").unwrap_err(),
            ["(1, 1) `${ min}` is no reference to a parameter: write `${name}`"]
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
            ["(1, 6) `${min}` stands within quotes, where it would be plain text"]
        );
        assert_eq!(
            sql("a = 'it''s' AND b = ${min}x").unwrap_err(),
            ["(1, 21) `${min}` stands for a whole value and cannot be part of a word"]
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
