//! What tests of datasets write and read again.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, AsArray, RecordBatch, StringArray};
use arrow::datatypes::{Float64Type, Int64Type};
use flow_audio::part::decode_row;
use flow_corpus::{ReadSettings, columns};
use flow_kind::StageError;
use flow_layouts::read::Read;
use flow_manifest::write::Write;
use flow_runtime::harness::{Harness, Output};
use flow_storage::Storage;

/// The files below a folder, without what says which files those of the set are.
pub fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
            match path.is_dir() {
                true => folders.push(path),
                false if ["flow.json", ".flow-files", ".flow-lock"].contains(&name.as_str()) => {}
                false => assert!(found.insert(name, fs::read(&path).unwrap()).is_none()),
            }
        }
    }
    found
}

pub fn layout(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../layouts/tests/data/layouts")
        .join(name)
}

pub fn read(manifest: &Path, split: &str) -> Output {
    read_with(manifest, split, &[])
}

pub fn read_with(manifest: &Path, split: &str, columns: &[&str]) -> Output {
    read_from(&Storage::default(), manifest, split, columns).unwrap_or_else(|e| panic!("{}: {e:?}", manifest.display()))
}

/// Reads a manifest that may be in object storage.
pub fn read_from(storage: &Storage, manifest: &Path, split: &str, columns: &[&str]) -> Result<Output, StageError> {
    let settings = ReadSettings {
        columns: columns.iter().map(|pair| (*pair).to_owned()).collect(),
        manifest: manifest.to_str().unwrap().into(),
        split: split.into(),
        ..ReadSettings::default()
    };
    Harness::<Read>::new(settings).storage(storage).run()
}

/// Writes rows into inputs of a dataset in `out`.
pub fn write_as(format: &str, inputs: &[(&str, &Output)], out: &Path, more: &str) -> Result<(), StageError> {
    write_to(&Storage::default(), format, inputs, out, more)
}

/// As [`write_as`], into a folder that may be in object storage.
pub fn write_to(
    storage: &Storage,
    format: &str,
    inputs: &[(&str, &Output)],
    out: &Path,
    more: &str,
) -> Result<(), StageError> {
    let settings = format!("{{out: {:?}, format: {format}{more}}}", out.to_str().unwrap());
    // Tests run at the same time.
    let scratch = tempfile::tempdir().unwrap();
    let mut harness = Harness::<Write>::from_yaml(&settings)?
        .storage(storage)
        .scratch(scratch.path());
    for (name, rows) in inputs {
        harness = harness.input(name, rows.shape.outputs[0].schema.clone());
        for partition in &rows.partitions {
            harness = harness.feed(name, partition.as_str(), rows.rows("rows", partition.as_str()));
        }
    }
    harness.run().map(|_| ())
}

/// Text, language, name and samples of a row.
pub type Row = (String, String, String, Vec<f32>);

/// What each row has.
pub fn rows_of(output: &Output) -> Vec<Row> {
    rows_in(&Storage::default(), output)
}

/// As [`rows_of`], of recordings that may be in object storage.
pub fn rows_in(storage: &Storage, output: &Output) -> Vec<Row> {
    let rows = output.all_rows("rows");
    let text = |name: &str, row: usize| columns::text(&rows, name).unwrap().value(row).to_owned();
    let number = |name: &str, row: usize| {
        let column = rows.column_by_name(name).unwrap().as_primitive::<Int64Type>();
        column.is_valid(row).then(|| column.value(row) as u64)
    };
    let seconds = |name: &str, row: usize| {
        let column = rows.column_by_name(name).unwrap().as_primitive::<Float64Type>();
        column.is_valid(row).then(|| column.value(row))
    };
    (0..rows.num_rows())
        .map(|row| {
            let range = number("offset", row).zip(number("size", row));
            let (start, length) = (seconds("start", row).unwrap_or(0.0), seconds("duration", row).unwrap());
            let path = text("audio_path", row);
            let signal = decode_row(storage, Path::new(&path), range, start, length, 60.0).unwrap();
            (text("text", row), text("lang", row), text("segment_id", row), signal)
        })
        .collect()
}

/// Writes the rows of one batch.
pub fn write_batch(format: &str, rows: RecordBatch, out: &Path, more: &str) -> Result<(), StageError> {
    let settings = format!("{{out: {:?}, format: {format}{more}}}", out.to_str().unwrap());
    let harness = Harness::<Write>::from_yaml(&settings)?.input("master", rows.schema());
    harness.feed("master", "a", rows).run().map(|_| ())
}

/// A batch with other texts in a column.
pub fn with_texts(batch: &RecordBatch, name: &str, texts: &[&str]) -> RecordBatch {
    let mut columns = batch.columns().to_vec();
    columns[batch.schema().index_of(name).unwrap()] = Arc::new(StringArray::from(texts.to_vec()));
    RecordBatch::try_new(batch.schema(), columns).unwrap()
}
