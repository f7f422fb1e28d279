//! Where extracted recordings go: a folder, or a prefix in object storage.

use std::path::{Path, PathBuf};

use flow_storage::{Location, Storage};

use crate::object_target::ObjectTarget;
use crate::place::{Content, Target};
use flow_audio::error::AudioError;

/// What receives the recordings.
pub(super) enum Destination {
    Folder(Target),
    Objects(ObjectTarget),
}

impl Destination {
    pub fn open(storage: &Storage, path: &Path) -> Result<Self, AudioError> {
        let failed = |error: flow_storage::StorageError| AudioError::write(path, error.into());
        match Location::of_path(path).map_err(failed)? {
            Location::Local(folder) => Target::open(&folder).map(Destination::Folder),
            Location::Object(url) => Ok(Destination::Objects(ObjectTarget::new(storage, &url))),
        }
    }

    /// The path or URL that a recording has below `folder`, as which this was opened.
    pub fn path(&self, folder: &Path, components: &[&str]) -> Result<PathBuf, AudioError> {
        match self {
            Destination::Folder(_) => Ok(folder.join(components.join("/"))),
            Destination::Objects(target) => Ok(target.object(components)?.to_string().into()),
        }
    }

    /// Whether a file may be there that needs no more room. There is always room in object storage.
    pub fn has_room_for(&self, path: &Path, size: Option<u64>) -> bool {
        match self {
            Destination::Folder(_) => std::fs::symlink_metadata(path)
                .is_ok_and(|file| file.is_file() && size.is_none_or(|size| file.len() == size)),
            Destination::Objects(_) => true,
        }
    }

    pub fn place(&self, components: &[&str], content: Content<'_>) -> Result<(), AudioError> {
        match self {
            Destination::Folder(target) => target.place(components, content).map(|_| ()),
            Destination::Objects(target) => target.place(components, content),
        }
    }

    /// The bytes of the file; none if it is not there.
    pub fn read(&self, components: &[&str]) -> Result<Option<Vec<u8>>, AudioError> {
        match self {
            Destination::Folder(target) => target.read(components),
            Destination::Objects(target) => target.read(components),
        }
    }

    /// Waits until what was placed outlives a power cut, as objects do.
    pub fn sync(&self) -> Result<(), AudioError> {
        match self {
            Destination::Folder(target) => target.sync(),
            Destination::Objects(_) => Ok(()),
        }
    }
}
