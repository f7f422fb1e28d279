//! `flow speakers add`: diarizations into the store.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use flow_base::escape::escape_line;
use flow_cli::failure::{Exit, Failure};
use flow_inspect::table::plural;
use flow_speakers::voices::{Change, Grouping, New, Recording, Voices, added};

use crate::arguments::AddArguments;
use crate::files::{Named, Refused, by_path, named, parsed, read};
use crate::voice::{change, open_to_change, shown};

/// What to do with a file.
enum Found {
    Unchanged,
    New(Box<New>),
}

pub fn add(folder: &Path, arguments: &AddArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let mut refused = Refused::default();
    let files = named(&arguments.paths, &mut refused)?;
    let mut store = open_to_change(folder)?;
    let before = store.voices().clone();
    let known = by_path(&before);
    let (mut new, mut unchanged) = (Vec::<New>::new(), 0);
    let mut dimension = before.dimension();
    let mut seen: BTreeMap<String, PathBuf> = BTreeMap::new();
    for file in &files {
        // The one that it has in the store already, or that of the command line.
        let name = known
            .get(file.real.as_str())
            .map_or_else(|| file.recording.clone(), |name| (*name).to_owned());
        if let Some(other) = seen.insert(name.clone(), file.path.clone()) {
            let why = format!(
                "{} has the same recording, {name}: name the folder above both",
                other.display()
            );
            refused.add(&file.path, why);
            continue;
        }
        match found(&before, file, name, &mut dimension) {
            Ok(Found::Unchanged) => unchanged += 1,
            Ok(Found::New(found)) => new.push(*found),
            Err(why) => refused.add(&file.path, why),
        }
    }
    for new in &new {
        for label in &new.diarization.voiceless {
            writeln!(
                io::stderr(),
                "warning: {}: {} spoke too little to have a voice, and is left out",
                escape_line(&new.file.path),
                escape_line(label)
            )?;
        }
    }
    let done = new.len() + unchanged;
    if new.is_empty() {
        writeln!(
            out,
            "nothing to add: {} unchanged",
            plural(unchanged as u64, "recording")
        )?;
        return refused.tell(done);
    }
    let replaced = new
        .iter()
        .filter(|new| before.recordings().contains_key(&new.recording))
        .count();
    let grouping = Grouping {
        clustering_threshold: arguments.clustering_threshold,
        known_threshold: arguments.known_threshold,
    };
    let added = added(&before, new, store.next_voice(), &grouping).map_err(|error| Failure::Usage {
        message: error.to_string(),
        help: None,
    })?;
    let number = change(&mut store, added.clone())?;
    if let Change::Add { recordings, moved, .. } = &added {
        let speakers: usize = recordings.iter().map(|added| added.speakers.len()).sum();
        writeln!(
            out,
            "change {number}: {} added, {replaced} replaced, {unchanged} unchanged; {}",
            plural((recordings.len() - replaced) as u64, "recording"),
            plural(speakers as u64, "speaker"),
        )?;
        for (key, voice) in moved {
            let from = before
                .members()
                .get(key)
                .map(|member| member.voice.to_string())
                .unwrap_or_default();
            let key = key.to_string();
            writeln!(
                out,
                "{}: {from} -> {}",
                escape_line(&key),
                shown(store.voices(), *voice)
            )?;
        }
    }
    let all = store.voices().voices();
    let names = all.values().filter(|voice| voice.name.is_some()).count();
    writeln!(
        out,
        "{} in {}, {names} with a name",
        plural(all.len() as u64, "voice"),
        escape_line(&folder.to_string_lossy())
    )?;
    refused.tell(done)
}

fn found(voices: &Voices, file: &Named, recording: String, dimension: &mut Option<usize>) -> Result<Found, String> {
    let content = read(&file.path)?;
    if let Some(before) = voices.recordings().get(&recording) {
        if before.digest == content.digest {
            return Ok(Found::Unchanged);
        }
        if before.path != file.real && Path::new(&before.path).exists() {
            return Err(format!(
                "the store has a recording {recording} from {}: name the folder above both, so that their names differ",
                before.path
            ));
        }
    }
    let diarization = parsed(&content)?;
    if let Some(first) = diarization.speakers.first() {
        let found = first.appearance.embedding.len();
        let known = *dimension.get_or_insert(found);
        if found != known {
            return Err(format!(
                "its embeddings have {found} values, those of the store {known}: they are of different networks, which cannot be \
                 compared; add it to another --store"
            ));
        }
    }
    let file = Recording {
        path: file.real.clone(),
        digest: content.digest,
    };
    Ok(Found::New(Box::new(New {
        recording,
        file,
        diarization,
    })))
}
