//! What a stage kind is written with: the traits that it implements, the context that it is given, batches and rejects that it
//! passes on, and the list of kinds. Independent of how stages are planned and run.

pub mod context;
pub mod decision;
pub mod inputs;
pub mod kind;
mod local_copy;
pub mod out;
pub mod output_files;
pub mod registry;
mod url_settings;
mod with_shared;

pub use flow_base::{
    available_memory, digest, error, escape, event, failpoints, full_disk, glob, partition, reject, row_number, secret,
    suggest, yaml,
};
pub use flow_processes as processes;
pub use flow_storage::Storage;
pub use flow_store as store;

pub use available_memory::available_memory;
pub use context::{Context, ProcessShare, RunLabels};
pub use decision::{ChoiceRows, Decision, GroupChoice, GroupDecision, GroupKey, GroupRows};
pub use digest::Digest;
pub use error::StageError;
pub use flow_base::random_bytes::random_hex;
pub use flow_base::read_once::ReadOnce;
pub use flow_base::regular_file::{
    open_input_file, open_regular_file, open_regular_file_or_open_pipe, read_local_file, read_regular_file,
};
pub use flow_base::shared::Shared;
pub use flow_base::unlinked_file::unlinked_file;
pub use flow_base::url_use::{NO_URL_HELP, UrlUse, no_url, url_scheme};
pub use full_disk::full_disk;
pub use inputs::{ColumnType, Input, InputCount, InputPort, Inputs, OutputPort, Reads};
pub use kind::{
    Body, Conservation, Export, Global, Kind, Log, LogPosition, Operator, Port, Progress, Role, RowOutcome, Shape,
    Source, SourcePartition,
};
pub use local_copy::local_copy;
pub use out::Out;
pub use partition::Partition;
pub use reject::{Reject, RejectClass, UNREADABLE};
pub use row_number::ROW;
pub use secret::Secret;
pub use store::{Artifact, ExportFile, ExportSet, FileRange, PartOfRejects, RejectSet};
pub use with_shared::WithShared;
