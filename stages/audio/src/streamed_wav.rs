//! WAV whose header has no or wrong sizes. One that was written to a pipe has the size 0xFFFFFFFF, like ffmpeg's, or 0, as its
//! header was written before its length was known.

use std::io::{Read, Seek, SeekFrom};

/// Longest header that is searched, in bytes.
pub(crate) const LONGEST_HEADER: u64 = 1 << 20;
/// The size in place of an unknown one.
pub(crate) const UNKNOWN: u32 = u32::MAX;

/// Sizes from this on are what programs write that do not know them, where the recording is smaller: sox 0x7FFFF000 and more.
const LEAST_UNKNOWN: u32 = 0x7fff_f000;
/// Names of chunks that may come right after one of an odd length that is not filled up.
const NAMES: [&[u8; 4]; 6] = [b"data", b"fmt ", b"fact", b"LIST", b"bext", b"cue "];

/// A-law and mu-law.
const COMPANDED: [[u8; 2]; 2] = [[6, 0], [7, 0]];
/// WAVE_FORMAT_EXTENSIBLE: the format is the beginning of an identifier.
const EXTENSIBLE: [u8; 2] = [0xfe, 0xff];

/// A header that was mended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub bytes: Vec<u8>,
    /// Where the samples begin in the recording.
    pub start: u64,
    /// Whether it has no size of the samples, which then end with the recording.
    is_open: bool,
}

/// The header of a WAV up to its samples, with the sizes that it should have. `bytes` are those of the recording, `size` is how many
/// there are. A header without sizes has 0xFFFFFFFF or 0x7FFFF000 and more for that of the samples; or 0, and for that of the whole 0,
/// 0xFFFFFFFF or the length of the header alone, or no chunk behind them. Others have a size of the whole that is too small for the samples, or a chunk of an
/// odd length that is not filled up, or a format of A-law or mu-law without its last field, or as an extensible one. None where the header is right, is incomplete, or the recording is larger than a WAV can be (4 GiB).
pub(crate) fn header_with_sizes(mut bytes: impl Read, size: u64) -> Option<Header> {
    let mut header = Vec::new();
    // "RIFF", the size of what follows, "WAVE".
    take(&mut bytes, 12, &mut header)?;
    // Bytes that were added to fill up, and whether something else was changed: the reader fills up a list of an odd length twice.
    let (mut added, mut before, mut is_mended) = (0, 0, false);
    loop {
        // Chunks: a name, a size, and as many bytes, filled up to an even number.
        let chunk = header.len();
        take(&mut bytes, 8, &mut header)?;
        if chunk % 2 == 1 {
            // Behind an odd length: this is the name of the next one, or a byte that fills up.
            if NAMES.iter().any(|name| header[chunk..].starts_with(*name)) {
                header.insert(chunk, 0);
                added += 1;
            } else {
                take(&mut bytes, 1, &mut header)?;
            }
        }
        if chunk % 2 == 1 && header[before..].starts_with(b"LIST") {
            let length = u32::from_le_bytes(header[before + 4..before + 8].try_into().ok()?);
            header[before + 4..before + 8].copy_from_slice(&(length + 1).to_le_bytes());
            is_mended = true;
        }
        let chunk = chunk + chunk % 2;
        before = chunk;
        let length = u32::from_le_bytes(header[chunk + 4..].try_into().ok()?);
        if &header[chunk..chunk + 4] == b"data" {
            let known = |size: u64| u32::try_from(size).ok().filter(|&size| size != UNKNOWN);
            let start = header.len() as u64 - added;
            let there = size.checked_sub(start)?;
            let whole = u32::from_le_bytes(header[4..8].try_into().ok()?);
            // With 0 samples and a larger size of the whole, other chunks follow, or what can only be samples.
            let is_unset = length == 0
                && (whole == 0 || whole == UNKNOWN || u64::from(whole) + 8 == start || is_no_chunk(&mut bytes, there));
            let is_open = is_unset || length == UNKNOWN || (length >= LEAST_UNKNOWN && u64::from(length) > there);
            let samples = if is_open { known(there)? } else { length };
            let least = known(header.len() as u64 - 8 + u64::from(samples))?;
            let is_right = !is_open && whole >= least && added == 0 && !is_mended;
            let all = if is_open { least } else { whole.max(least) };
            header[4..8].copy_from_slice(&all.to_le_bytes());
            header[chunk + 4..].copy_from_slice(&samples.to_le_bytes());
            let bytes = header;
            return (!is_right).then_some(Header { bytes, start, is_open });
        }
        if header.len() as u64 + u64::from(length) > LONGEST_HEADER {
            return None;
        }
        take(&mut bytes, length.into(), &mut header)?;
        let format = header.get(chunk + 8..chunk + 10).map(|tag| [tag[0], tag[1]]);
        let within = header.get(chunk + 32..chunk + 34).map(|tag| [tag[0], tag[1]]);
        if length == 40
            && header[chunk..].starts_with(b"fmt ")
            && format == Some(EXTENSIBLE)
            && let Some(tag) = within.filter(|tag| COMPANDED.contains(tag))
        {
            // The reader knows them by another identifier: as a plain format, with what remains as a chunk that is passed over.
            header[chunk + 4] = 18;
            header[chunk + 8..chunk + 10].copy_from_slice(&tag);
            header[chunk + 24..chunk + 34].copy_from_slice(b"\0\0JUNK\x0e\0\0\0");
            is_mended = true;
        }
        if length == 16 && header[chunk..].starts_with(b"fmt ") && format.is_some_and(|tag| COMPANDED.contains(&tag)) {
            // GStreamer leaves out the length of what it does not add, which the reader asks for.
            header[chunk + 4] = 18;
            header.extend([0; 2]);
            added += 2;
        }
    }
}

/// Whether at least as many bytes follow as the head of a chunk has, and they are none of one that ends within `size`.
fn is_no_chunk(bytes: &mut impl Read, size: u64) -> bool {
    let mut head = Vec::new();
    let is_whole = take(bytes, 8, &mut head).is_some();
    let length = head.last_chunk().map_or(0, |length| u32::from_le_bytes(*length));
    is_whole && !(is_name(&head[..4]) && 8 + u64::from(length) <= size)
}

fn is_name(name: &[u8]) -> bool {
    name.iter().all(|byte| (0x20..0x7f).contains(byte))
}

/// Fewest bytes of samples that can be heard: a twentieth of a second of telephony.
const AUDIBLE: u64 = 400;

/// Whether audible samples follow those that the header of a WAV of `size` bytes mentions.
pub(crate) fn is_longer_than_its_header_says(bytes: &mut (impl Read + Seek), size: u64) -> bool {
    if bytes.rewind().is_err() || header_with_sizes(&mut *bytes, size).is_some_and(|header| header.is_open) {
        // The header has no sizes: the samples end with the recording.
        return false;
    }
    bytes_after_end(bytes, size).is_some_and(|after| after >= AUDIBLE)
}

/// The same of a WAV whose header says that the samples end at `end`.
pub(crate) fn goes_on_after(bytes: &mut (impl Read + Seek), end: u64, size: u64) -> bool {
    let fill = end & 1;
    rest_after_chunks(bytes, end + fill, true, fill, size).is_some_and(|after| after >= AUDIBLE)
}

/// How many bytes of a WAV of `size` bytes come after the samples that its header mentions and are no chunks, as where a program
/// that recorded was killed, or where a size does not fit 32 bits. None where these are the usual padding or a tag.
fn bytes_after_end(bytes: &mut (impl Read + Seek), size: u64) -> Option<u64> {
    // After "RIFF", the size, and "WAVE".
    rest_after_chunks(bytes, 12, false, 0, size)
}

/// [`bytes_after_end`] from a place on, with this many bytes before it that fill up to an even number.
fn rest_after_chunks(
    bytes: &mut (impl Read + Seek),
    mut at: u64,
    mut is_after_samples: bool,
    mut fill: u64,
    size: u64,
) -> Option<u64> {
    while at < size {
        let mut head = [0; 8];
        bytes.seek(SeekFrom::Start(at)).ok()?;
        let is_whole = bytes.read_exact(&mut head).is_ok();
        let name = &head[..4];
        let length = u64::from(u32::from_le_bytes(head[4..].try_into().ok()?));
        // Samples may look like a name, but seldom like a length, too.
        let is_chunk = is_whole && at + 8 + length <= size && is_name(name);
        if is_after_samples && !is_chunk {
            // Some programs do not fill up to an even number.
            let unfilled = std::mem::take(&mut fill);
            if unfilled == 0 {
                break;
            }
            at -= unfilled;
            continue;
        }
        if name == b"data" && std::mem::replace(&mut is_after_samples, true) {
            // Samples once more, which no reader looks for.
            break;
        }
        fill = length & 1;
        at = at.checked_add(8 + length + fill)?;
    }
    let rest = size.checked_sub(at).filter(|rest| *rest > 0)?;
    let mut head = [0; 3];
    bytes.seek(SeekFrom::Start(at)).ok()?;
    let is_tag = bytes.read_exact(&mut head).is_ok() && [b"ID3", b"TAG"].contains(&&head);
    (!is_tag && !is_silence(bytes, at, rest)).then_some(rest)
}

/// Whether there are zeros at the beginning, in the middle and at the end of this many bytes.
fn is_silence(bytes: &mut (impl Read + Seek), start: u64, length: u64) -> bool {
    const PART: u64 = 1 << 12;
    let last = length.saturating_sub(PART);
    [0, last / 2, last].into_iter().all(|part| {
        let mut found = Vec::new();
        let sought = bytes.seek(SeekFrom::Start(start + part)).is_ok();
        sought && bytes.take(PART).read_to_end(&mut found).is_ok() && found.iter().all(|byte| *byte == 0)
    })
}

/// None where there are not as many.
pub(crate) fn take(bytes: &mut impl Read, count: u64, into: &mut Vec<u8>) -> Option<()> {
    let taken = bytes.take(count).read_to_end(into).ok()?;
    (taken as u64 == count).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::decode;
    use crate::format::Format;
    use crate::part::stated_seconds;
    use crate::part::tests::decode_part;
    use crate::recording::probe;
    use crate::test_data::{raw_wav, wav};
    use flow_storage::Storage;

    const LIST: &[u8] = b"LIST\x1a\0\0\0INFOISFT\x0d\0\0\0Lavf61.7.100\0\0";

    /// With a list of tags before the samples, and these two sizes.
    fn with_sizes(whole: &[u8], size: u32, samples: u32) -> Vec<u8> {
        let mut bytes = [&whole[..36], LIST, &whole[36..]].concat();
        let data = 36 + LIST.len();
        assert_eq!(&bytes[data..data + 4], b"data");
        bytes[4..8].copy_from_slice(&size.to_le_bytes());
        bytes[data + 4..data + 8].copy_from_slice(&samples.to_le_bytes());
        bytes
    }

    /// As ffmpeg writes it to a pipe.
    fn streamed(whole: &[u8]) -> Vec<u8> {
        with_sizes(whole, UNKNOWN, UNKNOWN)
    }

    /// The total size where only the header is counted.
    const HEADER: u32 = 36 + LIST.len() as u32;

    #[test]
    fn a_streamed_wav_is_what_it_is_as_a_file() {
        let samples: Vec<i16> = (0..40_000).map(|at| (at * 37 % 20_011) as i16).collect();
        let sizes = [(UNKNOWN, UNKNOWN), (UNKNOWN, 0), (0, UNKNOWN), (0, 0), (HEADER, 0)];
        for (channels, (size, of_samples)) in [1, 2]
            .into_iter()
            .flat_map(|channels| sizes.map(|sizes| (channels, sizes)))
        {
            let whole = wav(16_000, channels, &samples);
            let bytes = with_sizes(&whole, size, of_samples);
            assert_eq!(
                probe(&bytes, &Format::ALL).unwrap(),
                probe(&whole, &Format::ALL).unwrap()
            );
            assert_eq!(decode(&bytes, 10.0).unwrap(), decode(&whole, 10.0).unwrap());
            // Behind other bytes and before others, as in a tar.
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("within");
            std::fs::write(&path, [&[7; 512][..], &bytes, &[7; 999]].concat()).unwrap();
            let range = Some((512, bytes.len() as u64));
            let seconds = 40_000.0 / 16_000.0 / f64::from(channels);
            assert_eq!(stated_seconds(&Storage::default(), &path, range), Some(seconds));
            let part = decode_part(&path, range, 0.5, 0.25, 10.0).unwrap();
            assert_eq!(part.signal, decode(&whole, 10.0).unwrap()[8_000..12_000]);
            // Of two channels the first second is decoded, too: it decides whether they are mixed.
            let most = if channels == 2 { 34_000 } else { 16_000 };
            assert!(part.decoded_frames.is_some_and(|frames| frames < most));
        }
        // The first size is known, as some write it; a frame that was cut off does not count.
        let whole = wav(16_000, 1, &samples);
        let mut bytes = whole.clone();
        bytes[40..44].fill(0xff);
        bytes.push(1);
        assert_eq!(probe(&bytes, &Format::ALL).unwrap().1.frames, 40_000);
    }

    #[test]
    fn other_headers_stay_as_they_are() {
        let whole = wav(16_000, 1, &[1, 2, 3]);
        let header = |bytes: &[u8]| header_with_sizes(bytes, bytes.len() as u64).map(|header| header.bytes);
        assert_eq!(header(&whole), None);
        let bytes = streamed(&whole);
        let made = header(&bytes).unwrap();
        assert_eq!(made.len() + 6, bytes.len());
        for length in 0..made.len() {
            assert_eq!(header(&bytes[..length]), None, "{length}");
        }
        // More than 32 bits hold, and a header that never ends.
        assert_eq!(header_with_sizes(&bytes[..], 1 << 33), None);
        let mut endless = bytes.clone();
        endless[40..44].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes());
        assert_eq!(header(&endless), None);
        // Without a sample there is nothing to decode.
        let empty = wav(16_000, 1, &[]);
        for bytes in [streamed(&empty), with_sizes(&empty, 0, 0), empty.clone()] {
            assert!(probe(&bytes, &Format::ALL).is_err());
        }
        // Nor where other chunks follow.
        let size = HEADER + LIST.len() as u32;
        let followed = [&with_sizes(&empty, size, 0)[..], LIST].concat();
        assert_eq!(size as usize + 8, followed.len());
        assert_eq!(header(&followed), None);
        assert!(probe(&followed, &Format::ALL).is_err());
    }

    #[test]
    fn a_format_that_is_too_short_for_telephony_is_mended() {
        for tag in [6, 7] {
            let data: Vec<u8> = (0..4_000).map(|at| (at * 37 % 251) as u8).collect();
            let short = raw_wav(8_000, 1, tag, 8, &data);
            assert_eq!(short[16], 16);
            let mut right = short.clone();
            right[16] = 18;
            right.splice(36..36, [0, 0]);
            right[4] += 2;
            assert_eq!(
                probe(&short, &Format::ALL).unwrap(),
                probe(&right, &Format::ALL).unwrap()
            );
            assert_eq!(decode(&short, 1.0).unwrap(), decode(&right, 1.0).unwrap());
        }
    }

    /// As libsndfile writes them.
    #[test]
    fn telephony_in_the_extensible_format_is_decoded() {
        for (tag, channels) in [(6, 1), (7, 2)] {
            let data: Vec<u8> = (0..4_000).map(|at| (at * 37 % 251) as u8).collect();
            let plain = raw_wav(8_000, channels, tag, 8, &data);
            let mut bytes = raw_wav(8_000, channels, 0xfffe, 8, &data);
            (bytes[4], bytes[16]) = (bytes[4].wrapping_add(24), 40);
            let identifier = b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71";
            let more = [
                &[22, 0, 8, 0, if channels == 1 { 4 } else { 3 }, 0, 0, 0, tag as u8, 0][..],
                identifier,
            ]
            .concat();
            bytes.splice(36..36, more);
            assert_eq!(
                probe(&bytes, &Format::ALL).unwrap(),
                probe(&plain, &Format::ALL).unwrap()
            );
            assert_eq!(decode(&bytes, 1.0).unwrap(), decode(&plain, 1.0).unwrap());
        }
    }

    /// What other programs write, and read.
    #[test]
    fn sizes_that_are_wrong_are_mended() {
        let samples: Vec<i16> = (0..2_000).map(|at| (at * 37 % 20_011) as i16).collect();
        let whole = wav(16_000, 1, &samples);
        let expected = probe(&whole, &Format::ALL).unwrap();
        let right = HEADER + 4_000;
        for (size, of_samples) in [
            (0x7fff_f024, 0x7fff_f000),
            (0x7fff_ffff, 0x7fff_ffff),
            (0, 4_000),
            (right - 8, 4_000),
            (36, 4_000),
            (right, 0),
        ] {
            let bytes = with_sizes(&whole, size, of_samples);
            assert_eq!(
                probe(&bytes, &Format::ALL).unwrap(),
                expected,
                "{size:x} {of_samples:x}"
            );
            assert_eq!(decode(&bytes, 1.0).unwrap(), decode(&whole, 1.0).unwrap());
        }
        // The text of a list has an odd length and nothing that fills it up.
        let mut odd = with_sizes(&whole, right - 1, 4_000);
        odd[40] -= 1;
        odd.remove(36 + LIST.len() - 1);
        assert_eq!(probe(&odd, &Format::ALL).unwrap(), expected);
        assert_eq!(decode(&odd, 1.0).unwrap(), decode(&whole, 1.0).unwrap());
        // A list of 255 bytes: its even length has another second byte.
        let list = [
            b"LIST",
            &255u32.to_le_bytes()[..],
            b"INFOISFT",
            &243u32.to_le_bytes(),
            &[b'x'; 243],
        ]
        .concat();
        for fill in [&[][..], &[0]] {
            let odd = [&whole[..36], &list, fill, &whole[36..]].concat();
            assert_eq!(probe(&odd, &Format::ALL).unwrap(), expected);
        }
        // What is cut is cut, and samples that come once more are not passed over.
        assert!(probe(&with_sizes(&whole, 0, 4_002), &Format::ALL).is_err());
        let twice = [&whole[..], &whole[36..]].concat();
        let why = probe(&twice, &Format::ALL).unwrap_err().to_string();
        assert!(why.contains("more follows"), "{why}");
    }

    #[test]
    fn samples_behind_the_end_of_the_header_are_found() {
        let samples: Vec<i16> = (0..40_000).map(|at| (at * 37 % 20_011) as i16).collect();
        let whole = wav(16_000, 1, &samples);
        let after = |bytes: &[u8]| bytes_after_end(&mut std::io::Cursor::new(bytes), bytes.len() as u64);
        let sized = |size: u32| with_sizes(&whole, 36 + size, size);
        assert_eq!((after(&whole), after(&sized(80_000))), (None, None));
        assert_eq!(after(&sized(20_000)), Some(60_000));
        // More than there is, which the decoder finds; nothing but a header; no WAV.
        for bytes in [&sized(90_000)[..], &whole[..44], &whole[..40], b"RIFF\0\0\0\0WAVE"] {
            assert_eq!(after(bytes), None);
        }
        for (end, found) in [
            (LIST, None),
            (&[0; 9_000], None),
            (b"ID3\x04\0\0\0\0\0\x02..", None),
            (b"\x01\x02\x03", Some(3)),
        ] {
            assert_eq!(after(&[&whole, end].concat()), found, "{end:?}");
        }
        // An odd number of bytes, filled up or not.
        let mut odd = sized(79_999)[..36 + LIST.len() + 8 + 79_999].to_vec();
        odd.extend(LIST);
        assert_eq!(after(&odd), None);
        odd.insert(odd.len() - LIST.len(), 0);
        assert_eq!(after(&odd), None);
    }
}
