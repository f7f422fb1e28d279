//! What new recordings change: which voice each of their speakers has.

use std::collections::{BTreeMap, BTreeSet};

use flow_text::written_form::nfc;

use super::changes::{AddedRecording, AddedSpeaker, Change, Recording, Voices, fault_of_name, is_same_name};
use super::cluster::{Item, clusters};
use super::diarization::{Diarization, FoundSpeaker};
use super::{Appearance, MOST_SPEAKERS, SpeakerKey, VoiceId, centroid, cosine};
use crate::assignment::least_cost;
use crate::diarizer::{DiarizationSettings, KnownSpeakers};
use crate::error::{Error, Result};

/// A recording to be added.
#[derive(Debug, Clone)]
pub struct New {
    pub recording: String,
    pub file: Recording,
    pub diarization: Diarization,
}

/// When speakers of recordings are one voice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Grouping {
    /// Largest Euclidean distance between the centroids (of length 1) of two clusters that become one: above 0 to 2.
    pub clustering_threshold: f64,
    /// Least cosine for a speaker to come to a voice that the user has settled, from 0 to 1.
    pub known_threshold: f64,
}

impl Default for Grouping {
    /// Those of the diarizer.
    fn default() -> Self {
        Self {
            clustering_threshold: DiarizationSettings::default().clustering_threshold,
            known_threshold: KnownSpeakers::THRESHOLD,
        }
    }
}

/// A speaker whose voice is looked for.
struct Speaker<'a> {
    appearance: &'a Appearance,
    vector: Vec<f32>,
    /// The voice until now.
    before: Option<VoiceId>,
    settled: bool,
}

/// The speakers of all recordings, in order.
type Speakers<'a> = BTreeMap<SpeakerKey, Speaker<'a>>;

/// The change that adds recordings, or replaces those of the same names. `next` is the number of the next voice.
///
/// - Who is settled stays. In a recording that is replaced, a speaker who sounds like one before takes that one's place.
/// - A speaker with a name in the diarization comes to the voice of this name, which is made if it does not exist.
/// - All others are looked at again. Who is similar enough to a settled voice comes to it, so that the cosines of a recording
///   have the greatest sum. The rest is clustered.
/// - No voice gets two speakers of one recording.
///
/// So voices follow from all recordings together and from what is settled; the order in which recordings came does not matter. A
/// cluster keeps the number of the voice with which it has most seconds in common.
///
/// # Errors
/// If embeddings have different lengths, a recording is there twice, or there are too many speakers.
pub fn added(voices: &Voices, mut new: Vec<New>, next: VoiceId, grouping: &Grouping) -> Result<Change> {
    new.sort_by(|a, b| a.recording.cmp(&b.recording));
    if let Some(pair) = new.windows(2).find(|pair| pair[0].recording == pair[1].recording) {
        return Err(Error::Input(format!(
            "the recording {} is there twice",
            pair[0].recording
        )));
    }
    let speakers = speakers(voices, &new, grouping)?;
    let mut next = next.0..;
    let mut next = || {
        next.next()
            .map(VoiceId)
            .ok_or_else(|| Error::Input("there are too many voices".into()))
    };

    let mut found: BTreeMap<SpeakerKey, VoiceId> = BTreeMap::new();
    let mut taken: BTreeSet<(VoiceId, String)> = BTreeSet::new();
    for (key, speaker) in speakers.iter().filter(|(_, speaker)| speaker.settled) {
        if let Some(voice) = speaker.before {
            taken.insert((voice, key.recording.clone()));
            found.insert(key.clone(), voice);
        }
    }
    let mut named: Vec<(VoiceId, String)> = Vec::new();
    for key in speakers.keys() {
        if found.contains_key(key) || fault_of_name(&key.speaker).is_some() {
            continue;
        }
        let new = || {
            named
                .iter()
                .find(|(_, name)| is_same_name(name, &key.speaker))
                .map(|(voice, _)| *voice)
        };
        let voice = match voices.named(&key.speaker).or_else(new) {
            Some(voice) => voice,
            None => {
                let voice = next()?;
                named.push((voice, nfc(&key.speaker).into_owned()));
                voice
            }
        };
        if taken.insert((voice, key.recording.clone())) {
            found.insert(key.clone(), voice);
        }
    }
    // A named voice is not clustered, even if nothing in it is settled any more.
    let settled: BTreeSet<VoiceId> = found.values().copied().collect();
    for (key, speaker) in &speakers {
        if let Some(voice) = speaker.before.filter(|voice| !settled.contains(voice))
            && voices.voices().get(&voice).is_some_and(|voice| voice.name.is_some())
            && !found.contains_key(key)
        {
            taken.insert((voice, key.recording.clone()));
            found.insert(key.clone(), voice);
        }
    }
    let settled = join_settled(&speakers, &mut found, &taken, grouping.known_threshold)?;
    cluster(
        &speakers,
        &mut found,
        &settled,
        grouping.clustering_threshold,
        &mut next,
    )?;

    let moved = speakers.iter().filter_map(|(key, speaker)| {
        let is_new = new.binary_search_by(|new| new.recording.cmp(&key.recording)).is_ok();
        (!is_new && speaker.before != Some(found[key])).then(|| (key.clone(), found[key]))
    });
    let moved = moved.collect();
    let recordings = new.iter().map(|new| AddedRecording {
        recording: new.recording.clone(),
        file: new.file.clone(),
        speakers: new
            .diarization
            .speakers
            .iter()
            .map(|speaker| {
                let key = SpeakerKey::new(&new.recording, &speaker.label);
                AddedSpeaker {
                    voice: found[&key],
                    settled: speakers[&key].settled,
                    speaker: key.speaker,
                    appearance: speaker.appearance.clone(),
                }
            })
            .collect(),
    });
    Ok(Change::Add {
        recordings: recordings.collect(),
        moved,
        named,
    })
}

/// All speakers once the new recordings are there.
fn speakers<'a>(voices: &'a Voices, new: &'a [New], grouping: &Grouping) -> Result<Speakers<'a>> {
    let replaced: BTreeSet<&str> = new.iter().map(|new| new.recording.as_str()).collect();
    let mut speakers = Speakers::new();
    for (key, member) in voices.members() {
        if !replaced.contains(key.recording.as_str()) {
            let speaker = Speaker {
                vector: member.appearance.unit(),
                appearance: &member.appearance,
                before: Some(member.voice),
                settled: member.settled,
            };
            speakers.insert(key.clone(), speaker);
        }
    }
    for new in new {
        let before = voices.members().range(SpeakerKey::new(&new.recording, "")..);
        let before = before
            .take_while(|(key, _)| key.recording == new.recording)
            .map(|(_, member)| member);
        let before: Vec<_> = before.map(|member| (member, member.appearance.unit())).collect();
        let vectors: Vec<Vec<f32>> = new
            .diarization
            .speakers
            .iter()
            .map(|found| found.appearance.unit())
            .collect();
        let places = similar(
            &vectors,
            &before.iter().map(|(_, vector)| vector.as_slice()).collect::<Vec<_>>(),
            grouping.known_threshold,
        )?;
        for ((found, vector), place) in new.diarization.speakers.iter().zip(vectors).zip(places) {
            let FoundSpeaker { label, appearance } = found;
            let before = place.map(|place| before[place].0);
            let speaker = Speaker {
                appearance,
                vector,
                before: before.map(|member| member.voice),
                settled: before.is_some_and(|member| member.settled),
            };
            speakers.insert(SpeakerKey::new(&new.recording, label), speaker);
        }
    }
    let mut sizes = speakers.iter().map(|(key, speaker)| (key, speaker.vector.len()));
    if let Some((first, size)) = sizes.next()
        && let Some((key, other)) = sizes.find(|(_, other)| *other != size)
    {
        return Err(Error::Input(format!(
            "the embedding of {key} has {other} values, that of {first} {size}: they are of different networks"
        )));
    }
    if speakers.len() > MOST_SPEAKERS {
        return Err(Error::Input(format!(
            "the recordings have {} speakers, and a store has room for {MOST_SPEAKERS}",
            speakers.len()
        )));
    }
    Ok(speakers)
}

/// For each vector the one of the others that it is taken for, each at most once, so that the cosines have the greatest sum; none
/// below the threshold. Vectors of another length are similar to none.
fn similar(vectors: &[Vec<f32>], others: &[&[f32]], threshold: f64) -> Result<Vec<Option<usize>>> {
    let similarity = |a: &[f32], b: &[f32]| match a.len() == b.len() {
        true => f64::from(cosine(a, b)),
        false => -1.0,
    };
    let rows: Vec<Vec<f64>> = vectors
        .iter()
        .map(|vector| others.iter().map(|other| similarity(vector, other)).collect())
        .collect();
    // Most others are far from all.
    let near: Vec<usize> = (0..others.len())
        .filter(|&at| rows.iter().any(|row| row[at] >= threshold))
        .collect();
    if near.is_empty() {
        return Ok(vec![None; vectors.len()]);
    }
    // Pairs below the threshold count as 0, so that they do not prevent others.
    let cost = |cosine: f64| if cosine >= threshold { -1e-9 - cosine } else { 0.0 };
    let costs: Vec<f64> = rows
        .iter()
        .flat_map(|row| near.iter().map(|&at| cost(row[at])))
        .collect();
    let assigned = least_cost(&costs, near.len())?;
    let other = |(row, place): (&Vec<f64>, Option<usize>)| {
        let at = near[place?];
        (row[at] >= threshold).then_some(at)
    };
    Ok(rows.iter().zip(assigned).map(other).collect())
}

/// Gives settled voices the speakers that are similar enough to what is settled in them. Returns the settled voices.
fn join_settled(
    speakers: &Speakers,
    found: &mut BTreeMap<SpeakerKey, VoiceId>,
    taken: &BTreeSet<(VoiceId, String)>,
    threshold: f64,
) -> Result<BTreeSet<VoiceId>> {
    let mut settled: BTreeMap<VoiceId, Vec<&Appearance>> = BTreeMap::new();
    for (key, voice) in found.iter() {
        settled.entry(*voice).or_default().push(speakers[key].appearance);
    }
    let centroids: Vec<(VoiceId, Vec<f32>)> = settled
        .iter()
        .filter_map(|(voice, appearances)| Some((*voice, centroid(appearances.iter().copied())?)))
        .collect();
    let mut free: BTreeMap<&str, Vec<&SpeakerKey>> = BTreeMap::new();
    for key in speakers.keys().filter(|key| !found.contains_key(*key)) {
        free.entry(&key.recording).or_default().push(key);
    }
    for (recording, keys) in free {
        let others = centroids
            .iter()
            .filter(|(voice, _)| !taken.contains(&(*voice, recording.to_owned())));
        let (others, centroids): (Vec<VoiceId>, Vec<&[f32]>) =
            others.map(|(voice, centroid)| (*voice, centroid.as_slice())).unzip();
        let vectors: Vec<Vec<f32>> = keys.iter().map(|key| speakers[*key].vector.clone()).collect();
        for (key, place) in keys.into_iter().zip(similar(&vectors, &centroids, threshold)?) {
            if let Some(place) = place {
                found.insert(key.clone(), others[place]);
            }
        }
    }
    Ok(settled.into_keys().collect())
}

/// Clusters the speakers who have no voice yet.
fn cluster(
    speakers: &Speakers,
    found: &mut BTreeMap<SpeakerKey, VoiceId>,
    settled: &BTreeSet<VoiceId>,
    threshold: f64,
    next: &mut impl FnMut() -> Result<VoiceId>,
) -> Result<()> {
    let free: Vec<(&SpeakerKey, &Speaker)> = speakers.iter().filter(|(key, _)| !found.contains_key(*key)).collect();
    let mut recordings: BTreeMap<&str, u32> = BTreeMap::new();
    let items: Vec<Item> = free
        .iter()
        .map(|(key, speaker)| {
            let number = recordings.len() as u32;
            Item {
                recording: *recordings.entry(&key.recording).or_insert(number),
                weight: speaker.appearance.weight(),
                vector: speaker.vector.clone(),
            }
        })
        .collect();
    let clusters = clusters(&items, threshold);
    // Seconds that a cluster has in common with a voice.
    let mut common: BTreeMap<(usize, VoiceId), f64> = BTreeMap::new();
    for ((_, speaker), cluster) in free.iter().zip(&clusters) {
        if let Some(voice) = speaker.before.filter(|voice| !settled.contains(voice)) {
            *common.entry((*cluster, voice)).or_default() += speaker.appearance.weight();
        }
    }
    let mut common: Vec<((usize, VoiceId), f64)> = common.into_iter().collect();
    common.sort_by(|(a, first), (b, second)| second.total_cmp(first).then(a.1.cmp(&b.1)).then(a.0.cmp(&b.0)));
    let mut numbers: BTreeMap<usize, VoiceId> = BTreeMap::new();
    let mut used = BTreeSet::new();
    for ((cluster, voice), _) in common {
        if !numbers.contains_key(&cluster) && used.insert(voice) {
            numbers.insert(cluster, voice);
        }
    }
    for ((key, _), cluster) in free.iter().zip(clusters) {
        let voice = match numbers.get(&cluster) {
            Some(voice) => *voice,
            None => *numbers.entry(cluster).or_insert(next()?),
        };
        found.insert((*key).clone(), voice);
    }
    Ok(())
}
