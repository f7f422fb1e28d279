//! What the description of audio tracks in a Matroska file says beside what its reader tells.

use std::io;

use symphonia::core::io::MediaSource;

use crate::ends::{element, element_at, read_at};

/// Most bytes of descriptions of tracks that are read: these may hold fonts of subtitles.
const MOST_BYTES: u64 = 1 << 22;
/// Elements of a description (RFC 9559).
const ENTRY: u64 = 0xae;
const NUMBER: u64 = 0xd7;
const KIND: u64 = 0x83;
const ENABLED: u64 = 0xb9;
const DEFAULT: u64 = 0x88;
const ENCODINGS: u64 = 0x6d80;
const CODEC: u64 = 0x86;
/// Most bytes of the name of a codec in a message.
const LONGEST_NAME: usize = 32;
/// The kind of audio.
const AUDIO: u64 = 2;

/// Numbers of audio tracks.
#[derive(Debug, Default)]
pub(crate) struct AudioTracks {
    /// Those that are played where nobody chooses: flagged as default, which a track is that does not say that it is not.
    pub default: Vec<u32>,
    /// Those whose packets are compressed or encrypted, which the reader passes over.
    pub encoded: Vec<u32>,
    /// What the codecs of all are called.
    pub codecs: Vec<(u32, String)>,
}

/// The audio tracks that are described at a place.
///
/// # Errors
/// Where the file cannot be read.
pub(crate) fn audio_tracks(matroska: &mut dyn MediaSource, at: u64) -> io::Result<AudioTracks> {
    let mut found = AudioTracks::default();
    let Some((_, Some(size), of_head)) = element_at(matroska, at)? else {
        return Ok(found);
    };
    let mut tracks = vec![0; size.min(MOST_BYTES) as usize];
    let read = read_at(matroska, at + of_head, &mut tracks)?;
    for (_, entry) in elements(&tracks[..read]).filter(|(id, _)| *id == ENTRY) {
        found.add(entry);
    }
    Ok(found)
}

impl AudioTracks {
    fn add(&mut self, entry: &[u8]) -> Option<()> {
        let value = |wanted: u64| {
            let (_, bytes) = elements(entry).find(|(id, _)| *id == wanted)?;
            let bytes = bytes.get(..bytes.len().min(8))?;
            Some(bytes.iter().fold(0u64, |value, byte| value << 8 | u64::from(*byte)))
        };
        let number = value(NUMBER).and_then(|number| u32::try_from(number).ok())?;
        if value(KIND) == Some(AUDIO) {
            let is_played = value(DEFAULT) != Some(0) && value(ENABLED) != Some(0);
            self.default.extend(is_played.then_some(number));
            self.encoded.extend(value(ENCODINGS).map(|_| number));
            let codec = elements(entry).find(|(id, _)| *id == CODEC);
            // Some programs end it by zeros.
            let codec = codec.and_then(|(_, name)| name.split(|byte| *byte == 0).next());
            let codec = codec.map(|name| &name[..name.len().min(LONGEST_NAME)]);
            self.codecs
                .extend(codec.map(|name| (number, name.escape_ascii().to_string())));
        }
        Some(())
    }
}

/// Identifiers and contents of whole elements.
fn elements(mut bytes: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    std::iter::from_fn(move || {
        let (id, size, of_head) = element(bytes)?;
        let end = usize::try_from(size?).ok()?.checked_add(of_head)?;
        let content = bytes.get(of_head..end)?;
        bytes = &bytes[end..];
        Some((id, content))
    })
}
