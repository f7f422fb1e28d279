//! GigaSpeech: `GigaSpeech.json`, one object with a list `audios`, whose elements have `segments`; recordings below `audio`.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use flow_corpus::looks::{check_version, version_of};
use flow_corpus::manifest_row::{ManifestRow, Refusal, Wanted, line_values, refuse, refuse_by_rule};
use flow_corpus::tree;
use flow_corpus::{Corpus, LaidOut, Manifest, ManifestError, Part, ReadSettings, Take};
use flow_kind::{Partition, StageError, Storage, open_input_file};
use flow_storage::{FileVersion, InputFile};
use serde::Deserialize;
use serde_json::Map;

use super::splits::usual;
use super::utterance::{Common, Utterance, text_of};

const FILE: &str = "GigaSpeech.json";
const LIST: &str = "audios";
/// Recordings that make a partition.
const BLOCK: usize = 200;
/// Most bytes that the JSON of one recording may have.
const LARGEST: u64 = 256 << 20;
/// Marks that texts spell out.
const MARKS: [(&str, &str); 4] = [
    ("<COMMA>", ","),
    ("<PERIOD>", "."),
    ("<QUESTIONMARK>", "?"),
    ("<EXCLAMATIONPOINT>", "!"),
];
/// Words that represent what is no speech.
const NO_SPEECH: [&str; 4] = ["<SIL>", "<MUSIC>", "<NOISE>", "<OTHER>"];
/// Subsets for training, each of which has the ones before it.
const SUBSETS: [&str; 5] = ["xs", "s", "m", "l", "xl"];
/// Subsets that are not for training.
const HELD_OUT: [&str; 2] = ["{DEV}", "{TEST}"];

#[derive(Deserialize)]
struct Audio {
    aid: String,
    path: String,
    #[serde(default)]
    channels: Option<i64>,
    #[serde(default)]
    source: Option<String>,
    #[serde(default)]
    category: Option<serde_json::Value>,
    #[serde(default)]
    subsets: Vec<String>,
    #[serde(default)]
    segments: Vec<Segment>,
}

#[derive(Deserialize)]
struct Segment {
    sid: String,
    begin_time: f64,
    end_time: f64,
    #[serde(default)]
    speaker: Option<String>,
    text_tn: String,
    #[serde(default)]
    subsets: Option<Vec<String>>,
}

fn file_of(storage: &Storage, root: &Path) -> Option<PathBuf> {
    let named = root
        .file_name()
        .is_some_and(|name| name == FILE)
        .then(|| root.to_path_buf());
    named
        .or_else(|| Some(root.join(FILE)))
        .filter(|path| tree::is_file(storage, path))
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    file_of(storage, root).map(|_| FILE.to_string())
}

struct GigaSpeech {
    path: PathBuf,
    look: FileVersion,
    file: InputFile,
    /// Where the elements of the list are, in bytes.
    elements: Vec<(u64, u64)>,
    /// The subset that is read; empty: all but those for tests.
    subset: String,
    common: Common,
}

pub fn open(storage: &Storage, root: &Path, settings: &ReadSettings, _: &Path) -> Result<Manifest, ManifestError> {
    let path =
        file_of(storage, root).ok_or_else(|| ManifestError::manifest(root, format!("there is no {FILE} in it")))?;
    let failed = |error| ManifestError::io(&path, error);
    let look = version_of(storage, &path).map_err(failed)?;
    let file = open_input_file(storage, &path).map_err(failed)?;
    let elements = elements(
        BufReader::with_capacity(1 << 20, open_input_file(storage, &path).map_err(failed)?),
        LIST,
    );
    let subset = match settings.split.as_str() {
        "" | "train" | "all" => settings.split.clone(),
        named => match usual(named) {
            "validation" => "{DEV}".into(),
            "test" => "{TEST}".into(),
            "train" => "train".into(),
            other if SUBSETS.iter().any(|subset| subset.eq_ignore_ascii_case(other)) => {
                format!("{{{}}}", other.to_uppercase())
            }
            other => {
                let why = format!(
                    "it has no subset {other:?}, which `split` names; its subsets are {}, dev, test (`split: all` reads all)",
                    SUBSETS.join(", ")
                );
                return Err(ManifestError::manifest(root, why));
            }
        },
    };
    let corpus = GigaSpeech {
        elements: elements.map_err(failed)?,
        look,
        file,
        subset,
        common: Common::of(settings),
        path,
    };
    if !["", "train", "all"].contains(&corpus.subset.as_str())
        && let Some(there) = corpus.without_wanted()?
    {
        let there: Vec<String> = there.into_iter().collect();
        let why = format!(
            "it has no rows of the subset {}, which `split` names; its subsets are {}",
            corpus.subset,
            there.join(", ")
        );
        return Err(ManifestError::manifest(root, why));
    }
    LaidOut::of(corpus, root, settings)
}

/// Where the objects of a list are that an object has under a key. JSON that is cut short ends with the last whole one.
fn elements(mut reader: impl BufRead, key: &str) -> io::Result<Vec<(u64, u64)>> {
    let (mut found, mut at, mut depth, mut start) = (Vec::new(), 0u64, 0usize, None);
    let (mut in_text, mut escaped, mut text) = (false, false, Vec::new());
    // Whether the key was read last, and whether its list is open.
    let (mut is_key, mut in_list) = (false, false);
    loop {
        let bytes = reader.fill_buf()?;
        if bytes.is_empty() {
            return Ok(found);
        }
        for &byte in bytes {
            at += 1;
            if in_text {
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' => escaped = true,
                    b'"' => {
                        in_text = false;
                        is_key = depth == 1 && text == key.as_bytes();
                    }
                    byte if depth == 1 && text.len() <= key.len() => text.push(byte),
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => {
                    in_text = true;
                    text.clear();
                }
                b'{' | b'[' => {
                    if byte == b'[' && depth == 1 && is_key {
                        in_list = true;
                    }
                    if byte == b'{' && depth == 2 && in_list {
                        start = Some(at - 1);
                    }
                    depth += 1;
                }
                b'}' | b']' => {
                    depth = depth.saturating_sub(1);
                    if depth == 2 && in_list {
                        found.extend(start.take().map(|start| (start, at)));
                    }
                    in_list &= depth > 1;
                }
                b',' => is_key = false,
                _ => {}
            }
        }
        let read = bytes.len();
        reader.consume(read);
    }
}

impl GigaSpeech {
    fn element(&self, (start, end): (u64, u64)) -> Result<Result<String, Refusal>, ManifestError> {
        let size = end - start;
        if size > LARGEST {
            return Ok(Err(refuse("line_too_long", format!("{size} bytes of one recording"))));
        }
        let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
        let read = self.file.read_exact_at(&mut bytes, start);
        read.map_err(|error| ManifestError::io(&self.path, error))?;
        Ok(String::from_utf8(bytes).map_err(|error| refuse("not_utf8", error.to_string())))
    }

    /// All subsets; none where one of them is wanted.
    fn without_wanted(&self) -> Result<Option<BTreeSet<String>>, ManifestError> {
        let mut there = BTreeSet::new();
        for place in &self.elements {
            // What is damaged becomes a reject later.
            let audio = self
                .element(*place)?
                .ok()
                .and_then(|json| serde_json::from_str::<Audio>(&json).ok());
            let Some(audio) = audio else { continue };
            for segment in audio.segments {
                let subsets = segment.subsets.as_ref().unwrap_or(&audio.subsets);
                if self.is_wanted(subsets) {
                    return Ok(None);
                }
                there.extend(subsets.iter().cloned());
            }
        }
        Ok(Some(there))
    }

    fn is_wanted(&self, subsets: &[String]) -> bool {
        match self.subset.as_str() {
            "all" => true,
            "" | "train" => !subsets.iter().any(|subset| HELD_OUT.contains(&subset.as_str())),
            wanted => subsets.iter().any(|subset| subset == wanted),
        }
    }

    fn row(&self, audio: &Audio, segment: &Segment) -> Result<ManifestRow, Refusal> {
        if flow_corpus::names::unsafe_name(&audio.path) {
            return Err(refuse("unsafe_name", format!("{:?}", audio.path)));
        }
        if audio.channels.is_some_and(|channels| channels > 1) {
            return Err(refuse(
                "several_channels",
                format!("{} channels", audio.channels.unwrap_or(0)),
            ));
        }
        let length = segment.end_time - segment.begin_time;
        if !(length.is_finite() && length > 0.0) {
            let why = format!(
                "it begins at {} s and ends at {} s",
                segment.begin_time, segment.end_time
            );
            return Err(refuse("duration_invalid", why));
        }
        let words: Vec<&str> = segment.text_tn.split_whitespace().collect();
        if !words.is_empty() && words.iter().all(|word| NO_SPEECH.contains(word)) {
            return Err(refuse_by_rule("no_speech", segment.text_tn.clone()));
        }
        let mut text = String::new();
        for word in words.into_iter().filter(|word| !NO_SPEECH.contains(word)) {
            match MARKS.iter().find(|(mark, _)| *mark == word) {
                Some((_, mark)) => text.push_str(mark),
                None if text.is_empty() => text.push_str(word),
                None => text.extend([" ", word]),
            }
        }
        let mut extra = Map::new();
        extra.insert(
            "speaker".into(),
            segment.speaker.clone().filter(|speaker| speaker != "N/A").into(),
        );
        // `source` is a column of rows.
        extra.insert("origin".into(), audio.source.clone().into());
        extra.insert("category".into(), audio.category.clone().unwrap_or_default());
        let folder = self.path.parent().unwrap_or(Path::new(""));
        Ok(Utterance {
            id: segment.sid.clone(),
            shard: audio.aid.clone(),
            text: text_of(&text, "text_tn is empty")?,
            folder_lang: Some("en".into()),
            start: segment.begin_time,
            duration: Some(length),
            wanted: Wanted::file(tree::join(folder, &audio.path)),
            extra,
            ..Utterance::default()
        }
        .row(&self.common))
    }
}

impl Corpus for GigaSpeech {
    fn told(&self) -> String {
        let subset = match self.subset.as_str() {
            "" | "train" => "all subsets but {DEV} and {TEST} are read".to_string(),
            "all" => "all subsets are read".into(),
            named => format!("the subset {named} is read"),
        };
        format!("GigaSpeech; {subset}; marks that are spelled out (<COMMA>) are written as such")
    }

    fn parts(&self) -> Vec<Part> {
        let part = |number: usize| Part {
            name: Partition::from(format!("audios/{number:06}")),
            number,
            files: vec![self.path.clone()],
            looks: String::new(),
        };
        (0..self.elements.len().div_ceil(BLOCK)).map(part).collect()
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        check_version(storage, self.look, &self.path)?;
        for place in self.elements.iter().skip(part.number * BLOCK).take(BLOCK) {
            let element = self.element(*place)?;
            let audio = element.and_then(|json| {
                serde_json::from_str::<Audio>(&json)
                    .map_err(|error| refuse("bad_json", format!("of the recording at byte {}: {error}", place.0)))
            });
            let audio = match audio {
                Ok(audio) => audio,
                Err(refusal) => {
                    take(None, Err(refusal), &|| line_values(&format!("byte {}", place.0)))?;
                    continue;
                }
            };
            for segment in &audio.segments {
                if self.is_wanted(segment.subsets.as_ref().unwrap_or(&audio.subsets)) {
                    let values = || {
                        let (sid, text) = (&segment.sid, &segment.text_tn);
                        serde_json::json!({"aid": audio.aid, "sid": sid, "text_tn": text}).to_string()
                    };
                    take(None, self.row(&audio, segment), &values)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_a_list_are_found_whatever_texts_hold() {
        let of = |json: &str| {
            let found = elements(BufReader::with_capacity(3, json.as_bytes()), "audios").unwrap();
            found
                .into_iter()
                .map(|(start, end)| json[start as usize..end as usize].to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            of(r#"{"x": [{"a": 1}], "audios": [ {"t": "}\"]{"}, {"u": {"v": [{}]}} ], "y": [{}]}"#),
            [r#"{"t": "}\"]{"}"#, r#"{"u": {"v": [{}]}}"#]
        );
        assert_eq!(of(r#"{"n": "audios", "m": [{}], "audios": []}"#), Vec::<String>::new());
        assert_eq!(of(r#"{"audios": [{"a": 1}, {"b": "#), [r#"{"a": 1}"#], "cut short");
        assert_eq!(of("]]}}"), Vec::<String>::new());
    }
}
