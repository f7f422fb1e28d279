//! What the sources of a pipeline list, and how their files look from outside: told cheaply, without reading a file.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use flow_storage::{Location, Storage};

use crate::digest::Digest;
use crate::kind::Role;
use crate::plan::state::PlanState;
use crate::run_error::RunError;

impl PlanState {
    /// Equal for equal partitions of all selected sources, made of files of equal sizes, modification times and inodes.
    /// Sources that read artifacts of a run which is still to come are left out.
    ///
    /// # Errors
    /// A source that cannot list its partitions.
    pub fn listing(&mut self) -> Result<Digest, RunError> {
        let mut parts: Vec<String> = Vec::new();
        for node in 0..self.graph.nodes.len() {
            if self.graph.nodes[node].role != Role::Source || !self.selection.selected[node] {
                continue;
            }
            parts.push(self.stage(node).name.clone());
            for listed in self.list_source(node)?.unwrap_or_default() {
                parts.push(listed.partition.name.as_str().to_owned());
                parts.push(listed.partition.extra.clone());
                parts.extend(listed.partition.files.iter().map(|path| seen(path)));
                parts.extend(listed.ranges.iter().map(|range| seen(&range.path)));
            }
        }
        Ok(Digest::of_parts(parts))
    }
}

/// A file by its path and what a change of its contents moves; an object by its size, and by its ETag, version or time.
fn seen(path: &Path) -> String {
    let of = match Location::of_path(path) {
        Ok(Location::Local(path)) => match std::fs::metadata(path) {
            Ok(file) => format!("{} {}.{} {}", file.size(), file.mtime(), file.mtime_nsec(), file.ino()),
            Err(error) => error.kind().to_string(),
        },
        Ok(Location::Object(url)) => match Storage::global().look(&url) {
            Ok(Some(object)) => match object.etag.as_deref().or(object.version.as_deref()) {
                Some(tag) => format!("{} {tag}", object.size),
                None => format!("{} {:?}", object.size, object.modified),
            },
            Ok(None) => "none".to_owned(),
            Err(error) => format!("{:?}", error.fault),
        },
        Err(error) => error.to_string(),
    };
    format!("{} {of}", path.display())
}
