//! The joint network and the TDT loss over it, fused: logits exist for some thousand lattice cells at a time.

mod lattices;

use candle_core::{DType, Device, Tensor};
use flow_kernels::bias::{add_bias, column_sum};
use flow_kernels::column_sums::GrowingSums;
use flow_kernels::is_gpu;
use flow_kernels::joint::{Cell, CellList, Cells, add_hidden_gradient, hidden};
use flow_kernels::noise::DropMask;
use flow_kernels::product::{add_product_in, factor_in, product, product_in};

use crate::layers::dropout;
use crate::layers::linear::Linear;
use crate::loss::TdtLoss;
use crate::parameters::{Gradients, Initialise, Mode, ParameterBuilder, ParameterId, Parameters};
use crate::pending_sums::PendingSums;
use crate::{Error, Result};
use lattices::{Lattices, LogitGradients};

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
    lattices: Lattices,
    cells: CellList,
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

    /// The last layer's weight as products of training take it: on a device rounded once for all of them.
    fn rounded_weight(&self, parameters: &Parameters) -> Result<Tensor> {
        let weight = parameters.get(self.weight);
        match is_gpu(weight.device()) {
            true => Ok(weight.to_dtype(self.factors)?),
            false => Ok(weight.clone()),
        }
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
        let cells = self.list_cells(shape, frames, targets)?;
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
        let (weight, bias) = (self.rounded_weight(parameters)?, parameters.get(self.bias));
        let mut lattices = Lattices::new(cells.len(), self.durations, &f)?;
        let mut kept = Vec::new();
        let chunk = chunk(f.device());
        let may_keep = chunks_kept(chunk, (self.tokens + self.durations) * f.dtype().size_in_bytes());
        let cells = CellList::new(cells, f.device())?;
        for first in (0..cells.len()).step_by(chunk) {
            let cells = cells.part(first..cells.len().min(first + chunk))?;
            let hidden = hidden(&f, &g, cells.clone(), mask)?;
            let logits = match parameters.packed(self.weight) {
                Some(packed) => packed.product(&hidden)?,
                None => product_in(self.factors, &hidden, &weight.t()?)?,
            };
            lattices.set(first, &logits, bias, cells)?;
            if kept.len() < may_keep {
                kept.push(logits);
            }
        }
        let extents = frames
            .iter()
            .zip(targets)
            .map(|(&frames, target)| (frames, target.len() + 1));
        let losses = lattices.align(settings, &extents.collect::<Vec<_>>())?;
        Ok(JointLoss {
            losses,
            lattices,
            cells,
            kept,
            f,
            g,
            mask,
            encoded,
            predicted,
            shape,
        })
    }

    /// Lists the valid cells, utterance by utterance.
    fn list_cells(&self, shape: Shape, frames: &[usize], targets: &[Vec<u32>]) -> Result<Vec<Cell>> {
        if frames.len() != shape.batch || targets.len() != shape.batch {
            return Err(Error::Input(format!(
                "a batch of {} has {} lengths and {} targets",
                shape.batch,
                frames.len(),
                targets.len()
            )));
        }
        let mut cells = Vec::new();
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
        }
        Ok(cells)
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
        let d_logits = saved.lattices.gradients(settings, factors, saved.shape.frames)?;
        let active = d_logits.active().into_iter().map(|cell| saved.cells[cell]).collect();
        let active = CellList::new(active, d_f.device())?;
        let before = |index: usize| active.partition_point(|cell| cell.index < index);
        let weight = self.rounded_weight(parameters)?;
        let bias = &mut self.bias_sums(saved, &active, gradients)?;
        let mut kept_until = 0;
        let size = chunk(d_f.device());
        for (number, logits) in saved.kept.iter().enumerate() {
            let first = number * size;
            let chunk = active.part(before(first)..before(first + size))?;
            self.backward_cells(
                parameters,
                (saved, &weight),
                (chunk, &d_logits),
                Some((logits, first)),
                (&d_f, &d_g),
                (bias, gradients),
            )?;
            kept_until = first + size;
        }
        for first in (before(kept_until)..active.len()).step_by(size) {
            let chunk = active.part(first..active.len().min(first + size))?;
            self.backward_cells(
                parameters,
                (saved, &weight),
                (chunk, &d_logits),
                None,
                (&d_f, &d_g),
                (bias, gradients),
            )?;
        }
        let mut sums = PendingSums::default();
        if let Some(bias) = bias.take() {
            sums.add(&[self.bias], bias.sums()?);
        }
        let Shape { batch, frames, states } = saved.shape;
        let d_encoded = if encoder_frozen {
            self.encoder_projection
                .backward_weights(&saved.encoded, &d_f, gradients)?;
            None
        } else {
            let d = self
                .encoder_projection
                .backward_pending(parameters, &saved.encoded, &d_f, gradients, &mut sums)?;
            Some(d.reshape((batch, frames, ()))?)
        };
        let d_predicted =
            self.prediction_projection
                .backward_pending(parameters, &saved.predicted, &d_g, gradients, &mut sums)?;
        sums.complete(parameters, gradients)?;
        Ok((d_encoded, d_predicted.reshape((batch, states, ()))?))
    }

    /// On a device the sums over all chunks of cells that are the last bias's gradient.
    fn bias_sums(&self, saved: &JointLoss, active: &[Cell], gradients: &Gradients) -> Result<Option<GrowingSums>> {
        if !is_gpu(saved.f.device()) || !gradients.wants(self.bias) || active.is_empty() {
            return Ok(None);
        }
        let size = chunk(saved.f.device());
        let kept = size * saved.kept.len();
        let (kept, again) = active.split_at(active.partition_point(|cell| cell.index < kept));
        let of_kept = kept.chunk_by(|a, b| a.index / size == b.index / size);
        let rows = of_kept.chain(again.chunks(size)).map(<[Cell]>::len);
        Ok(Some(GrowingSums::new(rows, self.tokens + self.durations, &saved.f)?))
    }

    /// The backward pass of some cells, given the last layer's weight as products take it, and the logits that they are among
    /// (with the index of the first one's cell) if they were kept.
    fn backward_cells(
        &self,
        parameters: &Parameters,
        (saved, weight): (&JointLoss, &Tensor),
        (cells, d_logits): (Cells, &LogitGradients),
        kept: Option<(&Tensor, usize)>,
        (d_f, d_g): (&Tensor, &Tensor),
        (bias, gradients): (&mut Option<GrowingSums>, &mut Gradients),
    ) -> Result<()> {
        if cells.is_empty() {
            return Ok(());
        }
        let hidden = hidden(&saved.f, &saved.g, cells.clone(), saved.mask)?;
        let factor = factor_in(self.factors, &hidden)?;
        let computed;
        let (logits, first) = match kept {
            Some((logits, first)) => (logits, Some(first)),
            None => {
                computed = product_in(self.factors, &factor, &weight.t()?)?;
                (&computed, None)
            }
        };
        let d_logits = d_logits.of(logits, first, parameters.get(self.bias), &cells)?;
        let d_factor = factor_in(self.factors, &d_logits)?;
        if gradients.wants(self.weight) {
            match gradients.get(self.weight).filter(|sum| is_gpu(sum.device())) {
                Some(sum) => add_product_in(self.factors, sum, &d_factor.t()?, &factor)?,
                None => gradients.add(self.weight, product_in(self.factors, &d_factor.t()?, &factor)?)?,
            }
        }
        match bias {
            Some(bias) => bias.add(&d_logits)?,
            None if gradients.wants(self.bias) => gradients.add(self.bias, column_sum(&d_logits)?)?,
            None => {}
        }
        let keep_factor = saved.mask.map_or(1.0, |mask| mask.keep_factor);
        let d_hidden = product_in(self.factors, &d_factor, weight)?;
        Ok(add_hidden_gradient(&d_hidden, &hidden, cells, keep_factor, d_f, d_g)?)
    }
}

#[cfg(test)]
mod tests;
