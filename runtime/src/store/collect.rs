//! Removing what no run wants any more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;

use super::atomic;
use super::decide;
use super::read_back;
use super::record::{Index, RECORD_VERSION};
use super::writer::{data_folder, records_folder};
use super::{RECIPE_VERSION, Recipe, Store, StoreError};
use crate::digest::Digest;
use crate::partition::Partition;

/// What was removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    pub records: u64,
    pub files: u64,
    pub bytes: u64,
}

impl Store {
    /// Removes every record that is not in `used` (recipe to its partitions and keys), and the data that only
    /// such records name. What is to be removed is known before the first file goes; a crash leaves records
    /// whose data is gone, which do not count.
    ///
    /// # Errors
    /// If the store was opened for reading, or a writer of it is open.
    pub fn collect(&self, used: &BTreeMap<Digest, BTreeSet<(Partition, Digest)>>) -> Result<Collected, StoreError> {
        if self.inner.lock.is_none() {
            return Err(StoreError::ReadOnly {
                path: self.inner.dir.clone(),
            });
        }
        let writers = self.inner.writers.lock().unwrap_or_else(PoisonError::into_inner);
        if writers.values().any(|writer| writer.strong_count() > 0) {
            return Err(StoreError::Busy {
                path: self.inner.dir.clone(),
            });
        }
        let artifacts = self.inner.dir.join("artifacts");
        let entries = match std::fs::read_dir(&artifacts) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Collected::default()),
            Err(e) => return Err(StoreError::io("list the folder", &artifacts, e)),
        };
        let nothing = BTreeSet::new();
        let mut plans = Vec::new();
        for entry in entries {
            let folder = entry
                .map_err(|e| StoreError::io("list the folder", &artifacts, e))?
                .path();
            let path = folder.join("recipe.json");
            // Without it the folder is not one of ours, or has just been begun and holds nothing yet.
            let Some(bytes) = atomic::read(&path)? else { continue };
            let Recipe { recipe, .. } = read_back::from_json(&path, &bytes, RECIPE_VERSION)?;
            let found = read_back::recipe_folder(&folder, &recipe)?;
            let generation = found.index.as_ref().map_or(0, |index| index.generation);
            let generation = found
                .groups
                .iter()
                .map(|(name, _)| name.generation)
                .fold(generation, u64::max);
            let all = decide::merge(found.index, found.groups);
            let used = used.get(&recipe);
            let (kept, files) = decide::collectable(&all, &found.data, used.unwrap_or(&nothing));
            if used.is_some() && files.is_empty() && kept.len() == all.len() {
                continue;
            }
            let bytes = files.iter().filter_map(|file| found.data.get(file)).sum::<u64>();
            let collected = Collected {
                records: (all.len() - kept.len()) as u64,
                files: files.len() as u64,
                bytes,
            };
            let index = Index {
                version: RECORD_VERSION,
                recipe,
                generation,
                records: kept,
            };
            plans.push((folder, found.records, used.map(|_| index), files, collected));
        }
        let mut sum = Collected::default();
        for (folder, records, index, files, collected) in plans {
            match index {
                Some(index) => {
                    let path = folder.join("index.json");
                    self.inner.files.replace(&path, &read_back::to_json(&path, &index)?)?;
                    for name in records.keys() {
                        self.inner.files.remove(&records_folder(&folder).join(name))?;
                    }
                    for name in files {
                        self.inner.files.remove(&data_folder(&folder).join(name))?;
                    }
                }
                None => std::fs::remove_dir_all(&folder).map_err(|e| StoreError::io("remove", &folder, e))?,
            }
            sum.records += collected.records;
            sum.files += collected.files;
            sum.bytes += collected.bytes;
        }
        Ok(sum)
    }
}
