//! Committing partitions: data under temporary names on the workers' threads, then group by group one record
//! file, then one index.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;

use super::StoreError;
use super::atomic::{self, Files};
use super::data_file_writer::DataFileWriter;
use super::layout::{data_folder, records_folder};
use super::recipe_files::read_recipe_files;
use super::record::{
    Counts, Group, GroupName, Index, PortRecord, RECORD_VERSION, REJECTS, Record, RejectRecord, Selection, data_file,
};
use super::recovery;
use super::remote::is_fetched;
use super::versioned_json;
use super::{parquet_file, rejects};
use flow_base::digest::Digest;
use flow_base::failpoints;
use flow_base::partition::Partition;
use flow_base::reject::ID_COLUMN;
use flow_base::reject::packed::PackedRejects;

/// Most groups that may stay beside an index, if they hold at most this fraction of all records.
const LEFT_GROUPS: usize = 16;
const LEFT_SHARE: usize = 16;

/// The rows of one port of one partition, to be stored: batches in the order of `_row`.
pub struct PortRows {
    pub name: String,
    pub schema: SchemaRef,
    pub batches: Vec<RecordBatch>,
    /// Where all rows are written already. `batches` are then empty.
    pub file: Option<DataFileWriter>,
    /// Where the rows are a selection of a committed partition. `batches` are then empty.
    pub selection: Option<Selection>,
}

impl PortRows {
    pub fn new(name: impl Into<String>, schema: SchemaRef, batches: Vec<RecordBatch>) -> Self {
        PortRows {
            name: name.into(),
            schema,
            batches,
            file: None,
            selection: None,
        }
    }
}

/// Writes the partitions of one recipe. Cheap to clone and shared by the workers: all clones, and all that
/// [`super::Store::writer`] gives for one recipe, are one writer.
#[derive(Clone)]
pub struct ArtifactWriter {
    pub(super) shared: Arc<SharedWriter>,
    pub(super) id_column: &'static str,
}

pub(super) struct SharedWriter {
    files: Files,
    recipe: Digest,
    folder: PathBuf,
    state: Mutex<State>,
}

struct State {
    generation: u64,
    next_group: u64,
    groups: Vec<GroupName>,
    /// Records in these groups.
    grouped: usize,
    has_index: bool,
    /// All committed records, in the order of the commits.
    records: Vec<Arc<Record>>,
    places: BTreeMap<(Partition, Digest), usize>,
}

impl State {
    fn standing(&self, partition: &Partition, key: &Digest) -> Option<&Arc<Record>> {
        self.places.get(&(partition.clone(), *key)).map(|&at| &self.records[at])
    }

    fn put(&mut self, record: Arc<Record>) {
        let next = self.records.len();
        match self.places.insert((record.partition.clone(), record.key), next) {
            None => self.records.push(record),
            Some(at) => {
                self.places.insert((record.partition.clone(), record.key), at);
                self.records[at] = record;
            }
        }
    }
}

/// A partition whose data is in temporary files; it is not committed yet. Dropping it removes them.
#[must_use = "a partition that is not handed to `ArtifactWriter::commit` is not committed"]
pub struct Pending {
    record: Option<Record>,
    /// Temporary name and final name.
    moves: Vec<(PathBuf, PathBuf)>,
    files: Files,
}

impl Pending {
    /// The record as it will be committed.
    pub fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    fn discard(&mut self) {
        for (temporary, _) in self.moves.drain(..) {
            let _ = self.files.remove(&temporary);
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.discard();
    }
}

impl ArtifactWriter {
    fn new(files: Files, recipe: Digest, folder: PathBuf, state: State) -> Self {
        ArtifactWriter::of(Arc::new(SharedWriter {
            files,
            recipe,
            folder,
            state: Mutex::new(state),
        }))
    }

    pub(super) fn of(shared: Arc<SharedWriter>) -> Self {
        ArtifactWriter {
            shared,
            id_column: ID_COLUMN,
        }
    }

    /// Creates the folders of a recipe, and removes what a crash left in them. The caller holds the lock.
    pub(super) fn open(files: Files, recipe: Digest, folder: PathBuf, identity: &[u8]) -> Result<Self, StoreError> {
        for each in [&folder, &data_folder(&folder), &records_folder(&folder)] {
            files.create_folder(each)?;
        }
        let recipe_file = folder.join("recipe.json");
        if atomic::read(&recipe_file)?.is_none() {
            files.replace(&recipe_file, identity)?;
        }
        let state = recover(&files, &recipe, &folder)?;
        Ok(ArtifactWriter::new(files, recipe, folder, state))
    }

    /// A writer that writes data of a recipe which process 0 has recovered, and whose records process 0 alone writes.
    ///
    /// # Errors
    /// If the folder of a copy on this machine cannot be made.
    pub(super) fn follow(files: Files, recipe: Digest, folder: PathBuf) -> Result<Self, StoreError> {
        if files.are_objects() {
            let data = data_folder(&folder);
            files.create_folder(&data)?;
            // Of processes that were killed. Those of other machines that use the same copy seem so, too.
            let is_of_others = |name: &str| recovery::is_of_dead_process(name) || is_fetched(name);
            for name in atomic::list(&data)?.keys().filter(|name| is_of_others(name)) {
                let path = data.join(name);
                if atomic::is_left(&path) {
                    files.remove(&path)?;
                }
            }
        }
        let state = State {
            generation: 0,
            next_group: 0,
            groups: Vec::new(),
            grouped: 0,
            has_index: false,
            records: Vec::new(),
            places: BTreeMap::new(),
        };
        Ok(ArtifactWriter::new(files, recipe, folder, state))
    }

    /// The committed records of a partition, the latest last.
    pub fn records_of(&self, partition: &Partition) -> Vec<Arc<Record>> {
        let state = self.lock();
        let least = Digest::from_bytes([0; 32]);
        let from = state.places.range((partition.clone(), least)..);
        let mut places: Vec<usize> = from
            .take_while(|((of, _), _)| of == partition)
            .map(|(_, at)| *at)
            .collect();
        places.sort_unstable();
        places.into_iter().map(|at| Arc::clone(&state.records[at])).collect()
    }

    /// Adds records that are committed already.
    pub(super) fn put(&self, records: impl IntoIterator<Item = Arc<Record>>) {
        let mut state = self.lock();
        records.into_iter().for_each(|record| state.put(record));
    }

    /// The column of rejects that names their rows; `id` if nothing is said.
    pub fn with_id_column(mut self, id_column: &'static str) -> Self {
        self.id_column = id_column;
        self
    }

    pub fn recipe(&self) -> &Digest {
        &self.shared.recipe
    }

    /// Begins a data file, to be handed to [`ArtifactWriter::write_partition`].
    pub fn begin(&self, schema: &SchemaRef) -> Result<DataFileWriter, StoreError> {
        DataFileWriter::create(&self.shared.files, &data_folder(&self.shared.folder), schema)
    }

    /// Writes the data of one partition under temporary names: on the caller's thread, at the same time as
    /// others. `rejects` may come in any order. `inputs` are kept to tell later which input changed.
    ///
    /// # Errors
    /// If rows do not have the columns of their port, or the disk does not take them.
    pub fn write_partition(
        &self,
        partition: &Partition,
        key: Digest,
        inputs: Vec<Digest>,
        ports: Vec<PortRows>,
        rejects: impl Into<PackedRejects>,
        counts: Counts,
    ) -> Result<Pending, StoreError> {
        let data = data_folder(&self.shared.folder);
        let files = &self.shared.files;
        let mut pending = Pending {
            record: None,
            moves: Vec::new(),
            files: files.clone(),
        };
        let mut written = |port: &str, (temporary, written): (PathBuf, parquet_file::WrittenFile)| {
            pending
                .moves
                .push((temporary, data.join(data_file(&key, port, &written.digest))));
            failpoints::hit(failpoints::DATA_WRITTEN, &[]);
            written
        };
        let mut port_records = BTreeMap::new();
        for PortRows {
            name,
            schema,
            batches,
            file,
            selection,
        } in ports
        {
            check_port_name(&name)?;
            let misfit = |detail: String| StoreError::Rows {
                port: name.clone(),
                partition: partition.to_string(),
                detail,
            };
            let record = match selection {
                Some(selection) => PortRecord {
                    digest: selection.digest(),
                    rows: selection.rows(),
                    bytes: 0,
                    selection: Some(Arc::new(selection)),
                },
                None => {
                    let file = match file {
                        Some(file) => file.finish()?,
                        None => {
                            let batches = parquet_file::conform(&schema, batches).map_err(|e| misfit(e.to_string()))?;
                            parquet_file::write(files, &data, &schema, batches)?
                        }
                    };
                    let written = written(&name, file);
                    PortRecord {
                        digest: written.digest,
                        rows: written.rows,
                        bytes: written.bytes,
                        selection: None,
                    }
                }
            };
            if port_records.insert(name.clone(), record).is_some() {
                return Err(misfit("it is given twice".to_string()));
            }
        }
        let mut reject_record = RejectRecord::none();
        let rejects: PackedRejects = rejects.into();
        if !rejects.is_empty() {
            let by_reason = rejects.by_reason();
            let misfit = |error: &dyn std::fmt::Display| StoreError::Rows {
                port: REJECTS.to_string(),
                partition: partition.to_string(),
                detail: error.to_string(),
            };
            let schema = rejects::schema(self.id_column);
            let mut file = DataFileWriter::create(files, &data, &schema)?;
            for batch in rejects::in_order(rejects, &schema) {
                file.push(batch.map_err(|error| misfit(&error))?)?;
            }
            let written = written(REJECTS, file.finish()?);
            reject_record = Arc::new(RejectRecord {
                digest: written.digest,
                rows: written.rows,
                bytes: written.bytes,
                by_reason,
            });
        }
        pending.record = Some(Record {
            partition: partition.clone(),
            key,
            inputs,
            ports: port_records.into_iter().collect(),
            rows_in: counts.rows_in,
            rows_out: counts.rows_out,
            read: counts.read,
            merged: counts.merged,
            rejects: reject_record,
        });
        Ok(pending)
    }

    /// Commits partitions together: all of them when this returns, and after a crash or an error either all or none.
    /// Returns their committed records, in the order of `group`. Partitions for which the same record is committed
    /// already cost nothing.
    pub fn commit(&self, group: Vec<Pending>) -> Result<Vec<Arc<Record>>, StoreError> {
        self.commit_with(group, &[])
    }

    /// As [`ArtifactWriter::commit`], together with records whose data another process has placed ([`ArtifactWriter::place`]).
    /// Theirs come last among those that are returned.
    pub fn commit_with(&self, group: Vec<Pending>, placed: &[Arc<Record>]) -> Result<Vec<Arc<Record>>, StoreError> {
        let begun = Instant::now();
        let SharedWriter { files, folder, .. } = &*self.shared;
        let mut state = self.lock();
        let (mut result, mut fresh) = self.place_data(&state, group)?;
        let data = data_folder(folder);
        for record in placed {
            let standing = state.standing(&record.partition, &record.key);
            let record = standing.map_or_else(
                || Arc::clone(record),
                |old| Arc::new(recovery::combine(old, Record::clone(record))),
            );
            match standing {
                Some(old) if *old == record => result.push(Arc::clone(old)),
                _ => {
                    for (file, bytes) in record.files() {
                        files.backend().note_data(&data.join(file), bytes);
                    }
                    result.push(Arc::clone(&record));
                    fresh.push(record);
                }
            }
        }
        if !fresh.is_empty() {
            self.write_group(&mut state, &fresh)?;
        }
        tracing::debug!(
            recipe = %folder.display(),
            partitions = result.len(),
            written = fresh.len(),
            elapsed = ?begun.elapsed(),
            "commit"
        );
        for record in fresh {
            state.put(record);
        }
        Ok(result)
    }

    /// In a process that follows a run: brings the data of partitions to its place, on the disk or in object storage, and
    /// returns their records. No record is written: they are committed once process 0 has done so.
    pub fn place(&self, group: Vec<Pending>) -> Result<Vec<Arc<Record>>, StoreError> {
        let mut state = self.lock();
        let (records, fresh) = self.place_data(&state, group)?;
        for record in fresh {
            state.put(record);
        }
        Ok(records)
    }

    /// Gives the data of partitions its final names. Returns their records, and those of them that no record represents.
    #[allow(clippy::type_complexity, reason = "two lists of one kind")]
    fn place_data(
        &self,
        state: &State,
        group: Vec<Pending>,
    ) -> Result<(Vec<Arc<Record>>, Vec<Arc<Record>>), StoreError> {
        let SharedWriter { files, folder, .. } = &*self.shared;
        let mut result = Vec::with_capacity(group.len());
        let mut fresh: Vec<Arc<Record>> = Vec::new();
        let mut moving = Vec::new();
        for mut pending in group {
            let Some(record) = pending.record.take() else { continue };
            let standing = state.standing(&record.partition, &record.key);
            let record = standing.map_or_else(|| record.clone(), |old| recovery::combine(old, record.clone()));
            match standing {
                Some(old) if **old == record => {
                    result.push(old.clone());
                    pending.discard();
                }
                _ => {
                    let record = Arc::new(record);
                    result.push(record.clone());
                    fresh.push(record);
                    moving.push(pending);
                }
            }
        }
        if fresh.is_empty() {
            return Ok((result, fresh));
        }
        let temporary: Vec<PathBuf> = moving
            .iter()
            .flat_map(|p| &p.moves)
            .map(|(from, _)| from.clone())
            .collect();
        files.sync_all(&temporary)?;
        files.check_run()?;
        let moves: Vec<(PathBuf, PathBuf)> = moving.iter().flat_map(|pending| pending.moves.clone()).collect();
        files.backend().put_data(&moves)?;
        for pending in &mut moving {
            while let Some((from, to)) = pending.moves.last() {
                files.rename(from, to)?;
                pending.moves.pop();
                failpoints::hit(failpoints::DATA_RENAMED, &[]);
            }
        }
        if !temporary.is_empty() {
            files.sync_folder(&data_folder(folder))?;
        }
        Ok((result, fresh))
    }

    /// Writes one group of records: all of them are committed when this returns.
    fn write_group(&self, state: &mut State, records: &[Arc<Record>]) -> Result<(), StoreError> {
        let SharedWriter {
            files, recipe, folder, ..
        } = &*self.shared;
        let name = GroupName {
            generation: state.generation,
            number: state.next_group,
        };
        let path = records_folder(folder).join(name.file());
        let record_file = Group {
            version: RECORD_VERSION,
            recipe: *recipe,
            records: records.to_vec(),
        };
        if files.are_objects() {
            // Also where it fails: the answer may be lost, and the record there.
            state.next_group += 1;
        }
        let prepared = files.prepare(&path, &versioned_json::to_sealed_json(&path, &record_file)?)?;
        failpoints::hit(failpoints::RECORD_WRITTEN, &[]);
        match files.rename_if_absent(&prepared, &path) {
            Ok(true) => {}
            Ok(false) => {
                let _ = files.remove(&prepared);
                return Err(files.written_meanwhile(folder.parent().and_then(Path::parent).unwrap_or(folder), &path));
            }
            Err(error) => {
                let _ = files.remove(&prepared);
                return Err(error);
            }
        }
        files.sync_folder(&records_folder(folder))?;
        failpoints::hit(failpoints::RECORD_LINKED, &[]);
        state.next_group = name.number + 1;
        state.groups.push(name);
        state.grouped += records.len();
        Ok(())
    }

    /// Ends the artifact: one index file takes the place of the group records, unless they are few. `planned` are the partitions and
    /// keys that this run was to have.
    ///
    /// # Errors
    /// If one of `planned` was not committed.
    pub fn finish<'a>(&self, planned: impl IntoIterator<Item = (&'a Partition, &'a Digest)>) -> Result<(), StoreError> {
        let mut state = self.lock();
        for (partition, key) in planned {
            if state.standing(partition, key).is_none() {
                return Err(StoreError::NotCommitted {
                    partition: partition.to_string(),
                });
            }
        }
        // A few groups are left beside a large index, which takes much longer to write than they take to read.
        let is_small = state.groups.len() <= LEFT_GROUPS && state.grouped * LEFT_SHARE <= state.records.len();
        if state.has_index && is_small {
            return Ok(());
        }
        self.write_index(&mut state)
    }

    /// Keeps the records that `wanted` names, and removes the data of the others. Returns how many were removed.
    pub(super) fn retain(&self, wanted: impl Fn(&Record) -> bool) -> Result<u64, StoreError> {
        let mut state = self.lock();
        let before = state.records.len();
        state.records.retain(|record| wanted(record));
        state.places = (0..)
            .zip(&state.records)
            .map(|(at, record)| ((record.partition.clone(), record.key), at))
            .collect();
        let gone = (before - state.records.len()) as u64;
        if gone > 0 {
            // From here on no record names the data: after a crash the next writer removes the files.
            self.write_index(&mut state)?;
            drop(state);
            self.remove_orphans()?;
        }
        Ok(gone)
    }

    /// Removes data files that no record names.
    pub(super) fn remove_orphans(&self) -> Result<(), StoreError> {
        let state = self.lock();
        let SharedWriter { files, folder, .. } = &*self.shared;
        let orphans = recovery::orphans(&files.backend().list(folder)?, &state.records);
        let orphans: Vec<PathBuf> = orphans.into_iter().map(|file| data_folder(folder).join(file)).collect();
        files.remove_all(&orphans)
    }

    fn write_index(&self, state: &mut State) -> Result<(), StoreError> {
        let SharedWriter {
            files, recipe, folder, ..
        } = &*self.shared;
        let path = folder.join("index.json");
        let index = Index {
            version: RECORD_VERSION,
            recipe: *recipe,
            generation: state.generation,
            records: state.records.clone(),
        };
        files.replace_with(&path, |file| versioned_json::write_sealed_json(file, &index))?;
        failpoints::hit(failpoints::INDEX_WRITTEN, &[]);
        state.has_index = true;
        state.generation += 1;
        state.next_group = 0;
        state.grouped = 0;
        let superseded: Vec<PathBuf> = std::mem::take(&mut state.groups)
            .into_iter()
            .map(|name| records_folder(folder).join(name.file()))
            .collect();
        files.remove_all(&superseded)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is changed only after a group or an index is on the disk, so it is valid also after a panic.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the committed records and removes leftovers: temporary files, groups that are in the index, data files that no
/// record names.
fn recover(files: &Files, recipe: &Digest, folder: &Path) -> Result<State, StoreError> {
    let found = read_recipe_files(files, folder, recipe)?;
    let records = records_folder(folder);
    let data = data_folder(folder);
    let groups: Vec<GroupName> = found.groups.iter().map(|(name, _)| *name).collect();
    let indexed = found.index.as_ref().map(|index| index.generation);
    let generation = recovery::next_generation(indexed, groups.iter().copied());
    let stale = recovery::superseded_groups(indexed, &groups);
    for name in &stale {
        files.remove(&records.join(name.file()))?;
    }
    let is_left = |name: &GroupName| !stale.contains(name);
    let left = found.groups.iter().filter(|(name, _)| is_left(name));
    let grouped = left.map(|(_, group)| group.records.len()).sum();
    let all = recovery::merge(found.index, found.groups);
    let (standing, _) = recovery::complete_records(all, &found.data);
    // In object storage they are for garbage collection: each costs a request.
    if !files.are_objects() {
        for orphan in recovery::orphans(&found.data, &standing) {
            files.remove(&data.join(orphan))?;
        }
    }
    for (folder, listing) in [
        (&data, &found.data),
        (&records, &found.records),
        (&folder.to_path_buf(), &found.top),
    ] {
        for name in listing.keys().filter(|name| recovery::is_temporary(name)) {
            files.remove(&folder.join(name))?;
        }
    }
    let mut state = State {
        generation,
        next_group: 0,
        grouped,
        groups: groups.into_iter().filter(|name| !stale.contains(name)).collect(),
        has_index: indexed.is_some(),
        records: Vec::new(),
        places: BTreeMap::new(),
    };
    for record in standing {
        state.put(record);
    }
    Ok(state)
}

/// A port's name becomes part of a file name.
fn check_port_name(name: &str) -> Result<(), StoreError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        return Err(StoreError::Name {
            what: "a port",
            name: name.to_string(),
        });
    }
    Ok(())
}
