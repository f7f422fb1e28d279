//! Layer normalisation.

use candle_core::{DType, Tensor};

use super::Argument::{Int, Read, ReadIf, Write, WriteIf};
use super::sums::Partial;
use super::{Grid, alike, fresh, launch, mask_arguments};
use crate::error::Result;
use crate::layer_norm::LayerNormGradients;
use crate::noise::DropMask;

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

pub fn add_and_norm(
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
    let (sum, out, statistics) = (fresh(x.shape(), &x)?, fresh(x.shape(), &x)?, fresh((rows, 2), &x)?);
    let inputs = [&x, &y, weight, bias].map(Read);
    let outputs = [&sum, &out, &statistics].map(Write);
    let rest = [&[Int(d)][..], &mask_arguments(mask, factor)].concat();
    launch(
        "add_and_norm",
        Grid::rows(rows),
        &[&inputs[..], &outputs, &rest].concat(),
    )?;
    Ok((sum, out, statistics))
}

/// With `drop` also the gradient times its factor, dropped by its mask.
pub fn layer_norm_backward(
    x: &Tensor,
    statistics: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    residual: Option<&Tensor>,
    drop: Option<(f64, Option<DropMask>)>,
) -> Result<(LayerNormGradients, Option<Tensor>)> {
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let residual = residual.map(Tensor::contiguous).transpose()?;
    alike("layer norm", &x, &dy)?;
    alike("layer norm", &x, residual.as_ref().unwrap_or(&x))?;
    let d = weight.elem_count();
    let rows = x.elem_count() / d.max(1);
    let out = fresh(x.shape(), &x)?;
    let dropped = drop.map(|_| fresh(x.shape(), &x)).transpose()?;
    let (factor, mask) = drop.unwrap_or((1.0, None));
    let tensors = [Read(&x), Read(statistics), Read(weight), Read(&dy)];
    let results = [
        ReadIf(residual.as_ref()),
        Write(&out),
        WriteIf(dropped.as_ref()),
        Int(d),
    ];
    launch(
        "layer_norm_dx",
        Grid::rows(rows),
        &[&tensors[..], &results, &mask_arguments(mask, factor)].concat(),
    )?;
    let partial = Partial::new(DType::F32, rows, 2 * d, x.device())?;
    let tensors = [Read(&x), Read(statistics), Read(&dy), Write(&partial.sums)];
    let sizes = [rows, d, partial.chunk].map(Int);
    launch("layer_norm_weights", partial.grid(), &[&tensors[..], &sizes].concat())?;
    let both = partial.total(0, 2 * d, 2 * d)?;
    Ok(((out, both.narrow(0, 0, d)?, both.narrow(0, d, d)?), dropped))
}
