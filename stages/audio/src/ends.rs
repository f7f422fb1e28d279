//! Whether MP4, Matroska and Ogg files are complete: their readers silently drop the truncated part of a file, or all of it.

use std::io::{self, Read, Seek, SeekFrom};

use symphonia::core::io::MediaSource;

use crate::matroska_tracks::{AudioTracks, audio_tracks};
use crate::movie::Movie;

/// More bytes than any file has.
const ENDLESS: u64 = 1 << 62;
/// Bytes at the end of an Ogg file that are looked at: two of the largest pages.
const OGG_TAIL: u64 = 1 << 17;
/// Bytes at the end of a Matroska file that are looked at: more than the last picture of a film has, with tags after it.
const MATROSKA_TAIL: u64 = 1 << 22;
/// What the search for the last packet in them may take, as a packet of one byte is found everywhere.
const MOST_STEPS: usize = 1 << 24;
/// Most boxes of an MP4 that are looked at: an hour of fragments of a frame each.
const MOST_BOXES: usize = 1 << 19;
/// Most elements of a Matroska file before its packets that are looked at.
const MOST_ELEMENTS: usize = 64;
/// Elements of Matroska (RFC 8794, RFC 9559).
const EBML: u64 = 0x1a45_dfa3;
const SEGMENT: u64 = 0x1853_8067;
const CLUSTER: u64 = 0x1f43_b675;
const CHAPTERS: u64 = 0x1043_a770;
/// The identifier of no element, as long as that of chapters.
const UNKNOWN: [u8; 4] = [0x10, 0x43, 0xa7, 0x7f];
const TRACKS: u64 = 0x1654_ae6b;

/// Where the last chunk of a CAF of this size ends. libsndfile fills up the odd ones, and the reader takes what is left for a chunk
/// that is cut. The size itself where nothing is left, or a chunk is cut. `header` gives the header of the chunk at a place.
pub(crate) fn end_of_caf(size: u64, header: impl Fn(u64) -> Option<[u8; 12]>) -> u64 {
    let mut at = 8;
    for _ in 0..MOST_BOXES {
        let Some([_, _, _, _, length @ ..]) = header(at) else {
            return at.min(size);
        };
        let end = u64::from_be_bytes(length).saturating_add(at + 12);
        // Samples without a length (-1) reach to the end.
        if end > size {
            break;
        }
        at = end;
    }
    size
}

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

/// A source with other bytes at some places.
struct Patched {
    source: Box<dyn MediaSource>,
    at: u64,
    patches: Vec<(u64, [u8; 4])>,
}

impl Read for Patched {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer)?;
        for (place, bytes) in &self.patches {
            for (place, byte) in (*place..).zip(bytes) {
                let within = place.checked_sub(self.at).and_then(|at| usize::try_from(at).ok());
                if let Some(old) = within.and_then(|at| buffer[..read].get_mut(at)) {
                    *old = *byte;
                }
            }
        }
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for Patched {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.at = self.source.seek(to)?;
        Ok(self.at)
    }
}

impl MediaSource for Patched {
    fn is_seekable(&self) -> bool {
        self.source.is_seekable()
    }

    fn byte_len(&self) -> Option<u64> {
        self.source.byte_len()
    }
}

/// An MP4 for its reader, which leaves out a box that goes beyond the end: where the index comes before the samples, as in downloads
/// and in what is streamed, these are read up to the end, and missing ones are an error.
pub(crate) struct Mp4 {
    pub source: Box<dyn MediaSource>,
    /// It consists of fragments, each with an index of its own.
    pub is_fragmented: bool,
    /// Its index, if there is one.
    pub movie: Option<Movie>,
    /// Between fragments or after them there is what is no whole box: the reader ends there without a word.
    pub is_broken: bool,
}

impl Mp4 {
    /// # Errors
    /// Where the source cannot be read.
    pub fn of(mut source: Box<dyn MediaSource>) -> io::Result<Mp4> {
        let length = source.seek(SeekFrom::End(0))?;
        let (mut at, mut has_index, mut is_indexed) = (0u64, false, false);
        let (mut is_fragmented, mut is_broken, mut has_samples) = (false, false, true);
        let mut movie = None;
        for _ in 0..MOST_BOXES {
            let mut head = [0; 16];
            let read = read_at(&mut *source, at, &mut head)?;
            if read == 0 {
                is_broken = !has_samples;
                break;
            }
            let [a, b, c, d, ref name @ .., _, _, _, _, _, _, _, _] = head;
            match name {
                b"moov" => has_index = true,
                b"moof" => (is_indexed, is_fragmented, has_samples) = (has_index, true, false),
                b"mdat" => (is_indexed, has_samples) = (has_index, true),
                _ => {}
            }
            let size = match u64::from(u32::from_be_bytes([a, b, c, d])) {
                0 => {
                    // Such a box ends with the file. Zeros are none: they are there to fill it up, or a part is missing.
                    is_broken = is_fragmented && name == &[0; 4] && !is_zero(&mut *source, at)?;
                    is_indexed = false;
                    break;
                }
                1 => u64::from_be_bytes(std::array::from_fn(|byte| head[8 + byte])),
                size => size,
            };
            if is_indexed && !is_fragmented {
                break;
            }
            let end = at.checked_add(size).filter(|_| size >= 8 && read >= 8);
            let content = at + if head[..4] == [0, 0, 0, 1] { 16 } else { 8 };
            if let Some(end) = end.filter(|end| *end <= length && content <= *end) {
                match (name, &mut movie) {
                    (b"moov", None) => movie = Some(Movie::read(&mut *source, content, end)?),
                    (b"moof", Some(movie)) => movie.add_fragment(&mut *source, content, end)?,
                    _ => {}
                }
            }
            match end.filter(|end| *end <= length) {
                Some(end) => at = end,
                None => {
                    // Losing these boxes loses no audio.
                    is_broken = is_fragmented && (end.is_none() || ![b"mfra", b"free", b"skip"].contains(&name));
                    break;
                }
            }
        }
        source.rewind()?;
        let patches = movie.as_ref().map(Movie::patches).unwrap_or_default();
        if !patches.is_empty() {
            source = Box::new(Patched { source, at: 0, patches });
        }
        if is_indexed {
            source = Box::new(Endless(source));
        }
        Ok(Mp4 {
            source,
            is_fragmented,
            movie,
            is_broken,
        })
    }
}

/// Whether there is nothing but zeros from a place on.
fn is_zero(source: &mut dyn MediaSource, at: u64) -> io::Result<bool> {
    source.seek(SeekFrom::Start(at))?;
    let mut bytes = vec![0; 1 << 16];
    loop {
        match source.read(&mut bytes)? {
            0 => return Ok(true),
            read if bytes[..read].iter().any(|byte| *byte != 0) => return Ok(false),
            _ => {}
        }
    }
}

/// Whether several streams of an Ogg file play together, as those of a film: their first pages come one behind the other.
pub(crate) fn begins_with_several_streams(source: &mut dyn MediaSource) -> io::Result<bool> {
    let mut head = [0; 27 + 255];
    read_at(source, 0, &mut head)?;
    let laces = &head[27..][..usize::from(head[26])];
    let length = 27 + laces.len() + laces.iter().map(|lace| usize::from(*lace)).sum::<usize>();
    read_at(source, length as u64, &mut head[..6])?;
    source.rewind()?;
    Ok(head.starts_with(b"OggS\0") && head[5] & 2 != 0)
}

/// Whether the last page of an Ogg file is cut, or not the last one of its stream.
pub(crate) fn ends_within_a_stream(source: &mut dyn MediaSource) -> io::Result<bool> {
    let mut tail = Vec::new();
    let Some(length) = source.byte_len() else {
        return Ok(false);
    };
    source.seek(SeekFrom::Start(length.saturating_sub(OGG_TAIL)))?;
    (&mut *source).take(OGG_TAIL).read_to_end(&mut tail)?;
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

/// A Matroska file for its reader. Where that can seek, it looks for an index at the end, and leaves out all of what is not all there;
/// so it reads it from the beginning to the end.
pub(crate) struct Matroska {
    pub source: Box<dyn Read + Send + Sync>,
    pub end: SegmentEnd,
    /// The audio tracks that are flagged as those to play.
    pub tracks: AudioTracks,
}

/// What a Matroska file says of its end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SegmentEnd {
    Within,
    /// Before that of the file, where another one follows.
    Joined,
    /// Behind that of the file.
    Cut,
    /// It was written while nobody knew, as browsers do; with the last bytes of the file.
    Unknown(Vec<u8>),
}

impl Matroska {
    /// # Errors
    /// Where the source cannot be read.
    pub fn of(mut source: Box<dyn MediaSource>) -> io::Result<Matroska> {
        let length = source.seek(SeekFrom::End(0))?;
        let (mut chapters, mut end, mut tracks) = (None, SegmentEnd::Within, None);
        let mut most = u64::MAX;
        if let Some((begin, size)) = segment(&mut *source)? {
            chapters = before_packets(&mut *source, begin, CHAPTERS)?;
            tracks = before_packets(&mut *source, begin, TRACKS)?;
            match size.and_then(|size| begin.checked_add(size)) {
                Some(of_segment) if of_segment > length => end = SegmentEnd::Cut,
                Some(of_segment) => {
                    most = of_segment;
                    if element_at(&mut *source, of_segment)?.is_some_and(|(id, ..)| id == EBML) {
                        end = SegmentEnd::Joined;
                    }
                }
                None => {
                    let mut tail = Vec::new();
                    source.seek(SeekFrom::Start(length.saturating_sub(MATROSKA_TAIL).max(begin)))?;
                    (&mut *source).take(MATROSKA_TAIL).read_to_end(&mut tail)?;
                    end = SegmentEnd::Unknown(tail);
                }
            }
        }
        let tracks = match tracks {
            Some(at) => audio_tracks(&mut *source, at)?,
            None => AudioTracks::default(),
        };
        source.rewind()?;
        // Its reader refuses chapters without an `EditionUID`, which need not be there and which ffmpeg does not write.
        let patches = chapters.map(|at| (at, UNKNOWN)).into_iter().collect();
        let patched = Patched { source, at: 0, patches };
        let source = Box::new(patched.take(most));
        Ok(Matroska { source, end, tracks })
    }
}

/// Where the content of the segment begins, and its size, if it says it.
fn segment(matroska: &mut dyn MediaSource) -> io::Result<Option<(u64, Option<u64>)>> {
    let Some((EBML, Some(size), bytes)) = element_at(matroska, 0)? else {
        return Ok(None);
    };
    let Some(at) = size.checked_add(bytes) else {
        return Ok(None);
    };
    let found = element_at(matroska, at)?.filter(|(id, ..)| *id == SEGMENT);
    Ok(found.map(|(_, size, bytes)| (at + bytes, size)))
}

/// Where an element of a segment is, if it comes before its packets.
fn before_packets(matroska: &mut dyn MediaSource, begin: u64, wanted: u64) -> io::Result<Option<u64>> {
    let mut at = begin;
    for _ in 0..MOST_ELEMENTS {
        match element_at(matroska, at)? {
            Some((id, ..)) if id == wanted => return Ok(Some(at)),
            Some((id, Some(size), bytes)) if id != CLUSTER => {
                match at.checked_add(bytes).and_then(|at| at.checked_add(size)) {
                    Some(next) => at = next,
                    None => break,
                }
            }
            _ => break,
        }
    }
    Ok(None)
}

impl SegmentEnd {
    /// Whether a file ends where its reader finds no more, after this packet, its last that is not empty.
    pub fn is_after(&self, packet: &[u8]) -> bool {
        let tail = match self {
            SegmentEnd::Within | SegmentEnd::Joined => return true,
            SegmentEnd::Cut => return false,
            SegmentEnd::Unknown(tail) => tail,
        };
        let mut steps = MOST_STEPS;
        let places = tail.windows(packet.len().max(1)).enumerate().rev();
        for (place, _) in places.filter(|(_, bytes)| *bytes == packet) {
            if is_end(&tail[place + packet.len()..], &mut steps) {
                return true;
            }
            if steps == 0 {
                break;
            }
        }
        false
    }
}

/// Whether these bytes are whole elements, and zeros that fill a file up. Each element and each zero takes one of the steps.
fn is_end(mut rest: &[u8], steps: &mut usize) -> bool {
    loop {
        let zeros = rest.iter().take_while(|byte| **byte == 0).count();
        *steps = steps.saturating_sub(zeros + 1);
        if zeros == rest.len() {
            return true;
        }
        let end = element(rest).and_then(|(_, size, bytes)| usize::try_from(size?).ok()?.checked_add(bytes));
        match end.and_then(|end| rest.get(end..)) {
            Some(after) if *steps > 0 => rest = after,
            _ => return false,
        }
    }
}

/// [`element`] at a place, with the bytes of its head as a length in the file.
pub(crate) fn element_at(matroska: &mut dyn MediaSource, at: u64) -> io::Result<Option<(u64, Option<u64>, u64)>> {
    let mut head = [0; 4 + 8];
    let read = read_at(matroska, at, &mut head)?;
    Ok(element(&head[..read]).map(|(id, size, bytes)| (id, size, bytes as u64)))
}

/// Identifier and size of the element that begins here, and how many bytes these take. A size of nothing but ones is unknown.
pub(crate) fn element(bytes: &[u8]) -> Option<(u64, Option<u64>, usize)> {
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
pub(crate) fn read_at(source: &mut dyn MediaSource, at: u64, into: &mut [u8]) -> io::Result<usize> {
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
    use std::slice;

    use super::*;

    const HEAD: [u8; 7] = [0x1a, 0x45, 0xdf, 0xa3, 0x82, 1, 2];

    fn segment_of(size: &[u8], content: &[u8]) -> Vec<u8> {
        [&HEAD[..], &[0x18, 0x53, 0x80, 0x67], size, content].concat()
    }

    fn opened(bytes: &[u8]) -> (SegmentEnd, Vec<u8>) {
        let mut file = Matroska::of(Box::new(Cursor::new(bytes.to_vec()))).unwrap();
        let mut read = Vec::new();
        file.source.read_to_end(&mut read).unwrap();
        (file.end, read)
    }

    #[test]
    fn a_segment_says_where_it_ends() {
        let of = |bytes: &[u8]| opened(bytes).0;
        assert_eq!(of(&segment_of(&[0x84], &[1, 2, 3, 4])), SegmentEnd::Within);
        assert_eq!(of(&segment_of(&[0x84], &[1, 2, 3])), SegmentEnd::Cut);
        assert_eq!(
            of(&segment_of(&[0x01, 0, 0, 0, 0, 0, 1, 0], &[1; 255])),
            SegmentEnd::Cut
        );
        for unknown in [&[0xff][..], &[0x01, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]] {
            assert_eq!(of(&segment_of(unknown, &[1, 2, 3])), SegmentEnd::Unknown(vec![1, 2, 3]));
        }
        for other in [&b""[..], &HEAD[..5], &HEAD, b"\0\0\0\0\0\0\0\0\0\0\0\0\0"] {
            assert_eq!(of(other), SegmentEnd::Within, "{other:02x?}");
        }
        // What comes after it is not read.
        let one = segment_of(&[0x82], &[1, 2]);
        assert_eq!(opened(&[&one[..], &HEAD].concat()), (SegmentEnd::Joined, one.clone()));
        assert_eq!(opened(&[&one[..], &[0; 9]].concat()), (SegmentEnd::Within, one));
    }

    #[test]
    fn chapters_are_of_no_interest() {
        let content = [&[0xec, 0x81, 5][..], &[0x10, 0x43, 0xa7, 0x70, 0x81, 9]].concat();
        let bytes = segment_of(&[0x89], &content);
        let mut expected = bytes.clone();
        let last = expected.len();
        expected[last - 3] = 0x7f;
        assert_eq!(opened(&bytes), (SegmentEnd::Within, expected));
        // In a cluster they are none.
        let content = [&[0x1f, 0x43, 0xb6, 0x75, 0x86][..], &[0x10, 0x43, 0xa7, 0x70, 0x81, 9]].concat();
        let bytes = segment_of(&[0x8b], &content);
        assert_eq!(opened(&bytes).1, bytes);
    }

    #[test]
    fn a_file_ends_with_its_last_packet_and_whole_elements() {
        let end = SegmentEnd::Unknown(vec![9, 7, 8, 7, 8, 0x75, 0xa2, 0x82, 7, 8, 0, 0, 0]);
        assert!(end.is_after(&[7, 8, 7, 8]) && end.is_after(&[7, 8]) && end.is_after(&[8]));
        assert!(!end.is_after(&[7]) && !end.is_after(&[9, 7]) && !end.is_after(&[5; 20]) && !end.is_after(&[]));
        let cut = SegmentEnd::Unknown(vec![9, 7, 8, 0x75, 0xa2, 0x82, 7]);
        // Seconds, where each place would look at all that follows.
        let mut zeros = vec![0; 1 << 22];
        zeros.push(0xff);
        assert!(!SegmentEnd::Unknown(zeros).is_after(&[0]));
        let mut elements = [0xec, 0x80].repeat(1 << 20);
        elements.push(0xff);
        assert!(!SegmentEnd::Unknown(elements).is_after(&[0x80]));
        assert!(!cut.is_after(&[7, 8]) && !SegmentEnd::Cut.is_after(&[7, 8]) && SegmentEnd::Within.is_after(&[]));
    }

    #[test]
    fn boxes_of_an_mp4() {
        let part = |name: &[u8; 4], size: u32| {
            [&size.to_be_bytes()[..], name, &vec![0; size.saturating_sub(8) as usize]].concat()
        };
        let of = |parts: &[Vec<u8>]| {
            let mut mp4 = Mp4::of(Box::new(Cursor::new(parts.concat()))).unwrap();
            let is_endless = mp4.source.seek(SeekFrom::End(0)).unwrap() == ENDLESS;
            (is_endless, mp4.is_fragmented, mp4.is_broken)
        };
        let [ftyp, moov, moof, mdat] = [b"ftyp", b"moov", b"moof", b"mdat"].map(|name| part(name, 20));
        let head = [ftyp.clone(), moov.clone()];
        let with = |parts: &[Vec<u8>]| of(&[&head[..], parts].concat());
        let mut long = mdat.clone();
        long[3] = 21;
        assert_eq!(of(&[ftyp.clone(), mdat.clone(), moov.clone()]), (false, false, false));
        assert_eq!(with(slice::from_ref(&mdat)), (true, false, false));
        assert_eq!(with(&[long.clone()]), (true, false, false));
        assert_eq!(with(&[part(b"mdat", 0)]), (false, false, false));
        let fragment = [moof.clone(), mdat.clone()].concat();
        for whole in [
            &[][..],
            &[part(b"mfra", 9)[..8].to_vec()],
            &[part(b"free", 30)[..20].to_vec()],
        ] {
            assert_eq!(with(&[slice::from_ref(&fragment), whole].concat()), (true, true, false));
        }
        assert_eq!(with(&[fragment.clone(), vec![0; 30]]), (false, true, false));
        assert_eq!(
            with(&[fragment.clone(), moof.clone(), part(b"mdat", 0)]),
            (false, true, false)
        );
        for broken in [
            vec![1; 3],
            b"<html><body>".to_vec(),
            moof.clone(),
            moof[..12].to_vec(),
            [moof, long].concat(),
        ] {
            assert_eq!(
                with(&[fragment.clone(), broken.clone()]),
                (true, true, true),
                "{broken:02x?}"
            );
        }
        let hole = [vec![0; 100], fragment.clone()].concat();
        assert_eq!(with(&[fragment, hole]), (false, true, true));
    }
}
