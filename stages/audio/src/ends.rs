//! Whether MP4, Matroska and Ogg files end where they should: of one that is cut their readers leave out the part that is cut without
//! a word, or all of it.

use std::io::{self, Read, Seek, SeekFrom};

use symphonia::core::io::MediaSource;

/// More bytes than any file has.
const ENDLESS: u64 = 1 << 62;
/// Bytes at the end of a file that are looked at: two of the largest pages of Ogg, and more than a packet has.
const TAIL: u64 = 1 << 17;
/// Most boxes of an MP4 that are looked at: fragments of some hours.
const MOST_BOXES: usize = 1 << 14;
/// The elements of Matroska that a file consists of (RFC 8794, RFC 9559).
const EBML: u64 = 0x1a45_dfa3;
const SEGMENT: u64 = 0x1853_8067;

/// A source that says that it is endless.
struct Endless(Box<dyn MediaSource>);

impl Read for Endless {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Seek for Endless {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match to {
            SeekFrom::End(by) => self.0.seek(SeekFrom::Start(ENDLESS.saturating_add_signed(by))),
            to => self.0.seek(to),
        }
    }
}

impl MediaSource for Endless {
    fn is_seekable(&self) -> bool {
        true
    }

    fn byte_len(&self) -> Option<u64> {
        Some(ENDLESS)
    }
}

/// An MP4 for its reader, which leaves out a box that goes beyond the end: where the index comes before the samples, as in downloads
/// and in what is streamed, these are read up to the end, and that there are not all of them is an error. True: between fragments
/// or at the end there is what is no box, where the reader ends without a word.
///
/// # Errors
/// Where the source cannot be read.
pub(crate) fn with_cut_boxes(mut mp4: Box<dyn MediaSource>) -> io::Result<(Box<dyn MediaSource>, bool)> {
    let (mut at, mut has_index, mut is_indexed, mut is_fragmented) = (0u64, false, false, false);
    let mut is_broken = false;
    for _ in 0..MOST_BOXES {
        let mut head = [0; 16];
        let read = read_at(&mut *mp4, at, &mut head)?;
        if read == 0 {
            break;
        }
        let [a, b, c, d, ref name @ .., _, _, _, _, _, _, _, _] = head;
        match name {
            b"moov" => has_index = true,
            b"moof" => (is_indexed, is_fragmented) = (has_index, true),
            b"mdat" => is_indexed = has_index,
            _ => {}
        }
        if is_indexed && !is_fragmented {
            break;
        }
        let length = match u64::from(u32::from_be_bytes([a, b, c, d])) {
            // It ends with the file.
            0 if name == b"mdat" => break,
            1 => u64::from_be_bytes(std::array::from_fn(|byte| head[8 + byte])),
            length => length,
        };
        match at.checked_add(length) {
            Some(next) if length >= 8 && read >= 8 => at = next,
            _ => {
                is_broken = is_fragmented;
                break;
            }
        }
    }
    mp4.rewind()?;
    let endless = |mp4| -> Box<dyn MediaSource> { Box::new(Endless(mp4)) };
    Ok((if is_indexed { endless(mp4) } else { mp4 }, is_broken))
}

/// Whether the last page of an Ogg file is cut, or not the last one of its stream.
pub(crate) fn ends_within_a_stream(source: &mut dyn MediaSource) -> io::Result<bool> {
    let mut tail = Vec::new();
    let Some(length) = source.byte_len() else {
        return Ok(false);
    };
    source.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    (&mut *source).take(TAIL).read_to_end(&mut tail)?;
    source.seek(SeekFrom::Start(0))?;
    let is_head = |head: &[u8]| head.starts_with(b"OggS\0") && head[5] < 8;
    let Some(last) = tail.windows(6).rposition(is_head) else {
        return Ok(false);
    };
    let page = &tail[last..];
    let laces = page.get(26).and_then(|count| page.get(27..27 + usize::from(*count)));
    let length = laces.map(|laces| 27 + laces.len() + laces.iter().map(|lace| usize::from(*lace)).sum::<usize>());
    Ok(page[5] & 4 == 0 || length.is_none_or(|length| length > page.len()))
}

/// What a Matroska file says of its end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SegmentEnd {
    Within,
    /// Behind the end of the file.
    Cut,
    /// It was written while nobody knew, as browsers do; with the last bytes of the file.
    Unknown(Vec<u8>),
}

impl SegmentEnd {
    /// # Errors
    /// Where the source cannot be read.
    pub fn of(matroska: &mut dyn MediaSource) -> io::Result<SegmentEnd> {
        let length = matroska.seek(SeekFrom::End(0))?;
        let mut head = [0; 4 + 8];
        let mut at = 0;
        let found = loop {
            let read = read_at(matroska, at, &mut head)?;
            let Some((id, size, bytes)) = element(&head[..read]) else {
                break SegmentEnd::Within;
            };
            let begin = at + bytes as u64;
            match (id, size.and_then(|size| begin.checked_add(size))) {
                (EBML, Some(end)) if at == 0 => at = end,
                (SEGMENT, Some(end)) if end > length => break SegmentEnd::Cut,
                (SEGMENT, None) => {
                    let mut tail = Vec::new();
                    matroska.seek(SeekFrom::Start(length.saturating_sub(TAIL).max(begin)))?;
                    (&mut *matroska).take(TAIL).read_to_end(&mut tail)?;
                    break SegmentEnd::Unknown(tail);
                }
                _ => break SegmentEnd::Within,
            }
        };
        matroska.rewind()?;
        Ok(found)
    }

    /// Whether a file that does not say where it ends does so with this packet, or with whole elements after it.
    pub fn is_after(&self, packet: &[u8]) -> bool {
        let SegmentEnd::Unknown(tail) = self else {
            return false;
        };
        let whole_elements = |mut rest: &[u8]| {
            while !rest.is_empty() {
                let Some((_, Some(size), bytes)) = element(rest) else {
                    return false;
                };
                let end = usize::try_from(size).ok().and_then(|size| bytes.checked_add(size));
                let Some(after) = end.and_then(|end| rest.get(end..)) else {
                    return false;
                };
                rest = after;
            }
            true
        };
        let mut places = tail.windows(packet.len().max(1)).enumerate();
        let mut found = false;
        while let Some((place, bytes)) = places.next_back().filter(|_| !found) {
            found = bytes == packet && whole_elements(&tail[place + packet.len()..]);
        }
        found
    }
}

/// Identifier and size of the element that begins here, and how many bytes these take. A size of nothing but ones is unknown.
fn element(bytes: &[u8]) -> Option<(u64, Option<u64>, usize)> {
    let number = |bytes: &[u8], longest: u32| {
        let length = bytes.first()?.leading_zeros() + 1;
        let all = bytes.get(..length as usize).filter(|_| length <= longest)?;
        Some((
            all.iter().fold(0u64, |number, byte| number << 8 | u64::from(*byte)),
            length,
        ))
    };
    let (id, of_id) = number(bytes, 4)?;
    let (size, of_size) = number(&bytes[of_id as usize..], 8)?;
    let ones = (1u64 << (7 * of_size)) - 1;
    let size = Some(size & ones).filter(|size| *size != ones);
    Some((id, size, (of_id + of_size) as usize))
}

/// As many bytes as there are at a place.
fn read_at(source: &mut dyn MediaSource, at: u64, into: &mut [u8]) -> io::Result<usize> {
    source.seek(SeekFrom::Start(at))?;
    let mut read = 0;
    while read < into.len() {
        match source.read(&mut into[read..])? {
            0 => break,
            more => read += more,
        }
    }
    into[read..].fill(0);
    Ok(read)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    fn of(bytes: &[u8]) -> SegmentEnd {
        SegmentEnd::of(&mut Cursor::new(bytes.to_vec())).unwrap()
    }

    #[test]
    fn a_segment_says_where_it_ends() {
        let ebml = [0x1a, 0x45, 0xdf, 0xa3, 0x82, 1, 2];
        let segment = |size: &[u8], content: &[u8]| [&ebml[..], &[0x18, 0x53, 0x80, 0x67], size, content].concat();
        assert_eq!(of(&segment(&[0x84], &[1, 2, 3, 4])), SegmentEnd::Within);
        assert_eq!(of(&segment(&[0x84], &[1, 2, 3])), SegmentEnd::Cut);
        assert_eq!(of(&segment(&[0x01, 0, 0, 0, 0, 0, 1, 0], &[1; 255])), SegmentEnd::Cut);
        for unknown in [&[0xff][..], &[0x01, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]] {
            assert_eq!(of(&segment(unknown, &[1, 2, 3])), SegmentEnd::Unknown(vec![1, 2, 3]));
        }
        for other in [&b""[..], &ebml[..5], &ebml, b"\0\0\0\0\0\0\0\0\0\0\0\0\0"] {
            assert_eq!(of(other), SegmentEnd::Within, "{other:02x?}");
        }
    }

    #[test]
    fn a_file_ends_with_its_last_packet_and_whole_elements() {
        let end = SegmentEnd::Unknown(vec![9, 7, 8, 7, 8, 0x75, 0xa2, 0x82, 7, 8]);
        assert!(end.is_after(&[7, 8, 7, 8]) && end.is_after(&[7, 8]) && end.is_after(&[8]));
        assert!(!end.is_after(&[7]) && !end.is_after(&[9, 7]) && !end.is_after(&[5; 20]) && !end.is_after(&[]));
        let cut = SegmentEnd::Unknown(vec![9, 7, 8, 0x75, 0xa2, 0x82, 7]);
        assert!(!cut.is_after(&[7, 8]) && !SegmentEnd::Within.is_after(&[]));
    }
}
