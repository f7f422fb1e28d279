//! Removing what no run wants any more.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::PoisonError;

use serde::Deserialize;

use super::read_back::{self, recipe_folder};
use super::writer::data_folder;
use super::{RECIPE_VERSION, Recipe, Store, StoreError, atomic, decide};
use crate::digest::Digest;

/// What was removed, or would be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Artifacts: what stages made under settings that no run that is kept had.
    pub artifacts: u64,
    pub bytes: u64,
    /// Folders of runs.
    pub runs: u64,
    /// Artifacts that stay.
    pub kept: u64,
}

/// Of a run's plan, what its stages work under.
#[derive(Deserialize)]
struct Planned {
    stages: Vec<PlannedStage>,
}

#[derive(Deserialize)]
struct PlannedStage {
    recipe: Digest,
}

impl Store {
    /// Removes the folders of all runs but the last `keep`, and the artifacts that none of these planned with and that
    /// hold no row which an artifact of theirs selects. With `dry` nothing is removed. Where no run is known, nothing is
    /// removed either: what the artifacts are for cannot be told.
    ///
    /// An artifact goes as a whole; a crash leaves a part of one, whose records do not count without their data.
    ///
    /// # Errors
    /// If the store was opened for reading, a writer of it is open, or the plan of a run that is kept cannot be read.
    pub fn collect(&self, keep: usize, dry: bool) -> Result<Collected, StoreError> {
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
        let mut old = self.runs()?;
        let last = old.split_off(old.len().saturating_sub(keep));
        let mut recipes = BTreeSet::new();
        let mut planned = false;
        for run in &last {
            let path = self.run_folder(run)?.join("plan.json");
            // A run that ended before it had a plan.
            let Some(bytes) = atomic::read(&path)? else { continue };
            let plan: Planned = serde_json::from_slice(&bytes)
                .map_err(|error| StoreError::io("read the plan", &path, std::io::Error::other(error)))?;
            recipes.extend(plan.stages.into_iter().map(|stage| stage.recipe));
            planned = true;
        }
        if !planned {
            return Ok(Collected::default());
        }
        let folders = self.artifact_folders()?;
        let wanted = wanted(&folders, &recipes)?;
        let mut sum = Collected {
            runs: old.len() as u64,
            kept: wanted.len() as u64,
            ..Collected::default()
        };
        for (name, (folder, recipe)) in &folders {
            if wanted.contains(name) {
                continue;
            }
            let found = recipe_folder(folder, recipe)?;
            sum.artifacts += 1;
            sum.bytes += found.data.values().chain(found.records.values()).sum::<u64>();
            if !dry {
                // What names the artifact goes last: after a crash the rest is found again.
                let removed = match std::fs::remove_dir_all(data_folder(folder)) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
                    _ => std::fs::remove_dir_all(folder),
                };
                removed.map_err(|e| StoreError::io("remove", folder, e))?;
            }
        }
        if !dry {
            for run in &old {
                let folder = self.run_folder(run)?;
                std::fs::remove_dir_all(&folder).map_err(|e| StoreError::io("remove", &folder, e))?;
            }
        }
        Ok(sum)
    }

    /// The folders of all artifacts, by name.
    fn artifact_folders(&self) -> Result<BTreeMap<String, (PathBuf, Digest)>, StoreError> {
        let artifacts = self.inner.dir.join("artifacts");
        let entries = match std::fs::read_dir(&artifacts) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            Err(e) => return Err(StoreError::io("list the folder", &artifacts, e)),
        };
        let mut folders = BTreeMap::new();
        for entry in entries {
            let entry = entry.map_err(|e| StoreError::io("list the folder", &artifacts, e))?;
            let path = entry.path().join("recipe.json");
            // Without it the folder is not one of ours, or has just been begun and holds nothing yet.
            let Some(bytes) = atomic::read(&path)? else { continue };
            let Recipe { recipe, .. } = read_back::from_json(&path, &bytes, RECIPE_VERSION)?;
            if let Ok(name) = entry.file_name().into_string() {
                folders.insert(name, (entry.path(), recipe));
            }
        }
        Ok(folders)
    }
}

/// The names of the folders of these recipes, and of those whose files their records select rows of.
fn wanted(
    folders: &BTreeMap<String, (PathBuf, Digest)>,
    recipes: &BTreeSet<Digest>,
) -> Result<BTreeSet<String>, StoreError> {
    let mut open: Vec<&String> = folders
        .iter()
        .filter(|(_, (_, recipe))| recipes.contains(recipe))
        .map(|(name, _)| name)
        .collect();
    let mut wanted = BTreeSet::new();
    while let Some(name) = open.pop() {
        if !wanted.insert(name.clone()) {
            continue;
        }
        let (folder, recipe) = &folders[name];
        let found = recipe_folder(folder, recipe)?;
        for record in decide::merge(found.index, found.groups) {
            for selection in record.ports.values().filter_map(|port| port.selection.as_ref()) {
                // artifacts/<name>/data/<file>
                let other = selection
                    .file
                    .split('/')
                    .nth(1)
                    .and_then(|name| folders.get_key_value(name));
                open.extend(other.map(|(name, _)| name));
            }
        }
    }
    Ok(wanted)
}
