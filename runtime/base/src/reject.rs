//! Rows that a stage refused. A row never vanishes: it goes on, or it becomes one of these.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use crate::partition::Partition;

pub mod packed;

pub use crate::row_json::rejects as of_rows;

/// Why a row was refused, in kind: a filter said no, or something is broken.
///
/// Only `Fault` counts towards `max_rejects`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RejectClass {
    Rule,
    Fault,
}

impl RejectClass {
    pub fn as_str(self) -> &'static str {
        match self {
            RejectClass::Rule => "rule",
            RejectClass::Fault => "fault",
        }
    }
}

/// The reason of what is refused because a file cannot be read. Once the file can be, it is made again: a stage that
/// refuses rows of its input for this reason runs again each time.
pub const UNREADABLE: &str = "unreadable_file";

/// The reason of what is refused because its files changed while they were read. The next run reads them again.
pub const CHANGED: &str = "changed_while_read";

/// The column that names a row where a binary says nothing else.
pub const ID_COLUMN: &str = "id";

/// One refused row, or (with `row` empty) one refused partition.
#[derive(Clone, Debug, PartialEq)]
pub struct Reject {
    /// `_row` of the refused row; none when the whole partition was refused.
    pub row: Option<u32>,
    /// What names the row: its value in the column that the kinds of the run name by, where it has one.
    pub id: Option<String>,
    /// A name in snake case, such as `quality_too_low`.
    pub reason: String,
    pub class: RejectClass,
    /// What a person needs to understand this one case; may be empty.
    pub detail: String,
    /// The row's values as a JSON object; empty for a partition.
    pub values: String,
}

impl Reject {
    /// Where it is from, in words: the partition, and the row and what names it where they are known.
    pub fn place(&self, partition: &Partition) -> String {
        let mut place = partition.as_str().to_string();
        if let Some(row) = self.row {
            place.push_str(&format!(", row {row}"));
        }
        if let Some(id) = &self.id {
            place.push_str(&format!(" ({id})"));
        }
        place
    }

    /// The detail, cut after so many letters.
    pub fn short_detail(&self, letters: usize) -> String {
        match self.detail.char_indices().nth(letters) {
            Some((end, _)) => format!("{}...", &self.detail[..end]),
            None => self.detail.clone(),
        }
    }

    /// The one order that does not depend on how a run went: by row (a refused partition first), then by what they say.
    pub fn compare(&self, other: &Reject) -> Ordering {
        let key = |reject: &Reject| (reject.row, reject.class);
        key(self)
            .cmp(&key(other))
            .then_with(|| self.id.cmp(&other.id))
            .then_with(|| self.reason.cmp(&other.reason))
            .then_with(|| self.detail.cmp(&other.detail))
            .then_with(|| self.values.cmp(&other.values))
    }
}

/// How many rows were refused for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReasonCount {
    pub reason: String,
    pub class: RejectClass,
    pub rows: u64,
}
