//! FLAC: the verdict on a recording, and its samples.
//!
//! Metadata blocks are read here, and only `STREAMINFO` is passed to the decoder, so that a damaged comment or picture
//! does no harm. The third-party decoder gets hostile input, so a panic in it is caught and becomes a verdict.

use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};

use md5::{Digest as _, Md5};
use sha2::Sha256;
use symphonia::core::audio::{Audio, AudioBuffer, GenericAudioBufferRef};
use symphonia::core::codecs::audio::{AudioDecoder, AudioDecoderOptions};
use symphonia::core::formats::{FormatOptions, FormatReader};
use symphonia::core::io::{MediaSourceStream, MediaSourceStreamOptions};
use symphonia::default::codecs::FlacDecoder;
use symphonia::default::formats::FlacReader;

/// The first four bytes of a FLAC file.
pub const MARKER: &[u8; 4] = b"fLaC";

/// The verdict on one recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Ok,
    /// 0 bytes.
    EmptyFile,
    /// Does not begin with `fLaC`.
    NotFlac,
    /// A bad header, an error of the decoder, other frames than `STREAMINFO` says, or another MD5.
    DecodeError,
    /// Nothing after the last metadata block, or no frames.
    NoAudio,
    /// Of a format that is not allowed, or that cannot be decoded.
    UnsupportedFormat,
}

impl Status {
    /// The name under which rows are rejected.
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::EmptyFile => "empty_file",
            Status::NotFlac => "not_flac",
            Status::DecodeError => "decode_error",
            Status::NoAudio => "no_audio",
            Status::UnsupportedFormat => "unsupported_format",
        }
    }
}

/// The contents of `STREAMINFO`, or the equivalent of another format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamInfo {
    /// In Hz.
    pub sample_rate: u32,
    pub channels: u32,
    /// Bits per sample, 1 to 32.
    pub bits: u32,
    /// Frames (samples per channel); 0 where the encoder did not know.
    pub total_frames: u64,
    /// MD5 of the samples, interleaved, little-endian, in whole bytes; all zero where the encoder made none.
    pub md5: [u8; 16],
}

/// Why a recording cannot be used. `status` is never [`Status::Ok`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct Fault {
    pub status: Status,
    pub detail: String,
}

pub(crate) fn fault(status: Status, detail: impl ToString) -> Fault {
    Fault {
        status,
        detail: detail.to_string(),
    }
}

fn broken(detail: impl ToString) -> Fault {
    fault(Status::DecodeError, detail)
}

/// The hash of [`Verdict::audio_hash`] before the first sample.
pub(crate) fn new_hash(info: &StreamInfo) -> Sha256 {
    let mut hash = Sha256::new();
    hash.update(format!("{}:{}:", info.sample_rate, info.channels));
    hash
}

/// Adds left-justified samples to the hash; `buffer` is reused.
pub(crate) fn add_to_hash(hash: &mut Sha256, samples: &[i32], buffer: &mut Vec<u8>) {
    buffer.clear();
    buffer.extend(samples.iter().flat_map(|sample| sample.to_le_bytes()));
    hash.update(buffer);
}

/// A recording that decodes from beginning to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub info: StreamInfo,
    /// Frames decoded.
    pub frames: u64,
    /// Hexadecimal SHA-256 of ASCII `"{sample_rate}:{channels}:"` and the interleaved samples as
    /// little-endian `i32`, left-justified. Does not depend on how the samples were compressed.
    pub audio_hash: String,
}

/// Decodes the whole recording and checks it. Memory does not grow with its length.
pub fn probe(bytes: &[u8]) -> Result<Verdict, Fault> {
    let stream = Stream::open(bytes)?;
    let info = stream.info.clone();
    let mut hash = new_hash(&info);
    let mut little_endian: Vec<u8> = Vec::new();
    let mut checked = Checked::new(&info);
    stream.decode(|samples| {
        add_to_hash(&mut hash, samples, &mut little_endian);
        checked.take(samples)
    })?;
    let frames = checked.finish()?;
    Ok(Verdict {
        info,
        frames,
        audio_hash: hex::encode(hash.finalize()),
    })
}

/// Samples of a recording.
#[derive(Clone, Debug)]
pub struct Samples {
    pub info: StreamInfo,
    /// Interleaved, left-justified: a 16-bit sample is in the upper 16 bits.
    pub interleaved: Vec<i32>,
}

/// Decodes the samples, at most `max_frames` frames of them (more is a fault, so that a small file that
/// claims hours of silence cannot fill the memory). Checked like [`probe`].
pub fn decode(bytes: &[u8], max_frames: u64) -> Result<Samples, Fault> {
    let stream = Stream::open(bytes)?;
    let info = stream.info.clone();
    let mut interleaved = Vec::new();
    let mut checked = Checked::new(&info);
    stream.decode(|samples| {
        checked.take(samples)?;
        if checked.frames > max_frames {
            return Err(broken(format!("more than {max_frames} frames")));
        }
        interleaved.extend_from_slice(samples);
        Ok(())
    })?;
    checked.finish()?;
    Ok(Samples { info, interleaved })
}

/// Decodes the whole recording, checks it like [`probe`], and gives its samples block by block.
pub(crate) fn check(bytes: &[u8], mut take: impl FnMut(&StreamInfo, &[i32]) -> Result<(), Fault>) -> Result<(), Fault> {
    let stream = Stream::open(bytes)?;
    let mut checked = Checked::new(&stream.info);
    stream.decode(|samples| {
        checked.take(samples)?;
        take(&stream.info, samples)
    })?;
    checked.finish().map(|_| ())
}

/// Counts frames and computes the MD5 as `STREAMINFO` has it.
struct Checked<'a> {
    info: &'a StreamInfo,
    frames: u64,
    md5: Md5,
    bytes: Vec<u8>,
}

impl<'a> Checked<'a> {
    fn new(info: &'a StreamInfo) -> Self {
        Checked {
            info,
            frames: 0,
            md5: Md5::new(),
            bytes: Vec::new(),
        }
    }

    fn take(&mut self, samples: &[i32]) -> Result<(), Fault> {
        self.frames += samples.len() as u64 / u64::from(self.info.channels);
        if self.info.total_frames != 0 && self.frames > self.info.total_frames {
            return Err(broken(format!(
                "more frames than the {} of STREAMINFO",
                self.info.total_frames
            )));
        }
        if self.info.md5 != [0; 16] {
            let shift = 32 - self.info.bits;
            self.bytes.clear();
            match self.info.bits.div_ceil(8) {
                1 => self.bytes.extend(samples.iter().map(|sample| (sample >> shift) as u8)),
                2 => self.bytes.extend(
                    samples
                        .iter()
                        .flat_map(|sample| ((sample >> shift) as i16).to_le_bytes()),
                ),
                3 => {
                    for sample in samples {
                        let [a, b, c, _] = (sample >> shift).to_le_bytes();
                        self.bytes.extend([a, b, c]);
                    }
                }
                _ => self
                    .bytes
                    .extend(samples.iter().flat_map(|sample| (sample >> shift).to_le_bytes())),
            }
            self.md5.update(&self.bytes);
        }
        Ok(())
    }

    fn finish(self) -> Result<u64, Fault> {
        if self.info.total_frames != 0 && self.frames != self.info.total_frames {
            return Err(broken(format!(
                "{} frames, STREAMINFO says {}",
                self.frames, self.info.total_frames
            )));
        }
        if self.frames == 0 {
            return Err(fault(Status::NoAudio, "no frames"));
        }
        if self.info.md5 != [0; 16] && self.md5.finalize()[..] != self.info.md5 {
            return Err(broken("the MD5 of the samples is not that of STREAMINFO"));
        }
        Ok(self.frames)
    }
}

/// A FLAC file whose metadata was read.
struct Stream<'a> {
    info: StreamInfo,
    /// The 34 bytes of `STREAMINFO`.
    info_bytes: [u8; 34],
    /// What follows the last metadata block; not empty.
    frames: &'a [u8],
}

impl<'a> Stream<'a> {
    fn open(bytes: &'a [u8]) -> Result<Self, Fault> {
        if bytes.is_empty() {
            return Err(fault(Status::EmptyFile, "0 bytes"));
        }
        let Some(mut rest) = bytes.strip_prefix(MARKER) else {
            return Err(fault(Status::NotFlac, "does not begin with `fLaC`"));
        };
        let mut info_bytes: Option<[u8; 34]> = None;
        loop {
            let Some((&[kind, a, b, c], after)) = rest.split_first_chunk() else {
                return Err(broken("ends within the metadata"));
            };
            let length = u32::from_be_bytes([0, a, b, c]) as usize;
            if kind & 0x7f == 0 {
                if info_bytes.is_some() {
                    return Err(broken("two STREAMINFO blocks"));
                }
                let block = after.first_chunk().copied().filter(|_| length >= 34);
                info_bytes = Some(block.ok_or_else(|| broken("STREAMINFO is cut"))?);
            }
            rest = after.get(length..).unwrap_or_default();
            if kind & 0x80 != 0 {
                break;
            }
        }
        let info_bytes = info_bytes.ok_or_else(|| broken("no STREAMINFO"))?;
        if rest.is_empty() {
            return Err(fault(Status::NoAudio, "nothing after the metadata"));
        }
        Ok(Stream {
            info: StreamInfo::parse(&info_bytes)?,
            info_bytes,
            frames: rest,
        })
    }

    /// Gives the samples block by block, interleaved and left-justified.
    fn decode(&self, mut take: impl FnMut(&[i32]) -> Result<(), Fault>) -> Result<(), Fault> {
        let mut clean = Vec::with_capacity(42 + self.frames.len());
        clean.extend_from_slice(MARKER);
        // The one metadata block, marked as the last: type 0, 34 bytes.
        clean.extend_from_slice(&[0x80, 0, 0, 34]);
        clean.extend_from_slice(&self.info_bytes);
        clean.extend_from_slice(self.frames);
        let channels = self.info.channels as usize;
        let decoded = catch_unwind(AssertUnwindSafe(move || {
            let source = MediaSourceStream::new(Box::new(Cursor::new(clean)), MediaSourceStreamOptions::default());
            let mut reader = FlacReader::try_new(source, FormatOptions::default()).map_err(broken)?;
            let track = reader.tracks().first().ok_or_else(|| broken("no audio track"))?;
            let parameters = track.codec_params.as_ref().and_then(|parameters| parameters.audio());
            let parameters = parameters.ok_or_else(|| broken("no audio track"))?;
            let mut decoder = FlacDecoder::try_new(parameters, &AudioDecoderOptions::default()).map_err(broken)?;
            let mut interleaved = Vec::new();
            while let Some(packet) = reader.next_packet().map_err(broken)? {
                match decoder.decode(&packet).map_err(broken)? {
                    GenericAudioBufferRef::S32(block) => interleave(block, channels, &mut interleaved)?,
                    _ => return Err(broken("the decoder gave other samples than 32-bit ones")),
                }
                take(&interleaved)?;
            }
            Ok(())
        }));
        decoded.unwrap_or_else(|_| Err(broken("the decoder failed on damaged data")))
    }
}

fn interleave(block: &AudioBuffer<i32>, channels: usize, into: &mut Vec<i32>) -> Result<(), Fault> {
    if block.num_planes() != channels {
        return Err(broken(format!(
            "a block of {} channels, STREAMINFO says {channels}",
            block.num_planes()
        )));
    }
    into.clear();
    into.resize(block.frames() * channels, 0);
    for (channel, plane) in block.iter_planes().enumerate() {
        for (slot, sample) in into[channel..].iter_mut().step_by(channels).zip(plane) {
            *slot = *sample;
        }
    }
    Ok(())
}

/// What a FLAC file says of itself; none of other bytes, and where a tag comes before it.
pub fn stated_info(bytes: &[u8]) -> Option<StreamInfo> {
    // Marker, and the header of the first block: type 0 (perhaps the last block) and 34 bytes.
    let [marker @ .., kind, 0, 0, 34] = bytes.first_chunk::<8>()? else {
        return None;
    };
    let is_first = marker == MARKER && kind & 0x7f == 0;
    let block = bytes[8..].first_chunk::<34>().filter(|_| is_first)?;
    StreamInfo::parse(block).ok()
}

impl StreamInfo {
    /// Layout: RFC 9639 section 8.2. Bytes 0 to 9 hold block and frame sizes, which only the decoder needs.
    pub(crate) fn parse(block: &[u8; 34]) -> Result<Self, Fault> {
        let mut packed = [0u8; 8];
        packed.copy_from_slice(&block[10..18]);
        let packed = u64::from_be_bytes(packed);
        let mut md5 = [0u8; 16];
        md5.copy_from_slice(&block[18..34]);
        let info = StreamInfo {
            sample_rate: (packed >> 44) as u32,
            channels: ((packed >> 41) & 7) as u32 + 1,
            bits: ((packed >> 36) & 31) as u32 + 1,
            total_frames: packed & ((1 << 36) - 1),
            md5,
        };
        if info.sample_rate == 0 {
            return Err(broken("STREAMINFO has no sample rate"));
        }
        Ok(info)
    }
}

#[cfg(test)]
#[path = "flac_tests.rs"]
mod tests;
