//! What a person should look at: voices that are nearly the same, and speakers who may belong to another voice.

use rayon::prelude::*;

use super::changes::{Voice, Voices};
use super::{SpeakerKey, VoiceId, cosine};

/// A speaker may belong to another voice if that one is at most this much less similar than its own.
const MARGIN: f32 = 0.1;

/// Two voices that may be one. A name is that of the first, if one has a name.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Near {
    pub voice: VoiceId,
    pub other: VoiceId,
    /// The cosine of the centroids.
    pub cosine: f32,
}

/// A speaker who may have another voice.
#[derive(Debug, Clone, PartialEq)]
pub struct Between {
    pub speaker: SpeakerKey,
    pub voice: VoiceId,
    pub other: VoiceId,
    /// The cosine with the rest of its voice.
    pub own: f32,
    /// The cosine with the other one.
    pub cosine: f32,
}

/// The surest first.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Review {
    pub near: Vec<Near>,
    pub between: Vec<Between>,
}

/// Finds at most `most` of each kind. Similar is what has a cosine of `threshold`. Two voices with names, and two that speak in
/// one recording, are different; settled speakers are where they belong.
pub fn review(voices: &Voices, threshold: f64, most: usize) -> Review {
    let threshold = threshold as f32;
    let centroids: Vec<(VoiceId, &Voice, Vec<f32>)> = voices
        .voices()
        .iter()
        .filter_map(|(id, voice)| Some((*id, voice, voices.centroid(*id)?)))
        .collect();
    let surest = |mut near: Vec<Near>| {
        near.sort_by(|a, b| {
            b.cosine
                .total_cmp(&a.cosine)
                .then((a.voice, a.other).cmp(&(b.voice, b.other)))
        });
        near.truncate(most);
        near
    };
    let near = (0..centroids.len()).into_par_iter().flat_map_iter(|at| {
        let (id, voice, vector) = &centroids[at];
        let later = centroids[at + 1..].iter().filter_map(|(other, second, second_vector)| {
            let cosine = cosine(vector, second_vector);
            let is_open = cosine >= threshold
                && (voice.name.is_none() || second.name.is_none())
                && voice
                    .speakers
                    .keys()
                    .all(|recording| !second.speakers.contains_key(recording));
            let (voice, other) = if second.name.is_some() {
                (*other, *id)
            } else {
                (*id, *other)
            };
            is_open.then_some(Near { voice, other, cosine })
        });
        surest(later.collect())
    });
    let near = surest(near.collect());

    let mut between: Vec<Between> = voices
        .members()
        .par_iter()
        .filter(|(_, member)| !member.settled)
        .filter_map(|(key, member)| {
            let own = voices.likeness(key)?;
            let vector = member.appearance.unit();
            let others = centroids
                .iter()
                .filter(|(id, voice, _)| *id != member.voice && !voice.speakers.contains_key(&key.recording));
            let others = others.map(|(id, _, centroid)| (*id, cosine(&vector, centroid)));
            let (other, cosine) = others.max_by(|(a, x), (b, y)| x.total_cmp(y).then(b.cmp(a)))?;
            (cosine >= threshold && cosine > own - MARGIN).then(|| Between {
                speaker: key.clone(),
                voice: member.voice,
                other,
                own,
                cosine,
            })
        })
        .collect();
    between.sort_by(|a, b| {
        (b.cosine - b.own)
            .total_cmp(&(a.cosine - a.own))
            .then_with(|| a.speaker.cmp(&b.speaker))
    });
    between.truncate(most);
    Review { near, between }
}
