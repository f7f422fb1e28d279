//! Milliseconds per part of a training step of a small model (2.5 M parameters) on 20 s of audio.
//!
//! `cargo bench -p flow-model --bench step`; `FLOW_BENCH_CHANNELS` and `FLOW_BENCH_MELS` change the sub-sampling's size,
//! `RAYON_NUM_THREADS` the number of threads.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use flow_kernels::Noise;
use flow_model::model::{MicroBatch, TdtModel, TrainOptions};
use flow_model::{Encoder, Gradients, Mode, ModelConfig, ParameterBuilder};
use flow_nn::features::LogMel;
use flow_nn::spec_augment;

fn setting(name: &str, default: usize) -> usize {
    std::env::var(name)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

fn configuration(mels: usize, channels: usize) -> ModelConfig {
    let yaml = format!(
        "
preprocessor: {{sample_rate: 16000, window_size: 0.025, window_stride: 0.01, features: {mels}, n_fft: 512, pad_to: 0}}
encoder:
  {{feat_in: {mels}, n_layers: 4, d_model: 144, n_heads: 4, use_bias: false, xscaling: false, conv_kernel_size: 9,
   subsampling: dw_striding, subsampling_factor: 8, subsampling_conv_channels: {channels}, dropout: 0.1,
   dropout_pre_encoder: 0.1, dropout_emb: 0.0, dropout_att: 0.1}}
decoder: {{vocab_size: 1024, prednet: {{pred_hidden: 256, pred_rnn_layers: 1}}}}
joint: {{jointnet: {{joint_hidden: 256}}}}
loss: {{tdt_kwargs: {{durations: [0, 1, 2, 3, 4], sigma: 0.02}}}}
spec_augment: {{freq_masks: 2, time_masks: 10, freq_width: 27, time_width: 0.05}}
"
    );
    ModelConfig::from_nemo_yaml(&yaml).expect("the configuration above is valid")
}

/// Runs `part` and adds its time in milliseconds to `sum`.
fn timed<T>(sum: &mut f64, part: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = part();
    *sum += start.elapsed().as_secs_f64() * 1e3;
    result
}

fn main() -> Result<(), flow_model::Error> {
    flow_kernels::threads::install(run)
}

fn run() -> Result<(), flow_model::Error> {
    let config = configuration(setting("FLOW_BENCH_MELS", 80), setting("FLOW_BENCH_CHANNELS", 64));
    let mut builder = ParameterBuilder::random(DType::F32, Device::Cpu, 1);
    let front_end = LogMel::new(&config.preprocessor, &mut builder)?;
    let encoder = Encoder::new(&config.encoder, "encoder", &mut builder)?;
    let (parameters, _) = builder.finish();
    let mut noise = Noise::new(4);
    // Eleven utterances of 1.6 to 2 s.
    let signals: Vec<Vec<f32>> = (0..11)
        .map(|i| (0..25_600 + i * 640).map(|_| 0.1 * noise.normal() as f32).collect())
        .collect();
    let signals: Vec<&[f32]> = signals.iter().map(Vec::as_slice).collect();
    let (mut mel, mut mask, mut forward, mut backward) = (0.0, 0.0, 0.0, 0.0);
    let mut fastest = f64::INFINITY;
    let steps = setting("FLOW_BENCH_STEPS", 20);
    for step in 0..steps + 3 {
        if step == 3 {
            (mel, mask, forward, backward) = (0.0, 0.0, 0.0, 0.0);
        }
        let start = Instant::now();
        let mut features = timed(&mut mel, || front_end.compute(&signals, Some(&mut noise)))?;
        timed(&mut mask, || {
            spec_augment::apply(&config.spec_augment, &mut features, &mut noise)
        });
        let tensor = features.tensor(DType::F32, &Device::Cpu)?;
        let mut gradients = Gradients::new(&parameters);
        let (encoded, _, saved, _) = timed(&mut forward, || {
            encoder.forward(&parameters, &tensor, &features.lengths, Mode::Train(&mut noise))
        })?;
        let d = Tensor::ones(encoded.shape(), DType::F32, &Device::Cpu)?;
        timed(&mut backward, || {
            encoder.backward(&parameters, saved, &d, &mut gradients)
        })?;
        fastest = fastest.min(start.elapsed().as_secs_f64() * 1e3);
    }
    let n = steps as f64;
    println!("parameters of the encoder  {}", parameters.count_trainable());
    println!("features          {:8.2} ms", mel / n);
    println!("spec augment      {:8.2} ms", mask / n);
    println!("encoder forward   {:8.2} ms", forward / n);
    println!("encoder backward  {:8.2} ms", backward / n);
    println!(
        "all of these      {:8.2} ms, fastest {fastest:.2} ms",
        (mel + mask + forward + backward) / n
    );

    let mut model = TdtModel::new(config, None, 1, DType::F32, &Device::Cpu)?;
    let batch = MicroBatch {
        signals: signals.iter().map(|signal| signal.to_vec()).collect(),
        tokens: (0..11)
            .map(|b| (0..15).map(|u| (b * 37 + u * 101) % 1024).collect())
            .collect(),
        prompts: Vec::new(),
    };
    let mut gradients = Gradients::new(&model.parameters);
    let (mut whole, mut frozen) = (0.0, 0.0);
    let mut fastest = f64::INFINITY;
    for step in 0..steps + 3 {
        if step == 3 {
            (whole, frozen) = (0.0, 0.0);
        }
        for freeze_encoder in [false, true] {
            gradients.clear();
            let options = TrainOptions {
                freeze_encoder,
                seed: step as u64,
                ..TrainOptions::default()
            };
            let sum = if freeze_encoder { &mut frozen } else { &mut whole };
            let before = *sum;
            timed(sum, || model.train_micro_batch(&batch, &options, &mut gradients))?;
            if !freeze_encoder {
                fastest = fastest.min(*sum - before);
            }
        }
    }
    println!("parameters of the model    {}", model.parameters.count_trainable());
    println!("whole step        {:8.2} ms, fastest {fastest:.2} ms", whole / n);
    println!("encoder frozen    {:8.2} ms", frozen / n);
    Ok(())
}
