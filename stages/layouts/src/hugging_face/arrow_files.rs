//! Arrow files: what `save_to_disk` writes, and those of the cache of `datasets`.

use std::path::{Path, PathBuf};

use flow_audio::arrow_file::ArrowFile;
use flow_corpus::looks::version_of;
use flow_corpus::tree;
use flow_corpus::{Manifest, ManifestError, ReadSettings};
use flow_kind::{Storage, read_regular_file};
use serde_json::Value;

use super::columns::Columns;
use super::data_set::{Content, File, file_of, open_files};
use super::listing::{Listed, chosen_files, first_listed, listed, split_of_file};
use crate::folder_entries::entries_of;
use crate::splits::{chosen, refuse_other};

pub fn detect_arrow(storage: &Storage, root: &Path) -> Option<String> {
    if tree::is_folder(storage, root) {
        let marks = ["state.json", "dataset_dict.json"];
        let mark = marks.into_iter().find(|mark| tree::is_file(storage, &root.join(mark)));
        let of_state = mark.filter(|mark| {
            *mark == "dataset_dict.json"
                || entries_of(storage, root)
                    .names
                    .iter()
                    .any(|name| name.ends_with(".arrow"))
        });
        let first = || {
            first_listed(storage, root, "arrow")
                .filter(|found| found.config.is_empty())
                .map(|found| found.path)
        };
        return of_state
            .map(str::to_string)
            .or_else(|| Some(first()?.file_name()?.to_string_lossy().into_owned()));
    }
    root.extension()
        .filter(|extension| *extension == "arrow")
        .map(|_| "an Arrow file".into())
}

/// The files that `state.json` of a saved data set names, in its order.
fn saved_files(storage: &Storage, folder: &Path) -> Result<Vec<PathBuf>, ManifestError> {
    let path = folder.join("state.json");
    let text = read_regular_file(storage, &path).map_err(|error| ManifestError::io(&path, error))?;
    let state: Value =
        serde_json::from_slice(&text).map_err(|error| ManifestError::manifest(&path, error.to_string()))?;
    let files = state
        .get("_data_files")
        .and_then(Value::as_array)
        .ok_or_else(|| ManifestError::manifest(&path, "it names no files (`_data_files`)"))?;
    let file = |entry: &Value| {
        let name = entry.get("filename").and_then(Value::as_str);
        match name.filter(|name| !flow_corpus::names::unsafe_name(name)) {
            Some(name) => Ok(folder.join(name)),
            None => Err(ManifestError::manifest(
                &path,
                format!("{entry} in `_data_files` names no file of the folder"),
            )),
        }
    };
    files.iter().map(file).collect()
}

pub fn open_arrow(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    _: &Path,
) -> Result<Manifest, ManifestError> {
    let dict = root.join("dataset_dict.json");
    let mut told = String::new();
    let files: Vec<(PathBuf, String)> = if tree::is_file(storage, &dict) {
        let text = read_regular_file(storage, &dict).map_err(|error| ManifestError::io(&dict, error))?;
        let parsed: Value =
            serde_json::from_slice(&text).map_err(|error| ManifestError::manifest(&dict, error.to_string()))?;
        let splits = parsed.get("splits").and_then(Value::as_array).into_iter().flatten();
        let splits: Vec<&str> = splits
            .filter_map(Value::as_str)
            .filter(|name| !flow_corpus::names::unsafe_name(name))
            .collect();
        let (places, read) = chosen(&splits, &settings.split, root)?;
        told = read.map_or_else(String::new, |read| format!("; {read}"));
        let mut files = Vec::new();
        for place in places {
            let saved = saved_files(storage, &root.join(splits[place]))?;
            files.extend(saved.into_iter().map(|path| (path, splits[place].to_string())));
        }
        files
    } else if tree::is_file(storage, &root.join("state.json")) {
        // A split of a saved dictionary has its name; a data set of its own may have any.
        let is_split =
            tree::folder_above(root).is_some_and(|above| tree::is_file(storage, &above.join("dataset_dict.json")));
        let name = root.file_name().unwrap_or_default().to_string_lossy();
        refuse_other(if is_split { &name } else { "train" }, &settings.split, root)?;
        saved_files(storage, root)?
            .into_iter()
            .map(|path| (path, String::new()))
            .collect()
    } else if tree::is_folder(storage, root) {
        // A cache has results of `map`, too.
        let all = listed(storage, root, "arrow")?.into_iter().filter(|file| {
            file.config.is_empty()
                && !file
                    .path
                    .file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with("cache-"))
        });
        let all = all.map(|file| Listed {
            split: file
                .split
                .rsplit_once('-')
                .map_or(file.split.clone(), |(_, split)| split.to_string()),
            ..file
        });
        let (files, read) = chosen_files(root, all.collect(), settings)?;
        told = read;
        files.into_iter().map(|file| (file.path, file.split)).collect()
    } else {
        refuse_other(&split_of_file(root), &settings.split, root)?;
        vec![(root.to_path_buf(), String::new())]
    };
    let open = |(path, split): (PathBuf, String)| {
        let look = version_of(storage, &path).map_err(|error| ManifestError::io(&path, error))?;
        let file = ArrowFile::open(storage, &path)?;
        let columns = Columns::of(&file.schema, settings).map_err(|why| ManifestError::manifest(&path, why))?;
        let embeds = !file.has_nulls(&columns.audio, "bytes")?;
        Ok(File {
            embeds,
            ..file_of(root, path, split, look, columns, Content::Arrow(file), settings)
        })
    };
    let files = files
        .into_iter()
        .map(open)
        .collect::<Result<Vec<File>, ManifestError>>()?;
    open_files(root, files, format!("Arrow files of Hugging Face{told}"), settings)
}
