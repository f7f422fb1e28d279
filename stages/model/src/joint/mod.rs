//! The joint network and the TDT loss over it, fused: logits exist for some thousand lattice cells at a time.

mod lattices;
mod on_device;

use candle_core::{DType, Device, Tensor};
use flow_kernels::bias::{add_bias, column_sum};
use flow_kernels::joint::{Cell, CellTerms, add_hidden_gradient, cell_terms, hidden};
use flow_kernels::noise::DropMask;
use flow_kernels::product::product;
use flow_kernels::{is_gpu, on_cpu};

use crate::alignment::transducer::Cells as LatticeCells;
use crate::loss::TdtLoss;
use crate::{Error, Result};
use flow_nn::layers::dropout;
use flow_nn::layers::linear::Linear;
use flow_nn::parameters::{Gradients, Initialise, Mode, ParameterBuilder, ParameterId, Parameters};
use flow_nn::pending_sums::PendingSums;
use lattices::{Lattices, LogitGradients, negligible};

/// Cells whose logits are computed at once.
const CHUNK: usize = 512;

/// Logits are kept from the forward to the backward pass while they fit in this many bytes; beyond, and on a device, they are
/// computed again.
const KEPT_LOGITS: usize = 32 << 20;

/// Of a loss over so many cells with so many outputs in f32, the cells whose logits are computed again in the backward
/// pass.
pub fn cells_computed_again(cells: usize, outputs: usize, on_device: bool) -> usize {
    match on_device {
        true => cells,
        false => cells.saturating_sub(chunks_kept(outputs * DType::F32.size_in_bytes()) * CHUNK),
    }
}

/// Chunks of cells whose logits, of this many bytes for a cell, are kept.
fn chunks_kept(bytes: usize) -> usize {
    KEPT_LOGITS / (bytes * CHUNK).max(1)
}

/// `relu(enc(encoded) + pred(predicted))`, then one linear layer to tokens, blank and durations.
#[derive(Debug, Clone)]
pub struct Joint {
    encoder_projection: Linear,
    prediction_projection: Linear,
    weight: ParameterId,
    bias: ParameterId,
    dropout: f64,
    /// What the factors of the last layer's products are rounded to in training on a device. Its weight is kept in 32 bits.
    factors: DType,
    /// Tokens and blank.
    tokens: usize,
    durations: usize,
    /// On a device, how many cells are computed at once.
    sizes_on_device: on_device::Sizes,
}

/// Sizes of a joint network.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JointSizes {
    pub encoder: usize,
    pub prediction: usize,
    pub hidden: usize,
    /// Vocabulary without blank.
    pub vocabulary: usize,
    pub durations: usize,
    pub dropout: f64,
}

/// Loss per utterance, and what the backward pass needs.
pub struct JointLoss {
    /// Negative log likelihood per utterance (times 1 + lambda of FastEmit).
    pub losses: Vec<f64>,
    cells: CellSums,
    rows: Rows,
}

/// What the backward pass needs of the cells.
enum CellSums {
    Host(HostCells),
    Device(on_device::DeviceCells),
}

struct HostCells {
    lattices: Lattices,
    cells: Vec<Cell>,
    kept: Vec<Tensor>,
}

/// The two parts that the cells' hidden values are joined of.
struct Rows {
    /// Projected rows; on a device without biases.
    f: Tensor,
    g: Tensor,
    mask: Option<DropMask>,
    /// Rows of the inputs.
    encoded: Tensor,
    predicted: Tensor,
    shape: Shape,
}

#[derive(Debug, Clone, Copy)]
struct Shape {
    batch: usize,
    frames: usize,
    states: usize,
}

impl Joint {
    /// Declares the parameters under `prefix` (`joint`). The last layer's key is `joint_net.2`, or `joint_net.1` in
    /// archives of models without dropout.
    pub fn new(sizes: &JointSizes, prefix: &str, builder: &mut ParameterBuilder) -> Result<Self> {
        let outputs = sizes.vocabulary + 1 + sizes.durations;
        let encoder_projection = Linear::new(&format!("{prefix}.enc"), sizes.encoder, sizes.hidden, true, builder)?;
        let prediction_projection =
            Linear::new(&format!("{prefix}.pred"), sizes.prediction, sizes.hidden, true, builder)?;
        let short = format!("{prefix}.joint_net.1");
        let net = if builder.loaded_has(&format!("{short}.weight")) == Some(true) {
            short
        } else {
            format!("{prefix}.joint_net.2")
        };
        let bound = 1.0 / (sizes.hidden as f64).sqrt();
        let weight = builder.parameter(
            &format!("{net}.weight"),
            &[outputs, sizes.hidden],
            Initialise::Uniform(bound),
        )?;
        builder.pack(weight)?;
        let bias = builder.parameter(&format!("{net}.bias"), &[outputs], Initialise::Uniform(bound))?;
        Ok(Joint {
            encoder_projection,
            prediction_projection,
            weight,
            bias,
            dropout: sizes.dropout,
            factors: builder.matrix_dtype(),
            tokens: sizes.vocabulary + 1,
            durations: sizes.durations,
            sizes_on_device: on_device::Sizes::default(),
        })
    }

    /// Index of the blank output.
    pub fn blank(&self) -> usize {
        self.tokens - 1
    }

    /// Number of token outputs, blank included; the duration outputs follow.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The encoder's part of the hidden layer: (rows, encoder) to (rows, joint).
    pub fn project_encoder(&self, parameters: &Parameters, encoded: &Tensor) -> Result<Tensor> {
        self.encoder_projection.forward(parameters, encoded)
    }

    /// The prediction network's part of the hidden layer: (rows, prediction) to (rows, joint).
    pub fn project_prediction(&self, parameters: &Parameters, predicted: &Tensor) -> Result<Tensor> {
        self.prediction_projection.forward(parameters, predicted)
    }

    /// Logits of pairs of projected rows, without dropout: (pairs, tokens + durations).
    pub fn logits(&self, parameters: &Parameters, f: &Tensor, g: &Tensor, pairs: &[Cell]) -> Result<Tensor> {
        let (logits, bias) = self.logits_and_bias(parameters, &hidden(f, g, pairs, None)?)?;
        add_bias(&logits, bias)?;
        Ok(logits)
    }

    /// Logits of rows of the hidden layer, without the bias, which comes beside them.
    pub fn logits_and_bias<'a>(&self, parameters: &'a Parameters, hidden: &Tensor) -> Result<(Tensor, &'a Tensor)> {
        let logits = match parameters.packed(self.weight) {
            Some(packed) => packed.product(hidden)?,
            None => product(hidden, &parameters.get(self.weight).t()?)?,
        };
        Ok((logits, parameters.get(self.bias)))
    }

    /// The loss of a batch.
    ///
    /// `encoded`: (batch, frames, encoder), of which `frames[b]` are valid; `predicted`: (batch, states, prediction),
    /// of which `targets[b].len() + 1` are valid. An utterance without frames has loss 0.
    pub fn loss(
        &self,
        parameters: &Parameters,
        settings: &TdtLoss,
        (encoded, frames): (&Tensor, &[usize]),
        (predicted, targets): (&Tensor, &[Vec<u32>]),
        mut mode: Mode,
    ) -> Result<JointLoss> {
        let (batch, padded_frames, _) = encoded.dims3()?;
        let (_, padded_states, _) = predicted.dims3()?;
        let shape = Shape {
            batch,
            frames: padded_frames,
            states: padded_states,
        };
        self.check_extents(shape, frames, targets)?;
        if settings.durations.len() != self.durations {
            return Err(Error::Input(format!(
                "the loss has {} durations, the joint network {}",
                settings.durations.len(),
                self.durations
            )));
        }
        let rows = |x: &Tensor| -> Result<Tensor> { Ok(x.contiguous()?.flatten_to(1)?) };
        let (encoded, predicted) = (rows(encoded)?, rows(predicted)?);
        let projected = |layer: &Linear, x: &Tensor| match is_gpu(x.device()) {
            true => layer.product(parameters, x),
            false => layer.forward(parameters, x),
        };
        let rows = Rows {
            f: projected(&self.encoder_projection, &encoded)?,
            g: projected(&self.prediction_projection, &predicted)?,
            mask: dropout::draw(self.dropout, &mut mode),
            encoded,
            predicted,
            shape,
        };
        let (losses, cells) = if is_gpu(rows.f.device()) {
            let (losses, cells) = self.loss_on_device(parameters, settings, &rows, frames, targets)?;
            (losses, CellSums::Device(cells))
        } else {
            let (losses, cells) = self.loss_on_host(parameters, settings, &rows, frames, targets)?;
            (losses, CellSums::Host(cells))
        };
        Ok(JointLoss { losses, cells, rows })
    }

    /// Log-probabilities of cells, (frame, state) of a text with these tokens, from the projected rows of the frames and of the
    /// states.
    ///
    /// # Errors
    /// If the device fails.
    pub fn lattice_cells(
        &self,
        parameters: &Parameters,
        (f, g): (&Tensor, &Tensor),
        cells: impl Iterator<Item = (usize, usize)>,
        tokens: &[u32],
    ) -> Result<LatticeCells> {
        let cells: Vec<Cell> = cells
            .enumerate()
            .map(|(index, (frame, state))| Cell {
                frame,
                state,
                label: tokens.get(state).map(|&token| token as usize),
                index,
            })
            .collect();
        let mut found = LatticeCells::default();
        for cells in cells.chunks(CHUNK) {
            let (logits, bias) = self.logits_and_bias(parameters, &hidden(f, g, cells, None)?)?;
            let (logits, bias) = (logits.to_device(&Device::Cpu)?, bias.to_device(&Device::Cpu)?);
            let mut terms = vec![CellTerms::default(); cells.len()];
            let mut durations = vec![0.0; cells.len() * self.durations];
            on_cpu(|| cell_terms(&logits, &bias, cells, &mut terms, &mut durations))?;
            found.blank.extend(terms.iter().map(|terms| terms.blank));
            found.label.extend(terms.iter().map(|terms| terms.label));
            found.durations.extend(durations);
        }
        Ok(found)
    }

    /// Operations of the products of the backward pass that it leaves out on a device: the two of the last layer for each cell
    /// that does not count.
    pub fn flops_left_out(&self, loss: &JointLoss) -> f64 {
        let left_out = match &loss.cells {
            CellSums::Host(_) => 0,
            CellSums::Device(cells) => cells.left_out(),
        };
        let width = loss.rows.f.dim(1).unwrap_or(0);
        2.0 * 2.0 * left_out as f64 * (width * (self.tokens + self.durations)) as f64
    }

    fn loss_on_host(
        &self,
        parameters: &Parameters,
        settings: &TdtLoss,
        rows: &Rows,
        frames: &[usize],
        targets: &[Vec<u32>],
    ) -> Result<(Vec<f64>, HostCells)> {
        let Rows { f, g, mask, shape, .. } = rows;
        let cells = list_cells(*shape, frames, targets);
        let (weight, bias) = (parameters.get(self.weight), parameters.get(self.bias));
        let mut lattices = Lattices::new(cells.len(), self.durations);
        let mut kept = Vec::new();
        let may_keep = chunks_kept((self.tokens + self.durations) * f.dtype().size_in_bytes());
        for (number, cells) in cells.chunks(CHUNK).enumerate() {
            let hidden = hidden(f, g, cells, *mask)?;
            let logits = match parameters.packed(self.weight) {
                Some(packed) => packed.product(&hidden)?,
                None => product(&hidden, &weight.t()?)?,
            };
            lattices.set(number * CHUNK, &logits, bias, cells)?;
            if kept.len() < may_keep {
                kept.push(logits);
            }
        }
        let extents = frames
            .iter()
            .zip(targets)
            .map(|(&frames, target)| (frames, target.len() + 1));
        let losses = lattices.align(settings, &extents.collect::<Vec<_>>())?;
        Ok((losses, HostCells { lattices, cells, kept }))
    }

    /// An error where utterances do not fit their batch, or the vocabulary.
    fn check_extents(&self, shape: Shape, frames: &[usize], targets: &[Vec<u32>]) -> Result<()> {
        if frames.len() != shape.batch || targets.len() != shape.batch {
            return Err(Error::Input(format!(
                "a batch of {} has {} lengths and {} targets",
                shape.batch,
                frames.len(),
                targets.len()
            )));
        }
        for (b, (&length, target)) in frames.iter().zip(targets).enumerate() {
            if length > shape.frames || target.len() >= shape.states {
                return Err(Error::Input(format!("utterance {b} is longer than its batch")));
            }
            if let Some(token) = target.iter().find(|&&token| token as usize >= self.blank()) {
                return Err(Error::Input(format!(
                    "utterance {b} has target token {token}, but the vocabulary has {} tokens",
                    self.blank()
                )));
            }
        }
        Ok(())
    }

    /// Adds the gradients of `sum(factors[b] * losses[b])` and returns those of `encoded` (none if `encoder_frozen`)
    /// and `predicted`. Utterances whose loss is not finite have no gradient.
    pub fn backward(
        &self,
        parameters: &Parameters,
        settings: &TdtLoss,
        saved: &JointLoss,
        factors: &[f64],
        encoder_frozen: bool,
        gradients: &mut Gradients,
    ) -> Result<(Option<Tensor>, Tensor)> {
        let JointLoss { cells, rows, .. } = saved;
        let (d_f, d_g) = (rows.f.zeros_like()?, rows.g.zeros_like()?);
        let mut sums = PendingSums::default();
        match cells {
            CellSums::Host(cells) => {
                let factors = (settings, factors);
                self.backward_on_host(parameters, factors, (rows, cells), (&d_f, &d_g), gradients)?;
            }
            CellSums::Device(cells) => {
                let factors = (settings, factors);
                let bias = self.backward_on_device(parameters, factors, (rows, cells), (&d_f, &d_g), gradients)?;
                if let Some(bias) = bias {
                    sums.add(&[self.bias], bias);
                }
            }
        }
        let Shape { batch, frames, states } = rows.shape;
        let d_encoded = if encoder_frozen {
            self.encoder_projection
                .backward_weights(parameters, &rows.encoded, &d_f, gradients)?;
            None
        } else {
            let d = self
                .encoder_projection
                .backward_pending(parameters, &rows.encoded, &d_f, gradients, &mut sums)?;
            Some(d.reshape((batch, frames, ()))?)
        };
        let d_predicted =
            self.prediction_projection
                .backward_pending(parameters, &rows.predicted, &d_g, gradients, &mut sums)?;
        sums.complete(parameters, gradients)?;
        Ok((d_encoded, d_predicted.reshape((batch, states, ()))?))
    }

    fn backward_on_host(
        &self,
        parameters: &Parameters,
        (settings, factors): (&TdtLoss, &[f64]),
        (rows, saved): (&Rows, &HostCells),
        sums: (&Tensor, &Tensor),
        gradients: &mut Gradients,
    ) -> Result<()> {
        let d_logits = saved.lattices.gradients(settings, factors);
        let active: Vec<Cell> = d_logits
            .active(negligible(DType::F32))
            .into_iter()
            .map(|cell| saved.cells[cell])
            .collect();
        let before = |index: usize| active.partition_point(|cell| cell.index < index);
        let mut kept_until = 0;
        for (number, logits) in saved.kept.iter().enumerate() {
            let first = number * CHUNK;
            let cells = &active[before(first)..before(first + CHUNK)];
            self.backward_cells(
                parameters,
                rows,
                (cells, &d_logits),
                Some((logits, first)),
                sums,
                gradients,
            )?;
            kept_until = first + CHUNK;
        }
        for cells in active[before(kept_until)..].chunks(CHUNK) {
            self.backward_cells(parameters, rows, (cells, &d_logits), None, sums, gradients)?;
        }
        Ok(())
    }

    /// The backward pass of some cells on the host, given the logits that they are among (with the index of the first one's
    /// cell) if they were kept.
    fn backward_cells(
        &self,
        parameters: &Parameters,
        rows: &Rows,
        (cells, d_logits): (&[Cell], &LogitGradients),
        kept: Option<(&Tensor, usize)>,
        (d_f, d_g): (&Tensor, &Tensor),
        gradients: &mut Gradients,
    ) -> Result<()> {
        if cells.is_empty() {
            return Ok(());
        }
        let weight = parameters.get(self.weight);
        let hidden = hidden(&rows.f, &rows.g, cells, rows.mask)?;
        let computed;
        let (logits, first) = match kept {
            Some((logits, first)) => (logits, Some(first)),
            None => {
                computed = product(&hidden, &weight.t()?)?;
                (&computed, None)
            }
        };
        let d_logits = d_logits.of(logits, first, parameters.get(self.bias), cells)?;
        if gradients.wants(self.weight) {
            gradients.add(self.weight, product(&d_logits.t()?, &hidden)?)?;
        }
        if gradients.wants(self.bias) {
            gradients.add(self.bias, column_sum(&d_logits)?)?;
        }
        let d_hidden = product(&d_logits, weight)?;
        Ok(add_hidden_gradient(
            &d_hidden,
            &hidden,
            cells,
            rows.keep_factor(),
            d_f,
            d_g,
        )?)
    }
}

impl Rows {
    /// Factor of the hidden values that dropout keeps.
    fn keep_factor(&self) -> f64 {
        self.mask.map_or(1.0, |mask| mask.keep_factor)
    }
}

/// Lists the valid cells, utterance by utterance.
fn list_cells(shape: Shape, frames: &[usize], targets: &[Vec<u32>]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (b, (&length, target)) in frames.iter().zip(targets).enumerate() {
        for t in 0..length {
            for u in 0..=target.len() {
                cells.push(Cell {
                    frame: b * shape.frames + t,
                    state: b * shape.states + u,
                    label: target.get(u).map(|&token| token as usize),
                    index: cells.len(),
                });
            }
        }
    }
    cells
}

#[cfg(test)]
mod tests;
