//! From the bytes of a recording to what a model hears: one channel, 16 kHz, `f32`.

use std::fs::File;
use std::io::Cursor;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use symphonia::core::codecs::audio::AudioDecoderOptions;
use symphonia::core::errors::Error as SymphoniaError;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, TrackType};
use symphonia::core::io::{MediaSourceStream, MediaSourceStreamOptions};
use symphonia::core::meta::MetadataOptions;

use crate::error::AudioError;
use crate::flac;
use crate::resample::resample;

/// The sample rate of everything that is decoded, in Hz.
pub const SAMPLE_RATE: u32 = 16_000;
/// Largest recording that is read into memory: some four hours of 16 kHz FLAC.
pub const MAX_RECORDING_BYTES: u64 = 256 << 20;

/// Decodes a recording (FLAC, WAV, or what else its first bytes say it is) to 16 kHz mono in [-1, 1]: the
/// mean of the channels, then [`resample`] where the rate differs. The length is
/// `ceil(16000 * frames / rate)`. Longer than `max_seconds` is an error.
pub fn decode(bytes: &[u8], max_seconds: f64) -> Result<Vec<f32>, AudioError> {
    let (mono, rate) = if bytes.starts_with(flac::MARKER) {
        flac_mono(bytes, max_seconds)?
    } else {
        any_mono(bytes, max_seconds)?
    };
    resample(mono, rate, SAMPLE_RATE)
}

/// Reads `size` bytes at `offset` of a file: one member of a tar, or a whole file.
pub fn read_range(path: &Path, offset: u64, size: u64) -> Result<Vec<u8>, AudioError> {
    let failed = |source| AudioError::Read {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(failed)?;
    read_open_range(&file, path, offset, size)
}

/// [`read_range`] of a file that is open already; `path` is for messages.
pub fn read_open_range(file: &File, path: &Path, offset: u64, size: u64) -> Result<Vec<u8>, AudioError> {
    let failed = |source| AudioError::Read {
        path: path.to_owned(),
        source,
    };
    if size > MAX_RECORDING_BYTES {
        return Err(AudioError::TooLarge {
            path: path.to_owned(),
            size,
            limit: MAX_RECORDING_BYTES,
        });
    }
    // Compared before the buffer is made: a size is only a claim.
    let length = file.metadata().map_err(failed)?.len();
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
pub fn read_file(path: &Path) -> Result<Vec<u8>, AudioError> {
    let failed = |source| AudioError::Read {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    read_open_range(&file, path, 0, size)
}

fn frame_limit(rate: u32, max_seconds: f64) -> u64 {
    // Negative and NaN become 0, infinity the largest number.
    (f64::from(rate) * max_seconds) as u64
}

fn flac_mono(bytes: &[u8], max_seconds: f64) -> Result<(Vec<f32>, u32), AudioError> {
    // The rate is known only after opening; the highest one that can be resampled bounds what is decoded.
    let samples = flac::decode(bytes, frame_limit(768_000, max_seconds))
        .map_err(|fault| AudioError::Decode(fault.to_string()))?;
    let channels = samples.info.channels as usize;
    let rate = samples.info.sample_rate;
    if (samples.interleaved.len() / channels) as u64 > frame_limit(rate, max_seconds) {
        return Err(AudioError::TooLong {
            limit_seconds: max_seconds,
        });
    }
    const FULL_SCALE: f64 = 2_147_483_648.0;
    let scale = 1.0 / (FULL_SCALE * channels as f64);
    let mean = |frame: &[i32]| (frame.iter().map(|&sample| f64::from(sample)).sum::<f64>() * scale) as f32;
    Ok((samples.interleaved.chunks_exact(channels).map(mean).collect(), rate))
}

/// Whether the first bytes are those of a format that can be decoded. The library would otherwise search
/// anything for something that looks like MP3, and find it.
fn has_known_beginning(bytes: &[u8]) -> bool {
    let mpeg_frame = bytes.first() == Some(&0xff) && bytes.get(1).is_some_and(|byte| byte & 0xe0 == 0xe0);
    [&b"RIFF"[..], b"RF64", b"OggS", b"ID3"]
        .iter()
        .any(|magic| bytes.starts_with(magic))
        || bytes.get(4..8) == Some(b"ftyp")
        || mpeg_frame
}

fn any_mono(bytes: &[u8], max_seconds: f64) -> Result<(Vec<f32>, u32), AudioError> {
    if !has_known_beginning(bytes) {
        return Err(AudioError::Decode(
            "its first bytes are of no known audio format".into(),
        ));
    }
    let owned = bytes.to_vec();
    let decoded = catch_unwind(AssertUnwindSafe(|| symphonia_mono(owned, max_seconds)));
    decoded.unwrap_or_else(|_| Err(AudioError::Decode("the decoder failed on damaged data".into())))
}

fn symphonia_mono(bytes: Vec<u8>, max_seconds: f64) -> Result<(Vec<f32>, u32), AudioError> {
    let failed = |error: SymphoniaError| AudioError::Decode(error.to_string());
    let missing = || AudioError::Decode("no audio track".into());
    let source = MediaSourceStream::new(Box::new(Cursor::new(bytes)), MediaSourceStreamOptions::default());
    let mut format = symphonia::default::get_probe()
        .probe(
            &Hint::new(),
            source,
            FormatOptions::default(),
            MetadataOptions::default(),
        )
        .map_err(failed)?;
    let track = format.default_track(TrackType::Audio).ok_or_else(missing)?;
    let track_id = track.id;
    let parameters = track
        .codec_params
        .as_ref()
        .and_then(|parameters| parameters.audio())
        .ok_or_else(missing)?;
    let mut decoder = symphonia::default::get_codecs()
        .make_audio_decoder(parameters, &AudioDecoderOptions::default())
        .map_err(failed)?;
    let mut mono: Vec<f32> = Vec::new();
    let mut rate = None;
    let mut interleaved: Vec<f32> = Vec::new();
    while let Some(packet) = format.next_packet().map_err(failed)? {
        if packet.track_id != track_id {
            continue;
        }
        let block = decoder.decode(&packet).map_err(failed)?;
        let block_rate = block.spec().rate();
        if *rate.get_or_insert(block_rate) != block_rate {
            return Err(AudioError::Decode(
                "the sample rate changes within the recording".into(),
            ));
        }
        let channels = block.num_planes();
        if channels == 0 {
            return Err(missing());
        }
        block.copy_to_vec_interleaved(&mut interleaved);
        let mean = |frame: &[f32]| (frame.iter().map(|&x| f64::from(x)).sum::<f64>() / channels as f64) as f32;
        mono.extend(interleaved.chunks_exact(channels).map(mean));
        if mono.len() as u64 > frame_limit(block_rate, max_seconds) {
            return Err(AudioError::TooLong {
                limit_seconds: max_seconds,
            });
        }
    }
    let rate = rate.ok_or_else(|| AudioError::Decode("no frames".into()))?;
    Ok((mono, rate))
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
