//! AIFF whose samples end before its header says: one that was written to a pipe, whose sizes are 0, like ffmpeg's, or 0x7F000000 and
//! more, like sox's, and one that was cut. Its reader takes neither.

use std::io::Read;

use crate::decode_fault::ENDS_TOO_SOON;
use crate::streamed_wav::{LONGEST_HEADER, take};

/// Sizes from this on are what programs write that do not know them, where the recording is smaller.
const LEAST_UNKNOWN: u32 = 0x7f00_0000;

/// A header that was mended.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    pub bytes: Vec<u8>,
    /// Where the samples begin in the recording.
    pub start: u64,
    pub fault_at_end: Option<&'static str>,
}

/// The header of an AIFF up to its samples, with the sizes that it would have if the samples end with the recording, of which there are
/// `size` bytes. None where it has other sizes that are right, or is incomplete.
pub(crate) fn header_with_sizes(mut bytes: impl Read, size: u64) -> Option<Header> {
    let mut header = Vec::new();
    // "FORM", the size of what follows, "AIFF" or "AIFC".
    take(&mut bytes, 12, &mut header)?;
    let whole = u32::from_be_bytes(header[4..8].try_into().ok()?);
    loop {
        // Chunks: a name, a size, and as many bytes, filled up to an even number.
        let chunk = header.len();
        take(&mut bytes, 8, &mut header)?;
        let length = u32::from_be_bytes(header[chunk + 4..].try_into().ok()?);
        if &header[chunk..chunk + 4] == b"SSND" {
            let start = header.len() as u64;
            let there = size.checked_sub(start)?;
            let is_open = (whole == 0 && length == 0) || (length >= LEAST_UNKNOWN && u64::from(length) > there);
            if !is_open && u64::from(length) <= there {
                return None;
            }
            header[4..8].copy_from_slice(&u32::try_from(size - 8).ok()?.to_be_bytes());
            header[chunk + 4..].copy_from_slice(&u32::try_from(there).ok()?.to_be_bytes());
            return Some(Header {
                bytes: header,
                start,
                fault_at_end: (!is_open).then_some(ENDS_TOO_SOON),
            });
        }
        let filled = u64::from(length) + u64::from(length & 1);
        if header.len() as u64 + filled > LONGEST_HEADER {
            return None;
        }
        take(&mut bytes, filled, &mut header)?;
    }
}
