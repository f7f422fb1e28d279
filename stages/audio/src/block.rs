//! Samples of a block that was decoded: their layout, as integers, and what an encoder added to them.

use symphonia::core::audio::GenericAudioBufferRef;

use crate::decode_fault::broken;
use crate::flac::{self, Fault, Status, StreamInfo};
use crate::flac_encode::MOST_RATE;

/// The most that FLAC supports.
pub(crate) const MOST_CHANNELS: u32 = 8;

/// The longest padding at the end of an MP3, in frames: its number has 12 bits.
const MOST_PADDING: usize = 4_095;

/// Larger samples are no sound that was recorded too loud: some programs write integers as floating-point numbers, damaged packets of
/// lossy codecs have any value, and clipped they would be noise.
const LOUDEST: f64 = 128.0;

/// Leaves out of an MP3 what its encoder added at the beginning and, after the length that its header says, at the end. Where more
/// comes than an encoder adds, the length is wrong, and that of the first of several recordings that were joined.
#[derive(Default)]
pub(crate) struct Trim {
    /// Samples after that length.
    held: Vec<i32>,
    has_no_end: bool,
}

impl Trim {
    /// Takes the samples of a block, and how many frames of it come before the beginning and after the end. What is left of these
    /// and of blocks before it is in their place.
    pub fn trim(&mut self, samples: &mut Vec<i32>, channels: usize, (start, end): (u64, u64)) {
        let length = |frames: u64| usize::try_from(frames).unwrap_or(usize::MAX).saturating_mul(channels);
        samples.drain(..length(start).min(samples.len()));
        if end == 0 || self.has_no_end {
            return;
        }
        let kept = samples.len().saturating_sub(length(end));
        self.held.extend(samples.drain(kept..));
        if self.held.len() > MOST_PADDING * channels {
            self.has_no_end = true;
            samples.append(&mut self.held);
        }
    }
}

/// Notes the layout of the first block, and refuses blocks with another layout, or an impossible one.
pub(crate) fn accept(layout: &mut Option<StreamInfo>, here: StreamInfo) -> Result<(), Fault> {
    let (rate, channels) = (here.sample_rate, here.channels);
    let first = layout.get_or_insert_with(|| here.clone());
    if *first != here {
        let of = |info: &StreamInfo| {
            format!(
                "{} Hz, {} channels, {} bits",
                info.sample_rate, info.channels, info.bits
            )
        };
        let detail = format!(
            "sample rate, channels or width change within the recording: {} after {}",
            of(&here),
            of(first)
        );
        return Err(broken(detail));
    }
    if !(1..=MOST_RATE).contains(&rate) || !(1..=MOST_CHANNELS).contains(&channels) {
        let detail = format!("{rate} Hz with {channels} channels");
        return Err(flac::fault(Status::UnsupportedFormat, detail));
    }
    Ok(())
}

/// The samples of a block as left-justified integers of this many bits, interleaved. `lossy` is whether its codec is. Gives the
/// magnitude of the largest floating-point number, where 1 is full scale: larger ones are clipped.
pub(crate) fn left_justified(
    block: &GenericAudioBufferRef<'_>,
    bits: u32,
    lossy: bool,
    floats: &mut Vec<f64>,
    samples: &mut Vec<i32>,
) -> Result<f64, Fault> {
    let mut largest = 0.0f64;
    if let GenericAudioBufferRef::F32(_) | GenericAudioBufferRef::F64(_) = block {
        block.copy_to_vec_interleaved(floats);
        samples.clear();
        for &value in &*floats {
            if !value.is_finite() {
                return Err(broken("samples that are not numbers"));
            }
            if value.abs() > LOUDEST {
                let why = match lossy {
                    true => "",
                    false => ": integers were written as floating-point numbers",
                };
                return Err(broken(format!("a sample of {value}, where 1 is full scale{why}")));
            }
            largest = largest.max(value.abs());
            samples.push(whole(value, bits));
        }
        return Ok(largest);
    }
    block.copy_to_vec_interleaved(samples);
    if bits == 24 {
        // Wider PCM loses what FLAC with 24 bits cannot hold.
        samples.iter_mut().for_each(|sample| *sample &= !0xff);
    }
    Ok(largest)
}

/// How many bits the samples are brought to.
pub(crate) fn bits_of(block: &GenericAudioBufferRef<'_>, lossy: bool) -> u32 {
    match block {
        _ if lossy => 16,
        GenericAudioBufferRef::U8(_) | GenericAudioBufferRef::S8(_) => 8,
        GenericAudioBufferRef::U16(_) | GenericAudioBufferRef::S16(_) => 16,
        _ => 24,
    }
}

/// Rounded to an integer of this many bits, left-justified; clipped at full scale.
fn whole(value: f64, bits: u32) -> i32 {
    let scale = f64::from(1u32 << (bits - 1));
    let rounded = (value * scale).round().clamp(-scale, scale - 1.0);
    // In range after the clamp.
    (rounded as i32) << (32 - bits)
}
