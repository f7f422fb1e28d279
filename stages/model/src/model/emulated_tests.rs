//! The whole model on kernels for devices, run by the emulator or on the device that `FLOW_TEST_DEVICE` names, against the
//! model on the CPU.

use candle_core::{DType, Device, Tensor};
use flow_cuda_emulator::DeviceUnderTest;
use flow_cuda_emulator::emulator::{self, with_allocations};
use flow_kernels::device::is_out_of_memory;
use flow_kernels::squares::sum_of_squares;
use flow_kernels::testing::values;

use super::{MicroBatch, TdtModel, TrainOptions};
use crate::Result;
use crate::config::{AttentionContext, CausalConfig, ChunkContext, ModelConfig};
use crate::decoding::Hypothesis;
use crate::testing::golden;
use flow_nn::parameters::{Gradients, Parameters};

fn on_device<R>(work: impl FnOnce(&Device) -> R) -> R {
    DeviceUnderTest::get().run(work)
}

/// Compares the gradients of all parameters, and their norm.
fn same_gradients(parameters: &Parameters, expected: &Gradients, found: &Gradients) {
    let norm = |gradients: &Gradients| {
        let all: Vec<Tensor> = gradients.iter().map(|(_, gradient)| gradient.clone()).collect();
        sum_of_squares(&all).unwrap().sqrt()
    };
    let whole = norm(expected);
    assert!((on_device(|_| norm(found)) - whole).abs() <= 1e-4 * whole);
    for (id, parameter) in parameters.iter().filter(|(_, parameter)| parameter.trainable) {
        let name = &parameter.name;
        let of = |gradients: &Gradients| values(gradients.get(id).unwrap_or_else(|| panic!("{name} has no gradient")));
        let (expected, found) = (of(expected), of(found));
        let difference: f64 = found.iter().zip(&expected).map(|(a, b)| (a - b).powi(2)).sum();
        let size: f64 = expected.iter().map(|x| x * x).sum();
        // As between NeMo's own f32 and f64: in sub-sampling inputs are at the kink of a ReLU. Some gradients are zero
        // but for rounding, such as that of a bias before a normalisation.
        let bound = if name.starts_with("encoder.pre_encode") {
            5e-3
        } else {
            3e-5
        };
        let (difference, size) = (difference.sqrt(), size.sqrt());
        assert!(
            difference <= bound * size + 1e-6 * whole,
            "{name}: {difference} of {size}, {whole} in all"
        );
    }
}

/// A training step of the whole model, on emulated kernels alone: what is not on CUDA fails here. Losses and gradients
/// are those of the CPU, with all dropout masks; and so is what decoding hears.
#[test]
fn the_whole_model_trains_and_decodes() {
    let model = |device: &Device| TdtModel::load(&golden::file("model.nemo"), DType::F32, device).unwrap();
    let batch = MicroBatch {
        signals: golden::waves("train")[..3].to_vec(),
        tokens: vec![vec![3, 5, 7, 5], vec![2], vec![]],
        prompts: Vec::new(),
    };
    let train = |device: &Device| -> Result<_> {
        let mut model = model(device);
        let mut gradients = Gradients::new(&model.parameters);
        let options = TrainOptions {
            seed: 5,
            ..TrainOptions::default()
        };
        let output = model.train_micro_batch(&batch, &options, &mut gradients)?;
        Ok((output, gradients, model))
    };
    let (expected, expected_gradients, trained) = train(&Device::Cpu).unwrap();
    let (found, gradients, emulated) = on_device(train).unwrap();
    for (found, expected) in found.losses.iter().zip(&expected.losses) {
        assert!(
            (found - expected).abs() <= 1e-5 * expected.abs().max(1.0),
            "loss {found}, {expected}"
        );
    }
    same_gradients(&trained.parameters, &expected_gradients, &gradients);
    // Statistics of batch normalisation moved alike.
    for (id, parameter) in trained.parameters.iter().filter(|(_, p)| p.name.contains("running")) {
        for (a, b) in values(&parameter.tensor)
            .iter()
            .zip(values(emulated.parameters.get(id)))
        {
            assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{}", parameter.name);
        }
    }
    let (first, second) = (golden::wave("eval", 0), golden::wave("eval", 1));
    let signals = [&first[..], &second[..]];
    let hear = |device: &Device| model(device).transcribe(&signals).unwrap();
    let (expected, found) = (hear(&Device::Cpu), on_device(hear));
    assert!(expected.iter().any(|hypothesis| !hypothesis.ids.is_empty()));
    for (expected, found) in expected.iter().zip(found) {
        assert_eq!((&expected.ids, &expected.frames), (&found.ids, &found.frames));
    }
}

/// What finds no memory together is transcribed in parts: the same tokens and losses, and outputs seen for the same utterances.
#[test]
fn a_batch_without_memory_is_transcribed_in_parts() {
    let model = TdtModel::load(&golden::file("model.nemo"), DType::F32, &Device::Cpu).unwrap();
    let waves = golden::waves("eval");
    let samples = waves[..3].iter().map(Vec::len).min().unwrap().min(24_000);
    let signals: Vec<&[f32]> = waves[..3].iter().map(|wave| &wave[..samples]).collect();
    let targets = [vec![3, 5, 7, 5], vec![2], vec![]];
    let hear = |most: usize, signals: &[&[f32]]| {
        with_allocations(most, || {
            emulator::with(true, || {
                let mut seen = vec![Vec::new(); signals.len()];
                let mut observer = |utterance: usize, token: u32, _: &[f32]| seen[utterance].push(token);
                let heard = model.transcribe_with(signals, &model.decoding, Some(&mut observer))?;
                let with_losses = model.transcribe_with_losses(signals, &targets[..signals.len()], &[])?;
                Result::Ok((heard, with_losses, seen))
            })
        })
    };
    let (_, of_one) = hear(usize::MAX, &signals[..1]);
    let (expected, of_all) = hear(usize::MAX, &signals);
    assert!(of_one < of_all, "{of_one} {of_all}");
    let (found, largest) = hear(of_one, &signals);
    assert!(largest <= of_one, "{largest} {of_one}");
    let (expected, found) = (expected.unwrap(), found.unwrap());
    assert!(expected.2.iter().any(|tokens| !tokens.is_empty()));
    assert_eq!(found.2, expected.2);
    let ids = |heard: &[Hypothesis]| heard.iter().map(|one| one.ids.clone()).collect::<Vec<_>>();
    assert_eq!(ids(&found.0), ids(&expected.0));
    assert_eq!(ids(&found.1.0), ids(&expected.1.0));
    for (found, expected) in found.1.1.iter().zip(&expected.1.1) {
        assert!(
            (found - expected).abs() <= 1e-5 * expected.abs().max(1.0),
            "{found} {expected}"
        );
    }
    // One utterance cannot be divided.
    let (refused, _) = hear(of_one / 8, &signals);
    assert!(is_out_of_memory(&refused.unwrap_err()));
}

/// The parts that the golden model has not: limited attention, which works in blocks; biases everywhere; a CTC head; and
/// layers that are computed again in the backward pass.
#[test]
fn a_hybrid_model_with_limited_attention_trains() {
    let mut config = golden::model().0;
    config.ctc = Some(crate::config::CtcConfig {
        weight: 0.3,
        reduction: crate::config::Reduction::MeanBatch,
    });
    config.encoder.use_bias = true;
    config.encoder.xscaling = true;
    config.encoder.attention_context = AttentionContext::Band(2);
    let batch = MicroBatch {
        // Two seconds, whatever the recordings' lengths are.
        signals: golden::waves("train")[..2]
            .iter()
            .map(|wave| wave.iter().copied().cycle().take(32_000).collect())
            .collect(),
        tokens: vec![vec![3, 5, 7, 5], vec![2]],
        prompts: Vec::new(),
    };
    let train = |device: &Device| -> Result<_> {
        let mut model = TdtModel::new(config.clone(), None, 3, DType::F32, device)?;
        model.set_recompute(true);
        let mut gradients = Gradients::new(&model.parameters);
        let output = model.train_micro_batch(&batch, &TrainOptions::default(), &mut gradients)?;
        // More than one block of 16 queries with the keys beside them.
        assert!(output.frames.iter().any(|&frames| frames > 16 + 2));
        Ok((output, gradients, model))
    };
    let (expected, expected_gradients, model) = train(&Device::Cpu).unwrap();
    let (found, gradients, _) = on_device(train).unwrap();
    assert!((found.loss - expected.loss).abs() <= 1e-5 * expected.loss);
    let (found, expected) = (found.ctc_loss.unwrap(), expected.ctc_loss.unwrap());
    assert!(
        (found - expected).abs() <= 1e-5 * expected,
        "CTC loss {found}, {expected}"
    );
    same_gradients(&model.parameters, &expected_gradients, &gradients);
}

/// There is no backward pass then, which could leave something out.
#[test]
fn a_loss_that_is_not_finite_leaves_nothing_out() {
    let (output, gradients) = on_device(|device| {
        let mut model = TdtModel::load(&golden::file("model.nemo"), DType::F32, device).unwrap();
        let mut gradients = Gradients::new(&model.parameters);
        let mut signal = golden::wave("train", 0);
        let middle = signal.len() / 2;
        signal[middle] = f32::NAN;
        let batch = MicroBatch {
            signals: vec![signal],
            tokens: vec![vec![3, 5]],
            prompts: Vec::new(),
        };
        let output = model.train_micro_batch(&batch, &TrainOptions::default(), &mut gradients);
        (output.unwrap(), gradients.iter().count())
    });
    assert!(!output.loss.is_finite());
    assert_eq!((output.flops_left_out, gradients), (0.0, 0));
}

/// With matrices in bf16 the products of linear layers, that of the joint network's last one too, are in bf16. The loss and
/// the gradients move by what 8 bits of a factor make of them.
#[test]
fn matrices_in_bf16_train() {
    let step = |device: &Device| -> Result<_> {
        let path = golden::file("model.nemo");
        let mut model = TdtModel::load_storing(&path, DType::F32, DType::BF16, device)?;
        let mut gradients = Gradients::new(&model.parameters);
        let batch = MicroBatch {
            signals: vec![golden::wave("train", 0)],
            tokens: vec![vec![3, 5, 7]],
            prompts: Vec::new(),
        };
        let output = model.train_micro_batch(&batch, &TrainOptions::default(), &mut gradients)?;
        let types: Vec<DType> = gradients.iter().map(|(_, gradient)| gradient.dtype()).collect();
        assert!(types.iter().all(|dtype| *dtype == DType::F32));
        let all: Vec<f64> = gradients.iter().flat_map(|(_, gradient)| values(gradient)).collect();
        Ok((output.loss, all))
    };
    let (expected, found) = (step(&Device::Cpu).unwrap(), on_device(step).unwrap());
    assert!(
        (found.0 - expected.0).abs() < 0.01 * expected.0,
        "loss {} {}",
        found.0,
        expected.0
    );
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let norm = |a: &[f64]| dot(a, a).sqrt();
    let (expected_norm, found_norm) = (norm(&expected.1), norm(&found.1));
    assert!(
        (found_norm - expected_norm).abs() < 0.1 * expected_norm,
        "norm {found_norm} {expected_norm}"
    );
    let cosine = dot(&expected.1, &found.1) / (expected_norm * found_norm);
    assert!(cosine >= 0.995, "cosine {cosine}");
}

/// A model and a micro-batch of a form that is seldom met.
struct OddCase {
    name: &'static str,
    utterances: usize,
    /// Of each clip. Under the emulator, which is slow, no more than 0.6.
    seconds: f64,
    /// Target tokens of each clip; under the emulator no more than 24.
    tokens: usize,
    change: fn(&mut ModelConfig),
    freeze_encoder: bool,
    recompute: bool,
}

const ODD: OddCase = OddCase {
    name: "",
    utterances: 2,
    seconds: 0.6,
    tokens: 3,
    change: |_| {},
    freeze_encoder: false,
    recompute: false,
};

const ODD_CASES: [OddCase; 10] = [
    OddCase {
        name: "one clip",
        utterances: 1,
        ..ODD
    },
    OddCase {
        name: "one frame",
        seconds: 0.05,
        tokens: 1,
        ..ODD
    },
    OddCase {
        name: "no tokens",
        tokens: 0,
        ..ODD
    },
    OddCase {
        name: "512 tokens",
        seconds: 20.0,
        tokens: 512,
        ..ODD
    },
    OddCase {
        name: "one clip of 90 s",
        utterances: 1,
        seconds: 90.0,
        tokens: 200,
        ..ODD
    },
    OddCase {
        name: "limited attention",
        seconds: 6.0,
        change: |config| config.encoder.attention_context = AttentionContext::Band(2),
        ..ODD
    },
    OddCase {
        name: "causal",
        seconds: 2.0,
        change: |config| {
            let context = ChunkContext::limited(4, 1);
            config.encoder.attention_context = AttentionContext::Chunks(context);
            config.encoder.causal = CausalConfig {
                subsampling: true,
                convolution: true,
                layer_norm: true,
                contexts: vec![context],
                probabilities: Vec::new(),
            };
            config.preprocessor.normalized = false;
        },
        ..ODD
    },
    OddCase {
        name: "CTC",
        change: |config| {
            config.ctc = Some(crate::config::CtcConfig {
                weight: 0.3,
                reduction: crate::config::Reduction::MeanBatch,
            })
        },
        ..ODD
    },
    OddCase {
        name: "frozen encoder",
        freeze_encoder: true,
        ..ODD
    },
    OddCase {
        name: "recomputed layers",
        recompute: true,
        ..ODD
    },
];

#[test]
fn odd_cases_train() {
    let emulated = DeviceUnderTest::get().is_emulated();
    for case in ODD_CASES {
        let (seconds, tokens) = match emulated {
            true => (case.seconds.min(0.6), case.tokens.min(24)),
            false => (case.seconds, case.tokens),
        };
        let mut config = golden::model().0;
        (case.change)(&mut config);
        let vocabulary = config.vocab_size;
        let batch = MicroBatch {
            signals: golden::waves("train")[..case.utterances]
                .iter()
                .map(|wave| {
                    wave.iter()
                        .copied()
                        .cycle()
                        .take((seconds * 16_000.0) as usize)
                        .collect()
                })
                .collect(),
            tokens: vec![(0..tokens).map(|n| (n * 7 % vocabulary) as u32).collect(); case.utterances],
            prompts: Vec::new(),
        };
        let options = TrainOptions {
            freeze_encoder: case.freeze_encoder,
            seed: 3,
            ..TrainOptions::default()
        };
        let train = |device: &Device| -> Result<_> {
            let mut model = TdtModel::new(config.clone(), None, 3, DType::F32, device)?;
            model.set_recompute(case.recompute);
            let mut gradients = Gradients::new(&model.parameters);
            let output = model.train_micro_batch(&batch, &options, &mut gradients)?;
            let all: Vec<Tensor> = gradients.iter().map(|(_, gradient)| gradient.clone()).collect();
            Ok((output, sum_of_squares(&all)?.sqrt(), all.len()))
        };
        let (expected, norm, count) = train(&Device::Cpu).unwrap();
        let (found, found_norm, found_count) =
            on_device(train).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        assert_eq!((&found.frames, found_count), (&expected.frames, count), "{}", case.name);
        assert!(expected.loss.is_finite() && norm > 0.0, "{}: {expected:?}", case.name);
        let near = |found: f64, expected: f64, bound: f64| (found - expected).abs() <= bound * expected.abs().max(1e-3);
        assert!(
            near(found.loss, expected.loss, 1e-4),
            "{}: {found:?}, {expected:?}",
            case.name
        );
        assert!(near(found_norm, norm, 1e-3), "{}: norm {found_norm}, {norm}", case.name);
    }
}
