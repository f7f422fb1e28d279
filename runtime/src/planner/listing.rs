//! What the sources of a pipeline list, and how their files look from outside: told cheaply, without reading a file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use flow_storage::{FileVersion, Location, Storage};

use super::state::PlanState;
use flow_base::digest::Digest;
use flow_kind::kind::Role;
use flow_plan::run_error::RunError;
use flow_spec::yaml::Value;
use flow_store::is_of_one_machine;

/// What sources list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// Equal for equal partitions, made of files of equal sizes, modification times and inodes.
    pub digest: Digest,
    /// Folders and files that sources name in their settings, as absolute paths, sorted, if all files that were listed are
    /// these or are below them, and only this machine writes there: then what changes the listing changes something there.
    /// Else none.
    pub paths: Vec<PathBuf>,
}

impl PlanState {
    /// What all selected sources list. Sources that read artifacts of a run which is still to come are left out.
    ///
    /// # Errors
    /// A source that cannot list its partitions.
    pub fn listing(&mut self) -> Result<Listing, RunError> {
        let mut parts: Vec<String> = Vec::new();
        let mut paths = BTreeSet::new();
        let mut are_named = true;
        for node in 0..self.graph.nodes.len() {
            if self.graph.nodes[node].role != Role::Source || !self.selection.selected[node] {
                continue;
            }
            let name = self.stage(node).name.clone();
            let mut named = Vec::new();
            if let Some(stage) = self.checked.pipeline.stages.iter().find(|stage| stage.name == name) {
                named_paths(&stage.with, &mut named);
            }
            parts.push(name);
            let mut is_empty = true;
            for listed in self.list_source(node)?.unwrap_or_default() {
                parts.push(listed.partition.name.as_str().to_owned());
                parts.push(listed.partition.extra.clone());
                let files = listed.partition.files.iter();
                for file in files.chain(listed.ranges.iter().map(|range| &range.path)) {
                    parts.push(seen(&self.options.storage, file));
                    is_empty = false;
                    match innermost(&named, file) {
                        Some(path) if paths.contains(path) => {}
                        Some(path) => drop(paths.insert(path.clone())),
                        None => are_named = false,
                    }
                }
            }
            are_named &= !is_empty;
        }
        if !are_named || !paths.iter().all(|path| is_of_one_machine(path)) {
            paths.clear();
        }
        Ok(Listing {
            digest: Digest::of_parts(parts),
            paths: paths.into_iter().collect(),
        })
    }
}

/// Of several paths the one that is a file's, or the folder that it is in or below; of two the one below the other.
fn innermost<'p>(paths: &'p [PathBuf], file: &Path) -> Option<&'p PathBuf> {
    let file = std::path::absolute(file).ok()?;
    let around = paths.iter().filter(|path| file.starts_with(path));
    around.max_by_key(|path| path.components().count())
}

/// Adds the files and folders of this machine that texts of `value` name.
fn named_paths(value: &Value, paths: &mut Vec<PathBuf>) {
    match value {
        Value::String(text) => {
            if let Ok(Location::Local(path)) = Location::of_path(Path::new(text))
                && let Ok(path) = std::path::absolute(path)
                && path.exists()
            {
                paths.push(path);
            }
        }
        Value::Sequence(items) => items.iter().for_each(|item| named_paths(item, paths)),
        Value::Mapping(map) => map.values().for_each(|value| named_paths(value, paths)),
        _ => {}
    }
}

/// A path with the version of its file, or why there is none.
fn seen(storage: &Storage, path: &Path) -> String {
    let version = match Location::of_path(path) {
        Ok(Location::Local(path)) => std::fs::metadata(path)
            .map(|file| FileVersion::of_file(&file))
            .map_err(|error| error.kind().to_string()),
        Ok(Location::Object(url)) => match storage.look(&url) {
            Ok(Some(object)) => Ok(FileVersion::of_object(&object)),
            Ok(None) => Err("none".to_owned()),
            Err(error) => Err(format!("{:?}", error.fault)),
        },
        Err(error) => Err(error.to_string()),
    };
    format!("{} {version:?}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_path_that_is_named_holds_a_file() {
        let place = tempfile::tempdir().unwrap();
        let shards = place.path().join("shards");
        std::fs::create_dir_all(shards.join("en")).unwrap();
        let table = shards.join("table.csv");
        std::fs::write(&table, "a").unwrap();
        let settings = format!(
            "{{top: {:?}, not: {{there: [{:?}, \"s3://bucket/shards\"]}}, all: [{:?}, {:?}], few: 3}}",
            place.path(),
            shards.join("hi"),
            shards,
            table,
        );
        let mut named = Vec::new();
        named_paths(&serde_yaml::from_str(&settings).unwrap(), &mut named);
        named.sort();
        assert_eq!(named, [place.path().to_path_buf(), shards.clone(), table.clone()]);
        assert_eq!(
            innermost(&named, &shards.join("en/en_1/metadata.parquet")),
            Some(&shards)
        );
        assert_eq!(innermost(&named, &table), Some(&table));
        assert_eq!(innermost(&named[1..], &place.path().join("shards2/a")), None);
    }
}
