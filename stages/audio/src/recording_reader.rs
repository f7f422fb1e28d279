//! A recording decoded block by block: memory does not grow with its length.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use flow_storage::Storage;

use crate::decode::SAMPLE_RATE;
use crate::decode_fault::{LONGER_THAN_ITS_HEADER_SAYS, broken};
use crate::error::AudioError;
use crate::flac::{Fault, Status, StreamInfo};
use crate::format::Format;
pub use crate::mixer::Channels;
use crate::mixer::Mixer;
use crate::recording::Blocks;
use crate::resample::Resampler;
use crate::stored_bytes::{StoredBytes, open_track};

/// The result of [`RecordingReader::read`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// There may be more.
    More,
    /// The regular end of the recording.
    End,
    /// The recording cannot be decoded from here on, for this reason.
    Damaged(String),
}

/// Decodes a recording of any format that [`crate::recording`] knows, block by block, to 16 kHz mono in [-1, 1]. The samples
/// are those of [`decode`](crate::decode::decode), to the bit.
///
/// Checked are missing frames, and that the recording is as long as its header says (a WAV may also not be longer); not the MD5 of
/// a FLAC.
pub struct RecordingReader {
    path: PathBuf,
    bytes: StoredBytes,
    format: Format,
    /// None after the end.
    blocks: Option<Blocks>,
    layout: StreamInfo,
    channels: Channels,
    mixer: Mixer,
    /// What a user has to know of how it is read.
    note: Option<String>,
    resampler: Resampler,
    /// Samples at the recording's own rate that were decoded and not yet resampled.
    waiting: Vec<f32>,
    /// Frames decoded.
    frames: u64,
    /// Place of the first block, as the format has it.
    first: Option<u64>,
    /// As [`Blocks::hole`].
    hole: Option<(u64, u64)>,
}

impl RecordingReader {
    /// Opens a recording, which is the file, or the `range` (offset and size in bytes) of it, and decodes its first block.
    ///
    /// # Errors
    /// [`AudioError::Read`] if the file cannot be read, [`AudioError::Unsupported`] where the format is not known, and others
    /// where nothing can be decoded of the recording, or it has not that channel.
    pub fn open(
        storage: &Storage,
        path: &Path,
        range: Option<(u64, u64)>,
        channels: Channels,
    ) -> Result<RecordingReader, AudioError> {
        RecordingReader::open_track(storage, path, range, channels, None)
    }

    /// The same of an audio track, counted from 1; with none, of the one that is played.
    ///
    /// # Errors
    /// As [`RecordingReader::open`], and where there is no such track.
    pub fn open_track(
        storage: &Storage,
        path: &Path,
        range: Option<(u64, u64)>,
        channels: Channels,
        track: Option<u32>,
    ) -> Result<RecordingReader, AudioError> {
        RecordingReader::of(path, StoredBytes::open(storage, path, range)?, channels, track)
    }

    /// The same of a file that is open; `path` is for messages.
    pub(crate) fn of(
        path: &Path,
        bytes: StoredBytes,
        channels: Channels,
        track: Option<u32>,
    ) -> Result<RecordingReader, AudioError> {
        let failed = |source| AudioError::read(path, source);
        let found = bytes.recognise();
        if let Some(source) = bytes.take_failure() {
            return Err(failed(source));
        }
        let format = match found.map_err(failed)? {
            Ok(format) => format,
            Err(what) => return Err(AudioError::Unsupported(what.to_owned())),
        };
        let opened = guarded(|| {
            let mut blocks = open_track(&bytes, format, track)?;
            let first = blocks.next_block()?.map(|block| block.layout.clone());
            Ok((blocks, first))
        });
        if let Some(source) = bytes.take_failure() {
            return Err(failed(source));
        }
        let (blocks, layout) = opened.map_err(|fault| match fault.status {
            Status::UnsupportedFormat => AudioError::Unsupported(fault.detail),
            _ => AudioError::Decode(fault.detail),
        })?;
        let layout = layout.ok_or_else(|| AudioError::Decode("no frames".to_owned()))?;
        if let Channels::One(channel) = channels
            && channel >= layout.channels
        {
            let why = format!(
                "it has {} channels, and none of the number {}",
                layout.channels,
                channel + 1
            );
            return Err(AudioError::Decode(why));
        }
        let mut reader = RecordingReader {
            path: path.to_owned(),
            resampler: Resampler::new(layout.sample_rate, SAMPLE_RATE)?,
            bytes,
            format,
            mixer: Mixer::new(layout.channels, layout.sample_rate, channels),
            note: blocks.note.clone(),
            blocks: Some(blocks),
            layout,
            channels,
            waiting: Vec::new(),
            frames: 0,
            first: None,
            hole: None,
        };
        // The first block is there already.
        reader.take_block().map_err(|fault| AudioError::Decode(fault.detail))?;
        Ok(reader)
    }

    /// Puts silence in the place of damaged and missing pages of an Ogg, with a note; otherwise the recording ends there.
    pub fn fill_holes(&mut self) {
        if let Some(blocks) = &mut self.blocks {
            blocks.fills_holes = true;
        }
    }

    /// Samples of each channel in a second, as the recording has them.
    pub fn sample_rate(&self) -> u32 {
        self.layout.sample_rate
    }

    /// Channels of the recording.
    pub fn channels(&self) -> u32 {
        self.layout.channels
    }

    /// Frames decoded so far.
    pub(crate) fn frames(&self) -> u64 {
        self.frames
    }

    /// The length in seconds from the header, if it has one and the end was not reached.
    pub fn stated_seconds(&self) -> Option<f64> {
        let frames = self.blocks.as_ref()?.stated.filter(|frames| *frames > 0)?;
        Some(frames as f64 / f64::from(self.layout.sample_rate))
    }

    /// What a user has to know of how it is read, such as which one of several tracks. What concerns channels is known after the
    /// last read.
    pub fn note(&self) -> Option<String> {
        let seconds = |frames: u64| frames as f64 / f64::from(self.layout.sample_rate);
        let of_hole = self.hole.map(|(at, missing)| {
            let (at, missing) = (seconds(at), seconds(missing));
            let what = match self.format {
                Format::Ogg | Format::Opus => "pages are missing or damaged",
                _ => "packets are missing",
            };
            format!("{what}, from about {at:.1} s on: silence takes the place of {missing:.1} s")
        });
        let notes = self.note.iter().cloned().chain(of_hole);
        let notes = notes.chain(self.mixer.note(self.channels));
        notes.reduce(|first, second| format!("{first}; {second}"))
    }

    /// Appends samples at 16 kHz; perhaps none, though there are more. At the end and where the recording is damaged, what is
    /// appended is the last of it.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(&mut self, out: &mut Vec<f32>) -> Result<Progress, AudioError> {
        if self.blocks.is_none() {
            return Ok(Progress::End);
        }
        self.resampler.feed(&self.waiting, out);
        self.waiting.clear();
        let next = self.next_block();
        if let Some(source) = self.bytes.take_failure() {
            self.blocks = None;
            let path = self.path.clone();
            return Err(AudioError::read(path, source));
        }
        let progress = match next {
            Ok(true) => return Ok(Progress::More),
            Ok(false) => Progress::End,
            Err(fault) => Progress::Damaged(fault.detail),
        };
        self.blocks = None;
        self.mixer.finish(&mut self.waiting);
        self.resampler.feed(&self.waiting, out);
        self.waiting.clear();
        self.resampler.finish(out);
        Ok(progress)
    }

    /// Decodes the next block. False at the end.
    fn next_block(&mut self) -> Result<bool, Fault> {
        let Some(blocks) = &mut self.blocks else {
            return Ok(false);
        };
        let next = guarded(|| blocks.next_block().map(|block| block.is_some()));
        self.hole = blocks.hole;
        if next? {
            return self.take_block().map(|()| true);
        }
        blocks.check_end()?;
        if self.format == Format::Wav && self.bytes.is_longer_than_its_header_says() {
            return Err(broken(LONGER_THAN_ITS_HEADER_SAYS));
        }
        Ok(false)
    }

    /// Takes the block that was decoded last.
    fn take_block(&mut self) -> Result<(), Fault> {
        let Some(block) = self.blocks.as_ref().and_then(Blocks::last_block) else {
            return Ok(());
        };
        if self.format == Format::Flac {
            // Its reader silently skips damaged frames.
            let first = *self.first.get_or_insert(block.first);
            if block.first != first.saturating_add(self.frames) {
                return Err(broken("frames are missing or damaged"));
            }
            let promised = self
                .blocks
                .as_ref()
                .and_then(|blocks| blocks.promised)
                .filter(|frames| *frames > 0);
            if first > 0 && promised.is_some() {
                return Err(broken("its first frames are missing or damaged"));
            }
            if promised.is_some_and(|promised| self.frames + block.frames > promised) {
                return Err(broken("more frames than its header says"));
            }
        }
        self.mixer.take(block.samples, &mut self.waiting);
        self.frames += block.frames;
        #[cfg(test)]
        DECODED_FRAMES.set(DECODED_FRAMES.get() + block.frames);
        Ok(())
    }
}

#[cfg(test)]
thread_local! {
    /// How many frames the readers of this thread decoded.
    pub(crate) static DECODED_FRAMES: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Runs a decoder, whose panic is a fault of what it decodes.
fn guarded<T>(run: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(broken("the decoder failed on damaged data")))
}

/// How many channels an audio track (counted from 1; none for the one that is played) of a recording has, which is the file or the
/// `range` (offset and size in bytes) of it; none where it cannot be opened.
pub fn channel_count(storage: &Storage, path: &Path, range: Option<(u64, u64)>, track: Option<u32>) -> Option<u32> {
    let reader = RecordingReader::open_track(storage, path, range, Channels::Mix, track).ok()?;
    Some(reader.layout.channels)
}

#[cfg(test)]
#[path = "recording_reader_tests.rs"]
mod tests;
