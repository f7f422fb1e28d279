//! Lhotse: recordings with supervisions, and cuts.

use std::path::{Path, PathBuf};

use flow_audio::decode::SAMPLE_RATE;
use flow_audio::part::TOLERANCE_SECONDS;
use flow_corpus::manifest_row::{ManifestRow, Refusal, Wanted, line_values, refuse};
use flow_corpus::tree;
use flow_corpus::written_set::is_prefix_of_set;
use flow_corpus::{Corpus, LaidOut, Manifest, ManifestError, Part, ReadSettings, Take, file_stem, take_line};
use flow_kind::{Partition, StageError, Storage};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::folder_entries::{base_of, entries_of};
use super::line_file::{Block, IdIndex, Indexing, LineFile};
use super::splits::{chosen, refuse_other};
use super::table_lines::{TableLines, first_value};
use super::utterance::{Common, Utterance, text_of};

/// Recordings by which it is found out what paths are relative to.
const SAMPLED: usize = 64;

const ENDINGS: [&str; 4] = [".jsonl.gz", ".jsonl", ".json.gz", ".json"];

#[derive(Debug, Deserialize)]
pub(super) struct Recording {
    id: String,
    sources: Vec<AudioSource>,
    duration: f64,
    #[serde(default)]
    channel_ids: Option<Vec<i64>>,
    #[serde(default)]
    transforms: Option<Vec<Value>>,
}

#[derive(Debug, Deserialize)]
struct AudioSource {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    channels: Vec<i64>,
    #[serde(default)]
    source: Value,
}

#[derive(Debug, Deserialize)]
pub(super) struct Supervision {
    id: String,
    recording_id: String,
    start: f64,
    duration: f64,
    #[serde(default)]
    channel: Option<Value>,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    language: Option<String>,
    #[serde(default)]
    speaker: Option<String>,
    #[serde(default)]
    gender: Option<String>,
    #[serde(default)]
    custom: Option<Map<String, Value>>,
}

#[derive(Debug, Deserialize)]
struct Cut {
    id: String,
    #[serde(rename = "type", default)]
    kind: String,
    #[serde(default)]
    start: f64,
    #[serde(default)]
    duration: f64,
    #[serde(default)]
    channel: Option<Value>,
    #[serde(default)]
    supervisions: Option<Vec<Supervision>>,
    #[serde(default)]
    recording: Option<Recording>,
    #[serde(default)]
    custom: Option<Map<String, Value>>,
    #[serde(default)]
    tracks: Option<Vec<Track>>,
    #[serde(default)]
    transforms: Option<Vec<Value>>,
}

#[derive(Debug, Deserialize)]
struct Track {
    cut: Cut,
    #[serde(rename = "type", default)]
    kind: String,
}

/// What a line is, by the keys that Lhotse tells it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineKind {
    Recording,
    Supervision,
    Cut,
}

fn kind_of(item: &Value) -> Option<LineKind> {
    let fields = item.as_object()?;
    let has = |key: &str| fields.contains_key(key);
    if has("width") || has("shape") || has("array") || has("num_features") || !has("id") {
        return None;
    }
    match fields.get("type").and_then(Value::as_str) {
        Some("MonoCut" | "MultiCut" | "MixedCut" | "Cut" | "PaddingCut") => Some(LineKind::Cut),
        Some(_) => None,
        None if has("sources") && has("sampling_rate") => Some(LineKind::Recording),
        None if has("recording_id") && has("start") && has("duration") => Some(LineKind::Supervision),
        None => None,
    }
}

/// What the first line of a file is, or the first item of a list.
fn kind_of_file(storage: &Storage, path: &Path) -> Option<LineKind> {
    kind_of(&first_value(storage, path)?)
}

/// A name without the endings of manifests; none of another file.
fn bare(name: &str) -> Option<&str> {
    ENDINGS.iter().find_map(|ending| name.strip_suffix(ending))
}

/// What a file is called where a word is left out: `x_recordings_train` and `x_supervisions_train` are both `x__train`.
fn without<'n>(name: &'n str, word: &str) -> Option<(&'n str, &'n str)> {
    bare(name)?.split_once(word)
}

/// Files of recordings and of supervisions that belong together, with what their names have behind the word.
fn pairs(storage: &Storage, folder: &Path) -> Vec<(PathBuf, PathBuf, String)> {
    let entries = entries_of(storage, folder);
    let names = &entries.names;
    let supervisions = names
        .iter()
        .filter_map(|name| Some((name, without(name, "supervisions")?)));
    let pair = |(name, parts): (&String, (&str, &str))| {
        let recordings = names.iter().find(|other| without(other, "recordings") == Some(parts))?;
        let split = parts.1.trim_matches(['_', '-', '.']).to_string();
        Some((folder.join(recordings), folder.join(name), split))
    };
    supervisions.filter_map(pair).collect()
}

/// The files beside a named one of recordings or of supervisions.
fn pair_of(storage: &Storage, root: &Path) -> Option<(PathBuf, PathBuf, String)> {
    let folder = tree::folder_above(root)?;
    let folder = if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    };
    let name = root.file_name()?;
    let is_it = |path: &Path| path.file_name() == Some(name);
    pairs(storage, folder)
        .into_iter()
        .find(|(recordings, supervisions, _)| is_it(recordings) || is_it(supervisions))
}

pub fn detect_recordings(storage: &Storage, root: &Path) -> Option<String> {
    if tree::is_folder(storage, root) {
        let (recordings, _, _) = pairs(storage, root).into_iter().next()?;
        if has_cuts_of_all(storage, root) {
            return None;
        }
        return (kind_of_file(storage, &recordings)? == LineKind::Recording).then(|| {
            recordings
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned()
        });
    }
    match kind_of_file(storage, root)? {
        LineKind::Recording => Some("its first line is a Recording".into()),
        LineKind::Supervision => Some("its first line is a SupervisionSegment".into()),
        LineKind::Cut => None,
    }
}

/// Files of cuts in a folder, with what their names have behind the word.
fn cuts_in(storage: &Storage, folder: &Path) -> Vec<(PathBuf, String)> {
    let entries = entries_of(storage, folder);
    let names = &entries.names;
    let found = names
        .iter()
        .filter(|name| !super::shar::is_shard(name))
        .filter_map(|name| {
            let (_, split) = without(name, "cuts")?;
            Some((folder.join(name), split.trim_matches(['_', '-', '.']).to_string()))
        });
    found.collect()
}

/// Whether `manifest.write` wrote a folder of recordings, supervisions and cuts: these have the same rows.
fn has_cuts_of_all(storage: &Storage, folder: &Path) -> bool {
    let is_set = is_prefix_of_set(folder) || entries_of(storage, folder).names.contains("flow.json");
    is_set
        && cuts_in(storage, folder)
            .first()
            .is_some_and(|(first, _)| kind_of_file(storage, first) == Some(LineKind::Cut))
}

pub fn detect_cuts(storage: &Storage, root: &Path) -> Option<String> {
    if tree::is_folder(storage, root) {
        let (first, _) = cuts_in(storage, root).into_iter().next()?;
        return (kind_of_file(storage, &first)? == LineKind::Cut)
            .then(|| first.file_name().unwrap_or_default().to_string_lossy().into_owned());
    }
    (kind_of_file(storage, root)? == LineKind::Cut).then(|| "its first line is a cut".into())
}

/// Where the recordings are of a file's lines.
#[derive(Clone, Debug)]
pub(super) struct Paths {
    folder: PathBuf,
    base: Option<PathBuf>,
}

impl Paths {
    /// `source_of` gives the path of a line, if it names one.
    pub fn of(
        storage: &Storage,
        file: &LineFile,
        blocks: &[Block],
        source_of: impl Fn(&str) -> Option<String>,
    ) -> Paths {
        let mut sample = Vec::new();
        for block in blocks {
            let add = &mut |line: super::line_file::Line<'_>| {
                sample.extend(line.text.ok().and_then(&source_of));
                match sample.len() < SAMPLED {
                    true => Ok(()),
                    false => Err(StageError::failed("enough")),
                }
            };
            if file.lines(*block, add).is_err() {
                break;
            }
        }
        let folder = file.path.parent().unwrap_or(Path::new("")).to_path_buf();
        Paths {
            base: base_of(storage, &folder, sample.iter().map(String::as_str)),
            folder,
        }
    }

    pub fn told(&self) -> String {
        match &self.base {
            Some(base) if base.as_os_str().is_empty() => "; paths are relative to the current folder".into(),
            Some(base) => format!("; paths are relative to {}", base.display()),
            None => String::new(),
        }
    }

    pub fn join(&self, path: &str) -> PathBuf {
        tree::join(self.base.as_ref().unwrap_or(&self.folder), path)
    }
}

/// Where a recording is; only one that is as it is stored, in one file with one channel.
fn file_of(recording: &Recording, paths: &Paths) -> Result<Wanted, Refusal> {
    is_as_stored(recording)?;
    let [source] = recording.sources.as_slice() else {
        let why = format!("its channels are in {} files", recording.sources.len());
        return Err(refuse("several_channels", why));
    };
    match (source.kind.as_str(), &source.source) {
        ("file", Value::String(path)) if !path.is_empty() => Ok(Wanted::file(paths.join(path))),
        ("command", Value::String(command)) => Err(refuse(
            "shell_command",
            format!("the recording is a shell command, which is not run: {command}"),
        )),
        ("shar", _) => Err(refuse(
            "missing_audio",
            "the recording is in the tar of a Shar folder; name that folder",
        )),
        (kind, _) => {
            let why = format!("a source of the type {kind:?}; recordings of the type \"file\" are read");
            Err(refuse("unsupported_source", why))
        }
    }
}

/// Whether a transform leaves all that is heard: it resamples to the rate of training or more.
fn keeps_all(transform: &Value) -> bool {
    let rate = &transform["kwargs"]["target_sampling_rate"];
    transform["name"] == "Resample" && rate.as_f64().is_some_and(|rate| rate >= f64::from(SAMPLE_RATE))
}

/// Refuses changes of the signal, and several channels.
fn is_as_stored(recording: &Recording) -> Result<(), Refusal> {
    let transforms = recording.transforms.iter().flatten();
    let changes: Vec<&Value> = transforms.filter(|transform| !keeps_all(transform)).collect();
    if !changes.is_empty() {
        let name = |transform: &Value| match transform.get("name").and_then(Value::as_str) {
            Some(name) => name.to_string(),
            None => "one without a name".to_string(),
        };
        let names: Vec<String> = changes.into_iter().map(name).collect();
        let why = format!(
            "the recording is changed by {}; write the changed recordings as files",
            names.join(", ")
        );
        return Err(refuse("transformed_audio", why));
    }
    let channels = recording.channel_ids.clone();
    let channels = channels.unwrap_or_else(|| {
        recording
            .sources
            .iter()
            .flat_map(|source| source.channels.clone())
            .collect()
    });
    if channels.len() > 1 {
        let why = format!(
            "the recording has {} channels; write each as a recording of its own",
            channels.len()
        );
        return Err(refuse("several_channels", why));
    }
    Ok(())
}

/// A channel is a number, or of a MultiCut a list of them.
fn one_channel(channel: Option<&Value>) -> Result<(), Refusal> {
    match channel.and_then(Value::as_array) {
        Some(channels) if channels.len() > 1 => Err(refuse(
            "several_channels",
            format!("it has {} channels", channels.len()),
        )),
        _ => Ok(()),
    }
}

/// Refuses a part that is not within the recording.
fn within(start: f64, duration: f64, recording: &Recording) -> Result<(), Refusal> {
    if !(start.is_finite() && start >= 0.0) {
        return Err(refuse("offset_invalid", format!("{start} s")));
    }
    if !(duration.is_finite() && duration > 0.0) {
        return Err(refuse("duration_invalid", format!("{duration} s")));
    }
    let end = start + duration;
    if !recording.duration.is_finite() || end - recording.duration > TOLERANCE_SECONDS {
        let why = format!("it ends at {end} s, the recording at {} s", recording.duration);
        return Err(refuse("duration_past_end", why));
    }
    Ok(())
}

fn bad(error: &serde_json::Error) -> Refusal {
    refuse("bad_json", error.to_string())
}

impl Supervision {
    fn extra(&mut self) -> Map<String, Value> {
        let mut extra = self.custom.take().unwrap_or_default();
        for (key, value) in [("speaker", self.speaker.take()), ("gender", self.gender.take())] {
            extra.extend(value.map(|value| (key.to_string(), Value::from(value))));
        }
        extra
    }
}

struct Recordings {
    recordings: LineFile,
    ids: IdIndex,
    supervisions: LineFile,
    blocks: Vec<Block>,
    paths: Paths,
    common: Common,
    label: String,
}

struct AllRecordings {
    pairs: Vec<Recordings>,
    told: Option<String>,
}

pub fn open_recordings(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let lacking = "recordings of Lhotse need supervisions beside them, by the same name: x_recordings_train.jsonl.gz and \
                   x_supervisions_train.jsonl.gz";
    let (pairs, told) = match tree::is_folder(storage, root) {
        true => {
            let all = pairs(storage, root);
            if all.is_empty() {
                return Err(ManifestError::manifest(root, lacking));
            }
            let splits: Vec<&str> = all.iter().map(|(_, _, split)| split.as_str()).collect();
            let (places, told) = chosen(&splits, &settings.split, root)?;
            (places.into_iter().map(|place| all[place].clone()).collect(), told)
        }
        false => {
            let pair = pair_of(storage, root).ok_or_else(|| ManifestError::manifest(root, lacking))?;
            refuse_other(&pair.2, &settings.split, root)?;
            (vec![pair], None)
        }
    };
    let open = |(recordings, supervisions, _): &(PathBuf, PathBuf, String)| {
        let recordings = LineFile::open_list(storage, recordings, scratch)?;
        let mut ids = Indexing::default();
        let in_recordings = recordings.blocks(|offset, line| {
            if let Ok(recording) = serde_json::from_str::<Recording>(line) {
                ids.add(&recording.id, offset);
            }
        })?;
        let path_of = |line: &str| path_of_recording(serde_json::from_str(line).ok()?);
        let paths = Paths::of(storage, &recordings, &in_recordings, path_of);
        let supervisions = LineFile::open_list(storage, supervisions, scratch)?;
        Ok(Recordings {
            ids: ids.finish(),
            recordings,
            blocks: supervisions.blocks(|_, _| {})?,
            label: file_stem(&supervisions.path),
            supervisions,
            paths,
            common: Common::of(settings),
        })
    };
    let pairs = pairs.iter().map(open).collect::<Result<Vec<_>, ManifestError>>()?;
    LaidOut::of(AllRecordings { pairs, told }, root, settings)
}

fn path_of_recording(recording: Recording) -> Option<String> {
    let source = recording.sources.into_iter().next()?;
    match source.source {
        Value::String(path) if source.kind == "file" => Some(path),
        _ => None,
    }
}

impl Recordings {
    fn row(&self, line: &str) -> Result<Result<ManifestRow, Refusal>, ManifestError> {
        let mut supervision: Supervision = match serde_json::from_str(line) {
            Ok(supervision) => supervision,
            Err(error) => return Ok(Err(bad(&error))),
        };
        let id = supervision.recording_id.clone();
        let of = |line: &str| {
            let recording: Recording = serde_json::from_str(line).ok()?;
            (recording.id == id).then_some(recording)
        };
        let Some(recording) = self.ids.find(&self.recordings, &id, of)? else {
            return Ok(Err(refuse(
                "missing_recording",
                format!("there is no recording {id:?}"),
            )));
        };
        let mut row = || -> Result<ManifestRow, Refusal> {
            one_channel(supervision.channel.as_ref())?;
            let wanted = file_of(&recording, &self.paths)?;
            within(supervision.start, supervision.duration, &recording)?;
            let text = text_of(
                supervision.text.as_deref().unwrap_or_default(),
                "the supervision has no text",
            )?;
            Ok(Utterance {
                extra: supervision.extra(),
                id: std::mem::take(&mut supervision.id),
                shard: self.label.clone(),
                text,
                lang: supervision.language.take(),
                lang_field: "language",
                start: supervision.start,
                duration: Some(supervision.duration),
                wanted,
                ..Utterance::default()
            }
            .row(&self.common))
        };
        Ok(row())
    }
}

impl AllRecordings {
    fn places(&self) -> impl Iterator<Item = (&Recordings, usize)> {
        let pairs = self.pairs.iter();
        pairs.flat_map(|pair| (0..pair.blocks.len()).map(move |block| (pair, block)))
    }
}

impl Corpus for AllRecordings {
    fn told(&self) -> String {
        let paths = self.pairs.first().map(|pair| pair.paths.told()).unwrap_or_default();
        let split = self.told.as_ref().map_or_else(String::new, |told| format!("; {told}"));
        format!("recordings and supervisions of Lhotse{paths}{split}")
    }

    fn parts(&self) -> Vec<Part> {
        let part = |(number, (pair, block)): (usize, (&Recordings, usize))| Part {
            name: Partition::from(format!("{}/{block:06}", pair.label)),
            number,
            files: vec![pair.supervisions.path.clone(), pair.recordings.path.clone()],
            looks: String::new(),
        };
        self.places().enumerate().map(part).collect()
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        let Some((pair, block)) = self.places().nth(part.number) else {
            return Ok(());
        };
        pair.supervisions.still(storage)?;
        pair.recordings.still(storage)?;
        pair.supervisions
            .lines(pair.blocks[block], &mut |line| match line.text {
                Ok(text) => take(Some(line.number), pair.row(text)?, &|| line_values(text)),
                bad => take_line(take, line.number, bad, |_| Err(refuse("bad_line", ""))),
            })
    }
}

pub fn open_cuts(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let (files, told) = match tree::is_folder(storage, root) {
        true => {
            let all = cuts_in(storage, root);
            let splits: Vec<&str> = all.iter().map(|(_, split)| split.as_str()).collect();
            let (places, told) = chosen(&splits, &settings.split, root)?;
            (places.into_iter().map(|place| all[place].0.clone()).collect(), told)
        }
        false => {
            let name = root.file_name().unwrap_or_default().to_string_lossy();
            let own = without(&name, "cuts").map_or("", |(_, split)| split.trim_matches(['_', '-', '.']));
            refuse_other(own, &settings.split, root)?;
            (vec![root.to_path_buf()], None)
        }
    };
    let (mut opened, mut all_paths) = (Vec::new(), Vec::new());
    for path in &files {
        let file = LineFile::open_list(storage, path, scratch)?;
        let blocks = file.blocks(|_, _| {})?;
        let path_of = |line: &str| path_of_recording(recording_of(serde_json::from_str(line).ok()?)?);
        all_paths.push(Paths::of(storage, &file, &blocks, path_of));
        opened.push((file, blocks));
    }
    let split = told.map_or_else(String::new, |told| format!("; {told}"));
    let beside = match tree::is_folder(storage, root)
        && has_cuts_of_all(storage, root)
        && !pairs(storage, root).is_empty()
    {
        true => "; the recordings and supervisions beside them are not read (`layout: lhotse_recordings` reads those)",
        false => "",
    };
    let told = format!(
        "cuts of Lhotse{}{split}{beside}",
        all_paths.first().map(Paths::told).unwrap_or_default()
    );
    let common = Common::of(settings);
    let stems: Vec<String> = files.iter().map(|file| file_stem(file)).collect();
    let row = move |file: usize, line: &str| {
        let cut = CutLine::of(line)?;
        let wanted = cut.recording().and_then(|recording| {
            let wanted = file_of(recording, &all_paths[file])?;
            within(cut.0.start, cut.0.duration, recording)?;
            Ok(wanted)
        })?;
        cut.row(stems[file].clone(), wanted, None, &common)
    };
    LaidOut::of(TableLines::of(opened, false, told, row), root, settings)
}

fn recording_of(cut: Cut) -> Option<Recording> {
    let inner = cut
        .tracks
        .into_iter()
        .flatten()
        .find_map(|track| recording_of(track.cut));
    cut.recording.or(inner)
}

/// A cut of one recording, whose texts are within it.
pub(super) struct CutLine(Cut);

impl CutLine {
    /// The cut of a line: one of one channel, or such a one that is padded.
    ///
    /// # Errors
    /// Of others, by name.
    pub fn of(line: &str) -> Result<CutLine, Refusal> {
        let cut: Cut = serde_json::from_str(line).map_err(|error| bad(&error))?;
        let cut = match cut.kind.as_str() {
            "MonoCut" | "Cut" => cut,
            "MultiCut" => {
                one_channel(cut.channel.as_ref())?;
                cut
            }
            "PaddingCut" => return Err(refuse("missing_audio", "a PaddingCut is silence")),
            "MixedCut" => unpadded(cut)?,
            "" => return Err(refuse("missing_field", "type: the line is not a cut")),
            other => return Err(refuse("unsupported_cut", format!("a cut of the type {other:?}"))),
        };
        one_channel(cut.channel.as_ref())?;
        Ok(CutLine(cut))
    }

    pub fn id(&self) -> &str {
        &self.0.id
    }

    pub fn recording(&self) -> Result<&Recording, Refusal> {
        self.0
            .recording
            .as_ref()
            .ok_or_else(|| refuse("missing_recording", "the cut has no recording, only features"))
    }

    /// The row. `tar` is the tar of the recording and its member.
    pub fn row(
        self,
        shard: String,
        wanted: Wanted,
        tar: Option<(String, String)>,
        common: &Common,
    ) -> Result<ManifestRow, Refusal> {
        let mut cut = self.0;
        let mut supervisions = cut.supervisions.take().unwrap_or_default();
        supervisions.sort_by(|a, b| a.start.total_cmp(&b.start));
        let texts = supervisions
            .iter()
            .filter_map(|supervision| supervision.text.as_deref())
            .map(str::trim);
        let texts: Vec<&str> = texts.filter(|text| !text.is_empty()).collect();
        let text = text_of(&texts.join(" "), "the cut has no supervision with a text")?;
        for supervision in &supervisions {
            let end = supervision.start + supervision.duration;
            let is_within = supervision.start >= -TOLERANCE_SECONDS && end <= cut.duration + TOLERANCE_SECONDS;
            if !is_within {
                let why = format!(
                    "the cut is {} s long, and its supervision {:?} is from {} s to {end} s of it: the text is of more than the cut",
                    cut.duration, supervision.id, supervision.start
                );
                return Err(refuse("text_beyond_cut", why));
            }
        }
        let custom_lang = cut
            .custom
            .as_ref()
            .and_then(|custom| custom.get("lang"))
            .and_then(Value::as_str);
        let mut languages: Vec<&str> = supervisions
            .iter()
            .filter_map(|supervision| supervision.language.as_deref())
            .collect();
        languages.extend(custom_lang.filter(|_| languages.is_empty()));
        languages.sort_unstable();
        languages.dedup();
        let lang = match languages.as_slice() {
            [] => None,
            [one] => Some(one.to_string()),
            several => {
                let why = format!("its supervisions are of the languages {}", several.join(", "));
                return Err(refuse("several_languages", why));
            }
        };
        let mut extra = cut.custom.take().unwrap_or_default();
        if let [only] = supervisions.as_mut_slice() {
            extra.extend(only.extra());
        } else {
            let mut speakers: Vec<&str> = supervisions.iter().filter_map(|one| one.speaker.as_deref()).collect();
            speakers.dedup();
            if !speakers.is_empty() {
                extra.insert("speaker".into(), speakers.join(" ").into());
            }
        }
        let (tar_path, tar_member_name) = tar.unwrap_or_default();
        Ok(Utterance {
            id: cut.id,
            shard,
            text,
            lang,
            lang_field: "language",
            start: cut.start,
            duration: Some(cut.duration),
            wanted,
            tar_path,
            tar_member_name,
            extra,
            ..Utterance::default()
        }
        .row(common))
    }
}

/// The one cut of a mixed one whose other tracks are padding; it keeps the id of the whole.
fn unpadded(mixed: Cut) -> Result<Cut, Refusal> {
    if mixed
        .transforms
        .as_ref()
        .is_some_and(|transforms| !transforms.is_empty())
    {
        return Err(refuse("transformed_audio", "a MixedCut with transforms"));
    }
    let tracks = mixed.tracks.unwrap_or_default();
    let count = tracks.len();
    let is_padding = |track: &Track| track.kind == "PaddingCut" || track.cut.kind == "PaddingCut";
    let mut others: Vec<Track> = tracks.into_iter().filter(|track| !is_padding(track)).collect();
    match (others.pop(), others.is_empty()) {
        (Some(track), true) if track.kind != "MixedCut" && track.cut.tracks.is_none() => Ok(Cut {
            id: mixed.id,
            ..track.cut
        }),
        (None, _) => Err(refuse("missing_audio", "a MixedCut of nothing but padding")),
        _ => Err(refuse(
            "mixed_audio",
            format!("a MixedCut of {count} tracks; write it as a recording of its own"),
        )),
    }
}
