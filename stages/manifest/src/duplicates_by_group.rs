//! Duplicates decided group by group, for [`decide_duplicates`] over more key rows than one process holds, and over those of a
//! process that stays alive, of which few change.
//!
//! Round 1: each partition decides which of its rows share a segment id; of the others the reducers get the first half of
//! the audio key and the place, and reply the places of rows whose half comes twice. Round 2: these rows, which are few, go
//! to the reducers whole.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use arrow::array::{Array, RecordBatch, UInt32Array, UInt64Array, new_null_array};
use arrow::compute::take_record_batch;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_runtime::{
    Artifact, Context, GroupDecision, GroupRows, GroupedDecision, MappedRows, Partition, ROW, Reducer, ShuffledRows,
    StageError,
};
use rayon::prelude::*;
use serde_json::Value;

use crate::columns;
use crate::dedup::report;
use crate::duplicates::{decide_duplicates, each_once, key_schema, number, same_id};
use crate::error::ManifestError;
use crate::keys::{halves, key_at, keys};

/// Bytes for each row of the first round: half a key, partition, place.
const ROW_BYTES: u64 = 16;

/// Bytes for each row of the second round: a guess for its texts, which the reducer holds twice.
const WHOLE_ROW_BYTES: u64 = 300;

/// The decisions of [`decide_duplicates`].
pub(crate) struct DuplicatesByGroup;

/// What goes to the reducers of the first round.
fn half_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("half", DataType::UInt64, false),
        Field::new("place", DataType::UInt32, false),
    ]))
}

/// What they reply.
fn place_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("place", DataType::UInt32, false)]))
}

/// Keys are those of the data, which need not be spread evenly.
fn hash_of(half: u64) -> u64 {
    let product = half.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (product ^ (product >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn numbers<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a UInt32Array, ManifestError> {
    let column = batch.column_by_name(name);
    let column = column.and_then(|column| column.as_any().downcast_ref::<UInt32Array>());
    column.ok_or_else(|| lacks(name))
}

fn lacks(column: &str) -> ManifestError {
    ManifestError::Rows {
        message: format!("rows of the decision lack the column `{column}`"),
        row: None,
    }
}

/// The decisions on rows that share their segment id with another row of the partition, whatever their audio.
fn by_segment_id(keys: &Artifact, partition: &Partition, mut places: Vec<u32>) -> Result<RecordBatch, StageError> {
    places.sort_unstable();
    places.dedup();
    let whole = keys.read_whole(partition, None)?;
    let rows = take_record_batch(&whole, &UInt32Array::from(places))?;
    let (schema, mut columns, _) = rows.into_parts();
    let audio = schema.index_of("audio_hash").map_err(StageError::from)?;
    columns[audio] = new_null_array(columns[audio].data_type(), columns[audio].len());
    let rows = RecordBatch::try_new(schema, columns)?;
    let decided = decide_duplicates(&[(partition.clone(), vec![rows])])?;
    let decisions = decided.into_iter().next().map(|(_, decisions)| decisions);
    decisions.ok_or_else(|| StageError::failed(format!("nothing was decided about {partition}")))
}

/// The key rows at these places, ascending.
fn rows_at(partition: &Partition, keys: &Artifact, places: &[u32]) -> Result<RecordBatch, StageError> {
    let Some(last) = places.last() else {
        return Ok(RecordBatch::new_empty(key_schema()));
    };
    let whole = keys.read_whole(partition, None)?;
    if *last as usize >= whole.num_rows() {
        return Err(StageError::failed(format!(
            "{partition} has fewer rows than were decided on"
        )));
    }
    Ok(take_record_batch(&whole, &UInt32Array::from(places.to_vec()))?)
}

impl DuplicatesByGroup {
    fn map_halves(&self, partition: &Partition, keys_artifact: &Artifact) -> Result<MappedRows, StageError> {
        let batch = keys_artifact.read_whole(partition, Some(&[ROW, "segment_id", "audio_hash"]))?;
        let rows = columns::rows(&batch)?;
        each_once(partition, rows)?;
        let same = same_id(columns::text(&batch, "segment_id")?)?;
        let decisions = match same.is_empty() {
            true => None,
            false => Some(by_segment_id(keys_artifact, partition, same)?),
        };
        let gone: HashSet<u32> = match &decisions {
            Some(decisions) => columns::rows(decisions)?.values().iter().copied().collect(),
            None => HashSet::new(),
        };
        let audio = keys(&batch, "audio_hash")?;
        let is_left = |place: &u32| {
            let at = *place as usize;
            audio.is_valid(at) && (gone.is_empty() || !gone.contains(&rows.value(at)))
        };
        let places: Vec<u32> = (0..number(audio.len())?).filter(is_left).collect();
        let half = |place: &u32| halves(key_at(audio, *place as usize))[0];
        let halves: Vec<u64> = places.iter().map(half).collect();
        let hashes = halves.iter().map(|half| hash_of(*half)).collect();
        let columns: Vec<Arc<dyn Array>> =
            vec![Arc::new(UInt64Array::from(halves)), Arc::new(UInt32Array::from(places))];
        Ok(MappedRows {
            rows: RecordBatch::try_new(half_schema(), columns)?,
            hashes,
            decisions,
        })
    }

    /// The rows at the places that were replied.
    fn map_candidates(
        &self,
        partition: &Partition,
        keys_artifact: &Artifact,
        replies: &[RecordBatch],
    ) -> Result<MappedRows, StageError> {
        let mut places: Vec<u32> = Vec::new();
        for reply in replies {
            places.extend(numbers(reply, "place")?.values());
        }
        places.sort_unstable();
        let rows = rows_at(partition, keys_artifact, &places)?;
        let audio = keys(&rows, "audio_hash")?;
        let hash = |place| hash_of(halves(key_at(audio, place))[0]);
        let hashes = (0..audio.len()).map(hash).collect();
        Ok(MappedRows {
            rows,
            hashes,
            decisions: None,
        })
    }
}

impl GroupedDecision for DuplicatesByGroup {
    fn rounds(&self) -> usize {
        2
    }

    fn bytes(&self, round: usize, key_rows: u64, replied: u64) -> u64 {
        match round {
            0 => key_rows.saturating_mul(ROW_BYTES),
            _ => replied.saturating_mul(WHOLE_ROW_BYTES),
        }
    }

    fn map(
        &self,
        round: usize,
        partition: &Partition,
        keys: &Artifact,
        replies: &[RecordBatch],
    ) -> Result<MappedRows, StageError> {
        match round {
            0 => self.map_halves(partition, keys),
            _ => self.map_candidates(partition, keys, replies),
        }
    }

    fn reducer(&self, round: usize, partitions: &Arc<[Partition]>) -> Box<dyn Reducer> {
        match round {
            0 => Box::new(Halves::default()),
            _ => Box::new(Candidates {
                partitions: Arc::clone(partitions),
                rows: BTreeMap::new(),
            }),
        }
    }

    fn complete(
        &self,
        context: &Context,
        _carried: &Value,
        decisions: &[(Partition, RecordBatch)],
    ) -> Result<(), StageError> {
        report(context, decisions)
    }
}

impl GroupDecision for DuplicatesByGroup {
    fn rows(&self, partition: &Partition, keys: &Artifact) -> Result<GroupRows, StageError> {
        let mapped = self.map_halves(partition, keys)?;
        Ok(GroupRows {
            places: numbers(&mapped.rows, "place")?.values().to_vec(),
            hashes: mapped.hashes,
            decisions: mapped.decisions,
        })
    }

    fn whole(&self, partition: &Partition, keys: &Artifact, places: &[u32]) -> Result<RecordBatch, StageError> {
        rows_at(partition, keys, places)
    }

    fn decide(&self, rows: &[(Partition, Vec<RecordBatch>)]) -> Result<Vec<(Partition, RecordBatch)>, StageError> {
        Ok(decide_duplicates(rows)?)
    }

    fn complete(&self, context: &Context, decisions: &[(Partition, RecordBatch)]) -> Result<(), StageError> {
        report(context, decisions)
    }
}

/// Finds the rows that share the first half of their audio key.
#[derive(Default)]
struct Halves {
    /// Half a key, partition, place.
    rows: Vec<(u64, u32, u32)>,
}

impl Reducer for Halves {
    fn add(&mut self, rows: ShuffledRows) -> Result<(), StageError> {
        let places = numbers(&rows.rows, "place")?.values().iter();
        let halves = rows.rows.column_by_name("half");
        let halves = halves.and_then(|column| column.as_any().downcast_ref::<UInt64Array>());
        let halves = halves.ok_or_else(|| lacks("half"))?.values().iter();
        let rows = halves.zip(rows.partitions.values()).zip(places);
        self.rows
            .extend(rows.map(|((half, partition), place)| (*half, *partition, *place)));
        Ok(())
    }

    fn sort(&mut self) -> Result<(), StageError> {
        self.rows.par_sort_unstable();
        Ok(())
    }

    fn reduce(self: Box<Self>, _carried: &mut Value) -> Result<Vec<(u32, RecordBatch)>, StageError> {
        let alike = self.rows.chunk_by(|a, b| a.0 == b.0).filter(|alike| alike.len() > 1);
        let mut alike: Vec<(u32, u32)> = alike
            .flatten()
            .map(|(_, partition, place)| (*partition, *place))
            .collect();
        alike.par_sort_unstable();
        let reply = |places: &[(u32, u32)]| {
            let column = UInt32Array::from_iter_values(places.iter().map(|(_, place)| *place));
            let rows = RecordBatch::try_new(place_schema(), vec![Arc::new(column)])?;
            Ok((places[0].0, rows))
        };
        alike.chunk_by(|a, b| a.0 == b.0).map(reply).collect()
    }
}

/// Decides about rows of which another one may have the same audio.
struct Candidates {
    partitions: Arc<[Partition]>,
    rows: BTreeMap<u32, Vec<RecordBatch>>,
}

impl Reducer for Candidates {
    fn add(&mut self, rows: ShuffledRows) -> Result<(), StageError> {
        for (partition, rows) in rows.by_partition() {
            self.rows.entry(partition).or_default().push(rows);
        }
        Ok(())
    }

    fn reduce(self: Box<Self>, _carried: &mut Value) -> Result<Vec<(u32, RecordBatch)>, StageError> {
        let name = |place: u32| &self.partitions[place as usize]; // The runtime checks the places.
        let places: HashMap<&Partition, u32> = self.rows.keys().map(|place| (name(*place), *place)).collect();
        let rows: Vec<(Partition, Vec<RecordBatch>)> = self
            .rows
            .iter()
            .map(|(place, rows)| (name(*place).clone(), rows.clone()))
            .collect();
        let decided = decide_duplicates(&rows)?.into_iter();
        let decided = decided.filter_map(|(partition, decisions)| Some((*places.get(&partition)?, decisions)));
        Ok(decided.collect())
    }
}
