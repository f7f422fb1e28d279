//! Puts recordings into object storage.

use std::collections::HashSet;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use flow_storage::{Location, ObjectUrl, Storage, StorageError, StorageFault};

use crate::place::Content;
use flow_audio::error::AudioError;

/// Maximum size of an object that is read whole: that of a recording.
const MOST: u64 = 4 << 30;

/// A prefix in object storage that receives recordings.
pub struct ObjectTarget {
    storage: Storage,
    url: ObjectUrl,
    /// What lay below the prefix of a shard before this process wrote there; of the last shard that was asked for.
    standing: Mutex<Option<(String, HashSet<ObjectUrl>)>>,
}

impl ObjectTarget {
    pub fn new(storage: &Storage, url: &ObjectUrl) -> Self {
        ObjectTarget {
            storage: storage.clone(),
            url: url.clone(),
            standing: Mutex::default(),
        }
    }

    /// The object of that name (plain components), as rows name it.
    ///
    /// # Errors
    /// [`AudioError::UnsafePath`] where no object can be named so, or could not be read by its URL.
    pub fn object(&self, components: &[&str]) -> Result<ObjectUrl, AudioError> {
        let name = components.join("/");
        let refused = |why: String| AudioError::unsafe_path(format!("{}/{name}", self.url), why);
        let object = self.url.join(&name).map_err(|error| refused(error.to_string()))?;
        match Location::parse(&object.to_string()) {
            Ok(Location::Object(read)) if read == object => Ok(object),
            Ok(_) => Err(refused("its URL names another object".into())),
            Err(error) => Err(refused(error.to_string())),
        }
    }

    /// Writes an object, in place of one that is there. It appears whole or not at all.
    pub fn place(&self, components: &[&str], content: Content<'_>) -> Result<(), AudioError> {
        let object = self.object(components)?;
        let failed = |source| AudioError::write(object.to_string(), source);
        let mut writer = self.storage.create(&object).map_err(|error| failed(error.into()))?;
        content.each_piece(|piece| writer.write_all(piece).map(|()| true).map_err(failed))?;
        writer.finish().map_err(|error| failed(error.into()))
    }

    /// The bytes of an object; none if it is not there. The objects of a shard are listed once.
    pub fn read(&self, components: &[&str]) -> Result<Option<Vec<u8>>, AudioError> {
        let object = self.object(components)?;
        let failed = |error: StorageError| AudioError::read(PathBuf::from(object.to_string()), error.into());
        let shard = components[..components.len().min(2)].join("/");
        {
            let mut standing = self.standing.lock().unwrap_or_else(PoisonError::into_inner);
            if standing.as_ref().is_none_or(|(of, _)| *of != shard) {
                let below = self.url.join(&shard).map_err(failed)?;
                let listed = self.storage.list(&below).map_err(failed)?;
                *standing = Some((shard, listed.into_iter().map(|entry| entry.url).collect()));
            }
            if !standing.as_ref().is_some_and(|(_, objects)| objects.contains(&object)) {
                return Ok(None);
            }
        }
        match self.storage.read(&object, MOST) {
            Ok(bytes) => Ok(Some(bytes.to_vec())),
            // `flow` writes no larger one: treated as absent.
            Err(error) if matches!(error.fault, StorageFault::NotFound | StorageFault::TooLarge) => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use flow_storage_testing::{Fault, FaultRule, TestServer};

    use super::*;

    #[test]
    fn recordings_become_objects_that_are_whole() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("bucket")).unwrap();
        let server = TestServer::start(root.path()).unwrap();
        let Location::Object(url) = Location::parse("s3://bucket/audio").unwrap() else {
            panic!("no object")
        };
        let target = ObjectTarget::new(&server.storage(), &url);
        let name = ["hi", "hi_0000", "a b.flac"];
        assert_eq!(target.read(&name).unwrap(), None);
        server.fault(FaultRule::first(2, Fault::Status(503), "/bucket/audio"));
        target.place(&name, Content::Bytes(b"samples")).unwrap();
        assert_eq!(
            std::fs::read(root.path().join("bucket/audio/hi/hi_0000/a b.flac")).unwrap(),
            b"samples"
        );
        assert_eq!(
            target.object(&name).unwrap().to_string(),
            "s3://bucket/audio/hi/hi_0000/a b.flac"
        );
        // As one of another process finds it, with one listing for the shard.
        let other = ObjectTarget::new(&server.storage(), &url);
        server.clear();
        assert_eq!(other.read(&name).unwrap().as_deref(), Some(&b"samples"[..]));
        for missing in ["b.flac", "c.flac"] {
            assert_eq!(other.read(&["hi", "hi_0000", missing]).unwrap(), None);
        }
        assert_eq!(server.requests("list-type"), 1, "one page of a listing");
        // Letters that mean something in a URL.
        for odd in ["what?.flac", "a#1.flac"] {
            target.place(&["hi", odd], Content::Bytes(odd.as_bytes())).unwrap();
            let written = std::fs::read(root.path().join("bucket/audio/hi").join(odd));
            assert_eq!(written.unwrap(), odd.as_bytes());
        }
        // What cannot be written is an error that names it, and what was there stays.
        server.fault(FaultRule {
            method: Some("PUT"),
            ..FaultRule::always(Fault::Status(403), "")
        });
        let error = target.place(&name, Content::Bytes(b"others!")).unwrap_err();
        assert!(
            matches!(error, AudioError::Write { .. }) && error.to_string().contains("a b.flac"),
            "{error}"
        );
        assert_eq!(other.read(&name).unwrap().as_deref(), Some(&b"samples"[..]));
        // Names that no URL could have.
        for name in [".", ".."] {
            let error = target.place(&["hi", name], Content::Bytes(b"")).unwrap_err();
            assert!(matches!(error, AudioError::UnsafePath { .. }), "{name}: {error}");
        }
    }
}
