//! NeMo's `.nemo` archive: a tar, possibly gzipped, of `model_config.yaml`, `model_weights.ckpt` (a PyTorch zip) and
//! the tokenizer's files, which the configuration names as `nemo:<member>`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::pickle::{StoredTensor, read_state_dict};
use super::zip::{Member, Region, members};
use super::{MAX_SMALL_FILE, StoredModel, broken};
use crate::Result;

/// Reads a `.nemo` archive. Errors name the file and the member that is at fault.
pub fn read_nemo(path: &Path) -> Result<StoredModel> {
    let wrong = |what: String| broken(path, what);
    let file = open_tar(path).map_err(|error| broken(path, error))?;
    let tar = list_tar(&file).map_err(|error| broken(path, format!("is no .nemo archive: {error}")))?;
    let region = |name: &str| {
        tar.get(name)
            .map(|member| Region {
                file: &file,
                start: member.offset,
                length: member.length,
            })
            .ok_or_else(|| broken(path, format!("has no member `{name}`")))
    };
    let small = |name: &str| {
        let region = region(name)?;
        if region.length > MAX_SMALL_FILE {
            return Err(broken(
                path,
                format!("has a member `{name}` of {} bytes", region.length),
            ));
        }
        region
            .read(0, region.length)
            .map_err(|what| broken(path, format!("member `{name}` {what}")))
    };
    let config_yaml = String::from_utf8(small("model_config.yaml")?)
        .map_err(|_| broken(path, "has a model_config.yaml that is no UTF-8"))?;
    let tokenizer = match tokenizer_member(&config_yaml, &tar).map_err(wrong)? {
        Some(name) => Some(small(&name)?),
        None => None,
    };
    let tensors = read_torch(&region("model_weights.ckpt")?)
        .map_err(|what| broken(path, format!("member `model_weights.ckpt` {what}")))?;
    Ok(StoredModel {
        config_yaml,
        tokenizer,
        tensors,
    })
}

/// The archive as an uncompressed tar: the file itself, or a nameless temporary file with its gunzipped bytes.
fn open_tar(path: &Path) -> std::io::Result<File> {
    let mut file = File::open(path)?;
    let mut magic = [0; 2];
    let found = file.read(&mut magic)?;
    file.seek(SeekFrom::Start(0))?;
    if found == 2 && magic == [0x1f, 0x8b] {
        let mut plain = tempfile::tempfile()?;
        std::io::copy(
            &mut flate2::read::MultiGzDecoder::new(std::io::BufReader::new(file)),
            &mut plain,
        )?;
        plain.seek(SeekFrom::Start(0))?;
        return Ok(plain);
    }
    Ok(file)
}

fn list_tar(file: &File) -> std::io::Result<BTreeMap<String, Member>> {
    let mut listed = BTreeMap::new();
    let mut archive = tar::Archive::new(file);
    for entry in archive.entries_with_seek()? {
        let entry = entry?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let name = String::from_utf8_lossy(&entry.path_bytes())
            .trim_start_matches("./")
            .to_string();
        listed.insert(
            name,
            Member {
                offset: entry.raw_file_position(),
                length: entry.size(),
            },
        );
    }
    Ok(listed)
}

/// The member that holds the SentencePiece model.
fn tokenizer_member(config_yaml: &str, tar: &BTreeMap<String, Member>) -> std::result::Result<Option<String>, String> {
    let config: serde_yaml::Value =
        serde_yaml::from_str(config_yaml).map_err(|error| format!("has an unreadable model_config.yaml: {error}"))?;
    let tokenizer = &config["tokenizer"];
    if tokenizer["type"].as_str() == Some("agg") {
        return Err("has an aggregate tokenizer (`tokenizer.type: agg`), which is not supported".into());
    }
    let named = tokenizer["model_path"]
        .as_str()
        .and_then(|value| value.strip_prefix("nemo:"));
    Ok(match named {
        Some(name) => Some(name.to_string()),
        None => tar.keys().find(|name| name.ends_with("tokenizer.model")).cloned(),
    })
}

/// Reads the tensors of a PyTorch checkpoint.
fn read_torch(region: &Region) -> std::result::Result<Vec<(String, Tensor)>, String> {
    let members = members(region)?;
    let (pickle_name, &pickle) = members
        .iter()
        .find(|(name, _)| *name == "data.pkl" || name.ends_with("/data.pkl"))
        .ok_or("has no data.pkl: it is no PyTorch checkpoint")?;
    let root = pickle_name.strip_suffix("data.pkl").unwrap_or_default();
    if pickle.length > MAX_SMALL_FILE {
        return Err(format!("has a data.pkl of {} bytes", pickle.length));
    }
    if let Some(order) = members.get(&format!("{root}byteorder"))
        && region.read(order.offset, order.length.min(16))? != b"little"
    {
        return Err("was written on a big-endian machine".into());
    }
    let listed = read_state_dict(&region.read(pickle.offset, pickle.length)?)?;
    let mut tensors = Vec::with_capacity(listed.len());
    for (name, stored) in listed {
        let member = members
            .get(&format!("{root}data/{}", stored.key))
            .ok_or_else(|| format!("lacks the data of tensor `{name}`"))?;
        let tensor = read_tensor(region, member, &stored).map_err(|what| format!("tensor `{name}` {what}"))?;
        tensors.push((name, tensor));
    }
    Ok(tensors)
}

fn read_tensor(region: &Region, member: &Member, stored: &StoredTensor) -> std::result::Result<Tensor, String> {
    let dtype = match stored.storage.as_str() {
        "FloatStorage" => DType::F32,
        "DoubleStorage" => DType::F64,
        "HalfStorage" => DType::F16,
        "BFloat16Storage" => DType::BF16,
        "LongStorage" => DType::I64,
        other => return Err(format!("is of the unsupported type {other}")),
    };
    if stored.strides.len() != stored.shape.len() {
        return Err("has a damaged shape".into());
    }
    let mut expected = 1usize;
    for (&size, &stride) in stored.shape.iter().zip(&stored.strides).rev() {
        if size != 1 && stride != expected {
            return Err(format!(
                "is not stored contiguously (shape {:?}, strides {:?})",
                stored.shape, stored.strides
            ));
        }
        expected = expected.checked_mul(size).ok_or("has a damaged shape")?;
    }
    let width = dtype.size_in_bytes() as u64;
    let length = (expected as u64).checked_mul(width).ok_or("has a damaged shape")?;
    let start = stored.offset.checked_mul(width).ok_or("has a damaged offset")?;
    if start.checked_add(length).is_none_or(|end| end > member.length) {
        return Err(format!(
            "needs {length} bytes at {start}, but its data have {}",
            member.length
        ));
    }
    let bytes = region.read(member.offset + start, length)?;
    Tensor::from_raw_buffer(&bytes, dtype, &stored.shape, &Device::Cpu).map_err(|error| error.to_string())
}
