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
pub mod stored;

use std::collections::BTreeMap;
use std::path::PathBuf;

use arrow::array::RecordBatch;
use rayon::prelude::*;

use flow_base::available_memory::available_memory;
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_kind::context::Context;
use flow_kind::{ChoiceRows, Decision, GroupChoice, GroupDecision, GroupKey, GroupRows};
use flow_processes::Processes;
use flow_store::Artifact;

pub use incremental::StandingDecisions;
pub use incremental::{decide_generations, has_room_for};

/// What was decided.
pub struct Decided {
    /// Several batches of a partition are possible.
    pub decisions: Vec<(Partition, RecordBatch)>,
    /// Of a choice: rows in all and rows that were chosen, by class.
    pub classes: BTreeMap<String, (u64, u64)>,
}

impl Decided {
    /// Has the kind check and report what was decided.
    ///
    /// # Errors
    /// Those of the kind.
    pub fn complete(&self, decision: &Decision, context: &Context) -> Result<(), StageError> {
        match decision {
            Decision::Groups(groups) => groups.complete(context, &self.decisions),
            Decision::Choice(choice) => choice.complete(context, &self.classes),
        }
    }
}

/// What a decision may use.
pub struct Resources {
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
pub enum Ended {
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
pub fn decide(decision: &Decision, keys: &Artifact, resources: &Resources) -> Result<Decided, Ended> {
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
