//! The stored decisions of a global stage: one file with the decisions of all partitions, and one with a list of the
//! partitions' ranges and digests. Both are one commit, so they always match.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray, UInt64Array};
use arrow::compute::concat_batches;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, UInt64Type};
use arrow::ipc::writer::StreamWriter;
use rayon::prelude::*;

use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_store::Artifact;
use flow_store::row_order::in_row_order;

/// The one partition of the artifacts of `decide`.
pub const ALL: &str = "all";

pub fn digests_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("partition", DataType::Utf8, false),
        Field::new("digest", DataType::Utf8, false),
        Field::new("offset", DataType::UInt64, false),
        Field::new("rows", DataType::UInt64, false),
    ]))
}

/// Decisions by partition, without partitions that have none.
#[derive(Debug)]
pub struct Decisions {
    schema: SchemaRef,
    by_partition: BTreeMap<Partition, RecordBatch>,
}

impl Decisions {
    /// Sorts the output of `decide` into the order in which it is stored.
    pub fn new(schema: SchemaRef, decided: Vec<(Partition, RecordBatch)>) -> Result<Self, StageError> {
        let mut pieces: BTreeMap<Partition, Vec<RecordBatch>> = BTreeMap::new();
        for (partition, batch) in decided {
            if batch.num_rows() > 0 {
                pieces.entry(partition).or_default().push(batch);
            }
        }
        let mut by_partition = BTreeMap::new();
        for (partition, pieces) in pieces {
            let batch = concat_batches(&schema, &in_row_order(&schema, pieces)?)?;
            by_partition.insert(partition, batch);
        }
        Ok(Decisions { schema, by_partition })
    }

    pub fn partitions(&self) -> impl Iterator<Item = &Partition> {
        self.by_partition.keys()
    }

    pub fn of(&self, partition: &Partition) -> RecordBatch {
        self.by_partition
            .get(partition)
            .cloned()
            .unwrap_or_else(|| RecordBatch::new_empty(self.schema.clone()))
    }

    /// The rows of the two ports: all decisions one after the other, and the list.
    pub fn to_ports(&self) -> Result<(Vec<RecordBatch>, RecordBatch), StageError> {
        let digests = self.by_partition.par_iter().map(|(_, batch)| digest_of(batch));
        let digests: Vec<Digest> = digests.collect::<Result<_, _>>()?;
        let mut offset = 0;
        let mut list: Vec<(String, String, u64, u64)> = Vec::with_capacity(digests.len());
        for ((partition, batch), digest) in self.by_partition.iter().zip(digests) {
            let rows = batch.num_rows() as u64;
            list.push((partition.to_string(), digest.to_hex(), offset, rows));
            offset += rows;
        }
        let columns: Vec<ArrayRef> = vec![
            Arc::new(StringArray::from_iter_values(list.iter().map(|row| &row.0))),
            Arc::new(StringArray::from_iter_values(list.iter().map(|row| &row.1))),
            Arc::new(UInt64Array::from_iter_values(list.iter().map(|row| row.2))),
            Arc::new(UInt64Array::from_iter_values(list.iter().map(|row| row.3))),
        ];
        Ok((
            self.by_partition.values().cloned().collect(),
            RecordBatch::try_new(digests_schema(), columns)?,
        ))
    }

    /// Reads both ports back.
    pub fn load(decisions: &Artifact, digests: &Artifact) -> Result<Self, StageError> {
        let all = Partition::new(ALL);
        let rows = decisions.read_whole(&all, None)?;
        let mut by_partition = BTreeMap::new();
        for entry in read_list(digests)? {
            let (offset, length) = (entry.offset as usize, entry.rows as usize);
            if offset.checked_add(length).is_none_or(|end| end > rows.num_rows()) {
                return Err(StageError::failed(format!(
                    "the decisions on partition {} are cut short",
                    entry.partition
                )));
            }
            by_partition.insert(entry.partition, rows.slice(offset, length));
        }
        Ok(Decisions {
            schema: rows.schema(),
            by_partition,
        })
    }
}

/// Digest of the decisions of each partition, without partitions that have none.
pub fn digests(list: &Artifact) -> Result<BTreeMap<Partition, Digest>, StageError> {
    Ok(read_list(list)?
        .into_iter()
        .map(|entry| (entry.partition, entry.digest))
        .collect())
}

struct Entry {
    partition: Partition,
    digest: Digest,
    offset: u64,
    rows: u64,
}

fn read_list(list: &Artifact) -> Result<Vec<Entry>, StageError> {
    let batch = list.read_whole(&Partition::new(ALL), None)?;
    let [partitions, digests, offsets, rows] = batch.columns() else {
        return Err(StageError::failed("the list of decisions has other columns"));
    };
    let (partitions, digests) = (partitions.as_string::<i32>(), digests.as_string::<i32>());
    let (offsets, rows) = (offsets.as_primitive::<UInt64Type>(), rows.as_primitive::<UInt64Type>());
    (0..partitions.len())
        .map(|at| {
            let digest = Digest::from_hex(digests.value(at))
                .ok_or_else(|| StageError::failed("the list of decisions holds no digest where there should be one"))?;
            Ok(Entry {
                partition: Partition::new(partitions.value(at)),
                digest,
                offset: offsets.value(at),
                rows: rows.value(at),
            })
        })
        .collect()
}

fn digest_of(batch: &RecordBatch) -> Result<Digest, StageError> {
    let mut writer = StreamWriter::try_new(Vec::new(), batch.schema_ref())?;
    writer.write(batch)?;
    Ok(Digest::of(&writer.into_inner()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::UInt32Array;

    fn batch(rows: &[u32], said: &[&str]) -> RecordBatch {
        let schema = Schema::new(vec![
            Field::new("_row", DataType::UInt32, false),
            Field::new("said", DataType::Utf8, true),
        ]);
        let columns: Vec<ArrayRef> = vec![
            Arc::new(UInt32Array::from(rows.to_vec())),
            Arc::new(StringArray::from(said.to_vec())),
        ];
        RecordBatch::try_new(Arc::new(schema), columns).unwrap()
    }

    #[test]
    fn stored_and_back_whatever_the_order_they_came_in() {
        let (a, b) = (Partition::new("a"), Partition::new("b"));
        let one = vec![
            (b.clone(), batch(&[4, 9], &["x", "y"])),
            (a.clone(), batch(&[1], &["z"])),
        ];
        let two = vec![
            (a.clone(), batch(&[1], &["z"])),
            (b.clone(), batch(&[9], &["y"])),
            (b.clone(), batch(&[4], &["x"])),
            (Partition::new("c"), batch(&[], &[])),
        ];
        let schema = batch(&[], &[]).schema();
        let stored = |decided| {
            let (rows, list) = Decisions::new(schema.clone(), decided).unwrap().to_ports().unwrap();
            let all = Partition::new(ALL);
            let rows = Artifact::in_memory(schema.clone(), vec![(all.clone(), rows)]).unwrap();
            let list = Artifact::in_memory(digests_schema(), vec![(all, vec![list])]).unwrap();
            (rows, list)
        };
        let (rows, list) = stored(one);
        let (rows_two, list_two) = stored(two);
        assert_eq!((rows.digest(), list.digest()), (rows_two.digest(), list_two.digest()));
        let loaded = Decisions::load(&rows, &list).unwrap();
        assert_eq!(loaded.of(&a), batch(&[1], &["z"]));
        assert_eq!(loaded.of(&b), batch(&[4, 9], &["x", "y"]));
        assert_eq!(loaded.of(&Partition::new("c")).num_rows(), 0);
        assert_eq!(digests(&list).unwrap().len(), 2);
    }
}
