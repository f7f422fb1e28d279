//! What the sources of a pipeline list, and how their files look from outside: told cheaply, without reading a file.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use flow_storage::{Location, Storage};

use crate::digest::Digest;
use crate::kind::Role;
use crate::plan::state::PlanState;
use crate::run_error::RunError;
use crate::spec::yaml::Value;
use crate::store::is_of_one_machine;

/// What sources list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// Equal for equal partitions, made of files of equal sizes, modification times and inodes.
    pub digest: Digest,
    /// Folders that sources name in their settings, as absolute paths, sorted, if all files that were listed lie below them,
    /// and only this machine writes there: then what changes the listing changes something below them. Else none.
    pub folders: Vec<PathBuf>,
}

impl PlanState {
    /// What all selected sources list. Sources that read artifacts of a run which is still to come are left out.
    ///
    /// # Errors
    /// A source that cannot list its partitions.
    pub fn listing(&mut self) -> Result<Listing, RunError> {
        let mut parts: Vec<String> = Vec::new();
        let mut folders = BTreeSet::new();
        let mut is_below = true;
        for node in 0..self.graph.nodes.len() {
            if self.graph.nodes[node].role != Role::Source || !self.selection.selected[node] {
                continue;
            }
            let name = self.stage(node).name.clone();
            let (mut own, mut any) = (Vec::new(), false);
            if let Some(stage) = self.checked.pipeline.stages.iter().find(|stage| stage.name == name) {
                named_folders(&stage.with, &mut own);
            }
            parts.push(name);
            for listed in self.list_source(node)?.unwrap_or_default() {
                parts.push(listed.partition.name.as_str().to_owned());
                parts.push(listed.partition.extra.clone());
                let files = listed.partition.files.iter();
                for path in files.chain(listed.ranges.iter().map(|range| &range.path)) {
                    parts.push(seen(path));
                    any = true;
                    match innermost(&own, path) {
                        Some(folder) if folders.contains(folder) => {}
                        Some(folder) => drop(folders.insert(folder.clone())),
                        None => is_below = false,
                    }
                }
            }
            is_below &= any;
        }
        if !is_below || !folders.iter().all(|folder| is_of_one_machine(folder)) {
            folders.clear();
        }
        Ok(Listing {
            digest: Digest::of_parts(parts),
            folders: folders.into_iter().collect(),
        })
    }
}

/// The folder, of several, that a file lies in or below; of two the one below the other.
fn innermost<'f>(folders: &'f [PathBuf], file: &Path) -> Option<&'f PathBuf> {
    let file = std::path::absolute(file).ok()?;
    let around = folders.iter().filter(|folder| file.starts_with(folder));
    around.max_by_key(|folder| folder.components().count())
}

/// Adds the folders of this machine that texts of `value` name.
fn named_folders(value: &Value, folders: &mut Vec<PathBuf>) {
    match value {
        Value::String(text) => {
            if let Ok(Location::Local(path)) = Location::of_path(Path::new(text))
                && let Ok(path) = std::path::absolute(path)
                && path.is_dir()
            {
                folders.push(path);
            }
        }
        Value::Sequence(items) => items.iter().for_each(|item| named_folders(item, folders)),
        Value::Mapping(map) => map.values().for_each(|value| named_folders(value, folders)),
        _ => {}
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
