//! URLs in settings: where a path of this machine is meant they are refused by name, before a folder called `s3:` is made.

use flow_base::url_use::{NO_URL_HELP, UrlUse, no_url, url_scheme};
use flow_base::yaml::{Part, Step, Steps, TypedError, Value};

/// The first setting that is a URL and may not be one, or is one that cannot be used. `open` are the settings of the kind that
/// may be, `sql` those whose texts are SQL: where there are such, `params` has values of queries, which may be any text.
pub(crate) fn refused(with: &Value, open: &[(&str, UrlUse)], sql: &[&str]) -> Option<TypedError> {
    let Value::Mapping(settings) = with else { return None };
    settings.iter().find_map(|(key, value)| {
        let key = key.as_str()?;
        let steps = Steps::default().key(key);
        match open.iter().find(|(name, _)| *name == key) {
            Some((_, how)) => each_url(&steps, value, sql, &|steps, text| {
                how.fault(text)
                    .map(|why| (format!("the setting `{steps}`: {why}"), None))
            }),
            None if !sql.is_empty() && key == "params" => None,
            None => each_url(&steps, value, sql, &|steps, text| {
                let message = no_url(&format!("the setting `{steps}`"), url_scheme(text)?);
                Some((message, Some(NO_URL_HELP.to_string())))
            }),
        }
    })
}

/// What is wrong with a URL at a place: a message and a help.
type Judge<'a> = dyn Fn(&Steps, &str) -> Option<(String, Option<String>)> + 'a;

/// The first fault of a URL in a value.
fn each_url(steps: &Steps, value: &Value, sql: &[&str], judge: &Judge<'_>) -> Option<TypedError> {
    match value {
        Value::String(text) => {
            if matches!(steps.0.last(), Some(Step::Key(key)) if sql.contains(&key.as_str())) {
                return None;
            }
            url_scheme(text)?;
            let (message, help) = judge(steps, text)?;
            Some(TypedError {
                steps: steps.clone(),
                part: Part::Value,
                message,
                help,
            })
        }
        Value::Sequence(items) => items
            .iter()
            .enumerate()
            .find_map(|(index, item)| each_url(&steps.index(index), item, sql, judge)),
        Value::Mapping(map) => map
            .iter()
            .find_map(|(key, value)| each_url(&steps.key(key.as_str()?), value, sql, judge)),
        Value::Tagged(tagged) => each_url(steps, &tagged.value, sql, judge),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flow_base::yaml::parse_text;

    #[test]
    fn a_url_where_a_path_is_meant_is_named_and_not_shown() {
        let refused_in = |text: &str, open: &[&str], sql: &[&str]| {
            let open: Vec<_> = open.iter().map(|name| (*name, UrlUse::Write)).collect();
            let refused = refused(&parse_text(text).unwrap(), &open, sql);
            refused.map(|error| {
                assert!(!error.message.contains("bucket"), "{}", error.message);
                error.steps.to_string()
            })
        };
        let nested = "{out: s3://bucket/out, sets: [{name: a, files: [b, 'gs://bucket/c']}]}";
        assert_eq!(refused_in(nested, &[], &[]).as_deref(), Some("out"));
        assert_eq!(refused_in(nested, &["out"], &[]).as_deref(), Some("sets[0].files[1]"));
        assert_eq!(refused_in(nested, &["out", "sets"], &[]), None);
        let sql = "{query: 's3://bucket', rejects: [{when: 's3://bucket'}], params: {from: 's3://bucket'}, languages: 's3://bucket'}";
        assert_eq!(refused_in(sql, &[], &["query", "when"]).as_deref(), Some("languages"));
        assert_eq!(
            refused_in("{params: {from: 's3://bucket'}}", &[], &[]).as_deref(),
            Some("params.from")
        );
        assert_eq!(refused_in("~", &[], &[]), None);
    }

    #[test]
    fn a_url_that_cannot_be_used_is_refused() {
        let why = |text: &str, how| {
            let with = parse_text(&format!("{{out: '{text}'}}")).unwrap();
            refused(&with, &[("out", how)], &[]).map(|error| error.message)
        };
        for (text, write, read) in [
            ("s3://bucket/out", None, None),
            ("file:///data/out", None, None),
            ("https://host/out", Some("nothing can be written"), None),
            ("s3://", Some("names no bucket"), Some("names no bucket")),
            (
                "s3://user:secret@bucket/out",
                Some("must not contain a user or password"),
                Some("must not contain a user or password"),
            ),
            ("s3://bucket/../out", Some("`..`"), Some("`..`")),
            ("abfs://bucket/out", Some("not known"), Some("not known")),
            (" s3://bucket/out", Some("a blank"), Some("a blank")),
        ] {
            for (how, expected) in [(UrlUse::Write, write), (UrlUse::Read, read), (UrlUse::Text, None)] {
                let why = why(text, how);
                match expected {
                    None => assert_eq!(why, None),
                    Some(expected) => {
                        let why = why.unwrap_or_default();
                        assert!(
                            why.starts_with("the setting `out`: ") && why.contains(expected),
                            "{text}: {why}"
                        );
                        assert!(!why.contains("secret"), "{why}");
                    }
                }
            }
        }
    }
}
