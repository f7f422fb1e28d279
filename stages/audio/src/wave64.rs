//! WAV of more than 4 GiB: RF64 (EBU Tech 3306) and BW64 (ITU-R BS.2088), whose chunk `ds64` has the sizes in 64 bits. They are given
//! to the reader of CAF, which knows such sizes: the header becomes one of CAF.

use std::io::{Read, Seek};

use crate::decode_fault::{ENDS_TOO_SOON, LONGER_THAN_ITS_HEADER_SAYS, broken};
use crate::flac::{self, Fault, Status};
use crate::streamed_wav::{LONGEST_HEADER, UNKNOWN, goes_on_after, take};

/// A header of CAF for the samples, and where these are.
#[derive(Debug)]
pub(crate) struct Wave64 {
    pub head: Vec<u8>,
    /// Where the samples begin and end, in bytes.
    pub start: u64,
    pub end: u64,
    /// What is wrong where the header mentions more or fewer samples than there are.
    pub fault_at_end: Option<&'static str>,
}

/// How samples are stored.
struct Layout {
    /// Of CAF.
    kind: [u8; 4],
    /// Of CAF: 1 for floating point, 2 for little-endian.
    flags: u16,
    channels: u16,
    rate: u32,
    /// Of a frame, and of a sample.
    bytes: u16,
    bits: u16,
}

impl Layout {
    /// Of the content of a chunk `fmt `.
    fn parse(content: &[u8]) -> Result<Layout, Fault> {
        let cut = || broken("the chunk `fmt ` of a 64-bit WAV is cut");
        let short = |at: usize| content.get(at..at + 2).map(|two| u16::from_le_bytes([two[0], two[1]]));
        let rate = content
            .get(4..8)
            .and_then(|four| four.try_into().ok())
            .map(u32::from_le_bytes);
        let (Some(mut tag), Some(channels), Some(rate), Some(bytes), Some(_)) =
            (short(0), short(2), rate, short(12), short(14))
        else {
            return Err(cut());
        };
        // WAVE_FORMAT_EXTENSIBLE: the tag is the beginning of an identifier.
        if tag == 0xfffe {
            tag = short(24).ok_or_else(cut)?;
        }
        if channels == 0 || rate == 0 || bytes == 0 || bytes % channels != 0 {
            return Err(broken(format!(
                "a 64-bit WAV of {channels} channels at {rate} Hz with {bytes} bytes a frame"
            )));
        }
        let bits = 8 * u32::from(bytes / channels);
        let (kind, flags) = match (tag, bits) {
            (1, 16 | 24 | 32) => (*b"lpcm", 2),
            (3, 32 | 64) => (*b"lpcm", 3),
            (6, 8) => (*b"alaw", 0),
            (7, 8) => (*b"ulaw", 0),
            _ => {
                let what = format!("a 64-bit WAV of format {tag:#x} with {bits} bits");
                return Err(flac::fault(Status::UnsupportedFormat, what));
            }
        };
        Ok(Layout {
            kind,
            flags,
            channels,
            rate,
            bytes,
            bits: bits as u16,
        })
    }

    /// A file of CAF up to its samples, of which there are this many bytes.
    fn caf(&self, bytes: u64) -> Vec<u8> {
        let mut head = b"caff\0\x01\0\0desc".to_vec();
        head.extend(32u64.to_be_bytes());
        head.extend(f64::from(self.rate).to_be_bytes());
        head.extend(self.kind);
        // Flags; bytes of a packet, frames of it, channels, bits.
        for number in [self.flags, self.bytes, 1, self.channels, self.bits] {
            head.extend(u32::from(number).to_be_bytes());
        }
        head.extend(b"data");
        // With the count of edits, four bytes, before the samples.
        head.extend((bytes + 4).to_be_bytes());
        head.extend([0; 4]);
        head
    }
}

/// Reads the header. `bytes` are those of the recording, `size` is how many there are.
///
/// # Errors
/// Where it is cut or contradicts itself, or samples are coded in a way that is not supported.
pub(crate) fn read_header(mut bytes: impl Read + Seek, size: u64) -> Result<Wave64, Fault> {
    let cut = || broken("the header of a 64-bit WAV is cut");
    let mut part = Vec::new();
    take(&mut bytes, 12, &mut part).ok_or_else(cut)?;
    let mut at = 12;
    let (mut stated, mut layout): (Option<u64>, Option<Layout>) = (None, None);
    loop {
        part.clear();
        take(&mut bytes, 8, &mut part).ok_or_else(cut)?;
        at += 8;
        let &[a, b, c, d, ref length @ ..] = part.first_chunk::<8>().ok_or_else(cut)?;
        let (name, length) = ([a, b, c, d], u32::from_le_bytes(*length));
        if &name == b"data" {
            let layout = layout.ok_or_else(|| broken("a 64-bit WAV without the chunk `fmt `"))?;
            let stated = match length {
                // Programs that write to a pipe leave 0 or nothing but ones in both places.
                0 | UNKNOWN => stated.filter(|bytes| ![0, u64::MAX, u64::from(UNKNOWN)].contains(bytes)),
                length => Some(u64::from(length)),
            };
            let frame = u64::from(layout.bytes);
            let there = size.saturating_sub(at);
            let whole = there.min(stated.unwrap_or(there)) / frame * frame;
            let fault_at_end = match stated {
                Some(stated) if stated > there => Some(ENDS_TOO_SOON),
                Some(stated) if goes_on_after(&mut bytes, at + stated, size) => Some(LONGER_THAN_ITS_HEADER_SAYS),
                _ => None,
            };
            return Ok(Wave64 {
                head: layout.caf(whole),
                start: at,
                end: at + whole,
                fault_at_end,
            });
        }
        let padded = u64::from(length) + u64::from(length & 1);
        at += padded;
        if ![*b"ds64", *b"fmt "].contains(&name) {
            bytes.seek_relative(padded as i64).map_err(|_| cut())?;
            continue;
        }
        if padded > LONGEST_HEADER {
            return Err(broken("the header of a 64-bit WAV is too long"));
        }
        part.clear();
        take(&mut bytes, padded, &mut part).ok_or_else(cut)?;
        if &name == b"fmt " {
            layout = Some(Layout::parse(&part)?);
        } else {
            // Size of the whole, then of the samples.
            let sizes = part.get(8..16).and_then(|eight| eight.try_into().ok());
            stated = Some(u64::from_le_bytes(sizes.ok_or_else(cut)?));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use crate::decode::decode;
    use crate::format::{Format, recognise};
    use crate::recording::probe;
    use crate::test_data::raw_wav;

    /// A WAV as an RF64 whose `ds64` says that there are this many bytes of samples.
    pub fn as_rf64(wav: &[u8], stated: u64) -> Vec<u8> {
        let data = wav.windows(4).position(|name| name == b"data").unwrap();
        let mut sizes = Vec::new();
        for number in [stated.saturating_add(data as u64), stated, 0] {
            sizes.extend(number.to_le_bytes());
        }
        sizes.extend([0; 4]);
        let ds64 = [b"ds64", &(sizes.len() as u32).to_le_bytes()[..], &sizes].concat();
        let unknown = [0xff; 4];
        let after = &wav[data + 8..];
        [
            b"RF64",
            &unknown[..],
            b"WAVE",
            &ds64,
            &wav[12..data],
            b"data",
            &unknown,
            after,
        ]
        .concat()
    }

    #[test]
    fn a_64_bit_wav_has_the_samples_of_a_wav() {
        let bytes: Vec<u8> = (0..48_000u32).map(|at| (at * at % 251) as u8).collect();
        let floats: Vec<u8> = (0..9_000)
            .flat_map(|at| (at as f32 / 9_000.0 - 0.5).to_le_bytes())
            .collect();
        let pcm = [
            (1, 1, 16, &bytes),
            (2, 1, 16, &bytes),
            (2, 1, 24, &bytes),
            (8, 1, 16, &bytes),
            (1, 1, 32, &bytes),
            (1, 3, 32, &floats),
            (1, 6, 8, &bytes),
            (2, 7, 8, &bytes),
        ];
        for (channels, code, bits, data) in pcm {
            let what = format!("{channels} channels, format {code}, {bits} bits");
            let wav = raw_wav(48_000, channels, code, bits, data);
            let (_, expected) = probe(&wav, &Format::ALL).unwrap_or_else(|fault| panic!("{what}: {fault}"));
            let length = data.len() as u64;
            // Chunks behind the samples are none.
            let followed = [&as_rf64(&wav, length)[..], b"LIST\x04\0\0\0INFO"].concat();
            for bytes in [
                as_rf64(&wav, length),
                as_rf64(&wav, 0),
                as_rf64(&wav, u64::MAX),
                followed,
            ] {
                assert_eq!(recognise(&bytes), Ok(Format::Rf64));
                let (_, found) = probe(&bytes, &Format::ALL).unwrap_or_else(|fault| panic!("{what}: {fault}"));
                assert_eq!(
                    (found.frames, &found.audio_hash),
                    (expected.frames, &expected.audio_hash),
                    "{what}"
                );
            }
            assert_eq!(
                decode(&as_rf64(&wav, length), 1e6).unwrap(),
                decode(&wav, 1e6).unwrap(),
                "{what}"
            );
        }
    }

    #[test]
    fn what_is_cut_or_nonsense_is_a_fault() {
        let wav = raw_wav(16_000, 1, 1, 16, &[7; 3_200]);
        let whole = as_rf64(&wav, 3_200);
        let said = |bytes: &[u8]| probe(bytes, &Format::ALL).unwrap_err().to_string();
        assert!(said(&whole[..whole.len() - 100]).contains("the file is truncated"));
        assert!(said(&as_rf64(&wav, 1_600)).contains("more follows than its header says"));
        for end in 4..84 {
            assert!(probe(&whole[..end], &Format::ALL).is_err(), "{end} bytes");
        }
        assert!(said(&as_rf64(&raw_wav(16_000, 1, 1, 8, &[7; 100]), 100)).contains("format 0x1 with 8 bits"));
        assert!(said(&as_rf64(&raw_wav(0, 1, 1, 16, &[7; 100]), 100)).contains("at 0 Hz"));
        assert!(said(&as_rf64(&raw_wav(16_000, 0, 1, 16, &[7; 100]), 100)).contains("of 0 channels"));
        let huge = as_rf64(&wav, u64::MAX - 7);
        assert!(said(&huge).contains("the file is truncated"), "{}", said(&huge));
        // Where the size is in 64 bits alone, and after a long chunk of something else.
        let mut unset = whole.clone();
        let data = whole.len() - 3_200;
        unset[data - 4..data].fill(0);
        let long = [b"axml", &(3u32 << 20).to_le_bytes()[..], &vec![1; 3 << 20]].concat();
        unset.splice(12..12, long);
        assert_eq!(probe(&unset, &Format::ALL).unwrap().1.frames, 1_600);
    }
}
