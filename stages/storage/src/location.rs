//! What users name: a file or folder on this machine, or an object or prefix in object storage.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::error::{StorageError, StorageFault};

/// The kinds of object storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scheme {
    /// `s3://bucket/key`: Amazon S3 and what speaks as it does.
    S3,
    /// `gs://bucket/key`: Google Cloud Storage.
    Gs,
    /// `az://container/key`: Azure Blob Storage.
    Az,
    /// `https://host/key`: files of a web server, which are read only and cannot be listed.
    Https,
    /// `http://host/key`, of this machine alone.
    Http,
}

impl Scheme {
    const ALL: [Scheme; 5] = [Scheme::S3, Scheme::Gs, Scheme::Az, Scheme::Https, Scheme::Http];

    /// With `://`.
    pub fn prefix(self) -> &'static str {
        match self {
            Scheme::S3 => "s3://",
            Scheme::Gs => "gs://",
            Scheme::Az => "az://",
            Scheme::Https => "https://",
            Scheme::Http => "http://",
        }
    }

    /// Whether keys are percent-encoded as they are written.
    pub(crate) fn is_web(self) -> bool {
        matches!(self, Scheme::Https | Scheme::Http)
    }
}

/// An object, or the prefix of several, in object storage. It is displayed as it is written, and holds no secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectUrl {
    scheme: Scheme,
    /// The bucket, the container, or the host with its port.
    bucket: String,
    /// Without `/` at either end; empty for the whole bucket.
    key: String,
}

impl ObjectUrl {
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The bucket, the container, or the host with its port.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// The key, without `/` at either end; empty for the whole bucket.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The object of another key in the same bucket.
    pub(crate) fn with_key(&self, key: &str) -> ObjectUrl {
        ObjectUrl {
            scheme: self.scheme,
            bucket: self.bucket.clone(),
            key: key.to_string(),
        }
    }

    /// Whether the key can be in a URL that is read as this one.
    pub(crate) fn is_readable(&self) -> bool {
        let parsed = Location::parse(&self.to_string());
        matches!(parsed, Ok(Location::Object(url)) if url == *self)
    }

    /// What is named `name` below this prefix.
    ///
    /// # Errors
    /// When `name` is absolute, or has `..`, `.` or an empty part.
    pub fn join(&self, name: &str) -> Result<ObjectUrl, StorageError> {
        let name = check_key(name, name)?;
        let key = match (self.key.as_str(), name) {
            (key, "") => key.to_string(),
            ("", name) => name.to_string(),
            (key, name) => format!("{key}/{name}"),
        };
        Ok(self.with_key(&key))
    }

    /// The prefix that this is in; none for a bucket.
    pub fn parent(&self) -> Option<ObjectUrl> {
        if self.key.is_empty() {
            return None;
        }
        Some(self.with_key(self.key.rsplit_once('/').map_or("", |(parent, _)| parent)))
    }

    /// Whether what is below it can be listed: what a web server has cannot.
    pub fn can_be_listed(&self) -> bool {
        !self.scheme.is_web()
    }

    /// The key as it is called below a prefix; none where it is not below it.
    pub fn below(&self, prefix: &ObjectUrl) -> Option<&str> {
        if (self.scheme, &self.bucket) != (prefix.scheme, &prefix.bucket) {
            return None;
        }
        if prefix.key.is_empty() {
            return Some(&self.key);
        }
        self.key.strip_prefix(prefix.key.as_str())?.strip_prefix('/')
    }

    /// The last part of the key.
    pub fn name(&self) -> &str {
        self.key.rsplit('/').next().unwrap_or_default()
    }

    fn parse(scheme: Scheme, given: &str) -> Result<ObjectUrl, StorageError> {
        let rest = &given[scheme.prefix().len()..];
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        // What is before an `@` or after a `?` may be secret: it is not repeated.
        let refuse = |shown: &str, why: &str| {
            let message = format!("`{}{shown}`: {why}", scheme.prefix());
            Err(StorageError::new(StorageFault::Location, message))
        };
        if let Some((_, host)) = bucket.rsplit_once('@') {
            return refuse(
                &format!("***@{host}"),
                "a URL must not contain a user or password; give credentials by the environment",
            );
        }
        if let Some(at) = query_of(scheme, rest) {
            let why =
                "a URL must not contain a query (`?name=`): signed URLs are secrets, and would be kept with the run";
            return refuse(&format!("{}***", &rest[..at]), why);
        }
        if bucket.is_empty() {
            let what = if scheme.is_web() { "host" } else { "bucket" };
            return refuse(rest, &format!("it names no {what}"));
        }
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_');
        let is_host = |letter: char| is_part(letter) || matches!(letter, ':' | '[' | ']');
        let allowed = |letter| {
            if scheme.is_web() {
                is_host(letter)
            } else {
                is_part(letter)
            }
        };
        if !bucket.chars().all(allowed) || bucket == "." || bucket == ".." {
            return refuse(rest, &format!("`{bucket}` is not the name of a bucket or host"));
        }
        if scheme == Scheme::Http && !is_loopback(bucket) {
            return refuse(rest, "use https: http is for servers on this machine alone");
        }
        let decoded = if scheme.is_web() {
            match percent_decoded(key) {
                Some(decoded) => decoded,
                None => return refuse(rest, "what follows a `%` is not a byte of UTF-8 text"),
            }
        } else {
            key.to_string()
        };
        Ok(ObjectUrl {
            scheme,
            bucket: bucket.to_string(),
            key: check_key(&decoded, given)?.to_string(),
        })
    }
}

impl fmt::Display for ObjectUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.scheme.prefix(), self.bucket)?;
        if self.key.is_empty() {
            return Ok(());
        }
        if !self.scheme.is_web() {
            return write!(f, "/{}", self.key);
        }
        f.write_str("/")?;
        for byte in self.key.bytes() {
            match byte {
                b'%' | b'?' | b'#' | b' ' | b'"' | b'<' | b'>' | 0x7f.. => write!(f, "%{byte:02X}")?,
                _ => write!(f, "{}", char::from(byte))?,
            }
        }
        Ok(())
    }
}

/// Where a query or fragment begins, which is no part of a key. Keys of object storage, which are not percent-encoded, may have
/// a `#`, and a `?` that begins no query.
fn query_of(scheme: Scheme, text: &str) -> Option<usize> {
    if scheme.is_web() {
        return text.find(['?', '#']);
    }
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.');
    let begins_query = |at: &usize| {
        let rest = &text[at + 1..];
        let name = rest.trim_start_matches(is_name);
        name.len() < rest.len() && name.starts_with('=')
    };
    text.match_indices('?').map(|(at, _)| at).find(begins_query)
}

/// A key without `/` at its end.
fn check_key<'a>(key: &'a str, given: &str) -> Result<&'a str, StorageError> {
    let key = key.strip_suffix('/').unwrap_or(key);
    if key.is_empty() {
        return Ok(key);
    }
    let why = if key.split('/').any(|part| part == ".." || part == ".") {
        "no part of a key may be `..` or `.`"
    } else if key.split('/').any(str::is_empty) {
        "no part of a key may be empty"
    } else if key.chars().any(char::is_control) {
        "a key must not contain control characters"
    } else if key.len() > 1024 {
        "a key may have 1024 bytes"
    } else {
        return Ok(key);
    };
    let given: String = given.chars().take(200).flat_map(char::escape_debug).collect();
    Err(StorageError::new(StorageFault::Location, format!("`{given}`: {why}")))
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
        let (high, low) = (digit(bytes.next())?, digit(bytes.next())?);
        decoded.push(u8::try_from(high * 16 + low).ok()?);
    }
    String::from_utf8(decoded).ok()
}

/// Whether a host (which may have a port) is this machine.
pub(crate) fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => host.split(':').next().unwrap_or(host),
    };
    name == "localhost"
        || name
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// A file or folder on this machine, or an object or prefix in object storage.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Location {
    Local(PathBuf),
    Object(ObjectUrl),
}

impl Location {
    /// What a user wrote. A text without a scheme is a path, which may be relative.
    ///
    /// # Errors
    /// When it has a scheme that is not known, names no bucket, has a user, a password, `?` or `#`, or a key with `..`.
    pub fn parse(given: &str) -> Result<Location, StorageError> {
        for scheme in Scheme::ALL {
            if has_prefix(given, scheme.prefix()) {
                return ObjectUrl::parse(scheme, given).map(Location::Object);
            }
        }
        if has_prefix(given, "file://") {
            let path = &given["file://".len()..];
            let path = path
                .strip_prefix("localhost")
                .filter(|path| path.starts_with('/'))
                .unwrap_or(path);
            if !path.starts_with('/') {
                let message = format!("`{given}`: after file:// comes an absolute path of this machine");
                return Err(StorageError::new(StorageFault::Location, message));
            }
            let Some(path) = percent_decoded(path) else {
                let message = format!("`{given}`: what follows a `%` is not a byte of UTF-8 text");
                return Err(StorageError::new(StorageFault::Location, message));
            };
            return Ok(Location::Local(path.into()));
        }
        if let Some((scheme, _)) = given.split_once("://")
            && !scheme.is_empty()
            && scheme
                .chars()
                .all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '+' | '-' | '.'))
        {
            let message = format!("`{scheme}://` is not known here; there are s3, gs, az, https and file");
            return Err(StorageError::new(StorageFault::Location, message));
        }
        Ok(Location::Local(given.into()))
    }

    /// As [`Location::parse`], of a path that may hold a URL: settings and rows keep both in one field.
    ///
    /// # Errors
    /// Those of [`Location::parse`].
    pub fn of_path(path: &Path) -> Result<Location, StorageError> {
        match path.to_str() {
            Some(text) => Location::parse(text),
            None => Ok(Location::Local(path.to_path_buf())),
        }
    }

    /// What is named `name` below this folder or prefix.
    ///
    /// # Errors
    /// For an object when `name` is absolute, or has `..`, `.` or an empty part.
    pub fn join(&self, name: &str) -> Result<Location, StorageError> {
        match self {
            Location::Local(path) => Ok(Location::Local(path.join(name))),
            Location::Object(url) => url.join(name).map(Location::Object),
        }
    }

    /// As a path that [`Location::of_path`] makes a location of again.
    pub fn to_path(&self) -> PathBuf {
        match self {
            Location::Local(path) => path.clone(),
            Location::Object(url) => url.to_string().into(),
        }
    }

    /// The object, where it is one.
    pub fn object(&self) -> Option<&ObjectUrl> {
        match self {
            Location::Local(_) => None,
            Location::Object(url) => Some(url),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Local(path) => path.display().fmt(f),
            Location::Object(url) => url.fmt(f),
        }
    }
}

fn has_prefix(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len())
        .is_some_and(|head| head.eq_ignore_ascii_case(prefix))
}

/// Whether a path holds a URL of object storage (or of `file://`), by its first letters alone.
pub fn is_url(path: impl AsRef<Path>) -> bool {
    let Some(text) = path.as_ref().to_str() else {
        return false;
    };
    has_prefix(text, "file://") || Scheme::ALL.iter().any(|scheme| has_prefix(text, scheme.prefix()))
}

/// The path that a URL of `file://` represents; none for other URLs, for paths, and where the URL has none.
pub fn path_of_file_url(text: &str) -> Option<PathBuf> {
    match has_prefix(text, "file://").then(|| Location::parse(text)) {
        Some(Ok(Location::Local(path))) => Some(path),
        _ => None,
    }
}

#[cfg(test)]
#[path = "location_tests.rs"]
mod tests;
