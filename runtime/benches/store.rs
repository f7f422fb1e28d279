//! The cost of the store for a corpus of 2,000 shards: committing a stage's partitions, and finding them again when
//! nothing has changed; compared with one record file per partition.
//!
//! `cargo bench -p flow-runtime --bench store [-- FOLDER]`: FOLDER is where the disk to be measured is.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{Float64Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema};
use flow_kind::{Digest, Partition, Reject, RejectClass};
use flow_storage::Storage;
use flow_store::{Access, Counts, PortRows, Store};

const PARTITIONS: u64 = 2_000;
const ROWS: u32 = 260;
const GROUP: usize = 64;
const STAGES: u8 = 10;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args()
        .skip(1)
        .find(|arg| !arg.starts_with("--"))
        .map(PathBuf::from);
    let folder = match folder {
        Some(folder) => tempfile::tempdir_in(folder)?,
        None => tempfile::tempdir()?,
    };
    let state = folder.path().join("state");
    let store = Store::open(&Storage::default(), &state, Access::Run { run_id: "bench".into() })?;
    let schema = Arc::new(Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new("text", DataType::Utf8, false),
        Field::new("duration", DataType::Float64, false),
    ]));
    let batch = |seed: u64| {
        RecordBatch::try_new(
            schema.clone(),
            vec![
                Arc::new(UInt32Array::from_iter_values(0..ROWS)),
                Arc::new(StringArray::from_iter_values(
                    (0..ROWS).map(|i| format!("words of row {i} of {seed}")),
                )),
                Arc::new(Float64Array::from_iter_values(
                    (0..ROWS).map(|i| f64::from(i) + seed as f64),
                )),
            ],
        )
    };
    let partitions: Vec<Partition> = (0..PARTITIONS)
        .map(|i| Partition::new(format!("hi/hi_{i:04}")))
        .collect();
    let key = |i: u64| Digest::of(&i.to_le_bytes());

    for stage in 0..STAGES {
        let recipe = Digest::of(&[stage]);
        let writer = store.writer(&recipe, &serde_json::Value::Null)?;
        let (mut writing, mut committing) = (0.0, 0.0);
        let mut group = Vec::new();
        for (i, partition) in (0..).zip(&partitions) {
            let start = Instant::now();
            let reject = |row| Reject {
                row: Some(row),
                id: Some(format!("name {row}")),
                reason: "too_long".into(),
                class: RejectClass::Rule,
                detail: String::new(),
                values: "{}".into(),
            };
            let ports = vec![PortRows::new("rows", schema.clone(), vec![batch(i)?])];
            let rejects = if i % 2 == 0 {
                vec![reject(1), reject(5)]
            } else {
                Vec::new()
            };
            group.push(writer.write_partition(partition, key(i), vec![key(i)], ports, rejects, Counts::default())?);
            writing += start.elapsed().as_secs_f64();
            if group.len() == GROUP || i + 1 == PARTITIONS {
                let start = Instant::now();
                writer.commit(std::mem::take(&mut group))?;
                committing += start.elapsed().as_secs_f64();
            }
        }
        let start = Instant::now();
        writer.finish(
            (0..)
                .zip(&partitions)
                .map(|(i, p)| (p, key(i)))
                .collect::<Vec<_>>()
                .iter()
                .map(|(p, k)| (*p, k)),
        )?;
        if stage == 0 {
            println!(
                "{PARTITIONS} partitions: write {writing:.2} s, commit {committing:.2} s, index {:.3} s",
                start.elapsed().as_secs_f64()
            );
        }
    }
    drop(store);

    let start = Instant::now();
    let store = Store::open(&Storage::default(), &state, Access::Read)?;
    let mut found = 0;
    for stage in 0..STAGES {
        let records = store.records(&Digest::of(&[stage]))?;
        found += (0..)
            .zip(&partitions)
            .filter(|(i, p)| records.get(p, &key(*i)).is_some())
            .count();
    }
    println!(
        "{STAGES} stages, {found} records found again: {:.3} s",
        start.elapsed().as_secs_f64()
    );

    let start = Instant::now();
    for i in 0..PARTITIONS {
        let temporary = folder.path().join("record.tmp");
        let mut file = std::fs::File::create(&temporary)?;
        file.write_all(&[b'x'; 600])?;
        file.sync_all()?;
        std::fs::rename(&temporary, folder.path().join(format!("record-{i}")))?;
        std::fs::File::open(folder.path())?.sync_all()?;
    }
    println!(
        "a flushed record file for each partition would take {:.2} s more",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}
