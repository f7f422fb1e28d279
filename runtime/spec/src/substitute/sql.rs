//! References in SQL, as bound values.

use super::{Lookup, Piece, Problem, is_secret, pieces, position, referenced};
use crate::yaml::{Mapping, Steps, Value};

/// Turns `${name}` in SQL into the placeholder `$p_name` (dots become `_`) and gives the value to bind.
///
/// `$p_name` is as long as `${name}`, and a longer `${env:NAME:-default}` is filled up with blanks, so that
/// columns in the database's messages fit the user's text. In comments nothing is touched; within quotes a
/// reference is an error, since the placeholder would be plain text there.
pub(crate) fn in_sql(
    text: &str,
    steps: &Steps,
    lookup: &mut impl Lookup,
    bound: &mut Mapping,
    problems: &mut Vec<Problem>,
) -> String {
    let mut sql = String::with_capacity(text.len());
    let mut rest = text;
    let mut inside = Inside::Code;
    while let Some(c) = rest.chars().next() {
        let at = text.len() - rest.len();
        let mut problem = |message: Option<String>, help: Option<String>| {
            problems.push(Problem {
                steps: steps.clone(),
                offset: position(text, at),
                message,
                help,
            })
        };
        if rest.starts_with("${") && !matches!(inside, Inside::LineComment | Inside::BlockComment) {
            let end = rest.find('}').map_or(rest.len(), |end| end + 1);
            let reference = &rest[..end];
            let piece = match pieces(reference) {
                Ok(mut pieces) if pieces.len() == 1 => pieces.remove(0).1,
                Ok(_) => Piece::Text(reference),
                Err((_, message)) => {
                    problem(Some(message), None);
                    return text.to_string();
                }
            };
            let glued = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
            if matches!(inside, Inside::Quotes | Inside::QuotedName) {
                problem(
                    Some(format!("`{reference}` is inside quotes, where it would be plain text")),
                    Some("write it without quotes: it is a value, not a piece of text; join texts with ||".to_string()),
                );
            } else if glued(rest[end..].chars().next()) || glued(text[..at].chars().next_back()) {
                problem(
                    Some(format!("`{reference}` is a whole value and cannot be part of a word")),
                    Some("put a blank before and after it".to_string()),
                );
            } else {
                let name = match &piece {
                    Piece::Environment { name, .. } => format!("p_env_{name}"),
                    Piece::Param(name) => format!("p_{}", name.replace('.', "_")),
                    Piece::Text(_) | Piece::Escaped => String::new(),
                };
                match referenced(&piece, lookup) {
                    Ok(value) if is_secret(&value) => problem(
                        Some(format!("`{reference}` is a secret, which cannot be a value in SQL")),
                        Some("rows would hold it".to_string()),
                    ),
                    Ok(value) => match bound.get(name.as_str()) {
                        Some(other) if *other != value => {
                            problem(
                                Some(format!(
                                    "`{reference}` and another reference of this stage would both be bound as `${name}`"
                                )),
                                Some("rename one of the parameters".to_string()),
                            );
                        }
                        _ => {
                            bound.insert(Value::from(name.clone()), value);
                        }
                    },
                    Err((message, help)) => problem(message, help),
                }
                let placeholder = format!("${name}");
                sql.push_str(&placeholder);
                sql.extend(std::iter::repeat_n(
                    ' ',
                    reference.chars().count().saturating_sub(placeholder.chars().count()),
                ));
                rest = &rest[end..];
                continue;
            }
            sql.push_str(reference);
            rest = &rest[end..];
            continue;
        }
        if rest.starts_with("$${") {
            sql.push_str("${");
            rest = &rest[3..];
            continue;
        }
        let (next, length) = inside.step(rest, c);
        inside = next;
        sql.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    sql
}

/// The lexical context of a character in SQL.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Inside {
    Code,
    /// Within `'...'`.
    Quotes,
    /// Within `"..."`, a quoted name.
    QuotedName,
    LineComment,
    BlockComment,
}

impl Inside {
    /// The state after the next characters, and how many bytes they are.
    fn step(self, rest: &str, c: char) -> (Inside, usize) {
        match (self, c) {
            (Inside::Code, '\'') => (Inside::Quotes, 1),
            (Inside::Code, '"') => (Inside::QuotedName, 1),
            (Inside::Code, '-') if rest.starts_with("--") => (Inside::LineComment, 2),
            (Inside::Code, '/') if rest.starts_with("/*") => (Inside::BlockComment, 2),
            // A doubled quote ends and begins again at once.
            (Inside::Quotes, '\'') | (Inside::QuotedName, '"') | (Inside::LineComment, '\n') => (Inside::Code, 1),
            (Inside::BlockComment, '*') if rest.starts_with("*/") => (Inside::Code, 2),
            (inside, c) => (inside, c.len_utf8()),
        }
    }
}
