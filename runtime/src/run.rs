//! One execution of a pipeline: settles region after region, runs what must run, keeps the run's records.

mod dataflow;
mod export;
mod global;
mod job;
mod joined;
mod limits;
mod log;
mod records;
mod region;
mod signals;

use std::sync::Arc;
use std::time::Instant;

use crate::dataflow::job::Signals;
use crate::event::{EVENT_VERSION, Event, Events};
use crate::kind::StageError;
use crate::partition::Partition;
use crate::plan::ledger::Ledger;
use crate::plan::{Options, Plan, StagePlan};
use crate::processes::{Loss, SignalFlags};
use crate::spec::Checked;
use crate::store::{Access, SnapshotWriter, Store, StoreError};
pub use joined::joined;
use region::Ran;

/// What a run did.
#[derive(Clone, Debug)]
pub struct RunSummary {
    /// Name of the run: its folder below `runs/` of the state directory.
    pub run: String,
    pub stages: Vec<StageSummary>,
    /// Stage partitions that ran, and that were reused.
    pub ran: u64,
    pub reused: u64,
    pub seconds: f64,
    /// Stages past a reject limit whose action is `warn`. Not empty: exit code 4.
    pub past_reject_limit: Vec<String>,
}

#[derive(Clone, Debug)]
pub struct StageSummary {
    pub stage: String,
    pub kind: String,
    pub ran: u64,
    pub reused: u64,
    pub rows_in: u64,
    pub rows_out: u64,
    pub rejects: Vec<crate::event::ReasonCount>,
}

/// Why a run ended before its end.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A stage failed: exit code 1 (2 where the stage refused, or a setting or input is wrong).
    #[error("stage `{stage}`{}: {error}", at(.partition, .error))]
    Stage {
        stage: String,
        partition: Option<Partition>,
        #[source]
        error: StageError,
    },
    /// The command line names what is not there, or asks for what cannot be: exit code 2.
    #[error("{message}")]
    Usage { message: String, help: Option<String> },
    /// The state directory: exit code 3 where another run holds it, else 1.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A signal ended the run after what was in hand was committed: exit code 128 + signal.
    #[error("interrupted by signal {signal}")]
    Interrupted { signal: i32 },
    /// Another process of the run is lost: exit code 1.
    #[error("{message}")]
    Process { message: String },
    /// Our bug: exit code 70.
    #[error("internal error: {message}")]
    Internal { message: String },
}

fn at(partition: &Option<Partition>, error: &StageError) -> String {
    let mut text = String::new();
    if let Some(partition) = partition {
        text.push_str(&format!(", partition {partition}"));
    }
    if let StageError::Failed { row: Some(row), .. } = error {
        text.push_str(&format!(", row {row}"));
    }
    text
}

impl RunError {
    pub fn exit_code(&self) -> u8 {
        match self {
            RunError::Stage {
                error: StageError::Failed { .. },
                ..
            } => 1,
            RunError::Stage { .. } | RunError::Usage { .. } => 2,
            RunError::Store(error) if error.is_held() => 3,
            RunError::Store(_) | RunError::Process { .. } => 1,
            RunError::Interrupted { signal } => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            RunError::Internal { .. } => 70,
        }
    }

    /// What a person can do about it.
    pub fn help(&self) -> Option<String> {
        match self {
            RunError::Stage { error, .. } => match error {
                StageError::Setting { help, .. }
                | StageError::Input { help, .. }
                | StageError::Refused { help, .. }
                | StageError::Failed { help, .. } => help.clone(),
            },
            RunError::Usage { help, .. } => help.clone(),
            RunError::Store(error) => error.help(),
            RunError::Interrupted { .. } => Some("run it again: what is committed is not done again".to_string()),
            RunError::Process { .. } => Some(
                "look at what that process said last; then start all again: what is committed is not done again"
                    .to_string(),
            ),
            RunError::Internal { .. } => None,
        }
    }
}

/// What would run, and why. Changes nothing.
///
/// # Errors
/// As [`run`], except for what only running can find.
pub fn plan(checked: &Arc<Checked>, options: &Options) -> Result<Plan, RunError> {
    let store = Store::open(&options.state, Access::Read)?;
    Ledger::new(checked, options, store, &Events::default(), false)?.plan()
}

/// Runs a pipeline: plans it, freezes spec and plan in the run's folder, and runs region after region.
///
/// # Errors
/// The first failure; what was committed before it stays, and is not done again by the next run.
pub fn run(checked: &Arc<Checked>, options: &Options, events: &Events) -> Result<RunSummary, RunError> {
    let started = Instant::now();
    let id = records::new_run_id();
    let store = Store::open(&options.state, Access::Run { run_id: id.clone() })?;
    let folder = store.create_run_folder(&id)?;
    let log = records::EventLog::open(&folder, events)?;
    let snapshots = store.snapshot_writer(&id, &checked.pipeline.path)?;
    let signals = Arc::new(Signals {
        processes: options.processes.clone(),
        ..Signals::default()
    });
    if let Some(processes) = &options.processes {
        processes.signals_to(SignalFlags {
            stop: Arc::clone(&signals.stop),
            checkpoint: Arc::clone(&signals.checkpoint),
        });
    }
    let _handlers = options
        .signals
        .then(|| signals::Handlers::install(&signals))
        .transpose()?;
    events.send(Event::RunStarted {
        version: EVENT_VERSION,
        run: id.clone(),
        pipeline: checked.pipeline.name.clone(),
        stages: checked.stages.iter().map(|stage| stage.name.clone()).collect(),
        switched_off: checked.pipeline.switched_off.clone(),
    });
    let mut ran = Ran::default();
    let outcome = run_regions(
        checked,
        options,
        events,
        store.clone(),
        (&id, &snapshots),
        &signals,
        &mut ran,
    );
    let outcome = match (outcome, signals.lost()) {
        // Where a stage found out first, it says what it was about.
        (outcome @ Err(RunError::Stage { .. }), _) | (outcome, None) => outcome,
        (_, Some(Loss { message, .. })) => Err(RunError::Process { message }),
    };
    // Digests of source files are a shortcut: a run that did its work does not fail for want of it.
    if let Err(error) = store.save_sources() {
        events.send(Event::Warning {
            stage: None,
            message: error.to_string(),
        });
    }
    let seconds = started.elapsed().as_secs_f64();
    let (stages, past_reject_limit) = match outcome {
        Ok(done) => done,
        Err(error) => {
            if let RunError::Stage {
                stage,
                partition,
                error,
            } = &error
            {
                let row = if let StageError::Failed { row, .. } = error {
                    *row
                } else {
                    None
                };
                events.send(Event::RunFailed {
                    stage: Some(stage.clone()),
                    partition: partition.as_ref().map(Partition::to_string),
                    row,
                    message: error.to_string(),
                });
            } else if !matches!(error, RunError::Interrupted { .. }) {
                events.send(Event::RunFailed {
                    stage: None,
                    partition: None,
                    row: None,
                    message: error.to_string(),
                });
            }
            let outcome = if let RunError::Interrupted { .. } = error {
                "interrupted"
            } else {
                "failed"
            };
            events.send(finished(outcome, seconds, &ran));
            log.close();
            return Err(error);
        }
    };
    events.send(finished(
        if past_reject_limit.is_empty() {
            "done"
        } else {
            "past_reject_limit"
        },
        seconds,
        &ran,
    ));
    log.close();
    Ok(RunSummary {
        run: id,
        stages,
        ran: ran.ran,
        reused: ran.reused,
        seconds,
        past_reject_limit,
    })
}

fn finished(outcome: &str, seconds: f64, ran: &Ran) -> Event {
    Event::RunFinished {
        outcome: outcome.to_string(),
        seconds,
        ran: ran.ran,
        reused: ran.reused,
    }
}

/// Refuses at once what this program could not do hours later.
fn ready(ledger: &Ledger, plan: &Plan) -> Result<(), RunError> {
    for (node, described) in ledger.graph.nodes.iter().enumerate() {
        let runs = |stage: &StagePlan| stage.run > 0 || stage.if_changed > 0 || stage.unknown_partitions;
        let planned = plan.stages.iter().find(|stage| stage.stage == described.name);
        if planned.is_some_and(|stage| stage.selected && runs(stage)) {
            let settings = &ledger.stage(node).settings;
            settings.ready().map_err(|error| ledger.failed(node, None, error))?;
        }
    }
    Ok(())
}

type Done = (Vec<StageSummary>, Vec<String>);

fn run_regions(
    checked: &Arc<Checked>,
    options: &Options,
    events: &Events,
    store: Store,
    (id, snapshots): (&str, &SnapshotWriter),
    signals: &Arc<Signals>,
    ran: &mut Ran,
) -> Result<Done, RunError> {
    let mut ledger = Ledger::new(checked, options, store.clone(), events, true)?;
    let plan = ledger.plan()?;
    records::freeze(&store, id, checked, &plan)?;
    ready(&ledger, &plan)?;
    let mut past = Vec::new();
    let mut stages = Vec::new();
    for region in 0..ledger.graph.regions.len() {
        if let Some(signal) = signals.stop_asked() {
            return Err(RunError::Interrupted { signal });
        }
        if let Some(Loss { message, .. }) = signals.lost() {
            return Err(RunError::Process { message });
        }
        region::run(&mut ledger, region, id, snapshots, signals, ran)?;
        // A shortcut for the next run, and no more.
        let _ = store.append_sources();
        for node in ledger.graph.regions[region].nodes.clone() {
            if let Some(summary) = limits::summarise(&ledger, node, ran) {
                events.send(Event::StageFinished {
                    stage: summary.stage.clone(),
                    rows_in: summary.rows_in,
                    rows_out: summary.rows_out,
                    rejects: summary.rejects.clone(),
                });
                if limits::check(&ledger, node, &summary)? {
                    past.push(summary.stage.clone());
                }
                stages.push(summary);
            }
        }
    }
    Ok((stages, past))
}
