//! When training ends before its last step.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{CheckpointRecord, Monitor};
use crate::protect::risen;
use crate::settings::TrainSettings;

/// Ends training once `monitor` no longer gets better, as Lightning's `EarlyStopping` does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EarlyStopping {
    /// Evaluations in a row without an improvement after which training ends. The one before the first step does not count.
    pub patience: u64,
    /// By how much the figure must be lower than the lowest before to be an improvement: 0.001 is 0.1 % of the words, with
    /// `monitor: val_wer`.
    pub min_delta: f64,
}

impl Default for EarlyStopping {
    fn default() -> Self {
        EarlyStopping {
            patience: 10,
            min_delta: 0.001,
        }
    }
}

/// What early stopping knows after an evaluation. Part of a checkpoint, so that a resumed training ends at the same step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Improvement {
    pub monitor: Monitor,
    /// The lowest figure that was an improvement; none yet.
    pub lowest: Option<f64>,
    /// Its step.
    pub step: u64,
    /// Evaluations since.
    pub evaluations: u64,
}

impl Improvement {
    /// Takes the figure of an evaluation after `step` steps. One that is missing is no improvement.
    pub fn note(&mut self, settings: &EarlyStopping, monitor: Monitor, step: u64, figure: Option<f64>) {
        if self.monitor != monitor {
            *self = Improvement {
                monitor,
                ..Improvement::default()
            };
        }
        match figure {
            Some(figure) if self.lowest.is_none_or(|lowest| figure < lowest - settings.min_delta) => {
                (self.lowest, self.step, self.evaluations) = (Some(figure), step, 0);
            }
            _ => self.evaluations = self.evaluations.saturating_add(1),
        }
    }
}

impl TrainSettings {
    /// Whether all of training is done after a checkpoint.
    pub fn is_over(&self, record: &CheckpointRecord) -> bool {
        record.step >= self.max_steps || self.early_end(record).is_some()
    }

    /// Why training ends with a checkpoint although steps are left.
    pub fn early_end(&self, record: &CheckpointRecord) -> Option<String> {
        if !self.may_hand_on(record) {
            let risen = risen(&record.protected, self.protect.max_rise).unwrap_or_default();
            return Some(format!(
                "training ends early: the word error rate of protected languages rose, {risen}. Train with lower rates, fewer \
                 steps or rows of these languages too, or allow more with `protect.max_rise`"
            ));
        }
        let improvement = record.improvement.as_ref()?;
        let stopping = self.early_stopping.as_ref()?;
        if improvement.monitor != self.monitor || improvement.evaluations < stopping.patience {
            return None;
        }
        let monitor = self.monitor;
        Some(match improvement.lowest {
            Some(lowest) => format!(
                "training ends early: the {monitor} of validation has not fallen in {} evaluations below the {lowest:.4} of step {}",
                improvement.evaluations, improvement.step
            ),
            None => format!(
                "training ends early: none of {} evaluations has a {monitor}",
                improvement.evaluations
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_counts_evaluations_without_an_improvement() {
        let settings = EarlyStopping {
            patience: 2,
            min_delta: 0.01,
        };
        let mut improvement = Improvement::default();
        let mut since = |figure| {
            improvement.note(&settings, Monitor::ValWer, 7, figure);
            improvement.evaluations
        };
        // 0.395 is lower, but not by enough; 0.389 is. What is missing is no improvement.
        let figures = [Some(0.4), Some(0.395), Some(0.389), None, Some(0.5), Some(0.2)];
        assert_eq!(figures.map(&mut since), [0, 1, 0, 1, 2, 0]);
        improvement.note(&settings, Monitor::ValLoss, 8, Some(3.0));
        assert_eq!((improvement.lowest, improvement.evaluations), (Some(3.0), 0));
    }
}
