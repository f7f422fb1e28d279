//! Which rows are for validation: whole groups of equal words, chosen by hash per language, so that no sentence is on
//! both sides and the choice does not depend on the order of rows.

use std::sync::Arc;

use arrow::array::{Array, FixedSizeBinaryArray, FixedSizeBinaryBuilder, StringArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_corpus::ManifestError;
use flow_kind::ROW;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::keys::Key;

/// What must not be divided between training and validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SplitBy {
    /// Rows with the same words.
    Text,
    /// Rows with the same words, and rows of the same recording; rows that are connected by a chain of the two stay
    /// together. A row without a recording is connected by its words only.
    Recording,
}

/// How many rows of each language go to validation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quota {
    pub per_language: u64,
    /// At most this share of a language's rows, in percent.
    pub percent: f64,
}

impl Quota {
    /// Rows for validation of a language that has this many rows.
    pub fn target(self, rows: u64) -> u64 {
        // Exact for any count of rows below 2^53 / 100: the product is, and a quotient that is no whole
        // number is not rounded up to one.
        let share = (rows as f64 * self.percent / 100.0).floor();
        self.per_language.min(share as u64)
    }
}

/// Schema of key rows. By text: the words as a 128-bit key ([`group_key`]), whose first half is their place in the order
/// of choice. By recording: the words themselves, which name a group, and the recording as a key; `with_segment` also the
/// segment as one.
pub fn key_schema(by: SplitBy, with_segment: bool) -> SchemaRef {
    let mut fields = vec![
        Field::new(ROW, DataType::UInt32, false),
        // Null only in rows about which nothing is decided.
        Field::new("lang", DataType::Utf8, true),
    ];
    match by {
        SplitBy::Text => {
            fields.push(Field::new("words", DataType::FixedSizeBinary(16), false));
        }
        SplitBy::Recording => {
            fields.push(Field::new("norm", DataType::Utf8, false));
            fields.push(Field::new("recording", DataType::FixedSizeBinary(16), true));
            if with_segment {
                fields.push(Field::new("segment", DataType::FixedSizeBinary(16), true));
            }
        }
    }
    Arc::new(Schema::new(fields))
}

/// Schema of decisions: the rows for validation.
pub fn decision_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new(ROW, DataType::UInt32, false)]))
}

/// The first 16 bytes of SHA-256 over `"{seed}\n{words}"`.
pub fn group_key(seed: i64, words: &str) -> Key {
    let digest = Sha256::new()
        .chain_update(seed.to_string())
        .chain_update("\n")
        .chain_update(words)
        .finalize();
    let mut key = [0; 16];
    key.copy_from_slice(&digest[..16]);
    key
}

/// The keys of a column of words.
pub(crate) fn group_keys(seed: i64, texts: &StringArray) -> FixedSizeBinaryArray {
    let mut keys = FixedSizeBinaryBuilder::with_capacity(texts.len(), 16);
    for words in words(texts) {
        // A key has the width that the builder was made for.
        keys.append_value(group_key(seed, words)).expect("16 bytes");
    }
    keys.finish()
}

pub(crate) fn small(count: usize) -> Result<u32, ManifestError> {
    u32::try_from(count).map_err(|_| ManifestError::rows("more groups than fit in 32 bits", None))
}

/// The texts of a column, empty where null.
pub(crate) fn words(texts: &StringArray) -> impl Iterator<Item = &str> {
    texts.iter().map(|text| text.unwrap_or(""))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashSet};

    use arrow::array::{RecordBatch, UInt32Array};
    use flow_kind::{Artifact, Decision, Partition};
    use flow_runtime::harness::decide;
    use proptest::prelude::*;

    use super::*;
    use crate::keys::{halves, key_of, keys_of};
    use crate::split::{SplitSettings, ValidationChoice};
    use flow_corpus::columns;

    type Row = (u8, u8, Option<u8>, u8); // partition, words, recording, language

    const SEED: i64 = 7;

    /// The place of a group in the order of choice.
    fn group_order(seed: i64, words: &str) -> u64 {
        halves(group_key(seed, words))[0]
    }

    fn keys_for(rows: &[Row], by: SplitBy) -> Vec<(Partition, Vec<RecordBatch>)> {
        (0..3u8)
            .map(|partition| {
                let mine: Vec<(u32, &Row)> = (0u32..).zip(rows).filter(|(_, row)| row.0 == partition).collect();
                let numbers = UInt32Array::from_iter_values(mine.iter().map(|(number, _)| *number));
                let lang = StringArray::from_iter_values(mine.iter().map(|(_, row)| format!("l{}", row.3)));
                let norm = StringArray::from_iter_values(mine.iter().map(|(_, row)| format!("w{}", row.1)));
                let recording: StringArray = mine.iter().map(|(_, row)| row.2.map(|r| format!("r{r}"))).collect();
                let columns: Vec<Arc<dyn Array>> = match by {
                    SplitBy::Text => vec![Arc::new(numbers), Arc::new(lang), Arc::new(group_keys(SEED, &norm))],
                    SplitBy::Recording => vec![
                        Arc::new(numbers),
                        Arc::new(lang),
                        Arc::new(norm),
                        Arc::new(keys_of(&recording)),
                    ],
                };
                let name = Partition::from(format!("x/{partition}"));
                (
                    name,
                    vec![RecordBatch::try_new(key_schema(by, false), columns).unwrap()],
                )
            })
            .collect()
    }

    /// The rules word for word, on sets.
    fn slowly(rows: &[Row], by: SplitBy, quota: Quota) -> BTreeSet<u32> {
        let mut component: Vec<BTreeSet<usize>> = (0..rows.len()).map(|row| BTreeSet::from([row])).collect();
        loop {
            let before = component.clone();
            for (i, a) in rows.iter().enumerate() {
                for (j, b) in rows.iter().enumerate() {
                    if a.1 == b.1 || (by == SplitBy::Recording && a.2.is_some() && a.2 == b.2) {
                        let both: BTreeSet<usize> = component[i].union(&component[j]).copied().collect();
                        component[i] = both.clone();
                        component[j] = both;
                    }
                }
            }
            if before == component {
                break;
            }
        }
        let groups: BTreeSet<BTreeSet<usize>> = component.into_iter().collect();
        let mut validation = BTreeSet::new();
        for lang in rows.iter().map(|row| row.3).collect::<BTreeSet<_>>() {
            let of_lang = rows.iter().filter(|row| row.3 == lang).count() as u64;
            let target = quota.per_language.min(of_lang * quota.percent as u64 / 100);
            let mut home: Vec<(u64, String, &BTreeSet<usize>)> = groups
                .iter()
                .filter(|group| group.iter().map(|&row| rows[row].3).min() == Some(lang))
                .map(|group| {
                    let name = group.iter().map(|&row| format!("w{}", rows[row].1)).min().unwrap();
                    (group_order(SEED, &name), name, group)
                })
                .collect();
            home.sort();
            let mut got = 0;
            for (_, _, group) in home {
                if got < target && got + group.len() as u64 <= target {
                    got += group.len() as u64;
                    validation.extend(group.iter().map(|&row| row as u32));
                }
            }
        }
        validation
    }

    proptest! {
        #[test]
        fn splits_as_the_rules_say(
            rows in prop::collection::vec((0..3u8, 0..9u8, prop::option::of(0..7u8), 0..3u8), 0..40),
            per_language in 0..6u64, percent in 0..100u32, recording in any::<bool>(), turned in any::<bool>(),
            memory in 0..4_000u64,
        ) {
            let by = if recording { SplitBy::Recording } else { SplitBy::Text };
            let quota = Quota { per_language, percent: f64::from(percent) };
            let mut keys = keys_for(&rows, by);
            if turned {
                keys.reverse();
            }
            let settings = SplitSettings {
                val_per_language: per_language,
                val_percent: f64::from(percent),
                split_seed: SEED,
                split_by: by,
                ..SplitSettings::default()
            };
            let keys = Artifact::in_memory(key_schema(by, false), keys).unwrap();
            let decision = Decision::Choice(Arc::new(ValidationChoice(settings)));
            let scratch = tempfile::tempdir().unwrap();
            let (validation, languages) = decide(&decision, &keys, memory, scratch.path()).unwrap();
            let mut chosen = BTreeSet::new();
            for (_, decisions) in &validation {
                chosen.extend(columns::rows(decisions).unwrap().values().iter().copied());
            }
            prop_assert_eq!(&chosen, &slowly(&rows, by, quota));
            for lang in 0..3u8 {
                let of_lang: Vec<u32> = (0u32..).zip(&rows).filter(|(_, row)| row.3 == lang).map(|(number, _)| number).collect();
                let val = of_lang.iter().filter(|number| chosen.contains(number)).count() as u64;
                let counted = languages.get(&format!("l{lang}")).copied().unwrap_or_default();
                prop_assert_eq!(counted, (of_lang.len() as u64, val));
            }
            let chosen = &chosen;
            let sides = |want: bool| (0u32..).zip(&rows).filter(move |(n, _)| chosen.contains(n) == want).map(|(_, row)| row.1).collect::<HashSet<_>>();
            let (train, val) = (sides(false), sides(true));
            prop_assert!(train.is_disjoint(&val), "words on both sides");
        }
    }

    #[test]
    fn the_order_is_that_of_sha_256() {
        // python: int.from_bytes(hashlib.sha256(b"1\nabc").digest()[:8], "big")
        assert_eq!(group_order(1, "abc"), 14271674943407019265);
        assert_ne!(key_of("a"), key_of("b"));
    }
}
