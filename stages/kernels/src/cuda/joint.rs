//! Element-wise parts of the joint network and its loss.

use candle_core::{DType, Device, Tensor};

use super::Argument::{Float, Int, Long, Read, Write};
use super::sums::add_to_rows;
use super::{Grid, alike, fresh, fresh_of, launch, mask_arguments, numbers};
use crate::device::{to_device, to_host};
use crate::error::Result;
use crate::joint::{Cell, CellGradient, CellTerms};
use crate::noise::DropMask;

/// Four numbers for each cell.
fn upload(cells: &[Cell], like: &Tensor) -> Result<Tensor> {
    let numbers_of = |cell: &Cell| {
        [
            cell.frame,
            cell.state,
            cell.label.unwrap_or(u32::MAX as usize),
            cell.index,
        ]
    };
    numbers(cells.iter().flat_map(numbers_of), like)
}

pub fn hidden(f: &Tensor, g: &Tensor, cells: &[Cell], mask: Option<DropMask>) -> Result<Tensor> {
    let width = f.dim(1)?;
    let (n, out) = (cells.len() * width, fresh((cells.len(), width), f)?);
    let cells = upload(cells, f)?;
    let tensors = [Read(f), Read(g), Read(&cells), Write(&out)];
    let [keep, key, threshold] = mask_arguments(mask, 1.0);
    let rest = [Long(n as u64), Int(width), keep, key, threshold];
    launch("joint_hidden", Grid::elements(n), &[&tensors[..], &rest].concat())?;
    Ok(out)
}

pub fn cell_terms(
    logits: &Tensor,
    bias: &Tensor,
    cells: &[Cell],
    terms: &mut [CellTerms],
    durations: &mut [f64],
) -> Result<()> {
    let width = logits.dim(1)?;
    let count = durations.len() / cells.len().max(1);
    let found = fresh_of(DType::F64, (cells.len(), 3 + count), logits.device())?;
    let listed = upload(cells, logits)?;
    let tensors = [Read(logits), Read(bias), Read(&listed), Write(&found)];
    launch(
        "cell_terms",
        Grid::rows(cells.len()),
        &[&tensors[..], &[Int(width - count), Int(count)]].concat(),
    )?;
    let found = to_host::<f64>(&found.flatten_all()?)?;
    for (at, (terms, found)) in terms.iter_mut().zip(found.chunks_exact(3 + count)).enumerate() {
        let (own, logs) = found.split_at(3);
        *terms = CellTerms {
            normaliser: own[0],
            blank: own[1],
            label: own[2],
        };
        durations[at * count..(at + 1) * count].copy_from_slice(logs);
    }
    Ok(())
}

pub fn logit_gradient(
    logits: &Tensor,
    rows: &[usize],
    bias: &Tensor,
    cells: &[Cell],
    gradients: &[CellGradient],
    durations: &[(f64, f64)],
    clamp: f64,
) -> Result<Tensor> {
    let width = logits.dim(1)?;
    let count = durations.len() / cells.len().max(1);
    let out = fresh((cells.len(), width), logits)?;
    let doubles = |values: Vec<f64>| {
        let len = values.len();
        to_device(&Tensor::from_vec(values, len, &Device::Cpu)?, logits.device())
    };
    let parts = |of: &CellGradient| [of.normaliser, of.blank, of.label, of.factor];
    let gradients = doubles(gradients.iter().flat_map(parts).collect())?;
    let pairs = doubles(
        durations
            .iter()
            .flat_map(|&(log, posterior)| [log, posterior])
            .collect(),
    )?;
    let (rows, listed) = (numbers(rows.iter().copied(), logits)?, upload(cells, logits)?);
    let tensors = [logits, &rows, bias, &listed, &gradients, &pairs].map(Read);
    let rest = [Write(&out), Int(width - count), Int(count), Float(clamp)];
    launch(
        "logit_gradient",
        Grid::rows(cells.len()),
        &[&tensors[..], &rest].concat(),
    )?;
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
