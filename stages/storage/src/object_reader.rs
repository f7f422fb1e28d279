//! An object that is read like a file: in ranges that grow while it is read from one end to the other.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use crate::blocks::BlockSource;
use crate::client::{Begun, begin};
use crate::error::{StorageError, StorageFault};
use crate::location::ObjectUrl;
use crate::stat::Stat;
use crate::storage::Storage;

/// The first range that is asked for, and objects of up to this size whole. In bytes.
const FIRST: u64 = 256 << 10;

/// The largest range that is asked for at once. Two of them are held while an object is read in order. In bytes.
const LARGEST: u64 = 8 << 20;

/// Ranges of a download that are under way at the same time.
const DOWNLOAD_RANGES: usize = 4;

/// An object that is read at places. Clones share what they read ahead.
///
/// All bytes are of the object as it was when it was opened: once it is changed, reading fails. It holds two ranges of at most
/// 8 MiB.
#[derive(Clone)]
pub struct ObjectReader {
    storage: Storage,
    url: ObjectUrl,
    stat: Stat,
    window: Arc<Mutex<Window>>,
    at: u64,
    in_blocks: bool,
}

/// What was read last, and what will be needed next if reading goes on in order.
#[derive(Default)]
struct Window {
    start: u64,
    bytes: Bytes,
    ahead: Option<(Range<u64>, Begun<Bytes>)>,
}

impl Window {
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }
}

impl Storage {
    /// Opens an object to be read. It is looked at first, and what is read is of the object as it was then.
    ///
    /// # Errors
    /// When it is not there or cannot be looked at.
    pub fn open(&self, url: &ObjectUrl) -> Result<ObjectReader, StorageError> {
        Ok(ObjectReader::new(self.clone(), url.clone(), self.opened(url)?))
    }
}

impl ObjectReader {
    pub(crate) fn new(storage: Storage, url: ObjectUrl, stat: Stat) -> Self {
        ObjectReader {
            storage,
            url,
            stat,
            window: Arc::default(),
            at: 0,
            in_blocks: false,
        }
    }

    /// The reader of parts that are read in no order, again and again: they come from large blocks, which are kept on this machine
    /// as long as the objects that are read so fit together into what may be kept ([`Storage::keep`]). Else each part is asked for by
    /// itself.
    #[must_use]
    pub fn in_blocks(self) -> Self {
        ObjectReader {
            in_blocks: true,
            ..self
        }
    }

    pub(crate) fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Whether blocks of it are kept on this machine once they were read.
    pub(crate) fn has_kept_blocks(&self) -> bool {
        let folder = self.storage.kept();
        folder.is_ok_and(|folder| self.storage.blocks().keeps(&self.url, &self.stat, &folder))
    }

    pub(crate) fn is_in_blocks(&self) -> bool {
        self.in_blocks
    }

    pub fn url(&self) -> &ObjectUrl {
        &self.url
    }

    /// What storage said of the object when it was opened.
    pub fn stat(&self) -> &Stat {
        &self.stat
    }

    fn begin(&self, range: Range<u64>) -> Result<Begun<Bytes>, StorageError> {
        let (client, url, stat) = (self.storage.client(&self.url)?, self.url.clone(), self.stat.clone());
        begin(async move {
            let whole = range.start == 0 && range.end == stat.size;
            let got = client.get(&url, (!whole).then_some(range), Some(&stat)).await?;
            Ok(got.1)
        })
    }

    fn get(&self, range: Range<u64>) -> Result<Bytes, StorageError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let got = self.begin(range).and_then(Begun::wait);
        got.inspect_err(|_| self.storage.forget(&self.url))
    }

    /// Reads some of the bytes at `offset`: none at the end of the object.
    ///
    /// # Errors
    /// When they cannot be read, or the object was changed.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        if offset >= self.stat.size || buffer.is_empty() {
            return Ok(0);
        }
        if self.in_blocks {
            let left = self.stat.size - offset;
            let length = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            self.read_block_bytes(&mut buffer[..length], offset)?;
            return Ok(length);
        }
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        if !(window.start..window.end()).contains(&offset) {
            self.move_to(&mut window, offset, buffer.len() as u64)?;
        }
        let bytes = &window.bytes[(offset - window.start) as usize..];
        let length = bytes.len().min(buffer.len());
        buffer[..length].copy_from_slice(&bytes[..length]);
        Ok(length)
    }

    /// Makes the window begin at `offset` (or hold it), with `wanted` bytes if that many are left and allowed.
    fn move_to(&self, window: &mut Window, offset: u64, wanted: u64) -> Result<(), StorageError> {
        let in_order = offset == window.end() && window.end() > 0;
        let length_before = window.bytes.len() as u64;
        let ahead = window.ahead.take().filter(|(range, _)| range.contains(&offset));
        let (start, bytes) = match ahead {
            Some((range, begun)) => {
                let got = begun.wait().inspect_err(|_| self.storage.forget(&self.url))?;
                (range.start, got)
            }
            None if self.stat.size <= FIRST => (0, self.get(0..self.stat.size)?),
            None => {
                let usual = if in_order { 4 * length_before } else { FIRST };
                let length = usual.max(wanted).min(LARGEST);
                (
                    offset,
                    self.get(offset..offset.saturating_add(length).min(self.stat.size))?,
                )
            }
        };
        window.start = start;
        window.bytes = bytes;
        // The next range is asked for while this one is used.
        let end = window.end();
        if in_order && end < self.stat.size {
            let length = (4 * window.bytes.len() as u64).clamp(FIRST, LARGEST);
            let range = end..end.saturating_add(length).min(self.stat.size);
            window.ahead = self.begin(range.clone()).ok().map(|begun| (range, begun));
        }
        Ok(())
    }

    /// Asks for the bytes in `range` by one request, and does not wait for them: they come while something else is done.
    ///
    /// # Errors
    /// When the object ends before them, or there is no client for its bucket.
    pub fn ask_for(&self, range: Range<u64>) -> Result<AskedRange, StorageError> {
        self.check(&range)?;
        let begun = match range.is_empty() {
            true => None,
            false => Some(self.begin(range.clone())?),
        };
        Ok(AskedRange {
            reader: self.clone(),
            start: range.start,
            begun,
        })
    }

    fn check(&self, range: &Range<u64>) -> Result<(), StorageError> {
        if range.start <= range.end && range.end <= self.stat.size {
            return Ok(());
        }
        let said = format!(
            "bytes {} to {} were asked for of {}",
            range.start, range.end, self.stat.size
        );
        Err(StorageError::of(StorageFault::Other, &self.url.to_string(), &said))
    }

    /// Fills `buffer` with the bytes at `offset` if all of them are held; says whether they are.
    pub(crate) fn read_held(&self, buffer: &mut [u8], offset: u64) -> bool {
        let window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(start) = offset
            .checked_sub(window.start)
            .and_then(|start| usize::try_from(start).ok())
        else {
            return false;
        };
        let held = window.bytes.get(start..).and_then(|held| held.get(..buffer.len()));
        held.map(|held| buffer.copy_from_slice(held)).is_some()
    }

    /// The bytes in `range`, by one request of their own: nothing is read ahead.
    ///
    /// # Errors
    /// When they cannot be read, the object ends before them, or it was changed.
    pub fn read_range(&self, range: Range<u64>) -> Result<Bytes, StorageError> {
        self.check(&range)?;
        self.get(range)
    }

    /// Copies the whole object into a new file without a name in `folder`, in large ranges, some of which are under way at the same
    /// time. The file is gone with its last descriptor.
    ///
    /// # Errors
    /// When the object cannot be read or was changed, or the file cannot be written.
    pub fn download(&self, folder: &Path) -> io::Result<File> {
        let file = self.download_while(folder, &|| true)?;
        file.ok_or_else(|| io::Error::other("a copy was given up that nobody gave up"))
    }

    /// The same, as long as `go_on` says so, which is asked before each range is written; none once it does not.
    ///
    /// # Errors
    /// As of [`ObjectReader::download`].
    pub fn download_while(&self, folder: &Path, go_on: &dyn Fn() -> bool) -> io::Result<Option<File>> {
        let failed = |error: io::Error| {
            let said = format!("in {}, see FLOW_STORAGE_CACHE: {error}", folder.display());
            StorageError::of(StorageFault::Cache, &self.url.to_string(), &said)
        };
        std::fs::create_dir_all(folder).map_err(failed)?;
        let mut file = tempfile::tempfile_in(folder).map_err(failed)?;
        let is_whole = self.copy_to(&mut |bytes| {
            if !go_on() {
                return Ok(false);
            }
            file.write_all(bytes)
                .map(|()| true)
                .map_err(|error| failed(error).into())
        })?;
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        Ok(is_whole.then_some(file))
    }

    /// Gives all bytes in order to `take`, from large ranges, some of which are under way at the same time, until it says no.
    /// Whether it took all.
    ///
    /// # Errors
    /// When the object cannot be read or was changed (a [`StorageError`] within), or those of `take`.
    pub fn copy_to(&self, take: &mut dyn FnMut(&[u8]) -> io::Result<bool>) -> io::Result<bool> {
        let mut begun = std::collections::VecDeque::new();
        let mut next = 0;
        loop {
            while begun.len() < DOWNLOAD_RANGES && next < self.stat.size {
                let end = next.saturating_add(LARGEST).min(self.stat.size);
                begun.push_back(self.begin(next..end)?);
                next = end;
            }
            let Some(range) = begun.pop_front() else {
                return Ok(true);
            };
            let bytes = range.wait().inspect_err(|_| self.storage.forget(&self.url))?;
            if !take(&bytes)? {
                return Ok(false);
            }
        }
    }

    /// Fills `buffer` with the bytes at `offset`, from blocks.
    ///
    /// # Errors
    /// When they cannot be read, there are fewer ([`io::ErrorKind::UnexpectedEof`]), or the object was changed.
    pub(crate) fn read_block_bytes(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.stat.size) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if buffer.is_empty() {
            return Ok(());
        }
        match self.storage.kept() {
            Ok(folder) => {
                let source = BlockSource {
                    url: &self.url,
                    stat: &self.stat,
                    ask: &|range| self.read_range(range),
                };
                self.storage.blocks().read(&source, buffer, offset, &folder)
            }
            Err(error) if error.fault == StorageFault::Cache => {
                buffer.copy_from_slice(&self.read_range(offset..offset + buffer.len() as u64)?);
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Bytes of an object that were asked for. Dropped, they are not waited for, and the request ends.
pub struct AskedRange {
    reader: ObjectReader,
    start: u64,
    /// None of no bytes.
    begun: Option<Begun<Bytes>>,
}

impl AskedRange {
    /// Waits for the bytes.
    ///
    /// # Errors
    /// As of [`ObjectReader::read_range`].
    pub fn bytes(self) -> Result<Bytes, StorageError> {
        self.take().map(|(_, bytes)| bytes)
    }

    /// Waits for the bytes. Gives a reader of the same object that holds them: what is within them is not asked for again.
    ///
    /// # Errors
    /// As of [`ObjectReader::read_range`].
    pub fn wait(self) -> Result<ObjectReader, StorageError> {
        let start = self.start;
        let (reader, bytes) = self.take()?;
        let window = Window {
            start,
            bytes,
            ahead: None,
        };
        Ok(ObjectReader {
            window: Arc::new(Mutex::new(window)),
            ..reader
        })
    }

    fn take(self) -> Result<(ObjectReader, Bytes), StorageError> {
        let bytes = self.begun.map_or_else(|| Ok(Bytes::new()), Begun::wait);
        let bytes = bytes.inspect_err(|_| self.reader.storage.forget(&self.reader.url))?;
        Ok((self.reader, bytes))
    }
}

impl Read for ObjectReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.read_at(buffer, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for ObjectReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.stat.size.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a place before the beginning"))?;
        Ok(self.at)
    }
}

impl std::fmt::Debug for ObjectReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ObjectReader({})", self.url)
    }
}
