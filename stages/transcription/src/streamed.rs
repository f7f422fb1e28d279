//! The samples of a recording as a stream of blocks, which can be read several times.

use std::path::{Path, PathBuf};

use flow_audio::decode::SAMPLE_RATE;
use flow_audio::part::{Mixing, TOLERANCE_SECONDS, decode_row_of, is_decoded_from_the_beginning};
use flow_audio::recording_reader::{Channels, Progress, RecordingReader};
use flow_audio::samples::{OnDamage, Refusal, open_range};
use flow_storage::{FileVersion, Storage};

use crate::{Result, TranscriptionError};

/// Takes the next samples (mono, 16 kHz, in [-1, 1]), of which there may be none. False: no more are wanted.
pub type Take<'a> = dyn FnMut(&[f32]) -> Result<bool> + 'a;

/// Samples of a recording that can be read several times.
pub trait Samples {
    /// Passes all samples to `take`, from the first one on, until it returns false.
    ///
    /// # Errors
    /// Those of `take`, and if the samples cannot be read.
    fn pass(&self, take: &mut Take<'_>) -> Result<()>;
}

/// The error of a recording that ends at this many samples, before its end of an earlier pass.
pub(crate) fn shorter(samples: u64) -> TranscriptionError {
    TranscriptionError::Input(format!(
        "the recording ends at {samples} samples, and had more when it was read before"
    ))
}

impl Samples for &[f32] {
    fn pass(&self, take: &mut Take<'_>) -> Result<()> {
        take(self).map(drop)
    }
}

/// A part of a recording, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    pub start: f64,
    /// None for all that follows.
    pub seconds: Option<f64>,
}

/// Longest part that is in memory as a whole, in seconds: longer ones are decoded block by block, from the beginning of the
/// recording.
const IN_MEMORY: f64 = 600.0;

/// The sum of the samples of a recording: speech has a mean near 0.
#[derive(Default)]
struct Offset {
    sum: f64,
    samples: u64,
}

impl Offset {
    /// With larger ones voice activity misses speech.
    const LARGE: f64 = 0.1;
    /// Fewest samples of which it is reported: the mean of a few periods of a voice may be far from 0.
    const LEAST: u64 = SAMPLE_RATE as u64;

    fn add(&mut self, samples: &[f32]) {
        self.sum += samples.iter().map(|sample| f64::from(*sample)).sum::<f64>();
        self.samples += samples.len() as u64;
    }

    /// A note with what has to be known of it.
    fn told(&self, note: Option<String>) -> Option<String> {
        let mean = self.sum / self.samples.max(1) as f64;
        let of_offset = (self.samples >= Self::LEAST && mean.abs() >= Self::LARGE).then(|| {
            format!(
                "its samples have a DC offset of {:.0} % of full scale, so that speech may not be found: remove it first (`sox IN \
                 OUT dcshift {:.2}`)",
                100.0 * mean,
                -mean
            )
        });
        let notes = note.into_iter().chain(of_offset);
        notes.reduce(|first, second| format!("{first}; {second}"))
    }
}

/// A recording of any format that [`flow_audio::recording`] knows, or a part of one, decoded block by block.
#[derive(Clone, Debug)]
pub struct StreamedRecording {
    storage: Storage,
    path: PathBuf,
    channels: Channels,
    /// Offset and size in bytes, of a recording that is in a file with others.
    range: Option<(u64, u64)>,
    part: Option<Part>,
    /// An audio track, counted from 1; none for the one that is played.
    track: Option<u32>,
}

/// Decoders that stay open where parts of their recordings ended, so that the rows of a long recording are decoded one after the
/// other and not each from the beginning. In recordings that can be decoded from any place they are not needed: of the last one of these
/// what is made of its channels is kept.
#[derive(Default)]
pub struct OpenDecoders {
    opened: Vec<Opened>,
    mixing: Option<(Place, FileVersion, Mixing)>,
}

/// A recording: the file, offset and size in it, channels, and the number of the track.
type Place = (PathBuf, Option<(u64, u64)>, Channels, Option<u32>);

/// So many decoders stay open: of the channels of a recording, or of recordings whose rows alternate.
const MOST_OPEN: usize = 8;

struct Opened {
    recording: Place,
    /// Of the file when it was opened.
    identity: FileVersion,
    reader: RecordingReader,
    /// The last block, what came of reading it, and the first sample behind it.
    block: Vec<f32>,
    progress: Progress,
    at: u64,
}

impl OpenDecoders {
    /// The decoder of this recording that has gone furthest, but not past the sample `start`.
    fn take(&mut self, recording: &StreamedRecording, start: u64) -> Option<Opened> {
        let place = recording.place();
        let serves = |opened: &Opened| opened.recording == place && start >= opened.at - opened.block.len() as u64;
        let serving = self.opened.iter().enumerate().filter(|(_, opened)| serves(opened));
        let (at, _) = serving.max_by_key(|(_, opened)| opened.at)?;
        let opened = self.opened.remove(at);
        (FileVersion::settled(&recording.path)? == opened.identity).then_some(opened)
    }

    fn keep(&mut self, opened: Opened) {
        if self.opened.len() >= MOST_OPEN {
            // That which was used least recently.
            self.opened.remove(0);
        }
        self.opened.push(opened);
    }

    /// What is known of the channels of a recording whose parts are decoded by themselves.
    fn mixing(&self, recording: &StreamedRecording) -> Mixing {
        let known = self.mixing.as_ref().filter(|(place, identity, _)| {
            *place == recording.place() && FileVersion::settled(&recording.path).as_ref() == Some(identity)
        });
        known.map(|(.., mixing)| *mixing).unwrap_or_default()
    }
}

/// Takes the samples of a part out of the blocks of a recording.
struct Cut {
    /// The first sample of the next block.
    at: u64,
    start: u64,
    end: Option<u64>,
}

impl Cut {
    fn new(part: Option<Part>) -> Self {
        let sample = |seconds: f64| (seconds * f64::from(SAMPLE_RATE)).round() as u64;
        let part = part.unwrap_or(Part {
            start: 0.0,
            seconds: None,
        });
        Cut {
            at: 0,
            start: sample(part.start),
            end: part.seconds.map(|seconds| sample(part.start + seconds)),
        }
    }

    fn take<'b>(&mut self, block: &'b [f32]) -> &'b [f32] {
        let place = |sample: u64| {
            usize::try_from(sample.saturating_sub(self.at))
                .unwrap_or(usize::MAX)
                .min(block.len())
        };
        let (from, to) = (place(self.start), self.end.map_or(block.len(), place));
        self.at += block.len() as u64;
        &block[from.min(to)..to]
    }

    fn is_over(&self) -> bool {
        self.end.is_some_and(|end| self.at >= end)
    }

    /// Why there is no such part of a recording that ends here.
    fn past_end(&self) -> Option<String> {
        let seconds = |sample: u64| sample as f64 / f64::from(SAMPLE_RATE);
        let (end, tolerance) = (self.at, (TOLERANCE_SECONDS * f64::from(SAMPLE_RATE)) as u64);
        let last = self.end.filter(|last| *last > end + tolerance);
        let fits = |sample: u64| sample / 1000 <= end + tolerance;
        let begins_after = (self.start > 0 && self.start >= end).then_some(("begins", self.start));
        let (what, place) = last.map(|last| ("ends", last)).or(begins_after)?;
        // Shorter ones are hardly ever meant as milliseconds.
        let is_long = |last: u64| last - self.start > 100 * u64::from(SAMPLE_RATE);
        let fits_whole =
            |last: u64| fits(last) || fits((last - self.start).saturating_add(self.start.saturating_mul(1000)));
        let unit = match last.is_some_and(|last| is_long(last) && fits_whole(last)) {
            true => "; as milliseconds the row would fit, but `duration` and `offset` are seconds",
            false => "",
        };
        Some(format!(
            ": the row {what} at {} s, the recording ends at {} s{unit}",
            seconds(place),
            seconds(end)
        ))
    }
}

/// The extent of a recording.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extent {
    /// Samples at 16 kHz.
    pub samples: u64,
    /// Why it could not be decoded to its end, where it could not.
    pub damage: Option<String>,
    /// What a user has to know of how it is read, such as which one of several tracks.
    pub note: Option<String>,
}

impl StreamedRecording {
    pub fn new(storage: &Storage, path: impl Into<PathBuf>, channels: Channels) -> Self {
        StreamedRecording {
            storage: storage.clone(),
            path: path.into(),
            channels,
            range: None,
            part: None,
            track: None,
        }
    }

    /// The recording that is a `range` (offset and size in bytes) of the file, and a part of it.
    #[must_use]
    pub fn with_place(self, range: Option<(u64, u64)>, part: Option<Part>) -> Self {
        StreamedRecording { range, part, ..self }
    }

    /// An audio track of it, counted from 1.
    #[must_use]
    pub fn with_track(self, track: Option<u32>) -> Self {
        StreamedRecording { track, ..self }
    }

    fn place(&self) -> Place {
        (self.path.clone(), self.range, self.channels, self.track)
    }

    /// The part by itself, where it is short and its recording is of a format that lets it be decoded without the rest. None of
    /// one that is damaged, too.
    fn alone(&self, mixing: &mut Mixing) -> Option<Vec<f32>> {
        let Part { start, seconds } = self.part?;
        let seconds = seconds
            .filter(|seconds| *seconds <= IN_MEMORY && self.channels == Channels::Mix && self.track.is_none())?;
        if is_decoded_from_the_beginning(&self.storage, &self.path, self.range) {
            return None;
        }
        decode_row_of(
            &self.storage,
            &self.path,
            self.range,
            (start, seconds),
            IN_MEMORY,
            mixing,
        )
        .ok()
    }

    /// Reads the recording as [`Samples::pass`] does, and returns its extent, as far as `take` accepted samples. One
    /// that does not exist, is not audio, or is longer than `max_seconds` is a [`Refusal`], and so is a damaged one that
    /// `on_damage` does not accept.
    ///
    /// # Errors
    /// Those of `take`, and if the file is there and cannot be read.
    pub fn first_pass(
        &self,
        max_seconds: f64,
        on_damage: OnDamage,
        take: &mut Take<'_>,
    ) -> Result<std::result::Result<Extent, Refusal>> {
        self.first_pass_with(&mut OpenDecoders::default(), max_seconds, on_damage, take)
    }

    /// [`StreamedRecording::first_pass`] with the decoder of a part before, if this is a part and one serves; the decoder that was used
    /// is left there. The samples are the same.
    ///
    /// # Errors
    /// As [`StreamedRecording::first_pass`].
    pub fn first_pass_with(
        &self,
        open: &mut OpenDecoders,
        max_seconds: f64,
        on_damage: OnDamage,
        take: &mut Take<'_>,
    ) -> Result<std::result::Result<Extent, Refusal>> {
        let most = (max_seconds * f64::from(SAMPLE_RATE)) as u64;
        let mut extent = Extent::default();
        let mut mixing = open.mixing(self);
        let identity = FileVersion::settled(&self.path);
        if let Some(part) = self.alone(&mut mixing) {
            open.mixing = identity.map(|identity| (self.place(), identity, mixing));
            let mut offset = Offset::default();
            offset.add(&part);
            extent.note = offset.told(mixing.note());
            extent.samples = part.len() as u64;
            if extent.samples > most {
                return Ok(Err(Refusal::too_long(&self.path, max_seconds)));
            }
            take(&part)?;
            return Ok(Ok(extent));
        }
        // Of a part the length of the whole recording does not matter.
        let longest = if self.part.is_some() {
            f64::INFINITY
        } else {
            max_seconds
        };
        let mut cut = Cut::new(self.part);
        let opened = self.part.and_then(|_| open.take(self, cut.start));
        let (mut reader, mut block, mut progress, identity) = match opened {
            Some(opened) => {
                cut.at = opened.at - opened.block.len() as u64;
                (opened.reader, opened.block, opened.progress, Some(opened.identity))
            }
            None => {
                let identity = self.part.and_then(|_| FileVersion::settled(&self.path));
                match open_range(
                    &self.storage,
                    &self.path,
                    self.range,
                    longest,
                    self.channels,
                    self.track,
                )? {
                    Ok(mut reader) => {
                        if on_damage == OnDamage::Keep && self.part.is_none() {
                            reader.fill_holes();
                        }
                        (reader, Vec::new(), Progress::More, identity)
                    }
                    Err(refusal) => return Ok(Err(with_hint(refusal, &self.path))),
                }
            }
        };
        let mut offset = Offset::default();
        let outcome = loop {
            let taken = cut.take(&block);
            offset.add(taken);
            extent.samples += taken.len() as u64;
            if extent.samples > most {
                return Ok(Err(Refusal::too_long(&self.path, max_seconds)));
            }
            let wanted = take(taken)?;
            match &progress {
                _ if cut.is_over() => break Ok(extent),
                Progress::More if wanted => {}
                Progress::More => return Ok(Ok(extent)),
                Progress::End => {
                    break match cut.past_end() {
                        Some(why) => Err(Refusal::new("duration_past_end", &self.path, why)),
                        None => Ok(extent),
                    };
                }
                Progress::Damaged(why) => {
                    let accepted = on_damage.accept(&self.path, extent.samples, why);
                    extent.damage = Some(why.clone());
                    break accepted.map(|()| extent);
                }
            }
            block.clear();
            progress = reader.read(&mut block)?;
        };
        let outcome = outcome.map(|extent| Extent {
            note: offset.told(reader.note()),
            ..extent
        });
        if let Some(identity) = identity {
            open.keep(Opened {
                recording: self.place(),
                identity,
                reader,
                block,
                progress,
                at: cut.at,
            });
        }
        Ok(outcome)
    }
}

/// Endings of tables and lists, which somebody may take for manifests.
const ENDINGS_OF_LISTS: [&str; 5] = ["csv", "tsv", "txt", "lst", "scp"];

/// A refusal that says of a table what could be named in its place.
fn with_hint(mut refusal: Refusal, path: &Path) -> Refusal {
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
    if refusal.reason == "unsupported_format"
        && ending.is_some_and(|ending| ENDINGS_OF_LISTS.contains(&ending.as_str()))
    {
        refusal.detail += "; tables and lists are not manifests here: name one of JSON lines or parquet";
    }
    refusal
}

impl Samples for StreamedRecording {
    fn pass(&self, take: &mut Take<'_>) -> Result<()> {
        if let Some(part) = self.alone(&mut Mixing::default()) {
            return take(&part).map(drop);
        }
        let mut reader = RecordingReader::open_track(&self.storage, &self.path, self.range, self.channels, self.track)?;
        if self.part.is_none() {
            // Where they are damage, the first pass ended at it.
            reader.fill_holes();
        }
        let mut cut = Cut::new(self.part);
        let mut block = Vec::new();
        loop {
            block.clear();
            let progress = reader.read(&mut block)?;
            if !take(cut.take(&block))? || cut.is_over() || progress != Progress::More {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::test_data::wav;

    fn first_pass(
        bytes: &[u8],
        max_seconds: f64,
        on_damage: OnDamage,
    ) -> (std::result::Result<Extent, Refusal>, Vec<f32>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wav");
        std::fs::write(&path, bytes).unwrap();
        let recording = StreamedRecording::new(&Storage::default(), &path, Channels::Mix);
        let mut all = Vec::new();
        let extent = recording.first_pass(max_seconds, on_damage, &mut |block| {
            all.extend_from_slice(block);
            Ok(true)
        });
        let extent = extent.unwrap();
        if extent.is_ok() {
            let mut again = Vec::new();
            let pass = recording.pass(&mut |block| {
                again.extend_from_slice(block);
                Ok(true)
            });
            pass.unwrap();
            assert_eq!(again, all, "the second time");
        }
        (extent, all)
    }

    fn reason(bytes: &[u8], max_seconds: f64) -> &'static str {
        first_pass(bytes, max_seconds, OnDamage::Keep)
            .0
            .map_or_else(|refusal| refusal.reason, |_| "ok")
    }

    #[test]
    fn what_is_wrong_has_a_name() {
        let second = wav(16_000, &[0; 16_000]);
        assert_eq!(reason(&second, 10.0), "ok");
        assert_eq!(reason(&second, 1.0), "ok");
        assert_eq!(reason(&second, 0.5), "too_long");
        // A header that does not say how long it is.
        let mut streamed = second.clone();
        streamed[40..44].fill(0xff);
        assert_eq!(reason(&streamed, 0.5), "too_long");
        assert_eq!(reason(b"", 10.0), "empty_file");
        assert_eq!(reason(b"this is a text", 10.0), "unsupported_format");
        assert_eq!(reason(&wav(16_000, &[]), 10.0), "decode_error");
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().join("gone.wav"), folder.path().to_owned()] {
            let recording = StreamedRecording::new(&Storage::default(), path, Channels::Mix);
            let refused = recording.first_pass(10.0, OnDamage::Keep, &mut |_| Ok(true)).unwrap();
            assert_eq!(refused.unwrap_err().reason, "missing_file");
        }
    }

    #[test]
    fn a_table_in_place_of_a_manifest_is_told() {
        let folder = tempfile::tempdir().unwrap();
        for (name, is_told) in [("a.csv", true), ("a.SCP", true), ("a.wav", false)] {
            let path = folder.path().join(name);
            std::fs::write(&path, "path,text\nb.wav,x\n").unwrap();
            let recording = StreamedRecording::new(&Storage::default(), &path, Channels::Mix);
            let refused = recording.first_pass(10.0, OnDamage::Keep, &mut |_| Ok(true)).unwrap();
            let refused = refused.unwrap_err();
            assert_eq!(refused.reason, "unsupported_format");
            assert_eq!(refused.detail.contains("JSON lines"), is_told, "{}", refused.detail);
        }
    }

    #[test]
    fn a_dc_offset_is_told() {
        let note_of = |offset: i16, samples: i32| {
            let samples: Vec<i16> = (0..samples).map(|at| offset + (at % 200 - 100) as i16 * 50).collect();
            first_pass(&wav(16_000, &samples), 10.0, OnDamage::Keep).0.unwrap().note
        };
        let note = |offset| note_of(offset, 16_000);
        assert_eq!(note_of(16_384, 15_999), None, "less than a second");
        assert_eq!(note(0), None);
        for (offset, told) in [(16_384, " 50 %"), (-6_000, " -18 %")] {
            let note = note(offset).unwrap();
            assert!(note.contains("DC offset") && note.contains(told), "{note}");
        }
    }

    #[test]
    fn a_recording_that_is_cut_is_there_up_to_the_cut() {
        let samples: Vec<i16> = (0..32_000).map(|at| (at % 1_000) as i16).collect();
        let whole = wav(16_000, &samples);
        let (extent, all) = first_pass(&whole, 10.0, OnDamage::Refuse);
        assert_eq!(
            extent.unwrap(),
            Extent {
                samples: 32_000,
                ..Extent::default()
            }
        );
        let (extent, kept) = first_pass(&whole[..44 + 48_000], 10.0, OnDamage::Keep);
        let extent = extent.unwrap();
        assert!(extent.damage.is_some());
        assert_eq!(extent.samples, kept.len() as u64);
        assert!((20_000..=24_000).contains(&kept.len()), "{}", kept.len());
        assert_eq!(kept, all[..kept.len()]);
        // Where damage is refused, and where there is less than a second before it.
        for (bytes, on_damage) in [(48_000, OnDamage::Refuse), (24_000, OnDamage::Keep)] {
            let (refused, _) = first_pass(&whole[..44 + bytes], 10.0, on_damage);
            let refusal = refused.unwrap_err();
            assert_eq!(refusal.reason, "decode_error");
            assert!(refusal.detail.contains("is damaged at"), "{}", refusal.detail);
        }
    }

    #[test]
    fn a_part_is_the_same_however_it_is_decoded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wav");
        let samples: Vec<i16> = (0..80_000).map(|at| (at % 1_003) as i16).collect();
        std::fs::write(&path, wav(8_000, &samples)).unwrap();
        let read = |channels, start, seconds| {
            let recording = StreamedRecording::new(&Storage::default(), &path, channels)
                .with_place(None, Some(Part { start, seconds }));
            let mut all = Vec::new();
            let extent = recording.first_pass(4.0, OnDamage::Keep, &mut |block| {
                all.extend_from_slice(block);
                Ok(true)
            });
            let extent = extent.unwrap();
            if let Ok(extent) = &extent {
                let mut again = Vec::new();
                let pass = recording.pass(&mut |block| {
                    again.extend_from_slice(block);
                    Ok(true)
                });
                pass.unwrap();
                assert_eq!((again.len() as u64, &again), (extent.samples, &all));
            }
            extent.map(|_| all).map_err(|refusal| refusal.reason)
        };
        let mut whole = Vec::new();
        let pass = StreamedRecording::new(&Storage::default(), &path, Channels::Mix).pass(&mut |block| {
            whole.extend_from_slice(block);
            Ok(true)
        });
        pass.unwrap();
        // By itself, and from the beginning of the recording.
        for channels in [Channels::Mix, Channels::One(0)] {
            assert_eq!(read(channels, 2.5, Some(1.5)).unwrap(), whole[40_000..64_000]);
            assert_eq!(read(channels, 0.0, Some(0.25)).unwrap(), whole[..4_000]);
            assert_eq!(read(channels, 9.0, Some(1.05)).unwrap(), whole[144_000..]);
            assert_eq!(read(channels, 9.0, Some(1.2)), Err("duration_past_end"));
            assert_eq!(read(channels, 11.0, None), Err("duration_past_end"));
            assert_eq!(read(channels, 1.0, Some(5.0)), Err("too_long"));
        }
        assert_eq!(read(Channels::Mix, 8.0, None).unwrap(), whole[128_000..]);
        assert_eq!(read(Channels::Mix, 1.0, None), Err("too_long"));
    }

    /// The samples of a part or the reason of its refusal, and whether a decoder was open for it.
    fn part_of(
        whole: &StreamedRecording,
        open: &mut OpenDecoders,
        start: f64,
        seconds: f64,
    ) -> (std::result::Result<Vec<f32>, &'static str>, bool) {
        let part = Part {
            start,
            seconds: Some(seconds),
        };
        let recording = whole.clone().with_place(None, Some(part));
        let opened = open.take(&recording, (16_000.0 * start) as u64);
        let serves = opened.is_some();
        opened.into_iter().for_each(|opened| open.keep(opened));
        let mut found = Vec::new();
        let extent = recording.first_pass_with(open, 60.0, OnDamage::Keep, &mut |block| {
            found.extend_from_slice(block);
            Ok(true)
        });
        let extent = extent.unwrap().map_err(|refusal| refusal.reason);
        (extent.map(|_| found), serves)
    }

    #[test]
    fn parts_that_are_decoded_by_themselves_tell_what_is_made_of_the_channels() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wav");
        let tone = |at: i32| (f64::from(at) * 0.3).sin() * 8_000.0;
        let frames = |sign: f64| (0..48_000).flat_map(move |at| [tone(at) as i16, (sign * tone(at)) as i16]);
        let mut open = OpenDecoders::default();
        for sign in [-1.0, 1.0] {
            let mut bytes = wav(16_000, &frames(sign).collect::<Vec<_>>());
            // Two channels.
            bytes[22] = 2;
            bytes[28..32].copy_from_slice(&64_000u32.to_le_bytes());
            bytes[32] = 4;
            std::fs::write(&path, bytes).unwrap();
            for start in [0.0, 1.5, 2.0] {
                let part = Part {
                    start,
                    seconds: Some(0.5),
                };
                let recording =
                    StreamedRecording::new(&Storage::default(), &path, Channels::Mix).with_place(None, Some(part));
                let mut largest = 0.0f32;
                let extent = recording.first_pass_with(&mut open, 60.0, OnDamage::Keep, &mut |block| {
                    largest = block.iter().fold(largest, |largest, sample| largest.max(*sample));
                    Ok(true)
                });
                let note = extent.unwrap().unwrap().note;
                let told = note.is_some_and(|note| note.contains("cancel each other out"));
                assert_eq!((told, largest > 0.2), (sign < 0.0, true), "{start} s, {sign}");
            }
        }
    }

    #[test]
    fn parts_one_after_the_other_are_decoded_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wav");
        let samples: Vec<i16> = (0..160_000).map(|at| (at % 1_003) as i16).collect();
        std::fs::write(&path, wav(8_000, &samples)).unwrap();
        let whole = StreamedRecording::new(&Storage::default(), &path, Channels::One(0));
        let mut all = Vec::new();
        let pass = whole.pass(&mut |block| {
            all.extend_from_slice(block);
            Ok(true)
        });
        pass.unwrap();
        // Until the file is old enough to be known again.
        let deadline = Instant::now() + Duration::from_secs(20);
        while FileVersion::settled(&path).is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(100));
        }
        let expected = |start: f64, seconds: f64| {
            let sample = |seconds: f64| (16_000.0 * seconds) as usize;
            Ok(all[sample(start)..sample(start + seconds)].to_vec())
        };
        let mut open = OpenDecoders::default();
        for (start, seconds, serves) in [
            (1.0, 0.5, false),
            (1.5, 0.25, true),
            // It begins in the last block, which the part before ended in.
            (1.75, 3.0, true),
            (7.0, 1.0, true),
            // From the beginning again.
            (2.0, 1.0, false),
            // The one that was at 8 s goes on, and then the one at 3 s.
            (12.0, 8.0, true),
            (4.0, 1.0, true),
            (0.0, 0.5, false),
            (15.0, 0.5, true),
        ] {
            let found = part_of(&whole, &mut open, start, seconds);
            assert!(found == (expected(start, seconds), serves), "{start} s");
        }
        // Also one that is at the end.
        for start in [15.5, 19.75, 25.0, 25.0] {
            let found = part_of(&whole, &mut open, start, 10.0);
            assert_eq!(found, (Err("duration_past_end"), true), "{start} s");
        }
        // All are past it.
        assert!(part_of(&whole, &mut open, 19.5, 0.5) == (expected(19.5, 0.5), false));
        // A whole recording is looked at from its beginning, and its length with it.
        let mut all_of_it = |max_seconds: f64| {
            let extent = whole.first_pass_with(&mut open, max_seconds, OnDamage::Keep, &mut |_| Ok(true));
            extent
                .unwrap()
                .map(|extent| extent.samples)
                .map_err(|refusal| refusal.reason)
        };
        assert_eq!((all_of_it(60.0), all_of_it(10.0)), (Ok(320_000), Err("too_long")));
        // Another file of the same name and size, at a place that a decoder is open for.
        std::fs::write(&path, wav(8_000, &vec![7; 160_000])).unwrap();
        let (found, serves) = part_of(&whole, &mut open, 25.0, 0.5);
        assert_eq!((found, serves), (Err("duration_past_end"), false));
        assert!(part_of(&whole, &mut open, 16.0, 0.5).0 != expected(16.0, 0.5));
    }

    #[test]
    fn who_wants_no_more_gets_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wav");
        std::fs::write(&path, wav(16_000, &[0; 160_000])).unwrap();
        let recording = StreamedRecording::new(&Storage::default(), &path, Channels::Mix);
        let mut taken = 0;
        let pass = recording.pass(&mut |block| {
            taken += block.len();
            Ok(taken < 16_000)
        });
        pass.unwrap();
        assert!((16_000..32_000).contains(&taken), "{taken}");
    }
}
