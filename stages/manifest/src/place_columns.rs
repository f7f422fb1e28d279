//! Where the recordings of rows are, for written manifests.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;

use arrow::array::{Array, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Schema};
use flow_corpus::columns::{self, MANIFEST_COLUMNS, with_extra};
use flow_corpus::extra::EXTRA;
use flow_corpus::places::prefixed;
use flow_kind::{Input, Partition, ROW, StageError};
use flow_storage::is_url;

use crate::extracted::Extracted;

/// Columns by which rows of `manifest.read` say where their recordings are, beside those of a manifest, and their types.
const OF_READ: [(&str, DataType); 4] = [
    ("audio_path", DataType::Utf8),
    ("start", DataType::Float64),
    ("offset", DataType::Int64),
    ("size", DataType::Int64),
];

/// Whether rows have all of these columns. If not, `tar_path` and `tar_member_name` say where the recordings are.
pub(crate) fn of_read(schema: &Schema) -> bool {
    OF_READ.iter().all(|(name, _)| schema.field_with_name(name).is_ok())
}

/// Checks, before a run, the types of the columns above.
pub(crate) fn check(input: &Input) -> Result<(), StageError> {
    if of_read(&input.schema) {
        for (name, data_type) in &OF_READ {
            columns::expect(input, name, data_type)?;
        }
    }
    Ok(())
}

/// The columns that are read of rows: those of a manifest first, `further` ones last.
pub(crate) fn columns_of<'a>(schema: &Schema, further: &'a [String]) -> Vec<&'a str> {
    let mut names: Vec<&str> = MANIFEST_COLUMNS.to_vec();
    let there = OF_READ.map(|(name, _)| name);
    names.extend(there.into_iter().filter(|name| schema.field_with_name(name).is_ok()));
    if with_extra(schema) {
        names.push(EXTRA);
    }
    names.extend(further.iter().map(String::as_str));
    names
}

/// The columns of rows that a manifest has no place for.
pub(crate) fn others(schema: &Schema) -> Vec<&str> {
    let written = columns_of(schema, &[]);
    let names = schema.fields().iter().map(|field| field.name().as_str());
    names.filter(|name| *name != ROW && !written.contains(name)).collect()
}

/// Where the recordings of a batch are.
pub(crate) struct Places<'b> {
    batch: &'b RecordBatch,
    tars: &'b StringArray,
    members: &'b StringArray,
    files: Option<Files<'b>>,
    /// Where the recordings are in their tars, in bytes, of rows that say that much alone.
    ranges: Option<[&'b Int64Array; 2]>,
    /// Rows of one tar mostly follow each other.
    last: RefCell<Option<TarPath<'b>>>,
}

/// The path of a tar with the folder of shards before it.
struct TarPath<'b> {
    tar: &'b str,
    shards: String,
    path: Rc<str>,
    is_there: Cell<Option<bool>>,
}

struct Files<'b> {
    paths: &'b StringArray,
    starts: &'b Float64Array,
    offsets: &'b Int64Array,
    sizes: &'b Int64Array,
}

/// Where one recording is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Place {
    /// The file, where it is one.
    pub file: Option<String>,
    /// The tar that the row names, with the folder of shards before it.
    pub tar_path: Rc<str>,
    /// The recording is in that tar, in no file of its own.
    pub in_tar: bool,
    /// Start of the row in the recording, in seconds; none for its beginning.
    pub offset: Option<f64>,
}

impl<'b> Places<'b> {
    pub fn of(batch: &'b RecordBatch) -> Result<Self, StageError> {
        let files = if of_read(batch.schema_ref()) {
            Some(Files {
                paths: columns::text(batch, "audio_path")?,
                starts: columns::number(batch, "start")?,
                offsets: columns::whole(batch, "offset")?,
                sizes: columns::whole(batch, "size")?,
            })
        } else {
            None
        };
        let has_range = ["offset", "size"].iter().all(|name| {
            let column = batch.column_by_name(name);
            column.is_some_and(|column| *column.data_type() == DataType::Int64)
        });
        let ranges = match has_range && files.is_none() {
            true => Some([columns::whole(batch, "offset")?, columns::whole(batch, "size")?]),
            false => None,
        };
        Ok(Places {
            ranges,
            batch,
            tars: columns::text(batch, "tar_path")?,
            members: columns::text(batch, "tar_member_name")?,
            files,
            last: RefCell::new(None),
        })
    }

    /// Where the recording of a row is. The row's columns of a manifest are not null.
    ///
    /// # Errors
    /// Where the row does not say it.
    pub fn of_row(
        &self,
        row: usize,
        shards: &str,
        extracted: &Extracted<'_>,
        partition: &Partition,
    ) -> Result<Place, StageError> {
        let (tar, member) = (self.tars.value(row), self.members.value(row));
        let named = self.files.as_ref().filter(|files| files.has(row));
        let offset = named.and_then(|files| files.start(row));
        let tar_path = match named {
            // The tar in which the recording was found.
            Some(files) if files.in_tar(row) && shards.is_empty() => self.tar_path(files.paths.value(row), ""),
            _ if tar.is_empty() => self.tar_path("", ""),
            _ => self.tar_path(tar, shards),
        };
        let file = match named {
            Some(files) if !files.in_tar(row) => Some(extracted.seen(files.paths.value(row).as_ref())?),
            Some(_) if tar_path.is_empty() || member.is_empty() => {
                return Err(self.unknown(row, partition, "it is in a tar"));
            }
            None if tar_path.is_empty() => return Err(self.unknown(row, partition, "it has no `tar_path`")),
            _ => None,
        };
        let in_range = self
            .ranges
            .is_some_and(|ranges| ranges.iter().all(|range| range.is_valid(row)));
        if in_range && !self.is_there(&tar_path) {
            return Err(StageError::failed(format!(
                "{partition}: the recordings are in tars, but {tar_path} does not exist"
            ))
            .with_help("`shards` of this stage is the folder that holds the tars, as the stage before says it"));
        }
        Ok(Place {
            in_tar: in_range || named.is_some_and(|files| files.in_tar(row)),
            file,
            tar_path,
            offset,
        })
    }

    /// Whether a tar is there, the one that was named last.
    fn is_there(&self, tar: &str) -> bool {
        let last = self.last.borrow();
        let looked = last
            .as_ref()
            .filter(|last| &*last.path == tar)
            .map(|last| &last.is_there);
        let look = || is_url(tar) || Path::new(tar).is_file();
        match looked {
            Some(known) => {
                let is_there = known.get().unwrap_or_else(look);
                known.set(Some(is_there));
                is_there
            }
            None => look(),
        }
    }

    /// [`prefixed`], made once for equal paths that follow each other.
    fn tar_path(&self, tar: &'b str, shards: &str) -> Rc<str> {
        let mut last = self.last.borrow_mut();
        match &*last {
            Some(last) if last.tar == tar && last.shards == shards => Rc::clone(&last.path),
            _ => {
                let path: Rc<str> = prefixed(tar, shards).into();
                *last = Some(TarPath {
                    tar,
                    shards: shards.to_string(),
                    path: Rc::clone(&path),
                    is_there: Cell::new(None),
                });
                path
            }
        }
    }

    fn unknown(&self, row: usize, partition: &Partition, why: &str) -> StageError {
        let schema = self.batch.schema_ref();
        let missing: Vec<String> = OF_READ
            .iter()
            .filter(|(name, _)| schema.field_with_name(name).is_err())
            .map(|(name, _)| format!("`{name}`"))
            .collect();
        let lacking = if missing.is_empty() {
            "`audio_path`, or `tar_path` and `tar_member_name`, are empty".to_string()
        } else {
            format!("the rows lack the columns {}", missing.join(", "))
        };
        let id = columns::text(self.batch, "segment_id").map_or("", |ids| ids.value(row));
        StageError::failed(format!(
            "{partition}: the recording of {id:?} cannot be found: {why}, and {lacking}"
        ))
        .with_help(
            "rows of manifest.read say in `audio_path, start, \"offset\", size` where their recordings are: select these columns, too",
        )
    }
}

impl Files<'_> {
    fn has(&self, row: usize) -> bool {
        self.paths.is_valid(row) && !self.paths.value(row).is_empty()
    }

    fn in_tar(&self, row: usize) -> bool {
        self.offsets.is_valid(row) && self.sizes.is_valid(row)
    }

    fn start(&self, row: usize) -> Option<f64> {
        self.starts.is_valid(row).then(|| self.starts.value(row))
    }
}
