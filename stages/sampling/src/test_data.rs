//! Where the tests find corpora and golden figures.

use std::path::PathBuf;

/// A bundled golden training manifest, whatever the environment says.
pub fn bundled_manifest(corpus: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/golden/data"))
        .join(corpus)
        .join("train_manifest_v2.parquet")
}

fn folder(variable: &str, bundled: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(folder) => folder.into(),
        None => PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data")).join(bundled),
    }
}

/// Golden figures: `micro`, `mini` or `sampler_synth`.
pub fn golden(name: &str) -> PathBuf {
    folder("FLOW_TEST_GOLDEN", "golden/data").join(name)
}

/// Golden results of augmentation.
pub fn golden_augment() -> PathBuf {
    folder("FLOW_TEST_GOLDEN_AUGMENT", "golden/augment")
}

/// What the sampler's tests need of a row of a golden training manifest.
#[derive(serde::Deserialize)]
pub struct TrainRow {
    pub duration: f64,
    pub lang: String,
}

pub fn train_rows(corpus: &str) -> Vec<TrainRow> {
    let text = std::fs::read_to_string(golden(corpus).join("train_manifest_v2.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// `<corpora>/micro` or `<corpora>/mini`.
pub fn corpus(name: &str) -> PathBuf {
    folder("FLOW_TEST_CORPUS", "corpus").join(name)
}
