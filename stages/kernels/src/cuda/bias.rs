//! Bias of linear and convolution layers.

use candle_core::{DType, Tensor};

use super::Argument::{Int, Long, Read, Write};
use super::sums::Partial;
use super::{Grid, launch};
use crate::error::Result;

pub fn add_bias(y: &Tensor, bias: &Tensor) -> Result<()> {
    let (n, width) = (y.elem_count(), bias.elem_count());
    let arguments = [Write(y), Read(bias), Long(n as u64), Int(width)];
    launch("add_bias", Grid::elements(n), &arguments)
}

pub fn column_sum(dy: &Tensor) -> Result<Tensor> {
    let dy = dy.contiguous()?;
    let width = dy.dims().last().copied().unwrap_or(1);
    let rows = dy.elem_count() / width.max(1);
    let partial = Partial::new(DType::F32, rows, width, dy.device())?;
    let sizes = [rows, width, partial.chunk].map(Int);
    let tensors = [Read(&dy), Write(&partial.sums)];
    launch("column_sum", partial.grid(), &[&tensors[..], &sizes].concat())?;
    partial.total(0, width, width)
}
