//! `flow run --watch`: the pipeline runs again each time its sources have changed, until a signal ends it.

mod file_events;

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use flow_kind::Digest;
use flow_kind::kind::Role;
use flow_kind::registry::Registry;
use flow_runtime::StandingDecisions;
use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown, register_usize};
use signal_hook::low_level::unregister;

use file_events::{Changes, FileEvents, pipeline_file};

use super::run::{Files, run_once};
use super::{checked, gc, options};
use crate::arguments::{Progress, RunArguments};
use crate::screen;
use flow_cli::failure::{Exit, Failure};

/// Sources that change all the time are run after this many times `--settle`, whatever still changes.
const LONGEST_WAIT: u32 = 10;
/// A run that failed is tried again after this time, or as long as sources may take to settle if that is more.
const RETRY: Duration = Duration::from_secs(60);
/// How often sources are listed, at most and at least; where the file system tells of changes, as seldom as the latter until
/// it does.
const LISTED_EVERY: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(30)];
/// How soon a signal is noticed.
const TICK: Duration = Duration::from_millis(100);

pub fn watch(arguments: &RunArguments, registry: &Registry, out: &mut dyn Write) -> Result<Exit, Failure> {
    refuse_training(arguments, registry)?;
    let signals = Signals::install()?;
    let mut watch = Watch {
        arguments,
        registry,
        settle: Duration::from_secs_f64(arguments.settle),
        events: None,
    };
    let standing = Arc::new(StandingDecisions::default());
    let mut files = Files::New;
    let mut uncollected = 0;
    // Listed before each run, so that what changes meanwhile is taken up by the next one.
    let mut listed = watch.listing().ok();
    loop {
        let outcome = run_once(arguments, registry, files, Some(&standing), out);
        if signals.came().is_some() {
            return outcome;
        }
        let failed = outcome.is_err();
        match (&outcome, files) {
            (Ok(_), _) => {}
            // What is wrong from the start is for whoever starts it to mend.
            (Err(_), Files::New) => return outcome,
            (Err(failure), Files::Append) => say(failure.render(screen::style()).trim_end()),
        }
        files = Files::Append;
        uncollected += 1;
        if let Some(keep) = arguments.keep.filter(|keep| uncollected >= *keep) {
            uncollected = 0;
            // What stays for now is removed another time.
            let said = gc::collected(registry.storage(), &arguments.selection.state.state, keep, false);
            let said = said.unwrap_or_else(|failure| failure.render(screen::style()));
            if arguments.progress != Progress::None {
                say(said.trim_end());
            }
        }
        if arguments.progress != Progress::None {
            say(&watch.waiting());
        }
        listed = match watch.wait(listed, failed, &signals) {
            Waited::Listed(now) => now,
            Waited::Signal => return outcome,
        };
    }
}

/// A training goes on from its checkpoints, and refuses other data than it began with.
fn refuse_training(arguments: &RunArguments, registry: &Registry) -> Result<(), Failure> {
    let checked = checked(&arguments.pipeline, registry)?;
    let selected = flow_runtime::run::selected(&checked, &options(registry.storage(), &arguments.selection))
        .map_err(|error| Failure::run(error, &checked))?;
    let mut stages = checked.stages.iter().zip(selected);
    let Some((stage, _)) = stages.find(|(stage, is_selected)| *is_selected && stage.shape.role == Role::Log) else {
        return Ok(());
    };
    Err(Failure::usage(
        format!(
            "the stage `{}` trains, and a training cannot take up changed data",
            stage.name
        ),
        "watch the stages before it: --until STAGE",
    ))
}

/// What ended the wait for a change.
enum Waited {
    /// What the sources list now.
    Listed(Option<Digest>),
    Signal,
}

/// What sources list, and the pipeline.
struct Listed {
    digest: Digest,
    /// What can be watched for changes; none where something else may change what is listed.
    folders: Vec<PathBuf>,
    files: Vec<PathBuf>,
}

struct Watch<'a> {
    arguments: &'a RunArguments,
    registry: &'a Registry,
    settle: Duration,
    /// Where the file system tells of changes.
    events: Option<FileEvents>,
}

impl Watch<'_> {
    /// Digest of what sources list, and of the pipeline with its values; read again each time. Events are from here on those
    /// that come after it was read.
    fn listing(&mut self) -> Result<Digest, Failure> {
        if let Some(events) = &mut self.events {
            events.forget();
        }
        let listed = self.list();
        let Ok(Listed { folders, files, .. }) = &listed else {
            self.events = None;
            return listed.map(|listed| listed.digest);
        };
        if !self.events.as_ref().is_some_and(|events| events.are_of(folders, files)) {
            // Where the file system does not tell of changes, sources are listed at intervals.
            self.events = match folders.is_empty() && files.is_empty() {
                false if !self.arguments.poll => FileEvents::watch(folders, files).ok(),
                _ => None,
            };
            if self.events.is_some() {
                // Of what came between the listing and the events nobody told.
                return self.list().map(|listed| listed.digest);
            }
        }
        listed.map(|listed| listed.digest)
    }

    /// What is waited for, and how it is noticed.
    fn waiting(&self) -> String {
        let how = match self.events {
            Some(_) => "the file system tells of them".to_owned(),
            None => format!("they are looked for every {:.1} s", self.every().as_secs_f64()),
        };
        format!("waiting for changes of the sources; {how}")
    }

    /// How often sources are listed where nobody tells of changes.
    fn every(&self) -> Duration {
        (self.settle / 2).clamp(LISTED_EVERY[0], LISTED_EVERY[1])
    }

    fn list(&self) -> Result<Listed, Failure> {
        let checked = checked(&self.arguments.pipeline, self.registry)?;
        let listed = flow_runtime::run::listing(&checked, &options(self.registry.storage(), &self.arguments.selection))
            .map_err(|error| Failure::run(error, &checked))?;
        let (folders, mut files): (Vec<PathBuf>, Vec<PathBuf>) =
            listed.paths.into_iter().partition(|path| path.is_dir());
        if !(folders.is_empty() && files.is_empty()) {
            files.extend(pipeline_file(&checked.pipeline.path));
        }
        Ok(Listed {
            digest: Digest::of_parts([checked.pipeline.frozen(), listed.digest.to_hex()]),
            folders,
            files,
        })
    }

    /// Waits until the sources are others than `before` and have not changed for the time to settle, or until a failed run
    /// is to be tried again, or until a signal comes.
    fn wait(&mut self, before: Option<Digest>, failed: bool, signals: &Signals) -> Waited {
        let every = self.every();
        let longest = self.settle * LONGEST_WAIT;
        let began = Instant::now();
        let mut listed = began;
        let mut last = before;
        let mut changed: Option<Changes> = None;
        let mut complained = String::new();
        loop {
            if signals.came().is_some() {
                return Waited::Signal;
            }
            thread::sleep(TICK);
            let told = self.events.as_mut().and_then(FileEvents::changes);
            let is_due = match told {
                Some(told) => told.latest.elapsed() >= self.settle || told.first.elapsed() >= longest,
                // Some events may be lost.
                None if self.events.is_some() && changed.is_none() => listed.elapsed() >= LISTED_EVERY[1],
                None => listed.elapsed() >= every,
            };
            let again = failed && began.elapsed() >= RETRY.max(longest) && listed.elapsed() >= every;
            if !is_due && !again {
                continue;
            }
            let now = match self.listing() {
                Ok(digest) => Some(digest),
                // A folder that is gone for now, or a pipeline that is being written.
                Err(failure) => {
                    let text = failure.render(screen::style());
                    if text != complained {
                        say(text.trim_end());
                        complained = text;
                    }
                    listed = Instant::now();
                    continue;
                }
            };
            listed = Instant::now();
            complained.clear();
            if now != last {
                let told = told.unwrap_or(Changes {
                    first: listed,
                    latest: listed,
                });
                let first = changed.map_or(told.first, |changed| changed.first);
                changed = Some(Changes { first, ..told });
                last = now;
            }
            if last == before && changed.is_some() {
                // Changed back.
                changed = None;
            }
            if let Some(Changes { first, latest }) = changed
                && (latest.elapsed() >= self.settle || first.elapsed() >= longest)
            {
                return Waited::Listed(last);
            }
            if failed && began.elapsed() >= RETRY.max(longest) {
                return Waited::Listed(last);
            }
        }
    }
}

/// A line for whoever looks at standard error. A screen that cannot be written ends nothing.
fn say(text: &str) {
    if !text.is_empty() {
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

/// SIGINT, SIGTERM and SIGHUP, noted beside what a run makes of them. While nothing runs, a second SIGINT or SIGTERM ends
/// the process at once.
struct Signals {
    came: Arc<AtomicUsize>,
    ids: Vec<SigId>,
}

impl Signals {
    fn install() -> Result<Signals, Failure> {
        let failed = |error: std::io::Error| Failure::unreadable(format!("cannot handle signals: {error}"));
        let mut signals = Signals {
            came: Arc::default(),
            ids: Vec::new(),
        };
        let armed = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag unset, and arms it.
            let ids = [
                register_conditional_shutdown(signal, 128 + signal, Arc::clone(&armed)).map_err(failed)?,
                register(signal, Arc::clone(&armed)).map_err(failed)?,
            ];
            signals.ids.extend(ids);
        }
        let hang_up = (!flow_runtime::run::is_ignored(SIGHUP)).then_some(SIGHUP);
        for signal in [SIGINT, SIGTERM].into_iter().chain(hang_up) {
            let id = register_usize(signal, Arc::clone(&signals.came), signal as usize).map_err(failed)?;
            signals.ids.push(id);
        }
        Ok(signals)
    }

    /// The last signal that came.
    fn came(&self) -> Option<i32> {
        i32::try_from(self.came.load(Ordering::Acquire))
            .ok()
            .filter(|signal| *signal > 0)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            unregister(id);
        }
    }
}
