//! Lightning's `.ckpt`: a PyTorch checkpoint with the weights under `state_dict` and the model's configuration under
//! `hyper_parameters`. It holds no tokenizer.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use serde_yaml::Value;

use super::{Format, OpenModel, broken};
use crate::Result;
use flow_nn::tensor_files::tensor_entry::OpenFile;
use flow_nn::tensor_files::torch::open_torch;

/// Opens a Lightning checkpoint. No code in it is executed.
pub(super) fn open_lightning(path: &Path) -> Result<OpenModel> {
    let file = File::open(path).map_err(|error| broken(path, error))?;
    let length = file.metadata().map_err(|error| broken(path, error))?.len();
    let file = Arc::new(OpenFile {
        path: path.to_path_buf(),
        file,
    });
    let (tensors, parameters) = open_torch(&file, 0, length, |pickle, tensors| {
        Ok((tensors, pickle.hyper_parameters()?))
    })
    .map_err(|what| broken(path, what))?;
    let config = parameters.as_ref().and_then(configuration).ok_or_else(|| {
        broken(
            path,
            "holds no model configuration under `hyper_parameters` (or only objects): give the .nemo archive of the \
             same training instead, or put the weights beside a model_config.yaml in a model folder",
        )
    })?;
    let config_yaml = serde_yaml::to_string(config).map_err(|error| broken(path, error))?;
    Ok(OpenModel {
        path: path.to_path_buf(),
        format: Format::Lightning,
        config_yaml,
        tokenizer: None,
        no_tokenizer: Some(format!(
            "{} is a Lightning checkpoint, which holds no tokenizer",
            path.display()
        )),
        tensors,
        notes: Vec::new(),
    })
}

/// NeMo's models keep their configuration as `cfg`; others may have it at the top.
fn configuration(parameters: &Value) -> Option<&Value> {
    [parameters.get("cfg"), Some(parameters)]
        .into_iter()
        .flatten()
        .find(|value| value.get("encoder").is_some_and(Value::is_mapping))
}
