//! What is between the frames of an MP3, and of AAC without a container: the reader looks for the next frame without a word where
//! there is something else, such as a part that was never downloaded. All that comes after it would then be too early.

use std::io::{self, Read, SeekFrom};
use std::sync::{Arc, Mutex, PoisonError};

use symphonia::core::io::MediaSource;

use crate::ends::read_at;
use crate::format::{Format, mpeg};

/// Most bytes that are kept; a decoder reads ahead by far less.
const MOST_KEPT: usize = 1 << 20;
/// The longest frame, in bytes. Where a recording was cut and joined at any byte, as much of a frame may be left on either side.
const LONGEST_FRAME: usize = 1_441;
/// Most bytes after the last frame that need not be known.
const MOST_AT_END: usize = 1 << 14;
/// Tags that may be between frames: where recordings were joined, and at the end.
const TAGS: [&[u8]; 5] = [b"ID3", b"TAG", b"APETAGEX", b"LYRICSBEGIN", b"3DI"];
/// Bytes of what is between two frames that tell what it is.
const HEAD: usize = 11;

/// Bytes that were read, from the end of the last frame on.
#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    /// Where in `bytes` what is kept begins.
    start: usize,
    /// How many bytes before that were dropped, because there were too many, and the first of these.
    dropped: usize,
    head: Vec<u8>,
}

impl Kept {
    fn waiting(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or_default()
    }

    fn add(&mut self, bytes: &[u8]) {
        if self.start >= MOST_KEPT {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
        let too_many = self.waiting().len().saturating_sub(MOST_KEPT);
        if too_many > 0 {
            self.skip(too_many);
        }
    }

    /// Counts the next bytes among those between two frames.
    fn skip(&mut self, count: usize) {
        if self.head.is_empty() {
            self.head = self.waiting().iter().take(HEAD).copied().collect();
        }
        self.start += count;
        self.dropped += count;
    }

    /// Whether what was skipped may be there: `most` bytes of anything, or what is known. Nothing is skipped then.
    fn is_usual(&mut self, most: usize) -> bool {
        let head = std::mem::take(&mut self.head);
        let count = std::mem::take(&mut self.dropped);
        count <= most
            || TAGS.iter().any(|tag| head.starts_with(tag))
            // A frame that says how long a recording is, within joined ones.
            || mpeg(&head) == Ok(Format::Mp3)
    }
}

/// A source whose bytes are kept until [`Gaps`] has seen the frames in them.
pub(crate) struct Watched<S> {
    source: S,
    kept: Arc<Mutex<Kept>>,
}

impl<S: Read> Read for Watched<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer)?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.add(&buffer[..read]);
        Ok(read)
    }
}

/// Frames that the header of an MP3 (Xing, Info) may count too many: GStreamer counts the one that holds the header, too. None where
/// the recording has not all bytes that the header says, so that a part of it may be missing.
///
/// # Errors
/// Where the source cannot be read.
pub(crate) fn counted_too_many(source: &mut dyn MediaSource) -> io::Result<u64> {
    let length = source.seek(SeekFrom::End(0))?;
    let mut head = [0; 64];
    read_at(source, 0, &mut head)?;
    source.rewind()?;
    let is_mpeg_1 = head[1] & 0x18 == 0x18;
    let is_mono = head[3] >> 6 == 3;
    // After the header of the frame and the side information.
    let at = 4 + match (is_mpeg_1, is_mono) {
        (true, false) => 32,
        (true, true) | (false, false) => 17,
        (false, true) => 9,
    };
    let tag = &head[at..];
    let number = |at: usize| u32::from_be_bytes(std::array::from_fn(|byte| tag[at + byte]));
    // With the number of frames, and of bytes.
    let is_counted = [&b"Xing"[..], b"Info"].contains(&&tag[..4]) && number(4) & 3 == 3;
    let is_whole = is_counted && number(12) > 0 && u64::from(number(12)) <= length;
    Ok(match (is_whole, is_mpeg_1) {
        (false, _) => 0,
        (true, true) => 1_152,
        (true, false) => 576,
    })
}

/// Maximum junk between two MP3 frames, in bytes.
pub(crate) const BETWEEN_MP3: usize = 2 * LONGEST_FRAME;
/// The same for AAC, whose reader gives frames without their header. It is joined frame by frame.
pub(crate) const BETWEEN_AAC: usize = 9;

/// Finds frames in the bytes that their reader has read.
pub(crate) struct Gaps {
    kept: Arc<Mutex<Kept>>,
    begun: bool,
    /// Maximum junk between two frames, in bytes.
    most: usize,
}

impl Gaps {
    /// For the frames that are read of a source, which is to be read from the result, with at most this many bytes of anything between
    /// two of them.
    pub fn of<S: Read>(source: S, most: usize) -> (Gaps, Watched<S>) {
        let kept = Arc::<Mutex<Kept>>::default();
        let watched = Watched {
            source,
            kept: Arc::clone(&kept),
        };
        let gaps = Gaps {
            kept,
            begun: false,
            most,
        };
        (gaps, watched)
    }

    /// Whether a frame follows the one before it, or what may be between frames. Before the first frame there may be anything.
    pub fn follows(&mut self, frame: &[u8]) -> bool {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let place = kept
            .waiting()
            .windows(frame.len().max(1))
            .position(|bytes| bytes == frame);
        // It is always there, unless the reader has read further ahead than is kept.
        let place = place.unwrap_or(0);
        if place > 0 {
            kept.skip(place);
        }
        let usual = kept.is_usual(self.most);
        kept.start = (kept.start + frame.len()).min(kept.bytes.len());
        !std::mem::replace(&mut self.begun, true) || usual
    }

    /// Whether nothing is left after the last frame but what may be there.
    pub fn ends(&mut self) -> bool {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let rest = kept.waiting().len();
        if rest > 0 {
            kept.skip(rest);
        }
        !self.begun || kept.is_usual(MOST_AT_END)
    }
}
