//! `flow speakers apply` and `export`: files with the names of voices.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use flow_base::escape::escape_line;
use flow_cli::failure::{Exit, Failure};
use flow_inspect::table::plural;
use flow_kind::read_local_file;
use flow_speakers::voices::{Diarization, SpeakerKey, VoiceStore, Voices};
use flow_store::write_atomically;
use serde_json::{Map, Value, json};

use crate::arguments::{AppliedFormat, ApplyArguments, ExportArguments};
use crate::files::{Named, Refused, by_path, is_below, named, parsed, read};
use crate::voice::{open, shown};

/// The label of a speaker without a voice whose own label is the name of another speaker.
const UNKNOWN: &str = "UNKNOWN";

pub fn apply(folder: &Path, arguments: &ApplyArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let store = open(folder)?;
    let voices = store.voices();
    let mut refused = Refused::default();
    let files = named(&arguments.paths, &mut refused)?;
    let inputs: BTreeSet<&str> = files.iter().map(|file| file.real.as_str()).collect();
    let known = by_path(voices);
    let mut done = 0;
    for file in &files {
        match applied(folder, voices, file, &known, &inputs, arguments) {
            Ok(()) => done += 1,
            Err((path, why)) => refused.add(&path, why),
        }
    }
    writeln!(
        out,
        "{} in {}",
        plural(done as u64, "diarization"),
        escape_line(&arguments.out.to_string_lossy())
    )?;
    refused.tell(done)
}

/// Writes the files of a recording. An error names the file that it is about.
fn applied(
    folder: &Path,
    voices: &Voices,
    file: &Named,
    known: &BTreeMap<&str, &str>,
    inputs: &BTreeSet<&str>,
    arguments: &ApplyArguments,
) -> Result<(), (PathBuf, String)> {
    let of_input = |why: String| (file.path.clone(), why);
    let content = read(&file.path).map_err(of_input)?;
    let name = known.get(file.real.as_str()).copied().unwrap_or(&file.recording);
    let found = voices.recordings().get_key_value(name);
    let Some((recording, before)) = found else {
        return Err(of_input(
            "it is not in the store: add it with `flow speakers add`".to_owned(),
        ));
    };
    if before.digest != content.digest {
        return Err(of_input(
            "it changed since it was added: run `flow speakers add` again".to_owned(),
        ));
    }
    if !is_below(Path::new(recording)) {
        return Err(of_input(format!("{recording} cannot be the name of a file")));
    }
    let diarization = parsed(&content).map_err(of_input)?;
    let names = names(voices, recording, &diarization);
    let name = |label: &str| names.get(label).cloned();
    for format in &arguments.format {
        let text = match format {
            AppliedFormat::Rttm => diarization
                .renamed_rttm(recording, &name)
                .map_err(|error| of_input(error.to_string()))?,
            AppliedFormat::Json => diarization.renamed_json(&name),
        };
        let path = arguments.out.join(format!("{recording}.{}", format.ending()));
        write_new(folder, &path, text.as_bytes(), inputs, arguments.overwrite).map_err(|why| (path, why))?;
    }
    Ok(())
}

/// The name of each speaker's voice, or its number.
fn names(voices: &Voices, recording: &str, diarization: &Diarization) -> BTreeMap<String, String> {
    let labels = diarization.labels();
    let mut names = BTreeMap::new();
    for label in &labels {
        if let Some(member) = voices.members().get(&SpeakerKey::new(recording, *label)) {
            names.insert((*label).to_owned(), voices.shown(member.voice));
        }
    }
    // As RTTM writes them.
    let field = |name: &str| name.replace(char::is_whitespace, "_");
    let mut used: BTreeSet<String> = names.values().map(|name| field(name)).collect();
    let (taken, free): (Vec<&str>, Vec<&str>) = labels
        .iter()
        .filter(|label| !names.contains_key(**label))
        .partition(|label| used.contains(&field(label)));
    used.extend(free.into_iter().map(field));
    for label in taken {
        let numbered = (2..).map(|number| format!("{UNKNOWN}_{number}"));
        let name = std::iter::once(UNKNOWN.to_owned())
            .chain(numbered)
            .find(|name| !used.contains(name));
        if let Some(name) = name {
            used.insert(name.clone());
            names.insert(label.to_owned(), name);
        }
    }
    names
}

/// Writes a file. What is there with another content is replaced only if that is asked for, and never if it is among the inputs.
fn write_new(store: &Path, path: &Path, bytes: &[u8], inputs: &BTreeSet<&str>, overwrite: bool) -> Result<(), String> {
    if VoiceStore::owns(store, path) {
        return Err("it is a file of the store itself: name another one".to_owned());
    }
    if fs::symlink_metadata(path).is_ok() {
        let real = path.canonicalize().map_err(|error| error.to_string())?;
        if real.to_str().is_some_and(|real| inputs.contains(real)) {
            return Err("it is one of the files that are read: name another folder with --out".to_owned());
        }
        let before = read_local_file(path).map_err(|error| format!("cannot be replaced: {error}"))?;
        if before == bytes {
            return Ok(());
        }
        if !overwrite {
            return Err("it exists with another content: --overwrite replaces it".to_owned());
        }
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let made = folder.map_or(Ok(()), fs::create_dir_all);
    made.map_err(|error| format!("its folder cannot be made: {error}"))?;
    write_atomically(path, bytes).map_err(|error| error.to_string())
}

pub fn export(folder: &Path, arguments: &ExportArguments, out: &mut dyn Write) -> Result<(), Failure> {
    let store = open(folder)?;
    let voices = store.voices();
    let mut known = Map::new();
    for (id, voice) in voices.voices() {
        let Some(name) = &voice.name else { continue };
        match voices.centroid(*id) {
            Some(centroid) => {
                known.insert(name.clone(), json!(centroid));
            }
            None => writeln!(
                io::stderr(),
                "warning: {} has no speaker, and is left out",
                shown(voices, *id)
            )?,
        }
    }
    if known.is_empty() {
        return Err(Failure::usage(
            format!("no voice in {} has a name and a speaker", folder.display()),
            "name one: flow speakers name V1 NAME",
        ));
    }
    let count = plural(known.len() as u64, "voice");
    let text = format!("{}\n", Value::Object(known));
    let path = &arguments.file;
    write_new(folder, path, text.as_bytes(), &BTreeSet::new(), arguments.overwrite)
        .map_err(|why| Failure::unreadable(format!("{}: {why}", path.display())))?;
    writeln!(out, "{count} in {}", escape_line(&path.to_string_lossy()))?;
    Ok(())
}
