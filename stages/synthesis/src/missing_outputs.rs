//! Checks that the files of shards still exist.

use std::collections::BTreeMap;
use std::path::Path;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use flow_kind::{Artifact, Partition, StageError};

/// The shards with files that are missing or have another size, each with the first such file.
pub(super) fn missing_outputs(out: &Path, committed: &Artifact) -> Result<BTreeMap<Partition, String>, StageError> {
    let mut found = BTreeMap::new();
    for partition in committed.partitions() {
        for batch in committed.read(partition, Some(&["path", "bytes"]))? {
            let batch = batch?;
            let (paths, sizes) = (batch.column(0).as_string_opt::<i32>(), batch.column(1));
            let (Some(paths), Some(sizes)) = (paths, sizes.as_primitive_opt::<Int64Type>()) else {
                return Err(StageError::failed("the rows of audio.synthesize have other columns"));
            };
            for (path, size) in paths.iter().zip(sizes).filter_map(|(path, size)| path.zip(size)) {
                let path = out.join(path);
                let why = match std::fs::symlink_metadata(&path) {
                    Ok(file) if file.is_file() && i64::try_from(file.len()) == Ok(size) => continue,
                    Ok(file) if file.is_file() => {
                        format!("{} has {} bytes instead of {size}", path.display(), file.len())
                    }
                    _ => format!("{} is gone", path.display()),
                };
                found.entry(partition.clone()).or_insert(why);
            }
        }
    }
    Ok(found)
}
