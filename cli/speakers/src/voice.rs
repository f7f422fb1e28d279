//! The store that a command works with, and the voices and speakers that its arguments name.

use std::io::{self, Write};
use std::path::Path;

use chrono::{SecondsFormat, Utc};
use flow_base::escape::escape_line;
use flow_base::suggest::did_you_mean;
use flow_cli::failure::Failure;
use flow_speakers::voices::{Change, SpeakerKey, VoiceId, VoiceStore, VoiceStoreError, Voices};

/// Opens a store to be read.
pub fn open(folder: &Path) -> Result<VoiceStore, Failure> {
    opened(VoiceStore::open(folder).map_err(failure)?)
}

/// Opens a store that exists to be changed.
pub fn open_to_correct(folder: &Path) -> Result<VoiceStore, Failure> {
    // A typing error in --store makes no folder.
    VoiceStore::open(folder).map_err(failure)?;
    open_to_change(folder)
}

/// Opens a store to be changed; there need not be one.
pub fn open_to_change(folder: &Path) -> Result<VoiceStore, Failure> {
    opened(VoiceStore::open_to_change(folder).map_err(failure)?)
}

fn opened(store: VoiceStore) -> Result<VoiceStore, Failure> {
    if let Some(torn) = store.torn() {
        writeln!(
            io::stderr(),
            "warning: {}: line {} is incomplete, as after a crash, and does not count; the next change cuts it off",
            escape_line(&torn.path.to_string_lossy()),
            torn.line
        )?;
    }
    Ok(store)
}

pub fn failure(error: VoiceStoreError) -> Failure {
    match error {
        VoiceStoreError::Missing { .. } => Failure::usage(
            error.to_string(),
            "add diarizations with `flow speakers add`, or name the folder of another store with --store",
        ),
        VoiceStoreError::Damaged { .. } => Failure::Unreadable {
            message: error.to_string(),
            help: Some("restore the file from a backup, or start a new store with --store".to_owned()),
        },
        VoiceStoreError::Lock(error) => Failure::Store(error),
        VoiceStoreError::Refused(message) => Failure::Usage { message, help: None },
        VoiceStoreError::Io { .. } => Failure::unreadable(error),
    }
}

/// Makes a change now, and returns its number.
pub fn change(store: &mut VoiceStore, change: Change) -> Result<u64, Failure> {
    let time = Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true);
    let entry = store.change(change, time).map_err(failure)?;
    Ok(entry.number)
}

/// The voice of a number or a name.
pub fn voice(voices: &Voices, text: &str) -> Result<VoiceId, Failure> {
    let by_number = text.parse().ok().filter(|id| voices.voices().contains_key(id));
    by_number.or_else(|| voices.named(text)).ok_or_else(|| {
        let shown: Vec<String> = voices.voices().keys().map(|id| voices.shown(*id)).collect();
        let help = did_you_mean(text, shown.iter().map(String::as_str), "voices");
        Failure::usage(format!("there is no voice `{text}`"), help)
    })
}

/// The speaker that is written as `RECORDING/SPEAKER`.
pub fn speaker(voices: &Voices, text: &str) -> Result<SpeakerKey, Failure> {
    let keys = text
        .match_indices('/')
        .map(|(at, _)| SpeakerKey::new(&text[..at], &text[at + 1..]));
    let mut keys = keys.filter(|key| voices.members().contains_key(key));
    keys.next().ok_or_else(|| {
        let shown: Vec<String> = voices.members().keys().map(SpeakerKey::to_string).collect();
        let help = did_you_mean(text, shown.iter().map(String::as_str), "speakers");
        Failure::usage(format!("there is no speaker `{text}`"), help)
    })
}

/// A voice as messages name it: `V7`, `V7 (Ann)`.
pub fn shown(voices: &Voices, id: VoiceId) -> String {
    match voices.voices().get(&id).and_then(|voice| voice.name.as_deref()) {
        Some(name) => format!("{id} ({})", escape_line(name)),
        None => id.to_string(),
    }
}

/// A text as a shell takes it for one word.
pub fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_-./+,:@%".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", escape_line(text).replace('\'', "'\\''")),
    }
}
