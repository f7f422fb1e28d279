//! Greedy search on a device, run by the emulator or on the device that `FLOW_TEST_DEVICE` names, against the search on the
//! CPU.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use flow_cuda_emulator::DeviceUnderTest;
use flow_kernels::counts::counted;

use super::beam::Steps;
use super::{GreedyState, Hypothesis, Networks, decode_greedy_observed, decode_greedy_on};
use crate::fusion::Fusion;
use crate::joint::{Joint, JointSizes};
use crate::model::TdtModel;
use crate::prediction::Prediction;
use crate::testing::golden;
use flow_nn::parameters::{ParameterBuilder, Parameters};

/// The decoder of a model of random weights, whose outputs are large, so that it emits much.
struct Decoder {
    parameters: Parameters,
    prediction: Prediction,
    joint: Joint,
}

const ENCODER: usize = 24;
const VOCABULARY: usize = 300;

impl Decoder {
    fn new(durations: usize, device: &Device) -> Self {
        let mut builder = ParameterBuilder::random(DType::F32, device.clone(), 11);
        let prediction = Prediction::new(VOCABULARY, 20, 2, 0.0, "decoder.prediction", &mut builder).unwrap();
        let sizes = JointSizes {
            encoder: ENCODER,
            prediction: 20,
            hidden: 28,
            vocabulary: VOCABULARY,
            durations,
            dropout: 0.0,
        };
        let joint = Joint::new(&sizes, "joint", &mut builder).unwrap();
        let (mut parameters, _) = builder.finish();
        let bias = parameters.id("joint.joint_net.2.bias").unwrap();
        // Blank is the best output of about every second frame.
        let mut values: Vec<f32> = parameters.get(bias).to_vec1().unwrap();
        values[VOCABULARY] += 2.6;
        let changed = Tensor::from_vec(values, parameters.get(bias).shape(), &Device::Cpu).unwrap();
        parameters.set(bias, changed.to_device(device).unwrap()).unwrap();
        Decoder {
            parameters,
            prediction,
            joint,
        }
    }

    fn networks(&self) -> Networks<'_> {
        Networks {
            parameters: &self.parameters,
            prediction: &self.prediction,
            joint: &self.joint,
        }
    }
}

fn on_device<R>(work: impl FnOnce(&Device) -> R) -> R {
    DeviceUnderTest::get().run(work)
}

/// Ids, frames and durations are equal, scores but for rounding.
fn assert_same(what: &str, expected: &[Hypothesis], found: &[Hypothesis]) {
    assert_eq!(expected.len(), found.len(), "{what}");
    for (expected, found) in expected.iter().zip(found) {
        assert_eq!(
            (&expected.ids, &expected.frames, &expected.durations),
            (&found.ids, &found.frames, &found.durations),
            "{what}"
        );
        let bound = 1e-4 * (1.0 + expected.score.abs());
        assert!((expected.score - found.score).abs() <= bound, "{what}: {found:?}");
    }
}

fn encoded(batch: usize, frames: usize) -> Tensor {
    let mut noise = flow_kernels::Noise::new(5);
    let values: Vec<f32> = (0..batch * frames * ENCODER)
        .map(|_| 4.0 * noise.normal() as f32)
        .collect();
    Tensor::from_vec(values, (batch, frames, ENCODER), &Device::Cpu).unwrap()
}

/// Batches of one and many, utterances without frames, of one frame, with and without durations, with several tokens on a
/// frame and few allowed, in one part and in two; with the logits behind the tokens.
#[test]
fn a_search_on_a_device_finds_what_the_cpu_finds() {
    let mut tokens_on_one_frame = 0;
    for (durations, max_symbols, lengths) in [
        (&[0, 1, 2, 3, 4][..], 10, &[70, 0, 1, 33, 69][..]),
        (&[0, 1, 2, 3, 4], 2, &[40]),
        (&[0, 1], 1, &[17, 20]),
        (&[0], 3, &[9, 12, 0]),
        (&[], 4, &[25, 13]),
        (&[2, 4], 5, &[31; 20]),
    ] {
        let frames = *lengths.iter().max().unwrap();
        let encoded = encoded(lengths.len(), frames);
        let cut = frames / 2;
        let run = |device: &Device| {
            let decoder = Decoder::new(durations.len(), device);
            let networks = decoder.networks();
            let steps = || Steps {
                speech: &[],
                durations,
                max_symbols,
                blank_penalty: 0.0,
            };
            let encoded = encoded.to_device(device).unwrap();
            let mut seen: Vec<Vec<u32>> = vec![Vec::new(); lengths.len()];
            let mut observer = |utterance: usize, token: u32, logits: &[f32]| {
                assert_eq!(logits.len(), VOCABULARY + 1);
                let best =
                    (0..logits.len()).fold(0, |best, next| if logits[next] > logits[best] { next } else { best });
                assert_eq!(token, best as u32);
                seen[utterance].push(token);
            };
            let none = Fusion::default();
            let whole = decode_greedy_observed(&networks, &none, steps(), &encoded, lengths, None).unwrap();
            let observed =
                decode_greedy_observed(&networks, &none, steps(), &encoded, lengths, Some(&mut observer)).unwrap();
            assert_same("observed", &whole, &observed);
            assert!(whole.iter().map(|found| &found.ids).eq(&seen));
            // In two parts; a copy of the state in between is not changed by the second one.
            let mut state = GreedyState::start(&networks, &none, lengths.len()).unwrap();
            let part = |first: usize, len: usize, state: &mut GreedyState| {
                let lengths: Vec<usize> = lengths.iter().map(|l| l.saturating_sub(first).min(len)).collect();
                let part = encoded.narrow(1, first, len).unwrap();
                decode_greedy_on(&networks, &none, steps(), &part, &lengths, state, None).unwrap()
            };
            let mut joined = part(0, cut, &mut state);
            let kept = state.clone();
            let second = part(cut, frames - cut, &mut state);
            let mut kept = kept;
            assert_eq!(second, part(cut, frames - cut, &mut kept));
            for (all, next) in joined.iter_mut().zip(second) {
                all.ids.extend(next.ids);
                all.frames.extend(next.frames.iter().map(|frame| frame + cut as u32));
                all.durations.extend(next.durations);
                all.score += next.score;
            }
            assert_same("two parts", &whole, &joined);
            whole
        };
        let expected = run(&Device::Cpu);
        let found = on_device(run);
        assert_same(&format!("{durations:?}, {max_symbols}, {lengths:?}"), &expected, &found);
        let ids: usize = expected.iter().map(|found| found.ids.len()).sum();
        let frames: usize = lengths.iter().sum();
        assert!(ids > frames / 16, "{ids} tokens in {frames} frames");
        for hypothesis in &expected {
            let repeated = hypothesis.frames.windows(2).filter(|pair| pair[0] == pair[1]);
            tokens_on_one_frame += repeated.count();
        }
    }
    assert!(tokens_on_one_frame > 10, "{tokens_on_one_frame}");
}

/// The bundled model hears on a device what it hears on the CPU in recordings of the bundled corpus, and the host looks
/// once in 32 steps.
#[test]
fn bundled_recordings_are_heard_alike() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let load = |device: &Device| TdtModel::load(&root.join("configs/models/small.nemo"), DType::F32, device).unwrap();
    let waves = golden::waves("eval");
    let signals: Vec<&[f32]> = waves.iter().map(Vec::as_slice).collect();
    let model = load(&Device::Cpu);
    let (encoded, lengths) = model.encode(&signals).unwrap();
    let search = |model: &TdtModel, device: &Device| {
        let encoded = encoded.to_device(device).unwrap();
        model.decode_encoded(&encoded, &lengths, &model.decoding, None).unwrap()
    };
    let expected = search(&model, &Device::Cpu);
    let loaded = on_device(load);
    let (found, counts) = counted(|| on_device(|device| search(&loaded, device)));
    assert_same("small.nemo", &expected, &found);
    let texts = |found: &[Hypothesis]| found.iter().map(|found| found.text.clone()).collect::<Vec<_>>();
    assert_eq!(texts(&expected), texts(&found));
    assert!(
        expected.iter().filter(|found| found.ids.len() > 3).count() > 1,
        "{expected:?}"
    );
    let steps = counts.kernels["greedy_advance"];
    // The last ones may be shorter.
    assert!(counts.to_host.count <= steps / 32 + 2, "{counts:?}");
    // Lengths, durations, record, and what the first step of the prediction network takes; nothing for each token.
    let [launches, copies] = [counts.launches(), counts.to_device.count];
    assert!(copies <= 12, "{copies} copies to the device");
    assert!(launches <= steps * 8 + 30, "{launches} launches in {steps} steps");
}
