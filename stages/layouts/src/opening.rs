//! Opens a manifest by its format.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use flow_corpus::tree;
use flow_corpus::unpacking::{misnamed, unpacking};
use flow_hub::DatasetReference;
use flow_kind::open_input_file;
use flow_kind::store::{on_threads, path_in_set, place_in_set};
use flow_storage::{Location, Storage, is_url};

use flow_corpus::files::{Format, expand, format_of};
use flow_corpus::folder::table_of;
use flow_corpus::lines::LineManifest;
use flow_corpus::tables::TableManifest;
use flow_corpus::text_tables::TextTables;
use flow_corpus::written_set::check_set;
use flow_corpus::{Fetch, LaidOut, Layout, Manifest, ManifestError, ReadSettings};

use crate::at_once::threads_for;
use crate::chosen_rows::{ChosenRows, open_table};
use crate::hugging_face::{Kind, Selected};
use crate::told::Told;
use crate::{hugging_face, tables_below, transcripts, webdataset, zip_folder};

/// The dataset of the hub that `manifest` names, if it names one.
///
/// # Errors
/// What is wrong with the reference.
pub fn dataset(settings: &ReadSettings) -> Result<Option<DatasetReference>, String> {
    match DatasetReference::parse(&settings.manifest) {
        None if settings.manifest.starts_with("hf://") => {
            Err("a dataset of the hub is written hf://datasets/OWNER/NAME[@REVISION][/CONFIG][:SPLIT]".into())
        }
        parsed => parsed.transpose().map_err(|error| error.to_string()),
    }
}

/// Opens the manifest. `progress` receives lines about downloads from the hub, and cancels them by false.
pub fn open(
    storage: &Storage,
    settings: &ReadSettings,
    scratch: &Path,
    progress: &mut dyn FnMut(&str) -> bool,
) -> Result<Manifest, ManifestError> {
    let wrong = |why: String| ManifestError::manifest(&settings.manifest, why);
    if let Some(dataset) = dataset(settings).map_err(wrong)? {
        let others = hugging_face::Others {
            open,
            open_selected,
            is_recognised: crate::is_recognised,
        };
        return hugging_face::open_dataset(storage, &dataset, settings, scratch, &others, progress);
    }
    if settings.fetch != Fetch::Files {
        return Err(wrong(
            "`fetch` is of datasets of the hub; files in object storage are always read in parts".into(),
        ));
    }
    let is_auto = settings.layout == Layout::Auto && settings.format == Format::Auto && settings.tars.is_empty();
    let selected = |path: &Path| tree::answered(|| hugging_face::selected_at(storage, path, &settings.split))?;
    let files = match existing(storage, &settings.manifest, "the manifest") {
        Err(error) => {
            let path = Path::new(&settings.manifest);
            let may_be_config =
                is_auto && hugging_face::data_set_above(path).is_some_and(|above| has_readme(storage, above));
            let Some((root, selected)) = may_be_config.then(|| selected(path)).transpose()?.flatten() else {
                return Err(error);
            };
            return open_selected(storage, &root, &selected, settings, scratch);
        }
        Ok(files) => files,
    };
    check_layout(settings, &files)?;
    if let ([root], true) = (files.as_slice(), is_auto)
        && let Some((root, selected)) = selected(root)?
    {
        return open_selected(storage, &root, &selected, settings, scratch);
    }
    open_files(storage, files, settings, scratch)
}

/// Whether a README.md is in a folder; what else is in a bucket is listed then. One that may not be listed has none.
fn has_readme(storage: &Storage, folder: &Path) -> bool {
    let can_be_listed = match Location::of_path(folder) {
        Ok(Location::Object(url)) => url.can_be_listed(),
        place => place.is_ok(),
    };
    let is_there = || tree::answered(|| tree::is_file(storage, &folder.join("README.md"))).unwrap_or(false);
    can_be_listed && is_there() && tree::list_all(storage, folder).unwrap_or(false)
}

/// Opens what a README.md declares of the data set at `root`.
pub fn open_selected(
    storage: &Storage,
    root: &Path,
    selected: &Selected,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let files = || selected.files.iter().map(|(file, _)| root.join(file));
    let with_splits = || {
        files()
            .zip(selected.files.iter().map(|(_, split)| split.clone()))
            .collect()
    };
    let told = selected.told.clone();
    // The files are those of the split.
    let of_files = &ReadSettings {
        split: String::new(),
        ..settings.clone()
    };
    // Lists beside tars of NeMo and Shar have their texts, so their folder is read.
    let folder = files().next().and_then(|first| first.parent().map(Path::to_path_buf));
    let is_of_others = |folder: &PathBuf| tree::answered(|| webdataset::is_of_others(storage, folder));
    if let (Kind::Tars, Some(folder)) = (&selected.kind, folder)
        && is_of_others(&folder)?
    {
        return open_files(storage, vec![folder], of_files, scratch);
    }
    let manifest = match selected.kind {
        Kind::Folder => open_files(storage, files().collect(), settings, scratch)?,
        Kind::Lists => open_files(storage, files().collect(), of_files, scratch)?,
        Kind::Tables => tables_below::open_tables(storage, root, files().collect(), of_files, scratch)?,
        Kind::Parquet => {
            let told = String::new();
            hugging_face::open_parquet_files(storage, root, with_splits(), told, of_files)?
        }
        Kind::Tars => webdataset::open_files(storage, root, with_splits(), String::new(), of_files)?,
        Kind::Zips => {
            let files: Vec<PathBuf> = files().collect();
            zip_folder::open_archives(storage, root, &files, String::new(), of_files, scratch)?
        }
    };
    Ok(Told::of(manifest, told))
}

fn open_files(
    storage: &Storage,
    files: Vec<PathBuf>,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    if let ([root], Format::Auto, true) = (files.as_slice(), settings.format, settings.tars.is_empty())
        && let Some(manifest) = crate::open(storage, root, settings, scratch)?
    {
        return Ok(manifest);
    }
    let mut format = settings.format;
    for file in &files {
        let found = match settings.format {
            Format::Auto => format_of(storage, file).ok_or_else(|| {
                if let Some(why) = misnamed(storage, file) {
                    return ManifestError::manifest(file, why);
                }
                if let Some(command) = unpacking(file) {
                    let why = match file.extension().is_some_and(|extension| extension == "zip") {
                        true => format!("it is an archive without `metadata.csv` or `.jsonl`; {command}"),
                        false => format!("it is compressed; {command}"),
                    };
                    return ManifestError::manifest(file, why);
                }
                let why = match file.extension().and_then(|extension| extension.to_str()) {
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
        let is_folder = tree::is_folder(storage, file);
        if is_folder != (found == Format::Folder) {
            let why = if is_folder {
                "it is a folder, not a file"
            } else {
                "it is a file, not a folder"
            };
            return Err(ManifestError::manifest(file, why));
        }
        if found != Format::Folder {
            check_set(storage, file)?;
        }
        format = found;
    }
    if !settings.tars.is_empty() && format != Format::Nemo {
        return Err(ManifestError::manifest(
            &settings.tars,
            "`tars` belongs to manifests of JSON lines",
        ));
    }
    let (mut has_columns, mut below) = (true, Vec::new());
    if let (Format::Folder, [root]) = (format, files.as_slice()) {
        has_columns = table_of(storage, root)?.is_some();
        if !has_columns {
            below = tables_below::find(storage, root)?;
        }
    }
    if let (false, [root]) = (below.is_empty(), files.as_slice()) {
        return tables_below::open(storage, root, below, settings, scratch);
    }
    let may_have_splits = matches!((format, settings.tars.as_str()), (Format::Table | Format::Nemo, ""));
    if !settings.split.is_empty() && has_columns && !may_have_splits {
        return Err(ManifestError::manifest(
            &settings.manifest,
            "`split` belongs to layouts with splits, and this is not one of them",
        ));
    }
    if !settings.columns.is_empty() && !has_columns {
        return Err(ManifestError::manifest(
            &settings.manifest,
            "`columns` belongs to manifests with columns, and this is a folder of recordings with their texts",
        ));
    }
    match (format, files.as_slice()) {
        (Format::Parquet, [first, ..]) if hugging_face::has_recordings(storage, first) => {
            hugging_face::open_named(storage, files, settings)
        }
        (Format::Parquet, _) => {
            let told = counted(files.len(), "Parquet table");
            let manifest = Box::new(TableManifest::open(storage, files, settings, scratch)?);
            Ok(Told::first(told, manifest))
        }
        (Format::Table, [first, ..]) => {
            let (first, told) = (first.clone(), counted(files.len(), "text table"));
            let rows = ChosenRows::all(TextTables::open(storage, files, None, settings)?, told);
            Ok(LaidOut::of_lines(rows.by_column(storage, &first, settings)?, settings))
        }
        (Format::Nemo, [first, ..]) => {
            let tars = if settings.tars.is_empty() {
                Vec::new()
            } else {
                existing(storage, &settings.tars, "the tar")?
            };
            let (first, told) = (first.clone(), counted(files.len(), "file") + " of JSON lines");
            let rows = ChosenRows::all(LineManifest::open(storage, files, tars, settings)?, told);
            Ok(LaidOut::of_lines(rows.by_column(storage, &first, settings)?, settings))
        }
        (_, [root]) => open_folder(storage, settings, root, scratch),
        (_, [_, second, ..]) => Err(ManifestError::manifest(second, "only one folder can be read")),
        (_, []) => Err(ManifestError::manifest(&settings.manifest, "it matches no file")),
    }
}

/// Refuses a layout with what contradicts it.
fn check_layout(settings: &ReadSettings, files: &[PathBuf]) -> Result<(), ManifestError> {
    let wrong = |why: &str| Err(ManifestError::manifest(&settings.manifest, why));
    match files {
        _ if settings.layout == Layout::Auto => Ok(()),
        _ if settings.format != Format::Auto => {
            wrong("`format` is of single manifests; leave it out where `layout` is given")
        }
        _ if !settings.tars.is_empty() => {
            wrong("`tars` belongs to manifests of JSON lines; leave it out where `layout` is given")
        }
        [_] => Ok(()),
        _ => wrong("a layout is read of one folder or file"),
    }
}

/// How many of something there are.
fn counted(count: usize, what: &str) -> String {
    match count {
        1 => format!("a {what}"),
        count => format!("{count} {what}s"),
    }
}

fn open_folder(
    storage: &Storage,
    settings: &ReadSettings,
    root: &Path,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    match table_of(storage, root)? {
        Some(table) => open_table(storage, &table, root, settings, scratch),
        None => transcripts::open(storage, root, settings),
    }
}

/// Where files and folders lie that may be of sets in object storage, or in copies of them; objects are opened.
fn in_sets(storage: &Storage, files: &[String]) -> Result<Vec<PathBuf>, ManifestError> {
    let look = |file: &String| -> Result<PathBuf, ManifestError> {
        let wrong = |error: &dyn std::fmt::Display| ManifestError::manifest(file, error.to_string());
        let path = path_in_set(storage, file.as_ref()).map_err(|error| wrong(&error))?;
        let in_set = |path: &Path| place_in_set(storage, path).map_err(|error| wrong(&error));
        let url = match Location::of_path(&path) {
            Ok(Location::Object(url)) => url,
            Ok(Location::Local(path)) if path.is_dir() || !path.exists() => return Ok(in_set(&path)?.unwrap_or(path)),
            Ok(Location::Local(path)) => return Ok(path),
            Err(error) => return Err(wrong(&error)),
        };
        // Why it cannot be read is said here: rights, the bucket, credentials.
        let missing: std::io::Error = match url.key() {
            "" => ErrorKind::NotFound.into(),
            _ => match open_input_file(storage, &path) {
                Ok(_) => {
                    storage.remember_file(&url);
                    return Ok(path);
                }
                Err(error) => error,
            },
        };
        // S3 denies those who may not list all of a bucket what is not there.
        let is_denied = missing.kind() == ErrorKind::PermissionDenied;
        let can_be_listed = url.can_be_listed() || tree::is_folder(storage, &path);
        if (is_denied || missing.kind() == ErrorKind::NotFound) && can_be_listed {
            let path = match in_set(&path)? {
                Some(place) if open_input_file(storage, &place).is_ok() => return Ok(place),
                place => place.unwrap_or_else(|| path.clone()),
            };
            match tree::list_all(storage, &path) {
                Ok(true) => return Ok(path),
                Err(error) if !is_denied => return Err(ManifestError::io(&path, error)),
                Ok(false) | Err(_) => {}
            }
        }
        Err(ManifestError::io(&path, missing))
    };
    on_threads(files, threads_for(files.iter()), look).into_iter().collect()
}

/// The files of a pattern, all of which have to be there.
fn existing(storage: &Storage, pattern: &str, what: &str) -> Result<Vec<PathBuf>, ManifestError> {
    // The pattern was checked with the pipeline.
    let files = expand(pattern).map_err(|why| ManifestError::manifest(pattern, why))?;
    let files = in_sets(storage, &files)?;
    let is_there = |file: &PathBuf| is_url(file) || file.is_file() || file.is_dir();
    match files.iter().find(|file| !is_there(file)) {
        None => Ok(files),
        Some(missing) => Err(ManifestError::manifest(
            missing,
            match missing.exists() {
                true => format!("{what} is neither a file nor a folder (a named pipe or a device is not read)"),
                false => format!("{what} does not exist (paths are relative to the current directory)"),
            },
        )),
    }
}
