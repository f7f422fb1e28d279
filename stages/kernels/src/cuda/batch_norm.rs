//! Batch normalisation over rows, followed by SiLU.

use candle_core::{DType, Tensor};

use super::Argument::{Double, Float, Int, Long, Read, ReadIf, Write};
use super::sums::Partial;
use super::{Grid, alike, fresh, fresh_of, launch};
use crate::batch_norm::{EPSILON, MOMENTUM, Normaliser, unbiased};
use crate::error::{Error, Result};

pub fn batch_statistics(x: &Tensor, running: (&Tensor, &Tensor)) -> Result<(Tensor, Tensor, [Tensor; 2])> {
    let x = x.contiguous()?;
    let width = running.0.elem_count();
    let rows = x.elem_count() / width.max(1);
    if running.1.elem_count() != width || rows * width != x.elem_count() {
        return Err(Error::Input(format!(
            "batch norm: running statistics of {width} columns for a tensor of shape {:?}",
            x.dims()
        )));
    }
    let moment = |mean: Option<&Tensor>| -> Result<Partial> {
        let partial = Partial::new(DType::F64, rows, width, x.device())?;
        let tensors = [Read(&x), ReadIf(mean), Write(&partial.sums)];
        let sizes = [rows, width, partial.chunk].map(Int);
        launch("column_moment", partial.grid(), &[&tensors[..], &sizes].concat())?;
        Ok(partial)
    };
    let sums = moment(None)?;
    let sizes = [sums.chunks, width, rows].map(Int);
    let (exact, mean) = (fresh_of(DType::F64, width, x.device())?, fresh(width, &x)?);
    let tensors = [Read(&sums.sums), Write(&exact), Write(&mean)];
    let grid = Grid::elements(width);
    launch("column_mean", grid, &[&tensors[..], &sizes].concat())?;
    // About the mean as f32 has it.
    let squares = moment(Some(&mean))?;
    let (inverse, moved) = (fresh(width, &x)?, [fresh(width, &x)?, fresh(width, &x)?]);
    let inputs = [&squares.sums, &exact, &mean, running.0, running.1].map(Read);
    let outputs = [&inverse, &moved[0], &moved[1]].map(Write);
    let factors = [EPSILON, MOMENTUM, unbiased(rows)].map(Double);
    launch(
        "batch_statistics",
        grid,
        &[&inputs[..], &outputs, &sizes, &factors].concat(),
    )?;
    Ok((mean, inverse, moved))
}

pub fn inverse_deviation(variance: &Tensor) -> Result<Tensor> {
    let variance = variance.contiguous()?;
    let (width, out) = (variance.elem_count(), fresh(variance.shape(), &variance)?);
    let arguments = [Read(&variance), Write(&out), Int(width), Double(EPSILON)];
    launch("inverse_deviation", Grid::elements(width), &arguments)?;
    Ok(out)
}

/// Factor and offset of every column, (2, C).
fn affine(by: &Normaliser) -> Result<Tensor> {
    let width = by.mean.elem_count();
    let out = fresh((2, width), by.mean)?;
    let tensors = [by.mean, by.inverse, by.weight, by.bias].map(Read);
    launch(
        "batch_norm_affine",
        Grid::elements(width),
        &[&tensors[..], &[Write(&out), Int(width)]].concat(),
    )?;
    Ok(out)
}

pub fn normalise_silu(x: &Tensor, by: &Normaliser) -> Result<Tensor> {
    let x = x.contiguous()?;
    let (n, width) = (x.elem_count(), by.mean.elem_count());
    let (affine, out) = (affine(by)?, fresh(x.shape(), &x)?);
    let arguments = [Read(&x), Read(&affine), Write(&out), Long(n as u64), Int(width)];
    launch("normalise_silu", Grid::elements(n), &arguments)?;
    Ok(out)
}

pub fn normalise_silu_backward(
    x: &Tensor,
    by: &Normaliser,
    dy: &Tensor,
    batch_statistics: bool,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    alike("batch norm", &x, &dy)?;
    let (n, width) = (x.elem_count(), by.mean.elem_count());
    let rows = n / width.max(1);
    let affine = affine(by)?;
    let partial = Partial::new(DType::F32, rows, 2 * width, x.device())?;
    let tensors = [Read(&x), Read(&affine), Read(by.mean), Read(&dy), Write(&partial.sums)];
    let sizes = [rows, width, partial.chunk].map(Int);
    launch("normalise_silu_sums", partial.grid(), &[&tensors[..], &sizes].concat())?;
    let (dw, db) = (fresh(width, &x)?, fresh(width, &x)?);
    let (level, out) = (fresh((2, width), &x)?, fresh(x.shape(), &x)?);
    let tensors = [
        Read(&partial.sums),
        Read(by.inverse),
        Write(&dw),
        Write(&db),
        Write(&level),
    ];
    let sizes = [
        Int(partial.chunks),
        Int(width),
        Float(rows as f64),
        Int(usize::from(batch_statistics)),
    ];
    launch(
        "normalise_silu_level",
        Grid::elements(width),
        &[&tensors[..], &sizes].concat(),
    )?;
    let tensors = [Read(&x), Read(&affine), Read(by.mean), Read(&level), Read(&dy)];
    launch(
        "normalise_silu_dx",
        Grid::elements(n),
        &[&tensors[..], &[Write(&out), Long(n as u64), Int(width)]].concat(),
    )?;
    Ok((out, dw, db))
}
