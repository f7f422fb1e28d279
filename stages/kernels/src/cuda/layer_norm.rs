//! Layer normalisation.

use candle_core::{DType, Tensor};

use super::Argument::{Int, Read, ReadIf, Write};
use super::sums::Partial;
use super::{Grid, alike, fresh, launch};
use crate::error::Result;

pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<(Tensor, Tensor)> {
    let x = x.contiguous()?;
    let d = weight.elem_count();
    let rows = x.elem_count() / d.max(1);
    alike("layer norm", weight, bias)?;
    let (out, statistics) = (fresh(x.shape(), &x)?, fresh((rows, 2), &x)?);
    let tensors = [Read(&x), Read(weight), Read(bias), Write(&out), Write(&statistics)];
    launch("layer_norm", Grid::rows(rows), &[&tensors[..], &[Int(d)]].concat())?;
    Ok((out, statistics))
}

pub fn layer_norm_backward(
    x: &Tensor,
    statistics: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    residual: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let residual = residual.map(Tensor::contiguous).transpose()?;
    alike("layer norm", &x, &dy)?;
    alike("layer norm", &x, residual.as_ref().unwrap_or(&x))?;
    let d = weight.elem_count();
    let rows = x.elem_count() / d.max(1);
    let out = fresh(x.shape(), &x)?;
    let tensors = [Read(&x), Read(statistics), Read(weight), Read(&dy)];
    let results = [ReadIf(residual.as_ref()), Write(&out), Int(d)];
    launch("layer_norm_dx", Grid::rows(rows), &[&tensors[..], &results].concat())?;
    let partial = Partial::new(DType::F32, rows, 2 * d, x.device())?;
    let tensors = [Read(&x), Read(statistics), Read(&dy), Write(&partial.sums)];
    let sizes = [rows, d, partial.chunk].map(Int);
    launch("layer_norm_weights", partial.grid(), &[&tensors[..], &sizes].concat())?;
    Ok((out, partial.total(0, d, d)?, partial.total(d, d, d)?))
}
