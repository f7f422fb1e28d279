//! Optimizer steps: micro-batches in, one update out.

use candle_core::Tensor;
use flow_model::model::{MicroBatch, TdtModel, TrainOptions};
use flow_model::{Gradients, ParameterId, Parameters};

use crate::average::Average;
use crate::error::TrainingError;
use crate::optimizer::{AdamW, clip_factor, global_norm};
use crate::schedule::Recipe;

/// One micro-batch with what is told about it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadedBatch {
    pub epoch: u64,
    pub rank: u32,
    /// Place within the optimizer step.
    pub micro: u32,
    pub segments: Vec<String>,
    pub batch: MicroBatch,
}

impl LoadedBatch {
    /// Samples of audio.
    pub fn audio_samples(&self) -> u64 {
        self.batch.signals.iter().map(|signal| signal.len() as u64).sum()
    }

    /// Seconds that the padded batch computes on.
    pub fn padded_seconds(&self) -> f64 {
        let longest = self.batch.signals.iter().map(Vec::len).max().unwrap_or(0);
        (longest * self.batch.signals.len()) as f64 / SAMPLE_RATE
    }
}

/// Samples per second of all signals.
pub const SAMPLE_RATE: f64 = 16_000.0;

/// What decides the numbers of a training run, beside the model and the data.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerConfig {
    pub recipe: Recipe,
    /// Global norm that gradients are clipped to; 0 for none.
    pub clip: f64,
    /// Micro-batches per optimizer step, over all ranks. A micro-batch that did not come counts as one
    /// without gradient.
    pub micro_batches_per_step: u32,
    pub seed: u64,
    pub spec_augment: bool,
    pub dither: bool,
    pub dropout: bool,
}

/// What one optimizer step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Number of this step; the first is 0.
    pub step: u64,
    pub micro_batches: u32,
    /// Mean of the micro-batches' losses.
    pub loss: f64,
    pub rate: f64,
    /// Global norm of the accumulated gradient before clipping.
    pub gradient_norm: f64,
    pub utterances: u64,
    pub audio_samples: u64,
    pub padded_seconds: f64,
    pub tokens: u64,
    pub epoch: u64,
    pub encoder_frozen: bool,
    /// Where a loss or the gradient was not finite: the segments to look at. The step changed nothing.
    pub skipped: Option<Vec<String>>,
}

/// A model in training, with its optimizer.
pub struct Trainer {
    pub model: TdtModel,
    pub optimizer: AdamW,
    pub config: TrainerConfig,
    /// Averaged weights, where they are asked for: what is evaluated and handed on instead of the model's own.
    pub average: Option<Average>,
    gradients: Gradients,
    buffers: Vec<ParameterId>,
}

impl StepReport {
    /// Seconds of audio.
    pub fn seconds(&self) -> f64 {
        self.audio_samples as f64 / SAMPLE_RATE
    }
}

impl Trainer {
    pub fn new(model: TdtModel, optimizer: AdamW, config: TrainerConfig, average: Option<Average>) -> Self {
        let gradients = Gradients::new(&model.parameters);
        let buffers = model
            .parameters
            .iter()
            .filter(|(_, p)| !p.trainable)
            .map(|(id, _)| id)
            .collect();
        Trainer {
            model,
            optimizer,
            config,
            average,
            gradients,
            buffers,
        }
    }

    /// Optimizer step `step` on its micro-batches. The gradient is the mean over
    /// `micro_batches_per_step` of the gradients of the micro-batches' own reduced losses, as Lightning
    /// accumulates. Where a loss or the norm of the gradient is not finite, nothing changes: neither
    /// parameters nor statistics of batch normalisation.
    pub fn step(&mut self, step: u64, micro_batches: &[LoadedBatch]) -> Result<StepReport, TrainingError> {
        let encoder_frozen = self.config.recipe.encoder_frozen(step);
        let rate = self.config.recipe.rate(step);
        self.gradients.clear();
        let before: Vec<(ParameterId, Tensor)> = self
            .buffers
            .iter()
            .map(|&id| (id, self.model.parameters.get(id).clone()))
            .collect();
        let mut report = StepReport {
            step,
            micro_batches: micro_batches.len() as u32,
            loss: 0.0,
            rate,
            gradient_norm: 0.0,
            utterances: 0,
            audio_samples: 0,
            padded_seconds: 0.0,
            tokens: 0,
            epoch: 0,
            encoder_frozen,
            skipped: None,
        };
        let mut bad = Vec::new();
        for loaded in micro_batches {
            let options = TrainOptions {
                freeze_encoder: encoder_frozen,
                seed: micro_batch_seed(self.config.seed, step, loaded.rank, loaded.micro),
                spec_augment: self.config.spec_augment,
                dither: self.config.dither,
                dropout: self.config.dropout,
                scale: 1.0 / f64::from(self.config.micro_batches_per_step.max(1)),
            };
            let output = self
                .model
                .train_micro_batch(&loaded.batch, &options, &mut self.gradients)?;
            report.loss += output.loss / micro_batches.len() as f64;
            report.utterances += loaded.segments.len() as u64;
            report.audio_samples += loaded.audio_samples();
            report.padded_seconds += loaded.padded_seconds();
            report.tokens += output.tokens as u64;
            report.epoch = report.epoch.max(loaded.epoch);
            if !output.loss.is_finite() {
                let before = bad.len();
                bad.extend(
                    loaded
                        .segments
                        .iter()
                        .zip(&output.losses)
                        .filter(|(_, loss)| !loss.is_finite())
                        .map(|(name, _)| name.clone()),
                );
                if bad.len() == before {
                    bad.extend(loaded.segments.iter().cloned());
                }
            }
        }
        report.gradient_norm = global_norm(&self.model.parameters, &self.gradients)?;
        if bad.is_empty() && !report.gradient_norm.is_finite() {
            bad.extend(micro_batches.iter().flat_map(|loaded| loaded.segments.iter().cloned()));
        }
        if !bad.is_empty() || !report.gradient_norm.is_finite() || !report.loss.is_finite() {
            for (id, tensor) in before {
                self.model.parameters.set(id, tensor)?;
            }
            report.skipped = Some(bad);
        } else {
            let scale = clip_factor(report.gradient_norm, self.config.clip);
            self.optimizer
                .step(&self.model.parameters, &self.gradients, rate, scale)?;
            if let Some(average) = &mut self.average {
                average.update(&self.model.parameters, step)?;
            }
        }
        self.gradients.clear();
        Ok(report)
    }

    /// Lends the model that training is for: with averaged weights where they are asked for. The second argument
    /// is then the weights that training goes on from.
    pub fn lend<R>(&mut self, use_model: impl FnOnce(&TdtModel, &AdamW, Option<&Parameters>) -> R) -> R {
        let optimizer = &self.optimizer;
        match &mut self.average {
            None => use_model(&self.model, optimizer, None),
            Some(average) => average.with(&mut self.model, |model, live| use_model(model, optimizer, Some(live))),
        }
    }
}

/// Seed of the random numbers of one micro-batch: a mix of all four, so that no state of a generator
/// outlives a step (the finaliser of SplitMix64 after each).
fn micro_batch_seed(seed: u64, step: u64, rank: u32, micro: u32) -> u64 {
    [step, u64::from(rank), u64::from(micro)]
        .into_iter()
        .fold(mix(seed), |state, part| mix(state ^ part))
}

fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
