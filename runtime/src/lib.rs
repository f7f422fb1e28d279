//! The runtime of `flow`: reads a pipeline, plans what must run, runs it on timely dataflow, and stores the results. It
//! is independent of speech, and the only crate that depends on timely and differential dataflow.

mod available_memory;
pub mod context;
pub mod dataflow;
mod decision;
pub mod digest;
pub mod error;
pub mod escape;
pub mod event;
pub mod failpoints;
mod full_disk;
pub mod glob;
pub mod harness;
mod host;
pub mod inputs;
pub mod kind;
mod local_copy;
mod options;
pub mod out;
pub mod output_files;
mod panic_guard;
pub mod partition;
pub mod pipeline_test;
pub mod plan;
mod planner;
pub mod processes;
mod read_once;
pub mod registry;
mod regular_file;
pub mod reject;
mod row_json;
pub mod row_number;
mod row_order;
pub mod run;
pub mod run_error;
pub mod secret;
mod shared;
pub mod spec;
pub mod store;
mod suggest;
mod switched_off;
mod unlinked_file;
mod url_use;

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
