//! The hub's cache: `models--OWNER--NAME` with `blobs`, `snapshots/COMMIT` (links to blobs) and `refs`.

use std::path::{Path, PathBuf};

use super::reference::{Reference, is_commit, is_inside};
use crate::error::TrainingError;

/// The part of the cache that belongs to one model and revision.
pub struct Cache {
    folder: PathBuf,
    revision: String,
}

impl Cache {
    pub fn new(root: &Path, reference: &Reference) -> Self {
        Cache {
            folder: root.join(format!("models--{}--{}", reference.owner, reference.name)),
            revision: reference.revision.clone(),
        }
    }

    /// The commit that the revision is, or was when it was last asked for.
    pub fn commit(&self) -> Option<String> {
        if is_commit(&self.revision) {
            return Some(self.revision.clone());
        }
        let text = std::fs::read_to_string(self.folder.join("refs").join(&self.revision)).ok()?;
        let commit = text.trim();
        is_commit(commit).then(|| commit.to_owned())
    }

    pub fn note_revision(&self, commit: &str) -> Result<(), TrainingError> {
        if is_commit(&self.revision) {
            return Ok(());
        }
        let folder = self.folder.join("refs");
        std::fs::create_dir_all(&folder).map_err(TrainingError::file(&folder))?;
        let waiting = folder.join(format!(".{}.{}", self.revision, std::process::id()));
        std::fs::write(&waiting, commit).map_err(TrainingError::file(&waiting))?;
        std::fs::rename(&waiting, folder.join(&self.revision)).map_err(TrainingError::file(&folder))
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// A file of a commit, if it is there.
    pub fn file(&self, commit: &str, file: &str) -> Option<PathBuf> {
        let path = self.snapshot(commit).join(file);
        path.is_file().then_some(path)
    }

    /// All files of a commit that are there, sorted, folders within it included.
    pub fn files(&self, commit: &str) -> Vec<String> {
        let root = self.snapshot(commit);
        let mut open = vec![String::new()];
        let mut files = Vec::new();
        while let Some(below) = open.pop() {
            let Ok(entries) = std::fs::read_dir(root.join(&below)) else {
                continue;
            };
            for entry in entries.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                let name = if below.is_empty() {
                    name
                } else {
                    format!("{below}/{name}")
                };
                if root.join(&name).is_file() {
                    files.push(name);
                } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) && name.matches('/').count() < 8 {
                    open.push(name);
                }
            }
        }
        files.sort();
        files
    }

    /// Whether a safetensors model is there with all files that its index names.
    pub fn is_whole_folder(&self, commit: &str) -> bool {
        let root = self.snapshot(commit);
        let Ok(index) = std::fs::read(root.join("model.safetensors.index.json")) else {
            return true;
        };
        let index: serde_json::Value = serde_json::from_slice(&index).unwrap_or_default();
        let parts = index["weight_map"].as_object().map(|map| map.values());
        parts.is_some_and(|mut parts| {
            parts.all(|part| {
                part.as_str()
                    .is_some_and(|part| is_inside(part) && root.join(part).is_file())
            })
        })
    }

    /// Where the bytes with this etag lie, or will.
    pub fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// Gives a blob its name in the snapshot.
    pub fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), TrainingError> {
        let path = self.snapshot(commit).join(file);
        let folder = path.parent().unwrap_or(&path);
        std::fs::create_dir_all(folder).map_err(TrainingError::file(folder))?;
        let up = "../".repeat(file.matches('/').count() + 2);
        // A link of an earlier download that led to nothing.
        let _ = std::fs::remove_file(&path);
        match std::os::unix::fs::symlink(format!("{up}blobs/{etag}"), &path) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.is_file() => Ok(()),
            Err(error) => Err(TrainingError::file(&path)(error)),
        }
    }
}
