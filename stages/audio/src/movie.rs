//! What the index of an MP4 or of a QuickTime movie says of sound, where its reader does not look: codecs that QuickTime describes in its
//! own way, the parts of a track that are presented (its edit list), and the times of fragments.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZero;

use symphonia::core::audio::Channels;
use symphonia::core::codecs::audio::well_known::{
    CODEC_ID_ADPCM_IMA_QT, CODEC_ID_ALAC, CODEC_ID_PCM_ALAW, CODEC_ID_PCM_F32BE, CODEC_ID_PCM_F64BE,
    CODEC_ID_PCM_MULAW, CODEC_ID_PCM_S8, CODEC_ID_PCM_S24BE, CODEC_ID_PCM_S32BE, CODEC_ID_VORBIS,
};
use symphonia::core::codecs::audio::{AudioCodecParameters, CODEC_ID_NULL_AUDIO};
use symphonia::core::io::MediaSource;

use crate::ends::read_at;

/// Most boxes of an index that are looked at.
const MOST_BOXES: usize = 1 << 14;
/// Boxes of a track around the deepest one that is looked at.
const DEEPEST: usize = 4;
/// Most bytes of one box that are read.
const MOST_BYTES: u64 = 1 << 20;
/// Frames in a packet of IMA4.
const IMA4_FRAMES: u64 = 64;

/// The index of a movie.
#[derive(Debug, Default)]
pub(crate) struct Movie {
    /// Ticks of a second in edit lists.
    pub timescale: u32,
    pub tracks: Vec<Track>,
    /// For each track the duration of a frame in fragments that do not say it.
    default_durations: BTreeMap<u32, u32>,
}

#[derive(Debug, Default)]
pub(crate) struct Track {
    pub id: u32,
    /// Whether it is one of those that are played.
    pub is_enabled: bool,
    /// Ticks of a second in the track.
    pub timescale: u32,
    pub edits: Vec<Edit>,
    pub sound: Option<Sound>,
    is_sound: bool,
    /// Where in the file the description of its sound is, if that is to be read as another one.
    patch: Option<(u64, [u8; 4])>,
    /// Whether the index itself has frames of it; others may follow in fragments.
    has_frames: bool,
    pub fragments: Fragments,
}

/// An entry of an edit list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Edit {
    /// In ticks of the movie; 0 in the last one is up to the end.
    pub duration: u64,
    /// Where in the track it begins; none of silence.
    pub from: Option<u64>,
    /// Whether it is to be played as it is, neither faster nor slower.
    pub is_plain: bool,
}

/// The times of the fragments of a track, which its reader takes to follow each other without a gap.
#[derive(Debug, Default)]
pub(crate) struct Fragments {
    /// The sum of the durations so far.
    at: u64,
    /// When the first one begins.
    pub first: Option<u64>,
    /// From a time of the reader on, how many ticks later it really is.
    pub shifts: Vec<(u64, i64)>,
}

/// How the samples of a track are coded.
#[derive(Debug, Default)]
pub(crate) struct Sound {
    kind: [u8; 4],
    version: u16,
    channels: u16,
    /// Bits of a sample of PCM.
    bits: u32,
    rate: u32,
    is_little_endian: bool,
    /// Of ALAC.
    cookie: Option<Box<[u8]>>,
}

/// Of the three headers of Vorbis, as its description in MP4 has them (in the laces of Xiph: how many lengths there are, and those of
/// all but the last), the first and the last, which its decoder needs.
fn vorbis_headers(description: &[u8]) -> Option<Box<[u8]>> {
    let mut rest = description.strip_prefix(&[2])?;
    let mut lengths = [0; 2];
    for length in &mut lengths {
        loop {
            let (lace, after) = rest.split_first()?;
            rest = after;
            *length += usize::from(*lace);
            if *lace < 255 {
                break;
            }
        }
    }
    let (first, rest) = rest.split_at_checked(lengths[0])?;
    let last = rest.get(lengths[1]..)?;
    let is_known = first.starts_with(b"\x01vorbis") && last.starts_with(b"\x05vorbis");
    is_known.then(|| [first, last].concat().into())
}

/// A box: its name, and where its content begins and ends.
struct Part {
    name: [u8; 4],
    start: u64,
    end: u64,
}

/// Reads boxes of a file, only so many.
struct Boxes<'a> {
    source: &'a mut dyn MediaSource,
    left: usize,
}

impl Boxes<'_> {
    /// The boxes between two places; the last one may be cut.
    fn within(&mut self, part: &Part) -> io::Result<Vec<Part>> {
        let (mut at, mut parts) = (part.start, Vec::new());
        while self.left > 0 && part.end.saturating_sub(at) >= 8 {
            self.left -= 1;
            let mut head = [0; 16];
            read_at(self.source, at, &mut head)?;
            let [a, b, c, d, e, f, g, h, ref long @ ..] = head;
            let (size, of_head) = match u32::from_be_bytes([a, b, c, d]) {
                0 => (part.end - at, 8),
                1 => (u64::from_be_bytes(*long), 16),
                size => (size.into(), 8),
            };
            let end = at.saturating_add(size).min(part.end);
            if size < of_head || at + of_head > end {
                break;
            }
            let (name, start) = ([e, f, g, h], at + of_head);
            parts.push(Part { name, start, end });
            at = end;
        }
        Ok(parts)
    }

    fn bytes(&mut self, part: &Part) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; (part.end - part.start).min(MOST_BYTES) as usize];
        let read = read_at(self.source, part.start, &mut bytes)?;
        bytes.truncate(read);
        Ok(bytes)
    }
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    number(bytes, at).map(u16::from_be_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    number(bytes, at).map(u32::from_be_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    number(bytes, at).map(u64::from_be_bytes)
}

/// Names and contents of the boxes in these bytes; one that is cut is the last.
fn boxes_in(mut bytes: &[u8]) -> impl Iterator<Item = ([u8; 4], &[u8])> {
    std::iter::from_fn(move || {
        let size = u32_at(bytes, 0)? as usize;
        let name = number(bytes, 4)?;
        let (content, rest) = match size {
            0 => (bytes.get(8..)?, &bytes[bytes.len()..]),
            _ if size > bytes.len() => (bytes.get(8..)?, &bytes[bytes.len()..]),
            _ => (bytes.get(8..size)?, &bytes[size..]),
        };
        bytes = rest;
        Some((name, content))
    })
}

impl Movie {
    /// Reads the content of the box `moov`. What is missing or wrong in it is left out: that is for the reader of the file to say.
    ///
    /// # Errors
    /// Where the source cannot be read.
    pub fn read(source: &mut dyn MediaSource, start: u64, end: u64) -> io::Result<Movie> {
        let left = MOST_BOXES;
        let mut boxes = Boxes { source, left };
        let name = *b"moov";
        let mut movie = Movie::default();
        for part in boxes.within(&Part { name, start, end })? {
            match &part.name {
                b"mvhd" => movie.timescale = timescale(&boxes.bytes(&part)?).unwrap_or(0),
                b"trak" => {
                    let mut track = Track::default();
                    track.read(&mut boxes, &part, 0)?;
                    movie.tracks.push(track);
                }
                b"mvex" => {
                    for part in boxes.within(&part)? {
                        let bytes = boxes.bytes(&part)?;
                        // Version and flags, the track, its description, the duration.
                        let duration = u32_at(&bytes, 4).zip(u32_at(&bytes, 12));
                        movie
                            .default_durations
                            .extend(duration.filter(|_| &part.name == b"trex"));
                    }
                }
                _ => {}
            }
        }
        Ok(movie)
    }

    /// Bytes that its reader is to find in place of others: names of codings of PCM that it knows, with the place of each.
    pub fn patches(&self) -> Vec<(u64, [u8; 4])> {
        self.tracks.iter().filter_map(|track| track.patch).collect()
    }

    /// What the codecs of tracks of sound are called.
    pub fn codecs(&self) -> Vec<(u32, String)> {
        let name = |track: &Track| Some((track.id, track.sound.as_ref()?.kind.escape_ascii().to_string()));
        self.tracks
            .iter()
            .filter(|track| track.is_sound)
            .filter_map(name)
            .collect()
    }

    pub fn track(&self, id: u32) -> Option<&Track> {
        self.tracks.iter().find(|track| track.id == id)
    }

    /// When the first fragment of any track begins, in so many ticks to the second.
    pub fn first_time(&self, scale: NonZero<u32>) -> i64 {
        let times = self.tracks.iter().filter_map(|track| {
            let (first, own) = (track.fragments.first?, track.timescale);
            (u128::from(first) * u128::from(scale.get())).checked_div(own.into())
        });
        times.min().and_then(|first| i64::try_from(first).ok()).unwrap_or(0)
    }

    /// Notes when the fragment begins that the content of a box `moof` describes.
    ///
    /// # Errors
    /// Where the source cannot be read.
    pub fn add_fragment(&mut self, source: &mut dyn MediaSource, start: u64, end: u64) -> io::Result<()> {
        let name = *b"moof";
        let mut boxes = Boxes { source, left: 1 };
        let moof = boxes.bytes(&Part { name, start, end })?;
        for (name, part) in boxes_in(&moof) {
            if &name == b"traf" {
                self.add_track_fragment(part);
            }
        }
        Ok(())
    }

    fn add_track_fragment(&mut self, traf: &[u8]) -> Option<()> {
        let part = |wanted: &[u8; 4]| boxes_in(traf).find(|(name, _)| name == wanted).map(|(_, part)| part);
        let head = part(b"tfhd")?;
        let (flags, id) = (u32_at(head, 0)?, u32_at(head, 4)?);
        let track = self.tracks.iter_mut().find(|track| track.id == id)?;
        let has = |flag: u32| flags & flag != 0;
        // After a place and the number of a description, if they are there.
        let at = 8 + 8 * usize::from(has(1)) + 4 * usize::from(has(2));
        let duration = if has(8) {
            u32_at(head, at)
        } else {
            self.default_durations.get(&id).copied()
        };
        if let Some(time) = part(b"tfdt")
            && !track.has_frames
        {
            let version = u32_at(time, 0)? >> 24;
            let begins = if version == 0 {
                u32_at(time, 4)?.into()
            } else {
                u64_at(time, 4)?
            };
            let fragments = &mut track.fragments;
            let shift = i64::try_from(begins).ok()?.checked_sub_unsigned(fragments.at)?;
            fragments.first.get_or_insert(begins);
            if fragments.shifts.last().map_or(0, |(_, shift)| *shift) != shift {
                fragments.shifts.push((fragments.at, shift));
            }
        }
        for (_, run) in boxes_in(traf).filter(|(name, _)| name == b"trun") {
            let length = run_duration(run, duration.unwrap_or(0)).unwrap_or(0);
            track.fragments.at = track.fragments.at.saturating_add(length);
        }
        Some(())
    }
}

/// The sum of the durations in a box `trun`.
fn run_duration(run: &[u8], default: u32) -> Option<u64> {
    let (flags, count) = (u32_at(run, 0)?, u32_at(run, 4)?);
    let has = |flag: u32| usize::from(flags & flag != 0);
    if has(0x100) == 0 {
        return Some(u64::from(count) * u64::from(default));
    }
    let start = 8 + 4 * (has(1) + has(4));
    // Duration, size, flags, and offset of each frame.
    let each = 4 * (has(0x100) + has(0x200) + has(0x400) + has(0x800));
    let frames = run.get(start..)?.chunks_exact(each).take(count as usize);
    Some(frames.filter_map(|frame| u32_at(frame, 0)).map(u64::from).sum())
}

/// Ticks of a second, from the content of `mvhd` or `mdhd`.
fn timescale(head: &[u8]) -> Option<u32> {
    // After version, flags, and two dates.
    u32_at(head, if head.first()? == &1 { 20 } else { 12 })
}

impl Track {
    /// Reads a box of the track and those within it.
    fn read(&mut self, boxes: &mut Boxes<'_>, part: &Part, depth: usize) -> io::Result<()> {
        match &part.name {
            b"trak" | b"edts" | b"mdia" | b"minf" | b"stbl" if depth < DEEPEST => {
                for part in boxes.within(part)? {
                    self.read(boxes, &part, depth + 1)?;
                }
            }
            b"tkhd" => {
                let head = boxes.bytes(part)?;
                self.is_enabled = head.get(3).is_some_and(|flags| flags & 1 != 0);
                let at = if head.first() == Some(&1) { 20 } else { 12 };
                self.id = u32_at(&head, at).unwrap_or(0);
            }
            b"mdhd" => self.timescale = timescale(&boxes.bytes(part)?).unwrap_or(0),
            // After version, flags, and four bytes of QuickTime's.
            b"hdlr" => self.is_sound |= boxes.bytes(part)?.get(8..12) == Some(b"soun"),
            b"elst" => self.edits = edits(&boxes.bytes(part)?),
            b"stsd" => {
                self.sound = sound(&boxes.bytes(part)?);
                let known = self.sound.as_mut().and_then(Sound::known_pcm);
                // After version, flags, the number of descriptions, and the size of the first.
                self.patch = known.map(|name| (part.start + 12, name));
            }
            b"stts" => {
                let mut head = [0; 8];
                read_at(boxes.source, part.start, &mut head)?;
                self.has_frames = u32_at(&head, 4).is_some_and(|count| count > 0);
            }
            _ => {}
        }
        Ok(())
    }
}

fn edits(list: &[u8]) -> Vec<Edit> {
    let is_long = list.first() == Some(&1);
    let count = u32_at(list, 4).unwrap_or(0) as usize;
    let entries = list.get(8..).unwrap_or_default();
    let edit = |entry: &[u8]| {
        let (duration, from, rate) = if is_long {
            let from = u64_at(entry, 8)? as i64;
            (u64_at(entry, 0)?, from, u32_at(entry, 16)?)
        } else {
            let from = u32_at(entry, 4)? as i32;
            (u32_at(entry, 0)?.into(), from.into(), u32_at(entry, 8)?)
        };
        Some(Edit {
            duration,
            from: u64::try_from(from).ok(),
            is_plain: rate == 1 << 16 || from < 0,
        })
    };
    let entries = entries.chunks_exact(if is_long { 20 } else { 12 }).take(count);
    entries.filter_map(edit).collect()
}

/// Of the first description of samples (QuickTime File Format, "Sound Sample Descriptions").
fn sound(descriptions: &[u8]) -> Option<Sound> {
    let (kind, entry) = boxes_in(descriptions.get(8..)?).next()?;
    let version = u16_at(entry, 8)?;
    let mut sound = Sound {
        kind,
        version,
        channels: u16_at(entry, 16)?,
        bits: match version {
            1 => u32_at(entry, 32)?.saturating_mul(8),
            _ => u16_at(entry, 18)?.into(),
        },
        // The upper half: the lower one is a fraction.
        rate: u16_at(entry, 24)?.into(),
        ..Sound::default()
    };
    let extensions = match version {
        0 => 28,
        1 => 44,
        _ => 64,
    };
    let parts = boxes_in(entry.get(extensions..).unwrap_or_default());
    for (name, content) in parts {
        match &name {
            b"wave" => boxes_in(content).for_each(|(name, content)| sound.extend(name, content)),
            _ => sound.extend(name, content),
        }
    }
    Some(sound)
}

impl Sound {
    fn extend(&mut self, name: [u8; 4], content: &[u8]) {
        match &name {
            b"enda" => self.is_little_endian = u16_at(content, 0) == Some(1),
            // After version and flags (ISO/IEC 23003-5, "PCMConfig").
            b"pcmC" => self.is_little_endian = content.get(4).is_some_and(|flags| flags & 1 != 0),
            // After version and flags.
            b"alac" => self.cookie = content.get(4..).map(Into::into),
            _ => {}
        }
    }

    /// The name by which the reader of the file knows a coding of PCM: that of MP4 (ISO/IEC 23003-5), which it does not know, and those
    /// of QuickTime for 16 bits, which other programs use for 8 and GStreamer for 24, too. None where it is right.
    fn known_pcm(&mut self) -> Option<[u8; 4]> {
        let is_mp4 = matches!(&self.kind, b"ipcm" | b"fpcm");
        if matches!((&self.kind, self.bits), (b"twos" | b"sowt", 8)) {
            // Its bytes have no sign.
            return Some(*b"raw ");
        }
        let name = match (&self.kind, self.bits) {
            (b"ipcm", 16) if self.is_little_endian => b"sowt",
            (b"ipcm", 16) => b"twos",
            (b"ipcm" | b"twos" | b"sowt", 24) => b"in24",
            (b"ipcm" | b"twos" | b"sowt", 32) => b"in32",
            (b"fpcm", 32) => b"fl32",
            (b"fpcm", 64) => b"fl64",
            _ => return None,
        };
        self.is_little_endian = if is_mp4 {
            self.is_little_endian
        } else {
            &self.kind == b"sowt"
        };
        self.kind = *name;
        Some(*name)
    }

    /// Where the reader of the file does not know the description at all.
    pub fn parameters(&self) -> Option<AudioCodecParameters> {
        let mut parameters = AudioCodecParameters::new();
        parameters.with_sample_rate(self.rate);
        (&self.kind == b"ima4").then_some(parameters)
    }

    /// Completes what the reader of the file makes of the description.
    pub fn complete(&self, parameters: &mut AudioCodecParameters) {
        // Version 2 says the order of bytes in a place of its own.
        let is_big_endian = self.version < 2 && !self.is_little_endian;
        let is_unknown = parameters.codec == CODEC_ID_NULL_AUDIO;
        parameters.codec = match &self.kind {
            b"twos" | b"sowt" if self.bits == 8 => CODEC_ID_PCM_S8,
            b"in24" if is_big_endian => CODEC_ID_PCM_S24BE,
            b"in32" if is_big_endian => CODEC_ID_PCM_S32BE,
            b"fl32" if is_big_endian => CODEC_ID_PCM_F32BE,
            b"fl64" if is_big_endian => CODEC_ID_PCM_F64BE,
            b"alaw" if is_unknown => CODEC_ID_PCM_ALAW,
            b"ulaw" if is_unknown => CODEC_ID_PCM_MULAW,
            b"ima4" if is_unknown => {
                parameters.with_max_frames_per_packet(IMA4_FRAMES);
                parameters.with_frames_per_block(IMA4_FRAMES);
                CODEC_ID_ADPCM_IMA_QT
            }
            b"mp4a" if is_unknown => {
                let Some(headers) = parameters.extra_data.as_deref().and_then(vorbis_headers) else {
                    return;
                };
                parameters.extra_data = Some(headers);
                CODEC_ID_VORBIS
            }
            b"alac" if is_unknown && self.cookie.is_some() => {
                parameters.extra_data = self.cookie.clone();
                CODEC_ID_ALAC
            }
            _ => return,
        };
        if parameters.channels.is_none() {
            parameters.with_channels(Channels::Discrete(self.channels));
        }
    }
}
