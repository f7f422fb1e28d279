//! Bias of linear and convolution layers.

use candle_core::Tensor;
use rayon::prelude::*;

use crate::error::Result;
use crate::ops::sums::column_sums::ColumnSums;
use crate::{dispatch, modify, multiversion, on_gpu, rows_per_chunk, slice, sum_over_rows, tensor};

/// `y[.., c] += bias[c]`, in place.
pub fn add_bias(y: &Tensor, bias: &Tensor) -> Result<()> {
    on_gpu!(y, super::cuda::add_bias(y, bias));
    let width = bias.elem_count();
    dispatch!(y.dtype(), T => {
        let bias = slice::<T>(bias)?;
        let bias: &[T] = &bias;
        modify::<T>(y, |y| {
            y.par_chunks_mut(rows_per_chunk(width) * width).for_each(|rows| {
                for row in rows.chunks_exact_mut(width) {
                    for (y, &bias) in row.iter_mut().zip(bias) {
                        *y += bias;
                    }
                }
            });
        })
    })
}

/// [`column_sum`] as sums that are added up later, with others.
pub fn column_sums(dy: &Tensor) -> Result<ColumnSums> {
    on_gpu!(dy, super::cuda::column_sums(dy));
    Ok(ColumnSums::whole(column_sum(dy)?))
}

/// Sum over all but the last dimension: the gradient of a bias. Shape (C).
pub fn column_sum(dy: &Tensor) -> Result<Tensor> {
    on_gpu!(dy, super::cuda::column_sum(dy));
    let dy = dy.contiguous()?;
    let width = dy.dims().last().copied().unwrap_or(1);
    dispatch!(dy.dtype(), T => {
        let dys = slice::<T>(&dy)?;
        let dys: &[T] = &dys;
        let sums = sum_over_rows::<T>(dys.len() / width.max(1), width, |rows, sums| multiversion!({
            for row in dys[rows.start * width..rows.end * width].chunks_exact(width) {
                for (sum, &dy) in sums.iter_mut().zip(row) {
                    *sum += dy;
                }
            }
        }));
        tensor(sums, width)
    })
}
