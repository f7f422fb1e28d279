//! The rounds of a grouped decision, as each of the processes goes through them.

use std::sync::Arc;

use arrow::array::{RecordBatch, UInt32Array};
use arrow::compute::{concat_batches, take_record_batch};
use rayon::prelude::*;
use serde_json::Value;

use super::passes::Pass;
use super::shuffle::{Shuffle, Stopped};
use super::{GroupedDecision, MappedRows, ShuffledRows};
use crate::error::StageError;
use crate::failpoints;
use crate::panic_guard::catch_panic;
use crate::partition::Partition;
use crate::store::Artifact;

/// Partitions that are mapped at a time, and rows of them.
const SOME_PARTITIONS: usize = 256;
const SOME_ROWS: u64 = 1 << 18;

/// What is to be decided.
pub(crate) struct Task<'a> {
    pub grouped: &'a dyn GroupedDecision,
    /// Key rows, of the process's own partitions at least: those whose place modulo the number of processes is its number.
    pub keys: &'a Artifact,
    /// All partitions, sorted by name.
    pub partitions: &'a Arc<[Partition]>,
    pub shuffle: &'a Shuffle,
    /// Passes of a round, by its number and the rows that the reducers of the round before replied. Asked in process 0.
    pub passes: &'a dyn Fn(usize, u64) -> u64,
}

/// What was decided, at process 0.
pub(crate) struct Decided {
    /// What the last reducer left.
    pub carried: Value,
    /// In no order; several batches of a partition are possible.
    pub decisions: Vec<(Partition, RecordBatch)>,
}

/// Goes through all rounds. None at processes other than 0.
///
/// # Errors
/// Where this or another process cannot go on; the others are told.
pub(crate) fn run(task: &Task) -> Result<Option<Decided>, Stopped> {
    let mut decision = Decision::new(task);
    let done = decision.all_rounds();
    if let Err(why) = &done {
        task.shuffle.leave(why);
    }
    done
}

struct Decision<'a> {
    task: &'a Task<'a>,
    /// Places of this process's partitions.
    own: Vec<u32>,
    /// By own partition, what it was replied in the round before.
    replies: Vec<Vec<RecordBatch>>,
    /// Made by this process, by place of their partition.
    decisions: Vec<(u32, RecordBatch)>,
    /// At process 0 between passes; at any process while its reducer has it.
    carried: Value,
}

impl<'a> Decision<'a> {
    fn new(task: &'a Task<'a>) -> Self {
        let shuffle = task.shuffle;
        let own: Vec<u32> = (0u32..)
            .zip(task.partitions.iter())
            .map(|(place, _)| place)
            .skip(shuffle.process())
            .step_by(shuffle.processes())
            .collect();
        Decision {
            task,
            replies: vec![Vec::new(); own.len()],
            own,
            decisions: Vec::new(),
            carried: Value::Null,
        }
    }

    fn all_rounds(&mut self) -> Result<Option<Decided>, Stopped> {
        let shuffle = self.task.shuffle;
        let rounds = self.task.grouped.rounds();
        for round in 0..rounds {
            let last = round + 1 == rounds;
            let replied: usize = self.replies.iter().flatten().map(RecordBatch::num_rows).sum();
            let passes = (self.task.passes)(round, (replied as u64).saturating_mul(shuffle.processes() as u64));
            let mut next = vec![Vec::new(); self.own.len()];
            for number in 0.. {
                let Some(pass) = self.begin_pass(round, number, passes)? else {
                    break;
                };
                let said = self.pass(round, pass)?;
                if last {
                    self.decisions.extend(said);
                } else {
                    self.reply(said, &mut next)?;
                }
                // Leaves process 0 with what the last reducer of the pass left.
                if shuffle.processes() > 1 && shuffle.process() == 0 {
                    self.carried = shuffle.receive_carried()?;
                }
            }
            self.replies = next;
        }
        self.gather()
    }

    /// The next pass, on which process 0 decides; none at the end of the round.
    fn begin_pass(&self, round: usize, number: u64, passes: u64) -> Result<Option<Pass>, Stopped> {
        let shuffle = self.task.shuffle;
        if shuffle.process() > 0 {
            return shuffle.receive_pass();
        }
        let goes_on = number < passes && !self.task.grouped.is_done(round, &self.carried);
        let pass = goes_on.then_some(Pass { number, passes });
        shuffle.send_pass(pass);
        Ok(pass)
    }

    /// Maps the own partitions and reduces the own range: what the reducer says.
    fn pass(&mut self, round: usize, pass: Pass) -> Result<Vec<(u32, RecordBatch)>, Stopped> {
        let (grouped, shuffle) = (self.task.grouped, self.task.shuffle);
        let mut reducer = grouped.reducer(round, self.task.partitions);
        let mut phase = shuffle.phase();
        let known = self.task.partitions.len();
        let processes = shuffle.processes();
        let mut add = |from: usize, rows: ShuffledRows| {
            check_places(rows.partitions.values(), known)?;
            // A process maps its own partitions.
            check_owner(rows.partitions.values(), processes, from)?;
            catch_panic(|| reducer.add(rows))
        };
        let mut first = 0;
        while first < self.own.len() {
            shuffle.check()?;
            let count = self.some_from(first);
            let mapped = self.map(round, first..first + count)?;
            if pass.number == 0 {
                let places = self.own.iter().skip(first);
                let decisions = places.zip(&mapped).filter_map(|(place, mapped)| {
                    let decisions = mapped.decisions.clone()?;
                    Some((*place, decisions))
                });
                self.decisions.extend(decisions);
            }
            for (to, rows) in divided(&self.own[first..first + count], &mapped, pass, shuffle.processes())? {
                match to == shuffle.process() {
                    true => add(to, rows)?,
                    false => shuffle.send_rows(to, &rows, &mut phase, &mut add)?,
                }
            }
            drop(mapped);
            // What others sent meanwhile need not wait in two forms.
            shuffle.take_some(&mut phase, &mut add)?;
            first += count;
            failpoints::hit(failpoints::ROWS_SHUFFLED, &[]);
        }
        shuffle.end_rows();
        shuffle.take_all(&mut phase, &mut add)?;
        catch_panic(|| reducer.sort())?;
        if shuffle.process() > 0 {
            self.carried = shuffle.receive_carried()?;
        }
        let carried = &mut self.carried;
        let said = catch_panic(|| reducer.reduce(carried))?;
        check_places(said.iter().map(|(place, _)| place), known)?;
        if shuffle.processes() > 1 {
            shuffle.send_carried((shuffle.process() + 1) % shuffle.processes(), &self.carried);
        }
        failpoints::hit(failpoints::ROWS_REDUCED, &[]);
        Ok(said)
    }

    /// How many of the own partitions from `first` on are mapped at a time.
    fn some_from(&self, first: usize) -> usize {
        let mut rows = 0u64;
        let fit = self.own[first..].iter().take(SOME_PARTITIONS).take_while(|place| {
            let partition = &self.task.partitions[**place as usize];
            rows = rows.saturating_add(self.task.keys.rows_of(partition).unwrap_or_default());
            rows <= SOME_ROWS
        });
        fit.count().max(1)
    }

    fn map(&self, round: usize, own: std::ops::Range<usize>) -> Result<Vec<MappedRows>, StageError> {
        let Task {
            grouped,
            keys,
            partitions,
            ..
        } = *self.task;
        let places = self.own[own.clone()].par_iter().zip(&self.replies[own]);
        places
            .map(|(place, replies)| {
                let partition = &partitions[*place as usize];
                let mapped = catch_panic(|| grouped.map(round, partition, keys, replies))?;
                match mapped.hashes.len() == mapped.rows.num_rows() {
                    true => Ok(mapped),
                    false => Err(StageError::failed(format!(
                        "it gave {} hashes for {} rows of {partition}",
                        mapped.hashes.len(),
                        mapped.rows.num_rows()
                    ))),
                }
            })
            .collect()
    }

    /// Sends what the own reducer said to the processes of the partitions, and takes what is for the own ones.
    fn reply(&self, said: Vec<(u32, RecordBatch)>, next: &mut [Vec<RecordBatch>]) -> Result<(), Stopped> {
        let shuffle = self.task.shuffle;
        let processes = shuffle.processes();
        let mut phase = shuffle.phase();
        let known = self.task.partitions.len();
        let own = shuffle.process();
        let mut take = |_: usize, rows: ShuffledRows| {
            check_places(rows.partitions.values(), known)?;
            check_owner(rows.partitions.values(), processes, own)?;
            for (place, rows) in rows.by_partition() {
                if let Some(replies) = next.get_mut(place as usize / processes) {
                    replies.push(rows);
                }
            }
            Ok(())
        };
        let mut by_process: Vec<Vec<(u32, RecordBatch)>> = (0..processes).map(|_| Vec::new()).collect();
        for (place, rows) in said {
            by_process[place as usize % processes].push((place, rows));
        }
        for (to, said) in by_process.into_iter().enumerate() {
            for rows in joined(said)? {
                match to == own {
                    true => take(to, rows)?,
                    false => shuffle.send_rows(to, &rows, &mut phase, &mut take)?,
                }
            }
        }
        shuffle.end_rows();
        shuffle.take_all(&mut phase, &mut take)
    }

    /// Brings the decisions of all processes to process 0.
    fn gather(&mut self) -> Result<Option<Decided>, Stopped> {
        let shuffle = self.task.shuffle;
        let decisions = std::mem::take(&mut self.decisions);
        if shuffle.process() > 0 {
            let mut phase = shuffle.phase_of_sending();
            for rows in joined(decisions)? {
                shuffle.send_rows(0, &rows, &mut phase, &mut |_, _| Ok(()))?;
            }
            shuffle.end_rows_for(0);
            return Ok(None);
        }
        let partitions = self.task.partitions;
        let named = |(place, rows): (u32, RecordBatch)| {
            let partition = partitions.get(place as usize).cloned();
            Ok((partition.ok_or_else(|| no_partition(place))?, rows))
        };
        let mut all: Vec<(Partition, RecordBatch)> =
            decisions.into_iter().map(named).collect::<Result<_, StageError>>()?;
        let mut phase = shuffle.phase();
        shuffle.take_all(&mut phase, &mut |_, rows| {
            for one in rows.by_partition() {
                all.push(named(one)?);
            }
            Ok(())
        })?;
        Ok(Some(Decided {
            carried: std::mem::take(&mut self.carried),
            decisions: all,
        }))
    }
}

fn no_partition(place: u32) -> StageError {
    StageError::failed(format!("there is no partition {place}: a fault of the stage"))
}

fn check_places<'a>(places: impl IntoIterator<Item = &'a u32>, partitions: usize) -> Result<(), StageError> {
    let mut places = places.into_iter();
    match places.find(|place| **place as usize >= partitions) {
        Some(place) => Err(no_partition(*place)),
        None => Ok(()),
    }
}

/// That partitions are those of a process: their places modulo the number of processes are its number.
fn check_owner<'a>(
    places: impl IntoIterator<Item = &'a u32>,
    processes: usize,
    owner: usize,
) -> Result<(), StageError> {
    let mut places = places.into_iter();
    match places.find(|place| **place as usize % processes != owner) {
        Some(place) => Err(StageError::failed(format!(
            "rows of partition {place} came from, or for, process {owner}, which does not have it: a fault of the runtime"
        ))),
        None => Ok(()),
    }
}

/// The rows of partitions, by the process whose reducer they go to in a pass. `places` are those of the partitions.
fn divided(
    places: &[u32],
    mapped: &[MappedRows],
    pass: Pass,
    processes: usize,
) -> Result<Vec<(usize, ShuffledRows)>, StageError> {
    let given: Vec<(u32, RecordBatch)> = places
        .iter()
        .zip(mapped)
        .map(|(place, mapped)| (*place, mapped.rows.clone()))
        .collect();
    let hashes = mapped.iter().flat_map(|mapped| &mapped.hashes);
    let mut rows_of: Vec<Vec<u32>> = vec![Vec::new(); processes];
    for (row, hash) in (0u32..).zip(hashes) {
        if let Some(process) = pass.process_of(*hash, processes) {
            rows_of[process].push(row);
        }
    }
    let Some(all) = concatenated(given)? else {
        return Ok(Vec::new());
    };
    let mut divided = Vec::new();
    for (process, rows) in rows_of.into_iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
        let partitions = rows.iter().map(|row| all.partitions.value(*row as usize)).collect();
        let rows = take_record_batch(&all.rows, &UInt32Array::from(rows))?;
        divided.push((process, ShuffledRows { partitions, rows }));
    }
    Ok(divided)
}

/// Rows of partitions, in few batches of a size that can be sent.
fn joined(given: Vec<(u32, RecordBatch)>) -> Result<Vec<ShuffledRows>, StageError> {
    let mut joined = Vec::new();
    let (mut some, mut rows) = (Vec::new(), 0);
    for (place, batch) in given {
        rows += batch.num_rows() as u64;
        some.push((place, batch));
        if rows >= SOME_ROWS {
            joined.extend(concatenated(std::mem::take(&mut some))?);
            rows = 0;
        }
    }
    joined.extend(concatenated(some)?);
    Ok(joined)
}

/// Rows of partitions as one batch; none where there are no rows.
fn concatenated(mut given: Vec<(u32, RecordBatch)>) -> Result<Option<ShuffledRows>, StageError> {
    given.retain(|(_, rows)| rows.num_rows() > 0);
    let Some((_, first)) = given.first() else {
        return Ok(None);
    };
    let rows = concat_batches(&first.schema(), given.iter().map(|(_, rows)| rows))?;
    let places = given
        .iter()
        .flat_map(|(place, rows)| std::iter::repeat_n(*place, rows.num_rows()));
    Ok(Some(ShuffledRows {
        partitions: UInt32Array::from_iter_values(places),
        rows,
    }))
}
