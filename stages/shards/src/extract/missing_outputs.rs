//! Checks that extracted files still exist.

use std::collections::BTreeMap;
use std::path::Path;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use flow_kind::output_files::Objects;
use flow_kind::{Artifact, Partition, StageError};
use flow_storage::{Location, Storage};
use rayon::ThreadPoolBuilder;
use rayon::prelude::*;

use super::settings::{BYTES_COLUMN, PATH_COLUMN};

/// The partitions with files that are gone or of another size, and the first of each.
/// In object storage one listing of `target` tells.
pub(super) fn missing_outputs(
    target: &Path,
    committed: &Artifact,
    threads: usize,
) -> Result<BTreeMap<Partition, String>, StageError> {
    let objects = match Location::of_path(target).map_err(StageError::failed)? {
        Location::Object(url) => Some(Objects::list(Storage::global(), &url)?),
        Location::Local(_) => None,
    };
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
                let fault = match &objects {
                    Some(objects) => objects.fault(path, size, None),
                    None => fault(path, size),
                };
                let Some(why) = fault else { continue };
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

/// What is wrong with a file that was written with this many bytes.
fn fault(path: &str, size: i64) -> Option<String> {
    match std::fs::symlink_metadata(Path::new(path)) {
        Ok(file) if file.is_file() && i64::try_from(file.len()) == Ok(size) => None,
        Ok(file) if file.is_file() => Some(format!("{path} has {} bytes instead of {size}", file.len())),
        _ => Some(format!("{path} is gone")),
    }
}
