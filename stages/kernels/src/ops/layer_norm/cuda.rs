//! Layer normalisation.

use candle_core::{DType, Tensor};

use crate::device::launch::Argument::{Int, Read, ReadIf, Write};
use crate::device::launch::{Grid, alike, fresh, fresh_in, in_either, launch, mask_arguments, of_either};
use crate::error::Result;
use crate::noise::DropMask;
use crate::ops::layer_norm::{LayerNormGradients, NormInput, TwoNorms};
use crate::ops::sums::column_sums::ColumnSums;

pub fn layer_norm(dtype: DType, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<(Tensor, Tensor)> {
    let x = x.contiguous()?;
    let d = weight.elem_count();
    let rows = x.elem_count() / d.max(1);
    alike("layer norm", weight, bias)?;
    let (out, statistics) = (fresh_in(dtype, x.shape(), x.device())?, fresh((rows, 2), &x)?);
    let tensors = [&x, weight, bias].map(Read);
    launch(
        "layer_norm",
        Grid::rows(rows),
        &[&tensors[..], &in_either(&out), &[Write(&statistics), Int(d)]].concat(),
    )?;
    Ok((out, statistics))
}

pub fn add_and_norm(
    dtype: DType,
    x: &Tensor,
    y: &Tensor,
    (factor, mask): (f64, Option<DropMask>),
    weight: &Tensor,
    bias: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (x, y) = (x.contiguous()?, y.contiguous()?);
    let d = weight.elem_count();
    let rows = x.elem_count() / d.max(1);
    alike("residual", &x, &y)?;
    alike("layer norm", weight, bias)?;
    let (sum, out, statistics) = (
        fresh(x.shape(), &x)?,
        fresh_in(dtype, x.shape(), x.device())?,
        fresh((rows, 2), &x)?,
    );
    let inputs = [&x, &y, weight, bias].map(Read);
    let rest = [&[Write(&statistics), Int(d)][..], &mask_arguments(mask, factor)].concat();
    let name = of_either(&y, ["add_and_norm", "add_and_norm_of_bf16"]);
    launch(
        name,
        Grid::rows(rows),
        &[&inputs[..], &[Write(&sum)], &in_either(&out), &rest].concat(),
    )?;
    Ok((sum, out, statistics))
}

pub fn add_and_norm_twice(
    dtype: DType,
    x: &Tensor,
    y: &Tensor,
    (factor, mask): (f64, Option<DropMask>),
    by: [(&Tensor, &Tensor); 2],
) -> Result<TwoNorms> {
    let (x, y) = (x.contiguous()?, y.contiguous()?);
    let [(weight, bias), (next_weight, next_bias)] = by;
    let d = weight.elem_count();
    let rows = x.elem_count() / d.max(1);
    alike("residual", &x, &y)?;
    for vector in [bias, next_weight, next_bias] {
        alike("layer norm", weight, vector)?;
    }
    let (sum, out) = (fresh(x.shape(), &x)?, fresh(x.shape(), &x)?);
    let next = fresh_in(dtype, x.shape(), x.device())?;
    let statistics = [fresh((rows, 2), &x)?, fresh((rows, 2), &x)?];
    let inputs = [&x, &y, weight, bias, next_weight, next_bias].map(Read);
    let results = [Write(&sum), Write(&out)];
    let rest = [Write(&statistics[0]), Write(&statistics[1]), Int(d)];
    let name = of_either(&y, ["add_and_norm_twice", "add_and_norm_twice_of_bf16"]);
    launch(
        name,
        Grid::rows(rows),
        &[
            &inputs[..],
            &results,
            &in_either(&next),
            &rest,
            &mask_arguments(mask, factor),
        ]
        .concat(),
    )?;
    Ok(TwoNorms {
        sum,
        out,
        next,
        statistics,
    })
}

/// Rows of a block, and how many blocks there are: three, which run at once, for each of the 132 multiprocessors of an H100, with so few rows that those
/// which a block reads twice are still in its cache then. Sums over rows depend on it, so it is the same on all devices.
fn blocks_of(rows: usize) -> (usize, usize) {
    let chunk = rows.div_ceil(3 * 132).max(4);
    (chunk, rows.div_ceil(chunk))
}

pub fn layer_norm_backward_twice(
    dtype: DType,
    next: NormInput,
    (dy, residual): (&Tensor, &Tensor),
    norm: NormInput,
    (factor, mask): (f64, Option<DropMask>),
) -> Result<([ColumnSums; 2], Tensor, Tensor)> {
    let (dy, residual) = (dy.contiguous()?, residual.contiguous()?);
    let d = norm.weight.elem_count();
    let rows = dy.elem_count() / d.max(1);
    for tensor in [next.x, norm.x, &residual] {
        alike("layer norm", &dy, tensor)?;
    }
    alike("layer norm", norm.weight, next.weight)?;
    let [between, out] = [fresh(dy.shape(), &dy)?, fresh(dy.shape(), &dy)?];
    let dropped = fresh_in(dtype, dy.shape(), dy.device())?;
    let (chunk, blocks) = blocks_of(rows);
    let partial = [fresh((blocks, 2 * d), &dy)?, fresh((blocks, 2 * d), &dy)?];
    let of = |norm: NormInput| -> Result<[Tensor; 3]> {
        Ok([norm.x.contiguous()?, norm.statistics.clone(), norm.weight.clone()])
    };
    let (of_next, of_norm) = (of(next)?, of(norm)?);
    let [wide, narrow] = in_either(&dropped);
    let results = [
        Write(&between),
        Write(&out),
        wide,
        narrow,
        Write(&partial[0]),
        Write(&partial[1]),
    ];
    let names = ["layer_norm_backward_twice", "layer_norm_backward_twice_of_bf16"];
    launch(
        of_either(&dy, names),
        Grid::rows(blocks),
        &[
            &of_next.each_ref().map(Read)[..],
            &[Read(&dy), Read(&residual)],
            &of_norm.each_ref().map(Read),
            &results,
            &[rows, d, chunk].map(Int),
            &mask_arguments(mask, factor),
        ]
        .concat(),
    )?;
    Ok((partial.map(ColumnSums::partial), out, dropped))
}

/// With `drop` also the gradient times its factor, dropped by its mask, in its type.
pub fn layer_norm_backward(
    x: &Tensor,
    statistics: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    residual: Option<&Tensor>,
    drop: Option<(DType, f64, Option<DropMask>)>,
) -> Result<(LayerNormGradients, Option<Tensor>)> {
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let residual = residual.map(Tensor::contiguous).transpose()?;
    alike("layer norm", &x, &dy)?;
    alike("layer norm", &x, residual.as_ref().unwrap_or(&x))?;
    let d = weight.elem_count();
    let rows = x.elem_count() / d.max(1);
    let out = fresh(x.shape(), &x)?;
    let dropped = drop
        .map(|(dtype, ..)| fresh_in(dtype, x.shape(), x.device()))
        .transpose()?;
    let (factor, mask) = drop.map_or((1.0, None), |(_, factor, mask)| (factor, mask));
    let (chunk, blocks) = blocks_of(rows);
    let partial = fresh((blocks, 2 * d), &x)?;
    let tensors = [Read(&x), Read(statistics), Read(weight), Read(&dy)];
    let [wide, narrow] = in_either(dropped.as_ref());
    let results = [ReadIf(residual.as_ref()), Write(&out), wide, narrow, Write(&partial)];
    let sizes = [rows, d, chunk].map(Int);
    let name = of_either(&dy, ["layer_norm_backward", "layer_norm_backward_of_bf16"]);
    launch(
        name,
        Grid::rows(blocks),
        &[&tensors[..], &results, &sizes, &mask_arguments(mask, factor)].concat(),
    )?;
    Ok(((out, ColumnSums::partial(partial)), dropped))
}
