//! Matrix products by cuBLAS whose result is in f32, whatever its factors are, or is added to what is there.

use candle_core::{DType, Tensor};

use super::{fresh, is_emulated, without_emulation};
use crate::elementwise;
use crate::error::{Error, Result};
use crate::product;

/// `a b` in f32 for matrices (m, k) and (k, n) of one type, f32, bf16 or f16, transposed ones too. Stacks of matrices are
/// multiplied in their own type, and the result is widened.
pub fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if is_emulated() {
        return emulated(a, b);
    }
    if a.rank() != 2 || b.rank() != 2 {
        return Ok(a.matmul(b)?.to_dtype(DType::F32)?);
    }
    let out = fresh((a.dim(0)?, b.dim(1)?), a)?;
    on_device(&out, a, b, 0.0)?;
    Ok(out)
}

/// `sum += a b`.
pub fn add_product(sum: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    let ((m, k), (l, n)) = (a.dims2()?, b.dims2()?);
    if sum.dims() != [m, n] || k != l || sum.dtype() != DType::F32 || !sum.is_contiguous() {
        return Err(Error::Input(format!(
            "a product of {m} x {k} and {l} x {n} cannot be added to a tensor of shape {:?}",
            sum.dims()
        )));
    }
    if is_emulated() {
        let added = emulated(a, b)?;
        return without_emulation(|| elementwise::add_in_place(sum, &added));
    }
    on_device(sum, a, b, 1.0)
}

/// `a b` in f32, written to the rows of `out` from `first` on.
pub fn product_into_rows(out: &Tensor, first: usize, a: &Tensor, b: &Tensor) -> Result<()> {
    let ((m, k), (l, n)) = (a.dims2()?, b.dims2()?);
    let (rows, columns) = out.dims2()?;
    if k != l || columns != n || first + m > rows || out.dtype() != DType::F32 || !out.is_contiguous() {
        return Err(Error::Input(format!(
            "a product of {m} x {k} and {l} x {n} does not fit row {first} of a tensor of shape {:?}",
            out.dims()
        )));
    }
    if is_emulated() {
        return Ok(out.slice_set(&emulated(a, b)?, 0, first)?);
    }
    on_device(&out.narrow(0, first, m)?, a, b, 0.0)
}

/// cuBLAS multiplies numbers in bf16 exactly, and adds in f32.
fn emulated(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    crate::counts::counted(|| product::product(&a.to_dtype(DType::F32)?, &b.to_dtype(DType::F32)?)).0
}

#[cfg(feature = "cuda")]
fn on_device(out: &Tensor, a: &Tensor, b: &Tensor, beta: f32) -> Result<()> {
    super::device::multiply(out, a, b, beta)
}

#[cfg(not(feature = "cuda"))]
fn on_device(_: &Tensor, _: &Tensor, _: &Tensor, _: f32) -> Result<()> {
    Err(Error::Input("a matrix product: built without CUDA".into()))
}
