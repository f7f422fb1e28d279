//! Decisions in little memory and by changes are those over all rows.

use std::sync::Arc;

use arrow::array::{Array, FixedSizeBinaryBuilder, Float64Array, RecordBatch, StringArray, UInt32Array, UInt64Array};
use flow_kind::{Artifact, Decision, Partition, StageError};
use flow_runtime::harness::{OfGeneration, decide, decide_incrementally, stored_decisions};
use proptest::prelude::*;

use crate::duplicates::{self, Duplicates, decide_duplicates};
use crate::split::{SplitSettings, ValidationChoice};
use crate::validation::{self, SplitBy, group_key};

/// Names whose order differs from that of their components; some partitions stay empty.
const PARTITIONS: [&str; 5] = ["a-b/x", "a/x", "b/x", "b/y", "c"];

fn decide_in(decision: &Decision, keys: &Artifact, memory: u64) -> Result<OfGeneration, StageError> {
    let scratch = tempfile::tempdir().unwrap();
    decide(decision, keys, memory, scratch.path())
}

/// Of all key rows, by the plain function.
fn all_duplicates(keys: &Artifact) -> Vec<(Partition, RecordBatch)> {
    let rows = |name: &Partition| (name.clone(), vec![keys.read_whole(name, None).unwrap()]);
    decide_duplicates(&keys.partitions().map(rows).collect::<Vec<_>>()).unwrap()
}

fn artifact(schema: &arrow::datatypes::SchemaRef, columns_of: impl Fn(usize) -> Vec<Arc<dyn Array>>) -> Artifact {
    let partition = |(number, name): (usize, &&str)| {
        let batch = RecordBatch::try_new(Arc::clone(schema), columns_of(number)).unwrap();
        (Partition::from(*name), vec![batch])
    };
    let partitions = PARTITIONS.iter().enumerate().map(partition);
    // Of those that have no rows some are not there.
    let is_there = |(name, rows): &(Partition, Vec<RecordBatch>)| name.as_str() > "b" || rows[0].num_rows() > 0;
    Artifact::in_memory(Arc::clone(schema), partitions.filter(is_there).collect()).unwrap()
}

/// Rows of a partition, each with its number: gaps are rows that a stage before kept back.
fn rows_of<T>(rows: &[(usize, bool, T)], partition: usize) -> Vec<(u32, &T)> {
    let rows = (0u32..).zip(rows);
    rows.filter(|(_, (of, comes_through, _))| *of == partition && *comes_through)
        .map(|(number, (.., row))| (number, row))
        .collect()
}

#[derive(Clone, Debug)]
struct Segment {
    id: Option<u8>,
    member: u8,
    quality: Option<f64>,
    norm: Option<u8>,
    /// The two halves of the audio key: equal first halves are no duplicates.
    audio: Option<(u8, u8)>,
}

fn segment() -> impl Strategy<Value = Segment> {
    let quality = prop_oneof![Just(Some(0.5)), Just(Some(0.9)), Just(Some(f64::NAN)), Just(None)];
    let audio = prop::option::weighted(0.9, (0..6u8, 0..2u8));
    let ids = prop::option::weighted(0.9, 0..8u8);
    (ids, 0..3u8, quality, prop::option::weighted(0.9, 0..3u8), audio).prop_map(|(id, member, quality, norm, audio)| {
        Segment {
            id,
            member,
            quality,
            norm,
            audio,
        }
    })
}

fn segment_keys(rows: &[(usize, bool, Segment)]) -> Artifact {
    artifact(&duplicates::key_schema(), |partition| {
        let rows = rows_of(rows, partition);
        let mut audio = FixedSizeBinaryBuilder::new(16);
        for (_, row) in &rows {
            match row.audio {
                Some((first, second)) => {
                    let mut key = [first.wrapping_mul(43); 16];
                    key[15] = second;
                    audio.append_value(key).unwrap();
                }
                None => audio.append_null(),
            }
        }
        vec![
            Arc::new(UInt32Array::from_iter_values(rows.iter().map(|row| row.0))),
            Arc::new(StringArray::from_iter(
                rows.iter().map(|row| row.1.id.map(|id| format!("s{id}"))),
            )),
            Arc::new(StringArray::from_iter_values(
                rows.iter().map(|row| format!("m{}", row.1.member)),
            )),
            Arc::new(Float64Array::from_iter(rows.iter().map(|row| row.1.quality))),
            Arc::new(UInt64Array::from_iter(rows.iter().map(|row| row.1.norm.map(u64::from)))),
            Arc::new(audio.finish()),
        ]
    })
}

fn sentence_keys(rows: &[(usize, bool, (u8, u8))], seed: i64) -> Artifact {
    artifact(&validation::key_schema(SplitBy::Text, false), |partition| {
        let rows = rows_of(rows, partition);
        let mut words = FixedSizeBinaryBuilder::new(16);
        for (_, (text, _)) in &rows {
            let mut key = group_key(seed, &format!("w{}", text / 2));
            // Some groups have one place in the order of choice.
            key[15] = text % 2;
            words.append_value(key).unwrap();
        }
        vec![
            Arc::new(UInt32Array::from_iter_values(rows.iter().map(|row| row.0))),
            Arc::new(StringArray::from_iter_values(
                rows.iter().map(|row| format!("l{}", row.1.1)),
            )),
            Arc::new(words.finish()),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn duplicates_are_the_same_in_whatever_memory(
        rows in prop::collection::vec((0..5usize, prop::bool::weighted(0.9), segment()), 0..60),
        memory in 0..4_000u64,
    ) {
        let keys = segment_keys(&rows);
        let schema = duplicates::decision_schema();
        let (decided, _) = decide_in(&Decision::Groups(Arc::new(Duplicates)), &keys, memory).unwrap();
        prop_assert_eq!(
            stored_decisions(&schema, decided).unwrap(),
            stored_decisions(&schema, all_duplicates(&keys)).unwrap()
        );
    }
}

/// Generations of a corpus: each takes the rows of some partitions away, and puts others into their places, perhaps none.
fn generations<T: Clone + std::fmt::Debug + 'static>(
    row: BoxedStrategy<T>,
) -> impl Strategy<Value = Vec<Vec<(usize, bool, T)>>> {
    let rows = |row| prop::collection::vec((0..5usize, prop::bool::weighted(0.9), row), 0..40);
    let edits = prop::collection::vec((prop::collection::vec(0..5usize, 0..3), rows(row.clone())), 0..6);
    (rows(row), edits).prop_map(|(first, edits)| {
        let mut all = vec![first];
        for (changed, rows) in edits {
            let last = all.last().into_iter().flatten();
            let kept = last.filter(|(of, ..)| !changed.contains(of)).cloned();
            let new = rows.into_iter().filter(|(of, ..)| changed.contains(of));
            let next = kept.chain(new).collect();
            all.push(next);
        }
        all
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn duplicates_after_any_changes_are_the_same(generations in generations(segment().boxed())) {
        let keys: Vec<Artifact> = generations.iter().map(|rows| segment_keys(rows)).collect();
        let schema = duplicates::decision_schema();
        let incremental = Decision::Groups(Arc::new(Duplicates));
        let decided = decide_incrementally(&incremental, &keys).unwrap();
        prop_assert_eq!(decided.len(), keys.len());
        for (keys, (by_changes, _)) in keys.iter().zip(decided) {
            prop_assert_eq!(
                stored_decisions(&schema, by_changes).unwrap(),
                stored_decisions(&schema, all_duplicates(keys)).unwrap()
            );
        }
    }

    #[test]
    fn splits_by_text_after_any_changes_are_the_same(
        generations in generations((0..24u8, 0..3u8).boxed()),
        val_per_language in 0..9u64, val_percent in 0..100u32,
    ) {
        let settings = SplitSettings {
            val_per_language,
            val_percent: f64::from(val_percent),
            ..SplitSettings::default()
        };
        let keys: Vec<Artifact> = generations.iter().map(|rows| sentence_keys(rows, settings.split_seed)).collect();
        let schema = validation::decision_schema();
        let incremental = Decision::Choice(Arc::new(ValidationChoice(settings)));
        let decided = decide_incrementally(&incremental, &keys).unwrap();
        prop_assert_eq!(decided.len(), keys.len());
        for (keys, (by_changes, languages)) in keys.iter().zip(decided) {
            let (at_once, of_all) = decide_in(&incremental, keys, 1 << 20).unwrap();
            prop_assert_eq!(
                stored_decisions(&schema, by_changes).unwrap(),
                stored_decisions(&schema, at_once).unwrap()
            );
            prop_assert_eq!(languages, of_all);
        }
    }
}
