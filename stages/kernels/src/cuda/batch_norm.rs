//! Batch normalisation over rows, followed by SiLU.

use candle_core::{DType, Tensor};

use super::Argument::{Float, Int, Long, Read, ReadIf, Write};
use super::sums::Partial;
use super::{Grid, alike, fresh, launch};
use crate::batch_norm::Normaliser;
use crate::device::to_host;
use crate::error::Result;

pub fn column_statistics(x: &Tensor) -> Result<(Vec<f64>, Vec<f64>)> {
    let x = x.contiguous()?;
    let width = x.dims().last().copied().unwrap_or(1);
    let rows = x.elem_count() / width.max(1);
    let moment = |mean: Option<&Tensor>| -> Result<Tensor> {
        let partial = Partial::new(DType::F64, rows, width, x.device())?;
        let tensors = [Read(&x), ReadIf(mean), Write(&partial.sums)];
        let sizes = [rows, width, partial.chunk].map(Int);
        launch("column_moment", partial.grid(), &[&tensors[..], &sizes].concat())?;
        partial.total(0, width, width)
    };
    let sums = moment(None)?;
    let rounded = fresh(width, &x)?;
    let arguments = [Read(&sums), Write(&rounded), Int(width), Int(rows)];
    launch("column_mean", Grid::elements(width), &arguments)?;
    let squares = moment(Some(&rounded))?;
    // All kernels are launched before the first of these waits for the device.
    let means = |sums: Tensor| -> Result<Vec<f64>> {
        let sums = to_host::<f64>(&sums)?;
        Ok(sums.iter().map(|sum| sum / rows as f64).collect())
    };
    let (mean, squares, rounded) = (means(sums)?, means(squares)?, to_host::<f32>(&rounded)?);
    // About the mean as f32 has it; the rest of the mean is taken off.
    let away = |((square, mean), rounded): ((&f64, &f64), &f32)| square - (mean - f64::from(*rounded)).powi(2);
    let variance = squares.iter().zip(&mean).zip(&rounded).map(away).collect();
    Ok((mean, variance))
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
    let (dw, db) = (partial.total(0, width, width)?, partial.total(width, width, width)?);
    let (level, out) = (fresh((2, width), &x)?, fresh(x.shape(), &x)?);
    let tensors = [Write(&dw), Read(&db), Read(by.inverse), Write(&level)];
    let sizes = [Int(width), Float(rows as f64), Int(usize::from(batch_statistics))];
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
