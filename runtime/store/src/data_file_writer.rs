//! A data file whose row groups are written while rows still arrive.

use std::fs::File;
use std::path::{Path, PathBuf};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;

use super::StoreError;
use super::atomic::Files;
use super::parquet_file::{self, Encoder, WrittenFile};
use flow_base::error::StageError;

/// Writes the rows of one port of one partition to a temporary file, which gets the same bytes as if all rows were
/// written at once. Dropping it removes the file.
pub struct DataFileWriter {
    files: Files,
    path: PathBuf,
    schema: SchemaRef,
    encoder: Option<Encoder<File>>,
}

impl DataFileWriter {
    pub(super) fn create(files: &Files, folder: &Path, schema: &SchemaRef) -> Result<Self, StoreError> {
        let (path, file) = files.create_temporary(folder)?;
        Ok(DataFileWriter {
            files: files.clone(),
            path,
            schema: schema.clone(),
            encoder: Some(Encoder::new(file, schema)),
        })
    }

    /// Takes rows with the columns of the schema. True: all that were taken before this batch are written.
    pub fn push(&mut self, batch: RecordBatch) -> Result<bool, StoreError> {
        match &mut self.encoder {
            Some(encoder) => encoder
                .push(batch)
                .map_err(|error| StoreError::parquet_written(&self.path, error)),
            None => Ok(true),
        }
    }

    fn end(&mut self) -> Result<WrittenFile, StoreError> {
        let ended = parquet::errors::ParquetError::General("it was ended before".into());
        let finished = self.encoder.take().map_or(Err(ended), Encoder::finish);
        finished.map_err(|error| StoreError::parquet_written(&self.path, error))
    }

    /// Finishes the file. It is not flushed to the disk yet.
    pub(super) fn finish(mut self) -> Result<(PathBuf, WrittenFile), StoreError> {
        let written = self.end()?;
        Ok((std::mem::take(&mut self.path), written))
    }

    /// Reads all rows back into memory and removes the file.
    pub fn read_back(mut self) -> Result<Vec<RecordBatch>, StageError> {
        let written = self.end()?;
        parquet_file::open(&self.path, written.bytes, &self.schema, None, None)?.collect()
    }
}

impl Drop for DataFileWriter {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            let _ = self.files.remove(&self.path);
        }
    }
}
