//! Element-wise parts of the joint network and its loss.

use candle_core::{Device, Tensor};

use super::Argument::{Float, Int, Long, Read, Write};
use super::{Grid, THREADS, alike, fresh, launch, mask_arguments, numbers};
use crate::error::{Error, Result};
use crate::joint::{Cell, Cells};
use crate::noise::DropMask;

/// Four numbers for each cell, where a tensor lies.
pub(super) fn listed(cells: &Cells, like: &Tensor) -> Result<Tensor> {
    match cells.on_device() {
        Some(listed) => Ok(listed.clone()),
        None => copied(cells, like.device()),
    }
}

/// The same of cells that are on the host alone.
pub fn copied(cells: &[Cell], device: &Device) -> Result<Tensor> {
    let numbers_of = |cell: &Cell| {
        [
            cell.frame,
            cell.state,
            cell.label.unwrap_or(u32::MAX as usize),
            cell.index,
        ]
    };
    numbers(cells.iter().flat_map(numbers_of), device)
}

pub fn hidden(f: &Tensor, g: &Tensor, cells: &Cells, mask: Option<DropMask>) -> Result<Tensor> {
    let width = f.dim(1)?;
    let (n, out) = (cells.len() * width, fresh((cells.len(), width), f)?);
    let cells = listed(cells, f)?;
    let tensors = [Read(f), Read(g), Read(&cells), Write(&out)];
    let [keep, key, threshold] = mask_arguments(mask, 1.0);
    let rest = [Long(n as u64), Int(width), keep, key, threshold];
    launch("joint_hidden", Grid::elements(n), &[&tensors[..], &rest].concat())?;
    Ok(out)
}

pub fn add_hidden_gradient(
    d_hidden: &Tensor,
    hidden: &Tensor,
    cells: &Cells,
    keep_factor: f64,
    d_f: &Tensor,
    d_g: &Tensor,
) -> Result<()> {
    alike("hidden", d_hidden, hidden)?;
    let ((count, width), (frames, of_f), (states, of_g)) = (hidden.dims2()?, d_f.dims2()?, d_g.dims2()?);
    if cells.len() != count || of_f != width || of_g != width {
        return Err(Error::Input(format!(
            "gradients of {} cells of width {width}, in tensors of width {of_f} and {of_g}, for {count} rows",
            cells.len()
        )));
    }
    let outside = |cell: &Cell| cell.frame >= frames || cell.state >= states;
    if !cells.is_sorted_by_key(|cell| (cell.frame, cell.state)) || cells.iter().any(outside) {
        return Err(Error::Input(
            "cells of a gradient are not in order, or lie outside".into(),
        ));
    }
    if count == 0 {
        return Ok(());
    }
    let listed = listed(cells, hidden)?;
    let tensors = [Read(d_hidden), Read(hidden), Read(&listed), Write(d_f), Write(d_g)];
    let rest = [Int(count), Int(frames), Int(width), Float(keep_factor)];
    launch(
        "joint_hidden_sums",
        Grid::of(frames + states, width.div_ceil(THREADS)),
        &[&tensors[..], &rest].concat(),
    )
}
