//! Products whose right-hand side, a weight, is kept in bf16 or int8, and whose left-hand side is rounded to that where it is
//! multiplied: for networks that are not trained. On the CPU.
//!
//! - bf16: both factors are rounded to eight bits, sums are in f32.
//! - int8: the weights of an output are rounded to -127 to 127 of a 127th of the largest of them; the values of a row to 0 to 255
//!   of a 255th of what is between its smallest and its largest one, or zero, which is exact. Sums are whole numbers of 32 bits,
//!   and exact.
//!
//! An element is the same to the bit on every processor, for any number of threads and whatever the other rows: a row's codes are
//! its own. (With bf16 where no sum is a subnormal number.)

mod bf16;
mod int8;
mod quantise;
mod tiles;

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};
use crate::{filled, slice};
use bf16::{Bf16Kernel, Bf16Matrix};
use int8::{Int8Kernel, Int8Matrix, MOST_DEPTH};

/// A number type that factors of products are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LowPrecision {
    Bf16,
    Int8,
}

impl LowPrecision {
    /// The instructions that products of it need to be faster than those in f32, if this processor has none of them; it
    /// computes the same without, in as much time as in f32 or more.
    pub fn missing_instructions(self) -> Option<&'static str> {
        match self {
            #[cfg(target_arch = "x86_64")]
            LowPrecision::Bf16 if Bf16Kernel::best() == Bf16Kernel::Avx512Bf16 => None,
            #[cfg(target_arch = "x86_64")]
            LowPrecision::Int8 if Int8Kernel::best() != Int8Kernel::Loops => None,
            LowPrecision::Bf16 => Some("AVX-512 BF16"),
            LowPrecision::Int8 => Some("AVX-512 VNNI or AVX2"),
        }
    }
}

/// The right-hand side of products, packed once.
pub struct LowPrecisionRhs(Rhs);

enum Rhs {
    Bf16(Bf16Matrix),
    Int8(Int8Matrix),
}

impl LowPrecisionRhs {
    /// From a weight of a linear layer as PyTorch keeps it, (outputs, inputs): the product is `x W^T`.
    ///
    /// # Errors
    /// If the weight is no contiguous matrix of f32 on the CPU, or has so many inputs that sums of int8 may not fit into 32 bits
    /// (more than 66,311).
    pub fn from_weight(precision: LowPrecision, weight: &Tensor) -> Result<Self> {
        let (columns, depth) = weight.dims2()?;
        let values = slice::<f32>(weight)?;
        Ok(Self(match precision {
            LowPrecision::Bf16 => Rhs::Bf16(Bf16Matrix::new(Bf16Kernel::best(), &values, columns, depth)),
            LowPrecision::Int8 if depth > MOST_DEPTH => {
                return Err(Error::Input(format!(
                    "a weight has {depth} inputs; products of int8 may have {MOST_DEPTH}"
                )));
            }
            LowPrecision::Int8 => Rhs::Int8(Int8Matrix::new(Int8Kernel::best(), &values, columns, depth)),
        }))
    }

    /// Inputs and outputs.
    pub fn shape(&self) -> [usize; 2] {
        match &self.0 {
            Rhs::Bf16(b) => [b.depth(), b.columns()],
            Rhs::Int8(b) => [b.depth(), b.columns()],
        }
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Rhs::Bf16(b) => b.bytes(),
            Rhs::Int8(b) => b.bytes(),
        }
    }

    /// `x W^T` in f32 for `x` (rows, inputs) in f32 on the CPU. A value that is not finite makes all elements of its row no numbers
    /// with int8; with bf16 they are what sums of such values are.
    ///
    /// # Errors
    /// If `x` is something else.
    pub fn product(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, found) = x.dims2()?;
        let [depth, columns] = self.shape();
        if found != depth || x.dtype() != DType::F32 {
            return Err(Error::Input(format!(
                "{rows} x {found} values of type {} times {depth} x {columns} of low precision",
                x.dtype().as_str()
            )));
        }
        crate::counts::multiplied(1, rows, depth, columns);
        let x = x.contiguous()?;
        let values = slice::<f32>(&x)?;
        let values: &[f32] = &values;
        let fill = |out: &mut [std::mem::MaybeUninit<f32>]| match &self.0 {
            Rhs::Bf16(b) => b.multiply(values, rows, out),
            Rhs::Int8(b) => b.multiply(values, rows, out),
        };
        // SAFETY: `multiply` writes the whole of the result, or panics.
        let out = unsafe { filled(rows * columns, fill) };
        crate::tensor(out, (rows, columns))
    }
}

impl std::fmt::Debug for LowPrecisionRhs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match self.0 {
            Rhs::Bf16(_) => "bf16",
            Rhs::Int8(_) => "int8",
        };
        let [depth, columns] = self.shape();
        write!(f, "{depth} x {columns} in {name}")
    }
}

#[cfg(test)]
mod tests;
