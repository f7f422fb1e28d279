//! Parquet files with a column of recordings.

use std::path::{Path, PathBuf};

use flow_corpus::looks::version_of;
use flow_corpus::tree;
use flow_corpus::unpacking::misnamed_or;
use flow_corpus::{Manifest, ManifestError, ReadSettings};
use flow_kind::Storage;
use flow_kind::store::on_threads;
use flow_parquet::ForeignParquet;
use parquet::arrow::arrow_reader::ArrowReaderMetadata;

use super::columns::{Columns, is_audio};
use super::data_set::{Content, File, file_of, is_full, open_files};
use super::listing::{Listed, chosen_files, first_listed, listed, split_of_file};
use super::readme::declared_in_folder;
use crate::at_once::threads_for;
use crate::splits::refuse_other;

fn parquet_of(storage: &Storage, path: &Path) -> Result<ArrowReaderMetadata, ManifestError> {
    let file = ForeignParquet::open(storage, path).map_err(|error| ManifestError::io(path, error))?;
    file.metadata()
        .map_err(|source| misnamed_or(storage, path, ManifestError::parquet(path, source)))
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

pub fn open_parquet(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    _: &Path,
) -> Result<Manifest, ManifestError> {
    let (files, told) = match tree::is_folder(storage, root) {
        true => {
            let all = listed(storage, root, "parquet")?;
            match declared_in_folder(storage, root, &all)? {
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

fn named(path: &Path) -> Listed {
    Listed {
        path: path.to_path_buf(),
        config: String::new(),
        split: String::new(),
    }
}

pub fn open_parquet_files(
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
