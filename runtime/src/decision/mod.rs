//! How a global stage decides. A kind says how a row becomes a key and what follows for rows with equal keys, as plain functions;
//! the runtime executes them in two ways:
//!
//! - over all key rows ([`decide`]): keys are sorted in bounded memory, and groups come in their order;
//! - over what changed since the last run, in a process that stays alive ([`StandingDecisions`]).

mod choice;
mod components;
mod external_sort;
mod groups;
mod incremental;
pub(crate) mod stored;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{RecordBatch, StringArray};
use rayon::prelude::*;

use crate::available_memory::available_memory;
use crate::context::Context;
use crate::error::StageError;
use crate::partition::Partition;
use crate::processes::Processes;
use crate::store::Artifact;

pub use incremental::StandingDecisions;
pub(crate) use incremental::{decide_generations, has_room_for};

/// How a stage decides.
#[derive(Clone)]
pub enum Decision {
    /// What is decided of a row follows from the rows that share its hash.
    Groups(Arc<dyn GroupDecision>),
    /// Of each class the first groups are chosen.
    Choice(Arc<dyn GroupChoice>),
}

/// Rows of a partition that are in groups.
pub struct GroupRows {
    /// By row: the hash of its group.
    pub hashes: Vec<u64>,
    /// By row: its place among the key rows of the partition, ascending.
    pub places: Vec<u32>,
    /// Decisions that follow from the partition alone, about other rows, with the columns of
    /// [`decision_schema`](crate::Global::decision_schema).
    pub decisions: Option<RecordBatch>,
}

/// Decides about groups of rows that share a hash. Of a row that is alone nothing is decided.
pub trait GroupDecision: Send + Sync {
    /// The rows of a partition of `keys` that are in groups. The same each time. All columns of the key rows of all partitions
    /// may not fit in memory, but these are held: read only the columns that are needed.
    ///
    /// # Errors
    /// When key rows cannot be read, or nothing can be decided about them.
    fn rows(&self, partition: &Partition, keys: &Artifact) -> Result<GroupRows, StageError>;

    /// The key rows at these places, as [`GroupDecision::decide`] takes them; `_row` among their columns.
    ///
    /// # Errors
    /// When they cannot be read.
    fn whole(&self, partition: &Partition, keys: &Artifact, places: &[u32]) -> Result<RecordBatch, StageError>;

    /// Decisions about some groups, of which all rows are given, by partition.
    ///
    /// # Errors
    /// When nothing can be decided about them.
    fn decide(&self, rows: &[(Partition, Vec<RecordBatch>)]) -> Result<Vec<(Partition, RecordBatch)>, StageError>;

    /// Checks and reports what was decided.
    ///
    /// # Errors
    /// When the decisions must not stand.
    fn complete(&self, context: &Context, decisions: &[(Partition, RecordBatch)]) -> Result<(), StageError>;
}

/// 128 bits. Groups are visited in this order.
pub type GroupKey = (u64, u64);

/// Rows of a partition among which is chosen: all of its rows.
pub struct ChoiceRows {
    /// By row: the key of its group, whose first half is spread evenly over all 64 bits.
    pub keys: Vec<GroupKey>,
    /// By row: the place of its class in `names`.
    pub classes: Vec<u32>,
    /// Each class that a row has, once.
    pub names: Vec<String>,
    /// By row: its `_row`.
    pub numbers: Vec<u32>,
    /// For each of [`GroupChoice::ties`], by row: rows that share one are in one group, too, whatever their keys; null ties
    /// nothing.
    pub ties: Vec<Vec<Option<GroupKey>>>,
}

/// Chooses whole groups of rows. A group belongs to the smallest class of its rows, by name. The groups of a class are
/// visited in the order of their keys, and each is taken that has no more rows than the class still misses to its quota.
///
/// Rows with equal keys are one group. With ties groups are the connected components of rows that share their key or a tie, and the
/// key of a group is that of the smallest name of its rows.
pub trait GroupChoice: Send + Sync {
    /// The rows of a partition of `keys`. The same each time.
    ///
    /// # Errors
    /// When key rows cannot be read, or nothing can be decided about them.
    fn rows(&self, partition: &Partition, keys: &Artifact) -> Result<ChoiceRows, StageError>;

    /// How many kinds of ties there are.
    fn ties(&self) -> usize {
        0
    }

    /// The names of the rows of a partition, from which their keys come. Asked where there are ties.
    ///
    /// # Errors
    /// When key rows cannot be read.
    fn names(&self, _partition: &Partition, _keys: &Artifact) -> Result<StringArray, StageError> {
        Err(StageError::failed("its rows have no names"))
    }

    /// The key of a row with this name.
    fn key_of(&self, _name: &str) -> GroupKey {
        GroupKey::default()
    }

    /// The rows that may be chosen of a class that has so many.
    fn quota(&self, rows: u64) -> u64;

    /// The decisions about a partition of which these rows (`_row`, ascending) were chosen.
    ///
    /// # Errors
    /// When they are no record batch.
    fn decisions(&self, chosen: Vec<u32>) -> Result<RecordBatch, StageError>;

    /// Checks and reports what was decided. `classes`: rows in all and rows that were chosen, by name.
    ///
    /// # Errors
    /// When the decisions must not stand.
    fn complete(&self, context: &Context, classes: &BTreeMap<String, (u64, u64)>) -> Result<(), StageError>;
}

/// What was decided.
pub(crate) struct Decided {
    /// Several batches of a partition are possible.
    pub decisions: Vec<(Partition, RecordBatch)>,
    /// Of a choice: rows in all and rows that were chosen, by class.
    pub classes: BTreeMap<String, (u64, u64)>,
}

impl Decision {
    pub(crate) fn complete(&self, context: &Context, decided: &Decided) -> Result<(), StageError> {
        match self {
            Decision::Groups(groups) => groups.complete(context, &decided.decisions),
            Decision::Choice(choice) => choice.complete(context, &decided.classes),
        }
    }

    /// Whether it can be made by what changed. Of tied rows one change may touch all groups.
    pub(crate) fn can_be_held(&self) -> bool {
        match self {
            Decision::Groups(_) => true,
            Decision::Choice(choice) => choice.ties() == 0,
        }
    }
}

/// What a decision may use.
pub(crate) struct Resources {
    /// Bytes for key rows. Beside them a choice with ties takes 4 bytes a row, and decisions are held.
    pub memory: u64,
    /// Folder for what does not fit.
    pub scratch: PathBuf,
    /// The signal that asks the run to end.
    pub stop: Box<dyn Fn() -> Option<i32> + Sync>,
}

impl Resources {
    /// `given` bytes, or half of the memory that is available, shared with the other processes of the run on this machine.
    pub fn memory(given: Option<u64>, processes: Option<&Processes>) -> u64 {
        let here = processes.map_or(1, |processes| {
            let peers = processes.peers();
            let own = peers.get(processes.process()).map(|peer| &peer.host);
            peers.iter().filter(|peer| Some(&peer.host) == own).count().max(1)
        });
        let available = || available_memory().map_or(u64::MAX, |available| available / 2 / here as u64);
        given.unwrap_or_else(available)
    }

    fn go_on(&self) -> Result<(), Ended> {
        match (self.stop)() {
            Some(signal) => Err(Ended::Signal(signal)),
            None => Ok(()),
        }
    }
}

/// Why a decision was not made.
#[derive(Debug)]
pub(crate) enum Ended {
    Stage(StageError),
    Signal(i32),
}

impl From<StageError> for Ended {
    fn from(error: StageError) -> Self {
        Ended::Stage(error)
    }
}

/// Decides over all key rows. A panic of the kind's functions is the caller's.
///
/// # Errors
/// When the stage cannot decide, or is to end.
pub(crate) fn decide(decision: &Decision, keys: &Artifact, resources: &Resources) -> Result<Decided, Ended> {
    if u32::try_from(keys.partitions().len()).is_err() {
        return Err(StageError::failed("more partitions than fit in 32 bits").into());
    }
    match decision {
        Decision::Groups(groups) => groups::decide(groups.as_ref(), keys, resources),
        Decision::Choice(choice) => choice::decide(choice.as_ref(), keys, resources),
    }
}

/// Reads partitions on all cores, some at a time, and takes what was read in their order. With each goes its place.
fn for_each_partition<T: Send>(
    keys: &Artifact,
    resources: &Resources,
    read: impl Fn(u32, &Partition) -> Result<T, StageError> + Sync,
    mut take: impl FnMut(u32, T) -> Result<(), StageError>,
) -> Result<(), Ended> {
    /// Partitions that are read at a time, and rows of them.
    const SOME_PARTITIONS: usize = 256;
    const SOME_ROWS: u64 = 1 << 20;
    let all: Vec<(u32, &Partition)> = (0..).zip(keys.partitions()).collect();
    let mut rest = all.as_slice();
    while !rest.is_empty() {
        resources.go_on()?;
        let mut rows = 0u64;
        let fit = rest.iter().take(SOME_PARTITIONS).take_while(|(_, partition)| {
            rows = rows.saturating_add(keys.rows_of(partition).unwrap_or_default());
            rows <= SOME_ROWS
        });
        let (some, after) = rest.split_at(fit.count().max(1));
        let read = some.par_iter().map(|(place, partition)| read(*place, partition));
        let read: Vec<T> = read.collect::<Result<_, StageError>>()?;
        for ((place, _), read) in some.iter().zip(read) {
            take(*place, read)?;
        }
        rest = after;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_given_counts_with_and_without_other_processes() {
        assert_eq!(Resources::memory(Some(7), None), 7);
        // Others take and give memory meanwhile.
        let own = Resources::memory(None, None);
        assert!(available_memory().is_none_or(|available| own <= available.saturating_mul(2)));
        assert!(own > 0);
    }
}
