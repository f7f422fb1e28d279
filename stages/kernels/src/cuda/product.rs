//! Matrix products by cuBLASLt or cuBLAS whose result is in f32, whatever its factors are, is rounded to bf16, or is added to
//! what is there.

use candle_core::{DType, Tensor};

use super::{cublaslt, fresh, fresh_of, is_emulated, sums, without_emulation};
use crate::elementwise;
use crate::error::{Error, Result};
use crate::product;

/// How a matrix, or a stack of matrices that are equally far apart, is in memory. Numbers are of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Placed {
    pub rows: usize,
    pub columns: usize,
    /// Columns are contiguous, not rows.
    pub transposed: bool,
    /// From one row to the next; if it is transposed, from one column to the next.
    pub leading: usize,
    /// How many matrices, and from one to the next. Of one that is in no stack: 1, and 0.
    pub count: usize,
    pub step: usize,
}

impl Placed {
    /// None where neither rows nor columns are contiguous, or matrices of a stack are not equally far apart.
    pub fn of(tensor: &Tensor) -> Option<Self> {
        let ([stack @ .., rows, columns], [steps @ .., row_step, column_step]) = (tensor.dims(), tensor.stride())
        else {
            return None;
        };
        let (rows, columns) = (*rows, *columns);
        // The step along an axis of one element says nothing.
        let (transposed, leading) = match (*row_step, *column_step) {
            (step, 1) if step >= columns || rows == 1 => (false, step.max(columns)),
            (1, step) if step >= rows || columns == 1 => (true, step.max(rows)),
            // A step of 0 repeats one element, which no leading dimension says.
            (step, _) if columns == 1 && (step > 0 || rows == 1) => (false, step),
            (_, step) if rows == 1 && step > 0 => (true, step),
            _ => return None,
        };
        let (mut count, mut step) = (1, 0);
        for (&dim, &of_dim) in stack.iter().zip(steps).rev().filter(|(dim, _)| **dim != 1) {
            if count > 1 && of_dim != step * count {
                return None;
            }
            if count == 1 {
                step = of_dim;
            }
            count *= dim;
        }
        Some(Self {
            rows,
            columns,
            transposed,
            leading: leading.max(1),
            count,
            step,
        })
    }
}

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
    let out = if is_emulated() {
        emulated(a, b)?
    } else if a.rank() != 2 || b.rank() != 2 {
        a.matmul(b)?.to_dtype(DType::F32)?
    } else {
        let out = fresh((a.dim(0)?, b.dim(1)?), a)?;
        by_cublas(&out, a, b, 0.0)?;
        out
    };
    if let Some(bias) = bias {
        sums::add_bias(&out, bias)?;
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
    if is_emulated() {
        let added = emulated(a, b)?;
        return without_emulation(|| elementwise::add_in_place(sum, &added));
    }
    by_cublas(sum, a, b, 1.0)
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
    if is_emulated() {
        return Ok(out.slice_set(&emulated(a, b)?, 0, first)?);
    }
    by_cublas(&to, a, b, 0.0)
}

/// cuBLAS multiplies numbers in bf16 exactly, and adds in f32.
fn emulated(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let multiply = || product::product(&a.to_dtype(DType::F32)?, &b.to_dtype(DType::F32)?);
    without_emulation(|| crate::counts::counted(multiply).0)
}

#[cfg(feature = "cuda")]
fn by_cublas(out: &Tensor, a: &Tensor, b: &Tensor, beta: f32) -> Result<()> {
    let described = || cublaslt::described(out, a, b);
    crate::timings::around(out.device(), described, || super::device::multiply(out, a, b, beta))
}

#[cfg(not(feature = "cuda"))]
fn by_cublas(_: &Tensor, _: &Tensor, _: &Tensor, _: f32) -> Result<()> {
    Err(Error::Input("a matrix product: built without CUDA".into()))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn stacks_whose_matrices_are_equally_far_apart_are_told_from_others() {
        let of = |tensor: &Tensor| Placed::of(tensor);
        let all = Tensor::zeros((4, 3, 5, 6), DType::F32, &Device::Cpu).unwrap();
        let placed = of(&all).unwrap();
        assert_eq!(
            (placed.count, placed.step, placed.leading, placed.transposed),
            (12, 30, 6, false)
        );
        let placed = of(&all.transpose(2, 3).unwrap()).unwrap();
        assert_eq!(
            (placed.rows, placed.columns, placed.leading, placed.transposed),
            (6, 5, 6, true)
        );
        let placed = of(&all.narrow(1, 1, 1).unwrap()).unwrap();
        assert_eq!((placed.count, placed.step), (4, 90));
        assert_eq!(of(&all.narrow(1, 0, 2).unwrap()), None);
        assert_eq!(of(&all.transpose(0, 1).unwrap()), None);
        let shared = all.narrow(0, 0, 1).unwrap().narrow(1, 0, 1).unwrap();
        let placed = of(&shared.broadcast_as((4, 3, 5, 6)).unwrap()).unwrap();
        assert_eq!((placed.count, placed.step), (12, 0));
        // Elements that are repeated are in no matrix.
        let one = all
            .flatten_all()
            .unwrap()
            .narrow(0, 0, 1)
            .unwrap()
            .reshape((1, 1))
            .unwrap();
        for (shape, is_matrix) in [((1, 1), true), ((5, 1), false), ((1, 6), false), ((5, 6), false)] {
            assert_eq!(of(&one.broadcast_as(shape).unwrap()).is_some(), is_matrix, "{shape:?}");
        }
        // Heads behind time.
        let heads = Tensor::zeros((2, 5, 3, 6), DType::F32, &Device::Cpu).unwrap();
        let of_one = heads.narrow(0, 0, 1).unwrap().transpose(1, 2).unwrap();
        let placed = of(&of_one).unwrap();
        assert_eq!((placed.count, placed.step, placed.leading), (3, 6, 18));
        assert_eq!(of(&heads.transpose(1, 2).unwrap()), None);
        assert_eq!(
            of(&all.narrow(3, 0, 1).unwrap().narrow(2, 0, 1).unwrap())
                .unwrap()
                .leading,
            6
        );
    }
}
