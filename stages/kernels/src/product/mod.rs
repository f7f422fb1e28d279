//! Matrix products.
//!
//! Products in f32 on x86-64 processors with AVX-512 or AVX2 are our own; the others are candle's. An element of ours is
//! the same to the bit whatever the other rows, the number of threads and the processor.

#[cfg(target_arch = "x86_64")]
mod cache;
pub mod cublaslt;
mod cuda;
#[cfg(test)]
mod device_tests;
#[cfg(target_arch = "x86_64")]
mod gemm;
#[cfg(target_arch = "x86_64")]
mod gemv;
pub mod low_precision;
#[cfg(target_arch = "x86_64")]
mod matrix;
#[cfg(target_arch = "x86_64")]
mod micro_kernel;
#[cfg(target_arch = "x86_64")]
mod packing;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use crate::counts::{converted, multiplied};
use crate::device::is_gpu;
use crate::device::launch::fresh;
use crate::error::{Error, Result};
use crate::ops::sums::bias::add_bias;

/// Whether an element of a product in f32 on the CPU is the same to the bit whatever the other rows are: whether such products
/// are our own here.
pub fn is_row_invariant() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        own::processor().is_some()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// `a b` for matrices (m, k) and (k, n), transposed ones too, or for stacks of as many matrices, (.., m, k) and
/// (.., k, n).
pub fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    count(a, b);
    if is_gpu(a.device())
        && a.dtype() == DType::F32
        && let Some(out) = cuda::by_cublaslt(a, b, None)?
    {
        return Ok(out);
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(out) = own::product(a, b)? {
        return Ok(out);
    }
    Ok(a.matmul(b)?)
}

/// `a b` as [`product_in`] has it, for matrices (m, k) and (k, n), with `bias` (n) added to each row; on a device by the product
/// itself where cuBLASLt computes it.
///
/// # Errors
/// Where shapes do not fit, or the device fails.
pub fn product_with_bias_in(dtype: DType, a: &Tensor, b: &Tensor, bias: &Tensor) -> Result<Tensor> {
    if !is_gpu(a.device()) || bias.dtype() != DType::F32 {
        let out = product_in(dtype, a, b)?;
        add_bias(&out, bias)?;
        return Ok(out);
    }
    count(a, b);
    cuda::product_with_bias(&factor_in(dtype, a)?, &factor_in(dtype, b)?, Some(bias))
}

/// `a b` with both factors rounded to `dtype` and sums and result in f32, on a device; elsewhere [`product`]. On a device `a`
/// may be of type `dtype` already.
pub fn product_in(dtype: DType, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if !is_gpu(a.device()) || (dtype == a.dtype() && !matches!(dtype, DType::BF16 | DType::F16)) {
        return product(a, b);
    }
    count(a, b);
    cuda::product(&factor_in(dtype, a)?, &factor_in(dtype, b)?)
}

/// The same, on a device in bf16 with the result rounded to bf16 too: half the memory that it is written to and read from.
pub fn product_rounded_in(dtype: DType, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if !is_gpu(a.device()) || dtype != DType::BF16 {
        return product_in(dtype, a, b);
    }
    count(a, b);
    cuda::product_in_bf16(&factor_in(dtype, a)?, &factor_in(dtype, b)?)
}

/// `sum += a b` in place, as [`product_in`] has it, for matrices on a device; `sum` is in f32 and contiguous.
pub fn add_product_in(dtype: DType, sum: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    count(a, b);
    cuda::add_product(sum, &factor_in(dtype, a)?, &factor_in(dtype, b)?)
}

/// Products of one width on a device whose rows come one after another in one tensor.
#[derive(Debug)]
pub struct StackedProducts {
    /// (rows, columns) in f32.
    rows: Tensor,
    filled: usize,
}

impl StackedProducts {
    /// For this many rows in all, on the device of `like`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn new(rows: usize, columns: usize, like: &Tensor) -> Result<Self> {
        Ok(Self {
            rows: fresh((rows, columns), like)?,
            filled: 0,
        })
    }

    /// The next rows: `a b` as [`product_in`] has it.
    ///
    /// # Errors
    /// Where shapes do not fit.
    pub fn push(&mut self, dtype: DType, a: &Tensor, b: &Tensor) -> Result<()> {
        count(a, b);
        cuda::product_into_rows(&self.rows, self.filled, &factor_in(dtype, a)?, &factor_in(dtype, b)?)?;
        self.filled += a.dim(0)?;
        Ok(())
    }

    /// All rows.
    ///
    /// # Errors
    /// Where some are missing.
    pub fn rows(self) -> Result<Tensor> {
        match self.rows.dim(0)? {
            rows if rows == self.filled => Ok(self.rows),
            rows => Err(Error::Input(format!("{} of {rows} rows of products", self.filled))),
        }
    }
}

/// A factor of several products of [`product_in`] rounded once for all of them; itself where that multiplies it as it is. A
/// transposed matrix is rounded as it is stored.
pub fn factor_in(dtype: DType, x: &Tensor) -> Result<Tensor> {
    if x.dtype() == dtype || !is_gpu(x.device()) {
        return Ok(x.clone());
    }
    converted();
    Ok(match x.is_contiguous() {
        true => x.to_dtype(dtype)?,
        false => x.t()?.to_dtype(dtype)?.t()?,
    })
}

/// Counts a product of stacks of matrices. What does not fit is refused by the product itself.
fn count(a: &Tensor, b: &Tensor) {
    if let ([stack @ .., m, k], [.., n]) = (a.dims(), b.dims()) {
        multiplied(stack.iter().product(), *m, *k, *n);
    }
}

/// The right-hand side of many products, packed once.
pub struct PackedRhs(Rhs);

enum Rhs {
    #[cfg(target_arch = "x86_64")]
    Packed(packing::PackedMatrix),
    /// Where the products are candle's.
    Unpacked(Tensor),
}

impl PackedRhs {
    /// Packs a matrix (k, n), transposed or not.
    pub fn new(b: &Tensor) -> Result<Self> {
        #[cfg(target_arch = "x86_64")]
        if let Some(packed) = own::pack(b)? {
            return Ok(Self(Rhs::Packed(packed)));
        }
        Ok(Self(Rhs::Unpacked(b.clone())))
    }

    /// `a b` for `a` (m, k).
    pub fn product(&self, a: &Tensor) -> Result<Tensor> {
        match &self.0 {
            #[cfg(target_arch = "x86_64")]
            Rhs::Packed(packed) => {
                let [depth, columns] = packed.shape();
                multiplied(1, a.elem_count() / depth.max(1), depth, columns);
                own::product_with(a, packed)
            }
            Rhs::Unpacked(b) => product(a, b),
        }
    }

    /// From a weight of a linear layer as PyTorch keeps it, (`outputs`, inputs) row-major: the product is `x W^T`.
    pub fn from_weight(weight: &[f32], outputs: usize) -> Result<Self> {
        let inputs = weight.len() / outputs.max(1);
        Self::new(&Tensor::from_slice(weight, (outputs, inputs), &Device::Cpu)?.t()?)
    }

    /// `a b` on the CPU, where row `i` of `a` begins at `i * row_step` of `values`: rows may overlap, as those of a
    /// convolution in time do. The result is row-major, (rows, n).
    ///
    /// # Errors
    /// If rows lie beyond the values.
    pub fn product_of_rows(&self, values: &[f32], rows: usize, row_step: usize) -> Result<Vec<f32>> {
        match &self.0 {
            #[cfg(target_arch = "x86_64")]
            Rhs::Packed(packed) => own::product_of_rows(values, rows, row_step, packed),
            Rhs::Unpacked(b) => unpacked_product_of_rows(b, values, rows, row_step),
        }
    }

    /// The same into `out`, of rows times n values, which are equal to the bit to those of
    /// [`product_of_rows`](Self::product_of_rows).
    ///
    /// # Errors
    /// As there, and if `out` is of another size.
    pub fn product_of_rows_into(&self, values: &[f32], rows: usize, row_step: usize, out: &mut [f32]) -> Result<()> {
        self.product_of_taps_into(values, rows, row_step, &[0], out)
    }

    /// The same where row `i` is put together from several places, those of a convolution's taps: its part for tap `t`, of
    /// k / taps values, begins at `i * row_step + taps[t]`.
    ///
    /// # Errors
    /// As there, and if k is not a multiple of the number of taps.
    pub fn product_of_taps_into(
        &self,
        values: &[f32],
        rows: usize,
        row_step: usize,
        taps: &[usize],
        out: &mut [f32],
    ) -> Result<()> {
        match &self.0 {
            #[cfg(target_arch = "x86_64")]
            Rhs::Packed(packed) => own::product_of_taps_into(values, rows, row_step, taps, packed, out),
            Rhs::Unpacked(b) => {
                let (depth, columns) = b.dims2()?;
                if out.len() != rows * columns {
                    return Err(other_size(out.len(), rows, columns));
                }
                let part = part_of_depth(depth, taps)?;
                let mut a = Vec::with_capacity(rows * depth);
                for row in 0..rows {
                    for tap in taps {
                        let start = row * row_step + tap;
                        a.extend_from_slice(values.get(start..start + part).ok_or_else(outside)?);
                    }
                }
                out.copy_from_slice(&unpacked_product_of_rows(b, &a, rows, depth)?);
                Ok(())
            }
        }
    }
}

/// [`PackedRhs::product_of_rows`] where products are candle's.
fn unpacked_product_of_rows(b: &Tensor, values: &[f32], rows: usize, row_step: usize) -> Result<Vec<f32>> {
    let depth = b.dim(0)?;
    let row = |row: usize| {
        let start = row * row_step;
        values.get(start..start + depth).ok_or_else(outside)
    };
    let a = (0..rows).map(row).collect::<Result<Vec<_>>>()?.concat();
    let a = Tensor::from_vec(a, (rows, depth), &Device::Cpu)?;
    Ok(product(&a, b)?.flatten_all()?.to_vec1()?)
}

/// Steps of depth for each of `taps`.
fn part_of_depth(depth: usize, taps: &[usize]) -> Result<usize> {
    match depth.checked_div(taps.len()) {
        Some(part) if part * taps.len() == depth => Ok(part),
        _ => Err(Error::Input(format!("a depth of {depth} for {} taps", taps.len()))),
    }
}

fn other_size(found: usize, rows: usize, columns: usize) -> Error {
    Error::Input(format!("room for {found} values for a product of {rows} x {columns}"))
}

/// Does each task, on all threads of the pool if asked.
fn each_task(count: usize, parallel: bool, work: impl Fn(usize) + Send + Sync) {
    if parallel {
        (0..count).into_par_iter().for_each(work);
    } else {
        (0..count).for_each(work);
    }
}

fn outside() -> Error {
    Error::Input("a matrix exceeds its storage".into())
}

#[cfg(target_arch = "x86_64")]
mod own {
    use std::mem::MaybeUninit;
    use std::ops::Deref;
    use std::sync::OnceLock;

    use candle_core::{DType, Device, Layout, Storage, Tensor};
    use rayon::prelude::*;

    use super::gemm::multiply;
    use super::matrix::Matrix;
    use super::micro_kernel::Processor;
    use super::packing::PackedMatrix;
    use super::{other_size, outside, part_of_depth};
    use crate::error::{Error, Result};
    use crate::filled;

    pub fn processor() -> Option<Processor> {
        static DETECTED: OnceLock<Option<Processor>> = OnceLock::new();
        *DETECTED.get_or_init(Processor::detect)
    }

    /// The values behind a CPU tensor in f32, with all that its storage has.
    fn values(storage: &impl Deref<Target = Storage>) -> Option<&[f32]> {
        match &**storage {
            Storage::Cpu(values) => values.as_slice().ok(),
            _ => None,
        }
    }

    /// Matrix `index` of a stack of matrices.
    fn matrix<'a>(values: &'a [f32], layout: &Layout, index: usize) -> Option<Matrix<'a>> {
        let (dims, steps) = (layout.dims(), layout.stride());
        let stacked = dims.len().checked_sub(2)?;
        let (mut start, mut rest) = (layout.start_offset(), index);
        for (dim, step) in dims[..stacked].iter().zip(&steps[..stacked]).rev() {
            start += rest % dim * step;
            rest /= dim;
        }
        let both = |all: &[usize]| [all[stacked], all[stacked + 1]];
        Matrix::new(values, start, both(dims), both(steps))
    }

    /// None if it is not for us.
    pub fn product(a: &Tensor, b: &Tensor) -> Result<Option<Tensor>> {
        let Some(processor) = processor() else {
            return Ok(None);
        };
        let stacked = a.rank().saturating_sub(2);
        if a.dtype() != DType::F32
            || b.dtype() != DType::F32
            || a.rank() < 2
            || a.rank() != b.rank()
            || a.dims()[..stacked] != b.dims()[..stacked]
            || a.dims()[stacked + 1] != b.dims()[stacked]
        {
            return Ok(None);
        }
        let ((sa, la), (sb, lb)) = (a.storage_and_layout(), b.storage_and_layout());
        let (Some(va), Some(vb)) = (values(&sa), values(&sb)) else {
            return Ok(None);
        };
        let count: usize = a.dims()[..stacked].iter().product();
        let (rows, columns) = (a.dims()[stacked], b.dims()[stacked + 1]);
        let size = rows * columns;
        // All are looked at before anything is computed.
        let pairs = (0..count)
            .map(|i| Some((matrix(va, la, i)?, matrix(vb, lb, i)?)))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(outside)?;
        let fill = |out: &mut [MaybeUninit<f32>]| match &pairs[..] {
            [(a, b)] => multiply(processor, *a, *b, out),
            _ => out
                .par_chunks_mut(size.max(1))
                .zip(&pairs)
                .for_each(|(out, (a, b))| multiply(processor, *a, *b, out)),
        };
        // SAFETY: the result is cut into as many chunks of `size` as there are pairs, and `multiply` writes the whole of its
        // chunk, or panics.
        let out = unsafe { filled(count * size, fill) };
        let mut shape = a.dims().to_vec();
        shape[stacked + 1] = columns;
        Ok(Some(Tensor::from_vec(out, shape, &Device::Cpu)?))
    }

    /// None if it is not for us.
    pub fn pack(b: &Tensor) -> Result<Option<PackedMatrix>> {
        let (Some(processor), DType::F32, 2) = (processor(), b.dtype(), b.rank()) else {
            return Ok(None);
        };
        let (storage, layout) = b.storage_and_layout();
        let Some(values) = values(&storage) else {
            return Ok(None);
        };
        let b = matrix(values, layout, 0).ok_or_else(outside)?;
        Ok(Some(PackedMatrix::new(processor, b)))
    }

    pub fn product_with(a: &Tensor, b: &PackedMatrix) -> Result<Tensor> {
        let [depth, columns] = b.shape();
        let (rows, found) = a.dims2()?;
        let (storage, layout) = a.storage_and_layout();
        let (Some(values), true) = (values(&storage), found == depth) else {
            return Err(Error::Input(format!(
                "{} x {found} values of type {} times {depth} x {columns} on the CPU",
                rows,
                a.dtype().as_str()
            )));
        };
        let a = matrix(values, layout, 0).ok_or_else(outside)?;
        // SAFETY: `multiply` writes the whole of the result, or panics.
        let out = unsafe { filled(rows * columns, |out| b.multiply(a, &[0], out)) };
        Ok(Tensor::from_vec(out, (rows, columns), &Device::Cpu)?)
    }

    pub fn product_of_rows(values: &[f32], rows: usize, row_step: usize, b: &PackedMatrix) -> Result<Vec<f32>> {
        let [depth, columns] = b.shape();
        let a = Matrix::new(values, 0, [rows, depth], [row_step, 1]).ok_or_else(outside)?;
        // SAFETY: `multiply` writes the whole of the result, or panics.
        Ok(unsafe { filled(rows * columns, |out| b.multiply(a, &[0], out)) })
    }

    pub fn product_of_taps_into(
        values: &[f32],
        rows: usize,
        row_step: usize,
        taps: &[usize],
        b: &PackedMatrix,
        out: &mut [f32],
    ) -> Result<()> {
        let [depth, columns] = b.shape();
        let part = part_of_depth(depth, taps)?;
        let a = Matrix::new(values, 0, [rows, part], [row_step, 1]).ok_or_else(outside)?;
        let last = taps.iter().max().copied().unwrap_or(0);
        if rows > 0 && part > 0 && !a.has(rows - 1, part - 1, last) {
            return Err(outside());
        }
        if out.len() != rows * columns {
            return Err(other_size(out.len(), rows, columns));
        }
        // SAFETY: both are floats, and `multiply` writes no others than floats.
        let out = unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<MaybeUninit<f32>>(), out.len()) };
        b.multiply(a, taps, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
