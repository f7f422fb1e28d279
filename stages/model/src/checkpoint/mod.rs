//! Models on disk: NeMo's `.nemo` archives (read) and our own model folders (read and write).

mod nemo;
mod pickle;
mod safetensors;
mod zip;

use std::path::{Path, PathBuf};

use candle_core::Tensor;

use crate::{Error, Result};

pub use nemo::read_nemo;
pub use safetensors::{
    CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, read_model_folder, read_safetensors, write_model_folder,
    write_safetensors,
};

/// What a model on disk consists of.
pub struct StoredModel {
    /// NeMo's `model_config.yaml`.
    pub config_yaml: String,
    /// The SentencePiece model, where there is one.
    pub tokenizer: Option<Vec<u8>>,
    /// Name (NeMo's key) and tensor, on the CPU, in the file's own type and order.
    pub tensors: Vec<(String, Tensor)>,
}

/// Reads a `.nemo` archive (a file) or a model folder.
pub fn read_model(path: &Path) -> Result<StoredModel> {
    let metadata = std::fs::metadata(path).map_err(|error| broken(path, error))?;
    if metadata.is_dir() {
        read_model_folder(path)
    } else {
        read_nemo(path)
    }
}

/// A configuration or tokenizer file larger than this is refused: the largest known is some 5 MB.
const MAX_SMALL_FILE: u64 = 64 << 20;

pub(crate) fn broken(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::File {
        path: PathBuf::from(path),
        what: what.to_string(),
    }
}

#[cfg(test)]
mod tests;
