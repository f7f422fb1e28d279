//! The diarizations that a command line names.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

use flow_base::escape::escape_line;
use flow_cli::failure::{Exit, Failure};
use flow_cli::files::files_below;
use flow_kind::{Digest, read_local_file};
use flow_speakers::voices::{Diarization, Voices};

const HELP: &str = "make them with `flow diarize RECORDINGS --format json --out FOLDER`";

/// A file, and the recording that it is of.
pub struct Named {
    pub path: PathBuf,
    /// Its path below the folder that was named, without the ending; the name of a file that was named itself.
    pub recording: String,
    /// The path on this machine that names it in the store.
    pub real: String,
}

/// What is in it.
pub struct Content {
    pub bytes: Vec<u8>,
    pub digest: String,
}

/// Files that a command does nothing with, each with the reason.
#[derive(Default)]
pub struct Refused(Vec<(PathBuf, String)>);

impl Refused {
    pub fn add(&mut self, path: &Path, why: impl Into<String>) {
        self.0.push((path.to_owned(), why.into()));
    }

    /// Reports them on standard error. `done` is the number of files with which all was well.
    pub fn tell(&self, done: usize) -> Result<Exit, Failure> {
        for (path, why) in &self.0 {
            let path = path.to_string_lossy();
            writeln!(io::stderr(), "warning: {}: {}", escape_line(&path), escape_line(why))?;
        }
        Ok(match (self.0.is_empty(), done) {
            (true, _) => Exit::Done,
            (false, 0) => Exit::Failed,
            (false, _) => Exit::Noted,
        })
    }
}

/// The files of the command line, each once, in the order of their recordings.
///
/// # Errors
/// If there is no file at all, or a folder cannot be read.
pub fn named(paths: &[PathBuf], refused: &mut Refused) -> Result<Vec<Named>, Failure> {
    let mut found: Vec<Named> = Vec::new();
    for top in paths {
        let is_folder = top.is_dir();
        for path in files_below(std::slice::from_ref(top), &["json"], HELP)? {
            let below = match is_folder {
                true => path.strip_prefix(top).unwrap_or(&path),
                false => Path::new(path.file_name().unwrap_or_default()),
            };
            let recording = below.with_extension("");
            let real = path.canonicalize();
            match (recording.to_str(), real.as_deref().map(Path::to_str)) {
                (Some(recording), Ok(Some(real)))
                    if !recording.contains(char::is_control) && is_below(Path::new(recording)) =>
                {
                    let (recording, real) = (recording.to_owned(), real.to_owned());
                    found.push(Named { path, recording, real });
                }
                (_, Err(error)) => refused.add(&path, format!("cannot be read: {error}")),
                _ => refused.add(
                    &path,
                    "its name cannot be that of a recording: it is not UTF-8, or has control characters",
                ),
            }
        }
    }
    found.sort_by(|a, b| (&a.recording, &a.real).cmp(&(&b.recording, &b.real)));
    let mut seen = BTreeSet::new();
    found.retain(|named| seen.insert(named.real.clone()));
    Ok(found)
}

/// The recordings of a store, by the files that they were read from.
pub fn by_path(voices: &Voices) -> BTreeMap<&str, &str> {
    let recordings = voices.recordings().iter();
    recordings
        .map(|(name, recording)| (recording.path.as_str(), name.as_str()))
        .collect()
}

/// Whether a relative path stays below its folder.
pub fn is_below(path: &Path) -> bool {
    let mut parts = path.components().peekable();
    parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
}

pub fn read(path: &Path) -> Result<Content, String> {
    let bytes = read_local_file(path).map_err(|error| format!("cannot be read: {error}"))?;
    let digest = Digest::of(&bytes).to_hex();
    Ok(Content { bytes, digest })
}

pub fn parsed(content: &Content) -> Result<Diarization, String> {
    Diarization::read(&content.bytes).map_err(|error| error.to_string())
}
