//! NeMo's tarred data: tars `audio_0.tar`, …, and `tarred_audio_manifest.json`, or a manifest for each tar in `sharded_manifests`.

use std::path::{Path, PathBuf};

use flow_corpus::files::trailing_number;
use flow_corpus::lines::LineManifest;
use flow_corpus::tree;
use flow_corpus::{LaidOut, Manifest, ManifestError, ReadSettings};
use flow_storage::Storage;

use super::chosen_rows::ChosenRows;
use super::folder_entries::entries_of;

const MANIFESTS: [&str; 2] = ["tarred_audio_manifest.json", "manifest.json"];
const SHARDED: &str = "sharded_manifests";

/// Files of a folder whose names begin and end so, with a number between, in the order of the numbers.
fn numbered(storage: &Storage, folder: &Path, begin: &str, end: &str) -> Vec<PathBuf> {
    let entries = entries_of(storage, folder);
    let names = &entries.names;
    let found = names.iter().filter_map(|name| {
        let path = folder.join(name);
        let is_one = name.starts_with(begin) && name.ends_with(end);
        Some((trailing_number(&path).filter(|_| is_one)?, path))
    });
    let mut found: Vec<(u64, PathBuf)> = found.collect();
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

fn tars(storage: &Storage, root: &Path) -> Vec<PathBuf> {
    numbered(storage, root, "audio_", ".tar")
}

fn manifests(storage: &Storage, root: &Path) -> Vec<PathBuf> {
    let sharded = numbered(storage, &root.join(SHARDED), "manifest_", ".json");
    if !sharded.is_empty() {
        return sharded;
    }
    let one = MANIFESTS
        .iter()
        .map(|name| root.join(name))
        .find(|path| tree::is_file(storage, path));
    one.into_iter().collect()
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    let manifest = manifests(storage, root).into_iter().next()?;
    let tar = tars(storage, root).into_iter().next()?;
    let name = |path: &Path| path.strip_prefix(root).unwrap_or(path).display().to_string();
    Some(format!("{} beside {}", name(&tar), name(&manifest)))
}

pub fn open(storage: &Storage, root: &Path, settings: &ReadSettings, _: &Path) -> Result<Manifest, ManifestError> {
    let (manifests, tars) = (manifests(storage, root), tars(storage, root));
    if manifests.is_empty() || tars.is_empty() {
        return Err(ManifestError::manifest(
            root,
            format!(
                "it has no tars audio_<number>.tar beside {} or {SHARDED}",
                MANIFESTS.join(", ")
            ),
        ));
    }
    if manifests.len() > 1 && manifests.len() != tars.len() {
        let why = format!(
            "it has {} manifests in {SHARDED}, but {} tars",
            manifests.len(),
            tars.len()
        );
        return Err(ManifestError::manifest(root, why));
    }
    let told = format!(
        "tarred data of NeMo: {} tars, {} manifests",
        tars.len(),
        manifests.len()
    );
    let lines = LineManifest::open(storage, manifests, tars, settings)?;
    Ok(LaidOut::of_lines(ChosenRows::all(lines, told), settings))
}
