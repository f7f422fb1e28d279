//! Decodes the bytes of a recording to the input of a model: one channel, 16 kHz, `f32`.

use std::path::Path;

use flow_kind::open_input_file;
use flow_storage::{InputFile, Storage};

use crate::embedded;
use crate::error::AudioError;
use crate::mixer::{Decided, Mixer};
use crate::recording;
use crate::recording_reader::Channels;
use crate::resample::resample;

/// The sample rate of everything that is decoded, in Hz.
pub const SAMPLE_RATE: u32 = 16_000;
/// Largest recording that is read into memory: some four hours of 16 kHz FLAC.
pub const MAX_RECORDING_BYTES: u64 = 256 << 20;

/// Decodes a recording of any format that [`crate::recording`] knows to 16 kHz mono in [-1, 1]: the
/// mean of the channels (of channels that cancel each other out, one), then [`resample`] where the rate differs. The length is
/// `ceil(16000 * frames / rate)`. Longer than `max_seconds` is an error.
pub fn decode(bytes: &[u8], max_seconds: f64) -> Result<Vec<f32>, AudioError> {
    decode_and_tell(bytes, max_seconds).map(|(signal, _)| signal)
}

/// The same, and what is made of the channels.
pub(crate) fn decode_and_tell(bytes: &[u8], max_seconds: f64) -> Result<(Vec<f32>, Option<Decided>), AudioError> {
    // The rate is known only after opening; the highest one that can be resampled bounds what is decoded.
    let samples = recording::decode(bytes, frame_limit(768_000, max_seconds))
        .map_err(|fault| AudioError::Decode(fault.to_string()))?;
    let channels = samples.info.channels as usize;
    let rate = samples.info.sample_rate;
    if (samples.interleaved.len() / channels) as u64 > frame_limit(rate, max_seconds) {
        return Err(AudioError::TooLong {
            limit_seconds: max_seconds,
        });
    }
    let mut mixer = Mixer::new(samples.info.channels, rate, Channels::Mix);
    let mut mono = Vec::new();
    mixer.take(&samples.interleaved, &mut mono);
    mixer.finish(&mut mono);
    Ok((resample(mono, rate, SAMPLE_RATE)?, mixer.decided()))
}

/// Reads `size` bytes at `offset` of a file: one member of a tar, whose blocks are kept if it is an object.
pub fn read_range(storage: &Storage, path: &Path, offset: u64, size: u64) -> Result<Vec<u8>, AudioError> {
    let failed = |source| AudioError::read(path, source);
    let file = open_input_file(storage, path).map_err(failed)?.in_blocks();
    read_open_range(&file, path, offset, size)
}

/// [`read_range`] of a file that is open already; `path` is for messages.
pub fn read_open_range(file: &InputFile, path: &Path, offset: u64, size: u64) -> Result<Vec<u8>, AudioError> {
    let failed = |source| AudioError::read(path, source);
    if size > MAX_RECORDING_BYTES {
        return Err(AudioError::TooLarge {
            path: path.to_owned(),
            size,
            limit: MAX_RECORDING_BYTES,
        });
    }
    // Compared before the buffer is made: a size is only a claim.
    let length = file.length().map_err(failed)?;
    if offset.checked_add(size).is_none_or(|end| end > length) {
        return Err(AudioError::PastEnd {
            path: path.to_owned(),
            offset,
            size,
        });
    }
    let mut bytes = vec![0u8; size as usize];
    file.read_exact_at(&mut bytes, offset).map_err(failed)?;
    Ok(bytes)
}

/// Reads a whole file of one recording.
pub fn read_file(storage: &Storage, path: &Path) -> Result<Vec<u8>, AudioError> {
    if let Some(embedded) = embedded::parse(path) {
        return embedded.read(storage);
    }
    let failed = |source| AudioError::read(path, source);
    let file = open_input_file(storage, path).map_err(failed)?;
    let size = file.length().map_err(failed)?;
    read_open_range(&file, path, 0, size)
}

/// Frames of `max_seconds` at a rate in Hz.
pub fn frame_limit(rate: u32, max_seconds: f64) -> u64 {
    // Negative and NaN become 0, infinity the largest number.
    (f64::from(rate) * max_seconds) as u64
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
