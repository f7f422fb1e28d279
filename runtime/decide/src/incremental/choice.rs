//! The choice of groups in the order of their keys, class by class.
//!
//! A hierarchy over the keys keeps a change from looking at all groups of a class. Level n has the keys whose first half has n
//! leading zeros: half of all keys are of level 0, a quarter of level 1, and so on. Levels of a class are opened from the smallest
//! keys on, until the class has what its quota allows; rows of other levels are in arrangements, and nothing is computed of
//! them. Levels of a class that has grown are closed again once it needs far fewer of its rows.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use differential_dataflow::input::{Input, InputSession};
use differential_dataflow::trace::implementations::{ValBuilder, ValSpine};
use rayon::prelude::*;
use timely::dataflow::operators::probe::Handle;
use timely::worker::Worker;

use super::partition_versions::{Changes, PartitionVersions};
use crate::{ChoiceRows, Decided, GroupChoice};
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_store::Artifact;

/// Partitions that are taken in at a time: it bounds the rows that are sorted at once.
const PARTITIONS_AT_ONCE: usize = 64;
/// Levels of keys.
const LEVELS: u32 = u64::BITS + 1;
/// Rows that the levels have at least, on average, which are opened first for each row that is chosen.
const FIRST_LEVELS: u64 = 2;
/// Levels that are open beyond those that would be opened first, before they are closed: with so many a class looks at four
/// times as many rows.
const SPARE_LEVELS: u32 = 2;

type Diff = i32;
/// The number of a class.
type Class = u32;
/// Key of a group.
type Key = (u64, u64);
/// A row: the version of its partition, and its number there.
type Row = (u32, u32);
/// A row beside the first half of its key: the second half, its class, the row.
type KeyedRow = (u64, Class, Row);

/// What a class is given, in the order in which it looks at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
enum Given {
    Quota(u64),
    Group { key: Key, rows: u64 },
}

/// What a class says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
enum Said {
    Chosen(Key),
    /// It would take more groups.
    Misses,
}

/// The names of classes, by number.
type Names = Rc<RefCell<Vec<Arc<str>>>>;

/// Changes that a dataflow tells.
type Told<T> = Rc<RefCell<Vec<(T, Diff)>>>;

pub(super) struct Choice {
    rows: InputSession<u32, (u64, KeyedRow), Diff>,
    quotas: InputSession<u32, (Class, u64), Diff>,
    open: InputSession<u32, (Class, u32), Diff>,
    time: u32,
    passed: Handle<u32>,
    chosen_changes: Told<(Class, Row)>,
    misses_changes: Told<Class>,
    versions: PartitionVersions,
    held: Option<Artifact>,
    names: Names,
    numbers: HashMap<Arc<str>, Class>,
    classes: Vec<OfClass>,
    /// By version: numbers of the rows that are chosen.
    chosen: HashMap<u32, BTreeMap<u32, Diff>>,
}

/// What is known of a class.
#[derive(Default)]
struct OfClass {
    rows: u64,
    quota: Option<u64>,
    chosen: i64,
    misses: Diff,
    /// The levels from this one on are open.
    open_from: u32,
    /// Its rows when it last needed more levels than those that were opened first.
    needed_more: u64,
}

impl Choice {
    pub fn new(worker: &mut Worker) -> Choice {
        let names = Names::default();
        let (chosen_changes, misses_changes) = (Told::default(), Told::default());
        let passed = Handle::new();
        let (rows, quotas, open) = worker.dataflow::<u32, _, _>(|scope| {
            let (rows_input, rows) = scope.new_collection::<(u64, KeyedRow), Diff>();
            let (quotas_input, quotas) = scope.new_collection::<(Class, u64), Diff>();
            let (open_input, open) = scope.new_collection::<(Class, u32), Diff>();
            let open = open.map(|level| (level, ())).arrange_by_key();
            // First halves of keys that a class looks at; a group has rows of other classes, too.
            let looked_at = rows
                .clone()
                .map(|(first, (_, class, _))| ((class, level_of(first)), first))
                .arrange_by_key()
                .join_core(open.clone(), |_, first, ()| Some((*first, ())))
                .reduce(|_, _, output: &mut Vec<((), Diff)>| output.push(((), 1)))
                .arrange_by_key();
            let rows = rows
                .arrange_by_key()
                .join_core(looked_at, |first, (second, class, row), ()| Some(((*first, *second), (*class, *row))))
                .arrange_by_key();
            let names_of = Rc::clone(&names);
            let groups = rows
                .clone()
                .reduce_abelian::<_, ValBuilder<Key, (Class, u64), u32, Diff>, ValSpine<Key, (Class, u64), u32, Diff>, _, _>(
                    "groups",
                    move |_, rows, output| {
                        let names = names_of.borrow();
                        let classes = rows.iter().map(|((class, _), _)| *class);
                        let home = classes.min_by(|a, b| names[*a as usize].cmp(&names[*b as usize]));
                        let count = rows.iter().map(|(_, diff)| u64::from(diff.unsigned_abs())).sum();
                        output.extend(home.map(|home| ((home, count), 1)));
                    },
                    |updates, key, groups| {
                        updates.clear();
                        updates.extend(groups.drain(..).map(|(group, time, diff)| ((*key, group), time, diff)));
                    },
                )
                .as_collection(|key, (home, rows)| ((*home, level_of(key.0)), (*key, *rows)))
                .arrange_by_key()
                .join_core(open, |(home, _), (key, rows), ()| {
                    Some((*home, Given::Group { key: *key, rows: *rows }))
                });
            let said = quotas
                .map(|(class, quota)| (class, Given::Quota(quota)))
                .concat(groups)
                .reduce(|_, given, output| choose(given.iter().map(|(given, _)| **given), output));
            let told = Rc::clone(&misses_changes);
            said.clone()
                .filter(|(_, said)| *said == Said::Misses)
                .inspect(move |((class, _), _, diff)| told.borrow_mut().push((*class, *diff)))
                .probe_with(&passed);
            let told = Rc::clone(&chosen_changes);
            said.flat_map(|(_, said)| match said {
                Said::Chosen(key) => Some((key, ())),
                Said::Misses => None,
            })
            .arrange_by_key()
            .join_core(rows, |_, (), (class, row)| Some((*class, *row)))
            .inspect(move |(row, _, diff)| told.borrow_mut().push((*row, *diff)))
            .probe_with(&passed);
            (rows_input, quotas_input, open_input)
        });
        Choice {
            rows,
            quotas,
            open,
            time: 0,
            passed,
            chosen_changes,
            misses_changes,
            versions: PartitionVersions::default(),
            held: None,
            names,
            numbers: HashMap::new(),
            classes: Vec::new(),
            chosen: HashMap::new(),
        }
    }

    fn advance(&mut self, worker: &mut Worker) -> Result<(), StageError> {
        let next = self.time.checked_add(1);
        self.time = next.ok_or_else(|| StageError::failed("more generations than fit in 32 bits"))?;
        self.rows.advance_to(self.time);
        self.rows.flush();
        self.quotas.advance_to(self.time);
        self.quotas.flush();
        self.open.advance_to(self.time);
        self.open.flush();
        while self.passed.less_than(&self.time) {
            worker.step();
        }
        Ok(())
    }

    /// Takes over the key rows, and gives the decisions about them.
    pub fn decide(
        &mut self,
        worker: &mut Worker,
        decision: &dyn GroupChoice,
        keys: &Artifact,
    ) -> Result<Decided, StageError> {
        let Changes { gone, new, changed } = self.versions.advance_in_place(keys)?;
        let held = self.held.replace(keys.clone());
        if !(gone.is_empty() && changed.is_empty()) {
            let held = held.ok_or_else(|| StageError::failed("key rows that change were never held"))?;
            for some in gone.chunks(PARTITIONS_AT_ONCE) {
                for ((version, _), rows) in some.iter().zip(read(decision, some, &held)?) {
                    self.update(*version, Some(&rows), None)?;
                }
            }
            for some in changed.chunks(PARTITIONS_AT_ONCE) {
                let before = read(decision, some, &held)?;
                let now = read(decision, some, keys)?;
                for ((version, _), (before, now)) in some.iter().zip(before.iter().zip(&now)) {
                    self.update(*version, Some(before), Some(now))?;
                }
            }
        }
        for some in new.chunks(PARTITIONS_AT_ONCE) {
            for ((version, _), rows) in some.iter().zip(read(decision, some, keys)?) {
                self.update(*version, None, Some(&rows))?;
            }
            if new.len() > PARTITIONS_AT_ONCE {
                self.advance(worker)?;
            }
        }
        for (class, of) in (0..).zip(&mut self.classes) {
            let quota = decision.quota(of.rows);
            if of.quota != Some(quota) {
                if let Some(before) = of.quota.replace(quota) {
                    self.quotas.update((class, before), -1);
                }
                self.quotas.update((class, quota), 1);
            }
        }
        self.close_some();
        loop {
            self.advance(worker)?;
            self.take_told();
            if !self.open_more() {
                break;
            }
        }
        self.decided(decision, &gone)
    }

    /// Puts rows of a partition in place of those that it had before: what is the same stays.
    fn update(
        &mut self,
        version: u32,
        before: Option<&ChoiceRows>,
        now: Option<&ChoiceRows>,
    ) -> Result<(), StageError> {
        let before = before.map_or(Ok(Vec::new()), |rows| self.numbered(rows))?;
        let now = now.map_or(Ok(Vec::new()), |rows| self.numbered(rows))?;
        let (mut before, mut now) = (before.into_iter().peekable(), now.into_iter().peekable());
        loop {
            let (row, diff) = match (before.peek(), now.peek()) {
                (Some(old), Some(new)) if old == new => {
                    before.next();
                    now.next();
                    continue;
                }
                (Some(old), Some(new)) if old > new => (now.next(), 1),
                (Some(_), _) => (before.next(), -1),
                (None, _) => (now.next(), 1),
            };
            let Some((number, key, class)) = row else {
                return Ok(());
            };
            self.rows.update((key.0, (key.1, class, (version, number))), diff);
            let of = &mut self.classes[class as usize]; // `number` made it.
            of.rows = of.rows.saturating_add_signed(diff.into());
        }
    }

    /// The rows by their numbers, with the numbers of their classes.
    fn numbered(&mut self, rows: &ChoiceRows) -> Result<Vec<(u32, Key, Class)>, StageError> {
        let counts = [rows.classes.len(), rows.numbers.len()];
        if counts != [rows.keys.len(); 2] {
            return Err(StageError::failed(format!(
                "it gave {} keys, {} classes and {} numbers of rows",
                rows.keys.len(),
                counts[0],
                counts[1]
            )));
        }
        let mut classes: Vec<Class> = Vec::with_capacity(rows.names.len());
        for name in &rows.names {
            classes.push(self.number(name)?);
        }
        let mut numbered = Vec::with_capacity(rows.keys.len());
        for ((key, class), number) in rows.keys.iter().zip(&rows.classes).zip(&rows.numbers) {
            let class = classes.get(*class as usize).copied();
            let class = class.ok_or_else(|| StageError::failed("a row has a class without a name"))?;
            numbered.push((*number, *key, class));
        }
        // They mostly are.
        numbered.sort_unstable();
        Ok(numbered)
    }

    fn number(&mut self, name: &str) -> Result<Class, StageError> {
        if let Some(number) = self.numbers.get(name) {
            return Ok(*number);
        }
        let number = Class::try_from(self.classes.len());
        let number = number.map_err(|_| StageError::failed("more classes than fit in 32 bits"))?;
        let name: Arc<str> = name.into();
        self.numbers.insert(Arc::clone(&name), number);
        self.names.borrow_mut().push(name);
        self.classes.push(OfClass {
            open_from: LEVELS,
            ..OfClass::default()
        });
        Ok(number)
    }

    fn take_told(&mut self) {
        for (class, diff) in self.misses_changes.borrow_mut().drain(..) {
            self.classes[class as usize].misses += diff;
        }
        for ((class, (version, number)), diff) in self.chosen_changes.borrow_mut().drain(..) {
            self.classes[class as usize].chosen += i64::from(diff);
            *self.chosen.entry(version).or_default().entry(number).or_default() += diff;
        }
    }

    /// Closes levels of classes that need far fewer of their rows than they look at: levels that they opened when they had fewer.
    fn close_some(&mut self) {
        for (class, of) in (0..).zip(&mut self.classes) {
            let first = first_level(of.quota.unwrap_or(0), of.rows);
            // Some classes need more than others, as they have large groups: these try it again when they have twice as many rows.
            let needs_them = of.misses > 0 || of.rows < of.needed_more.saturating_mul(2);
            if needs_them || of.open_from.saturating_add(SPARE_LEVELS) > first {
                continue;
            }
            for level in of.open_from..first {
                self.open.update((class, level), -1);
            }
            of.open_from = first;
        }
    }

    /// Opens levels of classes that would take more groups; says whether there were any.
    fn open_more(&mut self) -> bool {
        let mut opened = false;
        for (class, of) in (0..).zip(&mut self.classes) {
            if of.misses <= 0 || of.open_from == 0 {
                continue;
            }
            let from = match of.open_from {
                LEVELS => first_level(of.quota.unwrap_or(0), of.rows),
                from => from - 1,
            };
            if of.open_from < LEVELS {
                of.needed_more = of.rows;
            }
            for level in from..of.open_from {
                self.open.update((class, level), 1);
            }
            of.open_from = from;
            opened = true;
        }
        opened
    }

    fn decided(&mut self, decision: &dyn GroupChoice, gone: &[(u32, Partition)]) -> Result<Decided, StageError> {
        for (version, _) in gone {
            self.chosen.remove(version);
        }
        let mut decisions = Vec::new();
        for (partition, version) in self.versions.all() {
            let Some(numbers) = self.chosen.get_mut(&version) else {
                continue;
            };
            numbers.retain(|_, diff| *diff > 0);
            if !numbers.is_empty() {
                decisions.push((
                    partition.clone(),
                    decision.decisions(numbers.keys().copied().collect())?,
                ));
            }
        }
        let names = self.names.borrow();
        let counts = names.iter().zip(&self.classes).filter(|(_, of)| of.rows > 0);
        let counts = counts.map(|(name, of)| (name.to_string(), (of.rows, of.chosen.unsigned_abs())));
        Ok(Decided {
            decisions,
            classes: counts.collect(),
        })
    }
}

/// The rows of some partitions.
fn read(
    decision: &dyn GroupChoice,
    partitions: &[(u32, Partition)],
    keys: &Artifact,
) -> Result<Vec<ChoiceRows>, StageError> {
    let read = partitions
        .par_iter()
        .map(|(_, partition)| decision.rows(partition, keys));
    read.collect()
}

/// The level of a key with this first half.
fn level_of(first: u64) -> u32 {
    first.leading_zeros()
}

/// The level from which on there are probably enough rows for the quota.
fn first_level(quota: u64, rows: u64) -> u32 {
    // Level n and those above it have a share of 2^-n of the rows.
    let wanted = quota.saturating_mul(FIRST_LEVELS).max(1);
    (rows / wanted).checked_ilog2().unwrap_or(0).min(LEVELS - 1)
}

/// What is chosen of what a class is given, in its order: the quota comes first.
fn choose(given: impl Iterator<Item = Given>, output: &mut Vec<(Said, Diff)>) {
    let mut missing = 0;
    for given in given {
        match given {
            Given::Quota(quota) => missing = quota,
            Given::Group { key, rows } if rows <= missing => {
                output.push((Said::Chosen(key), 1));
                missing -= rows;
            }
            Given::Group { .. } => {}
        }
        if missing == 0 {
            break;
        }
    }
    if missing > 0 {
        output.push((Said::Misses, 1));
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, AsArray, RecordBatch, UInt32Array, UInt64Array};
    use arrow::datatypes::UInt64Type;

    use super::*;
    use flow_base::row_number::ROW;
    use flow_kind::context::Context;

    /// Chooses a tenth of the rows, three at most. Each is a group of its own, by the column `key`.
    struct FewRows;

    impl GroupChoice for FewRows {
        fn rows(&self, partition: &Partition, keys: &Artifact) -> Result<ChoiceRows, StageError> {
            let rows = keys.read_whole(partition, None)?;
            let keys = rows.column(0).as_primitive::<UInt64Type>().values();
            Ok(ChoiceRows {
                keys: keys.iter().map(|key| (*key, 0)).collect(),
                classes: vec![0; keys.len()],
                names: vec!["only".into()],
                numbers: (0u32..).zip(keys).map(|(number, _)| number).collect(),
                ties: Vec::new(),
            })
        }

        fn quota(&self, rows: u64) -> u64 {
            (rows / 10).min(3)
        }

        fn decisions(&self, chosen: Vec<u32>) -> Result<RecordBatch, StageError> {
            let numbers: ArrayRef = Arc::new(UInt32Array::from(chosen));
            Ok(RecordBatch::try_from_iter([(ROW, numbers)])?)
        }

        fn complete(&self, _: &Context, _: &BTreeMap<String, (u64, u64)>) -> Result<(), StageError> {
            Ok(())
        }
    }

    fn keys_of(number: u64) -> Vec<u64> {
        let count = if number == 0 { 12 } else { 500 };
        let key = |row: u64| (number * 1_000 + row + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (0..count).map(key).collect()
    }

    /// Partitions from 0 on, the first of which is small.
    fn artifact(partitions: u64) -> Artifact {
        let partition = |number: u64| {
            let keys: ArrayRef = Arc::new(UInt64Array::from(keys_of(number)));
            let rows = RecordBatch::try_from_iter([("key", keys)]).unwrap();
            (Partition::new(format!("p{number:02}")), vec![rows])
        };
        let all: Vec<_> = (0..partitions).map(partition).collect();
        Artifact::in_memory(all[0].1[0].schema(), all).unwrap()
    }

    /// The chosen keys.
    fn chosen(decided: &Decided) -> Vec<u64> {
        let mut keys = Vec::new();
        for (partition, rows) in &decided.decisions {
            let of_partition = keys_of(partition.as_str()[1..].parse().unwrap());
            let numbers = rows.column(0).as_primitive::<arrow::datatypes::UInt32Type>();
            keys.extend(numbers.values().iter().map(|row| of_partition[*row as usize]));
        }
        keys.sort_unstable();
        keys
    }

    /// A class that began small looked at all of its rows; when it has grown, and becomes small again, it looks at few, and chooses
    /// what it would of all.
    #[test]
    fn levels_that_a_class_needs_no_more_are_closed() {
        timely::execute_directly(|worker| {
            let mut choice = Choice::new(worker);
            let mut looked_at = Vec::new();
            for partitions in [1, 2, 3, 20, 21, 22, 1, 12] {
                let decided = choice.decide(worker, &FewRows, &artifact(partitions)).unwrap();
                let mut all: Vec<u64> = (0..partitions).flat_map(keys_of).collect();
                all.sort_unstable();
                all.truncate(FewRows.quota(all.len() as u64) as usize);
                assert_eq!(chosen(&decided), all, "of {partitions} partitions");
                looked_at.push(choice.classes[0].open_from);
            }
            let [first, .., grown, shrunk, _] = looked_at[..] else {
                panic!("{looked_at:?}")
            };
            assert!(first <= 3 && grown >= 8 && shrunk <= 3, "{looked_at:?}");
        });
    }
}
