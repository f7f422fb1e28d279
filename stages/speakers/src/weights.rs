//! Weights of networks: from safetensors in memory, or from files of safetensors or PyTorch.

use std::collections::BTreeMap;
use std::path::Path;

use flow_nn::tensor_files::{DType, TensorEntry, open_tensors};
use half::f16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::error::{Error, Result};

/// The bytes of a file that the program carries, in elements of `size` bytes.
pub fn unpack(packed: &[u8], size: usize) -> Result<Vec<u8>> {
    flow_nn::tensor_files::unpack(packed, size).map_err(|error| Error::Weights(error.to_string()))
}

/// The tensors of a file.
#[derive(Debug)]
pub struct Weights<'a>(Tensors<'a>);

#[derive(Debug)]
enum Tensors<'a> {
    InMemory(SafeTensors<'a>),
    /// Read on demand.
    InFile(BTreeMap<String, TensorEntry>),
}

impl Weights<'static> {
    /// Those of a safetensors file, or of the state dictionary of a PyTorch checkpoint, detected by content. No values
    /// are read yet.
    ///
    /// # Errors
    /// If the file cannot be read or is damaged; it is named.
    pub fn open_file(path: &Path) -> Result<Self> {
        let entries = open_tensors(path).map_err(|error| Error::Input(error.to_string()))?;
        let named = entries.into_iter().map(|entry| (entry.name.clone(), entry));
        Ok(Self(Tensors::InFile(named.collect())))
    }
}

impl<'a> Weights<'a> {
    /// Reads the header of `bytes`, a whole safetensors file.
    pub fn open(bytes: &'a [u8]) -> Result<Self> {
        SafeTensors::deserialize(bytes)
            .map(|tensors| Self(Tensors::InMemory(tensors)))
            .map_err(|error| Error::Weights(error.to_string()))
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        match &self.0 {
            Tensors::InMemory(tensors) => tensors.tensor(name).is_ok(),
            Tensors::InFile(entries) => entries.contains_key(name),
        }
    }

    /// A tensor of f32 or f16, row-major. Another shape, type, or a value that is not finite is an error.
    pub fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let wrong = |dtype: &dyn std::fmt::Debug, found: &[usize]| {
            Error::Weights(format!(
                "{name} is {dtype:?} of shape {found:?}; F32 or F16 of shape {shape:?} is needed"
            ))
        };
        let values: Vec<f32> = match &self.0 {
            Tensors::InMemory(tensors) => {
                let tensor = in_memory(tensors, name)?;
                match tensor.dtype() {
                    Dtype::F32 if tensor.shape() == shape => {
                        let (values, _) = tensor.data().as_chunks();
                        values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
                    }
                    Dtype::F16 if tensor.shape() == shape => {
                        let (values, _) = tensor.data().as_chunks();
                        values.iter().map(|&bytes| f16::from_le_bytes(bytes).to_f32()).collect()
                    }
                    dtype => return Err(wrong(&dtype, tensor.shape())),
                }
            }
            Tensors::InFile(entries) => {
                let entry = in_file(entries, name)?;
                if !matches!(entry.dtype(), DType::F32 | DType::F16) || entry.shape() != shape {
                    return Err(wrong(&entry.dtype(), entry.shape()));
                }
                let unread = |error: &dyn std::fmt::Display| Error::Weights(format!("{name}: {error}"));
                let tensor = entry.load().map_err(|error| unread(&error))?;
                let values = tensor.flatten_all().and_then(|tensor| tensor.to_dtype(DType::F32));
                values
                    .and_then(|tensor| tensor.to_vec1())
                    .map_err(|error| unread(&error))?
            }
        };
        if values.iter().any(|value| !value.is_finite()) {
            return Err(Error::Weights(format!("{name} has values that are not finite")));
        }
        Ok(values)
    }
}

fn in_memory<'a>(tensors: &SafeTensors<'a>, name: &str) -> Result<TensorView<'a>> {
    tensors
        .tensor(name)
        .map_err(|error| Error::Weights(format!("{name}: {error}")))
}

fn in_file<'e>(entries: &'e BTreeMap<String, TensorEntry>, name: &str) -> Result<&'e TensorEntry> {
    entries
        .get(name)
        .ok_or_else(|| Error::Weights(format!("there is no tensor {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_precision_is_read() {
        let bytes: Vec<u8> = [1.5f32, -0.25]
            .into_iter()
            .flat_map(|x| f16::from_f32(x).to_le_bytes())
            .collect();
        let view = safetensors::tensor::TensorView::new(Dtype::F16, vec![2], &bytes).unwrap();
        let file = safetensors::serialize([("x", view)], None).unwrap();
        let weights = Weights::open(&file).unwrap();
        assert_eq!(weights.floats("x", &[2]).unwrap(), [1.5, -0.25]);
        assert!(weights.floats("x", &[1, 2]).is_err());
    }
}
