//! flow's model folders: `model.safetensors` with NeMo's tensor names, `model_config.yaml`, and `tokenizer.model`. A
//! checkpoint of a training run is one.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use candle_core::{DType, Tensor};

use super::{Format, OpenModel, TensorEntry, broken, write_safetensors};
use crate::Result;
use flow_nn::tensor_files::files::{read_config, read_small, write_renamed};
use flow_nn::tensor_files::safetensors::{open_tensor_files, write_entries};
use flow_nn::tensor_files::tensor_entry::written_dtype;

pub const WEIGHTS_FILE: &str = "model.safetensors";
pub const CONFIG_FILE: &str = "model_config.yaml";
pub const TOKENIZER_FILE: &str = "tokenizer.model";

/// Opens a model folder. Errors name the file that is missing or damaged.
pub(super) fn open_model_folder(folder: &Path) -> Result<OpenModel> {
    let config = folder.join(CONFIG_FILE);
    let config_yaml = read_config(&config)?;
    let tokenizer = folder.join(TOKENIZER_FILE);
    let tokenizer = if tokenizer.exists() {
        Some(read_small(&tokenizer)?)
    } else {
        None
    };
    Ok(OpenModel {
        path: folder.to_path_buf(),
        format: Format::Folder,
        config_yaml,
        no_tokenizer: tokenizer
            .is_none()
            .then(|| format!("{} has no {TOKENIZER_FILE}", folder.display())),
        tokenizer,
        tensors: open_tensor_files(folder, WEIGHTS_FILE)?,
        notes: Vec::new(),
    })
}

/// Writes a model folder, creating it where needed. Each file is written under a temporary name, flushed and renamed,
/// the weights last.
pub fn write_model_folder(
    folder: &Path,
    config_yaml: &str,
    tokenizer: Option<&[u8]>,
    tensors: &[(&str, &Tensor)],
) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|error| broken(folder, error))?;
    write_small_files(folder, config_yaml, tokenizer)?;
    write_safetensors(&folder.join(WEIGHTS_FILE), tensors)?;
    File::open(folder)
        .and_then(|opened| opened.sync_all())
        .map_err(|error| broken(folder, error))
}

/// The same from an open model, tensor by tensor.
pub(super) fn fill_model_folder(folder: &Path, model: &OpenModel, dtype: Option<DType>) -> Result<()> {
    write_small_files(folder, &model.config_yaml, model.tokenizer.as_deref())?;
    let path = folder.join(WEIGHTS_FILE);
    write_renamed(&path, |file| {
        write_entries(file, &path, &model.tensors, |entry: &TensorEntry| {
            written_dtype(entry, dtype)
        })
    })
}

fn write_small_files(folder: &Path, config_yaml: &str, tokenizer: Option<&[u8]>) -> Result<()> {
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        write_renamed(&path, |file| {
            file.write_all(bytes).map_err(|error| broken(&path, error))
        })
    };
    write(CONFIG_FILE, config_yaml.as_bytes())?;
    tokenizer.map_or(Ok(()), |bytes| write(TOKENIZER_FILE, bytes))
}
