//! Changes of a store, and the voices that follow from them.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use flow_text::written_form::nfc;
use serde::{Deserialize, Serialize};

use super::{Appearance, MOST_SPEAKERS, SpeakerKey, VoiceId, centroid, cosine};
use crate::diarizer::KnownSpeakers;
use crate::stages::write::field;

/// A step of the history. It names everything that it changes, so that a later version of the clustering does not change the
/// past.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Change {
    /// Recordings come, or replace those of the same name.
    Add {
        recordings: Vec<AddedRecording>,
        /// Speakers of other recordings who come to another voice.
        moved: Vec<(SpeakerKey, VoiceId)>,
        /// New voices that have a name: that of the diarization.
        named: Vec<(VoiceId, String)>,
    },
    /// A voice gets a name. The speakers in `settled` stay in it from now on.
    Name {
        voice: VoiceId,
        name: String,
        settled: Vec<SpeakerKey>,
    },
    /// The speakers of `other` come to `voice`, which keeps its name, or takes that of `other` if it has none.
    Merge {
        voice: VoiceId,
        other: VoiceId,
        settled: Vec<SpeakerKey>,
        moved: Vec<SpeakerKey>,
    },
    /// A speaker comes to another voice, or to a new one, or stays in its own. This one and those in `settled`, who are in one of both
    /// voices, are settled.
    Move {
        speaker: SpeakerKey,
        voice: VoiceId,
        settled: Vec<SpeakerKey>,
    },
    /// A voice is removed, with its speakers.
    Forget { voice: VoiceId, speakers: Vec<SpeakerKey> },
    /// The change of this number does not count; if that is an undo itself, what it took back counts again.
    Undo { change: u64 },
}

/// A recording with its speakers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddedRecording {
    pub recording: String,
    pub file: Recording,
    pub speakers: Vec<AddedSpeaker>,
}

/// Where a recording's diarization was read, and the digest of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recording {
    /// The absolute path.
    pub path: String,
    pub digest: String,
}

/// A speaker, and the voice that the speaker was found to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddedSpeaker {
    pub speaker: String,
    pub voice: VoiceId,
    #[serde(default)]
    pub settled: bool,
    pub appearance: Appearance,
}

/// A speaker in the store.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    pub voice: VoiceId,
    /// Whether the user said so: clustering does not move this speaker.
    pub settled: bool,
    pub appearance: Appearance,
}

/// A voice: its name, and its speaker in each recording. At most one of a recording.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Voice {
    pub name: Option<String>,
    /// Labels by recording.
    pub speakers: BTreeMap<String, String>,
}

impl Voice {
    pub fn keys(&self) -> impl Iterator<Item = SpeakerKey> {
        self.speakers
            .iter()
            .map(|(recording, speaker)| SpeakerKey::new(recording, speaker))
    }
}

/// The voices after some changes. A voice without a name exists as long as it has a speaker.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Voices {
    recordings: BTreeMap<String, Recording>,
    members: BTreeMap<SpeakerKey, Member>,
    voices: BTreeMap<VoiceId, Voice>,
}

/// What is wrong with a name of a voice: what no known speaker may have, or what the number of a voice looks like.
pub fn fault_of_name(name: &str) -> Option<&'static str> {
    match KnownSpeakers::fault_of_name(name) {
        Some(fault) => Some(fault),
        None if name.parse::<VoiceId>().is_ok() => Some("has a name like the number of a voice"),
        None if name == "new" => Some("has the name `new`, which is reserved for a new voice"),
        None if name.trim() != name => Some("has a name with spaces around it"),
        None if name.chars().count() > 200 => Some("has a name of more than 200 characters"),
        None => None,
    }
}

/// Whether two names are those of one voice.
pub(super) fn is_same_name(a: &str, b: &str) -> bool {
    field(&nfc(a)) == field(&nfc(b))
}

impl Voices {
    pub fn recordings(&self) -> &BTreeMap<String, Recording> {
        &self.recordings
    }

    pub fn members(&self) -> &BTreeMap<SpeakerKey, Member> {
        &self.members
    }

    pub fn voices(&self) -> &BTreeMap<VoiceId, Voice> {
        &self.voices
    }

    /// The length of embeddings, if there is one.
    pub fn dimension(&self) -> Option<usize> {
        self.members
            .first_key_value()
            .map(|(_, member)| member.appearance.embedding.len())
    }

    /// The voice of this name; a name is the same with `_` in place of spaces, since RTTM has none, and in another Unicode form.
    pub fn named(&self, name: &str) -> Option<VoiceId> {
        self.with_name(|other| is_same_name(other, name))
    }

    fn with_name(&self, is_it: impl Fn(&str) -> bool) -> Option<VoiceId> {
        let mut named = self.voices.iter();
        named
            .find(|(_, voice)| voice.name.as_deref().is_some_and(&is_it))
            .map(|(id, _)| *id)
    }

    /// The name of a voice, or its number.
    pub fn shown(&self, voice: VoiceId) -> String {
        let name = self.voices.get(&voice).and_then(|voice| voice.name.clone());
        name.unwrap_or_else(|| voice.to_string())
    }

    /// The appearances of a voice.
    pub fn appearances(&self, voice: VoiceId) -> impl Iterator<Item = (SpeakerKey, &Member)> {
        let keys = self.voices.get(&voice).into_iter().flat_map(Voice::keys);
        keys.filter_map(|key| {
            let member = self.members.get(&key)?;
            Some((key, member))
        })
    }

    /// The centroid of a voice, of length 1: the mean of its embeddings of length 1, weighted by seconds. None without speakers.
    pub fn centroid(&self, voice: VoiceId) -> Option<Vec<f32>> {
        centroid(self.appearances(voice).map(|(_, member)| &member.appearance))
    }

    /// The cosine of a speaker with the centroid of the others of its voice. None if it is alone.
    pub fn likeness(&self, key: &SpeakerKey) -> Option<f32> {
        let member = self.members.get(key)?;
        let others = self.appearances(member.voice).filter(|(other, _)| other != key);
        let rest = centroid(others.map(|(_, other)| &other.appearance))?;
        Some(cosine(&member.appearance.unit(), &rest))
    }

    /// The voices after these changes, as far as they are not undone. `is_undone` is that of [`undone`].
    ///
    /// # Errors
    /// Which change does not fit what was before it, by its place, and why.
    pub(super) fn replayed<'a>(
        changes: impl IntoIterator<Item = &'a Change>,
        is_undone: &[bool],
    ) -> Result<Self, (usize, String)> {
        let mut voices = Self::default();
        for (place, change) in changes.into_iter().enumerate() {
            if !is_undone[place] {
                voices.apply(change).map_err(|why| (place, why))?;
            }
        }
        Ok(voices)
    }

    /// Makes a change. After an error the voices are of no use.
    pub(super) fn apply(&mut self, change: &Change) -> Result<(), String> {
        match change {
            Change::Add {
                recordings,
                moved,
                named,
            } => self.add(recordings, moved, named)?,
            Change::Name { voice, name, settled } => {
                self.settle(*voice, settled)?;
                self.set_name(*voice, name)?;
            }
            Change::Merge {
                voice,
                other,
                settled,
                moved,
            } => {
                if voice == other {
                    return Err(format!("{voice} cannot be merged into itself"));
                }
                self.settle(*voice, settled)?;
                self.settle(*other, moved)?;
                let gone = self.voices.remove(other).unwrap_or_default();
                for key in gone.keys() {
                    self.place(&key, *voice)?;
                }
                let kept = self.voices.entry(*voice).or_default();
                kept.name = kept.name.take().or(gone.name);
            }
            Change::Move {
                speaker,
                voice,
                settled,
            } => {
                let from = self.member(speaker)?.voice;
                self.take_out(speaker);
                self.place(speaker, *voice)?;
                let settled = settled.iter().chain([speaker]);
                for key in settled {
                    let member = self.member(key)?;
                    if member.voice != from && member.voice != *voice {
                        return Err(format!("{key} is not in {from} or {voice}"));
                    }
                    member.settled = true;
                }
                self.drop_if_empty(from);
            }
            Change::Forget { voice, speakers } => {
                self.settle(*voice, speakers)?;
                let gone = self.voices.remove(voice).unwrap_or_default();
                if gone.speakers.len() != speakers.len() {
                    return Err(format!("{voice} has other speakers"));
                }
                for key in gone.keys() {
                    self.members.remove(&key);
                }
            }
            Change::Undo { .. } => {}
        }
        Ok(())
    }

    fn add(
        &mut self,
        recordings: &[AddedRecording],
        moved: &[(SpeakerKey, VoiceId)],
        named: &[(VoiceId, String)],
    ) -> Result<(), String> {
        let mut left = BTreeSet::new();
        for added in recordings {
            let first = SpeakerKey::new(&added.recording, "");
            let before = self.members.range(first..);
            let before = before.take_while(|(key, _)| key.recording == added.recording);
            for key in before.map(|(key, _)| key.clone()).collect::<Vec<_>>() {
                left.extend(self.take_out(&key));
                self.members.remove(&key);
            }
            self.recordings.insert(added.recording.clone(), added.file.clone());
        }
        for (key, voice) in moved {
            self.member(key)?;
            left.extend(self.take_out(key));
            if self.member(key)?.settled {
                return Err(format!("{key} is settled, and would be moved to {voice}"));
            }
        }
        for (key, voice) in moved {
            self.place(key, *voice)?;
        }
        let mut dimension = self.dimension();
        for (recording, added) in recordings
            .iter()
            .flat_map(|added| added.speakers.iter().map(move |speaker| (&added.recording, speaker)))
        {
            let key = SpeakerKey::new(recording, &added.speaker);
            let size = added.appearance.embedding.len();
            if *dimension.get_or_insert(size) != size {
                return Err(format!("the embedding of {key} has another length"));
            }
            let member = Member {
                voice: added.voice,
                settled: added.settled,
                appearance: added.appearance.clone(),
            };
            if self.members.insert(key.clone(), member).is_some() {
                return Err(format!("{key} is there twice"));
            }
            self.place(&key, added.voice)?;
        }
        if self.members.len() > MOST_SPEAKERS {
            return Err(format!("there are more than {MOST_SPEAKERS} speakers"));
        }
        for (voice, name) in named {
            self.set_name(*voice, name)?;
        }
        for voice in left {
            self.drop_if_empty(voice);
        }
        Ok(())
    }

    fn member(&mut self, key: &SpeakerKey) -> Result<&mut Member, String> {
        self.members
            .get_mut(key)
            .ok_or_else(|| format!("there is no speaker {key}"))
    }

    /// Settles these speakers of a voice. They must be in it.
    fn settle(&mut self, voice: VoiceId, keys: &[SpeakerKey]) -> Result<(), String> {
        if !self.voices.contains_key(&voice) {
            return Err(format!("there is no voice {voice}"));
        }
        for key in keys {
            let member = self.member(key)?;
            if member.voice != voice {
                return Err(format!("{key} is not in {voice}"));
            }
            member.settled = true;
        }
        Ok(())
    }

    fn set_name(&mut self, voice: VoiceId, name: &str) -> Result<(), String> {
        if let Some(fault) = fault_of_name(name) {
            return Err(format!("{voice} {fault}"));
        }
        // Stores of earlier versions may have a name in two Unicode forms.
        match self.with_name(|other| field(other) == field(name)) {
            Some(other) if other != voice => Err(format!("{other} has the name {name:?} already")),
            _ => {
                self.voices.entry(voice).or_default().name = Some(name.to_owned());
                Ok(())
            }
        }
    }

    /// Takes a speaker out of its voice, which is returned.
    fn take_out(&mut self, key: &SpeakerKey) -> Option<VoiceId> {
        let voice = self.members.get(key)?.voice;
        self.voices.get_mut(&voice)?.speakers.remove(&key.recording);
        Some(voice)
    }

    /// Puts a speaker who is in no voice into one.
    fn place(&mut self, key: &SpeakerKey, voice: VoiceId) -> Result<(), String> {
        self.member(key)?.voice = voice;
        let speakers = &mut self.voices.entry(voice).or_default().speakers;
        match speakers.entry(key.recording.clone()) {
            Entry::Vacant(free) => {
                free.insert(key.speaker.clone());
                Ok(())
            }
            Entry::Occupied(taken) => Err(format!(
                "{key} and {}/{} are two speakers of one recording, and cannot both be {voice}",
                key.recording,
                taken.get()
            )),
        }
    }

    fn drop_if_empty(&mut self, voice: VoiceId) {
        if let Entry::Occupied(found) = self.voices.entry(voice)
            && found.get().name.is_none()
            && found.get().speakers.is_empty()
        {
            found.remove();
        }
    }
}

impl Change {
    /// The highest number of a voice in it.
    pub(super) fn last_voice(&self) -> u32 {
        let highest = |voices: &mut dyn Iterator<Item = VoiceId>| voices.map(|voice| voice.0).max().unwrap_or(0);
        match self {
            Self::Add {
                recordings,
                moved,
                named,
            } => {
                let speakers = recordings.iter().flat_map(|added| &added.speakers);
                let mut voices = speakers
                    .map(|speaker| speaker.voice)
                    .chain(moved.iter().map(|(_, voice)| *voice))
                    .chain(named.iter().map(|(voice, _)| *voice));
                highest(&mut voices)
            }
            Self::Name { voice, .. } | Self::Move { voice, .. } | Self::Forget { voice, .. } => voice.0,
            Self::Merge { voice, other, .. } => voice.0.max(other.0),
            Self::Undo { .. } => 0,
        }
    }
}

/// Which changes are undone. An undo of a change that is not before it is an error, by its place.
pub(super) fn undone<'a>(changes: impl IntoIterator<Item = &'a Change>) -> Result<Vec<bool>, (usize, String)> {
    let changes: Vec<&Change> = changes.into_iter().collect();
    let mut is_undone = vec![false; changes.len()];
    for (place, change) in changes.iter().enumerate().rev() {
        if let Change::Undo { change } = change {
            let of = usize::try_from(*change).ok().and_then(|number| number.checked_sub(1));
            let Some(of) = of.filter(|of| *of < place) else {
                return Err((place, format!("it undoes change {change}, which is not before it")));
            };
            if !is_undone[place] {
                is_undone[of] = true;
            }
        }
    }
    Ok(is_undone)
}
