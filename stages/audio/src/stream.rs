//! The stream of a recording that is decoded, and its decoder.

use symphonia::core::codecs::CodecParameters;
use symphonia::core::codecs::audio::well_known::{
    CODEC_ID_AAC, CODEC_ID_FLAC, CODEC_ID_MP3, CODEC_ID_OPUS, CODEC_ID_PCM_ALAW, CODEC_ID_PCM_MULAW, CODEC_ID_VORBIS,
};
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoder, AudioDecoderOptions, CODEC_ID_NULL_AUDIO};
use symphonia::core::errors::Error as SymphoniaError;
use symphonia::core::formats::{FormatReader, Track, TrackType};
use symphonia::core::units::TimeBase;

use crate::block::MOST_CHANNELS;
use crate::decode_fault::{broken, failed};
use crate::flac::{self, Fault, Status};
use crate::format::Format;
use crate::movie::Movie;
use crate::opus::{self, OpusPackets};

/// Most frames in a packet. No encoder makes larger ones than FLAC may have.
pub(crate) const MOST_PACKET: u64 = 1 << 16;

pub(crate) enum Decoder {
    Symphonia(Box<dyn AudioDecoder>),
    Opus(Box<OpusPackets>),
}

/// Of the configuration of HE-AAC (`AudioSpecificConfig`, ISO/IEC 14496-3 section 1.6.2.1) that of the AAC-LC in it, which has
/// half the rate and the lower half of the band, and with parametric stereo one channel. None of another.
pub(crate) fn core_of_he_aac(config: &[u8]) -> Option<[u8; 2]> {
    const LC: u64 = 2;
    let bits = u64::from_be_bytes(std::array::from_fn(|at| config.get(at).copied().unwrap_or(0)));
    let part = |from: u32, count: u32| (bits << from) >> (64 - count);
    // Type of object, index of the rate, channels, index of the rate of the whole, type of the object within.
    let (kind, rate, channels, whole, core) = (part(0, 5), part(5, 4), part(9, 4), part(13, 4), part(17, 5));
    // Rates that have no index are not used with it.
    let is_he = [5, 29].contains(&kind) && core == LC && rate < 13 && whole < 13;
    is_he.then(|| ((LC << 11 | rate << 7 | channels << 3) as u16).to_be_bytes())
}

/// One stream of a recording, which its reader is at.
pub(crate) struct Stream {
    pub decoder: Decoder,
    pub track_id: u32,
    pub promised: Option<u64>,
    pub lossy: bool,
    /// Bits of the samples of FLAC in Ogg.
    pub flac_bits: Option<u32>,
    /// Frames of a second, where it says it.
    pub rate: u32,
    /// Length of a tick of its times, where they have one.
    pub tick: Option<TimeBase>,
    /// What a user has to know who expects another one.
    pub note: Option<String>,
}

/// What a container says of its tracks beside what its reader tells.
#[derive(Default)]
pub(crate) struct Container {
    pub movie: Option<Movie>,
    /// The tracks that are played where nobody chooses; none where the reader knows.
    pub preferred: Option<Vec<u32>>,
    /// Tracks whose packets are compressed or encrypted.
    pub encoded: Vec<u32>,
    /// What it calls the codecs of audio tracks, of those that cannot be decoded, too.
    pub codecs: Vec<(u32, String)>,
}

impl Container {
    /// The fault of a track, or of all, that cannot be decoded.
    fn without_decoder(&self, track: Option<u32>) -> Fault {
        let codecs = self
            .codecs
            .iter()
            .filter(|(id, _)| track.is_none_or(|track| track == *id));
        let names: Vec<&str> = codecs.map(|(_, name)| name.as_str()).collect();
        if names.is_empty() {
            return broken("no audio track");
        }
        let detail = format!("its audio has a codec that is not supported: {}", names.join(", "));
        flac::fault(Status::UnsupportedFormat, detail)
    }
}

impl Stream {
    /// The audio track of a number, counted from 1; where none is asked for, the one that is played, or the first other one that can
    /// be decoded.
    pub fn of(
        reader: &dyn FormatReader,
        format: Format,
        container: &Container,
        number: Option<u32>,
    ) -> Result<Stream, Fault> {
        let no_track = || broken("no audio track");
        let is_audio = |track: &&Track| parameters_of(track, container).is_some();
        let tracks: Vec<&Track> = reader.tracks().iter().filter(is_audio).collect();
        if let Some(number) = number {
            let place = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
            let track = place.and_then(|place| tracks.get(place));
            let track = track.ok_or_else(|| no_such_track(tracks.len(), number))?;
            return Stream::of_track(track, format, container);
        }
        let Some(preferred) = &container.preferred else {
            let track = reader.default_track(TrackType::Audio).ok_or_else(no_track)?;
            return Stream::of_track(track, format, container);
        };
        let mut order: Vec<usize> = (0..tracks.len()).collect();
        order.sort_by_key(|&place| !preferred.contains(&tracks[place].id));
        let mut refused = None;
        for place in order {
            match Stream::of_track(tracks[place], format, container) {
                Ok(mut stream) => {
                    let count = tracks.len();
                    let told = || {
                        let number = place + 1;
                        format!("it has {count} audio tracks; number {number} is decoded (`track` chooses)")
                    };
                    stream.note = (count > 1).then(told);
                    return Ok(stream);
                }
                Err(fault) => refused = refused.or(Some(fault)),
            }
        }
        Err(refused.unwrap_or_else(|| container.without_decoder(None)))
    }

    fn of_track(track: &Track, format: Format, container: &Container) -> Result<Stream, Fault> {
        let (track_id, mut promised) = (track.id, track.num_frames);
        let parameters = parameters_of(track, container);
        let without_decoder = || container.without_decoder(Some(track_id));
        let mut parameters = parameters.ok_or_else(without_decoder)?;
        if parameters.codec == CODEC_ID_NULL_AUDIO {
            return Err(without_decoder());
        }
        if container.encoded.contains(&track_id) {
            let detail = "the packets of its track are compressed or encrypted (ContentEncodings)";
            return Err(flac::fault(Status::UnsupportedFormat, detail));
        }
        let codec = parameters.codec;
        let only = match format {
            Format::Mp3 => Some((CODEC_ID_MP3, "MPEG layer III")),
            Format::Ogg if codec != CODEC_ID_FLAC => Some((CODEC_ID_VORBIS, "Vorbis")),
            Format::Opus => Some((CODEC_ID_OPUS, "Opus")),
            _ => None,
        };
        if let Some((_, name)) = only.filter(|(only, _)| *only != codec) {
            let detail = format!("{} with another codec than {name}", format.as_str());
            return Err(flac::fault(Status::UnsupportedFormat, detail));
        }
        // Decoders allocate by the header, before the first block shows that its values are impossible.
        let channels = parameters.channels.as_ref().map_or(0, |channels| channels.count());
        if channels > MOST_CHANNELS as usize {
            return Err(flac::fault(Status::UnsupportedFormat, format!("{channels} channels")));
        }
        if let Some(frames) = parameters.max_frames_per_packet.filter(|frames| *frames > MOST_PACKET) {
            return Err(broken(format!("packets of {frames} frames")));
        }
        let decoder = if codec == CODEC_ID_OPUS {
            let mut head = parameters.extra_data.as_deref().unwrap_or_default().to_vec();
            if format == Format::M4a {
                opus::to_little_endian(&mut head);
            }
            if format == Format::Caf && !head.starts_with(opus::MAGIC) {
                head = opus::usual_head(channels);
            }
            let opus = OpusPackets::open(&head)?;
            if format == Format::Opus {
                // Ogg counts what is left out at the beginning, and may begin at another number than 0.
                let start = u64::try_from(track.start_ts.get()).unwrap_or_default();
                promised = promised.map(|frames| frames.saturating_sub(opus.pre_skip.saturating_add(start)));
            } else {
                promised = None;
            }
            Decoder::Opus(Box::new(opus))
        } else {
            let core = parameters.extra_data.as_deref().filter(|_| codec == CODEC_ID_AAC);
            if let Some(core) = core.and_then(core_of_he_aac) {
                // The container counts frames at twice the rate of the core.
                (parameters.extra_data, promised) = (Some(core.into()), None);
            }
            let codecs = symphonia::default::get_codecs();
            // An MP3 is trimmed here.
            let options = AudioDecoderOptions::default().gapless(format != Format::Mp3);
            let decoder = codecs.make_audio_decoder(&parameters, &options);
            Decoder::Symphonia(decoder.map_err(|error| match error {
                SymphoniaError::Unsupported(_) if !container.codecs.is_empty() => without_decoder(),
                error => failed(error),
            })?)
        };
        Ok(Stream {
            decoder,
            track_id,
            promised,
            lossy: [CODEC_ID_AAC, CODEC_ID_MP3, CODEC_ID_OPUS, CODEC_ID_VORBIS].contains(&codec),
            flac_bits: parameters
                .bits_per_sample
                .filter(|_| format == Format::Ogg && codec == CODEC_ID_FLAC),
            rate: parameters.sample_rate.unwrap_or_default(),
            tick: track.time_base,
            note: None,
        })
    }
}

/// # Errors
/// Where another track than the first is asked for, of a format that has one.
pub(crate) fn one_track(number: Option<u32>) -> Result<(), Fault> {
    number
        .filter(|number| *number != 1)
        .map_or(Ok(()), |number| Err(no_such_track(1, number)))
}

fn no_such_track(count: usize, number: u32) -> Fault {
    let tracks = if count == 1 { "track" } else { "tracks" };
    broken(format!(
        "it has {count} audio {tracks}, and none of the number {number}"
    ))
}

/// What the reader and the container say of the codec of a track; none where it is none of sound.
fn parameters_of(track: &Track, container: &Container) -> Option<AudioCodecParameters> {
    let described = container.movie.as_ref().and_then(|movie| movie.track(track.id));
    let sound = described.and_then(|track| track.sound.as_ref());
    let mut parameters = match &track.codec_params {
        Some(CodecParameters::Audio(parameters)) => parameters.clone(),
        Some(_) => return None,
        None => sound?.parameters()?,
    };
    if let Some(sound) = sound {
        sound.complete(&mut parameters);
    }
    if [CODEC_ID_PCM_ALAW, CODEC_ID_PCM_MULAW].contains(&parameters.codec) {
        // CAF and the extensible format of WAV say the 8 bits that are stored, the decoder asks for those of its samples.
        (parameters.bits_per_sample, parameters.bits_per_coded_sample) = (None, None);
    }
    Some(parameters)
}
