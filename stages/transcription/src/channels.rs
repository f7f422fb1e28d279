//! Which channels of which recordings are transcribed.

use std::collections::BTreeSet;
use std::sync::Arc;

use flow_audio::listing::{Recording, shared_recordings};
use flow_audio::recording_reader::{Channels, channel_count};
use flow_runtime::{Shared, StageError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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

/// A unit of transcription: a recording, or a channel of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// With the name of the transcript: that of a channel ends in `.ch1`, `.ch2` and so on.
    pub recording: Recording,
    pub channels: Channels,
}

/// What `input` names ([`flow_audio::listing::recordings`]), sorted by name. With [`ChannelUse::Split`], a recording of
/// several channels is listed once for each of them; one that cannot be opened is listed as a whole.
///
/// # Errors
/// As [`flow_audio::listing::recordings`], and if a channel would have the name of another recording.
pub fn listed(input: &[String], channels: ChannelUse) -> Result<Vec<Listed>, StageError> {
    let shared = shared_recordings(input)?;
    let found = shared.iter().cloned();
    let whole = |recording| Listed {
        recording,
        channels: Channels::Mix,
    };
    if channels == ChannelUse::Mix {
        return Ok(found.map(whole).collect());
    }
    let mut listed = Vec::new();
    for recording in found {
        // The error is reported when it is transcribed.
        let count = channel_count(&recording.path).unwrap_or(1);
        if count == 1 {
            listed.push(whole(recording));
            continue;
        }
        listed.extend((0..count).map(|channel| Listed {
            recording: Recording {
                name: format!("{}.ch{}", recording.name, channel + 1),
                ..recording.clone()
            },
            channels: Channels::One(channel),
        }));
    }
    listed.sort_by(|a, b| a.recording.name.cmp(&b.recording.name));
    let mut names = BTreeSet::new();
    for Listed { recording, .. } in &listed {
        if !names.insert(&recording.name) {
            let why = format!(
                "`{}` would be the name of a recording and of a channel of another one: rename one of them",
                recording.name
            );
            return Err(StageError::setting("input", why));
        }
    }
    Ok(listed)
}

/// The same, cached while in use: the workers of a run share it, and files are opened once to count their channels.
///
/// # Errors
/// As [`listed`].
pub fn shared_listed(input: &[String], channels: ChannelUse) -> Result<Arc<Vec<Listed>>, StageError> {
    static LISTED: Shared<(Vec<String>, ChannelUse), Vec<Listed>> = Shared::new();
    LISTED.get((input.to_owned(), channels), || listed(input, channels))
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
            let listed = listed(&input, channels)?.into_iter();
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
    }

    #[test]
    fn workers_share_one_listing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("talk.wav");
        std::fs::write(&path, wav(16_000, &[1; 80])).unwrap();
        let input = [folder.path().to_string_lossy().into_owned()];
        let split = shared_listed(&input, ChannelUse::Split).unwrap();
        let mix = shared_listed(&input, ChannelUse::Mix).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(Arc::ptr_eq(&split, &shared_listed(&input, ChannelUse::Split).unwrap()));
        assert!(!Arc::ptr_eq(&split, &mix));
        drop((split, mix));
        assert!(shared_listed(&input, ChannelUse::Mix).is_err());
    }
}
