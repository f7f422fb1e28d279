//! The runtime of `flow`: reads a pipeline, plans what must run, runs it on timely dataflow, and stores the results. It
//! is independent of speech, and the only crate that depends on timely and differential dataflow.

pub mod context;
pub mod dataflow;
mod decision;
pub mod harness;
pub mod inputs;
pub mod kind;
mod local_copy;
mod options;
pub mod out;
pub mod output_files;
pub mod pipeline_test;
pub mod plan;
mod planner;
pub mod registry;
mod row_order;
pub mod run;
pub mod run_error;
pub mod spec;

pub use flow_base::{digest, error, escape, event, failpoints, glob, partition, reject, row_number, secret};
pub use flow_processes as processes;
pub use flow_store as store;

use flow_base::{
    available_memory, full_disk, host, panic_guard, random_bytes, read_once, regular_file, row_json, shared, suggest,
    switched_off, unlinked_file, url_use,
};

pub use available_memory::available_memory;
pub use context::{Context, ProcessShare};
pub use decision::{ChoiceRows, Decision, GroupChoice, GroupDecision, GroupKey, GroupRows, StandingDecisions};
pub use digest::Digest;
pub use error::StageError;
pub use full_disk::full_disk;
pub use inputs::{ColumnType, Input, InputCount, InputPort, Inputs, OutputPort, Reads};
pub use kind::{
    Body, Conservation, Export, Global, Kind, Log, LogPosition, Operator, Port, Progress, Role, RowOutcome, Shape,
    Source, SourcePartition,
};
pub use local_copy::local_copy;
pub use out::Out;
pub use partition::Partition;
pub use random_bytes::random_hex;
pub use read_once::ReadOnce;
pub use regular_file::{open_input_file, open_regular_file, open_regular_file_or_open_pipe, read_regular_file};
pub use reject::{CHANGED, Reject, RejectClass, UNREADABLE};
pub use row_number::ROW;
pub use run_error::RunError;
pub use secret::Secret;
pub use shared::Shared;
pub use store::{Artifact, ExportFile, ExportSet, FileRange, PartOfRejects, RejectSet};
pub use unlinked_file::unlinked_file;
pub use url_use::{NO_URL_HELP, UrlUse, no_url, url_scheme};
