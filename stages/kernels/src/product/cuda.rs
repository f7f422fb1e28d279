//! Matrix products by cuBLASLt or cuBLAS whose result is in f32, whatever its factors are, is rounded to bf16, or is added to
//! what is there.

use candle_core::{DType, Tensor};

use super::cublaslt;
use crate::device::executor::executor;
use crate::device::launch::fresh_of;
use crate::error::{Error, Result};
use crate::ops::sums::bias::add_bias;

/// `a b` in f32 for matrices (m, k) and (k, n) of one type, f32, bf16 or f16, transposed ones too, or for stacks of them. cuBLAS
/// multiplies stacks in their own type, and the result is widened.
pub fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    product_with_bias(a, b, None)
}

/// The same with a bias (n) added to each row.
pub fn product_with_bias(a: &Tensor, b: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if let Some(out) = by_cublaslt(a, b, bias)? {
        return Ok(out);
    }
    without_cublaslt(a, b, bias)
}

/// `a b` of [`product()`] rounded to bf16, for factors in bf16.
pub fn product_in_bf16(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    match computed_by_cublaslt(DType::BF16, a, b, None)? {
        Some(out) => Ok(out),
        None => Ok(without_cublaslt(a, b, None)?.to_dtype(DType::BF16)?),
    }
}

fn without_cublaslt(a: &Tensor, b: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let out = executor().product(a, b)?;
    if let Some(bias) = bias {
        add_bias(&out, bias)?;
    }
    Ok(out)
}

/// The same, where cuBLASLt is there and takes it.
pub fn by_cublaslt(a: &Tensor, b: &Tensor, bias: Option<&Tensor>) -> Result<Option<Tensor>> {
    computed_by_cublaslt(DType::F32, a, b, bias)
}

/// With a result of this type.
fn computed_by_cublaslt(dtype: DType, a: &Tensor, b: &Tensor, bias: Option<&Tensor>) -> Result<Option<Tensor>> {
    if !cublaslt::is_there() {
        return Ok(None);
    }
    let ([stack @ .., m, k], [of_b @ .., l, n]) = (a.dims(), b.dims()) else {
        return Ok(None);
    };
    // What does not fit is refused by those who come after.
    if k != l || stack != of_b || bias.is_some_and(|bias| bias.dims() != [*n]) {
        return Ok(None);
    }
    let out = fresh_of(dtype, [stack, &[*m, *n]].concat(), a.device())?;
    Ok(cublaslt::multiply(&out, a, b, bias, 0.0)?.then_some(out))
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
    if cublaslt::multiply(sum, a, b, None, 1.0)? {
        return Ok(());
    }
    executor().multiply(sum, a, b, 1.0)
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
    let to = out.narrow(0, first, m)?;
    if cublaslt::multiply(&to, a, b, None, 0.0)? {
        return Ok(());
    }
    executor().multiply(&to, a, b, 0.0)
}
