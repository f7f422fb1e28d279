//! A file to be read, on this machine or in object storage.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::location::{Location, ObjectUrl};
use crate::object_reader::{AskedRange, ObjectReader};
use crate::storage::Storage;

/// This many bytes of an object at a place are fetched by a request of their own: threads that read at different places do not take
/// from one another what was read ahead.
const OF_ITS_OWN: usize = 32 << 10;

/// A file that is read, in order or at places.
#[derive(Debug)]
pub enum InputFile {
    Local(File),
    Object(Box<ObjectReader>),
}

impl InputFile {
    /// Opens what a path or URL names; a local path is opened as it is, whatever is there.
    ///
    /// # Errors
    /// When it is no location, is not there, or cannot be opened.
    pub fn open(storage: &Storage, path: &Path) -> io::Result<InputFile> {
        match Location::of_path(path)? {
            Location::Local(path) => File::open(path).map(InputFile::Local),
            Location::Object(url) => InputFile::open_object(storage, &url),
        }
    }

    /// Opens an object.
    ///
    /// # Errors
    /// When it is not there, or cannot be looked at.
    pub fn open_object(storage: &Storage, url: &ObjectUrl) -> io::Result<InputFile> {
        let reader = storage.open(url)?;
        Ok(InputFile::Object(Box::new(reader)))
    }

    /// The file itself, or a copy of the object without a name in [`Storage::cache_folder`]: for readers that jump to and fro.
    ///
    /// # Errors
    /// When the object cannot be read, or the copy not written.
    pub fn into_local(self) -> io::Result<File> {
        match self {
            InputFile::Local(file) => Ok(file),
            InputFile::Object(object) => object.download(&object.storage().cache_folder()),
        }
    }

    /// For parts that are read in no order, again and again, such as recordings in a tar: those of an object come from blocks that
    /// are kept on this machine ([`ObjectReader::in_blocks`]).
    #[must_use]
    pub fn in_blocks(self) -> InputFile {
        match self {
            InputFile::Local(file) => InputFile::Local(file),
            InputFile::Object(object) => InputFile::Object(Box::new(object.in_blocks())),
        }
    }

    /// For one who jumps through all of a file, as from header to header of a tar: an object is read in blocks, if these are kept, or
    /// else a copy without a name in [`Storage::cache_folder`].
    ///
    /// # Errors
    /// When the object cannot be read, or the copy not written.
    pub fn for_jumps(self) -> io::Result<InputFile> {
        match self {
            InputFile::Object(object) if !object.has_kept_blocks() => {
                InputFile::Object(object).into_local().map(InputFile::Local)
            }
            other => Ok(other.in_blocks()),
        }
    }

    /// Asks for the bytes in `range` of an object, by one request; none of a file on this machine, whose bytes are at hand.
    ///
    /// # Errors
    /// When the object ends before them, or there is no client for its bucket.
    pub fn ask_for(&self, range: Range<u64>) -> io::Result<Option<AskedRange>> {
        match self {
            InputFile::Local(_) => Ok(None),
            InputFile::Object(object) => Ok(Some(object.ask_for(range)?)),
        }
    }

    /// In bytes. Of an object, when it was opened.
    ///
    /// # Errors
    /// When the file system does not say.
    pub fn length(&self) -> io::Result<u64> {
        match self {
            InputFile::Local(file) => Ok(file.metadata()?.len()),
            InputFile::Object(object) => Ok(object.stat().size),
        }
    }

    /// Reads some of the bytes at `offset`: none at the end.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        match self {
            InputFile::Local(file) => file.read_at(buffer, offset),
            InputFile::Object(object) => object.read_at(buffer, offset),
        }
    }

    /// Fills `buffer` with the bytes at `offset`.
    ///
    /// # Errors
    /// When they cannot be read, or there are fewer ([`io::ErrorKind::UnexpectedEof`]).
    pub fn read_exact_at(&self, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
        match self {
            InputFile::Local(file) => return file.read_exact_at(buffer, offset),
            InputFile::Object(object) if object.is_in_blocks() => return object.read_block_bytes(buffer, offset),
            InputFile::Object(object) if buffer.len() >= OF_ITS_OWN && object.stat().size > buffer.len() as u64 => {
                let end = offset.saturating_add(buffer.len() as u64);
                if end > object.stat().size {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                if object.read_held(buffer, offset) {
                    return Ok(());
                }
                buffer.copy_from_slice(&object.read_range(offset..end)?);
                return Ok(());
            }
            InputFile::Object(_) => {}
        }
        while !buffer.is_empty() {
            let read = self.read_at(buffer, offset)?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            buffer = &mut buffer[read..];
            offset += read as u64;
        }
        Ok(())
    }
}

/// Whether a path or URL names a file that is there. What is not a URL that can be used names none.
///
/// # Errors
/// When storage does not say whether an object is there: it must not be taken for missing.
pub fn is_file(storage: &Storage, path: &Path) -> io::Result<bool> {
    match Location::of_path(path) {
        Ok(Location::Local(path)) => Ok(path.is_file()),
        Ok(Location::Object(url)) if url.key().is_empty() => Ok(false),
        Ok(Location::Object(url)) => Ok(storage.look(&url)?.is_some()),
        Err(_) => Ok(false),
    }
}

impl Read for InputFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            InputFile::Local(file) => file.read(buffer),
            InputFile::Object(object) => object.read(buffer),
        }
    }
}

impl Seek for InputFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match self {
            InputFile::Local(file) => file.seek(to),
            InputFile::Object(object) => object.seek(to),
        }
    }
}

impl From<ObjectReader> for InputFile {
    fn from(object: ObjectReader) -> Self {
        InputFile::Object(Box::new(object))
    }
}

impl From<File> for InputFile {
    fn from(file: File) -> Self {
        InputFile::Local(file)
    }
}
