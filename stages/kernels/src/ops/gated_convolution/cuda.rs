//! The convolution module between its matrix products.

use candle_core::{DType, Tensor};

use crate::device::launch::Argument::{Double, Int, Read, ReadIf, Write, WriteIf};
use crate::device::launch::{Grid, alike, fresh, fresh_in, fresh_of, in_either, launch, of_either};
use crate::error::{Error, Result};
use crate::lengths::Lengths;
use crate::ops::batch_norm::{EPSILON, MOMENTUM, unbiased};
use crate::ops::gated_convolution::{BackwardOutput, Origin, Output, Saved, Wanted, Weights};
use crate::ops::sums::column_sums::ColumnSums;

/// Frames of a block, as in `gated_convolution.cu`.
const FRAMES: usize = 32;

/// Sequences, frames, channels and taps, checked.
fn sizes(doubled: &Tensor, by: &Weights) -> Result<[usize; 4]> {
    let (batch, time, double) = doubled.dims3()?;
    let (channels, _, taps) = by.weight.dims3()?;
    let vectors = [by.norm_weight, by.norm_bias, by.running.0, by.running.1];
    let vectors = vectors.into_iter().chain(by.bias);
    if double != 2 * channels || vectors.into_iter().any(|vector| vector.elem_count() != channels) || taps % 2 == 0 {
        return Err(Error::Input(format!(
            "a convolution of {channels} channels and {taps} taps does not fit a tensor of shape {:?}",
            doubled.dims()
        )));
    }
    Ok([batch, time, channels, taps])
}

/// Rows of a block that goes over rows of 32 channels: at most 16 blocks behind each other, as each of them adds up what all
/// chunks found.
fn rows_per_block(rows: usize) -> usize {
    rows.div_ceil(16).max(256)
}

pub fn forward(dtype: DType, doubled: &Tensor, lengths: &Lengths, by: Weights, of_batch: bool) -> Result<Output> {
    let doubled = doubled.contiguous()?;
    let [batch, time, channels, taps] = sizes(&doubled, &by)?;
    let (rows, chunks) = (batch * time, batch * time.div_ceil(FRAMES));
    let device = doubled.device();
    let convolved = fresh_in(doubled.dtype(), (rows, channels), device)?;
    let moments = of_batch
        .then(|| fresh_of(DType::F64, (chunks, 2, channels), device))
        .transpose()?;
    let on_device = lengths.on_device(batch, device)?;
    let arguments = [
        Read(&doubled),
        Read(&on_device),
        Read(by.weight),
        ReadIf(by.bias),
        Write(&convolved),
        WriteIf(moments.as_ref()),
        Int(time),
        Int(channels),
        Int(taps),
    ];
    let name = of_either(&doubled, ["gated_convolution", "gated_convolution_of_bf16"]);
    launch(name, Grid::of(channels.div_ceil(32), chunks), &arguments)?;
    let y = fresh_in(dtype, (rows, channels), device)?;
    let vector = || fresh(channels, &doubled);
    let (mean, inverse) = (vector()?, vector()?);
    let moved = of_batch.then(|| Ok::<_, Error>([vector()?, vector()?])).transpose()?;
    let [moved_mean, moved_variance] = [0, 1].map(|at| WriteIf(moved.as_ref().map(|moved| &moved[at])));
    let per_block = rows_per_block(rows);
    let inputs = [Read(&convolved), ReadIf(moments.as_ref())];
    let vectors = [by.running.0, by.running.1, by.norm_weight, by.norm_bias].map(Read);
    let results = [Write(&mean), Write(&inverse), moved_mean, moved_variance];
    let numbers = [rows, channels, chunks, per_block].map(Int);
    let factors = [EPSILON, MOMENTUM, unbiased(rows)].map(Double);
    launch(
        of_either(&convolved, ["normalise_batch", "normalise_batch_of_bf16"]),
        Grid::of(channels.div_ceil(32), rows.div_ceil(per_block)),
        &[&inputs[..], &vectors, &in_either(&y), &results, &numbers, &factors].concat(),
    )?;
    let saved = Saved {
        doubled,
        gated: None,
        convolved,
        mean,
        inverse,
        origin: if of_batch { Origin::Own } else { Origin::Running },
    };
    Ok(Output { y, saved, moved })
}

pub fn backward(
    dtype: DType,
    saved: &Saved,
    lengths: &Lengths,
    by: Weights,
    dy: &Tensor,
    wanted: Wanted,
) -> Result<BackwardOutput> {
    let dy = dy.contiguous()?;
    alike("convolution", &saved.convolved, &dy)?;
    let [batch, time, channels, taps] = sizes(&saved.doubled, &by)?;
    let (rows, chunks) = (batch * time, batch * time.div_ceil(FRAMES));
    let device = dy.device();
    let per_block = rows_per_block(rows);
    let blocks = rows.div_ceil(per_block);
    let sums = fresh((blocks, 2, channels), &dy)?;
    let norm = [&saved.mean, &saved.inverse, by.norm_weight, by.norm_bias].map(Read);
    launch(
        of_either(&dy, ["normalise_batch_sums", "normalise_batch_sums_of_bf16"]),
        Grid::of(channels.div_ceil(32), blocks),
        &[
            &[Read(&saved.convolved)][..],
            &norm,
            &[Read(&dy), Write(&sums)],
            &[rows, channels, per_block].map(Int),
        ]
        .concat(),
    )?;
    let norm_gradients = fresh((1, 2 * channels), &dy)?;
    let of_chunks = |wanted: bool, width: usize| wanted.then(|| fresh((chunks, width), &dy)).transpose();
    let weight = of_chunks(wanted.weight, channels * taps)?;
    let bias = of_chunks(wanted.bias && by.bias.is_some(), channels)?;
    let out = fresh_in(dtype, saved.doubled.shape(), device)?;
    let on_device = lengths.on_device(batch, device)?;
    let inputs = [Read(&saved.doubled), Read(&on_device), Read(&saved.convolved)];
    let gradients = [Write(&norm_gradients), WriteIf(weight.as_ref()), WriteIf(bias.as_ref())];
    let numbers = [
        batch,
        time,
        channels,
        taps,
        blocks,
        usize::from(saved.origin == Origin::Own),
    ]
    .map(Int);
    let names = ["gated_convolution_backward", "gated_convolution_backward_of_bf16"];
    launch(
        of_either(&dy, names),
        Grid::of(channels.div_ceil(32), chunks),
        &[
            &inputs[..],
            &norm,
            &[Read(&dy), Read(&sums), Read(by.weight)],
            &gradients,
            &in_either(&out),
            &numbers,
        ]
        .concat(),
    )?;
    Ok(BackwardOutput {
        doubled: out,
        weight: weight.map(ColumnSums::partial),
        bias: bias.map(ColumnSums::partial),
        norm: ColumnSums::partial(norm_gradients),
    })
}
