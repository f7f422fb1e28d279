//! Translates errors of the SQL engine: what is wrong, where, and what was probably meant.

use datafusion::common::SchemaError;
use datafusion::error::DataFusionError;
use flow_corpus::ManifestError;

/// `text` is the SQL, `relations` what it can read.
pub(super) fn explain(error: DataFusionError, text: &str, relations: &[String]) -> ManifestError {
    let span = error.diagnostic().and_then(|d| d.span).and_then(|span| {
        let place = (
            usize::try_from(span.start.line).ok()?,
            usize::try_from(span.start.column).ok()?,
        );
        (place.0 > 0).then_some(place)
    });
    match error.find_root() {
        DataFusionError::SchemaError(schema, _) => match schema.as_ref() {
            SchemaError::FieldNotFound { field, valid_fields } => {
                let mut names: Vec<&str> = valid_fields.iter().map(|column| column.name.as_str()).collect();
                names.sort_unstable();
                names.dedup();
                let message = match &field.relation {
                    Some(relation) => format!("`{relation}` has no column `{}`", field.name),
                    None => format!("no column `{}`", field.name),
                };
                let meant = near(&field.name, names.iter().copied()).map(|name| format!("did you mean `{name}`? "));
                let help = format!("{}the columns are {}", meant.unwrap_or_default(), names.join(", "));
                return ManifestError::Sql {
                    message,
                    offset: span.or_else(|| place_of_word(text, &field.name)),
                    help: Some(help),
                };
            }
            other => {
                return ManifestError::Sql {
                    message: lower(&other.to_string()),
                    offset: span,
                    help: None,
                };
            }
        },
        DataFusionError::SQL(parser, _) => {
            let message = parser.to_string();
            let message = message.strip_prefix("sql parser error: ").unwrap_or(&message);
            let (message, mut place) = split_place(message);
            if place.is_none() && message.ends_with("found: EOF") {
                let last = text.lines().count().max(1);
                place = Some((last, text.lines().last().map_or(0, |line| line.chars().count()) + 1));
            }
            return ManifestError::Sql {
                message: lower(message),
                offset: span.or(place),
                help: None,
            };
        }
        _ => {}
    }
    let message = error.find_root().message().into_owned();
    if let Some(name) = message
        .strip_prefix("table '")
        .and_then(|rest| rest.strip_suffix("' not found"))
    {
        let name = name.rsplit('.').next().unwrap_or(name);
        let meant = near(name, relations.iter().map(String::as_str)).map(|name| format!("did you mean `{name}`? "));
        return ManifestError::Sql {
            message: format!("no input `{name}`"),
            offset: span.or_else(|| place_of_word(text, name)),
            help: Some(format!(
                "{}SQL here can read {}",
                meant.unwrap_or_default(),
                relations.join(", ")
            )),
        };
    }
    ManifestError::Sql {
        message: lower(message.trim()),
        offset: span,
        help: None,
    }
}

/// The candidate nearest to `name`, if one is near.
pub(super) fn near<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = candidates.map(|candidate| (strsim::jaro_winkler(name, candidate), candidate));
    scored
        .filter(|(score, _)| *score > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

/// Messages are fragments: they begin in lower case, unless the first word is a keyword in capitals.
fn lower(message: &str) -> String {
    let mut chars = message.chars();
    match (chars.next(), chars.next()) {
        (Some(first), Some(second)) if first.is_uppercase() && second.is_lowercase() => first
            .to_lowercase()
            .chain(std::iter::once(second))
            .chain(chars)
            .collect(),
        _ => message.to_string(),
    }
}

/// Cuts `... at Line: 3, Column: 14` into message and place.
fn split_place(message: &str) -> (&str, Option<(usize, usize)>) {
    let Some((before, place)) = message.rsplit_once(" at Line: ") else {
        return (message, None);
    };
    let parsed = place.split_once(", Column: ").and_then(|(line, column)| {
        let digits = column.split(|c: char| !c.is_ascii_digit()).next()?;
        Some((line.parse().ok()?, digits.parse().ok()?))
    });
    match parsed {
        Some(place) => (before, Some(place)),
        None => (message, None),
    }
}

/// Line and column (from 1, in characters) of the first occurrence of `word` as a whole word.
fn place_of_word(text: &str, word: &str) -> Option<(usize, usize)> {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    for (line, content) in text.lines().enumerate() {
        for (start, _) in content.match_indices(word) {
            let before = content[..start].chars().next_back();
            let after = content[start + word.len()..].chars().next();
            if !before.is_some_and(part_of_word) && !after.is_some_and(part_of_word) {
                return Some((line + 1, content[..start].chars().count() + 1));
            }
        }
    }
    None
}
