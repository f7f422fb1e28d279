//! The update that ends a step: in place; or, offloaded, in host memory, while the next forward pass goes on.
//!
//! Offloaded, a rank keeps the sums of its gradients, its moments and a copy of all parameters in host memory. A thread
//! updates the copy part by part, in the order in which the model reads them, and the next forward pass waits before each
//! part until that one is done and brings it to the device. Every pass computes with the updated parameters, so nothing
//! but time depends on it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use candle_core::Device;
use crossbeam_channel::{Receiver, unbounded};
use flow_model::{Gradients, ParameterId, Parameters, Part};
use rayon::ThreadPool;

use super::{Collective, Place, What, pool};
use crate::error::TrainingError;
use crate::optimizer::AdamW;
use crate::trainer::panic_text;

/// What a rank updates its parameters with.
pub(super) struct Updater {
    /// Holds the moments of the parameters that this rank owns.
    pub optimizer: AdamW,
    pub collective: Box<dyn Collective>,
    /// Sums over all ranks of the gradients of what this one owns.
    pub sums: Gradients,
}

/// How one step updates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StepUpdate {
    pub step: u64,
    pub rate: f64,
    /// What every gradient is multiplied by.
    pub scale: f64,
}

impl StepUpdate {
    fn place(&self, round: usize) -> Place {
        Place {
            step: self.step,
            round: round as u32,
            what: What::Parameters,
        }
    }
}

/// A rank's updates, of which one may be under way.
pub(super) struct Updates {
    rank: usize,
    /// None while an update is under way, and after one that panicked.
    updater: Option<Box<Updater>>,
    under_way: Option<UnderWay>,
    /// The parameters in host memory, where updates are offloaded.
    host: Option<Parameters>,
    /// Threads of the updates alone: those of the forward pass wait for them.
    threads: Option<Arc<ThreadPool>>,
}

struct UnderWay {
    /// What the model's own parameters lack, in the order in which it is updated.
    missing: VecDeque<(Part, Vec<ParameterId>)>,
    /// A message for each part that is done.
    done: Receiver<()>,
    thread: JoinHandle<(Box<Updater>, Result<(), TrainingError>)>,
}

impl Updates {
    pub fn new(updater: Updater, parameters: &Parameters, offload: bool) -> Result<Self, TrainingError> {
        Ok(Updates {
            rank: updater.collective.rank(),
            updater: Some(Box::new(updater)),
            under_way: None,
            host: offload.then(|| parameters.copied_to(&Device::Cpu)).transpose()?,
            threads: None,
        })
    }

    /// What updates are made with, when none is under way any more; what the last one changed is brought to `parameters`.
    pub fn settled(&mut self, parameters: &Parameters) -> Result<&mut Updater, TrainingError> {
        self.bring(None, parameters)?;
        let (rank, gone) = (self.rank, "its last update panicked");
        self.updater.as_deref_mut().ok_or_else(|| TrainingError::Rank {
            rank,
            message: gone.into(),
        })
    }

    /// Brings what the last update changes of a part, and of those before it, to `parameters`; waits until it is there.
    pub fn need(&mut self, part: Part, parameters: &Parameters) -> Result<(), TrainingError> {
        let missing = |under_way: &UnderWay| under_way.missing.iter().any(|(other, _)| *other == part);
        match self.under_way.as_ref().is_some_and(missing) {
            true => self.bring(Some(part), parameters),
            false => Ok(()),
        }
    }

    /// The same up to the end where no part is named.
    fn bring(&mut self, until: Option<Part>, parameters: &Parameters) -> Result<(), TrainingError> {
        let (Some(under_way), Some(host)) = (&mut self.under_way, &self.host) else {
            return Ok(());
        };
        // Nothing comes any more where the update failed, which the end of its thread tells.
        while !under_way.missing.is_empty() && under_way.done.recv().is_ok() {
            let Some((part, ids)) = under_way.missing.pop_front() else {
                break;
            };
            for id in ids {
                let new = host.get(id).to_device(parameters.device())?;
                parameters.get(id).slice_set(&new, 0, 0)?;
            }
            if until == Some(part) && !under_way.missing.is_empty() {
                return Ok(());
            }
        }
        self.join()
    }

    /// Waits for the thread of an update.
    fn join(&mut self) -> Result<(), TrainingError> {
        match self.under_way.take().map(|under_way| under_way.thread.join()) {
            None => Ok(()),
            Some(Ok((updater, outcome))) => {
                self.updater = Some(updater);
                outcome
            }
            Some(Err(panic)) => Err(TrainingError::Rank {
                rank: self.rank,
                message: format!("its update panicked: {}", panic_text(panic.as_ref())),
            }),
        }
    }

    /// Updates `parts`, given in the order of the forward pass, by the sums that stand, or begins to. The other ranks do the
    /// same.
    pub fn update(
        &mut self,
        parts: VecDeque<(Part, Vec<ParameterId>)>,
        update: StepUpdate,
        parameters: &mut Parameters,
    ) -> Result<(), TrainingError> {
        self.settled(parameters)?;
        let Some(mut updater) = self.updater.take() else {
            return Ok(());
        };
        let Some(host) = &self.host else {
            let changed: Vec<ParameterId> = parts.into_iter().flat_map(|(_, ids)| ids).collect();
            let outcome = updater.update(&changed, &update, 0, parameters);
            self.updater = Some(updater);
            return outcome;
        };
        let threads = match &self.threads {
            Some(threads) => Arc::clone(threads),
            // As many as this rank's share of the processor.
            None => Arc::clone(
                self.threads
                    .insert(Arc::new(pool(self.rank, rayon::current_num_threads())?)),
            ),
        };
        let (tell, done) = unbounded();
        let (missing, mut host) = (parts.clone(), host.clone());
        let work = move || {
            for (round, (_, ids)) in parts.into_iter().enumerate() {
                if let Err(error) = updater.update(&ids, &update, round, &mut host) {
                    return (updater, Err(error));
                }
                // Whoever listened may be gone; the other ranks still need this one's part.
                let _ = tell.send(());
            }
            (updater, Ok(()))
        };
        let thread = std::thread::Builder::new()
            .name(format!("update-{}", self.rank))
            .spawn(move || threads.install(work))
            .map_err(|e| TrainingError::Rank {
                rank: self.rank,
                message: format!("the thread of its update cannot be started: {e}"),
            })?;
        self.under_way = Some(UnderWay { missing, done, thread });
        Ok(())
    }

    /// Lets the other ranks know that this one cannot go on.
    pub fn fail(&mut self, message: &str) {
        // What an update under way has to say comes too late.
        let _ = self.join();
        if let Some(updater) = &mut self.updater {
            updater.collective.fail(message);
        }
    }
}

impl Drop for Updates {
    fn drop(&mut self) {
        // Nobody is left to use its result or to be told of a failure, but its memory is to be free after this.
        let _ = self.join();
    }
}

impl Updater {
    /// Updates what this rank owns of some parameters and exchanges it for what the others own. The sums are used up.
    fn update(
        &mut self,
        ids: &[ParameterId],
        update: &StepUpdate,
        round: usize,
        parameters: &mut Parameters,
    ) -> Result<(), TrainingError> {
        self.optimizer
            .step_of(ids, parameters, &self.sums, update.rate, update.scale)?;
        for &id in ids {
            self.sums.take(id);
        }
        if self.collective.size() > 1 {
            self.collective.spread(update.place(round), parameters, ids)?;
        }
        Ok(())
    }
}
