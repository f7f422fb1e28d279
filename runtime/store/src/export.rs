//! Sets of files in folders of the user. A set is complete when its `flow.json` exists, which is written last.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use flow_storage::{Location, Stat, Storage};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::StoreError;
use super::atomic::{self, Files};
use super::export_file::{ExportFile, Noted, digest_of};
use super::file_digest::read_digest;
use super::lock::{Lock, new_token};
use super::object_set::{self, ObjectSet};
use super::recovery::TEMPORARY;
use super::sources::SourceDigests;
use super::temporary_file::keep_permissions;
use super::versioned_json;
use super::written_files::{WRITTEN, WrittenFiles};
use flow_base::digest::Digest;
use flow_base::failpoints;
use flow_parquet::ForeignParquet;

/// Newest version of `flow.json` that is known: the one of sets in object storage.
pub(super) const EXPORT_VERSION: u64 = 2;
/// Version of `flow.json` in a folder.
const FOLDER_VERSION: u64 = 1;
/// Says of what a set consists; a set without it is incomplete. Sets that share a folder have names of their own.
pub(super) const MANIFEST: &str = "flow.json";
const LOCK: &str = ".flow-lock";
/// Prefix of the names of folders of unfinished files, after [`TEMPORARY`].
const WAITING: &str = "export-";
/// The folder of files that go to object storage, in a stage's scratch folder.
const UPLOADS: &str = "uploads";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub version: u64,
    /// Digest of what the set was made from.
    pub key: Digest,
    /// Below which of its prefixes the files lie: in object storage alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    pub files: BTreeMap<String, FileEntry>,
}

impl versioned_json::Versioned for Manifest {
    fn version(&self) -> u64 {
        self.version
    }
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEntry {
    pub digest: Digest,
    pub bytes: u64,
    /// Of the object, in object storage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// Rows that were noted of it, and of a parquet file in object storage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
}

impl FileEntry {
    /// Whether an object is the one that was written, as far as its size and ETag tell.
    pub(super) fn is_same(&self, found: &Stat) -> bool {
        let same_etag = match (&self.etag, &found.etag) {
            (Some(own), Some(found)) => own == found,
            _ => true,
        };
        self.bytes == found.size && same_etag
    }
}

/// Whether an export has to be made again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportStatus {
    /// All files are there, as they were made from the same inputs.
    Whole,
    /// The set's `flow.json` is not there: never made, or cut short.
    Missing,
    /// Made from other inputs.
    Outdated,
    /// A file is missing or was changed.
    Changed { file: String },
}

/// What the description of a set (its `flow.json`) records of a file in the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileInSet {
    /// There is no description.
    NoSet,
    /// There is none, and a set was begun.
    CutShort,
    /// It does not name the file.
    Other,
    AsWritten,
    /// The file is not what was written.
    Changed,
}

/// What `manifest` (a name such as `flow.json`) in `folder` says of the file `name` there. Reads the file where it names it.
///
/// # Errors
/// If the description or the file cannot be read, or a newer flow wrote it.
pub fn file_in_set(storage: &Storage, folder: &Path, manifest: &str, name: &str) -> Result<FileInSet, StoreError> {
    if let Location::Object(url) = Location::of_path(folder)? {
        return object_set::file_in_set(storage, &url, manifest, name);
    }
    // A copy of a set that object storage had.
    let prefix = folder.file_name().and_then(|name| name.to_str());
    let prefix = prefix.filter(|name| object_set::is_prefix(name));
    let (top, prefix) = match (folder.parent(), prefix) {
        (Some(top), Some(prefix)) if top.join(manifest).is_file() => (top, Some(prefix)),
        _ => (folder, None),
    };
    let Some(set) = read_manifest(&top.join(manifest))? else {
        let entries = std::fs::read_dir(folder).map_err(|e| StoreError::io("list the folder", folder, e))?;
        let mut names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let begun = names.any(|name| name == LOCK || name.starts_with(TEMPORARY));
        return Ok(if begun { FileInSet::CutShort } else { FileInSet::NoSet });
    };
    let Some(entry) = set.files.get(name) else {
        return Ok(FileInSet::Other);
    };
    if set.prefix.as_deref() != prefix {
        return Ok(FileInSet::Changed);
    }
    let path = folder.join(name);
    let failed = |e| StoreError::io("read", &path, e);
    let same = std::fs::metadata(&path).map_err(failed)?.len() == entry.bytes
        && read_digest(&path).map_err(failed)? == entry.digest;
    Ok(if same { FileInSet::AsWritten } else { FileInSet::Changed })
}

/// Sets with fewer rows are not guarded against shrinking: in a small trial, one shard fewer may remove most rows.
const FEW_ROWS: u64 = 100;

/// Guards the number of rows of a set against shrinking.
struct Guarded {
    what: &'static str,
    /// Files of the set: Parquet, or with noted rows.
    names: Vec<String>,
    rows: u64,
    /// Most that may be gone, as a share of 1.
    most: f64,
}

/// A set with far fewer rows than the existing set in the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shrunk {
    pub what: &'static str,
    pub before: u64,
    pub now: u64,
}

/// A set of files being written into a folder. Ask for a path with [`ExportSet::file`], write there, and call
/// [`ExportSet::finish`]; dropped before, nothing in the folder has changed.
pub struct ExportSet {
    folder: PathBuf,
    /// Name of the set's `flow.json`.
    manifest: String,
    /// Where files lie until the set is finished; inside the folder, so that renaming is on one file system. Of a set that goes
    /// to object storage in the stage's scratch folder.
    waiting: PathBuf,
    key: Digest,
    names: BTreeMap<String, PathBuf>,
    /// Digests of files that were digested while they were written.
    noted: Noted,
    /// Rows of files that do not say how many they have.
    rows: BTreeMap<String, u64>,
    guarded: Vec<Guarded>,
    /// Why a set without rows is probably a mistake.
    without_rows: Option<String>,
    /// Dropped last: a folder is let go after it has been cleaned up.
    target: Target,
}

/// Where the set goes.
enum Target {
    Folder {
        files: Files,
        /// Knows the name of the waiting folder.
        lock: Lock,
        /// Which files of the folder sets have put there.
        written: WrittenFiles,
        /// Those of this set: what its list names, or if there is none, what is noted. None if there was no such set.
        ours: Option<BTreeSet<String>>,
    },
    Objects(Box<ObjectSet>),
}

impl ExportSet {
    /// Whether the set that `manifest` (a name such as `flow.json`) describes in `folder` is whole and made from
    /// what `key` represents. Changes nothing. Files are read only if `sources` has no note of them.
    ///
    /// # Errors
    /// If a newer flow wrote the folder, or the set's description cannot be read.
    pub fn status(
        folder: &Path,
        manifest: &str,
        key: &Digest,
        sources: &SourceDigests,
    ) -> Result<ExportStatus, StoreError> {
        let folder = match Location::of_path(folder)? {
            Location::Object(url) => return object_set::status(sources.storage(), &url, manifest, key),
            Location::Local(folder) => folder,
        };
        let manifest_path = folder.join(manifest);
        let manifest = match read_manifest(&manifest_path) {
            Ok(Some(manifest)) => manifest,
            Ok(None) => return Ok(ExportStatus::Missing),
            // It was edited: the set is made again, which repairs it.
            Err(StoreError::Damaged { .. }) => {
                return Ok(ExportStatus::Changed {
                    file: manifest.to_string(),
                });
            }
            Err(error) => return Err(error),
        };
        if manifest.key != *key {
            return Ok(ExportStatus::Outdated);
        }
        if manifest.prefix.is_some() {
            // Copied here from object storage: files lie elsewhere than they would here.
            let file = manifest_path.file_name().unwrap_or_default();
            return Ok(ExportStatus::Changed {
                file: file.to_string_lossy().into_owned(),
            });
        }
        for (name, entry) in &manifest.files {
            let changed = || Ok(ExportStatus::Changed { file: name.clone() });
            let Ok(path) = plain_name(name).map(|name| folder.join(name)) else {
                return changed();
            };
            match std::fs::metadata(&path) {
                Ok(metadata) if metadata.is_file() && metadata.len() == entry.bytes => {}
                _ => return changed(),
            }
            // One that cannot be read is made again like one that is gone.
            if sources.digest(&path).ok() != Some(entry.digest) {
                return changed();
            }
        }
        Ok(ExportStatus::Whole)
    }

    /// Begins a set in a folder, or at a URL in object storage. A folder is made if it is not there, and locked; the folder of
    /// temporary files that a crash left, by the name that was written down before it was made, is removed. Nothing else is,
    /// whatever its name. Files for object storage are made in `scratch`, where no other export may be at the same time.
    ///
    /// # Errors
    /// [`StoreError::Held`] if another run exports there.
    pub fn begin(
        storage: &Storage,
        folder: &Path,
        manifest: &str,
        key: Digest,
        run: &str,
        scratch: &Path,
    ) -> Result<ExportSet, StoreError> {
        match Location::of_path(folder)? {
            Location::Local(folder) => ExportSet::begin_with(&folder, manifest, key, run, Files::default()),
            Location::Object(url) => {
                let files = Files::default();
                let waiting = scratch.join(UPLOADS);
                if waiting.is_dir() {
                    std::fs::remove_dir_all(&waiting).map_err(|e| StoreError::io("remove", &waiting, e))?;
                }
                files.create_folder(&waiting)?;
                let target = Target::Objects(Box::new(ObjectSet::begin(storage, &url, manifest, scratch)?));
                Ok(ExportSet::new(folder, manifest, waiting, key, target))
            }
        }
    }

    /// Removes what an export that was killed left in a folder whose set is whole: its lock, and the folder of temporary files
    /// that it noted there. Nothing is done where another export is at work or the folder cannot be written.
    pub fn clean_up(folder: &Path, run: &str) {
        let Ok(Location::Local(folder)) = Location::of_path(folder) else {
            return;
        };
        let path = folder.join(LOCK);
        if path.symlink_metadata().is_ok_and(|found| found.is_file())
            && let Ok(lock) = Lock::take(&path, "the export folder", run)
            && remove_left(&folder, lock.left()).is_ok()
        {
            // Without names in it, the lock's file goes with the lock.
            let _ = lock.note(&[]);
        }
    }

    fn new(folder: &Path, manifest: &str, waiting: PathBuf, key: Digest, target: Target) -> ExportSet {
        ExportSet {
            folder: folder.to_path_buf(),
            manifest: manifest.to_string(),
            waiting,
            key,
            names: BTreeMap::new(),
            noted: Noted::default(),
            rows: BTreeMap::new(),
            guarded: Vec::new(),
            without_rows: None,
            target,
        }
    }

    pub(super) fn begin_with(
        folder: &Path,
        manifest: &str,
        key: Digest,
        run: &str,
        files: Files,
    ) -> Result<ExportSet, StoreError> {
        files.create_folder(folder)?;
        let lock = Lock::take(&folder.join(LOCK), "the export folder", run)?;
        let files = files.under(&lock);
        // The set of a newer flow is not overwritten, nor a file of another program with this name. One of ours that
        // was edited or truncated is.
        let manifest_path = folder.join(manifest);
        let old = match read_manifest(&manifest_path) {
            Ok(old) => old,
            Err(error @ StoreError::Newer { .. }) => return Err(error),
            Err(StoreError::Damaged { .. }) if is_foreign(&std::fs::read(&manifest_path).unwrap_or_default()) => {
                return Err(StoreError::OtherSet {
                    path: folder.to_path_buf(),
                    found: manifest.to_string(),
                });
            }
            Err(_) => None,
        };
        let written = WrittenFiles::read(folder)?;
        let ours = match old {
            Some(old) => Some(old.files.into_keys().collect()),
            None => written.of_set(manifest).cloned(),
        };
        remove_left(folder, lock.left())?;
        let name = format!("{TEMPORARY}{WAITING}{}", new_token());
        let waiting = folder.join(&name);
        lock.note(&[&name])?;
        files.create_new_folder(&waiting)?;
        let target = Target::Folder {
            files,
            lock,
            written,
            ours,
        };
        Ok(ExportSet::new(folder, manifest, waiting, key, target))
    }

    /// Refuses files of these names, and files in folders of these names, that the set has not put there: the set may be made from
    /// them, and readers would take them for its own. Names in folders that begin with a dot, which readers leave out, are no matter.
    /// In object storage, where each set has a prefix of its own, only if there was no set. [`ExportSet::finish`] refuses all files
    /// that it would replace; this is for what can be known before the set is written.
    ///
    /// # Errors
    /// With the first of them, or if a folder cannot be read.
    pub fn refuse_others(&self, names: impl IntoIterator<Item = String>) -> Result<(), StoreError> {
        let found = match &self.target {
            Target::Objects(set) => set.find_other(names)?,
            Target::Folder { ours, .. } => {
                let none = BTreeSet::new();
                let ours = ours.as_ref().unwrap_or(&none);
                let found = names
                    .into_iter()
                    .map(|name| first_of_others(&self.folder, name, ours))
                    .find(|found| !matches!(found, Ok(None)));
                found.transpose()?.flatten()
            }
        };
        match found {
            Some(found) => Err(StoreError::OtherSet {
                path: self.folder.clone(),
                found,
            }),
            None => Ok(()),
        }
    }

    /// The folder that receives the set; a URL in object storage.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where to write the file `name` of the set: a path under a temporary name, which nobody but the caller
    /// writes to. `name` may have folders (`a/b/c.txt`); they are made.
    ///
    /// # Errors
    /// If `name` leads out of the folder, is taken by the set itself (`flow.json`), or was given before.
    pub fn file(&mut self, name: &str) -> Result<PathBuf, StoreError> {
        let relative = plain_name(name)?;
        let normal = relative.to_string_lossy().into_owned();
        let path = self.waiting.join(&relative);
        if self.names.contains_key(&normal) || normal == self.manifest {
            return Err(StoreError::Name {
                what: "a second file of the export",
                name: name.to_string(),
            });
        }
        if let Some(folder) = path.parent() {
            match &self.target {
                Target::Folder { files, .. } => files.create_folder(folder)?,
                Target::Objects(_) => Files::default().create_folder(folder)?,
            }
        }
        self.names.insert(normal, path.clone());
        Ok(path)
    }

    /// The same for a file that is written from its beginning to its end: it is digested meanwhile, and not read for that
    /// again.
    ///
    /// # Errors
    /// As [`ExportSet::file`], and if it cannot be created.
    pub fn create(&mut self, name: &str) -> Result<ExportFile, StoreError> {
        let path = self.file(name)?;
        let normal = plain_name(name)?.to_string_lossy().into_owned();
        let created = ExportFile::create(path.clone(), normal, Noted::clone(&self.noted));
        created.map_err(|e| StoreError::io("create", &path, e))
    }

    /// Notes in the set's description that the file `name` has `rows`: of files that are not Parquet nothing else says it.
    pub fn note_rows(&mut self, name: &str, rows: u64) {
        self.rows.insert(name.to_string(), rows);
    }

    /// Declares that the files `names` of the set, which are Parquet or have [noted rows](ExportSet::note_rows), have `rows` together; compared with the set in the folder, at
    /// most the share `most` (0 to 1) may be missing. `what` names the rows in messages.
    pub fn guard_rows(&mut self, what: &'static str, names: Vec<String>, rows: u64, most: f64) {
        self.guarded.push(Guarded {
            what,
            names,
            rows,
            most,
        });
    }

    /// Declares that the set has no rows, and why that is probably a mistake: it is then written only where the user
    /// allows it.
    pub fn guard_empty(&mut self, why: String) {
        self.without_rows = Some(why);
    }

    /// Why the set, which has no rows, is probably a mistake.
    pub fn without_rows(&self) -> Option<&str> {
        self.without_rows.as_deref()
    }

    /// Guarded rows that became too few (only where the old set had at least 100). Files of the old set that cannot be
    /// read do not count.
    pub fn shrunk(&self) -> Vec<Shrunk> {
        if let Target::Objects(set) = &self.target {
            return self.fewer_than(|guarded| set.rows_before(&guarded.names));
        }
        // Without it (somebody removed it, or an export was cut short) the files that are there count.
        let old = read_manifest(&self.folder.join(&self.manifest)).ok().flatten();
        let of_old = |guarded: &Guarded| {
            let rows = |name: &String| match old.as_ref().map(|old| old.files.get(name)) {
                Some(entry) => entry?.rows.or_else(|| rows_of(&self.folder.join(name))),
                None => rows_of(&self.folder.join(name)),
            };
            guarded.names.iter().filter_map(rows).sum::<u64>()
        };
        self.fewer_than(of_old)
    }

    /// What is guarded and has far fewer rows than `before` says.
    fn fewer_than(&self, before: impl Fn(&Guarded) -> u64) -> Vec<Shrunk> {
        let shrunk = |guarded: &Guarded| {
            let (before, now) = (before(guarded), guarded.rows);
            let too_few = (now as f64) < before as f64 * (1.0 - guarded.most);
            (before >= FEW_ROWS && too_few).then_some(Shrunk {
                what: guarded.what,
                before,
                now,
            })
        };
        self.guarded.iter().filter_map(shrunk).collect()
    }

    /// Puts the set in place: everything is brought to the disk, the old `flow.json` is removed, all files get
    /// their names, files of the old set that the new one does not have are removed, and the new `flow.json` is
    /// written. In object storage the files are written beside those of the old set, then `flow.json` is replaced, and the old
    /// set is deleted. Gives the names of the files, sorted.
    ///
    /// # Errors
    /// If the folder has a file of others with the name of one of the set, a file that was asked for was not written, or the disk does
    /// not take it. The folder then either is as
    /// it was, or has no `flow.json`; in object storage the old set stands.
    pub fn finish(self) -> Result<Vec<String>, StoreError> {
        match &self.target {
            Target::Folder {
                files, written, ours, ..
            } => self.finish_folder(files, written.clone(), ours.as_ref())?,
            Target::Objects(set) => set.finish(self.key, &self.names, &self.noted, &self.rows)?,
        }
        Ok(self.names.keys().cloned().collect())
    }

    fn finish_folder(
        &self,
        to: &Files,
        mut written: WrittenFiles,
        ours: Option<&BTreeSet<String>>,
    ) -> Result<(), StoreError> {
        let manifest_path = self.folder.join(&self.manifest);
        let old = read_manifest(&manifest_path).ok().flatten();
        if let Some(old) = &old
            && let Some(found) = old.files.keys().next()
            && !old.files.keys().any(|name| self.names.contains_key(name))
        {
            return Err(StoreError::OtherSet {
                path: self.folder.clone(),
                found: found.clone(),
            });
        }
        for name in self.names.keys() {
            let target = self.folder.join(name);
            if target.is_dir() {
                let error = std::io::Error::from(std::io::ErrorKind::IsADirectory);
                return Err(StoreError::io("write", &target, error));
            }
        }
        self.refuse_others(self.names.keys().cloned())?;
        let entry = |(name, path): (&String, &PathBuf)| {
            let (digest, bytes) = digest_of(&self.noted, name, path)?;
            let entry = FileEntry {
                digest,
                bytes,
                etag: None,
                rows: self.rows.get(name).copied(),
            };
            Ok((name.clone(), entry))
        };
        let (entries, synced) = std::thread::scope(|scope| {
            // Files whose digests are not known are read while the disk takes them.
            let entries = scope.spawn(|| {
                let entries = self.names.par_iter().map(entry);
                entries.collect::<Result<BTreeMap<String, FileEntry>, StoreError>>()
            });
            let synced = to.sync_all(&self.names.values().cloned().collect::<Vec<_>>());
            // Propagates a panic of the other thread.
            let entries = entries.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (entries, synced)
        });
        let entries = entries?;
        synced?;
        let names: BTreeSet<String> = self.names.keys().cloned().collect();
        // Both sets' files may be there until all is done.
        let both = ours.map_or_else(|| names.clone(), |ours| ours.union(&names).cloned().collect());
        written.set(&self.manifest, both, &self.folder, &self.waiting, to)?;
        to.remove(&manifest_path)?;
        to.sync_folder(&self.folder)?;
        let mut folders = BTreeSet::from([self.folder.clone()]);
        for (name, path) in &self.names {
            let target = self.folder.join(name);
            if let Some(parent) = target.parent()
                && folders.insert(parent.to_path_buf())
            {
                to.create_folder(parent)?;
            }
            let written = std::fs::File::open(path);
            let kept = written.and_then(|file| keep_permissions(&file, &target));
            kept.map_err(|e| StoreError::io("write", &target, e))?;
            to.rename(path, &target)?;
            failpoints::hit(failpoints::EXPORT_RENAMING, &[]);
        }
        self.remove_left_over(to, old, &entries)?;
        for folder in &folders {
            to.sync_folder(folder)?;
        }
        let manifest = Manifest {
            version: FOLDER_VERSION,
            key: self.key,
            prefix: None,
            files: entries,
        };
        // In the folder of unfinished files, so that a crash leaves no temporary file of unknown name.
        let manifest = versioned_json::to_json(&manifest_path, &manifest)?;
        let prepared = to.prepare(&self.waiting.join(MANIFEST), &manifest)?;
        to.rename(&prepared, &manifest_path)?;
        to.sync_folder(&self.folder)?;
        written.set(&self.manifest, names, &self.folder, &self.waiting, to)?;
        failpoints::hit(failpoints::EXPORT_DONE, &[]);
        Ok(())
    }

    /// Removes what only the old set had, unless somebody has changed it since.
    fn remove_left_over(
        &self,
        to: &Files,
        old: Option<Manifest>,
        new: &BTreeMap<String, FileEntry>,
    ) -> Result<(), StoreError> {
        for (name, entry) in old.map(|manifest| manifest.files).unwrap_or_default() {
            let Ok(relative) = plain_name(&name) else { continue };
            let path = self.folder.join(relative);
            let is_file = std::fs::symlink_metadata(&path).is_ok_and(|m| m.is_file() && m.len() == entry.bytes);
            if !new.contains_key(&name) && is_file && read_digest(&path).is_ok_and(|digest| digest == entry.digest) {
                to.remove(&path)?;
            }
        }
        Ok(())
    }
}

impl Drop for ExportSet {
    fn drop(&mut self) {
        if std::fs::remove_dir_all(&self.waiting).is_ok()
            && let Target::Folder { lock, .. } = &self.target
        {
            // If this cannot be written, the next export looks for a folder that is not there.
            let _ = lock.note(&[]);
        }
    }
}

/// The file `name` of a folder, or the first file below it if it is a folder, if it is not one of `ours`.
fn first_of_others(folder: &Path, name: String, ours: &BTreeSet<String>) -> Result<Option<String>, StoreError> {
    let mut pending = vec![name];
    while let Some(name) = pending.pop() {
        let path = folder.join(&name);
        let Ok(found) = path.symlink_metadata() else { continue };
        // A link to the folder of a set is followed, one below it is a file of others.
        let is_folder = found.is_dir() || (path.is_dir() && !name.contains('/'));
        if !is_folder {
            match ours.contains(&name) {
                true => continue,
                false => return Ok(Some(name)),
            }
        }
        let failed = |e| StoreError::io("list the folder", &path, e);
        let mut below = Vec::new();
        for entry in std::fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?.file_name();
            let entry = entry.to_string_lossy();
            if !entry.starts_with('.') {
                below.push(format!("{name}/{entry}"));
            }
        }
        below.sort_unstable_by(|one, other| other.cmp(one));
        pending.append(&mut below);
    }
    Ok(None)
}

/// The names of the files of the set that `manifest` (a name such as `flow.json`) describes in a folder of this machine; none if there
/// is no such set, or it lies elsewhere as its description was copied from object storage.
///
/// # Errors
/// If the description cannot be read, or a newer flow wrote it.
pub fn files_of_set(folder: &Path, manifest: &str) -> Result<Option<BTreeSet<String>>, StoreError> {
    let set = read_manifest(&folder.join(manifest))?.filter(|set| set.prefix.is_none());
    Ok(set.map(|set| set.files.into_keys().collect()))
}

/// How many rows a parquet file says it has.
pub(super) fn rows_of(path: &Path) -> Option<u64> {
    let metadata = ForeignParquet::open_local(path).ok()?.metadata().ok()?;
    u64::try_from(metadata.metadata().file_metadata().num_rows()).ok()
}

fn read_manifest(path: &Path) -> Result<Option<Manifest>, StoreError> {
    match atomic::read(path)? {
        Some(bytes) => versioned_json::from_json(path, &bytes, EXPORT_VERSION).map(Some),
        None => Ok(None),
    }
}

/// Whether the text of a file that has the name of a set's `flow.json`, and is none, was written by somebody else. One of ours
/// that was edited has some of its fields; one that was cut short begins as ours do.
pub(super) fn is_foreign(text: &[u8]) -> bool {
    match serde_json::from_slice::<serde_json::Value>(text) {
        Ok(value) => value["version"].is_null() || (value["key"].is_null() && value["files"].is_null()),
        Err(_) => !b"{\"version\":".starts_with(&text[..text.len().min(11)]),
    }
}

/// Removes temporary folders of interrupted exports, by the names noted for them.
fn remove_left(folder: &Path, names: &[String]) -> Result<(), StoreError> {
    for name in names {
        let token = name.strip_prefix(TEMPORARY).and_then(|rest| rest.strip_prefix(WAITING));
        if !token.is_some_and(|token| token.bytes().all(|byte| byte.is_ascii_alphanumeric())) {
            continue;
        }
        let path = folder.join(name);
        // Anything but a folder was not made by an export.
        if path.symlink_metadata().is_ok_and(|found| found.is_dir()) {
            std::fs::remove_dir_all(&path).map_err(|e| StoreError::io("remove", &path, e))?;
        }
    }
    Ok(())
}

/// A path below the folder, and not one of our own names.
fn plain_name(name: &str) -> Result<PathBuf, StoreError> {
    let path = Path::new(name);
    let refused = || StoreError::Name {
        what: "a file of the export",
        name: name.to_string(),
    };
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(part) => plain.push(part),
            _ => return Err(refused()),
        }
    }
    let first = plain
        .components()
        .next()
        .map(|c| c.as_os_str().to_string_lossy().into_owned());
    let ours =
        first.is_none_or(|first| [MANIFEST, LOCK, WRITTEN].contains(&first.as_str()) || first.starts_with(TEMPORARY));
    if ours || name.contains('\0') || name.ends_with('/') {
        return Err(refused());
    }
    Ok(plain)
}
