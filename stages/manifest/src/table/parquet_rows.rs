//! Tables in parquet files.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, RecordBatch, UInt32Array, new_null_array};
use arrow::compute::kernels::cmp::distinct;
use arrow::compute::{cast, filter_record_batch};
use arrow::datatypes::{DataType, SchemaRef};
use arrow::error::ArrowError;
use flow_corpus::ManifestError;
use flow_kind::{Out, RejectClass, StageError};
use flow_parquet::ForeignParquet;
use flow_storage::Storage;
use parquet::arrow::ProjectionMask;

use super::cells::{Cell, CellType, Columns, Rows, of_text};
use super::{check_taken, lacks, schema_of, send, too_many_rows};

/// Rows that are decoded at a time.
const BATCH_ROWS: usize = 2_048;

/// The type of a column; none for types that tables do not support.
fn cell_type(data_type: &DataType) -> Option<CellType> {
    match data_type {
        // A column without a value says nothing of its type.
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View | DataType::Null => Some(CellType::Text),
        DataType::Dictionary(_, values) => cell_type(values),
        DataType::Boolean => Some(CellType::Bool),
        found if found.is_integer() => Some(CellType::Int64),
        found if found.is_floating() => Some(CellType::Float64),
        _ => None,
    }
}

fn open(storage: &Storage, path: &Path) -> Result<ForeignParquet, ManifestError> {
    ForeignParquet::open(storage, path).map_err(|error| ManifestError::io(path, error))
}

fn of_path(path: &Path) -> impl Fn(parquet::errors::ParquetError) -> ManifestError + '_ {
    move |source| ManifestError::parquet(path, source)
}

/// The columns that a file has.
pub(super) fn columns(storage: &Storage, path: &Path) -> Result<Columns, ManifestError> {
    let metadata = open(storage, path)?.metadata().map_err(of_path(path))?;
    let fields = metadata.schema().fields().iter();
    Ok(fields
        .filter_map(|field| Some((field.name().clone(), cell_type(field.data_type())?)))
        .collect())
}

/// Reads all rows of a file.
pub(super) fn read(
    storage: &Storage,
    path: &Path,
    columns: &Columns,
    schema: &SchemaRef,
    out: &mut Out,
) -> Result<(), StageError> {
    let file = open(storage, path)?;
    let metadata = file.metadata().map_err(of_path(path))?;
    let fields = metadata.schema().fields();
    let names: Vec<&str> = fields.iter().map(|field| field.name().as_str()).collect();
    let mut roots = Vec::with_capacity(columns.len());
    for (column, _) in columns {
        let root = names.iter().position(|name| name == column);
        roots.push(root.ok_or_else(|| lacks(path, column, &names))?);
    }
    let mask = ProjectionMask::roots(metadata.parquet_schema(), roots.iter().copied());
    let reader = file.rows(&metadata, mask, BATCH_ROWS, None).map_err(of_path(path))?;
    let (mut first, mut taken, mut first_refused) = (0u32, 0, None);
    for batch in reader {
        let batch = batch?;
        let rows = u32::try_from(batch.num_rows()).map_err(|_| too_many_rows(path))?;
        let next = first.checked_add(rows).ok_or_else(|| too_many_rows(path))?;
        let numbers: ArrayRef = Arc::new(UInt32Array::from_iter_values(first..next));
        out.read(u64::from(rows));
        // By row, the first column with a value that is none of the column's type.
        let mut bad: Vec<Option<&str>> = vec![None; batch.num_rows()];
        let mut cells: Vec<ArrayRef> = vec![numbers];
        for (column, cell) in columns {
            let found = batch.column_by_name(column);
            let found = found.ok_or_else(|| lacks(path, column, &[]))?;
            let (made, kept) = of_type(found, *cell)?;
            for (bad, _) in bad.iter_mut().zip(kept).filter(|(_, kept)| !kept) {
                bad.get_or_insert(column);
            }
            cells.push(made);
        }
        let made = RecordBatch::try_new(SchemaRef::clone(schema), cells)?;
        let refused = refuse(&batch, &bad, first, out)?;
        first_refused = first_refused.or(refused);
        let good: BooleanArray = bad.iter().map(|bad| Some(bad.is_none())).collect();
        taken += good.true_count();
        send(out, filter_record_batch(&made, &good)?);
        first = next;
    }
    check_taken(path, taken, first_refused)
}

/// The values as those of another type, and of each whether it is kept: text is read as in tables of text, and other values
/// are kept where they are the same in both types.
fn of_type(found: &ArrayRef, cell: CellType) -> Result<(ArrayRef, Vec<bool>), ArrowError> {
    let found = match found.data_type() {
        DataType::Dictionary(_, values) => cast(found, values)?,
        _ => ArrayRef::clone(found),
    };
    if found.data_type() == &DataType::Null {
        return Ok((new_null_array(&cell.data_type(), found.len()), vec![true; found.len()]));
    }
    if cell != CellType::Text && cell_type(found.data_type()) == Some(CellType::Text) {
        let columns = vec![(String::new(), cell)];
        let mut rows = Rows::new(&columns, &schema_of(&columns));
        let mut kept = Vec::with_capacity(found.len());
        for text in cast(&found, &DataType::Utf8)?.as_string::<i32>() {
            let value = text.map_or(Some(Cell::Null), |text| of_text(cell, text));
            kept.push(value.is_some());
            rows.push(0, vec![value.unwrap_or(Cell::Null)]);
        }
        return Ok((ArrayRef::clone(rows.take()?.column(1)), kept));
    }
    let made = cast(&found, &cell.data_type())?;
    let mut kept: Vec<bool> = (0..found.len())
        .map(|row| made.is_valid(row) || found.is_null(row))
        .collect();
    if cell != CellType::Text && made.data_type() != found.data_type() {
        let differs = distinct(&cast(&made, found.data_type())?, &found)?;
        for (kept, differs) in kept.iter_mut().zip(differs.values()) {
            *kept &= !differs;
        }
    }
    Ok((made, kept))
}

/// Refuses the rows that have a bad column, with the values that the file has. Gives what is wrong with the first.
fn refuse(found: &RecordBatch, bad: &[Option<&str>], first: u32, out: &mut Out) -> Result<Option<String>, StageError> {
    let mut first_refused = None;
    for (row, column) in bad.iter().enumerate() {
        let Some(column) = *column else { continue };
        let value = match found.column_by_name(column) {
            Some(values) => arrow::util::display::array_value_to_string(values, row)?,
            None => String::new(),
        };
        let short: String = value.chars().take(60).collect();
        let detail = format!("column `{column}`: {short:?} is not of its type");
        first_refused.get_or_insert_with(|| detail.clone());
        out.reject(flow_kind::Reject {
            row: u32::try_from(row).ok().and_then(|row| first.checked_add(row)),
            id: None,
            reason: "bad_value".into(),
            class: RejectClass::Fault,
            detail,
            values: serde_json::json!({ column: short }).to_string(),
        });
    }
    Ok(first_refused)
}
