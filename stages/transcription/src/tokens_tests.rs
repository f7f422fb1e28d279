use flow_kernels::threads::install;
use flow_model::Precision;
use flow_model::model::TdtModel;
use flow_storage::Storage;
use proptest::prelude::*;

use super::*;
use crate::recognizer::{Heard, Recognizer};
use crate::test_data;

fn recognizer(precision: Precision) -> Recognizer {
    Recognizer::load_in(
        &test_data::bundled_model(),
        candle_core::DType::F32,
        precision,
        &candle_core::Device::Cpu,
    )
    .unwrap()
}

/// Two recordings of the bundled corpus.
fn recordings() -> [Vec<f32>; 2] {
    ["rec_hi_0001_000.flac", "rec_hi_0008_001.flac"]
        .map(|name| flow_audio::decode::decode(&test_data::hindi(&Storage::default(), name), 100.0).unwrap())
}

fn joined(heard: &Heard) -> String {
    let words: Vec<String> = heard
        .tokens
        .iter()
        .map(|tokens| String::from_utf8(tokens.iter().flat_map(|token| token.bytes.clone()).collect()).unwrap())
        .collect();
    words.join(" ")
}

#[test]
fn low_precision_has_log_probabilities_of_its_own_words() {
    for precision in [Precision::Bf16, Precision::Int8] {
        let recognizer = recognizer(precision);
        for samples in recordings() {
            let heard = recognizer.decode(&[&samples]).unwrap().remove(0);
            let words: Vec<&str> = heard.words.iter().map(|word| word.word.trim()).collect();
            assert_eq!(joined(&heard), words.join(" "), "{precision:?}");
            assert_eq!(heard.tokens.len(), words.len());
            assert!(heard.tokens.iter().flatten().all(|token| token.logprob <= 0.0));
            let certain = heard
                .tokens
                .iter()
                .flatten()
                .filter(|token| token.logprob > -0.5)
                .count();
            assert!(certain * 2 > heard.tokens.iter().flatten().count(), "{heard:?}");
        }
    }
}

/// With a beam, too, each token has the logits from which it was chosen.
#[test]
fn tokens_of_beams_have_their_own_scores() {
    let path = test_data::bundled_model();
    let mut model = TdtModel::load(&path, candle_core::DType::F32, &candle_core::Device::Cpu).unwrap();
    model.decoding.beam = 4;
    let method = ConfidenceMethod::default();
    for samples in recordings() {
        let mut seen = Vec::new();
        let mut observe = |_: usize, token: u32, logits: &[f32]| {
            seen.push((token, TokenScore::new(&method, token, logits, true).unwrap().logprob));
        };
        let found = install(|| model.transcribe_with(&[&samples], &model.decoding, Some(&mut observe))).unwrap();
        let ids: Vec<u32> = seen.iter().map(|(token, _)| *token).collect();
        assert_eq!(ids, found[0].ids);
        assert!(
            seen.iter().all(|(_, logprob)| *logprob <= 0.0 && *logprob > -20.0),
            "{seen:?}"
        );
    }
}

#[test]
fn probabilities_of_all_tokens_make_one_and_none_is_no_number() {
    let method = ConfidenceMethod::default();
    let logits: Vec<f32> = (0..1025u32).map(|i| ((i * 7919) % 101) as f32 / 9.0).collect();
    let scores = (0..logits.len() as u32).map(|token| TokenScore::new(&method, token, &logits, true).unwrap());
    let sum: f64 = scores.map(|score| score.logprob.exp()).sum();
    assert!((sum - 1.0).abs() < 1e-9);
    for logits in [[f32::NAN; 3], [f32::NEG_INFINITY, 0.0, 0.0], [f32::INFINITY; 3]] {
        assert!(TokenScore::new(&method, 0, &logits, true).unwrap().logprob.is_finite());
    }
    assert!(TokenScore::new(&method, 3, &[0.0; 3], true).is_err());
}

proptest! {
    #[test]
    fn tokens_make_the_words_of_any_text(ids in prop::collection::vec(0u32..1024, 1..30)) {
        let model = flow_model::checkpoint::OpenModel::open(&test_data::bundled_model()).unwrap();
        let tokenizer = Tokenizer::from_bytes(model.tokenizer.as_deref().unwrap()).unwrap();
        let scores = vec![TokenScore { confidence: 1.0, logprob: -0.5, is_first_choice: true }; ids.len()];
        let tokens = tokens_of_word(&tokenizer, &ids, &scores).unwrap();
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.bytes.clone()).collect();
        let text = tokenizer.decode(&ids).unwrap();
        prop_assert_eq!(String::from_utf8(bytes).unwrap(), text.trim_matches(' '));
        prop_assert_eq!(tokens.len(), ids.len());
    }
}
