//! How much memory training will need, found out before it begins.
//!
//! Nothing is guessed from formulas for activations, which would have to follow every change of a kernel. Micro-batches of
//! the shapes that training will meet are really computed, forward and backward, in a model of the same widths with one
//! encoder layer and in one with two, while the allocator counts. What a layer keeps, and what it needs for itself, is
//! then known, and so is a model of any depth; a batch of evaluation is computed in the same way. Parameters, gradients and
//! optimizer state are counted from shapes.

mod profile;

use candle_core::{DType, Device};
use flow_model::device::DeviceChoice;
use flow_model::model::TdtModel;
use flow_model::parameter_groups::trainable_groups;
use flow_model::{ModelConfig, ParameterGroup};
use flow_runtime::available_memory;
use flow_sampling::plan::Packing;

use crate::error::TrainingError;
use crate::settings::{Optimizer, TrainSettings};
use profile::{Depths, depths};

/// Utterances of one length that make a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchShape {
    pub utterances: usize,
    /// Of audio, each.
    pub seconds: f64,
    /// Tokens of each text.
    pub tokens: usize,
}

/// What is assumed of the data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Assumed {
    /// The longest clip, in seconds.
    pub longest: f64,
    /// Tokens per second of speech, at most; texts are not longer than `max_tokens` in any case.
    pub tokens_per_second: f64,
}

impl Assumed {
    /// The shapes of full micro-batches: those of the shortest and of the longest clips that fill a duration bucket. All
    /// others lie between, in frames for attention as in tokens for the prediction network.
    pub fn shapes(&self, settings: &TrainSettings) -> Vec<BatchShape> {
        let longest = self.longest.min(settings.max_batch_seconds).max(0.1);
        let shortest = Packing::default()
            .boundaries
            .first()
            .copied()
            .unwrap_or(longest)
            .min(longest);
        let mut shapes: Vec<BatchShape> = [shortest, longest]
            .into_iter()
            .map(|seconds| BatchShape {
                utterances: ((settings.max_batch_seconds / seconds).floor() as usize).max(1),
                seconds,
                tokens: ((seconds * self.tokens_per_second).ceil() as usize).clamp(1, settings.max_tokens),
            })
            .collect();
        shapes.dedup();
        shapes
    }
}

/// Bytes that one rank needs: on its device, but for `host`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Needs {
    pub parameters: u64,
    /// All gradients of this rank's share, as they stand when the backward pass ends; of one part of the model where they
    /// do not stay.
    pub gradients: u64,
    /// The optimizer's moments of this rank's share.
    pub optimizer: u64,
    /// Averaged weights; on the first rank.
    pub average: u64,
    /// What the encoder's layers and its sub-sampling keep for the backward pass.
    pub activations: u64,
    /// The prediction and the joint network with the loss.
    pub joint: u64,
    /// What one layer needs for itself while it is computed.
    pub workspace: u64,
    /// The most that a step needs at once beside parameters, optimizer and average. Less than the sum of gradients,
    /// activations, joint and workspace, which are not all there at the same time.
    pub step: u64,
    /// The most that evaluation between two steps needs beside parameters, optimizer and average; on the first rank.
    pub evaluation: u64,
    /// A copy of parameters, optimizer state and average from which a checkpoint is written while training goes on; on
    /// the first rank, of all ranks.
    pub checkpoint: u64,
    /// In host memory, where that is another one.
    pub host: HostNeeds,
    /// The worst micro-batch.
    pub shape: Option<BatchShape>,
}

/// Bytes that one rank needs in host memory beside a device that has its own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostNeeds {
    /// The parameters as they are updated here.
    pub parameters: u64,
    /// Sums of this rank's share.
    pub gradients: u64,
    /// The optimizer's moments of this rank's share.
    pub optimizer: u64,
    /// The copy from which a checkpoint is written; on the first rank, of all ranks.
    pub checkpoint: u64,
}

impl HostNeeds {
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer + self.checkpoint
    }
}

impl Needs {
    /// Most bytes at once on the first rank's device: what is always there, and the peak of a step or of an evaluation.
    pub fn total(&self) -> u64 {
        self.parameters + self.optimizer + self.average + self.checkpoint + self.step.max(self.evaluation)
    }

    /// The same of any other rank.
    pub fn of_another(&self) -> u64 {
        self.parameters + self.optimizer + self.step
    }

    /// Most bytes at once of so many ranks that share one memory.
    pub fn of_ranks(&self, ranks: u32) -> u64 {
        self.total() + u64::from(ranks.saturating_sub(1)) * self.of_another()
    }

    /// Most bytes at once in the host memory of so many ranks that have devices of their own.
    pub fn of_host(&self, ranks: u32) -> u64 {
        let other = self.host.total() - self.host.checkpoint;
        self.host.total() + u64::from(ranks.saturating_sub(1)) * other
    }
}

/// Memory that training will need, found before it begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checked {
    /// Of the ranks of this process.
    pub needed: u64,
    /// Of each rank that is not the first.
    pub another: u64,
    /// What there is.
    pub available: u64,
}

/// Refuses training on the CPU that needs more memory than there is, for the `here` ranks of this process. None where what
/// is needed or what there is cannot be known.
pub fn check(settings: &TrainSettings, config: &ModelConfig, here: u32) -> Result<Option<Checked>, TrainingError> {
    if settings.device()? != DeviceChoice::Cpu {
        return Ok(None);
    }
    let assumed = Assumed {
        longest: settings.max_duration,
        tokens_per_second: TOKENS_PER_SECOND,
    };
    let Some(available) = available_memory() else {
        return Ok(None);
    };
    let Some(measured) = Measured::new(config, settings, &assumed.shapes(settings))? else {
        return Ok(None);
    };
    let needs = measured.needs(settings);
    let (total, another) = (needs.of_ranks(here), needs.of_another());
    if total <= available {
        return Ok(Some(Checked {
            needed: total,
            another,
            available,
        }));
    }
    Err(TrainingError::Refused {
        message: format!(
            "training would need {} of memory, and {} are available",
            gigabytes(total),
            gigabytes(available)
        ),
        help: Some(
            "`flow memory PIPELINE` says what needs how much; lower `max_batch_seconds`, set `recompute: true`, `optimizer: \
             adamw8bit` or `checkpoint_in_background: false`; or `memory_check: false` to try all the same"
                .into(),
        ),
    })
}

/// Tokens per second of speech that are assumed where nothing else is known: fast speech in a vocabulary of small pieces.
pub const TOKENS_PER_SECOND: f64 = 12.0;

/// Bytes as a reader wants them: `8.2 GB`, `340 MB`.
pub fn gigabytes(bytes: u64) -> String {
    match bytes as f64 / 1e9 {
        large if large >= 0.9995 => format!("{large:.1} GB"),
        small => format!("{:.0} MB", small * 1e3),
    }
}

/// What micro-batches of some shapes take in a model, whatever its optimizer, ranks and averages.
pub struct Measured {
    layers: i64,
    shapes: Vec<(BatchShape, Depths)>,
}

impl Measured {
    /// Computes trial micro-batches. None if the program's allocator does not count, or counts for somebody else just now.
    /// Of the settings, `recompute`, `precision`, `dropout` and `spec_augment` matter.
    pub fn new(
        config: &ModelConfig,
        settings: &TrainSettings,
        shapes: &[BatchShape],
    ) -> Result<Option<Measured>, TrainingError> {
        let mut measured = Vec::with_capacity(shapes.len());
        for &shape in shapes {
            match depths(config, settings, shape)? {
                Some(depths) => measured.push((shape, depths)),
                None => return Ok(None),
            }
        }
        Ok(Some(Measured {
            layers: config.encoder.n_layers as i64,
            shapes: measured,
        }))
    }

    /// What the first of the ranks needs, at the worst of the shapes.
    pub fn needs(&self, settings: &TrainSettings) -> Needs {
        let each = self
            .shapes
            .iter()
            .map(|(shape, depths)| of_depth(depths, self.layers, settings, *shape));
        each.max_by_key(Needs::total).unwrap_or_default()
    }
}

/// The largest whole `max_batch_seconds` whose micro-batches fit, at the same longest clip; none if not even one clip
/// does. What a step needs grows linearly with the number of its utterances, which two sizes show.
pub fn largest_batch(
    config: &ModelConfig,
    settings: &TrainSettings,
    assumed: &Assumed,
    device: u64,
) -> Result<Option<f64>, TrainingError> {
    let at = |seconds: f64| -> Result<Option<Needs>, TrainingError> {
        let settings = TrainSettings {
            max_batch_seconds: seconds,
            ..settings.clone()
        };
        let measured = Measured::new(config, &settings, &assumed.shapes(&settings))?;
        Ok(measured.map(|measured| measured.needs(&settings)))
    };
    // Not too few, since the first clips cost more than others: what the loss may keep of its logits has a fixed limit.
    let longest = assumed.longest.max(0.1);
    let few = longest * (40.0 / longest).ceil();
    let Some(at_few) = at(few)? else { return Ok(None) };
    let (from, to) = if at_few.total() > device {
        (longest, few)
    } else {
        (few, 2.0 * few)
    };
    let (Some(at_from), Some(at_to)) = (at(from)?, at(to)?) else {
        return Ok(None);
    };
    let (at_from, at_to, device) = (at_from.total() as f64, at_to.total() as f64, device as f64);
    if at_from > device {
        return Ok(None);
    }
    let more = (to - from) * (device - at_from) / (at_to - at_from).max(1.0);
    Ok(Some((from + more).floor().min(100_000.0)))
}

/// A model of so many layers, from what models of one and two have shown.
fn of_depth(depths: &Depths, layers: i64, settings: &TrainSettings, shape: BatchShape) -> Needs {
    let ranks = i64::from(settings.ranks.max(1));
    let separate = settings.separate_memory();
    let away = settings.offload && separate;
    let (one, two) = (&depths.one, &depths.two);
    let parameters = depths.scaled(layers, |model| model.parameters);
    let whole_gradient = depths.scaled(layers, |model| model.trainable);
    let bits = usize::from(settings.optimizer == Optimizer::Adamw8bit);
    let moments = depths.scaled(layers, |model| model.moments[bits]);
    let heads_gradient = two.heads_gradient;
    let layer_gradient = two.trainable - one.trainable;

    // What a layer keeps until its backward pass.
    let kept = (two.heads.held - one.heads.held).max(0);
    // The peak before the first gradients are complete is that of the heads, with all layers' activations; or, in a
    // shallow model, that of the sub-sampling, whatever the depth.
    let before_layers = if two.heads.most - one.heads.most < kept {
        one.heads.most
    } else {
        0
    };
    let heads = (two.heads.most + (layers - 2) * kept).max(before_layers);
    let held_after_heads = two.heads.held + (layers - 2) * kept;
    let prediction = held_after_heads + (two.prediction.most - two.heads.held);
    let held_after_prediction = held_after_heads + (two.prediction.held - two.heads.held);
    let workspace = (two.layers[0].most - two.prediction.held).max(two.layers[1].most - two.layers[0].held);
    let subsampling = two.subsampling.most - two.layers[1].held;

    // Gradients that are there before the micro-batch begins, and what stays of a part's gradient when it is complete.
    let micro_batches = i64::from(settings.grad_accum.max(1));
    let (before, stays) = match (ranks, micro_batches) {
        _ if away || settings.fold_update => (0, 0),
        (1, 1) => (0, layer_gradient),
        // Added to what stands, and freed.
        (1, _) => (whole_gradient, 0),
        // Handed to its owner: this rank keeps its share.
        (_, 1) => (0, layer_gradient / ranks),
        _ => (whole_gradient / ranks, 0),
    };
    let level = |done: i64| {
        let heads_stay = match (ranks, micro_batches) {
            _ if away || settings.fold_update => heads_gradient,
            (1, 1) => 0,
            (_, 1) => heads_gradient - heads_gradient / ranks,
            _ => heads_gradient,
        };
        held_after_prediction - heads_stay + done * (stays - kept)
    };
    let in_layers = level(0).max(level(layers - 1)) + workspace;
    let in_subsampling = level(layers) + subsampling;
    let step = before + heads.max(prediction).max(in_layers).max(in_subsampling);
    let gradients = if away || settings.fold_update {
        heads_gradient.max(layer_gradient)
    } else {
        whole_gradient / ranks
    };
    let step = step.max(gradients);

    let average = if settings.average_decay > 0.0 { parameters } else { 0 };
    let bytes = |value: i64| value.max(0) as u64;
    let checkpoint = if settings.checkpoint_in_background {
        parameters + moments + average
    } else {
        0
    };
    // What is in host memory, and what on the device, where each has its own.
    let on_host = |value: i64, there: bool| if there { (value, 0) } else { (0, value) };
    let (host_optimizer, optimizer) = on_host(moments / ranks, away);
    let (host_checkpoint, checkpoint) = on_host(checkpoint, separate);
    let copy = if settings.offload { parameters } else { 0 };
    let (host_parameters, copy) = on_host(copy, separate);
    Needs {
        parameters: bytes(parameters + copy),
        gradients: bytes(gradients),
        optimizer: bytes(optimizer),
        average: bytes(average),
        activations: bytes(layers * kept + (one.heads.held - heads_gradient - kept - one.joint_held).max(0)),
        joint: bytes(heads - held_after_heads + one.joint_held),
        workspace: bytes(workspace.max(subsampling)),
        step: bytes(step),
        evaluation: if settings.eval_every > 0 {
            bytes(one.evaluation)
        } else {
            0
        },
        checkpoint: bytes(checkpoint),
        host: HostNeeds {
            parameters: bytes(host_parameters),
            gradients: if away { bytes(whole_gradient / ranks) } else { 0 },
            optimizer: bytes(host_optimizer),
            checkpoint: bytes(host_checkpoint),
        },
        shape: Some(shape),
    }
}

/// A model of the same widths with so many encoder layers and weights at random.
fn shallow(config: &ModelConfig, layers: usize, settings: &TrainSettings) -> Result<TdtModel, TrainingError> {
    let mut config = config.clone();
    config.encoder.n_layers = layers;
    let model = TdtModel::new(config, None, 1, DType::F32, &Device::Cpu)?;
    let mut model = model.stored_as(settings.precision.matrices())?;
    model.set_recompute(settings.recompute);
    Ok(model)
}

/// The gradient bytes of a model's heads.
fn heads_gradient(model: &TdtModel) -> Result<i64, TrainingError> {
    let groups = trainable_groups(&model.parameters)?;
    let heads = groups.get(&ParameterGroup::Heads).into_iter().flatten();
    Ok(heads.map(|&id| model.parameters.get(id).elem_count() as i64 * 4).sum())
}
