//! One LSTM layer over a sequence.

use candle_core::{DType, Tensor};

use crate::device::launch::Argument::{Int, Read, Write};
use crate::device::launch::{Grid, fresh, launch, numbers};
use crate::error::Result;
use crate::ops::lstm::{LstmGradients, LstmSaved, LstmWeights, gradients};
use crate::product::product;

/// Hidden units that a block has; as in `lstm.cu`.
const UNITS: usize = 8;

/// Blocks for a layer, and what counts them at their barriers.
fn blocks(width: usize, like: &Tensor) -> Result<(Grid, Tensor)> {
    let arrived = Tensor::zeros(1, DType::U32, like.device())?;
    Ok((Grid::rows(width.div_ceil(UNITS)), arrived))
}

pub fn lstm(x: &Tensor, weights: LstmWeights) -> Result<(Tensor, LstmSaved)> {
    let (steps, batch, inputs) = x.dims3()?;
    let width = weights.hidden.dim(1)?;
    let x = x.contiguous()?.reshape((steps * batch, inputs))?;
    let gates = product(&x, &weights.input.t()?)?;
    let (cells, hidden) = (fresh((steps * batch, width), &x)?, fresh((steps * batch, width), &x)?);
    if steps * batch > 0 {
        let (grid, arrived) = blocks(width, &x)?;
        let inputs = [weights.hidden, weights.input_bias, weights.hidden_bias].map(Read);
        let outputs = [&cells, &hidden, &arrived].map(Write);
        let sizes = [steps, batch, width].map(Int);
        let arguments = [&[Write(&gates)][..], &inputs, &outputs, &sizes].concat();
        launch("lstm_layer", grid, &arguments)?;
    }
    let y = hidden.reshape((steps, batch, width))?;
    let input = x;
    Ok((
        y,
        LstmSaved {
            input,
            gates,
            cells,
            hidden,
            batch,
        },
    ))
}

/// Shapes were checked.
pub fn lstm_backward<'a>(dy: &Tensor, saved: &'a LstmSaved, weights: LstmWeights) -> Result<LstmGradients<'a>> {
    let dy = dy.contiguous()?;
    let (steps, batch, width) = dy.dims3()?;
    let d_gates = fresh((steps * batch, 4 * width), &dy)?;
    if steps * batch > 0 {
        let (grid, arrived) = blocks(width, &dy)?;
        let (transposed, d_cell) = (weights.hidden.t()?.contiguous()?, fresh((batch, width), &dy)?);
        let inputs = [&dy, &transposed, &saved.gates, &saved.cells].map(Read);
        let outputs = [&d_cell, &d_gates, &arrived].map(Write);
        let sizes = [steps, batch, width].map(Int);
        launch("lstm_layer_backward", grid, &[&inputs[..], &outputs, &sizes].concat())?;
    }
    gradients(d_gates, saved, weights, (steps, batch))
}

pub fn lstm_step(x: &Tensor, hidden: &Tensor, cell: &Tensor, weights: LstmWeights) -> Result<(Tensor, Tensor)> {
    let recurrent = product(hidden, &weights.hidden.t()?)?;
    let gates = product(x, &weights.input.t()?)?;
    let (cells, outputs) = (fresh(cell.shape(), cell)?, fresh(cell.shape(), cell)?);
    let (n, width) = (cells.elem_count(), cells.dim(1)?);
    let inputs = [&gates, &recurrent, weights.input_bias, weights.hidden_bias, cell].map(Read);
    let rest = [Write(&cells), Write(&outputs), Int(n), Int(width)];
    launch("lstm_step", Grid::elements(n), &[&inputs[..], &rest].concat())?;
    Ok((outputs, cells))
}

/// One step of the utterances that move, whose rows of `hidden` and `cell` it replaces.
pub(crate) fn lstm_step_rows(
    x: &Tensor,
    hidden: &Tensor,
    cell: &Tensor,
    moves: &Tensor,
    weights: LstmWeights,
) -> Result<()> {
    let recurrent = product(hidden, &weights.hidden.t()?)?;
    let gates = product(x, &weights.input.t()?)?;
    let (n, width) = (cell.elem_count(), cell.dim(1)?);
    let inputs = [&gates, &recurrent, weights.input_bias, weights.hidden_bias, moves].map(Read);
    let rest = [Write(cell), Write(hidden), Int(n), Int(width)];
    launch("lstm_step_rows", Grid::elements(n), &[&inputs[..], &rest].concat())
}

pub fn replace_rows(old: &Tensor, new: &Tensor, take: &[bool]) -> Result<Tensor> {
    let (n, width) = (old.elem_count(), old.dim(1)?);
    let (out, take) = (
        fresh(old.shape(), old)?,
        numbers(take.iter().map(|&take| usize::from(take)), old.device())?,
    );
    let tensors = [Read(old), Read(new), Read(&take), Write(&out)];
    launch(
        "replace_rows",
        Grid::elements(n),
        &[&tensors[..], &[Int(n), Int(width)]].concat(),
    )?;
    Ok(out)
}
