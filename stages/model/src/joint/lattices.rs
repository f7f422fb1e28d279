//! The lattices of a batch between the logits of the forward pass and the gradients of logits in the backward pass: on the
//! CPU, or on the device that the logits lie on.

use candle_core::Tensor;
use flow_kernels::is_gpu;
use flow_kernels::joint::{Cell, CellGradient, CellTerms, Cells, cell_terms, logit_gradient};
use flow_kernels::tdt::{self, Aligned, Rules, doubles};
use rayon::prelude::*;

use crate::loss::{Alignment, Lattice, TdtLoss, align};
use crate::{Error, Result};

/// Cells with a smaller posterior are left out of the backward pass: a batch has some 1e5 cells, so all of them
/// together move no gradient by more than 1e-15 of the largest logit gradient.
const NEGLIGIBLE: f64 = 1e-20;

/// Log probabilities of all cells, and what [`Lattices::align`] makes of them.
#[derive(Debug)]
pub(super) enum Lattices {
    Host(HostLattices),
    Device(tdt::Lattices, Option<Aligned>),
}

#[derive(Debug)]
pub(super) struct HostLattices {
    terms: Vec<CellTerms>,
    /// Log probabilities, duration minor.
    durations: Vec<f64>,
    /// First cell of each utterance, and the number of all cells.
    starts: Vec<usize>,
    alignments: Vec<Alignment>,
}

/// What the gradients of logits are made of.
pub(super) enum LogitGradients<'a> {
    Host(&'a HostLattices, Vec<CellGradient>, f64),
    Device {
        lattices: &'a tdt::Lattices,
        aligned: &'a Aligned,
        /// Of each utterance's loss.
        factors: Tensor,
        /// Rows of the encoder's output that an utterance has.
        frames: usize,
        clamp: f64,
    },
}

impl Lattices {
    /// For so many cells whose logits will lie where `like` does.
    pub fn new(cells: usize, durations: usize, like: &Tensor) -> Result<Self> {
        if is_gpu(like.device()) {
            let lattices = tdt::Lattices::new(cells, durations, like.device())?;
            return Ok(Lattices::Device(lattices, None));
        }
        Ok(Lattices::Host(HostLattices {
            terms: vec![CellTerms::default(); cells],
            durations: vec![0.0; cells * durations],
            starts: Vec::new(),
            alignments: Vec::new(),
        }))
    }

    /// Takes in the logits, without bias, of the cells from `first` on.
    pub fn set(&mut self, first: usize, logits: &Tensor, bias: &Tensor, cells: Cells) -> Result<()> {
        match self {
            Lattices::Host(host) => {
                let count = host.durations.len() / host.terms.len().max(1);
                let terms = &mut host.terms[first..first + cells.len()];
                let durations = &mut host.durations[first * count..(first + cells.len()) * count];
                cell_terms(logits, bias, &cells, terms, durations)?;
            }
            Lattices::Device(lattices, _) => lattices.set_terms(first, logits, bias, cells)?,
        }
        Ok(())
    }

    /// The loss of each utterance, of so many frames and states. Its cells are those of the utterances before, behind each
    /// other.
    pub fn align(&mut self, settings: &TdtLoss, extents: &[(usize, usize)]) -> Result<Vec<f64>> {
        match self {
            Lattices::Host(host) => {
                host.align(settings, extents)?;
                Ok(host.alignments.iter().map(|alignment| alignment.loss).collect())
            }
            Lattices::Device(lattices, aligned) => {
                let rules = Rules {
                    durations: &settings.durations,
                    sigma: settings.sigma,
                    label_factor: settings.label_factor(),
                    negligible: NEGLIGIBLE,
                    rnnt: settings.rnnt,
                };
                let found = lattices.align(&rules, extents)?;
                let losses = found.losses.clone();
                *aligned = Some(found);
                Ok(losses)
            }
        }
    }

    /// What gradients of `sum(factors[b] * losses[b])` are made of. `frames`: rows of the encoder's output that an
    /// utterance has.
    pub fn gradients(&self, settings: &TdtLoss, factors: &[f64], frames: usize) -> Result<LogitGradients<'_>> {
        match self {
            Lattices::Host(host) => Ok(LogitGradients::Host(
                host,
                host.gradients(settings, factors),
                settings.clamp,
            )),
            Lattices::Device(lattices, Some(aligned)) => Ok(LogitGradients::Device {
                lattices,
                aligned,
                factors: doubles(factors.to_vec(), lattices.device())?,
                frames,
                clamp: settings.clamp,
            }),
            Lattices::Device(_, None) => Err(Error::Input("a loss was not summed up yet".into())),
        }
    }
}

impl HostLattices {
    fn align(&mut self, settings: &TdtLoss, extents: &[(usize, usize)]) -> Result<()> {
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
        Ok(())
    }

    fn gradients(&self, settings: &TdtLoss, factors: &[f64]) -> Vec<CellGradient> {
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
    /// The cells that count, in order.
    pub fn active(&self) -> Vec<usize> {
        match self {
            LogitGradients::Host(_, posteriors, _) => (0..posteriors.len())
                .filter(|&cell| posteriors[cell].blank + posteriors[cell].label >= NEGLIGIBLE)
                .collect(),
            LogitGradients::Device { aligned, .. } => {
                (0..aligned.active.len()).filter(|&cell| aligned.active[cell]).collect()
            }
        }
    }

    /// The gradient of the logits of some cells: (cells, tokens + durations). Row 0 of `logits` is that of the cell with the index
    /// `first`; without it, rows are those of the cells.
    pub fn of(&self, logits: &Tensor, first: Option<usize>, bias: &Tensor, cells: &Cells) -> Result<Tensor> {
        match self {
            LogitGradients::Host(host, posteriors, clamp) => {
                let own: Vec<CellGradient> = cells.iter().map(|cell| posteriors[cell.index]).collect();
                let durations = host.duration_terms(cells);
                let rows: Vec<usize> = match first {
                    Some(first) => cells.iter().map(|cell| cell.index - first).collect(),
                    None => (0..cells.len()).collect(),
                };
                Ok(logit_gradient(logits, &rows, bias, cells, &own, &durations, *clamp)?)
            }
            LogitGradients::Device {
                lattices,
                aligned,
                factors,
                frames,
                clamp,
            } => Ok(lattices.logit_gradient(aligned, logits, first, bias, cells, (factors, *frames), *clamp)?),
        }
    }
}
