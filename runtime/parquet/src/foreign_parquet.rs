//! Parquet files that others made, and that may be damaged.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use arrow::datatypes::{DataType, Field, FieldRef, Fields};
use bytes::Bytes;
use flow_storage::{InputFile, Storage, StorageError};
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, RowGroups, RowSelection,
};
use parquet::arrow::{ProjectionMask, parquet_to_arrow_field_levels};
use parquet::column::page::{Page, PageIterator, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{ChunkReader, Length};
use parquet::file::serialized_reader::SerializedPageReader;

use crate::counted_rows::{CountedRows, rows_of_file, without_panic};
use crate::thrift::{Fault, check_metadata, page_bytes};
use flow_base::regular_file::{open_input_file, open_regular_file};

/// Bytes at the end of a file: the length of the metadata (4 bytes) and the magic number.
const TAIL: u64 = 8;

/// Most bytes of a page. By default writers end pages at one megabyte.
const LARGEST_PAGE: i64 = 512 << 20;

/// Longest page header that is accepted; it may contain minimum and maximum texts.
const LONGEST_HEADER: u64 = 64 << 20;

/// A parquet file that is read by the parquet crate, after checks of values that the crate does not validate:
///
/// - Where more is read than there is, it gets an error. Skipping in the header of a page takes the end of a file for
///   numbers that were skipped, and where a damaged header mentions two thousand million of them, that takes many minutes.
/// - A page may not declare more values than it can hold, or of more bytes than its column has, for which gigabytes would
///   be set aside.
/// - Columns may not end before or after the number of rows that the metadata say: [`CountedRows`].
/// - No header has a list of two thousand million booleans, which take no bytes, but a long time to be passed over.
/// - Fields have the types that the crate takes them for, and schemas are not nested without end (`thrift.rs`).
/// - Columns are within the file, and what the crate panics at is an error.
#[derive(Clone, Debug)]
pub struct ForeignParquet {
    file: Arc<Noting>,
    length: u64,
}

/// A file that notes its first I/O error. The decoder's error does not distinguish an I/O error from damage.
#[derive(Debug)]
struct Noting {
    file: InputFile,
    failed: OnceLock<String>,
}

impl Noting {
    fn note<T>(&self, read: io::Result<T>) -> io::Result<T> {
        read.inspect_err(|error| {
            if error.raw_os_error().is_some() || StorageError::in_io(error).is_some() {
                let _ = self.failed.set(error.to_string());
            }
        })
    }
}

impl ForeignParquet {
    /// Opens a file, on this machine or, by its URL, in object storage.
    ///
    /// # Errors
    /// When it cannot be opened, or is not a regular file.
    pub fn open(storage: &Storage, path: &Path) -> io::Result<Self> {
        Self::of(open_input_file(storage, path)?)
    }

    /// Opens a file of this machine.
    ///
    /// # Errors
    /// As of [`ForeignParquet::open`].
    pub fn open_local(path: &Path) -> io::Result<Self> {
        Self::of(open_regular_file(path)?.into())
    }

    /// As [`ForeignParquet::open`], for values that are read in no order, again and again: those of an object come from blocks that are
    /// kept on this machine ([`InputFile::in_blocks`]).
    ///
    /// # Errors
    /// As of [`ForeignParquet::open`].
    pub fn open_in_blocks(storage: &Storage, path: &Path) -> io::Result<Self> {
        Self::of(open_input_file(storage, path)?.in_blocks())
    }

    fn of(file: InputFile) -> io::Result<Self> {
        Ok(ForeignParquet {
            length: file.length()?,
            file: Arc::new(Noting {
                file,
                failed: OnceLock::new(),
            }),
        })
    }

    /// The first I/O error, if there was one: the decoder's error is then not due to damage of the file.
    pub fn unreadable(&self) -> Option<&str> {
        self.file.failed.get().map(String::as_str)
    }
}

impl ForeignParquet {
    /// Its metadata.
    ///
    /// # Errors
    /// When it is damaged, or says one number of rows for the file and another one for its row groups.
    pub fn metadata(&self) -> Result<ArrowReaderMetadata> {
        self.metadata_with(ArrowReaderOptions::new())
    }

    /// Its metadata, with options of the parquet crate, such as those that leave out the Arrow schema of the writer.
    ///
    /// # Errors
    /// As [`ForeignParquet::metadata`].
    pub fn metadata_with(&self, options: ArrowReaderOptions) -> Result<ArrowReaderMetadata> {
        checked_metadata(self, options)
    }

    /// Its rows in batches: of the columns in `mask`, and of `selection` where there is one. `metadata` is its own.
    ///
    /// # Errors
    /// When the metadata contradicts itself.
    pub fn rows(
        &self,
        metadata: &ArrowReaderMetadata,
        mask: ProjectionMask,
        batch_size: usize,
        selection: Option<RowSelection>,
    ) -> Result<CountedRows> {
        let all: Vec<usize> = (0..metadata.metadata().num_row_groups()).collect();
        self.rows_of(metadata, &all, mask, batch_size, selection)
    }

    /// As [`ForeignParquet::rows`], of these row groups alone: nothing of the others is read. A selection counts the rows of
    /// these groups.
    ///
    /// # Errors
    /// When the metadata contradicts itself.
    pub fn rows_of(
        &self,
        metadata: &ArrowReaderMetadata,
        groups: &[usize],
        mask: ProjectionMask,
        batch_size: usize,
        selection: Option<RowSelection>,
    ) -> Result<CountedRows> {
        // With offsets of 32 bits a batch of texts that would need gigabytes is an error of the reader's, whatever offsets the
        // writer had: a dictionary of one long text makes a small file.
        // Views and dictionaries are read as plain texts too: a part of such a column holds on to the texts of the whole.
        let is_text =
            |data_type: &DataType| matches!(data_type, DataType::LargeUtf8 | DataType::Utf8View | DataType::Utf8);
        let plain = |field: &FieldRef| match field.data_type() {
            DataType::LargeUtf8 | DataType::Utf8View => Arc::new(Field::clone(field).with_data_type(DataType::Utf8)),
            DataType::Dictionary(_, values) if is_text(values) => {
                Arc::new(Field::clone(field).with_data_type(DataType::Utf8))
            }
            _ => Arc::clone(field),
        };
        let fields: Fields = metadata.schema().fields().iter().map(plain).collect();
        let levels = || parquet_to_arrow_field_levels(metadata.parquet_schema(), mask, Some(&fields));
        let levels = without_panic(levels)?;
        let groups = Groups::new(self.clone(), Arc::clone(metadata.metadata()), groups)?;
        let batch_size = batch_size.min(groups.rows);
        let expected = selection.as_ref().map_or(groups.rows, RowSelection::row_count);
        let reader = || ParquetRecordBatchReader::try_new_with_row_groups(&levels, &groups, batch_size, selection);
        Ok(CountedRows::new(without_panic(reader)?, expected as u64))
    }
}

/// The metadata of a file.
///
/// # Errors
/// When it is damaged, or says one number of rows for the file and another one for its row groups.
pub fn checked_metadata(file: &impl ChunkReader, options: ArrowReaderOptions) -> Result<ArrowReaderMetadata> {
    check_footer(file)?;
    let metadata = without_panic(|| ArrowReaderMetadata::load(file, options))?;
    rows_of_file(metadata.metadata())?;
    check_places(metadata.metadata(), file.len())?;
    Ok(metadata)
}

/// Looks at the metadata at the end of the file, where there are any; what else may be wrong there is found when they are
/// read.
fn check_footer(file: &impl ChunkReader) -> Result<()> {
    let Some(place) = file.len().checked_sub(TAIL) else {
        return Ok(());
    };
    let tail = file.get_bytes(place, TAIL as usize)?;
    let length = u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]);
    let Some(start) = place.checked_sub(u64::from(length)).filter(|_| tail.ends_with(b"PAR1")) else {
        return Ok(());
    };
    let bytes = file.get_bytes(start, length as usize)?;
    check_metadata(&bytes).map_err(|fault| general(format!("the metadata: {fault}")))
}

/// Columns are within the file.
fn check_places(metadata: &ParquetMetaData, file_length: u64) -> Result<()> {
    for column in metadata.row_groups().iter().flat_map(RowGroupMetaData::columns) {
        let (first, length) = (column.data_page_offset(), column.compressed_size());
        let start = column.dictionary_page_offset().unwrap_or(first);
        let end = start.checked_add(length).and_then(|end| u64::try_from(end).ok());
        let is_within = end.is_some_and(|end| end <= file_length);
        if !is_within
            || [first, start, length, column.num_values()]
                .iter()
                .any(|number| *number < 0)
        {
            return Err(general(format!(
                "the metadata: column `{}` with {} values in {length} bytes at {start}, of a file of {file_length} bytes",
                column.column_path(),
                column.num_values(),
            )));
        }
    }
    Ok(())
}

/// Row groups of a file.
#[derive(Clone)]
struct Groups {
    file: Arc<ForeignParquet>,
    metadata: Arc<ParquetMetaData>,
    chosen: Arc<[usize]>,
    rows: usize,
}

impl Groups {
    fn new(file: ForeignParquet, metadata: Arc<ParquetMetaData>, chosen: &[usize]) -> Result<Self> {
        let mut rows = 0usize;
        for group in chosen.iter().filter_map(|group| metadata.row_groups().get(*group)) {
            rows = rows
                .checked_add(usize::try_from(group.num_rows())?)
                .ok_or_else(|| ParquetError::General("too many rows".into()))?;
        }
        Ok(Groups {
            file: Arc::new(file),
            metadata,
            chosen: chosen.into(),
            rows,
        })
    }
}

impl RowGroups for Groups {
    fn num_rows(&self) -> usize {
        self.rows
    }

    fn column_chunks(&self, column: usize) -> Result<Box<dyn PageIterator>> {
        Ok(Box::new(Chunks {
            groups: self.clone(),
            column,
            next: 0,
        }))
    }

    fn row_groups(&self) -> Box<dyn Iterator<Item = &RowGroupMetaData> + '_> {
        let group = |group: &usize| self.metadata.row_groups().get(*group);
        Box::new(self.chosen.iter().filter_map(group))
    }

    fn metadata(&self) -> &ParquetMetaData {
        &self.metadata
    }
}

/// One column in the row groups.
struct Chunks {
    groups: Groups,
    column: usize,
    next: usize,
}

impl Iterator for Chunks {
    type Item = Result<Box<dyn PageReader>>;

    fn next(&mut self) -> Option<Self::Item> {
        let chosen = self.groups.chosen.get(self.next)?;
        let group = self.groups.metadata.row_groups().get(*chosen)?;
        self.next += 1;
        let chunk = group.column(self.column);
        let pages = usize::try_from(group.num_rows())
            .map_err(ParquetError::from)
            .and_then(|rows| {
                let source = PageSource {
                    file: ForeignParquet::clone(&self.groups.file),
                    // Some writers have counted a little less than there is.
                    largest: chunk.uncompressed_size().saturating_mul(2).saturating_add(1 << 20),
                };
                SerializedPageReader::new(Arc::new(source), chunk, rows, None)
            });
        let values = chunk.num_values();
        Some(pages.map(|pages| Box::new(Pages { pages, values }) as Box<dyn PageReader>))
    }
}

impl PageIterator for Chunks {}

/// The pages of one column in one row group.
struct Pages {
    pages: SerializedPageReader<PageSource>,
    /// How many values they have together.
    values: i64,
}

impl Pages {
    fn checked(&self, page: Page) -> Result<Page> {
        let values = u64::from(page.num_values());
        let most = match &page {
            // Each takes at least a byte.
            Page::DictionaryPage { buf, .. } => buf.len() as u64,
            _ => u64::try_from(self.values).unwrap_or(0),
        };
        if values > most {
            return Err(general(format!(
                "a page says that it has {values} values, and can have {most} at most"
            )));
        }
        Ok(page)
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let page = self.pages.get_next_page()?;
        page.map(|page| self.checked(page)).transpose()
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.pages.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> Result<bool> {
        self.pages.at_record_boundary()
    }
}

impl Iterator for Pages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

fn general(message: String) -> ParquetError {
    ParquetError::General(message)
}

/// The file as the pages of one column are read from it.
struct PageSource {
    file: ForeignParquet,
    /// Most bytes that a page of this column may have.
    largest: i64,
}

impl Length for PageSource {
    fn len(&self) -> u64 {
        self.file.length
    }
}

impl ChunkReader for PageSource {
    type T = Header;

    fn get_read(&self, start: u64) -> Result<Header> {
        Ok(Header {
            file: self.file.clone(),
            start,
            largest: self.largest.min(LARGEST_PAGE),
            bytes: self.file.get_read(start)?,
            checked: false,
        })
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        self.file.get_bytes(start, length)
    }
}

/// Reads the header of a page, and looks at it before the first byte is given out. (The page reader asks for it also where
/// it knows the header already, and then reads nothing.)
struct Header {
    file: ForeignParquet,
    start: u64,
    largest: i64,
    bytes: BufReader<FromPlace>,
    checked: bool,
}

impl Header {
    fn check(&mut self) -> io::Result<()> {
        let invalid =
            |detail: String| io::Error::new(io::ErrorKind::InvalidData, format!("the header of a page: {detail}"));
        let found = match page_bytes(self.bytes.fill_buf()?) {
            Err(Fault::Cut) => {
                let rest = self.file.length.saturating_sub(self.start).min(LONGEST_HEADER);
                let longer = self
                    .file
                    .get_bytes(self.start, rest as usize)
                    .map_err(io::Error::other)?;
                page_bytes(&longer)
            }
            found => found,
        };
        match found {
            Ok(size) if size <= self.largest => Ok(()),
            Ok(size) => Err(invalid(format!(
                "a page of {size} bytes, where one can have {} at most",
                self.largest
            ))),
            Err(fault) => Err(invalid(fault.to_string())),
        }
    }
}

impl Read for Header {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if !self.checked {
            self.check()?;
            self.checked = true;
        }
        self.bytes.read(into)
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
        // Checked before this much memory is allocated.
        if start.checked_add(length as u64).is_none_or(|end| end > self.length) {
            return Err(ParquetError::EOF(format!(
                "{length} bytes at {start} go beyond the end of the file, {}",
                self.length
            )));
        }
        let mut bytes = vec![0; length];
        self.file.note(self.file.file.read_exact_at(&mut bytes, start))?;
        Ok(bytes.into())
    }
}

/// Reads a file from a place on. Its end is an error.
#[derive(Debug)]
pub struct FromPlace {
    file: Arc<Noting>,
    at: u64,
}

impl Read for FromPlace {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.note(self.file.file.read_at(into, self.at))?;
        if read == 0 && !into.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use arrow::array::{AsArray, Int64Array, RecordBatch, StringArray};
    use arrow::datatypes::Int64Type;
    use parquet::arrow::ArrowWriter;
    use parquet::file::properties::WriterProperties;

    #[test]
    fn what_the_system_cannot_read_is_told_from_damage() {
        let folder = tempfile::tempdir().unwrap();
        let damaged = folder.path().join("damaged.parquet");
        std::fs::write(&damaged, "PAR1 and no more of it PAR1").unwrap();
        let damaged = ForeignParquet::open_local(&damaged).unwrap();
        assert!(damaged.metadata().is_err());
        assert_eq!(damaged.unreadable(), None);
        // A plain file that gives an input/output error at every place.
        let broken = ForeignParquet {
            length: 1000,
            ..ForeignParquet::open_local(Path::new("/proc/self/mem")).unwrap()
        };
        assert!(broken.metadata().is_err());
        assert!(broken.unreadable().unwrap().contains("os error 5"));
        let again = ForeignParquet::open_local(Path::new("/proc/self/mem")).unwrap();
        assert!(again.get_read(0).unwrap().read(&mut [0; 8]).is_err());
        assert!(again.unreadable().is_some());
    }

    fn read(path: &Path) -> Result<i64> {
        let file = ForeignParquet::open_local(path)?;
        let reader = file.rows(&file.metadata()?, ProjectionMask::all(), 64, None)?;
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

    /// A column that ends early at the end of a page, and counts of rows that contradict each other: no row may vanish.
    #[test]
    fn rows_that_the_metadata_promise_and_the_pages_do_not_have_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.parquet");
        let numbers = Int64Array::from_iter_values(0..1000);
        let batch = RecordBatch::try_from_iter([("n", Arc::new(numbers) as _)]).unwrap();
        let pages = WriterProperties::builder()
            .set_dictionary_enabled(false)
            .set_write_batch_size(100)
            .set_data_page_row_count_limit(100)
            .build();
        let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), Some(pages)).unwrap();
        writer.write(&batch).unwrap();
        let written = writer.close().unwrap();
        let places = written.offset_index().unwrap()[0][0].page_locations();
        assert_eq!(places.len(), 10);
        let file = ForeignParquet::open_local(&path).unwrap();
        let whole = Arc::clone(file.metadata().unwrap().metadata());
        let rows = |metadata: ParquetMetaData, selection: Option<RowSelection>| {
            let metadata = ArrowReaderMetadata::try_new(Arc::new(metadata), ArrowReaderOptions::new()).unwrap();
            let mut read = 0;
            for batch in file.rows(&metadata, ProjectionMask::all(), 64, selection).unwrap() {
                match batch {
                    Ok(batch) => read += batch.num_rows(),
                    Err(error) => return (read, Some(error.to_string())),
                }
            }
            (read, None)
        };
        assert_eq!(rows(whole.as_ref().clone(), None), (1000, None));
        let of = |first, count| RowSelection::from_consecutive_ranges(std::iter::once(first..first + count), 1000);
        assert_eq!(rows(whole.as_ref().clone(), Some(of(350, 7))), (7, None));

        let group = whole.row_group(0);
        let chunk = group.column(0).clone().into_builder();
        let half = places[5].offset - places[0].offset;
        let chunk = chunk.set_total_compressed_size(half).build().unwrap();
        let group = group
            .clone()
            .into_builder()
            .set_column_metadata(vec![chunk])
            .build()
            .unwrap();
        let cut = ParquetMetaData::new(whole.file_metadata().clone(), vec![group]);
        let (read, error) = rows(cut.clone(), None);
        assert_eq!(read, 500);
        let error = error.expect("an error");
        assert!(
            error.contains("it has 500 rows, where its metadata say 1000"),
            "{error}"
        );
        let (read, error) = rows(cut, Some(of(450, 100)));
        assert_eq!((read, error.is_some()), (50, true));

        let column = || whole.row_group(0).column(0).clone().into_builder();
        for wrong in [
            column().set_data_page_offset(-4),
            column().set_dictionary_page_offset(Some(-4)),
            column().set_dictionary_page_offset(Some(i64::MAX)),
            column().set_total_compressed_size(-1),
            column().set_total_compressed_size(1 << 40),
            column().set_num_values(-1),
        ] {
            let columns = vec![wrong.build().unwrap()];
            let group = whole.row_group(0).clone().into_builder().set_column_metadata(columns);
            let metadata = ParquetMetaData::new(whole.file_metadata().clone(), vec![group.build().unwrap()]);
            let error = check_places(&metadata, file.length).unwrap_err().to_string();
            assert!(error.contains("of a file of"), "{error}");
        }

        let empty = whole
            .row_group(0)
            .clone()
            .into_builder()
            .set_num_rows(0)
            .build()
            .unwrap();
        let contradiction = ParquetMetaData::new(whole.file_metadata().clone(), vec![empty]);
        let error = rows_of_file(&contradiction).unwrap_err().to_string();
        assert!(error.contains("claim 1000 rows, and the row groups have 0"), "{error}");
    }

    /// A header of a page whose first unknown field is a list of 2^31 - 1 doubles, right up to the end of the file.
    #[test]
    fn headers_that_promise_more_than_there_is_are_errors_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.parquet");
        let numbers = Int64Array::from_iter_values(0..1000);
        let texts = StringArray::from_iter_values((0..1000).map(|n| format!("text {n}")));
        let batch = RecordBatch::try_from_iter([("n", Arc::new(numbers) as _), ("t", Arc::new(texts) as _)]).unwrap();
        let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        assert_eq!(read(&path).unwrap(), 499_500);

        let whole = std::fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        // The first page begins after the magic number: a field of a new kind (9 on from 0, a list), then 15 for "a count
        // follows" with 7 for doubles, then the count.
        bytes[4..11].copy_from_slice(&[0x99, 0xF7, 0xFF, 0xFF, 0xFF, 0xFF, 0x07]);
        std::fs::write(&path, &bytes).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(!error.is_empty());
        // The same with booleans, of which all would be passed over: in a page, and in the metadata.
        bytes[5] = 0xF1;
        std::fs::write(&path, &bytes).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("too many booleans"), "{error}");
        let mut bytes = b"PAR1\xA9\xF1\xFF\xFF\xFF\xFF\x07\0".to_vec();
        bytes.extend_from_slice(&[8, 0, 0, 0]);
        bytes.extend_from_slice(b"PAR1");
        std::fs::write(&path, &bytes).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("too many booleans"), "{error}");
        // A page that says it has 2^31 - 1 bytes: its kind, that number, and how many it takes in the file.
        let mut bytes = whole.clone();
        bytes[4..13].copy_from_slice(&[0x15, 0, 0x15, 0xFE, 0xFF, 0xFF, 0xFF, 0x0F, 0]);
        std::fs::write(&path, &bytes).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("a page of 2147483647 bytes"), "{error}");

        // The header of a dictionary page of numbers says that there are 8,191 of them in its 8,000 bytes, not 1,000.
        let mut bytes = whole.clone();
        let header = [0x4C, 0x15, 0xD0, 0x0F];
        let at = bytes.windows(4).position(|found| found == header).expect("the header");
        bytes[at + 2..at + 4].copy_from_slice(&[0xFE, 0x7F]);
        std::fs::write(&path, &bytes).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(
            error.contains("it has 8191 values, and can have 8000 at most"),
            "{error}"
        );

        bytes.truncate(bytes.len() / 2);
        std::fs::write(&path, &bytes).unwrap();
        assert!(read(&path).is_err());
        let foreign = ForeignParquet::open_local(&path).unwrap();
        assert!(foreign.get_bytes(4, 1 << 40).is_err() && foreign.get_bytes(u64::MAX, 1).is_err());
        assert!(ForeignParquet::open_local(folder.path()).is_err());
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success() && ForeignParquet::open_local(&pipe).is_err());
    }
}
