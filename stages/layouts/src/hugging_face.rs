//! Hugging Face's data sets: Parquet files and Arrow files whose recordings are in a column `struct<bytes, path>`.
//!
//! A recording is named by its place in the file (`flow_audio::embedded`), a row by the file and its number there: what the column
//! `path` says of embedded bytes is neither a place nor unique.

mod columns;
mod hub;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use arrow::array::RecordBatch;
use flow_audio::embedded::{path_of_bytes, path_of_value};
use flow_corpus::files::label;
use flow_corpus::looks::{Chain, check_version, version_of};
use flow_corpus::manifest_row::{ManifestRow, Refusal, Wanted, refuse};
use flow_corpus::places::Places;
use flow_corpus::tree;
use flow_corpus::written_set::{REJECTS, is_prefix_of_set};
use flow_corpus::{Corpus, LaidOut, Manifest, ManifestError, Part, ReadSettings, Take, file_stem};
use flow_kind::store::on_threads;
use flow_kind::{Partition, StageError, Storage, read_regular_file};
use flow_parquet::ForeignParquet;
use flow_storage::{FileVersion, is_url};
use flow_text::language_names::code_of_name;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use serde_json::{Map, Value};

use columns::{Columns, float, is_audio, recording};
pub use hub::{Others, open_dataset};

use super::at_once::threads_for;
use super::folder_entries::{Entries, MOST_FOLDERS, entries_of, read_entries};
use super::splits::{chosen, refuse_other, spoken_of, usual};
use super::stream_offsets::ArrowFile;
use super::utterance::{Common, Utterance, language_called, text_of};

/// Rows of a partition, at least, where there are so many.
const PART_ROWS: i64 = 1_000;
/// Rows that are decoded at a time, and how many where their recordings are, too.
const BATCH: usize = 1_024;
const BATCH_WITH_BYTES: usize = 16;
/// Folders below the first in which files are looked for.
const MOST_DEPTH: usize = 3;

/// A file of a data set.
struct File {
    path: PathBuf,
    look: FileVersion,
    columns: Columns,
    content: Content,
    /// The language of the folder that it is in.
    lang: Option<String>,
    split: String,
    places: Places,
    /// What rows are called by, and their shard.
    stem: String,
    /// Whether all its rows hold their recordings, as far as it says so.
    embeds: bool,
}

enum Content {
    Arrow(ArrowFile),
    Parquet {
        metadata: ArrowReaderMetadata,
        /// The leaf column of the bytes.
        leaf: usize,
        /// Number of the first row of each row group.
        first_rows: Vec<u64>,
    },
}

struct DataSet {
    files: Vec<File>,
    common: Common,
    told: String,
}

/// Where the recording of a row is.
type PlaceOf<'p> = dyn Fn(&RecordBatch, usize) -> Result<Option<String>, Refusal> + 'p;

impl File {
    /// Gives the rows of a batch, of which the first has the number `first` in the file. `place_of` names the recording of a row
    /// that is embedded.
    fn rows(
        &self,
        batch: &RecordBatch,
        first: u64,
        place_of: &PlaceOf<'_>,
        common: &Common,
        take: &mut Take<'_>,
    ) -> Result<(), StageError> {
        for row in 0..batch.num_rows() {
            let number = first + row as u64;
            let made = self.row(batch, row, number, place_of, common);
            let values = || {
                let mut values = Map::new();
                values.insert("row".into(), number.into());
                values.insert("text".into(), self.columns.value(batch, &self.columns.text, row));
                for name in &self.columns.further {
                    values.insert(name.clone(), self.columns.value(batch, name, row));
                }
                Value::Object(values).to_string()
            };
            take(None, made, &values)?;
        }
        Ok(())
    }

    fn row(
        &self,
        batch: &RecordBatch,
        row: usize,
        number: u64,
        place_of: &PlaceOf<'_>,
        common: &Common,
    ) -> Result<ManifestRow, Refusal> {
        let columns = &self.columns;
        let path = batch
            .column_by_name(&columns.audio)
            .and_then(|audio| recording(audio, row).1);
        let wanted = match (place_of(batch, row)?, &path) {
            (Some(place), _) => Wanted::file(place),
            (None, Some(path)) if !is_url(path) && path.contains("://") => {
                return Err(refuse(
                    "unsupported_source",
                    format!("{path:?} has no bytes and is not a file; fetch it first"),
                ));
            }
            (None, Some(path)) => self.places.of_path(path),
            (None, None) => return Err(refuse("missing_audio", format!("`{}` is null", columns.audio))),
        };
        let text = columns.text_value(batch, &columns.text, row);
        let text = text_of(
            &text.unwrap_or_default(),
            &format!("`{}` is null or empty", columns.text),
        )?;
        let seconds = |(name, parts): &(String, f64)| {
            let column = batch.column_by_name(name)?;
            float(column, row).map(|value| value / parts)
        };
        let duration = columns.duration.as_ref().and_then(seconds);
        let id = columns
            .id
            .as_ref()
            .and_then(|name| columns.text_value(batch, name, row));
        let mut extra = Map::new();
        for name in &columns.further {
            extra.insert(name.clone(), columns.value(batch, name, row));
        }
        if !extra.contains_key("path") {
            extra.extend(path.map(|path| ("path".to_string(), Value::from(path))));
        }
        Ok(Utterance {
            id: id
                .filter(|id| !id.is_empty())
                .unwrap_or_else(|| format!("{}/{number}", self.stem)),
            shard: self.stem.clone(),
            text,
            lang: columns
                .lang
                .as_ref()
                .and_then(|name| columns.text_value(batch, name, row)),
            lang_field: "lang",
            folder_lang: self.lang.clone(),
            duration,
            wanted,
            extra,
            ..Utterance::default()
        }
        .row(common))
    }
}

/// A file that is listed: its folder below the first one, and its split.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Listed {
    pub path: PathBuf,
    pub config: String,
    pub split: String,
}

/// Files of an extension in a folder and below it.
pub(super) fn listed(storage: &Storage, root: &Path, extension: &str) -> Result<Vec<Listed>, ManifestError> {
    let read = |folder: &Path| {
        let entries = read_entries(storage, folder)?;
        let is_one = |name: &str| Path::new(name).extension().is_some_and(|found| found == extension);
        let mut unnamed = entries.unnamed.iter();
        match unnamed.find(|(name, is_folder)| *is_folder || is_one(name)) {
            Some((name, _)) => Err(ManifestError::manifest(
                folder.join(name),
                "its name is not UTF-8; give it another",
            )),
            None => Ok(entries),
        }
    };
    let mut found = listed_until(root, extension, read, |_, _| false)?;
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// The first file of an extension that is found in few folders.
pub(super) fn first_listed(storage: &Storage, root: &Path, extension: &str) -> Option<Listed> {
    let is_enough = |found, folders| found > 0 || folders >= MOST_FOLDERS;
    let found = listed_until(root, extension, |folder| Ok(entries_of(storage, folder)), is_enough).ok()?;
    found.into_iter().min_by(|a, b| a.path.cmp(&b.path))
}

/// `is_enough` is asked after each folder with how many files and folders there were. As for Hugging Face, names that begin with an
/// underscore do not count.
fn listed_until(
    root: &Path,
    extension: &str,
    entries: impl Fn(&Path) -> Result<Rc<Entries>, ManifestError>,
    is_enough: impl Fn(usize, usize) -> bool,
) -> Result<Vec<Listed>, ManifestError> {
    let (mut found, mut folders) = (Vec::new(), 0);
    let mut waiting = VecDeque::from([(root.to_path_buf(), Vec::<String>::new())]);
    while let Some((folder, below)) = waiting.pop_front() {
        let entries = entries(&folder)?;
        for name in entries.names.difference(&entries.folders) {
            let path = folder.join(name);
            let is_one = path.extension().is_some_and(|found| found == extension);
            // Rejects of a dataset that `manifest.write` wrote.
            let is_of_set = entries.names.contains("flow.json") || is_prefix_of_set(&folder);
            let is_beside = name == REJECTS && is_of_set;
            if is_one && !name.starts_with("metadata.") && !name.starts_with('_') && !is_beside {
                let (config, split) = config_and_split(&below, name);
                found.push(Listed { path, config, split });
            }
        }
        folders += 1;
        if is_enough(found.len(), folders) {
            break;
        }
        if below.len() < MOST_DEPTH {
            let inner = entries.folders.iter().filter(|name| !name.starts_with('_'));
            waiting.extend(inner.map(|name| (folder.join(name), [&below[..], std::slice::from_ref(name)].concat())));
        }
    }
    Ok(found)
}

/// Configuration and split by the names of folders and of the file: `hindi/train-00000-of-00047.parquet`, `data/test-….parquet`,
/// `hi_in/partial-train/0000.parquet`.
fn config_and_split(below: &[String], name: &str) -> (String, String) {
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let of_name = numbered(stem).map(|numbered| numbered.split.to_string());
    let mut folders: Vec<&str> = below
        .iter()
        .map(String::as_str)
        .filter(|folder| *folder != "data")
        .collect();
    let split = match of_name {
        Some(split) => split,
        None => {
            let last = folders
                .last()
                .map(|last| last.strip_prefix("partial-").unwrap_or(last))
                .unwrap_or_default();
            let is_number = stem.bytes().all(|byte| byte.is_ascii_digit());
            match usual(spoken_of(last)) {
                // As the hub names converted files: the folder is the split.
                _ if is_number && !folders.is_empty() => {
                    let split = usual(last).to_string();
                    folders.pop();
                    split
                }
                split @ ("train" | "validation" | "test") => {
                    folders.pop();
                    split.to_string()
                }
                _ => match spoken_of(stem) {
                    split @ ("train" | "validation" | "test") => split.to_string(),
                    _ => "train".into(),
                },
            }
        }
    };
    (folders.join("/"), split)
}

/// What the name of a file with a number says.
struct Numbered<'a> {
    split: &'a str,
    number: usize,
    total: usize,
}

/// The parts of `train-00000-of-00047` and of `train-00000-of-00001-3859b9935622e1d8`.
fn numbered(stem: &str) -> Option<Numbered<'_>> {
    let (before, total) = stem.split_once("-of-")?;
    let (split, number) = before.rsplit_once('-')?;
    let number_of = |digits: &str| {
        let is_number = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| digits.parse().ok()).flatten()
    };
    Some(Numbered {
        split,
        number: number_of(number)?,
        total: number_of(total.get(..5)?)?,
    })
}

fn parquet_of(storage: &Storage, path: &Path) -> Result<ArrowReaderMetadata, ManifestError> {
    let file = ForeignParquet::open(storage, path).map_err(|error| ManifestError::io(path, error))?;
    file.metadata().map_err(|source| ManifestError::parquet(path, source))
}

/// Whether a Parquet file has a column of recordings.
pub fn has_recordings(storage: &Storage, path: &Path) -> bool {
    let file = tree::or_note(path, ForeignParquet::open(storage, path).map(Some));
    let metadata = file.and_then(|file| file.metadata().ok());
    metadata.is_some_and(|metadata| metadata.schema().fields().iter().any(|field| is_audio(field)))
}

pub fn detect_parquet(storage: &Storage, root: &Path) -> Option<String> {
    if tree::is_folder(storage, root) {
        let first = first_listed(storage, root, "parquet")?.path;
        return has_recordings(storage, &first)
            .then(|| first.strip_prefix(root).unwrap_or(&first).display().to_string());
    }
    let is_parquet = root.extension().is_some_and(|extension| extension == "parquet");
    (is_parquet && has_recordings(storage, root)).then(|| "a column holds recordings".into())
}

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

/// The files of one configuration and of the splits that are read, and what is told of them.
pub(super) fn chosen_files(
    root: &Path,
    all: Vec<Listed>,
    settings: &ReadSettings,
) -> Result<(Vec<Listed>, String), ManifestError> {
    let mut configs: Vec<&str> = all.iter().map(|file| file.config.as_str()).collect();
    configs.sort_unstable();
    configs.dedup();
    // One configuration for each language is one corpus.
    let is_language = |config: &&str| language_called(config.rsplit('/').next().unwrap_or_default()).is_some();
    if configs.len() > 1 && !configs.iter().all(is_language) {
        let why = format!(
            "it has several configurations: {}; name the folder of one",
            configs.join(", ")
        );
        return Err(ManifestError::manifest(root, why));
    }
    let splits: Vec<&str> = all.iter().map(|file| file.split.as_str()).collect();
    let (places, told) = chosen(&splits, &settings.split, root)?;
    let files: Vec<Listed> = places.into_iter().map(|place| all[place].clone()).collect();
    configs.retain(|config| files.iter().all(|file| file.config != *config));
    let without = match configs.is_empty() {
        true => String::new(),
        false => format!("; configurations without that split: {}", configs.join(", ")),
    };
    let missing = match missing_numbers(files.iter().map(|file| file.path.as_path())) {
        Some(missing) => format!("; {missing}"),
        None => String::new(),
    };
    let partial = files.iter().any(|file| {
        file.path
            .components()
            .any(|part| part.as_os_str().to_string_lossy().starts_with("partial-"))
    });
    let partial = if partial {
        "; it is only the beginning of the split (partial)"
    } else {
        ""
    };
    Ok((
        files,
        told.map_or_else(String::new, |told| format!("; {told}")) + &without + &missing + partial,
    ))
}

pub fn open_parquet(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    _: &Path,
) -> Result<Manifest, ManifestError> {
    let (files, told) = match tree::is_folder(storage, root) {
        true => {
            let all = listed(storage, root, "parquet")?;
            match hub::declared_in_folder(storage, root, &all)? {
                None => chosen_files(root, all, settings)?,
                Some((files, config)) => {
                    let (files, told) = chosen_files(root, files, settings)?;
                    let config = match config.as_str() {
                        "" => String::new(),
                        config => format!("; configuration {config} of its README.md"),
                    };
                    (files, config + &told)
                }
            }
        }
        false => {
            refuse_other(&split_of_file(root), &settings.split, root)?;
            (vec![named(root)], String::new())
        }
    };
    open_parquet_files(
        storage,
        root,
        files.into_iter().map(|file| (file.path, file.split)).collect(),
        told,
        settings,
    )
}

/// Parquet files that a pattern names.
pub fn open_named(storage: &Storage, files: Vec<PathBuf>, settings: &ReadSettings) -> Result<Manifest, ManifestError> {
    let root = files.first().cloned().unwrap_or_default();
    let files = files.into_iter().map(|path| (path, String::new())).collect();
    open_parquet_files(storage, &root, files, String::new(), settings)
}

/// The split that a file is of by its name, or that of its folder; empty where neither says it.
fn split_of_file(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let above = path
        .parent()
        .and_then(Path::file_name)
        .unwrap_or_default()
        .to_string_lossy();
    let mut splits = [&stem, &above].into_iter().map(|name| spoken_of(name));
    let known = splits.find(|split| ["train", "validation", "test"].contains(split));
    known.unwrap_or_default().to_string()
}

/// What is missing of files with numbers, `train-00000-of-00047.parquet`.
pub(super) fn missing_numbers<'p>(paths: impl Iterator<Item = &'p Path>) -> Option<String> {
    let mut sets: BTreeMap<(&Path, &str, usize), BTreeSet<usize>> = BTreeMap::new();
    for path in paths {
        let stem = path.file_stem().and_then(OsStr::to_str).unwrap_or_default();
        if let (Some(Numbered { split, number, total }), Some(folder)) = (numbered(stem), path.parent()) {
            sets.entry((folder, split, total)).or_default().insert(number);
        }
    }
    let ((folder, split, total), found) = sets.iter().find(|((_, _, total), found)| found.len() < *total)?;
    let files = folder.join(format!("{split}-NNNNN-of-{total:05}"));
    Some(format!("it has {} of {total} files `{}`", found.len(), files.display()))
}

fn named(path: &Path) -> Listed {
    Listed {
        path: path.to_path_buf(),
        config: String::new(),
        split: String::new(),
    }
}

fn open_parquet_files(
    storage: &Storage,
    root: &Path,
    files: Vec<(PathBuf, String)>,
    told: String,
    settings: &ReadSettings,
) -> Result<Manifest, ManifestError> {
    let open = |(path, split): &(PathBuf, String)| {
        let (path, split) = (path.clone(), split.clone());
        let look = version_of(storage, &path).map_err(|error| ManifestError::io(&path, error))?;
        let metadata = parquet_of(storage, &path)?;
        let columns = Columns::of(metadata.schema(), settings).map_err(|why| ManifestError::manifest(&path, why))?;
        let schema = metadata.parquet_schema();
        let is_leaf = |leaf: &usize| {
            let parts = schema.column(*leaf).path().parts().to_vec();
            parts == [columns.audio.as_str(), "bytes"] || parts == [columns.audio.as_str()]
        };
        let leaf = (0..schema.num_columns()).find(is_leaf);
        let leaf =
            leaf.ok_or_else(|| ManifestError::manifest(&path, format!("its column `{}` has no bytes", columns.audio)))?;
        let mut first_rows = vec![0u64];
        for group in metadata.metadata().row_groups() {
            let last = first_rows.last().copied().unwrap_or(0);
            first_rows.push(last.saturating_add(u64::try_from(group.num_rows()).unwrap_or(0)));
        }
        let embeds = (0..metadata.metadata().num_row_groups()).all(|group| is_full(&metadata, group, leaf));
        let content = Content::Parquet {
            leaf,
            first_rows,
            metadata,
        };
        Ok(File {
            embeds,
            ..file_of(root, path, split, look, columns, content, settings)
        })
    };
    let files = on_threads(&files, threads_for(files.iter().map(|(path, _)| path)), open);
    let files = files.into_iter().collect::<Result<Vec<File>, ManifestError>>()?;
    open_files(root, files, format!("Parquet files of Hugging Face{told}"), settings)
}

/// The language of a file is that which a folder above it is called by: a code from the input on, an English name above it, too.
fn file_of(
    root: &Path,
    path: PathBuf,
    split: String,
    look: FileVersion,
    columns: Columns,
    content: Content,
    settings: &ReadSettings,
) -> File {
    let absolute = tree::absolute(&path);
    let root = tree::absolute(root);
    let input = if absolute == root {
        root.parent()
    } else {
        Some(root.as_path())
    };
    let lang = absolute.ancestors().skip(1).take(3).find_map(|above| {
        let name = above.file_name()?.to_str()?;
        let is_below = input.is_some_and(|input| above.starts_with(input));
        match is_below && !["data", split.as_str()].contains(&name) {
            true => language_called(name),
            false => code_of_name(name),
        }
    });
    File {
        lang: lang.map(str::to_string),
        places: settings.places(path.parent().unwrap_or(Path::new(""))),
        stem: file_stem(&path),
        embeds: false,
        path,
        look,
        columns,
        content,
        split,
    }
}

/// Whether the statistics of a row group say that a column has no nulls.
fn is_full(metadata: &ArrowReaderMetadata, group: usize, leaf: usize) -> bool {
    let statistics = metadata.metadata().row_group(group).column(leaf).statistics();
    statistics.and_then(|statistics| statistics.null_count_opt()) == Some(0)
}

/// Files of one name in several splits (`train/data-00000-of-00001.arrow`) call their rows by the split, too.
fn name_by_split(files: &mut [File]) {
    let mut splits: HashMap<&str, &str> = HashMap::new();
    let is_unclear = files.iter().any(|file| {
        splits
            .insert(&file.stem, &file.split)
            .is_some_and(|other| other != file.split)
    });
    for file in files.iter_mut().filter(|_| is_unclear) {
        file.stem = format!("{}/{}", file.split, file.stem);
    }
}

/// Files of one name in several folders (`hindi/train-00000-of-00001.parquet`) call their rows by the folder, too.
fn name_by_folder(files: &mut [File], root: &Path) {
    let mut folders: HashMap<&str, Option<&Path>> = HashMap::new();
    let is_unclear = files.iter().any(|file| {
        let folder = file.path.parent();
        folders.insert(&file.stem, folder).is_some_and(|other| other != folder)
    });
    for file in files.iter_mut().filter(|_| is_unclear) {
        let below = file.path.parent().and_then(|folder| folder.strip_prefix(root).ok());
        if let Some(below) = below.filter(|below| !below.as_os_str().is_empty()) {
            file.stem = format!("{}/{}", below.display(), file.stem);
        }
    }
}

fn open_files(
    root: &Path,
    mut files: Vec<File>,
    what: String,
    settings: &ReadSettings,
) -> Result<Manifest, ManifestError> {
    name_by_split(&mut files);
    name_by_folder(&mut files, root);
    let columns = files.first().map(|file| &file.columns);
    let columns = columns.map_or_else(String::new, |columns| {
        format!(
            "; recordings are of the column `{}`, texts of `{}`",
            columns.audio, columns.text
        )
    });
    let data_set = DataSet {
        files,
        common: Common::of(settings),
        told: what + &columns,
    };
    LaidOut::of(data_set, root, settings)
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

impl DataSet {
    /// The file and the row groups of each part.
    fn places(&self) -> Vec<(usize, std::ops::Range<usize>)> {
        let mut places = Vec::new();
        for (number, file) in self.files.iter().enumerate() {
            match &file.content {
                Content::Arrow(_) => places.push((number, 0..0)),
                Content::Parquet { metadata, .. } => {
                    let groups = metadata.metadata().row_groups();
                    let (mut start, mut rows) = (0, 0i64);
                    for (group, about) in groups.iter().enumerate() {
                        rows = rows.saturating_add(about.num_rows());
                        if rows >= PART_ROWS || group + 1 == groups.len() {
                            places.push((number, start..group + 1));
                            (start, rows) = (group + 1, 0);
                        }
                    }
                }
            }
        }
        places
    }
}

impl Corpus for DataSet {
    fn told(&self) -> String {
        self.told.clone()
    }

    /// Files with recordings are not read for their digests: their looks serve instead. A row without bytes names another file.
    fn has_files(&self, part: &Part) -> bool {
        let file = self.places().get(part.number).map(|(file, _)| *file);
        file.is_some_and(|file| !self.files[file].embeds)
    }

    fn parts(&self) -> Vec<Part> {
        let part = |(number, (file, groups)): (usize, (usize, std::ops::Range<usize>))| {
            let at = &self.files[file];
            let mut chain = Chain::default();
            chain.add(&Some((0, at.look)));
            let split = if at.split.is_empty() {
                String::new()
            } else {
                format!("{}/", at.split)
            };
            Part {
                name: Partition::from(format!("{split}{}/{:06}", label(file, &at.path), groups.start)),
                number,
                files: Vec::new(),
                looks: chain.to_hex(),
            }
        };
        self.places().into_iter().enumerate().map(part).collect()
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        let Some((number, groups)) = self.places().into_iter().nth(part.number) else {
            return Ok(());
        };
        let file = &self.files[number];
        check_version(storage, file.look, &file.path)?;
        let path = file
            .path
            .to_str()
            .ok_or_else(|| StageError::failed("the path is not UTF-8"))?;
        let audio = file.columns.audio.as_str();
        match &file.content {
            Content::Arrow(arrow) => {
                let mut first = 0;
                arrow.each(&mut |placed| {
                    let place_of = |batch: &RecordBatch, row: usize| {
                        let column = batch.column_by_name(audio);
                        let bytes = column.and_then(|column| recording(column, row).0);
                        let place = bytes.map(|bytes| {
                            let copied =
                                || refuse("decode_error", "the value is not aligned in the file as Arrow says");
                            placed.place_of(bytes).ok_or_else(copied)
                        });
                        let place = place.transpose()?;
                        Ok(place.map(|(offset, size)| path_of_bytes(path, offset, size)))
                    };
                    file.rows(&placed.batch, first, &place_of, &self.common, take)?;
                    first += placed.batch.num_rows() as u64;
                    Ok(())
                })
            }
            Content::Parquet {
                metadata,
                leaf,
                first_rows,
            } => {
                let parquet =
                    ForeignParquet::open(storage, &file.path).map_err(|error| ManifestError::io(&file.path, error))?;
                let schema = metadata.parquet_schema();
                for group in groups {
                    // Where all rows have bytes, these are not read.
                    let is_full = is_full(metadata, group, *leaf);
                    let read = |column: &usize| {
                        let parts = schema.column(*column).path().parts().to_vec();
                        let is_audio = parts.first().is_some_and(|name| name == audio);
                        let is_single = parts.len() == 1
                            || is_audio && parts.get(1).is_some_and(|name| name == "path" || name == "bytes");
                        is_single && !(is_full && column == leaf)
                    };
                    let mask = ProjectionMask::leaves(schema, (0..schema.num_columns()).filter(read));
                    let batch = if is_full { BATCH } else { BATCH_WITH_BYTES };
                    let failed = |source| ManifestError::parquet(&file.path, source);
                    let mut rows = parquet.rows_of(metadata, &[group], mask, batch, None).map_err(failed)?;
                    let mut at = 0usize;
                    while let Some(batch) = rows.next().transpose()? {
                        let place_of = |batch: &RecordBatch, row: usize| {
                            let has_bytes = is_full
                                || batch
                                    .column_by_name(audio)
                                    .is_some_and(|column| recording(column, row).0.is_some());
                            Ok(has_bytes.then(|| path_of_value(path, *leaf, group, at + row)))
                        };
                        file.rows(&batch, first_rows[group] + at as u64, &place_of, &self.common, take)?;
                        at += batch.num_rows();
                    }
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_files_of_a_numbered_split_are_told() {
        let missing = |names: &[&str]| missing_numbers(names.iter().map(Path::new));
        let all = [
            "d/train-00000-of-00002.parquet",
            "d/train-00001-of-00002.parquet",
            "d/x.parquet",
        ];
        assert_eq!(missing(&all), None);
        let told = missing(&all[1..]).unwrap();
        assert_eq!(told, "it has 1 of 2 files `d/train-NNNNN-of-00002`");
    }

    #[test]
    fn names_of_files_tell_configuration_and_split() {
        let of = |path: &str| {
            let mut parts: Vec<String> = path.split('/').map(str::to_string).collect();
            let name = parts.pop().unwrap();
            let (config, split) = config_and_split(&parts, &name);
            format!("{config}:{split}")
        };
        for (path, expected) in [
            ("data/train-00000-of-00047.parquet", ":train"),
            (
                "data/train.clean.100-00000-of-00014-3859b9935622e1d8.parquet",
                ":train.clean.100",
            ),
            ("hindi/valid-00000-of-00001.parquet", "hindi:valid"),
            ("hi_in/partial-train/0000.parquet", "hi_in:train"),
            ("hi_in/9_hours/0000.parquet", "hi_in:9_hours"),
            ("all/test.clean/0000.parquet", "all:test.clean"),
            ("dev/0000.parquet", ":validation"),
            ("my_dev_1.parquet", ":validation"),
            ("x.parquet", ":train"),
        ] {
            assert_eq!(of(path), expected, "{path}");
        }
    }
}
