//! Data folders of Kaldi and ESPnet: `wav.scp` and `text`, and `segments`, `utt2spk`, `utt2lang` and others where they are there.
//!
//! Each line of `text` is a row. Where there are `segments`, they say which part of which recording of `wav.scp` an utterance is,
//! else it is a recording by itself. Utterances of `segments` or `wav.scp` without a text are refused.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use flow_audio::embedded::path_of_bytes;
use flow_corpus::listing::AUDIO;
use flow_corpus::manifest_row::{ManifestRow, Refusal, Wanted, line_values, refuse};
use flow_corpus::tree;
use flow_corpus::{Corpus, LaidOut, Manifest, ManifestError, Part, ReadSettings, Take, file_stem, take_line};
use flow_kind::{Partition, StageError, Storage};
use flow_storage::InputFile;
use serde_json::{Map, Value};

use super::folder_entries::entries_of;
use super::lhotse::Paths;
use super::line_file::{Block, IdIndex, Indexing, LineFile};
use super::utterance::{Common, Utterance, text_of};

/// A `wav.scp`, in a folder or named itself.
fn folder_of(storage: &Storage, root: &Path) -> Option<PathBuf> {
    if tree::is_folder(storage, root) {
        return Some(root.to_path_buf());
    }
    let is_list = root.file_name().is_some_and(|name| name == "wav.scp") && tree::is_file(storage, root);
    is_list.then(|| root.parent().unwrap_or(Path::new("")).to_path_buf())
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    let folder = folder_of(storage, root).filter(|folder| tree::is_file(storage, &folder.join("wav.scp")))?;
    // Recordings with texts beside them may have a list of their own.
    let has_recordings = || {
        let is_audio = |name: &String| {
            Path::new(name)
                .extension()
                .is_some_and(|ending| AUDIO.iter().any(|audio| ending.eq_ignore_ascii_case(audio)))
        };
        entries_of(storage, &folder).names.iter().any(is_audio)
    };
    (tree::is_file(storage, &folder.join("text")) || !has_recordings()).then(|| "wav.scp".into())
}

/// A list whose lines begin with an id.
struct List {
    file: LineFile,
    ids: IdIndex,
    blocks: Vec<Block>,
}

impl List {
    fn open(storage: &Storage, path: PathBuf, scratch: &Path) -> Result<Option<List>, ManifestError> {
        if !tree::is_file(storage, &path) {
            return Ok(None);
        }
        let file = LineFile::open(storage, &path, scratch)?;
        let mut ids = Indexing::default();
        let blocks = file.blocks(|offset, line| {
            if let Some((id, _)) = split(line) {
                ids.add(id, offset);
            }
        })?;
        Ok(Some(List {
            ids: ids.finish(),
            blocks,
            file,
        }))
    }

    /// What the first line of an id says of it.
    fn find(&self, id: &str) -> Result<Option<String>, ManifestError> {
        let of = |line: &str| split(line).and_then(|(other, rest)| (other == id).then(|| rest.to_string()));
        self.ids.find(&self.file, id, of)
    }
}

/// The id of a line, and what follows.
fn split(line: &str) -> Option<(&str, &str)> {
    let line = line.trim();
    let (id, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    (!id.is_empty()).then_some((id, rest.trim()))
}

/// `reco2file_and_channel`, and hashes of what several recordings of `wav.scp` name.
struct Channels {
    list: List,
    shared: HashSet<u64>,
}

impl Channels {
    fn open(list: List, recordings: &List) -> Result<Channels, ManifestError> {
        let (mut seen, mut shared) = (HashSet::new(), HashSet::new());
        recordings.file.blocks(|_, line| {
            if let Some((_, place)) = split(line)
                && !seen.insert(hash_of(place))
            {
                shared.insert(hash_of(place));
            }
        })?;
        Ok(Channels { list, shared })
    }

    /// The channel of a recording whose file others have, too.
    fn of(&self, recording: &str, place: &str) -> Result<Option<String>, ManifestError> {
        if !self.shared.contains(&hash_of(place)) {
            return Ok(None);
        }
        let fields = self.list.find(recording)?;
        Ok(fields.and_then(|fields| fields.split_whitespace().nth(1).map(str::to_owned)))
    }
}

fn hash_of(place: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    place.hash(&mut hasher);
    hasher.finish()
}

struct Kaldi {
    text: List,
    recordings: List,
    segments: Option<List>,
    speakers: Option<List>,
    languages: Option<List>,
    genders: Option<List>,
    channels: Option<Channels>,
    paths: Paths,
    /// What rows have as their shard.
    label: String,
    common: Common,
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let folder = folder_of(storage, root)
        .ok_or_else(|| ManifestError::manifest(root, "a data folder of Kaldi has a file wav.scp"))?;
    let list = |name: &str| List::open(storage, folder.join(name), scratch);
    let needed = |name: &str| {
        let why = format!("it is a data folder of Kaldi, but there is no {name} in it");
        list(name)?.ok_or_else(|| ManifestError::manifest(&folder, why))
    };
    let recordings = needed("wav.scp")?;
    let place_of = |line: &str| {
        let (_, place) = split(line)?;
        (!place.ends_with('|')).then(|| place.to_string())
    };
    let channels = list("reco2file_and_channel")?.map(|list| Channels::open(list, &recordings));
    let kaldi = Kaldi {
        channels: channels.transpose()?,
        text: needed("text")?,
        segments: list("segments")?,
        speakers: list("utt2spk")?,
        languages: list("utt2lang")?,
        genders: list("spk2gender")?,
        paths: Paths::of(storage, &recordings.file, &recordings.blocks, place_of),
        label: file_stem(&folder),
        recordings,
        common: Common::of(settings),
    };
    LaidOut::of(kaldi, root, settings)
}

impl Kaldi {
    /// All lists that rows are made of.
    fn lists(&self) -> impl Iterator<Item = &List> {
        let others = [&self.segments, &self.speakers, &self.languages, &self.genders];
        let others = others.into_iter().flatten();
        [&self.text, &self.recordings]
            .into_iter()
            .chain(others.chain(self.channels.as_ref().map(|channels| &channels.list)))
    }

    /// The list whose utterances should have texts.
    fn utterances(&self) -> &List {
        self.segments.as_ref().unwrap_or(&self.recordings)
    }

    fn row(&self, storage: &Storage, line: &str) -> Result<Result<ManifestRow, Refusal>, ManifestError> {
        let Some((id, text)) = split(line) else {
            return Ok(Err(refuse("bad_line", "")));
        };
        let of = |list: &Option<List>, id: &str| list.as_ref().map_or(Ok(None), |list| list.find(id));
        let segment = of(&self.segments, id)?;
        let (recording, start, duration) = match (&self.segments, segment) {
            (None, _) => (id.to_string(), 0.0, None),
            (Some(_), None) => return Ok(Err(refuse("missing_audio", "the utterance has no line in segments"))),
            (Some(_), Some(fields)) => match times(&fields) {
                Ok(times) => times,
                Err(refusal) => return Ok(Err(refusal)),
            },
        };
        let Some(place) = self.recordings.find(&recording)? else {
            let why = format!("the recording {recording:?} has no line in wav.scp");
            return Ok(Err(refuse("missing_audio", why)));
        };
        if let Some(channels) = &self.channels
            && let Some(channel) = channels.of(&recording, &place)?
        {
            let why = format!(
                "reco2file_and_channel names channel {channel} of a file that several recordings have; write each channel as a \
                 recording of its own"
            );
            return Ok(Err(refuse("several_channels", why)));
        }
        let wanted = match self.wanted(storage, &place) {
            Ok(wanted) => wanted,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let text = match text_of(text, "the line has nothing behind the id") {
            Ok(text) => text,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let speaker = of(&self.speakers, id)?;
        let gender = match &speaker {
            Some(speaker) => of(&self.genders, speaker)?,
            None => None,
        };
        let mut extra = Map::new();
        for (key, value) in [("speaker", speaker), ("gender", gender)] {
            extra.extend(value.map(|value| (key.to_string(), Value::from(value))));
        }
        Ok(Ok(Utterance {
            id: id.to_string(),
            shard: self.label.clone(),
            text,
            lang: of(&self.languages, id)?,
            lang_field: "utt2lang",
            start,
            duration,
            wanted,
            one_channel: true,
            extra,
            ..Utterance::default()
        }
        .row(&self.common)))
    }

    /// Where the recording of a line of `wav.scp` is.
    fn wanted(&self, storage: &Storage, place: &str) -> Result<Wanted, Refusal> {
        if let Some(command) = place.strip_suffix('|') {
            let command = command.trim();
            let is_file = |word: &&str| word.contains('/') || Path::new(word).extension().is_some();
            let read = command
                .split('|')
                .next()
                .unwrap_or_default()
                .split_whitespace()
                .skip(1)
                .filter(is_file)
                .last();
            let hint = read.map_or_else(String::new, |file| {
                format!("; it reads {file}: convert that to WAV or FLAC and name the result in wav.scp")
            });
            return Err(refuse(
                "shell_command",
                format!("wav.scp names a shell command, which is not run: {command}{hint}"),
            ));
        }
        if place.is_empty() {
            return Err(refuse("missing_audio", "its line in wav.scp names no file"));
        }
        let archive = place
            .rsplit_once(':')
            .and_then(|(file, offset)| Some((file, offset.parse::<u64>().ok()?)));
        let path = archive.map_or(place, |(file, _)| file);
        let path = self.paths.join(path);
        let Some((_, offset)) = archive else {
            return Ok(Wanted::file(path));
        };
        let (offset, size) = in_archive(storage, &path, offset)
            .map_err(|why| refuse("missing_audio", format!("{} at byte {offset}: {why}", path.display())))?;
        let path = path
            .to_str()
            .ok_or_else(|| refuse("unsafe_name", "the path is not UTF-8"))?;
        Ok(Wanted::file(path_of_bytes(path, offset, size)))
    }
}

/// Where the recording of an archive is that begins at an offset: a WAV as it is, or behind the mark `AUDIO` and its length, as
/// kaldiio writes formats of libsndfile.
fn in_archive(storage: &Storage, path: &Path, offset: u64) -> Result<(u64, u64), String> {
    let file = InputFile::open(storage, path).map_err(|error| error.to_string())?;
    let mut head = [0; 14];
    let mut read = 0;
    while read < head.len() {
        match file.read_at(&mut head[read..], offset.saturating_add(read as u64)) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(error) => return Err(error.to_string()),
        }
    }
    let whole = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
    match &head {
        head if head.starts_with(b"RIFF") => Ok((offset, whole(&head[4..8]) + 8)),
        // How many bytes the length has, and the length.
        head if head.starts_with(b"AUDIO") && (1..=8).contains(&head[5]) => {
            let bytes = 6 + usize::from(head[5]);
            Ok((offset + bytes as u64, whole(&head[6..bytes])))
        }
        head if head.starts_with(b"fLaC") => Err("a FLAC without its length; write the recordings as files".into()),
        _ => Err("there is no recording".into()),
    }
}

/// The recording of a line of `segments`, where the utterance begins in it, and how long it is (none: to its end).
fn times(fields: &str) -> Result<(String, f64, Option<f64>), Refusal> {
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let [recording, start, end, channel @ ..] = fields.as_slice() else {
        return Err(refuse(
            "bad_line",
            format!("{} fields in segments in place of 4", fields.len() + 1),
        ));
    };
    if let Some(channel) = channel.first() {
        let why = format!("segments names channel {channel}; write each channel as a recording of its own");
        return Err(refuse("several_channels", why));
    }
    let seconds = |field: &str| match field.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() => Ok(seconds),
        _ => Err(refuse("bad_type", format!("{field:?} in segments is not a time"))),
    };
    let (from, to) = (seconds(start)?, seconds(end)?);
    let duration = match to {
        -1.0 => None,
        to if to > from => Some(to - from),
        to => {
            return Err(refuse(
                "duration_invalid",
                format!("it begins at {from} s and ends at {to} s"),
            ));
        }
    };
    Ok((recording.to_string(), from, duration))
}

impl Corpus for Kaldi {
    fn told(&self) -> String {
        let segments = if self.segments.is_some() {
            "with segments"
        } else {
            "without segments"
        };
        format!("a data folder of Kaldi {segments}{}", self.paths.told())
    }

    fn parts(&self) -> Vec<Part> {
        let files: Vec<PathBuf> = self.lists().map(|list| list.file.path.clone()).collect();
        let texts = (0..self.text.blocks.len()).map(|block| format!("text/{block:06}"));
        let without = (0..self.utterances().blocks.len()).map(|block| format!("without_text/{block:06}"));
        let part = |(number, name): (usize, String)| Part {
            name: Partition::from(name),
            number,
            files: files.clone(),
            looks: String::new(),
        };
        texts.chain(without).enumerate().map(part).collect()
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        for list in self.lists() {
            list.file.still(storage)?;
        }
        if let Some(block) = self.text.blocks.get(part.number) {
            return self.text.file.lines(*block, &mut |line| match line.text {
                Ok(text) => take(Some(line.number), self.row(storage, text)?, &|| line_values(text)),
                bad => take_line(take, line.number, bad, |_| Err(refuse("bad_line", ""))),
            });
        }
        let list = self.utterances();
        let Some(block) = list.blocks.get(part.number - self.text.blocks.len()) else {
            return Ok(());
        };
        list.file.lines(*block, &mut |line| {
            let Ok(text) = line.text else {
                return take_line(take, line.number, line.text, |_| Err(refuse("bad_line", "")));
            };
            let Some((id, _)) = split(text) else { return Ok(()) };
            if self.text.find(id)?.is_some() {
                return Ok(());
            }
            let name = list
                .file
                .path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let refusal = refuse(
                "missing_text",
                format!("the utterance {id:?} of {name} has no line in text"),
            );
            take(None, Err(refusal), &|| line_values(text))
        })
    }
}
