//! Training of a model: losses and gradients of a micro-batch.

use candle_core::Tensor;
use flow_kernels::Noise;
use flow_kernels::elementwise::add_in_place;

use super::TdtModel;
use crate::config::AttentionContext;
use crate::heads::{Head, HeadInput, HeadKind, HeadPass};
use crate::loss::divisors_in;
use crate::parameter_groups::{ParameterGroup, PassObserver};
use crate::{Error, Result, encoder};
use flow_nn::parameters::{BufferUpdates, Gradients, Mode, Parameters};

/// Utterances that share one forward and one backward pass.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MicroBatch {
    /// 16 kHz mono samples in [-1, 1], one vector per utterance; padded inside to the longest.
    pub signals: Vec<Vec<f32>>,
    /// Token ids of the target, one vector per utterance, each below the blank id. May be empty.
    pub tokens: Vec<Vec<u32>>,
    /// Numbers of the language prompts, one for each utterance. Empty for the model's own
    /// ([`TdtModel::prompt`]), and for models without prompts.
    pub prompts: Vec<usize>,
}

/// How one micro-batch is trained.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainOptions {
    /// No gradient and no dropout in the encoder, batch normalisation with its stored statistics.
    pub freeze_encoder: bool,
    /// Seeds dither, SpecAugment, dropout and the loss's omega draw of this micro-batch.
    pub seed: u64,
    /// Mask the features as the configuration's `spec_augment` says.
    pub spec_augment: bool,
    /// Add the configuration's dither to the signals.
    pub dither: bool,
    /// Apply the dropout rates that the model was made with; otherwise all are zero.
    pub dropout: bool,
    /// Factor on the gradients: 1 / number of micro-batches per optimizer step.
    pub scale: f64,
    /// The micro-batch that this one is a part of, if it is one. Loss and gradients are then the part's share of those of
    /// the whole, and dropout, dither and masks are drawn for each part.
    pub part: Option<PartOf>,
}

/// A part of a micro-batch that was divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartOf {
    /// Its number; the first is 0.
    pub number: u64,
    /// Utterances of the whole.
    pub utterances: usize,
    /// Target tokens of the whole.
    pub tokens: usize,
}

impl Default for TrainOptions {
    fn default() -> Self {
        TrainOptions {
            freeze_encoder: false,
            seed: 0,
            spec_augment: true,
            dither: true,
            dropout: true,
            scale: 1.0,
            part: None,
        }
    }
}

/// The result of a forward pass over a micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct MicroBatchOutput {
    /// Loss after the configured reduction, not multiplied by `TrainOptions::scale`. Not finite when an utterance's
    /// loss is not.
    pub loss: f64,
    /// Negative log likelihood of each utterance by the model's first head: zero for one too short to have a frame, infinite
    /// for one whose target a transducer cannot align; zero for one that CTC cannot, which then has no gradient, as in NeMo.
    pub losses: Vec<f64>,
    /// CTC loss after its own reduction, where the model has a CTC head beside a transducer and trains it. The gradient is then
    /// that of `(1 - weight) * loss + weight * ctc_loss`.
    pub ctc_loss: Option<f64>,
    /// Encoder frames of each utterance.
    pub frames: Vec<usize>,
    /// Encoder frames of the padded tensor, times utterances.
    pub padded_frames: usize,
    /// Target tokens of all utterances.
    pub tokens: usize,
    /// Operations of matrix products that the backward pass leaves out on a device, since cells of the lattices do not count.
    pub flops_left_out: f64,
}

/// A forward pass of the encoder.
struct Encoded {
    frames: Tensor,
    lengths: Vec<usize>,
    /// None if the encoder is not trained.
    saved: Option<encoder::Saved>,
    updates: BufferUpdates,
}

impl TdtModel {
    /// Trains one micro-batch: adds its gradients, times `options.scale`, to `gradients`, and moves the statistics of
    /// batch normalisation (unless the encoder is frozen).
    ///
    /// If the loss is not finite, neither happens: the caller learns which utterances are at fault from the result.
    pub fn train_micro_batch(
        &mut self,
        batch: &MicroBatch,
        options: &TrainOptions,
        gradients: &mut Gradients,
    ) -> Result<MicroBatchOutput> {
        self.train_micro_batch_observed(
            batch,
            options,
            gradients,
            &mut |_: ParameterGroup, _: &mut Gradients, _: &Parameters| {},
        )
    }

    /// As [`TdtModel::train_micro_batch`]; `observer` is called before each parameter group is read, and when its
    /// gradients are complete. If the loss is not finite, there is no backward pass.
    pub fn train_micro_batch_observed(
        &mut self,
        batch: &MicroBatch,
        options: &TrainOptions,
        gradients: &mut Gradients,
        observer: &mut (dyn PassObserver + Send),
    ) -> Result<MicroBatchOutput> {
        self.parameters.check_f32("trained")?;
        let mut adapters = self.config.adapters.iter().filter(|adapter| adapter.enabled);
        if let Some(adapter) = adapters.find(|adapter| adapter.regularised) {
            return Err(Error::Input(format!(
                "adapter `{}` has `stochastic_depth` or `l2_lambda`, with which adapters are not trained here",
                adapter.name
            )));
        }
        check(batch)?;
        let prompts = self.prompts_of(&batch.prompts, batch.signals.len())?;
        if self.prompt_kernel.is_some() && prompts.is_empty() {
            return Err(Error::Input(
                "a micro-batch has no language prompts, and the model has no `auto`".into(),
            ));
        }
        let of_whole = Noise::new(options.seed);
        let noise = match options.part {
            Some(part) if part.number > 0 => of_whole.derive(&format!("part {}", part.number)),
            _ => of_whole.clone(),
        };
        let mut dropout = noise.derive("dropout");
        if !options.dropout {
            dropout = dropout.without_dropout();
        }
        let mut encoded = self.encode_for_training(batch, options, (&of_whole, &noise), &mut dropout, observer)?;
        // Heads may have a group in common.
        let mut read: Vec<ParameterGroup> = Vec::new();
        let mut before = |group: ParameterGroup| {
            if !read.contains(&group) {
                read.push(group);
                observer.before_forward(group, &self.parameters);
            }
        };
        let mut of_prompts = None;
        if let Some(kernel) = &self.prompt_kernel {
            before(ParameterGroup::Heads);
            let (frames, saved) = kernel.forward_each(&self.parameters, &encoded.frames, &prompts)?;
            encoded.frames = frames;
            of_prompts = Some((kernel, saved));
        }
        let mut passes: Vec<Box<dyn HeadPass + '_>> = Vec::with_capacity(self.heads.len());
        let mut output = self.output(batch, options.part, &encoded, Vec::new())?;
        for head in &self.heads {
            let weight = self.head_weight(head.as_ref());
            // The main head has a loss whatever its share is.
            if weight == 0.0 && !passes.is_empty() {
                continue;
            }
            let divisors = self.divisors(head.as_ref(), batch, options.part);
            let factors: Vec<f64> = if passes.is_empty() {
                let factors = divisors.iter().map(|divisor| 1.0 / divisor);
                factors.map(|factor| factor * options.scale * weight).collect()
            } else {
                divisors
                    .iter()
                    .map(|divisor| weight * options.scale / divisor)
                    .collect()
            };
            let input = HeadInput {
                frames: &encoded.frames,
                lengths: &encoded.lengths,
                targets: &batch.tokens,
                factors: &factors,
                choices: Some(&of_whole),
            };
            let mode = Mode::Train(&mut dropout);
            let pass = head.forward(&self.parameters, &self.config, &input, mode, &mut before)?;
            if passes.is_empty() {
                output = self.output(batch, options.part, &encoded, pass.losses().to_vec())?;
                if !output.loss.is_finite() {
                    return Ok(output);
                }
                output.flops_left_out = pass.flops_left_out();
            } else {
                output.ctc_loss = Some(reduced_by(pass.losses(), &divisors));
            }
            passes.push(pass);
        }
        let mut d_encoded: Option<Tensor> = None;
        let encoder_frozen = encoded.saved.is_none();
        for pass in &mut passes {
            let unused = encoder_frozen && of_prompts.is_none();
            let d_frames = pass.backward_outputs(&self.parameters, unused, gradients)?;
            match (&d_encoded, d_frames) {
                (Some(sum), Some(d_frames)) => add_in_place(sum, &d_frames)?,
                (None, d_frames) => d_encoded = d_frames,
                (Some(_), None) => {}
            }
        }
        if let (Some((kernel, saved)), Some(dy)) = (&of_prompts, &d_encoded) {
            d_encoded = kernel.backward(&self.parameters, saved, dy, encoder_frozen, gradients)?;
        }
        observer.gradients_complete(ParameterGroup::Heads, gradients, &self.parameters);
        for pass in passes {
            pass.backward_rest(&self.parameters, gradients, observer)?;
        }
        if let (Some(saved), Some(d_encoded)) = (encoded.saved, d_encoded) {
            self.encoder
                .backward_observed(&self.parameters, saved, &d_encoded, gradients, observer)?;
        }
        encoded.updates.apply(&mut self.parameters)?;
        Ok(output)
    }

    fn encode_for_training(
        &self,
        batch: &MicroBatch,
        options: &TrainOptions,
        (of_whole, noise): (&Noise, &Noise),
        dropout: &mut Noise,
        observer: &mut (dyn PassObserver + Send),
    ) -> Result<Encoded> {
        let mut dither = noise.derive("dither");
        let signals: Vec<&[f32]> = batch.signals.iter().map(Vec::as_slice).collect();
        let mut augment = noise.derive("spec_augment");
        let augment = options
            .spec_augment
            .then_some((&self.config.spec_augment, &mut augment));
        let (tensor, lengths) = self.front_end.on(
            (self.parameters.dtype(), self.parameters.device()),
            &signals,
            options.dither.then_some(&mut dither),
            augment,
        )?;
        if options.freeze_encoder {
            for group in ParameterGroup::encoder_forward_order(self.encoder_layers()) {
                observer.before_forward(group, &self.parameters);
            }
            let (frames, lengths) = self.encoder.encode(&self.parameters, &tensor, &lengths)?;
            return Ok(Encoded {
                frames,
                lengths,
                saved: None,
                updates: BufferUpdates::default(),
            });
        }
        let context = match self.encoder.drawn_context(&mut of_whole.derive("attention context")) {
            Some(context) => AttentionContext::Chunks(context).into(),
            None => self.encoder.context,
        };
        let (mode, features) = (Mode::Train(dropout), (&tensor, &lengths[..]));
        let (frames, lengths, saved, updates) =
            self.encoder
                .forward_observed(&self.parameters, features, context, mode, observer)?;
        Ok(Encoded {
            frames,
            lengths,
            saved: Some(saved),
            updates,
        })
    }

    /// The loss in evaluation mode: no noise, stored statistics, no gradient.
    pub fn evaluate_loss(&self, batch: &MicroBatch) -> Result<MicroBatchOutput> {
        check(batch)?;
        let signals: Vec<&[f32]> = batch.signals.iter().map(Vec::as_slice).collect();
        let (frames, lengths) = self.encode_each(&signals, &batch.prompts)?;
        let losses = self.losses_of_encoded(&frames, &lengths, &batch.tokens)?;
        let encoded = Encoded {
            frames,
            lengths,
            saved: None,
            updates: BufferUpdates::default(),
        };
        self.output(batch, None, &encoded, losses)
    }

    /// The loss of each utterance by the main head in evaluation mode. `frames`: (batch, frames, d_model) as
    /// [`TdtModel::encode`] gives them, of which `lengths` are valid; `targets`: token ids of each utterance.
    pub(super) fn losses_of_encoded(
        &self,
        frames: &Tensor,
        lengths: &[usize],
        targets: &[Vec<u32>],
    ) -> Result<Vec<f64>> {
        let input = HeadInput {
            frames,
            lengths,
            targets,
            factors: &vec![1.0; targets.len()],
            choices: None,
        };
        let pass = self.heads[0].forward(&self.parameters, &self.config, &input, Mode::Evaluate, &mut |_| ())?;
        Ok(pass.losses().to_vec())
    }

    /// The share of a head's loss in training.
    fn head_weight(&self, head: &dyn Head) -> f64 {
        let ctc = self.config.ctc.as_ref().map(|ctc| ctc.weight);
        match (head.kind(), ctc) {
            (HeadKind::Ctc, Some(weight)) => weight,
            (HeadKind::Transducer, Some(weight)) => 1.0 - weight,
            (_, None) => 1.0,
        }
    }

    /// What the losses of a head's utterances are divided by.
    fn divisors(&self, head: &dyn Head, batch: &MicroBatch, part: Option<PartOf>) -> Vec<f64> {
        let lengths: Vec<usize> = batch.tokens.iter().map(Vec::len).collect();
        let (utterances, tokens) = part.map_or((lengths.len(), lengths.iter().sum()), |part| {
            (part.utterances, part.tokens)
        });
        divisors_in(head.reduction(&self.config), &lengths, utterances, tokens)
    }

    /// The result of a batch.
    fn output(
        &self,
        batch: &MicroBatch,
        part: Option<PartOf>,
        encoded: &Encoded,
        losses: Vec<f64>,
    ) -> Result<MicroBatchOutput> {
        let divisors = self.divisors(self.heads[0].as_ref(), batch, part);
        let loss = losses
            .iter()
            .zip(&divisors)
            .map(|(loss, divisor)| loss * (1.0 / divisor))
            .sum();
        let (utterances, frames, _) = encoded.frames.dims3()?;
        Ok(MicroBatchOutput {
            loss,
            losses,
            ctc_loss: None,
            frames: encoded.lengths.clone(),
            padded_frames: utterances * frames,
            tokens: batch.tokens.iter().map(Vec::len).sum(),
            flops_left_out: 0.0,
        })
    }
}

/// Losses divided by these: the sum is divided once where all divisors are one.
fn reduced_by(losses: &[f64], divisors: &[f64]) -> f64 {
    match divisors.first() {
        Some(first) if divisors.iter().all(|divisor| divisor == first) => losses.iter().sum::<f64>() / first,
        _ => losses.iter().zip(divisors).map(|(loss, divisor)| loss / divisor).sum(),
    }
}

fn check(batch: &MicroBatch) -> Result<()> {
    if batch.signals.is_empty() || batch.signals.len() != batch.tokens.len() {
        return Err(Error::Input(format!(
            "a micro-batch has {} signals and {} token lists",
            batch.signals.len(),
            batch.tokens.len()
        )));
    }
    Ok(())
}
