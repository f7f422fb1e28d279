//! Sets of files in object storage, where nothing is renamed and nobody holds a lock.
//!
//! ```text
//! <folder>/flow.json             which set is current: whoever reads a file of it depends on this
//! <folder>/set-<token>/<name>    its files
//! ```
//!
//! The files of a new set are written below a prefix that no other set has, so that the set that stands is not touched.
//! `flow.json` is one object, which takes the place of the one before as a whole: writing it is the commit. Files of the set
//! before are deleted after it. Of what is written, and of what is to be deleted, a note is kept on this machine: when a
//! process is killed, the next export that has the note deletes what no `flow.json` names.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use flow_storage::{Location, ObjectUrl, ObjectVersion, Scheme, Stat, Storage, StorageError, StorageFault};
use serde::{Deserialize, Serialize};

use super::StoreError;
use super::atomic::{self, write_atomically};
use super::export::{EXPORT_VERSION, ExportStatus, FileEntry, FileInSet, MANIFEST, Manifest, is_foreign, rows_of};
use super::export_file::{Noted, digest_of};
use super::lock::new_token;
use super::versioned_json;
use flow_base::digest::Digest;
use flow_base::failpoints;

/// How the prefix of a set's files begins.
const PREFIX: &str = "set-";
/// The file of notes.
const NOTES: &str = "object_sets.json";

/// The prefix of a set's files, which may have to be deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    /// URL of the set's `flow.json`.
    manifest: String,
    prefix: String,
}

/// A set that is being written.
pub(super) struct ObjectSet {
    storage: Storage,
    folder: ObjectUrl,
    manifest: ObjectUrl,
    /// What stood when this began.
    old: Option<Standing>,
    /// Folder of the notes.
    scratch: PathBuf,
}

/// An object that has the name of a `flow.json`.
struct Standing {
    stat: Stat,
    /// None if it is damaged.
    set: Option<Manifest>,
    /// Whether it was written by somebody else.
    is_foreign: bool,
}

/// See [`super::ExportSet::status`]. The files are not read: size and ETag are compared.
pub(super) fn status(
    storage: &Storage,
    folder: &ObjectUrl,
    manifest: &str,
    key: &Digest,
) -> Result<ExportStatus, StoreError> {
    let url = folder.join(manifest)?;
    let set = match read_manifest(storage, &url)? {
        None => return Ok(ExportStatus::Missing),
        Some(Standing { set: Some(set), .. }) => set,
        Some(Standing { set: None, .. }) => {
            let file = manifest.to_string();
            return Ok(ExportStatus::Changed { file });
        }
    };
    if set.key != *key {
        return Ok(ExportStatus::Outdated);
    }
    // One that was copied there from a folder has no ETags to go by.
    let prefix = set.prefix.as_deref().filter(|prefix| is_prefix(prefix));
    for (name, entry) in &set.files {
        let found = match prefix {
            Some(prefix) => stat_if_there(storage, &folder.join(prefix)?.join(name)?)?,
            None => None,
        };
        if !found.is_some_and(|found| entry.is_same(&found)) {
            return Ok(ExportStatus::Changed { file: name.clone() });
        }
    }
    Ok(ExportStatus::Whole)
}

/// See [`super::file_in_set`]. The file itself may lie where the set has it, or be called by the name that it has in the set:
/// that is another object then, which is none of the set's. Files are not read: size and ETag are compared.
pub(super) fn file_in_set(
    storage: &Storage,
    folder: &ObjectUrl,
    manifest: &str,
    name: &str,
) -> Result<FileInSet, StoreError> {
    let (top, prefix) = match folder.parent() {
        Some(parent) if is_prefix(folder.name()) => (parent, Some(folder.name())),
        _ => (folder.clone(), None),
    };
    let url = top.join(manifest)?;
    if !is_written(&url) {
        return Ok(FileInSet::NoSet);
    }
    let set = match visible_manifest(storage, &url)? {
        None if prefix.is_some() => return Ok(FileInSet::CutShort),
        None => return Ok(FileInSet::NoSet),
        Some(Standing { set: None, .. }) => return Err(damaged(&url)),
        Some(Standing { set: Some(set), .. }) => set,
    };
    let Some(entry) = set.files.get(name) else {
        return Ok(FileInSet::Other);
    };
    if set.prefix.as_deref() != prefix {
        return Ok(FileInSet::Changed);
    }
    let object = folder.join(name)?;
    let found = storage.stat(&object)?;
    // A copy may have been uploaded in other parts, and has another ETag then.
    let is_same = entry.is_same(&found)
        || entry.bytes == found.size && digest_of_object(storage, &object, &found)? == entry.digest;
    Ok(if is_same {
        FileInSet::AsWritten
    } else {
        FileInSet::Changed
    })
}

/// Reads an object for its digest.
fn digest_of_object(storage: &Storage, url: &ObjectUrl, found: &Stat) -> Result<Digest, StoreError> {
    const PIECE: u64 = 8 << 20;
    let mut hasher = blake3::Hasher::new();
    let mut at = 0;
    while at < found.size {
        let end = at.saturating_add(PIECE).min(found.size);
        hasher.update(&storage.read_range(url, at..end, found)?);
        at = end;
    }
    Ok(Digest::from_bytes(*hasher.finalize().as_bytes()))
}

/// Where files of a set lie below a prefix of their own (`set-1a2b`), as in object storage and in copies of it: of the set's folder, of
/// a folder in it, or of a file in such a folder, by the names that they would have without the prefix. None if no `flow.json`
/// says so. `path` is nothing that is there, or a folder.
///
/// # Errors
/// If the description of a set cannot be read, or is damaged.
pub fn place_in_set(storage: &Storage, path: &Path) -> Result<Option<PathBuf>, StoreError> {
    let of = |top: PathBuf, below: &str| -> Result<Option<PathBuf>, StoreError> {
        let Some(set) = set_in(storage, &top)? else {
            return Ok(None);
        };
        let is_in_set = below.is_empty() || has_name(&set, below) || has_folder(&set, below);
        let prefix = set.prefix.filter(|prefix| is_in_set && is_prefix(prefix));
        Ok(prefix.map(|prefix| match below {
            "" => top.join(prefix),
            below => top.join(prefix).join(below),
        }))
    };
    if let Some(place) = of(path.to_path_buf(), "")? {
        return Ok(Some(place));
    }
    let is_folder_here =
        || Location::of_path(path).is_ok_and(|at| matches!(at, Location::Local(path) if path.is_dir()));
    let mut below = String::new();
    let mut above = path;
    // Files of a set are at most in one folder.
    for _ in 0..2 {
        let (Some(name), Some(parent)) = (above.file_name().and_then(|name| name.to_str()), above.parent()) else {
            return Ok(None);
        };
        let is_root = flow_storage::is_url(path) && !flow_storage::is_url(parent);
        if is_root || is_folder_here() {
            return Ok(None);
        }
        below = match below.as_str() {
            "" => name.to_owned(),
            below => format!("{name}/{below}"),
        };
        if let Some(place) = of(parent.to_path_buf(), &below)? {
            return Ok(Some(place));
        }
        above = parent;
    }
    Ok(None)
}

/// The set that a `flow.json` in a folder describes, if there is one.
fn set_in(storage: &Storage, folder: &Path) -> Result<Option<Manifest>, StoreError> {
    match Location::of_path(folder)? {
        Location::Object(url) if !is_written(&url) => Ok(None),
        Location::Object(url) => {
            let list = url.join(MANIFEST)?;
            match visible_manifest(storage, &list)? {
                Some(Standing { is_foreign: true, .. }) | None => Ok(None),
                Some(Standing { set: None, .. }) => Err(damaged(&list)),
                Some(Standing { set, .. }) => Ok(set),
            }
        }
        Location::Local(folder) => {
            let list = folder.join(MANIFEST);
            let is_short = std::fs::metadata(&list).is_ok_and(|found| found.is_file() && found.len() <= LONGEST_LIST);
            let Some(text) = is_short.then(|| atomic::read(&list)).transpose()?.flatten() else {
                return Ok(None);
            };
            match versioned_json::from_json(&list, &text, EXPORT_VERSION) {
                Err(StoreError::Damaged { .. }) if is_foreign(&text) => Ok(None),
                read => read.map(Some),
            }
        }
    }
}

fn has_name(set: &Manifest, name: &str) -> bool {
    set.files.contains_key(name)
}

fn has_folder(set: &Manifest, name: &str) -> bool {
    let folder = format!("{name}/");
    let first = set.files.range(folder.clone()..).next();
    first.is_some_and(|(name, _)| name.starts_with(&folder))
}

/// Where a file lies that may be one of a set in object storage: `s3://bucket/folder/train.parquet` is
/// `s3://bucket/folder/set-1a2b/train.parquet` where a `flow.json` in the folder (or `train.flow.json`) says so. Any other
/// path stays as it is.
///
/// # Errors
/// If the description of a set cannot be read, or is damaged.
pub fn path_in_set(storage: &Storage, path: &Path) -> Result<PathBuf, StoreError> {
    match Location::of_path(path)? {
        Location::Object(url) => Ok(object_of_set(storage, &url)?.unwrap_or(url).to_string().into()),
        Location::Local(_) => Ok(path.to_path_buf()),
    }
}

/// The object that a set has for a name in its folder; none where there is no such set.
fn object_of_set(storage: &Storage, url: &ObjectUrl) -> Result<Option<ObjectUrl>, StoreError> {
    let Some(folder) = url.parent().filter(|_| is_written(url)) else {
        return Ok(None);
    };
    let name = url.name();
    let stem = name.split('.').next().unwrap_or(name);
    for list in ["flow.json", &format!("{stem}.flow.json"), &format!("{name}.flow.json")] {
        let list = folder.join(list)?;
        let set = match visible_manifest(storage, &list)? {
            None => continue,
            Some(Standing { set: None, .. }) => return Err(damaged(&list)),
            Some(Standing { set: Some(set), .. }) => set,
        };
        let prefix = set.prefix.filter(|prefix| is_prefix(prefix));
        if let Some(prefix) = prefix.filter(|_| set.files.contains_key(name)) {
            return Ok(Some(folder.join(&prefix)?.join(name)?));
        }
    }
    Ok(None)
}

/// Whether sets may be written where a URL leads.
fn is_written(url: &ObjectUrl) -> bool {
    !matches!(url.scheme(), Scheme::Https | Scheme::Http)
}

/// As [`read_manifest`]. One that may not be looked at is none: S3 denies those who may not list a bucket what is not there.
fn visible_manifest(storage: &Storage, url: &ObjectUrl) -> Result<Option<Standing>, StoreError> {
    match read_manifest(storage, url) {
        Err(StoreError::Storage(error)) if error.fault == StorageFault::PermissionDenied => Ok(None),
        read => read,
    }
}

fn damaged(url: &ObjectUrl) -> StoreError {
    StoreError::Damaged {
        path: url.to_string().into(),
        detail: "it is not a list of a set's files".into(),
    }
}

impl ObjectSet {
    /// Begins a set. Nothing is written, but what sets left that a killed process did not finish is deleted, as far as notes
    /// of them are in `scratch`.
    ///
    /// # Errors
    /// If a newer flow wrote what is there, or somebody else's file has the name of the set's list.
    pub fn begin(
        storage: &Storage,
        folder: &ObjectUrl,
        manifest: &str,
        scratch: &Path,
    ) -> Result<ObjectSet, StoreError> {
        let url = folder.join(manifest)?;
        let old = read_manifest(storage, &url)?;
        if old.as_ref().is_some_and(|old| old.is_foreign) {
            return Err(StoreError::OtherSet {
                path: folder.to_string().into(),
                found: manifest.to_string(),
            });
        }
        let set = ObjectSet {
            storage: storage.clone(),
            folder: folder.clone(),
            manifest: url,
            old,
            scratch: scratch.to_path_buf(),
        };
        set.delete_noted();
        Ok(set)
    }

    fn old_set(&self) -> Option<&Manifest> {
        self.old.as_ref().and_then(|old| old.set.as_ref())
    }

    /// The first of these names that an object in the folder has, or a folder with objects, if no set stands: whoever reads the name
    /// would get another file once one does.
    ///
    /// # Errors
    /// If storage does not say it.
    pub fn find_other(&self, names: impl IntoIterator<Item = String>) -> Result<Option<String>, StoreError> {
        if self.old.is_some() {
            return Ok(None);
        }
        for name in names {
            let url = self.folder.join(&name)?;
            if stat_if_there(&self.storage, &url)?.is_some() || !self.storage.list(&url)?.is_empty() {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    /// Rows that files of the standing set have together, as far as it says so.
    pub fn rows_before(&self, names: &[String]) -> u64 {
        let files = self.old_set().map(|old| &old.files);
        let rows = |name: &String| files.and_then(|files| files.get(name)?.rows);
        names.iter().filter_map(rows).sum()
    }

    /// Writes the files `names` (each with its path on this machine) and then the list of them, which is the commit. Files whose
    /// digests are not `noted` are read for them. `rows` are those of files that do not say how many they have.
    ///
    /// # Errors
    /// If a file cannot be read, or object storage does not take it: the set that stood stands. Also if another run has
    /// written a set meanwhile: then that one stands.
    pub fn finish(
        &self,
        key: Digest,
        names: &BTreeMap<String, PathBuf>,
        noted: &Noted,
        rows: &BTreeMap<String, u64>,
    ) -> Result<(), StoreError> {
        if let Some(old) = self.old_set()
            && let Some(found) = old.files.keys().next()
            && !old.files.keys().any(|name| names.contains_key(name))
        {
            return Err(StoreError::OtherSet {
                path: self.folder.to_string().into(),
                found: found.clone(),
            });
        }
        if let Some(found) = self.find_other(names.keys().cloned())? {
            return Err(StoreError::OtherSet {
                path: self.folder.to_string().into(),
                found,
            });
        }
        let mut files = BTreeMap::new();
        for (name, path) in names {
            let (digest, bytes) = digest_of(noted, name, path)?;
            let entry = FileEntry {
                digest,
                bytes,
                etag: None,
                rows: match rows.get(name) {
                    None if name.ends_with(".parquet") => rows_of(path),
                    noted => noted.copied(),
                },
            };
            files.insert(name.clone(), entry);
        }
        let prefix = format!("{PREFIX}{}", new_token());
        self.note(&prefix)?;
        let below = self.folder.join(&prefix)?;
        for (name, path) in names {
            let object = below.join(name)?;
            put_file(&self.storage, &object, path)?;
            let found = self.storage.stat(&object)?;
            match files.get_mut(name) {
                Some(entry) if entry.bytes == found.size => entry.etag = found.etag,
                _ => {
                    return Err(StoreError::Damaged {
                        path: object.to_string().into(),
                        detail: "it is not there as it was written".into(),
                    });
                }
            }
            failpoints::hit(failpoints::EXPORT_RENAMING, &[]);
        }
        if let Some(before) = self.old_set().and_then(|old| old.prefix.as_deref()) {
            self.note(before)?;
        }
        let set = Manifest {
            version: EXPORT_VERSION,
            key,
            prefix: Some(prefix),
            files,
        };
        let text = versioned_json::to_json(&PathBuf::from(self.manifest.to_string()), &set)?;
        self.put_list(text.into())?;
        failpoints::hit(failpoints::EXPORT_DONE, &[]);
        self.delete_noted();
        Ok(())
    }

    /// Writes the list of the set's files in place of the one that was read, and of no other: two exports into one folder at the
    /// same time are no damage, but one of them would be lost unseen.
    fn put_list(&self, text: Bytes) -> Result<(), StoreError> {
        let before = self.old.as_ref().map(|old| ObjectVersion::from(&old.stat));
        let is_comparable = |before: &ObjectVersion| {
            let strong = before.etag.as_ref().is_some_and(|etag| !etag.starts_with("W/"));
            strong || before.version.is_some()
        };
        if before.as_ref().is_none_or(is_comparable) {
            // The list names a prefix that no other set has: no one else's has its bytes.
            match self.storage.put_if(&self.manifest, &text, before.as_ref()) {
                Ok(_) => return Ok(()),
                Err(error) if matches!(error.fault, StorageFault::AlreadyExists | StorageFault::Changed) => {
                    return Err(other_writer(&self.folder));
                }
                Err(error) if error.fault == StorageFault::Unsupported => {}
                Err(error) => return Err(error.into()),
            }
        }
        // Storage without conditions: one that comes within the time of these requests is not seen.
        self.refuse_other_writer()?;
        Ok(self.storage.put(&self.manifest, text)?)
    }

    fn refuse_other_writer(&self) -> Result<(), StoreError> {
        let now = stat_if_there(&self.storage, &self.manifest)?;
        let before = self.old.as_ref().map(|old| &old.stat);
        let same = match (&now, before) {
            (Some(now), Some(before)) => now.is_same(before),
            (None, None) => true,
            _ => false,
        };
        if same { Ok(()) } else { Err(other_writer(&self.folder)) }
    }

    fn notes(&self) -> Vec<Note> {
        let text = atomic::read(&self.scratch.join(NOTES))
            .ok()
            .flatten()
            .unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    fn write_notes(&self, notes: &[Note]) -> Result<(), StoreError> {
        let path = self.scratch.join(NOTES);
        std::fs::create_dir_all(&self.scratch).map_err(|e| StoreError::io("create the folder", &self.scratch, e))?;
        let text = serde_json::to_vec(notes).unwrap_or_default();
        write_atomically(&path, &text)
    }

    fn note(&self, prefix: &str) -> Result<(), StoreError> {
        let mut notes = self.notes();
        notes.push(Note {
            manifest: self.manifest.to_string(),
            prefix: prefix.to_string(),
        });
        self.write_notes(&notes)
    }

    /// Deletes the files of sets that were noted and are not current. What cannot be deleted stays noted: it costs room, and is
    /// no reason to fail.
    fn delete_noted(&self) {
        let notes = self.notes();
        if notes.is_empty() {
            return;
        }
        let left: Vec<Note> = notes
            .into_iter()
            .filter(|note| delete(&self.storage, note).is_err())
            .collect();
        let _ = self.write_notes(&left);
    }
}

/// Deletes the files of a set, unless its `flow.json` names it.
fn delete(storage: &Storage, note: &Note) -> Result<(), StoreError> {
    let Location::Object(manifest) = Location::parse(&note.manifest)? else {
        return Ok(());
    };
    let Some(folder) = manifest.parent() else { return Ok(()) };
    if !is_prefix(&note.prefix) {
        return Ok(());
    }
    let prefix = folder.join(&note.prefix)?;
    match read_manifest(storage, &manifest)? {
        Some(Standing { set: Some(set), .. }) if set.prefix.as_ref() == Some(&note.prefix) => return Ok(()),
        // Whether it stands cannot be determined.
        Some(Standing { set: None, .. }) => return Ok(()),
        _ => {}
    }
    for object in storage.list(&prefix)? {
        storage.delete(&object.url)?;
    }
    Ok(())
}

/// Whether a name is one that we give the prefix of a set's files.
pub(super) fn is_prefix(name: &str) -> bool {
    let token = name.strip_prefix(PREFIX);
    token.is_some_and(|token| !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_alphanumeric()))
}

/// Maximum size of a list of files in bytes; `flow` writes no larger one.
const LONGEST_LIST: u64 = 64 << 20;

fn stat_if_there(storage: &Storage, url: &ObjectUrl) -> Result<Option<Stat>, StoreError> {
    match storage.stat(url) {
        Ok(stat) => Ok(Some(stat)),
        Err(error) if error.fault == StorageFault::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// What stands as a set's `flow.json`; none if there is none. One of a newer flow is an error.
fn read_manifest(storage: &Storage, url: &ObjectUrl) -> Result<Option<Standing>, StoreError> {
    let Some(stat) = stat_if_there(storage, url)? else {
        return Ok(None);
    };
    if stat.size > LONGEST_LIST {
        return Ok(Some(Standing {
            stat,
            set: None,
            is_foreign: true,
        }));
    }
    let text = storage.read_range(url, 0..stat.size, &stat)?;
    let path = PathBuf::from(url.to_string());
    let (set, is_foreign) = match versioned_json::from_json(&path, &text, EXPORT_VERSION) {
        Ok(set) => (Some(set), false),
        Err(StoreError::Damaged { .. }) => (None, is_foreign(&text)),
        Err(error) => return Err(error),
    };
    Ok(Some(Standing { stat, set, is_foreign }))
}

/// Writes a file of this machine as an object.
fn put_file(storage: &Storage, url: &ObjectUrl, path: &Path) -> Result<(), StoreError> {
    let failed = |error: std::io::Error| match StorageError::in_io(&error) {
        Some(error) => StoreError::Storage(error.clone()),
        None => StoreError::io("read", path, error),
    };
    let mut file = File::open(path).map_err(failed)?;
    let mut object = storage.create(url)?;
    std::io::copy(&mut file, &mut object).map_err(failed)?;
    object.finish()?;
    Ok(())
}

fn other_writer(folder: &ObjectUrl) -> StoreError {
    StoreError::SetMeanwhile {
        folder: folder.to_string(),
    }
}

#[cfg(test)]
#[path = "object_set_tests.rs"]
mod tests;
