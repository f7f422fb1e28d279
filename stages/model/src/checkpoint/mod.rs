//! Models on disk: NeMo's `.nemo` archives, the folders of Hugging Face's transformers, our own model folders (all
//! read and written), and Lightning's `.ckpt` (read).

mod adapter;
pub mod diff;
mod files;
mod folder;
mod hf_tokenizer;
mod huggingface;
mod lightning;
mod nemo;
mod npz;
mod one_width;
mod open_model;
mod packed;
mod pickle;
mod safetensors;
mod tar_members;
mod tensor_entry;
mod tensor_file;
mod torch;
mod zip;
mod zip_write;

use std::path::{Path, PathBuf};

use candle_core::Tensor;

use crate::Error;

pub use adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter, base_and_adapter, write_adapter};
pub use candle_core::DType;
pub use folder::{CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, write_model_folder};
pub use huggingface::huggingface_module;
pub use npz::read_npz;
pub use open_model::{Format, OpenModel};
pub use packed::{read_packed, unpack};
pub use safetensors::{read_safetensors, write_safetensors};
pub use tensor_entry::{TensorEntry, TensorSource, dtype_name};
pub use tensor_file::open_tensors;

/// The parts of a model on disk.
pub struct StoredModel {
    /// NeMo's `model_config.yaml`.
    pub config_yaml: String,
    /// The SentencePiece model, where there is one.
    pub tokenizer: Option<Vec<u8>>,
    /// Name (NeMo's key) and tensor, on the CPU, in the file's own type and order.
    pub tensors: Vec<(String, Tensor)>,
}

/// A tokenizer file, an index or a header larger than this is refused: the largest known is some 5 MB.
const MAX_SMALL_FILE: u64 = 64 << 20;
/// A configuration in YAML larger than this is refused: a value in memory takes many times its text. The largest known, with all
/// pieces of its tokenizer, has 0.2 MB.
const MAX_CONFIG: u64 = 4 << 20;

pub(crate) fn broken(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::File {
        path: PathBuf::from(path),
        what: what.to_string(),
    }
}

#[cfg(test)]
mod tests;
