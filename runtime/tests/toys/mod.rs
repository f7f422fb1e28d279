#![allow(dead_code, reason = "each test binary uses some of them")]
//! Stage kinds of a few lines each, for tests of the runtime.

mod count;
mod dedup;
mod double;
mod join;
mod login;
pub mod once;
mod steps;
mod train;
mod write;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch, UInt32Array};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef, UInt32Type};
use flow_kind::registry::{AnyKind, kind};
use flow_kind::{Partition, Port};

pub use count::Count;
pub use dedup::Dedup;
pub use double::Double;
pub use join::Join;
pub use login::Login;
pub use once::Once;
pub use steps::Steps;
pub use train::Train;
pub use write::Write_;

pub fn kinds() -> Vec<Box<dyn AnyKind>> {
    vec![
        kind::<Count>(),
        kind::<Once>(),
        kind::<Double>(),
        kind::<Join>(),
        kind::<Login>(),
        kind::<Dedup>(),
        kind::<Write_>(),
        kind::<Steps>(),
        kind::<Train>(),
    ]
}

pub fn rows_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new("value", DataType::Int64, false),
    ]))
}

pub fn rows(numbers: &[u32], values: &[i64]) -> RecordBatch {
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from(numbers.to_vec())),
        Arc::new(Int64Array::from(values.to_vec())),
    ];
    RecordBatch::try_new(rows_schema(), columns).unwrap()
}

fn port(name: &str) -> Port {
    Port::new(name, rows_schema())
}

fn each(batch: &RecordBatch) -> Vec<(u32, i64)> {
    let (numbers, values) = (
        batch.column(0).as_primitive::<UInt32Type>(),
        batch.column(1).as_primitive::<Int64Type>(),
    );
    numbers
        .values()
        .iter()
        .copied()
        .zip(values.values().iter().copied())
        .collect()
}

/// Says in a file how often a stage worked on a partition.
fn note(folder: &Path, stage: &str, partition: &Partition) {
    if folder.as_os_str().is_empty() {
        return;
    }
    let mut file = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join("work.log"))
        .unwrap();
    file.write_all(format!("{stage} {partition}\n").as_bytes()).unwrap();
}
