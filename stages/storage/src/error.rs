//! Why object storage could not be read or written. No message holds a secret.

use std::io;

/// What went wrong, in the words of HTTP and of the clouds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageFault {
    /// What was written is no location.
    Location,
    /// There is no object of this key.
    NotFound,
    /// There is no bucket (or container) of this name.
    NoSuchBucket,
    /// The credentials are good, but do not permit this (403).
    PermissionDenied,
    /// There are no credentials, or they are wrong or have expired.
    Credentials,
    /// An object was to be written where there must not be one, and there is.
    AlreadyExists,
    /// The object is another one than when it was first looked at.
    Changed,
    /// This kind of location cannot do what was asked for.
    Unsupported,
    /// There was no answer in time.
    TimedOut,
    /// The server could not be reached, or answered 429 or 5xx, however often it was asked.
    Unavailable,
    /// No copy of the object can be kept on this machine while it is read.
    Cache,
    /// The object is larger than what was asked for allows.
    TooLarge,
    /// Everything else: the server's own words are in the message.
    Other,
}

/// Why object storage could not be read or written.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct StorageError {
    pub fault: StorageFault,
    message: String,
}

impl StorageError {
    pub(crate) fn new(fault: StorageFault, message: impl Into<String>) -> Self {
        StorageError {
            fault,
            message: message.into(),
        }
    }

    /// Of an object (or prefix) that is named by `url`, with what the server said.
    pub(crate) fn of(fault: StorageFault, url: &str, said: &str) -> Self {
        let said = if said.is_empty() {
            String::new()
        } else {
            format!(" ({said})")
        };
        let message = match fault {
            StorageFault::Location => format!("{url}: no location{said}"),
            StorageFault::NotFound => format!("{url}: there is no such object{said}"),
            StorageFault::NoSuchBucket => format!("{url}: there is no such bucket{said}"),
            StorageFault::PermissionDenied => format!("{url}: permission denied{said}"),
            StorageFault::Credentials => format!(
                "{url}: no credentials, or they are wrong or have expired{said}; see docs/storage.md for where they are looked for"
            ),
            StorageFault::AlreadyExists => format!("{url}: there is an object of this name{said}"),
            StorageFault::Changed => format!("{url}: it was changed while it is read; wait until it is written{said}"),
            StorageFault::Unsupported => format!("{url}: not supported{said}"),
            StorageFault::TimedOut => format!("{url}: no answer in time{said}"),
            StorageFault::Unavailable => format!("{url}: the server is not available{said}"),
            StorageFault::Cache => format!("{url}: no copy can be kept on this machine{said}"),
            StorageFault::TooLarge => format!("{url}: too large{said}"),
            StorageFault::Other => format!("{url}: the request failed{said}"),
        };
        StorageError { fault, message }
    }

    /// Whether this object is to blame, and not the credentials, the bucket, the network or this machine: others may then be
    /// read.
    pub fn is_of_the_object(&self) -> bool {
        !matches!(
            self.fault,
            StorageFault::NoSuchBucket
                | StorageFault::Credentials
                | StorageFault::TimedOut
                | StorageFault::Unavailable
                | StorageFault::Cache
        )
    }

    /// The storage error in an [`io::Error`], where there is one.
    pub fn in_io(error: &io::Error) -> Option<&StorageError> {
        error.get_ref()?.downcast_ref()
    }
}

impl From<StorageError> for io::Error {
    fn from(error: StorageError) -> Self {
        let kind = match error.fault {
            StorageFault::NotFound => io::ErrorKind::NotFound,
            StorageFault::PermissionDenied => io::ErrorKind::PermissionDenied,
            StorageFault::AlreadyExists => io::ErrorKind::AlreadyExists,
            StorageFault::TimedOut => io::ErrorKind::TimedOut,
            StorageFault::Unsupported => io::ErrorKind::Unsupported,
            StorageFault::Location => io::ErrorKind::InvalidInput,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}

/// What an error of the client says of `url`. `secrets` are taken out of it.
pub(crate) fn of_client(url: &str, error: &object_store::Error, secrets: &[String]) -> StorageError {
    use object_store::Error;
    let text = with_sources(error);
    let code = between(&text, "<Code>", "</Code>").unwrap_or_default();
    let fault = match code {
        "NoSuchBucket" | "ContainerNotFound" => StorageFault::NoSuchBucket,
        "ExpiredToken"
        | "ExpiredTokenException"
        | "TokenRefreshRequired"
        | "InvalidToken"
        | "InvalidAccessKeyId"
        | "SignatureDoesNotMatch"
        | "RequestTimeTooSkewed"
        | "AuthenticationFailed"
        | "InvalidAuthenticationInfo" => StorageFault::Credentials,
        "NotImplemented" => StorageFault::Unsupported,
        _ => match error {
            Error::NotFound { .. } => StorageFault::NotFound,
            Error::PermissionDenied { .. } => StorageFault::PermissionDenied,
            Error::Unauthenticated { .. } => StorageFault::Credentials,
            Error::AlreadyExists { .. } => StorageFault::AlreadyExists,
            Error::Precondition { .. } | Error::NotModified { .. } => StorageFault::Changed,
            Error::NotSupported { .. } | Error::NotImplemented { .. } => StorageFault::Unsupported,
            Error::InvalidPath { .. } => StorageFault::Location,
            _ if text.contains("redential") && !text.contains("status code") => StorageFault::Credentials,
            _ if text.contains("status code: 416") => StorageFault::Changed,
            _ if text.contains("timed out") && !text.contains("status code") => StorageFault::TimedOut,
            _ if text.contains("non-partial response") => StorageFault::Unsupported,
            _ if ["5", "429"]
                .iter()
                .any(|status| text.contains(&format!("status code: {status}"))) =>
            {
                StorageFault::Unavailable
            }
            Error::Generic { .. } if text.contains("Error performing") && !text.contains("status code") => {
                StorageFault::Unavailable
            }
            _ => StorageFault::Other,
        },
    };
    StorageError::of(fault, url, &said(&text, code, secrets))
}

/// Whether an answer was cut on its way, so that it may be asked for again. (The client itself sends requests again that were not
/// answered, or by 429 and 5xx.)
pub(crate) fn is_cut(error: &object_store::Error) -> bool {
    let generic = matches!(error, object_store::Error::Generic { .. });
    generic && !with_sources(error).contains("status code")
}

/// What the server said: its code and message where it gave them, its status, or the innermost cause.
fn said(text: &str, code: &str, secrets: &[String]) -> String {
    let mut said = if !code.is_empty() {
        match between(text, "<Message>", "</Message>") {
            Some(message) => format!("{code}: {message}"),
            None => code.to_string(),
        }
    } else if let Some(at) = text.find("status code: ") {
        let rest = &text[at + "status code: ".len()..];
        rest.split([':', '\n']).next().unwrap_or(rest).trim().to_string()
    } else {
        text.rsplit(CAUSE).next().unwrap_or(text).to_string()
    };
    for secret in secrets {
        said = said.replace(secret.as_str(), "***");
    }
    let one_line: String = said
        .chars()
        .map(|letter| if letter.is_control() { ' ' } else { letter })
        .take(300)
        .collect();
    without_queries(one_line.trim())
}

/// Separates an error from its cause.
const CAUSE: &str = "\u{1f}";

fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(CAUSE);
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    rest.split_once(after).map(|(found, _)| found.trim())
}

/// A signature may be in the query of a URL.
fn without_queries(text: &str) -> String {
    let word = |word: &str| match word.split_once('?') {
        Some((address, _)) if address.contains("://") => format!("{address}?***"),
        _ => word.to_string(),
    };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(body: &str) -> StorageError {
        let source = Box::new(io::Error::other(format!(
            "Server returned non-2xx status code: 403 Forbidden: {body}"
        )));
        let error = object_store::Error::PermissionDenied {
            path: "key".into(),
            source,
        };
        of_client("s3://bucket/key", &error, &["hush-hush".into()])
    }

    #[test]
    fn a_message_has_the_servers_words_and_no_secret() {
        let denied = of(
            "<Error><Code>AccessDenied</Code><Message>No, hush-hush.</Message><StringToSign>AWS4</StringToSign></Error>",
        );
        assert_eq!(denied.fault, StorageFault::PermissionDenied);
        assert_eq!(
            denied.to_string(),
            "s3://bucket/key: permission denied (AccessDenied: No, ***.)"
        );
        assert!(denied.is_of_the_object());
        let expired = of("<Error><Code>ExpiredToken</Code><Message>The token has expired</Message></Error>");
        assert_eq!(expired.fault, StorageFault::Credentials);
        assert!(!expired.is_of_the_object());
        assert_eq!(of("").to_string(), "s3://bucket/key: permission denied (403 Forbidden)");
        assert_eq!(
            without_queries("for url (https://a/b?X-Amz-Signature=1) end"),
            "for url (https://a/b?*** end"
        );
    }
}
