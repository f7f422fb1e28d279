use std::collections::HashMap;

use flow_kernels::joint::Cell;
use flow_kernels::testing::values;

use super::*;
use crate::config::{EncoderConfig, Reduction};
use crate::heads::transducer::Transducer;
use crate::testing::golden;
use flow_nn::parameters::{Gradients, Mode};
use flow_nn::tensor_files::{read_packed, read_safetensors};

fn model(dtype: DType) -> TdtModel {
    TdtModel::load(&golden::file("model.nemo"), dtype, &Device::Cpu).unwrap()
}

fn json(name: &str) -> serde_json::Value {
    serde_json::from_slice(&read_packed(&golden::file(name), 1).unwrap()).unwrap()
}

fn targets(tensors: &HashMap<String, Tensor>) -> Vec<Vec<u32>> {
    golden::lengths(&tensors["target_len"])
        .into_iter()
        .enumerate()
        .map(|(b, length)| {
            let row = golden::lengths(&tensors["targets"].get(b).unwrap());
            row[..length].iter().map(|&token| token as u32).collect()
        })
        .collect()
}

fn train_batch(utterances: std::ops::Range<usize>) -> MicroBatch {
    let tokens = targets(&golden::tensors("train_step.safetensors"));
    MicroBatch {
        signals: golden::waves("train")[utterances.clone()].to_vec(),
        tokens: tokens[utterances].to_vec(),
        prompts: Vec::new(),
    }
}

/// All utterances of the golden training step.
fn whole_batch() -> MicroBatch {
    train_batch(0..golden::waves("train").len())
}

/// The golden steps were made without noise of any kind.
fn quiet(scale: f64) -> TrainOptions {
    TrainOptions {
        spec_augment: false,
        dither: false,
        dropout: false,
        scale,
        ..TrainOptions::default()
    }
}

/// Norm of the difference over the norm of `expected`.
fn relative(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.dims(), expected.dims());
    let (found, expected) = (values(found), values(expected));
    let difference: f64 = found.iter().zip(&expected).map(|(a, b)| (a - b).powi(2)).sum();
    let norm: f64 = expected.iter().map(|x| x * x).sum();
    if norm == 0.0 {
        difference.sqrt()
    } else {
        (difference / norm).sqrt()
    }
}

/// As a share of the gradient's norm. NeMo's own f32 and f64 gradients differ by some 6e-6, and by more where inputs of a
/// ReLU are at its kink: by 2e-3 in the sub-sampling, and in all tensors where it is one of the joint network. How much it
/// is in each tensor of the network at hand is in the facts of the training step, for one pair of runs; how far rounding
/// moves our own (`moved`) counts as well, below what an error of the mathematics would do.
fn gradient_bound(name: &str, facts: &serde_json::Value, moved: f64) -> f64 {
    let theirs = facts["grad_stats_f64"][name]["f32_err_rel"].as_f64().unwrap_or(0.0);
    let at_the_kink: f64 = if name.starts_with("encoder.pre_encode") {
        5e-3
    } else {
        3e-5
    };
    at_the_kink.max(3.0 * theirs).max((3.0 * moved).min(2e-3))
}

/// How far each gradient of the golden step moves, as a share of its norm, in 32 bits and where the recordings are rounded
/// in the last place.
fn moved_gradients() -> std::collections::HashMap<String, f64> {
    let whole = whole_batch();
    let rounded = MicroBatch {
        signals: golden::rounded(&whole.signals),
        tokens: whole.tokens.clone(),
        prompts: Vec::new(),
    };
    let runs = [(&whole, DType::F64), (&whole, DType::F32), (&rounded, DType::F64)];
    let [exact, moved @ ..] = runs.map(|(batch, dtype)| {
        let mut model = model(dtype);
        let mut gradients = Gradients::new(&model.parameters);
        model.train_micro_batch(batch, &quiet(1.0), &mut gradients).unwrap();
        (model, gradients)
    });
    let of = |(id, gradient): (_, &Tensor)| {
        let name = exact.0.parameters.parameter(id).name.clone();
        let moved = moved.iter().map(|run| relative(run.1.get(id).unwrap(), gradient));
        (name, moved.fold(0.0, f64::max))
    };
    exact.1.iter().map(of).collect()
}

#[test]
fn a_training_step_has_nemos_losses_gradients_and_statistics() {
    let expected = golden::tensors("train_step.safetensors");
    let facts = json("train_step.json");
    let moved = moved_gradients();
    for dtype in [DType::F32, DType::F64] {
        let mut model = model(dtype);
        let mut gradients = Gradients::new(&model.parameters);
        let output = model
            .train_micro_batch(&whole_batch(), &quiet(1.0), &mut gradients)
            .unwrap();
        assert_eq!(output.frames, golden::lengths(&expected["enc_len"]));
        assert_eq!(output.tokens, targets(&expected).iter().map(Vec::len).sum::<usize>());
        for (found, exact) in output
            .losses
            .iter()
            .zip(facts["loss_per_utt_f64_model"].as_array().unwrap())
        {
            let exact = exact.as_f64().unwrap();
            // The features are f32 in both, of another transform; the rest is exact in f64.
            let share = if dtype == DType::F64 { 4e-7 } else { 1.5e-6 };
            let off = (found / exact - 1.0).abs();
            assert!(off < share, "{dtype:?}: loss {found} {exact}, off by {off:e}");
        }
        let mean = facts["loss_mean_batch"].as_f64().unwrap();
        assert!((output.loss / mean - 1.0).abs() < 1.5e-6, "{} {mean}", output.loss);
        let mut compared = 0;
        for (id, parameter) in model.parameters.iter().filter(|(_, parameter)| parameter.trainable) {
            let name = &parameter.name;
            let found = gradients.get(id).unwrap_or_else(|| panic!("{name} has no gradient"));
            let difference = relative(found, &expected[&format!("grad.{name}")]);
            assert!(
                difference < gradient_bound(name, &facts, moved[name]),
                "{dtype:?} {name}: gradient differs by {difference}"
            );
            let stats = &facts["grad_stats_f64"][name];
            let (norm, exact) = (
                values(found).iter().map(|x| x * x).sum::<f64>().sqrt(),
                stats["norm"].as_f64().unwrap(),
            );
            assert!(
                (norm - exact).abs() < gradient_bound(name, &facts, moved[name]) * exact.max(1e-3),
                "{name}: norm {norm} {exact}"
            );
            compared += 1;
        }
        assert_eq!(compared, expected.keys().filter(|key| key.starts_with("grad.")).count());
        for (key, value) in expected.iter().filter(|(key, _)| key.starts_with("after.")) {
            let id = model.parameters.id(&key["after.".len()..]).unwrap();
            let difference = relative(model.parameters.get(id), value);
            assert!(difference < 1e-5, "{key} differs by {difference}");
        }
    }
}

#[test]
fn accumulated_gradients_are_those_of_lightning() {
    let facts = json("grad_accumulation.json");
    let of_step = json("train_step.json");
    let moved = moved_gradients();
    // Names such as `train3`.
    let utterances = |micro: &serde_json::Value| -> Vec<usize> {
        let names = micro["utterances"].as_array().unwrap().iter();
        let number = |name: &serde_json::Value| name.as_str()?.strip_prefix("train")?.parse().ok();
        names.map(|name| number(name).unwrap()).collect()
    };
    let micro_batches: Vec<_> = facts["micro_batches"]
        .as_array()
        .unwrap()
        .iter()
        .map(utterances)
        .collect();
    let scale = 1.0 / micro_batches.len() as f64;
    let all = whole_batch();
    for reduction in [
        Reduction::MeanBatch,
        Reduction::Mean,
        Reduction::MeanVolume,
        Reduction::Sum,
    ] {
        let case = &facts["cases"][reduction.name()];
        let mut model = model(DType::F32);
        model.config.transducer.as_mut().unwrap().loss.reduction = reduction;
        let mut gradients = Gradients::new(&model.parameters);
        for (micro, utterances) in micro_batches.iter().enumerate() {
            let batch = MicroBatch {
                signals: utterances.iter().map(|&i| all.signals[i].clone()).collect(),
                tokens: utterances.iter().map(|&i| all.tokens[i].clone()).collect(),
                prompts: Vec::new(),
            };
            let output = model.train_micro_batch(&batch, &quiet(scale), &mut gradients).unwrap();
            let expected = case["losses_of_micro_batches"][micro].as_f64().unwrap();
            assert!(
                (output.loss - expected).abs() < 2e-6 * expected,
                "{reduction:?}: {} {expected}",
                output.loss
            );
        }
        let squares: f64 = gradients
            .iter()
            .map(|(_, g)| values(g).iter().map(|x| x * x).sum::<f64>())
            .sum();
        let expected = case["total_norm"].as_f64().unwrap();
        assert!(
            (squares.sqrt() - expected).abs() < 1e-3 * expected,
            "{reduction:?}: {} {expected}",
            squares.sqrt()
        );
        for (name, facts) in case["tensors"].as_object().unwrap() {
            let found = values(gradients.get(model.parameters.id(name).unwrap()).unwrap());
            let norm = found.iter().map(|x| x * x).sum::<f64>().sqrt();
            let exact = facts["norm"].as_f64().unwrap();
            let bound = gradient_bound(name, &of_step, moved[name]);
            assert!(
                (norm - exact).abs() < bound * exact,
                "{reduction:?} {name}: norm {norm} {exact}"
            );
            for (found, first) in found.iter().zip(facts["first"].as_array().unwrap()) {
                assert!(
                    (found - first.as_f64().unwrap()).abs() < bound * exact,
                    "{reduction:?} {name}: {found} {first}"
                );
            }
        }
    }
}

#[test]
fn logits_are_nemos() {
    let model = model(DType::F32);
    let expected = golden::tensors("eval.safetensors");
    // From NeMo's features: those of another FFT move the logits by 2e-5, in f64 too.
    let mel = golden::tensors("mel.safetensors");
    let padded = golden::lengths(&mel["eval.mel_padded_shape"])[2];
    let pad = |mel: &Tensor| mel.pad_with_zeros(1, 0, padded - mel.dim(1).unwrap()).unwrap();
    let utterances = golden::lengths(&mel["eval.mel_padded_shape"])[0];
    let features: Vec<Tensor> = (0..utterances).map(|i| pad(&mel[&format!("eval{i}.mel")])).collect();
    let (encoded, lengths) = model
        .encoder
        .encode(
            &model.parameters,
            &Tensor::stack(&features, 0).unwrap(),
            &golden::lengths(&mel["eval.mel_len"]),
        )
        .unwrap();
    assert_eq!(lengths, golden::lengths(&expected["encoded_len"]));
    let targets = targets(&expected);
    // Its own copy of the head, as that of the model is behind a trait.
    let (config, tensors) = golden::model();
    let mut builder = ParameterBuilder::from_tensors(DType::F32, Device::Cpu, tensors);
    let head = Transducer::new(&config, config.transducer.as_ref().unwrap(), &mut builder).unwrap();
    let (parameters, _) = builder.finish();
    let (predicted, _) = head.prediction.forward(&parameters, &targets, Mode::Evaluate).unwrap();
    let prednet = expected["prednet"].transpose(1, 2).unwrap();
    let lengths_with_start: Vec<usize> = targets.iter().map(|target| target.len() + 1).collect();
    assert!(
        golden::valid_difference(&predicted, &prednet, &lengths_with_start)
            < golden::FROM_FEATURES * golden::magnitude(&prednet)
    );
    let (_, frames, width) = encoded.dims3().unwrap();
    let states = predicted.dim(1).unwrap();
    let f = head
        .joint
        .project_encoder(&parameters, &encoded.reshape(((), width)).unwrap())
        .unwrap();
    let g = predicted.reshape(((), predicted.dim(2).unwrap())).unwrap();
    let g = head.joint.project_prediction(&parameters, &g).unwrap();
    let mut compared = 0;
    for (b, target) in targets.iter().enumerate() {
        let Some(expected) = expected.get(&format!("logits{b}")) else {
            continue;
        };
        compared += 1;
        let pairs: Vec<Cell> = (0..lengths[b] * (target.len() + 1))
            .map(|cell| {
                let (t, u) = (cell / (target.len() + 1), cell % (target.len() + 1));
                Cell {
                    frame: b * frames + t,
                    state: b * states + u,
                    label: None,
                    index: cell,
                }
            })
            .collect();
        let logits = head.joint.logits(&parameters, &f, &g, &pairs).unwrap();
        let expected = expected.flatten_to(1).unwrap();
        let difference = flow_kernels::testing::max_difference(&logits, &expected);
        let magnitude = golden::magnitude(&expected);
        println!("logits {b}: {difference:e}, values up to {magnitude}");
        assert!(
            difference < golden::FROM_FEATURES * magnitude,
            "logits {b} differ by {difference}, {magnitude}"
        );
    }
    assert!(compared > 0);
}

#[test]
fn greedy_decoding_is_nemos_token_for_token() {
    let mut model = model(DType::F32);
    let facts = json("decode.json");
    let signals = golden::waves("eval");
    let numbers = |value: &serde_json::Value| -> Vec<u32> {
        value
            .as_array()
            .unwrap()
            .iter()
            .map(|n| n.as_u64().unwrap() as u32)
            .collect()
    };
    let limits = facts.as_object().unwrap().keys();
    let limits: Vec<&str> = limits
        .filter_map(|key| key.strip_prefix("greedy_batch_alone_max"))
        .collect();
    assert!(!limits.is_empty());
    for limit in limits {
        model.config.transducer.as_mut().unwrap().decoding.max_symbols = limit.parse().unwrap();
        let alone = facts[format!("greedy_batch_alone_max{limit}")].as_array().unwrap();
        let together: Vec<&[f32]> = signals.iter().map(Vec::as_slice).collect();
        let together = model.transcribe(&together).unwrap();
        for (i, expected) in alone.iter().enumerate() {
            let single = model.transcribe(&[&signals[i]]).unwrap().remove(0);
            for found in [&single, &together[i]] {
                assert_eq!(found.ids, numbers(&expected["ids"]), "utterance {i}");
                assert_eq!(found.frames, numbers(&expected["frames"]), "utterance {i}");
                assert_eq!(found.durations, numbers(&expected["durations"]), "utterance {i}");
                assert_eq!(found.text, expected["text"].as_str().unwrap(), "utterance {i}");
                let score = expected["score"].as_f64().unwrap();
                // A sum of logits, each off by a share of the largest.
                let bound = golden::FROM_WAVES * (score.abs() + found.ids.len() as f64);
                assert!((found.score - score).abs() <= bound, "{} {score}", found.score);
            }
        }
    }
}

#[test]
fn an_observer_sees_the_outputs_behind_each_token() {
    let model = model(DType::F32);
    let signals = golden::waves("eval");
    let signals: Vec<&[f32]> = signals.iter().map(Vec::as_slice).collect();
    let mut seen: Vec<Vec<u32>> = vec![Vec::new(); signals.len()];
    let mut observer = |utterance: usize, token: u32, logits: &[f32]| {
        assert_eq!(logits.len(), model.config.vocab_size + 1);
        let first_largest =
            (0..logits.len()).fold(0, |best, next| if logits[next] > logits[best] { next } else { best });
        assert_eq!(token, first_largest as u32);
        seen[utterance].push(token);
    };
    let found = model
        .transcribe_with(&signals, &model.decoding, Some(&mut observer))
        .unwrap();
    assert!(found.iter().any(|hypothesis| !hypothesis.ids.is_empty()));
    let ids: Vec<Vec<u32>> = found.iter().map(|hypothesis| hypothesis.ids.clone()).collect();
    assert_eq!(seen, ids);
    assert_eq!(found, model.transcribe(&signals).unwrap());
    assert!((model.frame_seconds() - 0.08).abs() < 1e-12);
}

#[test]
fn a_saved_model_is_the_same_model() {
    let model = model(DType::F32);
    assert!(model.unused_tensors().is_empty(), "{:?}", model.unused_tensors());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    model.save(&path).unwrap();
    let first = std::fs::read(path.join("model.safetensors")).unwrap();
    let loaded = TdtModel::load(&path, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(loaded.parameters.len(), model.parameters.len());
    for ((_, a), (_, b)) in loaded.parameters.iter().zip(model.parameters.iter()) {
        assert_eq!(
            (&a.name, a.trainable, a.tensor.dtype()),
            (&b.name, b.trainable, b.tensor.dtype())
        );
        assert_eq!(values(&a.tensor), values(&b.tensor), "{}", a.name);
    }
    let wave = golden::wave("eval", 1);
    assert_eq!(
        loaded.transcribe(&[&wave]).unwrap(),
        model.transcribe(&[&wave]).unwrap()
    );
    loaded.save(&path).unwrap();
    assert_eq!(first, std::fs::read(path.join("model.safetensors")).unwrap());
    let mut names: Vec<_> = std::fs::read_dir(&path)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["model.safetensors", "model_config.yaml", "tokenizer.model"]);
    // Damage: every error names the file.
    std::fs::write(path.join("model.safetensors"), &first[..first.len() - 1]).unwrap();
    let error = TdtModel::load(&path, DType::F32, &Device::Cpu)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("model.safetensors"), "{error}");
    std::fs::remove_file(path.join("model_config.yaml")).unwrap();
    let error = TdtModel::load(&path, DType::F32, &Device::Cpu)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("model_config.yaml"), "{error}");
    assert!(read_safetensors(&path.join("none")).is_err());
}

#[test]
fn a_new_model_learns_one_batch() {
    // A network of this test's own: how fast one learns is its own affair.
    let mut config = model(DType::F32).config;
    config.encoder = EncoderConfig {
        n_layers: 2,
        d_model: 64,
        n_heads: 4,
        subsampling_conv_channels: 32,
        ff_expansion_factor: 4,
        conv_kernel_size: 9,
        use_bias: false,
        xscaling: false,
        ..config.encoder
    };
    let transducer = config.transducer.as_mut().unwrap();
    (transducer.prediction.pred_hidden, transducer.prediction.pred_rnn_layers) = (64, 1);
    transducer.joint.joint_hidden = 64;
    let mut model = TdtModel::new(config.clone(), None, 7, DType::F32, &Device::Cpu).unwrap();
    let twin = TdtModel::new(config, None, 7, DType::F32, &Device::Cpu).unwrap();
    for ((_, a), (_, b)) in model.parameters.iter().zip(twin.parameters.iter()) {
        assert_eq!(
            values(&a.tensor),
            values(&b.tensor),
            "{} is not determined by the seed",
            a.name
        );
    }
    let batch = train_batch(0..2);
    let options = TrainOptions {
        dropout: true,
        dither: true,
        spec_augment: true,
        ..TrainOptions::default()
    };
    let mut losses = Vec::new();
    for step in 0..30 {
        let mut gradients = Gradients::new(&model.parameters);
        let options = TrainOptions {
            seed: step,
            ..options.clone()
        };
        losses.push(model.train_micro_batch(&batch, &options, &mut gradients).unwrap().loss);
        let updates: Vec<_> = gradients.iter().map(|(id, g)| (id, g.clone())).collect();
        let norm: f64 = updates
            .iter()
            .map(|(_, g)| values(g).iter().map(|x| x * x).sum::<f64>())
            .sum::<f64>()
            .sqrt();
        for (id, gradient) in updates {
            let moved = (model.parameters.get(id) - (gradient * (0.5 / norm)).unwrap()).unwrap();
            model.parameters.set(id, moved).unwrap();
        }
    }
    assert!(losses[29] < 0.6 * losses[0], "{losses:?}");
}

#[test]
fn a_frozen_encoder_has_no_gradient_and_keeps_its_statistics() {
    let mut model = model(DType::F32);
    let before: Vec<Vec<f64>> = model
        .parameters
        .iter()
        .map(|(_, parameter)| values(&parameter.tensor))
        .collect();
    let mut gradients = Gradients::new(&model.parameters);
    let options = TrainOptions {
        freeze_encoder: true,
        ..quiet(1.0)
    };
    let output = model
        .train_micro_batch(&whole_batch(), &options, &mut gradients)
        .unwrap();
    for ((id, parameter), before) in model.parameters.iter().zip(before) {
        assert_eq!(values(&parameter.tensor), before, "{} moved", parameter.name);
        assert_eq!(
            gradients.get(id).is_some(),
            parameter.trainable && !parameter.name.starts_with("encoder.")
        );
    }
    assert_eq!(output.losses, model.evaluate_loss(&whole_batch()).unwrap().losses);
}

#[test]
fn losses_beside_transcripts_are_those_of_training_without_noise() {
    let mut model = model(DType::F32);
    let batch = whole_batch();
    let signals: Vec<&[f32]> = batch.signals.iter().map(Vec::as_slice).collect();
    let (hypotheses, losses) = model.transcribe_with_losses(&signals, &batch.tokens, &[]).unwrap();
    assert_eq!(hypotheses, model.transcribe(&signals).unwrap());
    assert_eq!(losses, model.evaluate_loss(&batch).unwrap().losses);
    assert!(losses.iter().all(|loss| *loss > 0.0), "{losses:?}");
    // The same reduction as that of training.
    let lengths: Vec<usize> = batch.tokens.iter().map(Vec::len).collect();
    let reduced = crate::loss::reduced(model.config.reduction(), &losses, &lengths);
    model.config.transducer.as_mut().unwrap().loss.omega = 0.0;
    let options = TrainOptions {
        freeze_encoder: true,
        ..quiet(1.0)
    };
    let mut gradients = Gradients::new(&model.parameters);
    let trained = model.train_micro_batch(&batch, &options, &mut gradients).unwrap();
    assert_eq!((reduced, losses), (trained.loss, trained.losses));
    // By beam search too, and not with targets of another number.
    model.decoding.beam = 2;
    let (hypotheses, _) = model.transcribe_with_losses(&signals, &batch.tokens, &[]).unwrap();
    assert_eq!(hypotheses, model.transcribe(&signals).unwrap());
    assert!(model.transcribe_with_losses(&signals, &batch.tokens[1..], &[]).is_err());
}

#[test]
fn recomputed_layers_give_the_same_gradients_and_statistics() {
    // The archive's rates are zero, and a second pass must draw the same masks.
    let (mut config, tensors) = golden::model();
    let encoder = &mut config.encoder;
    (encoder.dropout, encoder.dropout_pre_encoder, encoder.dropout_att) = (0.2, 0.1, 0.1);
    let run = |recompute: bool| {
        let builder = ParameterBuilder::from_tensors(DType::F32, Device::Cpu, tensors.clone());
        let mut model = TdtModel::build(config.clone(), None, builder).unwrap();
        model.set_recompute(recompute);
        let mut gradients = Gradients::new(&model.parameters);
        let options = TrainOptions {
            seed: 5,
            ..TrainOptions::default()
        };
        model
            .train_micro_batch(&whole_batch(), &options, &mut gradients)
            .unwrap();
        let gradients: Vec<_> = gradients.iter().map(|(_, gradient)| values(gradient)).collect();
        let parameters: Vec<_> = model.parameters.iter().map(|(_, p)| values(&p.tensor)).collect();
        (gradients, parameters)
    };
    let (kept, again) = (run(false), run(true));
    assert!(kept == again);
    let before = TdtModel::build(
        config.clone(),
        None,
        ParameterBuilder::from_tensors(DType::F32, Device::Cpu, tensors.clone()),
    );
    let before = before.unwrap();
    for (id, parameter) in before
        .parameters
        .iter()
        .filter(|(_, p)| p.name.ends_with("num_batches_tracked"))
    {
        let moved = again.1[id.index()][0] - values(&parameter.tensor)[0];
        assert_eq!(moved, 1.0, "{}", parameter.name);
    }
}

/// A model whose matrices are kept in half precision is the model of those matrices, computed in 32 bits.
#[test]
fn matrices_in_half_precision_are_computed_in_32_bits() {
    let path = golden::file("model.nemo");
    let signals = golden::waves("eval");
    let signals: Vec<&[f32]> = signals.iter().map(Vec::as_slice).collect();
    let whole = model(DType::F32);
    let size = |model: &TdtModel| -> usize {
        let tensors = model.parameters.iter().map(|(_, p)| &p.tensor);
        tensors.map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum()
    };
    for half in [DType::BF16, DType::F16] {
        let stored = TdtModel::load_storing(&path, DType::F32, half, &Device::Cpu).unwrap();
        let mut rounded = model(DType::F32);
        let (mut matrices, mut elements) = (0, 0);
        for (id, parameter) in stored.parameters.iter().filter(|(_, p)| p.tensor.dtype() == half) {
            let tensor = parameter.tensor.to_dtype(DType::F32).unwrap();
            assert!(relative(&tensor, whole.parameters.get(id)) < 4e-3, "{}", parameter.name);
            elements += tensor.elem_count();
            rounded.parameters.set(id, tensor).unwrap();
            matrices += 1;
        }
        // Nine of each layer, and the last one of the sub-sampling.
        assert!(matrices > 9 * whole.config.encoder.n_layers, "{matrices}");
        let (found, lengths) = stored.encode(&signals).unwrap();
        let (expected, _) = rounded.encode(&signals).unwrap();
        assert_eq!(values(&found), values(&expected), "{half:?}");
        let worst = golden::valid_difference(&found, &whole.encode(&signals).unwrap().0, &lengths);
        println!(
            "{half:?}: {worst:e} from the model in 32 bits, {} of {} bytes",
            size(&stored),
            size(&whole)
        );
        assert!(worst > 0.0 && size(&stored) == size(&whole) - 2 * elements);
    }
}

/// Products of low precision: the same utterances whether alone or in a batch, in less memory, near the model in 32 bits, with the
/// tokens that it finds where it is sure of them.
#[test]
fn low_precision_decodes_alone_as_in_company() {
    let path = golden::file("model.nemo");
    let signals = golden::waves("eval");
    let signals: Vec<&[f32]> = signals.iter().map(Vec::as_slice).collect();
    let whole = model(DType::F32);
    let (expected, lengths) = whole.encode(&signals).unwrap();
    // int8 has 256 codes for what a row spans, bf16 eight bits; layers are normalised in between.
    for (precision, far) in [(Precision::Bf16, 0.05), (Precision::Int8, 0.2)] {
        let load = || TdtModel::load_for_decoding(&path, DType::F32, precision, &Device::Cpu).unwrap();
        let mut low = load();
        assert_eq!(low.parameters.precision(), precision);
        let packed: Vec<&str> = (low.parameters.iter())
            .filter(|(id, _)| low.parameters.packed(*id).is_some())
            .map(|(_, parameter)| parameter.name.as_str())
            .collect();
        // Eleven of each layer: two of each feed-forward module, five of attention, two pointwise convolutions.
        assert_eq!(packed.len(), 11 * whole.config.encoder.n_layers + 3, "{packed:?}");
        assert!(
            packed
                .iter()
                .all(|name| name.starts_with("encoder.layers.") || name.starts_with("joint."))
        );
        let (found, found_lengths) = low.encode(&signals).unwrap();
        assert_eq!(found_lengths, lengths);
        let worst = golden::valid_difference(&found, &expected, &lengths);
        println!(
            "{precision:?}: {worst} of {} from the model in 32 bits",
            golden::magnitude(&expected)
        );
        assert!(
            worst > 0.0 && worst < far * golden::magnitude(&expected),
            "{precision:?}: {worst}"
        );
        let together = low.transcribe(&signals).unwrap();
        assert!(together.iter().any(|hypothesis| !hypothesis.ids.is_empty()));
        for (signal, together) in signals.iter().zip(&together) {
            assert_eq!(&low.transcribe(&[signal]).unwrap()[0], together, "{precision:?}");
        }
        assert_eq!(load().transcribe(&signals).unwrap(), together);
        // Its numbers are gone: whatever needs them says so.
        let folder = tempfile::tempdir().unwrap();
        assert!(low.save(folder.path()).is_err() && low.replica().is_err());
        let batch = MicroBatch {
            signals: vec![signals[0].to_vec()],
            tokens: vec![vec![1]],
            prompts: Vec::new(),
        };
        let mut gradients = Gradients::new(&low.parameters);
        assert!(low.train_micro_batch(&batch, &quiet(1.0), &mut gradients).is_err());
        let loss = |model: &TdtModel| model.evaluate_loss(&batch).unwrap().loss;
        let (low_loss, loss) = (loss(&low), loss(&whole));
        assert!((low_loss - loss).abs() < far * loss.abs(), "{low_loss} {loss}");
        assert!(low.stored_as(DType::BF16).is_err());
        assert!(TdtModel::load_for_decoding(&path, DType::BF16, precision, &Device::Cpu).is_err());
    }
}

#[test]
fn odd_batches_do_not_crash() {
    let mut model = model(DType::F32);
    let mut gradients = Gradients::new(&model.parameters);
    let speech = golden::wave("train", 0);
    let batch = MicroBatch {
        signals: vec![vec![], vec![0.0; 200], speech.clone(), vec![0.25; 5000]],
        tokens: vec![vec![1, 2], vec![3; 40], vec![], vec![4; 300]],
        prompts: Vec::new(),
    };
    let output = model.train_micro_batch(&batch, &quiet(1.0), &mut gradients).unwrap();
    assert_eq!(output.losses[0], 0.0);
    assert!(output.losses.iter().all(|loss| loss.is_finite()) && output.loss.is_finite());
    assert!(
        gradients
            .iter()
            .all(|(_, gradient)| values(gradient).iter().all(|x| x.is_finite()))
    );
    let texts = model.transcribe(&[&[], &[0.0; 100], &speech]).unwrap();
    assert!(texts.len() == 3 && texts[0].ids.is_empty() && texts[1].ids.is_empty());
    assert!(model.transcribe(&[]).unwrap().is_empty());
    // Not a number somewhere: no gradient, no new statistics, and the culprit shows.
    let before: Vec<Vec<f64>> = model
        .parameters
        .iter()
        .map(|(_, parameter)| values(&parameter.tensor))
        .collect();
    let mut gradients = Gradients::new(&model.parameters);
    let mut broken = speech.clone();
    let middle = broken.len() / 2;
    broken[middle] = f32::NAN;
    let batch = MicroBatch {
        signals: vec![broken],
        tokens: vec![vec![1]],
        prompts: Vec::new(),
    };
    match model.train_micro_batch(&batch, &quiet(1.0), &mut gradients) {
        Ok(output) => assert!(!output.loss.is_finite()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    assert_eq!(gradients.iter().count(), 0);
    for ((_, parameter), before) in model.parameters.iter().zip(before) {
        assert_eq!(values(&parameter.tensor), before, "{} moved", parameter.name);
    }
    let unknown = MicroBatch {
        signals: vec![speech],
        tokens: vec![vec![model.config.vocab_size as u32]],
        prompts: Vec::new(),
    };
    assert!(model.train_micro_batch(&unknown, &quiet(1.0), &mut gradients).is_err());
    assert!(
        model
            .train_micro_batch(&MicroBatch::default(), &quiet(1.0), &mut gradients)
            .is_err()
    );
}

/// Work is cut by the size of the data, so a step has the same bits with any number of threads.
#[test]
fn the_number_of_threads_changes_no_bit() {
    let run = |threads: usize| {
        let pool = flow_kernels::threads::pool("test", threads).unwrap();
        pool.install(|| {
            let mut model = model(DType::F32);
            let mut gradients = Gradients::new(&model.parameters);
            model
                .train_micro_batch(&whole_batch(), &TrainOptions::default(), &mut gradients)
                .unwrap();
            gradients
                .iter()
                .map(|(_, gradient)| values(gradient))
                .collect::<Vec<_>>()
        })
    };
    assert!(run(1) == run(3));
}
