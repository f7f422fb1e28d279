//! Measurement of one micro-batch, while the allocator counts.

use candle_core::{DType, Device};
use flow_evaluation::decode::BATCH_SECONDS;
use flow_kernels::Noise;
use flow_kernels::threads::install;
use flow_model::allocation::Count;
use flow_model::config::{AttentionContext, ChunkContext};
use flow_model::model::{MicroBatch, TdtModel, TrainOptions};
use flow_model::parameter_groups::trainable_groups;
use flow_model::{Gradients, ModelConfig, ParameterGroup, Parameters};
use flow_nn::layers::attention::attention_blocks;
use serde::{Deserialize, Serialize};

use super::BatchShape;
use crate::average::fixed;
use crate::error::TrainingError;
use crate::optimizer::moment_bytes;
use crate::resolved_settings::ResolvedSettings;
use crate::trainable;
use crate::trainer::SAMPLE_RATE;

/// Bytes at the end of the backward pass of a parameter group, counted from the beginning of the micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct MemoryMark {
    /// The peak since the previous group was complete.
    pub most: i64,
    /// Bytes that are allocated now.
    pub held: i64,
}

/// The memory of a model with one or two encoder layers, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct MemoryProfile {
    pub parameters: i64,
    /// Gradients of all parameters.
    pub trainable: i64,
    /// The parameters in 32 bits, as averaged weights are.
    pub averaged: i64,
    /// The optimizer's state, in 32 and in 8 bits.
    pub moments: [i64; 2],
    /// Master weights of what is stored in bf16.
    pub masters: i64,
    pub heads_gradient: i64,
    pub heads: MemoryMark,
    pub prediction: MemoryMark,
    /// From the last layer to the first.
    pub layers: Vec<MemoryMark>,
    pub subsampling: MemoryMark,
    /// About what the prediction network keeps: what its backward pass frees.
    pub joint_held: i64,
    /// The most that a batch of evaluation needs; of a model with one layer, which is that of any depth.
    pub evaluation: i64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct DepthProfiles {
    pub one: MemoryProfile,
    pub two: MemoryProfile,
}

impl DepthProfiles {
    /// A quantity that grows by the same amount with each layer.
    pub fn scaled(&self, layers: i64, of: impl Fn(&MemoryProfile) -> i64) -> i64 {
        of(&self.one) + (layers - 1) * (of(&self.two) - of(&self.one))
    }
}

/// Above this many bytes the loss no longer keeps its logits, and memory grows linearly with tokens.
const LINEAR_FROM: usize = 96 << 20;

/// Seconds of audio in a micro-batch past which two smaller ones are measured: memory grows linearly with the number of clips.
const MEASURED_WHOLE: f64 = 160.0;

/// Measures both depths. None if the allocator does not count.
pub(super) fn profile_depths(
    config: &ModelConfig,
    settings: &ResolvedSettings,
    shape: BatchShape,
) -> Result<Option<DepthProfiles>, TrainingError> {
    // Not too few clips: what the loss may keep of its logits has a fixed limit, so the first ones cost more than others.
    let few = ((MEASURED_WHOLE / 4.0 / shape.seconds).ceil() as usize).max(1);
    if shape.seconds * shape.utterances as f64 <= MEASURED_WHOLE || shape.utterances <= 2 * few {
        return profile_whole(config, settings, shape);
    }
    let of = |utterances: usize| profile_whole(config, settings, BatchShape { utterances, ..shape });
    let (Some(first), Some(second)) = (of(few)?, of(2 * few)?) else {
        return Ok(None);
    };
    let (few, all) = (few as f64, shape.utterances as f64);
    Ok(Some(DepthProfiles {
        one: first.one.extended(&second.one, few, all),
        two: first.two.extended(&second.two, few, all),
    }))
}

fn profile_whole(
    config: &ModelConfig,
    settings: &ResolvedSettings,
    shape: BatchShape,
) -> Result<Option<DepthProfiles>, TrainingError> {
    let config = &in_widest_context(config, shape.seconds);
    let at = |layers: usize, tokens: usize| -> Result<Option<MemoryProfile>, TrainingError> {
        let mut model = shallow(config, layers, settings)?;
        measured(&mut model, settings, BatchShape { tokens, ..shape })
    };
    // The joint network takes most of the time, in proportion to tokens. Its memory is known from a part of them, and
    // does not depend on the depth of the encoder, of which few tokens tell enough.
    let frames = (shape.seconds * SAMPLE_RATE / 1280.0) as usize * shape.utterances;
    let durations = config.transducer.as_ref().map_or(0, |head| head.loss.durations.len());
    let row = (config.vocab_size + 1 + durations) * 4;
    let few = LINEAR_FROM / (frames * row).max(1) + 2;
    let part = few.max(shape.tokens / 16);
    if 2 * part >= shape.tokens {
        return Ok(match (at(1, shape.tokens)?, at(2, shape.tokens)?) {
            (Some(one), Some(two)) => Some(DepthProfiles { one, two }),
            _ => None,
        });
    }
    let (Some(one), Some(two)) = (at(1, few)?, at(2, few)?) else {
        return Ok(None);
    };
    let (Some(first), Some(second)) = (at(1, part)?, at(1, 2 * part)?) else {
        return Ok(None);
    };
    let whole = first.extended(&second, part as f64, shape.tokens as f64);
    Ok(Some(DepthProfiles {
        two: two.shifted(&one, &whole),
        one: whole,
    }))
}

/// The model with the context of its list that needs most for clips of this length: training may draw any of them.
fn in_widest_context(config: &ModelConfig, seconds: f64) -> ModelConfig {
    let mut config = config.clone();
    let samples = (seconds * SAMPLE_RATE) as usize;
    let features = samples / (config.preprocessor.window_stride * SAMPLE_RATE).max(1.0) as usize;
    let time = config.encoder.subsampled(features);
    let causal = &mut config.encoder.causal;
    let scores = |context: &ChunkContext| {
        let (blocks, positions) = attention_blocks(AttentionContext::Chunks(*context), time);
        let of_blocks = blocks.iter().map(|(queries, keys)| queries.len() * keys.len());
        (of_blocks.sum::<usize>(), positions)
    };
    if let Some(widest) = causal.contexts.iter().copied().max_by_key(scores) {
        (causal.contexts, causal.probabilities) = (vec![widest], Vec::new());
    }
    config
}

impl MemoryMark {
    fn with(&self, other: &MemoryMark, of: impl Fn(i64, i64) -> i64) -> MemoryMark {
        MemoryMark {
            most: of(self.most, other.most),
            held: of(self.held, other.held),
        }
    }
}

impl MemoryProfile {
    /// With `all` tokens or clips, if this is with `few` and the other one with twice as many.
    fn extended(&self, twice: &MemoryProfile, few: f64, all: f64) -> MemoryProfile {
        let line = |a: i64, b: i64| a + ((b - a) as f64 * (all - few) / few) as i64;
        let pairs = self.layers.iter().zip(&twice.layers);
        MemoryProfile {
            heads: self.heads.with(&twice.heads, line),
            prediction: self.prediction.with(&twice.prediction, line),
            layers: pairs.map(|(a, b)| a.with(b, line)).collect(),
            subsampling: self.subsampling.with(&twice.subsampling, line),
            joint_held: line(self.joint_held, twice.joint_held),
            ..self.clone()
        }
    }

    /// With as many more tokens as lead from `few` to `many`, which are of one layer.
    fn shifted(&self, few: &MemoryProfile, many: &MemoryProfile) -> MemoryProfile {
        let shift = |mark: &MemoryMark, few: &MemoryMark, many: &MemoryMark| {
            let more = many.with(few, |many, few| many - few);
            mark.with(&more, |a, b| a + b)
        };
        let none = MemoryMark::default();
        let (layer_few, layer_many) = (
            few.layers.first().unwrap_or(&none),
            many.layers.first().unwrap_or(&none),
        );
        let layers = self.layers.iter().map(|mark| shift(mark, layer_few, layer_many));
        MemoryProfile {
            heads: shift(&self.heads, &few.heads, &many.heads),
            prediction: shift(&self.prediction, &few.prediction, &many.prediction),
            layers: layers.collect(),
            subsampling: shift(&self.subsampling, &few.subsampling, &many.subsampling),
            joint_held: self.joint_held + many.joint_held - few.joint_held,
            ..self.clone()
        }
    }
}

fn measured(
    model: &mut TdtModel,
    settings: &ResolvedSettings,
    shape: BatchShape,
) -> Result<Option<MemoryProfile>, TrainingError> {
    install(|| measured_here(model, settings, shape))
}

fn measured_here(
    model: &mut TdtModel,
    settings: &ResolvedSettings,
    shape: BatchShape,
) -> Result<Option<MemoryProfile>, TrainingError> {
    let mut profile = MemoryProfile {
        heads_gradient: heads_gradient(model)?,
        ..MemoryProfile::default()
    };
    let is_fixed = fixed(&model.parameters);
    for (_, parameter) in model.parameters.iter() {
        let (elements, size) = (parameter.tensor.elem_count(), parameter.tensor.dtype().size_in_bytes());
        profile.parameters += (elements * size) as i64;
        // The average shares what never changes, in 32 bits.
        if !is_fixed(parameter) || size < 4 {
            profile.averaged += (elements * size.max(4)) as i64;
        }
        if parameter.trainable {
            // Gradients are in 32 bits, whatever the weights are stored in.
            profile.trainable += elements as i64 * 4;
            if parameter.tensor.dtype() == DType::BF16 {
                profile.masters += elements as i64 * 4;
            }
            for (moments, eight_bit) in profile.moments.iter_mut().zip([false, true]) {
                *moments += moment_bytes(elements, eight_bit) as i64;
            }
        }
    }
    let batch = micro_batch(shape, &model.config);
    let options = TrainOptions {
        freeze_encoder: false,
        seed: 1,
        spec_augment: settings.spec_augment,
        dither: true,
        dropout: settings.dropout,
        ..TrainOptions::default()
    };
    let mut gradients = Gradients::new(&model.parameters);
    let Some(count) = Count::begin() else { return Ok(None) };
    let mut before = 0;
    let output = model.train_micro_batch_observed(
        &batch,
        &options,
        &mut gradients,
        &mut |group: ParameterGroup, _: &mut Gradients, _: &Parameters| {
            let mark = MemoryMark {
                most: count.most(),
                held: count.held(),
            };
            match group {
                ParameterGroup::Heads => {
                    profile.heads = mark;
                    // It stays so where there is no prediction network.
                    profile.prediction = MemoryMark {
                        most: mark.held,
                        held: mark.held,
                    };
                }
                ParameterGroup::Prediction => {
                    profile.joint_held = before - mark.held;
                    profile.prediction = mark;
                }
                ParameterGroup::Layer(_) => profile.layers.push(mark),
                ParameterGroup::Subsampling => profile.subsampling = mark,
            }
            before = mark.held;
        },
    )?;
    drop(count);
    if settings.eval_every > 0 && model.encoder_layers() == 1 {
        let seconds = settings.max_batch_seconds().min(BATCH_SECONDS);
        let Some(evaluation) = evaluated(model, seconds, shape.seconds)? else {
            return Ok(None);
        };
        profile.evaluation = evaluation;
    }
    if !output.loss.is_finite() || profile.layers.len() != model.encoder_layers() {
        return Err(TrainingError::data(
            "a trial micro-batch, to measure memory, had no finite loss",
        ));
    }
    Ok(Some(profile))
}

/// The most that encoding a batch of evaluation takes, of clips of `seconds` that fill `batch_seconds`. What the search
/// of greedy decoding needs beside is a few rows of the vocabulary's size; what the loss needs after the encoder is no more
/// than in a training step of as many seconds, which counts in any case.
fn evaluated(model: &TdtModel, batch_seconds: f64, seconds: f64) -> Result<Option<i64>, TrainingError> {
    let utterances = ((batch_seconds / seconds).floor() as usize).max(1);
    let batch = micro_batch(
        BatchShape {
            utterances,
            seconds,
            tokens: 0,
        },
        &model.config,
    );
    let signals: Vec<&[f32]> = batch.signals.iter().map(Vec::as_slice).collect();
    let Some(count) = Count::begin() else { return Ok(None) };
    model.encode(&signals)?;
    Ok(Some(count.most()))
}

/// Noise for signals, and tokens by number.
pub(super) fn micro_batch(shape: BatchShape, config: &ModelConfig) -> MicroBatch {
    let mut noise = Noise::new(1);
    let samples = (shape.seconds * SAMPLE_RATE) as usize;
    let signal: Vec<f32> = (0..samples).map(|_| 0.1 * noise.normal() as f32).collect();
    let tokens: Vec<u32> = (0..shape.tokens)
        .map(|n| (n % config.vocab_size.max(1)) as u32)
        .collect();
    MicroBatch {
        signals: vec![signal; shape.utterances],
        tokens: vec![tokens; shape.utterances],
        prompts: config.prompt.as_ref().map_or(Vec::new(), |_| vec![0; shape.utterances]),
    }
}

/// A model of the same widths with `layers` encoder layers and random weights.
fn shallow(config: &ModelConfig, layers: usize, settings: &ResolvedSettings) -> Result<TdtModel, TrainingError> {
    let mut config = config.clone();
    config.encoder.n_layers = layers;
    let model = TdtModel::new(config, None, 1, DType::F32, &Device::Cpu)?;
    let mut model = model.stored_as(settings.precision.matrices())?;
    model = trainable::applied_to_shallow(model, settings)?;
    model.set_recompute(settings.recompute);
    Ok(model)
}

/// Bytes of the gradients of the joint network and the CTC head.
fn heads_gradient(model: &TdtModel) -> Result<i64, TrainingError> {
    let groups = trainable_groups(&model.parameters)?;
    let heads = groups.get(&ParameterGroup::Heads).into_iter().flatten();
    Ok(heads.map(|&id| model.parameters.get(id).elem_count() as i64 * 4).sum())
}
