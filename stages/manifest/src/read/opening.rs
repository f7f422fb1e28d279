//! Opens a manifest by its format.

use std::path::{Path, PathBuf};

use flow_hub::DatasetReference;
use flow_kind::store::{on_threads, path_in_set};
use flow_kind::{Partition, SourcePartition, StageError, open_input_file};
use flow_storage::is_url;

use super::ReadSettings;
use super::files::{Format, expand, format_of};
use super::folder::{AudioFolder, table_of};
use super::layouts::{self, Corpus, LaidOut, Layout};
use super::lines::LineManifest;
use super::rows::Rows;
use super::tables::TableManifest;
use super::text_tables::TextTables;
use super::whole::check_set;
use crate::error::ManifestError;

/// A manifest whose parts are known.
pub enum Manifest {
    Tables(TableManifest),
    /// JSON lines, or tables as text.
    Lines(LaidOut),
    Folder(AudioFolder),
    LaidOut(LaidOut),
}

impl Manifest {
    /// The names of the partitions, without a look at their recordings.
    pub(super) fn names(&self) -> Vec<Partition> {
        match self {
            Manifest::Tables(tables) => tables.names(),
            Manifest::Folder(folder) => folder.names(),
            Manifest::Lines(corpus) | Manifest::LaidOut(corpus) => corpus.names(),
        }
    }

    pub(super) fn partitions(&self) -> Result<Vec<SourcePartition>, ManifestError> {
        Ok(match self {
            Manifest::Tables(tables) => tables.partitions(),
            Manifest::Folder(folder) => folder.partitions()?,
            Manifest::Lines(corpus) | Manifest::LaidOut(corpus) => corpus.partitions()?,
        })
    }

    /// The decisions about the names of folders and the unit of times as text for the log; none where they do not count.
    pub(super) fn decision(&self) -> Option<String> {
        match self {
            Manifest::Tables(tables) => tables.decision(),
            Manifest::Folder(folder) => folder.decision(),
            Manifest::Lines(corpus) | Manifest::LaidOut(corpus) => corpus.decision(),
        }
    }

    pub(super) fn read(&self, partition: &Partition, rows: &mut Rows<'_>) -> Result<(), StageError> {
        match self {
            Manifest::Tables(tables) => tables.read(partition, rows),
            Manifest::Folder(folder) => folder.read(partition, rows),
            Manifest::Lines(corpus) | Manifest::LaidOut(corpus) => corpus.read(partition, rows),
        }
    }
}

impl ReadSettings {
    /// The identity of what is opened.
    pub(super) fn name(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The dataset of the hub that `manifest` names, if it names one.
    ///
    /// # Errors
    /// What is wrong with the reference.
    pub(super) fn dataset(&self) -> Result<Option<DatasetReference>, String> {
        match DatasetReference::parse(&self.manifest) {
            None if self.manifest.starts_with("hf://") => {
                Err("a dataset of the hub is written hf://datasets/OWNER/NAME[@REVISION][/CONFIG][:SPLIT]".into())
            }
            parsed => parsed.transpose().map_err(|error| error.to_string()),
        }
    }

    /// Opens the manifest. `progress` receives lines about downloads from the hub, and cancels them by false.
    pub(super) fn open(
        &self,
        scratch: &Path,
        progress: &mut dyn FnMut(&str) -> bool,
    ) -> Result<Manifest, ManifestError> {
        let wrong = |why: String| ManifestError::manifest(&self.manifest, why);
        if let Some(dataset) = self.dataset().map_err(wrong)? {
            return layouts::open_dataset(&dataset, self, progress);
        }
        let files = existing(&self.manifest, "the manifest")?;
        self.check_layout(&files)?;
        if let ([root], Format::Auto, true) = (files.as_slice(), self.format, self.tars.is_empty())
            && let Some(manifest) = layouts::open(root, self, scratch)?
        {
            return Ok(manifest);
        }
        if !self.split.is_empty() {
            return Err(ManifestError::manifest(
                &self.manifest,
                "`split` belongs to layouts with splits, and this is none of them",
            ));
        }
        let mut format = self.format;
        for file in &files {
            let found = match self.format {
                Format::Auto => format_of(file).ok_or_else(|| {
                    let why = match file.extension().and_then(|extension| extension.to_str()) {
                        Some("gz" | "bz2" | "xz" | "zst") => "it is compressed; unpack it",
                        Some("tar") => {
                            "it is a tar, which `audio.webdataset` reads, or `tars` beside a manifest of its members"
                        }
                        Some("xlsx" | "xls" | "ods") => "it is a workbook; save it as CSV",
                        _ => "its name does not tell its format; say `format: parquet`, `nemo` or `table`",
                    };
                    ManifestError::manifest(file, why)
                })?,
                given => given,
            };
            if format != Format::Auto && format != found {
                return Err(ManifestError::manifest(
                    file,
                    "it has another format than the files before it",
                ));
            }
            if file.is_dir() != (found == Format::Folder) {
                let why = if file.is_dir() {
                    "it is a folder, not a file"
                } else {
                    "it is a file, not a folder"
                };
                return Err(ManifestError::manifest(file, why));
            }
            if found != Format::Folder {
                check_set(file)?;
            }
            format = found;
        }
        if !self.tars.is_empty() && format != Format::Nemo {
            return Err(ManifestError::manifest(
                &self.tars,
                "`tars` belongs to manifests of JSON lines",
            ));
        }
        let has_columns = match (format, files.as_slice()) {
            (Format::Folder, [root]) => table_of(root)?.is_some(),
            _ => true,
        };
        if !self.columns.is_empty() && !has_columns {
            return Err(ManifestError::manifest(
                &self.manifest,
                "`columns` belongs to manifests with columns, and this is a folder of recordings with their texts",
            ));
        }
        match (format, files.as_slice()) {
            (Format::Parquet, [first, ..]) if layouts::has_recordings(first) => layouts::open_named(files, self),
            (Format::Parquet, _) => Ok(Manifest::Tables(TableManifest::open(files, self, scratch)?)),
            (Format::Table, _) => Ok(self.of_lines(TextTables::open(files, None, self)?)),
            (Format::Nemo, _) => {
                let tars = if self.tars.is_empty() {
                    Vec::new()
                } else {
                    existing(&self.tars, "the tar")?
                };
                Ok(self.of_lines(LineManifest::open(files, tars, self)?))
            }
            (_, [root]) => self.open_folder(root, scratch),
            (_, [_, second, ..]) => Err(ManifestError::manifest(second, "only one folder can be read")),
            (_, []) => Err(ManifestError::manifest(&self.manifest, "it matches no file")),
        }
    }

    /// Refuses a layout with what contradicts it.
    fn check_layout(&self, files: &[PathBuf]) -> Result<(), ManifestError> {
        let wrong = |why: &str| Err(ManifestError::manifest(&self.manifest, why));
        match files {
            _ if self.layout == Layout::Auto => Ok(()),
            _ if self.format != Format::Auto => {
                wrong("`format` is of single manifests; leave it out where `layout` is given")
            }
            _ if !self.tars.is_empty() => {
                wrong("`tars` belongs to manifests of JSON lines; leave it out where `layout` is given")
            }
            [_] => Ok(()),
            _ => wrong("a layout is read of one folder or file"),
        }
    }

    fn open_folder(&self, root: &Path, scratch: &Path) -> Result<Manifest, ManifestError> {
        match table_of(root)? {
            Some(table) => self.open_table(&table, root, scratch),
            None => Ok(Manifest::Folder(AudioFolder::open(root, self)?)),
        }
    }

    pub(super) fn of_lines(&self, corpus: impl Corpus + 'static) -> Manifest {
        Manifest::Lines(LaidOut::in_parts(corpus, self))
    }

    /// A table of the recordings of a folder.
    pub(super) fn open_table(&self, table: &Path, root: &Path, scratch: &Path) -> Result<Manifest, ManifestError> {
        let files = vec![table.to_path_buf()];
        Ok(match format_of(table) {
            Some(Format::Nemo) => self.of_lines(LineManifest::open(files, Vec::new(), self)?),
            Some(Format::Parquet) => Manifest::Tables(TableManifest::open(files, self, scratch)?),
            _ => self.of_lines(TextTables::open(files, Some(root), self)?),
        })
    }
}

/// Objects that are looked for at the same time.
const OBJECTS_AT_ONCE: usize = 16;

/// Where files lie that may be of sets in object storage; objects are opened.
fn in_sets(files: &[String]) -> Result<Vec<PathBuf>, ManifestError> {
    let look = |file: &String| -> Result<PathBuf, ManifestError> {
        let path = path_in_set(file.as_ref()).map_err(|error| ManifestError::manifest(file, error.to_string()))?;
        if is_url(&path) {
            // Why it cannot be read is said here: rights, the bucket, credentials.
            open_input_file(&path).map_err(|error| ManifestError::io(&path, error))?;
        }
        Ok(path)
    };
    // For each object several requests are waited for.
    let threads = if files.iter().any(is_url) { OBJECTS_AT_ONCE } else { 1 };
    on_threads(files, threads, look).into_iter().collect()
}

/// The files of a pattern, all of which have to be there.
fn existing(pattern: &str, what: &str) -> Result<Vec<PathBuf>, ManifestError> {
    // The pattern was checked with the pipeline.
    let files = expand(pattern).map_err(|why| ManifestError::manifest(pattern, why))?;
    let files = in_sets(&files)?;
    let is_there = |file: &PathBuf| is_url(file) || file.is_file() || file.is_dir();
    match files.iter().find(|file| !is_there(file)) {
        None => Ok(files),
        Some(missing) => Err(ManifestError::manifest(
            missing,
            match missing.exists() {
                true => format!("{what} is neither a file nor a folder (a named pipe or a device is not read)"),
                false => format!("{what} is not there (paths are relative to the current directory)"),
            },
        )),
    }
}
