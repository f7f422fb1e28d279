//! Which channels of which recordings are transcribed, and which parts of them.

use std::collections::BTreeSet;
use std::sync::Arc;

use flow_audio::listing::{ENDINGS_OF_RESULTS, Recording, shared_recordings};
use flow_audio::recording_reader::{Channels, channel_count};
use flow_kind::{Shared, StageError};
use flow_storage::Storage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::manifest_rows::{Row, is_manifest, rows};
use crate::streamed::StreamedRecording;

/// How the channels of a recording are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChannelUse {
    /// Their mean is transcribed.
    #[default]
    Mix,
    /// Each is transcribed separately, for example for calls with one speaker on each channel.
    Split,
}

/// A unit of transcription: a recording, the row of a manifest, or a channel of one.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed {
    /// With the name of the transcript: that of a channel ends in `.ch1`, `.ch2` and so on.
    pub recording: Recording,
    pub channels: Channels,
    /// The audio track that is asked for, counted from 1.
    pub track: Option<u32>,
    /// Where a manifest names it.
    pub row: Option<Arc<Row>>,
}

impl Listed {
    /// Its samples.
    pub fn samples(&self, storage: &Storage) -> StreamedRecording {
        let recording = StreamedRecording::new(storage, &self.recording.path, self.channels).with_track(self.track);
        match &self.row {
            Some(row) => recording.with_place(row.range, row.part),
            None => recording,
        }
    }
}

/// What `input` names: recordings ([`flow_audio::listing::recordings`]), and the rows of manifests
/// ([`crate::manifest_rows::rows`]), sorted by name. With [`ChannelUse::Split`], a recording of
/// several channels is listed once for each of them; one that cannot be opened is listed as a whole.
///
/// # Errors
/// As [`flow_audio::listing::recordings`] and [`crate::manifest_rows::rows`], and if two transcripts would have one name.
pub fn listed(
    storage: &Storage,
    input: &[String],
    channels: ChannelUse,
    track: Option<u32>,
) -> Result<Vec<Listed>, StageError> {
    let (manifests, others): (Vec<String>, Vec<String>) = input.iter().cloned().partition(|text| is_manifest(text));
    let shared = match others.is_empty() && !manifests.is_empty() {
        true => Arc::default(),
        false => shared_recordings(storage, &others)?,
    };
    let mut found: Vec<(Recording, Option<Arc<Row>>)> = shared.iter().map(|found| (found.clone(), None)).collect();
    for (number, manifest) in manifests.iter().enumerate() {
        let rows = rows(storage, manifest, number)?.into_iter();
        found.extend(rows.map(|(recording, row)| (recording, Some(Arc::new(row)))));
    }
    let mut listed = Vec::new();
    for (recording, row) in found {
        let count = match &row {
            _ if channels == ChannelUse::Mix => None,
            Some(row) => channel_count(storage, &recording.path, row.range, track),
            None => channel_count(storage, &recording.path, None, track),
        };
        // The error is reported when it is transcribed.
        let Some(count) = count.filter(|count| *count > 1) else {
            listed.push(Listed {
                recording,
                channels: Channels::Mix,
                track,
                row,
            });
            continue;
        };
        listed.extend((0..count).map(|channel| Listed {
            recording: Recording {
                name: format!("{}.ch{}", recording.name, channel + 1),
                ..recording.clone()
            },
            channels: Channels::One(channel),
            track,
            row: row.clone(),
        }));
    }
    listed.sort_by(|a, b| a.recording.name.cmp(&b.recording.name));
    let mut names = BTreeSet::new();
    for Listed { recording, .. } in &listed {
        if !names.insert(&recording.name) {
            let why = format!(
                "`{}` would be the name of two transcripts: of recordings, their channels or rows of manifests; rename one of them",
                recording.name
            );
            return Err(StageError::setting("input", why));
        }
    }
    // The transcript of one must not have the name of the folder of another's.
    for Listed { recording, .. } in &listed {
        for (end, _) in recording.name.match_indices('/') {
            let folder = &recording.name[..end];
            let of = folder
                .rsplit_once('.')
                .filter(|(_, ending)| ENDINGS_OF_RESULTS.contains(ending));
            if let Some((name, _)) = of.filter(|(name, _)| names.contains(&(*name).to_owned())) {
                let why = format!(
                    "a transcript of `{name}` has the name of the folder of `{}`; rename one of them",
                    recording.name
                );
                return Err(StageError::setting("input", why));
            }
        }
    }
    Ok(listed)
}

/// The same, cached while in use: the workers of a run share it, and files are opened once to count their channels.
///
/// # Errors
/// As [`listed`].
pub fn shared_listed(
    storage: &Storage,
    input: &[String],
    channels: ChannelUse,
    track: Option<u32>,
) -> Result<Arc<Vec<Listed>>, StageError> {
    static LISTED: Shared<(Vec<String>, ChannelUse, Option<u32>), Vec<Listed>> = Shared::new();
    LISTED.get((input.to_owned(), channels, track), || {
        listed(storage, input, channels, track)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::wav;

    #[test]
    fn channels_have_names_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let mut call = wav(8_000, &[1; 80]);
        // Two channels instead of one.
        call[22] = 2;
        call[32] = 4;
        let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
        write("call.wav", &call);
        write("talk.wav", &wav(16_000, &[1; 80]));
        write("text.wav", b"no audio");
        let input = [folder.path().to_string_lossy().into_owned()];
        let names = |channels| -> Result<Vec<(String, Channels)>, StageError> {
            let listed = listed(&Storage::default(), &input, channels, None)?.into_iter();
            Ok(listed.map(|listed| (listed.recording.name, listed.channels)).collect())
        };
        let mix = |name: &str| (name.to_owned(), Channels::Mix);
        assert_eq!(names(ChannelUse::Mix).unwrap(), [mix("call"), mix("talk"), mix("text")]);
        let one = |name: &str, channel| (name.to_owned(), Channels::One(channel));
        assert_eq!(
            names(ChannelUse::Split).unwrap(),
            [one("call.ch1", 0), one("call.ch2", 1), mix("talk"), mix("text")]
        );
        write("call.ch2.wav", &wav(16_000, &[1; 80]));
        let error = names(ChannelUse::Split).unwrap_err().to_string();
        assert!(error.contains("`call.ch2`"), "{error}");
        assert_eq!(names(ChannelUse::Mix).unwrap().len(), 4);
        std::fs::create_dir(folder.path().join("talk.txt")).unwrap();
        write("talk.txt/a.wav", &wav(16_000, &[1; 80]));
        let error = names(ChannelUse::Mix).unwrap_err().to_string();
        assert!(
            error.contains("a transcript of `talk` has the name of the folder of `talk.txt/a`"),
            "{error}"
        );
    }

    #[test]
    fn workers_share_one_listing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("talk.wav");
        std::fs::write(&path, wav(16_000, &[1; 80])).unwrap();
        let input = [folder.path().to_string_lossy().into_owned()];
        let split = shared_listed(&Storage::default(), &input, ChannelUse::Split, None).unwrap();
        let mix = shared_listed(&Storage::default(), &input, ChannelUse::Mix, None).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(Arc::ptr_eq(
            &split,
            &shared_listed(&Storage::default(), &input, ChannelUse::Split, None).unwrap()
        ));
        assert!(!Arc::ptr_eq(&split, &mix));
        drop((split, mix));
        assert!(shared_listed(&Storage::default(), &input, ChannelUse::Mix, None).is_err());
    }
}
