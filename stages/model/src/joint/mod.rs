//! The joint network and the TDT loss over it, fused: logits exist for some thousand lattice cells at a time.

use candle_core::{DType, Device, Tensor};
use flow_kernels::bias::{add_bias, column_sum};
use flow_kernels::is_gpu;
use flow_kernels::joint::{Cell, CellGradient, CellTerms, add_hidden_gradient, cell_terms, hidden, logit_gradient};
use flow_kernels::noise::DropMask;
use flow_kernels::product::product;
use rayon::prelude::*;

use crate::layers::dropout;
use crate::layers::linear::Linear;
use crate::loss::{Alignment, Lattice, TdtLoss, align};
use crate::parameters::{Gradients, Initialise, Mode, ParameterBuilder, ParameterId, Parameters};
use crate::{Error, Result};

/// Cells whose logits are computed at once.
const CHUNK: usize = 512;
/// The same on a device, which needs more work at once to be busy.
const DEVICE_CHUNK: usize = 8192;

fn chunk(device: &Device) -> usize {
    if is_gpu(device) { DEVICE_CHUNK } else { CHUNK }
}

/// Logits are kept from the forward to the backward pass while they fit in this many bytes; beyond, they are computed
/// again.
const KEPT_LOGITS: usize = 32 << 20;

/// Of a loss over so many cells with so many outputs in f32, the cells whose logits are computed again in the backward
/// pass.
pub fn cells_computed_again(cells: usize, outputs: usize, on_device: bool) -> usize {
    let chunk = if on_device { DEVICE_CHUNK } else { CHUNK };
    cells.saturating_sub(chunks_kept(chunk, outputs * DType::F32.size_in_bytes()) * chunk)
}

/// Chunks of cells whose logits, of so many bytes for a cell, are kept.
fn chunks_kept(chunk: usize, bytes: usize) -> usize {
    KEPT_LOGITS / (bytes * chunk).max(1)
}

/// Cells with a smaller posterior are left out of the backward pass: a batch has some 1e5 cells, so all of them
/// together move no gradient by more than 1e-15 of the largest logit gradient.
const NEGLIGIBLE: f64 = 1e-20;

/// `relu(enc(encoded) + pred(predicted))`, then one linear layer to tokens, blank and durations.
#[derive(Debug, Clone)]
pub struct Joint {
    encoder_projection: Linear,
    prediction_projection: Linear,
    weight: ParameterId,
    bias: ParameterId,
    dropout: f64,
    /// Tokens and blank.
    tokens: usize,
    durations: usize,
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
    alignments: Vec<Alignment>,
    cells: Vec<Cell>,
    /// First cell of each utterance, and the number of all cells.
    starts: Vec<usize>,
    terms: Vec<CellTerms>,
    /// Log probabilities, duration minor.
    durations: Vec<f64>,
    kept: Vec<Tensor>,
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
        let bias = builder.parameter(&format!("{net}.bias"), &[outputs], Initialise::Uniform(bound))?;
        Ok(Joint {
            encoder_projection,
            prediction_projection,
            weight,
            bias,
            dropout: sizes.dropout,
            tokens: sizes.vocabulary + 1,
            durations: sizes.durations,
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
        let hidden = hidden(f, g, pairs, None)?;
        let logits = product(&hidden, &parameters.get(self.weight).t()?)?;
        add_bias(&logits, parameters.get(self.bias))?;
        Ok(logits)
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
        let (cells, starts) = self.list_cells(shape, frames, targets)?;
        let rows = |x: &Tensor| -> Result<Tensor> { Ok(x.contiguous()?.flatten_to(1)?) };
        let (encoded, predicted) = (rows(encoded)?, rows(predicted)?);
        let f = self.encoder_projection.forward(parameters, &encoded)?;
        let g = self.prediction_projection.forward(parameters, &predicted)?;
        let mask = dropout::draw(self.dropout, &mut mode);
        if settings.durations.len() != self.durations {
            return Err(Error::Input(format!(
                "the loss has {} durations, the joint network {}",
                settings.durations.len(),
                self.durations
            )));
        }
        let (weight, bias) = (parameters.get(self.weight).t()?, parameters.get(self.bias));
        let mut terms = vec![CellTerms::default(); cells.len()];
        let mut durations = vec![0.0; cells.len() * self.durations];
        let mut kept = Vec::new();
        let chunk = chunk(f.device());
        let may_keep = chunks_kept(chunk, (self.tokens + self.durations) * f.dtype().size_in_bytes());
        let chunks = cells.chunks(chunk).zip(terms.chunks_mut(chunk));
        for ((cells, terms), durations) in chunks.zip(durations.chunks_mut((chunk * self.durations).max(1))) {
            let logits = product(&hidden(&f, &g, cells, mask)?, &weight)?;
            cell_terms(&logits, bias, cells, terms, durations)?;
            if kept.len() < may_keep {
                kept.push(logits);
            }
        }
        let alignments = align_all(settings, &starts, frames, targets, &terms, &durations)?;
        Ok(JointLoss {
            losses: alignments.iter().map(|alignment| alignment.loss).collect(),
            alignments,
            cells,
            starts,
            terms,
            durations,
            kept,
            f,
            g,
            mask,
            encoded,
            predicted,
            shape,
        })
    }

    /// Lists the valid cells, and where each utterance's begin.
    fn list_cells(&self, shape: Shape, frames: &[usize], targets: &[Vec<u32>]) -> Result<(Vec<Cell>, Vec<usize>)> {
        if frames.len() != shape.batch || targets.len() != shape.batch {
            return Err(Error::Input(format!(
                "a batch of {} has {} lengths and {} targets",
                shape.batch,
                frames.len(),
                targets.len()
            )));
        }
        let mut cells = Vec::new();
        let mut starts = vec![0];
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
            starts.push(cells.len());
        }
        Ok((cells, starts))
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
        let (d_f, d_g) = (saved.f.zeros_like()?, saved.g.zeros_like()?);
        let posteriors = cell_gradients(settings, saved, factors);
        let active: Vec<usize> = (0..saved.cells.len())
            .filter(|&cell| posteriors[cell].blank + posteriors[cell].label >= NEGLIGIBLE)
            .collect();
        let before = |cell: usize| active.partition_point(|&other| other < cell);
        let mut kept_until = 0;
        let size = chunk(d_f.device());
        for (number, logits) in saved.kept.iter().enumerate() {
            let first = number * size;
            let chunk = &active[before(first)..before(first + size)];
            let rows: Vec<usize> = chunk.iter().map(|&cell| cell - first).collect();
            let kept = Some((logits, &rows[..]));
            self.backward_cells(
                parameters,
                settings,
                saved,
                (chunk, &posteriors),
                kept,
                (&d_f, &d_g),
                gradients,
            )?;
            kept_until = first + size;
        }
        for chunk in active[before(kept_until)..].chunks(size) {
            self.backward_cells(
                parameters,
                settings,
                saved,
                (chunk, &posteriors),
                None,
                (&d_f, &d_g),
                gradients,
            )?;
        }
        let Shape { batch, frames, states } = saved.shape;
        let d_encoded = if encoder_frozen {
            self.encoder_projection
                .backward_weights(&saved.encoded, &d_f, gradients)?;
            None
        } else {
            let d = self
                .encoder_projection
                .backward(parameters, &saved.encoded, &d_f, gradients)?;
            Some(d.reshape((batch, frames, ()))?)
        };
        let d_predicted = self
            .prediction_projection
            .backward(parameters, &saved.predicted, &d_g, gradients)?;
        Ok((d_encoded, d_predicted.reshape((batch, states, ()))?))
    }

    /// The backward pass of some cells, given their logits (with the row of each cell) if they were kept.
    #[allow(clippy::too_many_arguments)]
    fn backward_cells(
        &self,
        parameters: &Parameters,
        settings: &TdtLoss,
        saved: &JointLoss,
        (indices, posteriors): (&[usize], &[CellGradient]),
        kept: Option<(&Tensor, &[usize])>,
        (d_f, d_g): (&Tensor, &Tensor),
        gradients: &mut Gradients,
    ) -> Result<()> {
        if indices.is_empty() {
            return Ok(());
        }
        let weight = parameters.get(self.weight);
        let cells: Vec<Cell> = indices.iter().map(|&cell| saved.cells[cell]).collect();
        let posteriors: Vec<CellGradient> = indices.iter().map(|&cell| posteriors[cell]).collect();
        let durations = saved.duration_terms(indices, self.durations);
        let hidden = hidden(&saved.f, &saved.g, &cells, saved.mask)?;
        let computed;
        let in_order: Vec<usize>;
        let (logits, rows) = match kept {
            Some((logits, rows)) => (logits, rows),
            None => {
                computed = product(&hidden, &weight.t()?)?;
                in_order = (0..cells.len()).collect();
                (&computed, &in_order[..])
            }
        };
        let bias = parameters.get(self.bias);
        let d_logits = logit_gradient(logits, rows, bias, &cells, &posteriors, &durations, settings.clamp)?;
        if gradients.wants(self.weight) {
            gradients.add(self.weight, product(&d_logits.t()?, &hidden)?)?;
        }
        if gradients.wants(self.bias) {
            gradients.add(self.bias, column_sum(&d_logits)?)?;
        }
        let keep_factor = saved.mask.map_or(1.0, |mask| mask.keep_factor);
        let d_hidden = product(&d_logits, weight)?;
        Ok(add_hidden_gradient(&d_hidden, &hidden, &cells, keep_factor, d_f, d_g)?)
    }
}

impl JointLoss {
    /// Log probability and posterior of the durations of some cells.
    fn duration_terms(&self, indices: &[usize], count: usize) -> Vec<(f64, f64)> {
        let mut terms = Vec::with_capacity(indices.len() * count);
        for &cell in indices {
            let utterance = self.starts.partition_point(|&start| start <= cell) - 1;
            let local = cell - self.starts[utterance];
            let logs = &self.durations[cell * count..][..count];
            let posteriors = &self.alignments[utterance].durations[local * count..][..count];
            terms.extend(logs.iter().copied().zip(posteriors.iter().copied()));
        }
        terms
    }
}

fn cell_gradients(settings: &TdtLoss, saved: &JointLoss, factors: &[f64]) -> Vec<CellGradient> {
    let mut all = Vec::with_capacity(saved.cells.len());
    for (utterance, (alignment, &factor)) in saved.alignments.iter().zip(factors).enumerate() {
        let terms = &saved.terms[saved.starts[utterance]..saved.starts[utterance + 1]];
        all.extend(
            terms
                .iter()
                .zip(alignment.blank.iter().zip(&alignment.label))
                .map(|(terms, (&blank, &label))| CellGradient {
                    normaliser: terms.normaliser,
                    blank,
                    label: label * settings.label_factor(),
                    factor,
                }),
        );
    }
    all
}

fn align_all(
    settings: &TdtLoss,
    starts: &[usize],
    frames: &[usize],
    targets: &[Vec<u32>],
    terms: &[CellTerms],
    durations: &[f64],
) -> Result<Vec<Alignment>> {
    let count = settings.durations.len();
    (0..frames.len())
        .into_par_iter()
        .map(|b| {
            let range = starts[b]..starts[b + 1];
            let blank: Vec<f64> = terms[range.clone()].iter().map(|terms| terms.blank).collect();
            let label: Vec<f64> = terms[range.clone()].iter().map(|terms| terms.label).collect();
            let durations = &durations[range.start * count..range.end * count];
            let states = targets[b].len() + 1;
            align(
                settings,
                &Lattice {
                    frames: frames[b],
                    states,
                    blank: &blank,
                    label: &label,
                    durations,
                },
            )
        })
        .collect()
}

#[cfg(test)]
mod tests;
