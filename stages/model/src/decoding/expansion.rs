//! What a hypothesis can be extended by: scores of tokens and durations, with fusion.

use std::cell::OnceCell;
use std::rc::Rc;

use flow_kernels::Float;

use super::{BlankScore, DecodingSettings, Pruning};
use crate::fusion::{Fusion, FusionState};

/// Upper bound on the probability of blank, so that tokens keep a positive share, as in NeMo.
const MOST_BLANK: f32 = 0.99;

/// A token (or blank), how far it moves on, in frames, and its log-probability with fusion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    pub token: usize,
    pub duration: usize,
    pub score: f32,
}

/// The state of a hypothesis in the models of fusion, with the scores of all tokens in it, which stay the same from blank to
/// blank.
#[derive(Debug, Clone, Default)]
pub struct ScoredState {
    state: FusionState,
    /// Computed when they are first needed.
    scores: OnceCell<Rc<[f32]>>,
    /// Those on frames without speech.
    without_speech: OnceCell<Rc<[f32]>>,
}

impl ScoredState {
    /// The state before the first token.
    pub fn start(fusion: &Fusion) -> Self {
        fusion.start().into()
    }

    /// The state after a token on a frame with speech, or without.
    pub fn step(&self, fusion: &Fusion, token: u32, speech: bool) -> Self {
        fusion.step(&self.state, token, speech).into()
    }

    /// The scores of all tokens on a frame with speech, or without; empty without fusion.
    pub fn scores(&self, fusion: &Fusion, speech: bool) -> &Rc<[f32]> {
        let kept = if speech { &self.scores } else { &self.without_speech };
        kept.get_or_init(|| {
            let mut scores = Vec::new();
            fusion.scores(&self.state, speech, &mut scores);
            scores.into()
        })
    }

    /// The score of the end of the text.
    pub fn end(&self, fusion: &Fusion) -> f64 {
        f64::from(fusion.end(&self.state))
    }
}

impl From<FusionState> for ScoredState {
    fn from(state: FusionState) -> Self {
        ScoredState {
            state,
            scores: OnceCell::new(),
            without_speech: OnceCell::new(),
        }
    }
}

/// Finds the best candidates of a row of logits; its buffers serve one row after another.
pub struct Expansion<'a> {
    settings: &'a DecodingSettings,
    durations: &'a [usize],
    /// Tokens and blank, the last of them.
    tokens: usize,
    log_probabilities: Vec<f32>,
    duration_log_probabilities: Vec<f32>,
    best: Vec<Candidate>,
}

impl<'a> Expansion<'a> {
    pub fn new(settings: &'a DecodingSettings, durations: &'a [usize], tokens: usize) -> Self {
        Expansion {
            settings,
            durations,
            tokens,
            log_probabilities: Vec::new(),
            duration_log_probabilities: Vec::new(),
            best: Vec::new(),
        }
    }

    pub fn blank(&self) -> usize {
        self.tokens - 1
    }

    /// The best candidates of the last row, the best first.
    pub fn best(&self) -> &[Candidate] {
        &self.best
    }

    /// Finds the candidates of a row, of a frame with speech or without: logits of the tokens, of blank, and of the durations.
    pub fn expand(&mut self, row: &[f32], fusion: &ScoredState, speech: bool) {
        let (tokens, durations) = row.split_at(self.tokens);
        log_softmax(tokens, &mut self.log_probabilities);
        log_softmax(durations, &mut self.duration_log_probabilities);
        if durations.is_empty() {
            // Without durations a token stays on its frame, and blank moves on by one.
            self.duration_log_probabilities.push(0.0);
        }
        let (beam, blank) = (self.settings.beam.max(1), self.blank());
        let labels = if self.settings.fusion.is_empty() {
            best_of(&self.log_probabilities, beam)
        } else {
            let scores = fusion.scores(&self.settings.fusion, speech);
            self.fuse((beam, blank), self.settings.fusion.weight(speech), scores)
        };
        self.best.clear();
        for &(token, score) in &labels {
            for (index, duration_score) in self.duration_log_probabilities.iter().enumerate() {
                let duration = self.durations.get(index).copied().unwrap_or(0);
                self.best.push(Candidate {
                    token,
                    duration: if token == blank { duration.max(1) } else { duration },
                    score: score + duration_score,
                });
            }
        }
        self.best.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.best.truncate(beam);
    }

    /// The best labels with the scores of fusion, whose models have this weight together.
    fn fuse(&mut self, (beam, blank): (usize, usize), weight: f32, fused: &[f32]) -> Vec<(usize, f32)> {
        let settings = self.settings;
        // A term added to the scores of all tokens, and a factor of that of blank.
        let (common, blank_factor) = match settings.blank_score {
            BlankScore::NoScore => (0.0, 1.0),
            BlankScore::LmWeightedFull => {
                let blank = self.log_probabilities[blank].exp().min(MOST_BLANK);
                ((-blank).ln_1p() * weight, 1.0 + weight)
            }
        };
        match settings.pruning {
            Pruning::Late => {
                for (score, fused) in self.log_probabilities.iter_mut().zip(fused) {
                    *score += common + fused;
                }
                self.log_probabilities[blank] *= blank_factor;
                best_of(&self.log_probabilities, beam)
            }
            Pruning::Early => {
                let mut labels = best_of(&self.log_probabilities, beam);
                for (token, score) in &mut labels {
                    *score = match fused.get(*token) {
                        Some(fused) => *score + common + fused,
                        None => *score * blank_factor,
                    };
                }
                labels.sort_by(|a, b| b.1.total_cmp(&a.1));
                labels
            }
        }
    }

    /// Blank with the best duration: its score is that of the most probable one, and it moves on as the best candidate.
    pub fn forced_blank(&self) -> Candidate {
        let largest = self.duration_log_probabilities.iter().copied();
        let duration_score = largest.fold(f32::NEG_INFINITY, f32::max);
        Candidate {
            token: self.blank(),
            duration: self.best.first().map_or(1, |best| best.duration.max(1)),
            score: self.log_probabilities[self.blank()] + duration_score,
        }
    }
}

/// The largest values with their places, the largest first, of equal ones the first.
pub fn best_of(values: &[f32], count: usize) -> Vec<(usize, f32)> {
    let mut best: Vec<(usize, f32)> = Vec::with_capacity(count + 1);
    let mut least = f32::NEG_INFINITY;
    for (place, &value) in values.iter().enumerate() {
        if value <= least && best.len() == count || value.is_nan() {
            continue;
        }
        let rank = best.partition_point(|&(_, better)| better >= value);
        best.insert(rank, (place, value));
        best.truncate(count);
        least = best.last().map_or(least, |&(_, value)| value);
    }
    best
}

/// `log_probabilities` becomes the log-softmax of `logits`.
fn log_softmax(logits: &[f32], log_probabilities: &mut Vec<f32>) {
    // Sums and maxima in lanes, so that the compiler vectorises them.
    const LANES: usize = 16;
    let blocks = logits.chunks_exact(LANES);
    let rest = blocks.remainder();
    let mut largest = [f32::NEG_INFINITY; LANES];
    for block in blocks.clone() {
        for (largest, &logit) in largest.iter_mut().zip(block) {
            *largest = if logit > *largest { logit } else { *largest };
        }
    }
    let top = largest.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sums = [0.0; LANES];
    for block in blocks {
        for (sum, &logit) in sums.iter_mut().zip(block) {
            *sum += (logit - top).exp_quick();
        }
    }
    let rest: f32 = rest.iter().map(|logit| (logit - top).exp_quick()).sum();
    let normaliser = top + (sums.iter().sum::<f32>() + rest).ln();
    log_probabilities.clear();
    log_probabilities.extend(logits.iter().map(|logit| logit - normaliser));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_are_the_largest_in_order() {
        let values = [1.0, 5.0, f32::NAN, 5.0, -2.0, 7.0];
        assert_eq!(best_of(&values, 3), [(5, 7.0), (1, 5.0), (3, 5.0)]);
        assert_eq!(best_of(&values, 9).len(), 5);
        assert_eq!(best_of(&[f32::NEG_INFINITY], 2), [(0, f32::NEG_INFINITY)]);
    }

    #[test]
    fn a_log_softmax_is_that_of_float64() {
        let logits: Vec<f32> = (0..37).map(|i| ((i * 7919) % 101) as f32 / 7.0 - 240.0).collect();
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - top).exp()).sum();
        let mut found = Vec::new();
        log_softmax(&logits, &mut found);
        assert_eq!(found.len(), logits.len());
        for (found, logit) in found.iter().zip(&logits) {
            let expected = f64::from(logit - top) - sum.ln();
            assert!((f64::from(*found) - expected).abs() < 2e-5, "{found} is not {expected}");
        }
    }
}
