//! Garbage collection: removes what no run that is kept needs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

use serde::Deserialize;

use super::layout::data_folder;
use super::recipe_files::read_recipe_files;
use super::record::Record;
use super::recovery::Listing;
use super::writer::ArtifactWriter;
use super::{RECIPE_VERSION, Recipe, Store, StoreError, atomic, recovery, versioned_json};
use flow_base::digest::Digest;
use flow_base::partition::Partition;

/// What was removed, or would be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GarbageSummary {
    /// Artifacts: what stages made under settings that no run that is kept had.
    pub artifacts: u64,
    /// Partitions of artifacts that stay, as they were made from inputs that no run that is kept had.
    pub partitions: u64,
    pub bytes: u64,
    /// Folders of runs.
    pub runs: u64,
    /// Artifacts that stay.
    pub kept: u64,
    /// Files of runs that are damaged and count as absent.
    pub damaged: u64,
}

/// The part of a run's plan that names the recipes of its stages.
#[derive(Deserialize)]
struct Planned {
    stages: Vec<PlannedStage>,
}

#[derive(Deserialize)]
struct PlannedStage {
    #[serde(default)]
    stage: String,
    recipe: Digest,
}

/// A recipe's folder.
struct Folder {
    path: PathBuf,
    recipe: Digest,
    records: Vec<Arc<Record>>,
    data: Listing,
    /// Bytes of the files of records.
    noted: u64,
}

/// What the kept runs need.
#[derive(Default)]
struct Needed {
    /// Recipes that a plan names.
    recipes: BTreeSet<Digest>,
    /// Recipes of which a kept run has complete snapshots: records that no snapshot names may be removed.
    known: BTreeSet<Digest>,
    records: BTreeSet<(Digest, Partition, Digest)>,
    snapshots: BTreeSet<PathBuf>,
}

impl Store {
    /// Removes the folders of all runs of a pipeline but the last `keep` and the last that had all of some stage, the artifacts that none of these planned with,
    /// and of the others the partitions that none of these had. Data files with rows that are selected by a kept record
    /// are kept, too. With `dry` nothing is removed. Where no run is known, nothing is removed either: what the
    /// artifacts are for cannot be determined.
    ///
    /// After a crash a part is removed, and the rest is found again.
    ///
    /// # Errors
    /// If the store was opened for reading, a writer of it is open, or the plan of a run that is kept cannot be read.
    pub fn collect_garbage(&self, keep: usize, dry: bool) -> Result<GarbageSummary, StoreError> {
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
        let mut damaged = BTreeSet::new();
        let (last, old) = self.last_runs(keep, &mut damaged)?;
        let needed = self.needed(&last, &mut damaged)?;
        if needed.recipes.is_empty() {
            return Ok(GarbageSummary {
                damaged: damaged.len() as u64,
                ..GarbageSummary::default()
            });
        }
        let folders = self.artifact_folders()?;
        let wanted = wanted(&folders, &needed);
        let mut sum = GarbageSummary {
            runs: old.len() as u64,
            kept: wanted.len() as u64,
            damaged: damaged.len() as u64,
            ..GarbageSummary::default()
        };
        for (name, folder) in &folders {
            let Some(wanted) = wanted.get(name) else {
                sum.artifacts += 1;
                sum.bytes += folder.data.values().sum::<u64>() + folder.noted;
                if !dry {
                    // The files that name the artifact are removed last: after a crash the rest is found again.
                    self.inner.files.backend().delete_folder(&folder.path)?;
                    let removed = match std::fs::remove_dir_all(data_folder(&folder.path)) {
                        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
                        _ => std::fs::remove_dir_all(&folder.path),
                    };
                    removed.map_err(|e| StoreError::io("remove", &folder.path, e))?;
                }
                continue;
            };
            let is_wanted = |record: &Record| wanted.contains(&(record.partition.clone(), record.key));
            let gone: Vec<&Arc<Record>> = folder.records.iter().filter(|record| !is_wanted(record)).collect();
            if gone.is_empty() {
                let named = folder.records.iter().flat_map(|record| record.files());
                let named: BTreeSet<String> = named.map(|(file, _)| file).collect();
                let left = folder.data.iter().filter(|(file, _)| !named.contains(*file));
                let left: Vec<u64> = left.map(|(_, bytes)| *bytes).collect();
                // On a disk the next writer removes them.
                if self.inner.files.are_objects() && !left.is_empty() {
                    sum.bytes += left.iter().sum::<u64>();
                    if !dry {
                        self.writer_of(folder)?.remove_orphans()?;
                    }
                }
                continue;
            }
            let stays: BTreeSet<String> = folder
                .records
                .iter()
                .filter(|record| is_wanted(record))
                .flat_map(|record| record.files())
                .map(|(file, _)| file)
                .collect();
            sum.partitions += gone.len() as u64;
            sum.bytes += gone
                .iter()
                .flat_map(|record| record.files())
                .filter(|(file, _)| !stays.contains(file))
                .map(|(_, bytes)| bytes)
                .sum::<u64>();
            if !dry {
                self.writer_of(folder)?.retain(is_wanted)?;
            }
        }
        if !dry {
            for run in &old {
                let folder = self.run_folder(run)?;
                self.inner.files.backend().delete_folder(&folder)?;
                std::fs::remove_dir_all(&folder).map_err(|e| StoreError::io("remove", &folder, e))?;
            }
        }
        // After the runs that name them: a crash leaves no run that names a missing one.
        for path in self.snapshot_files()? {
            if !needed.snapshots.contains(&path) {
                sum.bytes += std::fs::metadata(&path).map_or(0, |file| file.len());
                if !dry {
                    self.inner.files.remove(&path)?;
                }
            }
        }
        if !dry {
            self.inner.files.backend().save()?;
        }
        Ok(sum)
    }

    fn writer_of(&self, folder: &Folder) -> Result<ArtifactWriter, StoreError> {
        let identity = atomic::read(&folder.path.join("recipe.json"))?.unwrap_or_default();
        ArtifactWriter::open(self.inner.files.clone(), folder.recipe, folder.path.clone(), &identity)
    }

    /// The last `keep` runs of each pipeline and the last that had all of some stage, and the others.
    fn last_runs(
        &self,
        keep: usize,
        damaged: &mut BTreeSet<PathBuf>,
    ) -> Result<(Vec<String>, Vec<String>), StoreError> {
        let mut of_pipeline: BTreeMap<Option<PathBuf>, (usize, bool)> = BTreeMap::new();
        let (mut last, mut old) = (Vec::new(), Vec::new());
        for run in self.runs()?.into_iter().rev() {
            // Runs of an unknown pipeline count as runs of one more pipeline.
            let (pipeline, is_complete) = whole(self.run_pipeline(&run), damaged)?.unzip();
            let (before, had_complete) = of_pipeline.entry(pipeline).or_default();
            *before += 1;
            let is_last_complete = is_complete == Some(true) && !std::mem::replace(had_complete, true);
            if *before <= keep || is_last_complete {
                last.push(run)
            } else {
                old.push(run)
            }
        }
        Ok((last, old))
    }

    fn needed(&self, runs: &[String], damaged: &mut BTreeSet<PathBuf>) -> Result<Needed, StoreError> {
        let mut needed = Needed::default();
        let mut planned: BTreeSet<(String, Digest)> = BTreeSet::new();
        let mut complete: BTreeSet<(String, Digest)> = BTreeSet::new();
        // Of runs whose notes are damaged: which records they had is not known.
        let mut unknown: BTreeSet<Digest> = BTreeSet::new();
        for run in runs {
            let path = self.run_folder(run)?.join("plan.json");
            // A run that ended before it had a plan.
            let Some(bytes) = atomic::read(&path)? else { continue };
            let plan: Planned = serde_json::from_slice(&bytes)
                .map_err(|error| StoreError::io("read the plan", &path, std::io::Error::other(error)))?;
            let recipes: BTreeSet<Digest> = plan.stages.iter().map(|stage| stage.recipe).collect();
            needed.recipes.extend(&recipes);
            planned.extend(plan.stages.into_iter().map(|stage| (stage.stage, stage.recipe)));
            let snapshots = self.run_snapshots(run);
            if matches!(snapshots, Err(StoreError::Damaged { .. })) {
                unknown.extend(recipes);
            }
            let snapshots = whole(snapshots, damaged)?.unwrap_or_default();
            for snapshot in snapshots.stages {
                needed.recipes.insert(snapshot.recipe);
                if snapshot.complete {
                    complete.insert((snapshot.stage, snapshot.recipe));
                }
                let keys = snapshot.keys.into_iter();
                needed
                    .records
                    .extend(keys.map(|(partition, key)| (snapshot.recipe, partition, key)));
            }
            let files = whole(self.snapshots_of_run(run), damaged)?;
            needed
                .snapshots
                .extend(files.iter().map(|digest| self.snapshot_file(digest)));
        }
        needed.known = needed.recipes.clone();
        for (_, recipe) in planned.difference(&complete) {
            needed.known.remove(recipe);
        }
        needed.known.retain(|recipe| !unknown.contains(recipe));
        Ok(needed)
    }

    /// The folders of all artifacts, by name.
    fn artifact_folders(&self) -> Result<BTreeMap<String, Folder>, StoreError> {
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
            // Without `recipe.json` the folder is not one of ours, or was just created and is empty.
            let Some(bytes) = atomic::read(&path)? else { continue };
            let Recipe { recipe, .. } = versioned_json::from_json(&path, &bytes, RECIPE_VERSION)?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let found = read_recipe_files(&self.inner.files, &entry.path(), &recipe)?;
            let folder = Folder {
                path: entry.path(),
                recipe,
                noted: found.records.values().chain(found.top.values()).sum(),
                records: recovery::merge(found.index, found.groups),
                data: found.data,
            };
            folders.insert(name, folder);
        }
        Ok(folders)
    }
}

/// What was read, or nothing of it where the file is damaged.
fn whole<T: Default>(read: Result<T, StoreError>, damaged: &mut BTreeSet<PathBuf>) -> Result<T, StoreError> {
    match read {
        Err(StoreError::Damaged { path, .. }) => {
            damaged.insert(path);
            Ok(T::default())
        }
        read => read,
    }
}

/// A partition and a key.
type RecordName = (Partition, Digest);

/// By the names of their folders, the artifacts that stay, and which of their records.
fn wanted(folders: &BTreeMap<String, Folder>, needed: &Needed) -> BTreeMap<String, BTreeSet<RecordName>> {
    let mut wanted: BTreeMap<String, BTreeSet<RecordName>> = BTreeMap::new();
    let mut open: Vec<(&String, &Arc<Record>)> = Vec::new();
    for (name, folder) in folders {
        if !needed.recipes.contains(&folder.recipe) {
            continue;
        }
        wanted.entry(name.clone()).or_default();
        let all = !needed.known.contains(&folder.recipe);
        open.extend(
            folder
                .records
                .iter()
                .map(|record| (name, record))
                .filter(|(_, record)| {
                    all || needed
                        .records
                        .contains(&(folder.recipe, record.partition.clone(), record.key))
                }),
        );
    }
    // Whose data file a selection names.
    let mut owners: BTreeMap<&String, BTreeMap<String, &Arc<Record>>> = BTreeMap::new();
    while let Some((name, record)) = open.pop() {
        let name_of = (record.partition.clone(), record.key);
        if !wanted.entry(name.clone()).or_default().insert(name_of) {
            continue;
        }
        for selection in record.ports.values().filter_map(|port| port.selection.as_ref()) {
            // artifacts/<name>/data/<file>
            let mut parts = selection.file.split('/').skip(1);
            let (other, file) = (parts.next(), parts.nth(1));
            let Some((other, folder)) = other.and_then(|name| folders.get_key_value(name)) else {
                continue;
            };
            let owners = owners.entry(other).or_insert_with(|| {
                let owned = |record| move |(file, _)| (file, record);
                folder
                    .records
                    .iter()
                    .flat_map(|record| record.files().map(owned(record)))
                    .collect()
            });
            open.extend(file.and_then(|file| owners.get(file)).map(|record| (other, *record)));
        }
    }
    wanted
}
