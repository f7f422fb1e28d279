//! Gated linear unit.

use candle_core::Tensor;

use super::Argument::{Int, Long, Read, Write};
use super::{Grid, fresh, launch};
use crate::error::Result;
use crate::lengths::Lengths;

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
