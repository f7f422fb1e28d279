//! Encoding of a message.

use std::io::{self, Write};

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use flow_kernels::device::moved;
use flow_kind::processes::Payload;
use half::slice::HalfFloatSliceExt;

use super::Value;
use super::format::dtype_code;
use crate::error::TrainingError;

/// A message that is built value by value. Tensors are referenced, and written when the message is sent.
#[derive(Clone, Default)]
pub(in crate::ranks) struct Message {
    pieces: Vec<Piece>,
    size: u64,
}

#[derive(Clone)]
enum Piece {
    Bytes(Vec<u8>),
    /// Contiguous, on the CPU.
    Tensor(Tensor),
}

impl Message {
    /// A message of a kind, which is its first byte.
    pub fn new(kind: u8) -> Message {
        Message::default().with(&kind)
    }

    /// The message with one more value.
    pub fn with(mut self, value: &impl Value) -> Message {
        value.write(&mut self);
        self
    }

    /// The message with bytes that follow without their number.
    pub fn with_bytes(mut self, bytes: &[u8]) -> Message {
        self.bytes(bytes);
        self
    }

    pub fn with_text(mut self, text: &str) -> Message {
        self.text(text);
        self
    }

    /// The message with a tensor: data type, shape, elements in row-major order.
    ///
    /// # Errors
    /// Where its data type is not sent, or it cannot be copied to host memory.
    pub fn with_tensor(self, tensor: &Tensor) -> Result<Message, TrainingError> {
        let tensor = moved(tensor, &Device::Cpu)?.contiguous()?;
        let mut message = self.with_dtype(tensor.dtype())?.with(&tensor.dims().to_vec());
        message.size += (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64;
        message.pieces.push(Piece::Tensor(tensor));
        Ok(message)
    }

    /// # Errors
    /// Where tensors of that type are not sent.
    pub fn with_dtype(self, dtype: DType) -> Result<Message, TrainingError> {
        Ok(self.with(&dtype_code(dtype)?))
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.size += bytes.len() as u64;
        if let Some(Piece::Bytes(last)) = self.pieces.last_mut() {
            last.extend_from_slice(bytes);
        } else {
            self.pieces.push(Piece::Bytes(bytes.to_vec()));
        }
    }

    /// A text after its length.
    pub(super) fn text(&mut self, text: &str) {
        text.len().write(self);
        self.bytes(text.as_bytes());
    }
}

impl Payload for Message {
    fn size(&self) -> u64 {
        self.size
    }

    fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        for piece in &self.pieces {
            match piece {
                Piece::Bytes(bytes) => to.write_all(bytes)?,
                Piece::Tensor(tensor) => write_tensor(tensor, to)?,
            }
        }
        Ok(())
    }
}

fn write_tensor(tensor: &Tensor, to: &mut dyn Write) -> io::Result<()> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(numbers), Some((from, end))) = (&*storage, layout.contiguous_offsets()) else {
        return Err(io::Error::other("a tensor that is not contiguous on the CPU"));
    };
    match numbers {
        CpuStorage::F32(numbers) => to.write_all(bytemuck::cast_slice(&numbers[from..end])),
        CpuStorage::F64(numbers) => to.write_all(bytemuck::cast_slice(&numbers[from..end])),
        CpuStorage::I64(numbers) => to.write_all(bytemuck::cast_slice(&numbers[from..end])),
        CpuStorage::U32(numbers) => to.write_all(bytemuck::cast_slice(&numbers[from..end])),
        CpuStorage::BF16(numbers) => {
            let bits: &[u16] = numbers[from..end].reinterpret_cast();
            to.write_all(bytemuck::cast_slice(bits))
        }
        CpuStorage::F16(numbers) => {
            let bits: &[u16] = numbers[from..end].reinterpret_cast();
            to.write_all(bytemuck::cast_slice(bits))
        }
        _ => Err(io::Error::other("a tensor of a type that is not sent")),
    }
}
