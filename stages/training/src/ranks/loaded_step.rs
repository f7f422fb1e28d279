//! Steps whose micro-batches each process loads for its own ranks: what process 0 is told of them.

use std::collections::BTreeMap;
use std::time::Duration;

use crossbeam_channel::Receiver;
use flow_sampling::dealing::rank_of;

use super::RankLayout;
use crate::error::TrainingError;
use crate::loaded_rows::LoadedStep;
use crate::trainer::{BatchFigures, LoadedBatch};

/// What a process has loaded of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LoadedShare {
    pub step: u64,
    /// As [`LoadedStep::seconds`], of all micro-batches.
    pub seconds: Vec<f64>,
    /// Of those of its own ranks that have an utterance.
    pub batches: Vec<BatchFigures>,
    pub lost: Vec<String>,
    pub dropped: Vec<String>,
    pub too_long: Vec<String>,
}

impl LoadedShare {
    pub fn of(step: u64, loaded: &LoadedStep) -> LoadedShare {
        LoadedShare {
            step,
            seconds: loaded.seconds.clone(),
            batches: loaded.batches.iter().map(LoadedBatch::figures).collect(),
            lost: loaded.lost.clone(),
            dropped: loaded.dropped.clone(),
            too_long: loaded.too_long.clone(),
        }
    }
}

/// What a process has loaded, or why it cannot.
pub(crate) type ShareOutcome = (usize, Result<LoadedShare, TrainingError>);

/// At process 0: what the others have loaded of the steps to come.
pub(crate) struct LoadedElsewhere {
    /// From all other processes.
    pub told: Receiver<ShareOutcome>,
    /// How long process 0 waits for one of them after it has loaded its own part.
    pub patience: Duration,
    layout: RankLayout,
    ranks: usize,
    processes: usize,
    /// By step and process.
    shares: BTreeMap<(u64, usize), LoadedShare>,
}

impl LoadedElsewhere {
    pub fn new(
        told: Receiver<ShareOutcome>,
        patience: Duration,
        layout: RankLayout,
        ranks: usize,
        processes: usize,
    ) -> LoadedElsewhere {
        LoadedElsewhere {
            told,
            patience,
            layout,
            ranks,
            processes,
            shares: BTreeMap::new(),
        }
    }

    /// Whether the micro-batch at `place` among the `planned` ones of a step falls to a rank of process 0.
    pub fn is_own(&self, place: u32, planned: u32) -> bool {
        self.layout.process_of(rank_of(place, planned, self.ranks)) == 0
    }

    /// Takes what one process has told.
    ///
    /// # Errors
    /// Where it cannot load its part.
    pub fn note(&mut self, (from, share): ShareOutcome) -> Result<(), TrainingError> {
        let share = share?;
        self.shares.insert((share.step, from), share);
        Ok(())
    }

    /// The first process that has not loaded its part of a step.
    pub fn missing(&self, step: u64) -> Option<usize> {
        (1..self.processes).find(|process| !self.shares.contains_key(&(step, *process)))
    }

    /// The error where a process does not load its part of a step in time.
    pub fn late(&self, step: u64, process: usize) -> TrainingError {
        TrainingError::rank(
            self.layout.ranks_of(process).start,
            format!(
                "process {process} did not load the micro-batches of step {} within {} s",
                step + 1,
                self.patience.as_secs_f64()
            ),
        )
    }

    /// The parts of a step that all others have loaded, in the order of the processes. `seconds` are those of process 0.
    ///
    /// # Errors
    /// Where one of them planned other micro-batches.
    pub fn take(&mut self, step: u64, seconds: &[f64]) -> Result<Vec<LoadedShare>, TrainingError> {
        // Those of earlier steps are of no use any more.
        let later = self.shares.split_off(&(step + 1, 0));
        let shares = std::mem::replace(&mut self.shares, later);
        let of_step = shares.into_iter().filter(|((of, _), _)| *of == step);
        let bits = |seconds: &[f64]| -> Vec<u64> { seconds.iter().map(|seconds| seconds.to_bits()).collect() };
        let mut taken = Vec::with_capacity(self.processes - 1);
        for ((_, process), share) in of_step {
            if bits(&share.seconds) != bits(seconds) {
                return Err(TrainingError::data(format!(
                    "process {process} planned other micro-batches for step {} than process 0: all processes \
                         need the same folder of checkpoints and the same rows",
                    step + 1
                )));
            }
            taken.push(share);
        }
        Ok(taken)
    }
}
