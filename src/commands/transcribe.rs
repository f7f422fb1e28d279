//! `flow transcribe`: recordings to transcripts, by the pipeline `transcribe` that the program carries.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use flow_hub::{Hub, HubReference};
use flow_model::checkpoint::OpenModel;
use flow_model::tokenizer::Tokenizer;
use flow_runtime::escape::escape_line;
use flow_runtime::registry::Registry;
use flow_runtime::store::{Access, Store};
use flow_transcription::channels::{self, listed};
use flow_transcription::listing::Recording;
use flow_transcription::recognizer::languages;
use flow_transcription::{Format, TranscriptionError};
use tempfile::TempDir;

use super::past_run::PastRun;
use super::{rejects, run};
use crate::arguments::{
    ChannelUse, LookArguments, PipelineArguments, ProcessArguments, Progress, RunArguments, SelectionArguments,
    StateArguments, TranscribeArguments,
};
use crate::bundle;
use crate::failure::{Exit, Failure};
use crate::table::plural;

/// The stage of the pipeline that transcribes.
const STAGE: &str = "transcribe";
/// The stage of the pipeline that writes.
const WRITE: &str = "write";
/// Parameters of the pipeline that options give.
const OPTIONS: [(&str, &str); 5] = [
    ("input", "INPUT..."),
    ("channels", "--channels"),
    ("out", "--out"),
    ("formats", "--format"),
    ("device", "--device"),
];
/// The name of standard input as a recording.
const STDIN: &str = "-";

pub fn transcribe(arguments: &TranscribeArguments, registry: &Registry, out: &mut dyn Write) -> Result<Exit, Failure> {
    let carried = bundle::pipeline(STAGE).map_err(unwritable)?;
    let pipeline = carried.ok_or_else(|| Failure::Bug(format!("the pipeline {STAGE} is missing")))?;
    let speaks = arguments.progress != Progress::None;
    // What is read from standard input, and printed without being kept, lies in folders that go with this value.
    let (spooled, printed) = (TempDir::new()?, TempDir::new()?);
    let input = input(&arguments.input, spooled.path())?;
    let folder = match &arguments.out {
        Some(folder) => folder.clone(),
        None if arguments.stdout => printed.path().to_owned(),
        None => PathBuf::from("."),
    };
    let formats = formats(&arguments.format)?;
    for (name, option) in OPTIONS {
        if given(&arguments.set, name) {
            let message = format!("`--set {name}=...` is not for this command");
            return Err(Failure::usage(
                message,
                format!("it has an option of its own: {option}"),
            ));
        }
    }
    let Some(out_folder) = folder.to_str() else {
        let message = format!("{} is not UTF-8", folder.display());
        return Err(Failure::usage(message, "give --out another name"));
    };
    refuse_files_of_others(arguments, &input, &folder, &formats)?;
    let mut set = vec![
        format!("input={}", json(&input)),
        format!("out={}", json(&[out_folder.to_owned()])[0]),
        format!("formats={}", json(&formats)),
        format!("channels={}", channel_use(arguments)),
        format!("device={}", arguments.device),
    ];
    match &arguments.model {
        Some(model) => set.push(format!("model={}", local_model(model, speaks)?)),
        None if speaks && !given(&arguments.set, "model") => tell_languages(&pipeline),
        None => {}
    }
    set.extend(arguments.set.iter().cloned());
    let state = state(arguments, &folder);
    let outcome = run::run(
        &run_arguments(arguments, pipeline, set, &state),
        registry,
        &mut io::sink(),
    )?;
    if outcome != Exit::Done && outcome != Exit::Noted {
        return Ok(outcome);
    }

    let listed = names(arguments, &input).map_err(Failure::unreadable)?;
    let refused = refused(&run_of(&state)?)?;
    let is_refused = |name: &str| refused.iter().any(|(refused, _)| refused == name);
    for (name, why) in &refused {
        let file = listed.iter().find(|recording| recording.name == *name);
        let shown = file.map_or(name.as_str(), |recording| recording.file.as_str());
        writeln!(
            io::stderr(),
            "warning: {} was not transcribed: {}",
            escape_line(shown),
            escape_line(why)
        )?;
    }
    for (name, at) in damaged(&run_of(&state)?)? {
        writeln!(
            io::stderr(),
            "warning: {} is damaged at {at} s; what comes after is not transcribed",
            escape_line(&name)
        )?;
    }
    let done: Vec<_> = listed.iter().filter(|recording| !is_refused(&recording.name)).collect();
    if arguments.stdout {
        for recording in &done {
            if listed.len() > 1 {
                writeln!(out, "==> {} <==", recording.file)?;
            }
            let path = folder.join(format!("{}.{}", recording.name, formats[0]));
            let text = fs::read_to_string(&path)
                .map_err(|error| Failure::unreadable(format!("cannot read {}: {error}", path.display())))?;
            out.write_all(text.as_bytes())?;
        }
        out.flush()?;
    }
    if speaks && (arguments.out.is_some() || !arguments.stdout) {
        writeln!(
            io::stderr(),
            "{} in {}",
            plural(done.len() as u64, "transcript"),
            escape_line(&folder.to_string_lossy())
        )?;
    }
    Ok(match (done.is_empty(), refused.is_empty()) {
        (_, true) => Exit::Done,
        (false, false) => Exit::Noted,
        (true, false) => Exit::Failed,
    })
}

fn unwritable(error: io::Error) -> Failure {
    Failure::unreadable(format!("the files that flow carries cannot be written: {error}"))
}

/// Names of files as the value of a parameter: as they are, whatever stands in them.
fn json(texts: &[String]) -> serde_json::Value {
    texts.iter().map(|text| text.replace("${", "$${")).collect()
}

/// The state directory: where it is known what was transcribed.
fn state(arguments: &TranscribeArguments, folder: &Path) -> StateArguments {
    StateArguments {
        state: arguments.state.clone().unwrap_or_else(|| folder.join(".flow")),
    }
}

/// The word for [`ChannelUse`] in the pipeline.
fn channel_use(arguments: &TranscribeArguments) -> &'static str {
    match arguments.channels {
        ChannelUse::Mix => "mix",
        ChannelUse::Split => "split",
    }
}

/// What is to be transcribed, with the names of the transcripts.
fn names(arguments: &TranscribeArguments, input: &[String]) -> Result<Vec<Recording>, TranscriptionError> {
    let channels = match arguments.channels {
        ChannelUse::Mix => channels::ChannelUse::Mix,
        ChannelUse::Split => channels::ChannelUse::Split,
    };
    let listed = listed(input, channels)?;
    Ok(listed.into_iter().map(|listed| listed.recording).collect())
}

/// Refuses to write over files that are no transcripts of an earlier run: a corpus may have texts beside its recordings.
fn refuse_files_of_others(
    arguments: &TranscribeArguments,
    input: &[String],
    folder: &Path,
    formats: &[String],
) -> Result<(), Failure> {
    // What cannot be listed is told by the run.
    let Ok(listed) = names(arguments, input) else {
        return Ok(());
    };
    let paths = listed.iter().flat_map(|recording| {
        let path = |format: &String| folder.join(format!("{}.{format}", recording.name));
        formats.iter().map(path)
    });
    let standing: Vec<PathBuf> = paths.filter(|path| path.exists()).collect();
    if standing.is_empty() {
        return Ok(());
    }
    let written = written(state(arguments, folder))?;
    match standing.iter().find(|path| !written.contains(*path)) {
        None => Ok(()),
        Some(path) => Err(Failure::usage(
            format!(
                "{} is there already, and no transcript of an earlier run",
                path.display()
            ),
            "name another folder with --out, or move the file away",
        )),
    }
}

/// The files that runs in a state directory wrote, as far as it is known.
fn written(state: StateArguments) -> Result<BTreeSet<PathBuf>, Failure> {
    let mut written = BTreeSet::new();
    if !state.state.join("FORMAT").is_file() {
        return Ok(written);
    }
    let store = Store::open(&state.state, Access::Read)?;
    for id in store.runs()? {
        let Some(snapshots) = store.run_snapshots(&id)? else {
            continue;
        };
        let Some(snapshot) = snapshots.of(WRITE) else { continue };
        for record in snapshot.among(&store.records(&snapshot.recipe)?) {
            let rows = store.first_rows(&snapshot.recipe, &record, "files", usize::MAX);
            for row in rows.map_err(Failure::unreadable)? {
                let path = row.iter().find(|(name, _)| name == "path");
                let path = path.and_then(|(_, value)| serde_json::from_str::<PathBuf>(value).ok());
                written.extend(path);
            }
        }
    }
    Ok(written)
}

/// What is to be transcribed, with standard input as a file in `folder`.
fn input(given: &[String], folder: &Path) -> Result<Vec<String>, Failure> {
    let mut input = given.to_vec();
    if let Some(place) = input.iter().position(|text| text == STDIN) {
        if input.iter().filter(|text| *text == STDIN).count() > 1 {
            return Err(Failure::usage("`-` is given twice", "standard input can be read once"));
        }
        let path = folder.join("stdin");
        let mut file = File::create(&path)?;
        io::copy(&mut io::stdin().lock(), &mut file)
            .map_err(|error| Failure::unreadable(format!("cannot read standard input: {error}")))?;
        input[place] = path.to_string_lossy().into_owned();
    }
    Ok(input)
}

/// The formats that `--format` names, each once, in their order.
fn formats(given: &[String]) -> Result<Vec<String>, Failure> {
    let mut formats: Vec<String> = Vec::new();
    for name in given.iter().flat_map(|list| list.split(',')).map(str::trim) {
        let format: Format = name.parse().map_err(|_| {
            let names = Format::ALL.map(Format::name).join(", ");
            Failure::usage(format!("`{name}` is no format"), format!("formats: {names}"))
        })?;
        if !formats.iter().any(|standing| standing == format.name()) {
            formats.push(format.name().to_owned());
        }
    }
    Ok(formats)
}

/// Whether `--set` gives a parameter.
fn given(set: &[String], name: &str) -> bool {
    set.iter()
        .any(|set| set.split_once('=').is_some_and(|(set, _)| set.trim() == name))
}

/// The path of a model, which is fetched first where it is one of the hub.
fn local_model(model: &str, speaks: bool) -> Result<String, Failure> {
    let wrong = |error: flow_hub::HubError| Failure::usage(error.to_string(), "give a file or folder instead");
    let Some(reference) = HubReference::parse(model).transpose().map_err(wrong)? else {
        return Ok(model.to_owned());
    };
    let mut tell = |line: &str| {
        if speaks {
            // A screen that cannot be written must not end the download.
            let _ = writeln!(io::stderr(), "{line}");
        }
        true
    };
    let fetched = Hub::from_environment().and_then(|hub| hub.fetch(&reference, &mut tell));
    let path = fetched.map_err(Failure::unreadable)?;
    // None only where the callback cancels, which this one never does.
    Ok(path.map_or_else(|| model.to_owned(), |path| path.to_string_lossy().into_owned()))
}

/// Says what the bundled model is good for.
fn tell_languages(pipeline: &Path) {
    let carried = pipeline.parent().and_then(Path::parent).unwrap_or(pipeline);
    let opened = OpenModel::open(&carried.join("configs/models/small.nemo"))
        .ok()
        .and_then(|opened| opened.tokenizer);
    let Some(tokenizer) = opened.and_then(|bytes| Tokenizer::from_bytes(&bytes).ok()) else {
        // The run says what is wrong with it.
        return;
    };
    let _ = writeln!(
        io::stderr(),
        "no --model is given: the bundled small model, made for trying things out, knows {}",
        languages(&tokenizer).join(", ")
    );
}

fn run_arguments(
    arguments: &TranscribeArguments,
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
            workers: arguments.workers,
            state: state.clone(),
        },
        processes: ProcessArguments {
            hosts: None,
            process: None,
            launch: None,
            port: None,
            join_timeout: 600.0,
        },
        allow_shrink: false,
        progress: arguments.progress,
        events: arguments.events.clone(),
        on_success: None,
        on_failure: None,
    }
}

/// The last run in a state directory.
fn run_of(state: &StateArguments) -> Result<PastRun, Failure> {
    PastRun::find_planned(&LookArguments {
        pipeline: Some(PathBuf::from(STAGE)),
        config: Vec::new(),
        set: Vec::new(),
        run: "latest".to_owned(),
        state: state.clone(),
    })
}

/// The recordings of a run that are damaged, and at which second.
fn damaged(run: &PastRun) -> Result<Vec<(String, String)>, Failure> {
    let snapshots = run.snapshots()?;
    let Some(snapshot) = snapshots.of(STAGE) else {
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

/// The recordings that a run refused, and why.
fn refused(run: &PastRun) -> Result<Vec<(String, String)>, Failure> {
    let set = rejects::of_run(run, &run.plan()?, Some(STAGE))?;
    let mut refused: Vec<(String, String)> = Vec::new();
    for reject in set.iter() {
        let (_, partition, reject) = reject.map_err(Failure::unreadable)?;
        refused.push((partition.to_string(), format!("{} ({})", reject.detail, reject.reason)));
    }
    Ok(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_read_from_lists() {
        let of = |given: &[&str]| {
            let given: Vec<String> = given.iter().map(|text| (*text).to_owned()).collect();
            formats(&given)
        };
        assert_eq!(of(&["srt,txt", " json", "txt"]).unwrap(), ["srt", "txt", "json"]);
        assert!(of(&["docx"]).unwrap_err().to_string().contains("`docx` is no format"));
        assert!(of(&[""]).is_err());
    }

    #[test]
    fn a_model_that_is_no_reference_is_a_path() {
        assert_eq!(local_model("models/a.nemo", false).unwrap(), "models/a.nemo");
        assert!(local_model("hf://only-one-part", false).is_err());
        assert!(given(&["model=x".to_owned()], "model") && !given(&["model_x=1".to_owned()], "model"));
    }
}
