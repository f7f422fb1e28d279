//! The FastConformer encoder: sub-sampling, then Conformer layers.

pub mod cached;
pub mod stream;

use candle_core::Tensor;
use flow_kernels::attention::Context;
use flow_kernels::batch_norm::Gather;
use flow_kernels::elementwise::drop_scaled;
use flow_kernels::noise::{DropMask, Noise};

use crate::Precision;
use crate::config::{AdapterConfig, CausalConfig, ChunkContext, EncoderConfig};
use crate::parameter_groups::{ParameterGroup, PassObserver, StatisticsPass};
use crate::{Error, Result};
use flow_nn::layers::attention::PositionTable;
use flow_nn::layers::conformer_layer::{self, BranchGradients, ConformerLayer};
use flow_nn::layers::convolution::{BatchNorm, BatchNormPass};
use flow_nn::layers::subsampling::{self, Subsampling};
use flow_nn::layers::{Frames, dropout};
use flow_nn::parameters::{BufferUpdates, Gradients, Mode, ParameterBuilder, Parameters};
use flow_nn::pending_sums::PendingSums;

/// The encoder.
#[derive(Debug)]
pub struct Encoder {
    pub(crate) subsampling: Subsampling,
    layers: Vec<ConformerLayer>,
    table: PositionTable,
    config: EncoderConfig,
    /// Keep only each layer's input in the forward pass and compute the layer again in the backward pass: less memory,
    /// about a third more time, the same gradients to the bit.
    pub recompute: bool,
    /// Which statistics batch normalisation uses in training.
    pub batch_norm: BatchNorm,
    /// Which frames a frame sees.
    pub context: Context,
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    subsampling: subsampling::Saved,
    /// Factor and dropout between sub-sampling and the layers.
    scale: f64,
    mask: Option<DropMask>,
    positions: Tensor,
    frames: Frames,
    layers: Vec<LayerSaved>,
}

#[derive(Debug)]
enum LayerSaved {
    Whole(Box<conformer_layer::Saved>),
    /// The layer's input, the generator as it was at its start (none when evaluating), and the statistics of batch
    /// normalisation where they are those of all ranks.
    Input(Tensor, Option<Noise>, Option<(Tensor, Tensor)>),
}

impl Encoder {
    /// `prefix` is `encoder` in NeMo's models.
    pub fn new(config: &EncoderConfig, prefix: &str, builder: &mut ParameterBuilder) -> Result<Self> {
        // The sub-sampling is computed in f32: it has a hundredth of a large model's products, and reads features, whose range is
        // wide.
        let precision = builder.set_precision(Precision::F32);
        let subsampling = Subsampling::new(&format!("{prefix}.pre_encode"), config, builder)?;
        builder.set_precision(precision);
        Ok(Self {
            subsampling,
            layers: (0..config.n_layers)
                .map(|i| ConformerLayer::new(&format!("{prefix}.layers.{i}"), config, builder))
                .collect::<Result<_>>()?,
            table: PositionTable::new(config.d_model),
            config: config.clone(),
            recompute: false,
            batch_norm: BatchNorm::default(),
            context: config.attention_context.into(),
        })
    }

    /// The encoder with NeMo's adapters behind each of its layers, one after another.
    pub fn with_adapters(
        mut self,
        adapters: &[AdapterConfig],
        prefix: &str,
        builder: &mut ParameterBuilder,
    ) -> Result<Self> {
        for (number, layer) in self.layers.iter_mut().enumerate() {
            for adapter in adapters {
                layer.add_adapter(
                    &format!("{prefix}.layers.{number}"),
                    self.config.d_model,
                    adapter,
                    builder,
                )?;
            }
        }
        Ok(self)
    }

    /// Features (B, mels, T) with `lengths` valid frames -> encoded (B, T', d), valid frames per utterance, what the
    /// backward pass needs, and the new running statistics (in training). T' is T / 8, rounded up; rows past a length
    /// hold finite values without meaning.
    pub fn forward(
        &self,
        parameters: &Parameters,
        features: &Tensor,
        lengths: &[usize],
        mode: Mode,
    ) -> Result<(Tensor, Vec<usize>, Saved, BufferUpdates)> {
        let observer = &mut |_: ParameterGroup, _: &mut Gradients, _: &Parameters| {};
        self.forward_observed(parameters, (features, lengths), self.context, mode, observer)
    }

    /// As [`Encoder::forward`], in a context; `observer` is called before the parameters of the sub-sampling and of each layer are
    /// read.
    pub fn forward_observed(
        &self,
        parameters: &Parameters,
        features: (&Tensor, &[usize]),
        context: Context,
        mut mode: Mode,
        observer: &mut (dyn PassObserver + Send),
    ) -> Result<(Tensor, Vec<usize>, Saved, BufferUpdates)> {
        observer.before_forward(ParameterGroup::Subsampling, parameters);
        let (mut x, mut saved) = self.start(parameters, features, context, &mut mode)?;
        let mut updates = BufferUpdates::default();
        // The input of a layer that the one before has normalised.
        let mut normalised = None;
        for (number, layer) in self.layers.iter().enumerate() {
            let noise = match &mode {
                Mode::Train(noise) if self.recompute => Some((*noise).clone()),
                _ => None,
            };
            let (positions, frames) = (&saved.positions, &saved.frames);
            let begun = match normalised.take() {
                Some(normalised) => normalised,
                None => {
                    observer.before_forward(ParameterGroup::Layer(number), parameters);
                    layer.begin(parameters, &x)?
                }
            };
            let mut norm = BatchNormPass {
                batch_norm: self.batch_norm,
                known: None,
                gather: Some(&mut |own| observer.gather_statistics(number, StatisticsPass::Forward, own, parameters)),
                updates: &mut updates,
            };
            let body = layer.body(parameters, (&x, begun), positions, frames, &mut mode, &mut norm)?;
            let (y, whole) = match self.layers.get(number + 1) {
                // Two norms in one pass.
                Some(next) if !layer.has_adapters() => {
                    observer.before_forward(ParameterGroup::Layer(number + 1), parameters);
                    let (y, whole, begun) = layer.end_and_begin(parameters, body, next)?;
                    normalised = Some(begun);
                    (y, whole)
                }
                _ => layer.end(parameters, body)?,
            };
            saved.layers.push(if self.recompute {
                let known = whole.batch_norm().filter(|_| self.batch_norm == BatchNorm::AllRanks);
                LayerSaved::Input(x, noise, known)
            } else {
                LayerSaved::Whole(Box::new(whole))
            });
            x = y;
        }
        let encoded = x.reshape((saved.frames.batch, saved.frames.time, self.config.d_model))?;
        Ok((encoded, saved.frames.lengths.to_vec(), saved, updates))
    }

    /// The same when evaluating, without keeping anything for a backward pass.
    pub fn encode(
        &self,
        parameters: &Parameters,
        features: &Tensor,
        lengths: &[usize],
    ) -> Result<(Tensor, Vec<usize>)> {
        let mut mode = Mode::Evaluate;
        let (mut x, start) = self.start(parameters, (features, lengths), self.context, &mut mode)?;
        let Saved { positions, frames, .. } = start;
        for layer in &self.layers {
            let updates = &mut BufferUpdates::default();
            let norm = &mut self.alone(None, updates);
            x = layer.forward(parameters, &x, &positions, &frames, &mut mode, norm)?.0;
        }
        let encoded = x.reshape((frames.batch, frames.time, self.config.d_model))?;
        Ok((encoded, frames.lengths.to_vec()))
    }

    /// The batch normalisation of a pass that exchanges nothing.
    fn alone<'a>(&self, known: Option<(Tensor, Tensor)>, updates: &'a mut BufferUpdates) -> BatchNormPass<'a> {
        BatchNormPass {
            batch_norm: self.batch_norm,
            known,
            gather: None,
            updates,
        }
    }

    /// A context of the configuration's list for a micro-batch of training, drawn with their probabilities; none where there is no
    /// list.
    pub fn drawn_context(&self, noise: &mut Noise) -> Option<ChunkContext> {
        let CausalConfig {
            contexts,
            probabilities,
            ..
        } = &self.config.causal;
        let last = contexts.last()?;
        let probability = |index: usize| probabilities.get(index).copied().unwrap_or(1.0 / contexts.len() as f64);
        let mut left = noise.uniform();
        for (index, context) in contexts.iter().enumerate() {
            left -= probability(index);
            if left < 0.0 {
                return Some(*context);
            }
        }
        // The probabilities add up to a little less than 1.
        Some(*last)
    }

    /// The factor between sub-sampling and the first layer.
    fn input_scale(&self) -> f64 {
        match self.config.xscaling {
            true => (self.config.d_model as f64).sqrt(),
            false => 1.0,
        }
    }

    /// Everything before the first layer.
    fn start(
        &self,
        parameters: &Parameters,
        (features, lengths): (&Tensor, &[usize]),
        context: Context,
        mode: &mut Mode,
    ) -> Result<(Tensor, Saved)> {
        let (batch, bands, time) = features.dims3()?;
        if batch == 0 || time == 0 || bands != self.config.feat_in {
            return Err(Error::Input(format!(
                "features of shape {:?}: expected (utterances, {}, frames), none of them 0",
                features.dims(),
                self.config.feat_in
            )));
        }
        let (x, time, lengths, subsampling) = self.subsampling.forward(parameters, features, lengths)?;
        let scale = self.input_scale();
        let mask = dropout::draw(self.config.dropout_pre_encoder, mode);
        let x = drop_scaled(&x, scale, mask)?;
        let positions = self.table.rows(time, parameters.dtype(), parameters.device())?;
        let positions = drop_scaled(&positions, 1.0, dropout::draw(self.config.dropout_emb, mode))?;
        // Each layer multiplies them with its weight.
        let factors = self.layers.first().map_or(x.dtype(), |layer| layer.factors(&x));
        let positions = positions.to_dtype(factors)?;
        let saved = Saved {
            subsampling,
            scale,
            mask,
            positions,
            frames: Frames {
                batch,
                time,
                lengths,
                context,
            },
            layers: Vec::with_capacity(self.layers.len()),
        };
        Ok((x, saved))
    }

    /// Adds the gradients of all parameters, given that of the output, (B, T', d).
    pub fn backward(
        &self,
        parameters: &Parameters,
        saved: Saved,
        d_encoded: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<()> {
        self.backward_observed(
            parameters,
            saved,
            d_encoded,
            gradients,
            &mut |_: ParameterGroup, _: &mut Gradients, _: &Parameters| {},
        )
    }

    /// As [`Encoder::backward`]; `observer` is called when the gradients of a layer or of the sub-sampling are
    /// complete.
    pub fn backward_observed(
        &self,
        parameters: &Parameters,
        saved: Saved,
        d_encoded: &Tensor,
        gradients: &mut Gradients,
        observer: &mut (dyn PassObserver + Send),
    ) -> Result<()> {
        let Saved {
            subsampling,
            scale,
            mask,
            positions,
            frames,
            layers,
        } = saved;
        let mut d = d_encoded.reshape((frames.rows(), self.config.d_model))?;
        // Of the layer that comes next on the way back: the gradient before its last norm, and sums that this gave.
        let mut begun: Option<(BranchGradients, PendingSums)> = None;
        let mut layers = layers;
        while let Some(saved) = layers.pop() {
            let number = layers.len();
            let layer = &self.layers[number];
            let saved = match saved {
                LayerSaved::Whole(saved) => *saved,
                LayerSaved::Input(x, mut noise, known) => {
                    let mut mode = noise.as_mut().map_or(Mode::Evaluate, Mode::Train);
                    let updates = &mut BufferUpdates::default();
                    let norm = &mut self.alone(known, updates);
                    layer.forward(parameters, &x, &positions, &frames, &mut mode, norm)?.1
                }
            };
            let (at_end, mut sums) = match begun.take() {
                Some(begun) => begun,
                None => {
                    let mut sums = PendingSums::default();
                    let d = layer.backward_adapters(parameters, &saved, &d, gradients, &mut sums)?;
                    (layer.backward_end(parameters, &saved, &d, &mut sums)?, sums)
                }
            };
            let mut gather =
                |own: &Tensor| observer.gather_statistics(number, StatisticsPass::Backward, own, parameters);
            let (given, to) = ((at_end, &mut gather as Gather), (&mut *gradients, &mut sums));
            let at_begin = layer.backward_body(parameters, &saved, &frames, given, to)?;
            match layers.last() {
                // Two norms in one pass.
                Some(LayerSaved::Whole(before)) if !self.layers[number - 1].has_adapters() => {
                    let mut sums_before = PendingSums::default();
                    let before = (&self.layers[number - 1], &**before, &mut sums_before);
                    let next = layer.backward_begin_and_end(parameters, &saved, &at_begin, &mut sums, before)?;
                    begun = Some((next, sums_before));
                }
                _ => d = layer.backward_begin(parameters, &saved, &at_begin, &mut sums)?,
            }
            layer.complete(parameters, &saved, sums, gradients)?;
            observer.gradients_complete(ParameterGroup::Layer(number), gradients, parameters);
        }
        let d = drop_scaled(&d, scale, mask)?;
        self.subsampling.backward(parameters, &subsampling, &d, gradients)?;
        observer.gradients_complete(ParameterGroup::Subsampling, gradients, parameters);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
