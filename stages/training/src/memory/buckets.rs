//! The largest micro-batch of each bucket of durations and texts that fits into memory: by prediction, and by trial.

use candle_core::DType;
use flow_kernels::device::{is_out_of_memory, release_memory};
use flow_kernels::threads::install;
use flow_model::ModelConfig;
use flow_model::allocation::Count;
use flow_model::model::TdtModel;
use flow_sampling::augment::added_seconds;
use flow_sampling::plan::Packing;

use super::profile::micro_batch;
use super::{BatchShape, DataAssumptions, MeasuredMemory, MemoryNeeds};
use crate::average::MovingAverage;
use crate::error::TrainingError;
use crate::optimizer::AdamW;
use crate::ranks::open_device;
use crate::resolved_settings::ResolvedSettings;
use crate::trainer::{LoadedBatch, Trainer};

/// Seconds of audio in the smaller of the two micro-batches that are measured. Not too few: what the loss may keep of its logits
/// has a fixed limit, so the first clips cost more than others.
const MEASURED_SECONDS: f64 = 40.0;
/// The most clips in a micro-batch.
const MOST: f64 = 100_000.0;

impl DataAssumptions {
    /// The shape of the longest single clip of each bucket, in the order of `bucket_batch_size`. Speed perturbation and
    /// added silence are counted.
    pub fn clips_of_buckets(&self, settings: &ResolvedSettings) -> Vec<BatchShape> {
        let default = Packing::default();
        let sampling = settings.sampling.as_ref();
        let packing = sampling.map_or(&default, |sampling| &sampling.packing);
        let speeds = sampling.into_iter().flat_map(|sampling| &sampling.speeds);
        let slowest = speeds.fold(1.0f64, |slowest, speed| slowest.min(*speed));
        let added = sampling.map_or(0.0, |sampling| added_seconds(&sampling.augment));
        let edges = packing.boundaries.iter().copied().chain([f64::INFINITY]);
        let mut shapes = Vec::with_capacity(packing.buckets());
        for edge in edges {
            let seconds = edge.min(self.longest).max(0.1);
            let spoken = (seconds * self.tokens_per_second).ceil() as usize;
            // A token is a character at least.
            let texts = packing
                .token_boundaries
                .iter()
                .map(|edge| *edge as usize)
                .chain([usize::MAX]);
            shapes.extend(texts.map(|characters| BatchShape {
                utterances: 1,
                seconds: seconds / slowest + added,
                tokens: spoken.min(characters).clamp(1, settings.max_tokens),
            }));
        }
        shapes
    }
}

/// The largest micro-batch of each bucket whose needs fit into `device` bytes, in the order of `bucket_batch_size`; one with no
/// clips where not even one fits. None if the program's allocator does not count. The needs of a step grow linearly with the
/// number of its clips, so two sizes are measured.
pub fn bucket_batch_sizes(
    config: &ModelConfig,
    settings: &ResolvedSettings,
    assumed: &DataAssumptions,
    device: u64,
) -> Result<Option<Vec<BatchShape>>, TrainingError> {
    let mut sizes: Vec<BatchShape> = Vec::new();
    let mut known: Vec<BatchShape> = Vec::new();
    for clip in assumed.clips_of_buckets(settings) {
        // Buckets past the longest clip are those below them.
        if let Some(at) = known.iter().position(|other| *other == clip) {
            sizes.push(sizes[at]);
        } else {
            let Some(utterances) = largest(config, settings, clip, device)? else {
                return Ok(None);
            };
            sizes.push(BatchShape { utterances, ..clip });
        }
        known.push(clip);
    }
    Ok(Some(sizes))
}

fn largest(
    config: &ModelConfig,
    settings: &ResolvedSettings,
    clip: BatchShape,
    device: u64,
) -> Result<Option<usize>, TrainingError> {
    let at = |utterances: usize| -> Result<Option<MemoryNeeds>, TrainingError> {
        let shape = BatchShape { utterances, ..clip };
        let measured = MeasuredMemory::new(config, settings, &[shape])?;
        Ok(measured.map(|measured| measured.needs(settings)))
    };
    let few = ((MEASURED_SECONDS / clip.seconds).ceil() as usize).max(2);
    let Some(at_few) = at(few)? else { return Ok(None) };
    let fits = at_few.total() <= device;
    // Beside it one that is larger, or the smallest.
    let Some(at_other) = at(if fits { 2 * few } else { 1 })? else {
        return Ok(None);
    };
    let (from, at_from, to, at_to) = match fits {
        true => (few, at_few, 2 * few, at_other),
        false => (1, at_other, few, at_few),
    };
    if at_from.total() > device {
        return Ok(Some(0));
    }
    // What a step may take: evaluation needs the same whatever the micro-batch.
    let always = at_from.total() - at_from.step.max(at_from.evaluation);
    let (room, least) = ((device - always) as f64, at_from.step as f64);
    let each = (at_to.step as f64 - least) / (to - from) as f64;
    Ok(Some(
        (from as f64 + (room - least) / each.max(1.0)).floor().min(MOST) as usize
    ))
}

/// Whether training steps with micro-batches of a shape fit, by two steps of a model with random weights: on the CPU into `memory`
/// bytes by the allocator's count, beside the copy for a checkpoint if there is one; on a device into what it has. None where the
/// allocator does not count.
///
/// # Errors
/// Where the device cannot be had, or the step fails for another reason than memory.
pub fn step_fits(
    config: &ModelConfig,
    settings: &ResolvedSettings,
    shape: BatchShape,
    memory: u64,
) -> Result<Option<bool>, TrainingError> {
    let device = open_device(settings.device()?, 0, 1, false)?;
    let settings = settings.with(|settings| {
        settings.ranks = 1;
        // Later micro-batches find the gradients of the first one.
        settings.grad_accum = settings.grad_accum.min(2);
        // All learns.
        settings.unfreeze_step = 0;
    });
    let count = Count::begin();
    if count.is_none() && device.is_cpu() {
        return Ok(None);
    }
    let build = || -> Result<Trainer, TrainingError> {
        let model = TdtModel::new(config.clone(), None, 1, DType::F32, &device)?;
        let average = match settings.average_decay > 0.0 {
            true => Some(MovingAverage::new(settings.average_decay, &model.parameters)?),
            false => None,
        };
        let mut model = model.stored_as(settings.precision.matrices())?;
        model.set_recompute(settings.recompute);
        model.set_batch_norm(settings.batch_norm.into());
        let trainer_config = settings.trainer_config(config.encoder.d_model);
        Trainer::new(model, AdamW::new(settings.adamw()), trainer_config, average)
    };
    let mut trainer = build()?;
    if let Some(count) = &count {
        // Making random weights takes more than they do.
        count.most();
    }
    let loaded = |place: u32| LoadedBatch {
        micro: place,
        place,
        segments: vec![String::new(); shape.utterances],
        batch: install(|| micro_batch(shape, config)),
        ..LoadedBatch::default()
    };
    let batches: Vec<LoadedBatch> = (0..settings.grad_accum).map(loaded).collect();
    let mut steps = || -> Result<bool, TrainingError> {
        let first = trainer.step(0, &batches, settings.grad_accum)?;
        let copied = device.is_cpu() && settings.checkpoint_in_background;
        let _copy = copied.then(|| trainer.snapshot()).transpose()?;
        let second = trainer.step(1, &batches, settings.grad_accum)?;
        Ok(first.out_of_memory.is_empty() && second.out_of_memory.is_empty())
    };
    let taken = steps();
    drop(trainer);
    release_memory(&device)?;
    match taken {
        // The next size may fit.
        Err(TrainingError::Refused { .. }) => Ok(Some(false)),
        Err(error) if is_out_of_memory(&error) => Ok(Some(false)),
        Err(error) => Err(error),
        Ok(false) => Ok(Some(false)),
        Ok(true) => {
            let most = count.filter(|_| device.is_cpu()).map_or(0, |count| count.most());
            Ok(Some(u64::try_from(most).unwrap_or(0) <= memory))
        }
    }
}
