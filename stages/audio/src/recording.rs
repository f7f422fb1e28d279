//! A recording of any format that can be decoded: the verdict on it, and its samples.
//!
//! FLAC is checked by [`crate::flac`]. Samples of other formats are converted to integers, so that the samples, their
//! hash, and a FLAC made of them agree: 16 bits for lossy codecs, A-law and 16-bit PCM, 24 bits for wider and
//! floating-point PCM.

use std::collections::VecDeque;
use std::io::{self, Cursor};
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};

use sha2::{Digest as _, Sha256};
use symphonia::core::codecs::audio::AudioDecoderOptions;
use symphonia::core::errors::Error as SymphoniaError;
use symphonia::core::formats::{FormatOptions, FormatReader, SeekMode, SeekTo};
use symphonia::core::io::{MediaSource, MediaSourceStream, MediaSourceStreamOptions, ReadOnlySource};
use symphonia::core::units::{TimeBase, Timestamp};
use symphonia::default::codecs::FlacDecoder;
use symphonia::default::formats::{
    AdtsReader, AiffReader, CafReader, FlacReader, IsoMp4Reader, MkvReader, MpaReader, OggReader, WavReader,
};

use crate::block::{Trim, accept, bits_of, left_justified};
use crate::decode_fault::{ENDS_TOO_SOON, LONGER_THAN_ITS_HEADER_SAYS, broken, failed, no_frames};
use crate::ends::{Matroska, Mp4, SegmentEnd, begins_with_several_streams, end_of_caf, ends_within_a_stream};
use crate::flac::{self, Fault, Samples, Status, StreamInfo, Verdict};
use crate::format::{Format, first_frame, recognise};
use crate::movie::Movie;
use crate::mpeg_gaps::{BETWEEN_AAC, BETWEEN_MP3, Gaps, counted_too_many};
use crate::stream::{Container, Decoder, MOST_PACKET, Stream};
use crate::streamed_aiff;
use crate::streamed_wav::{header_with_sizes, is_longer_than_its_header_says};
use crate::timeline::{Edits, Part, Timeline};
use crate::wave64;

/// What may be missing between two packets of Vorbis, in frames: some programs count them less exactly when they copy packets.
const MOST_MISSING: u64 = 1_024;
/// Most seconds of an Ogg that may be missing, where silence takes their place.
const MOST_SILENCE: u64 = 3_600;
/// Decodes the whole recording and checks it, if its format is one of `formats`.
pub fn probe(bytes: &[u8], formats: &[Format]) -> Result<(Format, Verdict), Fault> {
    if bytes.is_empty() {
        return Err(flac::fault(Status::EmptyFile, "0 bytes"));
    }
    let found = recognise(bytes);
    match found {
        Ok(Format::Flac) if formats.contains(&Format::Flac) => {
            flac::probe(bytes).map(|verdict| (Format::Flac, verdict))
        }
        Ok(format) if formats.contains(&format) => judge(bytes, format).map(|verdict| (format, verdict)),
        // Where only FLAC is allowed, all other formats are `not_flac`.
        _ if formats == [Format::Flac] => Err(flac::fault(Status::NotFlac, "does not begin with `fLaC`")),
        Ok(format) => {
            let detail = format!("{}, which is not among the allowed `formats`", format.as_str());
            Err(flac::fault(Status::UnsupportedFormat, detail))
        }
        Err(what) => Err(flac::fault(Status::UnsupportedFormat, what)),
    }
}

/// Decodes the samples, at most `max_frames` frames of them (more is a fault).
pub fn decode(bytes: &[u8], max_frames: u64) -> Result<Samples, Fault> {
    Ok(decode_with_largest(bytes, max_frames)?.0)
}

/// The same, with the magnitude of the largest floating-point sample, where 1 is full scale: larger ones are clipped. It is 0 for
/// integers and for lossy codecs, whose samples are a little larger than those that were encoded.
///
/// # Errors
/// As [`decode`].
pub fn decode_with_largest(bytes: &[u8], max_frames: u64) -> Result<(Samples, f64), Fault> {
    let format = match recognise(bytes) {
        _ if bytes.is_empty() => return Err(flac::fault(Status::EmptyFile, "0 bytes")),
        Ok(Format::Flac) => return Ok((flac::decode(bytes, max_frames)?, 0.0)),
        Ok(format) => format,
        Err(what) => return Err(flac::fault(Status::UnsupportedFormat, what)),
    };
    let mut interleaved = Vec::new();
    let mut frames = 0;
    let mut info = None;
    let largest = blocks(bytes, format, &mut |layout, samples| {
        frames += samples.len() as u64 / u64::from(layout.channels);
        if frames > max_frames {
            return Err(broken(format!("more than {max_frames} frames")));
        }
        info.get_or_insert_with(|| layout.clone());
        interleaved.extend_from_slice(samples);
        Ok(())
    })?;
    let mut info = info.ok_or_else(no_frames)?;
    info.total_frames = frames;
    Ok((Samples { info, interleaved }, largest))
}

/// Decodes the whole recording and checks it as [`probe`] does, keeping nothing: memory does not grow with its length. Gives its seconds.
///
/// # Errors
/// If it is damaged, of no known format, or has more than `max_frames` frames.
pub fn check(bytes: &[u8], max_frames: u64) -> Result<f64, Fault> {
    let (mut frames, mut rate) = (0, 0);
    let mut count = |layout: &StreamInfo, samples: &[i32]| {
        frames += samples.len() as u64 / u64::from(layout.channels);
        rate = layout.sample_rate;
        match frames > max_frames {
            true => Err(broken(format!("more than {max_frames} frames"))),
            false => Ok(()),
        }
    };
    match recognise(bytes) {
        _ if bytes.is_empty() => return Err(flac::fault(Status::EmptyFile, "0 bytes")),
        Ok(Format::Flac) => flac::check(bytes, &mut count)?,
        Ok(format) => {
            blocks(bytes, format, &mut count)?;
        }
        Err(what) => return Err(flac::fault(Status::UnsupportedFormat, what)),
    }
    match rate {
        0 => Err(no_frames()),
        rate => Ok(frames as f64 / f64::from(rate)),
    }
}

fn judge(bytes: &[u8], format: Format) -> Result<Verdict, Fault> {
    let mut found: Option<(StreamInfo, Sha256)> = None;
    let mut little_endian = Vec::new();
    let mut frames = 0;
    blocks(bytes, format, &mut |layout, samples| {
        let (_, hash) = found.get_or_insert_with(|| (layout.clone(), flac::new_hash(layout)));
        flac::add_to_hash(hash, samples, &mut little_endian);
        frames += samples.len() as u64 / u64::from(layout.channels);
        Ok(())
    })?;
    let (mut info, hash) = found.ok_or_else(no_frames)?;
    info.total_frames = frames;
    let audio_hash = hex::encode(hash.finalize());
    Ok(Verdict {
        info,
        frames,
        audio_hash,
    })
}

type Take<'a> = dyn FnMut(&StreamInfo, &[i32]) -> Result<(), Fault> + 'a;

/// Gives the samples block by block, interleaved and left-justified; empty blocks are left out. All blocks have
/// one layout. The result is that of [`decode_with_largest`].
fn blocks(bytes: &[u8], format: Format, take: &mut Take<'_>) -> Result<f64, Fault> {
    let bytes = if matches!(format, Format::Mp3 | Format::Aac) {
        // Pictures in a tag may hold what looks like a frame.
        &bytes[first_frame(bytes)..]
    } else if format == Format::Caf {
        let header = |at: u64| bytes.get(at as usize..)?.first_chunk().copied();
        &bytes[..end_of_caf(bytes.len() as u64, header) as usize]
    } else {
        bytes
    };
    let mut fault_at_end = None;
    let mut owned = if format == Format::Rf64 {
        let wave = wave64::read_header(Cursor::new(bytes), bytes.len() as u64)?;
        fault_at_end = wave.fault_at_end;
        // Within the bytes, as it is never behind their end.
        [&wave.head, &bytes[wave.start as usize..wave.end as usize]].concat()
    } else {
        bytes.to_vec()
    };
    if format == Format::Wav
        && let Some(header) = header_with_sizes(bytes, bytes.len() as u64)
    {
        owned.splice(..header.start as usize, header.bytes);
    }
    if format == Format::Aiff
        && let Some(header) = streamed_aiff::header_with_sizes(bytes, bytes.len() as u64)
    {
        fault_at_end = header.fault_at_end;
        owned.splice(..header.start as usize, header.bytes);
    }
    let decoded = catch_unwind(AssertUnwindSafe(move || read_blocks(owned, format, fault_at_end, take)));
    let largest = decoded.unwrap_or_else(|_| Err(broken("the decoder failed on damaged data")))?;
    if format == Format::Wav && is_longer_than_its_header_says(&mut Cursor::new(bytes), bytes.len() as u64) {
        return Err(broken(LONGER_THAN_ITS_HEADER_SAYS));
    }
    Ok(largest)
}

fn read_blocks(
    bytes: Vec<u8>,
    format: Format,
    fault_at_end: Option<&'static str>,
    take: &mut Take<'_>,
) -> Result<f64, Fault> {
    let mut blocks = Blocks::open(Box::new(Cursor::new(bytes)), format, None)?;
    blocks.fault_at_end = fault_at_end.or(blocks.fault_at_end);
    while let Some(block) = blocks.next_block()? {
        take(block.layout, block.samples)?;
    }
    blocks.check_end()?;
    Ok(blocks.largest)
}

/// Reads a recording block by block. The third-party decoders get hostile input: the caller must catch their panics.
pub(crate) struct Blocks {
    reader: Box<dyn FormatReader>,
    format: Format,
    decoder: Decoder,
    track_id: u32,
    /// Frames that the header mentions; in an Ogg of several streams one after the other, that of the stream that is read.
    pub promised: Option<u64>,
    /// How many of these need not be there.
    too_many: u64,
    /// Frames that are given in all, if the recording says it.
    pub stated: Option<u64>,
    /// Of several tracks, which one is read; and of other things that a user has to know.
    pub note: Option<String>,
    /// Frames that were given, and those of them that came of streams before the one that is read.
    given: u64,
    before: u64,
    /// Whether an Ogg has other streams that play with this one.
    is_film: bool,
    lossy: bool,
    /// FLAC's bits per sample; samples are decoded to 32 bits.
    flac_bits: Option<u32>,
    /// For Ogg, whose reader silently skips damaged pages: frames that may be missing between two packets.
    most_missing: Option<u64>,
    /// Whether silence takes the place of what is missing, where it is damage otherwise.
    pub fills_holes: bool,
    /// The frame at which something is missing first, and how much is in all.
    pub hole: Option<(u64, u64)>,
    /// What is wrong after the last block: of Ogg, whose reader silently leaves out a stream that is cut in its header or its only
    /// page, of MP4 in fragments, and of a 64-bit WAV.
    pub fault_at_end: Option<&'static str>,
    /// For Matroska, which need not say where it ends; and the last packet that is not empty, of any track.
    segment_end: Option<SegmentEnd>,
    last_packet: Box<[u8]>,
    /// Where the next packet begins, if none is missing.
    next_packet: Option<i64>,
    /// For MP3 and AAC without a container, whose readers silently skip what is no frame.
    gaps: Option<Gaps>,
    trim: Trim,
    container: Container,
    /// For containers that tell the time of each packet, and what is still to be given of the packet that was decoded last.
    timeline: Option<Timeline>,
    parts: VecDeque<Part>,
    decoded: Vec<i32>,
    /// All blocks have one layout.
    layout: Option<StreamInfo>,
    floats: Vec<f64>,
    /// The magnitude of the largest floating-point sample, where 1 is full scale; 0 of integers and of lossy codecs.
    largest: f64,
    samples: Vec<i32>,
    /// Place and number of frames of the block whose samples these are.
    last: Option<(u64, u64)>,
}

/// Samples of one packet.
pub(crate) struct Block<'a> {
    /// Place of the first frame in the recording, as the format has it.
    pub first: u64,
    pub frames: u64,
    pub layout: &'a StreamInfo,
    /// Interleaved and left-justified.
    pub samples: &'a [i32],
}

impl Blocks {
    /// Any format but FLAC; of a 64-bit WAV, with the header of CAF that [`wave64`] makes of its own. `track` is an audio track,
    /// counted from 1; none for the one that is played.
    pub fn open(source: Box<dyn MediaSource>, format: Format, track: Option<u32>) -> Result<Blocks, Fault> {
        let (mut source, mut gaps, mut fault_at_end, mut segment_end) = (source, None, None, None);
        let (mut is_fragmented, mut container, mut too_many) = (false, Container::default(), 0);
        let unread = |error: io::Error| failed(error.into());
        let is_ogg = matches!(format, Format::Ogg | Format::Opus);
        if is_ogg && ends_within_a_stream(&mut *source).map_err(unread)? {
            fault_at_end = Some(ENDS_TOO_SOON);
        }
        let is_film = is_ogg && begins_with_several_streams(&mut *source).map_err(unread)?;
        let source: Box<dyn MediaSource> = match format {
            Format::Mkv => {
                let file = Matroska::of(source).map_err(unread)?;
                if file.end == SegmentEnd::Joined {
                    fault_at_end = Some(LONGER_THAN_ITS_HEADER_SAYS);
                }
                segment_end = Some(file.end);
                (container.preferred, container.encoded) = (Some(file.tracks.default), file.tracks.encoded);
                container.codecs = file.tracks.codecs;
                Box::new(ReadOnlySource::new(file.source))
            }
            Format::M4a => {
                let file = Mp4::of(source).map_err(unread)?;
                fault_at_end = file.is_broken.then_some(ENDS_TOO_SOON);
                is_fragmented = file.is_fragmented;
                let tracks = file.movie.iter().flat_map(|movie| &movie.tracks);
                container.preferred = Some(tracks.filter(|track| track.is_enabled).map(|track| track.id).collect());
                container.codecs = file.movie.as_ref().map(Movie::codecs).unwrap_or_default();
                container.movie = file.movie;
                file.source
            }
            // Of a seekable one that does not say its number of frames, the reader estimates the number.
            Format::Mp3 | Format::Aac => {
                let mut source = source;
                if format == Format::Mp3 {
                    too_many = counted_too_many(&mut *source).map_err(unread)?;
                }
                let most = if format == Format::Mp3 {
                    BETWEEN_MP3
                } else {
                    BETWEEN_AAC
                };
                let (found, watched) = Gaps::of(source, most);
                gaps = Some(found);
                Box::new(ReadOnlySource::new(watched))
            }
            _ => source,
        };
        let source = MediaSourceStream::new(source, MediaSourceStreamOptions::default());
        let options = FormatOptions::default();
        let reader: Box<dyn FormatReader> = match format {
            Format::Flac => return Err(broken("FLAC has a decoder of its own")),
            Format::Wav => Box::new(WavReader::try_new(source, options).map_err(failed)?),
            Format::Mp3 => Box::new(MpaReader::try_new(source, options).map_err(failed)?),
            Format::M4a => Box::new(IsoMp4Reader::try_new(source, options).map_err(failed)?),
            Format::Ogg | Format::Opus => Box::new(OggReader::try_new(source, options).map_err(failed)?),
            Format::Aiff => Box::new(AiffReader::try_new(source, options).map_err(failed)?),
            Format::Caf | Format::Rf64 => Box::new(CafReader::try_new(source, options).map_err(failed)?),
            Format::Aac => Box::new(AdtsReader::try_new(source, options).map_err(failed)?),
            Format::Mkv => Box::new(MkvReader::try_new(source, options).map_err(failed)?),
        };
        let Stream {
            mut decoder,
            track_id,
            mut promised,
            lossy,
            flac_bits,
            rate,
            tick,
            mut note,
        } = Stream::of(&*reader, format, &container, track)?;
        if is_film {
            // The reader looks for the last page among those of all streams, and stops at one of the pictures.
            promised = None;
        }
        if is_fragmented {
            // An index of all fragments may be that of the pictures, which end a little later.
            promised = promised.map(|frames| frames.saturating_sub(rate.into()));
        }
        let (mut timeline, mut stated) = (None, promised);
        if format == Format::Mkv {
            timeline = tick.map(|tick| Timeline::new(tick, None));
        }
        if let Some(movie) = &container.movie
            && let Some(track) = movie.track(track_id)
            && let Some(scale) = NonZero::new(track.timescale)
        {
            let edits = Edits::of(&track.edits, movie.timescale, track.timescale);
            if edits.is_none() && !track.edits.is_empty() {
                note.get_or_insert_with(|| "its edit list cannot be followed: the whole track is decoded".to_owned());
            }
            if let (Some(edits), Decoder::Opus(opus)) = (&edits, &mut decoder)
                && edits.cut_the_beginning()
            {
                opus.keep_delay();
            }
            if let Some(edits) = &edits {
                stated = promised.map(|frames| edits.length(rate, frames));
            }
            let line = Timeline::new(TimeBase::from_recip(scale), Some(movie.first_time(scale)));
            timeline = Some(line.with_shifts(track.fragments.shifts.clone()).with_edits(edits));
        }
        Ok(Blocks {
            reader,
            format,
            decoder,
            track_id,
            promised,
            too_many,
            stated,
            note,
            given: 0,
            before: 0,
            is_film,
            lossy,
            flac_bits,
            next_packet: None,
            most_missing: match format {
                Format::Opus => Some(0),
                Format::Ogg => Some(MOST_MISSING),
                _ => None,
            },
            fills_holes: false,
            hole: None,
            fault_at_end,
            segment_end,
            last_packet: Box::default(),
            gaps,
            trim: Trim::default(),
            container,
            timeline,
            parts: VecDeque::new(),
            decoded: Vec::new(),
            layout: None,
            floats: Vec::new(),
            largest: 0.0,
            samples: Vec::new(),
            last: None,
        })
    }

    /// A FLAC file whose only metadata is `info`.
    pub fn open_flac(source: Box<dyn MediaSource>, info: &StreamInfo) -> Result<Blocks, Fault> {
        let source = MediaSourceStream::new(source, MediaSourceStreamOptions::default());
        let reader = FlacReader::try_new(source, FormatOptions::default()).map_err(failed)?;
        let track = reader.tracks().first().ok_or_else(|| broken("no audio track"))?;
        let parameters = track.codec_params.as_ref().and_then(|parameters| parameters.audio());
        let parameters = parameters.ok_or_else(|| broken("no audio track"))?;
        let decoder = FlacDecoder::try_new(parameters, &AudioDecoderOptions::default()).map_err(failed)?;
        Ok(Blocks {
            track_id: track.id,
            promised: track.num_frames,
            too_many: 0,
            stated: track.num_frames,
            note: None,
            given: 0,
            before: 0,
            reader: Box::new(reader),
            format: Format::Flac,
            is_film: false,
            decoder: Decoder::Symphonia(Box::new(decoder)),
            lossy: false,
            flac_bits: Some(info.bits),
            next_packet: None,
            most_missing: None,
            fills_holes: false,
            hole: None,
            fault_at_end: None,
            segment_end: None,
            last_packet: Box::default(),
            gaps: None,
            trim: Trim::default(),
            container: Container::default(),
            timeline: None,
            parts: VecDeque::new(),
            decoded: Vec::new(),
            layout: None,
            floats: Vec::new(),
            largest: 0.0,
            samples: Vec::new(),
            last: None,
        })
    }

    /// Goes to the block that holds a frame, or to one before it.
    pub fn seek(&mut self, frame: u64) -> Result<(), Fault> {
        let to = SeekTo::Timestamp {
            ts: Timestamp::new(i64::try_from(frame).unwrap_or(i64::MAX)),
            track_id: self.track_id,
        };
        let Decoder::Symphonia(decoder) = &mut self.decoder else {
            return Err(broken("Opus is decoded from its beginning"));
        };
        self.reader.seek(SeekMode::Accurate, to).map_err(failed)?;
        decoder.reset();
        Ok(())
    }

    /// Goes on with the next of several streams of an Ogg file: they are joined by writing one file after the other, and by
    /// radio stations, each piece of which is a stream.
    fn begin_stream(&mut self) -> Result<(), Fault> {
        let stream = Stream::of(&*self.reader, self.format, &self.container, None);
        let Stream {
            decoder,
            track_id,
            promised,
            lossy,
            flac_bits,
            ..
        } = stream.map_err(|fault| {
            broken(format!(
                "it goes on with another stream, which cannot be decoded: {}",
                fault.detail
            ))
        })?;
        // Where both have one serial number, the reader takes the end of the last stream for that of this one.
        if track_id != self.track_id {
            self.check_end()?;
        }
        (self.decoder, self.track_id) = (decoder, track_id);
        (self.lossy, self.flac_bits) = (lossy, flac_bits);
        self.promised = promised.filter(|_| !self.is_film);
        self.stated = self.promised;
        self.before = self.given;
        self.next_packet = None;
        Ok(())
    }

    /// Whether as many frames were given as the header mentions, where none were passed over.
    pub fn check_end(&self) -> Result<(), Fault> {
        let frames = match &self.timeline {
            Some(timeline) if timeline.is_over() => return Ok(()),
            Some(timeline) => timeline.end(),
            None => self.given - self.before,
        };
        match self.promised {
            // Vorbis and MP3 count what they trim.
            Some(promised) if frames.saturating_add(self.too_many) < promised => {
                Err(broken(format!("{frames} frames, its header says {promised}")))
            }
            _ => Ok(()),
        }
    }

    /// Whether a Matroska file ends where there is no more of it.
    fn ends_here(&self, error: &io::Error) -> bool {
        let end = self.segment_end.as_ref();
        error.kind() == io::ErrorKind::UnexpectedEof && end.is_some_and(|end| end.is_after(&self.last_packet))
    }

    /// The next block that is not empty.
    pub fn next_block(&mut self) -> Result<Option<Block<'_>>, Fault> {
        loop {
            if let Some(part) = self.parts.pop_front() {
                self.give(part);
                return Ok(self.last_block());
            }
            if self.timeline.as_ref().is_some_and(Timeline::is_over) {
                self.last = None;
                return Ok(None);
            }
            let packet = match self.reader.next_packet() {
                Ok(Some(packet)) => packet,
                Ok(None) => break,
                Err(SymphoniaError::ResetRequired) if matches!(self.format, Format::Ogg | Format::Opus) => {
                    self.begin_stream()?;
                    continue;
                }
                Err(SymphoniaError::IoError(error)) if self.ends_here(&error) => break,
                Err(error) => return Err(failed(error)),
            };
            if matches!(self.segment_end, Some(SegmentEnd::Unknown(_))) && !packet.data.is_empty() {
                self.last_packet.clone_from(&packet.data);
            }
            if let Some(timeline) = self.timeline.as_mut().filter(|timeline| timeline.wants_origin()) {
                let track = self.reader.tracks().iter().find(|track| track.id == packet.track_id);
                if let Some(tick) = track.and_then(|track| track.time_base) {
                    timeline.set_origin(packet.pts.get(), tick);
                }
            }
            if packet.track_id != self.track_id {
                continue;
            }
            let (start, end) = (packet.trim_start.get(), packet.trim_end.get());
            if let Some(most) = self.most_missing {
                let length = packet.dur.get().saturating_add(start).saturating_add(end);
                let at = packet.pts.get();
                let next = self.next_packet.replace(at.saturating_add_unsigned(length));
                let missing = next.map_or(0, |next| at.saturating_sub(next));
                let missing = u64::try_from(missing).unwrap_or(0);
                if missing > most {
                    self.fill(missing)?;
                }
            }
            if self.gaps.as_mut().is_some_and(|gaps| !gaps.follows(&packet.data)) {
                return Err(broken("a part is missing or damaged"));
            }
            if self.format == Format::Aac && packet.data.is_empty() {
                return Err(broken("a frame without data"));
            }
            let frames = match &mut self.decoder {
                Decoder::Opus(opus) => {
                    let frames = opus.decode(&packet.data, start, end, &mut self.samples)?;
                    accept(&mut self.layout, opus.layout())?;
                    frames
                }
                Decoder::Symphonia(decoder) => {
                    let block = decoder.decode(&packet).map_err(failed)?;
                    if block.frames() == 0 {
                        continue;
                    }
                    let bits = self.flac_bits.unwrap_or_else(|| bits_of(&block, self.lossy));
                    let here = StreamInfo {
                        sample_rate: block.spec().rate(),
                        channels: u32::try_from(block.num_planes()).unwrap_or(u32::MAX),
                        bits,
                        total_frames: 0,
                        md5: [0; 16],
                    };
                    accept(&mut self.layout, here)?;
                    let largest = left_justified(&block, bits, self.lossy, &mut self.floats, &mut self.samples)?;
                    if !self.lossy {
                        self.largest = self.largest.max(largest);
                    }
                    if self.gaps.is_some() {
                        self.trim.trim(&mut self.samples, block.num_planes(), (start, end));
                    }
                    (self.samples.len() / block.num_planes()) as u64
                }
            };
            if let (Some(timeline), Some(layout)) = (&mut self.timeline, &self.layout) {
                let time = (packet.pts.get(), packet.dur.get());
                let missing = timeline.add(time, frames, layout.sample_rate, &mut self.parts)?;
                if missing > 0 {
                    let (at, before) = self.hole.unwrap_or((self.given, 0));
                    self.hole = Some((at, before.saturating_add(missing)));
                }
                std::mem::swap(&mut self.decoded, &mut self.samples);
            } else if !self.parts.is_empty() {
                self.parts.push_back(Part::Frames(0..frames));
                std::mem::swap(&mut self.decoded, &mut self.samples);
            } else if frames > 0 {
                let first = u64::try_from(packet.pts.get()).unwrap_or_default();
                self.last = Some((first, frames));
                self.given += frames;
                return Ok(self.last_block());
            }
        }
        self.last = None;
        if let Some(fault) = self.fault_at_end {
            return Err(broken(fault));
        }
        if self.promised.is_none() && matches!(self.format, Format::Ogg | Format::Opus) && !self.is_film {
            // The reader looked for the last page, and stopped at a damaged one before it.
            return Err(broken("a page is missing or damaged"));
        }
        if self.promised.is_none() && self.gaps.as_mut().is_some_and(|gaps| !gaps.ends()) {
            return Err(broken(format!(
                "it ends with what is not {}",
                self.format.as_str().to_uppercase()
            )));
        }
        Ok(None)
    }

    /// Puts silence in the place of frames that are missing. The reader tells the times of the page behind them as if it were the one
    /// that is missing: the silence comes after it.
    fn fill(&mut self, missing: u64) -> Result<(), Fault> {
        let (at, before) = self.hole.unwrap_or((self.given, 0));
        let all = before.saturating_add(missing);
        let most = self
            .layout
            .as_ref()
            .map_or(0, |layout| MOST_SILENCE * u64::from(layout.sample_rate));
        if !self.fills_holes || all > most {
            return Err(broken("a page is missing or damaged"));
        }
        self.hole = Some((at, all));
        self.parts.push_back(Part::Silence(missing));
        Ok(())
    }

    /// Makes a part of the block that was decoded last, or silence, the block that is given.
    fn give(&mut self, part: Part) {
        let channels = self.layout.as_ref().map_or(1, |layout| layout.channels as usize);
        let frames = match part {
            Part::Silence(frames) => {
                let now = frames.min(MOST_PACKET);
                if now < frames {
                    self.parts.push_front(Part::Silence(frames - now));
                }
                self.samples.clear();
                self.samples.resize(now as usize * channels, 0);
                now
            }
            Part::Frames(range) => {
                let (start, end) = (range.start as usize * channels, range.end as usize * channels);
                self.samples.clear();
                self.samples
                    .extend_from_slice(self.decoded.get(start..end).unwrap_or_default());
                range.end - range.start
            }
        };
        self.last = Some((self.given, frames));
        self.given += frames;
    }

    /// The block that [`Blocks::next_block`] gave last.
    pub fn last_block(&self) -> Option<Block<'_>> {
        let (first, frames) = self.last?;
        Some(Block {
            first,
            frames,
            layout: self.layout.as_ref()?,
            samples: &self.samples,
        })
    }
}

#[cfg(test)]
#[path = "recording_tests.rs"]
mod tests;
