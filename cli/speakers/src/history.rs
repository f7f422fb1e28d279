//! `flow speakers history` and `undo`.

use std::io::Write;
use std::path::Path;

use flow_cli::failure::Failure;
use flow_inspect::table::{lines, plural};
use flow_speakers::voices::{Change, VoiceStore};

use crate::voice::{change, open, open_to_correct};

pub fn history(folder: &Path, limit: usize, out: &mut dyn Write) -> Result<(), Failure> {
    let store = open(folder)?;
    let mut rows = vec![["change", "time (UTC)", "", "what"].map(str::to_owned).to_vec()];
    let entries: Vec<_> = store.history().collect();
    for (entry, is_undone) in entries.iter().rev().take(limit) {
        rows.push(vec![
            entry.number.to_string(),
            entry.time.clone(),
            if *is_undone { "undone" } else { "" }.to_owned(),
            sentence(&entry.change),
        ]);
    }
    for line in lines(&rows) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// A change in words.
fn sentence(change: &Change) -> String {
    match change {
        Change::Add { recordings, moved, .. } => {
            let names: Vec<&str> = recordings
                .iter()
                .take(3)
                .map(|added| added.recording.as_str())
                .collect();
            let more = match recordings.len() - names.len() {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let moved = match moved.len() {
                0 => String::new(),
                count => format!("; another voice for {}", plural(count as u64, "speaker")),
            };
            format!("add {}{more}{moved}", names.join(", "))
        }
        Change::Name { voice, name, .. } => format!("name {voice} {name}"),
        Change::Merge { voice, other, .. } => format!("merge {voice} {other}"),
        Change::Move { speaker, voice, .. } => format!("move {speaker} {voice}"),
        Change::Forget { voice, .. } => format!("forget {voice}"),
        Change::Undo { change } => format!("undo {change}"),
    }
}

pub fn undo(folder: &Path, number: Option<u64>, out: &mut dyn Write) -> Result<(), Failure> {
    let mut store = open_to_correct(folder)?;
    let undone = match number {
        Some(number) => number,
        None => store.last_change().ok_or_else(|| Failure::Usage {
            message: "there is no change to undo".to_owned(),
            help: None,
        })?,
    };
    let what = what(&store, undone)?;
    let number = change(&mut store, Change::Undo { change: undone })?;
    writeln!(
        out,
        "change {number}: {}",
        flow_base::escape::escape_line(&format!("change {undone} is undone ({what})"))
    )?;
    Ok(())
}

fn what(store: &VoiceStore, number: u64) -> Result<String, Failure> {
    let entry = store.history().find(|(entry, _)| entry.number == number);
    entry.map(|(entry, _)| sentence(&entry.change)).ok_or_else(|| {
        Failure::usage(
            format!("there is no change {number}"),
            "`flow speakers history` lists the changes with their numbers",
        )
    })
}
