//! What a narrower channel leaves of a signal.

use flow_audio::AudioError;
use flow_audio::resample::resample;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a telephone stores a sample in 8 bits (ITU-T G.711).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Codec {
    /// mu-law, of North America and Japan.
    MuLaw,
    /// A-law, of the rest of the world.
    ALaw,
}

/// Removes what is above `cutoff` Hz, with the filter of the resampler. The length stays.
///
/// # Errors
/// For cutoffs below 500 Hz.
pub fn lowpass(signal: &mut Vec<f32>, cutoff: u32, sample_rate: u32) -> Result<(), AudioError> {
    if cutoff >= sample_rate / 2 {
        return Ok(());
    }
    through(signal, 2 * cutoff, sample_rate, |_| ())
}

/// What a telephone at 8 kHz with this codec makes of a signal. The length stays.
///
/// # Errors
/// If `sample_rate` cannot be resampled.
pub fn narrowband(signal: &mut Vec<f32>, codec: Codec, sample_rate: u32) -> Result<(), AudioError> {
    through(signal, 8000, sample_rate, |signal| {
        for x in signal {
            *x = coded(*x, codec);
        }
    })
}

fn through(signal: &mut Vec<f32>, rate: u32, sample_rate: u32, change: impl Fn(&mut [f32])) -> Result<(), AudioError> {
    let length = signal.len();
    let mut narrow = resample(signal.clone(), sample_rate, rate)?;
    change(&mut narrow);
    *signal = resample(narrow, rate, sample_rate)?;
    signal.resize(length, 0.0);
    Ok(())
}

/// A sample in [-1, 1] as G.711 gives it back.
fn coded(x: f32, codec: Codec) -> f32 {
    let pcm = (f64::from(x).clamp(-1.0, 1.0) * 32767.0).round() as i16;
    f32::from(decoded(pcm, codec)) / 32768.0
}

/// A 16-bit sample as G.711 gives it back: the middle of its interval. There are eight segments of sixteen intervals for each
/// sign, each segment twice as wide as the one below it.
fn decoded(pcm: i16, codec: Codec) -> i16 {
    let magnitude = match codec {
        Codec::MuLaw => {
            // Of 14 bits, moved by 33 so that segments begin at powers of two.
            let moved = (i32::from(pcm) >> 2).abs().min(8158) + 33;
            let step = 1 << (27 - moved.leading_zeros());
            (moved / step * step + step / 2 - 33) * 4
        }
        Codec::ALaw => {
            // Of 13 bits; the two lowest segments are equally wide.
            let value = i32::from(if pcm < 0 { !pcm } else { pcm }) >> 3;
            let step = 1 << (27 - (value | 32).leading_zeros());
            (2 * (value / step * step) + step) * 4
        }
    };
    let magnitude = i16::try_from(magnitude).unwrap_or(i16::MAX);
    if pcm < 0 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sums are those of `sum(decoded * (i % 97))` over all 16-bit samples i, as Python's `audioop` codes and decodes them.
    #[test]
    fn all_samples_are_coded_as_python_codes_them() {
        for (codec, sum) in [(Codec::MuLaw, -1_266_784), (Codec::ALaw, 4_826_672)] {
            let weighted = |pcm: i16| i64::from(decoded(pcm, codec)) * i64::from(pcm).rem_euclid(97);
            assert_eq!((i16::MIN..=i16::MAX).map(weighted).sum::<i64>(), sum, "{codec:?}");
        }
    }
}
