//! The processes of a distributed training, and which ranks each of them has.

use std::ops::Range;
use std::sync::Arc;

use flow_kind::processes::Processes;

use crate::error::TrainingError;
use crate::loaded_rows::RowRules;
use crate::prompts::PromptSettings;

/// The processes that the ranks of a training are distributed over, as process 0 sees them.
#[derive(Clone, Copy)]
pub struct ProcessGroup<'a> {
    pub processes: &'a Arc<Processes>,
    /// Bytes of memory that a rank needs, where they are known; each process compares them with what it has.
    pub rank_bytes: Option<u64>,
    /// Where each process loads the micro-batches of its own ranks: what becomes of their rows. Otherwise process 0 sends
    /// them.
    pub own_batches: Option<(RowRules, &'a PromptSettings)>,
}

/// The number of ranks of each process. All processes have the same number; ranks are numbered in the order of the
/// processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankLayout {
    ranks_per_process: usize,
}

impl RankLayout {
    /// Distributes ranks over processes.
    ///
    /// # Errors
    /// Where the processes would not have the same number of ranks, or none.
    pub fn new(ranks: usize, processes: usize) -> Result<RankLayout, TrainingError> {
        if processes == 0 || ranks == 0 || !ranks.is_multiple_of(processes) {
            return Err(TrainingError::setting(
                "ranks",
                format!(
                    "{ranks} cannot be shared out evenly over {processes} processes; each has the same number of ranks"
                ),
            ));
        }
        Ok(RankLayout {
            ranks_per_process: ranks / processes,
        })
    }

    /// The ranks of a process.
    pub fn ranks_of(self, process: usize) -> Range<usize> {
        process * self.ranks_per_process..(process + 1) * self.ranks_per_process
    }

    /// The process that has a rank.
    pub fn process_of(self, rank: usize) -> usize {
        rank / self.ranks_per_process
    }
}
