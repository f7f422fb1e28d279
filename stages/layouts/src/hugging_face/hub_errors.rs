//! Why a dataset of the hub cannot be read.

use std::path::Path;

use flow_corpus::ManifestError;
use flow_hub::{DatasetReference, HubError};

pub(super) fn of_hub(reference: &DatasetReference, error: HubError) -> ManifestError {
    let why = match error {
        HubError::Unavailable { message, help } => format!("{message}; {help}"),
        other => other.to_string(),
    };
    ManifestError::manifest(Path::new(&reference.to_string()), why)
}

pub(super) fn stopped(reference: &DatasetReference) -> ManifestError {
    ManifestError::manifest(Path::new(&reference.to_string()), "the download was stopped")
}
