//! The layout of the hub's cache: `models--OWNER--NAME` and `datasets--OWNER--NAME` with `blobs`, `snapshots/COMMIT` (links to blobs) and `refs`.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::HubError;
use crate::reference::{HubReference, is_commit, is_inside};

/// The folder of one repository in the cache, and a revision of it.
pub(crate) struct Cache {
    folder: PathBuf,
    revision: String,
}

impl Cache {
    pub fn new(root: &Path, reference: &HubReference) -> Self {
        Cache {
            folder: root.join(format!(
                "{}--{}--{}",
                reference.kind.plural(),
                reference.owner,
                reference.name
            )),
            revision: reference.revision.clone(),
        }
    }

    /// The commit that the revision was last resolved to; itself if it is a commit.
    pub fn commit(&self) -> Option<String> {
        if is_commit(&self.revision) {
            return Some(self.revision.clone());
        }
        let text = std::fs::read_to_string(self.folder.join("refs").join(&self.revision)).ok()?;
        let commit = text.trim();
        is_commit(commit).then(|| commit.to_owned())
    }

    /// Records which commit the revision is resolved to.
    pub fn write_ref(&self, commit: &str) -> Result<(), HubError> {
        if is_commit(&self.revision) {
            return Ok(());
        }
        write_whole(&self.folder.join("refs").join(&self.revision), commit.as_bytes())
    }

    /// All files of a commit of the repository, as [`Cache::write_listing`] recorded them.
    pub fn listing(&self, commit: &str) -> Option<Vec<String>> {
        let files: Vec<String> = serde_json::from_slice(&std::fs::read(self.listing_file(commit)).ok()?).ok()?;
        Some(files.into_iter().filter(|file| is_inside(file)).collect())
    }

    /// Records all files of a commit, of which the cache may have only some.
    pub fn write_listing(&self, commit: &str, files: &[String]) -> Result<(), HubError> {
        let text = serde_json::to_vec(files).unwrap_or_default();
        write_whole(&self.listing_file(commit), &text)
    }

    /// Not in the snapshot, where the hub's own programs would take it for a file of the repository.
    fn listing_file(&self, commit: &str) -> PathBuf {
        self.folder.join(".flow").join(format!("{commit}.json"))
    }

    /// The folder of a commit.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// The path of a file of a commit, if it is in the cache.
    pub fn file(&self, commit: &str, file: &str) -> Option<PathBuf> {
        let path = self.snapshot(commit).join(file);
        path.is_file().then_some(path)
    }

    /// Paths of all files of a commit that are in the cache, sorted, those in subfolders included.
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

    /// Whether all shards that the index of a safetensors model names are in the cache; true without an index.
    pub fn has_all_shards(&self, commit: &str) -> bool {
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

    /// The path of the blob with this etag, which need not exist.
    pub fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// Links the name of a file in the snapshot to its blob.
    pub fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(file);
        let folder = path.parent().unwrap_or(&path);
        std::fs::create_dir_all(folder).map_err(HubError::file(folder))?;
        let up = "../".repeat(file.matches('/').count() + 2);
        // A dangling link of an earlier download.
        let _ = std::fs::remove_file(&path);
        match std::os::unix::fs::symlink(format!("{up}blobs/{etag}"), &path) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.is_file() => Ok(()),
            Err(error) => Err(HubError::file(&path)(error)),
        }
    }
}

/// Writes a file under a temporary name, then renames it.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder).map_err(HubError::file(folder))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // Stages of one process may write the same file at the same time.
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let partial = folder.join(format!(".{name}.{}.{number}", std::process::id()));
    std::fs::write(&partial, bytes).map_err(HubError::file(&partial))?;
    std::fs::rename(&partial, path).map_err(HubError::file(path))
}
