//! `flow speakers name`, `merge`, `move` and `forget`.

use std::io::Write;
use std::path::Path;

use flow_base::escape::escape_line;
use flow_cli::failure::Failure;
use flow_inspect::table::plural;
use flow_speakers::voices::{Change, SpeakerKey, VoiceId, Voices, fault_of_name};
use flow_text::written_form::nfc;

use crate::voice::{change, open_to_correct, shown, speaker, voice};

fn keys(voices: &Voices, id: VoiceId) -> Vec<SpeakerKey> {
    voices.appearances(id).map(|(key, _)| key).collect()
}

pub fn name(folder: &Path, text: &str, name: &str, out: &mut dyn Write) -> Result<(), Failure> {
    let mut store = open_to_correct(folder)?;
    let voices = store.voices();
    let id = voice(voices, text)?;
    let name = &nfc(name);
    if let Some(fault) = fault_of_name(name) {
        return Err(Failure::Usage {
            message: format!("`{}` cannot be the name of a voice: it {fault}", escape_line(name)),
            help: None,
        });
    }
    if let Some(other) = voices.named(name).filter(|other| *other != id) {
        return Err(Failure::usage(
            format!("{} has this name already", shown(voices, other)),
            format!("if both are the same person: flow speakers merge {other} {id}"),
        ));
    }
    let settled = keys(voices, id);
    let speakers = plural(settled.len() as u64, "speaker");
    let name = name.to_string();
    let number = change(
        &mut store,
        Change::Name {
            voice: id,
            name: name.clone(),
            settled,
        },
    )?;
    writeln!(out, "change {number}: {id} is {}, {speakers}", escape_line(&name))?;
    Ok(())
}

pub fn merge(folder: &Path, text: &str, other: &str, out: &mut dyn Write) -> Result<(), Failure> {
    let mut store = open_to_correct(folder)?;
    let voices = store.voices();
    let (id, other) = (voice(voices, text)?, voice(voices, other)?);
    if id == other {
        return Err(Failure::Usage {
            message: format!("{} is one voice", shown(voices, id)),
            help: None,
        });
    }
    let (settled, moved) = (keys(voices, id), keys(voices, other));
    if let Some((a, b)) = settled
        .iter()
        .find_map(|a| Some((a, moved.iter().find(|b| a.recording == b.recording)?)))
    {
        return Err(Failure::usage(
            format!("{a} and {b} are two speakers of one recording, which cannot be one voice"),
            "move one of them to another voice first, or diarize the recording again with fewer speakers (--num-speakers)",
        ));
    }
    let gone = shown(voices, other);
    let number = change(
        &mut store,
        Change::Merge {
            voice: id,
            other,
            settled,
            moved,
        },
    )?;
    let speakers = keys(store.voices(), id).len() as u64;
    writeln!(
        out,
        "change {number}: {gone} is now {}, {}",
        shown(store.voices(), id),
        plural(speakers, "speaker")
    )?;
    Ok(())
}

pub fn shift(folder: &Path, text: &str, to: &str, out: &mut dyn Write) -> Result<(), Failure> {
    let mut store = open_to_correct(folder)?;
    let voices = store.voices();
    let key = speaker(voices, text)?;
    let member = &voices.members()[&key];
    let from = member.voice;
    let id = match to {
        "new" => store.next_voice(),
        to => voice(voices, to)?,
    };
    let mut settled = Vec::new();
    if id == from {
        if member.settled {
            return Err(Failure::Usage {
                message: format!("{key} is settled in {} already", shown(voices, from)),
                help: None,
            });
        }
    } else {
        let others = keys(voices, id);
        if let Some(other) = others.iter().find(|other| other.recording == key.recording) {
            return Err(Failure::usage(
                format!("{key} and {other} are two speakers of one recording, which cannot be one voice"),
                format!("move {other} to another voice first, or to `new`"),
            ));
        }
        settled = keys(voices, from)
            .into_iter()
            .filter(|other| *other != key)
            .chain(others)
            .collect();
    }
    let before = shown(voices, from);
    let number = change(
        &mut store,
        Change::Move {
            speaker: key.clone(),
            voice: id,
            settled,
        },
    )?;
    let after = shown(store.voices(), id);
    let key = key.to_string();
    match id == from {
        true => writeln!(out, "change {number}: {} stays in {after}", escape_line(&key))?,
        false => writeln!(
            out,
            "change {number}: {} is in {after}, not in {before}",
            escape_line(&key)
        )?,
    }
    Ok(())
}

pub fn forget(folder: &Path, text: &str, out: &mut dyn Write) -> Result<(), Failure> {
    let mut store = open_to_correct(folder)?;
    let voices = store.voices();
    let id = voice(voices, text)?;
    let (gone, speakers) = (shown(voices, id), keys(voices, id));
    let count = plural(speakers.len() as u64, "speaker");
    let number = change(&mut store, Change::Forget { voice: id, speakers })?;
    writeln!(
        out,
        "change {number}: {gone} is forgotten, {count}; `flow speakers undo` brings it back, since the log keeps its embeddings"
    )?;
    Ok(())
}
