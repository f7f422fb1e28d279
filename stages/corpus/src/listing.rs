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
    /// No recording with a transcript, for this reason.
    Refused { reason: &'static str, detail: String },
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
        let recordings = contents.recordings(storage, &folder)?;
        // There may be millions of names.
        drop(contents);
        let mut files = recordings.into_iter().map(|(name, transcript)| Listed {
            file: inner(&name),
            transcript,
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

/// The entries of one folder.
#[derive(Default)]
struct Contents {
    folders: Vec<String>,
    /// Symbolic links to folders.
    links: Vec<String>,
    recordings: BTreeSet<String>,
    /// Files that may be transcripts.
    texts: BTreeSet<String>,
    /// Their extensions as they are written, by stem and extension in lower case.
    extensions: HashMap<(String, String), String>,
    /// Folders and recordings whose names are not UTF-8, as they can be shown.
    unnamed: BTreeSet<String>,
    /// Files that are neither recordings nor transcripts, by stem.
    others: HashMap<String, String>,
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
                contents.recordings.insert(name);
            } else if extension
                .is_some_and(|found| found.eq_ignore_ascii_case("txt") || found.eq_ignore_ascii_case("lab"))
            {
                contents.texts.insert(name);
            } else {
                contents.others.insert(stem(&name).to_string(), name);
            }
        }
        // Small letters come last in their order, and stand where there are both.
        for name in &contents.texts {
            if let Some(extension) = Path::new(name).extension().and_then(OsStr::to_str) {
                let key = (stem(name).to_string(), extension.to_ascii_lowercase());
                contents.extensions.insert(key, extension.to_string());
            }
            if let Some(recording) = of_libri_tts(name, NORMALIZED) {
                let key = (recording.to_string(), NORMALIZED.to_string());
                contents.extensions.insert(key, NORMALIZED.to_string());
            }
        }
        Ok(contents)
    }

    /// Recordings in the order of their names, and where their transcripts are. An utterance of a list without a
    /// recording counts as a missing recording, and so does a transcript without a recording beside others.
    fn recordings(&self, storage: &Storage, folder: &Path) -> Result<Vec<(String, Transcript)>, ManifestError> {
        let stems: HashSet<&str> = self.recordings.iter().map(|name| stem(name)).collect();
        let mut lines: HashMap<String, Arc<Path>> = HashMap::new();
        let mut refused: Vec<(String, Transcript)> = Vec::new();
        let mut refuse = |name: &str, reason, detail| {
            refused.push((name.to_string(), Transcript::Refused { reason, detail }));
        };
        for name in self.texts.iter().filter(|name| name.ends_with(LIST)) {
            // Or it is the transcript of `x.trans.flac`.
            if stems.contains(stem(name)) {
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
                recording.is_some_and(|recording| stems.contains(recording))
            };
            let texts = self
                .texts
                .iter()
                .filter(|name| !name.ends_with(LIST) && !is_of_libri_tts(name));
            // Hardly ever needed.
            let by_form: LazyCell<HashMap<String, &str>, _> =
                LazyCell::new(|| stems.iter().map(|stem| (composed(stem), *stem)).collect());
            for text in texts.filter(|name| !stems.contains(stem(name))) {
                let other = match (by_form.get(&composed(stem(text))), self.others.get(stem(text))) {
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
        let beside = |stem: &str| {
            let written = |extension: &str| self.extensions.get(&(stem.to_string(), extension.to_string()));
            written("txt")
                .or_else(|| written("lab"))
                .or_else(|| written(NORMALIZED))
                .cloned()
        };
        let transcript = |stem: &str| match (beside(stem), lines.get(stem)) {
            (Some(extension), _) if extension != "txt" => Transcript::Beside(extension.into()),
            (None, Some(list)) => Transcript::Line(Arc::clone(list)),
            _ => Transcript::Beside("txt".into()),
        };
        let mut found: Vec<(String, Transcript)> = self
            .recordings
            .iter()
            .map(|name| (name.clone(), transcript(stem(name))))
            .collect();
        let missing = lines
            .iter()
            .filter(|(utterance, _)| !stems.contains(utterance.as_str()));
        found
            .extend(missing.map(|(utterance, list)| (format!("{utterance}.flac"), Transcript::Line(Arc::clone(list)))));
        found.extend(refused);
        found.sort_by(|a, b| a.0.cmp(&b.0));
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
