//! The kind `manifest.table`: a file of any columns, as a lookup table for `sql`.

mod cells;
mod parquet_rows;
mod text_rows;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_corpus::ManifestError;
use flow_corpus::quoting::Quoting;
use flow_kind::event::Event;
use flow_kind::{
    Body, Conservation, Context, Inputs, Kind, Out, OutputPort, Partition, Port, ROW, ReadOnce, Shape, Source,
    SourcePartition, StageError, WithShared,
};
use flow_storage::Storage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use cells::CellType;
use cells::Columns;

/// The one partition.
const ALL: &str = "all";

/// Reads a file as a table of any columns: comma- or tab-separated text, JSON lines or parquet.
///
/// # What it does
///
/// Gives one row for each line or row of the file, in their order, in one partition. It is meant as a lookup table for
/// `sql`, which reads it whole (`whole: [speakers]` there): metadata of speakers, a list of recordings to leave out,
/// prices. Manifests of recordings are read by `manifest.read`.
///
/// Columns are those that `columns` declares, sorted by name; others of the file are left out. Where none are declared,
/// they are those of the file, whose beginning is then read when the pipeline is checked:
///
/// - `.csv` (fields may be in double quotes, RFC 4180) and `.tsv` (the same where all its quotes are written so, else quotes
///   are letters like others; `quoting`): the names of the
///   heading, which such a file must have; all are text.
/// - `.jsonl`, `.ndjson` and `.json`, one object to a line: the members of the first object, sorted by name, with the types
///   of their values there (a null is text). Members that are lists or objects are text, in JSON.
/// - `.parquet`: its columns; whole numbers are `int64`, others `float64`. Columns that are no text, no numbers and not
///   true or false are left out. A column of nulls alone, whose type is null, fits any type.
///
/// An empty field of a number, or of true or false, is null; an empty text is a text. A member that a line lacks is null.
/// A line that cannot be read is refused with class `fault`: `bad_line` (a quote that is not closed, another number of
/// fields than the heading, no JSON object), `not_utf8`, or `bad_value` (a value that is not of its column's type, with the
/// column and the value). A file of which every row is refused is an error.
///
/// The file is read whole; text may have 1 GiB. Its bytes belong to the key of the stage, not its path.
///
/// # Example
///
/// ```yaml
/// speakers:
///   uses: manifest.table
///   with: {path: speakers.csv, columns: {speaker: text, age: int64}}
/// adults:
///   uses: sql
///   from: {rows: scan, speakers: speakers}
///   with:
///     whole: [speakers]
///     join: SELECT rows.*, speakers.age FROM rows LEFT JOIN speakers ON rows.speaker_id = speakers.speaker
///     rejects: [{reason: too_young, when: age IS NULL OR age < 18}]
///     query: SELECT * FROM input
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TableSettings {
    /// The file.
    pub path: PathBuf,
    /// What kind of file it is.
    #[serde(default)]
    pub format: TableFormat,
    /// The columns, each with its type: `text`, `int64`, `float64` or `bool`. Those of the file if none are named.
    #[serde(default)]
    pub columns: BTreeMap<String, CellType>,
    /// Whether fields of CSV and TSV may be in double quotes.
    #[serde(default)]
    pub quoting: Quoting,
}

/// What the checks and bodies of a stage share.
#[derive(Clone, Debug, Default)]
pub struct TableShared {
    storage: Storage,
    /// The columns that the file has.
    columns: ReadOnce<Columns>,
}

/// What kind of file it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TableFormat {
    /// By the ending of its name.
    #[default]
    Auto,
    /// Separated by commas.
    Csv,
    /// Separated by tabs.
    Tsv,
    /// One JSON object to a line.
    Jsonl,
    /// Parquet.
    Parquet,
}

impl TableSettings {
    /// The format, where it is known: never `auto`.
    fn format(&self) -> Result<TableFormat, StageError> {
        if self.format != TableFormat::Auto {
            return Ok(self.format);
        }
        let extension = self.path.extension().and_then(|extension| extension.to_str());
        match extension.unwrap_or_default().to_ascii_lowercase().as_str() {
            "csv" => Ok(TableFormat::Csv),
            "tsv" => Ok(TableFormat::Tsv),
            "jsonl" | "ndjson" | "json" => Ok(TableFormat::Jsonl),
            "parquet" => Ok(TableFormat::Parquet),
            _ => {
                let message = format!("the ending of {} does not say what it is", self.path.display());
                let help = "set `format` to csv, tsv, jsonl or parquet";
                Err(StageError::setting("path", message).with_help(help))
            }
        }
    }

    /// The columns of the table.
    fn columns(&self, shared: &TableShared) -> Result<Arc<Columns>, StageError> {
        if self.path.as_os_str().is_empty() {
            return Err(StageError::setting("path", "no file is named"));
        }
        let format = self.format()?;
        let columns = if self.columns.is_empty() {
            let name = format!("{format:?} {:?} {}", self.quoting, self.path.display());
            let found = shared
                .columns
                .get(&name, || columns_of(&shared.storage, &self.path, format, self.quoting));
            found.map_err(|error| error.of_setting("path"))?
        } else {
            Arc::new(self.columns.iter().map(|(name, cell)| (name.clone(), *cell)).collect())
        };
        match columns.iter().find(|(name, _)| name == ROW || name.is_empty()) {
            None => Ok(columns),
            Some((name, _)) => {
                let message = format!("a column cannot be called `{name}` here");
                Err(StageError::setting("columns", message).with_help("declare the other columns in `columns`"))
            }
        }
    }
}

/// The columns that a file has, from its beginning (of parquet, from its end).
fn columns_of(storage: &Storage, path: &Path, format: TableFormat, quoting: Quoting) -> Result<Columns, ManifestError> {
    match format {
        TableFormat::Parquet => parquet_rows::columns(storage, path),
        _ => text_rows::columns(storage, path, format, quoting),
    }
}

fn schema_of(columns: &Columns) -> SchemaRef {
    let row = Field::new(ROW, DataType::UInt32, false);
    let cells = columns
        .iter()
        .map(|(name, cell)| Field::new(name, cell.data_type(), true));
    Arc::new(Schema::new(std::iter::once(row).chain(cells).collect::<Vec<_>>()))
}

pub struct Table;

impl Kind for Table {
    const NAME: &'static str = "manifest.table";
    const VERSION: u32 = 5;
    const INPUTS: &'static [flow_kind::InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "the rows of the file, in its order")];
    const URL_SETTINGS: &'static [(&'static str, flow_kind::UrlUse)] = &[("path", flow_kind::UrlUse::Read)];
    type Settings = WithShared<TableSettings, TableShared>;

    fn shape(settings: &Self::Settings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape {
            conservation: Conservation::Rows,
            ..Shape::source(vec![Port::new(
                "rows",
                schema_of(&*settings.columns(&settings.shared)?),
            )])
        })
    }

    fn set_storage(settings: &mut Self::Settings, storage: &Storage) {
        settings.shared.storage = storage.clone();
    }

    fn open(settings: &Self::Settings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(Reader {
            path: settings.path.clone(),
            format: settings.format()?,
            columns: settings.columns(&settings.shared)?,
            quoting: settings.quoting,
            context: context.clone(),
        })))
    }

    fn sources(settings: &Self::Settings) -> Vec<(&'static str, PathBuf)> {
        vec![("path", settings.path.clone())]
    }

    /// The columns with their types; the digest of the file is in the key of the partition.
    fn identity(settings: &Self::Settings) -> serde_json::Value {
        let columns = match settings.columns(&settings.shared) {
            Ok(columns) => serde_json::json!(*columns),
            Err(error) => error.to_string().into(), // Nothing runs with it: `shape` fails with the same error.
        };
        let format = settings.format().ok();
        serde_json::json!({"columns": columns, "format": format, "quoting": settings.quoting})
    }
}

struct Reader {
    path: PathBuf,
    format: TableFormat,
    columns: Arc<Columns>,
    quoting: Quoting,
    context: Context,
}

impl Source for Reader {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        Ok(vec![SourcePartition::new(
            Partition::new(ALL),
            vec![self.path.clone()],
            "",
        )])
    }

    fn read(&mut self, _: &Partition, out: &mut Out) -> Result<(), StageError> {
        let schema = schema_of(&self.columns);
        match self.format {
            TableFormat::Parquet => parquet_rows::read(&self.context.storage, &self.path, &self.columns, &schema, out),
            format => {
                let told = text_rows::read(
                    &self.context.storage,
                    &self.path,
                    format,
                    self.quoting,
                    &self.columns,
                    &schema,
                    out,
                )?;
                if let Some(told) = told {
                    let message = format!("{}: {told}", self.path.display());
                    self.context.events.send(Event::Note { message });
                }
                Ok(())
            }
        }
    }
}

/// The error of an invalid file.
fn wrong(path: &Path, why: impl Into<String>) -> ManifestError {
    ManifestError::manifest(path, why)
}

/// Checks that not all rows of a file were refused, as a lookup table would be empty then. `first` is what is wrong with the
/// first that was.
fn check_taken(path: &Path, taken: usize, first: Option<String>) -> Result<(), StageError> {
    match first {
        Some(first) if taken == 0 => {
            Err(wrong(path, format!("none of its rows can be read; the first: {first}")).into())
        }
        _ => Ok(()),
    }
}

/// The error of a declared column that the file does not have.
fn lacks(path: &Path, column: &str, found: &[&str]) -> ManifestError {
    wrong(
        path,
        format!("it has no column `{column}`; its columns are {}", found.join(", ")),
    )
}

/// The message of the error for a row beyond the limit.
fn too_many_rows(path: &Path) -> ManifestError {
    wrong(path, "it has more rows than fit in 32 bits")
}

fn send(out: &mut Out, batch: RecordBatch) {
    if batch.num_rows() > 0 {
        out.send(0, batch);
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
