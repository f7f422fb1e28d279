//! Model folders: `model.safetensors` with NeMo's names, `model_config.yaml`, and `tokenizer.model`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Dtype, SafeTensors, View};

use super::{MAX_SMALL_FILE, StoredModel, broken};
use crate::Result;

pub const WEIGHTS_FILE: &str = "model.safetensors";
pub const CONFIG_FILE: &str = "model_config.yaml";
pub const TOKENIZER_FILE: &str = "tokenizer.model";

/// Reads a model folder. Errors name the file that is missing or damaged.
pub fn read_model_folder(folder: &Path) -> Result<StoredModel> {
    let config = folder.join(CONFIG_FILE);
    let config_yaml = String::from_utf8(read_small(&config)?).map_err(|_| broken(&config, "is no UTF-8"))?;
    let tokenizer = folder.join(TOKENIZER_FILE);
    let tokenizer = if tokenizer.exists() {
        Some(read_small(&tokenizer)?)
    } else {
        None
    };
    let tensors = read_safetensors(&folder.join(WEIGHTS_FILE))?;
    Ok(StoredModel {
        config_yaml,
        tokenizer,
        tensors,
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
    write_renamed(&folder.join(CONFIG_FILE), |file| file.write_all(config_yaml.as_bytes()))?;
    if let Some(bytes) = tokenizer {
        write_renamed(&folder.join(TOKENIZER_FILE), |file| file.write_all(bytes))?;
    }
    write_safetensors(&folder.join(WEIGHTS_FILE), tensors)?;
    File::open(folder)
        .and_then(|opened| opened.sync_all())
        .map_err(|error| broken(folder, error))
}

/// Reads all tensors of a safetensors file to the CPU, in their own types, sorted by name.
pub fn read_safetensors(path: &Path) -> Result<Vec<(String, Tensor)>> {
    let bytes = std::fs::read(path).map_err(|error| broken(path, error))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| broken(path, error))?;
    let mut tensors = Vec::with_capacity(file.len());
    for (name, view) in file.iter() {
        let dtype = candle_dtype(view.dtype()).ok_or_else(|| {
            broken(
                path,
                format!("tensor `{name}` is of the unsupported type {:?}", view.dtype()),
            )
        })?;
        let tensor = Tensor::from_raw_buffer(view.data(), dtype, view.shape(), &Device::Cpu)
            .map_err(|error| broken(path, format!("tensor `{name}`: {error}")))?;
        tensors.push((name.to_string(), tensor));
    }
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(tensors)
}

/// Writes tensors as one safetensors file, under a temporary name that is flushed and renamed.
pub fn write_safetensors(path: &Path, tensors: &[(&str, &Tensor)]) -> Result<()> {
    let mut views = Vec::with_capacity(tensors.len());
    for &(name, tensor) in tensors {
        let dtype = stored_dtype(tensor.dtype()).ok_or_else(|| {
            broken(
                path,
                format!("tensor `{name}` is of the unsupported type {:?}", tensor.dtype()),
            )
        })?;
        let bytes = little_endian(tensor).map_err(|error| broken(path, format!("tensor `{name}`: {error}")))?;
        views.push((
            name,
            StoredView {
                dtype,
                shape: tensor.dims().to_vec(),
                bytes,
            },
        ));
    }
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let temporary = temporary_name(path);
    let written = safetensors::serialize_to_file(views, Some(metadata), &temporary)
        .map_err(|error| error.to_string())
        .and_then(|()| {
            File::open(&temporary)
                .and_then(|file| file.sync_all())
                .map_err(|error| error.to_string())
        })
        .and_then(|()| std::fs::rename(&temporary, path).map_err(|error| error.to_string()));
    written.map_err(|error| {
        // The first error is what the user must see, whether or not the remains can be removed.
        let _ = std::fs::remove_file(&temporary);
        broken(path, error)
    })
}

struct StoredView {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for StoredView {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

fn little_endian(tensor: &Tensor) -> candle_core::Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::F32 => bytemuck::cast_slice(&flat.to_vec1::<f32>()?).to_vec(),
        DType::F64 => bytemuck::cast_slice(&flat.to_vec1::<f64>()?).to_vec(),
        DType::I64 => bytemuck::cast_slice(&flat.to_vec1::<i64>()?).to_vec(),
        DType::U8 => flat.to_vec1::<u8>()?,
        DType::F16 => flat
            .to_vec1::<half::f16>()?
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
        DType::BF16 => flat
            .to_vec1::<half::bf16>()?
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
        other => candle_core::bail!("unsupported type {other:?}"),
    })
}

fn stored_dtype(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::U8 => Dtype::U8,
        _ => return None,
    })
}

fn candle_dtype(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::U8 => DType::U8,
        _ => return None,
    })
}

fn read_small(path: &Path) -> Result<Vec<u8>> {
    let length = std::fs::metadata(path).map_err(|error| broken(path, error))?.len();
    if length > MAX_SMALL_FILE {
        return Err(broken(path, format!("has {length} bytes, too many for such a file")));
    }
    std::fs::read(path).map_err(|error| broken(path, error))
}

fn temporary_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(".tmp");
    PathBuf::from(name)
}

fn write_renamed(path: &Path, write: impl FnOnce(&mut File) -> std::io::Result<()>) -> Result<()> {
    let temporary = temporary_name(path);
    let written = File::create(&temporary).and_then(|mut file| {
        write(&mut file)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    });
    written.map_err(|error| broken(path, error))
}
