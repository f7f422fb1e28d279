//! Decoding of a message.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use super::Value;
use super::format::{DTYPES, malformed_message};
use crate::error::TrainingError;

/// Reads a received message value by value, in the order in which [`super::Message`] was built.
///
/// # Errors
/// Every read fails where the message is too short or holds something else.
pub(in crate::ranks) struct MessageReader<'a>(&'a [u8]);

/// The most dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;

impl<'a> MessageReader<'a> {
    /// The kind of a message, and a reader of the rest.
    pub fn new(message: &'a [u8]) -> Result<(u8, MessageReader<'a>), TrainingError> {
        let mut reader = MessageReader(message);
        Ok((reader.value()?, reader))
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8], TrainingError> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or_else(malformed_message)?;
        self.0 = rest;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], TrainingError> {
        self.take(N)?.try_into().map_err(|_| malformed_message())
    }

    pub fn value<T: Value>(&mut self) -> Result<T, TrainingError> {
        T::read(self)
    }

    /// How many bytes are left.
    pub(super) fn left(&self) -> usize {
        self.0.len()
    }

    /// All bytes that are left.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }

    /// A list, after its length. Each item takes at least one byte, so a length above the bytes that are left is an
    /// error.
    pub fn list<T>(&mut self, read: impl Fn(&mut Self) -> Result<T, TrainingError>) -> Result<Vec<T>, TrainingError> {
        let count: usize = self.value()?;
        if count > self.left() {
            return Err(malformed_message());
        }
        (0..count).map(|_| read(self)).collect()
    }

    pub(super) fn numbers<T: bytemuck::Pod>(&mut self, count: usize) -> Result<Vec<T>, TrainingError> {
        let bytes = self.take(count.checked_mul(size_of::<T>()).ok_or_else(malformed_message)?)?;
        let mut numbers = vec![T::zeroed(); count];
        bytemuck::cast_slice_mut(&mut numbers).copy_from_slice(bytes);
        Ok(numbers)
    }

    pub fn tensor(&mut self) -> Result<Tensor, TrainingError> {
        let dtype = self.dtype()?;
        let shape: Vec<usize> = self.value()?;
        if shape.len() > MAX_DIMENSIONS {
            return Err(malformed_message());
        }
        // Strides of a shape with a zero are products of the other sizes.
        let strides = shape.iter().try_fold(1usize, |all, &size| all.checked_mul(size.max(1)));
        strides.ok_or_else(malformed_message)?;
        let count = shape.iter().product();
        let cpu = &Device::Cpu;
        Ok(match dtype {
            DType::F32 => Tensor::from_vec(self.numbers::<f32>(count)?, shape, cpu)?,
            DType::F64 => Tensor::from_vec(self.numbers::<f64>(count)?, shape, cpu)?,
            DType::I64 => Tensor::from_vec(self.numbers::<i64>(count)?, shape, cpu)?,
            DType::U32 => Tensor::from_vec(self.numbers::<u32>(count)?, shape, cpu)?,
            DType::BF16 => {
                let bits = self.numbers::<u16>(count)?;
                Tensor::from_vec(bits.into_iter().map(bf16::from_bits).collect::<Vec<_>>(), shape, cpu)?
            }
            _ => {
                let bits = self.numbers::<u16>(count)?;
                Tensor::from_vec(bits.into_iter().map(f16::from_bits).collect::<Vec<_>>(), shape, cpu)?
            }
        })
    }

    pub fn dtype(&mut self) -> Result<DType, TrainingError> {
        DTYPES
            .get(usize::from(self.value::<u8>()?))
            .copied()
            .ok_or_else(malformed_message)
    }
}
