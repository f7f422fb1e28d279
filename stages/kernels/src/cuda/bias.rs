//! Bias of linear and convolution layers.

use candle_core::Tensor;

use super::Argument::{Int, Long, Read, Write};
use super::sums::Partial;
use super::{Grid, fresh, launch};
use crate::column_sums::ColumnSums;
use crate::error::{Error, Result};

pub fn add_bias(y: &Tensor, bias: &Tensor) -> Result<()> {
    let (n, width) = (y.elem_count(), bias.elem_count());
    let arguments = [Write(y), Read(bias), Long(n as u64), Int(width)];
    launch("add_bias", Grid::elements(n), &arguments)
}

pub fn column_sum(dy: &Tensor) -> Result<Tensor> {
    column_sums(dy)?.total()
}

pub fn column_sums(dy: &Tensor) -> Result<ColumnSums> {
    let dy = dy.contiguous()?;
    let width = dy.dims().last().copied().unwrap_or(1);
    let dy = dy.reshape((dy.elem_count() / width.max(1), width))?;
    let partial = fresh((blocks(dy.dim(0)?), width), &dy)?;
    partial_column_sum(&dy, &partial)?;
    Ok(ColumnSums::partial(partial))
}

/// Blocks that so many rows are shared out among.
pub fn blocks(rows: usize) -> usize {
    Partial::chunks_of(rows).1
}

/// What each block finds of the sums of the rows of `x` (rows, columns), in `partial` (blocks, columns).
pub fn partial_column_sum(x: &Tensor, partial: &Tensor) -> Result<()> {
    let x = x.contiguous()?;
    let (rows, width) = x.dims2()?;
    let (chunk, chunks) = Partial::chunks_of(rows);
    if partial.dims() != [chunks, width] {
        return Err(Error::Input(format!(
            "sums of {width} columns in {chunks} blocks for a tensor of shape {:?}",
            partial.dims()
        )));
    }
    let sizes = [rows, width, chunk].map(Int);
    let grid = Grid::of(width.div_ceil(32), chunks);
    launch("column_sum", grid, &[&[Read(&x), Write(partial)][..], &sizes].concat())
}
