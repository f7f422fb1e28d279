//! Five optimizer steps against NeMo: the same losses, gradient norms and parameters.
//!
//! The golden traces were made by NeMo in 32 bits; for every tensor they also say how far NeMo itself moves
//! when the same steps are done in 64 bits. That figure is the yardstick: in 64 bits our parameters must lie
//! no farther from NeMo's 32-bit ones than NeMo's own 64-bit ones do. One such pair of runs says little of a network that
//! carries rounding errors far (an input of a ReLU at its kink moves whole tensors), and both of NeMo's began with the same
//! features where ours come from another Fourier transform. So how far rounding moves our own run counts as well, within
//! limits that no error of the mathematics stays below: in 32 bits, and from recordings that are rounded in the last place.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use flow_model::model::{MicroBatch, TdtModel};
use flow_training::optimizer::{AdamW, AdamWConfig};
use flow_training::schedule::{Recipe, Schedule};
use flow_training::settings::{ReduceDtype, ReduceEvery};
use flow_training::trainer::{LoadedBatch, Trainer, TrainerConfig};
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    let folder = std::env::var("FLOW_TEST_GOLDEN_MODEL")
        .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/golden/model").into());
    let path = PathBuf::from(folder).join(name);
    let place = std::env::current_exe()
        .expect("this test")
        .with_file_name("golden-model");
    flow_nn::testing::unpacked_copy(&path, &place).expect("golden file")
}

/// A golden file of JSON, which may be packed.
fn json(name: &str) -> Value {
    let bytes = flow_nn::tensor_files::read_packed(&golden(name), 1).expect("golden file");
    serde_json::from_slice(&bytes).expect("golden JSON")
}

/// The tensors of a golden file, which may be packed; None if there is no such file.
fn tensors(name: &str) -> Option<HashMap<String, Tensor>> {
    let bytes = flow_nn::tensor_files::read_packed(&golden(name), 4).ok()?;
    Some(candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).expect("tensors"))
}

/// A golden batch by its name in the traces: the recordings `NAME0_xx.wav`, `NAME1_yy.wav`, ... and the targets that are
/// kept for them.
fn micro_batch(name: &str) -> LoadedBatch {
    let files = [format!("{name}_step.safetensors"), format!("{name}_batch.safetensors")];
    let tensors = files.iter().find_map(|file| tensors(file)).expect("golden targets");
    let lengths: Vec<i64> = tensors["target_len"].to_vec1().expect("lengths");
    let rows: Vec<Vec<i64>> = tensors["targets"].to_vec2().expect("targets");
    let tokens = rows
        .iter()
        .zip(&lengths)
        .map(|(row, &n)| row[..n as usize].iter().map(|&id| id as u32).collect())
        .collect();
    let number = |path: &Path| -> Option<usize> {
        let rest = path.file_stem()?.to_str()?.strip_prefix(name)?;
        rest.split_once('_').map_or(rest, |(number, _)| number).parse().ok()
    };
    let entries = std::fs::read_dir(golden("audio")).expect("recordings");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut waves: Vec<(usize, PathBuf)> = paths.filter_map(|path| Some((number(&path)?, path))).collect();
    waves.sort();
    assert_eq!(waves.len(), lengths.len(), "recordings of {name}");
    let signals = waves
        .iter()
        .map(|(_, path)| flow_audio::decode::decode(&std::fs::read(path).expect("wave"), 60.0).expect("a wave"))
        .collect();
    LoadedBatch {
        segments: waves.iter().map(|(_, path)| path.display().to_string()).collect(),
        batch: MicroBatch {
            signals,
            tokens,
            prompts: Vec::new(),
        },
        ..LoadedBatch::default()
    }
}

/// The batches that the steps of a trace name.
fn batches(steps: &[Value]) -> BTreeMap<&str, LoadedBatch> {
    let names: BTreeSet<&str> = steps
        .iter()
        .map(|step| step["batch"].as_str().expect("a batch"))
        .collect();
    names.into_iter().map(|name| (name, micro_batch(name))).collect()
}

fn trainer(trace: &Value, dtype: DType) -> Trainer {
    let optim = &trace["optim"];
    let number = |value: &Value| value.as_f64().expect("a number");
    let schedule = &optim["sched"];
    let (base, minimum) = (number(&optim["lr"]), number(&schedule["min_lr"]));
    let warmup = schedule["warmup_steps"].as_u64().expect("warm-up");
    let phase2 = match schedule["name"].as_str() {
        Some("CosineAnnealing") => Schedule::Cosine {
            base,
            minimum,
            warmup,
            constant: 0,
            end: schedule["max_steps"].as_u64().expect("steps"),
        },
        Some("NoamAnnealing") => Schedule::Noam {
            base,
            minimum,
            warmup,
            d_model: schedule["d_model"].as_u64().expect("d_model"),
        },
        other => panic!("schedule {other:?}"),
    };
    let mut model = TdtModel::load(&golden("model.nemo"), dtype, &Device::Cpu).expect("golden model");
    // The golden steps use the TDT loss only.
    model.config.transducer.as_mut().unwrap().loss.omega = 0.0;
    let config = AdamWConfig {
        betas: (number(&optim["betas"][0]), number(&optim["betas"][1])),
        epsilon: optim["eps"].as_f64().unwrap_or(1e-8),
        weight_decay: number(&optim["weight_decay"]),
        ..AdamWConfig::default()
    };
    let config = (
        AdamW::new(config),
        TrainerConfig {
            recipe: Recipe {
                unfreeze_step: 0,
                phase1: phase2.clone(),
                phase2,
            },
            clip: trace["grad_clip"].as_f64().unwrap_or(0.0),
            ranks: 1,
            fold_update: false,
            tf32: false,
            offload: false,
            rank_timeout: std::time::Duration::from_secs(60),
            device: Default::default(),
            recompute: false,
            batch_norm: Default::default(),
            reduce_dtype: ReduceDtype::F32,
            reduce_every: ReduceEvery::MicroBatch,
            seed: 0,
            spec_augment: false,
            dither: false,
            dropout: false,
            row_losses: false,
        },
    );
    Trainer::new(model, config.0, config.1, None).expect("a trainer")
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor
        .to_dtype(DType::F64)
        .and_then(|t| t.flatten_all())
        .and_then(|t| t.to_vec1())
        .expect("values")
}

/// An eighth of a rounding error of the loudest sample on each sample, which moves features about twice as far as NeMo's lie
/// from ours.
fn rounded(wave: &[f32], draw: usize) -> Vec<f32> {
    let unit = wave.iter().fold(0f32, |largest, x| largest.max(x.abs())) * f32::EPSILON / 16.0;
    let bit = |i: usize| (i + (draw << 24)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 50 & 1;
    let sign = |i: usize| if bit(i) == 0 { unit } else { -unit };
    wave.iter().enumerate().map(|(i, x)| x + sign(i)).collect()
}

/// Loss and norm of the gradient at each step, and all parameters after the last.
struct Outcome {
    losses: Vec<f64>,
    norms: Vec<f64>,
    parameters: Vec<Vec<f64>>,
}

fn outcome(trace: &Value, batches: &BTreeMap<&str, LoadedBatch>, dtype: DType, draw: Option<usize>) -> Outcome {
    let mut trainer = trainer(trace, dtype);
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for (number, step) in trace["steps"].as_array().expect("steps").iter().enumerate() {
        let mut batch = batches[step["batch"].as_str().expect("batch")].clone();
        if let Some(draw) = draw {
            let signals = &mut batch.batch.signals;
            *signals = signals.iter().map(|wave| rounded(wave, draw)).collect();
        }
        let report = trainer.step(number as u64, &[batch], 1).expect("a step");
        losses.push(report.loss);
        norms.push(report.gradient_norm);
    }
    let parameters = trainer.model().parameters.iter();
    Outcome {
        losses,
        norms,
        parameters: parameters.map(|(_, parameter)| values(&parameter.tensor)).collect(),
    }
}

/// Three times as far as rounding moves a figure of our own run, as a share of it; not more than `limit`.
fn moved(exact: f64, rounded: [f64; 9], limit: f64) -> f64 {
    let share = |rounded: f64| (rounded / exact - 1.0).abs();
    (3.0 * rounded.map(share).into_iter().fold(0.0, f64::max)).min(limit)
}

/// Runs a trace; no parameter may lie farther from NeMo's than `slack` times the yardstick of its tensor, or than three times
/// what rounding moves it.
#[allow(clippy::print_stdout, reason = "tells people how far it is")]
fn run(name: &str, dtype: DType, slack: f64) {
    let trace = json(&format!("{name}.json"));
    let mut trainer = trainer(&trace, dtype);
    let steps = trace["steps"].as_array().expect("steps");
    let batches = batches(steps);
    let exact = outcome(&trace, &batches, DType::F64, None);
    let rounded: [Outcome; 9] = std::array::from_fn(|draw| match draw {
        8 => outcome(&trace, &batches, DType::F32, None),
        _ => outcome(&trace, &batches, DType::F64, Some(draw)),
    });
    let losses_f64: Vec<f64> = trace["loss_f64"]
        .as_array()
        .expect("losses")
        .iter()
        .map(|v| v.as_f64().expect("loss"))
        .collect();
    assert!(!steps.is_empty() && steps.len() == losses_f64.len());
    for (number, (step, loss_f64)) in steps.iter().zip(&losses_f64).enumerate() {
        let batch = &batches[step["batch"].as_str().expect("batch")];
        let report = trainer
            .step(number as u64, std::slice::from_ref(batch), 1)
            .expect("a step");
        let expected = |field: &str| step[field].as_f64().expect("a number");
        assert!(
            (report.rate - expected("lr")).abs() < 1e-12,
            "{name}: rate of step {number}"
        );
        // The loss of each step depends on all updates before it. How far NeMo's own in 32 bits has drifted from that in 64
        // says how far such updates may carry it.
        let drift = (expected("loss") / loss_f64 - 1.0).abs();
        let off = (report.loss / loss_f64 - 1.0).abs();
        assert!(
            off <= 2e-6_f64.max(2.0 * drift).max(moved(
                exact.losses[number],
                rounded.each_ref().map(|run| run.losses[number]),
                1e-4
            )),
            "{name}: loss of step {number}: {} is not {loss_f64}, off by {off:e}",
            report.loss
        );
        // The golden norms are those of NeMo's 32-bit run. How far its loss has drifted from its own 64-bit run
        // says how far its gradient may have: some fifty times as far (seen at all steps, in 32 and 64 bits alike).
        let off = (report.gradient_norm / expected("grad_norm") - 1.0).abs();
        assert!(
            off <= (1e-4 + 75.0 * drift).max(moved(
                exact.norms[number],
                rounded.each_ref().map(|run| run.norms[number]),
                5e-3
            )),
            "{name}: gradient norm of step {number}: {} is not {}",
            report.gradient_norm,
            expected("grad_norm")
        );
    }
    let finals = tensors(&format!("{name}_final_sample.safetensors")).expect("final values");
    let mut compared = 0;
    let mut worst: Vec<(f64, String)> = Vec::new();
    for (number, (_, parameter)) in trainer.model().parameters.iter().enumerate() {
        let Some(indices) = finals.get(&format!("{}#idx", parameter.name)) else {
            continue;
        };
        let indices: Vec<i64> = indices.to_vec1().expect("indices");
        let expected = values(&finals[&format!("{}#val", parameter.name)]);
        let ours = values(&parameter.tensor);
        let yardstick = trace["final_f32_vs_f64_max"][&parameter.name]
            .as_f64()
            .expect("a yardstick");
        let distance = indices
            .iter()
            .zip(&expected)
            .map(|(&i, e)| (ours[i as usize] - e).abs())
            .fold(0.0, f64::max);
        let scale = expected.iter().fold(0.0, |m: f64, e| m.max(e.abs()));
        let from_exact = |run: &Outcome| {
            let pairs = run.parameters[number].iter().zip(&exact.parameters[number]);
            pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
        };
        let moved = rounded.iter().map(from_exact).fold(0.0, f64::max);
        let yardstick = yardstick + 1e-6 * scale.max(1e-3);
        let bound = (slack * yardstick).max((3.0 * moved).min(10.0 * yardstick));
        worst.push((distance / bound, parameter.name.clone()));
        compared += 1;
    }
    worst.sort_by(|a, b| b.0.total_cmp(&a.0));
    println!("{name} {dtype:?}: {:?}", &worst[..worst.len().min(6)]);
    let stored = finals.keys().filter(|key| key.ends_with("#idx")).count();
    assert!(
        compared > 0 && compared == stored,
        "{compared} of {stored} tensors were compared"
    );
    assert!(
        worst[0].0 <= 1.0,
        "{name} {dtype:?}: farther from NeMo than its own 64-bit run, times {slack}: {:?}",
        &worst[..worst.len().min(6)]
    );
}

#[test]
fn cosine_trace_in_64_bits() {
    run("trace_cosine", DType::F64, 1.05);
}

#[test]
fn noam_trace_with_clipping_in_64_bits() {
    run("trace_noam_clip", DType::F64, 1.05);
}

#[test]
fn cosine_trace_in_32_bits() {
    run("trace_cosine", DType::F32, 3.0);
}

#[test]
fn noam_trace_with_clipping_in_32_bits() {
    run("trace_noam_clip", DType::F32, 3.0);
}
