//! Which files of a folder sets have put there. `.flow-files` says it, and stays when somebody removes `flow.json`: the files
//! of that set may still be replaced, those of others not.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::StoreError;
use super::atomic::{self, Files};
use super::versioned_json;

/// The name of the file. It begins with a dot, as those that readers of corpora and uploads leave out.
pub(super) const WRITTEN: &str = ".flow-files";
const VERSION: u64 = 1;

/// By the names of lists (`flow.json`): the names of files.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WrittenFiles {
    version: u64,
    sets: BTreeMap<String, BTreeSet<String>>,
}

impl versioned_json::Versioned for WrittenFiles {
    fn version(&self) -> u64 {
        self.version
    }
}

impl WrittenFiles {
    /// Those of a folder. One that is damaged says nothing: the files are then taken for those of others.
    ///
    /// # Errors
    /// If a newer flow wrote it, or it cannot be read.
    pub fn read(folder: &Path) -> Result<WrittenFiles, StoreError> {
        let none = WrittenFiles {
            version: VERSION,
            sets: BTreeMap::new(),
        };
        let path = folder.join(WRITTEN);
        match atomic::read(&path)?.map(|text| versioned_json::from_json(&path, &text, VERSION)) {
            None | Some(Err(StoreError::Damaged { .. })) => Ok(none),
            Some(read) => read,
        }
    }

    /// The files of one set; none if it has put none there.
    pub fn of_set(&self, manifest: &str) -> Option<&BTreeSet<String>> {
        self.sets.get(manifest)
    }

    /// Writes that the files of a set are these, below `waiting` first, if they are others. What is written is on the disk
    /// afterwards.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn set(
        &mut self,
        manifest: &str,
        names: BTreeSet<String>,
        folder: &Path,
        waiting: &Path,
        to: &Files,
    ) -> Result<(), StoreError> {
        if self.sets.get(manifest) == Some(&names) {
            return Ok(());
        }
        self.sets.insert(manifest.to_owned(), names);
        let path = folder.join(WRITTEN);
        let prepared = to.prepare(&waiting.join(WRITTEN), &versioned_json::to_json(&path, self)?)?;
        to.rename(&prepared, &path)?;
        to.sync_folder(folder)
    }
}
