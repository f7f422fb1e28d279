//! A data set: its files, whatever their format, and their rows.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use arrow::array::RecordBatch;
use flow_audio::arrow_file::ArrowFile;
use flow_audio::embedded::{path_in_batch, path_of_bytes, path_of_value};
use flow_corpus::files::label;
use flow_corpus::looks::{Chain, check_version};
use flow_corpus::manifest_row::{ManifestRow, Refusal, Wanted, refuse};
use flow_corpus::places::Places;
use flow_corpus::tree;
use flow_corpus::{Corpus, LaidOut, Manifest, ManifestError, Part, ReadSettings, Take, file_stem};
use flow_kind::{Partition, StageError, Storage};
use flow_parquet::ForeignParquet;
use flow_storage::{FileVersion, is_url};
use flow_text::language_names::code_of_name;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use serde_json::{Map, Value};

use super::columns::{Columns, float, recording};
use crate::utterance::{Common, Utterance, language_called, text_of};

/// Rows of a partition, at least, where there are so many.
const PART_ROWS: i64 = 1_000;
/// Rows that are decoded at a time, and how many where their recordings are, too.
const BATCH: usize = 1_024;
const BATCH_WITH_BYTES: usize = 16;

/// A file of a data set.
pub struct File {
    pub path: PathBuf,
    pub look: FileVersion,
    pub columns: Columns,
    pub content: Content,
    /// The language of the folder that it is in.
    pub lang: Option<String>,
    pub split: String,
    pub places: Places,
    /// What rows are called by, and their shard.
    pub stem: String,
    /// Whether all its rows hold their recordings, as far as it says so.
    pub embeds: bool,
}

pub enum Content {
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

/// The language of a file is that which a folder above it is called by: a code from the input on, an English name above it, too.
pub fn file_of(
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
pub fn is_full(metadata: &ArrowReaderMetadata, group: usize, leaf: usize) -> bool {
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

pub fn open_files(
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
                let (mut first, mut batches) = (0, arrow.batches());
                while let Some(placed) = batches.next_batch().map_err(ManifestError::from)? {
                    let place_of = |batch: &RecordBatch, row: usize| {
                        let column = batch.column_by_name(audio);
                        let bytes = column.and_then(|column| recording(column, row).0);
                        let place = bytes.map(|bytes| match (placed.place_of(bytes), batch.schema().index_of(audio)) {
                            (Some((offset, size)), _) => Ok(path_of_bytes(path, offset, size)),
                            (None, Ok(column)) if placed.is_compressed => {
                                Ok(path_in_batch(path, column, placed.at, row))
                            }
                            (None, _) => {
                                let why = "the value is not aligned in the file as Arrow says";
                                Err(refuse("decode_error", why))
                            }
                        });
                        place.transpose()
                    };
                    file.rows(&placed.batch, first, &place_of, &self.common, take)?;
                    first += placed.batch.num_rows() as u64;
                }
                Ok(())
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
