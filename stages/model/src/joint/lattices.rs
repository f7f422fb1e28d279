//! The lattices of a batch between the logits of the forward pass and the gradients of logits in the backward pass, on the CPU.

use candle_core::{DType, Tensor};
use flow_kernels::joint::{Cell, CellGradient, CellTerms, cell_terms, logit_gradient};
use rayon::prelude::*;

use crate::loss::{Alignment, Lattice, TdtLoss, align};
use crate::{Error, Result};

/// Cells with a smaller posterior are left out of the backward pass. The posteriors of an utterance add up to its states at least,
/// so what is left out is less than this share of them for each frame: some 1e-17 for a minute, and 1e-5 where factors of products
/// are in bf16, which rounds each by up to 4e-3.
pub(super) fn negligible(factors: DType) -> f64 {
    match factors {
        DType::BF16 => 1e-8,
        _ => 1e-20,
    }
}

/// Log probabilities of all cells, and what [`Lattices::align`] makes of them.
#[derive(Debug)]
pub(super) struct Lattices {
    terms: Vec<CellTerms>,
    /// Log probabilities, duration minor.
    durations: Vec<f64>,
    /// First cell of each utterance, and the number of all cells.
    starts: Vec<usize>,
    alignments: Vec<Alignment>,
}

/// What the gradients of logits are made of.
pub(super) struct LogitGradients<'a> {
    lattices: &'a Lattices,
    posteriors: Vec<CellGradient>,
    clamp: f64,
}

impl Lattices {
    /// For so many cells.
    pub fn new(cells: usize, durations: usize) -> Self {
        Self {
            terms: vec![CellTerms::default(); cells],
            durations: vec![0.0; cells * durations],
            starts: Vec::new(),
            alignments: Vec::new(),
        }
    }

    /// Takes in the logits, without bias, of the cells from `first` on.
    pub fn set(&mut self, first: usize, logits: &Tensor, bias: &Tensor, cells: &[Cell]) -> Result<()> {
        let count = self.durations.len() / self.terms.len().max(1);
        let terms = &mut self.terms[first..first + cells.len()];
        let durations = &mut self.durations[first * count..(first + cells.len()) * count];
        Ok(cell_terms(logits, bias, cells, terms, durations)?)
    }

    /// The loss of each utterance, of this many frames and states. Its cells are those of the utterances before, behind each
    /// other.
    pub fn align(&mut self, settings: &TdtLoss, extents: &[(usize, usize)]) -> Result<Vec<f64>> {
        let count = settings.durations.len();
        let mut next = 0;
        self.starts = vec![0];
        for &(frames, states) in extents {
            next += frames * states;
            self.starts.push(next);
        }
        if next != self.terms.len() || next * count != self.durations.len() {
            return Err(Error::Input(format!(
                "lattices of {} cells and {} durations for {next} cells",
                self.terms.len(),
                self.durations.len()
            )));
        }
        let starts = &self.starts;
        self.alignments = extents
            .par_iter()
            .enumerate()
            .map(|(b, &(frames, states))| {
                let range = starts[b]..starts[b + 1];
                let blank: Vec<f64> = self.terms[range.clone()].iter().map(|terms| terms.blank).collect();
                let label: Vec<f64> = self.terms[range.clone()].iter().map(|terms| terms.label).collect();
                let durations = &self.durations[range.start * count..range.end * count];
                align(
                    settings,
                    &Lattice {
                        frames,
                        states,
                        blank: &blank,
                        label: &label,
                        durations,
                    },
                )
            })
            .collect::<Result<_>>()?;
        Ok(self.alignments.iter().map(|alignment| alignment.loss).collect())
    }

    /// What gradients of `sum(factors[b] * losses[b])` are made of.
    pub fn gradients(&self, settings: &TdtLoss, factors: &[f64]) -> LogitGradients<'_> {
        LogitGradients {
            lattices: self,
            posteriors: self.posteriors(settings, factors),
            clamp: settings.clamp,
        }
    }

    fn posteriors(&self, settings: &TdtLoss, factors: &[f64]) -> Vec<CellGradient> {
        let mut all = Vec::with_capacity(self.terms.len());
        for (utterance, (alignment, &factor)) in self.alignments.iter().zip(factors).enumerate() {
            let terms = &self.terms[self.starts[utterance]..self.starts[utterance + 1]];
            all.extend(terms.iter().zip(alignment.blank.iter().zip(&alignment.label)).map(
                |(terms, (&blank, &label))| CellGradient {
                    normaliser: terms.normaliser,
                    blank,
                    label: label * settings.label_factor(),
                    factor,
                },
            ));
        }
        all
    }

    /// Log probability and posterior of the durations of some cells.
    fn duration_terms(&self, cells: &[Cell]) -> Vec<(f64, f64)> {
        let count = self.durations.len() / self.terms.len().max(1);
        let mut terms = Vec::with_capacity(cells.len() * count);
        for cell in cells {
            let utterance = self.starts.partition_point(|&start| start <= cell.index) - 1;
            let local = cell.index - self.starts[utterance];
            let logs = &self.durations[cell.index * count..][..count];
            let posteriors = &self.alignments[utterance].durations[local * count..][..count];
            terms.extend(logs.iter().copied().zip(posteriors.iter().copied()));
        }
        terms
    }
}

impl LogitGradients<'_> {
    /// The cells whose posterior is not below `least`, in order.
    pub fn active(&self, least: f64) -> Vec<usize> {
        (0..self.posteriors.len())
            .filter(|&cell| self.posteriors[cell].blank + self.posteriors[cell].label >= least)
            .collect()
    }

    /// The gradient of the logits of some cells: (cells, tokens + durations). Row 0 of `logits` is that of the cell with the index
    /// `first`; without it, rows are those of the cells.
    pub fn of(&self, logits: &Tensor, first: Option<usize>, bias: &Tensor, cells: &[Cell]) -> Result<Tensor> {
        let own: Vec<CellGradient> = cells.iter().map(|cell| self.posteriors[cell.index]).collect();
        let durations = self.lattices.duration_terms(cells);
        let rows: Vec<usize> = match first {
            Some(first) => cells.iter().map(|cell| cell.index - first).collect(),
            None => (0..cells.len()).collect(),
        };
        Ok(logit_gradient(
            logits, &rows, bias, cells, &own, &durations, self.clamp,
        )?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a lattice of 10 s with 120 tokens: where nothing was learned yet, and where each token has its frame.
    #[test]
    fn cells_that_are_left_out_have_no_posterior_to_speak_of() {
        let (frames, states) = (125, 121);
        let durations: Vec<usize> = (0..5).collect();
        let settings = TdtLoss {
            durations: durations.clone(),
            sigma: 0.0,
            fastemit: 0.0,
            clamp: 0.0,
            rnnt: false,
        };
        for learned in [false, true] {
            let mut lattices = Lattices::new(frames * states, durations.len());
            let cells = (0..frames).flat_map(|frame| (0..states).map(move |state| (frame, state)));
            for (cell, (frame, state)) in cells.enumerate() {
                let now = frame >= state * frames / states;
                let [label, blank]: [f64; 2] = match (learned, now) {
                    (false, _) => [1.0 / 8193.0; 2],
                    (true, true) => [0.97, 0.02],
                    (true, false) => [1e-4, 0.97],
                };
                lattices.terms[cell].blank = blank.ln();
                lattices.terms[cell].label = label.ln();
                lattices.durations[cell * 5..][..5].fill(0.2f64.ln());
            }
            lattices.align(&settings, &[(frames, states)]).unwrap();
            let gradients = lattices.gradients(&settings, &[1.0]);
            let [all, counted, wide] = [0.0, negligible(DType::BF16), negligible(DType::F32)].map(|least| {
                let cells = gradients.active(least);
                let posterior = |&cell: &usize| gradients.posteriors[cell].blank + gradients.posteriors[cell].label;
                (cells.len(), cells.iter().map(posterior).sum::<f64>())
            });
            for ((_, sum), dtype) in [(counted, DType::BF16), (wide, DType::F32)] {
                let share = (all.1 - sum) / all.1;
                // Sums of 15,000 numbers in 64 bits are as exact.
                let bound = frames as f64 * negligible(dtype) + 1e-12;
                assert!(share < bound, "{dtype:?}: {share}");
            }
            // A quarter of them at least are saved.
            assert!(4 * counted.0 < 3 * wide.0, "{} of {}", counted.0, wide.0);
        }
    }
}
