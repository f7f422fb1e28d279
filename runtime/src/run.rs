//! One execution of a pipeline: settles region after region, runs what must run, keeps the run's records.

mod counts;
mod dataflow;
mod export;
mod follow;
mod global;
mod job;
mod limits;
mod log;
mod node;
mod records;
mod region;
mod running;
mod schedule;
mod signals;
mod spread;
mod summary;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::dataflow::job::Signals;
use crate::options::Options;
pub use crate::planner::listing::Listing;
use crate::planner::state::PlanState;
use counts::RunCounts;
use flow_base::error::StageError;
use flow_base::event::{EVENT_VERSION, Event, Events, StageFailure, StageOutcome};
use flow_base::partition::Partition;
pub use flow_plan::run_error::{LeftOut, RunError};
use flow_plan::{Plan, StagePlan};
use flow_processes::{Loss, SignalFlags};
use flow_spec::Checked;
use flow_store::{Access, Store, run_name};
pub use follow::follow;
use running::Running;
pub use signals::is_ignored;
use spread::Spread;
pub use summary::{RunSummary, StageSummary};

/// What would run, and why. Changes nothing.
///
/// # Errors
/// As [`run`], except for what only running can find.
pub fn plan(checked: &Arc<Checked>, options: &Options) -> Result<Plan, RunError> {
    match plan_despite_refusal(checked, options)? {
        (plan, None) => Ok(plan),
        (_, Some(refusal)) => Err(refusal),
    }
}

/// As [`plan`], also where a stage would refuse the run because of what its log holds: with the reason.
///
/// # Errors
/// As [`plan`], but for such a refusal.
pub fn plan_despite_refusal(checked: &Arc<Checked>, options: &Options) -> Result<(Plan, Option<RunError>), RunError> {
    let hidden = |error: RunError| error.hidden(&checked.pipeline.secrets);
    let store = Store::open(&options.storage, &options.state, Access::Read)?;
    let mut state = PlanState::new(checked, options, store, &Events::default(), false).map_err(hidden)?;
    let plan = state.plan(true).map_err(hidden)?;
    Ok((plan, state.refusals.into_iter().next().map(hidden)))
}

/// Which stages of a pipeline, in its order, a run with these options would look at.
///
/// # Errors
/// Options that name no stage, or contradict each other; a state directory that cannot be read.
pub fn selected(checked: &Arc<Checked>, options: &Options) -> Result<Vec<bool>, RunError> {
    let hidden = |error: RunError| error.hidden(&checked.pipeline.secrets);
    let store = Store::open(&options.storage, &options.state, Access::Read)?;
    let state = PlanState::new(checked, options, store, &Events::default(), false).map_err(hidden)?;
    let mut selected = vec![false; checked.stages.len()];
    for (node, is_selected) in state.graph.nodes.iter().zip(&state.selection.selected) {
        selected[node.stage] |= *is_selected;
    }
    Ok(selected)
}

/// What the sources of a pipeline list: of equal digest as long as none of their partitions comes, goes or changes. Reads no file, only
/// sizes, times and inodes (of objects sizes and ETags, asked for anew: the run that follows sees objects as they are now).
///
/// # Errors
/// A source that cannot list its partitions, a state directory that cannot be read.
pub fn listing(checked: &Arc<Checked>, options: &Options) -> Result<Listing, RunError> {
    options.storage.forget_all();
    let hidden = |error: RunError| error.hidden(&checked.pipeline.secrets);
    let store = Store::open(&options.storage, &options.state, Access::Read)?;
    let mut state = PlanState::new(checked, options, store, &Events::default(), false).map_err(hidden)?;
    state.listing().map_err(hidden)
}

/// The name of a run, and its state directory.
fn begin(options: &Options) -> Result<(String, Store), RunError> {
    loop {
        let id = run_name::next(&Store::folder_of(&options.storage, &options.state)?)?;
        let store = Store::open(&options.storage, &options.state, Access::Run { run_id: id.clone() })?;
        // The copy of one in object storage may have lacked the runs of other machines.
        if store.runs()?.last().is_none_or(|last| run_name::is_after(&id, last)) {
            return Ok((id, store));
        }
    }
}

/// Runs a pipeline: plans it, freezes spec and plan in the run's folder, and runs region after region.
///
/// With [`Options::keep_going`] a failure of a stage does not end the run. The stage is left out for the partition that
/// failed, or as a whole where the failure is not due to one, and so is all that depends on it; stages that need all
/// partitions of one that failed do not run. The region of the failure begins again without it, on what is committed:
/// partitions that were in flight are computed again. What fails before the first region runs, the state directory,
/// signals and lost processes end the run all the same.
///
/// # Errors
/// The first failure, or with `keep_going` all of them. Committed partitions stay, and the next run reuses them.
pub fn run(checked: &Arc<Checked>, options: &Options, events: &Events) -> Result<RunSummary, RunError> {
    let started = Instant::now();
    let (id, store) = begin(options)?;
    let folder = store.create_run_folder(&id)?;
    events.hide(&checked.pipeline.secrets);
    let log = records::EventLog::open(&folder, events)?;
    let snapshots = store.snapshot_writer(&id, &checked.pipeline.path)?;
    let signals = Arc::new(Signals {
        processes: options.processes.clone(),
        ..Signals::default()
    });
    if let Some(processes) = &options.processes {
        processes.signals_to(SignalFlags {
            stop: Arc::clone(&signals.stop.signal),
            checkpoint: Arc::clone(&signals.checkpoint),
        });
    }
    let _handlers = options
        .signals
        .then(|| signals::SignalHandlers::install(&signals))
        .transpose()?;
    let _announcing = options.signals.then(|| signals::announce(&signals, events));
    events.send(Event::RunStarted {
        version: EVENT_VERSION,
        run: id.clone(),
        pipeline: checked.pipeline.name.clone(),
        stages: checked.stages.iter().map(|stage| stage.name.clone()).collect(),
        switched_off: checked.pipeline.switched_off.clone(),
        name: options.name.clone(),
        note: options.note.clone(),
    });
    let mut run_counts = RunCounts::default();
    let mut running = Running {
        id: id.clone(),
        snapshots,
        signals: Arc::clone(&signals),
        spread: None,
    };
    let mut removed = BTreeSet::new();
    let outcome = loop {
        let outcome = run_regions(checked, options, events, store.clone(), &mut running, &mut run_counts);
        let Err(error) = &outcome else { break outcome };
        // Several processes would have to begin again together: the next run makes it.
        let again = if running.processes() > 1 {
            "the next run makes again what it held"
        } else {
            "what it held is made again"
        };
        if !remove_damaged(&store, error, events, &mut removed, again) || running.processes() > 1 {
            break outcome;
        }
        run_counts = RunCounts::default();
    };
    let outcome = match (outcome, signals.lost()) {
        // What failed before says more than the loss that came of it.
        (Ok(_), Some(Loss { message, .. })) => Err(RunError::Process { message }),
        (outcome, _) => outcome,
    };
    let outcome = outcome.map_err(|error| error.hidden(&checked.pipeline.secrets));
    // Digests of source files are a cache: a failure to write them does not fail the run.
    if let Err(error) = store.save_sources() {
        events.send(Event::warning(None, error.to_string()));
    }
    let asked = options.storage.counts();
    if asked.requests() > 0 {
        events.send(Event::note(format!("object storage: {asked}")));
    }
    let left_out = options.storage.left_out();
    if !left_out.is_empty() {
        let first: Vec<String> = left_out
            .iter()
            .take(3)
            .map(|key| format!("`{}`", key.escape_debug()))
            .collect();
        events.send(Event::warning(
            None,
            format!(
                "objects of object storage whose keys no URL can name are left out: {} ({}{})",
                left_out.len(),
                first.join(", "),
                if left_out.len() > first.len() { ", ..." } else { "" }
            ),
        ));
    }
    if let Some(processes) = options.processes.as_ref().filter(|processes| processes.count() > 1) {
        let (sent, received) = processes.traffic();
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        events.send(Event::note(format!(
            "other processes: {:.1} MB sent, {:.1} MB received",
            megabytes(sent),
            megabytes(received)
        )));
    }
    let seconds = started.elapsed().as_secs_f64();
    let (stages, past_reject_limit) = match outcome {
        Ok(done) => done,
        Err(error) => {
            match &error {
                RunError::Several { failures, .. } => failures.iter().for_each(|error| tell_failure(events, error)),
                RunError::Interrupted { .. } => {}
                error => tell_failure(events, error),
            }
            let outcome = if let RunError::Interrupted { .. } = error {
                "interrupted"
            } else {
                "failed"
            };
            events.send(finished(outcome, seconds, &run_counts));
            log.close();
            if let Err(error) = store.upload_run(&id) {
                events.send(Event::warning(None, error.to_string()));
            }
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
        &run_counts,
    ));
    log.close();
    store.upload_run(&id)?;
    Ok(RunSummary {
        run: id,
        stages,
        ran: run_counts.ran,
        reused: run_counts.reused,
        seconds,
        past_reject_limit,
    })
}

/// Removes the files of the state directory that a run failed of, so that the next try makes again what they held. Says
/// whether there is a reason to try: none was among `removed` before.
fn remove_damaged(
    store: &Store,
    error: &RunError,
    events: &Events,
    removed: &mut BTreeSet<PathBuf>,
    again: &str,
) -> bool {
    let found = store.remove_damaged(error.damaged_files());
    for path in &found {
        events.send(Event::warning(
            None,
            format!(
                "{} was damaged (see to the disk): it is removed, and {again}",
                path.display()
            ),
        ));
    }
    !found.is_empty() && found.into_iter().all(|path| removed.insert(path))
}

fn tell_failure(events: &Events, error: &RunError) {
    let (stage, partition, row, message) = match error {
        RunError::Stage {
            stage,
            partition,
            error,
        } => {
            let row = match error {
                StageError::Failed { row, .. } => *row,
                _ => None,
            };
            let partition = partition.as_ref().map(Partition::to_string);
            (Some(stage.clone()), partition, row, error.to_string())
        }
        error => (None, None, None, error.to_string()),
    };
    events.send(Event::RunFailed {
        stage,
        partition,
        row,
        message,
    });
}

fn finished(outcome: &str, seconds: f64, run_counts: &RunCounts) -> Event {
    Event::RunFinished {
        outcome: outcome.to_string(),
        seconds,
        ran: run_counts.ran,
        reused: run_counts.reused,
    }
}

/// Calls [`Kind::ready`](flow_kind::Kind::ready) of all stages that will run, so that a run which cannot finish is refused
/// at its start.
fn ready(state: &PlanState, plan: &Plan) -> Result<(), RunError> {
    for (node, described) in state.graph.nodes.iter().enumerate() {
        let runs = |stage: &StagePlan| stage.run > 0 || stage.if_changed > 0 || stage.unknown_partitions;
        let planned = plan.stages.iter().find(|stage| stage.stage == described.name);
        if planned.is_some_and(|stage| stage.selected && runs(stage)) {
            let settings = &state.stage(node).settings;
            settings
                .ready(&state.options.storage)
                .map_err(|error| state.failed(node, None, error))?;
        }
    }
    Ok(())
}

type Done = (Vec<StageSummary>, Vec<String>);

/// Invites the other processes to compute partitions. Those of a run with a stage that spreads its own work over
/// processes need see neither the state directory nor the corpus: process 0 then computes all partitions.
fn spread_over(state: &PlanState, id: &str, signals: &Arc<Signals>) -> Result<Option<Spread>, RunError> {
    let processes = state.options.processes.as_ref();
    let Some(processes) = processes.filter(|processes| processes.count() > 1) else {
        return Ok(None);
    };
    let message = match Spread::new(processes, signals, id, state)? {
        Ok(spread) => return Ok(Some(spread)),
        Err(message) => message,
    };
    let spreads = |node: usize| {
        state.selection.selected[node] && state.stage(node).settings.spreads(processes.count()).unwrap_or(false)
    };
    if (0..state.graph.nodes.len()).any(spreads) {
        state.events.send(Event::warning(
            None,
            format!("{message}; process 0 alone computes partitions, and the others train only"),
        ));
        return Ok(None);
    }
    let help =
        "give all processes a --state directory, and a corpus, on file systems that they share or in object storage";
    Err(RunError::Usage {
        message,
        help: Some(help.to_owned()),
    })
}

fn run_regions(
    checked: &Arc<Checked>,
    options: &Options,
    events: &Events,
    store: Store,
    running: &mut Running,
    run_counts: &mut RunCounts,
) -> Result<Done, RunError> {
    let mut state = PlanState::new(checked, options, store.clone(), events, true)?;
    if let Some(standing) = &options.standing {
        standing.retain(&state.graph.nodes.iter().map(|node| node.recipe).collect::<Vec<_>>());
    }
    let plan = state.plan(false)?;
    records::freeze(&store, &running.id, checked, &plan)?;
    store.upload_run(&running.id)?;
    ready(&state, &plan)?;
    running.spread = spread_over(&state, &running.id, &running.signals)?;
    if state.is_partial() {
        tell_left_out(events, &plan);
    }
    drop(plan);
    let outcome = run_all(&mut state, running, run_counts);
    if state.failures.is_empty() {
        return outcome;
    }
    let mut failures = state.failures.take_errors();
    match outcome {
        Ok(_) => {}
        Err(error @ (RunError::Stage { .. } | RunError::Usage { .. } | RunError::Several { .. })) => {
            failures.push(error)
        }
        // Not a failure of a stage, and with its own exit code. Earlier failures were reported when they happened.
        Err(error) => return Err(error),
    }
    Err(RunError::Several {
        failures,
        left_out: state.failures.left_out(&state.graph, &state.selection.selected),
    })
}

/// Reports which stages a run of some partitions leaves out.
fn tell_left_out(events: &Events, plan: &Plan) {
    let left_out = plan.stages.iter().filter(|stage| stage.left_out.is_some());
    let left_out: Vec<&str> = left_out.map(|stage| stage.stage.as_str()).collect();
    if !left_out.is_empty() {
        events.send(Event::note(format!(
            "some partitions alone: left out are {}; `flow plan --partition` says why",
            left_out.join(", ")
        )));
    }
}

/// Reports the outcome of a stage.
fn tell_stage(state: &PlanState, summary: &StageSummary, (outcome, failures): (StageOutcome, Vec<StageFailure>)) {
    state.events.send(Event::StageFinished {
        stage: summary.stage.clone(),
        rows_in: summary.rows_in,
        rows_out: summary.rows_out,
        rejects: summary.rejects.clone(),
        outcome,
        failures,
    });
}

fn run_all(state: &mut PlanState, running: &Running, run_counts: &mut RunCounts) -> Result<Done, RunError> {
    let signals = &running.signals;
    let mut past = Vec::new();
    let mut stages = Vec::new();
    for region in 0..state.graph.regions.len() {
        if let Some(signal) = signals.stop_asked() {
            return Err(RunError::Interrupted { signal });
        }
        if let Some(Loss { message, .. }) = signals.lost() {
            return Err(RunError::Process { message });
        }
        region::run_on(state, region, running, run_counts)?;
        // A cache for the next run only.
        let _ = state.store.append_sources();
        state.store.upload_run(&running.id)?;
        for node in state.graph.regions[region].nodes.clone() {
            let Some(summary) = limits::summarise(state, node, run_counts) else {
                continue;
            };
            if state.failures.misses_all(node) {
                let (outcome, failures) = state.failures.outcome(&state.graph, &state.checked, node);
                if outcome == StageOutcome::Failed || run_counts.knows(node) {
                    tell_stage(state, &summary, (outcome, failures));
                }
                continue;
            }
            match limits::check(state, node, &summary) {
                Ok(false) => {}
                Ok(true) => past.push(summary.stage.clone()),
                Err(error) if state.options.keep_going => state.note_unusable(node, error),
                Err(error) => {
                    tell_stage(
                        state,
                        &summary,
                        (StageOutcome::Failed, vec![StageFailure::from(&error)]),
                    );
                    return Err(error);
                }
            }
            tell_stage(
                state,
                &summary,
                state.failures.outcome(&state.graph, &state.checked, node),
            );
            stages.push(summary);
        }
    }
    Ok((stages, past))
}
