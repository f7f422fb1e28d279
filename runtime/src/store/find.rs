//! Looking for a segment in what is committed.

use std::sync::Arc;

use arrow::array::{Array, AsArray, BooleanArray, RecordBatch};
use arrow::compute::filter_record_batch;
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

    /// The rows of a segment (by the column `segment_id`) that a record holds on a port; none where the port has no
    /// such column.
    ///
    /// # Errors
    /// If the data file cannot be read or is not what its record says.
    pub fn find_segment(
        &self,
        recipe: &Digest,
        record: &Record,
        port: &str,
        segment_id: &str,
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
        let mut found = Vec::new();
        for batch in parquet_file::open(&path, stored.bytes, &schema, None, selection.as_deref())? {
            let batch = batch?;
            let matching = matching(&batch, segment_id)?;
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

fn matching(batch: &RecordBatch, segment_id: &str) -> Result<BooleanArray, StageError> {
    let ids = batch
        .column_by_name("segment_id")
        .ok_or_else(|| StageError::failed("the rows have no column `segment_id`"))?;
    let ids = arrow::compute::cast(ids, &DataType::Utf8)?;
    let ids = ids.as_string::<i32>();
    Ok((0..ids.len())
        .map(|row| Some(ids.is_valid(row) && ids.value(row) == segment_id))
        .collect())
}
