//! What a lossy codec leaves of a signal: it is encoded and decoded again.

use flow_audio::{AudioError, recording};
use opus_pure::{Application, MAX_PACKET_BYTES, OpusDecoder, OpusEncoder};
use rusty_mp3::{Mp3Encoder, Mp3EncoderConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A lossy codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", rename_all = "snake_case")]
pub enum LossyCodec {
    /// Opus (RFC 6716) at a variable rate, as voice messages and calls over the network have it.
    Opus,
    /// MP3 at a constant rate, as old recordings and downloads have it.
    Mp3,
}

impl TryFrom<String> for LossyCodec {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        match name.as_str() {
            "opus" => Ok(LossyCodec::Opus),
            "mp3" => Ok(LossyCodec::Mp3),
            "vorbis" | "gsm" => Err(format!(
                "flow decodes `{name}`, but does not encode it; `opus` and `mp3` are possible"
            )),
            other => Err(format!("`{other}` is not a codec; `opus` and `mp3` are possible")),
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

/// Bits per second of one channel at 16 to 24 kHz at a level from 0 (160,000) to 1 (8,000), as libsndfile has it at constant rates. The
/// encoder takes the nearest rate of the standard.
pub fn mp3_rate(level: f64) -> u32 {
    (8000.0 + 152_000.0 * (1.0 - level.clamp(0.0, 1.0))) as u32
}

/// The signal after MP3 at so many bits per second. Length and place stay.
///
/// # Errors
/// If `sample_rate` is none of MP3.
pub fn mp3(signal: &mut [f32], bits_per_second: u32, sample_rate: u32) -> Result<(), AudioError> {
    if signal.is_empty() {
        return Ok(());
    }
    let failed = |why: String| AudioError::Decode(format!("MP3: {why}"));
    let mut encoder = Mp3Encoder::new(Mp3EncoderConfig {
        bitrate_kbps: bits_per_second.div_ceil(1000),
        vbr_quality: None,
    });
    let finite: Vec<f32> = signal.iter().map(|x| if x.is_finite() { *x } else { 0.0 }).collect();
    encoder
        .push_pcm_f32(&finite, 1, sample_rate)
        .map_err(|error| failed(error.to_string()))?;
    encoder.finish();
    let mut file = Vec::new();
    loop {
        match encoder.next_packet() {
            Ok(packet) => file.extend_from_slice(&packet),
            Err(rusty_mp3::Error::Again | rusty_mp3::Error::Eof) => break,
            Err(error) => return Err(failed(error.to_string())),
        }
    }
    // The first frame says how much of the rest is the signal.
    let decoded = recording::decode(&file, u64::MAX).map_err(|fault| failed(fault.to_string()))?;
    let mut decoded = decoded.interleaved.into_iter();
    for to in signal {
        *to = decoded.next().map_or(0.0, |sample| sample as f32 / 2_147_483_648.0);
    }
    Ok(())
}
