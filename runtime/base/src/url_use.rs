//! URLs of files, and what is said of them where a path of this machine is meant.

use flow_storage::{Location, Scheme};

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
    pub fn fault(self, text: &str) -> Option<String> {
        if self == UrlUse::Text {
            return None;
        }
        if text.starts_with(char::is_whitespace) {
            return Some("there is a blank before the URL".into());
        }
        match Location::parse(text) {
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
pub const NO_URL_HELP: &str = "docs/storage.md says what may be in object storage; copy what is read here to this machine, or write here \
    and copy the files to the bucket afterwards";

#[cfg(test)]
mod tests {
    use super::*;

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
}
