//! What must run and why: nodes, regions, recipes, keys, verdicts and reasons, as functions of what is known.
//!
//! Nothing here reads a file or a clock, waits or locks: `planner` reads what is needed, and gives it as a
//! `snapshot`.

mod cursor;
pub mod earlier;
pub mod failures;
pub mod graph;
pub mod keys;
pub mod node_state;
pub mod partitions;
mod reason;
pub mod run_error;
pub mod select;
pub mod show;
pub mod snapshot;
pub mod verdict;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use flow_base::digest::Digest;
use flow_base::partition::Partition;
use flow_base::switched_off::SwitchedOff;
use flow_kind::kind::Role;
pub use run_error::RunError;

/// The planned action for one partition of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    Run,
    /// Runs if upstream stages change its input.
    IfChanged,
    Reuse,
}

/// A plan: stages in the order of the pipeline, each with its regions' decisions.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    pub version: u32,
    pub pipeline: String,
    pub stages: Vec<StagePlan>,
    /// Stages that take no part, with the reason.
    #[serde(default)]
    pub switched_off: Vec<SwitchedOff>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StagePlan {
    /// The stage's name; parts of a global stage are `NAME:keys`, `NAME:decide` and `NAME:apply`.
    pub stage: String,
    pub kind: String,
    pub kind_version: u32,
    pub role: String,
    /// Regions run in this order.
    pub region: usize,
    pub recipe: Digest,
    /// The settings that are part of the recipe.
    pub identity: serde_json::Value,
    /// Names of the outputs that are kept as artifacts.
    pub stored: Vec<String>,
    /// False where `--from`, `--until`, `--only` or `--partition` leave the stage out.
    pub selected: bool,
    /// Why `--partition` leaves the stage out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_out: Option<String>,
    /// The stage is selected, or a selected one depends on it. Others are not part of the run and keep their results.
    #[serde(default = "used_by_default")]
    pub used: bool,
    pub run: u64,
    pub if_changed: u64,
    pub reuse: u64,
    /// The partitions are known only once a stage before has run.
    pub unknown_partitions: bool,
    /// How often each reason was given, commonest first.
    pub reasons: Vec<(Action, String, u64)>,
    /// In the plan that a run makes and keeps: those that are not reused.
    pub partitions: Vec<PartitionPlan>,
    /// Of a source: partitions that it had in the last run and that no longer exist.
    pub removed: Vec<Partition>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PartitionPlan {
    pub partition: Partition,
    pub action: Action,
    pub reason: Arc<str>,
}

/// Plans of earlier versions do not say.
fn used_by_default() -> bool {
    true
}

impl Plan {
    /// True when nothing would run, not even if something changed.
    pub fn is_empty(&self) -> bool {
        self.stages
            .iter()
            .all(|stage| stage.run == 0 && stage.if_changed == 0 && !stage.unknown_partitions)
    }
}

/// Version of `plan.json`.
pub const PLAN_VERSION: u32 = 2;

/// The name of a role in plans and messages.
pub fn role_name(role: Role) -> &'static str {
    match role {
        Role::Source => "source",
        Role::Local => "local",
        Role::Global => "global",
        Role::Log => "log",
        Role::Export => "export",
    }
}
