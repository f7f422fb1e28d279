//! The tensors of one file, in any supported format.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::broken;
use super::safetensors::open_safetensors;
use super::tensor_entry::{OpenFile, TensorEntry};
use super::torch::open_torch;
use crate::Result;

/// The first bytes of a zip file, and so of a PyTorch checkpoint.
const ZIP: &[u8; 4] = b"PK\x03\x04";
/// The first bytes of PyTorch's checkpoints before version 1.6: a pickle of a number. Read as the length of a
/// safetensors header they would be beyond the limit.
const OLD_TORCH: &[u8; 4] = b"\x80\x02\x8a\x0a";

/// The tensors of a safetensors file, or of the state dictionary of a PyTorch or Lightning checkpoint (`.bin`, `.pt`,
/// `.ckpt`), detected by content. No code in it is executed, and no values are read yet.
///
/// # Errors
/// If the file cannot be read, is damaged, or has an entry in its state dictionary that is not a tensor.
pub fn open_tensors(path: &Path) -> Result<Vec<TensorEntry>> {
    let file = File::open(path).map_err(|error| broken(path, error))?;
    let metadata = file.metadata().map_err(|error| broken(path, error))?;
    if !metadata.is_file() {
        return Err(broken(path, "is not a file"));
    }
    let mut begin = [0; 4];
    // A shorter file is refused as safetensors.
    let _ = file.read_exact_at(&mut begin, 0);
    if begin == *ZIP {
        let file = Arc::new(OpenFile {
            path: path.to_path_buf(),
            file,
        });
        let tensors = open_torch(&file, 0, metadata.len(), |_, tensors| Ok(tensors));
        return tensors.map_err(|what| broken(path, what));
    }
    if begin == *OLD_TORCH {
        let what = "is a PyTorch checkpoint as written before version 1.6; load and save it with a newer PyTorch";
        return Err(broken(path, what));
    }
    open_safetensors(path)
}
