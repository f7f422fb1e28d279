//! Options of a plan or a run.

use std::path::PathBuf;
use std::sync::Arc;

use flow_decide::StandingDecisions;
use flow_kind::context::RunLabels;
use flow_plan::select::Selection;
use flow_processes::Processes;
use flow_storage::Storage;

/// Options of a plan or a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The state directory.
    pub state: PathBuf,
    /// Object storage: of the state directory, and of all that stages read and write.
    pub storage: Storage,
    /// What the run is called, and a note of it, for people.
    pub name: Option<String>,
    pub note: Option<String>,
    /// Timely workers; none: one per core.
    pub workers: Option<usize>,
    /// The whole thread budget that workers share; none: one per core.
    pub threads: Option<usize>,
    /// What to run; all by default.
    pub selection: Selection,
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
    /// What stages may know of how the run is called.
    pub(crate) fn labels(&self) -> RunLabels {
        RunLabels {
            name: self.name.clone(),
            note: self.note.clone(),
        }
    }

    pub fn new(storage: &Storage, state: impl Into<PathBuf>) -> Self {
        Options {
            state: state.into(),
            storage: storage.clone(),
            name: None,
            note: None,
            workers: None,
            threads: None,
            selection: Selection::default(),
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
