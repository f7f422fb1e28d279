//! The update of the parameters at the end of a step: in place, or offloaded to host memory while the next forward pass
//! runs.
//!
//! With offloading a rank keeps the sums of its gradients, its moments and a copy of all parameters in host memory. A
//! thread updates the copy group by group, in the order in which the model reads them. The next forward pass waits
//! before each group until its update is done, and copies it to the device. Every pass computes with the updated
//! parameters, so the result does not depend on offloading.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use candle_core::Device;
use crossbeam_channel::{Receiver, unbounded};
use flow_model::{Gradients, ParameterGroup, ParameterId, Parameters};
use rayon::ThreadPool;

use super::{Collective, CollectiveKey, CollectiveOp, copy_into, rank_disconnected, rank_thread_pool};
use crate::error::TrainingError;
use crate::optimizer::AdamW;
use crate::trainer::panic_text;

/// The optimizer and the collective of a rank.
pub(super) struct Updater {
    /// Holds the moments of the parameters that this rank owns.
    pub optimizer: AdamW,
    pub collective: Box<dyn Collective>,
    /// Sums over all ranks of the gradients of the parameters that this one owns.
    pub sums: Gradients,
}

/// The scalars of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StepUpdate {
    pub step: u64,
    /// The learning rate.
    pub rate: f64,
    /// Factor on every gradient.
    pub scale: f64,
}

impl StepUpdate {
    /// Of the broadcast of the group with this index.
    fn key(&self, round: usize) -> CollectiveKey {
        CollectiveKey {
            step: self.step,
            round: round as u32,
            op: CollectiveOp::BroadcastParameters,
        }
    }
}

/// The updates of a rank, of which at most one is running.
pub(super) struct ParameterUpdates {
    rank: usize,
    /// None while an offloaded update is running, and after one that panicked.
    updater: Option<Box<Updater>>,
    running: Option<RunningUpdate>,
    /// Groups whose new values come from their owners, in the order in which the broadcasts were started. Without
    /// offloading.
    broadcasts: VecDeque<(ParameterGroup, CollectiveKey)>,
    /// The parameters in host memory, where updates are offloaded.
    host: Option<Parameters>,
    /// Threads for offloaded updates: those of the forward pass wait for them.
    threads: Option<Arc<ThreadPool>>,
}

struct RunningUpdate {
    /// Groups that are not copied to the model yet, in the order in which they are updated.
    remaining: VecDeque<(ParameterGroup, Vec<ParameterId>)>,
    /// A message for each group that is updated.
    done: Receiver<()>,
    thread: JoinHandle<(Box<Updater>, Result<(), TrainingError>)>,
}

impl ParameterUpdates {
    pub fn new(updater: Updater, parameters: &Parameters, offload: bool) -> Result<Self, TrainingError> {
        Ok(ParameterUpdates {
            rank: updater.collective.rank(),
            updater: Some(Box::new(updater)),
            running: None,
            broadcasts: VecDeque::new(),
            host: offload.then(|| parameters.copied_to(&Device::Cpu)).transpose()?,
            threads: None,
        })
    }

    /// Waits for a running update, and for new values from other ranks, until `parameters` have all of them.
    ///
    /// # Errors
    /// Where the update failed or panicked, or another rank failed.
    pub fn synchronize(&mut self, parameters: &Parameters) -> Result<&mut Updater, TrainingError> {
        self.copy_updated(None, parameters)?;
        self.finish_broadcasts(None, parameters)?;
        let rank = self.rank;
        self.updater
            .as_deref_mut()
            .ok_or_else(|| TrainingError::rank(rank, "its last update panicked"))
    }

    /// The collective, in the middle of a pass: new values of parameters may still be on their way. An offloaded update is
    /// waited for.
    pub fn collective(&mut self, parameters: &Parameters) -> Result<&mut dyn Collective, TrainingError> {
        self.copy_updated(None, parameters)?;
        match &mut self.updater {
            Some(updater) => Ok(updater.collective.as_mut()),
            None => Err(rank_disconnected(self.rank)),
        }
    }

    /// Waits until `parameters` have the new values of a group and of those before it.
    pub fn wait_for_group(&mut self, group: ParameterGroup, parameters: &Parameters) -> Result<(), TrainingError> {
        let remains = |running: &RunningUpdate| running.remaining.iter().any(|(other, _)| *other == group);
        match self.running.as_ref().is_some_and(remains) {
            true => self.copy_updated(Some(group), parameters),
            false => self.finish_broadcasts(Some(group), parameters),
        }
    }

    /// Waits for broadcasts: those up to that of `until`, if it is among them, or all.
    fn finish_broadcasts(
        &mut self,
        until: Option<ParameterGroup>,
        parameters: &Parameters,
    ) -> Result<(), TrainingError> {
        let count = match until {
            None => self.broadcasts.len(),
            Some(until) => {
                let at = self.broadcasts.iter().position(|(group, _)| *group == until);
                at.map_or(0, |at| at + 1)
            }
        };
        let Some(updater) = &mut self.updater else {
            return Ok(());
        };
        for (_, key) in self.broadcasts.drain(..count) {
            updater.collective.finish_broadcast(key, parameters)?;
        }
        Ok(())
    }

    /// Copies groups to `parameters` as their updates end: up to `until`, or all.
    fn copy_updated(&mut self, until: Option<ParameterGroup>, parameters: &Parameters) -> Result<(), TrainingError> {
        let (Some(running), Some(host)) = (&mut self.running, &self.host) else {
            return Ok(());
        };
        // No message comes where the update failed; `join` gives its error.
        while !running.remaining.is_empty() && running.done.recv().is_ok() {
            let Some((group, ids)) = running.remaining.pop_front() else {
                break;
            };
            for id in ids {
                copy_into(parameters, id, host.get(id))?;
            }
            if until == Some(group) && !running.remaining.is_empty() {
                return Ok(());
            }
        }
        self.join()
    }

    /// Waits for the thread of a running update.
    fn join(&mut self) -> Result<(), TrainingError> {
        match self.running.take().map(|running| running.thread.join()) {
            None => Ok(()),
            Some(Ok((updater, outcome))) => {
                self.updater = Some(updater);
                outcome
            }
            Some(Err(panic)) => Err(TrainingError::rank(
                self.rank,
                format!("its update panicked: {}", panic_text(panic.as_ref())),
            )),
        }
    }

    /// Updates `groups`, in the order of the forward pass, with the sums of gradients; with offloading only starts to, and
    /// with several ranks only starts to give each other the new values. All ranks do so with the same groups.
    pub fn update(
        &mut self,
        groups: VecDeque<(ParameterGroup, Vec<ParameterId>)>,
        update: StepUpdate,
        parameters: &mut Parameters,
    ) -> Result<(), TrainingError> {
        self.synchronize(parameters)?;
        if self.host.is_none() {
            return self.update_in_place(&groups, &update, parameters);
        }
        let (Some(mut updater), Some(host)) = (self.updater.take(), &self.host) else {
            return Ok(());
        };
        let threads = match &self.threads {
            Some(threads) => Arc::clone(threads),
            // As many as this rank's share of the processor.
            None => Arc::clone(
                self.threads
                    .insert(Arc::new(rank_thread_pool(self.rank, rayon::current_num_threads())?)),
            ),
        };
        let (updated, done) = unbounded();
        let (remaining, host) = (groups.clone(), host.clone());
        let work = move || {
            for (round, (_, ids)) in groups.into_iter().enumerate() {
                if let Err(error) = updater.update(&ids, &update, round, &host) {
                    return (updater, Err(error));
                }
                // The receiver may be dropped; the other ranks still need the parameters of this one.
                let _ = updated.send(());
            }
            (updater, Ok(()))
        };
        let thread = std::thread::Builder::new()
            .name(format!("update-{}", self.rank))
            .spawn(move || threads.install(work))
            .map_err(|e| TrainingError::rank(self.rank, format!("the thread of its update cannot be started: {e}")))?;
        self.running = Some(RunningUpdate {
            remaining,
            done,
            thread,
        });
        Ok(())
    }

    /// Updates the groups, and starts to broadcast the new values group by group: the next forward pass waits for each
    /// before it reads it.
    fn update_in_place(
        &mut self,
        groups: &VecDeque<(ParameterGroup, Vec<ParameterId>)>,
        update: &StepUpdate,
        parameters: &Parameters,
    ) -> Result<(), TrainingError> {
        let Some(updater) = &mut self.updater else {
            return Ok(());
        };
        let changed: Vec<ParameterId> = groups.iter().flat_map(|(_, ids)| ids).copied().collect();
        updater.apply(&changed, update, parameters)?;
        if updater.collective.size() > 1 {
            for (round, (group, ids)) in groups.iter().enumerate() {
                let key = update.key(round);
                updater.collective.start_broadcast(key, parameters, ids)?;
                self.broadcasts.push_back((*group, key));
            }
        }
        Ok(())
    }

    /// Makes the other ranks fail with an error that names this one.
    pub fn abort(&mut self, message: &str) {
        // An error of a running update comes too late to be named.
        let _ = self.join();
        if let Some(updater) = &mut self.updater {
            updater.collective.abort(message);
        }
    }
}

impl Drop for ParameterUpdates {
    fn drop(&mut self) {
        // Its result is not used any more, but its memory must be free after this.
        let _ = self.join();
    }
}

impl Updater {
    /// Updates those of `ids` that this rank owns. The sums of their gradients are dropped.
    fn apply(
        &mut self,
        ids: &[ParameterId],
        update: &StepUpdate,
        parameters: &Parameters,
    ) -> Result<(), TrainingError> {
        self.optimizer
            .step_of(ids, parameters, &self.sums, update.rate, update.scale)?;
        for &id in ids {
            self.sums.take(id);
        }
        Ok(())
    }

    /// Updates those of `ids` that this rank owns, and gets the new values of the others from their owners.
    fn update(
        &mut self,
        ids: &[ParameterId],
        update: &StepUpdate,
        round: usize,
        parameters: &Parameters,
    ) -> Result<(), TrainingError> {
        self.apply(ids, update, parameters)?;
        if self.collective.size() > 1 {
            let key = update.key(round);
            self.collective.start_broadcast(key, parameters, ids)?;
            self.collective.finish_broadcast(key, parameters)?;
        }
        Ok(())
    }
}
