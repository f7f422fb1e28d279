//! Safetensors files, one or several with an index, read tensor by tensor and written likewise.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::files::{read_small, write_renamed};
use super::tensor_entry::{OpenFile, TensorEntry};
use super::{MAX_SMALL_FILE, broken};
use crate::Result;

/// Reads all tensors of a safetensors file to the CPU, in their own types, sorted by name.
pub fn read_safetensors(path: &Path) -> Result<Vec<(String, Tensor)>> {
    open_safetensors(path)?
        .into_iter()
        .map(|entry| Ok((entry.name.clone(), entry.load()?)))
        .collect()
}

/// Writes tensors as one safetensors file, under a temporary name that is flushed and renamed.
pub fn write_safetensors(path: &Path, tensors: &[(&str, &Tensor)]) -> Result<()> {
    let entries: Vec<TensorEntry> = tensors
        .iter()
        .map(|&(name, tensor)| TensorEntry::in_memory(name, tensor.clone()))
        .collect();
    write_renamed(path, |file| write_entries(file, path, &entries, TensorEntry::dtype))
}

/// The tensors of a safetensors file, sorted by name. Only the header is read.
pub fn open_safetensors(path: &Path) -> Result<Vec<TensorEntry>> {
    let file = File::open(path).map_err(|error| broken(path, error))?;
    let length = file.metadata().map_err(|error| broken(path, error))?.len();
    let mut size = [0; 8];
    file.read_exact_at(&mut size, 0)
        .map_err(|_| broken(path, "is not a safetensors file: it has no header"))?;
    let size = u64::from_le_bytes(size);
    if size > MAX_SMALL_FILE || size + 8 > length {
        return Err(broken(
            path,
            format!("is not a safetensors file, or is cut off: a header of {size} bytes in {length}"),
        ));
    }
    let mut header = vec![0; size as usize];
    file.read_exact_at(&mut header, 8)
        .map_err(|error| broken(path, error))?;
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|error| broken(path, format!("has a damaged header: {error}")))?;
    let begin = 8 + size;
    if begin + metadata.data_len() as u64 != length {
        return Err(broken(
            path,
            format!(
                "has {length} bytes, but its header declares {}: it is cut off or damaged",
                begin + metadata.data_len() as u64
            ),
        ));
    }
    let file = Arc::new(OpenFile {
        path: path.to_path_buf(),
        file,
    });
    let infos: BTreeMap<String, &TensorInfo> = metadata.tensors().into_iter().collect();
    infos
        .into_iter()
        .map(|(name, info)| {
            let dtype = candle_dtype(info.dtype).ok_or_else(|| {
                broken(
                    path,
                    format!("tensor `{name}` is of the unsupported type {:?}", info.dtype),
                )
            })?;
            let offset = begin + info.data_offsets.0 as u64;
            Ok(TensorEntry::in_file(name, dtype, info.shape.clone(), &file, offset))
        })
        .collect()
}

/// The tensors of a folder: those of `<name>`, or of the files that `<name>.index.json` lists, as large models are
/// split. Sorted by name.
pub fn open_tensor_files(folder: &Path, name: &str) -> Result<Vec<TensorEntry>> {
    let whole = folder.join(name);
    let index = folder.join(format!("{name}.index.json"));
    if whole.exists() || !index.exists() {
        return open_safetensors(&whole);
    }
    let parsed: serde_json::Value = serde_json::from_slice(&read_small(&index)?)
        .map_err(|error| broken(&index, format!("is not JSON: {error}")))?;
    let map = parsed["weight_map"]
        .as_object()
        .ok_or_else(|| broken(&index, "has no `weight_map`"))?;
    let mut wanted: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, file) in map {
        let file = file
            .as_str()
            .filter(|file| !file.is_empty() && !file.contains(['/', '\\']) && !file.starts_with('.'))
            .ok_or_else(|| {
                broken(
                    &index,
                    format!("names for tensor `{tensor}` what is not a file of this folder"),
                )
            })?;
        wanted.entry(file).or_default().push(tensor);
    }
    let mut entries = Vec::with_capacity(map.len());
    for (file, tensors) in wanted {
        let path = folder.join(file);
        let mut found: BTreeMap<String, TensorEntry> = open_safetensors(&path)?
            .into_iter()
            .map(|entry| (entry.name.clone(), entry))
            .collect();
        for tensor in tensors {
            entries.push(
                found
                    .remove(tensor)
                    .ok_or_else(|| broken(&path, format!("lacks tensor `{tensor}`, which the index says is in it")))?,
            );
        }
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

/// Writes a safetensors file tensor by tensor: larger types first, then by name, as the format's own library does.
pub fn write_entries(
    file: &mut File,
    path: &Path,
    entries: &[TensorEntry],
    dtype: impl Fn(&TensorEntry) -> DType,
) -> Result<()> {
    let mut sorted = Vec::with_capacity(entries.len());
    for entry in entries {
        let dtype = dtype(entry);
        let stored = stored_dtype(dtype).ok_or_else(|| {
            broken(
                path,
                format!("tensor `{}` is of the unsupported type {dtype:?}", entry.name),
            )
        })?;
        sorted.push((stored, dtype, entry));
    }
    sorted.sort_by(|(a, _, left), (b, _, right)| b.cmp(a).then_with(|| left.name.cmp(&right.name)));
    let mut end = 0;
    let infos = sorted
        .iter()
        .map(|(stored, dtype, entry)| {
            let begin = end;
            end += entry.elements() * dtype.size_in_bytes();
            let info = TensorInfo {
                dtype: *stored,
                shape: entry.shape().to_vec(),
                data_offsets: (begin, end),
            };
            (entry.name.clone(), info)
        })
        .collect();
    let about = HashMap::from([("format".to_string(), "pt".to_string())]);
    let metadata = Metadata::new(Some(about), infos).map_err(|error| broken(path, error))?;
    let mut header = serde_json::to_vec(&metadata).map_err(|error| broken(path, error))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut out = BufWriter::new(file);
    let mut write = |bytes: &[u8]| out.write_all(bytes).map_err(|error| broken(path, error));
    write(&(header.len() as u64).to_le_bytes())?;
    write(&header)?;
    for (_, dtype, entry) in sorted {
        write(&entry.bytes_as(dtype)?)?;
    }
    out.flush().map_err(|error| broken(path, error))
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
