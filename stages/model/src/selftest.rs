//! Parity cases that the program carries: a small random model that NeMo made, what NeMo decoded with it, and the losses
//! and gradients of one of its training steps. They tell whether this machine computes what it should.

use std::path::Path;

use candle_core::{DType, Device};
use flow_kernels::device::DeviceChoice;
use flow_kernels::threads;
use serde_json::Value;

use crate::model::{MicroBatch, TdtModel, TrainOptions};
use crate::{Error, Gradients, Result};
use flow_nn::tensor_files::unpack;

macro_rules! golden {
    ($name:literal) => {
        include_bytes!(concat!("../../../tests/data/golden/model/", $name))
    };
}

/// Packed, in elements of 4 bytes.
const MODEL: &[u8] = golden!("model.nemo.zst");
/// Packed text.
const DECODED: &[u8] = golden!("decode.json.zst");
const TRAINED: &[u8] = golden!("train_step.json.zst");
/// The first recordings of the set that was decoded.
const HEARD: [&[u8]; 2] = [golden!("audio/eval0_en-us.wav"), golden!("audio/eval1_de.wav")];
/// The recordings of the training step.
const LEARNED: [&[u8]; 4] = [
    golden!("audio/train0_it.wav"),
    golden!("audio/train1_pl.wav"),
    golden!("audio/train2_ru.wav"),
    golden!("audio/train3_sv.wav"),
];
/// The tokens that it learned, `targets` of `train_step.safetensors`.
const TARGETS: [&[u32]; 4] = [
    &[41, 132, 1, 16, 68, 30, 44, 46, 2, 18, 35],
    &[41, 97, 49, 47, 108, 77, 38, 4, 42, 77, 60, 30],
    &[41, 149, 71, 85, 90, 88, 71, 41, 110, 91, 78, 67, 90],
    &[41, 128, 44, 46, 41, 59, 76, 57, 29, 15, 63, 52, 41, 45],
];

/// What was compared in one part, and how far it was off.
#[derive(Clone, Debug, PartialEq)]
pub struct Parity {
    pub name: &'static str,
    /// Numbers (or whole transcripts) that were compared.
    pub compared: usize,
    /// The largest error as a share of what is allowed; up to 1 is right, infinite where something is another altogether.
    pub worst: f64,
    /// Where that was.
    pub at: String,
}

impl Parity {
    fn new(name: &'static str) -> Self {
        Parity {
            name,
            compared: 0,
            worst: 0.0,
            at: String::new(),
        }
    }

    fn compare(&mut self, at: impl FnOnce() -> String, error: f64, allowed: f64) {
        self.compared += 1;
        // What is not a number is as wrong as can be.
        let share = if error.is_finite() {
            error / allowed
        } else {
            f64::INFINITY
        };
        if share > self.worst || self.at.is_empty() {
            (self.worst, self.at) = (share, at());
        }
    }

    pub fn is_right(&self) -> bool {
        self.compared > 0 && self.worst <= 1.0
    }
}

/// Computes all parts on a device, with the threads that training has.
///
/// # Errors
/// If the device cannot be had, the model cannot be written to the temporary folder, or a computation fails.
pub fn run(choice: DeviceChoice) -> Result<Vec<Parity>> {
    let device = choice.open(0)?;
    let unwritable = |path: &Path| {
        let path = path.to_path_buf();
        move |source| Error::Io { path, source }
    };
    let folder = tempfile::tempdir().map_err(unwritable(&std::env::temp_dir()))?;
    let path = folder.path().join("model.nemo");
    let model = unpack(MODEL, 4).map_err(|_| strange("the model"))?;
    std::fs::write(&path, model).map_err(unwritable(&path))?;
    threads::install(|| {
        let mut model = TdtModel::load(&path, DType::F32, &device)?;
        let heard = decoding(&mut model)?;
        let mut parts = vec![heard];
        parts.extend(training(&mut model, &device)?);
        Ok(parts)
    })
}

/// Greedy decoding: transcripts, frames and durations are NeMo's, and scores as far as rounding allows.
fn decoding(model: &mut TdtModel) -> Result<Parity> {
    let mut parity = Parity::new("decoding");
    let facts = json(DECODED)?;
    let limits = facts.as_object().into_iter().flatten();
    for (limit, expected) in
        limits.filter_map(|(key, value)| Some((key.strip_prefix("greedy_batch_alone_max")?, value)))
    {
        let transducer = model.config.transducer.as_mut().ok_or_else(|| strange("the model"))?;
        transducer.decoding.max_symbols = limit.parse().map_err(|_| strange("decode.json"))?;
        for (number, wave) in HEARD.into_iter().enumerate() {
            let expected = &expected[number];
            let at = || format!("recording {number}, at most {limit} tokens a frame");
            let signal = samples(wave)?;
            let found = model.transcribe(&[&signal[..]])?.pop().unwrap_or_default();
            let same = numbers(&found.ids) == expected["ids"]
                && numbers(&found.frames) == expected["frames"]
                && numbers(&found.durations) == expected["durations"]
                && expected["text"] == found.text.as_str();
            parity.compare(at, if same { 0.0 } else { f64::INFINITY }, 1.0);
            let score = number_of(&expected["score"])?;
            // A sum of logits, each off by a share of the largest: features of two Fourier transforms lie that far apart.
            let allowed = 1e-5 * (score.abs() + found.ids.len() as f64);
            parity.compare(at, (found.score - score).abs(), allowed);
        }
    }
    Ok(parity)
}

/// One training step without noise: the loss of each utterance, and the norm of each parameter's gradient.
fn training(model: &mut TdtModel, device: &Device) -> Result<[Parity; 2]> {
    let facts = json(TRAINED)?;
    let batch = MicroBatch {
        signals: LEARNED.into_iter().map(samples).collect::<Result<_>>()?,
        tokens: TARGETS.iter().map(|tokens| tokens.to_vec()).collect(),
        prompts: Vec::new(),
    };
    let options = TrainOptions {
        spec_augment: false,
        dither: false,
        dropout: false,
        ..TrainOptions::default()
    };
    let mut gradients = Gradients::new(&model.parameters);
    let output = model.train_micro_batch(&batch, &options, &mut gradients)?;
    let mut losses = Parity::new("loss");
    // Devices add up in another order than processors.
    let share = if device.is_cpu() { 1.5e-6 } else { 1e-5 };
    for (number, found) in output.losses.iter().enumerate() {
        let exact = number_of(&facts["loss_per_utt_f64_model"][number])?;
        losses.compare(
            || format!("utterance {number}"),
            (found - exact).abs(),
            share * exact.abs(),
        );
    }
    let mut norms = Parity::new("gradients");
    let facts = &facts["grad_stats_f64"];
    let whole = facts.as_object().into_iter().flatten();
    let whole: f64 = whole
        .filter_map(|(_, facts)| facts["norm"].as_f64())
        .map(|norm| norm * norm)
        .sum();
    for (id, parameter) in model.parameters.iter().filter(|(_, parameter)| parameter.trainable) {
        let name = &parameter.name;
        let facts = &facts[name];
        let exact = number_of(&facts["norm"])?;
        let found = match gradients.get(id) {
            Some(gradient) => norm(gradient)?,
            None => f64::NAN,
        };
        // As far as NeMo's own gradients in 32 bits lie from those in 64, times three. Where an input of a ReLU is at
        // its kink, rounding decides: in the sub-sampling, and in all tensors where it is one of the joint network.
        let kink: f64 = if name.starts_with("encoder.pre_encode") {
            5e-3
        } else {
            2e-3
        };
        let allowed = kink.max(3.0 * facts["f32_err_rel"].as_f64().unwrap_or(0.0)) * exact.max(1e-3);
        // A gradient that is zero but for rounding has what the others leave of it.
        let rounding = if device.is_cpu() { 0.0 } else { 1e-6 * whole.sqrt() };
        norms.compare(|| name.clone(), (found - exact).abs(), allowed + rounding);
    }
    Ok([losses, norms])
}

fn norm(tensor: &candle_core::Tensor) -> Result<f64> {
    let tensor = tensor.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::F64)?;
    let values: Vec<f64> = tensor.to_vec1()?;
    Ok(values.iter().map(|value| value * value).sum::<f64>().sqrt())
}

/// Samples of one of the recordings (WAV of 16 bits, 16 kHz), as int16 / 32768.
fn samples(wav: &[u8]) -> Result<Vec<f32>> {
    let data = wav.windows(4).position(|bytes| bytes == b"data");
    let data = data
        .and_then(|at| wav.get(at + 8..))
        .ok_or_else(|| strange("a recording"))?;
    let sample = |bytes: &[u8]| f32::from(i16::from_le_bytes([bytes[0], bytes[1]])) / 32768.0;
    Ok(data.chunks_exact(2).map(sample).collect())
}

fn json(packed: &[u8]) -> Result<Value> {
    let text = unpack(packed, 1).map_err(|_| strange("a table of numbers"))?;
    serde_json::from_slice(&text).map_err(|_| strange("a table of numbers"))
}

fn numbers(values: &[u32]) -> Value {
    Value::from(values.to_vec())
}

fn number_of(value: &Value) -> Result<f64> {
    value.as_f64().ok_or_else(|| strange("a table of numbers"))
}

/// What the program carries is not what it was built for.
fn strange(what: &str) -> Error {
    Error::Input(format!("{what} of the self-test cannot be read"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::golden;

    fn model() -> TdtModel {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.nemo");
        std::fs::write(&path, unpack(MODEL, 4).unwrap()).unwrap();
        TdtModel::load(&path, DType::F32, &Device::Cpu).unwrap()
    }

    #[test]
    fn this_machine_computes_as_nemo_does() {
        let parts = run(DeviceChoice::Cpu).unwrap();
        let names: Vec<_> = parts.iter().map(|part| part.name).collect();
        assert_eq!(names, ["decoding", "loss", "gradients"]);
        for part in &parts {
            println!("{part:?}");
            assert!(part.is_right(), "{part:?}");
        }
        assert!(parts[2].compared > 50, "{:?}", parts[2]);
    }

    #[test]
    fn a_wrong_weight_is_seen_in_every_part() {
        let mut wrong = model();
        let name = "encoder.layers.0.feed_forward1.linear1.weight";
        let id = wrong.parameters.id(name).unwrap();
        let off = wrong.parameters.get(id).affine(1.05, 0.0).unwrap();
        wrong.parameters.set(id, off).unwrap();
        let mut parts = vec![decoding(&mut wrong).unwrap()];
        parts.extend(training(&mut wrong, &Device::Cpu).unwrap());
        for part in parts {
            assert!(!part.is_right(), "{part:?}");
        }
        let mut nothing = Parity::new("nothing");
        assert!(!nothing.is_right());
        nothing.compare(String::new, f64::NAN, 1.0);
        assert!(!nothing.is_right());
    }

    #[test]
    fn the_targets_are_those_of_the_golden_step() {
        // Those that are in the repository, whatever other golden data the environment names.
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/data/golden/model/train_step.safetensors"
        );
        let tensors = golden::tensors_of(path.as_ref());
        let lengths = golden::lengths(&tensors["target_len"]);
        for (number, expected) in TARGETS.iter().enumerate() {
            let row = golden::lengths(&tensors["targets"].get(number).unwrap());
            let row: Vec<u32> = row[..lengths[number]].iter().map(|token| *token as u32).collect();
            assert_eq!(row, *expected);
        }
    }
}
