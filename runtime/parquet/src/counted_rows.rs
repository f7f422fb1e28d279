//! Rows of a parquet file, of which none may be missing: the parquet crate takes the end of a column for the end of the rows, and
//! reads nothing of row groups that say they have no rows.

use std::panic::{AssertUnwindSafe, catch_unwind};

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use parquet::arrow::arrow_reader::ParquetRecordBatchReader;
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::ParquetMetaData;

use flow_base::panic_guard::panic_message;

/// How many rows a file has, by its metadata.
///
/// # Errors
/// When the row groups together have another number of rows than the file, or one is negative.
pub fn rows_of_file(metadata: &ParquetMetaData) -> Result<u64> {
    let mut of_groups = 0u64;
    for group in metadata.row_groups() {
        let rows = u64::try_from(group.num_rows())?;
        of_groups = of_groups.saturating_add(rows);
    }
    let stated = metadata.file_metadata().num_rows();
    if u64::try_from(stated).ok() != Some(of_groups) {
        return Err(ParquetError::General(format!(
            "the metadata claim {stated} rows, and the row groups have {of_groups}"
        )));
    }
    Ok(of_groups)
}

/// Calls into the parquet crate; what it panics at in a damaged file is an error of that file.
///
/// # Errors
/// Those of the call, and a panic's message.
pub fn without_panic<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    // Nothing that panicked is called again.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let said = panic_message(panic.as_ref());
        Err(ParquetError::General(format!("it cannot be decoded: {said}")))
    })
}

/// Batches of rows, with an error at their end if there were more or fewer than there should be.
pub struct CountedRows {
    reader: ParquetRecordBatchReader,
    expected: u64,
    /// Rows so far; none once there was an error.
    seen: Option<u64>,
}

impl CountedRows {
    pub fn new(reader: ParquetRecordBatchReader, expected: u64) -> Self {
        CountedRows {
            reader,
            expected,
            seen: Some(0),
        }
    }
}

impl Iterator for CountedRows {
    type Item = std::result::Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        let seen = self.seen?;
        let next = match without_panic(|| Ok(self.reader.next())) {
            Ok(next) => next,
            Err(panic) => Some(Err(panic.into())),
        };
        self.seen = match &next {
            Some(Ok(batch)) => Some(seen + batch.num_rows() as u64),
            Some(Err(_)) | None => None,
        };
        if next.is_none() && seen != self.expected {
            let expected = self.expected;
            return Some(Err(ArrowError::ParquetError(format!(
                "it has {seen} rows, where its metadata say {expected}"
            ))));
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_decoder_is_an_error() {
        let error = without_panic::<()>(|| panic!("no such page {}", 7)).unwrap_err();
        assert!(
            error.to_string().contains("it cannot be decoded: no such page 7"),
            "{error}"
        );
        assert_eq!(without_panic(|| Ok(7)).unwrap(), 7);
    }
}
