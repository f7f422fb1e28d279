//! Snapshots: which records make up a stage's artifact in a run.
//!
//! Two stages may have the same recipe (the same kind with the same settings, on other rows), and a partition may have
//! records under several keys. The records do not show which of them a stage used, so each run notes it:
//!
//! ```text
//! snapshots/<digest>.json       partitions with their keys; named by its content, never changed
//! runs/<id>/snapshots.jsonl     the snapshot of each stage: as it begins (what is reused), and when all of it stands
//! runs/<id>/committed.jsonl     what was committed since, of the stages that are not complete
//! ```

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::{Record, Records, Store, StoreError, atomic, versioned_json};
use flow_base::digest::Digest;
use flow_base::partition::Partition;

/// Version of snapshots, and of a run's list of them.
const SNAPSHOT_VERSION: u64 = 1;

/// Files in a run's folder.
const SNAPSHOTS: &str = "snapshots.jsonl";
const COMMITTED: &str = "committed.jsonl";

/// The snapshot of a stage in a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageSnapshot {
    /// The stage's name; parts of a global stage are `NAME:keys`, `NAME:decide` and `NAME:apply`.
    pub stage: String,
    /// The name of its kind.
    pub kind: String,
    pub recipe: Digest,
    /// False where not all partitions of the stage were committed, as the run ended before or is still going on.
    pub complete: bool,
    /// The key of the record of each partition.
    pub keys: BTreeMap<Partition, Digest>,
}

impl StageSnapshot {
    /// Those of `records` (of the snapshot's recipe) that the snapshot names, sorted by partition. Records whose data
    /// is missing are left out.
    pub fn among(&self, records: &Records) -> Vec<Arc<Record>> {
        self.keys
            .iter()
            .filter_map(|(partition, key)| records.get(partition, key).cloned())
            .collect()
    }
}

/// The snapshots of all stages of a run, up to the present state of the run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunSnapshots {
    /// In the order in which they were first noted.
    pub stages: Vec<StageSnapshot>,
}

impl RunSnapshots {
    pub fn of(&self, stage: &str) -> Option<&StageSnapshot> {
        self.stages.iter().find(|snapshot| snapshot.stage == stage)
    }
}

/// Partitions and keys: a file below `snapshots/`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    version: u64,
    recipe: Digest,
    keys: BTreeMap<Partition, Digest>,
}

impl versioned_json::Versioned for Listed {
    fn version(&self) -> u64 {
        self.version
    }
}

/// The first line of a run's list.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    version: u64,
    pipeline: PathBuf,
}

impl versioned_json::Versioned for Head {
    fn version(&self) -> u64 {
        self.version
    }
}

/// Another line. Of several lines of a stage the last one counts.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    stage: String,
    kind: String,
    recipe: Digest,
    complete: bool,
    snapshot: Digest,
}

/// Partitions of a stage that were committed together.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CommittedLine {
    stage: String,
    recipe: Digest,
    keys: BTreeMap<Partition, Digest>,
}

/// Writes the lists of a run. Cheap to clone; may be used from any thread.
#[derive(Clone)]
pub struct SnapshotWriter {
    store: Store,
    snapshots: Arc<Appended>,
    committed: Arc<Appended>,
}

/// A file of lines.
struct Appended {
    path: PathBuf,
    file: Mutex<File>,
}

impl Appended {
    fn open(path: PathBuf) -> Result<Self, StoreError> {
        match OpenOptions::new().create(true).append(true).open(&path) {
            Ok(file) => Ok(Appended {
                path,
                file: Mutex::new(file),
            }),
            Err(error) => Err(StoreError::io("write", &path, error)),
        }
    }

    fn change(&self, change: impl FnOnce(&mut File) -> std::io::Result<()>) -> Result<(), StoreError> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut file).map_err(|e| StoreError::io("write", &self.path, e))
    }

    fn append(&self, line: &impl Serialize) -> Result<(), StoreError> {
        let bytes = versioned_json::to_sealed_json(&self.path, line)?;
        self.change(|file| file.write_all(&bytes))
    }
}

impl SnapshotWriter {
    /// Notes the records of a stage: all of them, or (not `complete`) those that are reused, before the others are
    /// made.
    pub fn note<'a>(
        &self,
        stage: &str,
        kind: &str,
        recipe: &Digest,
        complete: bool,
        records: impl IntoIterator<Item = &'a Arc<Record>>,
    ) -> Result<(), StoreError> {
        let keys = keys_of(records);
        let digest = digest_of(recipe, &keys);
        let path = self.store.snapshot_file(&digest);
        if !has_checksum(&path)? {
            let listed = Listed {
                version: SNAPSHOT_VERSION,
                recipe: *recipe,
                keys,
            };
            let files = &self.store.inner.files;
            files.create_folder(&self.store.inner.dir.join("snapshots"))?;
            files.replace(&path, &versioned_json::to_sealed_json(&path, &listed)?)?;
        }
        self.snapshots.append(&Line {
            stage: stage.to_string(),
            kind: kind.to_string(),
            recipe: *recipe,
            complete,
            snapshot: digest,
        })
    }

    /// Notes partitions that were just committed. A power failure may lose these lines: no stage is complete by them.
    pub fn note_committed(&self, stage: &str, recipe: &Digest, records: &[Arc<Record>]) -> Result<(), StoreError> {
        self.committed.append(&CommittedLine {
            stage: stage.to_string(),
            recipe: *recipe,
            keys: keys_of(records),
        })
    }

    /// Flushes the list to the disk and empties `committed.jsonl`; called when every stage that was running is
    /// complete.
    pub fn flush(&self) -> Result<(), StoreError> {
        self.snapshots.change(|file| file.sync_data())?;
        self.committed.change(|file| file.set_len(0))
    }
}

fn keys_of<'a>(records: impl IntoIterator<Item = &'a Arc<Record>>) -> BTreeMap<Partition, Digest> {
    records
        .into_iter()
        .map(|record| (record.partition.clone(), record.key))
        .collect()
}

fn digest_of(recipe: &Digest, keys: &BTreeMap<Partition, Digest>) -> Digest {
    let keys = keys
        .iter()
        .flat_map(|(partition, key)| [partition.as_str().as_bytes(), key.as_bytes().as_slice()]);
    Digest::of_parts(std::iter::once(recipe.as_bytes().as_slice()).chain(keys))
}

impl Store {
    /// Begins the lists of a run; `pipeline` is the file of its pipeline.
    pub fn snapshot_writer(&self, run: &str, pipeline: &Path) -> Result<SnapshotWriter, StoreError> {
        let folder = self.run_folder(run)?;
        let writer = SnapshotWriter {
            store: self.clone(),
            snapshots: Arc::new(Appended::open(folder.join(SNAPSHOTS))?),
            committed: Arc::new(Appended::open(folder.join(COMMITTED))?),
        };
        writer.snapshots.append(&Head {
            version: SNAPSHOT_VERSION,
            pipeline: absolute(pipeline),
        })?;
        Ok(writer)
    }

    /// The snapshots of a run's stages; none for a run that noted nothing.
    ///
    /// # Errors
    /// If the notes are damaged or newer than this binary. A truncated last line is skipped.
    pub fn run_snapshots(&self, run: &str) -> Result<Option<RunSnapshots>, StoreError> {
        let folder = self.run_folder(run)?;
        // Read first: a run that is going on removes these lines once they are in the other file.
        let committed: Vec<CommittedLine> = read_lines(&folder.join(COMMITTED), &mut |_| true)?;
        let Some(noted) = read_noted(&folder.join(SNAPSHOTS), None)? else {
            return Ok(None);
        };
        let mut last: Vec<Line> = Vec::new();
        for line in noted.lines {
            match last.iter_mut().find(|known| known.stage == line.stage) {
                Some(known) => *known = line,
                None => last.push(line),
            }
        }
        let mut stages = Vec::with_capacity(last.len());
        for line in last {
            stages.push(StageSnapshot {
                keys: self.snapshot(&line.snapshot, &line.recipe)?,
                stage: line.stage,
                kind: line.kind,
                recipe: line.recipe,
                complete: line.complete,
            });
        }
        for line in committed {
            let known = stages.iter_mut().find(|known| known.stage == line.stage);
            if let Some(known) = known.filter(|known| !known.complete && known.recipe == line.recipe) {
                known.keys.extend(line.keys);
            }
        }
        Ok(Some(RunSnapshots { stages }))
    }

    /// The last complete snapshot of a stage in a run of the pipeline in the file `pipeline`. A run whose notes are damaged is
    /// skipped, and `skipped` is called with the reason: the snapshot of an earlier run counts.
    ///
    /// # Errors
    /// If a file cannot be read, or is newer than this binary.
    pub fn last_complete_snapshot(
        &self,
        pipeline: &Path,
        stage: &str,
        kind: &str,
        skipped: &mut dyn FnMut(&StoreError),
    ) -> Result<Option<StageSnapshot>, StoreError> {
        let pipeline = absolute(pipeline);
        for run in self.runs()?.iter().rev() {
            let noted = match read_noted(&self.run_folder(run)?.join(SNAPSHOTS), Some(&pipeline)) {
                Ok(Some(noted)) => noted,
                Ok(None) => continue,
                Err(error @ StoreError::Damaged { .. }) => {
                    skipped(&error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let last = noted.lines.into_iter().rfind(|line| line.stage == stage);
            // A run that did not complete the stage is skipped: the snapshot of an earlier run counts.
            if let Some(line) = last
                && line.complete
                && line.kind == kind
            {
                let keys = match self.snapshot(&line.snapshot, &line.recipe) {
                    Err(error @ StoreError::Damaged { .. }) => {
                        skipped(&error);
                        continue;
                    }
                    keys => keys?,
                };
                return Ok(Some(StageSnapshot {
                    keys,
                    stage: line.stage,
                    kind: line.kind,
                    recipe: line.recipe,
                    complete: true,
                }));
            }
        }
        Ok(None)
    }

    /// The file of the pipeline that a run was of, as an absolute path, and whether the run had all of some stage: no run
    /// about some partitions does. None for a run that noted nothing.
    pub fn run_pipeline(&self, run: &str) -> Result<Option<(PathBuf, bool)>, StoreError> {
        let noted = read_noted(&self.run_folder(run)?.join(SNAPSHOTS), None)?;
        Ok(noted.map(|Noted { pipeline, lines }| {
            let last: BTreeMap<&str, bool> = lines.iter().map(|line| (line.stage.as_str(), line.complete)).collect();
            let complete = last.values().any(|complete| *complete);
            (pipeline, complete)
        }))
    }

    /// The digests of the snapshots that a run's list names.
    pub(super) fn snapshots_of_run(&self, run: &str) -> Result<Vec<Digest>, StoreError> {
        let noted = read_noted(&self.run_folder(run)?.join(SNAPSHOTS), None)?;
        Ok(noted.map_or_else(Vec::new, |noted| noted.lines.iter().map(|line| line.snapshot).collect()))
    }

    /// The names of all files of snapshots.
    pub(super) fn snapshot_files(&self) -> Result<Vec<PathBuf>, StoreError> {
        let folder = self.inner.dir.join("snapshots");
        Ok(atomic::list(&folder)?.keys().map(|name| folder.join(name)).collect())
    }

    pub(super) fn snapshot_file(&self, digest: &Digest) -> PathBuf {
        self.inner
            .dir
            .join("snapshots")
            .join(format!("{}.json", digest.to_hex()))
    }

    fn snapshot(&self, digest: &Digest, recipe: &Digest) -> Result<BTreeMap<Partition, Digest>, StoreError> {
        let path = self.snapshot_file(digest);
        let Some(bytes) = atomic::read(&path)? else {
            // It was removed because it was damaged.
            return Err(StoreError::damaged(&path, "it does not exist"));
        };
        let listed: Listed = versioned_json::from_json(&path, &bytes, SNAPSHOT_VERSION)?;
        if listed.recipe != *recipe || digest_of(recipe, &listed.keys) != *digest {
            return Err(StoreError::damaged(&path, "it does not hold what its name says"));
        }
        Ok(listed.keys)
    }
}

/// Whether a file is there and whole.
fn has_checksum(path: &Path) -> Result<bool, StoreError> {
    let bytes = atomic::read(path)?.unwrap_or_default();
    Ok(matches!(versioned_json::checked(path, &bytes), Ok(Cow::Owned(_))))
}

struct Noted {
    pipeline: PathBuf,
    lines: Vec<Line>,
}

/// Reads a run's list of snapshots; none if there is none, or if it is of another pipeline than `only`.
fn read_noted(path: &Path, only: Option<&Path>) -> Result<Option<Noted>, StoreError> {
    let mut head: Option<Result<Head, StoreError>> = None;
    let mut is_wanted = |line: &[u8]| {
        let first = head.is_none();
        let head = head.get_or_insert_with(|| versioned_json::from_json(path, line, SNAPSHOT_VERSION));
        !first
            && head
                .as_ref()
                .is_ok_and(|head| only.is_none_or(|only| only == head.pipeline))
    };
    let lines = read_lines(path, &mut is_wanted)?;
    match head {
        None => Ok(None),
        Some(Err(error)) => Err(error),
        Some(Ok(head)) if only.is_some_and(|only| only != head.pipeline) => Ok(None),
        Some(Ok(Head { pipeline, .. })) => Ok(Some(Noted { pipeline, lines })),
    }
}

/// Parses the lines of a file that are wanted; none if it is not there.
fn read_lines<T: serde::de::DeserializeOwned>(
    path: &Path,
    is_wanted: &mut dyn FnMut(&[u8]) -> bool,
) -> Result<Vec<T>, StoreError> {
    let bytes = atomic::read(path)?.unwrap_or_default();
    // A line without its end is being written now, or was when the run was killed.
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    bytes[..whole]
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty() && is_wanted(line))
        .map(|line| {
            let line = versioned_json::checked(path, line)?;
            serde_json::from_slice(&line).map_err(|error| StoreError::damaged(path, error))
        })
        .collect()
}

/// The path without links and dots, or (where the file is not there) as an absolute one.
fn absolute(path: &Path) -> PathBuf {
    path.canonicalize()
        .or_else(|_| std::path::absolute(path))
        .unwrap_or_else(|_| path.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::super::record::RejectRecord;
    use super::super::{Access, Counts, PortRecords};
    use super::*;
    use flow_storage::Storage;

    fn record(partition: &str, key: u8) -> Arc<Record> {
        let Counts {
            rows_in,
            rows_out,
            read,
            merged,
        } = Counts::default();
        Arc::new(Record {
            partition: Partition::new(partition),
            key: Digest::of(&[key]),
            inputs: Vec::new(),
            ports: PortRecords::default(),
            rows_in,
            rows_out,
            read,
            merged,
            rejects: RejectRecord::none(),
        })
    }

    fn keys(snapshot: &StageSnapshot) -> Vec<(String, Digest)> {
        let named = |(partition, key): (&Partition, &Digest)| (partition.to_string(), *key);
        snapshot.keys.iter().map(named).collect()
    }

    #[test]
    fn a_run_tells_what_its_stages_had_however_far_it_came() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&Storage::default(), dir.path(), Access::Run { run_id: "x".into() }).unwrap();
        let recipe = Digest::of(b"recipe");
        let pipeline = dir.path().join("a.yaml");
        let begin = |run: &str, pipeline: &Path| {
            store.create_run_folder(run).unwrap();
            store.snapshot_writer(run, pipeline).unwrap()
        };
        let last = || {
            store
                .last_complete_snapshot(&pipeline, "clean", "sql", &mut |_| ())
                .unwrap()
        };
        assert_eq!(store.run_snapshots("1").unwrap(), None);

        let first = begin("1", &pipeline);
        first.note("clean", "sql", &recipe, false, [&record("a", 1)]).unwrap();
        first
            .note_committed("clean", &recipe, &[record("b", 1), record("a", 2)])
            .unwrap();
        let seen = store.run_snapshots("1").unwrap().unwrap();
        let clean = seen.of("clean").unwrap();
        assert_eq!(
            keys(clean),
            [("a".into(), Digest::of(&[2])), ("b".into(), Digest::of(&[1]))]
        );
        assert!(!clean.complete && last().is_none());
        first
            .note("clean", "sql", &recipe, true, [&record("a", 2), &record("b", 1)])
            .unwrap();
        // Lines of single commits are ignored once the stage is complete, also before they are removed.
        first.note_committed("clean", &recipe, &[record("c", 9)]).unwrap();
        assert_eq!(last().unwrap().keys.len(), 2);
        assert_eq!(
            store
                .run_snapshots("1")
                .unwrap()
                .unwrap()
                .of("clean")
                .unwrap()
                .keys
                .len(),
            2
        );
        first.flush().unwrap();

        // A run that was interrupted, one of another pipeline, and one in which a stage of another kind has the name.
        begin("2", &pipeline)
            .note("clean", "sql", &recipe, false, [&record("z", 1)])
            .unwrap();
        begin("3", &dir.path().join("b/a.yaml"))
            .note("clean", "sql", &recipe, true, [&record("z", 1)])
            .unwrap();
        begin("4", &pipeline)
            .note("clean", "other", &recipe, true, [&record("z", 1)])
            .unwrap();
        assert_eq!(keys(&last().unwrap()), keys(clean));
    }

    #[test]
    fn damaged_notes_of_one_run_leave_those_of_the_runs_before() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&Storage::default(), dir.path(), Access::Run { run_id: "x".into() }).unwrap();
        let (recipe, pipeline) = (Digest::of(b"recipe"), dir.path().join("a.yaml"));
        for run in ["1", "2"] {
            store.create_run_folder(run).unwrap();
            let writer = store.snapshot_writer(run, &pipeline).unwrap();
            writer.note("a", "sql", &recipe, true, [&record(run, 1)]).unwrap();
        }
        let last = || {
            let mut skipped = 0;
            let last = store.last_complete_snapshot(&pipeline, "a", "sql", &mut |_| skipped += 1);
            (keys(&last.unwrap().unwrap())[0].0.clone(), skipped)
        };
        assert_eq!(last(), ("2".to_string(), 0));
        let path = store.run_folder("2").unwrap().join(SNAPSHOTS);
        let mut bytes = std::fs::read(&path).unwrap();
        let digit = bytes.iter().rposition(|byte| *byte == b'"').unwrap() - 30;
        bytes[digit] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(last(), ("1".to_string(), 1));
        // A snapshot itself: the next run that has the same writes it again.
        let listed = store.snapshot_files().unwrap();
        for path in &listed {
            let mut bytes = std::fs::read(path).unwrap();
            bytes[20] ^= 1;
            std::fs::write(path, bytes).unwrap();
        }
        store.create_run_folder("3").unwrap();
        let writer = store.snapshot_writer("3", &pipeline).unwrap();
        writer.note("a", "sql", &recipe, true, [&record("2", 1)]).unwrap();
        assert_eq!(last(), ("2".to_string(), 0));
        // One that was removed counts as absent, too.
        listed.iter().for_each(|path| std::fs::remove_file(path).unwrap());
        let last = store.last_complete_snapshot(&pipeline, "a", "sql", &mut |_| ());
        assert!(last.unwrap().is_none());
    }

    #[test]
    fn a_line_cut_short_is_passed_over_and_a_damaged_file_named() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&Storage::default(), dir.path(), Access::Run { run_id: "x".into() }).unwrap();
        let recipe = Digest::of(b"recipe");
        let folder = store.create_run_folder("1").unwrap();
        let writer = store.snapshot_writer("1", Path::new("p.yaml")).unwrap();
        for stage in ["a", "b"] {
            writer.note(stage, "sql", &recipe, true, [&record(stage, 1)]).unwrap();
        }
        let path = folder.join(SNAPSHOTS);
        let whole = std::fs::read(&path).unwrap();
        for end in 0..=whole.len() {
            std::fs::write(&path, &whole[..end]).unwrap();
            let stages = store.run_snapshots("1").unwrap().map_or(0, |seen| seen.stages.len());
            let ends = whole[..end].iter().filter(|byte| **byte == b'\n').count();
            assert_eq!(stages, ends.saturating_sub(1), "{end}");
        }
        let newer =
            versioned_json::unsealed(std::str::from_utf8(&whole).unwrap()).replace("\"version\":1", "\"version\":2");
        std::fs::write(&path, newer).unwrap();
        assert!(matches!(
            store.run_snapshots("1"),
            Err(StoreError::Newer { found: 2, .. })
        ));
        std::fs::write(&path, &whole).unwrap();
        let listed = store.snapshot_files().unwrap().remove(0);
        let text = versioned_json::unsealed(&std::fs::read_to_string(&listed).unwrap());
        std::fs::write(&listed, text.replace("\"a\":", "\"c\":").replace("\"b\":", "\"c\":")).unwrap();
        let error = store.run_snapshots("1").unwrap_err();
        assert!(error.to_string().contains("snapshots/"), "{error}");
    }
}
