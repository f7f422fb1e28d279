//! How sure a model was of frames, tokens and words, by NeMo's measures (`asr_confidence_utils.py`; Laptev and Ginsburg,
//! "Fast entropy-based methods of word-level confidence estimation for end-to-end automatic speech recognition").
//!
//! All measures are 1 where one output has all the probability, and fall to 0 where all outputs have the same.

use std::ops::Range;
use std::str::FromStr;

use flow_model::tokenizer::Tokenizer;

use crate::{Result, TranscriptionError};

/// Which entropy the probabilities are measured by. All are Shannon's where `alpha` is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entropy {
    Gibbs,
    Tsallis,
    Renyi,
}

/// How an entropy between 0 and its maximum becomes a confidence between 1 and 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Normalization {
    /// 1 - entropy / maximum.
    Linear,
    /// The same of exponentials of the negative entropies: spreads out what is nearly certain.
    Exponential,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// The largest probability.
    MaxProbability,
    Entropy(Entropy, Normalization),
}

/// A measure and the power `alpha` of the probabilities that it is taken of: below 1, small probabilities count for more.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConfidenceMethod {
    measure: Measure,
    alpha: f64,
}

impl ConfidenceMethod {
    /// An error if `alpha` is not a number above 0.
    pub fn new(measure: Measure, alpha: f64) -> Result<Self> {
        if alpha.is_finite() && alpha > 0.0 {
            return Ok(Self { measure, alpha });
        }
        let why = format!("{alpha} is not a number above 0");
        Err(TranscriptionError::setting("confidence_alpha", why))
    }

    /// The confidence of one distribution: `log_probabilities` are a log-softmax, `outputs` the number that the measure
    /// is normalised by: those of tokens with blank, for durations too, as NeMo has it.
    ///
    /// 0 where the distribution has what is no number. For fewer probabilities than `outputs`, 0 is not reached.
    pub fn confidence(&self, log_probabilities: &[f64], outputs: usize) -> f64 {
        let (alpha, outputs) = (self.alpha, outputs as f64);
        // Sums over the outputs; a probability of 0 adds nothing.
        let sum = |term: &dyn Fn(f64) -> f64| -> f64 {
            let possible = log_probabilities.iter().filter(|&&log| log != f64::NEG_INFINITY);
            possible.map(|&log| term(log)).sum()
        };
        let powers = || sum(&|log| (log * alpha).exp());
        let weighted_logs = || sum(&|log| (log * alpha).exp() * log);
        let confidence = match self.measure {
            Measure::MaxProbability => {
                let largest = log_probabilities.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let scale = outputs.powf(alpha);
                ((largest * alpha).exp() * scale - 1.0) / (scale - 1.0)
            }
            Measure::Entropy(_, Normalization::Linear) if alpha == 1.0 => 1.0 + weighted_logs() / outputs.ln(),
            Measure::Entropy(_, Normalization::Exponential) if alpha == 1.0 => {
                (weighted_logs().exp() * outputs - 1.0) / (outputs - 1.0)
            }
            Measure::Entropy(Entropy::Gibbs, Normalization::Linear) => {
                1.0 + weighted_logs() / (outputs.ln() * outputs.powf(1.0 - alpha))
            }
            Measure::Entropy(Entropy::Gibbs, Normalization::Exponential) => {
                let least = outputs.powf(-alpha * outputs.powf(1.0 - alpha));
                ((weighted_logs() * alpha).exp() - least) / (1.0 - least)
            }
            Measure::Entropy(Entropy::Tsallis, Normalization::Linear) => {
                1.0 + (1.0 - powers()) / (outputs.powf(1.0 - alpha) - 1.0)
            }
            Measure::Entropy(Entropy::Tsallis, Normalization::Exponential) => {
                let least = ((1.0 - outputs.powf(1.0 - alpha)) / (1.0 - alpha)).exp();
                (((1.0 - powers()) / (1.0 - alpha)).exp() - least) / (1.0 - least)
            }
            Measure::Entropy(Entropy::Renyi, Normalization::Linear) => {
                1.0 + powers().ln() / ((alpha - 1.0) * outputs.ln())
            }
            Measure::Entropy(Entropy::Renyi, Normalization::Exponential) => {
                (powers().powf(1.0 / (alpha - 1.0)) * outputs - 1.0) / (outputs - 1.0)
            }
        };
        if confidence.is_finite() && !log_probabilities.iter().any(|log| log.is_nan()) {
            confidence
        } else {
            0.0
        }
    }
}

/// NeMo's default: Tsallis entropy with alpha 0.33, normalised exponentially.
impl Default for ConfidenceMethod {
    fn default() -> Self {
        Self {
            measure: Measure::Entropy(Entropy::Tsallis, Normalization::Exponential),
            alpha: 0.33,
        }
    }
}

/// Names as NeMo has them: `max_prob`, `entropy_gibbs_lin`, `entropy_tsallis_exp`, ...
impl FromStr for Measure {
    type Err = TranscriptionError;

    fn from_str(name: &str) -> Result<Self> {
        use Entropy::{Gibbs, Renyi, Tsallis};
        use Normalization::{Exponential, Linear};
        let measures = [
            ("max_prob", Self::MaxProbability),
            ("entropy_gibbs_lin", Self::Entropy(Gibbs, Linear)),
            ("entropy_gibbs_exp", Self::Entropy(Gibbs, Exponential)),
            ("entropy_tsallis_lin", Self::Entropy(Tsallis, Linear)),
            ("entropy_tsallis_exp", Self::Entropy(Tsallis, Exponential)),
            ("entropy_renyi_lin", Self::Entropy(Renyi, Linear)),
            ("entropy_renyi_exp", Self::Entropy(Renyi, Exponential)),
        ];
        let known = measures.iter().find(|(known, _)| *known == name);
        known.map(|&(_, measure)| measure).ok_or_else(|| {
            let names = measures.map(|(name, _)| name).join(", ");
            TranscriptionError::setting("confidence_measure", format!("`{name}` is none of {names}"))
        })
    }
}

/// How the confidences of parts become that of the whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Aggregation {
    Mean,
    #[default]
    Min,
    Product,
}

impl Aggregation {
    /// None of nothing.
    pub fn of(self, confidences: &[f64]) -> Option<f64> {
        let last = confidences.len().checked_sub(1)?;
        Some(match self {
            Self::Mean => confidences.iter().sum::<f64>() / (last + 1) as f64,
            Self::Min => confidences.iter().copied().fold(f64::INFINITY, f64::min),
            Self::Product => confidences.iter().product(),
        })
    }
}

/// Names as NeMo has them: `mean`, `min`, `prod`.
impl FromStr for Aggregation {
    type Err = TranscriptionError;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "mean" => Ok(Self::Mean),
            "min" => Ok(Self::Min),
            "prod" => Ok(Self::Product),
            _ => Err(TranscriptionError::setting(
                "confidence_aggregation",
                format!("`{name}` is none of mean, min, prod"),
            )),
        }
    }
}

/// The confidence of a step of decoding: an output of the joint that was looked at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepConfidence {
    /// Whether blank was found, not a token.
    pub blank: bool,
    pub token: f64,
    /// Of the duration of TDT, where that is asked for.
    pub duration: Option<f64>,
}

/// The confidence of a step that found `label`, from the joint's outputs: first those of `tokens` tokens and blank, the
/// last of them, then those of durations, of which no softmax is taken together. `durations`: whether these count.
///
/// An error if the outputs are fewer than the tokens.
pub fn step_confidence(
    method: &ConfidenceMethod,
    logits: &[f32],
    tokens: usize,
    label: usize,
    durations: bool,
) -> Result<StepConfidence> {
    let Some((token_logits, duration_logits)) = logits.split_at_checked(tokens).filter(|_| tokens > 1) else {
        let why = format!("{} outputs of the joint are not those of {tokens} tokens", logits.len());
        return Err(TranscriptionError::Input(why));
    };
    let of = |logits: &[f32]| method.confidence(&log_softmax(logits), tokens);
    Ok(StepConfidence {
        blank: label + 1 == tokens,
        token: of(token_logits),
        duration: (durations && !duration_logits.is_empty()).then(|| of(duration_logits)),
    })
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let logits = logits.iter().map(|&logit| f64::from(logit));
    let largest = logits.clone().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.clone().map(|logit| (logit - largest).exp()).sum();
    logits.map(|logit| logit - largest - sum.ln()).collect()
}

/// The confidence of each token, in order. The confidences of a step's token and duration are aggregated first. Unless
/// blanks are excluded, those that follow a token are aggregated with it; blanks before the first token never count.
pub fn token_confidences(steps: &[StepConfidence], aggregation: Aggregation, exclude_blank: bool) -> Vec<f64> {
    let mut tokens: Vec<Vec<f64>> = Vec::new();
    for step in steps {
        let parts: Vec<f64> = std::iter::once(step.token).chain(step.duration).collect();
        let confidence = aggregation.of(&parts).unwrap_or(step.token);
        if !step.blank {
            tokens.push(vec![confidence]);
        } else if !exclude_blank && let Some(token) = tokens.last_mut() {
            token.push(confidence);
        }
    }
    tokens.iter().filter_map(|parts| aggregation.of(parts)).collect()
}

/// The confidence of each word of [`word_tokens`] from those of the tokens.
///
/// An error if a word has tokens that there are no confidences of.
pub fn word_confidences(tokens: &[f64], words: &[Range<usize>], aggregation: Aggregation) -> Result<Vec<f64>> {
    let word = |word: &Range<usize>| tokens.get(word.clone()).and_then(|tokens| aggregation.of(tokens));
    let missing = || TranscriptionError::Input(format!("words {words:?} do not fit {} confidences", tokens.len()));
    words.iter().map(|range| word(range).ok_or_else(missing)).collect()
}

/// Which tokens make which word, by NeMo's rule for confidences of words: a word begins at every token whose piece is
/// not its own text (it begins with the mark of a space), and at and after an unknown one. A lone mark of a space
/// before such a token makes no word. Unlike in time stamps, marks of punctuation get no rule of their own.
///
/// An error if an id is not in the vocabulary.
pub fn word_tokens(tokenizer: &Tokenizer, ids: &[u32]) -> Result<Vec<Range<usize>>> {
    let mut words = Vec::new();
    let mut start = 0;
    let (mut after_unknown, mut after_mark) = (false, false);
    for (index, &id) in ids.iter().enumerate() {
        let text = tokenizer.decode(&[id])?;
        let piece = tokenizer.piece(id).unwrap_or_default();
        if (piece != text || after_unknown) && index > start {
            if !after_mark {
                words.push(start..index);
            }
            start = index;
        }
        after_unknown = id == tokenizer.unknown_id();
        after_mark = piece == "\u{2581}";
    }
    if start < ids.len() && !after_mark {
        words.push(start..ids.len());
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use flow_model::checkpoint::OpenModel;
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
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
        let model = OpenModel::open(&test_data::root().join("configs/models/small.nemo")).unwrap();
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
            said.starts_with("setting `confidence_measure`: `entropy` is none of max_prob, "),
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
}
