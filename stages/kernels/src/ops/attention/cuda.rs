//! Parts of relative-position attention beside its matrix products.

use candle_core::{DType, Tensor};

use crate::device::launch::Argument::{Float, Int, Long, Read, ReadIf, Signed, Write, WriteIf};
use crate::device::launch::{Argument, Grid, alike, fresh, launch, mask_arguments};
use crate::error::Result;
use crate::noise::DropMask;
use crate::ops::attention::{Context, Scores};
use crate::ops::sums::Partial;

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

pub fn split_projections(
    [query, key, value]: [&Tensor; 3],
    heads: usize,
    (bias_u, bias_v): (&Tensor, &Tensor),
) -> Result<[Tensor; 4]> {
    let (query, key, value) = (query.contiguous()?, key.contiguous()?, value.contiguous()?);
    let (rows, d) = query.dims2()?;
    alike("keys", &query, &key)?;
    alike("values", &query, &value)?;
    alike("biases of heads", bias_u, bias_v)?;
    let k = d / heads;
    let made = || fresh((heads, rows, k), &query);
    let out = [made()?, made()?, made()?, made()?];
    let inputs = [&query, &key, &value, bias_u, bias_v].map(Read);
    let sizes = [rows, heads, k].map(Int);
    let outputs = out.each_ref().map(Write);
    launch(
        "split_projections",
        Grid::elements(rows * d),
        &[&inputs[..], &outputs, &[Long((rows * d) as u64)], &sizes].concat(),
    )?;
    Ok(out)
}

pub fn merge_projections(parts: [&Tensor; 4]) -> Result<[Tensor; 3]> {
    let [query_u, query_v, keys, values] = parts;
    let parts = [
        query_u.contiguous()?,
        query_v.contiguous()?,
        keys.contiguous()?,
        values.contiguous()?,
    ];
    let (heads, rows, k) = parts[0].dims3()?;
    for part in &parts {
        alike("heads", &parts[0], part)?;
    }
    let made = || fresh((rows, heads * k), &parts[0]);
    let (n, out) = (rows * heads * k, [made()?, made()?, made()?]);
    let (inputs, outputs) = (parts.each_ref().map(Read), out.each_ref().map(Write));
    let sizes = [rows, heads, k].map(Int);
    launch(
        "merge_projections",
        Grid::elements(n),
        &[&inputs[..], &outputs, &[Long(n as u64)], &sizes].concat(),
    )?;
    Ok(out)
}

pub fn head_sums(x: &Tensor, y: &Tensor) -> Result<(Tensor, Tensor)> {
    let (x, y) = (x.contiguous()?, y.contiguous()?);
    let (heads, rows, k) = x.dims3()?;
    alike("heads", &x, &y)?;
    let width = 2 * heads * k;
    let partial = Partial::new(DType::F32, rows, width, x.device())?;
    let tensors = [Read(&x), Read(&y), Write(&partial.sums)];
    let sizes = [rows, heads, k, partial.chunk].map(Int);
    launch("head_sums", partial.grid(), &[&tensors[..], &sizes].concat())?;
    let both = partial.total(width)?.reshape((2, heads, k))?;
    Ok((both.get(0)?, both.get(1)?))
}

pub fn add_rows_in_place(sum: &Tensor, part: &Tensor, time: usize, length: usize, first: usize) -> Result<()> {
    let (n, k) = (part.elem_count(), part.dim(2)?);
    let tensors = [Write(sum), Read(part), Long(n as u64)];
    let sizes = [time, length, first, k].map(Int);
    launch("add_rows", Grid::elements(n), &[&tensors[..], &sizes].concat())
}

/// The sizes that are the last arguments of both softmax kernels.
fn sizes<'a>((batch, queries, width, span): (usize, usize, usize, usize), scores: &Scores) -> [Argument<'a>; 10] {
    // A chunk that is longer than all frames is as good as the longest one.
    let longest = |size: usize| size.min(1 << 30) as i32;
    let (chunk, band) = match scores.context {
        Context::All => (0, -1),
        Context::Band(width) => (0, i32::try_from(width).unwrap_or(i32::MAX)),
        Context::From(left) => (-1, i32::try_from(left).unwrap_or(i32::MAX)),
        Context::Chunks { size, left } => (longest(size), i32::try_from(left).unwrap_or(i32::MAX)),
    };
    [
        Int(width),
        Int(span),
        Int(batch),
        Int(queries),
        Int(scores.queries.start),
        Int(scores.keys.start),
        Signed(band),
        Signed(chunk),
        Int(scores.reach),
        Float(scores.scale),
    ]
}

/// With a mask also the dropped weights.
pub fn weights(
    content: &Tensor,
    position: &Tensor,
    scores: &Scores,
    mask: Option<DropMask>,
) -> Result<(Tensor, Option<Tensor>)> {
    let (content, position) = (content.contiguous()?, position.contiguous()?);
    let (heads, batch, queries, width) = content.dims4()?;
    let out = fresh(content.shape(), &content)?;
    let dropped = mask.map(|_| fresh(content.shape(), &content)).transpose()?;
    let lengths = scores.lengths.on_device(batch, content.device())?;
    let tensors = [
        Read(&content),
        Read(&position),
        Read(&lengths),
        Write(&out),
        WriteIf(dropped.as_ref()),
    ];
    let sizes = sizes((batch, queries, width, position.dim(3)?), scores);
    launch(
        "attention_weights",
        Grid::rows(heads * batch * queries),
        &[&tensors[..], &sizes, &mask_arguments(mask, 1.0)].concat(),
    )?;
    Ok((out, dropped))
}

/// Gradients of content and positional scores; with a mask also the dropped weights.
pub fn weights_backward(
    p: &Tensor,
    dp: &Tensor,
    scores: &Scores,
    mask: Option<DropMask>,
) -> Result<((Tensor, Tensor), Option<Tensor>)> {
    let (p, dp) = (p.contiguous()?, dp.contiguous()?);
    alike("attention weights", &p, &dp)?;
    let (heads, batch, queries, width) = p.dims4()?;
    let content = fresh(p.shape(), &p)?;
    let position = fresh((heads, batch, queries, 2 * scores.reach + 1), &p)?;
    let dropped = mask.map(|_| fresh(p.shape(), &p)).transpose()?;
    let lengths = scores.lengths.on_device(batch, p.device())?;
    let tensors = [
        Read(&p),
        Read(&dp),
        Read(&lengths),
        Write(&content),
        Write(&position),
        WriteIf(dropped.as_ref()),
    ];
    let sizes = sizes((batch, queries, width, 2 * scores.reach + 1), scores);
    launch(
        "attention_weights_backward",
        Grid::rows(heads * batch * queries),
        &[&tensors[..], &sizes, &mask_arguments(mask, 1.0)].concat(),
    )?;
    Ok(((content, position), dropped))
}
