//! Weights in the form of safetensors.

use half::f16;
use safetensors::{Dtype, SafeTensors};

use crate::error::{Error, Result};

/// A file that the program carries: zstd over the bytes shuffled as by Blosc and HDF5, first those at multiples of `size`
/// (that of an element), then those one behind them, and so on. Signs and exponents, which repeat, then lie together.
pub fn unpack(packed: &[u8], size: usize) -> Result<Vec<u8>> {
    let shuffled = zstd::decode_all(packed).map_err(|error| Error::Weights(error.to_string()))?;
    let mut bytes = vec![0; shuffled.len()];
    let mut from = shuffled.into_iter();
    for first in 0..size {
        for (to, byte) in bytes.iter_mut().skip(first).step_by(size).zip(&mut from) {
            *to = byte;
        }
    }
    Ok(bytes)
}

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

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.0.tensor(name).is_ok()
    }

    /// Shape of a tensor.
    pub fn shape(&self, name: &str) -> Result<Vec<usize>> {
        let tensor = self.0.tensor(name);
        tensor
            .map(|tensor| tensor.shape().to_vec())
            .map_err(|error| Error::Weights(format!("{name}: {error}")))
    }

    /// A tensor of f32 or f16, row-major. Another shape, type, or a value that is not finite is an error.
    pub fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let tensor = self
            .0
            .tensor(name)
            .map_err(|error| Error::Weights(format!("{name}: {error}")))?;
        let values: Vec<f32> = match tensor.dtype() {
            Dtype::F32 if tensor.shape() == shape => {
                let (values, _) = tensor.data().as_chunks();
                values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
            }
            Dtype::F16 if tensor.shape() == shape => {
                let (values, _) = tensor.data().as_chunks();
                values.iter().map(|&bytes| f16::from_le_bytes(bytes).to_f32()).collect()
            }
            dtype => {
                let found = tensor.shape();
                return Err(Error::Weights(format!(
                    "{name} is {dtype:?} of shape {found:?}; F32 or F16 of shape {shape:?} is needed"
                )));
            }
        };
        if values.iter().any(|value| !value.is_finite()) {
            return Err(Error::Weights(format!("{name} has values that are not finite")));
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_carried_is_unshuffled() {
        // 7 bytes in elements of 2: those at 0, 2, 4, 6, then those at 1, 3, 5.
        let packed = zstd::encode_all(&[0u8, 2, 4, 6, 1, 3, 5][..], 1).unwrap();
        assert_eq!(unpack(&packed, 2).unwrap(), [0, 1, 2, 3, 4, 5, 6]);
        assert!(unpack(&packed[..8], 2).is_err());
    }

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
