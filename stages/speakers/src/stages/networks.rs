//! The diarizers that all workers of a run share: the bundled one, and those of pyannote pipelines.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use flow_hub::Progress;
use flow_kind::{Shared, StageError};

use crate::diarizer::{DiarizationSettings, Diarizer};
use crate::error::Error;
use crate::pyannote::Pipeline;

/// A diarizer, and its default settings.
#[derive(Debug)]
pub struct LoadedDiarizer {
    pub diarizer: Diarizer,
    pub defaults: DiarizationSettings,
}

/// The pyannote pipeline that the setting `model` names. A reference to the hub is resolved once per process, so that
/// the files that are digested for the key are those that are loaded; it is resolved again if `again`. None if
/// `progress` cancelled it.
pub fn found(model: &str, again: bool, progress: Progress<'_>) -> Result<Option<Arc<Pipeline>>, StageError> {
    static FOUND: Mutex<BTreeMap<String, Arc<Pipeline>>> = Mutex::new(BTreeMap::new());
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let (false, Some(pipeline)) = (again, found.get(model)) {
        return Ok(Some(Arc::clone(pipeline)));
    }
    let Some(pipeline) = Pipeline::find(model, None, progress).map_err(model_error)? else {
        return Ok(None);
    };
    let pipeline = Arc::new(pipeline);
    found.insert(model.to_owned(), Arc::clone(&pipeline));
    Ok(Some(pipeline))
}

/// All errors of a model are errors of the setting `model`.
fn model_error(error: Error) -> StageError {
    match error {
        Error::Hub { message, help } => StageError::setting("model", message).with_help(help),
        other => StageError::setting("model", other),
    }
}

/// A file as it was when it was loaded.
type Stamp = (PathBuf, Option<(u64, SystemTime)>);

/// The diarizer of a pipeline, or the bundled one: the first that needs it loads it.
pub fn loaded(pipeline: Option<Arc<Pipeline>>) -> Result<Arc<LoadedDiarizer>, StageError> {
    static LOADED: Shared<Vec<Stamp>, LoadedDiarizer> = Shared::new();
    let stamp = |path: PathBuf| -> Stamp {
        let metadata = std::fs::metadata(&path).ok();
        let state = metadata.and_then(|metadata| Some((metadata.len(), metadata.modified().ok()?)));
        (path, state)
    };
    let files = pipeline.as_ref().map_or_else(Vec::new, |pipeline| pipeline.files.all());
    let load = || -> Result<LoadedDiarizer, StageError> {
        Ok(match &pipeline {
            Some(pipeline) => LoadedDiarizer {
                diarizer: pipeline.diarizer().map_err(model_error)?,
                defaults: pipeline.settings(),
            },
            None => LoadedDiarizer {
                diarizer: Diarizer::bundled().map_err(StageError::failed)?,
                defaults: DiarizationSettings::default(),
            },
        })
    };
    LOADED.get(files.into_iter().map(stamp).collect(), load)
}
