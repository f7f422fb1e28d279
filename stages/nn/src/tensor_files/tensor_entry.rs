//! Tensors that are read on demand, so that a model can be inspected, compared and converted without loading all of it.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::broken;
use crate::{Error, Result};

/// An open file, with its name for messages.
#[derive(Debug)]
pub struct OpenFile {
    pub path: PathBuf,
    pub file: File,
}

/// A tensor of a model: its name and shape, and where its values are.
#[derive(Clone, Debug)]
pub struct TensorEntry {
    /// NeMo's name.
    pub name: String,
    dtype: DType,
    shape: Vec<usize>,
    place: Place,
}

/// Where a tensor is read from: tensors of equal places are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorSource {
    /// Device, inode, size, and times of the last changes of contents and status, in seconds and nanoseconds.
    file: [u64; 3],
    changed: [i64; 4],
    offset: u64,
    dtype: &'static str,
    shape: Vec<usize>,
}

#[derive(Clone, Debug)]
enum Place {
    /// Little-endian and row-major from this byte of the file on.
    File {
        file: Arc<OpenFile>,
        offset: u64,
    },
    Memory(Tensor),
    Sum(Box<LowRankSum>),
}

/// `base + scale * b a`.
#[derive(Clone, Debug)]
pub struct LowRankSum {
    /// (out, in, 1, ...)
    pub base: TensorEntry,
    /// (rank, in)
    pub a: Tensor,
    /// (out, rank)
    pub b: Tensor,
    pub scale: f64,
}

impl LowRankSum {
    /// The sum in the wider type of f32 and that of the base.
    fn load(&self) -> Result<Tensor> {
        let base = self.base.load()?;
        let dtype = sum_dtype(base.dtype());
        let product = self.b.to_dtype(dtype)?.matmul(&self.a.to_dtype(dtype)?)?;
        let added = (product * self.scale)?.reshape(base.shape())?;
        let sum = (base.to_dtype(dtype)? + added)?;
        // A model that had such values before keeps them.
        if !is_finite(&sum)? && is_finite(&base)? {
            let what = "with the adapter it has values that are not finite numbers";
            return Err(Error::Input(format!("tensor `{}`: {what}", self.base.name)));
        }
        Ok(sum)
    }
}

/// Whether all values are finite: zero times each is zero.
pub fn is_finite(tensor: &Tensor) -> Result<bool> {
    let zeros = (tensor * 0.0)?.sum_all()?.to_dtype(DType::F64)?;
    Ok(zeros.to_scalar::<f64>()? == 0.0)
}

fn sum_dtype(base: DType) -> DType {
    match base {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

impl TensorEntry {
    /// A tensor that is in memory.
    pub fn in_memory(name: impl Into<String>, tensor: Tensor) -> Self {
        TensorEntry {
            name: name.into(),
            dtype: tensor.dtype(),
            shape: tensor.dims().to_vec(),
            place: Place::Memory(tensor),
        }
    }

    /// A tensor that is the sum of another, by whose name it goes, and a product of thin matrices.
    pub fn low_rank_sum(sum: LowRankSum) -> Self {
        TensorEntry {
            name: sum.base.name.clone(),
            dtype: sum_dtype(sum.base.dtype),
            shape: sum.base.shape.clone(),
            place: Place::Sum(Box::new(sum)),
        }
    }

    /// A tensor within a file. The caller has checked that the file is long enough.
    pub fn in_file(name: String, dtype: DType, shape: Vec<usize>, file: &Arc<OpenFile>, offset: u64) -> Self {
        TensorEntry {
            name,
            dtype,
            shape,
            place: Place::File {
                file: Arc::clone(file),
                offset,
            },
        }
    }

    /// The number type that it is stored in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of values.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it is a buffer, not a trainable parameter: part of the front end, or a statistic of batch normalisation.
    pub fn is_buffer(&self) -> bool {
        const STATISTICS: [&str; 3] = [".running_mean", ".running_var", ".num_batches_tracked"];
        self.name.starts_with("preprocessor.") || STATISTICS.iter().any(|ending| self.name.ends_with(ending))
    }

    /// The file that contains it; none for a tensor in memory.
    pub fn file(&self) -> Option<&Path> {
        match &self.place {
            Place::File { file, .. } => Some(&file.path),
            Place::Memory(_) => None,
            Place::Sum(sum) => sum.base.file(),
        }
    }

    /// Where in a file it is, as the file is now; none for a tensor that is in memory or computed.
    pub fn source(&self) -> Option<TensorSource> {
        let Place::File { file, offset } = &self.place else {
            return None;
        };
        let now = file.file.metadata().ok()?;
        Some(TensorSource {
            file: [now.dev(), now.ino(), now.size()],
            changed: [now.mtime(), now.mtime_nsec(), now.ctime(), now.ctime_nsec()],
            offset: *offset,
            dtype: self.dtype.as_str(),
            shape: self.shape.clone(),
        })
    }

    /// The tensor on the CPU, in the type that it is stored in.
    pub fn load(&self) -> Result<Tensor> {
        match &self.place {
            Place::Memory(tensor) => Ok(tensor.clone()),
            Place::Sum(sum) => sum.load(),
            Place::File { file, .. } => Tensor::from_raw_buffer(&self.stored()?, self.dtype, &self.shape, &Device::Cpu)
                .map_err(|error| broken(&file.path, format!("tensor `{}`: {error}", self.name))),
        }
    }

    /// The bytes of the values in another type, little-endian and row-major. A finite value that the type cannot hold
    /// is an error.
    pub fn bytes_as(&self, dtype: DType) -> Result<Vec<u8>> {
        if dtype == self.dtype && matches!(self.place, Place::File { .. }) {
            return self.stored();
        }
        let tensor = self.load()?;
        let converted = if dtype == self.dtype {
            tensor
        } else {
            let converted = tensor.to_dtype(dtype)?;
            self.check_range(&tensor, &converted)?;
            converted
        };
        Ok(little_endian(&converted)?)
    }

    fn check_range(&self, before: &Tensor, after: &Tensor) -> Result<()> {
        let infinite = |tensor: &Tensor| -> candle_core::Result<Vec<bool>> {
            let values = tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            Ok(values.into_iter().map(f64::is_infinite).collect())
        };
        if infinite(before)? != infinite(after)? {
            let file = self.file().map(Path::to_path_buf).unwrap_or_default();
            return Err(broken(
                &file,
                format!(
                    "tensor `{}` has values that are too large for {}",
                    self.name,
                    dtype_name(after.dtype())
                ),
            ));
        }
        Ok(())
    }

    fn stored(&self) -> Result<Vec<u8>> {
        match &self.place {
            Place::Memory(tensor) => Ok(little_endian(tensor)?),
            Place::Sum(sum) => Ok(little_endian(&sum.load()?)?),
            Place::File { file, offset } => {
                let mut bytes = vec![0; self.elements() * self.dtype.size_in_bytes()];
                file.file
                    .read_exact_at(&mut bytes, *offset)
                    .map_err(|error| broken(&file.path, format!("tensor `{}`: {error}", self.name)))?;
                Ok(bytes)
            }
        }
    }
}

/// The name of a number type: `f32`, `bf16`, `i64`, ...
pub fn dtype_name(dtype: DType) -> &'static str {
    dtype.as_str()
}

/// The type in which a tensor is written when `dtype` is requested. Integers stay integers; the front end's window and
/// filter bank and the statistics of batch normalisation keep their type, since the features and the scale of every
/// layer depend on them and they are small.
pub fn written_dtype(entry: &TensorEntry, asked: Option<DType>) -> DType {
    let is_float = matches!(entry.dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
    match asked {
        Some(dtype) if is_float && !entry.is_buffer() => dtype,
        Some(DType::F32) if is_float => DType::F32,
        _ => entry.dtype,
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
