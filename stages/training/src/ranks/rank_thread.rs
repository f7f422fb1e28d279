//! A rank that works on a thread of its own, driven by commands.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crossbeam_channel::{Receiver, Sender, bounded};
use rayon::ThreadPool;

use super::{Evaluation, EvaluationReply, GroupWatch, RankReport, Replica, StepPlan};
use crate::error::TrainingError;
use crate::optimizer::AdamW;
use crate::trainer::{LoadedBatch, panic_text};

/// The channels to a rank that is not on the caller's thread: on a thread of this process, or, by a proxy thread, in
/// another process. The rank ends when this is dropped.
pub(crate) struct RankHandle {
    pub commands: Sender<RankCommand>,
    /// One report for each [`RankCommand::Step`]; the rank ends after an error.
    pub reports: Receiver<Result<RankReport, TrainingError>>,
}

pub(crate) enum RankCommand {
    /// An optimizer step, with the micro-batches of this rank.
    Step(StepPlan, Vec<LoadedBatch>),
    /// Asks for the state of the optimizer of the parameters that the rank owns.
    OptimizerState(StateReply),
    /// A part of an evaluation, between two steps.
    Evaluate(Evaluation, EvaluationReply),
}

/// Gets the state of the optimizer of a rank.
pub(crate) type StateReply = Sender<Result<AdamW, TrainingError>>;

impl RankHandle {
    /// Starts the thread of a rank, which computes on `pool`.
    ///
    /// # Errors
    /// Where the thread cannot be started.
    pub fn spawn(rank: usize, mut replica: Replica, pool: ThreadPool) -> Result<Self, TrainingError> {
        let (commands, received) = bounded::<RankCommand>(1);
        let (report, reports) = bounded(1);
        std::thread::Builder::new()
            .name(format!("rank-{rank}"))
            .spawn(move || {
                while let Ok(command) = received.recv() {
                    let outcome = match command {
                        RankCommand::OptimizerState(reply) => {
                            let state = replica.synchronize().and_then(|(_, optimizer)| optimizer.on_host());
                            // The receiver may be dropped already.
                            let _ = reply.send(state);
                            continue;
                        }
                        RankCommand::Evaluate(what, reply) => {
                            let evaluate = AssertUnwindSafe(|| replica.evaluate(&what));
                            reply(match pool.install(|| catch_unwind(evaluate)) {
                                Ok(outcome) => outcome.map_err(|error| failed(rank, error)),
                                Err(panic) => Err(panicked(rank, panic.as_ref())),
                            });
                            continue;
                        }
                        RankCommand::Step(plan, batches) => {
                            pool.install(|| catch_unwind(AssertUnwindSafe(|| replica.step(&plan, &batches))))
                        }
                    };
                    let outcome = outcome.unwrap_or_else(|panic| Err(panicked(rank, panic.as_ref())));
                    if let Err(error) = &outcome {
                        replica.step_failed(error);
                    }
                    let ended = outcome.is_err();
                    if report.send(outcome).is_err() || ended {
                        return;
                    }
                }
            })
            .map_err(|e| TrainingError::rank(rank, format!("its thread cannot be started: {e}")))?;
        Ok(RankHandle { commands, reports })
    }
}

fn panicked(rank: usize, panic: &(dyn Any + Send)) -> TrainingError {
    TrainingError::rank(rank, format!("it panicked: {}", panic_text(panic)))
}

/// An error with the rank that it is of.
fn failed(rank: usize, error: TrainingError) -> TrainingError {
    let (rank, message) = error.of_rank(rank);
    TrainingError::rank(rank, message)
}

/// The thread pool of one rank. Ranks share none: a rank that waits for another one must not block a thread that the
/// other one needs.
pub(crate) fn rank_thread_pool(rank: usize, threads: usize) -> Result<ThreadPool, TrainingError> {
    flow_kernels::threads::pool(&format!("rank-{rank}"), threads)
        .map_err(|e| TrainingError::rank(rank, format!("its threads cannot be started: {e}")))
}

/// The error where the channels of a rank are closed, or it does not report in time.
pub(crate) fn rank_disconnected(rank: usize) -> TrainingError {
    TrainingError::rank(rank, "it does not answer any more")
}

/// The error where a rank takes no more commands: why the first of its group failed, if one has.
pub(crate) fn gone(watch: Option<&GroupWatch>, rank: usize) -> TrainingError {
    let failed = watch.and_then(|watch| watch.check().err());
    failed.unwrap_or_else(|| rank_disconnected(rank))
}
