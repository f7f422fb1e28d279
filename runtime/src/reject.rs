//! Rows that a stage refused. A row never vanishes: it goes on, or it becomes one of these.

use serde::{Deserialize, Serialize};

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

/// One refused row, or (with `row` empty) one refused partition.
#[derive(Clone, Debug, PartialEq)]
pub struct Reject {
    /// `_row` of the refused row; none when the whole partition was refused.
    pub row: Option<u32>,
    pub segment_id: Option<String>,
    /// A name in snake case, such as `quality_too_low`.
    pub reason: String,
    pub class: RejectClass,
    /// What a person needs to understand this one case; may be empty.
    pub detail: String,
    /// The row's values as a JSON object; empty for a partition.
    pub values: String,
}
