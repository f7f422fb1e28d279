//! What shows that a file was changed.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

use flow_storage::Stat;

use crate::digest::Digest;

const NANOSECONDS: i64 = 1_000_000_000;

/// What the file system or object storage says of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileState {
    /// In bytes.
    pub size: u64,
    pub mtime_ns: i64,
    /// 0 for an object, as is the next.
    pub inode: u64,
    pub ctime_ns: i64,
    /// Of the ETag and the version of an object, where it has one of them.
    pub version: Option<Digest>,
}

impl FileState {
    pub fn of_file(metadata: &Metadata) -> Self {
        let nanoseconds = |seconds: i64, rest: i64| seconds.saturating_mul(NANOSECONDS).saturating_add(rest);
        FileState {
            size: metadata.len(),
            mtime_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            inode: metadata.ino(),
            ctime_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
            version: None,
        }
    }

    /// The time does not count where there is an ETag: copies of a bucket keep the one and not the other. Nor does the version
    /// then, which listings do not tell.
    pub fn of_object(stat: &Stat) -> Self {
        let since = stat.modified.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let name = stat.etag.as_deref().or(stat.version.as_deref());
        FileState {
            size: stat.size,
            mtime_ns: match name {
                Some(_) => 0,
                None => i64::try_from(since.as_nanos()).unwrap_or(i64::MAX),
            },
            inode: 0,
            ctime_ns: 0,
            version: name.map(|name| Digest::of(name.as_bytes())),
        }
    }

    pub fn modified(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_nanos(u64::try_from(self.mtime_ns).unwrap_or(0))
    }

    /// None for objects, and before 1970.
    pub fn changed(&self) -> Option<SystemTime> {
        let seconds = u64::try_from(self.ctime_ns.div_euclid(NANOSECONDS)).ok();
        let seconds = seconds.filter(|_| self.inode != 0)?;
        Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_known_by_its_etag_and_without_one_by_its_time() {
        let stat = |etag: Option<&str>, seconds| Stat {
            size: 5,
            modified: SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
            etag: etag.map(str::to_string),
            version: None,
        };
        let of = |etag, seconds| FileState::of_object(&stat(etag, seconds));
        assert_eq!(of(Some("a"), 1), of(Some("a"), 2));
        assert_ne!(of(Some("a"), 1), of(Some("b"), 1));
        assert_ne!(of(None, 1), of(None, 2));
        assert_eq!(of(None, 3).modified(), SystemTime::UNIX_EPOCH + Duration::from_secs(3));
    }
}
