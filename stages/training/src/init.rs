//! The model before its first step.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use flow_model::ModelConfig;
use flow_model::checkpoint::OpenModel;
use flow_model::model::TdtModel;
use flow_model::tokenizer::Tokenizer;
use flow_model::vocabulary::VocabularyChange;

use crate::error::TrainingError;
use crate::settings::TrainSettings;

/// The file or folder on this machine that `init` names.
pub fn resolve_init(init: &str) -> Result<PathBuf, TrainingError> {
    if init.starts_with("hf://") {
        return Err(TrainingError::setting(
            "init",
            format!("{init}: models cannot be downloaded yet; give the path of a folder that holds it"),
        ));
    }
    Ok(PathBuf::from(init))
}

/// Whether the first weights can be had, without reading them. Matters only where no checkpoint stands.
pub fn check_init(settings: &TrainSettings) -> Result<(), TrainingError> {
    if settings.init == "none" {
        return Ok(());
    }
    let path = resolve_init(&settings.init)?;
    if !path.exists() {
        return Err(TrainingError::setting(
            "init",
            format!("{} is not there", settings.init),
        ));
    }
    Ok(())
}

/// The model before its first step, and what became of the vocabulary where it is another than that of `init`.
pub fn first_model(settings: &TrainSettings) -> Result<(TdtModel, Option<VocabularyChange>), TrainingError> {
    let given = if settings.tokenizer.is_empty() {
        None
    } else {
        Some(read_tokenizer(&settings.tokenizer)?)
    };
    if settings.init == "none" {
        let tokenizer = given
            .ok_or_else(|| TrainingError::setting("tokenizer", "with `init: none` name a SentencePiece .model file"))?;
        let config = settings.model.config(&tokenizer.pieces())?;
        let model = TdtModel::new(config, Some(tokenizer), settings.seed, DType::F32, &Device::Cpu)?;
        return Ok((model, None));
    }
    check_init(settings)?;
    let path = resolve_init(&settings.init)?;
    let opened = OpenModel::open(&path)?;
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
            path: path.clone(),
            what: other.to_string(),
        }),
    };
    let config = ModelConfig::from_nemo_yaml(&opened.config_yaml).map_err(wrong)?;
    let model = TdtModel::from_stored(opened.load()?, config, DType::F32, &Device::Cpu).map_err(wrong)?;
    Ok((model, change))
}

fn read_tokenizer(path: &str) -> Result<Tokenizer, TrainingError> {
    Tokenizer::load(Path::new(path)).map_err(|error| TrainingError::setting("tokenizer", error))
}
