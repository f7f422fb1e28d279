//! At every process but 0: the micro-batches that it loads for its own ranks, from its dataflow to the ranks.

use std::collections::BTreeMap;

use arrow::array::RecordBatch;
use crossbeam_channel::{Receiver, Sender, unbounded};
use flow_model::tokenizer::Tokenizer;
use flow_sampling::dealing::rank_of;

use super::RankLayout;
use super::loaded_step::LoadedShare;
use crate::error::TrainingError;
use crate::loaded_rows::{LoadedStep, RowRules, own_micro_batches};
use crate::prompts::RowPrompts;
use crate::trainer::LoadedBatch;

/// What the thread of the ranks is to do, in order.
pub(crate) enum WorkerInput {
    /// A command of process 0.
    Command(Vec<u8>),
    /// The dataflow of this process has loaded a step.
    Step(ArrivedStep),
    /// The dataflow has ended.
    FeedEnded,
}

/// The rows of a step.
pub(crate) struct ArrivedStep {
    pub step: u64,
    pub batches: Vec<RecordBatch>,
    /// Called when the ranks have taken them, or the step is skipped.
    pub taken: Box<dyn FnOnce() + Send>,
}

/// The queue to the thread of the ranks; one for each process of a run.
pub(crate) struct WorkerInputs {
    pub send: Sender<WorkerInput>,
    pub receive: Receiver<WorkerInput>,
}

impl Default for WorkerInputs {
    fn default() -> Self {
        let (send, receive) = unbounded();
        WorkerInputs { send, receive }
    }
}

/// How rows become micro-batches of the ranks of this process.
pub(super) struct BatchRules {
    pub tokenizer: Tokenizer,
    pub rows: RowRules,
    pub prompts: Option<RowPrompts>,
    pub layout: RankLayout,
    pub ranks: usize,
    pub process: usize,
}

/// Steps that the ranks have not taken.
#[derive(Default)]
pub(super) struct OwnBatches {
    /// Not converted, as no training that takes them has begun.
    arrived: BTreeMap<u64, ArrivedStep>,
    converted: BTreeMap<u64, ConvertedStep>,
    /// Steps that the ranks took.
    steps_taken: u64,
}

struct ConvertedStep {
    /// By rank of this process, until it is taken.
    of_rank: BTreeMap<usize, Vec<LoadedBatch>>,
    taken: Box<dyn FnOnce() + Send>,
}

impl OwnBatches {
    pub fn arrive(&mut self, step: ArrivedStep) {
        self.arrived.insert(step.step, step);
    }

    /// Converts what has arrived, and gives what process 0 is told of it.
    ///
    /// # Errors
    /// Where rows are not those of micro-batches.
    pub fn convert(&mut self, rules: &BatchRules) -> Result<Vec<LoadedShare>, TrainingError> {
        let BatchRules {
            layout, ranks, process, ..
        } = *rules;
        let is_own = |place, planned| layout.process_of(rank_of(place, planned, ranks)) == process;
        let mut shares = Vec::new();
        while let Some((step, arrived)) = self.arrived.pop_first() {
            let prompts = rules.prompts.as_ref().map(|prompts| (prompts, step));
            let loaded = own_micro_batches(&arrived.batches, &rules.tokenizer, rules.rows, prompts, is_own)?;
            shares.push(LoadedShare::of(step, &loaded));
            let LoadedStep { batches, planned, .. } = loaded;
            let mut of_rank: BTreeMap<usize, Vec<LoadedBatch>> =
                layout.ranks_of(process).map(|rank| (rank, Vec::new())).collect();
            for batch in batches {
                of_rank
                    .entry(rank_of(batch.place, planned, ranks))
                    .or_default()
                    .push(batch);
            }
            let taken = arrived.taken;
            self.converted.insert(step, ConvertedStep { of_rank, taken });
        }
        Ok(shares)
    }

    /// The micro-batches of a rank in a step, once.
    ///
    /// # Errors
    /// Where they were not loaded.
    pub fn take(&mut self, step: u64, rank: usize) -> Result<Vec<LoadedBatch>, TrainingError> {
        // The step before was skipped if it is still there.
        if let Some(before) = step.checked_sub(1) {
            self.skip(before);
        }
        let waiting = self.converted.get_mut(&step);
        let batches = waiting.and_then(|waiting| waiting.of_rank.remove(&rank));
        let batches = batches.ok_or_else(|| {
            TrainingError::rank(rank, format!("its micro-batches of step {} were not loaded", step + 1))
        })?;
        if self
            .converted
            .get(&step)
            .is_some_and(|waiting| waiting.of_rank.is_empty())
            && let Some(whole) = self.converted.remove(&step)
        {
            self.steps_taken += 1;
            (whole.taken)();
        }
        Ok(batches)
    }

    /// Drops the steps up to this one, of which no rank takes anything any more.
    pub fn skip(&mut self, step: u64) {
        while let Some(first) = self.converted.first_entry() {
            if *first.key() > step {
                break;
            }
            (first.remove().taken)();
        }
    }

    /// The training is over. Gives the number of steps whose micro-batches the ranks took.
    pub fn end(&mut self) -> u64 {
        self.skip(u64::MAX);
        std::mem::take(&mut self.steps_taken)
    }

    /// The dataflow has ended. Steps that process 0 was told of stay until the training is over, as it may begin them.
    pub fn feed_ended(&mut self) {
        self.arrived.clear();
    }
}

#[cfg(test)]
#[path = "own_batches_tests.rs"]
mod tests;
