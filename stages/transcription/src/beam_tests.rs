//! Beam search and fusion against NeMo's, with real recordings.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device};
use flow_kernels::threads::install;
use flow_model::decoding::{BlankScore, DecodingOptions, DecodingSettings, Hypothesis, Pruning};
use flow_model::fusion::{BoostingRules, Fusion, Phrase, boosting_tree, parse_arpa};
use flow_model::heads::HeadKind;
use flow_model::model::TdtModel;
use flow_nn::tensor_files::read_packed;
use flow_nn::testing::unpacked_copy;
use flow_storage::Storage;
use serde_json::Value;

use crate::Word;
use crate::decoding_request::DecodingRequest;
use crate::recognizer::Recognizer;
use crate::test_data;

/// NeMo's own scores differ by 3e-5 between float32 and float64.
const TOLERANCE: f64 = 3e-4;

fn load(path: &Path) -> TdtModel {
    TdtModel::load(path, DType::F32, &Device::Cpu).unwrap()
}

fn model() -> TdtModel {
    load(&test_data::bundled_model())
}

fn fusion(config: &Value, golden: &Value, vocabulary: usize) -> Fusion {
    let mut fusion = Fusion::default();
    if config.get("ngram_lm_model").is_some() {
        let arpa = read_packed(&test_data::transcription("lm.arpa"), 1).unwrap();
        let model = parse_arpa(&arpa[..], vocabulary).unwrap();
        fusion
            .add(Arc::new(model), golden["alpha_lm"].as_f64().unwrap())
            .unwrap();
    }
    if config.get("boosting_tree").is_some() {
        let phrases = test_data::json(&test_data::transcription("boosting.json"))["phrase_ids"].clone();
        let phrases: Vec<Vec<u32>> = serde_json::from_value(phrases).unwrap();
        let phrases: Vec<Phrase> = phrases
            .into_iter()
            .map(|tokens| Phrase {
                tokens,
                context_score: None,
            })
            .collect();
        let tree = boosting_tree(&phrases, &BoostingRules::default(), vocabulary).unwrap();
        fusion
            .add(Arc::new(tree), golden["alpha_boost"].as_f64().unwrap())
            .unwrap();
    }
    fusion
}

fn settings(config: &Value, golden: &Value, vocabulary: usize) -> DecodingSettings {
    DecodingSettings {
        head: None,
        beam: config["beam_size"].as_u64().unwrap_or(0) as usize,
        score_norm: config["score_norm"].as_bool().unwrap_or(true),
        fusion: fusion(config, golden, vocabulary),
        pruning: match config["pruning_mode"].as_str() {
            Some("early") => Pruning::Early,
            _ => Pruning::Late,
        },
        blank_score: match config["blank_lm_score_mode"].as_str() {
            Some("no_score") => BlankScore::NoScore,
            _ => BlankScore::LmWeightedFull,
        },
        ..DecodingSettings::default()
    }
}

fn check(found: &[Hypothesis], expected: &Value, beam: bool, what: &str) {
    let expected = expected.as_array().unwrap();
    assert_eq!(found.len(), expected.len(), "{what}: number of hypotheses");
    for (rank, (found, expected)) in found.iter().zip(expected).enumerate() {
        let numbers = |key: &str| -> Vec<u32> { serde_json::from_value(expected[key].clone()).unwrap() };
        assert_eq!(found.ids, numbers("ids"), "{what}, rank {rank}");
        assert_eq!(found.frames, numbers("frames"), "{what}, rank {rank}");
        assert_eq!(found.durations, numbers("durations"), "{what}, rank {rank}");
        // Greedy scores are another measure in NeMo.
        let score = expected["score"].as_f64().unwrap();
        assert!(
            !beam || (found.score - score).abs() < TOLERANCE,
            "{what}, rank {rank}: {} is not {score}",
            found.score
        );
    }
}

#[test]
fn hypotheses_are_nemos() {
    let golden = test_data::json(&test_data::transcription("beam.json"));
    let recordings = golden["recordings"].as_array().unwrap().iter();
    let signals: Vec<Option<Vec<f32>>> = recordings
        .map(|recording| {
            let [file, id] = ["file", "id"].map(|key| recording[key].as_str().unwrap());
            test_data::golden_recording(&Storage::default(), file, id)
        })
        .collect();
    assert!(!signals.is_empty());
    let mut model = load(&test_data::golden_model());
    let vocabulary = model.config.vocab_size;
    let (mut beams, mut greedy) = (0, 0);
    for (name, config) in golden["configs"].as_object().unwrap() {
        let beam = match config["strategy"].as_str().unwrap() {
            "malsd_batch" => true,
            "greedy_batch" => false,
            _ => continue,
        };
        // Not what NeMo could not do.
        let Some(expected) = golden["nbest"][name].as_array() else {
            continue;
        };
        assert_eq!(expected.len(), signals.len(), "{name}");
        model.decoding = settings(config, &golden, vocabulary);
        for (number, (signal, expected)) in signals.iter().zip(expected).enumerate() {
            let Some(signal) = signal else { continue };
            let signal = [&signal[..]];
            let found = if beam {
                beams += 1;
                install(|| model.transcribe_n_best(&signal)).unwrap().remove(0)
            } else {
                greedy += 1;
                install(|| model.transcribe(&signal)).unwrap()
            };
            check(&found, expected, beam, &format!("{name}, recording {number}"));
        }
    }
    println!("{beams} beam searches and {greedy} greedy searches are compared");
    if test_data::is_bundled() {
        assert!(beams >= 13 * signals.len() && greedy >= 4 * signals.len());
    }
    assert!(beams + greedy > 0 || signals.iter().all(Option::is_none));
}

/// Three recordings of different lengths.
fn signals() -> Vec<Vec<f32>> {
    let hindi = |name| flow_audio::decode::decode(&test_data::hindi(&Storage::default(), name), 100.0).unwrap();
    let (first, second) = (hindi("rec_hi_0001_000.flac"), hindi("rec_hi_0008_001.flac"));
    let part = first[..first.len() / 2].to_vec();
    vec![first, part, second]
}

#[test]
fn a_batch_gives_what_each_recording_gives_alone() {
    let signals = signals();
    let mut model = model();
    model.decoding.beam = 4;
    let all: Vec<&[f32]> = signals.iter().map(Vec::as_slice).collect();
    let together = install(|| model.transcribe_n_best(&all)).unwrap();
    assert_eq!(together.len(), all.len());
    for (signal, together) in all.iter().zip(&together) {
        let alone = install(|| model.transcribe_n_best(&[signal])).unwrap().remove(0);
        assert!(!alone.is_empty() && alone.len() <= 4);
        assert_eq!(alone.len(), together.len());
        for (alone, together) in alone.iter().zip(together) {
            assert_eq!(
                (&alone.ids, &alone.frames, &alone.text),
                (&together.ids, &together.frames, &together.text)
            );
            assert!((alone.score - together.score).abs() < TOLERANCE);
        }
    }
}

#[test]
fn a_beam_of_one_is_greedy_search_and_observers_see_each_token() {
    let signals = signals();
    let all: Vec<&[f32]> = signals.iter().map(Vec::as_slice).collect();
    let mut model = model();
    let greedy = install(|| model.transcribe(&all)).unwrap();
    let one = install(|| model.transcribe_n_best(&all)).unwrap();
    for (greedy, one) in greedy.iter().zip(&one) {
        assert_eq!(one.len(), 1);
        assert_eq!(
            (&greedy.ids, &greedy.frames, &greedy.durations),
            (&one[0].ids, &one[0].frames, &one[0].durations)
        );
        assert!(!greedy.ids.is_empty());
    }
    model.decoding.beam = 3;
    let best = install(|| model.transcribe_n_best(&all)).unwrap();
    let mut seen: Vec<Vec<Vec<f32>>> = vec![Vec::new(); all.len()];
    let mut observe = |utterance: usize, _: u32, logits: &[f32]| seen[utterance].push(logits.to_vec());
    let found = install(|| model.transcribe_with(&all, &model.decoding, Some(&mut observe))).unwrap();
    for ((found, best), seen) in found.iter().zip(&best).zip(&seen) {
        assert_eq!(found, &best[0]);
        assert_eq!(found.ids.len(), seen.len());
        for (&id, logits) in found.ids.iter().zip(seen) {
            assert_eq!(logits.len(), model.config.vocab_size + 1);
            // Not always the largest, but never far from it.
            let better = logits.iter().filter(|&&logit| logit > logits[id as usize]).count();
            assert!(better < 3, "{better} outputs are better than token {id}");
        }
    }
}

#[test]
fn models_of_other_vocabularies_are_refused() {
    let signals = signals();
    let mut model = model();
    let phrase = Phrase {
        tokens: vec![1],
        context_score: None,
    };
    let tree = boosting_tree(&[phrase], &BoostingRules::default(), 7).unwrap();
    let vocabulary = model.config.vocab_size;
    model.decoding.fusion.add(Arc::new(tree), 1.0).unwrap();
    for beam in [0, 2] {
        model.decoding.beam = beam;
        let error = model.transcribe(&[&signals[0]]).unwrap_err().to_string();
        assert!(
            error.contains(&format!("does not fit a vocabulary of {vocabulary}")),
            "{error}"
        );
    }
}

/// Phrases of a request, and a beam, where the CTC head of a model with two decodes: confidences are those of the model.
#[test]
fn a_ctc_head_takes_phrases_and_a_beam() {
    let golden = test_data::root().join("tests/data/golden/hybrid");
    let place = tempfile::tempdir().unwrap();
    let model = unpacked_copy(&golden.join("model.nemo"), place.path()).unwrap();
    let mut recognizer = Recognizer::load(&model, DType::F32, &Device::Cpu).unwrap();
    let wave = std::fs::read_dir(golden.join("audio"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .min()
        .unwrap();
    let signal = flow_audio::decode::decode(&std::fs::read(wave).unwrap(), 100.0).unwrap();
    let request = |boost_weight: f64| DecodingRequest {
        phrases: vec!["night".into()],
        boost_weight: Some(boost_weight),
        ..DecodingRequest::default()
    };
    for beam in [0, 4] {
        let options = DecodingOptions {
            beam,
            ..DecodingOptions::default().with_head(Some(HeadKind::Ctc))
        };
        recognizer = recognizer.with_decoding(&options).unwrap();
        let decode = |boost_weight: f64| {
            let decoding = recognizer.decoding_for(&request(boost_weight)).unwrap();
            assert!(decoding.notes.is_empty(), "{:?}", decoding.notes);
            let found = install(|| recognizer.decode_again_where((&[&signal], &[]), &|_| false, &decoding.settings));
            found.unwrap().remove(0).words
        };
        let text = |words: &[Word]| {
            words
                .iter()
                .map(|word| word.word.as_str())
                .collect::<Vec<_>>()
                .join(" ")
        };
        let (plain, boosted) = (decode(0.0), decode(100.0));
        // Where speech is told, phrases are boosted there alone.
        let in_speech = |speech: &[Range<f64>]| {
            let decoding = recognizer.decoding_for(&request(100.0)).unwrap();
            let speech = [speech.to_vec()];
            let found =
                install(|| recognizer.decode_again_where((&[&signal], &speech), &|_| false, &decoding.settings));
            found.unwrap().remove(0).words
        };
        assert!(!text(&in_speech(&[])).contains("night"));
        assert_eq!(in_speech(std::slice::from_ref(&(0.0..100.0))), boosted);
        assert!(!plain.is_empty() && !text(&plain).contains("night"));
        assert!(text(&boosted).contains("night"), "{}", text(&boosted));
        for words in [plain, boosted] {
            assert!(
                words
                    .iter()
                    .all(|word| (-1e-6..=1.0 + 1e-6).contains(&word.confidence.unwrap()))
            );
            assert!(words.iter().all(|word| word.start <= word.end));
            assert!(words.windows(2).all(|pair| pair[0].start <= pair[1].start));
        }
    }
}
