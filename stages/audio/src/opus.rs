//! Opus packets to samples, whatever container they came in. Layout of the header: RFC 7845 section 5.1.

use opus_pure::{ChannelLayout, MAX_PACKET_SAMPLES, OpusDecoder, OpusMSDecoder};

use crate::decode_fault::broken;
use crate::flac::{self, Fault, Status, StreamInfo};

/// Opus is decoded at its own rate, in Hz, in which its header counts, too.
const RATE: u32 = 48_000;

enum Decoder {
    /// One or two channels.
    Single(Box<OpusDecoder>),
    /// Several streams in each packet, in the order of channels that Vorbis has.
    Multistream(Box<OpusMSDecoder>),
}

/// What a header begins with.
pub(crate) const MAGIC: &[u8] = b"OpusHead";

/// The header that is implied for a CAF without one, as ffmpeg and Apple's programs write it: nothing is said but the channels.
pub(crate) fn usual_head(channels: usize) -> Vec<u8> {
    let channels = u8::try_from(channels).unwrap_or(u8::MAX);
    let rate = RATE.to_le_bytes();
    [MAGIC, &[1, channels, 0, 0], &rate, &[0, 0, 0]].concat()
}

/// Of a header from an MP4, whose numbers are big-endian (`dOps`, "Encapsulation of Opus in ISO Base Media File Format"), one as in Ogg.
/// GStreamer writes that of Ogg: read as big-endian its rate is none, and its delay cuts off up to a second.
pub(crate) fn to_little_endian(head: &mut [u8]) {
    const HIGHEST_RATE: u32 = 1 << 20;
    let rate = head.get(12..).and_then(|rest| rest.first_chunk::<4>());
    if rate.is_some_and(|&rate| u32::from_be_bytes(rate) > HIGHEST_RATE && u32::from_le_bytes(rate) <= HIGHEST_RATE) {
        return;
    }
    // Delay of the encoder, rate of what it got, gain.
    for number in [10..12, 12..16, 16..18] {
        if let Some(bytes) = head.get_mut(number) {
            bytes.reverse();
        }
    }
}

/// Decodes the packets of one stream from its beginning.
pub(crate) struct OpusPackets {
    decoder: Decoder,
    channels: usize,
    /// Frames to leave out at the beginning: the delay of the encoder.
    pub pre_skip: u64,
    /// How many of them remain.
    left_out: u64,
    block: Vec<i16>,
}

impl OpusPackets {
    /// `head` is the packet `OpusHead`, which all containers keep.
    pub fn open(head: &[u8]) -> Result<OpusPackets, Fault> {
        let unsupported = |what: &str| flac::fault(Status::UnsupportedFormat, what);
        let Some(head) = head.strip_prefix(MAGIC) else {
            return Err(broken("Opus without its header"));
        };
        let Some(
            &[
                version,
                channels,
                skip_low,
                skip_high,
                _,
                _,
                _,
                _,
                gain_low,
                gain_high,
                family,
            ],
        ) = head.first_chunk()
        else {
            return Err(broken("the header of Opus is cut"));
        };
        if version >> 4 != 0 {
            return Err(unsupported("Opus of an unknown version"));
        }
        let gain = i32::from(i16::from_le_bytes([gain_low, gain_high]));
        let rate = RATE as i32;
        let decoder = if family == 0 {
            let decoder = OpusDecoder::new(rate, channels.into());
            let mut decoder = decoder.map_err(|_| broken(format!("Opus with {channels} channels")))?;
            decoder.gain_q8 = gain;
            Decoder::Single(Box::new(decoder))
        } else {
            let layout = ChannelLayout::surround(channels.into(), family);
            let layout = layout.map_err(|_| unsupported("Opus with an unknown order of channels"))?;
            // The decoder only supports the default order.
            let usual = [layout.nb_streams as u8, layout.nb_coupled_streams as u8];
            let said = head.get(11..).unwrap_or_default().strip_prefix(&usual);
            if said.and_then(|mapping| mapping.get(..layout.mapping.len())) != Some(&layout.mapping[..]) {
                return Err(unsupported("Opus with an unusual order of channels"));
            }
            let mut decoder = OpusMSDecoder::new(rate, channels.into(), family).map_err(broken)?;
            decoder
                .streams_mut()
                .iter_mut()
                .for_each(|stream| stream.gain_q8 = gain);
            Decoder::Multistream(Box::new(decoder))
        };
        let channels = usize::from(channels);
        let pre_skip = u64::from(u16::from_le_bytes([skip_low, skip_high]));
        Ok(OpusPackets {
            decoder,
            channels,
            pre_skip,
            left_out: pre_skip,
            block: vec![0; MAX_PACKET_SAMPLES * channels],
        })
    }

    /// Leaves the delay of the encoder in, for a container that says itself what is presented.
    pub fn keep_delay(&mut self) {
        self.left_out = 0;
    }

    pub fn layout(&self) -> StreamInfo {
        StreamInfo {
            sample_rate: RATE,
            channels: self.channels as u32,
            bits: 16,
            total_frames: 0,
            md5: [0; 16],
        }
    }

    /// The samples of the next packet, less `trim_start` and `trim_end` frames, interleaved and left-justified, in the place
    /// of what is in `samples`. Gives the number of frames.
    pub fn decode(
        &mut self,
        packet: &[u8],
        trim_start: u64,
        trim_end: u64,
        samples: &mut Vec<i32>,
    ) -> Result<u64, Fault> {
        samples.clear();
        if packet.is_empty() {
            return Ok(0);
        }
        let frames = match &mut self.decoder {
            Decoder::Single(decoder) => decoder.decode_s16(packet, MAX_PACKET_SAMPLES, &mut self.block),
            Decoder::Multistream(decoder) => decoder.decode_s16(packet, MAX_PACKET_SAMPLES, &mut self.block),
        };
        let frames = frames.map_err(broken)? as u64;
        let before = self.left_out.min(frames);
        self.left_out -= before;
        let first = before.max(trim_start.min(frames));
        let kept = frames.saturating_sub(trim_end).saturating_sub(first);
        let block = self.block.get(first as usize * self.channels..).unwrap_or_default();
        let kept_samples = kept as usize * self.channels;
        samples.extend(block.iter().take(kept_samples).map(|&sample| i32::from(sample) << 16));
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(channels: u8, family: u8, mapping: &[u8]) -> Vec<u8> {
        let fixed = [1, channels, 0x38, 1, 0x80, 0xbb, 0, 0, 0, 0, family];
        [b"OpusHead", &fixed[..], mapping].concat()
    }

    fn status(head: &[u8]) -> Status {
        OpusPackets::open(head).map_or_else(|fault| fault.status, |_| Status::Ok)
    }

    #[test]
    fn headers_are_read_and_others_refused() {
        let stereo = OpusPackets::open(&head(2, 0, &[])).unwrap();
        assert_eq!((stereo.pre_skip, stereo.layout().channels), (312, 2));
        // 5.1: four streams, two of them of two channels.
        let surround = [4, 2, 0, 4, 1, 2, 3, 5];
        assert_eq!(OpusPackets::open(&head(6, 1, &surround)).unwrap().layout().channels, 6);
        assert_eq!(status(&head(6, 1, &surround[..7])), Status::UnsupportedFormat);
        assert_eq!(
            status(&head(6, 1, &[4, 2, 0, 1, 2, 3, 4, 5])),
            Status::UnsupportedFormat
        );
        assert_eq!(status(&head(2, 255, &[2, 0, 0, 1])), Status::UnsupportedFormat);
        assert_eq!(status(&head(3, 0, &[])), Status::DecodeError);
        assert_eq!(status(&head(0, 0, &[])), Status::DecodeError);
        assert_eq!(status(&head(2, 0, &[])[..18]), Status::DecodeError);
        assert_eq!(status(b"OpusTags"), Status::DecodeError);
        let mut newer = head(1, 0, &[]);
        newer[8] = 0x10;
        assert_eq!(status(&newer), Status::UnsupportedFormat);
    }

    #[test]
    fn the_delay_and_what_is_trimmed_are_left_out() {
        // Silence: one frame of CELT, 20 ms.
        let packet = [0xf8, 0xff, 0xfe];
        let mut samples = vec![7];
        let mut frames = |opus: &mut OpusPackets, start, end| {
            let frames = opus.decode(&packet, start, end, &mut samples).unwrap();
            assert_eq!(samples.len() as u64, frames);
            frames
        };
        let mut opus = OpusPackets::open(&head(1, 0, &[])).unwrap();
        assert_eq!(frames(&mut opus, 0, 0), 960 - 312);
        assert_eq!(frames(&mut opus, 0, 0), 960);
        assert_eq!(frames(&mut opus, 100, 60), 800);
        assert_eq!(frames(&mut opus, 0, 5_000), 0);
        assert!(opus.decode(&[], 0, 0, &mut Vec::new()).is_ok_and(|frames| frames == 0));
        // Three frames of 60 ms are more than a packet may have.
        assert!(opus.decode(&[0x1b, 3, 0, 0, 0], 0, 0, &mut Vec::new()).is_err());
    }

    #[test]
    fn the_header_of_an_mp4_is_that_of_ogg() {
        // Two channels, a delay of 312 frames, 48 kHz, a gain of -1.
        let mut head = b"OpusHead\0\x02\x01\x38\0\0\xbb\x80\xff\0\0".to_vec();
        to_little_endian(&mut head);
        assert_eq!(head, b"OpusHead\0\x02\x38\x01\x80\xbb\0\0\0\xff\0");
        assert_eq!(OpusPackets::open(&head).unwrap().pre_skip, 312);
        to_little_endian(&mut head[..11]);
    }
}
