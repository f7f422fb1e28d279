//! Decisions of global stages that are made group by group, so that no process needs memory for the key rows of all
//! partitions: a sequence of MapReduce rounds. Every process maps its partitions to rows with hashes; rows go by hash to
//! reducers, each of which owns a range of the hashes; what a reducer says goes back to the partitions.
//!
//! There is a reducer for each process and pass: several processes hold their reducers at the same time, and a process whose
//! memory does not suffice has several, one after another. Reducers of a round are asked in the order of their ranges.

mod passes;
mod rounds;
mod shuffle;

use std::sync::Arc;

use arrow::array::{RecordBatch, UInt32Array};
use serde_json::Value;

use crate::context::Context;
use crate::error::StageError;
use crate::partition::Partition;
use crate::store::Artifact;

pub(crate) use passes::{Budget, fits_in_one_pass};
pub(crate) use rounds::{Decided, Task, run};
pub(crate) use shuffle::{Shuffle, Stopped};

/// What a partition gives to a round.
pub struct MappedRows {
    /// Of one schema in all partitions of the round.
    pub rows: RecordBatch,
    /// By row: rows with the same hash go to the same reducer. A reducer has a range of the hashes, so they should be
    /// spread evenly over all 64 bits.
    pub hashes: Vec<u64>,
    /// Decisions that follow from the partition alone, with the columns of [`decision_schema`]. Mapping a partition again
    /// gives the same.
    ///
    /// [`decision_schema`]: crate::Global::decision_schema
    pub decisions: Option<RecordBatch>,
}

/// Rows of several partitions on their way to a reducer.
pub struct ShuffledRows {
    /// By row, the place of its partition in the list of all partitions.
    pub partitions: UInt32Array,
    pub rows: RecordBatch,
}

impl ShuffledRows {
    /// The runs of rows of one partition each, with the partition's place. Copies nothing.
    pub fn by_partition(&self) -> impl Iterator<Item = (u32, RecordBatch)> + '_ {
        let mut first = 0;
        self.partitions.values().chunk_by(|a, b| a == b).map(move |run| {
            let rows = self.rows.slice(first, run.len());
            first += run.len();
            (run[0], rows)
        })
    }
}

/// Decides group by group. The same decisions as [`Global::decide`](crate::Global::decide), to the byte, whatever the number
/// of reducers.
pub trait GroupedDecision: Send + Sync {
    /// Number of rounds, at least 1.
    fn rounds(&self) -> usize;

    /// About how many bytes all reducers of a round hold together. `key_rows`: of all partitions; `replied`: rows that the
    /// reducers of the round before sent back.
    fn bytes(&self, round: usize, key_rows: u64, replied: u64) -> u64;

    /// What a partition of `keys` gives to a round. `replies`: what the reducers of the round before sent to it. Called on
    /// several threads, once for each pass.
    ///
    /// # Errors
    /// When key rows cannot be read, or nothing can be decided about them.
    fn map(
        &self,
        round: usize,
        partition: &Partition,
        keys: &Artifact,
        replies: &[RecordBatch],
    ) -> Result<MappedRows, StageError>;

    /// Makes a reducer of a round. `partitions` are all partitions, sorted by name.
    fn reducer(&self, round: usize, partitions: &Arc<[Partition]>) -> Box<dyn Reducer>;

    /// Whether the round may end here: the reducers that were not asked yet would say nothing and leave `carried` as it is.
    /// Where none was asked yet, no partition is mapped, and none makes decisions of its own in this round.
    fn is_done(&self, _round: usize, _carried: &Value) -> bool {
        false
    }

    /// Checks and reports what was decided; called once, in process 0.
    ///
    /// # Errors
    /// When the decisions must not stand.
    fn complete(
        &self,
        context: &Context,
        carried: &Value,
        decisions: &[(Partition, RecordBatch)],
    ) -> Result<(), StageError>;
}

/// Holds the rows of a range of hashes.
pub trait Reducer {
    /// Takes rows, in any order.
    ///
    /// # Errors
    /// When they have other columns, or are more than it can number.
    fn add(&mut self, rows: ShuffledRows) -> Result<(), StageError>;

    /// All rows are there. Does what does not depend on other reducers: those of all processes do it at the same time.
    ///
    /// # Errors
    /// As of [`Reducer::add`].
    fn sort(&mut self) -> Result<(), StageError> {
        Ok(())
    }

    /// What it says to partitions, by their places: replies, or decisions in the last round. `carried` goes from reducer to
    /// reducer in the order of their ranges, and on to the next round; it is null at first, and small.
    ///
    /// # Errors
    /// As of [`Reducer::add`].
    fn reduce(self: Box<Self>, carried: &mut Value) -> Result<Vec<(u32, RecordBatch)>, StageError>;
}
