//! Recordings below a folder, and where their transcripts are.

use std::borrow::Cow;
use std::cell::LazyCell;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flow_audio::listing::is_of_program;
use flow_kind::Partition;
use flow_storage::Storage;
use unicode_normalization::UnicodeNormalization;

use crate::ManifestError;
use crate::manifest_row::{self, Refusal};
use crate::transcripts::{LIST, lines_of, split_line};
use crate::tree::{self, TreeEntry};

/// Recordings that make a partition.
const BLOCK: usize = 1_000;
/// Most folders that are in one another below the first.
pub const MOST_DEPTH: usize = 64;

pub const AUDIO: [&str; 16] = [
    "flac", "wav", "wave", "mp3", "m4a", "mp4", "aac", "ogg", "oga", "opus", "webm", "mka", "aif", "aiff", "caf", "mov",
];
/// Endings of LibriTTS's transcripts: the first is read, the second is passed over.
const NORMALIZED: &str = "normalized.txt";
const ORIGINAL: &str = "original.txt";
/// What macOS adds to a file on other file systems has this before the file's name.
const RESOURCE_FORK: &str = "._";

/// A recording, relative to the first folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed {
    pub file: String,
    pub transcript: Transcript,
}

/// The place of a recording's transcript.
#[derive(Clone, Debug, PartialEq)]
pub enum Transcript {
    /// In a file beside it that has another extension.
    Beside(Cow<'static, str>),
    /// In a line of a list of LibriSpeech's form, `<utterance> <text>`.
    Line(Arc<Path>),
    /// No recording with a transcript, for this reason. There may be millions of the others, so it is apart.
    Refused(Box<Refusal>),
}

/// A folder to be listed.
struct Waiting {
    /// Relative to the first folder.
    below: String,
    canonical: PathBuf,
}

/// Recordings below a folder, by the folder they are in and then by name, in blocks. Links to folders are followed; a folder
/// is listed once, by its own name where it is below the first folder, else by the first link to it, so that cyclic
/// links end. Of the folders right in `root` only those of `only` are listed, if it is given.
///
/// # Errors
/// When a folder or a list of transcripts cannot be read, or folders lie deeper than [`MOST_DEPTH`] in one another.
pub fn list(
    storage: &Storage,
    root: &Path,
    only: Option<&BTreeSet<String>>,
) -> Result<Vec<(Partition, Vec<Listed>)>, ManifestError> {
    let mut blocks = Vec::new();
    let mut listed: HashSet<PathBuf> = HashSet::new();
    let mut links = BTreeSet::new();
    let mut waiting = vec![Waiting {
        below: String::new(),
        canonical: canonical(root)?,
    }];
    loop {
        let next = match waiting.pop() {
            Some(next) => next,
            None => match links.pop_first() {
                Some(below) => Waiting {
                    canonical: canonical(&root.join(&below))?,
                    below,
                },
                None => break,
            },
        };
        if !listed.insert(next.canonical.clone()) {
            continue;
        }
        let folder = below(root, &next.below);
        if next.below.split('/').count() > MOST_DEPTH {
            return Err(ManifestError::manifest(
                folder,
                format!(
                    "folders_too_deep: it is more than {MOST_DEPTH} folders below {}",
                    root.display()
                ),
            ));
        }
        let contents = Contents::of(storage, &folder)?;
        let inner = |name: &str| match next.below.as_str() {
            "" => name.to_string(),
            below => format!("{below}/{name}"),
        };
        let is_read = |name: &&String| !next.below.is_empty() || only.is_none_or(|only| only.contains(*name));
        for name in contents.folders.iter().filter(is_read) {
            waiting.push(Waiting {
                below: inner(name),
                canonical: next.canonical.join(name),
            });
        }
        links.extend(contents.links.iter().filter(is_read).map(|name| inner(name)));
        let mut files = contents
            .into_recordings(storage, &folder)?
            .into_iter()
            .map(|listed| Listed {
                file: if next.below.is_empty() {
                    listed.file
                } else {
                    inner(&listed.file)
                },
                ..listed
            });
        let name = if next.below.is_empty() { "." } else { &next.below };
        for number in 0.. {
            let block: Vec<Listed> = files.by_ref().take(BLOCK).collect();
            if block.is_empty() {
                break;
            }
            blocks.push((Partition::from(format!("{name}/{number:06}")), block));
        }
    }
    blocks.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(blocks)
}

/// A folder below the first one, which is `root` itself where it is called by nothing: a URL does not end in `/`.
fn below(root: &Path, name: &str) -> PathBuf {
    match name {
        "" => root.to_path_buf(),
        name => root.join(name),
    }
}

fn canonical(folder: &Path) -> Result<PathBuf, ManifestError> {
    tree::canonical(folder).map_err(|e| ManifestError::io(folder, e))
}

/// The entries of one folder, of which there may be millions; files in the order of their names.
#[derive(Default)]
struct Contents {
    folders: Vec<String>,
    /// Symbolic links to folders.
    links: Vec<String>,
    recordings: Vec<String>,
    /// Files that may be transcripts.
    texts: Vec<String>,
    /// Folders and recordings whose names are not UTF-8, as they can be shown.
    unnamed: BTreeSet<String>,
    /// Files that are neither recordings nor transcripts.
    others: Vec<String>,
}

/// What follows `stem` and a dot in the names, sorted, that begin so.
fn endings<'n>(names: &'n [String], stem: &str) -> impl Iterator<Item = &'n str> {
    let beginning = format!("{stem}.");
    let first = names.partition_point(|name| *name < beginning);
    names[first..]
        .iter()
        .map_while(move |name| name.strip_prefix(&beginning))
}

/// The extensions of the names that have this stem.
fn extensions<'n>(names: &'n [String], stem: &str) -> impl Iterator<Item = &'n str> {
    endings(names, stem).filter(|ending| !ending.contains('.'))
}

fn is_audio(extension: Option<&OsStr>) -> bool {
    let extension = extension.and_then(OsStr::to_str).map(str::to_ascii_lowercase);
    extension.is_some_and(|found| AUDIO.contains(&found.as_str()))
}

/// Whether a file is called as recordings are.
pub fn is_audio_name(name: &str) -> bool {
    is_audio(Path::new(name).extension())
}

impl Contents {
    fn of(storage: &Storage, folder: &Path) -> Result<Contents, ManifestError> {
        let mut contents = Contents::default();
        let entries = tree::entries(storage, folder).map_err(|e| ManifestError::io(folder, e))?;
        for TreeEntry {
            name,
            is_folder,
            is_link,
        } in entries
        {
            let name = match name.into_string() {
                Ok(name) => name,
                // A manifest cannot name it.
                Err(name) => {
                    if is_folder || is_audio(Path::new(&name).extension()) {
                        contents.unnamed.insert(name.to_string_lossy().into_owned());
                    }
                    continue;
                }
            };
            if name.starts_with(RESOURCE_FORK) || is_of_program(name.as_ref()) {
                continue;
            }
            let extension = Path::new(&name).extension();
            if is_folder && is_link {
                contents.links.push(name);
            } else if is_folder {
                contents.folders.push(name);
            } else if is_audio(extension) {
                contents.recordings.push(name);
            } else if extension
                .is_some_and(|found| found.eq_ignore_ascii_case("txt") || found.eq_ignore_ascii_case("lab"))
            {
                contents.texts.push(name);
            } else {
                contents.others.push(name);
            }
        }
        for names in [&mut contents.recordings, &mut contents.texts, &mut contents.others] {
            names.sort_unstable();
        }
        Ok(contents)
    }

    fn has_recording(&self, stem: &str) -> bool {
        extensions(&self.recordings, stem).next().is_some()
    }

    /// A file of this stem that is neither a recording nor a transcript.
    fn other(&self, stem: &str) -> Option<String> {
        match extensions(&self.others, stem).next() {
            Some(extension) => Some(format!("{stem}.{extension}")),
            None => self
                .others
                .binary_search_by(|name| name.as_str().cmp(stem))
                .is_ok()
                .then(|| stem.to_owned()),
        }
    }

    /// The extension of the transcript beside a recording, as it is written. Small letters come last in their order, and are taken
    /// where there are both.
    fn beside(&self, stem: &str) -> Option<&str> {
        let last = |wanted: &str| {
            extensions(&self.texts, stem)
                .filter(|extension| extension.eq_ignore_ascii_case(wanted))
                .last()
        };
        last("txt")
            .or_else(|| last("lab"))
            .or_else(|| endings(&self.texts, stem).find(|ending| *ending == NORMALIZED))
    }

    /// Recordings in the order of their names, and where their transcripts are. An utterance of a list without a
    /// recording counts as a missing recording, and so does a transcript without a recording beside others.
    fn into_recordings(mut self, storage: &Storage, folder: &Path) -> Result<Vec<Listed>, ManifestError> {
        let mut lines: HashMap<String, Arc<Path>> = HashMap::new();
        let mut refused: Vec<Listed> = Vec::new();
        let mut refuse = |name: &str, reason, detail| {
            refused.push(Listed {
                file: name.to_string(),
                transcript: Transcript::Refused(Box::new(manifest_row::refuse(reason, detail))),
            });
        };
        for name in self.texts.iter().filter(|name| name.ends_with(LIST)) {
            // Or it is the transcript of `x.trans.flac`.
            if self.has_recording(stem(name)) {
                continue;
            }
            let path: Arc<Path> = folder.join(name).into();
            for (line, _) in lines_of(storage, &path)?.lines() {
                if let Some((utterance, _)) = split_line(line) {
                    // The first line of it counts.
                    match lines.entry(utterance.to_string()) {
                        Entry::Vacant(entry) => {
                            entry.insert(Arc::clone(&path));
                        }
                        Entry::Occupied(first) => {
                            let why = format!(
                                "{} has another line of it; the first counts, in {}",
                                path.display(),
                                first.get().display()
                            );
                            refuse(utterance, "duplicate_utterance", why);
                        }
                    }
                }
            }
        }
        if !self.recordings.is_empty() {
            let is_of_libri_tts = |name: &str| {
                let recording = of_libri_tts(name, NORMALIZED).or_else(|| of_libri_tts(name, ORIGINAL));
                recording.is_some_and(|recording| self.has_recording(recording))
            };
            let texts = self
                .texts
                .iter()
                .filter(|name| !name.ends_with(LIST) && !is_of_libri_tts(name));
            // Hardly ever needed.
            let by_form: LazyCell<HashMap<String, &str>, _> = LazyCell::new(|| {
                let stems = self.recordings.iter().map(|name| stem(name));
                stems.map(|stem| (composed(stem), stem)).collect()
            });
            for text in texts.filter(|name| !self.has_recording(stem(name))) {
                let other = match (by_form.get(&composed(stem(text))), self.other(stem(text))) {
                    (Some(recording), _) => format!(
                        "; `{recording}` is written in another form of Unicode: its letters look the same, but the names differ"
                    ),
                    (None, Some(other)) => format!("; `{other}` is not of a format that is read"),
                    (None, None) => String::new(),
                };
                let why = format!("no recording called `{}` is beside `{text}`{other}", stem(text));
                refuse(text, "missing_audio", why);
            }
        }
        for name in &self.unnamed {
            refuse(name, "unsafe_name", "its name is not UTF-8".into());
        }
        let missing = lines.iter().filter(|(utterance, _)| !self.has_recording(utterance));
        refused.extend(missing.map(|(utterance, list)| Listed {
            file: format!("{utterance}.flac"),
            transcript: Transcript::Line(Arc::clone(list)),
        }));
        let transcript = |contents: &Contents, stem: &str| match (contents.beside(stem), lines.get(stem)) {
            (Some(extension), _) if extension != "txt" => Transcript::Beside(extension.to_owned().into()),
            (None, Some(list)) => Transcript::Line(Arc::clone(list)),
            _ => Transcript::Beside("txt".into()),
        };
        let recordings = std::mem::take(&mut self.recordings).into_iter();
        let mut found: Vec<Listed> = recordings
            .map(|file| Listed {
                transcript: transcript(&self, stem(&file)),
                file,
            })
            .collect();
        found.extend(refused);
        found.sort_by(|a, b| a.file.cmp(&b.file));
        Ok(found)
    }
}

/// The recording whose transcript of LibriTTS has this name.
fn of_libri_tts<'n>(name: &'n str, ending: &str) -> Option<&'n str> {
    name.strip_suffix(ending)?.strip_suffix('.')
}

/// A name in the one form of Unicode that all its forms have.
fn composed(name: &str) -> String {
    name.nfc().collect()
}

/// A name without its extension.
pub fn stem(name: &str) -> &str {
    Path::new(name)
        .file_stem()
        .and_then(|stem| stem.to_str())
        .unwrap_or(name)
}
