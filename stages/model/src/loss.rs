//! The token-and-duration transducer (TDT) loss on a lattice of frames and label states, in log space and f64.
//!
//! Xu et al., "Efficient Sequence Transduction by Jointly Predicting Tokens and Durations" (2023); the rules are those
//! of NeMo's `TDTLossNumba`. From the state (frame t, label state u) a blank of duration d > 0 leads to (t + d, u), a
//! label of any duration to (t + d, u + 1). Only a blank that lands exactly on the number of frames ends the
//! utterance, in the last label state.

use crate::config::Reduction;
use crate::{Error, Result};

/// Settings of the loss that do not depend on the batch.
#[derive(Debug, Clone, PartialEq)]
pub struct TdtLoss {
    /// Durations in frames, in the order of the duration outputs.
    pub durations: Vec<usize>,
    /// Subtracted from the log probability of every emission (under-normalisation).
    pub sigma: f64,
    /// Weight lambda of FastEmit: label emissions count 1 + lambda times in the gradient of the tokens (not in that of
    /// the durations, as in NeMo), and the reported loss is multiplied by 1 + lambda.
    pub fastemit: f64,
    /// Gradients of the token logits are clipped to this absolute value, before the reduction's factor; none if not
    /// positive.
    pub clamp: f64,
    /// Ignore durations: the standard transducer loss over the token outputs (NeMo's omega draws this at random).
    pub rnnt: bool,
}

/// One arc type: how many frames it advances, and its duration output, if durations count.
type Arc = (usize, Option<usize>);

impl TdtLoss {
    fn blank_arcs(&self) -> Vec<Arc> {
        if self.rnnt {
            return vec![(1, None)];
        }
        self.all_durations().filter(|&(advance, _)| advance > 0).collect()
    }

    fn label_arcs(&self) -> Vec<Arc> {
        if self.rnnt {
            vec![(0, None)]
        } else {
            self.all_durations().collect()
        }
    }

    fn all_durations(&self) -> impl Iterator<Item = Arc> {
        self.durations
            .iter()
            .enumerate()
            .map(|(index, &advance)| (advance, Some(index)))
    }

    /// The factor of label posteriors in the gradient.
    pub(crate) fn label_factor(&self) -> f64 {
        1.0 + self.fastemit
    }
}

/// Log probabilities of one utterance: cells are (frame, label state), label state minor.
#[derive(Debug, Clone, Copy)]
pub struct Lattice<'a> {
    pub frames: usize,
    /// Number of target tokens plus one.
    pub states: usize,
    /// Log probability of blank per cell, without sigma.
    pub blank: &'a [f64],
    /// Log probability of the next target token per cell; not used in the last label state.
    pub label: &'a [f64],
    /// Log probability of each duration per cell, duration minor.
    pub durations: &'a [f64],
}

/// Loss of one utterance and the posterior probability of its arcs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Alignment {
    /// `-ln p`: infinite if no path exists, not a number if an input is none.
    pub loss: f64,
    /// Posterior of the blank arcs that leave each cell. Zero everywhere if the loss is not finite.
    pub blank: Vec<f64>,
    /// Posterior of the label arcs that leave each cell.
    pub label: Vec<f64>,
    /// Posterior of the arcs of each duration that leave each cell, duration minor.
    pub durations: Vec<f64>,
}

/// Sums over all alignments of one utterance.
///
/// Backward: `beta(t, u)`, the log probability of ending from a cell. Forward: the posterior of a cell, which is split
/// among its arcs by `exp(weight + beta(next) - beta(here))` and handed on along them; so nothing is divided by the
/// total and no path falls below the range of f64 unless its share does.
pub fn align(settings: &TdtLoss, lattice: &Lattice) -> Result<Alignment> {
    let Lattice {
        frames,
        states,
        blank,
        label,
        durations,
    } = *lattice;
    let width = settings.durations.len();
    let cells = frames * states;
    if blank.len() != cells || label.len() != cells || durations.len() != cells * width || states == 0 {
        return Err(Error::Input(format!(
            "lattice of {frames} x {states} cells has lists of another length"
        )));
    }
    let mut alignment = Alignment {
        loss: 0.0,
        blank: vec![0.0; cells],
        label: vec![0.0; cells],
        durations: vec![0.0; cells * width],
    };
    if frames == 0 {
        return Ok(alignment);
    }
    let sigma = if settings.rnnt { 0.0 } else { settings.sigma };
    let (blank_arcs, label_arcs) = (settings.blank_arcs(), settings.label_arcs());
    let duration = |cell: usize, index: Option<usize>| index.map_or(0.0, |index| durations[cell * width + index]);
    let mut beta = vec![f64::NEG_INFINITY; cells];
    // Log probability of ending by a blank, or by a label, of this advance from (t, u).
    let after_blank = |beta: &[f64], t: usize, u: usize, advance: usize| match t + advance {
        next if next < frames => beta[next * states + u],
        next if next == frames && u + 1 == states => 0.0,
        _ => f64::NEG_INFINITY,
    };
    let after_label = |beta: &[f64], t: usize, u: usize, advance: usize| {
        if t + advance < frames && u + 1 < states {
            beta[(t + advance) * states + u + 1]
        } else {
            f64::NEG_INFINITY
        }
    };
    let mut terms = Vec::with_capacity(blank_arcs.len() + label_arcs.len());
    for t in (0..frames).rev() {
        for u in (0..states).rev() {
            let cell = t * states + u;
            terms.clear();
            for &(advance, index) in &blank_arcs {
                terms.push(blank[cell] - sigma + duration(cell, index) + after_blank(&beta, t, u, advance));
            }
            if u + 1 < states {
                for &(advance, index) in &label_arcs {
                    terms.push(label[cell] - sigma + duration(cell, index) + after_label(&beta, t, u, advance));
                }
            }
            beta[cell] = log_sum_exp(&terms);
        }
    }
    let total = beta[0];
    alignment.loss = -total * settings.label_factor();
    if !total.is_finite() {
        return Ok(alignment);
    }
    let mut posterior = vec![0.0; cells];
    posterior[0] = 1.0;
    for cell in 0..cells {
        let (t, u) = (cell / states, cell % states);
        let here = posterior[cell];
        if here == 0.0 {
            continue;
        }
        for &(advance, index) in &blank_arcs {
            let weight = blank[cell] - sigma + duration(cell, index) + after_blank(&beta, t, u, advance) - beta[cell];
            let share = here * weight.exp();
            alignment.blank[cell] += share;
            if let Some(index) = index {
                alignment.durations[cell * width + index] += share;
            }
            if t + advance < frames {
                posterior[(t + advance) * states + u] += share;
            }
        }
        if u + 1 == states {
            continue;
        }
        for &(advance, index) in &label_arcs {
            let weight = label[cell] - sigma + duration(cell, index) + after_label(&beta, t, u, advance) - beta[cell];
            let share = here * weight.exp();
            alignment.label[cell] += share;
            if let Some(index) = index {
                alignment.durations[cell * width + index] += share;
            }
            if t + advance < frames {
                posterior[(t + advance) * states + u + 1] += share;
            }
        }
    }
    Ok(alignment)
}

/// `ln(sum(exp(terms)))`; minus infinity for none, not a number if a term is none.
fn log_sum_exp(terms: &[f64]) -> f64 {
    let largest = terms.iter().fold(
        f64::NEG_INFINITY,
        |largest, &term| if term > largest { term } else { largest },
    );
    if largest == f64::NEG_INFINITY {
        return if terms.iter().any(|term| term.is_nan()) {
            f64::NAN
        } else {
            largest
        };
    }
    largest + terms.iter().map(|&term| (term - largest).exp()).sum::<f64>().ln()
}

/// What the losses of utterances are divided by in a batch that has so many utterances and target tokens, others
/// included. An utterance without target tokens counts as one with a single token where NeMo would divide by zero.
pub fn divisors_in(reduction: Reduction, target_lengths: &[usize], utterances: usize, tokens: usize) -> Vec<f64> {
    let (count, volume) = (utterances.max(1) as f64, tokens.max(1) as f64);
    let divisor = |&length: &usize| match reduction {
        Reduction::MeanBatch => count,
        Reduction::Mean => count * length.max(1) as f64,
        Reduction::MeanVolume => volume,
        Reduction::Sum => 1.0,
    };
    target_lengths.iter().map(divisor).collect()
}

/// The loss of a batch: those of its utterances, with so many target tokens each, after the reduction.
pub fn reduced(reduction: Reduction, losses: &[f64], target_lengths: &[usize]) -> f64 {
    let tokens = target_lengths.iter().sum();
    let divisors = divisors_in(reduction, target_lengths, target_lengths.len(), tokens);
    losses
        .iter()
        .zip(&divisors)
        .map(|(loss, divisor)| loss * (1.0 / divisor))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn settings(durations: &[usize], sigma: f64) -> TdtLoss {
        TdtLoss {
            durations: durations.to_vec(),
            sigma,
            fastemit: 0.0,
            clamp: 0.0,
            rnnt: false,
        }
    }

    /// The sum over all alignments, path by path.
    fn enumerate(settings: &TdtLoss, lattice: &Lattice, t: usize, u: usize) -> f64 {
        let cell = t * lattice.states + u;
        let width = settings.durations.len();
        let mut total = 0.0;
        for (index, &advance) in settings.durations.iter().enumerate() {
            let weight = |log: f64| (log - settings.sigma + lattice.durations[cell * width + index]).exp();
            let next = t + advance;
            if advance > 0 && next == lattice.frames && u + 1 == lattice.states {
                total += weight(lattice.blank[cell]);
            }
            if next < lattice.frames {
                if advance > 0 {
                    total += weight(lattice.blank[cell]) * enumerate(settings, lattice, next, u);
                }
                if u + 1 < lattice.states {
                    total += weight(lattice.label[cell]) * enumerate(settings, lattice, next, u + 1);
                }
            }
        }
        total
    }

    proptest! {
        #[test]
        fn the_loss_is_the_sum_over_all_paths(
            frames in 1usize..6,
            states in 1usize..4,
            sigma in 0.0..0.2f64,
            logs in proptest::collection::vec(-3.0..0.0f64, 200),
        ) {
            let settings = settings(&[0, 1, 2, 4], sigma);
            let cells = frames * states;
            let lattice = Lattice {
                frames,
                states,
                blank: &logs[..cells],
                label: &logs[20..20 + cells],
                durations: &logs[40..40 + 4 * cells],
            };
            let found = align(&settings, &lattice).unwrap();
            let expected = -enumerate(&settings, &lattice, 0, 0).ln();
            prop_assert!((found.loss - expected).abs() < 1e-9 || found.loss == expected, "{} {expected}", found.loss);
            // Every alignment emits each label once and ends once, by a blank.
            if found.loss.is_finite() {
                prop_assert!((found.label.iter().sum::<f64>() - (states - 1) as f64).abs() < 1e-9);
                let mass: f64 = found.blank.iter().chain(&found.label).sum();
                prop_assert!((found.durations.iter().sum::<f64>() - mass).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn odd_utterances() {
        let settings = settings(&[1, 2], 0.0);
        let empty = Lattice {
            frames: 0,
            states: 3,
            blank: &[],
            label: &[],
            durations: &[],
        };
        assert_eq!(align(&settings, &empty).unwrap().loss, 0.0);
        // Two labels in one frame need a duration of zero.
        let narrow = Lattice {
            frames: 1,
            states: 3,
            blank: &[-1.0; 3],
            label: &[-1.0; 3],
            durations: &[-0.7; 6],
        };
        let found = align(&settings, &narrow).unwrap();
        assert_eq!(found.loss, f64::INFINITY);
        assert!(
            found
                .blank
                .iter()
                .chain(&found.label)
                .all(|&posterior| posterior == 0.0)
        );
        let broken = Lattice {
            frames: 1,
            states: 1,
            blank: &[f64::NAN],
            label: &[0.0],
            durations: &[-0.7; 2],
        };
        assert!(align(&settings, &broken).unwrap().loss.is_nan());
        let short = Lattice {
            frames: 2,
            states: 1,
            blank: &[0.0],
            label: &[0.0],
            durations: &[-0.7; 2],
        };
        assert!(align(&settings, &short).is_err());
    }
}
