//! The column `_row`.

use arrow::array::{Array, ArrayRef, UInt32Array};

use crate::error::StageError;

/// The column that every row of a manifest-like batch carries: its number within its partition, given by
/// the source in reference order. `UInt32`, never null.
pub const ROW: &str = "_row";

/// `_row` as numbers, or what is wrong with it.
pub fn row_numbers(column: &ArrayRef) -> Result<&UInt32Array, StageError> {
    let rows = column
        .as_any()
        .downcast_ref::<UInt32Array>()
        .ok_or_else(|| StageError::failed(format!("column `{ROW}` is {}, it must be UInt32", column.data_type())))?;
    if rows.null_count() > 0 {
        return Err(StageError::failed(format!(
            "column `{ROW}` has nulls; every row carries its number"
        )));
    }
    Ok(rows)
}
