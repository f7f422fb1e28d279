//! WAV that was written to a pipe: its header was written before its length was known, and has the size 0xFFFFFFFF,
//! like ffmpeg's, or 0.

use std::io::Read;

/// Longest header that is searched, in bytes.
const LONGEST_HEADER: u64 = 1 << 20;
/// The size in place of an unknown one.
const UNKNOWN: u32 = u32::MAX;

/// The header of such a WAV, which ends where its samples begin, with the sizes that it would have if the samples end with the
/// recording. `bytes` are those of the recording, `size` is how many there are. A header without sizes has 0xFFFFFFFF for that of
/// the samples; or 0, and for that of the whole 0, 0xFFFFFFFF or the length of the header alone. None where the header has its
/// sizes, is incomplete, or the recording is larger than a WAV can be (4 GiB).
pub(crate) fn header_with_sizes(mut bytes: impl Read, size: u64) -> Option<Vec<u8>> {
    let mut header = Vec::new();
    // "RIFF", the size of what follows, "WAVE".
    take(&mut bytes, 12, &mut header)?;
    loop {
        // Chunks: a name, a size, and as many bytes, filled up to an even number.
        let chunk = header.len();
        take(&mut bytes, 8, &mut header)?;
        let length = u32::from_le_bytes(header[chunk + 4..].try_into().ok()?);
        if &header[chunk..chunk + 4] == b"data" {
            let known = |size: u64| u32::try_from(size).ok().filter(|&size| size != UNKNOWN);
            let whole = u32::from_le_bytes(header[4..8].try_into().ok()?);
            // With 0 samples and a larger size of the whole, other chunks follow.
            let is_unset =
                length == 0 && (whole == 0 || whole == UNKNOWN || u64::from(whole) + 8 == header.len() as u64);
            let samples = known(size.checked_sub(header.len() as u64)?)?;
            let all = known(size.checked_sub(8)?)?;
            header[4..8].copy_from_slice(&all.to_le_bytes());
            header[chunk + 4..].copy_from_slice(&samples.to_le_bytes());
            return (length == UNKNOWN || is_unset).then_some(header);
        }
        let padded = u64::from(length) + u64::from(length & 1);
        if header.len() as u64 + padded > LONGEST_HEADER {
            return None;
        }
        take(&mut bytes, padded, &mut header)?;
    }
}

/// None where there are not as many.
fn take(bytes: &mut impl Read, count: u64, into: &mut Vec<u8>) -> Option<()> {
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
    use crate::test_data::wav;

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
            assert_eq!(stated_seconds(&path, range), Some(seconds));
            let part = decode_part(&path, range, 0.5, 0.25, 10.0).unwrap();
            assert_eq!(part.signal, decode(&whole, 10.0).unwrap()[8_000..12_000]);
            assert!(part.decoded_frames.is_some_and(|frames| frames < 16_000));
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
        let header = |bytes: &[u8]| header_with_sizes(bytes, bytes.len() as u64);
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
        // A size of the samples and none of the whole: the former counts.
        assert_eq!(header(&with_sizes(&whole, 0, 6)), None);
    }
}
