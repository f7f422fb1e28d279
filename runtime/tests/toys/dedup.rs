//! A global stage.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, RecordBatch, StringArray, UInt32Array};
use arrow::compute::take_record_batch;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, UInt32Type};
use flow_kind::{
    Artifact, Body, Context, Decision, Global, GroupDecision, GroupRows, InputPort, Inputs, Kind, OutputPort,
    Partition, RejectClass, RowOutcome, Shape, StageError,
};
use serde::{Deserialize, Serialize};

use super::{each, note, port, rows_schema};

pub struct Dedup;

/// Keeps the first row of each value, over all partitions.
#[derive(Clone, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DedupSettings {
    /// Where to note work.
    noted: PathBuf,
    /// Values with the same remainder count as the same; 0 for the values themselves.
    modulo: i64,
    /// Keeps the last row instead.
    last: bool,
    /// Gives a key row too few.
    lossy: bool,
    /// A value that nothing can be decided about.
    refuse: Option<i64>,
    /// Fails to say how it decides.
    undecided: bool,
}

struct DedupBody {
    settings: DedupSettings,
}

impl Kind for Dedup {
    const NAME: &'static str = "toy.dedup";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::streamed("rows", "numbers")];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = DedupSettings;

    fn shape(_: &DedupSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::global(vec![port("rows")]))
    }

    fn open(settings: &DedupSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Global(Box::new(DedupBody {
            settings: settings.clone(),
        })))
    }

    fn identity(settings: &DedupSettings) -> serde_json::Value {
        serde_json::json!({"modulo": settings.modulo, "last": settings.last})
    }
}

impl DedupSettings {
    fn same(&self, value: i64) -> i64 {
        match self.modulo {
            0 => value,
            modulo => value.rem_euclid(modulo),
        }
    }

    fn check(&self, keys: &RecordBatch) -> Result<(), StageError> {
        match each(keys).iter().find(|(_, value)| Some(*value) == self.refuse) {
            Some((row, value)) => Err(StageError::failed(format!("row {row} has {value}, which is refused"))),
            None => Ok(()),
        }
    }

    /// The rows that have an original.
    fn originals(&self, all: BTreeSet<(i64, Partition, u32)>) -> BTreeMap<Partition, RecordBatch> {
        let mut all: Vec<_> = all.into_iter().collect();
        if self.last {
            all.reverse();
        }
        let mut first: BTreeMap<i64, String> = BTreeMap::new();
        let mut said: BTreeMap<Partition, Vec<(u32, String)>> = BTreeMap::new();
        for (value, partition, row) in all {
            match first.get(&value) {
                None => {
                    first.insert(value, format!("{partition}/{row}"));
                }
                Some(original) => said.entry(partition).or_default().push((row, original.clone())),
            }
        }
        let batch = |mut said: Vec<(u32, String)>| {
            said.sort();
            let columns: Vec<ArrayRef> = vec![
                Arc::new(UInt32Array::from_iter_values(said.iter().map(|one| one.0))),
                Arc::new(StringArray::from_iter_values(said.iter().map(|one| &one.1))),
            ];
            RecordBatch::try_new(original_schema(), columns).unwrap()
        };
        said.into_iter()
            .map(|(partition, said)| (partition, batch(said)))
            .collect()
    }
}

/// Rows are in one group whose values count as the same.
impl GroupDecision for DedupSettings {
    fn rows(&self, partition: &Partition, keys: &Artifact) -> Result<GroupRows, StageError> {
        let batch = keys.read_whole(partition, None)?;
        self.check(&batch)?;
        let hash = |value: i64| (self.same(value) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let values = each(&batch).into_iter();
        let hashes: Vec<u64> = values.map(|(_, value)| hash(value)).collect();
        Ok(GroupRows {
            places: (0..hashes.len() as u32).collect(),
            hashes,
            decisions: None,
        })
    }

    fn whole(&self, partition: &Partition, keys: &Artifact, places: &[u32]) -> Result<RecordBatch, StageError> {
        note(&self.noted, "whole", partition);
        let rows = keys.read_whole(partition, None)?;
        Ok(take_record_batch(&rows, &UInt32Array::from(places.to_vec()))?)
    }

    fn decide(&self, rows: &[(Partition, Vec<RecordBatch>)]) -> Result<Vec<(Partition, RecordBatch)>, StageError> {
        let mut all: BTreeSet<(i64, Partition, u32)> = BTreeSet::new();
        for (partition, batches) in rows {
            let rows = batches.iter().flat_map(each);
            all.extend(rows.map(|(row, value)| (self.same(value), partition.clone(), row)));
        }
        Ok(self.originals(all).into_iter().collect())
    }

    fn complete(&self, _: &Context, _: &[(Partition, RecordBatch)]) -> Result<(), StageError> {
        Ok(())
    }
}

fn original_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new("original", DataType::Utf8, false),
    ]))
}

impl Global for DedupBody {
    fn key_schema(&self) -> SchemaRef {
        rows_schema()
    }

    fn decision_schema(&self) -> SchemaRef {
        original_schema()
    }

    fn keys(&mut self, partition: &Partition, batch: &RecordBatch) -> Result<RecordBatch, StageError> {
        note(&self.settings.noted, "keys", partition);
        Ok(batch.slice(0, batch.num_rows() - usize::from(self.settings.lossy)))
    }

    fn decision(&self) -> Decision {
        assert!(!self.settings.undecided, "nothing can be decided");
        Decision::Groups(Arc::new(self.settings.clone()))
    }

    fn apply(
        &mut self,
        partition: &Partition,
        rows: &UInt32Array,
        decisions: &RecordBatch,
    ) -> Result<Vec<RowOutcome>, StageError> {
        note(&self.settings.noted, "apply", partition);
        let gone: BTreeMap<u32, String> = decisions
            .column(0)
            .as_primitive::<UInt32Type>()
            .values()
            .iter()
            .copied()
            .zip(
                decisions
                    .column(1)
                    .as_string::<i32>()
                    .iter()
                    .map(|text| text.unwrap().to_string()),
            )
            .collect();
        let fate = |row: &u32| match gone.get(row) {
            None => RowOutcome::Port(0),
            Some(original) => RowOutcome::Rejected {
                reason: "duplicate",
                class: RejectClass::Rule,
                detail: original.clone(),
            },
        };
        Ok(rows.values().iter().map(fate).collect())
    }
}
