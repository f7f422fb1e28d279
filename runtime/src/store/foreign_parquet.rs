//! Parquet files that others made, and that may be damaged.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use parquet::errors::{ParquetError, Result};
use parquet::file::reader::{ChunkReader, Length};

/// A parquet file for the reader of the parquet crate. Unlike a plain [`File`] it gives an error where more is read than
/// there is: skipping in the header of a page takes the end of the file for numbers that it skipped, and where a damaged
/// header speaks of two thousand million of them, that takes many minutes.
#[derive(Clone, Debug)]
pub struct ForeignParquet {
    file: Arc<File>,
    length: u64,
}

impl ForeignParquet {
    /// Opens a file.
    ///
    /// # Errors
    /// When it cannot be opened, or is no plain file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if metadata.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        Ok(ForeignParquet {
            file: Arc::new(file),
            length: metadata.len(),
        })
    }
}

impl Length for ForeignParquet {
    fn len(&self) -> u64 {
        self.length
    }
}

impl ChunkReader for ForeignParquet {
    type T = BufReader<FromPlace>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        Ok(BufReader::new(FromPlace {
            file: Arc::clone(&self.file),
            at: start,
        }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        // Before so much memory is taken.
        if start.checked_add(length as u64).is_none_or(|end| end > self.length) {
            return Err(ParquetError::EOF(format!(
                "{length} bytes at {start} go beyond the end of the file, {}",
                self.length
            )));
        }
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, start)?;
        Ok(bytes.into())
    }
}

/// Reads a file from a place on. Its end is an error.
#[derive(Debug)]
pub struct FromPlace {
    file: Arc<File>,
    at: u64,
}

impl Read for FromPlace {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(into, self.at)?;
        if read == 0 && !into.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{AsArray, Int64Array, RecordBatch, StringArray};
    use arrow::datatypes::Int64Type;
    use parquet::arrow::ArrowWriter;
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

    use super::*;

    fn read(path: &Path) -> Result<i64> {
        let reader = ParquetRecordBatchReaderBuilder::try_new(ForeignParquet::open(path)?)?.build()?;
        let mut sum = 0;
        for batch in reader {
            sum += batch?
                .column(0)
                .as_primitive::<Int64Type>()
                .values()
                .iter()
                .sum::<i64>();
        }
        Ok(sum)
    }

    /// A header of a page whose first unknown field is a list of 2^31 - 1 doubles, right up to the end of the file.
    #[test]
    fn a_header_that_skips_beyond_the_end_is_an_error_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.parquet");
        let numbers = Int64Array::from_iter_values(0..1000);
        let texts = StringArray::from_iter_values((0..1000).map(|n| format!("text {n}")));
        let batch = RecordBatch::try_from_iter([("n", Arc::new(numbers) as _), ("t", Arc::new(texts) as _)]).unwrap();
        let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        assert_eq!(read(&path).unwrap(), 499_500);

        let mut bytes = std::fs::read(&path).unwrap();
        // The first page begins after the magic number: a field of a new kind (9 on from 0, a list), then 15 for "a count
        // follows" with 7 for doubles, then the count.
        bytes[4..11].copy_from_slice(&[0x99, 0xF7, 0xFF, 0xFF, 0xFF, 0xFF, 0x07]);
        std::fs::write(&path, &bytes).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(!error.is_empty());

        bytes.truncate(bytes.len() / 2);
        std::fs::write(&path, &bytes).unwrap();
        assert!(read(&path).is_err());
        let foreign = ForeignParquet::open(&path).unwrap();
        assert!(foreign.get_bytes(4, 1 << 40).is_err() && foreign.get_bytes(u64::MAX, 1).is_err());
        assert!(ForeignParquet::open(folder.path()).is_err());
    }
}
