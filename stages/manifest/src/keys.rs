//! Key rows of global stages: short hashes that stand for texts, and the order of partitions.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use arrow::array::{Array, FixedSizeBinaryArray, FixedSizeBinaryBuilder, RecordBatch, StringArray};
use flow_runtime::{Artifact, Partition, StageError};
use rayon::prelude::*;

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

/// All key rows, partitions in [`partition_order`]; read on all cores.
///
/// # Errors
/// When they cannot be read.
pub fn key_rows(keys: &Artifact) -> Result<Vec<(Partition, Vec<RecordBatch>)>, StageError> {
    let mut partitions: Vec<&Partition> = keys.partitions().collect();
    partitions.sort_by(|a, b| partition_order(a, b));
    let read = |partition: &Partition| Ok((partition.clone(), vec![keys.read_whole(partition, None)?]));
    partitions.into_par_iter().map(read).collect()
}
