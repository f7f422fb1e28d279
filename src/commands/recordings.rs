//! The common part of `flow transcribe` and `flow diarize`: a bundled pipeline processes the recordings of the command
//! line and writes result files for each.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flow_audio::format::recognise;
use flow_audio::listing::{Recording, left_out};
use flow_audio::recording_reader::Channels;
use flow_base::escape::escape_line;
use flow_inspect::past_run::PastRun;
use flow_inspect::table::plural;
use flow_kind::output_files::Notes;
use flow_kind::registry::Registry;
use flow_kind::{Digest, StageError, read_regular_file};
use flow_storage::{Location, Storage, is_file, is_url};
use flow_store::{Access, Records, Store, StoreError};
use flow_transcription::channels::{ChannelUse, Listed, shared_listed};
use flow_transcription::manifest_rows::is_manifest_by_content;
use tempfile::TempDir;

use super::boosted;
use super::coverage::{measured_in, summary, tell_short};
use super::past_run;
use super::{rejects, run};
use crate::arguments::{
    LookArguments, PipelineArguments, ProcessArguments, Progress, RecordingsArguments, RunArguments,
    SelectionArguments, SpeakersArguments, StateArguments,
};
use crate::bundle;
use flow_cli::failure::{Exit, Failure};

/// The name of standard input as a recording.
const STDIN: &str = "-";

/// The longest name of a file, in bytes.
const LONGEST_NAME: usize = 255;
/// Bytes of standard input that are written at once.
const KEPT_AT_ONCE: u64 = 1 << 16;

/// A format to write, and the stage of the pipeline that writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenFormat {
    pub name: &'static str,
    pub stage: &'static str,
}

/// A command on recordings.
pub struct Work {
    /// The pipeline, by its name; its recordings are the parameter `input`, the folder for files is `out`.
    pub pipeline: &'static str,
    /// The name of the result: `transcript`.
    pub result: &'static str,
    /// The stages that may reject a recording, each with the step that was not done: `transcribed`.
    pub stages: Vec<(&'static str, &'static str)>,
    /// The formats to write, at least one.
    pub formats: Vec<WrittenFormat>,
    /// Parameters that options give, as `name=value`.
    pub set: Vec<String>,
    /// Parameters that options give or may give, each with its option.
    pub options: &'static [(&'static str, &'static str)],
    /// Whether results are for recordings or for their channels.
    pub channels: ChannelUse,
    /// The least share of speech that has to have words, where that is measured.
    pub coverage: Option<f64>,
    /// Whether phrases may have been boosted.
    pub boosts: bool,
}

/// A recording that a stage rejected.
struct Refused<'a> {
    name: String,
    /// The step that was not done.
    done: &'a str,
    why: String,
}

/// The path of a pipeline that the program carries.
pub fn carried(name: &str) -> Result<PathBuf, Failure> {
    let path = bundle::pipeline(name)
        .map_err(|error| Failure::unreadable(format!("the files that flow carries cannot be written: {error}")))?;
    path.ok_or_else(|| Failure::Bug(format!("the pipeline {name} is missing")))
}

/// Runs the pipeline, and reports rejected recordings on standard error.
pub fn work(
    work: &Work,
    arguments: &RecordingsArguments,
    registry: &Registry,
    out: &mut dyn Write,
) -> Result<Exit, Failure> {
    let pipeline = carried(work.pipeline)?;
    let speaks = arguments.progress != Progress::None;
    // The temporary folder of standard input and of output that is only printed; deleted with this value.
    let (spooled, printed) = (TempDir::new()?, TempDir::new()?);
    let input = input(&arguments.input, spooled.path())?;
    let folder = match &arguments.out {
        Some(folder) => PathBuf::from(folder),
        None if arguments.stdout => printed.path().to_owned(),
        None => PathBuf::from("."),
    };
    for (name, option) in work.options {
        if given(&arguments.set, name) {
            let message = format!("`--set {name}=...` is not for this command");
            return Err(Failure::usage(
                message,
                format!("it has an option of its own: {option}"),
            ));
        }
    }
    let target = Location::of_path(&folder)
        .map_err(|error| Failure::usage(error.to_string(), "docs/storage.md says what a URL may be"))?;
    let folder = target.to_path();
    let real = match &target {
        Location::Object(_) => folder.clone(),
        // The same folder, however it is spelled.
        Location::Local(folder) => {
            let real = fs::create_dir_all(folder).and_then(|()| folder.canonicalize());
            real.map_err(|error| {
                let message = format!("cannot make the folder {}: {error}", folder.display());
                Failure::usage(message, "name another folder with --out")
            })?
        }
    };
    let Some(out_folder) = real.to_str() else {
        let message = format!("{} is not UTF-8", folder.display());
        return Err(Failure::usage(message, "give --out another name"));
    };
    // Kept until the end, so that the run does not list again. Errors of listing are reported by the run.
    let listed = names(registry.storage(), work, &input, arguments.track);
    let state = state(registry.storage(), arguments, &target)?;
    let mut edited = BTreeSet::new();
    if let Ok(listed) = &listed {
        edited = standing_files(
            registry.storage(),
            work,
            &state.state,
            listed,
            &folder,
            &real,
            arguments.overwrite,
        )?;
    }
    if arguments.overwrite {
        edited.clear();
    }
    let kept: Vec<String> = edited
        .iter()
        .filter_map(|path| Some(path.to_str()?.to_owned()))
        .collect();
    let mut set = vec![
        format!("input={}", json(&input)),
        format!("out={}", json(&[out_folder.to_owned()])[0]),
        format!("keep={}", json(&kept)),
    ];
    set.extend(arguments.track.map(|track| format!("track={track}")));
    set.extend(work.set.iter().chain(&arguments.set).cloned());
    let outcome = run::run(
        &run_arguments(arguments, pipeline, set, &state),
        registry,
        &mut io::sink(),
    );
    let options: Vec<_> = work.options.iter().copied().chain([("model", "--model")]).collect();
    let outcome = outcome.map_err(|failure| failure.by_options(&options))?;
    if outcome != Exit::Done && outcome != Exit::Noted {
        return Ok(outcome);
    }

    tell_left_out(&input)?;
    if let Some(first) = edited.first() {
        let others = match edited.len() - 1 {
            0 => String::new(),
            more => format!(" and {}", plural(more as u64, "other file")),
        };
        writeln!(
            io::stderr(),
            "warning: {}{others} changed since an earlier run wrote it, and is left as it is; --overwrite replaces it",
            escape_line(&first.to_string_lossy())
        )?;
    }
    let listed = listed.map_err(Failure::unreadable)?;
    let mut refused: Vec<Refused> = Vec::new();
    let run = last_run(registry.storage(), work.pipeline, &state)?;
    for (stage, done) in &work.stages {
        for (name, why) in refused_by(&run, stage)? {
            // A recording that several stages cannot read is reported once.
            if refused.iter().all(|refused| refused.name != name) {
                refused.push(Refused { name, done, why });
            }
        }
    }
    // The file that a recording is, as it is shown.
    let file_of = |name: &str| {
        let found = listed.iter().find(|listed| listed.recording.name == name);
        found.map_or_else(|| escape_line(name).into_owned(), shown)
    };
    for Refused { name, done, why } in &refused {
        writeln!(
            io::stderr(),
            "warning: {} was not {done}: {}",
            file_of(name),
            escape_line(why)
        )?;
    }
    for (name, at) in damaged_in(&run, work.stages[0].0)? {
        writeln!(
            io::stderr(),
            "warning: {} is damaged at {at} s; what comes after is not {}",
            file_of(&name),
            work.stages[0].1
        )?;
    }
    let mut short = false;
    let mut covered = None;
    if let Some(least) = work.coverage {
        let measured = measured_in(&run, work.stages[0].0)?;
        short = tell_short(&measured, least, &file_of)?;
        covered = Some(summary(&measured)).filter(|_| !measured.is_empty());
    }
    let boosted = match work.boosts {
        true => boosted::summary(&run, work.stages[0].0)?,
        false => None,
    };
    let path = |recording: &Recording| folder.join(format!("{}.{}", recording.name, work.formats[0].name));
    // Written by this run: a file of an earlier run may exist.
    let written = written_by(&run, work.formats[0].stage)?;
    let mut done: Vec<_> = listed
        .iter()
        .filter(|listed| written.contains(&listed.recording.name))
        .collect();
    if arguments.stdout {
        // Rows of manifests in their order, so that lines are a manifest again.
        let is_rows = listed.iter().all(|listed| listed.row.is_some());
        done.sort_by_key(|done| done.row.as_ref().map(|row| row.place));
        for done in &done {
            if listed.len() > 1 && !(is_rows && work.formats[0].name == "jsonl") {
                writeln!(out, "==> {} <==", shown(done))?;
            }
            let path = path(&done.recording);
            let text = read_regular_file(registry.storage(), &path)
                .map_err(|error| Failure::unreadable(format!("cannot read {}: {error}", path.display())))?;
            out.write_all(&text)?;
        }
        out.flush()?;
    }
    if speaks && (arguments.out.is_some() || !arguments.stdout) {
        writeln!(
            io::stderr(),
            "{} in {}",
            plural(done.len() as u64, work.result),
            escape_line(&folder.to_string_lossy())
        )?;
    }
    if speaks && let Some(covered) = covered {
        writeln!(io::stderr(), "{covered}")?;
    }
    if speaks && let Some(boosted) = boosted {
        writeln!(io::stderr(), "{boosted}")?;
    }
    if short {
        return Ok(Exit::Uncovered);
    }
    Ok(match (done.is_empty(), refused.is_empty()) {
        (_, true) => Exit::Done,
        (false, false) => Exit::Noted,
        (true, false) => Exit::Failed,
    })
}

/// The file of a recording, and which of its channels, as it is shown.
fn shown(listed: &Listed) -> String {
    let file = escape_line(&listed.recording.file);
    let file = match &listed.row {
        Some(row) if row.refused.is_none() => {
            let id = row
                .values
                .get("segment_id")
                .and_then(|id| id.as_str())
                .unwrap_or_default();
            format!("{file} (row {})", escape_line(id)).into()
        }
        _ => file,
    };
    match listed.channels {
        Channels::Mix => file.into_owned(),
        Channels::One(channel) => format!("{file} (channel {})", channel + 1),
    }
}

/// The recordings or channels, with the names of their result files.
fn names(storage: &Storage, work: &Work, input: &[String], track: Option<u32>) -> Result<Arc<Vec<Listed>>, StageError> {
    shared_listed(storage, input, work.channels, track)
}

/// File names as the value of a parameter, with references escaped.
pub fn json(texts: &[String]) -> serde_json::Value {
    texts.iter().map(|text| text.replace("${", "$${")).collect()
}

/// The parameters about speakers.
pub fn speakers(arguments: &SpeakersArguments) -> Result<Vec<String>, Failure> {
    let numbers = [
        ("num_speakers", arguments.num_speakers),
        ("min_speakers", arguments.min_speakers),
        ("max_speakers", arguments.max_speakers),
    ];
    let given = |(name, number): (&str, Option<u16>)| Some(format!("{name}={}", number?));
    let mut set: Vec<String> = numbers.into_iter().filter_map(given).collect();
    if let Some(model) = &arguments.diarization_model {
        set.push(format!("diarization_model={}", json(std::slice::from_ref(model))[0]));
    }
    if let Some(path) = &arguments.known_speakers {
        let Some(text) = path.to_str() else {
            let message = format!("{} is not UTF-8", path.display());
            return Err(Failure::usage(message, "give the file another name"));
        };
        set.push(format!("known_speakers={}", json(&[text.to_owned()])[0]));
    }
    Ok(set)
}

/// The state directory.
fn state(storage: &Storage, arguments: &RecordingsArguments, out: &Location) -> Result<StateArguments, Failure> {
    let state = match (&arguments.state, out) {
        (Some(state), _) => state.clone(),
        (None, Location::Local(folder)) => folder.join(".flow"),
        (None, Location::Object(url)) => {
            let folder = storage.working_folder(url);
            let folder = folder.map_err(|error| Failure::usage(error.to_string(), "name a folder with --state"))?;
            folder.join(".flow")
        }
    };
    Ok(StateArguments { state })
}

/// Tells of files in folders that are not taken for recordings, but for texts.
fn tell_left_out(input: &[String]) -> io::Result<()> {
    let endings = left_out(input);
    let count = endings.values().sum::<u64>();
    if count == 0 {
        return Ok(());
    }
    let of_ending = |(ending, count): (&String, &u64)| match ending.as_str() {
        "" => format!("{count} without one"),
        ending => format!("{count} {}", escape_line(&format!(".{ending}"))),
    };
    let named: Vec<String> = endings.iter().take(10).map(of_ending).collect();
    let more = if endings.len() > named.len() { ", ..." } else { "" };
    writeln!(
        io::stderr(),
        "warning: {} left out, without the ending of a recording: {}{more}; a file that is named is read whatever its ending",
        plural(count, "file"),
        named.join(", ")
    )
}

/// The files that would be written over but were edited since an earlier run wrote them. Refuses to write over files that no earlier
/// run wrote: a corpus may have texts beside its recordings.
fn standing_files(
    storage: &Storage,
    work: &Work,
    state: &Path,
    listed: &[Listed],
    folder: &Path,
    real: &Path,
    overwrite: bool,
) -> Result<BTreeSet<PathBuf>, Failure> {
    let mut edited = BTreeSet::new();
    if let Ok(Location::Object(url)) = Location::of_path(real) {
        // Whether an object is there is then known of all.
        storage.list_and_remember(&url).map_err(Failure::unreadable)?;
    }
    let stages: BTreeSet<&str> = work.formats.iter().map(|format| format.stage).collect();
    for stage in stages {
        let own = || work.formats.iter().filter(|format| format.stage == stage);
        let files = listed.iter().flat_map(|listed| {
            let file = |format: &WrittenFormat| format!("{}.{}", listed.recording.name, format.name);
            own().map(file)
        });
        let mut standing: BTreeMap<PathBuf, String> = BTreeMap::new();
        for file in files {
            if !is_url(real)
                && file
                    .split('/')
                    .next_back()
                    .is_some_and(|name| name.len() > LONGEST_NAME)
            {
                return Err(Failure::usage(
                    format!(
                        "the name {} is longer than the {LONGEST_NAME} bytes that a file may have",
                        escape_line(&file)
                    ),
                    "give the recording a shorter one",
                ));
            }
            let path = real.join(&file);
            let is_there = match is_url(&path) {
                true => is_file(storage, &path).map_err(Failure::unreadable)?,
                false => path.exists(),
            };
            if is_there {
                standing.insert(path, file);
            }
        }
        if standing.is_empty() {
            continue;
        }
        let (mut changed, damage) = leave_unwritten(storage, stage, state, &mut standing, overwrite)?;
        // A killed run may have written files that no record names.
        if !standing.is_empty() || !changed.is_empty() {
            let notes = Notes::read(&state.join("scratch").join(stage));
            standing.retain(|path, _| !notes.hold(storage, path));
            changed.retain(|path| !notes.hold(storage, path));
        }
        edited.append(&mut changed);
        // Objects are not kept.
        if let (Some(damage), false) = (damage, standing.is_empty() || is_url(real)) {
            // The run makes it again.
            writeln!(
                io::stderr(),
                "warning: {}: whether an earlier run wrote the files in {} is not known, so they count as edited",
                escape_line(&damage),
                folder.display()
            )?;
            edited.extend(std::mem::take(&mut standing).into_keys());
        }
        if let Some(file) = standing.values().next() {
            return Err(Failure::usage(
                format!(
                    "{} is there already, and no {} of an earlier run",
                    folder.join(file).display(),
                    work.result
                ),
                "name another folder with --out, or move the file away",
            ));
        }
    }
    Ok(edited)
}

/// Keeps the files that no run of the state directory has written, as far as known, and gives the others that changed since, but with `overwrite` none. Runs
/// are searched from the last one back until no file is left: usually the last one has all. With what was damaged and could not
/// tell, the first of it.
fn leave_unwritten(
    storage: &Storage,
    stage: &str,
    state: &Path,
    files: &mut BTreeMap<PathBuf, String>,
    overwrite: bool,
) -> Result<(BTreeSet<PathBuf>, Option<String>), Failure> {
    let mut changed = BTreeSet::new();
    let mut damage: Option<String> = None;
    if !state.join("FORMAT").is_file() {
        return Ok((changed, damage));
    }
    let store = Store::open(storage, state, Access::Read)?;
    let mut records: BTreeMap<Digest, Records> = BTreeMap::new();
    // Runs share most records.
    let mut seen = BTreeSet::new();
    for id in store.runs()?.iter().rev() {
        let snapshots = match store.run_snapshots(id) {
            Ok(Some(snapshots)) => snapshots,
            Ok(None) => continue,
            Err(error @ StoreError::Damaged { .. }) => {
                damage.get_or_insert_with(|| error.to_string());
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let Some(snapshot) = snapshots.of(stage) else { continue };
        let records = match records.entry(snapshot.recipe) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => match store.records(&snapshot.recipe) {
                Ok(records) => unknown.insert(records),
                Err(error @ StoreError::Damaged { .. }) => {
                    damage.get_or_insert_with(|| error.to_string());
                    continue;
                }
                Err(error) => return Err(error.into()),
            },
        };
        for record in snapshot.among(records) {
            if !seen.insert((snapshot.recipe, record.partition.clone(), record.key)) {
                continue;
            }
            let rows = match store.first_rows(&snapshot.recipe, &record, "files", usize::MAX) {
                Ok(rows) => rows,
                Err(error) => {
                    damage.get_or_insert_with(|| error.to_string());
                    continue;
                }
            };
            for row in rows {
                let text = |name: &str| {
                    let value = row.iter().find(|(of, _)| of == name)?;
                    serde_json::from_str::<String>(&value.1).ok()
                };
                let (Some(path), Some(digest)) = (text("path").map(PathBuf::from), text("digest")) else {
                    continue;
                };
                let real = path.canonicalize().ok();
                let path = std::iter::once(path)
                    .chain(real)
                    .find(|path| files.remove(path).is_some());
                if let Some(path) = path.filter(|path| !overwrite && !is_url(path))
                    && read_regular_file(storage, &path).is_ok_and(|bytes| Digest::of(&bytes).to_hex() != digest)
                {
                    changed.insert(path);
                }
            }
            if files.is_empty() {
                return Ok((changed, damage));
            }
        }
    }
    Ok((changed, damage))
}

/// The named recordings, with standard input as a file in `folder`.
fn input(given: &[String], folder: &Path) -> Result<Vec<String>, Failure> {
    let mut input = given.to_vec();
    if let Some(place) = input.iter().position(|text| text == STDIN) {
        if input.iter().filter(|text| *text == STDIN).count() > 1 {
            return Err(Failure::usage("`-` is given twice", "standard input can be read once"));
        }
        let path = folder.join("stdin");
        keep(&mut io::stdin().lock(), &path)?;
        input[place] = path.to_string_lossy().into_owned();
    }
    Ok(input)
}

/// Writes what is read to a file; of what is not a recording, only its beginning, as it may have no end.
fn keep(from: &mut dyn Read, path: &Path) -> Result<(), Failure> {
    let unreadable = |error| Failure::unreadable(format!("cannot read standard input: {error}"));
    let unwritten = |error| {
        let folder = path.parent().unwrap_or(path).display();
        Failure::unreadable(format!("standard input cannot be kept in {folder}: {error}"))
    };
    let mut file = File::create(path).map_err(unwritten)?;
    let mut block = Vec::new();
    let mut begun = false;
    loop {
        block.clear();
        io::Read::take(&mut *from, KEPT_AT_ONCE)
            .read_to_end(&mut block)
            .map_err(unreadable)?;
        file.write_all(&block).map_err(unwritten)?;
        // Behind a tag there may be anything, and a manifest is not a recording.
        let is_other = block.starts_with(b"ID3") || is_manifest_by_content(&block);
        let is_none = !begun && recognise(&block).is_err() && !is_other;
        if block.is_empty() || is_none {
            return Ok(());
        }
        begun = true;
    }
}

/// The formats that `--format` names, each once, in their order.
pub fn formats(given: &[String], known: &[WrittenFormat]) -> Result<Vec<WrittenFormat>, Failure> {
    let mut formats: Vec<WrittenFormat> = Vec::new();
    for name in given.iter().flat_map(|list| list.split(',')).map(str::trim) {
        let format = known.iter().find(|format| format.name == name).ok_or_else(|| {
            let names: Vec<&str> = known.iter().map(|format| format.name).collect();
            Failure::usage(
                format!("`{name}` is not a format"),
                format!("formats: {}", names.join(", ")),
            )
        })?;
        if !formats.contains(format) {
            formats.push(*format);
        }
    }
    Ok(formats)
}

/// The names of the formats that a stage writes, as the value of a parameter.
pub fn names_of(formats: &[WrittenFormat], stage: &str) -> serde_json::Value {
    let own = formats.iter().filter(|format| format.stage == stage);
    own.map(|format| format.name).collect()
}

/// Whether `--set` gives a parameter.
pub fn given(set: &[String], name: &str) -> bool {
    set.iter()
        .any(|set| set.split_once('=').is_some_and(|(set, _)| set.trim() == name))
}

fn run_arguments(
    arguments: &RecordingsArguments,
    pipeline: PathBuf,
    set: Vec<String>,
    state: &StateArguments,
) -> RunArguments {
    RunArguments {
        pipeline: PipelineArguments {
            pipeline,
            config: Vec::new(),
            set,
        },
        selection: SelectionArguments {
            from: None,
            until: None,
            only: Vec::new(),
            force: Vec::new(),
            partition: Vec::new(),
            workers: arguments.workers,
            state: state.clone(),
        },
        processes: ProcessArguments {
            hosts: None,
            process: None,
            launch: None,
            port: None,
            secret_file: None,
            join_timeout: 600.0,
        },
        watch: false,
        settle: 10.0,
        poll: false,
        keep: None,
        name: None,
        note: None,
        allow_shrink: false,
        keep_going: false,
        decide_memory: None,
        progress: arguments.progress,
        events: arguments.events.clone(),
        on_success: None,
        on_failure: None,
    }
}

/// The last run of a pipeline in a state directory.
fn last_run(storage: &Storage, pipeline: &str, state: &StateArguments) -> Result<PastRun, Failure> {
    past_run::find_planned(
        storage,
        &LookArguments {
            pipeline: Some(PathBuf::from(pipeline)),
            config: Vec::new(),
            set: Vec::new(),
            run: "latest".to_owned(),
            state: state.clone(),
        },
    )
}

/// The recordings for which a stage wrote files in a run.
fn written_by(run: &PastRun, stage: &str) -> Result<BTreeSet<String>, Failure> {
    let snapshots = run.snapshots()?;
    let Some(snapshot) = snapshots.of(stage) else {
        return Ok(BTreeSet::new());
    };
    let mut written = BTreeSet::new();
    for record in run.records_of(snapshot)? {
        let files = run.store.first_rows(&snapshot.recipe, &record, "files", 1);
        if !files.map_err(Failure::unreadable)?.is_empty() {
            written.insert(record.partition.to_string());
        }
    }
    Ok(written)
}

/// The recordings that a stage of a run reported as damaged, with the position in seconds.
fn damaged_in(run: &PastRun, stage: &str) -> Result<Vec<(String, String)>, Failure> {
    let snapshots = run.snapshots()?;
    let Some(snapshot) = snapshots.of(stage) else {
        return Ok(Vec::new());
    };
    let mut damaged = Vec::new();
    for record in run.records_of(snapshot)? {
        let rows = run.store.first_rows(&snapshot.recipe, &record, "recordings", 1);
        for row in rows.map_err(Failure::unreadable)? {
            let at = row.into_iter().find(|(name, _)| name == "damaged_at");
            damaged.extend(at.map(|(_, at)| (record.partition.to_string(), at)));
        }
    }
    Ok(damaged)
}

/// The recordings that a stage rejected in a run, with reasons; none where it was switched off.
fn refused_by(run: &PastRun, stage: &str) -> Result<Vec<(String, String)>, Failure> {
    let set = rejects::of_run(run, &run.plan()?, Some(stage))?;
    let mut refused: Vec<(String, String)> = Vec::new();
    for reject in set.iter() {
        let (_, partition, reject) = reject.map_err(Failure::unreadable)?;
        refused.push((partition.to_string(), format!("{} ({})", reject.detail, reject.reason)));
    }
    Ok(refused)
}
