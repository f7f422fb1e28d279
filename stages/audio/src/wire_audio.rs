//! Audio as clients send it: 16 bit PCM or G.711, which become samples at 16 kHz.

use crate::AudioError;
use crate::decode::SAMPLE_RATE;
use crate::resample::Resampler;

/// Rates of PCM, in samples a second: those of telephones and speech, and of the microphones of browsers.
pub const PCM_RATES: [u32; 10] = [
    8_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 88_200, 96_000, 192_000,
];
/// Samples a second of G.711.
const TELEPHONE_RATE: u32 = 8_000;

/// The header of a WAV file of integer PCM.
///
/// `rate`: samples a second; `width`: bytes of a sample; `data`: bytes of all samples, none where they are not known yet, as in a file
/// that is still being written.
pub fn wav_header(rate: u32, channels: u16, width: u16, data: Option<u32>) -> [u8; 44] {
    let block = channels.saturating_mul(width);
    let mut header = *b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x01\0..............data\xff\xff\xff\xff";
    header[22..24].copy_from_slice(&channels.to_le_bytes());
    header[24..28].copy_from_slice(&rate.to_le_bytes());
    header[28..32].copy_from_slice(&rate.saturating_mul(block.into()).to_le_bytes());
    header[32..34].copy_from_slice(&block.to_le_bytes());
    header[34..36].copy_from_slice(&width.saturating_mul(8).to_le_bytes());
    if let Some(data) = data {
        header[4..8].copy_from_slice(&data.saturating_add(36).to_le_bytes());
        header[40..].copy_from_slice(&data.to_le_bytes());
    }
    header
}

/// How the samples of a client are written: one channel, no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AudioFormat {
    /// 16 bit, little-endian, at one of [`PCM_RATES`].
    Pcm { rate: u32 },
    /// G.711 with the µ-law, at 8 kHz.
    Ulaw,
    /// G.711 with the A-law, at 8 kHz.
    Alaw,
}

impl AudioFormat {
    pub fn rate(self) -> u32 {
        match self {
            AudioFormat::Pcm { rate } => rate,
            AudioFormat::Ulaw | AudioFormat::Alaw => TELEPHONE_RATE,
        }
    }

    /// Bytes of a sample.
    pub fn width(self) -> usize {
        match self {
            AudioFormat::Pcm { .. } => 2,
            AudioFormat::Ulaw | AudioFormat::Alaw => 1,
        }
    }
}

/// Reads audio that comes in messages of any size, which may end within a sample.
pub struct WireAudio {
    format: AudioFormat,
    resampler: Resampler,
    /// The first byte of a sample whose second one has not come.
    rest: Option<u8>,
    samples: Vec<f32>,
}

impl WireAudio {
    /// # Errors
    /// If the rate is none of those that are resampled.
    pub fn new(format: AudioFormat) -> Result<Self, AudioError> {
        Ok(WireAudio {
            format,
            resampler: Resampler::new(format.rate(), SAMPLE_RATE)?,
            rest: None,
            samples: Vec::new(),
        })
    }

    pub fn format(&self) -> AudioFormat {
        self.format
    }

    /// Takes the next bytes, and appends what they complete to `out`: 16 kHz, in [-1, 1].
    pub fn feed(&mut self, bytes: &[u8], out: &mut Vec<f32>) {
        self.samples.clear();
        match self.format {
            AudioFormat::Pcm { .. } => {
                let mut bytes = bytes;
                if let (Some(low), Some((high, after))) = (self.rest, bytes.split_first()) {
                    self.samples.push(sample(i16::from_le_bytes([low, *high])));
                    self.rest = None;
                    bytes = after;
                }
                let pairs = bytes.chunks_exact(2);
                if let [low] = pairs.remainder() {
                    self.rest = Some(*low);
                }
                let numbers = pairs.map(|pair| i16::from_le_bytes([pair[0], pair[1]]));
                self.samples.extend(numbers.map(sample));
            }
            AudioFormat::Ulaw => self.samples.extend(bytes.iter().map(|&byte| sample(ulaw(byte)))),
            AudioFormat::Alaw => self.samples.extend(bytes.iter().map(|&byte| sample(alaw(byte)))),
        }
        self.resampler.feed(&self.samples, out);
    }

    /// Appends what is left at the end of the audio, and starts over.
    pub fn flush(&mut self, out: &mut Vec<f32>) {
        self.resampler.finish(out);
        // The rate was taken before.
        if let Ok(resampler) = Resampler::new(self.format.rate(), SAMPLE_RATE) {
            self.resampler = resampler;
        }
        self.rest = None;
    }
}

fn sample(number: i16) -> f32 {
    f32::from(number) / 32_768.0
}

/// A byte of the µ-law (ITU-T G.711): sign, three bits of exponent, four of mantissa, all inverted; 14 bits, here times 4.
fn ulaw(byte: u8) -> i16 {
    const BIAS: i16 = 0x84;
    let byte = !byte;
    let magnitude = ((i16::from(byte & 0x0f) << 3) + BIAS) << (byte >> 4 & 7);
    if byte & 0x80 == 0 {
        magnitude - BIAS
    } else {
        BIAS - magnitude
    }
}

/// A byte of the A-law (ITU-T G.711): sign, three bits of exponent, four of mantissa, every other bit inverted; 13 bits, here
/// times 8.
fn alaw(byte: u8) -> i16 {
    let byte = byte ^ 0x55;
    let mantissa = (i16::from(byte & 0x0f) << 4) + 8;
    let magnitude = match byte >> 4 & 7 {
        0 => mantissa,
        exponent => (mantissa + 0x100) << (exponent - 1),
    };
    if byte & 0x80 == 0 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn g711_is_that_of_the_standard() {
        // The ends and the middle of both laws' tables.
        for (byte, number) in [
            (0xff, 0),
            (0x7f, 0),
            (0x80, 32_124),
            (0x00, -32_124),
            (0xfe, 8),
            (0x7e, -8),
            (0x8f, 16_764),
        ] {
            assert_eq!(ulaw(byte), number, "{byte:#x}");
        }
        for (byte, number) in [(0xd5, 8), (0x55, -8), (0xaa, 32_256), (0x2a, -32_256), (0xd4, 24)] {
            assert_eq!(alaw(byte), number, "{byte:#x}");
        }
        // Both laws go up with their positive codes.
        let (mut up, mut across): (Vec<i16>, Vec<i16>) =
            (0x80..=0xffu8).map(|byte| (ulaw(byte), alaw(byte ^ 0x55))).unzip();
        up.reverse();
        assert!(up.is_sorted() && across.is_sorted(), "{up:?} {across:?}");
        across.dedup();
        assert_eq!(across.len(), 128);
    }

    fn samples_of(format: AudioFormat, bytes: &[u8], sizes: &[usize]) -> Vec<u32> {
        let (mut audio, mut out) = (WireAudio::new(format).unwrap(), Vec::new());
        let mut rest = bytes;
        for size in sizes.iter().cycle() {
            let (block, after) = rest.split_at(rest.len().min(*size));
            audio.feed(block, &mut out);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        audio.flush(&mut out);
        out.iter().map(|sample| sample.to_bits()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn messages_may_end_anywhere(
            bytes in prop::collection::vec(any::<u8>(), 0..4_000), sizes in prop::collection::vec(1usize..700, 1..5),
            kind in 0..PCM_RATES.len() + 2,
        ) {
            let format = match kind {
                0 => AudioFormat::Ulaw,
                1 => AudioFormat::Alaw,
                kind => AudioFormat::Pcm { rate: PCM_RATES[kind - 2] },
            };
            let whole = samples_of(format, &bytes, &[bytes.len().max(1)]);
            let count = (bytes.len() / format.width()) as u64;
            prop_assert_eq!(whole.len() as u64, (count * 16_000).div_ceil(u64::from(format.rate())));
            prop_assert_eq!(samples_of(format, &bytes, &sizes), whole);
        }
    }

    #[test]
    fn pcm_at_16_khz_is_taken_as_it_is() {
        let mut out = Vec::new();
        let mut audio = WireAudio::new(AudioFormat::Pcm { rate: 16_000 }).unwrap();
        audio.feed(&[0x00, 0x80, 0x00, 0x40, 0xff], &mut out);
        audio.feed(&[0xff], &mut out);
        assert_eq!(out, [-1.0, 0.5, -1.0 / 32_768.0]);
    }
}
