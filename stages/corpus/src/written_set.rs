//! Checks that a manifest written by `manifest.write` belongs to a complete set.

use std::path::Path;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_kind::store::{FileInSet, file_in_set};
use flow_storage::Storage;

use crate::{ManifestError, tree};

/// The inputs of `manifest.write`, and the file that each becomes, less its extension.
pub const FILES: [(&str, &str); 3] = [
    ("master", "master_manifest"),
    ("train", "train_manifest_v2"),
    ("val", "val_manifest_v2"),
];

/// What it writes beside them.
pub const REJECTS: &str = "rejects.parquet";
pub const STATISTICS: &str = "statistics.json";

/// The columns of `rejects.parquet`.
pub fn rejects_schema() -> SchemaRef {
    let text = |name, nullable| Field::new(name, DataType::Utf8, nullable);
    Arc::new(Schema::new(vec![
        text("partition", false),
        Field::new("row", DataType::UInt32, true),
        text("segment_id", true),
        text("stage", false),
        text("reason", false),
        text("class", false),
        text("detail", false),
        text("values", false),
    ]))
}

/// Refuses a file that `manifest.write` wrote, or began to write, if its set is incomplete: the train manifest of one
/// split could be beside the validation manifest of another.
///
/// # Errors
/// When the set is incomplete, or cannot be checked.
pub fn check_set(storage: &Storage, path: &Path) -> Result<(), ManifestError> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        return Ok(());
    };
    let folder = if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    };
    let wrong = |why: String| Err(ManifestError::manifest(path, why));
    let again = "let the pipeline that writes it run to its end, or copy the file elsewhere if it is meant as it is";
    match file_in_set(storage, folder, "flow.json", name) {
        Err(error) => wrong(format!("{error}; {again}")),
        Ok(FileInSet::AsWritten) => Ok(()),
        Ok(FileInSet::Changed) => wrong(format!(
            "it is not as the flow.json beside it says, so it may be of another set; {again}"
        )),
        Ok(FileInSet::Other) if is_manifest(name) => wrong(format!(
            "the flow.json beside it does not name it, so it is of another set; {again}"
        )),
        Ok(found @ (FileInSet::NoSet | FileInSet::CutShort))
            if is_manifest(name) && (found == FileInSet::CutShort || is_of_set(storage, folder)) =>
        {
            wrong(format!(
                "there is no flow.json beside it, so its set was not written to the end; {again}"
            ))
        }
        Ok(FileInSet::Other | FileInSet::NoSet | FileInSet::CutShort) => Ok(()),
    }
}

/// Whether a folder has the name of a prefix that a set in object storage has for itself (`set-` and 16 digits), also in a copy.
pub fn is_prefix_of_set(folder: &Path) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str());
    let token = name.and_then(|name| name.strip_prefix("set-"));
    token.is_some_and(|token| token.len() == 16 && token.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Whether a file name is that of a manifest as they are written here.
fn is_manifest(name: &str) -> bool {
    let written = |stem: &str| FILES.iter().any(|(_, file)| *file == stem);
    name.rsplit_once('.')
        .is_some_and(|(stem, ending)| written(stem) && ["parquet", "jsonl"].contains(&ending))
}

/// Whether a folder has what is only written with manifests.
fn is_of_set(storage: &Storage, folder: &Path) -> bool {
    [STATISTICS, REJECTS]
        .iter()
        .any(|name| tree::is_file(storage, &folder.join(name)))
}
