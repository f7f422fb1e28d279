//! The loss and its gradients on a device, where cells and logits stay: losses, and how many cells count, are all that the host
//! reads. Where factors of products are in bf16, logits are rounded to bf16 too.

use std::ops::Range;

use candle_core::Tensor;
use flow_kernels::column_sums::ColumnSums;
use flow_kernels::product::{StackedProducts, add_product_in, product_in, product_rounded_in};
use flow_kernels::tdt::{Aligned, BiasSums, Extents, Lattices, LogitGradient, Rules, doubles};

use super::{Joint, Rows, negligible};
use crate::Result;
use crate::loss::TdtLoss;
use flow_nn::parameters::{Gradients, Parameters};

/// How many cells are computed at once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// Cells whose logits exist at once. With 8198 outputs, in rows of 8256, they take 203 MB in bf16 and 406 MB in f32; their
    /// gradients take their place.
    pub chunk: usize,
    /// Chunks whose hidden values exist at once: 79 MB in bf16 with a width of 640, and twice that for their gradients.
    pub chunks_of_hidden: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            chunk: 12 * 1024,
            chunks_of_hidden: 5,
        }
    }
}

/// Columns of logits are a multiple of this. Tensor cores are fed from rows that begin at multiples of 16 bytes, and rows of 8198
/// numbers in bf16 begin at multiples of 4.
const COLUMNS: usize = 64;

/// What the backward pass needs of the cells.
pub(super) struct DeviceCells {
    lattices: Lattices,
    aligned: Aligned,
    /// The last layer's weight, as products of training take it: with rows of zeros behind the outputs'.
    weight: Tensor,
}

impl DeviceCells {
    /// Cells that do not count.
    pub fn left_out(&self) -> usize {
        self.lattices.cells().len() - self.aligned.active
    }
}

/// The parts of a range, of one size but for the last.
fn parts(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range
        .step_by(size.max(1))
        .map(move |first| first..end.min(first + size))
}

impl Joint {
    /// Hidden values are joined with the projections' biases.
    fn projection_biases<'a>(&self, parameters: &'a Parameters) -> [Option<&'a Tensor>; 2] {
        [&self.encoder_projection, &self.prediction_projection].map(|layer| layer.bias().map(|id| parameters.get(id)))
    }

    pub(super) fn loss_on_device(
        &self,
        parameters: &Parameters,
        settings: &TdtLoss,
        rows: &Rows,
        frames: &[usize],
        targets: &[Vec<u32>],
    ) -> Result<(Vec<f64>, DeviceCells)> {
        let extents = Extents {
            padded: (rows.shape.frames, rows.shape.states),
            frames,
            targets,
            durations: &settings.durations,
        };
        let lattices = Lattices::new(&extents, rows.f.device())?;
        let weight = parameters.get(self.weight).to_dtype(self.factors)?;
        let outputs = weight.dim(0)?;
        let weight = weight.pad_with_zeros(0, 0, outputs.next_multiple_of(COLUMNS) - outputs)?;
        let (biases, bias) = (self.projection_biases(parameters), parameters.get(self.bias));
        let Sizes {
            chunk,
            chunks_of_hidden,
        } = self.sizes_on_device;
        for group in parts(0..lattices.cells().len(), chunk * chunks_of_hidden) {
            let cells = lattices.cells().part(group.clone())?;
            let hidden = cells.hidden(self.factors, (&rows.f, &rows.g), biases, rows.mask)?;
            for part in parts(0..cells.len(), chunk) {
                let hidden = hidden.narrow(0, part.start, part.len())?;
                let logits = product_rounded_in(self.factors, &hidden, &weight.t()?)?;
                lattices.set_terms(group.start + part.start, &logits, bias)?;
            }
        }
        let aligned = lattices.align(&Rules {
            sigma: settings.sigma,
            label_factor: settings.label_factor(),
            negligible: negligible(self.factors),
            rnnt: settings.rnnt,
        })?;
        let losses = aligned.losses.clone();
        let cells = DeviceCells {
            lattices,
            aligned,
            weight,
        };
        Ok((losses, cells))
    }

    /// Adds the gradients of the last layer's weight and of the projected rows. Gives the sums that are that of the last bias, if
    /// it is wanted.
    pub(super) fn backward_on_device(
        &self,
        parameters: &Parameters,
        (settings, factors): (&TdtLoss, &[f64]),
        (rows, saved): (&Rows, &DeviceCells),
        sums: (&Tensor, &Tensor),
        gradients: &mut Gradients,
    ) -> Result<Option<ColumnSums>> {
        let DeviceCells {
            lattices,
            aligned,
            weight,
        } = saved;
        if aligned.active == 0 {
            return Ok(None);
        }
        let active = lattices.active_cells(aligned)?;
        let Sizes {
            chunk,
            chunks_of_hidden,
        } = self.sizes_on_device;
        let outputs = self.tokens + self.durations;
        let mut bias_sums = match gradients.wants(self.bias) {
            true => Some(BiasSums::new(active.len().min(chunk), outputs, rows.f.device())?),
            false => None,
        };
        let options = LogitGradient {
            dtype: self.factors,
            factors: &doubles(factors.to_vec(), rows.f.device())?,
            clamp: settings.clamp,
        };
        let (biases, bias) = (self.projection_biases(parameters), parameters.get(self.bias));
        // Of the weight with its rows of zeros.
        let mut d_weight: Option<Tensor> = None;
        for group in parts(0..active.len(), chunk * chunks_of_hidden) {
            let cells = active.part(group)?;
            let hidden = cells.hidden(self.factors, (&rows.f, &rows.g), biases, rows.mask)?;
            let mut d_hidden = StackedProducts::new(cells.len(), hidden.dim(1)?, &rows.f)?;
            for part in parts(0..cells.len(), chunk) {
                let hidden = hidden.narrow(0, part.start, part.len())?;
                let cells = cells.part(part)?;
                let logits = product_rounded_in(self.factors, &hidden, &weight.t()?)?;
                let d_logits =
                    lattices.logit_gradient(aligned, (logits, bias), &cells, &options, bias_sums.as_mut())?;
                if gradients.wants(self.weight) {
                    match &d_weight {
                        Some(sum) => add_product_in(self.factors, sum, &d_logits.t()?, &hidden)?,
                        None => d_weight = Some(product_in(self.factors, &d_logits.t()?, &hidden)?),
                    }
                }
                d_hidden.push(self.factors, &d_logits, weight)?;
            }
            cells.add_hidden_gradient(&d_hidden.rows()?, &hidden, rows.keep_factor(), sums)?;
        }
        if let Some(sum) = d_weight {
            gradients.add(self.weight, sum.narrow(0, 0, outputs)?)?;
        }
        Ok(bias_sums.map(BiasSums::sums))
    }
}
