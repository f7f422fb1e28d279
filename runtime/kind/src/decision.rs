//! How a global stage decides: a kind says how a row becomes a key, and what follows for rows with equal keys, as plain functions.
//! The runtime sorts, groups and spills.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{RecordBatch, StringArray};
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_store::Artifact;

use crate::context::Context;

/// How a stage decides.
#[derive(Clone)]
pub enum Decision {
    /// What is decided of a row follows from the rows that share its hash.
    Groups(Arc<dyn GroupDecision>),
    /// Of each class the first groups are chosen.
    Choice(Arc<dyn GroupChoice>),
}

impl Decision {
    /// Whether it can be made by what changed. Of tied rows one change may touch all groups.
    pub fn can_be_held(&self) -> bool {
        match self {
            Decision::Groups(_) => true,
            Decision::Choice(choice) => choice.ties() == 0,
        }
    }
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
