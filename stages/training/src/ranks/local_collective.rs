//! The collective of ranks that are threads of one process, in its memory.
//!
//! Where other processes have ranks too, each process keeps the pending operations of the whole group. A contribution
//! is sent to the processes that need it and added to their pending operations, so that results are the same to the
//! bit.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{DType, Tensor};
use flow_kernels::elementwise::add_in_place;
use flow_model::{ParameterId, Parameters};

use super::peer_transport::PeerTransport;
use super::{Collective, CollectiveKey, ReducedGradients, copy_into};
use crate::error::TrainingError;

/// One rank of a group whose ranks are threads.
pub struct LocalCollective {
    rank: usize,
    owners: Arc<Vec<usize>>,
    group: Arc<LocalGroup>,
    wait_time: Duration,
}

/// What the ranks of one process have in common.
pub(crate) struct LocalGroup {
    size: usize,
    /// The ranks of this process.
    local_ranks: Range<usize>,
    timeout: Duration,
    /// The connection to the ranks of other processes.
    transport: Option<PeerTransport>,
    state: Mutex<GroupState>,
    changed: Condvar,
}

#[derive(Default)]
struct GroupState {
    /// Operations that not all ranks of this process have finished.
    pending: BTreeMap<CollectiveKey, PendingOperation>,
    /// The first rank that failed, and why.
    failed: Option<(usize, String)>,
}

struct PendingOperation {
    /// By rank; none where a rank has not contributed yet.
    contributions: Vec<Option<Contribution>>,
    /// How many ranks of this process have finished the operation.
    finished: usize,
}

/// The input of one rank to a collective operation.
pub(crate) enum Contribution {
    Gradients(BTreeMap<ParameterId, Tensor>),
    Numbers(Vec<f64>),
    Tensors(Vec<Tensor>),
    Parameters(Vec<(ParameterId, Tensor)>),
}

/// A group of `size` ranks that are all in this process, in their order. A rank waits for the others at most for
/// `timeout`. `owners` gives the owner of each parameter, as [`super::parameter_owners`] does.
pub fn local_group(size: usize, owners: Vec<usize>, timeout: Duration) -> Vec<LocalCollective> {
    group_in_process(size, 0..size, owners, timeout, None)
}

/// The ranks `local_ranks` of a group of `size`, which are in this process; `transport` connects them with the others.
pub(crate) fn group_in_process(
    size: usize,
    local_ranks: Range<usize>,
    owners: Vec<usize>,
    timeout: Duration,
    transport: Option<PeerTransport>,
) -> Vec<LocalCollective> {
    let group = Arc::new(LocalGroup {
        size,
        local_ranks: local_ranks.clone(),
        timeout,
        transport,
        state: Mutex::default(),
        changed: Condvar::new(),
    });
    let owners = Arc::new(owners);
    if let Some(transport) = &group.transport {
        transport.deliver_to(&group);
    }
    local_ranks
        .map(|rank| LocalCollective {
            rank,
            owners: owners.clone(),
            group: group.clone(),
            wait_time: Duration::ZERO,
        })
        .collect()
}

impl Drop for LocalCollective {
    fn drop(&mut self) {
        // Ranks that still wait would do so until the timeout.
        self.abort("it ended before the others");
    }
}

impl LocalGroup {
    fn lock(&self) -> MutexGuard<'_, GroupState> {
        // No change under the lock can be interrupted half way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the contribution of a rank, of this or another process.
    pub fn contribute(&self, rank: usize, key: CollectiveKey, contribution: Contribution) -> Result<(), TrainingError> {
        let mut state = self.lock();
        state.check()?;
        let size = self.size;
        let operation = state.pending.entry(key).or_insert_with(|| PendingOperation {
            contributions: (0..size).map(|_| None).collect(),
            finished: 0,
        });
        if let Some(entry) = operation.contributions.get_mut(rank) {
            *entry = Some(contribution);
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Records that a rank failed, as another process reports. Errors name the rank that failed first.
    pub fn rank_failed(&self, rank: usize, message: &str) {
        self.lock().failed.get_or_insert_with(|| (rank, message.to_owned()));
        self.changed.notify_all();
    }

    /// Records that a rank failed, as this process found, and reports it to the other processes.
    fn fail(&self, state: &mut GroupState, rank: usize, message: String) {
        if state.failed.is_some() {
            return;
        }
        if let Some(transport) = &self.transport {
            transport.send_failure(rank, &message);
        }
        state.failed = Some((rank, message));
        self.changed.notify_all();
    }
}

/// What a thread that works for a rank sees of its group.
pub(crate) struct GroupWatch {
    rank: usize,
    group: Arc<LocalGroup>,
}

impl GroupWatch {
    /// Fails where a rank has failed.
    pub fn check(&self) -> Result<(), TrainingError> {
        self.group.lock().check()
    }

    /// Records that the rank failed, unless one has before. Gives the words for the first failure.
    pub fn fail(&self, message: &str) -> String {
        self.name(self.rank, message)
    }

    /// Records that an operation is not finished in time: of the first rank that has not come to it (`absent` is then
    /// the message), or of this rank (`stuck`).
    pub fn late(&self, key: CollectiveKey, absent: &str, stuck: &str) -> String {
        let missing = self.group.lock().missing_ranks(key).first().copied();
        match missing {
            Some(rank) => self.name(rank, absent),
            None => self.name(self.rank, stuck),
        }
    }

    fn name(&self, rank: usize, message: &str) -> String {
        let mut state = self.group.lock();
        self.group.fail(&mut state, rank, message.to_owned());
        state
            .check()
            .map_or_else(|error| error.to_string(), |()| message.to_owned())
    }
}

impl GroupState {
    fn check(&self) -> Result<(), TrainingError> {
        match &self.failed {
            None => Ok(()),
            Some((rank, message)) => Err(TrainingError::rank(*rank, message.clone())),
        }
    }

    /// The ranks that have not contributed to an operation.
    fn missing_ranks(&self, key: CollectiveKey) -> Vec<usize> {
        let operation = self.pending.get(&key);
        operation.map_or(Vec::new(), |operation| {
            (0..operation.contributions.len())
                .filter(|&rank| operation.contributions[rank].is_none())
                .collect()
        })
    }
}

impl LocalCollective {
    fn contribute(&self, key: CollectiveKey, mut contribution: Contribution) -> Result<(), TrainingError> {
        if let Some(transport) = &self.group.transport {
            transport.send(self.rank, key, &mut contribution, &self.owners)?;
        }
        self.group.contribute(self.rank, key, contribution)
    }

    /// Waits until all ranks have contributed to an operation to which this one has.
    fn wait_for_all(&mut self, key: CollectiveKey) -> Result<MutexGuard<'_, GroupState>, TrainingError> {
        let began = Instant::now();
        let timeout = self.group.timeout;
        let mut state = self.group.lock();
        loop {
            let missing = state.missing_ranks(key);
            if missing.is_empty() {
                // Also where a rank has ended since: its contribution is complete.
                self.wait_time += began.elapsed();
                return Ok(state);
            }
            state.check()?;
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() {
                let message = format!("it did not come to {key} within {} s", timeout.as_secs_f64());
                self.group.fail(&mut state, missing[0], message);
                continue;
            }
            state = self
                .group
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// For a thread that works for this rank.
    pub(crate) fn watch(&self) -> GroupWatch {
        GroupWatch {
            rank: self.rank,
            group: self.group.clone(),
        }
    }

    /// Fails where a rank has failed.
    pub(super) fn check(&self) -> Result<(), TrainingError> {
        self.group.lock().check()
    }

    /// Starts an all-gather of numbers, and returns at once.
    pub(super) fn start_all_gather(&self, key: CollectiveKey, numbers: Vec<f64>) -> Result<(), TrainingError> {
        self.contribute(key, Contribution::Numbers(numbers))
    }

    /// The numbers of all ranks, of an all-gather that was started. With `wait` it waits for them; otherwise None where
    /// a rank has not contributed yet.
    pub(super) fn finish_all_gather(
        &mut self,
        key: CollectiveKey,
        wait: bool,
    ) -> Result<Option<Vec<Vec<f64>>>, TrainingError> {
        if !wait && !self.is_complete(key)? {
            return Ok(None);
        }
        self.collect_numbers(key).map(Some)
    }

    /// Whether all ranks have contributed.
    fn is_complete(&self, key: CollectiveKey) -> Result<bool, TrainingError> {
        let state = self.group.lock();
        state.check()?;
        Ok(state.missing_ranks(key).is_empty())
    }

    fn collect_numbers(&mut self, key: CollectiveKey) -> Result<Vec<Vec<f64>>, TrainingError> {
        let all = self.finish(key, |operation| {
            let numbers = |contribution: &Option<Contribution>| match contribution {
                Some(Contribution::Numbers(numbers)) => numbers.clone(),
                _ => Vec::new(),
            };
            operation.contributions.iter().map(numbers).collect()
        })?;
        Ok(all.unwrap_or_default())
    }

    /// Waits for all contributions and gives what `read` takes from them. The operation is removed when all ranks of
    /// this process have finished it.
    fn finish<R>(
        &mut self,
        key: CollectiveKey,
        read: impl FnOnce(&mut PendingOperation) -> R,
    ) -> Result<Option<R>, TrainingError> {
        let local_ranks = self.group.local_ranks.len();
        let mut state = self.wait_for_all(key)?;
        let Some(operation) = state.pending.get_mut(&key) else {
            return Ok(None);
        };
        let result = read(operation);
        operation.finished += 1;
        if operation.finished == local_ranks {
            state.pending.remove(&key);
        }
        Ok(Some(result))
    }
}

impl Collective for LocalCollective {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.size
    }

    fn start_reduce_scatter(
        &mut self,
        key: CollectiveKey,
        gradients: Vec<(ParameterId, Tensor)>,
    ) -> Result<(), TrainingError> {
        self.contribute(key, Contribution::Gradients(gradients.into_iter().collect()))
    }

    fn finish_reduce_scatter(
        &mut self,
        key: CollectiveKey,
        wait: bool,
    ) -> Result<Option<ReducedGradients>, TrainingError> {
        if !wait && !self.is_complete(key)? {
            return Ok(None);
        }
        let (rank, owners) = (self.rank, self.owners.clone());
        let terms = self.finish(key, |operation| {
            let mut terms: BTreeMap<ParameterId, Vec<Tensor>> = BTreeMap::new();
            // In the order of the ranks.
            for contribution in operation.contributions.iter_mut().flatten() {
                let Contribution::Gradients(gradients) = contribution else {
                    continue;
                };
                // The gradients that other ranks own stay for them.
                let own: Vec<ParameterId> = gradients
                    .keys()
                    .copied()
                    .filter(|id| owners[id.index()] == rank)
                    .collect();
                for id in own {
                    terms.entry(id).or_default().extend(gradients.remove(&id));
                }
            }
            terms
        })?;
        let mut sums = Vec::new();
        for (id, terms) in terms.unwrap_or_default() {
            // Sums of numbers that were sent in bf16 are taken in f32.
            let wide = |term: Tensor| match term.dtype() {
                DType::BF16 => term.to_dtype(DType::F32),
                _ => Ok(term),
            };
            let mut terms = terms
                .into_iter()
                .map(wide)
                .collect::<candle_core::Result<Vec<_>>>()?
                .into_iter();
            let Some(sum) = terms.next() else { continue };
            for term in terms {
                add_in_place(&sum, &term)?;
            }
            sums.push((id, sum));
        }
        Ok(Some(sums))
    }

    fn all_gather(&mut self, key: CollectiveKey, numbers: Vec<f64>) -> Result<Vec<Vec<f64>>, TrainingError> {
        self.contribute(key, Contribution::Numbers(numbers))?;
        self.collect_numbers(key)
    }

    fn all_gather_tensors(
        &mut self,
        key: CollectiveKey,
        tensors: Vec<Tensor>,
    ) -> Result<Vec<Vec<Tensor>>, TrainingError> {
        self.contribute(key, Contribution::Tensors(tensors))?;
        let all = self.finish(key, |operation| {
            let tensors = |contribution: &Option<Contribution>| match contribution {
                Some(Contribution::Tensors(tensors)) => tensors.clone(),
                _ => Vec::new(),
            };
            operation.contributions.iter().map(tensors).collect()
        })?;
        Ok(all.unwrap_or_default())
    }

    fn start_broadcast(
        &mut self,
        key: CollectiveKey,
        parameters: &Parameters,
        changed: &[ParameterId],
    ) -> Result<(), TrainingError> {
        let own = changed.iter().filter(|id| self.owners[id.index()] == self.rank);
        let own = own.map(|&id| (id, parameters.get(id).clone())).collect();
        self.contribute(key, Contribution::Parameters(own))
    }

    fn finish_broadcast(&mut self, key: CollectiveKey, parameters: &Parameters) -> Result<(), TrainingError> {
        let rank = self.rank;
        let others = self.finish(key, |operation| {
            let mut others = Vec::new();
            let contributions = operation.contributions.iter().enumerate();
            for contribution in contributions.filter(|(other, _)| *other != rank) {
                if let (_, Some(Contribution::Parameters(values))) = contribution {
                    others.extend(values.iter().cloned());
                }
            }
            others
        })?;
        // The owners change these tensors only in their next update. That needs metrics which this rank contributes
        // after it has copied the tensors.
        for (id, tensor) in others.unwrap_or_default() {
            copy_into(parameters, id, &tensor)?;
        }
        Ok(())
    }

    fn abort(&mut self, message: &str) {
        let mut state = self.group.lock();
        self.group.fail(&mut state, self.rank, message.to_owned());
    }

    fn take_wait_seconds(&mut self) -> f64 {
        std::mem::take(&mut self.wait_time).as_secs_f64()
    }
}
