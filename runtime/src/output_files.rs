//! Files that a local stage writes into a folder of the user's, some for each partition: written, told as rows, and looked
//! after when the next run is planned.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{AsArray, Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};

use crate::digest::Digest;
use crate::error::StageError;
use crate::partition::Partition;
use crate::row_number::ROW;
use crate::store::{Artifact, write_atomically};

/// A file to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputFile {
    /// The name of its format, for the rows.
    pub format: &'static str,
    pub path: PathBuf,
    pub bytes: Vec<u8>,
}

/// Columns of the rows: `_row, format, path, bytes, digest`.
pub fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("format", DataType::Utf8, false),
        Field::new("path", DataType::Utf8, false),
        Field::new("bytes", DataType::Int64, false),
        Field::new("digest", DataType::Utf8, false),
    ]))
}

/// Writes the files of a partition, each as a whole, and gives a row for each.
///
/// # Errors
/// When a file or a folder above it cannot be written.
pub fn write(files: &[OutputFile]) -> Result<RecordBatch, StageError> {
    for file in files {
        write_file(&file.path, &file.bytes)?;
    }
    let rows = UInt32Array::from_iter_values((0..).take(files.len()));
    let formats = files.iter().map(|file| file.format);
    let paths = files.iter().map(|file| file.path.to_string_lossy());
    // Lengths of what is in memory are below 2^63.
    let sizes = files.iter().map(|file| file.bytes.len() as i64);
    let digests = files.iter().map(|file| Digest::of(&file.bytes).to_hex());
    Ok(RecordBatch::try_new(
        schema(),
        vec![
            Arc::new(rows),
            Arc::new(StringArray::from_iter_values(formats)),
            Arc::new(StringArray::from_iter_values(paths)),
            Arc::new(Int64Array::from_iter_values(sizes)),
            Arc::new(StringArray::from_iter_values(digests)),
        ],
    )?)
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), StageError> {
    let help = "check the space and the permissions of the folder; a rerun goes on here";
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|error| {
            StageError::failed(format!("cannot make the folder {}: {error}", folder.display())).with_help(help)
        })?;
    }
    write_atomically(path, bytes).map_err(|error| StageError::failed(error).with_help(help))
}

/// The partitions of which a file is gone or changed, with the reason: what a kind's `missing_outputs` gives.
///
/// # Errors
/// When the rows cannot be read.
pub fn missing(committed: &Artifact) -> Result<BTreeMap<Partition, String>, StageError> {
    let mut missing = BTreeMap::new();
    for partition in committed.partitions() {
        for batch in committed.read(partition, Some(&["path", "digest"]))? {
            if let Some(why) = missing_file(&batch?)? {
                missing.entry(partition.clone()).or_insert(why);
            }
        }
    }
    Ok(missing)
}

/// What is wrong with the first file that is not as it was written: it may have been written anew by a run with other
/// settings. `files` has the columns `path` and `digest`.
///
/// # Errors
/// When it has others.
pub fn missing_file(files: &RecordBatch) -> Result<Option<String>, StageError> {
    let texts = |name: &str| {
        files
            .column_by_name(name)
            .and_then(|column| column.as_string_opt::<i32>())
    };
    let (Some(paths), Some(digests)) = (texts("path"), texts("digest")) else {
        return Err(StageError::failed("the rows of written files have other columns"));
    };
    let mut files = paths.iter().zip(digests).filter_map(|(path, digest)| path.zip(digest));
    Ok(files.find_map(|(path, digest)| match std::fs::read(path) {
        Ok(text) if Digest::of(&text).to_hex() == digest => None,
        Ok(_) => Some(format!("{path} is another than the one that was written")),
        Err(_) => Some(format!("{path} is gone")),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_missed_when_it_is_gone_or_changed() {
        let place = tempfile::tempdir().unwrap();
        let file = |name: &str| OutputFile {
            format: "txt",
            path: place.path().join(name),
            bytes: b"hello\n".to_vec(),
        };
        let rows = write(&[file("below/a.txt"), file("b.txt")]).unwrap();
        assert_eq!((rows.num_rows(), rows.schema()), (2, schema()));
        assert_eq!(
            std::fs::read_to_string(place.path().join("below/a.txt")).unwrap(),
            "hello\n"
        );
        assert_eq!(missing_file(&rows).unwrap(), None);
        // Another text of the same length.
        std::fs::write(place.path().join("b.txt"), "hullo\n").unwrap();
        let why = missing_file(&rows).unwrap().unwrap();
        assert!(why.ends_with("b.txt is another than the one that was written"), "{why}");
        std::fs::remove_file(place.path().join("below/a.txt")).unwrap();
        assert!(missing_file(&rows).unwrap().unwrap().ends_with("a.txt is gone"));
        assert!(missing_file(&rows.project(&[0]).unwrap()).is_err());
        // A file stands where a folder should be.
        std::fs::write(place.path().join("file"), "").unwrap();
        let error = write(&[file("file/c.txt")]).unwrap_err().to_string();
        assert!(error.contains("cannot make the folder"), "{error}");
    }
}
