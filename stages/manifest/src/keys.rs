//! Key rows of global stages: short hashes that stand for texts, the order of partitions, and what stands
//! after rounds of rows that left and came.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use arrow::array::{Array, BooleanArray, FixedSizeBinaryArray, FixedSizeBinaryBuilder, RecordBatch, StringArray};
use arrow::compute::filter_record_batch;
use flow_runtime::{Partition, Round, StageError};

use crate::columns;
use crate::error::ManifestError;

/// The first 128 bits of a BLAKE3 digest: two texts have the same key only if they are the same text.
pub type Key = [u8; 16];

/// A map by key. Keys are digests, so their first bytes are as good as any hash of them.
pub(crate) type ByKey<T> = HashMap<Key, T, BuildHasherDefault<FirstBytes>>;

#[derive(Default)]
pub(crate) struct FirstBytes(u64);

impl Hasher for FirstBytes {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        let mut first = [0; 8];
        let length = bytes.len().min(8);
        first[..length].copy_from_slice(&bytes[..length]);
        self.0 = u64::from_le_bytes(first);
    }

    /// Arrays say their length before their bytes.
    fn write_usize(&mut self, _: usize) {}
}

pub fn key_of(text: &str) -> Key {
    let mut key = [0; 16];
    key.copy_from_slice(&blake3::hash(text.as_bytes()).as_bytes()[..16]);
    key
}

/// The keys of a column of texts; null stays null.
pub(crate) fn keys_of(texts: &StringArray) -> FixedSizeBinaryArray {
    let mut keys = FixedSizeBinaryBuilder::with_capacity(texts.len(), 16);
    for text in texts {
        match text {
            // A key has the width that the builder was made for.
            Some(text) => keys.append_value(key_of(text)).expect("16 bytes"),
            None => keys.append_null(),
        }
    }
    keys.finish()
}

pub(crate) fn keys<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a FixedSizeBinaryArray, ManifestError> {
    let keys = batch
        .column_by_name(name)
        .and_then(|column| column.as_any().downcast_ref::<FixedSizeBinaryArray>());
    keys.filter(|keys| keys.value_length() == 16)
        .ok_or_else(|| ManifestError::Rows {
            message: format!("key rows lack the key `{name}`"),
            row: None,
        })
}

pub(crate) fn key_at(keys: &FixedSizeBinaryArray, row: usize) -> Key {
    let mut key = [0; 16];
    key.copy_from_slice(keys.value(row)); // `keys` checked the width.
    key
}

/// A key as two numbers.
pub(crate) fn halves(key: Key) -> [u64; 2] {
    let whole = u128::from_be_bytes(key);
    [(whole >> 64) as u64, whole as u64]
}

/// Manifests are in this order of partitions: language, then shard id, each as bytes. (Not the order of
/// the joined names: `a-b/x` comes before `a/x` there.)
pub fn partition_order(a: &Partition, b: &Partition) -> Ordering {
    a.as_str().split('/').cmp(b.as_str().split('/'))
}

/// Language and shard id of a partition `<lang>/<shard_id>`.
pub fn lang_and_shard(partition: &Partition) -> (&str, &str) {
    partition.as_str().split_once('/').unwrap_or(("", partition.as_str()))
}

/// The key rows that stand after all rounds, partitions in [`partition_order`], in each one batch per time
/// that rows came.
///
/// # Errors
/// Those of the rounds, and rows that leave without having come.
pub fn standing(
    rounds: &mut dyn Iterator<Item = Result<Round, StageError>>,
) -> Result<Vec<(Partition, Vec<RecordBatch>)>, StageError> {
    let mut standing: BTreeMap<Partition, Vec<RecordBatch>> = BTreeMap::new();
    for round in rounds {
        let round = round?;
        for (partition, batch) in round.minus {
            let leaving: HashSet<u32> = columns::rows(&batch)?.values().iter().copied().collect();
            let mut left = 0;
            if let Some(batches) = standing.get_mut(&partition) {
                for kept in batches.iter_mut() {
                    let stays: BooleanArray = columns::rows(kept)?
                        .values()
                        .iter()
                        .map(|row| Some(!leaving.contains(row)))
                        .collect();
                    let after = filter_record_batch(kept, &stays)?;
                    left += kept.num_rows() - after.num_rows();
                    *kept = after;
                }
                batches.retain(|batch| batch.num_rows() > 0);
            }
            if left != leaving.len() {
                return Err(StageError::failed(format!(
                    "{} key rows leave partition {partition}, but only {left} of them are there",
                    leaving.len()
                )));
            }
        }
        for (partition, batch) in round.plus {
            standing.entry(partition).or_default().push(batch);
        }
    }
    let mut standing: Vec<_> = standing.into_iter().collect();
    standing.sort_by(|a, b| partition_order(&a.0, &b.0));
    Ok(standing)
}
