//! Arguments of the commands about past runs.

use std::path::PathBuf;

use clap::Args;

use super::StateArguments;

/// Selects a run.
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
    /// The segment: SEGMENT, LANG/SHARD/SEGMENT, the path of its recording, TAR::MEMBER, or FILE:LINE of a manifest
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
