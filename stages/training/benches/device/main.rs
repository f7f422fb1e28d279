//! What a training step and decoding take on a device, and how far its numbers are from the CPU's. `.ci/gpu run` runs it
//! where a GPU is; tables are in Markdown, for docs/gpu.md.
//!
//! `device parts CARD SHAPE...` (SHAPE: CLIPSxSECONDSxTOKENS; `-`: the card that the device is): time by part of a step of a model of the size of parakeet-tdt-0.6b-v3 with
//! random weights, in bf16, beside the least time on a card (`flow memory --roofline`), and peak memory.
//! `device kernels SHAPE[@STEPS]...`: times of all kernels and products in a step of it; with `@60` after 60 steps on one batch,
//! where the lattices are as peaked as in fine-tuning (one model takes all steps, so such a shape comes last).
//! `device products SHAPE...`: the products of a step with each of cuBLASLt's first eight choices.
//! `device ceilings`: what the card reaches in a copy and a large product, and what a launch costs.
//! `device decode`: the same model's greedy decoding of clips one by one and together.
//! `device agree`: losses of 50 steps of a small model on the CPU, on the device in f32 and in bf16; and whether two runs on
//! the device are equal to the bit.
//! `device variants`: that recomputed layers, folded updates and an offloaded optimizer end with the parameters of a plain
//! training, to the bit; with eight-bit moments and a frozen encoder too.
//!
//! `FLOW_BENCH_DEVICE` names another device than `cuda` (`emulated`: the processor runs the kernels), `FLOW_BENCH_LAYERS` another
//! number of layers than 24.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use flow_kernels::device::{DeviceChoice, Moment, forget_peak_memory, peak_memory, set_tf32};
use flow_kernels::{Noise, cublaslt};
use flow_model::model::{MicroBatch, TdtModel, TrainOptions};
use flow_model::pass_parts::{PartObserver, PassPart};
use flow_model::{Gradients, ModelConfig};
use flow_training::memory::BatchShape;
use flow_training::optimizer::{AdamW, AdamWConfig, clip_factor, squared_norm};
use flow_training::resolved_settings::ResolvedSettings;
use flow_training::roofline::{Arithmetic, Card, parts};
use flow_training::settings::{Optimizer, Precision, TrainSettings};
use flow_training::trainer::{LoadedBatch, Trainer};

mod launches;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Steps before times count, and steps that count.
const WARM: usize = 3;
const TIMED: usize = 5;

fn configuration(layers: usize, width: usize, vocabulary: usize) -> Outcome<ModelConfig> {
    let (channels, narrow) = (width / 4, width / 8 * 5);
    let yaml = format!(
        "
preprocessor: {{sample_rate: 16000, window_size: 0.025, window_stride: 0.01, features: 128, n_fft: 512, pad_to: 0}}
encoder:
  {{feat_in: 128, n_layers: {layers}, d_model: {width}, n_heads: 8, use_bias: false, xscaling: false, conv_kernel_size: 9,
   subsampling: dw_striding, subsampling_factor: 8, subsampling_conv_channels: {channels}, dropout: 0.1,
   dropout_pre_encoder: 0.1, dropout_emb: 0.0, dropout_att: 0.1}}
decoder: {{vocab_size: {vocabulary}, prednet: {{pred_hidden: {narrow}, pred_rnn_layers: 2, dropout: 0.2}}}}
joint: {{num_extra_outputs: 5, jointnet: {{joint_hidden: {narrow}, dropout: 0.2}}}}
loss: {{loss_name: tdt, tdt_kwargs: {{durations: [0, 1, 2, 3, 4], sigma: 0.02}}}}
"
    );
    Ok(ModelConfig::from_nemo_yaml(&yaml)?)
}

fn full_size() -> Outcome<ModelConfig> {
    let layers = std::env::var("FLOW_BENCH_LAYERS").map_or(Ok(24), |text| text.parse())?;
    configuration(layers, 1024, 8192)
}

fn clips(shape: BatchShape, vocabulary: usize, seed: u64) -> MicroBatch {
    let mut noise = Noise::new(seed);
    let samples = (shape.seconds * 16_000.0) as usize;
    let signals = (0..shape.utterances)
        .map(|_| (0..samples).map(|_| 0.1 * noise.normal() as f32).collect())
        .collect();
    // Of a text nearly all tokens differ, and so do texts.
    let mut token = || (noise.bits() % vocabulary as u64) as u32;
    let tokens = (0..shape.utterances)
        .map(|_| (0..shape.tokens).map(|_| token()).collect())
        .collect();
    MicroBatch {
        signals,
        tokens,
        prompts: Vec::new(),
    }
}

fn shape(text: &str) -> Outcome<BatchShape> {
    let [clips, seconds, tokens] = text.split('x').collect::<Vec<_>>()[..] else {
        return Err(format!("`{text}` is not CLIPSxSECONDSxTOKENS").into());
    };
    Ok(BatchShape {
        utterances: clips.parse()?,
        seconds: seconds.parse()?,
        tokens: tokens.parse()?,
    })
}

/// A model in training, without a trainer's bookkeeping.
struct Training {
    model: TdtModel,
    optimizer: AdamW,
    gradients: Gradients,
    steps: u64,
    /// Operations that the last step left out, of cells of lattices that do not count.
    flops_left_out: f64,
}

impl Training {
    fn new(model: TdtModel) -> Self {
        Self {
            gradients: Gradients::new(&model.parameters),
            optimizer: AdamW::new(AdamWConfig::default()),
            model,
            steps: 0,
            flops_left_out: 0.0,
        }
    }

    /// A step; the loss. `ended` is called at the end of each part of the pass.
    fn step(&mut self, batch: &MicroBatch, ended: impl FnMut(PassPart) + Send) -> Outcome<f64> {
        self.gradients.clear();
        self.steps += 1;
        let options = TrainOptions {
            seed: self.steps,
            spec_augment: false,
            ..TrainOptions::default()
        };
        let mut observer = PartObserver::new(ended);
        let output = self
            .model
            .train_micro_batch_observed(batch, &options, &mut self.gradients, &mut observer)?;
        self.flops_left_out = output.flops_left_out;
        let norm = squared_norm(&self.model.parameters, &self.gradients)?.sqrt();
        let scale = clip_factor(norm, 1.0);
        self.optimizer
            .step(&self.model.parameters, &self.gradients, 1e-3, scale)?;
        Ok(output.loss)
    }
}

/// A model of full size in bf16; with TF32, the default of such a training.
fn full_training(device: &Device) -> Outcome<Training> {
    set_tf32(device, true);
    let made = Instant::now();
    let model = TdtModel::new(full_size()?, None, 1, DType::F32, &Device::Cpu)?.stored_as(DType::BF16)?;
    let training = Training::new(moved(model, device)?);
    println!(
        "{} parameters, made in {:.0} s\n",
        training.model.parameters.count_trainable(),
        made.elapsed().as_secs_f64()
    );
    Ok(training)
}

/// The part of the roofline that a part of a pass belongs to. An encoder layer has three of them.
fn rows() -> [(&'static str, &'static [PassPart], &'static [&'static str]); 6] {
    use PassPart::{
        Features, JointAndLoss, LayerBackward, LayerForward, PredictionBackward, PredictionForward,
        SubsamplingBackward, SubsamplingForward,
    };
    [
        ("features", &[Features], &[]),
        (
            "sub-sampling",
            &[SubsamplingForward, SubsamplingBackward],
            &["sub-sampling"],
        ),
        (
            "encoder layers",
            &[LayerForward, LayerBackward],
            &["feed-forward", "attention", "convolution"],
        ),
        (
            "prediction network",
            &[PredictionForward, PredictionBackward],
            &["prediction network"],
        ),
        ("joint network and loss", &[JointAndLoss], &["joint network and loss"]),
        ("optimizer", &[], &["optimizer"]),
    ]
}

fn by_parts(device: &Device, card: &Card, shapes: &[BatchShape]) -> Outcome<()> {
    let config = full_size()?;
    let mut training = full_training(device)?;
    let settings = ResolvedSettings::from(TrainSettings {
        precision: Precision::Bf16,
        ..TrainSettings::default()
    });
    let cublaslt_is_there = cublaslt::check().is_ok();
    match cublaslt::check() {
        Ok(()) => println!("products by cuBLASLt\n"),
        Err(reason) => println!("products by cuBLAS: {reason}\n"),
    }
    // All as trainings in bf16 are, and the first of them without TF32, and with products by cuBLAS.
    let runs = shapes.iter().map(|&shape| (shape, true, true));
    let others = shapes
        .iter()
        .take(1)
        .flat_map(|&shape| [(shape, false, true), (shape, true, false)]);
    for (shape, tf32, by_cublaslt) in runs.chain(others) {
        set_tf32(device, tf32);
        cublaslt::set_used(by_cublaslt && cublaslt_is_there);
        let arithmetic = Arithmetic {
            matrices_in_bf16: true,
            tf32,
        };
        let batch = clips(shape, config.vocab_size, 2);
        forget_peak_memory(device);
        for _ in 0..WARM {
            training.step(&batch, |_| {})?;
        }
        device.synchronize()?;
        let begun = Instant::now();
        for _ in 0..TIMED {
            training.step(&batch, |_| {})?;
        }
        device.synchronize()?;
        let whole = begun.elapsed().as_secs_f64() / TIMED as f64;
        // Once more, with an event behind each part.
        let mut borders: Vec<(Option<PassPart>, Moment)> = Vec::new();
        let mut launching = 0.0;
        for _ in 0..TIMED {
            borders.push((None, Moment::of(device)?));
            let begun = Instant::now();
            training.step(&batch, |part| {
                // A device that failed says so at the end.
                borders.extend(Moment::of(device).ok().map(|now| (Some(part), now)));
            })?;
            launching += begun.elapsed().as_secs_f64() / TIMED as f64;
        }
        borders.push((None, Moment::of(device)?));
        let mut times: BTreeMap<Option<PassPart>, f64> = BTreeMap::new();
        for pair in borders.windows(2) {
            // What comes before the first border of a step is the optimizer of the one before.
            *times.entry(pair[1].0).or_default() += pair[1].1.since(&pair[0].1)? / TIMED as f64;
        }
        let work = parts(&config, &settings, shape, true);
        println!(
            "| {} x {} s, {} tokens{}{} | ms | least ms | TFLOP/s |\n| --- | --- | --- | --- |",
            shape.utterances,
            shape.seconds,
            shape.tokens,
            if tf32 { "" } else { ", without TF32" },
            if by_cublaslt { "" } else { ", by cuBLAS" }
        );
        for (name, passes, names) in rows() {
            let seconds = match name {
                "optimizer" => times.get(&None).copied().unwrap_or(0.0),
                _ => passes.iter().filter_map(|part| times.get(&Some(*part))).sum::<f64>(),
            };
            let own = work.iter().filter(|part| names.contains(&part.name));
            let (mut least, mut flops) = (0.0, 0.0);
            for part in own {
                least += card.least_time(&part.work, arithmetic).seconds;
                flops += part.work.model.all();
            }
            println!(
                "| {name} | {:.2} | {:.2} | {:.1} |",
                seconds * 1e3,
                least * 1e3,
                flops / seconds / 1e12
            );
        }
        let flops: f64 = work.iter().map(|part| part.work.model.all()).sum();
        let least: f64 = work
            .iter()
            .map(|part| card.least_time(&part.work, arithmetic).seconds)
            .sum();
        println!(
            "| step, without waiting | {:.2} | {:.2} | {:.1} |\n",
            whole * 1e3,
            least * 1e3,
            flops / whole / 1e12
        );
        println!("the host gives a step to the device in {:.1} ms\n", launching * 1e3);
        let audio = shape.utterances as f64 * shape.seconds;
        println!(
            "model FLOP utilisation {:.2} % of {:.1} TFLOP/s, {:.2} % without the cells that are left out; {:.0} times real time; peak memory {}\n",
            100.0 * flops / whole / card.bf16,
            card.bf16 / 1e12,
            100.0 * (flops - training.flops_left_out) / whole / card.bf16,
            audio / whole,
            peak_memory(device).map_or("not told".into(), |bytes| format!("{:.2} GB", bytes as f64 / 1e9))
        );
    }
    cublaslt::set_used(cublaslt_is_there);
    Ok(())
}

/// The same model with its tensors on a device.
fn moved(mut model: TdtModel, device: &Device) -> Outcome<TdtModel> {
    model.parameters = model.parameters.copied_to(device)?;
    Ok(model)
}

fn decode(device: &Device) -> Outcome<()> {
    let model = TdtModel::new(full_size()?, None, 1, DType::F32, &Device::Cpu)?.stored_as(DType::BF16)?;
    let model = moved(model, device)?;
    println!("| decoded | ms | times real time |\n| --- | --- | --- |");
    for (clips_at_once, seconds) in [(1, 10.0), (8, 10.0), (32, 10.0), (64, 10.0), (1, 90.0)] {
        let shape = BatchShape {
            utterances: clips_at_once,
            seconds,
            tokens: 0,
        };
        let batch = clips(shape, 1, 3);
        let signals: Vec<&[f32]> = batch.signals.iter().map(Vec::as_slice).collect();
        let encode = || -> Outcome<()> {
            model.encode(&signals)?;
            Ok(device.synchronize()?)
        };
        let whole = || -> Outcome<()> {
            model.transcribe(&signals)?;
            Ok(())
        };
        for (what, run) in [
            ("encoded", &encode as &dyn Fn() -> Outcome<()>),
            ("transcribed", &whole),
        ] {
            run()?;
            let begun = Instant::now();
            run()?;
            let time = begun.elapsed().as_secs_f64();
            let audio = clips_at_once as f64 * seconds;
            println!(
                "| {clips_at_once} x {seconds} s {what} | {:.1} | {:.0} |",
                time * 1e3,
                audio / time
            );
        }
    }
    Ok(())
}

/// Number of a device, as settings name it.
fn device_name() -> String {
    std::env::var("FLOW_BENCH_DEVICE").unwrap_or_else(|_| "cuda".into())
}

/// The bits of a model's parameters, as one number.
fn digest(model: &TdtModel) -> Outcome<u64> {
    let mut digest = 0xcbf2_9ce4_8422_2325u64;
    for (_, parameter) in model.parameters.iter() {
        if parameter.tensor.dtype().is_float() {
            let wide: Tensor = parameter.tensor.to_dtype(DType::F32)?.flatten_all()?;
            for value in wide.to_vec1::<f32>()? {
                digest = (digest ^ u64::from(value.to_bits())).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
    }
    Ok(digest)
}

/// The parameters after some steps of a trainer with these settings.
fn trained(device: &Device, settings: &TrainSettings) -> Outcome<(f64, u64)> {
    let config = configuration(2, 128, 256)?;
    let mut model = moved(TdtModel::new(config, None, 1, DType::F32, &Device::Cpu)?, device)?;
    model.set_recompute(settings.recompute);
    let mut trainer = Trainer::new(model, AdamW::new(settings.adamw()), settings.trainer_config(128), None)?;
    let shape = BatchShape {
        utterances: 3,
        seconds: 1.5,
        tokens: 8,
    };
    let mut loss = f64::NAN;
    for step in 0..6 {
        let batch = LoadedBatch {
            segments: vec!["clip".into(); shape.utterances],
            batch: clips(shape, 256, step),
            ..LoadedBatch::default()
        };
        loss = trainer.step(step, &[batch], 1)?.loss;
    }
    Ok((loss, trainer.with_model(digest)??))
}

fn variants(device: &Device) -> Outcome<bool> {
    let plain = TrainSettings {
        device: device_name(),
        unfreeze_step: 0,
        clip: 0.0,
        average_decay: 0.0,
        eval_every: 0,
        ..TrainSettings::default()
    };
    let eight_bit = TrainSettings {
        optimizer: Optimizer::Adamw8bit,
        ..plain.clone()
    };
    let frozen = TrainSettings {
        unfreeze_step: 3,
        ..plain.clone()
    };
    println!("| settings | loss | plain | recompute | fold_update | offload |\n| --- | --- | --- | --- | --- | --- |");
    let mut same = true;
    for (name, base) in [
        ("adamw", &plain),
        ("adamw8bit", &eight_bit),
        ("frozen for 3 of 6 steps", &frozen),
    ] {
        let (loss, expected) = trained(device, base)?;
        let changes: [fn(&mut TrainSettings); 4] = [
            |_| {},
            |settings| settings.recompute = true,
            |settings| settings.fold_update = true,
            |settings| settings.offload = true,
        ];
        let mut cells = Vec::new();
        for change in changes {
            let mut settings = base.clone();
            change(&mut settings);
            cells.push(match trained(device, &settings) {
                Ok((_, found)) if found == expected => "equal".to_string(),
                Ok((found, _)) => format!("DIFFERS, loss {found:.5}"),
                Err(error) => format!("FAILS: {error}"),
            });
        }
        same &= loss.is_finite() && cells.iter().all(|cell| cell == "equal");
        println!("| {name} | {loss:.5} | {} |", cells.join(" | "));
    }
    Ok(same)
}

const AGREED_STEPS: usize = 50;

/// Losses of some steps of a small model, and the bits of its parameters afterwards.
fn losses(device: &Device, matrices: DType) -> Outcome<(Vec<f64>, u64)> {
    let model = TdtModel::new(configuration(2, 128, 256)?, None, 1, DType::F32, &Device::Cpu)?.stored_as(matrices)?;
    let mut training = Training::new(moved(model, device)?);
    let shape = BatchShape {
        utterances: 4,
        seconds: 2.0,
        tokens: 12,
    };
    let batches: Vec<MicroBatch> = (0..5).map(|seed| clips(shape, 256, seed)).collect();
    let mut losses = Vec::new();
    for step in 0..AGREED_STEPS {
        losses.push(training.step(&batches[step % batches.len()], |_| {})?);
    }
    let digest = digest(&training.model)?;
    Ok((losses, digest))
}

fn agree(device: &Device) -> Outcome<bool> {
    let (cpu, _) = losses(&Device::Cpu, DType::F32)?;
    let (single, digest) = losses(device, DType::F32)?;
    let (again, digest_again) = losses(device, DType::F32)?;
    set_tf32(device, true);
    let (tf32, _) = losses(device, DType::F32)?;
    // As trainings in bf16 are by default.
    let (short, _) = losses(device, DType::BF16)?;
    set_tf32(device, false);
    println!("| step | CPU, f32 | device, f32 | device, TF32 | device, bf16 |\n| --- | --- | --- | --- | --- |");
    for step in [0, 1, 4, 9, 19, 29, 39, AGREED_STEPS - 1] {
        let losses = [&cpu, &single, &tf32, &short].map(|losses| format!("{:.5}", losses[step]));
        println!("| {} | {} |", step + 1, losses.join(" | "));
    }
    let furthest = |one: &[f64], other: &[f64]| {
        let relative = one.iter().zip(other).map(|(a, b)| ((a - b) / a).abs());
        relative.fold(
            0.0,
            |most: f64, next| if next.is_nan() { f64::INFINITY } else { most.max(next) },
        )
    };
    let (to_cpu, to_single) = (furthest(&cpu, &single), furthest(&single, &short));
    let of_tf32 = furthest(&single, &tf32);
    let same = digest == digest_again && single.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits());
    println!("\nfurthest from the CPU: {to_cpu:.2e}; TF32 from f32: {of_tf32:.2e}; bf16 from f32: {to_single:.2e}");
    println!(
        "two runs on the device are equal to the bit: {}",
        if same { "yes" } else { "NO" }
    );
    Ok(to_cpu < 0.02 && to_single < 0.1 && same)
}

fn main() -> Outcome<()> {
    flow_kernels::threads::install(run)
}

fn run() -> Outcome<()> {
    // To see that it runs: its times are those of the emulator.
    if device_name() == "emulated" {
        return flow_cuda_emulator::emulator::with(true, || run_on(&Device::Cpu));
    }
    run_on(&device_name().parse::<DeviceChoice>()?.open(0)?)
}

fn run_on(device: &Device) -> Outcome<()> {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match &arguments[..] {
        ["parts", card, shapes @ ..] => {
            let card = match *card {
                "-" => flow_kernels::device::name(device).and_then(|name| Card::of_device(&name)),
                name => Card::named(name),
            };
            let card = card.ok_or("this card's rates are not known")?;
            let shapes = shapes.iter().map(|text| shape(text)).collect::<Outcome<Vec<_>>>()?;
            by_parts(device, card, &shapes)
        }
        ["kernels", shapes @ ..] => launches::kernels(device, shapes),
        ["products", shapes @ ..] => launches::products(device, shapes),
        ["ceilings"] => launches::ceilings(device).map(|_| ()),
        ["decode"] => decode(device),
        ["variants"] => match variants(device)? {
            true => Ok(()),
            false => Err("settings that save memory change what is learned".into()),
        },
        ["agree"] => match agree(device)? {
            true => Ok(()),
            false => Err("the device's numbers are too far from the CPU's, or differ from run to run".into()),
        },
        _ => {
            println!(
                "device parts CARD|- CLIPSxSECONDSxTOKENS... | device kernels SHAPE[@STEPS]... | device products SHAPE... | device ceilings | device decode | device variants | device agree"
            );
            Ok(())
        }
    }
}
