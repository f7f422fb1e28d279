//! The loss, a whole training step, and decoding.

use candle_core::{DType, Device, Tensor};
use flow_kernels::Noise;
use flow_model::joint::{Joint, JointSizes};
use flow_model::loss::TdtLoss;
use flow_model::model::{MicroBatch, TdtModel, TrainOptions};
use flow_model::{Gradients, Mode, ModelConfig, ParameterBuilder, Result};

use crate::kernels::random;
use crate::peer::{Peer, compare, peak_memory};

/// d, layers, heads, channels, width of prediction and joint network, vocabulary.
type Sizes = [usize; 7];

const MEDIUM: Sizes = [256, 8, 4, 256, 320, 320, 1024];
const FULL: Sizes = [1024, 24, 8, 256, 640, 640, 8192];

fn case(name: &str, sizes: Sizes, rest: &[usize]) -> String {
    let numbers: Vec<String> = sizes.iter().chain(rest).map(usize::to_string).collect();
    format!("{name} {}", numbers.join(" "))
}

fn configuration([d, layers, heads, channels, prediction, joint, vocabulary]: Sizes) -> Result<ModelConfig> {
    ModelConfig::from_nemo_yaml(&format!(
        "
preprocessor: {{sample_rate: 16000, window_size: 0.025, window_stride: 0.01, features: 128, n_fft: 512, pad_to: 0}}
encoder:
  {{feat_in: 128, n_layers: {layers}, d_model: {d}, n_heads: {heads}, use_bias: false, xscaling: false,
   conv_kernel_size: 9, subsampling: dw_striding, subsampling_factor: 8, subsampling_conv_channels: {channels},
   dropout: 0.0, dropout_pre_encoder: 0.0, dropout_emb: 0.0, dropout_att: 0.0}}
decoder: {{vocab_size: {vocabulary}, prednet: {{pred_hidden: {prediction}, pred_rnn_layers: 2}}}}
joint: {{jointnet: {{joint_hidden: {joint}, dropout: 0.0}}}}
loss: {{tdt_kwargs: {{durations: [0, 1, 2, 3, 4], sigma: 0.02}}}}
"
    ))
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

/// Ours is the joint network and the loss in one, so it is compared with the loss alone on given logits: it does more.
pub fn loss(torch: &mut Peer) -> Result<()> {
    let (batch, frames, tokens, vocabulary, width) = (9, 126, 40, 1024, 320);
    let mut builder = ParameterBuilder::random(DType::F32, Device::Cpu, 1);
    let sizes = JointSizes {
        encoder: 256,
        prediction: width,
        hidden: width,
        vocabulary,
        durations: 5,
        dropout: 0.0,
    };
    let joint = Joint::new(&sizes, "joint", &mut builder)?;
    let (parameters, _) = builder.finish();
    let (encoded, predicted) = (random(&[batch, frames, 256])?, random(&[batch, tokens + 1, width])?);
    let targets = targets(batch, tokens, vocabulary);
    let (settings, mut noise) = (settings(), Noise::new(1));
    let mut gradients = Gradients::new(&parameters);
    let case = format!("tdt_loss {batch} {frames} {tokens} {vocabulary}");
    compare("joint + loss / loss on logits", torch, &case, || {
        gradients.clear();
        let loss = joint.loss(
            &parameters,
            &settings,
            (&encoded, &vec![frames; batch]),
            (&predicted, &targets),
            Mode::Train(&mut noise),
        )?;
        let factors = vec![1.0 / batch as f64; batch];
        joint
            .backward(&parameters, &settings, &loss, &factors, false, &mut gradients)
            .map(drop)
    })?;
    Ok(())
}

fn targets(batch: usize, tokens: usize, vocabulary: usize) -> Vec<Vec<u32>> {
    let mut noise = Noise::new(3);
    let mut token = || (noise.bits() % vocabulary as u64) as u32;
    (0..batch).map(|_| (0..tokens).map(|_| token()).collect()).collect()
}

fn signals(batch: usize, seconds: usize) -> Vec<Vec<f32>> {
    let mut noise = Noise::new(4);
    let mut signal = || {
        (0..16_000 * seconds)
            .map(|_| 0.1 * noise.normal() as f32)
            .collect::<Vec<f32>>()
    };
    (0..batch).map(|_| signal()).collect()
}

/// Signals to gradients, without the optimizer on either side.
pub fn step(nemo: &mut Peer) -> Result<()> {
    let (batch, seconds, tokens) = (9, 10, 40);
    let mut model = TdtModel::new(configuration(MEDIUM)?, None, 1, DType::F32, &Device::Cpu)?;
    println!("parameters {}", model.parameters.count_trainable());
    let micro_batch = MicroBatch {
        signals: signals(batch, seconds),
        tokens: targets(batch, tokens, MEDIUM[6]),
        prompts: Vec::new(),
    };
    let options = TrainOptions {
        spec_augment: false,
        dither: false,
        dropout: false,
        ..TrainOptions::default()
    };
    let mut gradients = Gradients::new(&model.parameters);
    let mut run = || {
        gradients.clear();
        model
            .train_micro_batch(&micro_batch, &options, &mut gradients)
            .map(drop)
    };
    let case = case("step", MEDIUM, &[batch, seconds, tokens]);
    compare("step, 9 x 10 s", nemo, &case, &mut run)?;
    memory(nemo);
    Ok(())
}

/// Peak memory of both processes so far.
fn memory(peer: &mut Peer) {
    let mib = |bytes: u64| bytes / (1 << 20);
    let theirs = peer.run("memory").and_then(|(_, answer)| answer["peak"].as_u64());
    println!(
        "{:34} {:>18} {:>18}",
        "peak memory, MiB",
        mib(peak_memory()),
        theirs.map_or_else(String::new, |bytes| mib(bytes).to_string())
    );
}

/// The network of Parakeet TDT 0.6B with random weights on one signal of 15 s: the encoder beside NeMo's and beside
/// onnxruntime with NeMo's export, and the whole way from signal to tokens beside NeMo. On both sides the outputs'
/// biases are set so that about as many tokens are emitted as people speak.
pub fn decode(nemo: &mut Peer) -> Result<()> {
    let seconds = 15;
    let mut model = TdtModel::new(configuration(FULL)?, None, 1, DType::F32, &Device::Cpu)?;
    let signals = signals(1, seconds);
    let signals: Vec<&[f32]> = signals.iter().map(Vec::as_slice).collect();
    for (name, peer) in [
        ("encoder 0.6B, 15 s", "encode"),
        ("encoder 0.6B, 15 s, onnxruntime", "onnx"),
    ] {
        compare(name, nemo, &case(peer, FULL, &[1, seconds]), || {
            model.encode(&signals).map(drop)
        })?;
    }
    let tokens = speak(&mut model, &signals, 35 * seconds / 10)?;
    let name = format!("signal to {tokens} tokens, 15 s");
    let peer = case("transcribe", FULL, &[1, seconds]);
    let (ours, _) = compare(&name, nemo, &peer, || model.transcribe(&signals).map(drop))?;
    println!("{:34} {:>18.1}", "times real time", seconds as f64 / ours.wall);
    memory(nemo);
    Ok(())
}

/// Sets the biases of the joint network such that about `wanted` tokens are emitted; gives how many are.
fn speak(model: &mut TdtModel, signals: &[&[f32]], wanted: usize) -> Result<usize> {
    let id = |model: &TdtModel, name: &str| {
        let missing = || flow_model::Error::Input(format!("there is no {name}"));
        model.parameters.id(name).ok_or_else(missing)
    };
    let bias = id(model, "joint.joint_net.2.bias")?;
    let tensor = |name: &str| -> Result<Tensor> { Ok(model.parameters.get(id(model, name)?).clone()) };
    let (encoded, _) = model.encode(signals)?;
    let hidden = encoded
        .flatten_to(1)?
        .matmul(&tensor("joint.enc.weight")?.t()?)?
        .broadcast_add(&tensor("joint.enc.bias")?)?
        .broadcast_add(&tensor("joint.pred.bias")?)?
        .relu()?;
    let logits = hidden
        .matmul(&tensor("joint.joint_net.2.weight")?.t()?)?
        .broadcast_add(&tensor("joint.joint_net.2.bias")?)?;
    let mean: Vec<f32> = logits.mean(0)?.to_vec1()?;
    let mut values: Vec<f32> = tensor("joint.joint_net.2.bias")?.to_vec1()?;
    for (value, mean) in values.iter_mut().zip(mean) {
        *value -= mean;
    }
    let blank = FULL[6];
    values[blank + 1..].copy_from_slice(&[-2.0, 1.0, 2.0, 1.0, 0.0]);
    let (mut low, mut high, mut emitted) = (-40.0f32, 40.0f32, 0);
    for _ in 0..12 {
        values[blank] = (low + high) / 2.0;
        model
            .parameters
            .set(bias, Tensor::from_slice(&values, values.len(), &Device::Cpu)?)?;
        emitted = model.transcribe(signals)?.iter().map(|found| found.ids.len()).sum();
        (low, high) = if emitted > wanted {
            (values[blank], high)
        } else {
            (low, values[blank])
        };
    }
    Ok(emitted)
}
