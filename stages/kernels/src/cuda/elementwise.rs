//! Element-wise passes, and the gated linear unit.

use candle_core::{DType, Tensor};

use super::Argument::{Float, Int, Long, Read, ReadIf, Write};
use super::{Grid, alike, fresh, fresh_in, in_either, launch, mask_arguments};
use crate::error::Result;
use crate::lengths::Lengths;
use crate::noise::DropMask;

pub fn add_in_place(sum: &Tensor, x: &Tensor) -> Result<()> {
    let (x, n) = (x.contiguous()?, sum.elem_count());
    alike("sum", sum, &x)?;
    let arguments = [Write(sum), Read(&x), Long(n as u64)];
    launch("add_in_place", Grid::elements(n), &arguments)
}

pub fn scale_in_place(x: &Tensor, factor: f64) -> Result<()> {
    let n = x.elem_count();
    let arguments = [Write(x), Float(factor), Long(n as u64)];
    launch("scale_in_place", Grid::elements(n), &arguments)
}

pub fn blend_in_place(sum: &Tensor, x: &Tensor, share: f64) -> Result<()> {
    let (x, n) = (x.contiguous()?, sum.elem_count());
    alike("blend", sum, &x)?;
    let arguments = [Write(sum), Read(&x), Float(share), Long(n as u64)];
    launch("blend_in_place", Grid::elements(n), &arguments)
}

/// `x + factor * drop(y)`, or that without `x`.
pub fn residual(x: Option<&Tensor>, y: &Tensor, factor: f64, mask: Option<DropMask>) -> Result<Tensor> {
    let (x, y) = (x.map(Tensor::contiguous).transpose()?, y.contiguous()?);
    alike("residual", x.as_ref().unwrap_or(&y), &y)?;
    let (n, out) = (y.elem_count(), fresh(y.shape(), &y)?);
    let tensors = [ReadIf(x.as_ref()), Read(&y), Write(&out)];
    let [keep, key, threshold] = mask_arguments(mask, factor);
    launch(
        "residual",
        Grid::elements(n),
        &[&tensors[..], &[keep, key, threshold, Long(n as u64)]].concat(),
    )?;
    Ok(out)
}

pub fn silu(dtype: DType, h: &Tensor, mask: Option<DropMask>) -> Result<Tensor> {
    let h = h.contiguous()?;
    let (n, out) = (h.elem_count(), fresh_in(dtype, h.shape(), h.device())?);
    let ([wide, narrow], [keep, key, threshold]) = (in_either(&out), mask_arguments(mask, 1.0));
    let arguments = [Read(&h), wide, narrow, keep, key, threshold, Long(n as u64)];
    launch("silu", Grid::elements(n), &arguments)?;
    Ok(out)
}

pub fn silu_backward(dtype: DType, h: &Tensor, dy: &Tensor, mask: Option<DropMask>) -> Result<Tensor> {
    let (h, dy) = (h.contiguous()?, dy.contiguous()?);
    alike("silu", &h, &dy)?;
    let (n, out) = (h.elem_count(), fresh_in(dtype, h.shape(), h.device())?);
    let ([wide, narrow], [keep, key, threshold]) = (in_either(&out), mask_arguments(mask, 1.0));
    let arguments = [Read(&h), Read(&dy), wide, narrow, keep, key, threshold, Long(n as u64)];
    launch("silu_backward", Grid::elements(n), &arguments)?;
    Ok(out)
}

pub fn glu(h: &Tensor, lengths: &Lengths) -> Result<Tensor> {
    let h = h.contiguous()?;
    let (batch, time, double) = h.dims3()?;
    let d = double / 2;
    let (n, out) = (batch * time * d, fresh((batch, time, d), &h)?);
    let lengths = lengths.on_device(batch, h.device())?;
    let tensors = [Read(&h), Read(&lengths), Write(&out)];
    launch(
        "glu",
        Grid::elements(n),
        &[&tensors[..], &[Long(n as u64), Int(time), Int(d)]].concat(),
    )?;
    Ok(out)
}

pub fn glu_backward(h: &Tensor, dy: &Tensor, lengths: &Lengths) -> Result<Tensor> {
    let (h, dy) = (h.contiguous()?, dy.contiguous()?);
    let (batch, time, double) = h.dims3()?;
    let d = double / 2;
    let (n, out) = (batch * time * d, fresh((batch, time, 2 * d), &h)?);
    let lengths = lengths.on_device(batch, h.device())?;
    let tensors = [Read(&h), Read(&dy), Read(&lengths), Write(&out)];
    launch(
        "glu_backward",
        Grid::elements(n),
        &[&tensors[..], &[Long(n as u64), Int(time), Int(d)]].concat(),
    )?;
    Ok(out)
}
