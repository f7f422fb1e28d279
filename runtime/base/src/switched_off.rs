//! Stages that take no part in a run.

use serde::{Deserialize, Serialize};

/// A stage that does not take part in a run: its `when` does not hold, or an input that it needs comes from one like that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwitchedOff {
    /// With its groups.
    pub stage: String,
    /// The name of its kind.
    pub uses: String,
    /// In words.
    pub reason: String,
    /// The stage that it cannot do without and that is switched off itself, with its groups; none: its own `when` or that of
    /// its group does not hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// Its place among all stages of the pipeline, producers first.
    pub position: usize,
    /// The stages that it would read, with their groups.
    pub from: Vec<String>,
}
