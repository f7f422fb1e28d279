//! The arguments of `flow jobs`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Args, Debug)]
pub struct JobsArguments {
    #[command(subcommand)]
    pub command: JobsCommand,
    /// The address of the service
    #[arg(long, global = true, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// A file with the API key of the service, if it needs one
    #[arg(long, global = true, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum JobsCommand {
    /// List jobs, the newest first
    List {
        /// Only list jobs in this state: queued, running, done, failed or cancelled
        #[arg(long, value_name = "STATE")]
        state: Option<String>,
        /// The maximum number of jobs
        #[arg(long, value_name = "N", default_value_t = 20)]
        limit: usize,
    },
    /// Show a job as JSON
    Show {
        /// The id of the job
        id: String,
    },
    /// Print the result of a job
    Result {
        /// The id of the job
        id: String,
        /// Write the result to this file instead of printing it
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Cancel a job that waits or runs; remove one that has ended
    Cancel {
        /// The id of the job
        id: String,
    },
}
