//! Parts of relative-position attention beside its matrix products.

use candle_core::{DType, Tensor};

use super::Argument::{Float, Int, Long, Read, ReadIf, Signed, Write};
use super::sums::Partial;
use super::{Argument, Grid, fresh, launch};
use crate::attention::Scores;
use crate::error::Result;

pub fn split_heads(x: &Tensor, heads: usize, bias: Option<&Tensor>) -> Result<Tensor> {
    let x = x.contiguous()?;
    let (rows, d) = x.dims2()?;
    let k = d / heads;
    let (n, out) = (rows * d, fresh((heads, rows, k), &x)?);
    let tensors = [Read(&x), ReadIf(bias), Write(&out), Long(n as u64)];
    let sizes = [rows, heads, k].map(Int);
    launch("split_heads", Grid::elements(n), &[&tensors[..], &sizes].concat())?;
    Ok(out)
}

pub fn merge_heads(x: &Tensor, other: Option<&Tensor>) -> Result<Tensor> {
    let x = x.contiguous()?;
    let other = other.map(Tensor::contiguous).transpose()?;
    let (heads, rows, k) = x.dims3()?;
    let (n, out) = (x.elem_count(), fresh((rows, heads * k), &x)?);
    let tensors = [Read(&x), ReadIf(other.as_ref()), Write(&out), Long(n as u64)];
    let sizes = [rows, heads, k].map(Int);
    launch("merge_heads", Grid::elements(n), &[&tensors[..], &sizes].concat())?;
    Ok(out)
}

pub fn head_sum(x: &Tensor) -> Result<Tensor> {
    let x = x.contiguous()?;
    let (heads, rows, k) = x.dims3()?;
    let width = heads * k;
    let partial = Partial::new(DType::F32, rows, width, x.device())?;
    let tensors = [Read(&x), Write(&partial.sums)];
    let sizes = [rows, heads, k, partial.chunk].map(Int);
    launch("head_sum", partial.grid(), &[&tensors[..], &sizes].concat())?;
    Ok(partial.total(0, width, width)?.reshape((heads, k))?)
}

pub fn add_rows_in_place(sum: &Tensor, part: &Tensor, time: usize, length: usize, first: usize) -> Result<()> {
    let (n, k) = (part.elem_count(), part.dim(2)?);
    let tensors = [Write(sum), Read(part), Long(n as u64)];
    let sizes = [time, length, first, k].map(Int);
    launch("add_rows", Grid::elements(n), &[&tensors[..], &sizes].concat())
}

/// The sizes that are the last arguments of both softmax kernels.
fn sizes<'a>((batch, queries, width): (usize, usize, usize), scores: &Scores) -> [Argument<'a>; 9] {
    let band = scores.band.map_or(-1, |band| i32::try_from(band).unwrap_or(i32::MAX));
    [
        Int(width),
        Int(2 * scores.reach + 1),
        Int(batch),
        Int(queries),
        Int(scores.queries.start),
        Int(scores.keys.start),
        Signed(band),
        Int(scores.reach),
        Float(scores.scale),
    ]
}

pub fn weights(content: &Tensor, position: &Tensor, scores: &Scores) -> Result<Tensor> {
    let (content, position) = (content.contiguous()?, position.contiguous()?);
    let (heads, batch, queries, width) = content.dims4()?;
    let out = fresh(content.shape(), &content)?;
    let lengths = scores.lengths.on_device(batch, content.device())?;
    let tensors = [Read(&content), Read(&position), Read(&lengths), Write(&out)];
    launch(
        "attention_weights",
        Grid::rows(heads * batch * queries),
        &[&tensors[..], &sizes((batch, queries, width), scores)].concat(),
    )?;
    Ok(out)
}

pub fn weights_backward(p: &Tensor, dp: &Tensor, scores: &Scores) -> Result<(Tensor, Tensor)> {
    let (p, dp) = (p.contiguous()?, dp.contiguous()?);
    let (heads, batch, queries, width) = p.dims4()?;
    let content = fresh(p.shape(), &p)?;
    let position = fresh((heads, batch, queries, 2 * scores.reach + 1), &p)?;
    let lengths = scores.lengths.on_device(batch, p.device())?;
    let tensors = [Read(&p), Read(&dp), Read(&lengths), Write(&content), Write(&position)];
    launch(
        "attention_weights_backward",
        Grid::rows(heads * batch * queries),
        &[&tensors[..], &sizes((batch, queries, width), scores)].concat(),
    )?;
    Ok((content, position))
}
