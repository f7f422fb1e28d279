//! Any sequence of edits of a corpus, each followed by a run, gives the same bytes as a fresh build, and writes again
//! only what an edit affects.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use proptest::prelude::*;

use crate::binary::{Workplace, expect_code, read_manifest, read_rejects};

const PIPELINE: &str = "benches/build_metadata_only.yaml";

/// One row of a shard. Few words and recordings, so that rows of all shards meet.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    words: u8,
    recording: u8,
    quality: u8,
}

type Corpus = BTreeMap<(u8, u8), Vec<Row>>;

#[derive(Clone, Debug)]
enum Edit {
    /// Adds a shard, or puts another in its place.
    Put {
        lang: u8,
        shard: u8,
        rows: Vec<Row>,
    },
    Remove(prop::sample::Index),
    /// Gives one row another quality.
    Quality(prop::sample::Index, prop::sample::Index, u8),
    /// Gives one row other words.
    Words(prop::sample::Index, prop::sample::Index, u8),
}

impl Edit {
    /// Edits the corpus, and says which shard was touched.
    fn apply(&self, corpus: &mut Corpus) -> Option<(u8, u8)> {
        let keys: Vec<(u8, u8)> = corpus.keys().copied().collect();
        match self {
            Edit::Put { lang, shard, rows } => {
                corpus.insert((*lang, *shard), rows.clone());
                Some((*lang, *shard))
            }
            // Something is always left: an empty corpus is another test's business.
            Edit::Remove(which) if keys.len() > 1 => {
                let key = *which.get(&keys);
                corpus.remove(&key);
                Some(key)
            }
            Edit::Remove(_) => None,
            Edit::Quality(which, row, quality) => {
                let key = *which.get(&keys);
                let rows = corpus.get_mut(&key)?;
                let at = row.index(rows.len());
                rows[at].quality = *quality;
                Some(key)
            }
            Edit::Words(which, row, words) => {
                let key = *which.get(&keys);
                let rows = corpus.get_mut(&key)?;
                let at = row.index(rows.len());
                rows[at].words = *words;
                Some(key)
            }
        }
    }
}

fn row() -> impl Strategy<Value = Row> {
    (0u8..6, 0u8..9, 0u8..8).prop_map(|(words, recording, quality)| Row {
        words,
        recording,
        quality,
    })
}

fn edit() -> impl Strategy<Value = Edit> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        (0u8..2, 0u8..4, prop::collection::vec(row(), 1..6)).prop_map(|(lang, shard, rows)| Edit::Put {
            lang,
            shard,
            rows
        }),
        index().prop_map(Edit::Remove),
        (index(), index(), 0u8..8).prop_map(|(shard, row, quality)| Edit::Quality(shard, row, quality)),
        (index(), index(), 0u8..6).prop_map(|(shard, row, words)| Edit::Words(shard, row, words)),
    ]
}

fn name((lang, shard): (u8, u8)) -> String {
    let lang = ["en", "hi"][usize::from(lang)];
    format!("{lang}/{lang}_{shard:04}")
}

fn write(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

/// Writes one shard of the corpus to disk.
fn write_shard(shards: &Path, key: (u8, u8), rows: Option<&Vec<Row>>) {
    let folder = shards.join(name(key));
    if folder.exists() {
        std::fs::remove_dir_all(&folder).unwrap();
    }
    let Some(rows) = rows else { return };
    std::fs::create_dir_all(&folder).unwrap();
    let texts = |of: &dyn Fn(usize, &Row) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(
            rows.iter().enumerate().map(|(at, row)| of(at, row)),
        ))
    };
    let ids = texts(&|at, _| format!("s{}_{}_{at}", key.0, key.1));
    let words = ["one two", "two three", "three four", "एक दो", "दो तीन", "तीन चार"];
    let lang = ["en", "hi"][usize::from(key.0)];
    write(
        &folder.join("metadata.parquet"),
        vec![
            ("segment_id", Arc::clone(&ids)),
            ("recording_id", texts(&|_, row| format!("r{}", row.recording))),
            (
                "duration_s",
                Arc::new(Float64Array::from_iter_values(rows.iter().map(|_| 2.5))),
            ),
            (
                "transcription_native",
                texts(&|_, row| words[usize::from(row.words)].to_owned()),
            ),
            (
                "tx_quality_score",
                Arc::new(Float64Array::from_iter_values(
                    rows.iter().map(|row| 0.3 + 0.1 * f64::from(row.quality)),
                )),
            ),
            ("segment_language", texts(&|_, _| lang.to_owned())),
        ],
    );
    write(
        &folder.join("audio_index.parquet"),
        vec![
            ("segment_id", ids),
            ("tar_member_name", texts(&|at, _| format!("{at}.flac"))),
            ("audio_hash", texts(&|_, row| format!("{:032x}", row.recording))),
        ],
    );
}

/// Partitions of each stage that a run worked on.
fn run(place: &Workplace) -> BTreeMap<String, u64> {
    let events = place.path("events.jsonl");
    let mut flow = place.command("run", PIPELINE, &["val_percent=40"]);
    // Of few rows all may be refused, and the set may become empty.
    flow.arg("--allow-shrink").arg("--events").arg(&events);
    expect_code(&flow.output().unwrap(), 0);
    std::fs::read_to_string(&events)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .filter(|event| event["event"] == "stage_started")
        .map(|event| {
            (
                event["stage"].as_str().unwrap().to_owned(),
                event["run"].as_u64().unwrap(),
            )
        })
        .collect()
}

/// The lines of each shard in the exported files.
fn by_shard(place: &Workplace) -> BTreeMap<String, BTreeSet<String>> {
    let mut shards: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in ["train_manifest_v2.parquet", "val_manifest_v2.parquet"] {
        for row in read_manifest(&place.out().join(file)) {
            let shard = format!("{}/{}", &row.shard_id[..2], row.shard_id);
            shards.entry(shard).or_default().insert(format!("{file} {row:?}"));
        }
    }
    for reject in read_rejects(&place.out().join("rejects.parquet")) {
        shards
            .entry(reject.partition.clone())
            .or_default()
            .insert(format!("{reject:?} {}", reject.detail));
    }
    shards
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, max_shrink_iters: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn edits_give_the_bytes_of_a_build_from_nothing(
        first in prop::collection::btree_map((0u8..2, 0u8..4), prop::collection::vec(row(), 1..6), 2..5),
        edits in prop::collection::vec(edit(), 1..6),
    ) {
        let mut corpus: Corpus = first;
        let mut place = Workplace::new("micro");
        place.shards = place.path("shards");
        for (key, rows) in &corpus {
            write_shard(&place.shards, *key, Some(rows));
        }
        run(&place);
        let mut before = by_shard(&place);
        for edit in edits {
            let touched: Option<(u8, u8)> = edit.apply(&mut corpus);
            if let Some(key) = touched {
                write_shard(&place.shards, key, corpus.get(&key));
            }
            let ran = run(&place);
            let mut fresh = Workplace::new("micro");
            fresh.shards.clone_from(&place.shards);
            run(&fresh);
            let after = by_shard(&place);
            prop_assert_eq!(&after, &by_shard(&fresh));
            // `tar_path` begins with the same folder in both, so the files are the same to the byte.
            prop_assert!(place.out_bytes() == fresh.out_bytes(), "bytes differ after {:?}", edit);

            let here = |key: &(u8, u8)| corpus.contains_key(key);
            prop_assert!(ran["corrected"] <= u64::from(touched.as_ref().is_some_and(here)), "{:?}", ran);
            // Rows of a shard are written again only where the shard was edited, or what was decided on it changed.
            let mut changed: BTreeSet<&String> =
                after.keys().chain(before.keys()).filter(|shard| after.get(*shard) != before.get(*shard)).collect();
            let edited = touched.map(name);
            changed.extend(&edited);
            for stage in ["unique:apply", "split:apply"] {
                prop_assert!(ran[stage] <= changed.len() as u64, "{stage} ran {} of {changed:?}", ran[stage]);
            }
            before = after;
        }
    }
}
