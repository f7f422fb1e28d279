//! Layouts of corpora as they are on disk: a file for each, and the list of them. [`mod@read`] is the kind `manifest.read`, which
//! reads them and other manifests.

mod at_once;
mod chosen_rows;
mod common_voice;
#[cfg(test)]
mod configs_folder;
mod fleurs;
mod folder_entries;
mod gigaspeech;
mod gigaspeech2;
mod granary;
mod hugging_face;
mod json_list;
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
mod spgispeech;
mod splits;
mod subtitles;
mod table_lines;
mod tables_below;
mod told;
mod transcripts;
mod utterance;
mod voxpopuli;
mod voxpopuli_sessions;
mod webdataset;
mod yodas;
mod yodas2;
mod zip;
mod zip_folder;

pub use manifest_line::line_of;

use std::path::Path;

use flow_corpus::folder::table_of;
use flow_corpus::tree::{answered, is_folder};
use flow_corpus::{Layout, Manifest, ManifestError, ReadSettings};
use flow_storage::Storage;

use folder_entries::remembering_folders;

/// A layout: its name, how it is recognised, and how it is opened.
struct Known {
    layout: Layout,
    name: &'static str,
    /// What of a folder or file tells it; none where it is another layout.
    detect: fn(&Storage, &Path) -> Option<String>,
    open: Open,
}

type Open = fn(&Storage, &Path, &ReadSettings, &Path) -> Result<Manifest, ManifestError>;

const fn known(layout: Layout, name: &'static str, detect: fn(&Storage, &Path) -> Option<String>, open: Open) -> Known {
    Known {
        layout,
        name,
        detect,
        open,
    }
}

/// All layouts that are recognised. The last resort, recordings with their texts, is none of them.
const KNOWN: [Known; 23] = [
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
    known(Layout::Spgispeech, "spgispeech", spgispeech::detect, spgispeech::open),
    known(Layout::Granary, "granary", granary::detect, granary::open),
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
const WITHOUT_COLUMNS: [Layout; 15] = [
    Layout::Spgispeech,
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
const WITHOUT_SPLITS: [Layout; 7] = [
    Layout::Yodas,
    Layout::Yodas2,
    Layout::Kaldi,
    Layout::Ljspeech,
    Layout::NemoTarred,
    Layout::Subtitles,
    Layout::Transcripts,
];

impl Known {
    fn open(
        &self,
        storage: &Storage,
        root: &Path,
        settings: &ReadSettings,
        scratch: &Path,
    ) -> Result<Manifest, ManifestError> {
        refuse_settings(self.layout, self.name, root, settings)?;
        answered(|| (self.open)(storage, root, settings, scratch))?
    }
}

/// Refuses settings that a layout does not have.
fn refuse_settings(layout: Layout, name: &str, root: &Path, settings: &ReadSettings) -> Result<(), ManifestError> {
    if !settings.columns.is_empty() && WITHOUT_COLUMNS.contains(&layout) {
        let why = format!("`columns` belongs to manifests with columns, and this is {name}");
        return Err(ManifestError::manifest(root, why));
    }
    if !settings.split.is_empty() && WITHOUT_SPLITS.contains(&layout) {
        let why = format!("`split` belongs to layouts with splits, and this is {name}");
        return Err(ManifestError::manifest(root, why));
    }
    Ok(())
}

/// The layouts that fit what is at `root`, each with what tells it.
fn detected(storage: &Storage, root: &Path) -> Result<Vec<(&'static Known, String)>, ManifestError> {
    let detect = || {
        let detected = KNOWN.iter().map(|known| Some((known, (known.detect)(storage, root)?)));
        detected.flatten().collect()
    };
    answered(|| remembering_folders(detect))
}

/// Whether a layout of the list fits what is at `root`, or it is a folder with tables of its recordings.
///
/// # Errors
/// Where storage does not say it.
fn is_recognised(storage: &Storage, root: &Path) -> Result<bool, ManifestError> {
    let has_table = || answered(|| table_of(storage, root).map(|table| table.is_some()))?;
    let is_folder = || answered(|| is_folder(storage, root));
    let has_tables_below = || answered(|| tables_below::find(storage, root).map(|found| !found.is_empty()))?;
    Ok(!detected(storage, root)?.is_empty() || has_table()? || is_folder()? && has_tables_below()?)
}

/// Opens what is at `root`, where a layout of the list fits; none where none does.
///
/// # Errors
/// Where several fit, or the one cannot be opened.
fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Option<Manifest>, ManifestError> {
    if settings.layout == Layout::Transcripts {
        return transcripts::open(storage, root, settings).map(Some);
    }
    if settings.layout != Layout::Auto {
        let known = KNOWN.iter().find(|known| known.layout == settings.layout);
        return known
            .map(|known| known.open(storage, root, settings, scratch))
            .transpose();
    }
    match detected(storage, root)?.as_slice() {
        [] => Ok(None),
        [(known, _)] => known.open(storage, root, settings, scratch).map(Some),
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
