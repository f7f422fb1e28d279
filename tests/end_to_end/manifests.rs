//! The manifests that `build_manifest_v2.yaml` writes are the reference's, row for row and in order.

use std::collections::BTreeMap;

use arrow::array::{Array, AsArray};

use crate::binary::{ManifestRow, Workplace, golden, read_manifest, read_parquet, read_rejects};

/// The reference gives `tar_path` from the corpus root (`shards/...`); ours begins with `shards` as it was given.
fn expected(place: &Workplace, corpus: &str, file: &str) -> Vec<ManifestRow> {
    let mut rows = read_manifest(&golden(corpus).join(file));
    for row in &mut rows {
        let rest = row.tar_path.strip_prefix("shards/").unwrap();
        row.tar_path = format!("{}/{rest}", place.shards.display());
    }
    rows
}

#[track_caller]
fn assert_same_rows(ours: &[ManifestRow], reference: &[ManifestRow], what: &str) {
    for (position, (our, their)) in ours.iter().zip(reference).enumerate() {
        assert_eq!(our, their, "{what}, row {position}");
    }
    assert_eq!(ours.len(), reference.len(), "{what}: number of rows");
}

fn manifests_equal_the_reference(corpus: &str) {
    let place = Workplace::new(corpus);
    place.build_manifests(&[]);
    for (ours, reference) in [
        ("master_manifest.parquet", "manifest_v1.parquet"),
        ("train_manifest_v2.parquet", "train_manifest_v2.parquet"),
        ("val_manifest_v2.parquet", "val_manifest_v2.parquet"),
    ] {
        let rows = read_manifest(&place.out().join(ours));
        assert_same_rows(&rows, &expected(&place, corpus, reference), ours);
    }
    assert!(place.out().join("flow.json").is_file());
}

#[test]
fn micro_equals_the_reference() {
    manifests_equal_the_reference("micro");
}

#[test]
fn mini_equals_the_reference() {
    manifests_equal_the_reference("mini");
}

#[test]
fn split_by_recording_equals_the_reference() {
    for corpus in ["micro", "mini"] {
        let place = Workplace::new(corpus);
        place.build_manifests(&["split_by=recording"]);
        for side in ["train", "val"] {
            let rows = read_manifest(&place.out().join(format!("{side}_manifest_v2.parquet")));
            let reference = expected(&place, corpus, &format!("{side}_manifest_v2_by_recording.parquet"));
            assert_same_rows(&rows, &reference, side);
        }
    }
}

/// Every row that the reference refused is in `rejects.parquet`, with the same reason; nothing else is.
#[test]
fn rejects_are_the_references() {
    for corpus in ["micro", "mini"] {
        let place = Workplace::new(corpus);
        place.build_manifests(&[]);
        let mut theirs: BTreeMap<(String, Option<String>, String), usize> = BTreeMap::new();
        for batch in read_parquet(&golden(corpus).join("decisions.parquet")) {
            let text = |name: &str, row: usize| {
                let column = batch.column_by_name(name).unwrap();
                (!column.is_null(row)).then(|| column.as_string::<i32>().value(row).to_string())
            };
            for row in 0..batch.num_rows() {
                let reason = text("reason", row).unwrap();
                if !reason.is_empty() {
                    *theirs
                        .entry((text("shard_id", row).unwrap(), text("segment_id", row), reason))
                        .or_default() += 1;
                }
            }
        }
        let mut ours: BTreeMap<(String, Option<String>, String), usize> = BTreeMap::new();
        let mut quarantined: BTreeMap<String, String> = BTreeMap::new();
        for reject in read_rejects(&place.out().join("rejects.parquet")) {
            let shard = reject.partition.split('/').nth(1).unwrap().to_string();
            if reject.values.is_empty() {
                assert_eq!(reject.class, "fault");
                quarantined.insert(shard, reject.reason);
            } else {
                assert!(reject.values.starts_with('{'), "{}", reject.values);
                *ours.entry((shard, reject.segment_id, reject.reason)).or_default() += 1;
            }
        }
        assert_eq!(ours, theirs);

        let report: serde_json::Value =
            serde_json::from_slice(&std::fs::read(golden(corpus).join("report.json")).unwrap()).unwrap();
        let reference: BTreeMap<String, String> = report["shards"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|shard| shard["status"] == "quarantined")
            .map(|shard| {
                (
                    shard["shard_id"].as_str().unwrap().to_string(),
                    shard["reason"].as_str().unwrap().to_string(),
                )
            })
            .collect();
        assert_eq!(quarantined, reference);
    }
}
