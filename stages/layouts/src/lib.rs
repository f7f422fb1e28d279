//! Layouts of corpora as they are on disk: a file for each, and the list of them. [`mod@read`] is the kind `manifest.read`, which
//! reads them and other manifests.

mod common_voice;
mod fleurs;
mod gigaspeech;
mod gigaspeech2;
mod hugging_face;
mod kaldi;
mod lhotse;
mod line_file;
mod ljspeech;
mod manifest_line;
mod mls;
mod nemo_tarred;
mod opening;
mod peoples_speech;
pub mod read;
pub mod sample;
mod shar;
mod splits;
mod stream_offsets;
mod subtitles;
mod table_lines;
mod utterance;
mod voxpopuli;
mod voxpopuli_sessions;
mod webdataset;
mod yodas;
mod yodas2;

pub use manifest_line::line_of;

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use flow_audio::listing::is_of_program;
use flow_corpus::{Corpus, LaidOut, Layout, Manifest, ManifestError, Part, ReadSettings, Take};

/// A layout: its name, how it is recognised, and how it is opened.
struct Known {
    layout: Layout,
    name: &'static str,
    /// What of a folder or file tells it; none where it is another layout.
    detect: fn(&Path) -> Option<String>,
    open: Open,
}

type Open = fn(&Path, &ReadSettings, &Path) -> Result<Manifest, ManifestError>;

const fn known(layout: Layout, name: &'static str, detect: fn(&Path) -> Option<String>, open: Open) -> Known {
    Known {
        layout,
        name,
        detect,
        open,
    }
}

/// All layouts that are recognised. The last resort, recordings with their texts, is none of them.
const KNOWN: [Known; 21] = [
    known(
        Layout::LhotseRecordings,
        "lhotse_recordings",
        lhotse::detect_recordings,
        lhotse::open_recordings,
    ),
    known(
        Layout::LhotseCuts,
        "lhotse_cuts",
        lhotse::detect_cuts,
        lhotse::open_cuts,
    ),
    known(Layout::LhotseShar, "lhotse_shar", shar::detect, shar::open),
    known(Layout::Kaldi, "kaldi", kaldi::detect, kaldi::open),
    known(
        Layout::HuggingFaceParquet,
        "hugging_face_parquet",
        hugging_face::detect_parquet,
        hugging_face::open_parquet,
    ),
    known(
        Layout::HuggingFaceArrow,
        "hugging_face_arrow",
        hugging_face::detect_arrow,
        hugging_face::open_arrow,
    ),
    known(
        Layout::AudioFolder,
        "audio_folder",
        common_voice::detect_audio_folder,
        common_voice::open_folder,
    ),
    known(
        Layout::CommonVoice,
        "common_voice",
        common_voice::detect,
        common_voice::open,
    ),
    known(
        Layout::CommonVoiceSpontaneous,
        "common_voice_spontaneous",
        common_voice::detect_spontaneous,
        common_voice::open_spontaneous,
    ),
    known(Layout::Mls, "mls", mls::detect, mls::open),
    known(Layout::Voxpopuli, "voxpopuli", voxpopuli::detect, voxpopuli::open),
    known(Layout::Fleurs, "fleurs", fleurs::detect, fleurs::open),
    known(Layout::Gigaspeech, "gigaspeech", gigaspeech::detect, gigaspeech::open),
    known(
        Layout::Gigaspeech2,
        "gigaspeech_2",
        gigaspeech2::detect,
        gigaspeech2::open,
    ),
    known(
        Layout::PeoplesSpeech,
        "peoples_speech",
        peoples_speech::detect,
        peoples_speech::open,
    ),
    known(Layout::Ljspeech, "ljspeech", ljspeech::detect, ljspeech::open),
    known(
        Layout::NemoTarred,
        "nemo_tarred",
        nemo_tarred::detect,
        nemo_tarred::open,
    ),
    known(Layout::WebDataset, "webdataset", webdataset::detect, webdataset::open),
    known(Layout::Yodas, "yodas", yodas::detect, yodas::open),
    known(Layout::Yodas2, "yodas_2", yodas2::detect, yodas2::open),
    known(Layout::Subtitles, "subtitles", subtitles::detect, subtitles::open),
];

/// Layouts without columns that `columns` could name.
const WITHOUT_COLUMNS: [Layout; 14] = [
    Layout::PeoplesSpeech,
    Layout::Yodas,
    Layout::Yodas2,
    Layout::Gigaspeech2,
    Layout::LhotseRecordings,
    Layout::LhotseCuts,
    Layout::LhotseShar,
    Layout::Kaldi,
    Layout::CommonVoiceSpontaneous,
    Layout::Mls,
    Layout::Gigaspeech,
    Layout::Ljspeech,
    Layout::Subtitles,
    Layout::Transcripts,
];
/// Layouts without splits that `split` could name.
const WITHOUT_SPLITS: [Layout; 8] = [
    Layout::Yodas,
    Layout::Yodas2,
    Layout::LhotseShar,
    Layout::Kaldi,
    Layout::Ljspeech,
    Layout::NemoTarred,
    Layout::Subtitles,
    Layout::Transcripts,
];

impl Known {
    fn open(&self, root: &Path, settings: &ReadSettings, scratch: &Path) -> Result<Manifest, ManifestError> {
        refuse_settings(self.layout, self.name, root, settings)?;
        (self.open)(root, settings, scratch)
    }
}

/// Refuses settings that a layout does not have.
fn refuse_settings(layout: Layout, name: &str, root: &Path, settings: &ReadSettings) -> Result<(), ManifestError> {
    if !settings.columns.is_empty() && WITHOUT_COLUMNS.contains(&layout) {
        let why = format!("`columns` belongs to manifests with columns, and this is {name}");
        return Err(wrong(root, why));
    }
    if !settings.split.is_empty() && WITHOUT_SPLITS.contains(&layout) {
        let why = format!("`split` belongs to layouts with splits, and this is {name}");
        return Err(wrong(root, why));
    }
    Ok(())
}

/// Opens what is at `root`, where a layout of the list fits; none where none does.
///
/// # Errors
/// Where several fit, or the one cannot be opened.
fn open(root: &Path, settings: &ReadSettings, scratch: &Path) -> Result<Option<Manifest>, ManifestError> {
    if settings.layout == Layout::Transcripts {
        refuse_settings(Layout::Transcripts, "transcripts", root, settings)?;
        return flow_corpus::folder::AudioFolder::open(root, settings).map(|folder| Some(Manifest::Folder(folder)));
    }
    if settings.layout != Layout::Auto {
        let known = KNOWN.iter().find(|known| known.layout == settings.layout);
        return known.map(|known| known.open(root, settings, scratch)).transpose();
    }
    KEPT.set(Some(HashMap::new()));
    let found: Vec<(&Known, String)> = KNOWN
        .iter()
        .filter_map(|known| Some((known, (known.detect)(root)?)))
        .collect();
    KEPT.set(None);
    match found.as_slice() {
        [] => Ok(None),
        [(known, _)] => known.open(root, settings, scratch).map(Some),
        several => {
            let all: Vec<String> = several
                .iter()
                .map(|(known, evidence)| format!("{} ({evidence})", known.name))
                .collect();
            Err(ManifestError::manifest(
                root,
                format!(
                    "it may be of several layouts: {}; the setting `layout` says which one is read",
                    all.join(", ")
                ),
            ))
        }
    }
}

fn wrong(path: &Path, why: impl Into<String>) -> ManifestError {
    ManifestError::manifest(path, why)
}

/// Names in a folder, without those that begin with a dot and the folders of programs.
#[derive(Debug, Default)]
struct Entries {
    names: BTreeSet<String>,
    /// Of these, folders and links to folders.
    folders: BTreeSet<String>,
    /// Names that are not UTF-8, as they can be shown, and whether they are of folders.
    unnamed: BTreeSet<(String, bool)>,
}

thread_local! {
    /// What is in the folders that were looked into while a layout is found out: each layout asks, and there may be a million files.
    static KEPT: RefCell<Option<HashMap<PathBuf, Rc<Entries>>>> = const { RefCell::new(None) };
}

/// What is in a folder, to find out a layout; of what is no folder, or cannot be read, nothing.
fn entries_of(folder: &Path) -> Rc<Entries> {
    let known = KEPT.with_borrow(|kept| kept.as_ref()?.get(folder).map(Rc::clone));
    known.unwrap_or_else(|| {
        let found = read_entries(folder).unwrap_or_default();
        KEPT.with_borrow_mut(|kept| {
            if let Some(kept) = kept {
                kept.insert(folder.to_path_buf(), Rc::clone(&found));
            }
        });
        found
    })
}

/// What is in a folder, to read all of it.
///
/// # Errors
/// When it cannot be read.
fn read_entries(folder: &Path) -> Result<Rc<Entries>, ManifestError> {
    let failed = |error| ManifestError::io(folder, error);
    let mut found = Entries::default();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let kind = entry.file_type().map_err(failed)?;
        // Only links are looked up.
        let is_folder = kind.is_dir() || kind.is_symlink() && entry.path().is_dir();
        let name = match entry.file_name().into_string() {
            Ok(name) => name,
            Err(name) => {
                found.unnamed.insert((name.to_string_lossy().into_owned(), is_folder));
                continue;
            }
        };
        if name.starts_with('.') || is_of_program(name.as_ref()) {
            continue;
        }
        if is_folder {
            found.folders.insert(name.clone());
        }
        found.names.insert(name);
    }
    Ok(Rc::new(found))
}

/// Folders that are looked into to find out a layout.
const MOST_FOLDERS: usize = 200;

/// The first folder of some above `folder`, itself included, or else the current one, below which one of the relative `paths` is;
/// none where there is no such folder or no relative path.
fn base_of<'p>(folder: &Path, paths: impl Iterator<Item = &'p str>) -> Option<PathBuf> {
    let relative: Vec<&str> = paths.filter(|path| Path::new(path).is_relative()).collect();
    let absolute = std::path::absolute(folder).ok()?;
    let ways = absolute.ancestors().count();
    // As the folder was written, so that rows have paths of the same kind.
    let above = (0..ways.min(6)).scan(folder.to_path_buf(), |way, step| {
        if step > 0 {
            *way = match way.parent().filter(|parent| !parent.as_os_str().is_empty()) {
                Some(parent) if !way.ends_with("..") => parent.to_path_buf(),
                _ => absolute.ancestors().nth(step)?.to_path_buf(),
            };
        }
        Some(way.clone())
    });
    let here = std::iter::once(PathBuf::new());
    here.chain(above)
        .find(|base| relative.iter().any(|path| base.join(plain_file(path)).is_file()))
}

/// The file that a path leads to, without the place of a recording in it (`a.ark:1234`).
fn plain_file(path: &str) -> &str {
    match path.rsplit_once(':') {
        Some((file, place)) if !place.is_empty() && place.bytes().all(|byte| byte.is_ascii_digit()) => file,
        _ => path,
    }
}
