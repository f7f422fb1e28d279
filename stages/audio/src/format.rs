//! Detects the format of a recording by its first bytes, not by its name.

use std::io;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A format of recordings that can be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    Flac,
    /// RIFF WAVE with linear PCM, floating point, A-law or mu-law.
    Wav,
    /// MPEG audio layer III, with or without an ID3 tag before it.
    Mp3,
    /// The audio of an MP4 container or of a QuickTime movie: AAC, ALAC, Opus, PCM.
    M4a,
    /// Vorbis in Ogg.
    Ogg,
    /// Opus in Ogg.
    Opus,
    /// AIFF and AIFF-C.
    Aiff,
    /// Apple's Core Audio Format.
    Caf,
    /// The audio of Matroska and WebM.
    Mkv,
    /// AAC without a container, in frames of ADTS, with or without an ID3 tag before it.
    Aac,
    /// WAV with sizes of 64 bits: RF64 and BW64.
    Rf64,
}

impl Format {
    pub const ALL: [Format; 11] = [
        Format::Flac,
        Format::Wav,
        Format::Mp3,
        Format::M4a,
        Format::Ogg,
        Format::Opus,
        Format::Aiff,
        Format::Caf,
        Format::Mkv,
        Format::Aac,
        Format::Rf64,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Format::Flac => "flac",
            Format::Wav => "wav",
            Format::Mp3 => "mp3",
            Format::M4a => "m4a",
            Format::Ogg => "ogg",
            Format::Opus => "opus",
            Format::Aiff => "aiff",
            Format::Caf => "caf",
            Format::Mkv => "mkv",
            Format::Aac => "aac",
            Format::Rf64 => "rf64",
        }
    }
}

/// Detects the format; the error describes what else the bytes are.
pub fn recognise(bytes: &[u8]) -> Result<Format, &'static str> {
    if bytes.starts_with(crate::flac::MARKER) {
        return Ok(Format::Flac);
    }
    if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WAVE") {
        return match coding_of_wav(bytes) {
            // The frames of an MP3 are found where they are.
            Some(coding) => mpeg(&bytes[first_frame(bytes)..]).map_err(|_| coding),
            None => Ok(Format::Wav),
        };
    }
    // Old QuickTime movies begin without a `ftyp` box.
    if let Some(b"ftyp" | b"moov" | b"mdat" | b"wide") = bytes.get(4..8) {
        return Ok(Format::M4a);
    }
    if bytes.starts_with(b"OggS") {
        return ogg(bytes);
    }
    if bytes.starts_with(b"RF64") || bytes.starts_with(b"BW64") {
        return match bytes.get(8..12) {
            Some(b"WAVE") => Ok(Format::Rf64),
            _ => Err("a 64-bit RIFF file that is not WAV"),
        };
    }
    if bytes.starts_with(b"FORM") {
        return match bytes.get(8..12) {
            Some(b"AIFF" | b"AIFC") => Ok(Format::Aiff),
            _ => Err("an IFF file that is not AIFF"),
        };
    }
    if bytes.starts_with(b"caff") {
        return Ok(Format::Caf);
    }
    if bytes.starts_with(&[0x1a, 0x45, 0xdf, 0xa3]) {
        return Ok(Format::Mkv);
    }
    mpeg(&bytes[first_frame(bytes)..]).map_err(|error| another(bytes).unwrap_or(error))
}

/// What a WAV holds, where that cannot be decoded.
fn coding_of_wav(bytes: &[u8]) -> Option<&'static str> {
    let tag = bytes.get(20..22).filter(|_| bytes.get(12..16) == Some(b"fmt "))?;
    match u16::from_le_bytes([tag[0], tag[1]]) {
        0x31 => Some("a WAV of GSM 6.10"),
        0x38 => Some("a WAV of NMS ADPCM"),
        0x40 => Some("a WAV of G.721"),
        0x50 => Some("a WAV of MPEG audio"),
        0x55 => Some("a WAV of MP3"),
        0x45 | 0x64 => Some("a WAV of G.726"),
        0xff => Some("a WAV of AAC"),
        0x160..=0x163 => Some("a WAV of Windows Media"),
        _ => None,
    }
}

/// What users have that cannot be decoded.
fn another(bytes: &[u8]) -> Option<&'static str> {
    let names: [(&[u8], &str); 16] = [
        (b"\x00\x00\x01\xba", "an MPEG program stream"),
        (b"Creative Voice File\x1a", "a Creative Voice file (.voc)"),
        (b"TTA1", "True Audio"),
        (b"OFR ", "OptimFROG"),
        (b"RIFX", "a big-endian WAV (RIFX)"),
        (b"riff\x2e\x91\xcf\x11", "Sony Wave64"),
        (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "Windows Media (ASF)"),
        (b".snd", "a Sun audio file (.au)"),
        (b"#!AMR", "AMR"),
        (b"wvpk", "WavPack"),
        (b"MAC ", "Monkey's Audio"),
        (b"\x0b\x77", "AC-3"),
        (b"FLV\x01", "Flash video"),
        (b"NIST_1A", "NIST SPHERE"),
        (b"<!DOCTYPE", "a web page"),
        (b"<html", "a web page"),
    ];
    if bytes.first() == Some(&0x47) && bytes.get(188) == Some(&0x47) {
        return Some("an MPEG transport stream");
    }
    if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"AVI ") {
        return Some("an AVI film");
    }
    let known = names.into_iter().find(|(start, _)| bytes.starts_with(start));
    known.map(|(_, name)| name)
}

/// Bytes of the beginning of a recording that are enough for [`recognise`], unless it begins with an ID3v2 tag.
pub(crate) const HEAD: usize = MOST_REST + 3 * LONGEST_FRAME;

/// Most bytes of a frame that was cut, before the first whole one.
const MOST_REST: usize = 4_096;
/// Longer ones are not looked for: those of MP3 have 1,441 bytes at most.
const LONGEST_FRAME: usize = 4_096;

/// Most zeros after a tag that are its padding.
pub(crate) const MOST_PADDING: usize = 1 << 20;

/// Length of the ID3v2 tags at the beginning and of the zeros after them, 0 if there are none; never more than there are bytes.
pub fn id3_length(bytes: &[u8]) -> usize {
    let mut tags = 0;
    loop {
        let tag = stated_id3_length(&bytes[tags..]);
        if tag == 0 {
            break;
        }
        tags = (tags + tag).min(bytes.len());
    }
    if tags == 0 { 0 } else { tags + zeros(&bytes[tags..]) }
}

/// Zeros at the beginning, as many as a padding may have.
fn zeros(bytes: &[u8]) -> usize {
    bytes.iter().take(MOST_PADDING).take_while(|byte| **byte == 0).count()
}

/// Where the frames of MPEG audio begin: see [`first_frame_after`].
pub(crate) fn first_frame(bytes: &[u8]) -> usize {
    let from = |at: u64| {
        usize::try_from(at)
            .ok()
            .and_then(|at| bytes.get(at..))
            .unwrap_or_default()
    };
    let head = |at| Ok(from(at)[..from(at).len().min(HEAD)].to_vec());
    let tag = id3_length(bytes);
    let start = first_frame_after(tag as u64, head, |at| zeros(from(at)) as u64);
    start.map_or(tag, |start| start as usize)
}

/// Where the frames of MPEG audio begin: after tags, which end at `tag`, zeros, and the rest of a frame, as files and streams begin
/// that were cut. `tag` where there are none. `head` reads [`HEAD`] bytes at a place, or all that there are, and `zeros` counts those
/// at a place, up to [`MOST_PADDING`].
///
/// # Errors
/// Those of `head`.
pub(crate) fn first_frame_after(
    tag: u64,
    head: impl Fn(u64) -> io::Result<Vec<u8>>,
    zeros: impl Fn(u64) -> u64,
) -> io::Result<u64> {
    if mpeg(&head(tag)?).is_ok() {
        return Ok(tag);
    }
    let start = tag + zeros(tag);
    let bytes = head(start)?;
    if mpeg(&bytes).is_ok() {
        return Ok(start);
    }
    Ok(match before_first_frame(&bytes) {
        0 => tag,
        more => start + more as u64,
    })
}

/// How many bytes come before the first of three frames, one behind the other; 0 where there are none.
pub(crate) fn before_first_frame(bytes: &[u8]) -> usize {
    let is_chain = |start: &usize| {
        let mut at = *start;
        let mut first = None;
        (0..3).all(|_| {
            let Some((format, length)) = bytes.get(at..).and_then(frame) else {
                return false;
            };
            at += length;
            *first.get_or_insert(format) == format
        })
    };
    (0..bytes.len().min(MOST_REST)).find(is_chain).unwrap_or(0)
}

/// Format and length of the frame of MP3 or AAC that begins here.
fn frame(bytes: &[u8]) -> Option<(Format, usize)> {
    let format = mpeg(bytes).ok()?;
    let &[_, second, third, fourth, fifth, sixth] = bytes.first_chunk()?;
    let length = match format {
        Format::Aac => usize::from(fourth & 3) << 11 | usize::from(fifth) << 3 | usize::from(sixth) >> 5,
        _ => {
            const RATES: [usize; 3] = [44_100, 48_000, 32_000];
            const KILOBITS: [[usize; 15]; 2] = [
                [0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160],
                [0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320],
            ];
            let (version, padding) = ((second >> 3) & 3, usize::from((third >> 1) & 1));
            let is_first = version == 3;
            // Versions 2 and 2.5 have a half and a quarter of the rate, and half as many samples.
            let halvings = match version {
                3 => 0,
                2 => 1,
                _ => 2,
            };
            let rate = RATES.get(usize::from((third >> 2) & 3))? >> halvings;
            let kilobits = KILOBITS[usize::from(is_first)]
                .get(usize::from(third >> 4))
                .filter(|kilobits| **kilobits > 0)?;
            (if is_first { 144_000 } else { 72_000 }) * kilobits / rate + padding
        }
    };
    (7..=LONGEST_FRAME).contains(&length).then_some((format, length))
}

/// The length in the header of an ID3v2 tag at the beginning, 0 if there is none.
pub(crate) fn stated_id3_length(bytes: &[u8]) -> usize {
    let Some(&[b'I', b'D', b'3', _, _, flags, a, b, c, d]) = bytes.first_chunk() else {
        return 0;
    };
    let size = [a, b, c, d]
        .iter()
        .fold(0usize, |size, byte| size << 7 | usize::from(byte & 0x7f));
    let footer = if flags & 0x10 != 0 { 10 } else { 0 };
    10 + size + footer
}

/// The codec of an Ogg file is named at the beginning of the first packet. Streams that play together, such as a film and its sound,
/// have their first pages one behind the other.
fn ogg(bytes: &[u8]) -> Result<Format, &'static str> {
    let mut rest = bytes;
    let mut found = "an Ogg file without Vorbis, Opus or FLAC";
    while rest.starts_with(b"OggS")
        && rest
            .get(5)
            .is_some_and(|flags| flags & 2 != 0 || rest.len() == bytes.len())
    {
        let segments = rest.get(26).map_or(0, |&count| usize::from(count));
        let packet = rest.get(27 + segments..).unwrap_or_default();
        if packet.starts_with(b"\x01vorbis") {
            return Ok(Format::Ogg);
        } else if packet.starts_with(b"OpusHead") {
            // The reader knows one stream, and the order of channels that Vorbis has (RFC 7845 section 5.1.1).
            return match packet.get(18) {
                Some(2..) => Err("Opus with an unusual order of channels"),
                _ => Ok(Format::Opus),
            };
        } else if packet.starts_with(b"\x7fFLAC") {
            return Ok(Format::Ogg);
        } else if packet.starts_with(b"Speex") {
            found = "Speex";
        }
        let laces = rest.get(27..27 + segments).unwrap_or_default();
        let length = laces.iter().map(|lace| usize::from(*lace)).sum::<usize>();
        rest = packet.get(length..).unwrap_or_default();
    }
    Err(found)
}

pub(crate) fn mpeg(bytes: &[u8]) -> Result<Format, &'static str> {
    let Some(&[0xff, second, third]) = bytes.first_chunk() else {
        return Err("no known audio format");
    };
    let (version, layer) = ((second >> 3) & 3, (second >> 1) & 3);
    match layer {
        _ if second & 0xe0 != 0xe0 => Err("no known audio format"),
        // Index of the rate, and profile.
        0 if second & 0xf6 == 0xf0 && (third >> 2) & 15 < 13 => match third >> 6 {
            1 => Ok(Format::Aac),
            _ => Err("AAC of another profile than LC"),
        },
        // Reserved values: no frame begins like this.
        0 => Err("no known audio format"),
        _ if version == 1 || third >> 4 == 15 || (third >> 2) & 3 == 3 => Err("no known audio format"),
        1 if third >> 4 == 0 => Err("an MP3 of free format"),
        1 => Ok(Format::Mp3),
        _ => Err("MPEG audio of layer I or II"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_tell_and_names_do_not() {
        let ogg = |packet: &[u8]| [&b"OggS"[..], &[0; 22], &[1, 30], packet].concat();
        let tagged = |after: &[u8]| [&b"ID3\x04\0\0\0\0\0\x05.tag."[..], after].concat();
        for (bytes, expected) in [
            (&b"fLaC"[..], Ok(Format::Flac)),
            (b"RIFF\x01\x02\x03\x04WAVEfmt ", Ok(Format::Wav)),
            (
                b"RIFF\x01\x02\x03\x04WAVEfmt \x14\0\0\0\x31\0",
                Err("a WAV of GSM 6.10"),
            ),
            (b"RIFF\x01\x02\x03\x04AVI ", Err("an AVI film")),
            (b"\0\0\x01\xba\x44", Err("an MPEG program stream")),
            (b"Creative Voice File\x1a\x1a\0", Err("a Creative Voice file (.voc)")),
            (b"NIST_1A\n   1024\n", Err("NIST SPHERE")),
            (
                &[&[0x47; 1][..], &[0; 187], &[0x47]].concat(),
                Err("an MPEG transport stream"),
            ),
            (&[0xff, 0xfb, 0x04, 0xc0], Err("an MP3 of free format")),
            (b"\0\0\0\x1cftypisom", Ok(Format::M4a)),
            (&ogg(b"\x01vorbis"), Ok(Format::Ogg)),
            (&[0xff, 0xf3, 0x88, 0xc0], Ok(Format::Mp3)),
            (&tagged(&[0xff, 0xfb, 0x90, 0]), Ok(Format::Mp3)),
            (&[0xff, 0xf1, 0x50, 0x80], Ok(Format::Aac)),
            (&tagged(&[0xff, 0xf9, 0x50, 0x80]), Ok(Format::Aac)),
            (&[0xff, 0xf1, 0x10, 0x80], Err("AAC of another profile than LC")),
            (&[0xff, 0xf1, 0x7c, 0x80], Err("no known audio format")),
            (b"RF64\xff\xff\xff\xffWAVEds64", Ok(Format::Rf64)),
            (b"BW64\xff\xff\xff\xffAVI ", Err("a 64-bit RIFF file that is not WAV")),
            (&[0xff, 0xff, 0xff, 0xff], Err("no known audio format")),
            (&[0xff, 0xfd, 0x90, 0], Err("MPEG audio of layer I or II")),
            (&tagged(b"fLaC"), Err("no known audio format")),
            (b"ID3", Err("no known audio format")),
            (b"", Err("no known audio format")),
            (b"OggS", Err("an Ogg file without Vorbis, Opus or FLAC")),
        ] {
            assert_eq!(recognise(bytes), expected, "{bytes:?}");
        }
        for (bytes, expected) in [
            (&ogg(b"OpusHead")[..], Ok(Format::Opus)),
            (
                &ogg(b"OpusHead\x01\x02\0\0\0\0\0\0\0\0\xff"),
                Err("Opus with an unusual order of channels"),
            ),
            (&ogg(b"\x7fFLAC\x01\0"), Ok(Format::Ogg)),
            (&ogg(b"Speex   "), Err("Speex")),
            (b"\0\0\0\x08wide\0\0\0\0mdat", Ok(Format::M4a)),
            (b"FORM\0\0\0\x2eAIFFCOMM", Ok(Format::Aiff)),
            (b"FORM\0\0\0\x2eAIFCFVER", Ok(Format::Aiff)),
            (b"FORM\0\0\0\x2eILBM", Err("an IFF file that is not AIFF")),
            (b"caff\0\x01\0\0desc", Ok(Format::Caf)),
            (b"\x1a\x45\xdf\xa3\x9f\x42\x86", Ok(Format::Mkv)),
        ] {
            assert_eq!(recognise(bytes), expected, "{bytes:?}");
        }
        // Two tags, as where a program did not know the first one, and the padding of a tag that does not count it.
        let frame = [0xff, 0xfb, 0x90, 0];
        let twice = tagged(&[&tagged(&[0; 700])[..], &frame].concat());
        assert_eq!((recognise(&twice), id3_length(&twice)), (Ok(Format::Mp3), 730));
        assert_eq!((id3_length(&[0, 0, 0xff]), id3_length(&tagged(&[0; 3]))), (0, 18));
        // A tag that claims more than there is.
        assert_eq!(id3_length(b"ID3\x04\0\0\x7f\x7f\x7f\x7f...."), 14);
    }
}
