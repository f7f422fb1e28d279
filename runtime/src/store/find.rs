//! Looking for a segment in what is committed.

use std::sync::Arc;

use arrow::array::{Array, AsArray, BooleanArray, RecordBatch, StringArray};
use arrow::compute::{can_cast_types, filter_record_batch};
use arrow::datatypes::DataType;

use super::artifact::{Artifact, Data};
use super::record::Record;
use super::{Store, parquet_file};
use crate::digest::Digest;
use crate::error::StageError;
use crate::reject::RejectClass;
use crate::row_json;

/// A committed row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundRow {
    /// `_row`, where the rows have it.
    pub row: Option<u32>,
    /// The other columns as a JSON object, in the order of the file.
    pub values: String,
}

/// The columns by which a row is found, where it has them.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowNames<'r> {
    pub segment_id: Option<&'r str>,
    pub audio_path: Option<&'r str>,
    pub tar_path: Option<&'r str>,
    pub tar_member_name: Option<&'r str>,
}

/// The columns of [`RowNames`].
const NAME_COLUMNS: [&str; 4] = ["segment_id", "audio_path", "tar_path", "tar_member_name"];

/// The columns of a row that are not null, each with its value as JSON.
pub type RowValues = Vec<(String, String)>;

impl Store {
    /// What records of a recipe hold on a port; none where none of them kept it. The columns are those of the first file.
    ///
    /// # Errors
    /// If that file cannot be read.
    pub fn stored_artifact(
        &self,
        recipe: &Digest,
        records: &[Arc<Record>],
        port: &str,
    ) -> Result<Option<Artifact>, StageError> {
        let kept: Vec<&Arc<Record>> = records
            .iter()
            .filter(|record| record.ports.contains_key(port))
            .collect();
        let Some((first, stored)) = kept.first().and_then(|record| Some((record, record.ports.get(port)?))) else {
            return Ok(None);
        };
        let Data::File { path, .. } = self.data_of(recipe, first, port, stored)? else {
            return Ok(None);
        };
        let schema = parquet_file::schema_of(&path)?;
        Ok(Some(self.artifact(recipe, port, schema, kept)?))
    }

    /// The first rows that a record holds on a port; none where it did not keep the port. Lists of floats are left out.
    ///
    /// # Errors
    /// If the data file cannot be read or is not what its record says.
    pub fn first_rows(
        &self,
        recipe: &Digest,
        record: &Record,
        port: &str,
        rows: usize,
    ) -> Result<Vec<RowValues>, StageError> {
        let Some(stored) = record.ports.get(port) else {
            return Ok(Vec::new());
        };
        let Data::File { path, selection } = self.data_of(recipe, record, port, stored)? else {
            return Ok(Vec::new());
        };
        let schema = parquet_file::schema_of(&path)?;
        let mut first = Vec::new();
        for batch in parquet_file::open(&path, stored.bytes, &schema, None, selection.as_deref())? {
            let batch = batch?;
            for row in 0..batch.num_rows().min(rows - first.len()) {
                let mut values = RowValues::new();
                for (field, column) in schema.fields().iter().zip(batch.columns()) {
                    if column.is_valid(row) && !row_json::is_signal(column.data_type()) {
                        values.push((field.name().clone(), row_json::value_text(column.as_ref(), row)?));
                    }
                }
                first.push(values);
            }
            if first.len() == rows {
                break;
            }
        }
        Ok(first)
    }

    /// The rows that a record holds on a port, of those whose names are wanted; none where the port has no column
    /// `segment_id`. `is_wanted` may be asked twice of a row.
    ///
    /// # Errors
    /// If the data file cannot be read or is not what its record says.
    pub fn find_rows(
        &self,
        recipe: &Digest,
        record: &Record,
        port: &str,
        is_wanted: &mut dyn FnMut(&RowNames<'_>) -> bool,
    ) -> Result<Vec<FoundRow>, StageError> {
        let Some(stored) = record.ports.get(port) else {
            return Ok(Vec::new());
        };
        let Data::File { path, selection } = self.data_of(recipe, record, port, stored)? else {
            return Ok(Vec::new());
        };
        let schema = parquet_file::schema_of(&path)?;
        if schema.field_with_name("segment_id").is_err() {
            return Ok(Vec::new());
        }
        // Most files hold none of them, and their other columns, which may be large, are not read.
        let has = |name: &&str| schema.field_with_name(name).is_ok();
        let names: Vec<&str> = NAME_COLUMNS.into_iter().filter(has).collect();
        let mut is_there = false;
        for batch in parquet_file::open(&path, stored.bytes, &schema, Some(&names), selection.as_deref())? {
            if matching(&batch?, is_wanted)?.true_count() > 0 {
                is_there = true;
                break;
            }
        }
        if !is_there {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        for batch in parquet_file::open(&path, stored.bytes, &schema, None, selection.as_deref())? {
            let batch = batch?;
            let matching = matching(&batch, is_wanted)?;
            if matching.true_count() == 0 {
                continue;
            }
            let rows = filter_record_batch(&batch, &matching)?;
            let all: Vec<usize> = (0..rows.num_rows()).collect();
            row_json::rejects(&rows, &all, "", RejectClass::Rule, "", |row| {
                found.push(FoundRow {
                    row: row.row,
                    values: row.values,
                });
            })?;
        }
        Ok(found)
    }
}

fn matching(batch: &RecordBatch, is_wanted: &mut dyn FnMut(&RowNames<'_>) -> bool) -> Result<BooleanArray, StageError> {
    let texts = |name: &str| -> Result<Option<StringArray>, StageError> {
        match batch.column_by_name(name) {
            Some(column) if can_cast_types(column.data_type(), &DataType::Utf8) => {
                let texts = arrow::compute::cast(column, &DataType::Utf8)?;
                Ok(Some(texts.as_string::<i32>().clone()))
            }
            _ => Ok(None),
        }
    };
    let (ids, recordings) = (texts("segment_id")?, texts("audio_path")?);
    let (tars, members) = (texts("tar_path")?, texts("tar_member_name")?);
    Ok((0..batch.num_rows())
        .map(|row| {
            Some(is_wanted(&RowNames {
                segment_id: value(ids.as_ref(), row),
                audio_path: value(recordings.as_ref(), row),
                tar_path: value(tars.as_ref(), row),
                tar_member_name: value(members.as_ref(), row),
            }))
        })
        .collect())
}

fn value(texts: Option<&StringArray>, row: usize) -> Option<&str> {
    texts.filter(|texts| texts.is_valid(row)).map(|texts| texts.value(row))
}
