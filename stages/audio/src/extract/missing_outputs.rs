//! Checks that extracted files still exist.

use std::collections::BTreeMap;
use std::path::Path;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use flow_runtime::{Artifact, Partition, StageError};
use rayon::ThreadPoolBuilder;
use rayon::prelude::*;

use super::{BYTES_COLUMN, PATH_COLUMN};

/// The partitions with files that are missing or have another size, each with the first such file.
pub(super) fn missing_outputs(committed: &Artifact, threads: usize) -> Result<BTreeMap<Partition, String>, StageError> {
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads.max(1))
        .build()
        .map_err(|error| StageError::failed(format!("cannot start threads: {error}")))?;
    let partitions: Vec<&Partition> = committed.partitions().collect();
    let look = |partition: &&Partition| -> Result<Option<(Partition, String)>, StageError> {
        let mut first = None;
        let mut count = 0u64;
        for batch in committed.read(partition, Some(&[PATH_COLUMN, BYTES_COLUMN]))? {
            let batch = batch?;
            let (paths, sizes) = (batch.column(0).as_string_opt::<i32>(), batch.column(1));
            let (Some(paths), Some(sizes)) = (paths, sizes.as_primitive_opt::<Int64Type>()) else {
                return Err(StageError::failed("the rows of audio.extract have other columns"));
            };
            for (path, size) in paths.iter().zip(sizes).filter_map(|(path, size)| path.zip(size)) {
                let why = match std::fs::symlink_metadata(Path::new(path)) {
                    Ok(file) if file.is_file() && i64::try_from(file.len()) == Ok(size) => continue,
                    Ok(file) if file.is_file() => format!("{path} has {} bytes instead of {size}", file.len()),
                    _ => format!("{path} is gone"),
                };
                count += 1;
                first.get_or_insert(why);
            }
        }
        Ok(first.map(|first| {
            let others = if count > 1 {
                format!(" (and {} others)", count - 1)
            } else {
                String::new()
            };
            ((*partition).clone(), first + &others)
        }))
    };
    let found: Vec<_> = pool.install(|| partitions.par_iter().map(look).collect::<Result<_, _>>())?;
    Ok(found.into_iter().flatten().collect())
}
