//! Stage kinds whose rows cost next to nothing, in the roles of those of `pipelines/build_manifest_v2.yaml`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch, UInt32Array};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef, UInt32Type};
use flow_kind::registry::{AnyKind, kind};
use flow_kind::{
    Artifact, Body, Conservation, Context, Decision, Export, ExportSet, Global, GroupDecision, GroupRows, InputCount,
    InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Port, Progress, RejectClass, RowOutcome, Shape,
    Source, SourcePartition, StageError,
};
use serde::{Deserialize, Serialize};

/// Rows of a shard.
const ROWS: u32 = 16;
/// Shards in a folder.
const IN_A_FOLDER: u64 = 1_000;

pub fn kinds() -> Vec<Box<dyn AnyKind>> {
    vec![
        kind::<Scan>(),
        kind::<Probe>(),
        kind::<Pass>(),
        kind::<Unique>(),
        kind::<Split>(),
        kind::<Write>(),
    ]
}

/// Name of a shard: its language's folder and its number.
pub fn shard_name(shard: u64) -> String {
    let language = shard / IN_A_FOLDER;
    format!("l{language:03}/l{language:03}_{:06}", shard % IN_A_FOLDER)
}

/// Files of a shard: metadata, audio index, tar.
pub const FILES: [&str; 3] = ["metadata.parquet", "audio.parquet", "tar"];

pub fn file_of(folder: &Path, shard: u64, file: &str) -> PathBuf {
    folder.join(format!("{}.{file}", shard_name(shard)))
}

fn schema_of(value: &str) -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new(value, DataType::Int64, false),
    ]))
}

fn port(name: &str) -> Port {
    Port::new(name, schema_of("value"))
}

fn rows_of(partition: &Partition) -> Result<RecordBatch, StageError> {
    let of_name = |row: u32| {
        let digest = flow_kind::Digest::of_parts([partition.as_str().as_bytes(), &row.to_le_bytes()]);
        let bytes: [u8; 8] = std::array::from_fn(|at| digest.as_bytes()[at]);
        i64::from_le_bytes(bytes)
    };
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(0..ROWS)),
        Arc::new(Int64Array::from_iter_values((0..ROWS).map(of_name))),
    ];
    Ok(RecordBatch::try_new(schema_of("value"), columns)?)
}

/// Where the shards are. The listing is computed from their number; the files are there, and empty.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Shards {
    folder: PathBuf,
    shards: u64,
}

impl Shards {
    /// All shards with those of their files whose names are given.
    fn listed(&self, files: &[&str]) -> Vec<SourcePartition> {
        let one = |shard: u64| SourcePartition {
            name: shard_name(shard).into(),
            files: files.iter().map(|file| file_of(&self.folder, shard, file)).collect(),
            // Empty files are equal: without this all shards would have one key.
            extra: shard.to_string(),
        };
        (0..self.shards).map(one).collect()
    }
}

/// As `manifest.scan`: rows of two files.
pub struct Scan;

struct ScanBody(Shards);

impl Kind for Scan {
    const NAME: &'static str = "scale.scan";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = Shards;

    fn shape(_: &Shards, _: &Inputs) -> Result<Shape, StageError> {
        let mut shape = Shape::source(vec![port("rows")]);
        shape.conservation = Conservation::Rows;
        Ok(shape)
    }

    fn open(settings: &Shards, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(ScanBody(settings.clone()))))
    }

    fn identity(_: &Shards) -> serde_json::Value {
        serde_json::Value::Null
    }
}

impl Source for ScanBody {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        Ok(self.0.listed(&FILES[..2]))
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        out.read(u64::from(ROWS));
        out.send(0, rows_of(partition)?);
        Ok(())
    }
}

/// As `audio.probe`: expensive, two outputs.
pub struct Probe;

struct ProbeBody(Shards);

impl Kind for Probe {
    const NAME: &'static str = "scale.probe";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[
        OutputPort::new("members", "numbers"),
        OutputPort::new("tars", "numbers"),
    ];
    type Settings = Shards;

    fn shape(_: &Shards, _: &Inputs) -> Result<Shape, StageError> {
        let mut shape = Shape::source(vec![port("members"), port("tars")]);
        shape.expensive = true;
        Ok(shape)
    }

    fn open(settings: &Shards, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(ProbeBody(settings.clone()))))
    }

    fn identity(_: &Shards) -> serde_json::Value {
        serde_json::Value::Null
    }
}

impl Source for ProbeBody {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        Ok(self.0.listed(&FILES[2..]))
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        let rows = rows_of(partition)?;
        out.read(u64::from(ROWS));
        out.send(1, rows.slice(0, 1));
        out.send(0, rows);
        Ok(())
    }
}

/// As `sql`: passes rows on.
pub struct Pass;

#[derive(Clone, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PassSettings {
    /// So many rows at the beginning of each shard are refused.
    refused: u32,
    /// Tells stages apart that would have one recipe.
    step: u32,
}

struct PassBody(PassSettings);

impl Kind for Pass {
    const NAME: &'static str = "scale.pass";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("rows", "numbers"),
        InputPort::streamed("members", "numbers").optional(),
        InputPort::streamed("tars", "numbers").optional(),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = PassSettings;

    fn shape(_: &PassSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::local(vec![port("rows")]))
    }

    fn open(settings: &PassSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(PassBody(settings.clone()))))
    }
}

impl Operator for PassBody {
    fn batch(&mut self, input: &str, _: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        if input != "rows" {
            return Ok(());
        }
        let numbers = batch.column(0).as_primitive::<UInt32Type>();
        let refused = numbers.values().iter().filter(|row| **row < self.0.refused).count();
        let positions: Vec<usize> = (0..refused).collect();
        out.reject_rows(&batch, &positions, "too_small", RejectClass::Rule, "")?;
        out.send(0, batch.slice(refused, batch.num_rows() - refused));
        Ok(())
    }

    fn partition_complete(&mut self, _: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        Ok(Progress::Done)
    }
}

#[derive(Clone, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NoSettings {}

/// One row in `every` is decided, by its value.
#[derive(Clone, Copy)]
struct Decider {
    every: i64,
    refuses: bool,
}

fn value_schema() -> SchemaRef {
    schema_of("value")
}

impl GroupDecision for Decider {
    fn rows(&self, partition: &Partition, keys: &Artifact) -> Result<GroupRows, StageError> {
        let batch = keys.read_whole(partition, None)?;
        let rows = batch.column(0).as_primitive::<UInt32Type>().values().iter();
        let values = batch.column(1).as_primitive::<Int64Type>().values();
        let decided = rows.zip(values).filter(|(_, value)| value.rem_euclid(self.every) == 0);
        let (rows, values): (Vec<u32>, Vec<i64>) = decided.unzip();
        let columns: Vec<ArrayRef> = vec![Arc::new(UInt32Array::from(rows)), Arc::new(Int64Array::from(values))];
        Ok(GroupRows {
            hashes: Vec::new(),
            places: Vec::new(),
            decisions: Some(RecordBatch::try_new(value_schema(), columns)?),
        })
    }

    fn whole(&self, _: &Partition, _: &Artifact, _: &[u32]) -> Result<RecordBatch, StageError> {
        Err(StageError::failed("no row is in a group"))
    }

    fn decide(&self, _: &[(Partition, Vec<RecordBatch>)]) -> Result<Vec<(Partition, RecordBatch)>, StageError> {
        Ok(Vec::new())
    }

    fn complete(&self, _: &Context, _: &[(Partition, RecordBatch)]) -> Result<(), StageError> {
        Ok(())
    }
}

impl Global for Decider {
    fn key_schema(&self) -> SchemaRef {
        value_schema()
    }

    fn decision_schema(&self) -> SchemaRef {
        value_schema()
    }

    fn keys(&mut self, _: &Partition, batch: &RecordBatch) -> Result<RecordBatch, StageError> {
        Ok(batch.clone())
    }

    fn decision(&self) -> Decision {
        Decision::Groups(Arc::new(*self))
    }

    fn apply(
        &mut self,
        _: &Partition,
        rows: &UInt32Array,
        decisions: &RecordBatch,
    ) -> Result<Vec<RowOutcome>, StageError> {
        let decided = decisions.column(0).as_primitive::<UInt32Type>();
        let outcome = |row: &u32| match decided.values().contains(row) {
            false => RowOutcome::Port(0),
            true if self.refuses => RowOutcome::Rejected {
                reason: "duplicate",
                class: RejectClass::Rule,
                detail: String::new(),
            },
            true => RowOutcome::Port(1),
        };
        Ok(rows.values().iter().map(outcome).collect())
    }
}

/// As `manifest.dedup`: refuses one row in 50.
pub struct Unique;

impl Kind for Unique {
    const NAME: &'static str = "scale.unique";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::streamed("rows", "numbers")];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = NoSettings;

    fn shape(_: &NoSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::global(vec![port("rows")]))
    }

    fn open(_: &NoSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Global(Box::new(Decider {
            every: 50,
            refuses: true,
        })))
    }
}

/// As `manifest.split`: one row in 20 goes to the second output.
pub struct Split;

impl Kind for Split {
    const NAME: &'static str = "scale.split";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::streamed("rows", "numbers")];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("train", "numbers"), OutputPort::new("val", "numbers")];
    type Settings = NoSettings;

    fn shape(_: &NoSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::global(vec![port("train"), port("val")]))
    }

    fn open(_: &NoSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Global(Box::new(Decider {
            every: 20,
            refuses: false,
        })))
    }
}

/// As `manifest.write`: reads all rows and writes how many there are.
pub struct Write;

#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteSettings {
    folder: PathBuf,
}

struct WriteBody(PathBuf, Context);

impl Kind for Write {
    const NAME: &'static str = "scale.write";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::whole("tables", "numbers").count(InputCount::Many)];
    const OUTPUTS: &'static [OutputPort] = &[];
    type Settings = WriteSettings;

    fn shape(_: &WriteSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::export())
    }

    fn open(settings: &WriteSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Export(Box::new(WriteBody(
            settings.folder.clone(),
            context.clone(),
        ))))
    }

    fn identity(_: &WriteSettings) -> serde_json::Value {
        serde_json::Value::Null
    }
}

impl Export for WriteBody {
    fn folder(&self) -> PathBuf {
        self.0.clone()
    }

    fn write(&mut self, set: &mut ExportSet) -> Result<(), StageError> {
        let mut text = String::new();
        for (input, artifact) in self.1.whole("tables") {
            let mut rows = 0;
            for batch in artifact.batches(None) {
                rows += batch?.1.num_rows();
            }
            text.push_str(&format!("{} {rows}\n", input.name));
        }
        std::fs::write(set.file("rows.txt")?, text).map_err(StageError::failed)?;
        Ok(())
    }
}
