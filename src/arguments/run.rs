//! Arguments of the commands that plan, run, check and test a pipeline.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, ValueEnum};
use flow_cli::arguments::{PipelineArguments, StateArguments, sizes};

/// Selects the stages to run, and the state directory.
#[derive(Args, Clone, Debug)]
pub struct SelectionArguments {
    /// Run this stage and all stages after it, with the last results of the stages before it (see --only)
    #[arg(long, value_name = "STAGE")]
    pub from: Option<String>,
    /// Run this stage and all stages that it needs
    #[arg(long, value_name = "STAGE")]
    pub until: Option<String>,
    /// Run only this stage, with the last results of the others from a complete run of this pipeline, even if these are
    /// out of date (stages whose effect cannot be undone refuse such inputs); may be given several times
    #[arg(long, value_name = "STAGE")]
    pub only: Vec<String>,
    /// Run this stage (or `all`) even if nothing changed; may be given several times
    #[arg(long, value_name = "STAGE|all")]
    pub force: Vec<String>,
    /// Run only this partition of the sources, or those that match a pattern: `--partition 'hi/*'` (`*` and `?` do not
    /// match `/`, `**` matches any folders); may be given several times. Stages that need all partitions (global
    /// stages, exports, training, stages that read a whole artifact) are skipped, with all stages after them
    #[arg(long, value_name = "NAME", conflicts_with_all = ["from", "only"])]
    pub partition: Vec<String>,
    /// Worker threads; one per core if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,
    #[command(flatten)]
    pub state: StateArguments,
}

#[derive(Args, Debug)]
pub struct RunArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    #[command(flatten)]
    pub selection: SelectionArguments,
    #[command(flatten)]
    pub processes: ProcessArguments,
    /// A name for the run, which other commands accept instead of its id: `flow compare warm cold`
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// A note about the run, for its page and `flow compare`
    #[arg(long, value_name = "TEXT")]
    pub note: Option<String>,
    /// Also replace manifests by ones with far fewer rows (see `max_shrink`)
    #[arg(long)]
    pub allow_shrink: bool,
    /// After a failure, continue with the partitions and stages that do not depend on it. Those that do are skipped and
    /// named, and all failures are listed at the end (exit code 1). Partitions that were in flight in the failed part
    /// of the pipeline are computed again
    #[arg(long)]
    pub keep_going: bool,
    /// Memory for the keys that deduplication and splits sort, such as 4GiB (at least 16MiB); half of the available
    /// memory if not given. Keys that do not fit are sorted on disk, in the state directory
    #[arg(long, value_name = "SIZE", value_parser = sizes::bytes)]
    pub decide_memory: Option<u64>,
    /// Keep running, and run the pipeline again whenever its files change, or partitions of its sources are added,
    /// changed or removed. SIGTERM and SIGINT end it. Not with several processes
    #[arg(long, conflicts_with_all = ["hosts", "launch", "force", "from"])]
    pub watch: bool,
    /// With --watch: how long sources must stay unchanged before they are read (they are read after ten times that in
    /// any case)
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = seconds, requires = "watch")]
    pub settle: f64,
    /// With --watch: only look for changes at intervals, for file systems that do not report them
    #[arg(long, requires = "watch")]
    pub poll: bool,
    /// With --watch: after every so many runs, remove what the last so many did not use, as `flow gc --keep RUNS` does
    #[arg(long, value_name = "RUNS", requires = "watch", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: Option<u32>,
    /// What to show on standard error during the run
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub progress: Progress,
    /// Also write the events to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub events: Option<PathBuf>,
    /// A shell command to run after a successful run (exit code 0 or 4). Its standard input is a summary of the run,
    /// one JSON object. Its own exit code has no effect
    #[arg(long, value_name = "CMD")]
    pub on_success: Option<String>,
    /// The same for a run that failed, was refused or was interrupted. It is not called if no run began, for example
    /// because of a mistake in the pipeline
    #[arg(long, value_name = "CMD")]
    pub on_failure: Option<String>,
}

/// Heading of the options for several processes.
const PROCESSES: &str = "Several processes (see docs/machines.md)";

/// Options for a run of several processes: process 0 plans, and all compute their share of the partitions and train.
#[derive(Args, Clone, Debug)]
#[command(group = ArgGroup::new("others").args(["hosts", "launch"]))]
pub struct ProcessArguments {
    /// A file with one line for each process, HOST or HOST:PORT. Start the same command with the same pipeline and
    /// settings for each process. They share the state directory
    #[arg(long, help_heading = PROCESSES, value_name = "FILE", requires = "process")]
    pub hosts: Option<PathBuf>,
    /// The number of the line of the hosts file that names this process, from 0
    #[arg(long, help_heading = PROCESSES, value_name = "I", requires = "hosts")]
    pub process: Option<u32>,
    /// Read the number of this process and the address of process 0 from the launcher's environment variables, which
    /// are ignored without this option
    #[arg(long, help_heading = PROCESSES, value_name = "BY", conflicts_with = "hosts")]
    pub launch: Option<Launcher>,
    /// The port on which process 0 waits for the others, if the hosts file names none [default: 24500; with Slurm
    /// computed from the numbers of the job and the step, with torchrun MASTER_PORT + 1]
    #[arg(long, help_heading = PROCESSES, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    /// A file with a secret of at least 16 bytes, the same for all processes, which prove to each other that they know
    /// it. Nothing is encrypted
    #[arg(long, help_heading = PROCESSES, value_name = "FILE", requires = "others")]
    pub secret_file: Option<PathBuf>,
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
        _ => Err("write a number of seconds above 0, at most 1000000".into()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Launcher {
    /// Slurm's srun: SLURM_PROCID, SLURM_STEP_NUM_TASKS (else SLURM_NTASKS), SLURM_STEP_NODELIST (else SLURM_JOB_NODELIST)
    Slurm,
    /// torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    Torchrun,
    /// torchrun if RANK is set, else Slurm
    Auto,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Progress {
    /// Bars on a terminal, plain lines elsewhere
    Auto,
    /// One bar for each stage that is running
    Bars,
    /// One line per event
    Plain,
    /// One JSON object per line
    Json,
    /// Only errors
    None,
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
    /// Print the plan as one JSON object
    #[arg(long)]
    pub json: bool,
    /// Exit with code 4 if something would run, with 0 if nothing would
    #[arg(long)]
    pub exit_code: bool,
}

#[derive(Args, Debug)]
pub struct CheckArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// Also check that the files exist, by making the plan, and decode some recordings of each manifest
    #[arg(long)]
    pub deep: bool,
    /// List all parameters, including those of included pipelines: name, value and help
    #[arg(long)]
    pub params: bool,
    #[command(flatten)]
    pub state: StateArguments,
}

#[derive(Args, Debug)]
pub struct TestArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// Run only this test; may be given several times
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Run nothing, but print a test with the first rows of this stage (or STAGE.PORT) for a partition in the latest
    /// run, such as scan=hi/hi_0000; may be given several times
    #[arg(long, value_name = "STAGE=PARTITION", conflicts_with = "only")]
    pub record: Vec<String>,
    /// With --record: the state directory. Tests use a temporary one
    #[arg(long, value_name = "DIR", default_value = ".flow")]
    pub state: PathBuf,
}
