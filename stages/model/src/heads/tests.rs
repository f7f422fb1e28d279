//! Models with other heads than TDT alone, beside NeMo's.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use flow_cuda_emulator::DeviceUnderTest;
use flow_kernels::ctc::loss_and_gradient;
use flow_kernels::testing::{max_difference, values};
use serde_json::Value;

use super::*;
use crate::checkpoint::{Format, OpenModel};
use crate::config::ChunkContext;
use crate::fusion::{BoostingRules, Fusion, Phrase, boosting_tree};
use crate::model::{MicroBatch, TdtModel, TrainOptions};
use crate::testing::{golden, quiet};
use crate::tokenizer::Tokenizer;
use crate::vocabulary::NewPieces;
use flow_nn::tensor_files::read_packed;

const SETS: [&str; 3] = ["ctc", "rnnt", "hybrid"];

fn model(set: &str, dtype: DType) -> TdtModel {
    model_on(set, dtype, &Device::Cpu)
}

fn model_on(set: &str, dtype: DType, device: &Device) -> TdtModel {
    TdtModel::load(&golden::file_of(set, "model.nemo"), dtype, device).unwrap()
}

fn opened(set: &str) -> OpenModel {
    OpenModel::open(&golden::file_of(set, "model.nemo")).unwrap()
}

fn tensors(set: &str, name: &str) -> HashMap<String, Tensor> {
    golden::tensors_of(&golden::file_of(set, name))
}

fn json(set: &str, name: &str) -> Value {
    serde_json::from_slice(&read_packed(&golden::file_of(set, name), 1).unwrap()).unwrap()
}

fn waves(set: &str, which: &str) -> Vec<Vec<f32>> {
    golden::waves_in(&golden::file_of(set, "audio"), which)
}

fn slices(waves: &[Vec<f32>]) -> Vec<&[f32]> {
    waves.iter().map(Vec::as_slice).collect()
}

/// Rows of a padded (B, U) tensor of ids.
fn ids(rows: &Tensor, lengths: &Tensor) -> Vec<Vec<u32>> {
    let lengths = golden::lengths(lengths);
    let row = |(row, length): (usize, usize)| -> Vec<u32> {
        let ids = golden::lengths(&rows.get(row).unwrap());
        ids[..length].iter().map(|&id| id as u32).collect()
    };
    lengths.into_iter().enumerate().map(row).collect()
}

fn batch(set: &str) -> MicroBatch {
    let expected = tensors(set, "train_step.safetensors");
    MicroBatch {
        signals: waves(set, "train"),
        tokens: ids(&expected["targets"], &expected["target_len"]),
        prompts: Vec::new(),
    }
}

fn numbers(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn floats(value: &Value) -> Vec<f64> {
    let number = |value: &Value| value.as_f64().unwrap_or(f64::INFINITY);
    value.as_array().unwrap().iter().map(number).collect()
}

#[test]
fn archives_say_which_heads_they_have() {
    for (set, heads, reduction) in [
        ("ctc", "CTC", Reduction::MeanBatch),
        ("rnnt", "RNN-T", Reduction::MeanBatch),
        ("hybrid", "TDT and CTC", Reduction::MeanBatch),
    ] {
        let model = model(set, DType::F32);
        assert!(model.unused_tensors().is_empty(), "{set}: {:?}", model.unused_tensors());
        assert_eq!(
            (model.config.heads(), model.config.reduction()),
            (heads, reduction),
            "{set}"
        );
        assert_eq!(model.config.labels.len(), model.config.vocab_size);
        let again = ModelConfig::from_nemo_yaml(&model.config.to_nemo_yaml().unwrap()).unwrap();
        assert_eq!(
            (&again.transducer, &again.ctc, again.vocab_size),
            (&model.config.transducer, &model.config.ctc, model.config.vocab_size)
        );
    }
    assert_eq!(model("hybrid", DType::F32).config.ctc.unwrap().weight, 0.3);
}

#[test]
fn heads_that_are_not_known_are_refused_by_name() {
    let changed = |set: &str, from: &str, to: &str| {
        let yaml = opened(set).config_yaml;
        assert!(yaml.contains(from), "{set}: {from}");
        ModelConfig::from_nemo_yaml(&yaml.replacen(from, to, 1))
            .unwrap_err()
            .to_string()
    };
    let cases = [
        (
            "rnnt",
            "loss_name: default",
            "loss_name: monotonic_rnnt",
            "loss.loss_name",
        ),
        ("rnnt", "loss_name: default", "loss_name: tdt", "no durations"),
        ("rnnt", "vocab_size: 112", "vocab_size: 111", "joint.num_classes"),
        (
            "ctc",
            "modules.ConvASRDecoder",
            "modules.ConvASRDecoderReconstruction",
            "decoder._target_",
        ),
        ("ctc", "num_classes: 120", "num_classes: 119", "decoder.vocabulary"),
        ("ctc", "feat_in: 48", "feat_in: 47", "decoder.feat_in"),
        (
            "ctc",
            "ctc_reduction: mean_batch",
            "ctc_reduction: median",
            "ctc_reduction",
        ),
        (
            "ctc",
            "ctc_reduction: mean_batch",
            "interctc: {loss_weights: [0.3], apply_at_layers: [1]}",
            "interctc.loss_weights",
        ),
        (
            "ctc",
            "num_classes: 120\n  vocabulary",
            "other: 1\n  texts",
            "neither a transducer",
        ),
        (
            "hybrid",
            "num_classes: 104\n    vocabulary",
            "num_classes: 103\n    texts",
            "103 tokens",
        ),
        (
            "hybrid",
            "ctc_loss_weight: 0.3",
            "ctc_loss_weight: 1.3",
            "aux_ctc.ctc_loss_weight",
        ),
    ];
    for (set, from, to, expected) in cases {
        let error = changed(set, from, to);
        assert!(error.contains(expected), "{to}: {error}");
    }
    // NeMo's default, and lists of no inner heads, which NeMo's own recipes write.
    let yaml = opened("hybrid")
        .config_yaml
        .replace("ctc_loss_weight: 0.3", "unknown: 1");
    assert_eq!(ModelConfig::from_nemo_yaml(&yaml).unwrap().ctc.unwrap().weight, 0.5);
    let yaml = opened("ctc").config_yaml + "\ninterctc: {loss_weights: [], apply_at_layers: []}\n";
    ModelConfig::from_nemo_yaml(&yaml).unwrap();
    let mut root: serde_yaml::Value = serde_yaml::from_str(&opened("rnnt").config_yaml).unwrap();
    root["decoding"]["durations"] = serde_yaml::Value::Sequence(Vec::new());
    let yaml = serde_yaml::to_string(&root).unwrap();
    assert_eq!(ModelConfig::from_nemo_yaml(&yaml).unwrap().heads(), "RNN-T");
}

#[test]
fn outputs_are_nemos() {
    for set in SETS {
        let model = model(set, DType::F32);
        let expected = tensors(set, "eval.safetensors");
        let waves = waves(set, "eval");
        let (encoded, lengths) = model.encode(&slices(&waves)).unwrap();
        assert_eq!(lengths, golden::lengths(&expected["encoded_len"]));
        let theirs = expected["encoded"].transpose(1, 2).unwrap();
        let difference = golden::valid_difference(&encoded, &theirs, &lengths);
        println!("{set}: encoded {difference:e} of {}", golden::magnitude(&theirs));
        assert!(
            difference < golden::FROM_WAVES * golden::magnitude(&theirs),
            "{set}: {difference}"
        );
        if set == "rnnt" {
            continue;
        }
        let mut builder = ParameterBuilder::from_tensors(DType::F32, Device::Cpu, opened(set).load().unwrap().tensors);
        let head = ctc::CtcHead::new(&model.config, &mut builder).unwrap();
        let (parameters, _) = builder.finish();
        let (logits, _) = head.logits(&parameters, &encoded).unwrap();
        let (rows, outputs) = logits.dims2().unwrap();
        let logits = logits.reshape((lengths.len(), rows / lengths.len(), outputs)).unwrap();
        for (utterance, &length) in lengths.iter().enumerate() {
            let logits = logits.get(utterance).unwrap().narrow(0, 0, length).unwrap();
            let sums = logits.to_dtype(DType::F64).unwrap().log_sum_exp(1).unwrap();
            let found = logits.to_dtype(DType::F64).unwrap();
            let found = found.broadcast_sub(&sums.unsqueeze(1).unwrap()).unwrap();
            let expected = expected[&format!("ctc_logprobs{utterance}")]
                .to_dtype(DType::F64)
                .unwrap();
            let difference = max_difference(&found, &expected);
            let magnitude = golden::magnitude(&expected);
            println!("{set} {utterance}: log-probabilities {difference:e} of {magnitude}");
            assert!(
                difference < golden::FROM_WAVES * magnitude,
                "{set} {utterance}: {difference}"
            );
        }
    }
}

#[test]
fn greedy_ctc_is_nemos_token_for_token() {
    for set in ["ctc", "hybrid"] {
        let mut model = model(set, DType::F32);
        let golden = json(set, "decode.json");
        let settings = DecodingSettings {
            head: Some(HeadKind::Ctc),
            ..DecodingSettings::default()
        };
        model.set_decoding(settings).unwrap();
        let waves = waves(set, "eval");
        let mut shown: Vec<Vec<u32>> = vec![Vec::new(); waves.len()];
        let mut observe = |utterance: usize, token: u32, logits: &[f32]| {
            assert!(logits.iter().all(|logit| *logit <= logits[token as usize]));
            shown[utterance].push(token);
        };
        let found = model
            .transcribe_with(&slices(&waves), &model.decoding, Some(&mut observe))
            .unwrap();
        for (utterance, hypothesis) in found.iter().enumerate() {
            let own = &golden["ctc_own"][utterance];
            assert_eq!(hypothesis.ids, numbers(&own["ids"]), "{set} {utterance}");
            assert_eq!(shown[utterance], hypothesis.ids);
            let (first, last) = (numbers(&own["first_frame"]), numbers(&own["last_frame"]));
            assert_eq!(hypothesis.frames, first, "{set} {utterance}");
            let lengths: Vec<u32> = last.iter().zip(&first).map(|(last, first)| last - first + 1).collect();
            assert_eq!(hypothesis.durations, lengths, "{set} {utterance}");
            let theirs = &golden["ctc_greedy_batch"][utterance];
            assert_eq!(theirs["text"], hypothesis.text.as_str());
            let score = theirs["score"].as_f64().unwrap();
            // Log-probabilities of up to 66 frames near 0, each of logits up to 40 in 32 bits.
            assert!((hypothesis.score - score).abs() < 2e-4, "{} {score}", hypothesis.score);
            let stamps = model.time_stamps(hypothesis).unwrap();
            let words: Vec<&str> = stamps.words.iter().map(|word| word.text.as_str()).collect();
            let expected: Vec<&str> = theirs["word"]
                .as_array()
                .unwrap()
                .iter()
                .map(|w| w["word"].as_str().unwrap())
                .collect();
            assert_eq!(words, expected);
            // NeMo's stamps end a token where it begins.
            for (word, theirs) in stamps.word_tokens.iter().zip(theirs["word"].as_array().unwrap()) {
                let text: Vec<u32> = hypothesis.ids[word.clone()].to_vec();
                let mark =
                    |id: u32| [".", ",", "?", "!", "'"].contains(&model.tokenizer.as_ref().unwrap().piece(id).unwrap());
                if !mark(text[text.len() - 1]) {
                    assert_eq!(theirs["end_offset"], hypothesis.frames[word.end - 1]);
                }
            }
            // Alone, and in parts, it is the same.
            let encoded = model.encode_frames(&waves[utterance], 0, None).unwrap();
            let (mut state, mut parts) = (model.greedy_state(&model.decoding).unwrap(), Hypothesis::default());
            for first in (0..encoded.dim(0).unwrap()).step_by(5) {
                let part = encoded
                    .narrow(0, first, 5.min(encoded.dim(0).unwrap() - first))
                    .unwrap();
                let next = model.decode_on(&model.decoding, &part, &mut state, None).unwrap();
                parts.ids.extend(next.ids);
                parts
                    .frames
                    .extend(next.frames.iter().map(|frame| first as u32 + frame));
            }
            assert_eq!(
                (parts.ids, parts.frames),
                (hypothesis.ids.clone(), hypothesis.frames.clone())
            );
        }
    }
}

/// NeMo's best hypothesis, with its frames and score. In its beam a text has a place for each of its two ends, blank and the last
/// token, and in ours one for both: so ours
/// loses fewer paths: no text of both lists has a lower score than NeMo's, nor the best one a higher one than over all its paths.
/// Observers see what
/// they see of greedy search.
#[test]
fn beam_search_of_ctc_is_nemos() {
    let mut model = model("ctc", DType::F32);
    let golden = json("ctc", "decode.json");
    let log_probs = tensors("ctc", "eval.safetensors");
    for (utterance, wave) in waves("ctc", "eval").iter().enumerate() {
        model.set_decoding(DecodingSettings::default()).unwrap();
        let mut rows: Vec<Vec<f32>> = Vec::new();
        let mut observe = |_: usize, _: u32, logits: &[f32]| rows.push(logits.to_vec());
        let greedy = model
            .transcribe_with(&[wave], &model.decoding, Some(&mut observe))
            .unwrap()
            .remove(0);
        let settings = DecodingSettings {
            beam: 4,
            ..DecodingSettings::default()
        };
        model.set_decoding(settings).unwrap();
        let found = model.transcribe_n_best(&[wave]).unwrap().swap_remove(0);
        let expected = golden["ctc_beam_batch_4_alone"][utterance].as_array().unwrap();
        assert_eq!(found[0].ids, numbers(&expected[0]["ids"]));
        let least = found.last().unwrap().score;
        for (rank, expected) in expected.iter().enumerate() {
            let score = expected["score"].as_f64().unwrap();
            let Some(same) = found.iter().find(|found| found.ids == numbers(&expected["ids"])) else {
                assert!(score < least, "{score} {least}");
                continue;
            };
            assert_eq!(same.frames, numbers(&expected["timestamp"]));
            println!("{utterance} {rank}: {} {score}", same.score);
            // Log-probabilities of up to 66 frames, each of logits up to 40 in 32 bits.
            assert!(same.score > score - 2e-4, "{} {score}", same.score);
            if rank == 0 {
                let rows = &log_probs[&format!("ctc_logprobs{utterance}")];
                let (frames, target) = (rows.dim(0).unwrap(), vec![same.ids.clone()]);
                let (losses, _) = loss_and_gradient(rows, frames, &[frames], &target, &[1.0]).unwrap();
                assert!(same.score < 2e-4 - losses[0], "{} {}", same.score, -losses[0]);
            }
        }
        // It does not go on from part to part.
        assert!(
            model
                .greedy_state(&model.decoding)
                .unwrap_err()
                .to_string()
                .contains("window: vad")
        );
        let mut shown: Vec<Vec<f32>> = Vec::new();
        let mut observe = |_: usize, _: u32, logits: &[f32]| shown.push(logits.to_vec());
        let best = model
            .transcribe_with(&[wave], &model.decoding, Some(&mut observe))
            .unwrap()
            .remove(0);
        let times = |hypothesis: &Hypothesis| (hypothesis.frames.clone(), hypothesis.durations.clone());
        assert_eq!((&best.ids, times(&best)), (&greedy.ids, times(&greedy)));
        assert_eq!(best.text, greedy.text);
        assert_eq!(shown, rows);
    }
}

/// Phrases are boosted in CTC without a beam, too: whatever is boosted enough is found, and nothing else changes where it was not.
#[test]
fn a_boosted_phrase_is_found_by_ctc() {
    for (set, beam) in [("ctc", 0), ("ctc", 3), ("hybrid", 0)] {
        let model = model(set, DType::F32);
        let signal = waves(set, "eval").swap_remove(0);
        let settings = |weight: f64, token: u32| {
            let phrase = Phrase {
                tokens: vec![token],
                context_score: None,
            };
            let tree = boosting_tree(&[phrase], &BoostingRules::default(), model.config.vocab_size).unwrap();
            let mut fusion = Fusion::default();
            fusion.add(Arc::new(tree), weight).unwrap();
            DecodingSettings {
                head: Some(HeadKind::Ctc),
                beam,
                fusion,
                ..DecodingSettings::default()
            }
        };
        let decode = |settings: &DecodingSettings| model.transcribe_with(&[&signal], settings, None).unwrap().remove(0);
        let plain = decode(&settings(0.0, 0));
        let token = (0..model.config.vocab_size as u32)
            .find(|token| !plain.ids.contains(token))
            .unwrap();
        let barely = decode(&settings(1e-3, token));
        assert_eq!(
            (&barely.ids, &barely.frames),
            (&plain.ids, &plain.frames),
            "{set} {beam}"
        );
        let boosted = decode(&settings(1e3, token));
        assert!(boosted.ids.contains(&token), "{set} {beam}");
        assert_eq!(boosted.ids.len(), boosted.frames.len());
        assert!(boosted.frames.is_sorted_by(|a, b| a < b));
    }
}

#[test]
fn greedy_transducers_are_nemos_token_for_token() {
    for set in ["rnnt", "hybrid"] {
        let mut model = model(set, DType::F32);
        let golden = json(set, "decode.json");
        let waves = waves(set, "eval");
        for (key, limit) in [("own", 10), ("own_max2", 2)] {
            model.config.transducer.as_mut().unwrap().decoding.max_symbols = limit;
            let found = model.transcribe(&slices(&waves)).unwrap();
            for (utterance, hypothesis) in found.iter().enumerate() {
                let expected = &golden[key][utterance];
                assert_eq!(hypothesis.ids, numbers(&expected["ids"]), "{set} {key} {utterance}");
                assert_eq!(
                    hypothesis.frames,
                    numbers(&expected["frames"]),
                    "{set} {key} {utterance}"
                );
                if set == "hybrid" {
                    assert_eq!(hypothesis.durations, numbers(&expected["durations"]));
                }
                if limit != 10 {
                    continue;
                }
                let theirs = &golden["greedy_batch_alone"][utterance];
                assert_eq!(theirs["text"], hypothesis.text.as_str());
                let stamps = model.time_stamps(hypothesis).unwrap();
                for (ours, key) in [(&stamps.words, "word"), (&stamps.segments, "segment")] {
                    let ours: Vec<(&str, u32, u32)> = ours.iter().map(|w| (w.text.as_str(), w.start, w.end)).collect();
                    let theirs = theirs[key].as_array().unwrap().iter();
                    let offset = |word: &Value, key: &str| word[key].as_u64().unwrap() as u32;
                    let theirs: Vec<(&str, u32, u32)> = theirs
                        .map(|w| {
                            (
                                w[key].as_str().unwrap(),
                                offset(w, "start_offset"),
                                offset(w, "end_offset"),
                            )
                        })
                        .collect();
                    assert_eq!(ours, theirs, "{set} {utterance} {key}");
                }
            }
        }
    }
}

/// Beam search of an RNN-T: NeMo's best hypothesis, with its score.
#[test]
fn beam_search_of_rnnt_is_nemos() {
    let mut model = model("rnnt", DType::F32);
    let golden = json("rnnt", "decode.json");
    let settings = DecodingSettings {
        beam: 4,
        ..DecodingSettings::default()
    };
    model.set_decoding(settings).unwrap();
    for (utterance, wave) in waves("rnnt", "eval").iter().enumerate() {
        let found = model.transcribe_n_best(&[wave]).unwrap().swap_remove(0);
        let expected = &golden["malsd_batch_4"][utterance][0];
        assert_eq!(found[0].ids, numbers(&expected["ids"]));
        let score = expected["score"].as_f64().unwrap();
        // NeMo's own scores of a batch and of one utterance lie 3e-5 apart.
        assert!((found[0].score - score).abs() < 3e-4, "{} {score}", found[0].score);
    }
}

/// NeMo's own gradients in 32 bits are up to 2e-5 of a tensor's norm from those in 64, for these networks; the features of another
/// Fourier transform move ours by as much again.
const GRADIENT: f64 = 1e-4;

/// Gradients of all parameters against those of a step, in `train_step.safetensors` and `train_step.json`.
fn compare_gradients(
    case: &str,
    model: &TdtModel,
    gradients: &Gradients,
    (expected, facts): (&HashMap<String, Tensor>, &Value),
) {
    let (mut compared, mut worst) = (0, 0.0f64);
    for (id, parameter) in model.parameters.iter().filter(|(_, parameter)| parameter.trainable) {
        let name = &parameter.name;
        let found = values(gradients.get(id).unwrap_or_else(|| panic!("{name} has no gradient")));
        let facts = &facts["grads"][name];
        let norm = facts["f64_norm"].as_f64().unwrap();
        let theirs = facts["f32_err_rel"].as_f64().unwrap();
        // Gradients that are zero but for rounding (biases before a normalisation) are compared with the largest ones.
        let bound = GRADIENT.max(3.0 * theirs) * norm.max(1e-2);
        let own_norm = found.iter().map(|x| x * x).sum::<f64>().sqrt();
        assert!((own_norm - norm).abs() < bound, "{case} {name}: norm {own_norm} {norm}");
        let pairs: Vec<(f64, f64)> = match expected.get(&format!("grad.{name}#idx")) {
            Some(places) => {
                let places = golden::lengths(places).into_iter().map(|place| found[place]);
                places.zip(values(&expected[&format!("grad.{name}#val")])).collect()
            }
            None => {
                let all = values(&expected[&format!("grad.{name}")]);
                assert_eq!(all.len(), found.len(), "{name}");
                found.into_iter().zip(all).collect()
            }
        };
        let difference = pairs.iter().map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
        worst = worst.max(difference / norm.max(1e-2));
        assert!(difference < bound, "{case} {name}: {difference} of {norm}");
        compared += 1;
    }
    println!("{case}: {compared} gradients, the worst {worst:e} of its norm");
    assert_eq!(compared, facts["grads"].as_object().unwrap().len());
}

#[test]
fn training_steps_have_nemos_losses_and_all_gradients() {
    for set in SETS {
        let expected = tensors(set, "train_step.safetensors");
        let facts = json(set, "train_step.json");
        for (dtype, on_device) in [(DType::F64, false), (DType::F32, false), (DType::F32, true)] {
            let train = |device: &Device| {
                let mut model = model_on(set, dtype, device);
                let mut gradients = Gradients::new(&model.parameters);
                let output = model.train_micro_batch(&batch(set), &quiet(), &mut gradients).unwrap();
                (model, gradients, output)
            };
            let (model, gradients, output) = match on_device {
                true => DeviceUnderTest::get().run(train),
                false => train(&Device::Cpu),
            };
            assert_eq!(output.frames, golden::lengths(&expected["enc_len"]));
            let main = &facts[match set {
                "ctc" => "ctc",
                "rnnt" => "rnnt",
                _ => "tdt",
            }];
            for (found, exact) in output.losses.iter().zip(floats(&main["loss_per_utt_f64_model"])) {
                assert!(
                    (found - exact).abs() < 1e-5 * exact,
                    "{set} {dtype:?}: loss {found} {exact}"
                );
            }
            let lengths: Vec<usize> = batch(set).tokens.iter().map(Vec::len).collect();
            for reduction in [
                Reduction::MeanBatch,
                Reduction::Mean,
                Reduction::MeanVolume,
                Reduction::Sum,
            ] {
                let found = crate::loss::reduced(reduction, &output.losses, &lengths);
                let theirs = main["reductions"][reduction.name()].as_f64().unwrap();
                assert!(
                    (found - theirs).abs() < 1e-5 * theirs,
                    "{set} {reduction:?}: {found} {theirs}"
                );
            }
            let total = match output.ctc_loss {
                Some(ctc) => {
                    let theirs = facts["ctc"]["loss"].as_f64().unwrap();
                    assert!((ctc - theirs).abs() < 1e-5 * theirs, "{ctc} {theirs}");
                    let weight = model.config.ctc.as_ref().unwrap().weight;
                    (1.0 - weight) * output.loss + weight * ctc
                }
                None => output.loss,
            };
            let theirs = facts["combined"]["loss"]
                .as_f64()
                .unwrap_or(main["loss"].as_f64().unwrap());
            assert!((total - theirs).abs() < 1e-5 * theirs, "{set}: {total} {theirs}");
            compare_gradients(&format!("{set} {dtype:?}"), &model, &gradients, (&expected, &facts));
            for (key, value) in expected.iter().filter(|(key, _)| key.starts_with("after.")) {
                let id = model.parameters.id(&key["after.".len()..]).unwrap();
                let found = values(model.parameters.get(id));
                for (found, expected) in found.iter().zip(values(value)) {
                    assert!(
                        (found - expected).abs() < 1e-5 * expected.abs().max(1.0),
                        "{key}: {found} {expected}"
                    );
                }
            }
        }
    }
}

/// All of NeMo's cases of the CTC loss: infeasible targets, empty ones, and rows of one frame among them.
#[test]
fn golden_cases_of_the_ctc_loss() {
    let cases = json("ctc", "loss_cases.json");
    let golden_tensors = tensors("ctc", "loss_cases.safetensors");
    let cases = cases.as_object().unwrap();
    assert!(cases.len() > 8);
    for (name, case) in cases {
        let get = |part: &str| &golden_tensors[&format!("{name}.{part}")];
        let (batch, time, outputs) = get("logits").dims3().unwrap();
        let lengths = golden::lengths(get("t_len"));
        let targets = ids(get("labels"), get("u_len"));
        for (dtype, bound, on_device) in [
            (DType::F64, 1e-6, false),
            (DType::F32, 2e-5, false),
            (DType::F32, 2e-5, true),
        ] {
            let logits = get("logits")
                .to_dtype(dtype)
                .unwrap()
                .reshape((batch * time, outputs))
                .unwrap();
            let run = |device: &Device| {
                let logits = logits.to_device(device).unwrap();
                loss_and_gradient(&logits, time, &lengths, &targets, &vec![1.0; batch]).unwrap()
            };
            let (losses, gradient) = match on_device {
                true => DeviceUnderTest::get().run(run),
                false => run(&Device::Cpu),
            };
            for (utterance, found) in losses.iter().enumerate() {
                let plain = &case["none_plain"][utterance];
                let plain: f64 = plain.as_str().map_or(plain.as_f64(), |text| text.parse().ok()).unwrap();
                if plain.is_infinite() {
                    assert_eq!(*found, f64::INFINITY, "{name}");
                    continue;
                }
                // NeMo's are of 32 bits.
                assert!(
                    (found - plain).abs() <= 2e-6 * plain.abs().max(1.0),
                    "{name}: {found} {plain}"
                );
            }
            let expected = get("grad_f64").to_dtype(DType::F64).unwrap();
            let found = gradient
                .to_device(&Device::Cpu)
                .unwrap()
                .to_dtype(DType::F64)
                .unwrap()
                .reshape((batch, time, outputs))
                .unwrap();
            let difference = max_difference(&found, &expected);
            assert!(difference < bound, "{name} {dtype:?}: gradient differs by {difference}");
        }
    }
}

/// What is exported is the same model: as an archive, a model folder and, where transformers has such a model, for it.
#[test]
fn exported_models_are_the_same() {
    for set in SETS {
        let place = tempfile::tempdir().unwrap();
        let original = opened(set);
        let waves = waves(set, "eval");
        let whole = model(set, DType::F32);
        let expected = whole.transcribe(&slices(&waves)).unwrap();
        assert!(expected.iter().all(|hypothesis| !hypothesis.text.is_empty()));
        for (format, name) in [
            (Format::Nemo, "a.nemo"),
            (Format::Folder, "folder"),
            (Format::HuggingFace, "hf"),
        ] {
            let path = place.path().join(name);
            let notes = original.write(&path, format, None, false).unwrap();
            let back = OpenModel::open(&path).unwrap();
            let left_out = notes.iter().any(|note| note.contains("CTC head is left out"));
            assert_eq!(left_out, set == "hybrid" && format == Format::HuggingFace);
            let names = |model: &OpenModel| -> Vec<String> {
                let mut names: Vec<String> = model.tensors.iter().map(|entry| entry.name.clone()).collect();
                names.retain(|name| !(left_out && name.starts_with(ctc::AUXILIARY)));
                names.sort();
                names
            };
            if format != Format::HuggingFace {
                assert_eq!(names(&back), names(&original), "{set} {name}");
            }
            let read = TdtModel::load(&path, DType::F32, &Device::Cpu).unwrap();
            assert!(
                read.unused_tensors().is_empty(),
                "{set} {name}: {:?}",
                read.unused_tensors()
            );
            assert_eq!(read.config.vocab_size, whole.config.vocab_size);
            let found = read.transcribe(&slices(&waves)).unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(
                    (&found.ids, &found.text),
                    (&expected.ids, &expected.text),
                    "{set} {name}"
                );
            }
        }
        let config: Value =
            serde_json::from_slice(&std::fs::read(place.path().join("hf/config.json")).unwrap()).unwrap();
        let kind = match set {
            "ctc" => "parakeet_ctc",
            "rnnt" => "parakeet_rnnt",
            _ => "parakeet_tdt",
        };
        assert_eq!(config["model_type"], kind);
        assert_eq!(config.get("durations").is_some(), set == "hybrid");
        let archive = OpenModel::open(&place.path().join("a.nemo")).unwrap();
        let yaml: serde_yaml::Value = serde_yaml::from_str(&archive.config_yaml).unwrap();
        let before: serde_yaml::Value = serde_yaml::from_str(&original.config_yaml).unwrap();
        assert_eq!(yaml["target"], before["target"]);
        assert_eq!(yaml["loss"].is_mapping(), set != "ctc");
        if set == "rnnt" {
            assert_eq!(yaml["loss"]["loss_name"], "default");
            assert!(yaml["joint"]["num_extra_outputs"].is_null() && yaml["decoding"]["durations"].is_null());
        }
    }
}

/// A head that is gone, or that a model never had, is refused before anything is decoded; so is a search that CTC does not have.
#[test]
fn heads_that_a_model_does_not_have_do_not_decode() {
    let set = |set: &str, head: HeadKind, beam: usize| {
        let mut model = model(set, DType::F32);
        let settings = DecodingSettings {
            head: Some(head),
            beam,
            ..DecodingSettings::default()
        };
        model.set_decoding(settings).map_err(|error| error.to_string())
    };
    let error = set("rnnt", HeadKind::Ctc, 0).unwrap_err();
    assert!(error.contains("`ctc`") && error.contains("RNN-T"), "{error}");
    assert!(set("ctc", HeadKind::Transducer, 0).is_err());
    set("hybrid", HeadKind::Transducer, 4).unwrap();
    let without = TdtModel::from_stored(
        opened("hybrid").without_ctc().unwrap().load().unwrap(),
        ModelConfig::from_nemo_yaml(&opened("hybrid").without_ctc().unwrap().config_yaml).unwrap(),
        DType::F32,
        &Device::Cpu,
    );
    let mut without = without.unwrap();
    assert_eq!(without.config.heads(), "TDT");
    let ctc = DecodingSettings {
        head: Some(HeadKind::Ctc),
        ..DecodingSettings::default()
    };
    assert!(without.set_decoding(ctc).unwrap_err().to_string().contains("TDT"));
    assert!(without.decoding.head.is_none());
    // The only head of a model stays.
    assert_eq!(
        opened("ctc").without_ctc().unwrap().tensors.len(),
        opened("ctc").tensors.len()
    );
}

/// With a share of 0 a hybrid model learns as its transducer alone does, and keeps its CTC head; with 1 it learns CTC.
#[test]
fn shares_of_the_two_losses() {
    let gradients = |weight: f64| {
        let mut model = model("hybrid", DType::F64);
        model.config.ctc.as_mut().unwrap().weight = weight;
        let mut gradients = Gradients::new(&model.parameters);
        let output = model
            .train_micro_batch(&batch("hybrid"), &quiet(), &mut gradients)
            .unwrap();
        let of = |name: &str| gradients.get(model.parameters.id(name).unwrap()).map(values);
        let names = [
            "encoder.pre_encode.out.weight",
            "joint.enc.weight",
            "ctc_decoder.decoder_layers.0.weight",
        ];
        (output, names.map(of))
    };
    let (none, [encoder, joint, head]) = gradients(0.0);
    assert!(none.ctc_loss.is_none() && head.is_none());
    let (half, [encoder_half, joint_half, _]) = gradients(0.5);
    let (all, [encoder_all, joint_all, _]) = gradients(1.0);
    assert_eq!(
        (none.losses.clone(), half.ctc_loss.is_some()),
        (all.losses.clone(), true)
    );
    assert!(joint_all.unwrap().iter().all(|gradient| *gradient == 0.0));
    for (half, whole) in joint_half.unwrap().iter().zip(joint.unwrap()) {
        assert!((half - 0.5 * whole).abs() < 1e-12 * whole.abs().max(1.0));
    }
    for ((half, none), all) in encoder_half
        .unwrap()
        .iter()
        .zip(encoder.unwrap())
        .zip(encoder_all.unwrap())
    {
        assert!(
            (half - 0.5 * (none + all)).abs() < 1e-9 * half.abs().max(1.0),
            "{half} {none} {all}"
        );
    }
}

/// Utterances that are too short for their target count as 0, in training and in evaluation.
#[test]
fn targets_that_do_not_fit_have_no_ctc_loss() {
    let mut model = model("ctc", DType::F32);
    let speech = waves("ctc", "train").swap_remove(0);
    let batch = MicroBatch {
        signals: vec![speech.clone(), vec![0.25; 5000], vec![], speech],
        tokens: vec![vec![3; 400], vec![4; 300], vec![1], vec![]],
        prompts: Vec::new(),
    };
    let mut gradients = Gradients::new(&model.parameters);
    let output = model.train_micro_batch(&batch, &quiet(), &mut gradients).unwrap();
    assert_eq!(output.losses[..3], [0.0; 3]);
    assert!(output.losses[3] > 0.0 && (output.loss - output.losses[3] / 4.0).abs() < 1e-9);
    assert!(
        gradients
            .iter()
            .all(|(_, gradient)| values(gradient).iter().all(|x| x.is_finite()))
    );
    assert_eq!(model.evaluate_loss(&batch).unwrap().losses[..3], [0.0; 3]);
    let unknown = MicroBatch {
        signals: batch.signals[..1].to_vec(),
        tokens: vec![vec![model.config.vocab_size as u32]],
        prompts: Vec::new(),
    };
    assert!(model.train_micro_batch(&unknown, &quiet(), &mut gradients).is_err());
    let found = model.transcribe(&[&[], &[0.0; 100]]).unwrap();
    assert!(found.iter().all(|hypothesis| hypothesis.ids.is_empty()));
}

/// Another tokenizer: rows of pieces that both have stay, in the outputs of every head.
#[test]
fn vocabularies_of_all_heads_change() {
    let other = opened("hybrid");
    let tokenizer = Tokenizer::from_bytes(other.tokenizer.as_deref().unwrap()).unwrap();
    for (set, weight) in [
        ("ctc", "decoder.decoder_layers.0.weight"),
        ("rnnt", "joint.joint_net.2.weight"),
    ] {
        let before = opened(set);
        let old = Tokenizer::from_bytes(before.tokenizer.as_deref().unwrap()).unwrap();
        let (changed, change) = opened(set).with_tokenizer(&tokenizer, NewPieces::Mean, 3).unwrap();
        assert!(change.is_some_and(|change| change.kept() > 10));
        let config = ModelConfig::from_nemo_yaml(&changed.config_yaml).unwrap();
        assert_eq!(config.vocab_size, tokenizer.vocabulary_size());
        assert_eq!(config.labels, tokenizer.pieces());
        let rows = |model: &OpenModel| {
            let entry = model.tensors.iter().find(|entry| entry.name == weight).unwrap();
            entry.load().unwrap().flatten_from(1).unwrap()
        };
        let (new_rows, old_rows) = (rows(&changed), rows(&before));
        assert_eq!(new_rows.dim(0).unwrap(), tokenizer.vocabulary_size() + 1);
        let row = |rows: &Tensor, at: usize| values(&rows.get(at).unwrap());
        for (id, piece) in tokenizer.pieces().iter().enumerate() {
            if let Some(old) = old.id(piece) {
                assert_eq!(row(&new_rows, id), row(&old_rows, old as usize), "{set} {piece}");
            }
        }
        let blank = |rows: &Tensor| row(rows, rows.dim(0).unwrap() - 1);
        assert_eq!(blank(&new_rows), blank(&old_rows));
        let mut model = TdtModel::from_stored(changed.load().unwrap(), config, DType::F32, &Device::Cpu).unwrap();
        let batch = MicroBatch {
            signals: waves(set, "train")[..1].to_vec(),
            tokens: vec![vec![1, 2]],
            prompts: Vec::new(),
        };
        let mut gradients = Gradients::new(&model.parameters);
        let output = model.train_micro_batch(&batch, &quiet(), &mut gradients).unwrap();
        assert!(output.loss.is_finite() && output.loss > 0.0);
    }
}

/// A network whose blank has a larger bias says less, or nothing; a penalty of that size on blank gives what it said before.
#[test]
fn a_penalty_on_blank_undoes_a_bias_of_blank() {
    const BIAS: f64 = 16.0;
    let cases = [
        ("hybrid", HeadKind::Transducer, "joint.joint_net.2.bias"),
        ("rnnt", HeadKind::Transducer, "joint.joint_net.2.bias"),
        ("hybrid", HeadKind::Ctc, "ctc_decoder.decoder_layers.0.bias"),
    ];
    for (set, head, bias) in cases {
        let mut model = model(set, DType::F32);
        let settings = |blank_penalty: f64| DecodingSettings {
            head: Some(head),
            blank_penalty,
            ..DecodingSettings::default()
        };
        let signals = waves(set, "eval");
        let signals = slices(&signals);
        let whole = model.transcribe_with(&signals, &settings(0.0), None).unwrap();
        assert!(whole.iter().any(|found| !found.ids.is_empty()), "{set}");
        let id = model.parameters.id(bias).unwrap();
        let mut with_bias: Vec<f32> = model.parameters.get(id).to_vec1().unwrap();
        with_bias[model.config.vocab_size] += BIAS as f32;
        let length = with_bias.len();
        let with_bias = Tensor::from_vec(with_bias, length, &Device::Cpu).unwrap();
        model.parameters.set(id, with_bias).unwrap();
        let stuck = model.transcribe_with(&signals, &settings(0.0), None).unwrap();
        let tokens = |found: &[Hypothesis]| found.iter().map(|found| found.ids.len()).sum::<usize>();
        assert!(tokens(&stuck) < tokens(&whole), "{set}");
        let penalised = model.transcribe_with(&signals, &settings(BIAS), None).unwrap();
        for (found, expected) in penalised.iter().zip(&whole) {
            assert_eq!(
                (&found.ids, &found.frames),
                (&expected.ids, &expected.frames),
                "{set} {head:?}"
            );
            assert_eq!(found.durations, expected.durations);
            // So are the frames of blanks.
            assert_eq!(expected.blanks.is_empty(), head == HeadKind::Ctc, "{set}");
            assert_eq!(found.blanks.len(), expected.blanks.len(), "{set}");
            for (found, expected) in found.blanks.iter().zip(&expected.blanks) {
                assert_eq!(found.frame, expected.frame, "{set}");
                assert!(
                    (found.lead - expected.lead).abs() < 1e-3 && found.lead >= 0.0,
                    "{set}: {found:?}"
                );
            }
        }
    }
}

/// In the third context of the streaming model, as a list of this one alone. Drawn from the list, each context comes as often as its
/// probability says, and parts of a micro-batch have the same one.
#[test]
fn a_training_step_of_a_streaming_model_has_nemos_losses_and_all_gradients() {
    let expected = tensors("streaming", "train_step.safetensors");
    let facts = json("streaming", "train_step.json");
    let stored = opened("streaming");
    let mut config = ModelConfig::from_nemo_yaml(&stored.config_yaml).unwrap();
    let [left, right] = numbers(&facts["att_context_size"])[..] else {
        panic!("no context");
    };
    let context = ChunkContext::limited(left as usize, right as usize);
    config.encoder.check_context(context).unwrap();
    let all = config.encoder.causal.contexts.clone();
    for dtype in [DType::F64, DType::F32] {
        config.encoder.causal.contexts = vec![context];
        let opened = opened("streaming");
        let mut model = TdtModel::from_open(opened, config.clone(), dtype, dtype, &Device::Cpu).unwrap();
        let mut gradients = Gradients::new(&model.parameters);
        let output = model
            .train_micro_batch(&batch("streaming"), &quiet(), &mut gradients)
            .unwrap();
        assert_eq!(output.frames, golden::lengths(&expected["enc_len"]));
        for (found, key) in [(output.loss, "rnnt"), (output.ctc_loss.unwrap(), "ctc")] {
            let exact = facts["f64"][key].as_f64().unwrap();
            assert!((found - exact).abs() < 1e-5 * exact, "{dtype:?} {key}: {found} {exact}");
        }
        compare_gradients(&format!("streaming {dtype:?}"), &model, &gradients, (&expected, &facts));
    }
    // The context that is drawn is the one that is trained, and the seed alone decides.
    config.encoder.causal.contexts = all.clone();
    config.encoder.causal.probabilities = vec![0.0; all.len()];
    config.encoder.causal.probabilities[all.len() - 1] = 1.0;
    let loss = |config: &ModelConfig, seed: u64| {
        let opened = self::opened("streaming");
        let mut model = TdtModel::from_open(opened, config.clone(), DType::F64, DType::F64, &Device::Cpu).unwrap();
        let mut gradients = Gradients::new(&model.parameters);
        let options = TrainOptions { seed, ..quiet() };
        let output = model.train_micro_batch(&batch("streaming"), &options, &mut gradients);
        output.unwrap().loss
    };
    let last = loss(&config, 1);
    assert_eq!(last, loss(&config, 2));
    config.encoder.causal.probabilities = Vec::new();
    let drawn: Vec<f64> = (0..12).map(|seed| loss(&config, seed)).collect();
    assert!(drawn.contains(&last) && drawn.iter().any(|other| *other != last));
    assert_eq!(drawn[..4], (0..4).map(|seed| loss(&config, seed)).collect::<Vec<_>>());
    config.encoder.causal.contexts = vec![all[all.len() - 1]];
    assert_eq!(last, loss(&config, 3));
    // Contexts without a limit are drawn among others.
    let no_limit = [(None, Some(1)), (None, None), (Some(2), None)].map(|(left, right)| ChunkContext { left, right });
    let each = [all[0], no_limit[0], no_limit[1], no_limit[2]].map(|context| {
        config.encoder.causal.contexts = vec![context];
        loss(&config, 1)
    });
    config.encoder.causal.contexts = vec![all[0], no_limit[0], no_limit[1], no_limit[2]];
    let drawn: Vec<f64> = (0..16).map(|seed| loss(&config, seed)).collect();
    for (index, one) in each.iter().enumerate() {
        assert!(drawn.contains(one) && !each[..index].contains(one), "{index}");
    }
    assert!(drawn.iter().all(|loss| each.contains(loss)));
}
