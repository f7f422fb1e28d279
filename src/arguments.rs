//! The command line's arguments.

mod serve;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use flow_kernels::device::DeviceChoice;

pub use serve::ServeArguments;

/// Turns raw speech shards into a fine-tuned Parakeet TDT model: pipelines of stages, run on timely dataflow,
/// where only what changed is done again.
#[derive(Debug, Parser)]
#[command(name = "flow", version = VERSION, after_help = EXIT_CODES)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

/// The version, the commit and the features that this program was built from; the build script makes it.
pub const VERSION: &str = env!("FLOW_VERSION");

const EXIT_CODES: &str = "Exit codes: 0 done; 1 a stage failed, `doctor`: something fails, `test`: a test failed; 2 the pipeline, a setting or the command line is wrong; \
3 another run holds the state directory, or a folder that this one writes; 4 `plan --exit-code`: something would run, `run`: ended past a reject limit \
that only warns, `memory`: training does not fit; 70 a bug of ours; 129, 130, 143 interrupted.";

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a pipeline: whatever changed since the last run, and nothing else
    Run(RunArguments),
    /// Show what would run, and why; changes nothing
    Plan(PlanArguments),
    /// Check a pipeline: settings, parameters, edges and schemas
    Check(CheckArguments),
    /// Run the tests that a pipeline file holds: what stages give for small inputs
    Test(TestArguments),
    /// Show the rows that stages refused, counted by stage and reason
    Rejects(RejectsArguments),
    /// Show what became of a segment: where it went on, where it was refused and why, with its values
    Lineage(LineageArguments),
    /// Show the stage kinds and their settings
    Kinds(KindsArguments),
    /// Draw a pipeline's stages and edges
    Graph(GraphArguments),
    /// Show who runs in the state directory, and how far the last run came
    Status(LookArguments),
    /// Show the events of a run
    Log(LogArguments),
    /// Transcribe recordings: text, subtitles, words with times; what was transcribed is not transcribed again
    #[command(after_help = TRANSCRIBE_EXIT_CODES)]
    Transcribe(TranscribeArguments),
    /// Say who speaks when in recordings; what was diarized is not diarized again
    #[command(after_help = DIARIZE_EXIT_CODES)]
    Diarize(DiarizeArguments),
    /// Transcribe recordings over HTTP, as OpenAI's clients ask for it
    Serve(Box<ServeArguments>),
    /// Score results against references
    #[command(subcommand)]
    Evaluate(EvaluateCommand),
    /// Look at models on disk, convert and compare them
    #[command(subcommand)]
    Model(ModelCommand),
    /// Make n-gram language models for transcription
    #[command(subcommand)]
    Lm(LmCommand),
    /// Say how much memory training will need, what each switch would change, and the largest batch that fits
    Memory(MemoryArguments),
    /// Make room: remove from the state directory what the last runs did not use
    Gc(GcArguments),
    /// Make a folder with a pipeline that runs as it is, to begin from
    New(NewArguments),
    /// Look whether this machine has what runs need: exit code 1 if something fails
    Doctor(DoctorArguments),
    /// Print a completion script for a shell
    Completions(CompletionsArguments),
    /// Print the manual page, or write one for each command
    Man(ManArguments),
}

const TRANSCRIBE_EXIT_CODES: &str = "Exit codes: 0 done; 4 some recordings could not be read, 1 none could: each is named with the reason; others as of `flow`.";
const DIARIZE_EXIT_CODES: &str = TRANSCRIBE_EXIT_CODES;

#[derive(Args, Debug)]
pub struct TranscribeArguments {
    #[command(flatten)]
    pub recordings: RecordingsArguments,
    /// Formats to write, apart by commas: txt, json, srt, vtt, tsv, ctm, jsonl, parquet, and with --diarize rttm
    #[arg(long, value_name = "FORMATS", default_value = "txt")]
    pub format: Vec<String>,
    /// A .nemo archive, a model folder, a Hugging Face folder, or hf://OWNER/NAME; the bundled small model if
    /// not given
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// What goes through the model at once
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub window: WindowMethod,
    /// Keep so many hypotheses (beam search); 0 or 1 for greedy search, the default
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=64))]
    pub beam: Option<u16>,
    /// An n-gram language model in the ARPA format, such as `flow lm build` writes (its weight: --set lm_weight=0.3)
    #[arg(long, value_name = "FILE")]
    pub lm: Option<PathBuf>,
    /// Phrases that are to be heard more readily, one a line (their weight: --set boost_weight=1)
    #[arg(long, value_name = "FILE")]
    pub boost: Option<PathBuf>,
    /// What becomes of several channels
    #[arg(long, value_name = "HOW", default_value = "mix")]
    pub channels: ChannelUse,
    /// Where the model is computed: cpu, cuda or cuda:1
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: String,
    /// Say who speaks: of each segment and each word
    #[arg(long)]
    pub diarize: bool,
    #[command(flatten)]
    pub speakers: SpeakersArguments,
}

#[derive(Args, Debug)]
pub struct DiarizeArguments {
    #[command(flatten)]
    pub recordings: RecordingsArguments,
    /// Formats to write, apart by commas: rttm, json
    #[arg(long, value_name = "FORMATS", default_value = "rttm")]
    pub format: Vec<String>,
    #[command(flatten)]
    pub speakers: SpeakersArguments,
}

/// What commands that take recordings have in common.
#[derive(Args, Debug)]
pub struct RecordingsArguments {
    /// Recordings (FLAC, WAV, AIFF, CAF, MP3, Ogg with Vorbis or Opus, MP4 and M4A, QuickTime, Matroska, WebM): files, folders (all audio in them), patterns in quotes, or `-` for standard input
    #[arg(required = true)]
    pub input: Vec<String>,
    /// The folder that receives the files; folders below an input keep their shape [default: .]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print what is written, in the first of the formats; without --out no files are written
    #[arg(long)]
    pub stdout: bool,
    /// The value of another parameter of the command's pipeline, such as max_duration: see pipelines/transcribe.yaml,
    /// pipelines/diarize.yaml, docs/transcription.md and docs/speakers.md
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// The state directory, which knows what was done already [default: .flow in the folder of --out]
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Worker threads; one per core if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,
    /// What standard error shows meanwhile
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub progress: Progress,
    /// Write the events, one JSON object per line, to this file too
    #[arg(long, value_name = "FILE")]
    pub events: Option<PathBuf>,
}

/// Who may speak.
#[derive(Args, Debug)]
pub struct SpeakersArguments {
    /// A pyannote pipeline in place of the bundled networks: hf://pyannote/speaker-diarization-3.1,
    /// hf://pyannote/speaker-diarization-community-1, or a folder with config.yaml; see docs/speakers.md
    #[arg(long, value_name = "MODEL")]
    pub diarization_model: Option<String>,
    /// How many speakers each recording has
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub num_speakers: Option<u16>,
    /// Fewest speakers of a recording
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub min_speakers: Option<u16>,
    /// Most speakers of a recording
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub max_speakers: Option<u16>,
    /// Speakers whose names are known: JSON, {"NAME": "recording.wav", ...}; see docs/speakers.md
    #[arg(long, value_name = "FILE")]
    pub known_speakers: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum EvaluateCommand {
    /// Error rates of who speaks when, and of who said which word, against a reference
    Diarization(EvaluateDiarizationArguments),
}

#[derive(Args, Debug)]
pub struct EvaluateDiarizationArguments {
    /// The reference, of one or several recordings: RTTM; or with words STM, SegLST (JSON) or what `flow transcribe
    /// --diarize --format json` writes
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub reference: Vec<PathBuf>,
    /// What is scored, in any of these formats; words are scored where both sides have them
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub hypothesis: Vec<PathBuf>,
    /// The parts of recordings that are scored: UEM; recordings that it does not name are left out
    #[arg(long, value_name = "UEM")]
    pub uem: Option<PathBuf>,
    /// Seconds around each boundary of the reference that are left out, half before it and half after it (as
    /// pyannote.metrics; twice what md-eval is given)
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    pub collar: f64,
    /// Leave out where speakers of the reference overlap
    #[arg(long)]
    pub skip_overlap: bool,
    /// What is done to words before they are compared, as by evaluation.report
    #[arg(long, value_name = "HOW", default_value = "none")]
    pub normalize: Normalize,
    /// With `--normalize whisper_basic`: drop diacritics
    #[arg(long)]
    pub remove_diacritics: bool,
    /// With `--normalize`: a space between any two letters
    #[arg(long)]
    pub split_letters: bool,
    /// Write a page that shows who speaks when, and where that is wrong
    #[arg(long, value_name = "FILE.html")]
    pub page: Option<PathBuf>,
    /// Where the recordings are: the page plays them
    #[arg(long, value_name = "FOLDER", requires = "page")]
    pub audio: Option<PathBuf>,
    /// One JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// How texts are made alike before they are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Normalize {
    /// Case and punctuation count
    None,
    /// Whisper's BasicTextNormalizer, which takes vowel signs for punctuation
    WhisperBasic,
    /// The same, but marks such as vowel signs stay
    KeepMarks,
}

/// What of a recording goes through the model at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WindowMethod {
    /// The same as vad
    Auto,
    /// What lies between two pauses
    Vad,
    /// Chunks of a fixed length, the decoder's state carried from one to the next
    Chunked,
    /// The whole recording in one pass
    Full,
}

/// What becomes of the channels of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ChannelUse {
    /// Their mean is transcribed
    Mix,
    /// Each gets a transcript of its own: NAME.ch1, NAME.ch2 and so on
    Split,
}

#[derive(Args, Debug)]
pub struct NewArguments {
    /// The folder to make; it must not be there, or be empty
    pub folder: PathBuf,
    /// What to begin from
    #[arg(long, value_name = "WHAT", default_value = "finetune")]
    pub like: Start,
    /// With `own-kind`: a clone of flow's repository, which the new program is built with
    #[arg(long, value_name = "FOLDER", required_if_eq("like", "own-kind"))]
    pub source: Option<PathBuf>,
}

/// What a new folder holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Start {
    /// Shards to a fine-tuned model, with a small corpus and a small model
    Finetune,
    /// Shards to clean train and validation manifests, with a small corpus
    Manifest,
    /// A program with a stage kind of its own, and a pipeline that uses it
    OwnKind,
}

#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// Show a model's sizes, parameters, tokenizer and number types
    Info(ModelInfoArguments),
    /// Write a model in another form or number type, or with another vocabulary
    Convert(ModelConvertArguments),
    /// Compare two models: exit code 0 if they are the same, 1 if they differ, 2 if one cannot be read
    Diff(ModelDiffArguments),
}

#[derive(Args, Debug)]
pub struct ModelInfoArguments {
    /// A .nemo archive, a model folder (such as a checkpoint), a Hugging Face folder or a Lightning .ckpt
    pub model: String,
    /// Also list every tensor with its type and shape
    #[arg(long)]
    pub tensors: bool,
}

#[derive(Args, Debug)]
pub struct ModelConvertArguments {
    /// The model: a .nemo archive, a model folder, a Hugging Face folder or a Lightning .ckpt
    pub from: String,
    /// What to write. A name that ends in `.nemo` is an archive, one without an ending a model folder
    pub to: PathBuf,
    /// The form to write, where the name does not say it
    #[arg(long, value_name = "FORM")]
    pub format: Option<ModelFormat>,
    /// The number type of the weights; as they are stored if not given
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<ModelDtype>,
    /// A SentencePiece .model file: for a model that holds none, or another vocabulary
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// How pieces begin that the new vocabulary has and the old one has not
    #[arg(long, value_name = "HOW", default_value = "mean", requires = "tokenizer")]
    pub new_pieces: NewPieces,
    /// Seed of what begins at random
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
    /// Leave out the auxiliary CTC head, which serves training alone
    #[arg(long)]
    pub without_ctc: bool,
    /// Replace what stands at the target
    #[arg(long)]
    pub force: bool,
}

#[derive(Args, Debug)]
pub struct ModelDiffArguments {
    pub first: String,
    pub second: String,
}

#[derive(Debug, Subcommand)]
pub enum LmCommand {
    /// Count the texts of manifests and write an n-gram model in the ARPA format
    Build(LmBuildArguments),
}

#[derive(Args, Debug)]
pub struct LmBuildArguments {
    /// Manifests with texts: Parquet files, and NeMo's with one JSON object to a line
    #[arg(required = true)]
    pub manifests: Vec<PathBuf>,
    /// The model that the language model is for: a .nemo archive, a model folder, a Hugging Face folder or hf://OWNER/NAME
    #[arg(
        long,
        value_name = "MODEL",
        required_unless_present = "tokenizer",
        conflicts_with = "tokenizer"
    )]
    pub model: Option<String>,
    /// Its tokenizer instead: a SentencePiece .model file
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Tokens that n-grams are made of
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub order: u8,
    /// What to write; what stands there is replaced
    #[arg(long, value_name = "FILE.arpa")]
    pub out: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModelFormat {
    /// NeMo's archive
    Nemo,
    /// A folder as Hugging Face's transformers has it
    Hf,
    /// A model folder of our own
    Flow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModelDtype {
    F32,
    F16,
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NewPieces {
    /// As the mean of the rows of the old pieces they are made of
    Mean,
    /// At random, as in a model that begins from nothing
    Random,
}

/// Which pipeline, with which values.
#[derive(Args, Clone, Debug)]
pub struct PipelineArguments {
    /// The pipeline file
    pub pipeline: PathBuf,
    /// An overlay with values of parameters; may be given several times, later ones win
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,
    /// The value of a parameter, after all overlays: `--set train.max_steps=100`
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
}

/// What to run of it, and where.
#[derive(Args, Clone, Debug)]
pub struct SelectionArguments {
    /// Run this stage and what follows it, on what the stages before it last had (see --only)
    #[arg(long, value_name = "STAGE")]
    pub from: Option<String>,
    /// Run what this stage needs, and it
    #[arg(long, value_name = "STAGE")]
    pub until: Option<String>,
    /// Run this stage alone, on what the others last had in a complete run of this pipeline, even if the plan calls it stale
    /// (stages that cannot be undone refuse that); may be given several times
    #[arg(long, value_name = "STAGE")]
    pub only: Vec<String>,
    /// Run this stage (or `all`) even where nothing changed; may be given several times
    #[arg(long, value_name = "STAGE|all")]
    pub force: Vec<String>,
    /// Only this partition of the sources, by its name, or those that fit a pattern: `--partition 'hi/*'` (`*` and `?` stand
    /// for no `/`, `**` for any folders); may be given several times. Stages that need all partitions (global ones, exports,
    /// training, what reads a whole artifact) are left out, with all that follows them
    #[arg(long, value_name = "NAME", conflicts_with_all = ["from", "only"])]
    pub partition: Vec<String>,
    /// Worker threads; one per core if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,
    #[command(flatten)]
    pub state: StateArguments,
}

#[derive(Args, Clone, Debug)]
pub struct StateArguments {
    /// The state directory
    #[arg(long, value_name = "DIR", default_value = ".flow")]
    pub state: PathBuf,
}

#[derive(Args, Debug)]
pub struct RunArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    #[command(flatten)]
    pub selection: SelectionArguments,
    #[command(flatten)]
    pub processes: ProcessArguments,
    /// Replace manifests by ones with far fewer rows than those that stand there, too (see `max_shrink`)
    #[arg(long)]
    pub allow_shrink: bool,
    /// After a failure go on with the partitions and stages that do not depend on it; what does is left out and named, and
    /// all failures are listed at the end (exit code 1). Work of the failed part of the pipeline that was in flight is done
    /// again
    #[arg(long)]
    pub keep_going: bool,
    /// What standard error shows while the run goes on
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub progress: Progress,
    /// Write the events, one JSON object per line, to this file too
    #[arg(long, value_name = "FILE")]
    pub events: Option<PathBuf>,
    /// A shell command for the end of a run that did all its work (exit code 0 or 4); its standard input is a summary of
    /// the run, one JSON object. Its own exit code changes nothing
    #[arg(long, value_name = "CMD")]
    pub on_success: Option<String>,
    /// Likewise, for a run that failed, was refused or interrupted; not where none began (a mistake in the pipeline, say)
    #[arg(long, value_name = "CMD")]
    pub on_failure: Option<String>,
}

/// Over the options of several processes.
const PROCESSES: &str = "Several processes (only training ranks are spread; process 0 runs all other stages)";

/// Which of several processes this is. Only training is spread over processes: process 0 runs the pipeline and feeds the
/// training ranks of the others, which do nothing else.
#[derive(Args, Clone, Debug)]
pub struct ProcessArguments {
    /// A file with one line for each process, HOST or HOST:PORT; start the same command with the same pipeline and
    /// settings for each
    #[arg(long, help_heading = PROCESSES, value_name = "FILE", requires = "process")]
    pub hosts: Option<PathBuf>,
    /// Which line of the file of hosts this process is; the first is 0
    #[arg(long, help_heading = PROCESSES, value_name = "I", requires = "hosts")]
    pub process: Option<u32>,
    /// Read which process this is from the variables of what started it, which are not looked at otherwise
    #[arg(long, help_heading = PROCESSES, value_name = "BY", conflicts_with = "hosts")]
    pub launch: Option<Launcher>,
    /// The port at which process 0 waits for the others, where the file of hosts names none [default: 24500; with Slurm
    /// one that follows from the job's number, with torchrun the one after MASTER_PORT]
    #[arg(long, help_heading = PROCESSES, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    /// How long the processes wait for each other when they start
    #[arg(long, help_heading = PROCESSES, value_name = "SECONDS", default_value_t = 600.0, value_parser = seconds)]
    pub join_timeout: f64,
}

impl ProcessArguments {
    pub fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.join_timeout)
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= 1e6 => Ok(seconds),
        _ => Err("write a number of seconds above 0".into()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Launcher {
    /// Slurm's srun: SLURM_PROCID, SLURM_STEP_NUM_TASKS (else SLURM_NTASKS), SLURM_STEP_NODELIST (else SLURM_JOB_NODELIST)
    Slurm,
    /// torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    Torchrun,
    /// torchrun where RANK is set, else Slurm
    Auto,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Progress {
    /// Bars on a terminal, plain lines elsewhere
    Auto,
    /// One bar per stage in work
    Bars,
    /// One line per thing that happens
    Plain,
    /// One JSON object per line
    Json,
    /// Nothing but errors
    None,
}

#[derive(Args, Debug)]
pub struct MemoryArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// Memory of a device of each rank, as 8GB or 7.5GiB: says what would be there and what in host memory. Without it
    /// training is to fit into what this machine has available. Exit code 4 if it does not fit
    #[arg(long, value_name = "SIZE", value_parser = crate::commands::memory::bytes)]
    pub device_memory: Option<u64>,
    /// The longest clip, in seconds; the stage's max_duration if not given
    #[arg(long, value_name = "SECONDS")]
    pub longest: Option<f64>,
    /// Tokens per second of speech, at most
    #[arg(long, value_name = "N", default_value_t = flow_training::memory::TOKENS_PER_SECOND)]
    pub tokens_per_second: f64,
    /// Pieces of the vocabulary, where the pipeline makes its tokenizer itself or `init` is a model of the hub
    #[arg(long, value_name = "N")]
    pub vocabulary: Option<usize>,
    /// The training stage, where a pipeline has several
    #[arg(long, value_name = "STAGE")]
    pub stage: Option<String>,
}

#[derive(Args, Debug)]
pub struct GcArguments {
    /// Keep what this many of the last runs of each pipeline had, and their folders
    #[arg(long, value_name = "RUNS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: u32,
    /// Only say what would be removed
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub state: StateArguments,
}

#[derive(Args, Debug)]
pub struct PlanArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    #[command(flatten)]
    pub selection: SelectionArguments,
    /// Name every partition that would run
    #[arg(long)]
    pub partitions: bool,
    /// The plan as one JSON object
    #[arg(long)]
    pub json: bool,
    /// Exit with 0 if nothing would run, with 4 if something would
    #[arg(long)]
    pub exit_code: bool,
}

#[derive(Args, Debug)]
pub struct CheckArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// Also look whether the files are there, by making the plan
    #[arg(long)]
    pub deep: bool,
    #[command(flatten)]
    pub state: StateArguments,
}

#[derive(Args, Debug)]
pub struct TestArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// Run this test alone; may be given several times
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Run nothing: print a test with the first rows that this stage (or STAGE.PORT) had for a partition in the latest run,
    /// such as scan=hi/hi_0000; may be given several times
    #[arg(long, value_name = "STAGE=PARTITION", conflicts_with = "only")]
    pub record: Vec<String>,
    /// With --record: the state directory. Tests have one of their own, which is removed
    #[arg(long, value_name = "DIR", default_value = ".flow")]
    pub state: PathBuf,
}

/// Which run to look at.
#[derive(Args, Clone, Debug)]
pub struct LookArguments {
    /// Look at runs of this pipeline only
    pub pipeline: Option<PathBuf>,
    /// With the values of this overlay, as given to `flow run`; may be given several times
    #[arg(long, value_name = "FILE", requires = "pipeline", conflicts_with = "run")]
    pub config: Vec<PathBuf>,
    /// With this value of a parameter, as given to `flow run`: the latest run that had the same value of every parameter
    #[arg(long, value_name = "NAME=VALUE", requires = "pipeline", conflicts_with = "run")]
    pub set: Vec<String>,
    /// The run: `latest`, or its name
    #[arg(long, value_name = "ID", default_value = "latest")]
    pub run: String,
    #[command(flatten)]
    pub state: StateArguments,
}

#[derive(Args, Debug)]
pub struct RejectsArguments {
    #[command(flatten)]
    pub look: LookArguments,
    /// Rejects of this stage only, row by row
    #[arg(long)]
    pub stage: Option<String>,
    /// Rejects with this reason only, row by row
    #[arg(long)]
    pub reason: Option<String>,
    /// Write the rejects to this parquet file instead
    #[arg(long, value_name = "FILE")]
    pub export: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
pub struct LineageArguments {
    /// The segment, as LANG/SHARD/SEGMENT, or SEGMENT alone to look in all partitions
    pub segment: String,
    #[command(flatten)]
    pub look: LookArguments,
}

#[derive(Args, Debug)]
pub struct LogArguments {
    #[command(flatten)]
    pub look: LookArguments,
    /// The events as JSON lines, as they were written
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct KindsArguments {
    /// Show this kind with all its settings
    pub kind: Option<String>,
    /// The JSON schema: of the kind's settings, or of pipeline files, for editors
    #[arg(long)]
    pub schema: bool,
    /// Write the pages of all kinds and the schema of pipeline files below this folder
    #[arg(long, value_name = "DIR", conflicts_with_all = ["kind", "schema"])]
    pub docs: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub struct GraphArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// In which form
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
pub struct DoctorArguments {
    /// One JSON object instead of lines
    #[arg(long)]
    pub json: bool,
    /// Also compute with a small model that the program carries, and compare with NeMo's numbers
    #[arg(long)]
    pub selftest: bool,
    /// Where training is to run: `cpu`, `cuda` or `cuda:1`; what it needs must be there, and the self-test is computed there
    #[arg(long, default_value = "cpu")]
    pub device: DeviceChoice,
    #[command(flatten)]
    pub state: StateArguments,
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
