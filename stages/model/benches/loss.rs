//! Time of the fused joint network and loss, of the prediction network, and of greedy decoding, for the sizes of a
//! small model: `cargo bench --workspace --bench loss`. With `-- long`, time and memory of the loss of a batch of four
//! utterances of 20 s with 512 tokens each over the vocabulary of parakeet-tdt-0.6b-v3, which a joint network that
//! holds its logits and their gradient needs 33.6 GB for.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use flow_kernels::Noise;
use flow_model::joint::{Joint, JointSizes};
use flow_model::loss::TdtLoss;
use flow_model::prediction::Prediction;
use flow_model::{Gradients, Mode, ParameterBuilder, Result};

const BATCH: usize = 11;
const FRAMES: usize = 25;
const TOKENS: usize = 15;
const ENCODER: usize = 144;
const WIDTH: usize = 256;
const VOCABULARY: usize = 1024;

fn random(shape: &[usize], noise: &mut Noise) -> Result<Tensor> {
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| noise.normal() as f32).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

fn best(runs: usize, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..runs {
        let start = Instant::now();
        run()?;
        best = best.min(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(best)
}

fn settings() -> TdtLoss {
    TdtLoss {
        durations: vec![0, 1, 2, 3, 4],
        sigma: 0.02,
        fastemit: 0.0,
        clamp: -1.0,
        rnnt: false,
    }
}

/// Labels for each of so many utterances.
fn targets(batch: usize, tokens: usize, vocabulary: usize, noise: &mut Noise) -> Vec<Vec<u32>> {
    let mut label = || (noise.bits() % vocabulary as u64) as u32;
    (0..batch).map(|_| (0..tokens).map(|_| label()).collect()).collect()
}

/// A figure of `/proc/self/status`, in MB; none where there is no such file.
fn status(name: &str) -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.split_whitespace().next()?.parse::<f64>().ok()? * 1024.0 / 1e6)
}

/// Loss and gradients of 4 x 20 s, 512 tokens each, 8,192 pieces, blank and 5 durations.
fn long() -> Result<()> {
    let (batch, frames, tokens, width, vocabulary) = (4, 250, 512, 640, 8192);
    let mut builder = ParameterBuilder::random(DType::F32, Device::Cpu, 1);
    let sizes = JointSizes {
        encoder: 1024,
        prediction: width,
        hidden: width,
        vocabulary,
        durations: 5,
        dropout: 0.0,
    };
    let joint = Joint::new(&sizes, "joint", &mut builder)?;
    let (parameters, _) = builder.finish();
    let mut noise = Noise::new(2);
    let encoded = random(&[batch, frames, 1024], &mut noise)?;
    let predicted = random(&[batch, tokens + 1, width], &mut noise)?;
    let targets = targets(batch, tokens, vocabulary, &mut noise);
    let settings = settings();
    // The highest figure so far is forgotten.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    let before = status("VmRSS").unwrap_or(f64::NAN);
    let start = Instant::now();
    let lengths = vec![frames; batch];
    let loss = joint.loss(
        &parameters,
        &settings,
        (&encoded, &lengths),
        (&predicted, &targets),
        Mode::Evaluate,
    )?;
    let forward = start.elapsed().as_secs_f64();
    let mut gradients = Gradients::new(&parameters);
    joint.backward(&parameters, &settings, &loss, &vec![1.0; batch], false, &mut gradients)?;
    let peak = status("VmHWM").unwrap_or(f64::NAN) - before;
    let cells = (batch * frames * (tokens + 1)) as f64;
    let whole = 2.0 * cells * (vocabulary + 6) as f64 * 4.0 / 1e6;
    println!("losses {:?}", loss.losses);
    println!(
        "forward {forward:.1} s, forward and backward {:.1} s",
        start.elapsed().as_secs_f64()
    );
    println!(
        "peak above the inputs, gradients included, {peak:.0} MB; logits and their gradient would be {whole:.0} MB: {:.0} times",
        whole / peak
    );
    Ok(())
}

fn main() -> Result<()> {
    flow_kernels::threads::install(run)
}

fn run() -> Result<()> {
    if std::env::args().any(|argument| argument == "long") {
        return long();
    }
    let mut builder = ParameterBuilder::random(DType::F32, Device::Cpu, 1);
    let sizes = JointSizes {
        encoder: ENCODER,
        prediction: WIDTH,
        hidden: WIDTH,
        vocabulary: VOCABULARY,
        durations: 5,
        dropout: 0.1,
    };
    let joint = Joint::new(&sizes, "joint", &mut builder)?;
    let prediction = Prediction::new(VOCABULARY, WIDTH, 1, 0.1, "decoder.prediction", &mut builder)?;
    let (parameters, _) = builder.finish();
    let mut noise = Noise::new(2);
    let encoded = random(&[BATCH, FRAMES, ENCODER], &mut noise)?;
    let targets = targets(BATCH, TOKENS, VOCABULARY, &mut noise);
    let settings = settings();
    let (predicted, saved) = prediction.forward(&parameters, &targets, Mode::Train(&mut noise))?;
    let forward = |noise: &mut Noise| {
        joint.loss(
            &parameters,
            &settings,
            (&encoded, &[FRAMES; BATCH]),
            (&predicted, &targets),
            Mode::Train(noise),
        )
    };
    let loss = forward(&mut noise)?;
    let mut gradients = Gradients::new(&parameters);
    let factors = [1.0 / BATCH as f64; BATCH];
    println!(
        "{BATCH} utterances x {FRAMES} frames x {} states, hidden {WIDTH}, {VOCABULARY} tokens",
        TOKENS + 1
    );
    println!(
        "loss forward        {:7.2} ms",
        best(30, || forward(&mut noise).map(drop))?
    );
    println!(
        "loss backward       {:7.2} ms",
        best(30, || joint
            .backward(&parameters, &settings, &loss, &factors, false, &mut gradients)
            .map(drop))?
    );
    let dy = random(&[BATCH, TOKENS + 1, WIDTH], &mut noise)?;
    println!(
        "prediction forward  {:7.2} ms",
        best(30, || prediction
            .forward(&parameters, &targets, Mode::Train(&mut noise))
            .map(drop))?
    );
    println!(
        "prediction backward {:7.2} ms",
        best(30, || prediction.backward(&parameters, &saved, &dy, &mut gradients))?
    );
    let mut emitted = 0;
    let time = best(5, || {
        let found = flow_model::decoding::decode_greedy(
            &parameters,
            &prediction,
            &joint,
            &settings.durations,
            10,
            &encoded,
            &[FRAMES; BATCH],
        )?;
        emitted = found.iter().map(|hypothesis| hypothesis.ids.len()).sum();
        Ok(())
    })?;
    println!("greedy decoding     {time:7.2} ms ({emitted} tokens)");
    Ok(())
}
