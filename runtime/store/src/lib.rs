//! The store: keeps the results of runs, as immutable files that are renamed into place atomically.
//!
//! ```text
//! FORMAT                      {"version":1}
//! lock                        who runs: host, process, run; there while a run is going on
//! artifacts/<recipe>/         one folder per recipe, named by the first 16 digits
//!    recipe.json              the recipe in full, and what it was made of
//!    data/<key>.<port>.<digest>.parquet     one file per stored port of a partition; `rejects` for rejects
//!    records/<generation>-<number>.json     one file per committed group of partitions
//!    index.json               all records, once the artifact is complete; takes the place of records/
//! snapshots/<digest>.json     partitions and keys: of which records the artifact of a stage was made up in a run
//! sources.json, sources.jsonl digests of source files: a shortcut, never part of a key
//! runs/<id>/                  the frozen spec and plan, the events, the snapshots and the report of a run
//! scratch/<stage>/            what may be lost at any time
//! ```
//!
//! A partition is committed when a record file (or the index) names it; data files that no record names are ignored.
//! Which partitions are committed follows from the files by pure functions (`recovery`); every file is written by
//! `atomic`. Reading needs no lock, also during a run.
//!
//! A state directory may be a prefix in object storage (`remote`): the objects have the same names and bytes, and the lock is an
//! object, too (`lease`). The rest of the store works with a copy on this machine.

mod artifact;
mod atomic;
mod backend;
#[cfg(test)]
#[path = "tests/crash.rs"]
mod crash;
mod data_file_writer;
mod digested_file;
mod error;
mod export;
mod export_file;
mod file_digest;
mod find;
mod garbage;
mod layout;
mod lease;
mod lock;
mod object_set;
mod open;
mod parquet_file;
mod port_records;
mod recipe_files;
mod record;
mod recovery;
mod rejects;
mod remote;
#[cfg(test)]
mod remote_tests;
pub mod row_order;
pub mod run_name;
mod snapshot;
mod sources;
mod temporary_file;
#[cfg(test)]
mod tests;
mod tombstone;
mod verified;
mod versioned_json;
mod writer;
mod written_files;

pub use artifact::{Artifact, Batches};
pub use atomic::write_json_atomically;
pub use atomic::{write_atomically, write_atomically_with};
pub use data_file_writer::DataFileWriter;
pub use digested_file::{DigestedFile, OpeningFile};
pub use error::{Holder, StoreError};
pub use export::{ExportSet, ExportStatus, FileInSet, Shrunk, file_in_set, files_of_set};
pub use export_file::ExportFile;
pub use find::{FoundRow, RowValues};
pub use garbage::GarbageSummary;
pub use lock::Lock;
pub use lock::is_of_one_machine;
pub use object_set::{path_in_set, place_in_set};
pub use parquet_file::ROW_GROUP;
pub use port_records::PortRecords;
pub use record::Ranges;
pub use record::{Counts, LostRecord, PortRecord, Record, Records, RejectRecord, RowRange, Selection};
pub use rejects::{PartOfRejects, RejectSet, add_up};
pub use snapshot::SnapshotWriter;
pub use snapshot::{RunSnapshots, StageSnapshot};
pub use sources::NotedFile;
pub use sources::{FileRange, SourceDigests, is_fault_of_the_file, on_threads};
pub use temporary_file::{TEMPORARY_PREFIX, create_temporary_file, remove_left};
pub use tombstone::{TOMBSTONE_SUFFIX, has_tombstone, remove_source};
pub use versioned_json::{checked as checked_json, read_note, sealed as sealed_json, write_note};
pub use writer::{ArtifactWriter, Pending, PortRows};

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use arrow::datatypes::SchemaRef;
use serde::{Deserialize, Serialize};

pub use artifact::artifact_digest;
use artifact::{ArtifactPart, Data, Place, PlaceFolder};
use atomic::Files;
use flow_base::digest::Digest;
use flow_base::partition::Partition;
use lease::Lease;
use parquet_file::WrittenFile;
use rejects::{RejectData, RejectPart, StageRejects};

/// Indices that are read at the same time: the text of each is in memory until it is parsed.
const INDICES_AT_ONCE: usize = 4;

/// Version of `recipe.json`.
const RECIPE_VERSION: u64 = 1;

/// The mode in which a state directory is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// To run: it is made if it is not there, and locked until the last clone of the [`Store`] is dropped.
    Run { run_id: String },
    /// To look (`flow plan`, `flow rejects`): nothing is written, nothing locked, and a directory that is not
    /// there is an empty one. (Of one in object storage the copy on this machine is brought up to date.)
    Read,
    /// To write data for a run of process 0, which holds the lock, from another process of that run: nothing is locked,
    /// recovered or removed, and the only writers are those of `Store::follow_writer`. They write data alone: records, which
    /// make it count, are written by process 0, so that whoever has lost it commits nothing.
    Follow { run_id: String },
}

/// An open state directory. Cheap to clone; may be used from any thread.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    dir: PathBuf,
    files: Files,
    sources: SourceDigests,
    /// One writer per recipe, also where two stages of a pipeline have the same recipe.
    writers: Mutex<BTreeMap<Digest, Weak<writer::SharedWriter>>>,
    /// Given back before the lock of the folder.
    _lease: Option<Lease>,
    lock: Option<Lock>,
}

#[derive(Serialize, Deserialize)]
struct Recipe {
    version: u64,
    recipe: Digest,
    identity: serde_json::Value,
}

impl versioned_json::Versioned for Recipe {
    fn version(&self) -> u64 {
        self.version
    }
}

impl Store {
    /// The folder of the state directory; of one in object storage that of its copy.
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    /// The digests of source files, including those that earlier runs noted.
    pub fn sources(&self) -> &SourceDigests {
        &self.inner.sources
    }

    /// Writes the digests of source files for the next run. Does nothing if opened for reading.
    pub fn save_sources(&self) -> Result<(), StoreError> {
        match self.inner.lock {
            Some(_) => self.inner.sources.save(&self.inner.files, &self.inner.dir),
            None => Ok(()),
        }
    }

    /// Appends the digests of source files that were made since the last call, so that the files need not be read again
    /// after a run that was killed. Does nothing if opened for reading.
    pub fn append_sources(&self) -> Result<(), StoreError> {
        match self.inner.lock {
            // In object storage they are uploaded as a whole, at the end of the run.
            Some(_) => self.inner.sources.append(&self.inner.dir),
            None => Ok(()),
        }
    }

    /// All records of a recipe; empty for a recipe that never ran. Reads `index.json` and the records of groups
    /// committed since (none, once a run has come to its end), and lists the data files; opens none of them.
    ///
    /// # Errors
    /// If a record file is damaged or newer: named, with what to do. A record whose data is missing or short is
    /// no error: it is left out, listed in [`Records::lost`], and its partition runs again.
    pub fn records(&self, recipe: &Digest) -> Result<Records, StoreError> {
        let found = recipe_files::read_recipe_files(&self.inner.files, &self.recipe_folder(recipe), recipe)?;
        let (standing, mut lost) = recovery::complete_records(recovery::merge(found.index, found.groups), &found.data);
        let (standing, without) = self.with_their_files(standing);
        lost.extend(without);
        Ok(Records::new(*recipe, standing, lost))
    }

    /// The records of several recipes, on up to `threads` threads; without those of recipes whose files cannot be read. Recipes with
    /// large indices are read first, while there is most room for their texts.
    pub fn records_of_all(&self, mut recipes: Vec<Digest>, threads: usize) -> BTreeMap<Digest, Arc<Records>> {
        recipes.sort_unstable();
        recipes.dedup();
        let index = |recipe: &Digest| std::fs::metadata(self.recipe_folder(recipe).join("index.json"));
        recipes.sort_by_cached_key(|recipe| Reverse(index(recipe).map_or(0, |file| file.len())));
        let names: OnceLock<Vec<Partition>> = OnceLock::new();
        let read = |recipe: &Digest| {
            let mut records = self.records(recipe).ok()?;
            records.share_names(names.get_or_init(|| records.partitions().cloned().collect()));
            Some((*recipe, Arc::new(records)))
        };
        let found = on_threads(&recipes, threads.min(INDICES_AT_ONCE), read);
        found.into_iter().flatten().collect()
    }

    /// Separates the records whose selections refer to existing files from the others.
    fn with_their_files(&self, records: Vec<Arc<Record>>) -> (Vec<Arc<Record>>, Vec<LostRecord>) {
        let mut lost = Vec::new();
        let mut whole = Vec::with_capacity(records.len());
        for record in records {
            let missing = record.ports.values().find_map(|port| {
                let selection = port.selection.as_ref()?;
                // The path of an invalid one may lead anywhere.
                let size = || {
                    self.inner
                        .files
                        .backend()
                        .size_of(&self.inner.dir.join(&selection.file))
                };
                let found = selection.is_valid().then(size).flatten();
                (found != Some(selection.file_bytes)).then(|| (selection.file.clone(), found))
            });
            match missing {
                None => whole.push(record),
                Some((file, found)) => lost.push(LostRecord {
                    partition: record.partition.clone(),
                    key: record.key,
                    file,
                    found,
                }),
            }
        }
        (whole, lost)
    }

    /// The identity of a recipe, as given to [`Store::writer`]; none for a recipe that never ran.
    pub fn identity(&self, recipe: &Digest) -> Result<Option<serde_json::Value>, StoreError> {
        let path = self.recipe_folder(recipe).join("recipe.json");
        let Some(bytes) = atomic::read(&path)? else {
            return Ok(None);
        };
        let stored: Recipe = versioned_json::from_json(&path, &bytes, RECIPE_VERSION)?;
        if stored.recipe != *recipe {
            return Err(other_recipe(path, &stored.recipe, recipe));
        }
        Ok(Some(stored.identity))
    }

    /// The writer of a recipe. `identity` says what the recipe was made of (kind, version, settings); it is
    /// kept for people and for the reasons of a plan, and compared with nothing.
    ///
    /// # Errors
    /// [`StoreError::ReadOnly`] if the store was opened for reading, or to follow a run and `Store::follow_writer` gave
    /// no writer of the recipe that is still there.
    pub fn writer(&self, recipe: &Digest, identity: &serde_json::Value) -> Result<ArtifactWriter, StoreError> {
        let mut writers = self.writers();
        if let Some(shared) = writers.get(recipe).and_then(Weak::upgrade) {
            return Ok(ArtifactWriter::of(shared));
        }
        if self.inner.lock.is_none() {
            return Err(StoreError::ReadOnly {
                path: self.inner.dir.clone(),
            });
        }
        // Refuses another recipe with the same first 16 digits.
        self.identity(recipe)?;
        let folder = self.recipe_folder(recipe);
        let stored = Recipe {
            version: RECIPE_VERSION,
            recipe: *recipe,
            identity: identity.clone(),
        };
        let stored = versioned_json::to_sealed_json(&folder.join("recipe.json"), &stored)?;
        let writer = ArtifactWriter::open(self.inner.files.clone(), *recipe, folder, &stored)?;
        writers.insert(*recipe, Arc::downgrade(&writer.shared));
        Ok(writer)
    }

    /// The writer of a recipe in a process that follows a run: [`Store::writer`] gives the same as long as it is there.
    /// Process 0 has made the folders of the recipe, and commits what is placed here ([`ArtifactWriter::place`],
    /// [`ArtifactWriter::commit_with`]). `standing` are records of the partitions that are computed here.
    ///
    /// # Errors
    /// If the folder of the copy of a state directory in object storage cannot be made.
    pub fn follow_writer(
        &self,
        recipe: &Digest,
        standing: impl IntoIterator<Item = Arc<Record>>,
    ) -> Result<ArtifactWriter, StoreError> {
        let mut writers = self.writers();
        let shared = writers.get(recipe).and_then(Weak::upgrade);
        let writer = match shared {
            Some(shared) => ArtifactWriter::of(shared),
            None => ArtifactWriter::follow(self.inner.files.clone(), *recipe, self.recipe_folder(recipe))?,
        };
        writer.put(standing);
        writers.insert(*recipe, Arc::downgrade(&writer.shared));
        Ok(writer)
    }

    fn writers(&self) -> std::sync::MutexGuard<'_, BTreeMap<Digest, Weak<writer::SharedWriter>>> {
        // Each change is one insertion: whole, whatever panicked.
        self.inner.writers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The artifact that `records` make up on `port`.
    ///
    /// # Errors
    /// [`StoreError::NotCommitted`] if one of the records did not store the port.
    pub fn artifact<'a>(
        &self,
        recipe: &Digest,
        port: &str,
        schema: SchemaRef,
        records: impl IntoIterator<Item = &'a Arc<Record>>,
    ) -> Result<Artifact, StoreError> {
        let mut parts = Vec::new();
        let place = |path: PathBuf| {
            let files = self.inner.files.clone();
            Arc::new(PlaceFolder { path, files })
        };
        let folder = place(layout::data_folder(&self.recipe_folder(recipe)));
        let (dir, port): (Arc<PlaceFolder>, Arc<str>) = (place(self.inner.dir.clone()), port.into());
        for record in records {
            let Some(stored) = record.ports.get(&port) else {
                return Err(StoreError::NotCommitted {
                    partition: record.partition.to_string(),
                });
            };
            let written = WrittenFile {
                digest: stored.digest,
                rows: stored.rows,
                bytes: stored.bytes,
            };
            let selection = self.valid_selection(record, stored)?;
            let place = match selection {
                None => Place::Own {
                    folder: Arc::clone(&folder),
                    key: record.key,
                    port: Arc::clone(&port),
                    digest: stored.digest,
                },
                Some(_) => Place::Selected { dir: Arc::clone(&dir) },
            };
            let selection = selection.cloned();
            let data = Data::File { place, selection };
            parts.push((record.partition.clone(), ArtifactPart { written, data }));
        }
        Ok(Artifact::new(schema, parts.into_iter().collect()))
    }

    /// The file with the rows of a port of a record: all of its rows, or those that the port selects. One in object storage is
    /// fetched.
    fn data_path(
        &self,
        recipe: &Digest,
        record: &Record,
        port: &str,
        stored: &PortRecord,
    ) -> Result<PathBuf, StoreError> {
        let (path, bytes) = match self.valid_selection(record, stored)? {
            Some(selection) => (self.inner.dir.join(&selection.file), selection.file_bytes),
            None => {
                let data = layout::data_folder(&self.recipe_folder(recipe));
                (
                    data.join(record::data_file(&record.key, port, &stored.digest)),
                    stored.bytes,
                )
            }
        };
        self.inner.files.at_hand(path, bytes)
    }

    fn valid_selection<'a>(
        &self,
        record: &Record,
        stored: &'a PortRecord,
    ) -> Result<Option<&'a Arc<Selection>>, StoreError> {
        match &stored.selection {
            // The record is wrong, not the file.
            Some(selection) if !selection.is_valid() => Err(StoreError::io(
                "use",
                &self.inner.dir.join(&selection.file),
                std::io::Error::other(format!(
                    "partition {} selects rows that it cannot have",
                    record.partition
                )),
            )),
            selection => Ok(selection.as_ref()),
        }
    }

    /// The rejects of several stages: for each its name, its recipe and its records.
    pub fn reject_set(&self, stages: &[(String, Digest, Vec<Arc<Record>>)]) -> RejectSet {
        let of_stage = |(stage, recipe, records): &(String, Digest, Vec<Arc<Record>>)| {
            let data = layout::data_folder(&self.recipe_folder(recipe));
            let mut parts: Vec<RejectPart> = records
                .iter()
                .filter(|record| record.rejects.rows > 0)
                .map(|record| RejectPart {
                    partition: record.partition.clone(),
                    digest: record.rejects.digest,
                    by_reason: record.rejects.by_reason.clone(),
                    data: RejectData::File {
                        path: data.join(record::data_file(&record.key, record::REJECTS, &record.rejects.digest)),
                        bytes: record.rejects.bytes,
                        files: self.inner.files.clone(),
                    },
                })
                .collect();
            parts.sort_by(|a, b| a.partition.cmp(&b.partition));
            StageRejects {
                stage: stage.as_str().into(),
                parts,
            }
        };
        RejectSet::new(stages.iter().map(of_stage).collect())
    }

    /// The folder of a run, whether it is there or not.
    ///
    /// # Errors
    /// If `id` is not a plain name.
    pub fn run_folder(&self, id: &str) -> Result<PathBuf, StoreError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if id.is_empty() || id.starts_with('.') || !id.chars().all(plain) {
            return Err(StoreError::Name {
                what: "a run",
                name: id.to_string(),
            });
        }
        Ok(self.inner.dir.join("runs").join(id))
    }

    /// Makes the folder of a run.
    pub fn create_run_folder(&self, id: &str) -> Result<PathBuf, StoreError> {
        let folder = self.run_folder(id)?;
        self.inner.files.create_folder(&folder)?;
        Ok(folder)
    }

    /// The names of all runs that have a folder, the latest last.
    pub fn runs(&self) -> Result<Vec<String>, StoreError> {
        run_name::runs_in(&self.inner.dir)
    }

    /// The scratch folder of a stage, for files that may be deleted at any time; created if needed. A group in the
    /// stage's name (`manifest/dedup`) becomes a folder.
    pub fn scratch(&self, stage: &str) -> Result<PathBuf, StoreError> {
        let parts: Vec<&str> = stage.split('/').collect();
        if parts
            .iter()
            .any(|part| part.is_empty() || part.starts_with('.') || part.contains(['\\', '\0']))
        {
            return Err(StoreError::Name {
                what: "a stage",
                name: stage.to_string(),
            });
        }
        let folder = parts
            .iter()
            .fold(self.inner.dir.join("scratch"), |folder, part| folder.join(part));
        self.inner.files.create_folder(&folder)?;
        Ok(folder)
    }

    fn recipe_folder(&self, recipe: &Digest) -> PathBuf {
        self.inner.dir.join("artifacts").join(recipe.short())
    }
}

fn other_recipe(path: PathBuf, found: &Digest, expected: &Digest) -> StoreError {
    StoreError::OtherRecipe {
        path,
        found: found.to_hex(),
        expected: expected.to_hex(),
    }
}
