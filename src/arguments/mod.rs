//! The command line's arguments.

mod align;
#[cfg(feature = "service")]
mod jobs;
mod look;
mod model;
mod recordings;
mod run;
#[cfg(feature = "service")]
mod serve;
#[cfg(feature = "service")]
mod ui;
mod urls;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

pub use align::AlignArguments;
pub use flow_cli::arguments::{Decoder, PipelineArguments, StateArguments, WindowMethod, written};
use flow_cli_doctor::DoctorArguments;
pub use flow_cli_evaluate::{CompareFormat, EvaluateCommand};
use flow_cli_memory::MemoryArguments;
use flow_cli_speakers::VoicesArguments;
#[cfg(feature = "service")]
pub use jobs::{JobsArguments, JobsCommand};
pub use look::{CompareArguments, LineageArguments, LogArguments, LookArguments, RejectsArguments};
pub use model::{
    LmBuildArguments, LmCommand, ModelCommand, ModelConvertArguments, ModelDiffArguments, ModelFormat,
    ModelInfoArguments, NewPieces,
};
pub use recordings::{
    ChannelUse, Coverage, DiarizeArguments, RecordingsArguments, SpeakersArguments, TranscribeArguments,
};
pub use run::{
    CheckArguments, Launcher, PlanArguments, ProcessArguments, Progress, RunArguments, SelectionArguments,
    TestArguments,
};
#[cfg(feature = "service")]
pub use serve::ServeArguments;
#[cfg(feature = "service")]
pub use ui::UiArguments;

/// Fine-tune Parakeet speech models (TDT, RNN-T, CTC) on speech corpora, and transcribe recordings. Work whose inputs
/// and settings have not changed is not repeated.
#[derive(Debug, Parser)]
#[command(name = "flow", version = VERSION, after_help = EXIT_CODES)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

/// Reads the command line. A URL where an argument is a path of this machine is an error of its own.
pub fn parse(words: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Arguments, clap::Error> {
    let mut command = Arguments::command();
    let matches = command.try_get_matches_from_mut(words);
    #[cfg(not(feature = "service"))]
    let matches = matches.map_err(|error| without_service(&mut command, error));
    let matches = matches?;
    urls::refuse(&command, &matches)?;
    Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// Says of a command that other builds have why this one does not.
#[cfg(not(feature = "service"))]
fn without_service(command: &mut clap::Command, error: clap::Error) -> clap::Error {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(name)) if matches!(&name[..], "serve" | "jobs" | "ui") => {
            let message = format!("`flow {name}`: this program was built without the feature `service`");
            command.error(ErrorKind::InvalidSubcommand, message)
        }
        _ => error,
    }
}

/// The version, the commit and the features that this program was built from; the build script makes it.
pub const VERSION: &str = env!("FLOW_VERSION");

/// The commit that this program was built from, or `unknown`.
pub const COMMIT: &str = env!("FLOW_COMMIT");

const EXIT_CODES: &str = "Exit codes: 0 done; 1 a stage failed, `doctor`: a check failed, `test`: a test failed; 2 the pipeline, a setting or the command line is wrong; \
3 another run is using the state directory, or a folder that this one writes; 4 `plan --exit-code`: something would run, `run`: a reject limit \
that only warns was exceeded, `memory`: training does not fit; 5 `transcribe --require-coverage`: too little of the speech has words; 70 a bug in flow; 129, 130, 143 interrupted.";

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a pipeline: the parts whose inputs or settings changed since the last run
    Run(RunArguments),
    /// Show what a run would do, and why, without running anything
    Plan(PlanArguments),
    /// Check a pipeline: settings, parameters, edges and schemas
    Check(CheckArguments),
    /// Run the tests of a pipeline file, which compare the outputs of stages for small inputs
    Test(TestArguments),
    /// Show the rejected rows, counted by stage and reason
    Rejects(RejectsArguments),
    /// Show the path of a segment through the stages: its values, and where and why it was rejected
    Lineage(LineageArguments),
    /// Show the stage kinds and their settings
    Kinds(KindsArguments),
    /// Draw the stages and edges of a pipeline
    Graph(GraphArguments),
    /// Show which run holds the state directory, and the progress of the last run
    Status(LookArguments),
    /// Show the events of a run
    Log(LogArguments),
    /// Compare runs: their figures, and the settings that differ
    Compare(CompareArguments),
    /// Transcribe recordings: text, subtitles, words with times; unchanged recordings are skipped
    #[command(after_help = TRANSCRIBE_EXIT_CODES)]
    Transcribe(TranscribeArguments),
    /// Diarize recordings: who speaks when; unchanged recordings are skipped
    #[command(after_help = DIARIZE_EXIT_CODES)]
    Diarize(DiarizeArguments),
    /// Keep voices over recordings: who is whom in a folder of diarizations, with names, review and undo
    #[command(after_help = SPEAKERS_EXIT_CODES)]
    Speakers(VoicesArguments),
    /// Align a recording with its text: times of words and segments, what was not said, and speech that is not in the text
    Align(AlignArguments),
    #[cfg(feature = "service")]
    /// Serve transcription over HTTP, with OpenAI's API
    Serve(Box<ServeArguments>),
    #[cfg(feature = "service")]
    /// List, show and cancel the jobs of a service, and print their results
    Jobs(JobsArguments),
    #[cfg(feature = "service")]
    /// Browse runs, rows, recordings and transcripts in a browser on this machine
    Ui(UiArguments),
    /// Score results against references
    #[command(subcommand)]
    Evaluate(EvaluateCommand),
    /// Show, convert and compare models on disk
    #[command(subcommand)]
    Model(ModelCommand),
    /// Push a dataset or a model to the Hugging Face hub; files that are already there are not sent again
    Push(PushArguments),
    /// Build n-gram language models for transcription
    #[command(subcommand)]
    Lm(LmCommand),
    /// Predict the memory that training needs, the effect of each memory setting, and the largest batch that fits; or,
    /// for a model (`flow memory small.nemo`), the memory that `flow serve` needs to decode with it
    Memory(MemoryArguments),
    /// Remove from the state directory what the last runs did not use (garbage collection)
    Gc(GcArguments),
    /// Format pipelines: indentation, spaces and blank lines. Values and comments stay
    Fmt(FmtArguments),
    /// Create a project folder with a pipeline that runs without changes
    New(NewArguments),
    /// Check that this machine has what runs need; exit code 1 if a check fails
    Doctor(DoctorArguments),
    /// Print a completion script for a shell
    Completions(CompletionsArguments),
    /// Print the manual page, or write one for each command
    Man(ManArguments),
}

const TRANSCRIBE_EXIT_CODES: &str = "Exit codes: 0 done; 4 some recordings could not be read, 1 none could: each is named with the reason; 5 less of the speech has words than --require-coverage; others as for `flow`.";
const DIARIZE_EXIT_CODES: &str = "Exit codes: 0 done; 4 some recordings could not be read, 1 none could: each is named with the reason; others as for `flow`.";

const SPEAKERS_EXIT_CODES: &str = "Exit codes: 0 done; `add`, `apply`: 4 some files could not be used, 1 none could: each is named with the reason; others as for `flow`.";

#[derive(Args, Debug)]
pub struct PushArguments {
    /// The folder: a dataset that `manifest.write` wrote with `format: huggingface`, or a model that training wrote
    pub folder: PathBuf,
    /// hf://datasets/OWNER/NAME, or hf://OWNER/NAME for a model
    #[arg(value_name = "REPOSITORY")]
    pub to: String,
    /// The branch, which is created if it does not exist; main if not given
    #[arg(long, value_name = "BRANCH")]
    pub revision: Option<String>,
    /// Make a new repository private
    #[arg(long)]
    pub private: bool,
    /// The commit message
    #[arg(long, value_name = "TEXT", default_value = "Upload with flow")]
    pub message: String,
    /// Show what would be pushed, and the card of a model, without contacting the hub
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub state: StateArguments,
}

#[derive(Args, Debug)]
pub struct FmtArguments {
    /// Files, and folders whose pipelines are formatted; `-` formats standard input to standard output
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Write nothing, and list the files that would change; exit code 1 if there are any
    #[arg(long)]
    pub check: bool,
}

#[derive(Args, Debug)]
pub struct NewArguments {
    /// The folder to create; it must not exist, or must be empty
    pub folder: PathBuf,
    /// The template
    #[arg(long, value_name = "WHAT", default_value = "finetune")]
    pub like: Start,
    /// With `own-kind`: a clone of flow's repository, which the new program is built with
    #[arg(long, value_name = "FOLDER", required_if_eq("like", "own-kind"))]
    pub source: Option<PathBuf>,
}

/// Templates of a new folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Start {
    /// Shards to a fine-tuned model, with a small corpus and a small model
    Finetune,
    /// Shards to clean train and validation manifests, with a small corpus
    Manifest,
    /// A program with a stage kind of its own, and a pipeline that uses it
    OwnKind,
}

#[derive(Args, Debug)]
pub struct GcArguments {
    /// Keep what this many last runs of each pipeline used, and the folders of these runs
    #[arg(long, value_name = "RUNS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: u32,
    /// Only show what would be removed
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub state: StateArguments,
}

#[derive(Args, Debug)]
pub struct KindsArguments {
    /// Show this kind with all its settings
    pub kind: Option<String>,
    /// Print the JSON schema of the kind's settings, or without KIND that of pipeline files (for editors)
    #[arg(long)]
    pub schema: bool,
    /// Write the pages of all kinds and the schema of pipeline files into this folder
    #[arg(long, value_name = "DIR", conflicts_with_all = ["kind", "schema"])]
    pub docs: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub struct GraphArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// The output format
    #[arg(long, default_value = "mermaid")]
    pub format: GraphFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GraphFormat {
    Mermaid,
    Dot,
    Svg,
}

#[derive(Args, Debug)]
pub struct CompletionsArguments {
    /// The shell
    pub shell: clap_complete::Shell,
}

#[derive(Args, Debug)]
pub struct ManArguments {
    /// Write a page for each command into this folder, as flow.1, flow-run.1, ...
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}
