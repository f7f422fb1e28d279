//! The bytes of a recording in a file, read on demand by a decoder.

use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use flow_kind::open_input_file;
use flow_storage::{InputFile, Storage};
use symphonia::core::io::MediaSource;

use crate::decode_fault::broken;
use crate::embedded::{self, Embedded, EmbeddedPlace};
use crate::ends::end_of_caf;
use crate::error::AudioError;
use crate::flac::{self, Fault, MARKER, StreamInfo};
use crate::format::{Format, HEAD, MOST_PADDING, first_frame_after, mpeg, recognise, stated_id3_length};
use crate::recording::Blocks;
use crate::stream::one_track;
use crate::streamed_aiff;
use crate::streamed_wav::{header_with_sizes, is_longer_than_its_header_says};
use crate::wave64;

/// The bytes of a recording, read on demand.
#[derive(Clone)]
pub(crate) struct StoredBytes {
    pub file: Arc<InputFile>,
    pub offset: u64,
    pub size: u64,
    /// The first I/O error, which decoders do not return.
    failure: Arc<Mutex<Option<io::Error>>>,
}

impl StoredBytes {
    /// Of the file, or of the `range` (offset and size) of it; of a path that names a recording within a file, that recording.
    pub fn open(storage: &Storage, path: &Path, range: Option<(u64, u64)>) -> Result<StoredBytes, AudioError> {
        match (range, embedded::parse(path)) {
            (Some(_), _) | (_, None) => {}
            (
                None,
                Some(Embedded {
                    file,
                    place: EmbeddedPlace::Bytes { offset, size },
                }),
            ) => {
                return StoredBytes::open(storage, &file, Some((offset, size)));
            }
            (None, Some(value)) => return StoredBytes::of_file(value.into_file(storage)?.into(), path, None),
        }
        let failed = |source| AudioError::read(path, source);
        let mut file = open_input_file(storage, path).map_err(failed)?;
        if range.is_some() {
            file = file.in_blocks();
        }
        StoredBytes::of_file(file, path, range)
    }

    fn of_file(file: InputFile, path: &Path, range: Option<(u64, u64)>) -> Result<StoredBytes, AudioError> {
        let failed = |source| AudioError::read(path, source);
        let length = file.length().map_err(failed)?;
        let (offset, size) = range.unwrap_or((0, length));
        if offset.checked_add(size).is_none_or(|end| end > length) {
            return Err(AudioError::PastEnd {
                path: path.to_owned(),
                offset,
                size,
            });
        }
        let mut bytes = StoredBytes {
            file: Arc::new(file),
            offset,
            size,
            failure: Arc::default(),
        };
        // Some programs put the tag of an MP3 before a FLAC or a WAV.
        let tag = bytes.id3_length();
        if tag > 0 && bytes.array(tag).is_some_and(|name| [*MARKER, *b"RIFF"].contains(&name)) {
            bytes.offset += tag;
            bytes.size -= tag;
        }
        Ok(bytes)
    }

    pub fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.size.saturating_sub(at)).unwrap_or(usize::MAX);
        let length = buffer.len().min(left);
        let read = self.file.read_at(&mut buffer[..length], self.offset + at);
        read.map_err(|error| {
            let kind = error.kind();
            if kind != io::ErrorKind::Interrupted {
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
            kind.into()
        })
    }

    /// The I/O error, if there was one: the content of the file is then not the cause.
    pub fn take_failure(&self) -> Option<io::Error> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Detects the format; the error describes what else the bytes are.
    pub fn recognise(&self) -> io::Result<Result<Format, &'static str>> {
        let tag = self.id3_length();
        let head = self.head(tag)?;
        let found = if tag > 0 { mpeg(&head) } else { recognise(&head) };
        if found.is_ok() {
            return Ok(found);
        }
        let start = self.first_frame()?;
        Ok(if start > tag { mpeg(&self.head(start)?) } else { found })
    }

    /// Where the frames of MPEG audio begin.
    fn first_frame(&self) -> io::Result<u64> {
        first_frame_after(self.id3_length(), |at| self.head(at), |at| self.zeros(at))
    }

    fn head(&self, at: u64) -> io::Result<Vec<u8>> {
        let mut head = vec![0; HEAD];
        let length = self.read_whole_at(at, &mut head)?;
        head.truncate(length);
        Ok(head)
    }

    /// Zeros at a place.
    fn zeros(&self, at: u64) -> u64 {
        let bytes = BufReader::new(self.source(Vec::new(), at)).bytes();
        let zeros = bytes.take(MOST_PADDING).take_while(|byte| matches!(byte, Ok(0)));
        zeros.count() as u64
    }

    /// Length of the ID3v2 tags at the beginning and of the zeros after them, 0 if there are none; never more than there are bytes.
    pub fn id3_length(&self) -> u64 {
        let mut tags = 0;
        loop {
            let head: [u8; 10] = self.array(tags).unwrap_or_default();
            let tag = stated_id3_length(&head) as u64;
            if tag == 0 {
                break;
            }
            tags = (tags + tag).min(self.size);
        }
        if tags == 0 {
            return 0;
        }
        tags + self.zeros(tags)
    }

    /// [`is_longer_than_its_header_says`] of this WAV.
    pub fn is_longer_than_its_header_says(&self) -> bool {
        is_longer_than_its_header_says(&mut BufReader::new(self.source(Vec::new(), 0)), self.size)
    }

    /// As many bytes as the buffer holds, or as there are.
    fn read_whole_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut read = 0;
        let wanted = buffer.len() as u64;
        let mut source = self.source(Vec::new(), at).take(wanted);
        while read < buffer.len() {
            match source.read(&mut buffer[read..])? {
                0 => break,
                more => read += more,
            }
        }
        Ok(read)
    }

    /// None past the end.
    pub fn array<const N: usize>(&self, at: u64) -> Option<[u8; N]> {
        let mut array = [0; N];
        self.source(Vec::new(), at).read_exact(&mut array).ok()?;
        Some(array)
    }

    /// `head`, and after it the bytes from `from` on.
    pub fn source(&self, head: Vec<u8>, from: u64) -> Source {
        Source {
            bytes: self.clone(),
            head,
            from,
            at: 0,
        }
    }
}

pub(crate) struct Source {
    bytes: StoredBytes,
    head: Vec<u8>,
    from: u64,
    at: u64,
}

impl Source {
    fn length(&self) -> u64 {
        self.head.len() as u64 + self.bytes.size.saturating_sub(self.from)
    }
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = match usize::try_from(self.at).ok().and_then(|at| self.head.get(at..)) {
            Some(head) if !head.is_empty() => {
                let length = head.len().min(buffer.len());
                buffer[..length].copy_from_slice(&head[..length]);
                length
            }
            _ => self
                .bytes
                .read_at(self.from + (self.at - self.head.len() as u64), buffer)?,
        };
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for Source {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.length().checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a place before the beginning"))?;
        Ok(self.at)
    }
}

impl MediaSource for Source {
    fn is_seekable(&self) -> bool {
        true
    }

    fn byte_len(&self) -> Option<u64> {
        Some(self.length())
    }
}

/// The blocks of a recording of a format, from the beginning.
pub(crate) fn open(bytes: &StoredBytes, format: Format) -> Result<Blocks, Fault> {
    open_track(bytes, format, None)
}

/// The same of an audio track, counted from 1.
pub(crate) fn open_track(bytes: &StoredBytes, format: Format, track: Option<u32>) -> Result<Blocks, Fault> {
    let (head, from) = match format {
        Format::Flac => {
            one_track(track)?;
            let (info, info_bytes, frames) = flac_info(bytes)?;
            let mut head = MARKER.to_vec();
            // The one metadata block, marked as the last: type 0, 34 bytes.
            head.extend([0x80, 0, 0, 34]);
            head.extend(info_bytes);
            return Blocks::open_flac(Box::new(bytes.source(head, frames)), &info);
        }
        Format::Wav => {
            let header = header_with_sizes(BufReader::new(bytes.source(Vec::new(), 0)), bytes.size);
            header.map_or_else(Default::default, |header| (header.bytes, header.start))
        }
        Format::Aiff => {
            let header = streamed_aiff::header_with_sizes(BufReader::new(bytes.source(Vec::new(), 0)), bytes.size);
            let header = header.unwrap_or_default();
            let mut blocks = Blocks::open(Box::new(bytes.source(header.bytes, header.start)), format, track)?;
            blocks.fault_at_end = header.fault_at_end;
            return Ok(blocks);
        }
        Format::Rf64 => {
            let wave = wave64::read_header(BufReader::new(bytes.source(Vec::new(), 0)), bytes.size)?;
            let size = wave.end;
            let samples = StoredBytes { size, ..bytes.clone() };
            let mut blocks = Blocks::open(Box::new(samples.source(wave.head, wave.start)), format, track)?;
            blocks.fault_at_end = wave.fault_at_end;
            return Ok(blocks);
        }
        Format::Caf => {
            let size = end_of_caf(bytes.size, |at| bytes.array(at));
            let chunks = StoredBytes { size, ..bytes.clone() };
            return Blocks::open(Box::new(chunks.source(Vec::new(), 0)), format, track);
        }
        // Pictures in a tag may hold what looks like a frame.
        Format::Mp3 | Format::Aac => (Vec::new(), bytes.first_frame().map_err(broken)?),
        _ => (Vec::new(), 0),
    };
    Blocks::open(Box::new(bytes.source(head, from)), format, track)
}

/// The parsed `STREAMINFO`, its bytes, and where the frames begin.
pub(crate) fn flac_info(bytes: &StoredBytes) -> Result<(StreamInfo, [u8; 34], u64), Fault> {
    let mut at = MARKER.len() as u64;
    let mut info: Option<[u8; 34]> = None;
    let cut = || broken("ends within the metadata");
    loop {
        let [kind, a, b, c] = bytes.array(at).ok_or_else(cut)?;
        let length = u32::from_be_bytes([0, a, b, c]);
        if kind & 0x7f == 0 {
            if info.is_some() {
                return Err(broken("two STREAMINFO blocks"));
            }
            let block = bytes.array(at + 4).filter(|_| length >= 34);
            info = Some(block.ok_or_else(|| broken("STREAMINFO is cut"))?);
        }
        at += 4 + u64::from(length);
        if kind & 0x80 != 0 {
            break;
        }
    }
    let info = info.ok_or_else(|| broken("no STREAMINFO"))?;
    if at >= bytes.size {
        return Err(flac::fault(flac::Status::NoAudio, "nothing after the metadata"));
    }
    Ok((StreamInfo::parse(&info)?, info, at))
}
