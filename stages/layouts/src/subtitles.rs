//! Long recordings with subtitles beside them: `talk.mp3` and `talk.srt`, `talk.vtt` or `talk.en.vtt`. Each cue is a row.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::path::{Path, PathBuf};

use flow_audio::subtitle_cues::cues;
use flow_corpus::listing::{AUDIO, MOST_DEPTH, stem};
use flow_corpus::manifest_row::{ManifestRow, Refusal, Wanted, line_values, refuse};
use flow_corpus::naming::named;
use flow_corpus::transcripts::lines_of;
use flow_corpus::tree;
use flow_corpus::{Corpus, LaidOut, Manifest, ManifestError, Part, ReadSettings, Take};
use flow_kind::{Partition, StageError, Storage};
use flow_text::language_tag::is_language;

use super::folder_entries::{Entries, MOST_FOLDERS, entries_of, read_entries};
use super::utterance::{Common, Utterance, text_of};

const SUBTITLES: [&str; 2] = ["srt", "vtt"];
/// Recordings that make a partition.
const BLOCK: usize = 64;
/// Files of a partition of those that are refused.
const BLOCK_REFUSED: usize = 1_000;

/// A recording, its subtitles, and the language that the name of the latter has.
#[derive(Clone, Debug)]
struct Titled {
    recording: PathBuf,
    subtitles: PathBuf,
    lang: Option<String>,
}

fn ending(name: &str) -> Option<String> {
    Path::new(name)
        .extension()
        .and_then(|ending| ending.to_str())
        .map(str::to_ascii_lowercase)
}

/// Whether a name has one of these endings.
fn is_of(name: &str, endings: &[&str]) -> bool {
    ending(name).is_some_and(|ending| endings.contains(&ending.as_str()))
}

/// What is found in folders.
#[derive(Debug, Default)]
struct Found {
    titled: Vec<Titled>,
    /// What no row can be made of, by its path, and why.
    refused: Vec<(PathBuf, Refusal)>,
}

/// Recordings with subtitles in a folder and below it, as far as it can be read: a look that ends with the first one, or after few
/// folders.
fn first_titled(storage: &Storage, root: &Path) -> Option<Titled> {
    let (mut found, mut seen) = (Found::default(), HashSet::new());
    let mut waiting = VecDeque::from([root.to_path_buf()]);
    while let Some(folder) = waiting.pop_front() {
        if !tree::canonical(&folder).is_ok_and(|canonical| seen.insert(canonical)) {
            continue;
        }
        let entries = entries_of(storage, &folder);
        // There may be a million recordings without any, each of which `add` refuses.
        if entries.names.iter().any(|name| is_of(name, &SUBTITLES)) {
            found.add(&folder, &entries);
        }
        if !found.titled.is_empty() || seen.len() >= MOST_FOLDERS {
            break;
        }
        waiting.extend(entries.folders.iter().map(|name| folder.join(name)));
    }
    found.titled.into_iter().min_by(|a, b| a.subtitles.cmp(&b.subtitles))
}

impl Found {
    /// What is in a folder and below it. Each folder is looked into once, whatever links lead to it.
    fn all(storage: &Storage, root: &Path) -> Result<Found, ManifestError> {
        let (mut found, mut seen) = (Found::default(), HashSet::new());
        let mut waiting = VecDeque::from([(root.to_path_buf(), 0)]);
        while let Some((folder, depth)) = waiting.pop_front() {
            let canonical = tree::canonical(&folder);
            if !seen.insert(canonical.map_err(|error| ManifestError::io(&folder, error))?) {
                continue;
            }
            if depth > MOST_DEPTH {
                let why = format!("it is more than {MOST_DEPTH} folders below {}", root.display());
                return Err(ManifestError::manifest(&folder, why));
            }
            let entries = read_entries(storage, &folder)?;
            found.add(&folder, &entries);
            waiting.extend(entries.folders.iter().map(|name| (folder.join(name), depth + 1)));
        }
        found.titled.sort_by(|a, b| a.subtitles.cmp(&b.subtitles));
        found.refused.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    /// Adds what is in the folder itself.
    fn add(&mut self, folder: &Path, entries: &Entries) {
        let files = || entries.names.difference(&entries.folders);
        let mut recordings: BTreeMap<&str, &String> = BTreeMap::new();
        for name in files().filter(|name| is_of(name, &AUDIO)) {
            recordings.entry(stem(name)).or_insert(name);
        }
        let mut used: HashSet<&String> = HashSet::new();
        for name in files().filter(|name| is_of(name, &SUBTITLES)) {
            let stem = stem(name);
            let with_lang = stem.rsplit_once('.').filter(|(_, lang)| is_language(lang));
            let whole = recordings.get(stem).map(|recording| (*recording, None));
            let of = whole.or_else(|| {
                let (stem, lang) = with_lang?;
                Some((*recordings.get(stem)?, Some(lang.to_string())))
            });
            match of {
                Some((recording, lang)) => {
                    used.insert(recording);
                    self.titled.push(Titled {
                        recording: folder.join(recording),
                        subtitles: folder.join(name),
                        lang,
                    });
                }
                None => self.refuse(
                    folder,
                    name,
                    "missing_audio",
                    "there is no recording of this name beside it".into(),
                ),
            }
        }
        for name in files().filter(|name| is_of(name, &AUDIO) && !used.contains(name)) {
            let why = match recordings.get(stem(name)) {
                Some(other) if used.contains(other) => format!("the subtitles beside it are read with {other}"),
                _ => "there are no subtitles beside it".into(),
            };
            self.refuse(folder, name, "missing_text", why);
        }
        for (name, is_folder) in &entries.unnamed {
            if *is_folder || is_of(name, &AUDIO) || is_of(name, &SUBTITLES) {
                self.refuse(folder, name, "unsafe_name", "its name is not UTF-8".into());
            }
        }
    }

    fn refuse(&mut self, folder: &Path, name: &str, reason: &'static str, why: String) {
        let path = folder.join(name);
        let refusal = refuse(reason, format!("{}: {why}", path.display()));
        self.refused.push((path, refusal));
    }
}

/// Transcripts beside recordings are read in place of their subtitles.
fn has_transcripts(storage: &Storage, folder: &Path, recording: &Path) -> bool {
    let entries = entries_of(storage, recording.parent().unwrap_or(folder));
    let names = &entries.names;
    names
        .iter()
        .any(|name| ending(name).is_some_and(|ending| ending == "txt" || ending == "lab"))
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    let titled = first_titled(storage, root)?;
    let name = titled.subtitles.file_name()?.to_string_lossy().into_owned();
    (!has_transcripts(storage, root, &titled.recording)).then(|| format!("{name} beside its recording"))
}

struct Subtitles {
    root: PathBuf,
    all: Vec<Titled>,
    refused: Vec<(PathBuf, Refusal)>,
    common: Common,
}

pub fn open(storage: &Storage, root: &Path, settings: &ReadSettings, _: &Path) -> Result<Manifest, ManifestError> {
    let Found { titled: all, refused } = Found::all(storage, root)?;
    if all.is_empty() {
        return Err(ManifestError::manifest(
            root,
            "there are no recordings with subtitles in it",
        ));
    }
    let mut seen: BTreeMap<&Path, &Path> = BTreeMap::new();
    for one in &all {
        if let Some(other) = seen.insert(&one.recording, &one.subtitles) {
            let why = format!(
                "{} and {} are subtitles of one recording; leave one of them",
                other.display(),
                one.subtitles.display()
            );
            return Err(ManifestError::manifest(&one.recording, why));
        }
    }
    let subtitles = Subtitles {
        root: root.to_path_buf(),
        all,
        refused,
        common: Common::of(settings),
    };
    LaidOut::of(subtitles, root, settings)
}

impl Subtitles {
    /// Partitions of recordings with subtitles; those that are refused follow.
    fn titled_parts(&self) -> usize {
        self.all.len().div_ceil(BLOCK)
    }

    fn row(&self, titled: &Titled, start: f64, end: f64, text: &str) -> Result<ManifestRow, Refusal> {
        let below = titled.recording.strip_prefix(&self.root).unwrap_or(&titled.recording);
        let below = below
            .to_str()
            .ok_or_else(|| refuse("unsafe_name", "the path is not UTF-8"))?;
        let names = named(below, Some(start));
        Ok(Utterance {
            id: names.segment_id,
            shard: names.shard_id.unwrap_or_else(|| stem(below).to_string()),
            text: text_of(text, "the cue has no text")?,
            folder_lang: titled.lang.clone(),
            start,
            duration: Some(((end - start) * 1e3).round() / 1e3),
            wanted: Wanted::file(&titled.recording),
            ..Utterance::default()
        }
        .row(&self.common))
    }
}

impl Corpus for Subtitles {
    fn told(&self) -> String {
        format!("{} recordings with subtitles; each cue is a row", self.all.len())
    }

    fn parts(&self) -> Vec<Part> {
        let part = |(number, block): (usize, &[Titled])| Part {
            name: Partition::from(format!("subtitles/{number:06}")),
            number,
            files: block.iter().map(|titled| titled.subtitles.clone()).collect(),
            looks: String::new(),
        };
        let refused = |(number, block): (usize, &[(PathBuf, Refusal)])| Part {
            name: Partition::from(format!("refused/{number:06}")),
            number: self.titled_parts() + number,
            files: Vec::new(),
            looks: block
                .iter()
                .fold(blake3::Hasher::new(), |mut hasher, (_, refusal)| {
                    hasher.update(refusal.detail.as_bytes()).update(b"\n");
                    hasher
                })
                .finalize()
                .to_hex()
                .to_string(),
        };
        let titled = self.all.chunks(BLOCK).enumerate().map(part);
        titled
            .chain(self.refused.chunks(BLOCK_REFUSED).enumerate().map(refused))
            .collect()
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        if let Some(block) = part.number.checked_sub(self.titled_parts()) {
            for (path, refusal) in self.refused.iter().skip(block * BLOCK_REFUSED).take(BLOCK_REFUSED) {
                take(None, Err(refusal.clone()), &|| line_values(&path.to_string_lossy()))?;
            }
            return Ok(());
        }
        for titled in self.all.iter().skip(part.number * BLOCK).take(BLOCK) {
            let decoded = lines_of(storage, &titled.subtitles)?;
            for (_, cue) in cues(&decoded.text) {
                let cue = cue.map_err(|bad| refuse(bad.reason, bad.detail));
                let cue = cue.as_ref();
                let row = cue
                    .map_err(Clone::clone)
                    .and_then(|(start, end, text)| self.row(titled, *start, *end, text));
                let values = || {
                    let name = titled.subtitles.display();
                    cue.map_or_else(
                        |refusal| line_values(&format!("{name}: {}", refusal.detail)),
                        |(start, end, text)| line_values(&format!("{name}: {start} --> {end} {text}")),
                    )
                };
                take(None, row, &values)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_read_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(Found::all(&Storage::default(), file.path()).is_err());
        assert!(first_titled(&Storage::default(), file.path()).is_none());
    }
}
