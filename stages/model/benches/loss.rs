//! Time of the fused joint network and loss, of the prediction network, and of greedy decoding, for the sizes of a
//! small model: `cargo bench -p flow-model --bench loss`.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use flow_model::joint::{Joint, JointSizes};
use flow_model::loss::TdtLoss;
use flow_model::prediction::Prediction;
use flow_model::{Gradients, Mode, Noise, ParameterBuilder, Result};

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

fn main() -> Result<()> {
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
    let targets: Vec<Vec<u32>> = (0..BATCH)
        .map(|_| (0..TOKENS).map(|_| (noise.bits() % VOCABULARY as u64) as u32).collect())
        .collect();
    let settings = TdtLoss {
        durations: vec![0, 1, 2, 3, 4],
        sigma: 0.02,
        fastemit: 0.0,
        clamp: -1.0,
        rnnt: false,
    };
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
