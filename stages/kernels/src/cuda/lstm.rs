//! One LSTM layer over a sequence.

use candle_core::Tensor;

use super::Argument::{Int, Read, ReadIf, Write};
use super::{Grid, fresh, launch, numbers};
use crate::error::Result;
use crate::lstm::{LstmGradients, LstmSaved, LstmWeights, gradients};
use crate::product::product;

/// Activates gates (batch, 4H) in place, which hold the product with the input, and advances the cell.
fn advance(
    gates: &Tensor,
    recurrent: Option<&Tensor>,
    weights: LstmWeights,
    before: Option<&Tensor>,
    (cells, hidden): (&Tensor, &Tensor),
) -> Result<()> {
    let (n, width) = (cells.elem_count(), cells.dim(1)?);
    let inputs = [
        Write(gates),
        ReadIf(recurrent),
        Read(weights.input_bias),
        Read(weights.hidden_bias),
    ];
    let rest = [ReadIf(before), Write(cells), Write(hidden), Int(n), Int(width)];
    launch("lstm_step", Grid::elements(n), &[&inputs[..], &rest].concat())
}

pub fn lstm(x: &Tensor, weights: LstmWeights) -> Result<(Tensor, LstmSaved)> {
    let (steps, batch, inputs) = x.dims3()?;
    let width = weights.hidden.dim(1)?;
    let x = x.contiguous()?.reshape((steps * batch, inputs))?;
    let gates = product(&x, &weights.input.t()?)?;
    let (cells, hidden) = (fresh((steps * batch, width), &x)?, fresh((steps * batch, width), &x)?);
    let recurrent = weights.hidden.t()?;
    for step in 0..steps {
        let of = |all: &Tensor, step: usize| all.narrow(0, step * batch, batch);
        let before = step.checked_sub(1).map(|before| of(&cells, before)).transpose()?;
        let product = step
            .checked_sub(1)
            .map(|before| product(&of(&hidden, before)?, &recurrent))
            .transpose()?;
        let now = (&of(&cells, step)?, &of(&hidden, step)?);
        advance(&of(&gates, step)?, product.as_ref(), weights, before.as_ref(), now)?;
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
pub fn lstm_backward(dy: &Tensor, saved: &LstmSaved, weights: LstmWeights) -> Result<LstmGradients> {
    let dy = dy.contiguous()?;
    let (steps, batch, width) = dy.dims3()?;
    let dy = dy.reshape((steps * batch, width))?;
    let d_gates = fresh((steps * batch, 4 * width), &dy)?;
    let d_cell = Tensor::zeros((batch, width), dy.dtype(), dy.device())?;
    let mut later: Option<Tensor> = None;
    let n = batch * width;
    for step in (0..steps).rev() {
        let of = |all: &Tensor, step: usize| all.narrow(0, step * batch, batch);
        let before = step.checked_sub(1).map(|before| of(&saved.cells, before)).transpose()?;
        let (dy, gates, cells) = (of(&dy, step)?, of(&saved.gates, step)?, of(&saved.cells, step)?);
        let d_step = of(&d_gates, step)?;
        let tensors = [Read(&dy), ReadIf(later.as_ref()), Read(&gates), Read(&cells)];
        let rest = [
            ReadIf(before.as_ref()),
            Write(&d_cell),
            Write(&d_step),
            Int(n),
            Int(width),
        ];
        launch("lstm_step_backward", Grid::elements(n), &[&tensors[..], &rest].concat())?;
        if step > 0 {
            later = Some(product(&d_step, weights.hidden)?);
        }
    }
    gradients(&d_gates, saved, weights, (steps, batch))
}

pub fn lstm_step(x: &Tensor, hidden: &Tensor, cell: &Tensor, weights: LstmWeights) -> Result<(Tensor, Tensor)> {
    let recurrent = product(hidden, &weights.hidden.t()?)?;
    let gates = product(x, &weights.input.t()?)?;
    let (cells, outputs) = (fresh(cell.shape(), cell)?, fresh(cell.shape(), cell)?);
    advance(&gates, Some(&recurrent), weights, Some(cell), (&cells, &outputs))?;
    Ok((outputs, cells))
}

pub fn replace_rows(old: &Tensor, new: &Tensor, take: &[bool]) -> Result<Tensor> {
    let (n, width) = (old.elem_count(), old.dim(1)?);
    let (out, take) = (
        fresh(old.shape(), old)?,
        numbers(take.iter().map(|&take| usize::from(take)), old)?,
    );
    let tensors = [Read(old), Read(new), Read(&take), Write(&out)];
    launch(
        "replace_rows",
        Grid::elements(n),
        &[&tensors[..], &[Int(n), Int(width)]].concat(),
    )?;
    Ok(out)
}
