//! Models on disk: NeMo's `.nemo` archives, the folders of Hugging Face's transformers, our own model folders (all
//! read and written), and Lightning's `.ckpt` (read).

mod adapter;
pub mod diff;
mod folder;
mod hf_tokenizer;
mod huggingface;
mod lightning;
mod nemo;
mod one_width;
mod open_model;

use candle_core::Tensor;

use flow_nn::tensor_files::{MAX_CONFIG, MAX_SMALL_FILE, broken};

pub use adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter, base_and_adapter, write_adapter};
pub use candle_core::DType;
pub use flow_nn::tensor_files::{
    TensorEntry, TensorSource, dtype_name, open_tensors, read_safetensors, write_safetensors,
};
pub use folder::{CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, write_model_folder};
pub use huggingface::huggingface_module;
pub use open_model::{CALIBRATION_FILE, Format, OpenModel};

/// The parts of a model on disk.
pub struct StoredModel {
    /// NeMo's `model_config.yaml`.
    pub config_yaml: String,
    /// The SentencePiece model, where there is one.
    pub tokenizer: Option<Vec<u8>>,
    /// Name (NeMo's key) and tensor, on the CPU, in the file's own type and order.
    pub tensors: Vec<(String, Tensor)>,
}

#[cfg(test)]
mod tests;
