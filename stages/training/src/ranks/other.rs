//! A rank that is not the one that the caller runs itself: on a thread of its own.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crossbeam_channel::{Receiver, Sender, bounded};
use rayon::ThreadPool;

use super::{RankReport, Replica, StepPlan};
use crate::error::TrainingError;
use crate::optimizer::AdamW;
use crate::trainer::{LoadedBatch, panic_text};

/// A rank on a thread of its own, which ends when this is dropped.
pub(crate) struct OtherRank {
    pub work: Sender<Work>,
    pub reports: Receiver<Result<RankReport, TrainingError>>,
}

pub(crate) enum Work {
    Step(StepPlan, Vec<LoadedBatch>),
    /// Asks for the moments that the rank keeps.
    Moments(Sender<Result<AdamW, TrainingError>>),
}

impl OtherRank {
    pub fn start(number: usize, mut replica: Replica, pool: ThreadPool) -> Result<Self, TrainingError> {
        let (work, take) = bounded::<Work>(1);
        let (tell, reports) = bounded(1);
        std::thread::Builder::new()
            .name(format!("rank-{number}"))
            .spawn(move || {
                while let Ok(work) = take.recv() {
                    let outcome = match work {
                        Work::Moments(reply) => {
                            let moments = replica.settled().and_then(|(_, optimizer)| optimizer.on_host());
                            // Whoever asked may be gone.
                            let _ = reply.send(moments);
                            continue;
                        }
                        Work::Step(plan, batches) => {
                            pool.install(|| catch_unwind(AssertUnwindSafe(|| replica.step(&plan, &batches))))
                        }
                    };
                    let outcome = outcome.unwrap_or_else(|panic| {
                        Err(TrainingError::Rank {
                            rank: number,
                            message: format!("it panicked: {}", panic_text(panic.as_ref())),
                        })
                    });
                    match &outcome {
                        Ok(_) => {}
                        // Another one's failure, which all know of.
                        Err(TrainingError::Rank { rank, .. }) if *rank != number => {}
                        Err(TrainingError::Rank { message, .. }) => replica.fail(message),
                        Err(error) => replica.fail(&error.to_string()),
                    }
                    let ended = outcome.is_err();
                    if tell.send(outcome).is_err() || ended {
                        return;
                    }
                }
            })
            .map_err(|e| TrainingError::Rank {
                rank: number,
                message: format!("its thread cannot be started: {e}"),
            })?;
        Ok(OtherRank { work, reports })
    }
}

/// Threads for the work of one rank. They are its own: a rank that waits for another must not hold up a thread that the
/// other one needs.
pub(crate) fn pool(rank: usize, threads: usize) -> Result<ThreadPool, TrainingError> {
    flow_kernels::threads::pool(&format!("rank-{rank}"), threads).map_err(|e| TrainingError::Rank {
        rank,
        message: format!("its threads cannot be started: {e}"),
    })
}

pub(crate) fn gone(rank: usize) -> TrainingError {
    TrainingError::Rank {
        rank,
        message: "it does not answer any more".into(),
    }
}
