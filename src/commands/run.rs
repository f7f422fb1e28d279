//! `flow run`: runs a pipeline, alone or as one of several processes.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use arrow::datatypes::Field;
use flow_base::event::{Event, Events};
use flow_inspect::report::Report;
use flow_kind::Digest;
use flow_kind::registry::Registry;
use flow_processes::{End, Join, JoinMessage, Processes, join};
use flow_runtime::StandingDecisions;
use flow_runtime::run::RunError;
use flow_spec::Checked;
use flow_storage::Storage;
use flow_training::ranks::WorkerProcess;

use super::{checked, options};
use crate::arguments::{COMMIT, RunArguments};
use crate::hook;
use crate::launch::{self, Launch};
use crate::screen::{self, Screen};
use crate::secret_file;
use flow_cli::failure::{Exit, Failure};

/// Time after the loss of a process within which a run must end; otherwise one of its own ranks hangs, and the process
/// is ended.
const LAST_RESORT: Duration = Duration::from_secs(60);

/// With less, keys of many rows would be sorted in more parts than can be merged.
const LEAST_DECIDE_MEMORY: u64 = 16 << 20;

/// What becomes of the file of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    New,
    /// Events are added to those of the runs before.
    Append,
}

pub fn run(arguments: &RunArguments, registry: &Registry, out: &mut dyn Write) -> Result<Exit, Failure> {
    if arguments.watch {
        return super::watch::watch(arguments, registry, out);
    }
    run_once(arguments, registry, Files::New, None, out)
}

/// One run of the pipeline. `standing`: of a process that runs it many times.
pub fn run_once(
    arguments: &RunArguments,
    registry: &Registry,
    files: Files,
    standing: Option<&Arc<StandingDecisions>>,
    out: &mut dyn Write,
) -> Result<Exit, Failure> {
    let checked = checked(&arguments.pipeline, registry)?;
    let launch = launch::read(&arguments.processes, &launch::environment)?;
    let launch = launch.filter(|launch| launch.processes > 1);
    if let Some(launch) = &launch {
        check_spread(&checked, launch.processes)?;
    }
    let events = Events::default();
    events.hide(&checked.pipeline.secrets);
    if let Some(path) = &arguments.events {
        let mut open = std::fs::OpenOptions::new();
        match files {
            Files::New => open.write(true).create(true).truncate(true),
            Files::Append => open.append(true).create(true),
        };
        let file = open.open(path).map_err(|error| {
            Failure::usage(
                format!("cannot write events to {}: {error}", path.display()),
                "give --events a file in a folder that can be written",
            )
        })?;
        screen::json_lines(file, &events);
    }
    let screen = Screen::show(arguments.progress, &events);
    let Some(launch) = launch else {
        if arguments.processes.hosts.is_none()
            && arguments.processes.launch.is_none()
            && let Some(message) = launch::unheeded(&launch::environment)
        {
            events.send(Event::warning(None, message));
        }
        let report = Report::listen(&events);
        let outcome = conduct(
            arguments,
            &checked,
            &events,
            &report,
            screen,
            (registry.storage(), None, standing),
            out,
        );
        hook(arguments, &report, &events, &outcome);
        return outcome;
    };
    let processes = come_together(&launch, arguments, &checked, registry, &events)?;
    if processes.process() > 0 {
        return joined(registry.storage(), arguments, &processes, &checked, &events);
    }
    end_at_last(&processes);
    let report = Report::listen(&events);
    let outcome = conduct(
        arguments,
        &checked,
        &events,
        &report,
        screen,
        (registry.storage(), Some(&processes), standing),
        out,
    );
    let (code, message) = code_and_message(&outcome);
    processes.end(&End { code, message });
    // The other processes do not wait for it.
    hook(arguments, &report, &events, &outcome);
    outcome
}

/// The exit code of an outcome, and the message of a failure.
fn code_and_message(outcome: &Result<Exit, Failure>) -> (u8, String) {
    match outcome {
        Ok(exit) => (exit.code(), String::new()),
        Err(failure) => (failure.exit().code(), failure.to_string()),
    }
}

/// Runs the user's command for an outcome, after everything is committed.
fn hook(arguments: &RunArguments, report: &Report, events: &Events, outcome: &Result<Exit, Failure>) {
    let (code, message) = code_and_message(outcome);
    let Some((option, command)) = hook::for_code(arguments, code, report.began()) else {
        return;
    };
    let file = &arguments.pipeline.pipeline;
    let summary = report.summary(file, &arguments.selection.state.state, code, &message);
    if let Some(message) = hook::run(option, command, &format!("{summary}\n")) {
        events.send(Event::warning(None, message));
    }
}

/// Runs the pipeline.
fn conduct(
    arguments: &RunArguments,
    checked: &Arc<Checked>,
    events: &Events,
    report: &Report,
    screen: Screen,
    (storage, processes, standing): (&Storage, Option<&Arc<Processes>>, Option<&Arc<StandingDecisions>>),
    out: &mut dyn Write,
) -> Result<Exit, Failure> {
    let mut options = options(storage, &arguments.selection);
    options.signals = true;
    options.name.clone_from(&arguments.name);
    options.note.clone_from(&arguments.note);
    options.allow_shrink = arguments.allow_shrink;
    options.keep_going = arguments.keep_going;
    options.decide_bytes = arguments.decide_memory.map(|bytes| bytes.max(LEAST_DECIDE_MEMORY));
    options.processes = processes.cloned();
    options.standing = standing.cloned();
    let outcome = flow_runtime::run::run(checked, &options, events);
    let results = screen.close();
    let written = report.write(storage, &options.state);
    for table in &results.tables {
        writeln!(out, "{table}")?;
    }
    if let Ok(Some(path)) = &written {
        writeln!(out, "report: {}", path.display())?;
    }
    out.flush()?;
    let summary = outcome.map_err(|error| Failure::run(error, checked))?;
    written?;
    Ok(if summary.past_reject_limit.is_empty() {
        Exit::Done
    } else {
        Exit::Noted
    })
}

/// Refuses a pipeline whose ranks cannot be distributed over the processes.
fn check_spread(checked: &Arc<Checked>, processes: usize) -> Result<(), Failure> {
    for stage in &checked.stages {
        stage.settings.spreads(processes).map_err(|error| {
            let error = RunError::Stage {
                stage: stage.name.clone(),
                partition: None,
                error,
            };
            Failure::run(error, checked)
        })?;
    }
    Ok(())
}

/// What must be the same for all processes of a run: the pipeline with all its values, the columns of its stages (some
/// kinds read them from files), and the program.
fn digest(checked: &Checked, registry: &Registry, commit: &str) -> Digest {
    let mut pipeline = checked.pipeline.clone();
    // Without its path.
    pipeline.path = PathBuf::new();
    let kinds = registry
        .kinds()
        .map(|kind| format!("{} {}", kind.name(), kind.version()));
    let columns = columns(checked).map(|(stage, port, column, _)| {
        let name = column.name();
        format!("{stage}.{port}.{name} {}", type_of(column))
    });
    let parts = [env!("CARGO_PKG_VERSION"), commit].map(str::to_owned);
    Digest::of_parts(parts.into_iter().chain([pipeline.frozen()]).chain(kinds).chain(columns))
}

/// The parts of the digest, by name: the first difference is reported first. A column is named where it comes from.
fn told_apart(checked: &Checked, registry: &Registry, commit: &str) -> Vec<(String, String)> {
    // Of another program much may differ.
    let mut all = vec![
        ("commit that flow was built from".to_owned(), commit.to_owned()),
        ("version of flow".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
    ];
    all.extend(checked.pipeline.values());
    let kinds = registry
        .kinds()
        .map(|kind| (format!("version of {}", kind.name()), kind.version().to_string()));
    all.extend(kinds);
    let new = columns(checked).filter(|(_, _, _, is_new)| *is_new);
    all.extend(new.map(|(stage, port, column, _)| {
        let name = format!("column {} of {stage}.{port}", column.name());
        (name, type_of(column))
    }));
    all
}

/// All columns of all stages: stage, port, column, and whether no input of the stage has it.
fn columns(checked: &Checked) -> impl Iterator<Item = (&str, &str, &Field, bool)> {
    checked.stages.iter().flat_map(|stage| {
        stage.shape.outputs.iter().flat_map(move |port| {
            port.schema.fields().iter().map(move |column| {
                let mut before = stage.inputs.iter().flat_map(|input| input.schema.fields().iter());
                let is_new = !before.any(|field| field == column);
                (stage.name.as_str(), port.name.as_str(), column.as_ref(), is_new)
            })
        })
    })
}

fn type_of(column: &Field) -> String {
    let or_null = if column.is_nullable() { " or null" } else { "" };
    format!("{}{or_null}", column.data_type())
}

/// The options of the run that say what is done, which process 0 follows alone.
fn selected(arguments: &RunArguments) -> Vec<(String, String)> {
    let selection = &arguments.selection;
    let several = |options: &[String]| match options {
        [] => "none".to_owned(),
        some => some.join(" "),
    };
    let one = |option: &Option<String>| several(option.as_slice());
    [
        ("--from", one(&selection.from)),
        ("--until", one(&selection.until)),
        ("--only", several(&selection.only)),
        ("--force", several(&selection.force)),
        ("--partition", several(&selection.partition)),
        ("--keep-going", arguments.keep_going.to_string()),
        ("--allow-shrink", arguments.allow_shrink.to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

fn come_together(
    launch: &Launch,
    arguments: &RunArguments,
    checked: &Checked,
    registry: &Registry,
    events: &Events,
) -> Result<Arc<Processes>, Failure> {
    let tell = |message: JoinMessage| {
        events.send(match message {
            JoinMessage::Note(message) => Event::Note { message },
            JoinMessage::Warning(message) => Event::warning(None, message),
        });
    };
    let secret = match arguments.processes.secret_file.as_deref() {
        Some(path) => Some(secret_file::read(path, &|warning| tell(JoinMessage::Warning(warning)))?),
        None => None,
    };
    tell(JoinMessage::Note(format!(
        "process {} of {} (by {}); process 0 is at {}",
        launch.process, launch.processes, launch.read_from, launch.leader
    )));
    let member = Join {
        process: launch.process,
        processes: launch.processes,
        leader: launch.leader.clone(),
        port: launch.port,
        hosts: launch.hosts.clone(),
        secret,
        digest: Digest::of_parts([
            digest(checked, registry, COMMIT).to_hex(),
            format!("{:?}", selected(arguments)),
        ]),
        settings: selected(arguments)
            .into_iter()
            .chain(told_apart(checked, registry, COMMIT))
            .collect(),
        timeout: launch.timeout,
    };
    let processes = join(&member, &tell)?;
    tell(JoinMessage::Note(format!(
        "all {} processes are there",
        processes.count()
    )));
    Ok(processes)
}

/// The main function of a process other than 0: it computes its share of the partitions, and its training ranks work, until
/// process 0 ends the run.
fn joined(
    storage: &Storage,
    arguments: &RunArguments,
    processes: &Arc<Processes>,
    checked: &Arc<Checked>,
    events: &Events,
) -> Result<Exit, Failure> {
    let own = processes.process();
    let told = events.clone();
    let ranks = WorkerProcess::start(processes, move |line| {
        told.send(Event::note(format!("process {own}: {line}")));
    })
    .map_err(|error| Failure::unreadable(error.to_string()))?;
    let mut options = options(storage, &arguments.selection);
    options.signals = true;
    let end = flow_runtime::run::follow(processes, checked, &options, || ranks.abort_reason());
    let End { code, message } = end.map_err(|error| Failure::run(error, checked))?;
    if message.is_empty() {
        events.send(Event::note(format!(
            "process {own}: process 0 ended the run with exit code {code}"
        )));
        Ok(Exit::As(code))
    } else {
        Err(Failure::Ended { code, message })
    }
}

/// Ends this process if another one was lost and the run does not end: a hanging rank of this process would be waited
/// for indefinitely.
#[allow(clippy::exit, reason = "a rank that hangs cannot be ended otherwise")]
fn end_at_last(processes: &Arc<Processes>) {
    let processes = Arc::downgrade(processes);
    let watch = move || {
        while let Some(processes) = processes.upgrade() {
            if let Some(loss) = processes.lost()
                && processes.lost_for().is_some_and(|time| time > LAST_RESORT)
            {
                let _ = writeln!(
                    std::io::stderr(),
                    "error: {}; the run did not end for it within {} s, so it is ended now",
                    loss.message,
                    LAST_RESORT.as_secs()
                );
                std::process::exit(i32::from(Exit::Failed.code()));
            }
            drop(processes);
            thread::sleep(Duration::from_millis(500));
        }
    };
    // Without this thread a hanging run must be ended manually.
    let _ = thread::Builder::new().name("last-resort".into()).spawn(watch);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::PipelineArguments;

    /// Names of what differs between processes with different builds or files.
    #[test]
    fn another_build_and_other_columns_are_told_apart_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let (table, pipeline) = (folder.path().join("speakers.csv"), folder.path().join("pipeline.yaml"));
        let text = format!(
            "flow: 1\nstages:\n  speakers: {{uses: manifest.table, with: {{path: '{}'}}}}\n",
            table.display()
        );
        std::fs::write(&pipeline, text).unwrap();
        let registry = Registry::new(crate::kinds::all()).unwrap();
        let arguments = PipelineArguments {
            pipeline,
            config: Vec::new(),
            set: Vec::new(),
        };
        let process = |columns: &str, commit: &str| {
            std::fs::write(&table, columns).unwrap();
            let checked = checked(&arguments, &registry).unwrap();
            (
                digest(&checked, &registry, commit),
                told_apart(&checked, &registry, commit),
            )
        };
        let differing = |columns: &str, commit: &str| {
            let ((own, settings), (other, others)) = (process("speaker,age\n", "0a1b2c3"), process(columns, commit));
            let differ = |(name, value): &&(String, String)| !settings.contains(&(name.clone(), value.clone()));
            let names: Vec<String> = others.iter().filter(differ).map(|(name, _)| name.clone()).collect();
            assert_eq!(own == other, names.is_empty(), "{names:?}");
            names
        };
        assert_eq!(differing("speaker,age\n", "0a1b2c3"), [""; 0]);
        assert_eq!(
            differing("speaker,age\n", "4d5e6f7"),
            ["commit that flow was built from"]
        );
        assert_eq!(
            differing("speaker,years\n", "0a1b2c3"),
            ["column years of speakers.rows"]
        );
    }
}
