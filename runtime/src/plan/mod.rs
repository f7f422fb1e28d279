//! What must run and why: nodes, regions, recipes, keys.

mod cursor;
pub(crate) mod decide;
pub(crate) mod decisions;
mod earlier;
pub(crate) mod failures;
pub(crate) mod graph;
pub(crate) mod keys;
pub(crate) mod listing;
mod partitions;
pub(crate) mod reason;
pub(crate) mod select;
mod show;
pub(crate) mod state;

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::decision::StandingDecisions;
use crate::digest::Digest;
use crate::kind::Role;
use crate::partition::Partition;
use crate::processes::Processes;
use crate::switched_off::SwitchedOff;

/// Options of a plan or a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The state directory.
    pub state: PathBuf,
    /// Timely workers; none: one per core.
    pub workers: Option<usize>,
    /// The whole thread budget that workers share; none: one per core.
    pub threads: Option<usize>,
    /// Run this stage and all that follow it.
    pub from: Option<String>,
    /// Run this stage and all that it needs.
    pub until: Option<String>,
    /// Run only these stages, on existing artifacts.
    pub only: Vec<String>,
    /// Run these stages even where a record exists; `all` for every stage.
    pub force: Vec<String>,
    /// Work only on these partitions of the sources: names, or patterns of names (see [`crate::glob`]). Empty for all.
    /// Stages that need all partitions are left out. Not together with `from` or `only`.
    pub partitions: Vec<String>,
    /// Continue after a failure with everything that does not depend on it (see [`crate::run::run`]).
    pub keep_going: bool,
    /// Allow exports to replace sets by ones with far fewer rows.
    pub allow_shrink: bool,
    /// Take SIGINT, SIGTERM, SIGHUP and SIGUSR1 (a program does, a test does not).
    pub signals: bool,
    /// Partitions in flight at most; none: four times the workers, at least 16, and of steps that feed a log twice the
    /// workers, at least 4.
    pub in_flight: Option<usize>,
    /// Bytes in flight at most (the two oldest partitions are read whatever their size); none: an eighth of the memory that
    /// is available, and for what does not feed a log no more than 256 MiB for each worker.
    pub in_flight_bytes: Option<u64>,
    /// Bytes of key rows that are held at most while a global stage decides: more are sorted on disk. None: half of the memory
    /// that is available, shared by the processes of the run on one machine.
    pub decide_bytes: Option<u64>,
    /// Of a process that stays alive over many runs: what its global stages decide by changes.
    pub standing: Option<Arc<StandingDecisions>>,
    /// Send batches between workers as Arrow IPC instead of by pointer, as between processes. For tests.
    pub as_bytes: bool,
    /// The other processes of the run, where this is process 0 of several.
    pub processes: Option<Arc<Processes>>,
}

impl Options {
    pub fn new(state: impl Into<PathBuf>) -> Self {
        Options {
            state: state.into(),
            workers: None,
            threads: None,
            from: None,
            until: None,
            only: Vec::new(),
            force: Vec::new(),
            partitions: Vec::new(),
            keep_going: false,
            allow_shrink: false,
            signals: false,
            in_flight: None,
            in_flight_bytes: None,
            decide_bytes: None,
            standing: None,
            as_bytes: false,
            processes: None,
        }
    }
}

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

    /// True when something runs for certain.
    pub fn would_run(&self) -> bool {
        self.stages.iter().any(|stage| stage.run > 0)
    }
}

/// Version of `plan.json`.
pub const PLAN_VERSION: u32 = 2;

/// The name of a role in plans and messages.
pub(crate) fn role_name(role: Role) -> &'static str {
    match role {
        Role::Source => "source",
        Role::Local => "local",
        Role::Global => "global",
        Role::Log => "log",
        Role::Export => "export",
    }
}
