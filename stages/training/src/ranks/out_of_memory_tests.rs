//! Devices without memory for a micro-batch, in the emulator.

use std::path::Path;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use flow_cuda_emulator::emulator::{self, with_allocations};
use flow_kernels::device::DeviceChoice;
use flow_model::config::Reduction;
use flow_model::model::{MicroBatch, MicroBatchOutput, TdtModel, TrainOptions};
use flow_model::{Gradients, ParameterGroup, Parameters};
use flow_nn::layers::convolution::BatchNorm;
use flow_nn::testing::unpacked_copy;

use super::out_of_memory::{self, Remedies, join, train_in_parts};
use super::{OutOfMemory, RankReport, Replica, StepPlan, local_group, parameter_owners};
use crate::error::TrainingError;
use crate::optimizer::{AdamW, AdamWConfig};
use crate::schedule::{Recipe, Schedule};
use crate::settings::{ReduceDtype, ReduceEvery};
use crate::trainer::{LoadedBatch, TrainerConfig};

/// The golden model, which is small.
pub(super) fn model() -> TdtModel {
    let folder = std::env::var("FLOW_TEST_GOLDEN_MODEL")
        .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/golden/model").into());
    // Beside the test itself, in the target folder.
    let place = std::env::current_exe().unwrap().with_file_name("golden-model");
    let path = unpacked_copy(&Path::new(&folder).join("model.nemo"), &place).unwrap();
    TdtModel::load(&path, DType::F32, &Device::Cpu).unwrap()
}

/// Clips of noise, of about this many seconds, with texts of so many tokens.
fn batch(clips: usize, seconds: f64, tokens: fn(usize) -> u32) -> MicroBatch {
    let signal = |clip: usize| -> Vec<f32> {
        let mut noise = flow_kernels::Noise::new(clip as u64);
        let samples = (seconds * 16_000.0) as usize - 700 * clip;
        (0..samples).map(|_| 0.1 * noise.normal() as f32).collect()
    };
    MicroBatch {
        signals: (0..clips).map(signal).collect(),
        tokens: (0..clips).map(|clip| (1..=tokens(clip)).collect()).collect(),
        prompts: Vec::new(),
    }
}

fn loaded(place: u32, clips: usize) -> LoadedBatch {
    LoadedBatch {
        micro: place,
        place,
        segments: (0..clips).map(|clip| format!("{place}-{clip}")).collect(),
        batch: batch(clips, 0.6, |_| 3),
        ..LoadedBatch::default()
    }
}

pub(super) fn config(frozen: bool, offload: bool, reduce_every: ReduceEvery) -> TrainerConfig {
    let schedule = Schedule::Constant { base: 1e-3, warmup: 0 };
    TrainerConfig {
        recipe: Recipe {
            unfreeze_step: if frozen { 100 } else { 0 },
            phase1: schedule.clone(),
            phase2: schedule,
        },
        clip: 0.0,
        ranks: 1,
        fold_update: false,
        tf32: false,
        offload,
        rank_timeout: Duration::from_secs(60),
        device: DeviceChoice::Cpu,
        recompute: false,
        batch_norm: BatchNorm::default(),
        reduce_dtype: ReduceDtype::F32,
        reduce_every,
        seed: 3,
        spec_augment: false,
        dither: false,
        dropout: false,
        row_losses: false,
    }
}

/// A step of micro-batches of two and of four clips on a device whose largest allocation has this many bytes: its report,
/// and the largest allocation that was made.
fn step(most: usize, config: TrainerConfig, clips: [usize; 2]) -> (Result<RankReport, TrainingError>, usize) {
    let optimizer = AdamW::new(AdamWConfig::default());
    let mut replica = Replica::single(model(), optimizer, config).unwrap();
    let plan = StepPlan {
        step: 0,
        planned: 2,
        received: 2,
        rounds: 2,
    };
    let micro_batches = [loaded(0, clips[0]), loaded(1, clips[1])];
    with_allocations(most, || emulator::with(true, || replica.step(&plan, &micro_batches)))
}

/// The second micro-batch is divided, whether or not gradients of the first one are in the sums already, and the step is what
/// it would have been with more memory. With an encoder that learns, layers are computed again first.
#[test]
fn a_micro_batch_without_memory_is_divided() {
    for (frozen, offload, every) in [
        (true, false, ReduceEvery::MicroBatch),
        (true, true, ReduceEvery::MicroBatch),
        // The sums of the first one are computed again, as no gradient has left the device.
        (true, true, ReduceEvery::Step),
        (false, false, ReduceEvery::MicroBatch),
    ] {
        let (_, small) = step(usize::MAX, config(frozen, offload, every), [1, 2]);
        let (expected, most) = step(usize::MAX, config(frozen, offload, every), [2, 4]);
        let expected = expected.unwrap();
        assert!(small < most, "{small} {most}");
        assert!(expected.out_of_memory.is_empty() && expected.gradient_norm > 0.0);
        let (found, largest) = step(small, config(frozen, offload, every), [2, 4]);
        let found = found.unwrap();
        assert!(largest <= small && !found.skipped, "{found:?}");
        let events: Vec<(usize, u32, u64)> = found
            .out_of_memory
            .iter()
            .map(|event| (event.segments.len(), event.parts, event.tokens))
            .collect();
        let expected_events = [(4, 1, 3), (4, 2, 3)];
        let of_frozen = usize::from(frozen);
        assert_eq!(
            events,
            expected_events[of_frozen..],
            "frozen {frozen}, offload {offload}, {every:?}"
        );
        let OutOfMemory { segments, seconds, .. } = &found.out_of_memory[0];
        assert_eq!((&segments[0][..], *seconds), ("1-0", 0.6));
        assert_eq!(found.tokens, expected.tokens);
        // Statistics of batch normalisation are those of the parts.
        let bound = if frozen { 1e-5 } else { 0.2 };
        for (found, expected) in [
            (found.loss, expected.loss),
            (found.gradient_norm, expected.gradient_norm),
        ] {
            assert!((found - expected).abs() <= bound * expected, "{found} {expected}");
        }
    }
}

/// Two steps of two ranks with two micro-batches each, on threads of their own, where the device of the second one has
/// allocations of at most this many bytes: reports of both, and their parameters at the end.
fn ranks(most: usize, every: ReduceEvery) -> Vec<(Vec<RankReport>, Vec<Vec<f32>>)> {
    let config = TrainerConfig {
        ranks: 2,
        ..config(true, false, every)
    };
    let group = local_group(2, parameter_owners(&model().parameters, 2), config.rank_timeout);
    let threads: Vec<_> = group
        .into_iter()
        .enumerate()
        .map(|(rank, collective)| {
            let config = config.clone();
            std::thread::spawn(move || {
                let (model, optimizer) = (model(), AdamW::new(AdamWConfig::default()));
                let mut replica = Replica::new(model, optimizer, config, Box::new(collective)).unwrap();
                let first = 2 * rank as u32;
                let micro_batches = [loaded(first, 2), loaded(first + 1, 4)];
                let mut steps = || -> Vec<RankReport> {
                    let step = |step| {
                        let plan = StepPlan {
                            step,
                            planned: 4,
                            received: 4,
                            rounds: 2,
                        };
                        replica.step(&plan, &micro_batches).unwrap()
                    };
                    (0..2).map(step).collect()
                };
                let most = if rank == 1 { most } else { usize::MAX };
                let (reports, _) = with_allocations(most, || emulator::with(true, &mut steps));
                let (model, _) = replica.synchronize().unwrap();
                let values = |tensor: &Tensor| tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>();
                let parameters = model.parameters.iter();
                let parameters = parameters.map(|(_, parameter)| values(&parameter.tensor).unwrap());
                (reports, parameters.collect())
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// The other rank does not notice, though it waits in reductions that the divided micro-batch takes part in: whether gradients
/// are reduced after each micro-batch, or those of the first one are in the sums that have to be computed again.
#[test]
fn a_rank_without_memory_keeps_step_with_the_others() {
    for every in [ReduceEvery::MicroBatch, ReduceEvery::Step] {
        let (_, small) = step(usize::MAX, config(true, false, every), [1, 2]);
        let expected = ranks(usize::MAX, every);
        let found = ranks(small, every);
        let divided = |reports: &[RankReport]| reports.iter().map(|report| report.out_of_memory.len()).sum::<usize>();
        assert_eq!((divided(&found[0].0), divided(&found[1].0)), (0, 2), "{every:?}");
        assert!(
            found[0].1 == found[1].1 && expected[0].1 == expected[1].1,
            "the ranks differ"
        );
        for (found, expected) in found[0].0.iter().zip(&expected[0].0) {
            assert!(!found.skipped);
            let off = (found.gradient_norm / expected.gradient_norm - 1.0).abs();
            assert!(
                off < 1e-4 && (found.loss / expected.loss - 1.0).abs() < 1e-4,
                "{every:?}: {off}"
            );
        }
    }
}

#[test]
fn memory_that_lacks_elsewhere_in_a_step_is_named_with_help() {
    let full = || TrainingError::from(flow_kernels::Error::Input("CUDA_ERROR_OUT_OF_MEMORY".into()));
    let error = out_of_memory::named(full(), 6, "in the optimizer's update");
    let told = error.with_help();
    assert!(
        told.starts_with("step 7: the device has no memory left in the optimizer's update (")
            && told.contains("; set `optimizer: adamw8bit`"),
        "{told}"
    );
    // What a rank of another process or thread says has the help too.
    assert_eq!(error.of_rank(3), (3, told));
    for other in [
        TrainingError::rank(2, "CUDA_ERROR_OUT_OF_MEMORY"),
        TrainingError::data("another"),
    ] {
        let text = other.to_string();
        assert_eq!(out_of_memory::named(other, 6, "").to_string(), text);
    }
}

#[test]
fn one_clip_that_does_not_fit_is_an_error() {
    let (found, _) = step(4096, config(true, false, ReduceEvery::MicroBatch), [1, 2]);
    let error = found.unwrap_err();
    assert!(matches!(error, TrainingError::Refused { .. }), "{error}");
    let message = error.to_string();
    for part in ["step 1", "one clip", "0.6 s", "3 tokens", "0-0"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn what_cannot_be_computed_again_is_refused_in_words() {
    let (model, micro_batch) = (model(), loaded(3, 2));
    let mut remedies = Remedies::default();
    let mut after = |words: &str| {
        let error = flow_model::Error::Input(words.into());
        let refused = remedies.after(error, (4, 1), &micro_batch, (&model, false), Some("for a reason"));
        refused.unwrap_err()
    };
    let error = after("CUDA_ERROR_OUT_OF_MEMORY");
    assert!(matches!(error, TrainingError::Refused { .. }), "{error}");
    let message = error.to_string();
    for part in ["step 5", "2 clips", "0.6 s", "3 tokens", "for a reason", "3-0, 3-1"] {
        assert!(message.contains(part), "{message}");
    }
    let other = after("another error");
    assert!(matches!(other, TrainingError::Model(_)), "{other}");
    assert!(remedies.events.is_empty());
}

/// Gradients and losses of the parts are together those of the whole, whatever the reduction.
#[test]
fn parts_have_the_gradient_of_the_whole() {
    let batch = batch(5, 0.6, |clip| 1 + clip as u32);
    for reduction in [
        Reduction::MeanBatch,
        Reduction::MeanVolume,
        Reduction::Mean,
        Reduction::Sum,
    ] {
        let train = |parts: usize| {
            let mut model = model();
            model.config.transducer.as_mut().unwrap().loss.reduction = reduction;
            let options = TrainOptions {
                freeze_encoder: true,
                seed: 9,
                spec_augment: false,
                dither: false,
                dropout: false,
                scale: 0.5,
                part: None,
            };
            let mut gradients = Gradients::new(&model.parameters);
            let mut complete = 0;
            let mut observer = |_: ParameterGroup, _: &mut Gradients, _: &Parameters| complete += 1;
            let output = train_in_parts(
                &mut model,
                &batch,
                (parts, parts > 1),
                &options,
                &mut gradients,
                &mut observer,
                |_, _| {},
            );
            assert_eq!(complete, 2 * parts);
            assert!(!model.recomputes());
            let gradients: Vec<Tensor> = gradients.iter().map(|(_, gradient)| gradient.clone()).collect();
            (output.unwrap(), gradients)
        };
        let (whole, expected) = train(1);
        for parts in [2, 3, 5] {
            let (output, found) = train(parts);
            assert!((output.loss - whole.loss).abs() <= 1e-6 * whole.loss, "{output:?}");
            assert_eq!((&output.frames, output.tokens), (&whole.frames, whole.tokens));
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                let size = |x: &Tensor| x.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt();
                let difference = size(&(found - expected).unwrap());
                assert!(
                    difference <= 1e-5 * size(expected) + 1e-7,
                    "{reduction:?}, {parts}: {difference}"
                );
            }
        }
    }
}

#[test]
fn all_figures_of_the_parts_are_joined() {
    let output = |times: usize| MicroBatchOutput {
        loss: 1.5 * times as f64,
        losses: vec![2.5; times],
        ctc_loss: Some(3.5 * times as f64),
        frames: vec![4; times],
        padded_frames: 5 * times,
        tokens: 6 * times,
        flops_left_out: 7.0 * times as f64,
    };
    let mut whole = output(1);
    join(&mut whole, output(2));
    assert_eq!(whole, output(3));
}
