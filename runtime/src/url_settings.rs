//! URLs in settings: where a path of this machine is meant they are refused by name, before a folder called `s3:` is made.

use flow_storage::{Location, Scheme};

use crate::spec::yaml::{Part, Step, Steps, TypedError, Value};

/// What a setting takes that may be a URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UrlUse {
    /// Files that are read there.
    Read,
    /// Files that are written there.
    Write,
    /// Any text: it is written down, and nothing is looked for there.
    Text,
}

impl UrlUse {
    /// What is wrong with a URL that is used so.
    fn fault(self, text: &str) -> Option<String> {
        if self == UrlUse::Text {
            return None;
        }
        match Location::parse(text.trim_start()) {
            Err(error) => Some(error.to_string()),
            Ok(Location::Object(url))
                if self == UrlUse::Write && matches!(url.scheme(), Scheme::Https | Scheme::Http) =>
            {
                Some(format!(
                    "{url}: nothing can be written to a web server; there are s3, gs and az"
                ))
            }
            Ok(_) => None,
        }
    }
}

/// Schemes of URLs that name files.
const SCHEMES: [&str; 13] = [
    "s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss", "wasbs", "https", "http", "file",
];

/// The scheme of a text that is a URL of a file: `s3` of `s3://bucket/key`. None of any other text, so of `hf://`, which
/// names a model.
pub fn url_scheme(text: &str) -> Option<&'static str> {
    let (scheme, _) = text.trim_start().split_once("://")?;
    SCHEMES.into_iter().find(|known| known.eq_ignore_ascii_case(scheme))
}

/// What a setting says that is given a URL and takes none. The URL itself is not shown: it may hold a password.
pub fn no_url(what: &str, scheme: &str) -> String {
    format!("{what} takes no URL (`{scheme}://`), but a path of this machine")
}

/// What may be done about it.
pub const NO_URL_HELP: &str = "docs/storage.md says what may lie in object storage; copy what is read here to this machine, or write here \
    and copy the files to the bucket afterwards";

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
    use crate::spec::yaml::parse_text;

    #[test]
    fn urls_of_files_are_told_from_other_texts() {
        for (text, scheme) in [
            ("s3://bucket/key", Some("s3")),
            ("S3://bucket", Some("s3")),
            (" gs://bucket", Some("gs")),
            ("file:///data", Some("file")),
            ("https://user:password@host/a", Some("https")),
            ("hf://owner/name", None),
            ("s3:/bucket", None),
            ("work/s3://x", None),
            ("SELECT 's3://'", None),
            ("", None),
        ] {
            assert_eq!(url_scheme(text), scheme, "{text}");
        }
    }

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
                Some("no user or password"),
                Some("no user or password"),
            ),
            ("s3://bucket/../out", Some("`..`"), Some("`..`")),
            ("abfs://bucket/out", Some("not known"), Some("not known")),
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
