//! A store of voices over recordings: who speaks in which of them, by embeddings. Voices of people whom nobody has named are
//! found by clustering; names and corrections of the user stay.
//!
//! - [`Diarization`] is what `flow diarize --format json` writes.
//! - [`Change`] is a step of the history, [`Voices`] the state after some of them. A change holds its result, not the settings
//!   that led to it, so a history is read the same by later versions.
//! - [`VoiceStore`] keeps the history in a folder.
//! - `added` plans what new recordings change, `review` what a person should look at.

mod added;
mod changes;
mod cluster;
mod diarization;
mod review;
mod store;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use added::{Grouping, New, added};
pub use changes::{AddedRecording, AddedSpeaker, Change, Member, Recording, Voice, Voices, fault_of_name};
pub use diarization::{Diarization, FoundSpeaker};
pub use review::{Between, Near, Review, review};
pub use store::{Entry, TornLine, VoiceStore, VoiceStoreError};

/// Most speakers of recordings in a store: the cost of clustering grows with their square.
pub const MOST_SPEAKERS: usize = 20_000;

/// Number of a voice, from 1; written `V7`. A number is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VoiceId(pub u32);

impl fmt::Display for VoiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "V{}", self.0)
    }
}

impl FromStr for VoiceId {
    type Err = ();

    /// `V7` or `v7`.
    fn from_str(text: &str) -> Result<Self, ()> {
        let digits = text.strip_prefix(['V', 'v']).ok_or(())?;
        let is_number = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
        is_number.then(|| digits.parse().ok().map(VoiceId)).flatten().ok_or(())
    }
}

/// A speaker of a recording, by the label of its diarization.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpeakerKey {
    pub recording: String,
    pub speaker: String,
}

impl SpeakerKey {
    pub fn new(recording: impl Into<String>, speaker: impl Into<String>) -> Self {
        Self {
            recording: recording.into(),
            speaker: speaker.into(),
        }
    }
}

impl fmt::Display for SpeakerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.recording, self.speaker)
    }
}

/// A speaker of a recording: how long, how it sounds, and where to listen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Appearance {
    /// Duration of the turns, in seconds.
    pub seconds: f64,
    /// As the diarization has it, of any length above 0.
    pub embedding: Vec<f32>,
    /// The longest turns without others, in order: start and end in seconds.
    pub stretches: Vec<[f64; 2]>,
}

impl Appearance {
    /// The embedding with length 1.
    pub(crate) fn unit(&self) -> Vec<f32> {
        unit(self.embedding.iter().map(|&value| f64::from(value)))
    }

    /// How much it counts in a mean.
    pub(crate) fn weight(&self) -> f64 {
        self.seconds.max(1e-3)
    }
}

/// Divided by its length; zeros stay zeros.
fn unit(values: impl Iterator<Item = f64> + Clone) -> Vec<f32> {
    let length = values.clone().map(|value| value * value).sum::<f64>().sqrt();
    let length = if length > 0.0 { length } else { 1.0 };
    values.map(|value| (value / length) as f32).collect()
}

/// The centroid of appearances: the mean of their unit vectors, weighted by their seconds, with length 1. None of none.
pub(crate) fn centroid<'a>(appearances: impl IntoIterator<Item = &'a Appearance>) -> Option<Vec<f32>> {
    let mut sum: Vec<f64> = Vec::new();
    for appearance in appearances {
        let vector = appearance.unit();
        sum.resize(vector.len(), 0.0);
        for (sum, value) in sum.iter_mut().zip(vector) {
            *sum += appearance.weight() * f64::from(value);
        }
    }
    (!sum.is_empty()).then(|| unit(sum.iter().copied()))
}

/// The product of two unit vectors. The order of the two does not matter, to the last bit.
pub(crate) fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let (fours, rest) = a.as_chunks::<16>();
    let (others, last) = b.as_chunks::<16>();
    let mut sums = [0.0f32; 16];
    for (a, b) in fours.iter().zip(others) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest: f32 = rest.iter().zip(last).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}
