//! Weights in the form of safetensors.

use safetensors::{Dtype, SafeTensors};

use crate::error::{Error, Result};

/// The tensors of a file.
#[derive(Debug)]
pub struct Weights<'a>(SafeTensors<'a>);

impl<'a> Weights<'a> {
    /// Reads the header of `bytes`, a whole safetensors file.
    pub fn open(bytes: &'a [u8]) -> Result<Self> {
        SafeTensors::deserialize(bytes)
            .map(Self)
            .map_err(|error| Error::Weights(error.to_string()))
    }

    /// A tensor of f32, row-major. Another shape, type, or a value that is not finite is an error.
    pub fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let tensor = self
            .0
            .tensor(name)
            .map_err(|error| Error::Weights(format!("{name}: {error}")))?;
        if tensor.dtype() != Dtype::F32 || tensor.shape() != shape {
            let (dtype, found) = (tensor.dtype(), tensor.shape());
            return Err(Error::Weights(format!(
                "{name} is {dtype:?} of shape {found:?}; F32 of shape {shape:?} is needed"
            )));
        }
        let (values, _) = tensor.data().as_chunks();
        let values: Vec<f32> = values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        if values.iter().any(|value| !value.is_finite()) {
            return Err(Error::Weights(format!("{name} has values that are not finite")));
        }
        Ok(values)
    }
}
