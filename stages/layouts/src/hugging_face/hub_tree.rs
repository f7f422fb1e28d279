//! Datasets of the hub in other layouts than Parquet: a repository is read as the tree of files that it is, as a prefix of a bucket is.

use std::path::{Path, PathBuf};

use flow_corpus::tree;
use flow_corpus::{Fetch, ManifestError, ReadSettings};
use flow_hub::{DatasetFiles, DatasetReference, Hub};
use flow_storage::{Location, Storage};

use super::hub_errors::{of_hub, stopped};

/// Endings of files by which other layouts than Parquet are known.
const OF_LAYOUTS: [&str; 10] = ["tar", "csv", "tsv", "jsonl", "json", "gz", "arrow", "txt", "scp", "srt"];

/// Whether files may be of another layout than Parquet: what is not is not asked for.
pub(super) fn may_be_layout(files: &[String]) -> bool {
    files.iter().any(|file| {
        let ending = Path::new(file).extension().and_then(|ending| ending.to_str());
        ending.is_some_and(|ending| OF_LAYOUTS.contains(&ending))
    })
}

/// The URL of a dataset at its commit, or of the folder or file of it that the reference names. Storage knows all that is below it from
/// now on, as if it were a bucket. None: there is no such folder or file.
pub(super) fn place_in_tree(
    storage: &Storage,
    hub: &Hub,
    reference: &DatasetReference,
    dataset: &DatasetFiles,
    progress: &mut dyn FnMut(&str) -> bool,
) -> Result<Option<PathBuf>, ManifestError> {
    let root = reference.to_string();
    let wrong = |why: String| ManifestError::manifest(Path::new(&root), why);
    let tree = hub.tree(dataset, progress);
    let tree = tree.map_err(|error| of_hub(reference, error))?;
    let (address, files) = tree.ok_or_else(|| stopped(reference))?;
    let url = match Location::parse(&address) {
        Ok(Location::Object(url)) => url,
        Ok(Location::Local(_)) => return Err(wrong(format!("{address} is not an address"))),
        Err(error) => return Err(wrong(error.to_string())),
    };
    let objects = files.into_iter().map(|file| (file.path, file.size, file.etag));
    storage
        .remember_all(&url, objects)
        .map_err(|error| wrong(error.to_string()))?;
    let place = match &reference.config {
        None => PathBuf::from(url.to_string()),
        Some(config) => Path::new(&url.to_string()).join(config),
    };
    let is_there = tree::is_file(storage, &place) || tree::is_folder(storage, &place);
    Ok(is_there.then_some(place))
}

/// With which a place of a dataset is opened as one in a bucket is.
pub(super) fn settings_in_tree(
    reference: &DatasetReference,
    place: &Path,
    dataset: &DatasetFiles,
    settings: &ReadSettings,
    progress: &mut dyn FnMut(&str) -> bool,
) -> ReadSettings {
    let commit = dataset.commit.get(..12).unwrap_or(&dataset.commit);
    progress(&format!("reading {reference} where it is, at commit {commit}"));
    ReadSettings {
        manifest: place.to_string_lossy().into_owned(),
        split: reference.split.clone().unwrap_or_else(|| settings.split.clone()),
        fetch: Fetch::Files,
        ..settings.clone()
    }
}
