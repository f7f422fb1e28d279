//! Decisions over made-up key rows: `cargo bench -p flow-runtime --bench decide -- [ROWS] [MEMORY_MIB]`, a process for each.
//!
//! Key rows cost nothing here but their row numbers: each form of a decision computes its keys from the number of the row.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, RecordBatch, StringArray, UInt32Array};
use flow_kind::{
    Artifact, ChoiceRows, Context, Decision, GroupChoice, GroupDecision, GroupKey, GroupRows, Partition, ROW,
    StageError,
};
use flow_runtime::harness::decide;

/// Rows of a partition.
const ROWS: u64 = 50_000;
const LANGUAGES: u64 = 30;
/// Rows of a recording.
const RECORDING: u64 = 20;

fn main() {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    let number = |at: usize, or: u64| arguments.get(at).map_or(or, |text| text.parse().expect("a number"));
    let (rows, mebibytes) = (number(0, 5_200_000), number(1, 1_024));
    match arguments.get(2) {
        Some(form) => measure(form, rows, mebibytes),
        None => {
            println!("{rows} rows, {mebibytes} MiB for key rows");
            for form in ["groups", "choice", "ties"] {
                let own = std::env::current_exe().expect("this program");
                let status = Command::new(own)
                    .args([rows.to_string(), mebibytes.to_string(), form.to_string()])
                    .status();
                assert!(status.expect("it starts").success());
            }
        }
    }
}

fn measure(form: &str, rows: u64, mebibytes: u64) {
    let numbers: ArrayRef = Arc::new(UInt32Array::from_iter_values(0..ROWS as u32));
    let batch = RecordBatch::try_from_iter([(ROW, numbers)]).expect("a batch");
    let partitions =
        (0..rows.div_ceil(ROWS)).map(|number| (Partition::new(format!("{number:08}")), vec![batch.clone()]));
    let keys = Artifact::in_memory(batch.schema(), partitions.collect()).expect("key rows");
    let decision = match form {
        "groups" => Decision::Groups(Arc::new(Made { ties: 0 })),
        "choice" => Decision::Choice(Arc::new(Made { ties: 0 })),
        _ => Decision::Choice(Arc::new(Made { ties: 1 })),
    };
    let before = peak();
    let begun = Instant::now();
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (decisions, _) = decide(&decision, &keys, mebibytes << 20, scratch).expect("decided");
    let took = begun.elapsed();
    let decided: usize = decisions.iter().map(|(_, rows)| rows.num_rows()).sum();
    println!(
        "{form}: {:.2} s, {decided} rows decided, peak memory {} MiB ({before} before)",
        took.as_secs_f64(),
        peak()
    );
}

/// Peak resident memory of this process in MiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.expect("a number") / 1024
}

struct Made {
    ties: usize,
}

/// SplitMix64.
fn spread(number: u64) -> u64 {
    let number = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}

fn key(number: u64) -> GroupKey {
    (spread(number), spread(!number))
}

/// One row in fifty has the words, and the recording's samples, of the one before.
fn content(row: u64) -> u64 {
    row - u64::from(row % 50 == 1)
}

fn first_row(partition: &Partition) -> Result<u64, StageError> {
    let number: u64 = partition.as_str().parse().map_err(StageError::failed)?;
    Ok(number * ROWS)
}

impl GroupDecision for Made {
    fn rows(&self, partition: &Partition, _: &Artifact) -> Result<GroupRows, StageError> {
        let first = first_row(partition)?;
        Ok(GroupRows {
            hashes: (first..first + ROWS).map(|row| spread(content(row))).collect(),
            places: (0..ROWS as u32).collect(),
            decisions: None,
        })
    }

    fn whole(&self, _: &Partition, _: &Artifact, places: &[u32]) -> Result<RecordBatch, StageError> {
        rows_of(places.to_vec())
    }

    fn decide(&self, rows: &[(Partition, Vec<RecordBatch>)]) -> Result<Vec<(Partition, RecordBatch)>, StageError> {
        let rows = rows
            .iter()
            .flat_map(|(name, batches)| batches.iter().map(|rows| (name.clone(), rows.clone())));
        Ok(rows.collect())
    }

    fn complete(&self, _: &Context, _: &[(Partition, RecordBatch)]) -> Result<(), StageError> {
        Ok(())
    }
}

fn rows_of(numbers: Vec<u32>) -> Result<RecordBatch, StageError> {
    let numbers: ArrayRef = Arc::new(UInt32Array::from(numbers));
    Ok(RecordBatch::try_from_iter([(ROW, numbers)])?)
}

impl GroupChoice for Made {
    fn rows(&self, partition: &Partition, _: &Artifact) -> Result<ChoiceRows, StageError> {
        let first = first_row(partition)?;
        let rows = || first..first + ROWS;
        let recordings = |kind: u64| {
            rows()
                .map(|row| Some(key((row / RECORDING) ^ ((kind + 1) << 60))))
                .collect()
        };
        Ok(ChoiceRows {
            keys: rows().map(|row| self.key_of(&content(row).to_string())).collect(),
            classes: vec![0; ROWS as usize],
            names: vec![format!("l{:02}", first / ROWS % LANGUAGES)],
            numbers: (0..ROWS as u32).collect(),
            ties: (0..self.ties as u64).map(recordings).collect(),
        })
    }

    fn ties(&self) -> usize {
        self.ties
    }

    fn names(&self, partition: &Partition, _: &Artifact) -> Result<StringArray, StageError> {
        let first = first_row(partition)?;
        let names = (first..first + ROWS).map(|row| content(row).to_string());
        Ok(StringArray::from_iter_values(names))
    }

    fn key_of(&self, name: &str) -> GroupKey {
        key(name.parse().unwrap_or_default())
    }

    fn quota(&self, rows: u64) -> u64 {
        rows / 20
    }

    fn decisions(&self, chosen: Vec<u32>) -> Result<RecordBatch, StageError> {
        rows_of(chosen)
    }

    fn complete(&self, _: &Context, _: &BTreeMap<String, (u64, u64)>) -> Result<(), StageError> {
        Ok(())
    }
}
