//! The runtime of `flow`: it reads a pipeline, plans what must run, runs it on timely dataflow, and keeps
//! what was done. It knows nothing of speech, and is the only crate that names timely.

mod available_memory;
pub mod context;
pub mod dataflow;
pub mod digest;
pub mod event;
pub mod failpoints;
pub mod harness;
pub mod inputs;
pub mod kind;
pub mod out;
pub mod partition;
pub mod plan;
pub mod processes;
mod read_once;
pub mod registry;
pub mod reject;
mod row_json;
pub mod run;
pub mod spec;
pub mod store;
pub mod visible;

pub use available_memory::available_memory;
pub use context::Context;
pub use digest::Digest;
pub use inputs::{ColumnType, Input, InputCount, InputPort, Inputs, OutputPort};
pub use kind::{
    Body, Conservation, Export, Fate, FileRange, Global, Kind, Log, Operator, Port, Progress, ROW, Reads, Role, Shape,
    Source, SourcePartition, StageError, Standing,
};
pub use out::Out;
pub use partition::Partition;
pub use read_once::ReadOnce;
pub use reject::{Reject, RejectClass, UNREADABLE};
pub use store::{Artifact, ExportSet, RejectSet};
