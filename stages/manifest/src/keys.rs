//! Key rows of global stages: short hashes that stand for texts, and the order of partitions.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use arrow::array::{Array, FixedSizeBinaryArray, FixedSizeBinaryBuilder, RecordBatch, StringArray, UInt64Array};
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

/// A mark of a text, some ten times as cheap as its key: one for equal texts, and for other texts another but for chance
/// (one pair in 2^64). It is no digest, as whoever wants to can make two texts of one mark.
///
/// Eight bytes at a time (little-endian, the last ones filled with zeros) are multiplied into what was before them, which
/// at the beginning is the number of bytes; each step loses nothing of either.
pub fn mark_of(text: &str) -> u64 {
    const ODD: [u64; 2] = [0x9E37_79B9_7F4A_7C15, 0xD1B5_4A32_D192_ED03];
    let step = |mark: u64, eight: u64| (mark ^ eight.wrapping_mul(ODD[0])).rotate_left(29).wrapping_mul(ODD[1]);
    let (eights, rest) = text.as_bytes().as_chunks::<8>();
    let mut mark = eights
        .iter()
        .fold(text.len() as u64, |mark, eight| step(mark, u64::from_le_bytes(*eight)));
    if !rest.is_empty() {
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        mark = step(mark, u64::from_le_bytes(last));
    }
    // So that each bit of the last bytes counts in each bit of the mark.
    for odd in ODD {
        mark = (mark ^ (mark >> 32)).wrapping_mul(odd);
    }
    mark ^ (mark >> 32)
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

/// The marks of a column of texts; null stays null.
pub(crate) fn marks_of(texts: &StringArray) -> UInt64Array {
    texts.iter().map(|text| text.map(mark_of)).collect()
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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Marks stand in stored key rows: these must not change. And texts that differ little have others.
    #[test]
    fn marks_tell_texts_apart_and_stay_as_they_are() {
        assert_eq!(["", "a", "नमस्ते दुनिया"].map(mark_of), MARKS);
        let base = "कल सुबह दस बजे a quick brown fox 0123456789";
        let mut texts: Vec<String> = (0..200_000).map(|n| format!("{base} {n}")).collect();
        texts.extend((0..40).map(|n| "\0".repeat(n)));
        for (at, c) in base.char_indices() {
            let cut = |with: &str| format!("{}{with}{}", &base[..at], &base[at + c.len_utf8()..]);
            texts.extend(["", "x", "\0", "ः", "\u{7f}"].map(cut));
        }
        texts.sort();
        texts.dedup();
        let mut seen: HashMap<u64, &str> = HashMap::new();
        for text in &texts {
            assert_eq!(
                seen.insert(mark_of(text), text),
                None,
                "{text:?} has the mark of another"
            );
        }
        // Halves too: no part of a mark is left to chance.
        for shift in [0, 32] {
            let low: std::collections::HashSet<u32> =
                texts.iter().map(|text| (mark_of(text) >> shift) as u32).collect();
            assert!(texts.len() - low.len() < 30, "{} of {}", low.len(), texts.len());
        }
    }

    const MARKS: [u64; 3] = [0, 17638116316677762663, 7863651474084075448];
}
