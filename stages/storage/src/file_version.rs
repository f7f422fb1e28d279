//! Whether a file has changed: one answer for all who read a file twice, or keep what they made of it.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::stat::Stat;

const NANOSECONDS: i64 = 1_000_000_000;

/// File systems record times in steps of up to two seconds: within one, a second change leaves the same time.
const STEP: Duration = Duration::from_secs(2);

/// What the file system or object storage says of a file. Equal versions mean equal bytes, if the version has settled
/// ([`FileVersion::is_settled`]).
///
/// The change time counts beside the modification time, since programs can set the latter. The device does not: its number
/// may be another one after a file system is mounted again, and two files of two devices do not share inode, size and both
/// times. Of an object, the ETag (or else the version) replaces inode and times: copies of a bucket keep the ETag and not
/// the time, and listings do not give the version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileVersion {
    /// In bytes.
    pub size: u64,
    /// Nanoseconds since 1970; 0 for an object with an ETag or a version.
    pub mtime_ns: i64,
    /// 0 for an object, as is the next.
    pub ctime_ns: i64,
    pub inode: u64,
    /// BLAKE3 of the ETag, or else of the version, of an object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<[u8; 32]>,
}

impl FileVersion {
    pub fn of_file(metadata: &Metadata) -> Self {
        let nanoseconds = |seconds: i64, rest: i64| seconds.saturating_mul(NANOSECONDS).saturating_add(rest);
        FileVersion {
            size: metadata.len(),
            mtime_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            ctime_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
            inode: metadata.ino(),
            tag: None,
        }
    }

    pub fn of_object(stat: &Stat) -> Self {
        let since = stat.modified.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let tag = stat.etag.as_deref().or(stat.version.as_deref());
        FileVersion {
            size: stat.size,
            mtime_ns: match tag {
                Some(_) => 0,
                None => i64::try_from(since.as_nanos()).unwrap_or(i64::MAX),
            },
            ctime_ns: 0,
            inode: 0,
            tag: tag.map(|tag| *blake3::hash(tag.as_bytes()).as_bytes()),
        }
    }

    /// Of a regular file on this machine, if its version has settled.
    pub fn settled(path: &Path) -> Option<Self> {
        // Taken before the version: a change between the two could leave the same times.
        let now = SystemTime::now();
        let metadata = std::fs::metadata(path).ok().filter(Metadata::is_file)?;
        let version = FileVersion::of_file(&metadata);
        version.is_settled(now).then_some(version)
    }

    /// Whether any change from `now` on, which is before the version was taken, gives another one. Either time suffices: the
    /// modification time may be in the
    /// future, if somebody set it or the clock of a file server is ahead.
    pub fn is_settled(&self, now: SystemTime) -> bool {
        let is_old = |at: SystemTime| now.duration_since(at).is_ok_and(|age| age >= STEP);
        self.tag.is_some() || is_old(self.modified()) || self.changed().is_some_and(is_old)
    }

    /// Whether both are of one file with the same contents, which may have been renamed in between: this changes the change
    /// time.
    pub fn is_renamed(&self, other: &FileVersion) -> bool {
        FileVersion {
            ctime_ns: other.ctime_ns,
            ..*self
        } == *other
    }

    pub fn modified(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_nanos(u64::try_from(self.mtime_ns).unwrap_or(0))
    }

    /// None for objects, and before 1970. Rounded up to a second.
    fn changed(&self) -> Option<SystemTime> {
        let seconds = u64::try_from(self.ctime_ns.div_euclid(NANOSECONDS)).ok();
        let seconds = seconds.filter(|_| self.inode != 0)?;
        Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds + 1))
    }
}

/// Whether both are of one file, by device and inode.
pub fn is_one_file(a: &Metadata, b: &Metadata) -> bool {
    (a.dev(), a.ino()) == (b.dev(), b.ino())
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
        let of = |etag, seconds| FileVersion::of_object(&stat(etag, seconds));
        assert_eq!(of(Some("a"), 1), of(Some("a"), 2));
        assert_ne!(of(Some("a"), 1), of(Some("b"), 1));
        assert_ne!(of(None, 1), of(None, 2));
        assert_eq!(of(None, 3).modified(), SystemTime::UNIX_EPOCH + Duration::from_secs(3));
        assert!(of(Some("a"), 1).is_settled(SystemTime::UNIX_EPOCH));
    }

    #[test]
    fn a_file_has_another_version_after_each_change_once_it_has_settled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let of = |path: &Path| FileVersion::of_file(&std::fs::metadata(path).unwrap());
        std::fs::write(&path, "one").unwrap();
        let first = of(&path);
        let now = SystemTime::now();
        assert!(!first.is_settled(now) && FileVersion::settled(&path).is_none());
        assert!(first.is_settled(now + STEP + Duration::from_secs(2)));
        // As a file server whose clock is ahead gives it, or a program that sets it.
        let future = FileVersion {
            mtime_ns: i64::MAX,
            ..first
        };
        assert!(future.is_settled(now + STEP + Duration::from_secs(2)));
        std::fs::write(&path, "four").unwrap();
        assert_ne!(of(&path), first);
        let (second, moved) = (of(&path), folder.path().join("moved"));
        std::fs::rename(&path, &moved).unwrap();
        assert!(of(&moved).is_renamed(&second) && !of(&moved).is_renamed(&first));
        assert!(FileVersion::settled(folder.path()).is_none(), "a folder");
    }
}
