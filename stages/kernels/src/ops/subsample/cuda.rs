//! The strided 3x3 convolutions of the sub-sampling.

use candle_core::{DType, Tensor};

use crate::device::launch::Argument::{Int, Long, Read, Write};
use crate::device::launch::{Grid, alike, fresh, launch};
use crate::error::Result;
use crate::lengths::Lengths;
use crate::ops::subsample::halved;
use crate::ops::sums::Partial;
use crate::ops::sums::column_sums::ColumnSums;

/// Bands that a thread goes over; as in `subsample.cu`.
const STRIP: usize = 8;

/// Threads for an output (batch, frames, bands, channels).
fn strips([batch, frames, bands, channels]: [usize; 4]) -> usize {
    batch * frames * bands.div_ceil(STRIP) * channels
}

/// The blocks of a kernel that writes sums of nine taps and a bias.
fn grid_of_taps(partial: &Partial, channels: usize) -> Grid {
    Grid::of(channels.div_ceil(32), partial.chunks)
}

pub fn first(x: &Tensor, weight: &Tensor, bias: &Tensor, input_lengths: &Lengths, lengths: &Lengths) -> Result<Tensor> {
    let x = x.contiguous()?;
    let (batch, bands, time) = x.dims3()?;
    let channels = bias.elem_count();
    let out = fresh((batch, halved(time), halved(bands), channels), &x)?;
    let n = strips([batch, halved(time), halved(bands), channels]);
    let input_lengths = input_lengths.on_device(batch, x.device())?;
    let lengths = lengths.on_device(batch, x.device())?;
    let tensors = [&x, weight, bias, &input_lengths, &lengths].map(Read);
    let rest = [Write(&out), Int(n), Int(time), Int(bands), Int(channels)];
    launch("subsample_first", Grid::elements(n), &[&tensors[..], &rest].concat())?;
    Ok(out)
}

pub fn first_backward(x: &Tensor, dz: &Tensor, input_lengths: &Lengths) -> Result<ColumnSums> {
    let (x, dz) = (x.contiguous()?, dz.contiguous()?);
    let (_, bands, time) = x.dims3()?;
    let (batch, time_out, bands_out, channels) = dz.dims4()?;
    let rows = batch * time_out * bands_out;
    let input_lengths = input_lengths.on_device(batch, x.device())?;
    let partial = Partial::new(DType::F32, rows, 10 * channels, x.device())?;
    let tensors = [Read(&x), Read(&dz), Read(&input_lengths), Write(&partial.sums)];
    let sizes = [rows, time, bands, channels, partial.chunk].map(Int);
    launch(
        "subsample_first_weights",
        grid_of_taps(&partial, channels),
        &[&tensors[..], &sizes].concat(),
    )?;
    Ok(ColumnSums::partial_of_taps(partial.sums, 9))
}

pub fn depthwise(x: &Tensor, weight: &Tensor, bias: &Tensor, lengths: &Lengths) -> Result<Tensor> {
    let x = x.contiguous()?;
    let (batch, time, bands, channels) = x.dims4()?;
    let out = fresh((batch, halved(time), halved(bands), channels), &x)?;
    let n = strips([batch, halved(time), halved(bands), channels]);
    let lengths = lengths.on_device(batch, x.device())?;
    let tensors = [&x, weight, bias, &lengths].map(Read);
    let rest = [Write(&out), Int(n), Int(time), Int(bands), Int(channels)];
    launch(
        "subsample_depthwise",
        Grid::elements(n),
        &[&tensors[..], &rest].concat(),
    )?;
    Ok(out)
}

pub fn depthwise_backward(x: &Tensor, weight: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let (batch, time, bands, channels) = x.dims4()?;
    let (n, out) = (strips([batch, time, bands, channels]), fresh(x.shape(), &x)?);
    let tensors = [Read(&x), Read(weight), Read(&dy), Write(&out)];
    let sizes = [n, time, bands, channels].map(Int);
    launch(
        "subsample_depthwise_dx",
        Grid::elements(n),
        &[&tensors[..], &sizes].concat(),
    )?;
    Ok(out)
}

pub fn depthwise_backward_weight(x: &Tensor, dy: &Tensor) -> Result<ColumnSums> {
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let (batch, time, bands, channels) = x.dims4()?;
    let rows = batch * halved(time) * halved(bands);
    let partial = Partial::new(DType::F32, rows, 10 * channels, x.device())?;
    let tensors = [Read(&x), Read(&dy), Write(&partial.sums)];
    let sizes = [rows, time, bands, channels, partial.chunk].map(Int);
    launch(
        "subsample_depthwise_weights",
        grid_of_taps(&partial, channels),
        &[&tensors[..], &sizes].concat(),
    )?;
    Ok(ColumnSums::partial_of_taps(partial.sums, 9))
}

pub fn bias_relu(z: &Tensor, bias: &Tensor, lengths: &Lengths) -> Result<()> {
    let (batch, time, bands, channels) = z.dims4()?;
    let n = z.elem_count();
    let lengths = lengths.on_device(batch, z.device())?;
    let tensors = [Write(z), Read(bias), Read(&lengths), Long(n as u64)];
    let sizes = [time, bands * channels, channels].map(Int);
    launch(
        "bias_relu",
        Grid::elements(n.div_ceil(4)),
        &[&tensors[..], &sizes].concat(),
    )
}

pub fn relu_backward(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let (y, dy) = (y.contiguous()?, dy.contiguous()?);
    alike("relu", &y, &dy)?;
    let (n, out) = (y.elem_count(), fresh(y.shape(), &y)?);
    let arguments = [Read(&y), Read(&dy), Write(&out), Long(n as u64)];
    launch("relu_backward", Grid::elements(n.div_ceil(4)), &arguments)?;
    Ok(out)
}
