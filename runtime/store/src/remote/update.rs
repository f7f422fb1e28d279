//! Brings the copy of a state directory up to date with its objects.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use flow_storage::{Entry, FileVersion, ObjectVersion, StorageFault};
use serde::{Deserialize, Serialize};

use super::{AT_ONCE, Remote, data_file, group_file, is_fetched, is_index, is_kept, version_of};
use crate::StoreError;
use crate::atomic::{is_left, write_json_atomically};
use crate::backend::Backend;
use crate::recovery::{Listing, is_temporary};
use crate::sources::on_threads;

/// Files of the copy that are of this machine alone.
const NOTES: &str = "copied.json";

/// Version of the notes.
const NOTES_VERSION: u64 = 2;

/// What the copy has of an object.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Note {
    etag: Option<String>,
    version: Option<String>,
    file: FileVersion,
}

#[derive(Serialize, Deserialize)]
struct Notes {
    version: u64,
    objects: BTreeMap<String, Note>,
}

/// What the copy has of objects that are no data, by their keys.
#[derive(Default)]
pub(super) struct Copied(BTreeMap<String, Note>);

impl Copied {
    /// The notes of earlier processes. Without them everything is fetched again.
    pub fn read(dir: &Path) -> Copied {
        let bytes = std::fs::read(dir.join(NOTES)).unwrap_or_default();
        match serde_json::from_slice::<Notes>(&bytes) {
            Ok(notes) if notes.version == NOTES_VERSION => Copied(notes.objects),
            _ => Copied::default(),
        }
    }

    pub fn write(&self, dir: &Path) -> Result<(), StoreError> {
        let notes = Notes {
            version: NOTES_VERSION,
            objects: self.0.clone(),
        };
        write_json_atomically(&dir.join(NOTES), &notes)
    }

    /// Notes that a file in this state holds this version of the object.
    pub fn note(&mut self, key: String, file: Option<FileVersion>, ObjectVersion { etag, version }: ObjectVersion) {
        match file {
            Some(file) => self.0.insert(key, Note { etag, version, file }),
            None => self.0.remove(&key),
        };
    }

    pub fn forget(&mut self, key: &str) {
        self.0.remove(key);
    }

    /// Whether the file is as it was when it was noted.
    pub fn is_noted(&self, key: &str, file: &Path) -> bool {
        self.0
            .get(key)
            .is_some_and(|note| version_of(file).is_some_and(|now| now.is_renamed(&note.file)))
    }

    /// Which version of an object was fetched or written last.
    pub fn version(&self, key: &str) -> Option<ObjectVersion> {
        self.0.get(key).map(|note| ObjectVersion {
            etag: note.etag.clone(),
            version: note.version.clone(),
        })
    }
}

impl Remote {
    /// Brings the copy up to date. Where another process of this machine runs, which keeps it so (`is_kept`), it is left as it
    /// is, and only the data files are listed.
    ///
    /// Who has no lease may see objects that come and go meanwhile. So groups of records are fetched first, then the index,
    /// and then the data files are listed: a group that is gone is in the index, and data is there before the record that
    /// names it.
    ///
    /// # Errors
    /// If objects cannot be listed or fetched, or the copy cannot be written.
    pub fn update(&self, is_kept_up: bool) -> Result<(), StoreError> {
        if is_kept_up {
            self.note_data(&self.list("artifacts")?);
            return Ok(());
        }
        let mut listed = Vec::new();
        for folder in ["artifacts", "snapshots", "runs"] {
            listed.extend(self.list(folder)?);
        }
        listed.extend(self.storage.list_folder(&self.url)?.objects);
        let key = |entry: &Entry| Some(entry.url.below(&self.url)?.to_owned());
        let named = listed.iter().filter_map(|entry| Some((key(entry)?, entry)));
        let wanted: BTreeMap<String, &Entry> = named
            .filter(|(key, _)| is_kept(key) && data_file(key).is_none())
            .collect();
        self.remove_strangers(&wanted)?;
        let (groups, others): (Vec<_>, Vec<_>) = wanted
            .iter()
            .filter(|(key, entry)| !self.has(key, entry))
            .partition(|(key, _)| group_file(key).is_some());
        for part in [groups, others] {
            let fetched = on_threads(&part, AT_ONCE, |(key, _)| self.fetch_object(key));
            fetched.into_iter().collect::<Result<(), StoreError>>()?;
        }
        if self.lease.is_none() {
            // As they are now: groups that are not there any more are in them.
            let of_recipe = |recipe: &str| format!("artifacts/{recipe}/index.json");
            let listed = wanted.keys().filter(|key| is_index(key)).cloned();
            let of_groups = wanted.keys().filter_map(|key| group_file(key)).map(of_recipe);
            let indices: BTreeSet<String> = listed.chain(of_groups).collect();
            let indices: Vec<String> = indices.into_iter().collect();
            let fetched = on_threads(&indices, AT_ONCE, |key| self.fetch_if_changed(key));
            fetched.into_iter().collect::<Result<(), StoreError>>()?;
            self.note_data(&self.list("artifacts")?);
        } else {
            self.note_data(&listed);
            self.remove_strange_data()?;
        }
        self.save()
    }

    fn list(&self, folder: &str) -> Result<Vec<Entry>, StoreError> {
        Ok(self.storage.list(&self.url.join(folder)?)?)
    }

    fn note_data(&self, listed: &[Entry]) {
        let mut data: BTreeMap<String, Listing> = BTreeMap::new();
        for entry in listed {
            let Some(key) = entry.url.below(&self.url).filter(|key| is_kept(key)) else {
                continue;
            };
            if let Some((recipe, file)) = data_file(key) {
                let files = data.entry(recipe.to_owned()).or_default();
                files.insert(file.to_owned(), entry.stat.size);
            }
        }
        *self.data() = data;
    }

    /// Whether the copy has an object as it was listed.
    fn has(&self, key: &str, listed: &Entry) -> bool {
        let path = self.dir.join(key);
        // What this machine's runs left may be longer than what they uploaded, and is never rewritten.
        if key.starts_with("runs/") && std::fs::metadata(&path).is_ok_and(|file| file.len() > listed.stat.size) {
            return true;
        }
        let copied = self.copied();
        let version = copied.version(key).and_then(|version| version.etag);
        version.is_some() && version == listed.stat.etag && copied.is_noted(key, &path)
    }

    /// One that is gone meanwhile is passed over.
    fn fetch_object(&self, key: &str) -> Result<(), StoreError> {
        let (url, path) = (self.url.join(key)?, self.dir.join(key));
        match self.fetch_file(&url, &path, |_, _| Ok(())) {
            Ok(version) => self.copied().note(key.to_owned(), version_of(&path), version),
            Err(StoreError::Storage(error)) if error.fault == StorageFault::NotFound => {}
            // Another one was written while it was read.
            Err(StoreError::Storage(error)) if error.fault == StorageFault::Changed => return self.fetch_again(key),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn fetch_again(&self, key: &str) -> Result<(), StoreError> {
        let (url, path) = (self.url.join(key)?, self.dir.join(key));
        let version = self.fetch_file(&url, &path, |_, _| Ok(()))?;
        self.copied().note(key.to_owned(), version_of(&path), version);
        Ok(())
    }

    fn fetch_if_changed(&self, key: &str) -> Result<(), StoreError> {
        let url = self.url.join(key)?;
        match self.storage.stat(&url) {
            Ok(stat)
                if self.has(
                    key,
                    &Entry {
                        url,
                        stat: stat.clone(),
                    },
                ) =>
            {
                Ok(())
            }
            Ok(_) => self.fetch_object(key),
            Err(error) if error.fault == StorageFault::NotFound => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes files of the copy that are no objects any more, and what processes that were killed left of fetching. Data
    /// stays.
    fn remove_strangers(&self, wanted: &BTreeMap<String, &Entry>) -> Result<(), StoreError> {
        let mut gone = Vec::new();
        let mut folders = Vec::new();
        walk(&self.dir, &mut |path, is_folder| {
            let Some(key) = path.strip_prefix(&self.dir).ok().and_then(Path::to_str) else {
                return false;
            };
            let name = key.rsplit('/').next().unwrap_or_default();
            if is_folder {
                if key.starts_with("runs/") {
                    folders.push(path.to_path_buf());
                }
                return is_kept(key) && !key.ends_with("/data");
            }
            // Nobody else fetches what is no data while the copy is brought up to date.
            let is_strange = is_kept(key) && !wanted.contains_key(key) && !is_temporary(name);
            if is_strange || is_fetched(name) {
                gone.push((key.to_owned(), path.to_path_buf()));
            }
            false
        })?;
        for (key, path) in gone {
            match std::fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(StoreError::io("remove", &path, e)),
                _ => {}
            }
            self.copied().forget(&key);
        }
        for folder in folders {
            // Of a run that is gone; others have files.
            let _ = std::fs::remove_dir(folder);
        }
        Ok(())
    }

    /// Removes data files of the copy that are no objects, or other ones, and what processes that are no more left of fetching.
    /// Those of another machine that uses the same copy are not to be told from them but by their age.
    fn remove_strange_data(&self) -> Result<(), StoreError> {
        let mut gone = Vec::new();
        walk(&self.dir.join("artifacts"), &mut |path, is_folder| {
            let key = path.strip_prefix(&self.dir).ok().and_then(Path::to_str);
            if !is_folder
                && key.is_some_and(|key| data_file(key).is_some_and(|(_, file)| !is_fetched(file) || is_left(path)))
                && std::fs::metadata(path).ok().map(|file| file.len()) != self.size_of(path)
            {
                gone.push(path.to_path_buf());
            }
            is_folder
        })?;
        for path in gone {
            // Another process may be fetching it: what is gone is fetched when it is needed.
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    }
}

/// Shows all files and folders below a folder, in no order: whether it is a folder, and then whether to look into it. A folder
/// that is not there is empty.
fn walk(folder: &Path, look: &mut dyn FnMut(&Path, bool) -> bool) -> Result<(), StoreError> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(StoreError::io("list the folder", folder, e)),
    };
    for entry in entries {
        let entry = entry.map_err(|e| StoreError::io("list the folder", folder, e))?;
        let path: PathBuf = entry.path();
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if look(&path, is_folder) && is_folder {
            walk(&path, look)?;
        }
    }
    Ok(())
}
