//! Element-wise parts of the joint network and its loss.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use crate::device::launch::Argument::{Float, Int, Read, ReadIf, Write};
use crate::device::launch::{
    Grid, THREADS, alike, fresh_in, in_either, launch, mask_arguments, numbers, read_in_either,
};
use crate::device::to_host;
use crate::error::{Error, Result};
use crate::noise::DropMask;
use crate::ops::joint::Cell;

/// Cells of lattices, where tensors lie.
#[derive(Clone, Debug)]
pub struct CellList {
    /// Four numbers for each: frame, state, label (the largest number for none), index. A device has no memory of no bytes, so
    /// that there may be one more.
    list: Tensor,
    count: usize,
    /// Rows of the two parts that they are within.
    within: [usize; 2],
    /// Rows of the two parts that each utterance has: a cell joins rows of one utterance. All of them are one's where it is not
    /// known.
    each: [usize; 2],
    /// In rising order of frame and state.
    in_order: bool,
}

impl CellList {
    /// Copies cells that are on the host.
    ///
    /// # Errors
    /// If the device fails.
    pub fn copied(cells: &[Cell], device: &Device) -> Result<Self> {
        let numbers_of = |cell: &Cell| {
            [
                cell.frame,
                cell.state,
                cell.label.unwrap_or(u32::MAX as usize),
                cell.index,
            ]
        };
        let end = |row: fn(&Cell) -> usize| cells.iter().map(|cell| row(cell) + 1).max().unwrap_or(0);
        let within = [end(|cell| cell.frame), end(|cell| cell.state)];
        Ok(Self {
            list: numbers(cells.iter().flat_map(numbers_of), device)?,
            count: cells.len(),
            within,
            each: within,
            in_order: cells.is_sorted_by_key(|cell| (cell.frame, cell.state)),
        })
    }

    /// As many cells in order that `list` has, four numbers for each, of utterances with `each` rows of the two parts.
    pub(crate) fn in_order(list: Tensor, count: usize, utterances: usize, each: [usize; 2]) -> Self {
        Self {
            list,
            count,
            within: each.map(|rows| utterances * rows),
            each,
            in_order: true,
        }
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(crate) fn list(&self) -> &Tensor {
        &self.list
    }

    /// Those from one place of the list to another.
    ///
    /// # Errors
    /// If they are not in the list.
    pub fn part(&self, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.count {
            return Err(Error::Input(format!(
                "there are no cells {range:?} among {}",
                self.count
            )));
        }
        Ok(Self {
            list: self.list.narrow(0, 4 * range.start, 4 * range.len())?,
            count: range.len(),
            ..self.clone()
        })
    }

    /// Four numbers for each: frame, state, label (the largest number for none), index. Waits for the device.
    ///
    /// # Errors
    /// If the device fails.
    pub fn to_vec(&self) -> Result<Vec<u32>> {
        to_host(&self.list.narrow(0, 0, 4 * self.count)?)
    }

    fn check(&self, frames: usize, states: usize) -> Result<()> {
        if self.within[0] <= frames && self.within[1] <= states {
            return Ok(());
        }
        Err(Error::Input(format!(
            "cells of {:?} frames and states for {frames} and {states} rows",
            self.within
        )))
    }

    /// `drop(relu(f[frame] + g[state]))` of each, (cells, joint) in f32 or bf16. To the rows of `f` and `g` biases are added
    /// first, if they are given.
    ///
    /// # Errors
    /// Where cells are outside of the tensors.
    pub fn hidden(
        &self,
        dtype: DType,
        (f, g): (&Tensor, &Tensor),
        biases: [Option<&Tensor>; 2],
        mask: Option<DropMask>,
    ) -> Result<Tensor> {
        let ((frames, width), (states, of_g)) = (f.dims2()?, g.dims2()?);
        self.check(frames, states)?;
        if of_g != width || biases.iter().flatten().any(|bias| bias.elem_count() != width) {
            return Err(Error::Input(format!(
                "rows of {width} and {of_g} values, or their biases, do not fit"
            )));
        }
        let n = self.count * width.div_ceil(4);
        let out = fresh_in(dtype, (self.count, width), f.device())?;
        let [keep, key, threshold] = mask_arguments(mask, 1.0);
        let inputs = [Read(f), Read(g), ReadIf(biases[0]), ReadIf(biases[1]), Read(&self.list)];
        let rest = [Int(n), Int(width), keep, key, threshold];
        launch(
            "joint_hidden",
            Grid::elements(n),
            &[&inputs[..], &in_either(&out), &rest].concat(),
        )?;
        Ok(out)
    }

    /// Adds the gradient of the hidden values of these cells, which is in f32, to those of the rows that they joined: see
    /// [`add_hidden_gradient`](crate::joint::add_hidden_gradient). `hidden` is in f32 or bf16. Each sum is taken in the order of
    /// the cells, however these are divided into lists.
    ///
    /// # Errors
    /// Where cells are not in rising order of frame and state, or are outside of the tensors.
    pub fn add_hidden_gradient(
        &self,
        d_hidden: &Tensor,
        hidden: &Tensor,
        keep_factor: f64,
        (d_f, d_g): (&Tensor, &Tensor),
    ) -> Result<()> {
        alike("hidden", d_hidden, hidden)?;
        let ((count, width), (frames, of_f), (states, of_g)) = (hidden.dims2()?, d_f.dims2()?, d_g.dims2()?);
        if self.count != count || of_f != width || of_g != width {
            return Err(Error::Input(format!(
                "gradients of {} cells of width {width}, in tensors of width {of_f} and {of_g}, for {count} rows",
                self.count
            )));
        }
        if !self.in_order || self.check(frames, states).is_err() {
            return Err(Error::Input(
                "cells of a gradient are out of order or out of bounds".into(),
            ));
        }
        if count == 0 {
            return Ok(());
        }
        let outputs = [Read(&self.list), Write(d_f), Write(d_g)];
        let [frames_each, states_each] = self.each;
        let sizes = [count, frames, frames_each, states_each, width].map(Int);
        launch(
            "joint_hidden_sums",
            Grid::of(frames + states, width.div_ceil(THREADS)),
            &[
                &[Read(d_hidden)][..],
                &read_in_either(hidden),
                &outputs,
                &sizes,
                &[Float(keep_factor)],
            ]
            .concat(),
        )
    }
}

pub fn hidden(f: &Tensor, g: &Tensor, cells: &[Cell], mask: Option<DropMask>) -> Result<Tensor> {
    CellList::copied(cells, f.device())?.hidden(DType::F32, (f, g), [None; 2], mask)
}

pub fn add_hidden_gradient(
    d_hidden: &Tensor,
    hidden: &Tensor,
    cells: &[Cell],
    keep_factor: f64,
    d_f: &Tensor,
    d_g: &Tensor,
) -> Result<()> {
    CellList::copied(cells, hidden.device())?.add_hidden_gradient(d_hidden, hidden, keep_factor, (d_f, d_g))
}
