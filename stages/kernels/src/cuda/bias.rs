//! Bias of linear and convolution layers.

use candle_core::{DType, Tensor};

use super::Argument::{Int, Long, Read, Write};
use super::sums::Partial;
use super::{Grid, launch};
use crate::column_sums::ColumnSums;
use crate::error::Result;

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
    let (rows, partial) = (dy.dim(0)?, Partial::new(DType::F32, dy.dim(0)?, width, dy.device())?);
    let sizes = [rows, width, partial.chunk].map(Int);
    let arguments = [&[Read(&dy), Write(&partial.sums)][..], &sizes].concat();
    launch("column_sum", partial.grid(), &arguments)?;
    Ok(ColumnSums::partial(partial.sums))
}
