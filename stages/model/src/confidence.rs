//! Confidences of frames, tokens and words, by NeMo's measures (`asr_confidence_utils.py`; Laptev and Ginsburg, "Fast
//! entropy-based methods of word-level confidence estimation for end-to-end automatic speech recognition").
//!
//! All measures are 1 where one output has probability 1, and 0 where all outputs have equal probability.

use std::ops::Range;
use std::str::FromStr;

use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// The entropy that is used. All are Shannon's where `alpha` is 1.
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
    /// The same with exponentials of the negative entropies, which spreads values near 1.
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
        Err(Error::Input(format!("confidence_alpha: {why}")))
    }

    /// The confidence of one distribution: `log_probabilities` are a log-softmax, `outputs` the number that the measure
    /// is normalised by: those of tokens with blank, for durations too, as NeMo has it.
    ///
    /// 0 where the distribution has a NaN. For fewer probabilities than `outputs`, 0 is not reached.
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
    type Err = Error;

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
            Error::Input(format!("confidence_measure: `{name}` is none of {names}"))
        })
    }
}

/// How confidences are aggregated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Aggregation {
    Mean,
    #[default]
    Min,
    Product,
}

impl Aggregation {
    /// None for an empty list.
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
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "mean" => Ok(Self::Mean),
            "min" => Ok(Self::Min),
            "prod" => Ok(Self::Product),
            _ => Err(Error::Input(format!(
                "confidence_aggregation: `{name}` is none of mean, min, prod"
            ))),
        }
    }
}

/// The confidence of a step of decoding (one evaluated output of the joint network).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepConfidence {
    /// Whether blank was found, not a token.
    pub blank: bool,
    pub token: f64,
    /// That of TDT's duration, where requested.
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
        return Err(Error::Input(why));
    };
    let of = |logits: &[f32]| method.confidence(&log_softmax(logits), tokens);
    Ok(StepConfidence {
        blank: label + 1 == tokens,
        token: of(token_logits),
        duration: (durations && !duration_logits.is_empty()).then(|| of(duration_logits)),
    })
}

/// Logarithms of the probabilities that a softmax makes of these outputs.
pub fn log_softmax(logits: &[f32]) -> Vec<f64> {
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
    let missing = || Error::Input(format!("words {words:?} do not fit {} confidences", tokens.len()));
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
