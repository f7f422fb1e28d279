//! Datasets that other programs load: those of Hugging Face, Lhotse's manifests, and Lhotse Shar. `manifest.write` writes them with
//! [`write()`].

mod huggingface;
mod lhotse;
mod lhotse_items;
mod recordings;
mod refused;
mod rows;
mod settings;
mod shar;
mod versions;
mod writing;

use flow_kind::{Artifact, Digest, ExportSet, Inputs, StageError, Storage};

pub use settings::{AudioOfRows, DatasetFormat, DatasetSettings};
pub use writing::Writing;

/// Checks, before a run, that rows say where their recordings are, and that a dataset can have their columns.
///
/// # Errors
/// If they do not, or it cannot.
pub fn check(settings: &DatasetSettings, inputs: &Inputs) -> Result<(), StageError> {
    if settings.format == DatasetFormat::HuggingFace {
        huggingface::check(settings, inputs)?;
    }
    inputs
        .iter()
        .try_for_each(|input| rows::check_places(input, settings.format))
}

/// Represents the recordings of the splits' rows, which the files of a dataset follow from: another digest for others of the same names.
/// No recording is opened.
///
/// # Errors
/// If rows cannot be read, or storage does not say whether an object is there.
pub fn recordings_digest(
    storage: &Storage,
    settings: &DatasetSettings,
    splits: &[(&'static str, &Artifact)],
) -> Result<Digest, StageError> {
    versions::versions_of_recordings(storage, &settings.shards, splits)
}

/// Writes splits, each with its name, into a set, and `rejects.parquet` with the rows that are left out as their recordings cannot be
/// read, if there are any.
///
/// # Errors
/// If a value is null, more rows than `max_unreadable` allows have no readable recording, or a file cannot be written.
pub fn write(
    settings: &DatasetSettings,
    splits: &[(&'static str, &Artifact)],
    set: &mut ExportSet,
    writing: &Writing<'_>,
) -> Result<(), StageError> {
    match settings.format {
        DatasetFormat::HuggingFace => huggingface::write_dataset(settings, splits, set, writing),
        DatasetFormat::Lhotse => lhotse::write_lhotse(settings, splits, set, writing),
        DatasetFormat::Shar => shar::write_shar(settings, splits, set, writing),
    }
}
