//! Layer normalisation.

use candle_core::{DType, Tensor};

use super::Argument::{Int, Read, ReadIf, Write};
use super::{Grid, alike, fresh, fresh_in, in_either, launch, mask_arguments};
use crate::column_sums::ColumnSums;
use crate::error::Result;
use crate::layer_norm::LayerNormGradients;
use crate::noise::DropMask;

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
    launch(
        "add_and_norm",
        Grid::rows(rows),
        &[&inputs[..], &[Write(&sum)], &in_either(&out), &rest].concat(),
    )?;
    Ok((sum, out, statistics))
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
    // As many blocks as keep a device busy; rows that a block reads twice are still in its cache then.
    let chunk = rows.div_ceil(256).max(8);
    let blocks = rows.div_ceil(chunk);
    let partial = fresh((blocks, 2 * d), &x)?;
    let tensors = [Read(&x), Read(statistics), Read(weight), Read(&dy)];
    let [wide, narrow] = in_either(dropped.as_ref());
    let results = [ReadIf(residual.as_ref()), Write(&out), wide, narrow, Write(&partial)];
    let sizes = [rows, d, chunk].map(Int);
    launch(
        "layer_norm_backward",
        Grid::rows(blocks),
        &[&tensors[..], &results, &sizes, &mask_arguments(mask, factor)].concat(),
    )?;
    Ok(((out, ColumnSums::partial(partial)), dropped))
}
