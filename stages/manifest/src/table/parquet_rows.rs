//! Tables in parquet files.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BooleanArray, RecordBatch, UInt32Array};
use arrow::compute::{cast, filter_record_batch};
use arrow::datatypes::{DataType, SchemaRef};
use flow_runtime::store::ForeignParquet;
use flow_runtime::{Out, RejectClass, StageError};
use parquet::arrow::ProjectionMask;

use super::{CellType, Columns, lacks, send, too_many_rows};
use crate::error::ManifestError;
use crate::read::tables::sheltered;

/// Rows that are decoded at a time.
const BATCH_ROWS: usize = 2_048;

/// The type of a column; none for what a table does not hold.
fn cell_type(data_type: &DataType) -> Option<CellType> {
    match data_type {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Some(CellType::Text),
        DataType::Dictionary(_, values) => cell_type(values),
        DataType::Boolean => Some(CellType::Bool),
        found if found.is_integer() => Some(CellType::Int64),
        found if found.is_floating() => Some(CellType::Float64),
        _ => None,
    }
}

fn open(path: &Path) -> Result<ForeignParquet, ManifestError> {
    ForeignParquet::open(path).map_err(|error| ManifestError::io(path, error))
}

fn of_path(path: &Path) -> impl Fn(parquet::errors::ParquetError) -> ManifestError + '_ {
    move |source| ManifestError::Parquet {
        path: path.to_path_buf(),
        source,
    }
}

/// The columns that a file has.
pub(super) fn columns(path: &Path) -> Result<Columns, ManifestError> {
    sheltered(path, || {
        let metadata = open(path)?.metadata().map_err(of_path(path))?;
        let fields = metadata.schema().fields().iter();
        Ok(fields
            .filter_map(|field| Some((field.name().clone(), cell_type(field.data_type())?)))
            .collect())
    })
}

/// Reads all rows of a file.
pub(super) fn read(path: &Path, columns: &Columns, schema: &SchemaRef, out: &mut Out) -> Result<(), StageError> {
    let mut reader = sheltered(path, || {
        let file = open(path)?;
        let metadata = file.metadata().map_err(of_path(path))?;
        let fields = metadata.schema().fields();
        let names: Vec<&str> = fields.iter().map(|field| field.name().as_str()).collect();
        let mut roots = Vec::with_capacity(columns.len());
        for (column, _) in columns {
            let root = names.iter().position(|name| name == column);
            roots.push(root.ok_or_else(|| lacks(path, column, &names))?);
        }
        let mask = ProjectionMask::roots(metadata.parquet_schema(), roots.iter().copied());
        file.rows(&metadata, mask, BATCH_ROWS, None).map_err(of_path(path))
    })?;
    let mut first = 0u32;
    while let Some(batch) = sheltered(path, || reader.next().transpose().map_err(ManifestError::from))? {
        let rows = u32::try_from(batch.num_rows()).map_err(|_| too_many_rows(path))?;
        let next = first.checked_add(rows).ok_or_else(|| too_many_rows(path))?;
        let numbers: ArrayRef = Arc::new(UInt32Array::from_iter_values(first..next));
        out.read(u64::from(rows));
        // By column, where a value is lost by taking it for one of the column's type.
        let mut good = vec![true; batch.num_rows()];
        let mut cells: Vec<ArrayRef> = vec![numbers];
        for (column, cell) in columns {
            let found = batch.column_by_name(column);
            let found = found.ok_or_else(|| lacks(path, column, &[]))?;
            let made = cast(found, &cell.data_type())?;
            for (row, good) in good.iter_mut().enumerate() {
                *good &= made.is_valid(row) || found.is_null(row);
            }
            cells.push(made);
        }
        let made = RecordBatch::try_new(SchemaRef::clone(schema), cells)?;
        if good.contains(&false) {
            refuse(&batch, &made, &good, first, out)?;
        }
        send(out, filter_record_batch(&made, &BooleanArray::from(good))?);
        first = next;
    }
    Ok(())
}

/// Refuses the rows that are not good. They are named by the numbers of `made`, with the values that the file has.
fn refuse(found: &RecordBatch, made: &RecordBatch, good: &[bool], first: u32, out: &mut Out) -> Result<(), StageError> {
    for (row, _) in good.iter().enumerate().filter(|(_, good)| !**good) {
        let lost = made.schema().fields().iter().skip(1).find_map(|field| {
            let before = found.column_by_name(field.name())?;
            let after = made.column_by_name(field.name())?;
            (before.is_valid(row) && after.is_null(row)).then(|| field.name().clone())
        });
        let column = lost.unwrap_or_default();
        let value = match found.column_by_name(&column) {
            Some(values) => arrow::util::display::array_value_to_string(values, row)?,
            None => String::new(),
        };
        let short: String = value.chars().take(60).collect();
        out.reject(flow_runtime::Reject {
            row: u32::try_from(row).ok().and_then(|row| first.checked_add(row)),
            segment_id: None,
            reason: "bad_value".into(),
            class: RejectClass::Fault,
            detail: format!("column `{column}`: {short:?} is not of its type"),
            values: serde_json::json!({ column: short }).to_string(),
        });
    }
    Ok(())
}
