//! A global stage.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, UInt32Type};
use flow_runtime::{
    Artifact, Body, Context, Global, GroupedDecision, IncrementalDecision, InputPort, Inputs, Kind, MappedRows,
    OutputPort, Partition, Reducer, RejectClass, RowOutcome, Shape, ShuffledRows, StageError,
};
use serde::{Deserialize, Serialize};

use super::{each, note, port, rows, rows_schema};

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
    /// Fails to say how it decides by changes.
    unheld: bool,
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

/// Round 1 finds the rows whose value comes more than once, round 2 decides about these alone.
impl GroupedDecision for DedupSettings {
    fn rounds(&self) -> usize {
        2
    }

    fn bytes(&self, _round: usize, key_rows: u64, _replied: u64) -> u64 {
        key_rows * 24
    }

    fn map(
        &self,
        round: usize,
        partition: &Partition,
        keys: &Artifact,
        replies: &[RecordBatch],
    ) -> Result<MappedRows, StageError> {
        note(&self.noted, "map", partition);
        let batch = keys.read_whole(partition, None)?;
        self.check(&batch)?;
        let replied: BTreeSet<u32> = replies.iter().flat_map(each).map(|(row, _)| row).collect();
        let mut given = each(&batch);
        given.retain(|(row, _)| round == 0 || replied.contains(row));
        let (numbers, values): (Vec<u32>, Vec<i64>) = given.into_iter().unzip();
        let hash = |value: &i64| (self.same(*value) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Ok(MappedRows {
            hashes: values.iter().map(hash).collect(),
            rows: rows(&numbers, &values),
            decisions: None,
        })
    }

    fn reducer(&self, round: usize, partitions: &Arc<[Partition]>) -> Box<dyn Reducer> {
        Box::new(DedupReducer {
            settings: self.clone(),
            round,
            partitions: Arc::clone(partitions),
            rows: Vec::new(),
        })
    }

    fn complete(
        &self,
        _: &Context,
        carried: &serde_json::Value,
        decisions: &[(Partition, RecordBatch)],
    ) -> Result<(), StageError> {
        let rows: usize = decisions.iter().map(|(_, rows)| rows.num_rows()).sum();
        match carried.as_u64() {
            Some(carried) if carried == rows as u64 => Ok(()),
            other => Err(StageError::failed(format!(
                "{rows} decisions, but {other:?} were carried"
            ))),
        }
    }
}

struct DedupReducer {
    settings: DedupSettings,
    round: usize,
    partitions: Arc<[Partition]>,
    /// Value as it counts, place of the partition, row.
    rows: Vec<(i64, u32, u32)>,
}

impl Reducer for DedupReducer {
    fn add(&mut self, rows: ShuffledRows) -> Result<(), StageError> {
        for (place, rows) in rows.by_partition() {
            let settings = &self.settings;
            let rows = each(&rows).into_iter();
            self.rows
                .extend(rows.map(|(row, value)| (settings.same(value), place, row)));
        }
        Ok(())
    }

    fn sort(&mut self) -> Result<(), StageError> {
        self.rows.sort_unstable();
        Ok(())
    }

    fn reduce(self: Box<Self>, carried: &mut serde_json::Value) -> Result<Vec<(u32, RecordBatch)>, StageError> {
        note(
            &self.settings.noted,
            "reduce",
            &Partition::new(format!("round-{}", self.round)),
        );
        if self.round == 0 {
            let alike = self.rows.chunk_by(|a, b| a.0 == b.0).filter(|alike| alike.len() > 1);
            return Ok(alike
                .flatten()
                .map(|(value, place, row)| (*place, rows(&[*row], &[*value])))
                .collect());
        }
        let name = |place: u32| self.partitions[place as usize].clone();
        let all = self.rows.iter().map(|(value, place, row)| (*value, name(*place), *row));
        let originals = self.settings.originals(all.collect());
        let before = carried.as_u64().unwrap_or(0);
        let own: usize = originals.values().map(RecordBatch::num_rows).sum();
        *carried = (before + own as u64).into();
        let place = |partition: &Partition| self.partitions.binary_search(partition).unwrap() as u32;
        Ok(originals
            .into_iter()
            .map(|(partition, rows)| (place(&partition), rows))
            .collect())
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

    fn decide(&mut self, keys: &Artifact) -> Result<Vec<(Partition, RecordBatch)>, StageError> {
        let mut all: BTreeSet<(i64, Partition, u32)> = BTreeSet::new();
        for batch in keys.batches(None) {
            let (partition, batch) = batch?;
            self.settings.check(&batch)?;
            all.extend(
                each(&batch)
                    .into_iter()
                    .map(|(row, value)| (self.settings.same(value), partition.clone(), row)),
            );
        }
        Ok(self.settings.originals(all).into_iter().collect())
    }

    fn incrementally(&self) -> Option<IncrementalDecision> {
        assert!(!self.settings.unheld, "nothing can be held");
        None
    }

    fn by_groups(&self) -> Option<Box<dyn GroupedDecision>> {
        Some(Box::new(self.settings.clone()))
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
