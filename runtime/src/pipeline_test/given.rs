//! The stage that replaces another one in a test: a source of the test's rows.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::RecordBatch;

use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_kind::context::Context;
use flow_kind::inputs::{InputPort, Inputs, OutputPort};
use flow_kind::kind::{Body, Port, Shape, Source, SourcePartition};
use flow_kind::out::Out;
use flow_kind::registry::{AnyKind, AnySettings};
use flow_spec::yaml::{Part, Steps, TypedError, Value};
use flow_storage::Storage;
use flow_store::Artifact;

/// By partition, batches with the numbers of their ports.
pub(super) type Batches = BTreeMap<Partition, Vec<(usize, RecordBatch)>>;

/// The kind of stages that give rows of a test. No pipeline can name it.
pub(super) struct GivenKind;

impl AnyKind for GivenKind {
    fn name(&self) -> &'static str {
        "test.rows"
    }

    fn version(&self) -> u32 {
        1
    }

    fn inputs(&self) -> &'static [InputPort] {
        &[]
    }

    /// Ports of the replaced stage, which vary and so cannot be a constant.
    fn outputs(&self) -> &'static [OutputPort] {
        &[]
    }

    fn sql_settings(&self) -> &'static [&'static str] {
        &[]
    }

    fn schema(&self) -> serde_json::Value {
        serde_json::Value::Bool(false)
    }

    fn docs(&self) -> String {
        String::new()
    }

    fn parse(&self, _with: &Value, _: &Storage) -> Result<Arc<dyn AnySettings>, TypedError> {
        Err(TypedError {
            steps: Steps::default(),
            part: Part::Key,
            message: "rows of a test are given under `tests`".to_string(),
            help: None,
        })
    }
}

/// The rows of one stage.
pub(super) struct GivenRows {
    pub stage: String,
    /// Those of the stage that is not run.
    pub outputs: Vec<Port>,
    pub batches: Arc<Batches>,
}

impl GivenRows {
    pub fn shape(&self) -> Shape {
        Shape::source(self.outputs.clone())
    }
}

impl AnySettings for GivenRows {
    fn shape(&self, _inputs: &Inputs) -> Result<Shape, StageError> {
        Ok(GivenRows::shape(self))
    }

    fn open(&self, _context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(GivenSource(Arc::clone(&self.batches)))))
    }

    fn sources(&self) -> Vec<(&'static str, PathBuf)> {
        Vec::new()
    }

    fn ready(&self, _storage: &Storage) -> Result<(), StageError> {
        Ok(())
    }

    fn spreads(&self, _processes: usize) -> Result<bool, StageError> {
        Ok(false)
    }

    /// Distinguishes such stages of a test. Each test has its own state directory, so that the rows need not be part of
    /// it.
    fn identity(&self) -> serde_json::Value {
        serde_json::json!({"stage": self.stage})
    }

    fn all(&self) -> serde_json::Value {
        self.identity()
    }

    fn missing_outputs(
        &self,
        _storage: &Storage,
        _committed: &Artifact,
        _threads: usize,
    ) -> Result<BTreeMap<Partition, String>, StageError> {
        Ok(BTreeMap::new())
    }
}

struct GivenSource(Arc<Batches>);

impl Source for GivenSource {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let partition = |name: &Partition| SourcePartition::new(name.clone(), Vec::new(), name.to_string());
        Ok(self.0.keys().map(partition).collect())
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        for (port, batch) in self.0.get(partition).into_iter().flatten() {
            out.send(*port, batch.clone());
        }
        Ok(())
    }
}
