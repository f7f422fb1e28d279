//! The model before its first step.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use flow_evaluation::hub_token::hub_with_token;
use flow_hub::{Hub, HubError, HubReference};
use flow_kind::{Context, Secret, StageError, local_copy};
use flow_model::ModelConfig;
use flow_model::checkpoint::{OpenModel, base_and_adapter};
use flow_model::model::TdtModel;
use flow_model::tokenizer::Tokenizer;
use flow_model::vocabulary::VocabularyChange;
use flow_storage::{Storage, is_url};

use crate::error::TrainingError;
use crate::resolved_settings::ResolvedSettings;

/// The local file or folder of a model: `model` itself; where it is `hf://...` the path in the hub's cache, into which it is
/// downloaded first; and where it is a URL of object storage that of a copy, which is kept. `progress` is called with lines
/// about the download.
///
/// # Errors
/// Where the reference cannot be read, or the hub or the storage does not give the model.
pub fn local_model(storage: &Storage, model: &str, progress: &mut dyn FnMut(&str)) -> Result<PathBuf, TrainingError> {
    let fetched = fetch_model(storage, model, Hub::from_environment, &mut |line| {
        progress(line);
        true
    })?;
    // None only where the callback cancels, which this one never does.
    Ok(fetched.unwrap_or_else(|| PathBuf::from(model)))
}

/// As [`local_model`]. `hub` is asked for where it is needed. None: `progress` has cancelled it.
///
/// # Errors
/// Those of [`local_model`].
pub fn fetch_model(
    storage: &Storage,
    model: &str,
    hub: impl FnOnce() -> Result<Hub, HubError>,
    progress: &mut dyn FnMut(&str) -> bool,
) -> Result<Option<PathBuf>, TrainingError> {
    if let Some((base, adapter)) = model_and_adapter(model) {
        let fetched = fetch_model(storage, &base, hub, progress)?;
        return Ok(fetched.map(|base| {
            let mut both = base.into_os_string();
            both.push("+");
            both.push(adapter);
            both.into()
        }));
    }
    match HubReference::parse(model).transpose()? {
        Some(reference) => Ok(hub()?.fetch(&reference, progress)?),
        None if is_url(model) => local_copy(storage, Path::new(model), &OpenModel::is_part, progress)
            .map_err(|error| TrainingError::setting("init", error)),
        None => Ok(Some(PathBuf::from(model))),
    }
}

/// The local path of the model that a stage's `setting` names, as [`fetch_model`] gives it. The screen shows the download, which
/// ends where the run does.
///
/// # Errors
/// Those of [`local_model`], naming `setting`, and if the run ends.
pub(crate) fn fetch_for_stage(
    context: &Context,
    setting: &str,
    model: &str,
    token: Option<&Secret>,
) -> Result<PathBuf, StageError> {
    let fetched = fetch_model(&context.storage, model, || hub_with_token(token), &mut |line| {
        context.report(serde_json::json!({ "line": line }));
        !context.cancel.is_set()
    });
    let fetched = fetched.map_err(|error| match error {
        TrainingError::Setting { message, .. } => StageError::setting(setting, message),
        other => other.into(),
    });
    fetched?.ok_or_else(|| StageError::failed("stopped"))
}

/// The parts of `MODEL+ADAPTER` where the model has to be fetched.
fn model_and_adapter(model: &str) -> Option<(String, PathBuf)> {
    let (base, adapter) = base_and_adapter(Path::new(model))?;
    let base = base.to_str().filter(|base| is_remote(base))?.to_owned();
    Some((base, adapter))
}

/// Whether a model has to be fetched before it can be read.
pub fn is_remote(model: &str) -> bool {
    HubReference::parse(model).is_some() || is_url(model)
}

/// Checks that the first weights exist, without reading them. Only needed where there is no checkpoint.
pub fn check_init(settings: &ResolvedSettings) -> Result<(), TrainingError> {
    HubReference::parse(&settings.init).transpose()?;
    // It is fetched when training begins.
    if settings.init == "none" || is_remote(&settings.init) {
        return Ok(());
    }
    if !OpenModel::exists(Path::new(&settings.init)) {
        return Err(TrainingError::setting("init", not_there(&settings.init)));
    }
    Ok(())
}

/// The message about a model that does not exist.
pub fn not_there(model: &str) -> String {
    let mut message = format!("{model} does not exist");
    if let Some(meant) = HubReference::meant(model) {
        message.push_str(&format!("; a model of the Hugging Face hub is written {meant}"));
    }
    message
}

/// The model before its first step, and the change of the vocabulary where it differs from that of `init`.
pub fn first_model(
    storage: &Storage,
    settings: &ResolvedSettings,
    device: &Device,
) -> Result<(TdtModel, Option<VocabularyChange>), TrainingError> {
    let given = given_tokenizer(storage, settings)?;
    if settings.init == "none" {
        let tokenizer =
            given.ok_or_else(|| TrainingError::setting("tokenizer", "with `init: none` a tokenizer is needed"))?;
        let config = settings.model.config(&tokenizer.pieces())?;
        let model = TdtModel::new(config, Some(tokenizer), settings.seed, DType::F32, device)?;
        return Ok((model, None));
    }
    check_init(settings)?;
    let path = settings.init_path();
    let opened = OpenModel::open(path)?;
    let (opened, change) = match given {
        Some(tokenizer) => opened
            .with_tokenizer(&tokenizer, settings.new_pieces.into(), settings.seed)
            .map_err(|error| TrainingError::setting("tokenizer", error))?,
        None if opened.tokenizer.is_none() => {
            let why = opened.no_tokenizer.unwrap_or_default();
            return Err(TrainingError::setting(
                "tokenizer",
                format!("{why}; name the SentencePiece .model file that the model was trained with"),
            ));
        }
        None => (opened, None),
    };
    let wrong = |error: flow_model::Error| match error {
        flow_model::Error::File { .. } | flow_model::Error::Io { .. } => TrainingError::from(error),
        other => TrainingError::from(flow_model::Error::File {
            path: path.to_path_buf(),
            what: other.to_string(),
        }),
    };
    let config = ModelConfig::from_nemo_yaml(&opened.config_yaml).map_err(wrong)?;
    let model = TdtModel::from_open(opened, config, DType::F32, DType::F32, device).map_err(wrong)?;
    Ok((model, change))
}

/// The configuration of the model before its first step; of a given model only the configuration is read. `vocabulary`
/// is the number of pieces where the tokenizer is still to be made.
pub fn configuration(
    storage: &Storage,
    settings: &ResolvedSettings,
    vocabulary: Option<usize>,
) -> Result<ModelConfig, TrainingError> {
    let pieces = match (given_tokenizer(storage, settings)?, vocabulary) {
        (Some(tokenizer), _) => Some(tokenizer.pieces()),
        (None, Some(size)) => Some((0..size).map(|number| number.to_string()).collect()),
        (None, None) => None,
    };
    if settings.init == "none" {
        let pieces =
            pieces.ok_or_else(|| TrainingError::setting("tokenizer", "with `init: none` a tokenizer is needed"))?;
        return settings.model.config(&pieces);
    }
    check_init(settings)?;
    let opened = OpenModel::open(settings.init_path())?;
    let mut config = ModelConfig::from_nemo_yaml(&opened.config_yaml)?;
    if let Some(pieces) = pieces {
        config.vocab_size = pieces.len();
        config.labels = pieces;
    }
    Ok(config)
}

/// The tokenizer that was given; none if that of `init` is meant.
fn given_tokenizer(storage: &Storage, settings: &ResolvedSettings) -> Result<Option<Tokenizer>, TrainingError> {
    let Some(bytes) = settings.tokenizer_file(storage)? else {
        return Ok(None);
    };
    let read = Tokenizer::from_bytes(&bytes);
    read.map(Some)
        .map_err(|e| TrainingError::setting("tokenizer", format!("{} {e}", settings.tokenizer_path())))
}
