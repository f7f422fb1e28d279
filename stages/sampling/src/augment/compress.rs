//! What a lossy codec leaves of a signal: it is encoded and decoded again.

use flow_audio::AudioError;
use opus_pure::{Application, MAX_PACKET_BYTES, OpusDecoder, OpusEncoder};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A lossy codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", rename_all = "snake_case")]
pub enum LossyCodec {
    /// Opus (RFC 6716) at a variable rate, as voice messages and calls over the network have it.
    Opus,
}

impl TryFrom<String> for LossyCodec {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        match name.as_str() {
            "opus" => Ok(LossyCodec::Opus),
            "mp3" | "vorbis" | "gsm" => Err(format!(
                "flow decodes `{name}`, but does not encode it; `opus` is possible"
            )),
            other => Err(format!("`{other}` is not a codec; `opus` is possible")),
        }
    }
}

/// Bits per second of one channel at a level from 0 (256,000) to 1 (6,000), as libsndfile, and so Lhotse's `compress`, has it.
pub fn opus_rate(level: f64) -> i32 {
    (6000.0 + 250_000.0 * (1.0 - level.clamp(0.0, 1.0))) as i32
}

/// The signal after Opus at so many bits per second, in frames of 20 ms. Length and place stay.
///
/// # Errors
/// If `sample_rate` is none of Opus: 8, 12, 16, 24 or 48 kHz.
pub fn opus(signal: &mut [f32], bits_per_second: i32, sample_rate: u32) -> Result<(), AudioError> {
    let failed = |error: opus_pure::Error| AudioError::Decode(format!("Opus: {error}"));
    let rate = sample_rate as i32;
    let frame = sample_rate as usize / 50;
    let mut encoder = OpusEncoder::new(rate, 1, Application::Audio).map_err(failed)?;
    encoder.bitrate_bps = bits_per_second;
    let mut decoder = OpusDecoder::new(rate, 1).map_err(failed)?;
    let delay = encoder.lookahead();
    let mut packet = vec![0; MAX_PACKET_BYTES];
    let mut coded = signal.to_vec();
    let (mut block, mut decoded) = (vec![0.0; frame], vec![0.0; frame]);
    for at in (0..signal.len() + delay).step_by(frame) {
        let input = signal.get(at..).unwrap_or_default();
        let count = input.len().min(frame);
        for (to, from) in block.iter_mut().zip(&input[..count]) {
            *to = if from.is_finite() { *from } else { 0.0 };
        }
        block[count..].fill(0.0);
        let size = encoder.encode(&block, frame, &mut packet).map_err(failed)?;
        decoder.decode(&packet[..size], frame, &mut decoded).map_err(failed)?;
        let skipped = delay.saturating_sub(at).min(frame);
        let output = coded
            .get_mut((at + skipped).saturating_sub(delay)..)
            .unwrap_or_default();
        for (to, from) in output.iter_mut().zip(&decoded[skipped..]) {
            *to = *from;
        }
    }
    signal.copy_from_slice(&coded);
    Ok(())
}
