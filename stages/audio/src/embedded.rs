//! Recordings that are stored within another file, named by a path with a fragment.
//!
//! - `data.arrow#offset=4096&size=20304`: bytes of the file as they are there, such as of an Arrow file or a Kaldi archive.
//! - `train.parquet#column=0&row_group=2&row=17`: the value of a leaf column of a Parquet file. Columns and row groups are counted
//!   from 0, rows from the first of their row group.
//! - `data.arrow#column=0&batch=4096&row=17`: the value of a column of an Arrow file, where it is compressed in the record batch that
//!   begins at this byte.
//!
//! A path of another form names a file of its own, also if it has a `#`.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::DataType;
use flow_parquet::{CountedRows, ForeignParquet};
use flow_storage::{FileVersion, Storage, is_url};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, RowSelection, RowSelector};
use rustix::fs::MemfdFlags;

use crate::arrow_file::ArrowFile;
use crate::decode::{MAX_RECORDING_BYTES, read_range};
use crate::error::AudioError;

/// Parquet files whose metadata a thread keeps.
const MOST_OPEN: usize = 16;

/// A recording within another file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Embedded {
    pub file: PathBuf,
    pub place: EmbeddedPlace,
}

/// Where in the file it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmbeddedPlace {
    /// In bytes.
    Bytes { offset: u64, size: u64 },
    /// A value of a Parquet file.
    Value {
        column: usize,
        row_group: usize,
        row: usize,
    },
    /// A value in a record batch of an Arrow file, which begins at the byte `batch`.
    InBatch { column: usize, batch: u64, row: usize },
}

/// The path of bytes of a file.
pub fn path_of_bytes(file: &str, offset: u64, size: u64) -> String {
    format!("{file}#offset={offset}&size={size}")
}

/// The path of a value of a Parquet file.
pub fn path_of_value(file: &str, column: usize, row_group: usize, row: usize) -> String {
    format!("{file}#column={column}&row_group={row_group}&row={row}")
}

/// The path of a value in a record batch of an Arrow file, which begins at the byte `batch`.
pub fn path_in_batch(file: &str, column: usize, batch: u64, row: usize) -> String {
    format!("{file}#column={column}&batch={batch}&row={row}")
}

/// The file that a path leads to: of a recording within another file the latter, else the path itself.
pub fn file_of(path: &Path) -> &Path {
    split(path).map_or(path, |(file, _)| Path::new(file))
}

/// The recording within another file that a path names; none where it names a file.
pub fn parse(path: &Path) -> Option<Embedded> {
    split(path).map(|(file, place)| Embedded {
        file: file.into(),
        place,
    })
}

fn split(path: &Path) -> Option<(&str, EmbeddedPlace)> {
    let (file, fragment) = path.to_str()?.rsplit_once('#')?;
    let mut fields = fragment.split('&');
    let mut field = |name: &str| fields.next()?.strip_prefix(name)?.strip_prefix('=');
    let place = if fragment.starts_with("offset=") {
        EmbeddedPlace::Bytes {
            offset: number(field("offset")?)?,
            size: number(field("size")?)?,
        }
    } else {
        let column = usize::try_from(number(field("column")?)?).ok()?;
        let (name, value) = fields.next()?.split_once('=')?;
        let value = number(value)?;
        let row = usize::try_from(number(fields.next()?.strip_prefix("row=")?)?).ok()?;
        match name {
            "row_group" => EmbeddedPlace::Value {
                column,
                row_group: usize::try_from(value).ok()?,
                row,
            },
            "batch" => EmbeddedPlace::InBatch {
                column,
                batch: value,
                row,
            },
            _ => return None,
        }
    };
    (fields.next().is_none() && !file.is_empty()).then_some((file, place))
}

/// Digits alone, without leading zeros: each place has one name.
fn number(digits: &str) -> Option<u64> {
    let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    is_plain.then(|| digits.parse().ok()).flatten()
}

impl Embedded {
    /// The bytes of the recording.
    ///
    /// # Errors
    /// When the file cannot be read or has no such bytes or value.
    pub fn read(&self, storage: &Storage) -> Result<Vec<u8>, AudioError> {
        match self.place {
            EmbeddedPlace::Bytes { offset, size } => read_range(storage, &self.file, offset, size),
            EmbeddedPlace::Value { column, row_group, row } => self.value(storage, column, row_group, row),
            EmbeddedPlace::InBatch { column, batch, row } => self.in_batch(storage, column, batch, row),
        }
    }

    /// The same as a file of its own, which is in memory.
    pub(crate) fn into_file(self, storage: &Storage) -> Result<std::fs::File, AudioError> {
        let bytes = self.read(storage)?;
        let in_memory = || -> io::Result<std::fs::File> {
            let file = std::fs::File::from(rustix::fs::memfd_create("recording", MemfdFlags::CLOEXEC)?);
            std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0)?;
            Ok(file)
        };
        in_memory().map_err(|source| AudioError::read(self.file, source))
    }

    fn in_batch(&self, storage: &Storage, column: usize, batch: u64, row: usize) -> Result<Vec<u8>, AudioError> {
        thread_local! {
            static LAST: RefCell<Option<ReadColumn>> = const { RefCell::new(None) };
        }
        let path = &self.file;
        let version = version_of(path).map_err(|source| AudioError::read(path, source))?;
        let last = LAST.take().filter(|last| {
            last.file == *path && last.version == version && (last.column, last.batch) == (column, batch)
        });
        let values = match last {
            Some(last) => last.values,
            None => ArrowFile::open(storage, path)?.column_of(batch, column)?,
        };
        let value = (row < values.len())
            .then(|| leaf_value(&values.slice(row, 1)))
            .flatten();
        LAST.set(Some(ReadColumn {
            file: path.clone(),
            version,
            column,
            batch,
            values,
        }));
        let no_bytes = || AudioError::Decode(format!("{}: row {row} of batch {batch} has no bytes", path.display()));
        within_limit(path, value.ok_or_else(no_bytes)?)
    }

    fn value(&self, storage: &Storage, column: usize, row_group: usize, row: usize) -> Result<Vec<u8>, AudioError> {
        thread_local! {
            static OPEN: RefCell<OpenFiles> = RefCell::default();
        }
        // Taken while it is used: a panic of the decoder leaves none that is half read.
        let mut open = OPEN.with_borrow_mut(std::mem::take);
        let value = open.value(storage, &self.file, column, row_group, row);
        OPEN.set(open);
        value
    }
}

/// The column of a record batch that was read last: values are often read one after the other.
struct ReadColumn {
    file: PathBuf,
    version: Option<FileVersion>,
    column: usize,
    batch: u64,
    values: ArrayRef,
}

/// The version of a file; none of an object, which does not change while it is open.
fn version_of(path: &Path) -> io::Result<Option<FileVersion>> {
    match is_url(path) {
        true => Ok(None),
        false => Ok(Some(FileVersion::of_file(&std::fs::metadata(path)?))),
    }
}

fn within_limit(path: &Path, value: Vec<u8>) -> Result<Vec<u8>, AudioError> {
    match value.len() as u64 {
        size if size > MAX_RECORDING_BYTES => Err(AudioError::TooLarge {
            path: path.to_owned(),
            size,
            limit: MAX_RECORDING_BYTES,
        }),
        _ => Ok(value),
    }
}

/// Parquet files that a thread reads values of.
#[derive(Default)]
struct OpenFiles {
    files: HashMap<PathBuf, OpenFile>,
    /// Behind the value that was read last: values are often read one after the other.
    cursor: Option<Cursor>,
}

struct OpenFile {
    parquet: ForeignParquet,
    metadata: ArrowReaderMetadata,
    /// None of an object, which does not change while it is open.
    version: Option<FileVersion>,
}

struct Cursor {
    file: PathBuf,
    column: usize,
    row_group: usize,
    /// The row that comes next.
    row: usize,
    rows: CountedRows,
}

impl OpenFiles {
    fn value(
        &mut self,
        storage: &Storage,
        path: &Path,
        column: usize,
        row_group: usize,
        row: usize,
    ) -> Result<Vec<u8>, AudioError> {
        let read = |source| AudioError::read(path, source);
        let damaged = |why: String| AudioError::Decode(format!("{}: {why}", path.display()));
        let version = version_of(path).map_err(read)?;
        if self.files.get(path).is_none_or(|file| file.version != version) {
            self.cursor = None;
            if self.files.len() >= MOST_OPEN {
                self.files.clear();
            }
            let parquet = ForeignParquet::open_in_blocks(storage, path).map_err(read)?;
            let metadata = parquet.metadata();
            let metadata = metadata.map_err(|error| unreadable(&parquet, path, error.to_string()))?;
            let file = OpenFile {
                parquet,
                metadata,
                version,
            };
            self.files.insert(path.to_owned(), file);
        }
        let file = &self.files[path];
        let is_next = |cursor: &&mut Cursor| {
            cursor.file == path && (cursor.column, cursor.row_group, cursor.row) == (column, row_group, row)
        };
        if self.cursor.as_mut().filter(is_next).is_none() {
            let groups = file.metadata.metadata().row_groups();
            let rows = groups
                .get(row_group)
                .and_then(|group| usize::try_from(group.num_rows()).ok())
                .filter(|rows| row < *rows)
                .ok_or_else(|| damaged(format!("it has no row {row} in a row group {row_group}")))?;
            let schema = file.metadata.parquet_schema();
            if column >= schema.num_columns() {
                return Err(damaged(format!("it has no column {column}")));
            }
            let selection = RowSelection::from(vec![RowSelector::skip(row), RowSelector::select(rows - row)]);
            let mask = ProjectionMask::leaves(schema, [column]);
            let rows = file
                .parquet
                .rows_of(&file.metadata, &[row_group], mask, 1, Some(selection));
            self.cursor = Some(Cursor {
                file: path.to_owned(),
                column,
                row_group,
                row,
                rows: rows.map_err(|error| unreadable(&file.parquet, path, error.to_string()))?,
            });
        }
        // After an error the rows behind it are not read on.
        let Some(mut cursor) = self.cursor.take() else {
            return Err(damaged("no rows".into()));
        };
        let batch = match cursor.rows.next() {
            Some(Ok(batch)) => batch,
            Some(Err(error)) => return Err(unreadable(&file.parquet, path, error.to_string())),
            None => return Err(damaged(format!("it has no row {row} in a row group {row_group}"))),
        };
        cursor.row += 1;
        self.cursor = Some(cursor);
        let value = batch.columns().first().and_then(leaf_value);
        let value = value.ok_or_else(|| damaged(format!("row {row} of row group {row_group} has no bytes")))?;
        within_limit(path, value)
    }
}

fn unreadable(parquet: &ForeignParquet, path: &Path, why: String) -> AudioError {
    match parquet.unreadable() {
        Some(error) => AudioError::read(path, io::Error::other(error.to_string())),
        None => AudioError::Decode(format!("{}: {why}", path.display())),
    }
}

/// The first value of the one leaf of an array; none where it is null or no bytes.
fn leaf_value(array: &ArrayRef) -> Option<Vec<u8>> {
    if array.is_empty() || array.is_null(0) {
        return None;
    }
    match array.data_type() {
        // Of Arrow files all fields are read, of Parquet files the leaf alone.
        DataType::Struct(_) => {
            let fields = array.as_struct();
            leaf_value(fields.column_by_name("bytes").or(fields.columns().first())?)
        }
        DataType::Binary => Some(array.as_binary::<i32>().value(0).to_vec()),
        DataType::LargeBinary => Some(array.as_binary::<i64>().value(0).to_vec()),
        DataType::BinaryView => Some(array.as_binary_view().value(0).to_vec()),
        _ => None,
    }
}

#[cfg(test)]
#[path = "embedded_tests.rs"]
mod tests;
