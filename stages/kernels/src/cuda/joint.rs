//! Element-wise parts of the joint network and its loss.

use candle_core::Tensor;

use super::Argument::{Float, Int, Long, Read, Write};
use super::sums::add_to_rows;
use super::{Grid, alike, fresh, launch, mask_arguments, numbers};
use crate::error::Result;
use crate::joint::Cell;
use crate::noise::DropMask;

/// Four numbers for each cell.
pub(super) fn listed(cells: &[Cell], like: &Tensor) -> Result<Tensor> {
    let numbers_of = |cell: &Cell| {
        [
            cell.frame,
            cell.state,
            cell.label.unwrap_or(u32::MAX as usize),
            cell.index,
        ]
    };
    numbers(cells.iter().flat_map(numbers_of), like.device())
}

pub fn hidden(f: &Tensor, g: &Tensor, cells: &[Cell], mask: Option<DropMask>) -> Result<Tensor> {
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
    cells: &[Cell],
    keep_factor: f64,
    d_f: &Tensor,
    d_g: &Tensor,
) -> Result<()> {
    alike("hidden", d_hidden, hidden)?;
    let (n, passed) = (hidden.elem_count(), fresh(hidden.shape(), hidden)?);
    let tensors = [Read(d_hidden), Read(hidden), Write(&passed)];
    launch(
        "joint_hidden_backward",
        Grid::elements(n),
        &[&tensors[..], &[Float(keep_factor), Long(n as u64)]].concat(),
    )?;
    let rows = |of: fn(&Cell) -> usize| cells.iter().map(|cell| Some(of(cell))).collect::<Vec<_>>();
    add_to_rows(d_f, &passed, &rows(|cell| cell.frame))?;
    add_to_rows(d_g, &passed, &rows(|cell| cell.state))
}
