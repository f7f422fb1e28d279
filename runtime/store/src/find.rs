//! Looking for rows in what is committed.

use std::sync::Arc;

use arrow::array::{Array, AsArray, BooleanArray, RecordBatch, StringArray};
use arrow::compute::{can_cast_types, filter_record_batch};
use arrow::datatypes::DataType;

use super::artifact::Artifact;
use super::record::Record;
use super::{Store, parquet_file};
use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_base::reject::RejectClass;
use flow_base::row_json;

/// A committed row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundRow {
    /// `_row`, where the rows have it.
    pub row: Option<u32>,
    /// The other columns as a JSON object, in the order of the file.
    pub values: String,
}

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
        let path = self.data_path(recipe, first, port, stored)?;
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
        let (path, selection) = (self.data_path(recipe, record, port, stored)?, &stored.selection);
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

    /// The rows that a record holds on a port, of those that are wanted by their texts in `columns`; none where the port has
    /// not the first of these columns. `is_wanted` is given a text or none for each of them, and may be asked twice of a row.
    ///
    /// # Errors
    /// If the data file cannot be read or is not what its record says.
    pub fn find_rows(
        &self,
        recipe: &Digest,
        record: &Record,
        port: &str,
        columns: &[&str],
        is_wanted: &mut dyn FnMut(&[Option<&str>]) -> bool,
    ) -> Result<Vec<FoundRow>, StageError> {
        let Some(stored) = record.ports.get(port) else {
            return Ok(Vec::new());
        };
        let (path, selection) = (self.data_path(recipe, record, port, stored)?, &stored.selection);
        let schema = parquet_file::schema_of(&path)?;
        let id_column = match columns.first() {
            Some(first) if schema.field_with_name(first).is_ok() => *first,
            _ => return Ok(Vec::new()),
        };
        // Most files hold none of them, and their other columns, which may be large, are not read.
        let has = |name: &&str| schema.field_with_name(name).is_ok();
        let there: Vec<&str> = columns.iter().copied().filter(has).collect();
        let mut is_there = false;
        for batch in parquet_file::open(&path, stored.bytes, &schema, Some(&there), selection.as_deref())? {
            if matching(&batch?, columns, is_wanted)?.true_count() > 0 {
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
            let matching = matching(&batch, columns, is_wanted)?;
            if matching.true_count() == 0 {
                continue;
            }
            let rows = filter_record_batch(&batch, &matching)?;
            let all: Vec<usize> = (0..rows.num_rows()).collect();
            row_json::rejects(&rows, id_column, &all, "", RejectClass::Rule, "", |row| {
                found.push(FoundRow {
                    row: row.row,
                    values: row.values,
                });
            })?;
        }
        Ok(found)
    }
}

fn matching(
    batch: &RecordBatch,
    columns: &[&str],
    is_wanted: &mut dyn FnMut(&[Option<&str>]) -> bool,
) -> Result<BooleanArray, StageError> {
    let texts = |name: &str| -> Result<Option<StringArray>, StageError> {
        match batch.column_by_name(name) {
            Some(column) if can_cast_types(column.data_type(), &DataType::Utf8) => {
                let texts = arrow::compute::cast(column, &DataType::Utf8)?;
                Ok(Some(texts.as_string::<i32>().clone()))
            }
            _ => Ok(None),
        }
    };
    let columns: Vec<Option<StringArray>> = columns.iter().map(|name| texts(name)).collect::<Result<_, _>>()?;
    let mut of_row = Vec::with_capacity(columns.len());
    Ok((0..batch.num_rows())
        .map(|row| {
            of_row.clear();
            for texts in &columns {
                let texts = texts.as_ref().filter(|texts| texts.is_valid(row));
                of_row.push(texts.map(|texts| texts.value(row)));
            }
            Some(is_wanted(&of_row))
        })
        .collect())
}
