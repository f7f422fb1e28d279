//! The needs of a model of any depth, from measurements of shallow ones.

use flow_model::ModelConfig;
use serde::{Deserialize, Serialize};

use super::profile::{DepthProfiles, MemoryProfile, profile_depths};
use super::{BatchShape, DataAssumptions, HostMemoryNeeds, MemoryNeeds};
use crate::error::TrainingError;
use crate::resolved_settings::ResolvedSettings;
use crate::settings::{Optimizer, ReduceEvery};

/// Measurements of micro-batches of some shapes in a model; they do not depend on its optimizer, ranks and averages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredMemory {
    layers: i64,
    shapes: Vec<(BatchShape, DepthProfiles)>,
}

impl MeasuredMemory {
    /// Computes trial micro-batches. None if the program's allocator does not count, or another count is running.
    /// Of the settings, `recompute`, `precision`, `dropout` and `spec_augment` matter.
    pub fn new(
        config: &ModelConfig,
        settings: &ResolvedSettings,
        shapes: &[BatchShape],
    ) -> Result<Option<MeasuredMemory>, TrainingError> {
        let mut measured = Vec::with_capacity(shapes.len());
        for &shape in shapes {
            match profile_depths(config, settings, shape)? {
                Some(depths) => measured.push((shape, depths)),
                None => return Ok(None),
            }
        }
        Ok(Some(MeasuredMemory {
            layers: config.encoder.n_layers as i64,
            shapes: measured,
        }))
    }

    /// The needs of the first rank, at the shape that needs most.
    pub fn needs(&self, settings: &ResolvedSettings) -> MemoryNeeds {
        let each = self
            .shapes
            .iter()
            .map(|(shape, depths)| of_depth(depths, self.layers, settings, *shape));
        each.max_by_key(MemoryNeeds::total).unwrap_or_default()
    }
}

/// The largest whole `max_batch_seconds` whose micro-batches fit into `device` bytes, with the same longest clip; none
/// if not even one clip does. The needs of a step grow linearly with the number of its utterances, so two sizes are
/// measured.
pub fn largest_batch(
    config: &ModelConfig,
    settings: &ResolvedSettings,
    assumed: &DataAssumptions,
    device: u64,
) -> Result<Option<f64>, TrainingError> {
    let at = |seconds: f64| -> Result<Option<MemoryNeeds>, TrainingError> {
        let settings = settings.with_batch_seconds(seconds);
        let measured = MeasuredMemory::new(config, &settings, &assumed.shapes(&settings))?;
        Ok(measured.map(|measured| measured.needs(&settings)))
    };
    // Not too few, since the first clips cost more than others: what the loss may keep of its logits has a fixed limit.
    let longest = assumed.longest.max(0.1);
    let few = longest * (40.0 / longest).ceil();
    let Some(at_few) = at(few)? else { return Ok(None) };
    let fits = at_few.total() <= device;
    // Beside it one that is larger, or the smallest.
    let Some(at_other) = at(if fits { 2.0 * few } else { longest })? else {
        return Ok(None);
    };
    let (from, at_from, to, at_to) = match fits {
        true => (few, at_few, 2.0 * few, at_other),
        false => (longest, at_other, few, at_few),
    };
    let (at_from, at_to, device) = (at_from.total() as f64, at_to.total() as f64, device as f64);
    if at_from > device {
        return Ok(None);
    }
    let more = (to - from) * (device - at_from) / (at_to - at_from).max(1.0);
    Ok(Some((from + more).floor().min(100_000.0)))
}

/// The needs of a model with `layers` layers, from the profiles of models with one and two.
fn of_depth(depths: &DepthProfiles, layers: i64, settings: &ResolvedSettings, shape: BatchShape) -> MemoryNeeds {
    let ranks = i64::from(settings.ranks.max(1));
    let separate = settings.separate_memory();
    let away = settings.offload && separate;
    let (one, two) = (&depths.one, &depths.two);
    let parameters = depths.scaled(layers, |model| model.parameters);
    let whole_gradient = depths.scaled(layers, |model| model.trainable);
    let bits = usize::from(settings.optimizer == Optimizer::Adamw8bit);
    let masters = |model: &MemoryProfile| if settings.master_weights { model.masters } else { 0 };
    let moments = depths.scaled(layers, |model| model.moments[bits] + masters(model));
    let heads_gradient = two.heads_gradient;
    let layer_gradient = two.trainable - one.trainable;

    // The bytes that a layer keeps until its backward pass.
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
    // Whether they are kept for the last micro-batch, though they go to other ranks or to host memory.
    let held = settings.reduce_every == ReduceEvery::Step && micro_batches > 1 && (away || ranks > 1);
    let (before, stays) = match (ranks, micro_batches) {
        _ if held => (whole_gradient, 0),
        _ if away || settings.fold_update => (0, 0),
        (1, 1) => (0, layer_gradient),
        // Added to the gradients so far, and freed.
        (1, _) => (whole_gradient, 0),
        // Reduced to the owners: this rank keeps its share.
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
    let gradients = if held {
        whole_gradient
    } else if away || settings.fold_update {
        heads_gradient.max(layer_gradient)
    } else {
        whole_gradient / ranks
    };
    let step = step.max(gradients);

    let averaged = depths.scaled(layers, |model| model.averaged);
    let average = if settings.average_decay > 0.0 { averaged } else { 0 };
    // Averaged weights are stored as the others are while they are evaluated.
    let evaluated = if average > parameters { parameters } else { 0 };
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
    MemoryNeeds {
        parameters: bytes(parameters + copy),
        gradients: bytes(gradients),
        optimizer: bytes(optimizer),
        average: bytes(average),
        activations: bytes(layers * kept + (one.heads.held - heads_gradient - kept - one.joint_held).max(0)),
        joint: bytes(heads - held_after_heads + one.joint_held),
        workspace: bytes(workspace.max(subsampling)),
        step: bytes(step),
        evaluation: if settings.eval_every > 0 {
            bytes(one.evaluation + evaluated)
        } else {
            0
        },
        checkpoint: bytes(checkpoint),
        host: HostMemoryNeeds {
            parameters: bytes(host_parameters),
            gradients: if away { bytes(whole_gradient / ranks) } else { 0 },
            optimizer: bytes(host_optimizer),
            checkpoint: bytes(host_checkpoint),
        },
        shape: Some(shape),
    }
}
