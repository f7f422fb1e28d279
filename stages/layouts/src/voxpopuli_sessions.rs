//! VoxPopuli's annotations: `asr_<lang>.tsv.gz`, a table with bars whose rows are parts of whole sessions, which are in
//! `raw_audios/original/<year>/<session>_original.ogg`.

use std::path::{Path, PathBuf};

use flow_corpus::manifest_row::{ManifestRow, Refusal, Wanted, refuse, refuse_by_rule};
use flow_corpus::names::unsafe_name;
use flow_corpus::table_text::{Layout, records};
use flow_corpus::tree;
use flow_corpus::{LaidOut, Manifest, ManifestError, ReadSettings};
use flow_storage::Storage;
use serde_json::Map;

use super::folder_entries::{MOST_FOLDERS, entries_of};
use super::splits::usual;
use super::table_lines::{TableLines, first_line};
use super::utterance::{Common, Utterance, language_called, text_of};
use super::voxpopuli::{YEAR, text_column};

const BARS: Layout = Layout {
    separator: '|',
    quoted: true,
};
const TEXT: &str = "normed_text";
const OTHER_TEXT: &str = "original_text";
/// Columns that make the row, and are not kept beside it.
const USED: [&str; 6] = ["session_id", "id_", "split", "start_time", "end_time", "vad"];

/// The heading of a table with bars, plain or compressed; none of another file.
fn heading(storage: &Storage, path: &Path) -> Option<Vec<String>> {
    let names = fields(&first_line(storage, path)?)?;
    names.iter().any(|name| name == "session_id").then_some(names)
}

fn fields(line: &str) -> Option<Vec<String>> {
    let record = records(line, BARS).next().filter(|record| record.broken.is_none())?;
    Some(record.fields.iter().map(|field| field.trim().to_owned()).collect())
}

/// Tables of annotations: the one that `root` is; or those in it, in its `annotations/asr`, or in folders of `transcribed_data`.
pub fn tables(storage: &Storage, root: &Path) -> Vec<PathBuf> {
    let is_table = |name: &str| {
        let name = name.strip_suffix(".gz").unwrap_or(name);
        name.starts_with("asr_") && name.ends_with(".tsv")
    };
    if tree::is_file(storage, root) {
        let name = root.file_name().and_then(|name| name.to_str());
        let found = name.is_some_and(is_table) && heading(storage, root).is_some();
        return found.then(|| root.to_path_buf()).into_iter().collect();
    }
    let transcribed = root.join("transcribed_data");
    let languages = entries_of(storage, &transcribed);
    let languages = languages
        .folders
        .iter()
        .take(MOST_FOLDERS)
        .map(|name| transcribed.join(name));
    let folders = [root.to_path_buf(), root.join("annotations/asr")]
        .into_iter()
        .chain(languages);
    let tables = folders.flat_map(|folder| {
        let entries = entries_of(storage, &folder);
        let names = entries.names.iter().filter(|name| is_table(name));
        names.map(|name| folder.join(name)).collect::<Vec<_>>()
    });
    tables.filter(|path| heading(storage, path).is_some()).collect()
}

/// The folder of whole sessions: the first `raw_audios` beside a table or above it.
fn sessions(storage: &Storage, table: &Path) -> Option<PathBuf> {
    let absolute = tree::absolute(table);
    let mut above = std::iter::successors(tree::folder_above(&absolute), |folder| tree::folder_above(folder)).take(4);
    above.find_map(|folder| Some(folder.join("raw_audios")).filter(|found| tree::is_folder(storage, found)))
}

struct Table {
    heading: Vec<String>,
    lang: String,
    sessions: PathBuf,
}

impl Table {
    fn open(storage: &Storage, path: &Path) -> Result<Table, ManifestError> {
        let heading =
            heading(storage, path).ok_or_else(|| ManifestError::manifest(path, "its heading has no session_id"))?;
        let sessions = sessions(storage, path).ok_or_else(|| {
            ManifestError::manifest(
                path,
                "its sessions do not exist: a folder raw_audios beside it, or up to three folders above",
            )
        })?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let lang = name.trim_start_matches("asr_").split('.').next().unwrap_or_default();
        Ok(Table {
            heading,
            lang: lang.to_owned(),
            sessions,
        })
    }
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let files = tables(storage, root);
    let opened = files.iter().map(|path| Table::open(storage, path));
    let opened = opened.collect::<Result<Vec<Table>, ManifestError>>()?;
    let text = text_column(root, settings, [TEXT, OTHER_TEXT])?;
    if let Some(place) = opened.iter().position(|table| !table.heading.contains(&text)) {
        return Err(ManifestError::manifest(
            &files[place],
            format!("it has no column {text:?}, which `columns` names"),
        ));
    }
    let told = format!("VoxPopuli's annotations; rows are parts of whole sessions, and texts are of the column {text}");
    let split = match settings.split.as_str() {
        "" => "train".to_owned(),
        named => usual(named).to_owned(),
    };
    let common = Common::of(settings);
    let row = move |file: usize, line: &str| opened[file].row(line, &text, &split, &common);
    LaidOut::of(
        TableLines::open(storage, &files, true, told, scratch, row)?,
        root,
        settings,
    )
}

impl Table {
    fn row(&self, line: &str, text: &str, split: &str, common: &Common) -> Result<ManifestRow, Refusal> {
        let fields = fields(line).ok_or_else(|| refuse("bad_line", "a quote is not closed"))?;
        if fields.len() != self.heading.len() {
            let why = format!("{} fields under a heading of {}", fields.len(), self.heading.len());
            return Err(refuse("bad_line", why));
        }
        let get = |name: &str| {
            let place = self.heading.iter().position(|other| other == name);
            place.map_or("", |place| fields[place].as_str())
        };
        let (session, number) = (get("session_id"), get("id_"));
        let id = format!("{session}-{number}");
        if session.is_empty() || number.is_empty() || unsafe_name(&id) {
            return Err(refuse("unsafe_name", format!("{id:?}")));
        }
        if split != "all" && usual(get("split")) != split {
            return Err(refuse_by_rule("other_split", get("split").to_owned()));
        }
        let (start, end) = times(get("vad"), get("start_time"), get("end_time"))?;
        let year: String = session.chars().take(YEAR).collect();
        let file = |folder: &str, ending: &str| {
            let folder = self.sessions.join(folder).join(&year);
            folder.join(format!("{session}_{ending}.ogg"))
        };
        let mut extra = Map::new();
        for name in self
            .heading
            .iter()
            .filter(|name| *name != text && !USED.contains(&name.as_str()))
        {
            let key = if name == "speaker_id" { "speaker" } else { name };
            extra.insert(key.to_owned(), get(name).into());
        }
        Ok(Utterance {
            id,
            shard: format!("{}_{}", self.lang, get("split")),
            text: text_of(get(text), text)?,
            folder_lang: language_called(&self.lang).map(str::to_owned),
            start,
            // Their difference has no more digits than they have.
            duration: Some(((end - start) * 1e8).round() / 1e8),
            wanted: Wanted {
                files: vec![
                    file("original", "original"),
                    file(&self.lang, "original"),
                    file(&self.lang, &self.lang),
                ],
                member: None,
            },
            extra,
            ..Utterance::default()
        }
        .row(common))
    }
}

/// Where a row begins and ends in its session, in seconds: from the first to the last piece of speech of `vad`, a list of pairs;
/// without it, by the columns of times.
fn times(vad: &str, start: &str, end: &str) -> Result<(f64, f64), Refusal> {
    let invalid = |why: String| refuse("duration_invalid", why);
    let (start, end) = if vad.is_empty() {
        let number = |text: &str| {
            text.parse::<f64>()
                .map_err(|_| invalid(format!("{text:?} is not a time")))
        };
        (number(start)?, number(end)?)
    } else {
        // Python writes pairs as tuples or as lists.
        let list = vad.replace('(', "[").replace(')', "]");
        let pieces: Vec<[f64; 2]> =
            serde_json::from_str(&list).map_err(|_| invalid(format!("vad is not a list of pairs: {vad:.80}")))?;
        let starts = pieces.iter().map(|[start, _]| *start);
        let ends = pieces.iter().map(|[_, end]| *end);
        (
            starts.fold(f64::INFINITY, f64::min),
            ends.fold(f64::NEG_INFINITY, f64::max),
        )
    };
    if start.is_finite() && end.is_finite() && start >= 0.0 && start < end {
        Ok((start, end))
    } else {
        Err(invalid(format!("it begins at {start} s and ends at {end} s")))
    }
}
