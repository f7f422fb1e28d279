//! What a body may know of the run it takes part in.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::inputs::{Input, Inputs};
use crate::local_copy::local_copy;
use flow_base::error::StageError;
use flow_base::event::{Event, Events};
use flow_processes::Processes;
use flow_storage::Storage;
use flow_store::{Artifact, RejectSet};

/// What people call a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunLabels {
    pub name: Option<String>,
    pub note: Option<String>,
}

/// Handed to [`crate::Kind::open`]: one per body, that is, one per stage and worker.
#[derive(Clone)]
pub struct Context {
    /// The stage's name in this run, with its group: `manifest/dedup`.
    pub stage: String,
    pub labels: RunLabels,
    /// Names and schemas of all inputs: what [`crate::Kind::shape`] was given.
    pub inputs: Inputs,
    /// By place in `inputs`; `None` for streamed ones.
    pub artifacts: Arc<[Option<Artifact>]>,
    /// Of a source, a log or an export: the rejects of all stages before its whole inputs. Others have none.
    pub rejects: RejectSet,
    pub worker: usize,
    pub workers: usize,
    /// Threads this body may use beside its worker (for rayon and the like): its share of the one budget.
    pub threads: usize,
    /// A folder of this stage below the state directory, for files that may be deleted at any time.
    pub scratch: PathBuf,
    /// Object storage, which all stages of the run share.
    pub storage: Storage,
    pub events: Events,
    pub cancel: Cancel,
    pub stop: StopAsked,
    pub waker: Waker,
    /// The other processes of the run, where there are several.
    pub processes: Option<Arc<Processes>>,
    /// Of a log that is spread over processes, and of the stages that feed it: each process runs all of them, for all
    /// partitions. None where they run in process 0 alone.
    pub share: Option<ProcessShare>,
    /// Of a process that follows: see [`Context::compare_unreadable`].
    pub compare_unreadable: Option<CompareUnreadable>,
}

/// An error for a file that cannot be read in this process, if process 0 can read it.
pub type CompareUnreadable = Arc<dyn Fn(&Path) -> Result<(), StageError> + Send + Sync>;

/// The place of a process among those that run the same stages for the same partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessShare {
    pub process: usize,
    pub processes: usize,
}

impl Context {
    /// The rows of the input `name`, if it was given and is read as a whole.
    pub fn input(&self, name: &str) -> Option<&Artifact> {
        self.artifacts.get(self.inputs.position(name)?)?.as_ref()
    }

    /// The rows of the input `name`, which the kind declares as required and reads as a whole.
    ///
    /// # Errors
    /// When it was not given, which is a bug in the kind.
    pub fn required(&self, name: &str) -> Result<&Artifact, StageError> {
        self.input(name)
            .ok_or_else(|| StageError::failed(format!("the input `{name}` was not given")))
    }

    /// The inputs bound to the declared input `port` that are read as a whole, with their rows.
    pub fn whole(&self, port: &str) -> impl Iterator<Item = (&Input, &Artifact)> {
        let inputs = self.inputs.iter().zip(self.artifacts.iter());
        inputs
            .filter_map(move |(input, artifact)| Some((input, artifact.as_ref()?)).filter(|_| input.port.name == port))
    }

    /// To be called before rows are rejected for a file that is not there or cannot be read: with several processes,
    /// an error where process 0 can read it. A mount may be missing here.
    ///
    /// # Errors
    /// If process 0 can read the file, or the run ends.
    pub fn compare_unreadable(&self, file: &Path) -> Result<(), StageError> {
        self.compare_unreadable.as_ref().map_or(Ok(()), |compare| compare(file))
    }

    /// [`local_copy`] of what `setting` names. It is shown on the screen, and ends where the run does.
    ///
    /// # Errors
    /// Those of [`local_copy`], naming `setting`, and if the run ends.
    pub fn local_copy(&self, setting: &str, path: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<PathBuf, StageError> {
        let copied = local_copy(&self.storage, path, wanted, &mut |line| {
            self.report(serde_json::json!({ "line": line }));
            !self.cancel.is_set()
        });
        let copied = copied.map_err(|error| StageError::setting(setting, error))?;
        copied.ok_or_else(|| StageError::failed("stopped"))
    }

    /// Whether long work is to be given up: the run is being aborted, or was asked to end a moment ago. A body then returns
    /// an error, whichever, from where it reads, takes, completes or polls for a partition, which is left to the next run if this one
    /// was asked to end.
    pub fn gives_up(&self) -> impl Fn() -> bool + Clone + Send + Sync + 'static {
        let (cancel, stop) = (self.cancel.clone(), self.stop.clone());
        move || cancel.is_set() || stop.is_over()
    }

    /// Warns on the screen and in the event log, in the name of the stage.
    pub fn warn(&self, message: impl Into<String>) {
        self.events.send(Event::warning(Some(self.stage.clone()), message));
    }

    /// Sends figures of the stage (step, loss, ...) as an event to the screen and the event log.
    pub fn report(&self, figures: serde_json::Value) {
        self.events.send(Event::StageFigures {
            stage: self.stage.clone(),
            figures,
        });
    }
}

/// Set once, when the run has to end (a failure elsewhere, a second Ctrl-C). Long work checks it regularly.
#[derive(Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    pub fn set(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Whether the run was asked to end (Ctrl-C, SIGTERM).
#[derive(Clone, Default)]
pub struct StopAsked {
    /// Number of the signal; 0 for none.
    pub signal: Arc<AtomicUsize>,
    /// When somebody first looked after it came.
    since: Arc<OnceLock<Instant>>,
}

impl StopAsked {
    /// Time for what is nearly done.
    const GRACE: Duration = Duration::from_millis(300);

    /// Whether what is still in work is to be given up.
    pub fn is_over(&self) -> bool {
        self.signal.load(Ordering::Acquire) != 0 && self.since.get_or_init(Instant::now).elapsed() > StopAsked::GRACE
    }
}

/// Asks the runtime, from any thread, to call [`crate::Operator::poll`].
#[derive(Clone, Default)]
pub struct Waker(pub Option<Arc<dyn Fn() + Send + Sync>>);

impl Waker {
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Waker(Some(Arc::new(wake)))
    }

    pub fn wake(&self) {
        if let Some(wake) = &self.0 {
            wake();
        }
    }
}
