//! Rows with what their layout was taken for, and without those of other splits.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use flow_corpus::files::{Format, format_of_name};
use flow_corpus::folder::{first_of, tables};
use flow_corpus::lines::LineManifest;
use flow_corpus::manifest_row::{ManifestRow, refuse_by_rule};
use flow_corpus::tables::TableManifest;
use flow_corpus::text_tables::TextTables;
use flow_corpus::{Corpus, LaidOut, Manifest, ManifestError, Part, ReadSettings, Take};
use flow_kind::StageError;
use flow_storage::Storage;
use serde_json::Value;

use super::folder_entries::entries_of;
use super::splits::{ALL, chosen, is_of_split};
use super::told::Told;

/// The column that says the split of a row.
const COLUMN: &str = "split";
/// Most splits of a column.
const MOST_SPLITS: usize = 100;

/// The split of a row; none where it names none.
type SplitOf = fn(&Path, &ManifestRow) -> Option<String>;
/// Why a row is left out; none where it is read.
type LeftOut = dyn Fn(&ManifestRow) -> Option<String> + Send + Sync;

/// Rows of some corpus.
pub struct ChosenRows {
    rows: Box<dyn Corpus>,
    told: String,
    left_out: Option<Box<LeftOut>>,
    /// Files that decide which rows are left out.
    files: Vec<PathBuf>,
}

impl ChosenRows {
    pub fn all(rows: impl Corpus + 'static, told: impl Into<String>) -> ChosenRows {
        ChosenRows {
            rows: Box::new(rows),
            told: told.into(),
            left_out: None,
            files: Vec::new(),
        }
    }

    /// Leaves out rows (`other_split`), as the `files` decide it.
    pub fn without(
        self,
        files: Vec<PathBuf>,
        left_out: impl Fn(&ManifestRow) -> Option<String> + Send + Sync + 'static,
    ) -> ChosenRows {
        ChosenRows {
            left_out: Some(Box::new(left_out)),
            files,
            ..self
        }
    }

    /// Leaves out rows of other splits than the chosen ones of `all`.
    ///
    /// # Errors
    /// Where there is no such split.
    fn of_splits(
        self,
        all: &BTreeSet<String>,
        split_of: SplitOf,
        root: &Path,
        settings: &ReadSettings,
    ) -> Result<ChosenRows, ManifestError> {
        let names: Vec<&String> = all.iter().collect();
        let (places, told) = chosen(&names, &settings.split, root)?;
        let read: BTreeSet<String> = places.into_iter().map(|place| names[place].clone()).collect();
        let told = told
            .into_iter()
            .fold(self.told.clone(), |all, told| format!("{all}; {told}"));
        let rows = ChosenRows { told, ..self };
        if read.len() == all.len() {
            return Ok(rows);
        }
        let folder = root.to_path_buf();
        Ok(rows.without(Vec::new(), move |row| match split_of(&folder, row) {
            Some(split) if read.contains(&split) => None,
            Some(split) => Some(format!("the row is of the split {split:?}")),
            None => Some("the row is of no split".into()),
        }))
    }

    /// Calls `each` with the rows that are not refused, as long as it gives true.
    fn visit(&self, storage: &Storage, mut each: impl FnMut(&ManifestRow) -> bool) -> Result<(), ManifestError> {
        let mut stopped = false;
        for part in self.rows.parts() {
            let read = self.rows.each(storage, &part, &mut |_, row, _| {
                stopped = row.is_ok_and(|row| !each(&row));
                match stopped {
                    true => Err(StageError::failed("stopped")),
                    false => Ok(()),
                }
            });
            match read {
                Err(_) if stopped => break,
                read => read.map_err(|error| ManifestError::rows(error.to_string(), None))?,
            }
        }
        Ok(())
    }

    /// The splits of all rows; none where a row has none.
    fn splits(
        &self,
        storage: &Storage,
        of: impl Fn(&ManifestRow) -> Option<String>,
    ) -> Result<Option<BTreeSet<String>>, ManifestError> {
        let mut found = Some(BTreeSet::new());
        self.visit(storage, |row| {
            found = found.take().zip(of(row)).map(|(mut found, split)| {
                found.insert(split);
                found
            });
            found = found.take().filter(|found| found.len() <= MOST_SPLITS);
            found.is_some()
        })?;
        Ok(found.filter(|found| !found.is_empty()))
    }

    /// Rows of a table that may have a column of splits, which `split` chooses from.
    ///
    /// # Errors
    /// Where `split` names what it has not.
    pub fn by_column(
        self,
        storage: &Storage,
        root: &Path,
        settings: &ReadSettings,
    ) -> Result<ChosenRows, ManifestError> {
        let of = |row: &ManifestRow| split_of_column(root, row);
        if settings.split == ALL {
            return Ok(self);
        }
        if !settings.split.is_empty() {
            let splits = self.splits(storage, of)?.ok_or_else(|| {
                let why =
                    "`split` belongs to layouts with splits, and this is a table without a column `split` in all rows";
                ManifestError::manifest(root, why)
            })?;
            return self.of_splits(&splits, split_of_column, root, settings);
        }
        let mut has_column = false;
        self.visit(storage, |row| {
            has_column = of(row).is_some();
            false
        })?;
        let told = match has_column {
            true => format!(
                "{}; it has a column `split`: rows of all splits are read (`split: train` reads those of one)",
                self.told
            ),
            false => self.told,
        };
        Ok(ChosenRows { told, ..self })
    }
}

fn split_of_column(_: &Path, row: &ManifestRow) -> Option<String> {
    let extra = row.extra.as_ref().filter(|extra| extra.contains(COLUMN))?;
    let extra: Value = serde_json::from_str(extra).ok()?;
    extra.get(COLUMN)?.as_str().map(str::to_owned)
}

/// The folder right below `root` that a recording is in, if it is called by a split.
fn split_of_path(root: &Path, row: &ManifestRow) -> Option<String> {
    let below = row.wanted.files.first()?.strip_prefix(root).ok()?;
    let mut parts = below.iter();
    let first = parts.next()?.to_str().filter(|name| is_of_split(name))?;
    parts.next().map(|_| first.to_owned())
}

impl Corpus for ChosenRows {
    fn told(&self) -> String {
        let more = self.rows.told();
        if more.is_empty() {
            self.told.clone()
        } else {
            format!("{}; {more}", self.told)
        }
    }

    fn parts(&self) -> Vec<Part> {
        let mut parts = self.rows.parts();
        for part in &mut parts {
            part.files.extend(self.files.iter().cloned());
        }
        parts
    }

    fn has_files(&self, part: &Part) -> bool {
        self.rows.has_files(part)
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        let Some(left_out) = &self.left_out else {
            return self.rows.each(storage, part, take);
        };
        self.rows.each(storage, part, &mut |line, row, values| {
            let row = row.and_then(|row| match left_out(&row) {
                Some(why) => Err(refuse_by_rule("other_split", why)),
                None => Ok(row),
            });
            take(line, row, values)
        })
    }
}

/// Opens a table of the recordings of a folder, which may be in the folder of a split. Of a table above folders of splits, those rows
/// are read whose recordings are in the folders of the chosen splits.
///
/// # Errors
/// When it cannot be opened, or there is no such split.
pub fn open_table(
    storage: &Storage,
    table: &Path,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let files = vec![table.to_path_buf()];
    let name = table.strip_prefix(root).unwrap_or(table);
    let folder = table.parent().unwrap_or(Path::new(""));
    let mut told = format!("AudioFolder with {}", name.display());
    let others = tables("")
        .into_iter()
        .filter(|other| table.file_name().is_none_or(|name| name != other.as_str()));
    let others: Vec<String> = others.collect();
    if let Some(other) = first_of(storage, folder, &others) {
        let other = other.strip_prefix(root).unwrap_or(&other).display().to_string();
        told = format!("{told}; {other} is not read");
    }
    let is_own = folder == root;
    let entries = entries_of(storage, root);
    let splits = entries.folders.iter().filter(|name| is_of_split(name));
    let splits: Vec<&str> = splits.filter(|_| is_own).map(String::as_str).collect();
    let rows = match format_of_name(table) {
        Some(Format::Parquet) => {
            if !settings.split.is_empty() && is_own {
                let why = "`split` belongs to layouts with splits; rows of metadata.parquet are read together";
                return Err(ManifestError::manifest(root, why));
            }
            if !splits.is_empty() {
                told = format!("{told}; rows of all its folders are read: {}", splits.join(", "));
            }
            let manifest = Box::new(TableManifest::open(storage, files, settings, scratch)?);
            return Ok(Told::first(told, manifest));
        }
        Some(Format::Nemo) => ChosenRows::all(LineManifest::open(storage, files, Vec::new(), settings)?, told),
        _ => ChosenRows::all(TextTables::open(storage, files, Some(root), settings)?, told),
    };
    if !is_own {
        return Ok(LaidOut::of_lines(rows, settings));
    }
    let of_folders = match splits.is_empty() {
        true => None,
        false => rows.splits(storage, |row| split_of_path(root, row))?,
    };
    let rows = match of_folders {
        Some(splits) => rows.of_splits(&splits, split_of_path, root, settings)?,
        None => rows.by_column(storage, root, settings)?,
    };
    Ok(LaidOut::of_lines(rows, settings))
}
