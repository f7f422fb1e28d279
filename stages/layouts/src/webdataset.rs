//! WebDataset: tars in which members with one name up to a dot are a sample, a recording and its text in `.txt` or `.json`.

use std::path::{Path, PathBuf};

use flow_audio::decode::read_open_range;
use flow_audio::tar::{self, Member};
use flow_corpus::column_names::renamed;
use flow_corpus::files::label;
use flow_corpus::looks::{Chain, check_version, version_of};
use flow_corpus::manifest_row::{ManifestRow, Refusal, Wanted, refuse};
use flow_corpus::tree;
use flow_corpus::unpacking::{misnamed, unpacking};
use flow_corpus::{Corpus, LaidOut, Manifest, ManifestError, Part, ReadSettings, Take, file_stem};
use flow_kind::{Partition, StageError, Storage, open_input_file};
use flow_shards::webdataset::sample::{LONGEST_TEXT, Sample, group};
use flow_storage::{FileVersion, InputFile};
use serde_json::{Map, Value};

use super::hugging_face::{chosen_files, first_listed, listed};
use super::utterance::{Common, Utterance, text_of};
use super::{nemo_tarred, shar};

/// Keys of a `.json` with what was said, its language, and its length in seconds, in the order in which they count.
const TEXTS: [&str; 5] = ["text", "transcription", "transcript", "sentence", "normalized_text"];
const LANGUAGES: [&str; 2] = ["lang", "language"];
const DURATIONS: [&str; 1] = ["duration"];

/// How members are grouped to samples, as part of the key of what was read: another one where rows become others.
const GROUPED: &str = " dots, transcripts";

struct Tar {
    path: PathBuf,
    look: FileVersion,
    split: String,
}

struct WebDataset {
    tars: Vec<Tar>,
    keys: Keys,
    common: Common,
    told: String,
}

/// Under which keys of a `.json` fields of a row are.
struct Keys {
    text: Vec<String>,
    lang: Vec<String>,
    duration: Vec<String>,
}

impl Keys {
    fn of(settings: &ReadSettings, root: &Path) -> Result<Keys, ManifestError> {
        let mut keys = Keys {
            text: TEXTS.map(str::to_owned).to_vec(),
            lang: LANGUAGES.map(str::to_owned).to_vec(),
            duration: DURATIONS.map(str::to_owned).to_vec(),
        };
        for (theirs, ours) in renamed(&settings.columns).map_err(|why| ManifestError::manifest(root, why))? {
            let field = match ours {
                "text" => &mut keys.text,
                "lang" | "language" => &mut keys.lang,
                "duration" => &mut keys.duration,
                other => {
                    let why = format!("`columns` of WebDataset name text, lang and duration, and not {other}");
                    return Err(ManifestError::manifest(root, why));
                }
            };
            *field = vec![theirs.to_owned()];
        }
        Ok(keys)
    }
}

/// Whether a tar has a recording and its text under one name.
fn has_samples(storage: &Storage, path: &Path) -> bool {
    let has_text = |sample: &Sample<'_>| sample.text.is_some() || sample.json.is_some();
    tree::list_head_of_tar(storage, path).is_some_and(|listing| {
        let samples = group(&listing.last_of_each_name());
        samples
            .iter()
            .any(|sample| sample.recording().is_ok() && has_text(sample))
    })
}

/// Whether the tars of a folder are of another layout. Shar has `.json` beside recordings, too.
pub fn is_of_others(storage: &Storage, root: &Path) -> bool {
    shar::detect(storage, root).is_some() || nemo_tarred::detect(storage, root).is_some()
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    if is_of_others(storage, root) {
        return None;
    }
    let first = match tree::is_folder(storage, root) {
        true => first_listed(storage, root, "tar")?.path,
        false => root
            .extension()
            .is_some_and(|extension| extension == "tar")
            .then(|| root.to_path_buf())?,
    };
    has_samples(storage, &first).then(|| first.strip_prefix(root).unwrap_or(&first).display().to_string())
}

pub fn open(storage: &Storage, root: &Path, settings: &ReadSettings, _: &Path) -> Result<Manifest, ManifestError> {
    let (files, told) = match tree::is_folder(storage, root) {
        true => {
            let (files, told) = chosen_files(root, listed(storage, root, "tar")?, settings)?;
            (files.into_iter().map(|file| (file.path, file.split)).collect(), told)
        }
        false => (vec![(root.to_path_buf(), String::new())], String::new()),
    };
    open_files(storage, root, files, told, settings)
}

/// Tars, each with its split; `told` is for the log.
///
/// # Errors
/// When one is missing or compressed, or `columns` name what is not there.
pub fn open_files(
    storage: &Storage,
    root: &Path,
    files: Vec<(PathBuf, String)>,
    told: String,
    settings: &ReadSettings,
) -> Result<Manifest, ManifestError> {
    let tar = |(path, split): (PathBuf, String)| {
        if let Some(command) = unpacking(&path) {
            let why = misnamed(storage, &path).unwrap_or_else(|| format!("it is compressed; {command}"));
            return Err(ManifestError::manifest(&path, why));
        }
        let look = version_of(storage, &path).map_err(|error| ManifestError::io(&path, error))?;
        Ok(Tar { path, look, split })
    };
    let tars: Vec<Tar> = files.into_iter().map(tar).collect::<Result<_, ManifestError>>()?;
    let corpus = WebDataset {
        told: format!("WebDataset of {} tars{told}", tars.len()),
        tars,
        keys: Keys::of(settings, root)?,
        common: Common::of(settings),
    };
    LaidOut::of(corpus, root, settings)
}

impl WebDataset {
    fn row(&self, file: &InputFile, tar: &Tar, sample: &Sample<'_>) -> Result<ManifestRow, Refusal> {
        let recording = sample.recording().map_err(|(reason, detail)| refuse(reason, detail))?;
        let read = |member: &Member, reason: &'static str| {
            if member.size > LONGEST_TEXT {
                return Err(refuse(reason, format!("{}: {} bytes", member.name, member.size)));
            }
            let bytes = read_open_range(file, &tar.path, member.offset, member.size);
            bytes.map_err(|error| refuse(reason, error.to_string()))
        };
        let mut fields: Map<String, Value> = match sample.json {
            None => Map::new(),
            Some(member) => serde_json::from_slice(&read(member, "bad_json")?)
                .map_err(|error| refuse("bad_json", format!("{}: {error}", member.name)))?,
        };
        let mut field = |keys: &[String]| {
            keys.iter()
                .find_map(|key| fields.remove(key).filter(|value| !value.is_null()))
        };
        let (said, lang, duration) = (
            field(&self.keys.text),
            field(&self.keys.lang),
            field(&self.keys.duration),
        );
        let text = match (sample.text, &said) {
            (Some(member), _) => String::from_utf8(read(member, "bad_text")?)
                .map_err(|_| refuse("bad_text", format!("{}: it is not UTF-8", member.name)))?,
            (None, Some(Value::String(text))) => text.clone(),
            (None, Some(_)) => return Err(refuse("bad_json", "its text is not text")),
            (None, None) => {
                let keys = self.keys.text.join(", ");
                return Err(refuse("missing_text", format!("no .txt, and no {keys} in a .json")));
            }
        };
        fields.retain(|_, value| !(value.is_array() || value.is_object()));
        let tar_path = tar
            .path
            .to_str()
            .ok_or_else(|| refuse("unsafe_name", "the path is not UTF-8"))?;
        Ok(Utterance {
            id: sample.key.to_owned(),
            shard: file_stem(&tar.path),
            text: text_of(&text, "the text is empty")?,
            lang: lang.as_ref().and_then(Value::as_str).map(str::to_owned),
            lang_field: "lang",
            duration: duration.as_ref().and_then(Value::as_f64),
            wanted: Wanted {
                files: Vec::new(),
                member: Some((tar.path.clone(), recording.name.clone())),
            },
            tar_path: tar_path.to_owned(),
            tar_member_name: recording.name.clone(),
            extra: fields,
            ..Utterance::default()
        }
        .row(&self.common))
    }
}

impl Corpus for WebDataset {
    fn told(&self) -> String {
        self.told.clone()
    }

    /// Tars are not read when a run is planned: their looks serve instead.
    fn has_files(&self, _: &Part) -> bool {
        false
    }

    fn parts(&self) -> Vec<Part> {
        let part = |(number, tar): (usize, &Tar)| {
            let mut chain = Chain::default();
            chain.add(&Some((0, tar.look)));
            let split = match tar.split.as_str() {
                "" => String::new(),
                split => format!("{split}/"),
            };
            Part {
                name: Partition::from(format!("{split}{}", label(number, &tar.path))),
                number,
                files: Vec::new(),
                looks: format!("{}{GROUPED}", chain.to_hex()),
            }
        };
        self.tars.iter().enumerate().map(part).collect()
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        let Some(tar) = self.tars.get(part.number) else {
            return Ok(());
        };
        check_version(storage, tar.look, &tar.path)?;
        let failed = |error| ManifestError::io(&tar.path, error);
        let mut file = open_input_file(storage, &tar.path)
            .and_then(InputFile::for_jumps)
            .map_err(failed)?;
        let listing = tree::list_open_tar(&mut file).map_err(failed)?;
        for sample in group(&listing.last_of_each_name()) {
            let values = || serde_json::json!({ "key": sample.key, "members": sample.names() }).to_string();
            take(None, self.row(&file, tar, &sample), &values)?;
        }
        if let tar::End::Cut(why) = &listing.end {
            let path = tar.path.display().to_string();
            let why = &misnamed(storage, &tar.path).unwrap_or_else(|| why.clone());
            take(None, Err(refuse("tar_truncated", format!("{path}: {why}"))), &|| {
                serde_json::json!({ "tar": path }).to_string()
            })?;
        }
        Ok(())
    }
}
