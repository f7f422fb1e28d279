//! The bytes of a data file as the page reader asks for them. The library's own reader of files duplicates the file's
//! descriptor, seeks and reads for each header and each page: a decision that reads two columns of thousands of small files makes
//! more than half a million system calls that way.

use std::io::Read;
use std::ops::Range;

use bytes::{Buf, Bytes};
use parquet::errors::Result;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{ChunkReader, Length};

use crate::foreign_parquet::ForeignParquet;

/// Bytes at the end of a file that are read at once: the footer, and all of a small file.
const TAIL: u64 = 1 << 16;
/// Most bytes of column chunks that are read before they are asked for.
const AT_ONCE: u64 = 1 << 21;

/// A file, of which some ranges have been read. It may be damaged, as those of others.
pub struct ColumnChunks {
    file: ForeignParquet,
    /// Where each begins in the file.
    read: Vec<(u64, Bytes)>,
}

impl ColumnChunks {
    pub fn new(file: ForeignParquet) -> Result<ColumnChunks> {
        let (length, read) = (file.len(), Vec::new());
        let mut chunks = ColumnChunks { file, read };
        chunks.read(length.saturating_sub(TAIL)..length)?;
        Ok(chunks)
    }

    /// Reads the chunks of these leaf columns, in the order of the file, as far as they are few bytes.
    pub fn read_leaves(&mut self, metadata: &ParquetMetaData, wanted: impl Fn(usize) -> bool) -> Result<()> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut left = AT_ONCE;
        for group in metadata.row_groups() {
            for (_, column) in group.columns().iter().enumerate().filter(|(leaf, _)| wanted(*leaf)) {
                let first = column.dictionary_page_offset().unwrap_or(column.data_page_offset());
                let (Ok(start), Ok(length)) = (u64::try_from(first), u64::try_from(column.compressed_size())) else {
                    continue;
                };
                // What a damaged file says is left to the page reader.
                let end = start.saturating_add(length).min(self.len());
                if length > left || start >= end || self.at(start, length).is_some() {
                    continue;
                }
                left -= length;
                match ranges.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => ranges.push(start..end),
                }
            }
        }
        ranges.into_iter().try_for_each(|range| self.read(range))
    }

    fn read(&mut self, range: Range<u64>) -> Result<()> {
        let bytes = self.file.get_bytes(range.start, (range.end - range.start) as usize)?;
        self.read.push((range.start, bytes));
        Ok(())
    }

    /// A range, if it has been read.
    fn at(&self, start: u64, length: u64) -> Option<Bytes> {
        self.read.iter().find_map(|(first, bytes)| {
            let from = start.checked_sub(*first)?;
            let to = from.checked_add(length)?;
            (to <= bytes.len() as u64).then(|| bytes.slice(from as usize..to as usize))
        })
    }
}

impl Length for ColumnChunks {
    fn len(&self) -> u64 {
        self.file.len()
    }
}

impl ChunkReader for ColumnChunks {
    type T = Box<dyn Read>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        let read = self.read.iter().find_map(|(first, bytes)| {
            let from = usize::try_from(start.checked_sub(*first)?).ok()?;
            (from < bytes.len()).then(|| bytes.slice(from..))
        });
        Ok(match read {
            // A header does not go beyond its chunk.
            Some(read) => Box::new(read.reader()),
            None => Box::new(self.file.get_read(start)?),
        })
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        let read = self.at(start, length as u64);
        read.map_or_else(|| self.file.get_bytes(start, length), Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranges that were read before, that were not, and that lie across the border between the two.
    #[test]
    fn all_ranges_are_those_of_the_file() {
        let content: Vec<u8> = (0..200_000u32).flat_map(u32::to_le_bytes).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &content).unwrap();
        let length = content.len() as u64;
        let mut chunks = ColumnChunks::new(ForeignParquet::open_local(file.path()).unwrap()).unwrap();
        chunks.read(1000..5000).unwrap();
        for start in [0, 900, 1000, 3000, 4990, length - TAIL - 10, length - TAIL, length - 5] {
            for bytes in [0, 1, 5, 100, 4000] {
                let end = start + bytes;
                match chunks.get_bytes(start, bytes as usize) {
                    Ok(found) => assert_eq!(found, content[start as usize..end as usize]),
                    Err(_) => assert!(end > length, "{bytes} at {start}"),
                }
            }
            let mut found = vec![0; 5];
            chunks.get_read(start).unwrap().read_exact(&mut found).unwrap();
            assert_eq!(found, content[start as usize..start as usize + 5]);
        }
        assert!(chunks.get_bytes(u64::MAX, usize::MAX).is_err());
        assert_eq!(chunks.get_read(u64::MAX).unwrap().read(&mut [0]).unwrap_or(0), 0);
        // A file that became shorter after it was opened.
        let opened = ForeignParquet::open_local(file.path()).unwrap();
        file.as_file().set_len(length - 1).unwrap();
        assert!(ColumnChunks::new(opened).is_err());
    }
}
