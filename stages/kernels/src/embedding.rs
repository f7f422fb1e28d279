//! Sums over rows that share a place: the gradient of an embedding.

use candle_core::Tensor;

use super::{dispatch, modify, on_gpu, slice};
use crate::error::Result;

/// `sum[rows[i]] += x[i]`, in place, for every row `i` of `x` (N, C) that has a place in `sum` (.., C), in order.
pub fn add_to_rows(sum: &Tensor, x: &Tensor, rows: &[Option<usize>]) -> Result<()> {
    on_gpu!(x, sums::add_to_rows(sum, x, rows));
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
