//! Files of tensors: safetensors (one file or several with an index), PyTorch's archives and NumPy's `.npz`. Tensors are read where
//! they are, one by one; their file may be larger than memory.

pub mod files;
mod npz;
mod packed;
pub mod pickle;
pub mod safetensors;
pub mod tar_members;
pub mod tensor_entry;
mod tensor_file;
pub mod torch;
pub mod zip;
pub mod zip_write;

use std::path::{Path, PathBuf};

use crate::Error;

pub use candle_core::DType;
pub use npz::read_npz;
pub use packed::{read_packed, unpack};
pub use safetensors::{read_safetensors, write_safetensors};
pub use tensor_entry::{TensorEntry, TensorSource, dtype_name};
pub use tensor_file::open_tensors;

/// A tokenizer file, an index or a header larger than this is refused: the largest known is some 5 MB.
pub const MAX_SMALL_FILE: u64 = 64 << 20;
/// A configuration in YAML larger than this is refused: a value in memory takes many times its text. The largest known, with all
/// pieces of its tokenizer, has 0.2 MB.
pub const MAX_CONFIG: u64 = 4 << 20;

/// The error of a file at `path` that is not what it should be.
pub fn broken(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::File {
        path: PathBuf::from(path),
        what: what.to_string(),
    }
}
