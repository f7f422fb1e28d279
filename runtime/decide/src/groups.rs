//! Decides about groups of rows that share a hash.

use std::collections::BTreeMap;

use arrow::array::RecordBatch;
use rayon::prelude::*;

use super::external_sort::{Record, Sorter, u32_at, u64_at};
use super::{Decided, Ended, GroupDecision, GroupRows, Resources, for_each_partition};
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_store::Artifact;

/// Bytes of a key row that is read whole: a guess for its texts, which are held twice.
const WHOLE_ROW_BYTES: u64 = 300;

/// A row by the hash of its group: the place of its partition, and its own there.
type Row = (u64, u32, u32);

impl Record for Row {
    const BYTES: usize = 16;

    fn write(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.0.to_le_bytes());
        bytes.extend(self.1.to_le_bytes());
        bytes.extend(self.2.to_le_bytes());
    }

    fn read(bytes: &[u8]) -> Self {
        (u64_at(bytes, 0), u32_at(bytes, 8), u32_at(bytes, 12))
    }
}

/// Half of the memory is for the hashes, half for the rows of groups of two or more: where these need more, they are decided
/// about some groups at a time, for each of which the key rows are read once.
pub(super) fn decide(decision: &dyn GroupDecision, keys: &Artifact, resources: &Resources) -> Result<Decided, Ended> {
    let half = resources.memory / 2;
    let mut sorter = Sorter::new(half, keys.rows(), &resources.scratch);
    let mut decisions: Vec<(Partition, RecordBatch)> = Vec::new();
    let partitions: Vec<&Partition> = keys.partitions().collect();
    for_each_partition(
        keys,
        resources,
        |_, partition| rows_of(decision, partition, keys),
        |place, rows: GroupRows| {
            decisions.extend(rows.decisions.map(|rows| (partitions[place as usize].clone(), rows)));
            sorter.extend(
                rows.hashes
                    .into_iter()
                    .zip(rows.places)
                    .map(|(hash, row)| (hash, place, row)),
            )
        },
    )?;
    let most = half / WHOLE_ROW_BYTES;
    let decide = |rows: &mut Vec<Row>| -> Result<Vec<(Partition, RecordBatch)>, Ended> {
        resources.go_on()?;
        let mut places: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (_, partition, row) in rows.drain(..) {
            places.entry(partition).or_default().push(row);
        }
        let places: Vec<(&Partition, Vec<u32>)> = places
            .into_iter()
            .map(|(partition, places)| (partitions[partition as usize], places))
            .collect();
        let read = places.into_par_iter().map(|(partition, mut places)| {
            places.sort_unstable();
            let rows = decision.whole(partition, keys, &places)?;
            match rows.num_rows() == places.len() {
                true => Ok((partition.clone(), vec![rows])),
                false => Err(StageError::failed(format!(
                    "{partition} has other key rows than before"
                ))),
            }
        });
        let rows: Vec<(Partition, Vec<RecordBatch>)> = read.collect::<Result<_, StageError>>()?;
        Ok(decision.decide(&rows)?)
    };
    let (mut some, mut group): (Vec<Row>, Vec<Row>) = (Vec::new(), Vec::new());
    let mut looked_at = 0u64;
    for row in sorter.finish()? {
        let row = row?;
        if group.last().is_some_and(|last| last.0 != row.0) {
            if group.len() > 1 {
                some.append(&mut group);
            }
            group.clear();
            if some.len() as u64 >= most.max(2) {
                decisions.extend(decide(&mut some)?);
            }
        }
        group.push(row);
        looked_at += 1;
        if looked_at.is_multiple_of(1 << 20) {
            resources.go_on()?;
        }
    }
    if group.len() > 1 {
        some.append(&mut group);
    }
    if !some.is_empty() {
        decisions.extend(decide(&mut some)?);
    }
    Ok(Decided {
        decisions,
        classes: BTreeMap::new(),
    })
}

/// The rows of a partition that are in groups.
pub(super) fn rows_of(
    decision: &dyn GroupDecision,
    partition: &Partition,
    keys: &Artifact,
) -> Result<GroupRows, StageError> {
    let rows = decision.rows(partition, keys)?;
    match rows.hashes.len() == rows.places.len() {
        true => Ok(rows),
        false => Err(StageError::failed(format!(
            "it gave {} hashes for {} rows of {partition}",
            rows.hashes.len(),
            rows.places.len()
        ))),
    }
}
