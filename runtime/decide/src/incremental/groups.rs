//! Groups of rows that share a hash. The dataflow says which rows are in groups of two or more; these, which are few, are held
//! whole, and the groups that a generation touches are decided about anew.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::rc::Rc;

use arrow::array::{BooleanArray, RecordBatch, UInt32Array};
use arrow::compute::{concat_batches, filter_record_batch, take_record_batch};
use differential_dataflow::input::{Input, InputSession};
use differential_dataflow::trace::implementations::{ValBuilder, ValSpine};
use rayon::prelude::*;
use timely::dataflow::operators::probe::Handle;
use timely::worker::Worker;

use super::partition_versions::PartitionVersions;
use crate::groups::rows_of;
use crate::{Decided, GroupDecision, GroupRows};
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_base::row_number::{ROW, row_numbers};
use flow_store::Artifact;

/// Partitions that are taken in at a time: it bounds the rows that are sorted at once.
const PARTITIONS_AT_ONCE: usize = 64;

/// A row: the version of its partition, and its place there.
type Row = (u32, u32);
type Diff = i32;

/// Key rows of a partition that are in groups of two or more (or were).
struct Whole {
    /// Ascending.
    places: Vec<u32>,
    rows: RecordBatch,
}

/// Rows by hash, and whether they came (1) or left (-1).
type Changes = Rc<RefCell<Vec<((u64, Row), Diff)>>>;

pub(super) struct Groups {
    rows: InputSession<u32, (u64, Row), Diff>,
    time: u32,
    passed: Handle<u32>,
    /// Rows that came into groups of two or more, or left them.
    changes: Changes,
    versions: PartitionVersions,
    /// The key rows of the last generation.
    held: Option<Artifact>,
    /// Groups of two or more.
    groups: HashMap<u64, BTreeSet<Row>>,
    /// By version of a partition: the places of its rows in them.
    in_groups: HashMap<u32, BTreeSet<u32>>,
    whole: HashMap<u32, Whole>,
    /// By version: what follows from the partition alone, and what from its groups.
    alone: HashMap<u32, RecordBatch>,
    decided: HashMap<u32, RecordBatch>,
}

impl Groups {
    pub fn new(worker: &mut Worker) -> Groups {
        let changes = Rc::new(RefCell::new(Vec::new()));
        let seen = Rc::clone(&changes);
        let passed = Handle::new();
        let rows = worker.dataflow::<u32, _, _>(|scope| {
            let (input, rows) = scope.new_collection::<(u64, Row), Diff>();
            rows.arrange_by_key()
                .reduce_abelian::<_, ValBuilder<u64, Row, u32, Diff>, ValSpine<u64, Row, u32, Diff>, _, _>(
                    "two or more",
                    |_, rows, output| {
                        if rows.len() > 1 {
                            output.extend(rows.iter().map(|(row, _)| (**row, 1)));
                        }
                    },
                    |updates, hash, rows| {
                        updates.clear();
                        updates.extend(rows.drain(..).map(|(row, time, diff)| ((*hash, row), time, diff)));
                    },
                )
                .as_collection(|hash, row| (*hash, *row))
                .inspect(move |(row, _, diff)| seen.borrow_mut().push((*row, *diff)))
                .probe_with(&passed);
            input
        });
        Groups {
            rows,
            time: 0,
            passed,
            changes,
            versions: PartitionVersions::default(),
            held: None,
            groups: HashMap::new(),
            in_groups: HashMap::new(),
            whole: HashMap::new(),
            alone: HashMap::new(),
            decided: HashMap::new(),
        }
    }

    fn advance(&mut self, worker: &mut Worker) -> Result<(), StageError> {
        let next = self.time.checked_add(1);
        self.time = next.ok_or_else(|| StageError::failed("more generations than fit in 32 bits"))?;
        self.rows.advance_to(self.time);
        self.rows.flush();
        while self.passed.less_than(&self.time) {
            worker.step();
        }
        Ok(())
    }

    /// Takes over the key rows, and gives the decisions about them.
    pub fn decide(
        &mut self,
        worker: &mut Worker,
        decision: &dyn GroupDecision,
        keys: &Artifact,
    ) -> Result<Decided, StageError> {
        let changes = self.versions.advance(keys)?;
        if let (Some(held), false) = (self.held.take(), changes.gone.is_empty()) {
            for (version, partition) in &changes.gone {
                let GroupRows { hashes, places, .. } = rows_of(decision, partition, &held)?;
                for (hash, place) in hashes.into_iter().zip(places) {
                    self.rows.update((hash, (*version, place)), -1);
                }
                self.whole.remove(version);
                self.in_groups.remove(version);
                self.alone.remove(version);
                self.decided.remove(version);
            }
        }
        self.held = Some(keys.clone());
        for some in changes.new.chunks(PARTITIONS_AT_ONCE) {
            let read = some.par_iter().map(|(_, partition)| rows_of(decision, partition, keys));
            let read: Vec<GroupRows> = read.collect::<Result<_, _>>()?;
            for ((version, _), rows) in some.iter().zip(read) {
                for (hash, place) in rows.hashes.into_iter().zip(rows.places) {
                    self.rows.update((hash, (*version, place)), 1);
                }
                if let Some(decisions) = rows.decisions {
                    self.alone.insert(*version, decisions);
                }
            }
            self.advance(worker)?;
        }
        if changes.new.is_empty() {
            self.advance(worker)?;
        }
        self.decide_touched(decision, keys)?;
        let mut decisions = Vec::new();
        for (partition, version) in self.versions.all() {
            let both = [self.alone.get(&version), self.decided.get(&version)];
            let both = both.into_iter().flatten().filter(|batch| batch.num_rows() > 0);
            decisions.extend(both.map(|batch| (partition.clone(), batch.clone())));
        }
        Ok(Decided {
            decisions,
            classes: BTreeMap::new(),
        })
    }

    /// Decides about the groups that changed.
    fn decide_touched(&mut self, decision: &dyn GroupDecision, keys: &Artifact) -> Result<(), StageError> {
        let mut net: HashMap<(u64, Row), Diff> = HashMap::new();
        for (row, diff) in self.changes.borrow_mut().drain(..) {
            *net.entry(row).or_default() += diff;
        }
        let mut touched: HashSet<u64> = HashSet::new();
        // Rows about which something may have been decided before, by version.
        let mut touched_rows: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        let mut more: HashSet<u32> = HashSet::new();
        for ((hash, row), diff) in net.into_iter().filter(|(_, diff)| *diff != 0) {
            touched.insert(hash);
            let (version, place) = row;
            if diff > 0 {
                self.groups.entry(hash).or_default().insert(row);
                self.in_groups.entry(version).or_default().insert(place);
                more.insert(version);
            } else {
                if let Some(rows) = self.groups.get_mut(&hash) {
                    rows.remove(&row);
                }
                if let Some(places) = self.in_groups.get_mut(&version) {
                    places.remove(&place);
                }
            }
            touched_rows.entry(version).or_default().insert(place);
        }
        self.load_whole(decision, keys, more, &touched_rows)?;
        let mut rows_now: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for hash in &touched {
            match self.groups.get(hash) {
                Some(rows) if !rows.is_empty() => {
                    for (version, place) in rows {
                        rows_now.entry(*version).or_default().insert(*place);
                        touched_rows.entry(*version).or_default().insert(*place);
                    }
                }
                _ => drop(self.groups.remove(hash)),
            }
        }
        let rows_now: Vec<(u32, BTreeSet<u32>)> = rows_now.into_iter().collect();
        let (whole, versions, before) = (&self.whole, &self.versions, &self.decided);
        let given = rows_now.par_iter().map(|(version, places)| {
            let Some(name) = versions.name(*version) else {
                return Ok(None);
            };
            Ok(Some((name.clone(), vec![rows_at(whole, *version, places)?])))
        });
        let given: Vec<Option<_>> = given.collect::<Result<_, StageError>>()?;
        let given: Vec<(Partition, Vec<RecordBatch>)> = given.into_iter().flatten().collect();
        let mut new: HashMap<u32, RecordBatch> = HashMap::new();
        for (partition, decisions) in decision.decide(&given)? {
            if let (Some(version), true) = (versions.version(&partition), decisions.num_rows() > 0) {
                new.insert(version, decisions);
            }
        }
        let touched: Vec<(u32, BTreeSet<u32>)> = touched_rows
            .into_iter()
            .filter(|(version, _)| versions.name(*version).is_some())
            .collect();
        let decided = touched.par_iter().map(|(version, places)| {
            let before = match before.get(version) {
                Some(before) => Some(without_rows(before, &rows_at(whole, *version, places)?)?),
                None => None,
            };
            let both: Vec<&RecordBatch> = before.iter().chain(new.get(version)).collect();
            match both.first() {
                Some(first) => Ok(Some(concat_batches(first.schema_ref(), both.iter().copied())?)),
                None => Ok(None),
            }
        });
        let decided: Vec<Option<RecordBatch>> = decided.collect::<Result<_, StageError>>()?;
        for ((version, _), decided) in touched.iter().zip(decided) {
            match decided.filter(|decided| decided.num_rows() > 0) {
                Some(decided) => drop(self.decided.insert(*version, decided)),
                None => drop(self.decided.remove(version)),
            }
        }
        Ok(())
    }

    /// Reads key rows of these versions that are held as hashes only so far.
    fn load_whole(
        &mut self,
        decision: &dyn GroupDecision,
        keys: &Artifact,
        versions: HashSet<u32>,
        touched: &BTreeMap<u32, BTreeSet<u32>>,
    ) -> Result<(), StageError> {
        let versions: Vec<(u32, &Partition, Vec<u32>)> = versions
            .into_iter()
            .filter_map(|version| {
                let places = self.in_groups.get(&version)?.union(touched.get(&version)?);
                let places: Vec<u32> = places.copied().collect();
                Some((version, self.versions.name(version)?, places))
            })
            .collect();
        let read = versions.into_par_iter().map(|(version, partition, places)| {
            let rows = decision.whole(partition, keys, &places)?;
            if rows.num_rows() != places.len() {
                return Err(StageError::failed(format!(
                    "{partition} has other key rows than before"
                )));
            }
            Ok((version, Whole { places, rows }))
        });
        let read: Vec<(u32, Whole)> = read.collect::<Result<_, _>>()?;
        self.whole.extend(read);
        Ok(())
    }
}

/// The key rows of a version at these places, which are held whole.
fn rows_at(whole: &HashMap<u32, Whole>, version: u32, places: &BTreeSet<u32>) -> Result<RecordBatch, StageError> {
    let lacks = || StageError::failed("a row of a group is not held");
    let whole = whole.get(&version).ok_or_else(lacks)?;
    let at = |place: &u32| {
        whole
            .places
            .binary_search(place)
            .ok()
            .and_then(|at| u32::try_from(at).ok())
    };
    let at: Option<Vec<u32>> = places.iter().map(at).collect();
    Ok(take_record_batch(
        &whole.rows,
        &UInt32Array::from(at.ok_or_else(lacks)?),
    )?)
}

/// The decisions but those about these key rows.
fn without_rows(decisions: &RecordBatch, rows: &RecordBatch) -> Result<RecordBatch, StageError> {
    let numbers = |batch: &RecordBatch| -> Result<UInt32Array, StageError> {
        let column = batch.column_by_name(ROW);
        let column = column.ok_or_else(|| StageError::failed(format!("there is no column `{ROW}`")))?;
        Ok(row_numbers(column)?.clone())
    };
    let gone: HashSet<u32> = numbers(rows)?.values().iter().copied().collect();
    let stays: BooleanArray = numbers(decisions)?
        .values()
        .iter()
        .map(|row| Some(!gone.contains(row)))
        .collect();
    Ok(filter_record_batch(decisions, &stays)?)
}
