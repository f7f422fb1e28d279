//! How much memory training will need, found out before it begins.
//!
//! Nothing is guessed from formulas for activations, which would have to follow every change of a kernel. Micro-batches of
//! the shapes that training will meet are really computed, forward and backward, in a model of the same widths with one
//! encoder layer and in one with two, while the allocator counts. What a layer keeps, and what it needs for itself, is
//! then known, and so is a model of any depth. Parameters, gradients and optimizer state are counted from shapes.

mod available;
mod profile;

use candle_core::{DType, Device};
use flow_model::device::DeviceChoice;
use flow_model::model::TdtModel;
use flow_model::{ModelConfig, Part};
use flow_sampling::plan::Packing;

use crate::error::TrainingError;
use crate::settings::{Optimizer, TrainSettings};
use profile::{Depths, depths};

pub use available::available;

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

/// Bytes that one rank needs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Needs {
    pub parameters: u64,
    /// All gradients of this rank's share, as they stand when the backward pass ends.
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
    /// A copy of parameters, optimizer state and average from which a checkpoint is written while training goes on; on
    /// the first rank, of all ranks.
    pub checkpoint: u64,
    /// The worst micro-batch.
    pub shape: Option<BatchShape>,
}

impl Needs {
    /// Most bytes at once on the first rank: what is always there, and the step's peak.
    pub fn total(&self) -> u64 {
        self.parameters + self.optimizer + self.average + self.checkpoint + self.step
    }

    /// Most bytes at once of so many ranks that share one memory.
    pub fn of_ranks(&self, ranks: u32) -> u64 {
        let other = self.parameters + self.optimizer + self.step;
        self.total() + u64::from(ranks.saturating_sub(1)) * other
    }
}

/// Refuses training on the CPU that needs more memory than there is, for the `here` ranks of this process. Gives what is
/// needed and what there is, where both are known.
pub fn check(settings: &TrainSettings, config: &ModelConfig, here: u32) -> Result<Option<(u64, u64)>, TrainingError> {
    if settings.device()? != DeviceChoice::Cpu {
        return Ok(None);
    }
    let assumed = Assumed {
        longest: settings.max_duration,
        tokens_per_second: TOKENS_PER_SECOND,
    };
    let Some(available) = available() else { return Ok(None) };
    let Some(measured) = Measured::new(config, settings, &assumed.shapes(settings))? else {
        return Ok(None);
    };
    let total = measured.needs(settings).of_ranks(here);
    if total <= available {
        return Ok(Some((total, available)));
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
        (1, 1) if settings.fold_update => (0, 0),
        (1, 1) => (0, layer_gradient),
        // Added to what stands, and freed.
        (1, _) => (whole_gradient, 0),
        // Handed to its owner: this rank keeps its share.
        (_, 1) => (0, layer_gradient / ranks),
        _ => (whole_gradient / ranks, 0),
    };
    let level = |done: i64| {
        let heads_stay = match (ranks, micro_batches) {
            (1, 1) if settings.fold_update => heads_gradient,
            (1, 1) => 0,
            (_, 1) => heads_gradient - heads_gradient / ranks,
            _ => heads_gradient,
        };
        held_after_prediction - heads_stay + done * (stays - kept)
    };
    let in_layers = level(0).max(level(layers - 1)) + workspace;
    let in_subsampling = level(layers) + subsampling;
    let step = before + heads.max(prediction).max(in_layers).max(in_subsampling);
    let gradients = if settings.fold_update {
        heads_gradient.max(layer_gradient)
    } else {
        whole_gradient / ranks
    };
    let step = step.max(gradients);

    let average = if settings.average_decay > 0.0 { parameters } else { 0 };
    let bytes = |value: i64| value.max(0) as u64;
    Needs {
        parameters: bytes(parameters),
        gradients: bytes(gradients),
        optimizer: bytes(moments / ranks),
        average: bytes(average),
        activations: bytes(layers * kept + (one.heads.held - heads_gradient - kept - one.joint_held).max(0)),
        joint: bytes(heads - held_after_heads + one.joint_held),
        workspace: bytes(workspace.max(subsampling)),
        step: bytes(step),
        checkpoint: if settings.checkpoint_in_background {
            bytes(parameters + moments + average)
        } else {
            0
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
fn heads_gradient(model: &TdtModel) -> i64 {
    let heads = model.parameters.iter().map(|(_, parameter)| parameter);
    let heads = heads.filter(|parameter| parameter.trainable && Part::of(&parameter.name) == Part::Heads);
    heads.map(|parameter| parameter.tensor.elem_count() as i64 * 4).sum()
}
