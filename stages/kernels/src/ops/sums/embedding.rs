//! Sums rows by index: the gradient of an embedding.

use candle_core::Tensor;

pub use super::cuda::ListedRows;
use crate::error::Result;
use crate::{dispatch, modify, on_gpu, slice};

/// `sum[rows[i]] += x[i]`, in place, for every row `i` of `x` (N, C) that has a place in `sum` (.., C), in order.
pub fn add_to_rows(sum: &Tensor, x: &Tensor, rows: &[Option<usize>]) -> Result<()> {
    on_gpu!(x, super::cuda::add_to_rows(sum, x, rows));
    let width = sum.dim(1)?;
    dispatch!(x.dtype(), T => {
        let x = slice::<T>(x)?;
        let x: &[T] = &x;
        modify::<T>(sum, |sum| {
            for (x, row) in x.chunks_exact(width).zip(rows) {
                if let Some(row) = row {
                    let sum = &mut sum[row * width..][..width];
                    sum.iter_mut().zip(x).for_each(|(sum, &x)| *sum += x);
                }
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::flow_cuda_emulator::emulator;
    use crate::testing::values;

    #[test]
    fn rows_are_added_where_they_belong_on_both_sides() {
        let rows = [Some(2), None, Some(0), Some(2)];
        for (dtype, emulated) in [(DType::F64, false), (DType::F32, false), (DType::F32, true)] {
            let x = Tensor::arange(0.0, 8.0, &Device::Cpu).unwrap();
            let x = x.reshape((4, 2)).unwrap().to_dtype(dtype).unwrap();
            let sum = Tensor::ones((3, 2), dtype, &Device::Cpu).unwrap();
            emulator::with(emulated, || add_to_rows(&sum, &x, &rows)).unwrap();
            assert_eq!(values(&sum), [5.0, 6.0, 1.0, 1.0, 7.0, 9.0]);
        }
    }
}
