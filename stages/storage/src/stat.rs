//! What storage says of an object.

use std::time::{Duration, SystemTime};

/// What storage says of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// In bytes.
    pub size: u64,
    /// In whole seconds, as HTTP tells it.
    pub modified: SystemTime,
    /// Another one after each change, as far as the storage has them. Without `"` around it.
    pub etag: Option<String>,
    /// Where the bucket keeps versions.
    pub version: Option<String>,
}

impl Stat {
    pub(crate) fn of(meta: &object_store::ObjectMeta) -> Stat {
        let seconds = u64::try_from(meta.last_modified.timestamp()).unwrap_or(0);
        Stat {
            size: meta.size,
            modified: SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
            etag: meta.e_tag.as_deref().map(|etag| etag.trim_matches('"').to_string()),
            version: meta.version.clone(),
        }
    }

    /// Whether two looks at an object saw the same bytes: by ETag where both have one, by time otherwise.
    pub fn is_same(&self, other: &Stat) -> bool {
        self.size == other.size
            && match (&self.etag, &other.etag) {
                (Some(a), Some(b)) => a == b,
                _ => self.modified == other.modified,
            }
    }

    /// The ETag, where a request may be bound to it.
    pub(crate) fn strong_etag(&self) -> Option<&str> {
        self.etag
            .as_deref()
            .filter(|etag| !etag.starts_with("W/") && !etag.is_empty())
    }
}
