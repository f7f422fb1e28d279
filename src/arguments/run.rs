//! Arguments of the commands that plan, run, check and test a pipeline.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, ValueEnum};
use flow_cli::arguments::{PipelineArguments, StateArguments, sizes};

/// Selects the stages to run, and the state directory.
#[derive(Args, Clone, Debug)]
pub struct SelectionArguments {
    /// Run this stage and all that follow it, on the last results of the stages before it (see --only)
    #[arg(long, value_name = "STAGE")]
    pub from: Option<String>,
    /// Run this stage and all that it needs
    #[arg(long, value_name = "STAGE")]
    pub until: Option<String>,
    /// Run this stage alone, on the last results of the others in a complete run of this pipeline, even if the plan
    /// calls them stale (stages that cannot be undone refuse that); may be given several times
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

#[derive(Args, Debug)]
pub struct RunArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    #[command(flatten)]
    pub selection: SelectionArguments,
    #[command(flatten)]
    pub processes: ProcessArguments,
    /// A name for the run, which other commands take in place of its id: `flow compare warm cold`
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// A note of the run, for its page and `flow compare`
    #[arg(long, value_name = "TEXT")]
    pub note: Option<String>,
    /// Also replace manifests by ones with far fewer rows (see `max_shrink`)
    #[arg(long)]
    pub allow_shrink: bool,
    /// After a failure continue with the partitions and stages that do not depend on it; those that do are left out and
    /// named, and all failures are listed at the end (exit code 1). Partitions that were in flight in the failed part
    /// of the pipeline are computed again
    #[arg(long)]
    pub keep_going: bool,
    /// Memory for the keys that deduplication and splits sort, such as 4GiB (16MiB at least); half of the available memory
    /// if not given. Keys that do not fit are sorted on disk, in the state directory
    #[arg(long, value_name = "SIZE", value_parser = sizes::bytes)]
    pub decide_memory: Option<u64>,
    /// Stay, and run the pipeline again each time its sources or its files have changed: partitions that come, change or go.
    /// SIGTERM and SIGINT end it. Not with several processes
    #[arg(long, conflicts_with_all = ["hosts", "launch", "force", "from"])]
    pub watch: bool,
    /// With --watch: for how long sources must not have changed before they are read (at the latest, after ten times that)
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = seconds, requires = "watch")]
    pub settle: f64,
    /// With --watch: look for changes at intervals alone, as where the file system does not tell of them
    #[arg(long, requires = "watch")]
    pub poll: bool,
    /// With --watch: each time so many runs ended, remove what none of the last so many had, as `flow gc --keep RUNS`
    #[arg(long, value_name = "RUNS", requires = "watch", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: Option<u32>,
    /// What standard error shows while the run goes on
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub progress: Progress,
    /// Write the events, one JSON object per line, to this file too
    #[arg(long, value_name = "FILE")]
    pub events: Option<PathBuf>,
    /// A shell command for the end of a successful run (exit code 0 or 4); its standard input is a summary of the run,
    /// one JSON object. Its own exit code has no effect
    #[arg(long, value_name = "CMD")]
    pub on_success: Option<String>,
    /// Likewise, for a run that failed, was refused or interrupted; not where no run began (a mistake in the pipeline,
    /// for example)
    #[arg(long, value_name = "CMD")]
    pub on_failure: Option<String>,
}

/// Heading of the options for several processes.
const PROCESSES: &str = "Several processes (see docs/machines.md)";

/// Options for a run of several processes: process 0 plans, and all compute their share of the partitions and train.
#[derive(Args, Clone, Debug)]
#[command(group = ArgGroup::new("others").args(["hosts", "launch"]))]
pub struct ProcessArguments {
    /// A file with one line for each process, HOST or HOST:PORT; start the same command with the same pipeline and
    /// settings for each; they share the state directory
    #[arg(long, help_heading = PROCESSES, value_name = "FILE", requires = "process")]
    pub hosts: Option<PathBuf>,
    /// Which line of the file of hosts this process is; the first is 0
    #[arg(long, help_heading = PROCESSES, value_name = "I", requires = "hosts")]
    pub process: Option<u32>,
    /// Read the number of this process and the address of process 0 from the launcher's environment variables, which
    /// are ignored otherwise
    #[arg(long, help_heading = PROCESSES, value_name = "BY", conflicts_with = "hosts")]
    pub launch: Option<Launcher>,
    /// The port at which process 0 waits for the others, where the file of hosts names none [default: 24500; with Slurm
    /// one that follows from the numbers of job and step, with torchrun the one after MASTER_PORT]
    #[arg(long, help_heading = PROCESSES, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    /// A file with a secret of 16 bytes or more, the same for all processes: they prove to each other that they know it.
    /// Nothing is encrypted
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
    /// torchrun where RANK is set, else Slurm
    Auto,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Progress {
    /// Bars on a terminal, plain lines elsewhere
    Auto,
    /// One bar per stage in work
    Bars,
    /// One line per event
    Plain,
    /// One JSON object per line
    Json,
    /// Nothing but errors
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
    /// Also check that the files exist, by making the plan, and decode some recordings of each manifest
    #[arg(long)]
    pub deep: bool,
    /// List all parameters, also those that included pipelines have: name, value and help
    #[arg(long)]
    pub params: bool,
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
