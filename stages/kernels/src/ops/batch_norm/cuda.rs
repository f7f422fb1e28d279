//! Batch normalisation over rows, followed by SiLU.

use candle_core::{DType, Tensor};

use crate::device::launch::Argument::{Double, Float, Int, Long, Read, ReadIf, Write};
use crate::device::launch::{Grid, alike, fresh, fresh_of, launch};
use crate::error::{Error, Result};
use crate::ops::batch_norm::{EPSILON, MOMENTUM, Normaliser, Statistics, check_parts, part_sums, unbiased};
use crate::ops::sums::Partial;

/// Sums over the rows of the columns of a tensor, for their mean and variance.
struct ColumnSums {
    /// Of the squared distances from the mean in f32, for each chunk of rows.
    squares: Partial,
    /// The mean, in f64 and in f32.
    exact: Tensor,
    mean: Tensor,
    rows: usize,
}

fn column_sums(x: &Tensor, width: usize) -> Result<ColumnSums> {
    let x = x.contiguous()?;
    let rows = x.elem_count() / width.max(1);
    if rows * width != x.elem_count() {
        return Err(Error::Input(format!(
            "batch norm: statistics of {width} columns of a tensor of shape {:?}",
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
    let (exact, mean) = (fresh_of(DType::F64, width, x.device())?, fresh(width, &x)?);
    let tensors = [Read(&sums.sums), Write(&exact), Write(&mean)];
    let sizes = [sums.chunks, width, rows].map(Int);
    launch("column_mean", Grid::elements(width), &[&tensors[..], &sizes].concat())?;
    // About the mean as f32 has it.
    let squares = moment(Some(&mean))?;
    Ok(ColumnSums {
        squares,
        exact,
        mean,
        rows,
    })
}

pub fn batch_statistics(x: &Tensor, running: (&Tensor, &Tensor)) -> Result<(Tensor, Tensor, [Tensor; 2])> {
    let width = running.0.elem_count();
    if running.1.elem_count() != width {
        return Err(Error::Input(format!(
            "batch norm: running statistics of {width} and {} columns",
            running.1.elem_count()
        )));
    }
    let ColumnSums {
        squares,
        exact,
        mean,
        rows,
    } = column_sums(x, width)?;
    let (inverse, moved) = (fresh(width, x)?, [fresh(width, x)?, fresh(width, x)?]);
    let inputs = [&squares.sums, &exact, &mean, running.0, running.1].map(Read);
    let outputs = [&inverse, &moved[0], &moved[1]].map(Write);
    let sizes = [squares.chunks, width, rows].map(Int);
    let factors = [EPSILON, MOMENTUM, unbiased(rows)].map(Double);
    launch(
        "batch_statistics",
        Grid::elements(width),
        &[&inputs[..], &outputs, &sizes, &factors].concat(),
    )?;
    Ok((mean, inverse, moved))
}

pub fn column_moments(x: &Tensor, width: usize) -> Result<Tensor> {
    let ColumnSums {
        squares,
        exact,
        mean,
        rows,
    } = column_sums(x, width)?;
    let moments = fresh_of(DType::F64, 2 * width + 1, x.device())?;
    let tensors = [Read(&squares.sums), Read(&exact), Read(&mean), Write(&moments)];
    let sizes = [squares.chunks, width, rows].map(Int);
    // One more than columns: the number of rows.
    launch(
        "column_moments",
        Grid::elements(width + 1),
        &[&tensors[..], &sizes].concat(),
    )?;
    Ok(moments)
}

pub fn joined_statistics(moments: &Tensor, running: (&Tensor, &Tensor)) -> Result<(Tensor, Tensor, [Tensor; 2])> {
    let width = running.0.elem_count();
    check_parts(moments, width)?;
    let moments = moments.contiguous()?;
    let fresh = || fresh(width, running.0);
    let (mean, inverse, moved) = (fresh()?, fresh()?, [fresh()?, fresh()?]);
    let inputs = [&moments, running.0, running.1].map(Read);
    let outputs = [&mean, &inverse, &moved[0], &moved[1]].map(Write);
    let sizes = [moments.dims()[0], width].map(Int);
    let factors = [EPSILON, MOMENTUM].map(Double);
    launch(
        "joined_statistics",
        Grid::elements(width),
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
    statistics: Statistics,
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
        Int(usize::from(matches!(statistics, Statistics::Own))),
    ];
    launch(
        "normalise_silu_level",
        Grid::elements(width),
        &[&tensors[..], &sizes].concat(),
    )?;
    if let Statistics::Joined(gather) = statistics {
        let parts = gather(&part_sums(&dw, &db, rows)?)?;
        check_parts(&parts, width)?;
        let parts = parts.contiguous()?;
        let tensors = [Read(&parts), Read(by.inverse), Write(&level)];
        let sizes = [parts.dims()[0], width].map(Int);
        launch("joined_level", Grid::elements(width), &[&tensors[..], &sizes].concat())?;
    }
    let tensors = [Read(&x), Read(&affine), Read(by.mean), Read(&level), Read(&dy)];
    launch(
        "normalise_silu_dx",
        Grid::elements(n),
        &[&tensors[..], &[Write(&out), Long(n as u64), Int(width)]].concat(),
    )?;
    Ok((out, dw, db))
}
