//! A pipeline with the values of its parameters, and the state directory of its runs.

use std::path::PathBuf;

use clap::Args;

/// Selects a pipeline and the values of its parameters.
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

#[derive(Args, Clone, Debug)]
pub struct StateArguments {
    /// The state directory: a folder, or a URL of object storage
    #[arg(long, value_name = "DIR", default_value = ".flow")]
    pub state: PathBuf,
}
