//! Languages that training must not make worse, such as those that the first model knows and that are not trained on.

use std::collections::BTreeMap;

use flow_evaluation::wer::Scores;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::checkpoint::CheckpointRecord;
use crate::settings::TrainSettings;

/// What happens where error rates of the input `protect` rise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProtectSettings {
    /// By how much the word error rate of each language may be above that before training: 0.02 is two words of a hundred.
    pub max_rise: f64,
    /// Rows of each language to evaluate on; 0 for all.
    pub samples_per_language: usize,
    /// End training when a rate rises by more; otherwise there is only a warning. The checkpoint that is handed on is then one
    /// from before, or `init` if there is none.
    pub stop: bool,
}

impl Default for ProtectSettings {
    fn default() -> Self {
        ProtectSettings {
            max_rise: 0.02,
            samples_per_language: 30,
            stop: true,
        }
    }
}

impl ProtectSettings {
    pub fn is_default(&self) -> bool {
        *self == ProtectSettings::default()
    }
}

/// Word error rates of a protected language. Part of checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProtectedRate {
    /// Before training.
    pub before: f64,
    /// In the last evaluation.
    pub now: f64,
}

/// By how much the difference of two shares may be wrong.
const ROUNDING: f64 = 1e-9;

/// Protected languages by name.
pub type ProtectedRates = BTreeMap<String, ProtectedRate>;

/// Takes the result of an evaluation. The first of a language is that before training; a language without a word has none, and one
/// that is no longer in the input is forgotten.
pub fn note(rates: &mut ProtectedRates, scores: &Scores) {
    rates.retain(|language, _| scores.languages.contains_key(language));
    for (language, score) in &scores.languages {
        let now = score.words.rate();
        if now.is_finite() {
            let first = ProtectedRate { before: now, now };
            rates.entry(language.clone()).or_insert(first).now = now;
        }
    }
}

/// `en from 5.0 % to 7.5 %`, for each language whose rate rose by more than `limit`.
pub fn risen(rates: &ProtectedRates, limit: f64) -> Option<String> {
    let risen = rates
        .iter()
        .filter(|(_, rate)| rate.now - rate.before > limit + ROUNDING);
    let texts = risen.map(|(language, rate)| {
        let [before, now] = [rate.before, rate.now].map(|rate| 100.0 * rate);
        format!("{language} from {before:.1} % to {now:.1} %")
    });
    let texts: Vec<String> = texts.collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

impl TrainSettings {
    /// Whether the model of a checkpoint may be handed on: no protected language is worse than allowed. Where that is only a
    /// warning, it may.
    pub fn may_hand_on(&self, record: &CheckpointRecord) -> bool {
        !self.protect.stop || risen(&record.protected, self.protect.max_rise).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rise_is_counted_from_the_rate_before_training() {
        let mut rates = ProtectedRates::new();
        let mut evaluate = |errors: &[(&str, u64)]| {
            let mut scores = Scores::default();
            for (language, errors) in errors {
                let score = scores.languages.entry((*language).to_owned()).or_default();
                (score.words.units, score.words.substitutions) = (100, *errors);
            }
            scores.languages.insert("xx".into(), Default::default());
            note(&mut rates, &scores);
            risen(&rates, 0.02)
        };
        assert_eq!(evaluate(&[("en", 5), ("de", 40)]), None);
        assert_eq!(evaluate(&[("en", 7), ("de", 10)]), None);
        assert_eq!(evaluate(&[("en", 8), ("de", 12)]).unwrap(), "en from 5.0 % to 8.0 %");
        assert_eq!(evaluate(&[("de", 12)]), None);
        assert_eq!(rates.len(), 1);
    }
}
