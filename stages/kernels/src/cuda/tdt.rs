//! The TDT loss over lattices of frames and label states that lie on a device: nothing of them is copied to host memory but
//! the losses, and which cells count.

use candle_core::{DType, Device, Tensor};

use super::Argument::{Float, Int, Read, Signed, Write};
use super::joint::listed;
use super::{Grid, fresh, fresh_of, launch, numbers};
use crate::device::{to_device, to_host};
use crate::error::{Error, Result};
use crate::joint::{Cell, Cells};

/// Log probabilities of all cells of a batch, utterance by utterance.
#[derive(Debug)]
pub struct Lattices {
    /// (cells, 3 + durations): normaliser, log probabilities of blank, of the label and of each duration.
    terms: Tensor,
    cells: usize,
    durations: usize,
}

/// The rules of the sums.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// Frames of each duration.
    pub durations: &'a [usize],
    /// Subtracted from the log probability of every emission.
    pub sigma: f64,
    /// Factor of label posteriors in the gradient, and of the loss.
    pub label_factor: f64,
    /// A cell with less posterior does not count.
    pub negligible: f64,
    /// Durations do not count.
    pub rnnt: bool,
}

/// Sums over all alignments of each utterance.
#[derive(Debug)]
pub struct Aligned {
    /// Negative log likelihood of each utterance, times the label factor: 0 without frames, infinite where nothing fits.
    pub losses: Vec<f64>,
    /// Whether each cell counts.
    pub active: Vec<bool>,
    /// (cells, 2 + durations): posteriors of blank, label and durations.
    arcs: Tensor,
    settings: Tensor,
}

impl Lattices {
    /// For so many cells.
    pub fn new(cells: usize, durations: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            // A device has no memory of no bytes.
            terms: fresh_of(DType::F64, (cells.max(1), 3 + durations), device)?,
            cells,
            durations,
        })
    }

    /// Where they lie.
    pub fn device(&self) -> &Device {
        self.terms.device()
    }

    /// Log probabilities as they were set.
    #[cfg(test)]
    pub(super) fn terms(&self) -> &Tensor {
        &self.terms
    }

    /// Log probabilities of the cells from `first` on, of their logits (cells, tokens + durations) without bias.
    pub fn set_terms<'a>(
        &self,
        first: usize,
        logits: &Tensor,
        bias: &Tensor,
        cells: impl Into<Cells<'a>>,
    ) -> Result<()> {
        let cells = cells.into();
        let (rows, width) = logits.dims2()?;
        let tokens = width
            .checked_sub(self.durations)
            .filter(|tokens| *tokens > 0)
            .ok_or_else(|| Error::Input(format!("{width} outputs for {} durations", self.durations)))?;
        if rows != cells.len() || bias.elem_count() != width {
            return Err(Error::Input(format!(
                "logits {rows} x {width} for {} cells, and a bias of {}",
                cells.len(),
                bias.elem_count()
            )));
        }
        let terms = self.terms.narrow(0, first, cells.len())?;
        let listed = listed(&cells, logits)?;
        let tensors = [Read(logits), Read(bias), Read(&listed), Write(&terms)];
        launch(
            "cell_terms",
            Grid::rows(cells.len()),
            &[&tensors[..], &[Int(tokens), Int(self.durations)]].concat(),
        )
    }

    /// The sums of utterances with so many frames and states each, whose cells are behind each other. Waits for the device.
    pub fn align(&self, rules: &Rules, extents: &[(usize, usize)]) -> Result<Aligned> {
        let (cells, device) = (self.cells, self.terms.device());
        let (mut next, mut listed) = (0, Vec::with_capacity(3 * extents.len()));
        for &(frames, states) in extents {
            listed.extend([next, frames, states]);
            next += frames * states;
        }
        if next != cells || rules.durations.len() != self.durations || extents.iter().any(|&(_, states)| states == 0) {
            return Err(Error::Input(format!(
                "lattices of {cells} cells and {} durations for {next} cells and {}",
                self.durations,
                rules.durations.len()
            )));
        }
        let scalars = [rules.sigma, rules.label_factor, rules.negligible];
        let settings = scalars
            .into_iter()
            .chain(rules.durations.iter().map(|&frames| frames as f64));
        let settings = doubles(settings.collect(), device)?;
        let of_cells = |width: usize| fresh_of(DType::F64, (cells.max(1), width), device);
        let (beta, posterior, arcs) = (of_cells(1)?, of_cells(1)?, of_cells(2 + self.durations)?);
        let losses = fresh_of(DType::F64, extents.len(), device)?;
        let active = fresh_of(DType::U8, cells.max(1), device)?;
        let extents = numbers(listed.into_iter(), self.terms.device())?;
        let read = [&self.terms, &settings, &extents].map(Read);
        let written = [&beta, &posterior, &arcs, &losses, &active].map(Write);
        let sizes = [Int(self.durations), Int(usize::from(rules.rnnt))];
        launch(
            "tdt_align",
            Grid::rows(losses.elem_count()),
            &[&read[..], &written, &sizes].concat(),
        )?;
        Ok(Aligned {
            losses: to_host(&losses)?,
            active: to_host::<u8>(&active)?
                .into_iter()
                .take(cells)
                .map(|active| active != 0)
                .collect(),
            arcs,
            settings,
        })
    }

    /// The gradient of the logits of some cells. Row 0 of `logits` is that of the cell with the index `first`; without it, rows
    /// are those of the cells. `factors`: of each utterance's loss;
    /// `frames`: rows of the encoder's output that an utterance has; `clamp`: to which gradients of tokens are clipped, if
    /// positive.
    #[allow(clippy::too_many_arguments)]
    pub fn logit_gradient(
        &self,
        aligned: &Aligned,
        logits: &Tensor,
        first: Option<usize>,
        bias: &Tensor,
        cells: &Cells,
        (factors, frames): (&Tensor, usize),
        clamp: f64,
    ) -> Result<Tensor> {
        let (height, width) = logits.dims2()?;
        let of = aligned.active.len();
        let utterance = |cell: &Cell| cell.frame / frames.max(1);
        let outside = |cell: &Cell| cell.index >= of || utterance(cell) >= factors.elem_count();
        let in_rows = |first: usize| {
            let row = |cell: &Cell| cell.index.checked_sub(first);
            i32::try_from(first).is_ok() && cells.iter().all(|cell| row(cell).is_some_and(|row| row < height))
        };
        let fits = first.map_or(height == cells.len(), in_rows)
            && width > self.durations
            && bias.elem_count() == width
            && of == self.cells;
        if frames == 0 || !fits || cells.iter().any(outside) {
            return Err(Error::Input("cells lie outside of their lattices".into()));
        }
        let out = fresh((cells.len(), width), logits)?;
        let listed = listed(cells, logits)?;
        let tensors = [
            logits,
            bias,
            &listed,
            &self.terms,
            &aligned.arcs,
            &aligned.settings,
            factors,
        ]
        .map(Read);
        let sizes = [width - self.durations, self.durations, frames].map(Int);
        // Checked above.
        let first = Signed(first.map_or(-1, |first| first as i32));
        launch(
            "tdt_logit_gradient",
            Grid::rows(cells.len()),
            &[&tensors[..], &[Write(&out)], &sizes, &[first, Float(clamp)]].concat(),
        )?;
        Ok(out)
    }
}

/// Numbers in 64 bits on a device.
pub fn doubles(values: Vec<f64>, device: &Device) -> Result<Tensor> {
    let len = values.len();
    to_device(&Tensor::from_vec(values, len, &Device::Cpu)?, device)
}
