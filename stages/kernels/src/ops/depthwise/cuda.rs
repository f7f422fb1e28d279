//! Depthwise convolution over time.

use candle_core::{DType, Tensor};

use crate::device::launch::Argument::{Int, Long, Read, ReadIf, Write};
use crate::device::launch::{Grid, alike, fresh, launch};
use crate::error::Result;
use crate::ops::sums::Partial;

pub fn depthwise(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    convolve(x, weight, bias, false)
}

pub fn depthwise_backward(dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
    convolve(dy, weight, None, true)
}

fn convolve(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, flip: bool) -> Result<Tensor> {
    let x = x.contiguous()?;
    let (batch, time, channels) = x.dims3()?;
    let taps = weight.elem_count() / channels.max(1);
    let (n, out) = (x.elem_count(), fresh((batch, time, channels), &x)?);
    let tensors = [Read(&x), Read(weight), ReadIf(bias), Write(&out), Long(n as u64)];
    let sizes = [time, channels, taps, usize::from(flip)].map(Int);
    launch("depthwise", Grid::elements(n), &[&tensors[..], &sizes].concat())?;
    Ok(out)
}

pub fn depthwise_backward_weight(x: &Tensor, dy: &Tensor, taps: usize) -> Result<Tensor> {
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    alike("depthwise", &x, &dy)?;
    let (batch, time, channels) = x.dims3()?;
    let rows = batch * time;
    let partial = Partial::new(DType::F32, rows, taps * channels, x.device())?;
    let tensors = [Read(&x), Read(&dy), Write(&partial.sums)];
    let sizes = [rows, time, channels, taps, partial.chunk].map(Int);
    launch("depthwise_weight", partial.grid(), &[&tensors[..], &sizes].concat())?;
    Ok(partial.total(channels)?.reshape((channels, 1, taps))?)
}
