use std::ops::Range;

use flow_model::checkpoint::OpenModel;
use flow_model::confidence::*;
use flow_model::tokenizer::Tokenizer;
use proptest::prelude::*;
use serde_json::Value;

use crate::test_data;

/// Confidences of NeMo, computed in float32 and stored with seven digits: within 3e-6 of float64, products
/// of some numbers included.
const TOLERANCE: f64 = 3e-5;

struct Golden {
    tokens: usize,
    recordings: Vec<Value>,
}

fn golden() -> Golden {
    let file = test_data::json(&test_data::transcription("confidence.json"));
    let recordings = file["recordings"]
        .as_object()
        .unwrap()
        .values()
        .cloned()
        .collect::<Vec<_>>();
    assert!(!recordings.is_empty());
    Golden {
        tokens: file["vocabulary_with_blank"].as_u64().unwrap() as usize,
        recordings,
    }
}

fn labels(recording: &Value) -> Vec<usize> {
    let steps: Vec<Vec<usize>> = serde_json::from_value(recording["steps"].clone()).unwrap();
    steps.concat()
}

fn methods(recording: &Value) -> Vec<(ConfidenceMethod, &str, &Value)> {
    let methods = recording["methods"].as_object().unwrap().iter();
    let methods = methods.map(|(name, golden)| {
        let (measure, alpha) = name.rsplit_once('_').unwrap();
        let method = ConfidenceMethod::new(measure.parse().unwrap(), alpha.parse().unwrap()).unwrap();
        (method, name.as_str(), golden)
    });
    methods.collect()
}

/// Token and duration confidence of each step.
fn steps(method: &Value, labels: &[usize], tokens: usize) -> Vec<StepConfidence> {
    let frames: Vec<Vec<(f64, f64)>> = serde_json::from_value(method["frame"]["dur"].clone()).unwrap();
    let alone: Vec<Vec<f64>> = serde_json::from_value(method["frame"]["nodur"].clone()).unwrap();
    let steps: Vec<StepConfidence> = frames
        .concat()
        .into_iter()
        .zip(labels)
        .map(|((token, duration), &label)| StepConfidence {
            blank: label + 1 == tokens,
            token,
            duration: Some(duration),
        })
        .collect();
    assert_eq!(steps.len(), labels.len());
    assert!(
        steps
            .iter()
            .zip(alone.concat())
            .all(|(step, token)| step.token == token)
    );
    steps
}

fn check(found: &[f64], golden: &Value, what: &str) {
    let expected: Vec<f64> = serde_json::from_value(golden.clone()).unwrap();
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(&expected) {
        assert!(
            (found - expected).abs() < TOLERANCE,
            "{what}: {found} is not {expected}"
        );
    }
}

#[test]
fn confidences_of_frames_are_nemos() {
    let Golden { tokens, recordings } = golden();
    let path = test_data::transcription("confidence_logits.safetensors");
    let tensors = test_data::tensors(&path, |name| name == "logits");
    let (_, shape, logits) = &tensors[0];
    // The outputs are those of one of the recordings: of that with as many steps and the same best outputs.
    let rows: Vec<&[f32]> = logits.chunks_exact(shape[1]).collect();
    let best = |row: &&[f32]| (0..tokens).fold(0, |best, next| if row[next] > row[best] { next } else { best });
    let found: Vec<usize> = rows.iter().map(best).collect();
    let recording = recordings.iter().find(|recording| labels(recording) == found);
    let recording = recording.expect("the recording of the outputs");
    for (method, name, golden) in methods(recording) {
        let expected = steps(golden, &found, tokens);
        for ((row, &label), expected) in rows.iter().zip(&found).zip(expected) {
            let step = step_confidence(&method, row, tokens, label, true).unwrap();
            assert_eq!(step.blank, expected.blank);
            assert!(
                (step.token - expected.token).abs() < TOLERANCE,
                "{name}: {step:?} is not {expected:?}"
            );
            let durations = (step.duration.unwrap(), expected.duration.unwrap());
            assert!(
                (durations.0 - durations.1).abs() < TOLERANCE,
                "{name}: {step:?} is not {expected:?}"
            );
            let alone = step_confidence(&method, row, tokens, label, false).unwrap();
            assert_eq!((alone.token, alone.duration), (step.token, None));
        }
    }
}

/// A setting reads `dur,exclude_blank,mean`.
#[test]
fn confidences_of_tokens_and_words_are_nemos() {
    let Golden { tokens, recordings } = golden();
    let model = OpenModel::open(&test_data::golden_model()).unwrap();
    let tokenizer = Tokenizer::from_bytes(model.tokenizer.as_deref().unwrap()).unwrap();
    for recording in &recordings {
        let ids: Vec<u32> = serde_json::from_value(recording["ids"].clone()).unwrap();
        let labels = labels(recording);
        assert_eq!(tokenizer.decode(&ids).unwrap(), recording["text"], "another tokenizer");
        let words = word_tokens(&tokenizer, &ids).unwrap();
        let texts: Vec<String> = words
            .iter()
            .map(|word| tokenizer.decode(&ids[word.clone()]).unwrap().trim().to_owned())
            .collect();
        assert_eq!(
            texts,
            serde_json::from_value::<Vec<String>>(recording["words"].clone()).unwrap()
        );
        for (_, name, golden) in methods(recording) {
            let steps = steps(golden, &labels, tokens);
            for (settings, expected) in golden["token"].as_object().unwrap() {
                let what = format!("{}: {name} {settings}", recording["id"]);
                let [durations, blanks, aggregation] = settings.split(',').collect::<Vec<_>>()[..] else {
                    panic!("{what}");
                };
                let mut steps = steps.clone();
                if durations == "nodur" {
                    steps.iter_mut().for_each(|step| step.duration = None);
                }
                let aggregation = aggregation.parse().unwrap();
                let found = token_confidences(&steps, aggregation, blanks == "exclude_blank");
                check(&found, expected, &what);
                let found = word_confidences(&found, &words, aggregation).unwrap();
                check(&found, &golden["word"][settings], &what);
            }
        }
    }
}

fn all_methods() -> Vec<ConfidenceMethod> {
    let names = [
        "max_prob",
        "entropy_gibbs_lin",
        "entropy_gibbs_exp",
        "entropy_tsallis_lin",
        "entropy_tsallis_exp",
        "entropy_renyi_lin",
        "entropy_renyi_exp",
    ];
    let methods = names
        .iter()
        .flat_map(|name| [0.33, 0.5, 1.0].map(|alpha| (name, alpha)));
    let methods = methods.map(|(name, alpha)| ConfidenceMethod::new(name.parse().unwrap(), alpha));
    methods.map(Result::unwrap).collect()
}

#[test]
fn certainty_is_1_and_ignorance_0() {
    for method in all_methods() {
        let mut certain = [f64::NEG_INFINITY; 50];
        certain[7] = 0.0;
        assert!((method.confidence(&certain, 50) - 1.0).abs() < 1e-9, "{method:?}");
        let even = [-(50f64.ln()); 50];
        assert!(method.confidence(&even, 50).abs() < 1e-9, "{method:?}");
        assert_eq!(method.confidence(&[f64::NAN; 50], 50), 0.0, "{method:?}");
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let method = ConfidenceMethod::default();
    assert!(step_confidence(&method, &[0.0; 4], 5, 0, true).is_err());
    assert!(step_confidence(&method, &[], 0, 0, true).is_err());
    assert_eq!(step_confidence(&method, &[f32::NAN; 4], 4, 0, true).unwrap().token, 0.0);
    assert!(word_confidences(&[0.5], &[Range { start: 0, end: 2 }], Aggregation::Min).is_err());
    assert!(word_confidences(&[0.5], &[Range { start: 1, end: 1 }], Aggregation::Min).is_err());
    for alpha in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(
            ConfidenceMethod::new(Measure::MaxProbability, alpha).is_err(),
            "{alpha}"
        );
    }
    let said = "entropy".parse::<Measure>().unwrap_err().to_string();
    assert!(
        said.starts_with("confidence_measure: `entropy` is none of max_prob, "),
        "{said}"
    );
    assert!("median".parse::<Aggregation>().is_err());
}

#[test]
fn blanks_count_with_the_token_before() {
    let step = |blank, token, duration| StepConfidence { blank, token, duration };
    let steps = [
        step(true, 0.1, None),
        step(false, 0.5, Some(0.25)),
        step(true, 0.75, None),
        step(false, 1.0, None),
    ];
    assert_eq!(token_confidences(&steps, Aggregation::Min, true), [0.25, 1.0]);
    assert_eq!(token_confidences(&steps, Aggregation::Product, false), [0.09375, 1.0]);
    assert_eq!(token_confidences(&steps, Aggregation::Mean, false), [0.5625, 1.0]);
    assert_eq!(token_confidences(&steps[..1], Aggregation::Mean, false), [0.0; 0]);
}

proptest! {
    #[test]
    fn confidences_are_finite(logits in prop::collection::vec(any::<f32>(), 2..40)) {
        for method in all_methods() {
            let step = step_confidence(&method, &logits, logits.len() - 1, 0, true).unwrap_or(StepConfidence {
                blank: false,
                token: 0.0,
                duration: None,
            });
            prop_assert!(step.token.is_finite() && step.duration.is_none_or(f64::is_finite));
        }
    }
}
