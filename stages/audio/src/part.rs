//! Part of a recording, decoded without the rest of it where the format lets us.
//!
//! Frames of FLAC and PCM have a position and do not depend on previous frames, so decoding begins at the frame in
//! which the part begins. Lossy formats carry state from block to block and are decoded from the beginning to the end
//! of the part, as are containers that do not count positions in frames.
//!
//! The samples are equal to those of decoding the whole recording. The checks are weaker: the recording must begin, and
//! FLAC and PCM end, as the header says, and the decoded frames must be intact, but damage elsewhere, and so a wrong
//! MD5 in `STREAMINFO`, is not detected.

use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use flow_storage::Storage;

use crate::decode::{SAMPLE_RATE, decode_and_tell, read_open_range};
use crate::decode_fault::broken;
use crate::error::AudioError;
use crate::flac::Fault;
use crate::format::{Format, recognise};
use crate::mixer::{Decided, Mixer};
use crate::recording::Blocks;
use crate::recording_reader::{Channels, Progress, RecordingReader};
use crate::resample::{NeededInput, needed_input, resample};
use crate::stored_bytes::{StoredBytes, flac_info, open};

/// Tolerance between the durations of a manifest and of the recording, in seconds: durations are rounded.
/// `pipelines/build_manifest_v2.yaml` uses the same tolerance.
pub const TOLERANCE_SECONDS: f64 = 0.1;

/// What is made of the channels of a recording, which is found out once for all rows of it that are decoded by themselves.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mixing(Option<Decided>);

impl Mixing {
    /// What a user has to know of it; known once a row was decoded.
    pub fn note(&self) -> Option<String> {
        self.0?.note(Channels::Mix)
    }

    /// Decodes the beginning of the recording, if it was not done before, and returns how many frames that took, too.
    fn of(&mut self, bytes: &StoredBytes, format: Format) -> Result<(Decided, u64), Fault> {
        if let Some(decided) = self.0 {
            return Ok((decided, 0));
        }
        let mut blocks = open(bytes, format)?;
        let (mut mixer, mut frames) = (Mixer::new(1, SAMPLE_RATE, Channels::Mix), 0);
        let mut unused = Vec::new();
        while let Some(block) = blocks.next_block()? {
            if frames == 0 {
                mixer = Mixer::new(block.layout.channels, block.layout.sample_rate, Channels::Mix);
            }
            if mixer.decided().is_some() {
                break;
            }
            mixer.take(block.samples, &mut unused);
            unused.clear();
            frames += block.frames;
        }
        mixer.finish(&mut unused);
        self.0 = mixer.decided();
        let decided = self.0.ok_or_else(|| broken("no frames"))?;
        Ok((decided, frames))
    }
}

/// The samples of a manifest's row: those that [`decode`](crate::decode::decode) gives of the whole recording, of any format that
/// [`crate::recording`] knows, from `start` on for `seconds`. A row from the beginning that is as long as the recording, give
/// or take [`TOLERANCE_SECONDS`], is all of it, decoded and checked as a whole; one that ends no more than that after the
/// recording ends with it. The recording is the file, or the `range` (offset and size in bytes) of it. Longer than
/// `max_seconds` is an error; for a recording that has to be decoded from the beginning, this applies to the length in
/// its header and to the decoded length.
///
/// # Errors
/// If the file cannot be read, the recording is not audio or damaged where it is decoded, or the row reaches past its end.
pub fn decode_row(
    storage: &Storage,
    path: &Path,
    range: Option<(u64, u64)>,
    start: f64,
    seconds: f64,
    max_seconds: f64,
) -> Result<Vec<f32>, AudioError> {
    decode_row_of(
        storage,
        path,
        range,
        (start, seconds),
        max_seconds,
        &mut Mixing::default(),
    )
}

/// [`decode_row`] of a recording (`start` and `seconds` of the row) of which others may have been decoded.
///
/// # Errors
/// As [`decode_row`].
pub fn decode_row_of(
    storage: &Storage,
    path: &Path,
    range: Option<(u64, u64)>,
    (start, seconds): (f64, f64),
    max_seconds: f64,
    mixing: &mut Mixing,
) -> Result<Vec<f32>, AudioError> {
    let bytes = StoredBytes::open(storage, path, range)?;
    let is_all = |length: f64| start == 0.0 && (seconds - length).abs() <= TOLERANCE_SECONDS;
    if stated(&bytes).is_some_and(is_all) {
        let whole = read_open_range(&bytes.file, path, bytes.offset, bytes.size)?;
        // A recording that is far longer than its header says is refused.
        let (signal, decided) = decode_and_tell(&whole, seconds * 2.0 + 30.0)?;
        mixing.0 = decided;
        return Ok(signal);
    }
    let wanted = sample_at(start)..sample_at(start + seconds);
    around(&bytes, path, &wanted, max_seconds, mixing)?.row(start, seconds)
}

/// [`decode_row`] of several rows of one recording, each with its `start` and `seconds`, in their order. Where
/// [`is_decoded_from_the_beginning`] holds, the recording is decoded once for all of them, as far as the last one needs it
/// or to the first damage.
pub fn decode_rows(
    storage: &Storage,
    path: &Path,
    range: Option<(u64, u64)>,
    rows: &[(f64, f64)],
    max_seconds: f64,
) -> Vec<Result<Vec<f32>, AudioError>> {
    if rows.len() > 1
        && let Ok(bytes) = StoredBytes::open(storage, path, range)
        && is_streamed(&bytes)
        && let Ok(mut pass) = Pass::open(&bytes, path, max_seconds)
    {
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|&row| sample_at(rows[row].0));
        let mut decoded: Vec<_> = order.into_iter().map(|row| (row, pass.row(rows[row]))).collect();
        decoded.sort_by_key(|(row, _)| *row);
        return decoded.into_iter().map(|(_, signal)| signal).collect();
    }
    let mut mixing = Mixing::default();
    let alone = |row: &(f64, f64)| decode_row_of(storage, path, range, *row, max_seconds, &mut mixing);
    rows.iter().map(alone).collect()
}

/// Whether parts of a recording, which is the file or the `range` (offset and size in bytes) of it, cannot be decoded without
/// what comes before them. False where it cannot be read.
pub fn is_decoded_from_the_beginning(storage: &Storage, path: &Path, range: Option<(u64, u64)>) -> bool {
    StoredBytes::open(storage, path, range).is_ok_and(|bytes| is_streamed(&bytes))
}

/// The length in seconds that the header of a FLAC or WAV recording gives, which is the file or the `range` (offset and size
/// in bytes) of it. None of another format, and where the header does not say it or cannot be read: then only decoding tells.
pub fn stated_seconds(storage: &Storage, path: &Path, range: Option<(u64, u64)>) -> Option<f64> {
    Some(opened_extent(storage, path, range)??.seconds())
}

/// What the header says, as for [`stated_seconds`], of a recording that can be opened; the outer is none of others.
pub fn opened_extent(storage: &Storage, path: &Path, range: Option<(u64, u64)>) -> Option<Option<Extent>> {
    Some(stated_extent(&StoredBytes::open(storage, path, range).ok()?))
}

/// Rate, channels and length of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Samples of each channel.
    pub frames: u64,
    /// In Hz.
    pub sample_rate: u32,
    pub channels: u32,
}

impl Extent {
    pub fn seconds(&self) -> f64 {
        self.frames as f64 / f64::from(self.sample_rate)
    }
}

/// The extent of a recording, which is the file or the `range` (offset and size in bytes) of it: as the header of FLAC and WAV says it,
/// otherwise decoded from the beginning to the end.
///
/// # Errors
/// If the file cannot be read, is not audio, or is damaged as far as it was decoded.
pub fn extent(storage: &Storage, path: &Path, range: Option<(u64, u64)>) -> Result<Extent, AudioError> {
    if let Some(extent) = stated_extent(&StoredBytes::open(storage, path, range)?) {
        return Ok(extent);
    }
    let mut reader = RecordingReader::open(storage, path, range, Channels::Mix)?;
    let mut unused = Vec::new();
    loop {
        match reader.read(&mut unused)? {
            Progress::More => unused.clear(),
            Progress::Damaged(why) => return Err(AudioError::Decode(broken(why).to_string())),
            Progress::End => break,
        }
    }
    Ok(Extent {
        frames: reader.frames(),
        sample_rate: reader.sample_rate(),
        channels: reader.channels(),
    })
}

fn stated(bytes: &StoredBytes) -> Option<f64> {
    Some(stated_extent(bytes)?.seconds())
}

fn stated_extent(bytes: &StoredBytes) -> Option<Extent> {
    let read = catch_unwind(AssertUnwindSafe(|| header_extent(bytes)));
    read.ok()?.ok()?
}

fn header_extent(bytes: &StoredBytes) -> Result<Option<Extent>, Fault> {
    let mut head = [0; 64];
    let length = bytes.read_at(0, &mut head).map_err(broken)?;
    let (frames, (sample_rate, channels)) = match recognise(&head[..length]) {
        Ok(Format::Flac) => {
            let (info, _, _) = flac_info(bytes)?;
            (info.total_frames, (info.sample_rate, info.channels))
        }
        Ok(Format::Wav) => {
            let mut blocks = open(bytes, Format::Wav)?;
            let frames = blocks.promised.unwrap_or(0);
            let first = blocks.next_block()?;
            let layout = first.map(|block| (block.layout.sample_rate, block.layout.channels));
            (frames, layout.unwrap_or_default())
        }
        _ => return Ok(None),
    };
    Ok((frames > 0 && sample_rate > 0).then_some(Extent {
        frames,
        sample_rate,
        channels,
    }))
}

/// The index of the 16 kHz sample at a time in seconds. Negative and NaN become 0, infinity the largest number.
fn sample_at(seconds: f64) -> u64 {
    (seconds * f64::from(SAMPLE_RATE)).round() as u64
}

/// Samples at 16 kHz that hold a part, or all of it up to the end of the recording.
struct Around {
    signal: Vec<f32>,
    /// Which sample of the recording the first one is.
    first: u64,
    /// How many frames of the recording were decoded for the part; none where it was decoded from the beginning.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "tests see by it that no more than a part is decoded")
    )]
    decoded_frames: Option<u64>,
    /// Whether the recording is known to end with the last one.
    ends: bool,
}

fn around(
    bytes: &StoredBytes,
    path: &Path,
    wanted: &Range<u64>,
    max_seconds: f64,
    mixing: &mut Mixing,
) -> Result<Around, AudioError> {
    let alone = if wanted.end.saturating_sub(wanted.start) > sample_at(max_seconds) {
        None
    } else {
        let decoded = catch_unwind(AssertUnwindSafe(|| alone(bytes, wanted, mixing)));
        // After any error in decoding the part, the whole recording is decoded and decides.
        decoded.ok().and_then(Result::ok).flatten()
    };
    Ok(match alone {
        Some(mono) => Around {
            signal: resample(mono.samples, mono.rate, SAMPLE_RATE)?,
            first: mono.first_output,
            decoded_frames: Some(mono.decoded_frames),
            ends: false,
        },
        None if is_streamed(bytes) => {
            let mut pass = Pass::open(bytes, path, max_seconds)?;
            pass.read(wanted)?;
            pass.around
        }
        None => {
            let whole = read_open_range(&bytes.file, path, bytes.offset, bytes.size)?;
            let (signal, decided) = decode_and_tell(&whole, max_seconds)?;
            mixing.0 = decided;
            Around {
                signal,
                first: 0,
                decoded_frames: None,
                ends: true,
            }
        }
    })
}

/// Whether a recording whose parts cannot be decoded alone is decoded block by block. FLAC and WAV recordings of this
/// sort are decoded and checked whole.
fn is_streamed(bytes: &StoredBytes) -> bool {
    let found = bytes.recognise();
    // The next read reports that the file cannot be read.
    bytes.take_failure();
    matches!(found, Ok(Ok(format)) if !matches!(format, Format::Flac | Format::Wav))
}

/// A recording that is decoded from its beginning, part after part.
struct Pass {
    reader: RecordingReader,
    /// Decoded samples that are still needed.
    around: Around,
    max_seconds: f64,
    /// Why no more can be decoded, and the end of the samples decoded before that.
    failed: Option<(u64, AudioError)>,
}

impl Pass {
    fn open(bytes: &StoredBytes, path: &Path, max_seconds: f64) -> Result<Pass, AudioError> {
        let pass = Pass {
            reader: RecordingReader::of(path, bytes.clone(), Channels::Mix, None)?,
            around: Around {
                signal: Vec::new(),
                first: 0,
                decoded_frames: None,
                ends: false,
            },
            max_seconds,
            failed: None,
        };
        match pass.reader.stated_seconds() {
            Some(seconds) if seconds > max_seconds => Err(pass.too_long()),
            _ => Ok(pass),
        }
    }

    fn too_long(&self) -> AudioError {
        AudioError::TooLong {
            limit_seconds: self.max_seconds,
        }
    }

    /// A row of the recording, which begins no earlier than the one before: see [`decode_row`].
    fn row(&mut self, (start, seconds): (f64, f64)) -> Result<Vec<f32>, AudioError> {
        self.read(&(sample_at(start)..sample_at(start + seconds)))?;
        self.around.row(start, seconds)
    }

    /// Decodes on to [`TOLERANCE_SECONDS`] after a part, and drops what comes before it: the next part begins no earlier.
    /// After an error, parts for which no more than what was decoded before it is needed are still there; others get the
    /// same error, as they would by themselves.
    fn read(&mut self, wanted: &Range<u64>) -> Result<(), AudioError> {
        let Around { signal, first, .. } = &mut self.around;
        let before = usize::try_from(wanted.start.saturating_sub(*first)).unwrap_or(usize::MAX);
        let before = before.min(signal.len());
        signal.drain(..before);
        *first += before as u64;
        let needed = wanted.end.saturating_add(sample_at(TOLERANCE_SECONDS));
        if let Some((end, why)) = &self.failed
            && needed >= *end
        {
            return Err(same_error(why));
        }
        while !self.around.ends && self.around.end() <= needed {
            let end = self.around.end();
            if let Err(why) = self.read_block(wanted.start) {
                let told = same_error(&why);
                self.failed = Some((end, why));
                return Err(told);
            }
        }
        Ok(())
    }

    /// Decodes the next block, and drops what ends before `start`.
    fn read_block(&mut self, start: u64) -> Result<(), AudioError> {
        let progress = self.reader.read(&mut self.around.signal)?;
        let end = self.around.end();
        if end > sample_at(self.max_seconds) {
            return Err(self.too_long());
        }
        match progress {
            Progress::More if end <= start => {
                self.around.signal.clear();
                self.around.first = end;
            }
            Progress::More => {}
            Progress::End => self.around.ends = true,
            Progress::Damaged(why) => return Err(AudioError::Decode(broken(why).to_string())),
        }
        Ok(())
    }
}

/// An error of decoding a block, for another row.
fn same_error(error: &AudioError) -> AudioError {
    match error {
        AudioError::TooLong { limit_seconds } => AudioError::TooLong {
            limit_seconds: *limit_seconds,
        },
        AudioError::Read { path, source } => AudioError::read(
            path,
            match source.raw_os_error() {
                Some(code) => io::Error::from_raw_os_error(code),
                None => io::Error::new(source.kind(), source.to_string()),
            },
        ),
        AudioError::Decode(why) => AudioError::Decode(why.clone()),
        other => AudioError::Decode(other.to_string()),
    }
}

impl Around {
    /// Behind its last sample.
    fn end(&self) -> u64 {
        self.first + self.signal.len() as u64
    }

    /// A row of the recording: see [`decode_row`].
    fn row(&self, start: f64, seconds: f64) -> Result<Vec<f32>, AudioError> {
        let wanted = sample_at(start)..sample_at(start + seconds);
        let end = self.end();
        let end_seconds = end as f64 / f64::from(SAMPLE_RATE);
        let is_whole = self.first == 0 && self.ends;
        if is_whole && start == 0.0 && (seconds - end_seconds).abs() <= TOLERANCE_SECONDS {
            return Ok(self.signal.clone());
        }
        let part = self.cut(&wanted, start)?;
        if wanted.end > end.saturating_add(sample_at(TOLERANCE_SECONDS)) {
            return Err(AudioError::Decode(format!(
                "the row ends at {} s, the recording at {end_seconds} s",
                start + seconds
            )));
        }
        Ok(part.to_vec())
    }

    /// The part itself, which ends with the recording where that comes first.
    fn cut(&self, wanted: &Range<u64>, start: f64) -> Result<&[f32], AudioError> {
        let place = |sample: u64| {
            let place = usize::try_from(sample.saturating_sub(self.first)).unwrap_or(usize::MAX);
            place.min(self.signal.len())
        };
        let part = self.signal.get(place(wanted.start)..place(wanted.end));
        part.filter(|part| !part.is_empty())
            .ok_or_else(|| AudioError::Decode(format!("the recording ends before {start} s")))
    }
}

/// One channel of a part at the recording's own rate.
struct Mono {
    rate: u32,
    samples: Vec<f32>,
    /// Which sample at 16 kHz comes of the first one.
    first_output: u64,
    decoded_frames: u64,
}

/// None where the format does not support it, or where the recording's frame positions are inconsistent.
fn alone(bytes: &StoredBytes, wanted: &Range<u64>, mixing: &mut Mixing) -> Result<Option<Mono>, Fault> {
    let mut head = [0; 64];
    let length = bytes.read_at(0, &mut head).map_err(broken)?;
    let format = match recognise(&head[..length]) {
        Ok(format @ (Format::Flac | Format::Wav)) => format,
        _ => return Ok(None),
    };
    let mut blocks = open(bytes, format)?;
    let Some(total) = blocks.promised.filter(|total| *total > 0) else {
        return Ok(None);
    };
    let Some(first) = blocks.next_block()? else {
        return Ok(None);
    };
    let mut decoded = first.frames;
    let (rate, channels) = (first.layout.sample_rate, first.layout.channels);
    if first.first != 0 || !ends_at(&mut blocks, total, &mut decoded)? {
        return Ok(None);
    }
    let NeededInput { input, first_output } = needed_input(wanted.clone(), rate, SAMPLE_RATE);
    let mut samples = Vec::new();
    let (how, of_beginning) = mixing.of(bytes, format)?;
    let mut mixer = Mixer::from(input.start, channels, how);
    decoded += of_beginning;
    if input.start < total && !input.is_empty() {
        // Opened again: the FLAC reader treats frames before those that it has read as noise.
        blocks = open(bytes, format)?;
        blocks.seek(input.start)?;
        let mut next: Option<u64> = None;
        while next.is_none_or(|next| next < input.end) {
            let Some(block) = blocks.next_block()? else { break };
            decoded += block.frames;
            // The position found is after the one sought, or a block is missing.
            if next.map_or(block.first > input.start, |next| next != block.first) {
                return Ok(None);
            }
            next = Some(block.first + block.frames);
            let channels = block.layout.channels as usize;
            let skip = input.start.saturating_sub(block.first).min(block.frames) as usize;
            mixer.take(&block.samples[skip * channels..], &mut samples);
        }
        if next.is_none_or(|next| next < input.end.min(total)) {
            return Ok(None);
        }
    }
    Ok(Some(Mono {
        rate,
        samples,
        first_output,
        decoded_frames: decoded,
    }))
}

/// Whether the last block ends where the header says.
fn ends_at(blocks: &mut Blocks, total: u64, decoded: &mut u64) -> Result<bool, Fault> {
    blocks.seek(total - 1)?;
    let mut end = 0;
    while let Some(block) = blocks.next_block()? {
        *decoded += block.frames;
        end = block.first + block.frames;
    }
    Ok(end == total)
}

#[cfg(test)]
#[path = "part_tests.rs"]
pub(crate) mod tests;
