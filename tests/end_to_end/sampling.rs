//! Planning the batches of an epoch through the built program.

use std::collections::BTreeMap;
use std::path::Path;

use arrow::array::AsArray;
use arrow::datatypes::{Float64Type, Int64Type};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::binary::{Workplace, expect_code, golden, program, stderr};

/// Language and seconds of each row of the golden training manifest of mini.
fn manifest() -> Vec<(String, f64)> {
    let file = std::fs::File::open(golden("mini").join("train_manifest_v2.parquet")).unwrap();
    let mut rows = Vec::new();
    for batch in ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap() {
        let batch = batch.unwrap();
        let languages = batch["lang"].as_string::<i32>().iter().flatten().map(str::to_owned);
        rows.extend(languages.zip(batch["duration"].as_primitive::<Float64Type>().values().iter().copied()));
    }
    rows
}

/// Row numbers of all batches of all ranks.
fn planned(file: &Path) -> Vec<usize> {
    let file = std::fs::File::open(file).unwrap();
    let mut rows = Vec::new();
    for batch in ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap() {
        for list in batch.unwrap()["rows"].as_list::<i32>().iter().flatten() {
            rows.extend(
                list.as_primitive::<Int64Type>()
                    .values()
                    .iter()
                    .map(|&row| row as usize),
            );
        }
    }
    rows
}

/// Plans mini and gives what stood on standard output.
fn plan(place: &Workplace, out: &str, workers: &str, settings: &[&str]) -> String {
    let mut flow = program();
    flow.args([
        "run",
        "pipelines/plan_batches.yaml",
        "--progress",
        "none",
        "--workers",
        workers,
    ]);
    flow.arg("--state").arg(place.path(&format!("{out}.state")));
    let manifest = golden("mini").join("train_manifest_v2.parquet");
    flow.args(["--set", &format!("manifest={}", manifest.display())]);
    flow.args(["--set", &format!("out={}", place.path(out).display())]);
    flow.args(["--set", "max_batch_seconds=20"]);
    for setting in settings {
        flow.args(["--set", setting]);
    }
    let output = flow.output().unwrap();
    expect_code(&output, 0);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn quotas_change_the_mixture_and_the_order_alone_does_not() {
    let place = Workplace::new("mini");
    let rows = manifest();
    let seconds = |batches: &[usize]| {
        let mut seconds = BTreeMap::<&str, f64>::new();
        batches
            .iter()
            .for_each(|&row| *seconds.entry(&rows[row].0).or_default() += rows[row].1);
        seconds
    };
    let held = seconds(&(0..rows.len()).collect::<Vec<_>>());
    let total: f64 = held.values().sum();

    let screen = plan(&place, "order.parquet", "1", &[]);
    let order = planned(&place.path("order.parquet"));
    let mut once = order.clone();
    once.sort_unstable();
    assert_eq!(once, (0..rows.len()).collect::<Vec<_>>());
    // Batches and language shares of both are on the screen.
    for text in ["order (chosen)", "quota", "audio padding", "Share of time by language"] {
        assert!(screen.contains(text), "{text}:\n{screen}");
    }

    let balance = ["balance=quota", "temperature=0.3", "epoch=2"];
    plan(&place, "quota.parquet", "1", &balance);
    let emitted = seconds(&planned(&place.path("quota.parquet")));
    let sum: f64 = held.values().map(|seconds| seconds.powf(0.3)).sum();
    for (language, held) in &held {
        let quota = total * held.powf(0.3) / sum;
        let longest = rows
            .iter()
            .filter(|row| row.0 == *language)
            .map(|row| row.1)
            .fold(0.0, f64::max);
        assert!(
            (emitted[language] - quota).abs() <= longest,
            "{language}: {} s, {quota} s",
            emitted[language]
        );
    }

    // The same bytes again, with another number of workers.
    plan(&place, "again.parquet", "3", &balance);
    let bytes = |name: &str| std::fs::read(place.path(name)).unwrap();
    assert_eq!(bytes("quota.parquet"), bytes("again.parquet"));
}

#[test]
fn wrong_ways_to_balance_are_refused_with_the_right_ones() {
    let place = Workplace::new("mini");
    for (setting, hints) in [
        ("balance=qota", &["qota", "did you mean `quota`"][..]),
        ("token_boundaries=[30, 20]", &["token_boundaries", "rising order"]),
        ("token_boundaries=[-1]", &["token_boundaries"]),
    ] {
        let mut check = program();
        check.args(["check", "pipelines/plan_batches.yaml", "--set", setting]);
        check.args(["--set", &format!("out={}", place.path("out.parquet").display())]);
        let output = check.output().unwrap();
        expect_code(&output, 2);
        let text = stderr(&output);
        assert!(hints.iter().all(|hint| text.contains(hint)), "{setting}:\n{text}");
    }
}
