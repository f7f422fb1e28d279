//! What a stage kind is: its settings, its shape, and the operator that does its work.
//!
//! A kind is declared in one file: a settings struct (its doc comments become the reference page and the
//! JSON schema), a [`Shape`] computed from settings and input schemas, and a [`Body`]. The runtime calls
//! the body on timely's workers; a test calls the same body through `flow_runtime::harness` without timely.

use std::collections::BTreeMap;
use std::path::PathBuf;

use arrow::array::{RecordBatch, UInt32Array};
use arrow::datatypes::SchemaRef;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::context::Context;
use crate::decision::Decision;
use crate::inputs::{Input, InputPort, Inputs, OutputPort, Reads};
use crate::out::Out;
use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_base::reject::RejectClass;
use flow_base::url_use::UrlUse;
use flow_storage::Storage;
use flow_store::{Artifact, ExportSet, FileRange};

/// A stage kind. Implemented by a unit struct; registered with [`crate::registry::kind`].
pub trait Kind: Send + Sync + 'static {
    /// `area.verb`; of a kind with [`Kind::SQL_SETTINGS`], one word will do.
    const NAME: &'static str;
    /// Raised whenever the same input and settings give other bytes. Part of every key.
    const VERSION: u32;
    /// What `from` may give. From here come the checks of a pipeline, the reference page and the JSON schema.
    const INPUTS: &'static [InputPort];
    /// What other stages may read.
    const OUTPUTS: &'static [OutputPort];
    /// Settings, on any level, whose texts are SQL: references to parameters in them are never pasted into the text but
    /// become `$name`, and their values are entries of the setting `params`, which such a kind has.
    const SQL_SETTINGS: &'static [&'static str] = &[];
    /// Settings (of the first level, with all below them) whose texts may be URLs. A URL in any other setting is refused: it
    /// would be taken for the path of a folder called `s3:`.
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[];
    /// Plain data. [`WithShared`](crate::WithShared) adds what checks and bodies read once and share.
    type Settings: DeserializeOwned + Serialize + schemars::JsonSchema + Clone + Send + Sync + 'static;

    /// Ports, schemas and how the stage takes part in a run. Pure: reads no data, so that `flow check`
    /// can call it. `inputs` fit what the kind declares.
    fn shape(settings: &Self::Settings, inputs: &Inputs) -> Result<Shape, StageError>;

    /// Gives settings the object storage for files that [`Kind::shape`] and [`Kind::identity`] look into, such as the head
    /// of a table. Called once, when they were parsed. Bodies use that of their [`Context`].
    fn set_storage(_settings: &mut Self::Settings, _storage: &Storage) {}

    /// Makes one body for one worker.
    fn open(settings: &Self::Settings, context: &Context) -> Result<Body, StageError>;

    /// The settings that decide the output bytes. Settings that do not (an output folder, a thread
    /// count) are taken out here, so that changing them runs nothing again.
    fn identity(settings: &Self::Settings) -> serde_json::Value {
        // Settings are plain data; a map with non-string keys would be the only way to fail.
        serde_json::to_value(settings).unwrap_or(serde_json::Value::Null)
    }

    /// Files and folders of the user that must exist when the stage runs, each with the setting that names it. `flow
    /// check` warns of missing ones. Files that an earlier stage may write are not included.
    fn sources(_settings: &Self::Settings) -> Vec<(&'static str, PathBuf)> {
        Vec::new()
    }

    /// Checks whether the stage can run with these settings: for example that the program was built for the device that
    /// they name, or that the stage's existing log allows them. Called when a run begins, before any stage runs, for
    /// the stages that will run; `flow check` and `flow plan` do not call it.
    fn ready(_settings: &Self::Settings, _storage: &Storage) -> Result<(), StageError> {
        Ok(())
    }

    /// Whether the processes of a run share the work of the stage; all others run in process 0 alone. A log whose work is
    /// shared, and the stages that feed it, run in every process where the processes share the state directory: see
    /// [`Context::share`]. Process 0 alone keeps the log.
    ///
    /// # Errors
    /// When it cannot be shared out over so many.
    fn spreads(_settings: &Self::Settings, _processes: usize) -> Result<bool, StageError> {
        Ok(false)
    }

    /// Checks what a local stage or a source left outside the state directory, for example files in a folder of the
    /// user. `committed` are the rows of its first port that a run would reuse. Returns the partitions whose files are
    /// missing or changed, with the reason; they run again. Called when a run is planned; changes nothing.
    fn missing_outputs(
        _settings: &Self::Settings,
        _storage: &Storage,
        _committed: &Artifact,
        _threads: usize,
    ) -> Result<BTreeMap<Partition, String>, StageError> {
        Ok(BTreeMap::new())
    }
}

#[derive(Clone, Debug)]
pub struct Port {
    pub name: String,
    pub schema: SchemaRef,
}

impl Port {
    pub fn new(name: impl Into<String>, schema: SchemaRef) -> Port {
        let name = name.into();
        Port { name, schema }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Opens a space of partitions. All inputs are read whole.
    Source,
    /// Computes partition p from partition p of its streamed inputs alone.
    Local,
    /// Needs all partitions to decide; each row stays in its partition (deduplication, split).
    Global,
    /// Keeps a log of its own (checkpoints), which says where to go on. Runs in the partition space of
    /// its streamed input, whose ordinals are its steps; not recorded by the runtime.
    Log,
    /// Writes files into a folder of the user. All inputs are read whole; no outputs.
    Export,
}

/// Which count must come out even at the end of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conservation {
    /// Rows of input 0 = rows out over all ports + rejects + what `Out::merged` counted.
    /// For a source: what `Out::read` counted represents the rows in.
    Rows,
    /// The stage makes new rows that do not correspond to those of its input; nothing is compared.
    NewRows,
}

#[derive(Clone, Debug)]
pub struct Shape {
    pub role: Role,
    /// Those that the kind declares, in the same order.
    pub outputs: Vec<Port>,
    /// Too expensive to compute again: outputs are stored even when only streamed stages read them.
    pub expensive: bool,
    /// Runs only on inputs that are up to date, not on older results that `--only` and `--from` reuse: its effect
    /// cannot be undone, or is a check that others rely on.
    pub needs_current: bool,
    pub conservation: Conservation,
    /// Names of inputs bound to a declared input of [`InputCount::Many`](crate::inputs::InputCount::Many) that a local
    /// stage reads whole in this pipeline although the kind declares them as streamed.
    pub whole: Vec<String>,
}

impl Shape {
    pub fn source(outputs: Vec<Port>) -> Self {
        Shape {
            role: Role::Source,
            outputs,
            expensive: false,
            needs_current: false,
            conservation: Conservation::NewRows,
            whole: Vec::new(),
        }
    }

    pub fn local(outputs: Vec<Port>) -> Self {
        Shape {
            role: Role::Local,
            conservation: Conservation::Rows,
            ..Shape::source(outputs)
        }
    }

    pub fn global(outputs: Vec<Port>) -> Self {
        Shape {
            role: Role::Global,
            ..Shape::local(outputs)
        }
    }

    pub fn log(outputs: Vec<Port>) -> Self {
        Shape {
            role: Role::Log,
            ..Shape::source(outputs)
        }
    }

    pub fn export() -> Self {
        Shape {
            role: Role::Export,
            ..Shape::source(Vec::new())
        }
    }

    /// How the stage reads an input.
    pub fn reads(&self, input: &Input) -> Reads {
        match self.role {
            Role::Source | Role::Export => Reads::Whole,
            Role::Local if input.port.is_many() && self.whole.contains(&input.name) => Reads::Whole,
            Role::Local | Role::Global | Role::Log => input.port.reads,
        }
    }
}

/// The operator of a stage.
pub enum Body {
    Source(Box<dyn Source>),
    Local(Box<dyn Operator>),
    Global(Box<dyn Global>),
    Log(Box<dyn Log>),
    Export(Box<dyn Export>),
}

/// One partition that a source can give.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SourcePartition {
    pub name: Partition,
    /// The files that this partition is made from, in a fixed order; one may be absent. Their contents
    /// (not their paths or times) are the input digest of the partition.
    pub files: Vec<PathBuf>,
    /// What the content depends on beside files; part of the partition's input digest.
    pub extra: String,
}

impl SourcePartition {
    pub fn new(name: Partition, files: Vec<PathBuf>, extra: impl Into<String>) -> SourcePartition {
        let extra = extra.into();
        SourcePartition { name, files, extra }
    }
}

/// Opens a space of partitions.
pub trait Source {
    /// All partitions, sorted by name. Called once, before the run, on one body.
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError>;

    /// Whether [`Source::read`] reads the files of a partition from beginning to end itself, and gives them to
    /// [`Out::digested`]; otherwise the runtime reads them before, for their digests.
    fn digests(&self, _partition: &SourcePartition) -> bool {
        false
    }

    /// The ranges of files that a partition is made from, beside its [`SourcePartition::files`], in a fixed order.
    /// Their bytes are part of its input digest, too: for sources that read small parts of large files. Called after
    /// `partitions`, on the same body.
    fn ranges(&mut self, _partition: &Partition) -> Result<Vec<FileRange>, StageError> {
        Ok(Vec::new())
    }

    /// Names the partitions that [`Source::read`] will probably be called for after the next call, in that order: a
    /// source may compute several together in one call and keep what it does not give yet, if that is little. The run
    /// may end before. Called before each `read`. The files of the partitions may change until they are read.
    fn upcoming(&mut self, _partitions: &[Partition]) {}

    /// Whether a partition whose files change each time that they are read becomes a reject (`changed_while_read`, of class
    /// `fault`), which the next run reads again. Otherwise the run ends with an error.
    fn refuses_changed_files(&self) -> bool {
        false
    }

    /// Gives one partition. Called on the worker that the partition falls to; other workers read other
    /// partitions at the same time with bodies of their own.
    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError>;
}

/// Whether the stage has finished a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Done,
    /// The body goes on with it on threads of its own; [`Operator::poll`] reports when it is done.
    NotYet,
}

/// Computes partition by partition.
pub trait Operator {
    /// Takes one batch of a streamed input, by its name. Batches of several partitions may come interleaved; within one
    /// partition and input they come in order.
    fn batch(
        &mut self,
        input: &str,
        partition: &Partition,
        batch: RecordBatch,
        out: &mut Out,
    ) -> Result<(), StageError>;

    /// No more batches of `partition` will come.
    fn partition_complete(&mut self, partition: &Partition, out: &mut Out) -> Result<Progress, StageError>;

    /// Called after [`crate::context::Waker::wake`], and while partitions are `NotYet`. Puts into `out` what is ready and
    /// returns the partitions that are done now.
    fn poll(&mut self, _out: &mut Out) -> Result<Vec<Partition>, StageError> {
        Ok(Vec::new())
    }

    /// All partitions are complete.
    fn complete(&mut self) -> Result<(), StageError> {
        Ok(())
    }
}

/// Where a row of a global stage goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowOutcome {
    /// To this port, unchanged.
    Port(usize),
    Rejected {
        reason: &'static str,
        class: RejectClass,
        detail: String,
    },
}

/// Decides over all partitions, then applies the decisions partition by partition. Rows are passed on unchanged: a
/// global stage stores which rows of its input each port has, not the rows themselves.
pub trait Global {
    /// Schema of the key rows: `_row` and what the decision needs.
    fn key_schema(&self) -> SchemaRef;
    /// Schema of the decisions: `_row` and what was decided.
    fn decision_schema(&self) -> SchemaRef;
    /// The columns that `keys` reads, `_row` among them; all, if none are named. Others are not read from disk
    /// where the stage reads an artifact.
    fn key_columns(&self) -> Option<Vec<String>> {
        None
    }
    /// Projects rows to key rows: one for each row, in their order. Local. Where the stage takes rows from another global
    /// one, rows that do not come through that one are projected, too; the decision is not shown them.
    fn keys(&mut self, partition: &Partition, batch: &RecordBatch) -> Result<RecordBatch, StageError>;
    /// How it decides about the key rows of all partitions. Rows without a decision are left out.
    fn decision(&self) -> Decision;
    /// Applies the decisions of one partition: one outcome for each row, by its `_row`, ascending. Local.
    fn apply(
        &mut self,
        partition: &Partition,
        rows: &UInt32Array,
        decisions: &RecordBatch,
    ) -> Result<Vec<RowOutcome>, StageError>;
}

/// How far the log of a stage has progressed.
#[derive(Clone, Debug, PartialEq)]
pub enum LogPosition {
    /// Nothing left to do.
    Finished { detail: String },
    /// Steps below `step` are done.
    At { step: u64, detail: String },
}

/// A stage that keeps its own log of progress. Time is its step: partition ordinal s of the streamed
/// input is step s.
pub trait Log: Operator {
    /// Reads the log. Called before the run (in `flow plan` too); changes nothing. An error refuses the
    /// run (`StageError::Refused`).
    fn position(&mut self) -> Result<LogPosition, StageError>;
    /// Rows of output port 0 once finished; stored as the one partition `result`.
    fn result(&mut self) -> Result<RecordBatch, StageError>;
    /// Finishes the current step and writes a checkpoint; called on Ctrl-C before the dataflow is dropped, and (`stop`
    /// false) on SIGUSR1.
    fn checkpoint(&mut self, stop: bool) -> Result<(), StageError>;
    /// Whether the log is finished although steps are left: the region then ends without them, once
    /// [`Operator::complete`] was called.
    fn ended_early(&self) -> bool {
        false
    }
}

/// Writes a set of files into a folder of the user, all of them or none.
pub trait Export {
    /// The folder that receives the set.
    fn folder(&self) -> PathBuf;
    /// Name of the file that describes the set, in the folder. Sets that share a folder need different ones.
    fn manifest(&self) -> String {
        "flow.json".to_string()
    }
    /// Writes all files of the set. Inputs, and the rejects of every stage upstream, are those of the [`Context`] that it was
    /// opened with.
    fn write(&mut self, set: &mut ExportSet) -> Result<(), StageError>;
    /// Digest of what the files follow from beside the settings, the rows and the rejects, such as the versions of recordings that they
    /// hold: if it changes, the set is written again. Computed while a run is planned, once all inputs are settled.
    fn further_inputs(&self) -> Result<Option<Digest>, StageError> {
        Ok(None)
    }
    /// Called when the set that was written stands: for notes of it that the next one makes use of.
    fn stands(&mut self) {}
}
