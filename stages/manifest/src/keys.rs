//! Key rows of global stages: short hashes in place of texts, and the order of partitions.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use arrow::array::{Array, FixedSizeBinaryArray, FixedSizeBinaryBuilder, RecordBatch, StringArray, UInt64Array};
use flow_corpus::ManifestError;
use flow_kind::Partition;
use twox_hash::XxHash64;

/// 128 bits: two texts have the same key only if they are the same text. See [`key_of`].
pub type Key = [u8; 16];

/// A map by key. Keys are digests (or claimed to be by the data), so a multiplication is a sufficient hash.
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
        let product = u64::from_le_bytes(first).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ (product >> 32);
    }

    /// Arrays say their length before their bytes.
    fn write_usize(&mut self, _: usize) {}
}

/// Values of the lower-case hexadecimal digits; of all other bytes more than any digit has.
const DIGITS: [u8; 256] = {
    let mut values = [u8::MAX; 256];
    let mut digit = 0;
    while digit < 16 {
        values[b"0123456789abcdef"[digit as usize] as usize] = digit;
        digit += 1;
    }
    values
};

/// The first 128 bits of the text's BLAKE3 digest; of a text that is a digest of 128 bits in lower-case hexadecimal,
/// that digest itself, which takes a tenth of the time.
pub fn key_of(text: &str) -> Key {
    let mut key = [0; 16];
    if let Ok(digits) = <&[u8; 32]>::try_from(text.as_bytes()) {
        let mut all = 0;
        for (byte, pair) in key.iter_mut().zip(digits.as_chunks::<2>().0) {
            let [high, low] = pair.map(|digit| DIGITS[usize::from(digit)]);
            all |= high | low;
            *byte = high << 4 | low & 15;
        }
        if all < 16 {
            return key;
        }
    }
    key.copy_from_slice(&blake3::hash(text.as_bytes()).as_bytes()[..16]);
    key
}

/// A 64-bit mark of a text, about ten times as fast as its key: XXH64 with the seed 0. Equal for equal texts; different
/// texts collide with probability 2^-64. It is not collision-resistant against an attacker.
pub fn mark_of(text: &str) -> u64 {
    XxHash64::oneshot(0, text.as_bytes())
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
        .ok_or_else(|| ManifestError::rows(format!("key rows lack the key `{name}`"), None))
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

/// Language and shard id of a partition `<lang>/<shard_id>`.
pub fn lang_and_shard(partition: &Partition) -> (&str, &str) {
    partition.as_str().split_once('/').unwrap_or(("", partition.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_a_digest() {
        let digest = "00112233445566778899aabbccddeeff";
        assert_eq!(hex::encode(key_of(digest)), digest);
        // Different texts have different keys, and these are not digests of 128 bits.
        for other in [
            digest.to_uppercase().as_str(),
            &digest[1..],
            "x0112233445566778899aabbccddeeff",
            "",
        ] {
            let want = &blake3::hash(other.as_bytes()).to_hex()[..32];
            assert_eq!(hex::encode(key_of(other)), want, "{other}");
        }
    }

    /// Stored key rows contain marks, so these must not change. (The values are those of the reference implementation.)
    #[test]
    fn marks_are_xxh64() {
        let want = [0xEF46_DB37_51D8_E999, 0xD24E_C4F1_A98C_6E5B, 0x44BC_2CF5_AD77_0999];
        assert_eq!(["", "a", "abc"].map(mark_of), want);
    }
}
