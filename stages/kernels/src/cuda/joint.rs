//! Element-wise parts of the joint network and its loss.

use candle_core::Tensor;

use super::Argument::{Float, Int, Long, Read, Write};
use super::sums::groups_of;
use super::{Grid, THREADS, alike, fresh, launch, mask_arguments, numbers};
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
    let width = hidden.dim(1)?;
    let rows = |of: fn(&Cell) -> usize| cells.iter().map(|cell| Some(of(cell))).collect::<Vec<_>>();
    let (mut groups, mut members) = groups_of(&rows(|cell| cell.frame));
    let first_state = groups.len() / 2;
    let (of_states, more) = groups_of(&rows(|cell| cell.state));
    // Those of the states are behind those of the frames.
    let before = members.len();
    groups.extend(
        of_states
            .chunks_exact(2)
            .flat_map(|group| [before + group[0], group[1]]),
    );
    members.extend(more);
    let count = groups.len() / 2;
    groups.push(members.len());
    let listed = numbers(groups.into_iter().chain(members), hidden.device())?;
    let (groups, members) = (
        listed.narrow(0, 0, 2 * count + 1)?,
        listed.narrow(0, 2 * count + 1, 2 * before)?,
    );
    let tensors = [d_hidden, hidden, &groups, &members].map(Read);
    let rest = [Write(d_f), Write(d_g), Int(first_state), Int(width), Float(keep_factor)];
    launch(
        "joint_hidden_sums",
        Grid::of(count, width.div_ceil(THREADS)),
        &[&tensors[..], &rest].concat(),
    )
}
