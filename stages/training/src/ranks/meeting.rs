//! Ranks that are threads and meet in the memory of their process.
//!
//! Where there are ranks in other processes too, each process has a table of its own for each place. What a rank lays down
//! is sent to the processes that need it and laid down there in its name, so that the rest is the same, to the bit.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_core::Tensor;
use flow_kernels::elementwise::add_in_place;
use flow_model::{ParameterId, Parameters};

use super::elsewhere::Elsewhere;
use super::{Collective, Place, Sums};
use crate::error::TrainingError;

/// One rank of a group.
pub struct Member {
    rank: usize,
    owners: Arc<Vec<usize>>,
    shared: Arc<Shared>,
    waited: Duration,
}

pub(crate) struct Shared {
    size: usize,
    /// The ranks of this process.
    here: Range<usize>,
    timeout: Duration,
    /// The way to the ranks of other processes.
    elsewhere: Option<Elsewhere>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// What was laid down and not yet taken by all.
    tables: BTreeMap<Place, Table>,
    /// The first rank that cannot go on, and why.
    failed: Option<(usize, String)>,
}

struct Table {
    /// By rank; none where a rank has not come.
    laid: Vec<Option<Laid>>,
    /// Ranks of this process that have taken what they need.
    done: usize,
}

/// What a rank lays down.
pub(crate) enum Laid {
    Gradients(BTreeMap<ParameterId, Tensor>),
    Numbers(Vec<f64>),
    Tensors(Vec<Tensor>),
    Parameters(Vec<(ParameterId, Tensor)>),
}

/// The members of a group, in the order of their ranks. A rank waits for the others at most for `timeout`. `owners` says
/// which rank owns which parameter.
pub fn members(size: usize, owners: Vec<usize>, timeout: Duration) -> Vec<Member> {
    members_among(size, 0..size, owners, timeout, None)
}

/// The members that are in this process, where others are elsewhere.
pub(crate) fn members_among(
    size: usize,
    here: Range<usize>,
    owners: Vec<usize>,
    timeout: Duration,
    elsewhere: Option<Elsewhere>,
) -> Vec<Member> {
    let shared = Arc::new(Shared {
        size,
        here: here.clone(),
        timeout,
        elsewhere,
        state: Mutex::default(),
        changed: Condvar::new(),
    });
    let owners = Arc::new(owners);
    if let Some(elsewhere) = &shared.elsewhere {
        elsewhere.listen(&shared);
    }
    here.map(|rank| Member {
        rank,
        owners: owners.clone(),
        shared: shared.clone(),
        waited: Duration::ZERO,
    })
    .collect()
}

impl Drop for Member {
    fn drop(&mut self) {
        // Whoever still waits would do so in vain.
        self.fail("it ended before the others");
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing is left half done under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lays something down in the name of a rank.
    pub fn lay(&self, rank: usize, place: Place, what: Laid) -> Result<(), TrainingError> {
        let mut state = self.lock();
        state.check()?;
        let size = self.size;
        let table = state.tables.entry(place).or_insert_with(|| Table {
            laid: (0..size).map(|_| None).collect(),
            done: 0,
        });
        if let Some(laid) = table.laid.get_mut(rank) {
            *laid = Some(what);
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Notes that a rank cannot go on, as another process says. The first that failed is the one that is named.
    pub fn failed(&self, rank: usize, message: &str) {
        self.lock().failed.get_or_insert_with(|| (rank, message.to_owned()));
        self.changed.notify_all();
    }

    /// The same, as this process says: it tells the others.
    fn fail(&self, state: &mut State, rank: usize, message: String) {
        if state.failed.is_some() {
            return;
        }
        if let Some(elsewhere) = &self.elsewhere {
            elsewhere.fail(rank, &message);
        }
        state.failed = Some((rank, message));
        self.changed.notify_all();
    }
}

impl State {
    fn check(&self) -> Result<(), TrainingError> {
        match &self.failed {
            None => Ok(()),
            Some((rank, message)) => Err(TrainingError::Rank {
                rank: *rank,
                message: message.clone(),
            }),
        }
    }

    fn missing(&self, place: Place) -> Vec<usize> {
        let table = self.tables.get(&place);
        table.map_or(Vec::new(), |table| {
            (0..table.laid.len())
                .filter(|&rank| table.laid[rank].is_none())
                .collect()
        })
    }
}

impl Member {
    fn lay(&self, place: Place, mut what: Laid) -> Result<(), TrainingError> {
        if let Some(elsewhere) = &self.shared.elsewhere {
            elsewhere.lay(self.rank, place, &mut what, &self.owners)?;
        }
        self.shared.lay(self.rank, place, what)
    }

    /// Waits until all ranks have come to a place where this one was before.
    fn wait(&mut self, place: Place) -> Result<MutexGuard<'_, State>, TrainingError> {
        let began = Instant::now();
        let timeout = self.shared.timeout;
        let mut state = self.shared.lock();
        loop {
            let missing = state.missing(place);
            if missing.is_empty() {
                // Also where one has ended since: what it had to give is there.
                self.waited += began.elapsed();
                return Ok(state);
            }
            state.check()?;
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() {
                let message = format!("it did not come to {place} within {} s", timeout.as_secs_f64());
                self.shared.fail(&mut state, missing[0], message);
                continue;
            }
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Fails where a rank has failed.
    #[cfg(feature = "nccl")]
    pub(super) fn check(&self) -> Result<(), TrainingError> {
        self.shared.lock().check()
    }

    /// Gives this rank's numbers, and returns at once.
    #[cfg(feature = "nccl")]
    pub(super) fn announce(&self, place: Place, numbers: Vec<f64>) -> Result<(), TrainingError> {
        self.lay(place, Laid::Numbers(numbers))
    }

    /// The numbers that all ranks gave at a place where this one gave its own. None if not `wait` and they are not there
    /// yet.
    #[cfg(feature = "nccl")]
    pub(super) fn answers(&mut self, place: Place, wait: bool) -> Result<Option<Vec<Vec<f64>>>, TrainingError> {
        if !wait && !self.all_came(place)? {
            return Ok(None);
        }
        self.numbers(place).map(Some)
    }

    fn all_came(&self, place: Place) -> Result<bool, TrainingError> {
        let state = self.shared.lock();
        state.check()?;
        Ok(state.missing(place).is_empty())
    }

    fn numbers(&mut self, place: Place) -> Result<Vec<Vec<f64>>, TrainingError> {
        let all = self.take(place, |table| {
            let numbers = |laid: &Option<Laid>| match laid {
                Some(Laid::Numbers(numbers)) => numbers.clone(),
                _ => Vec::new(),
            };
            table.laid.iter().map(numbers).collect()
        })?;
        Ok(all.unwrap_or_default())
    }

    /// Waits for all, takes what `take` makes of a table, and clears the table when all have.
    fn take<R>(&mut self, place: Place, take: impl FnOnce(&mut Table) -> R) -> Result<Option<R>, TrainingError> {
        let here = self.shared.here.len();
        let mut state = self.wait(place)?;
        let Some(table) = state.tables.get_mut(&place) else {
            return Ok(None);
        };
        let taken = take(table);
        table.done += 1;
        if table.done == here {
            state.tables.remove(&place);
        }
        Ok(Some(taken))
    }
}

impl Collective for Member {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.shared.size
    }

    fn start_sum(&mut self, place: Place, gradients: Vec<(ParameterId, Tensor)>) -> Result<(), TrainingError> {
        self.lay(place, Laid::Gradients(gradients.into_iter().collect()))
    }

    fn finish_sum(&mut self, place: Place, wait: bool) -> Result<Option<Sums>, TrainingError> {
        if !wait && !self.all_came(place)? {
            return Ok(None);
        }
        let (rank, owners) = (self.rank, self.owners.clone());
        let parts = self.take(place, |table| {
            let mut parts: BTreeMap<ParameterId, Vec<Tensor>> = BTreeMap::new();
            for laid in table.laid.iter_mut().flatten() {
                let Laid::Gradients(gradients) = laid else { continue };
                // What others own stays for them.
                let own: Vec<ParameterId> = gradients
                    .keys()
                    .copied()
                    .filter(|id| owners[id.index()] == rank)
                    .collect();
                for id in own {
                    parts.entry(id).or_default().extend(gradients.remove(&id));
                }
            }
            parts
        })?;
        let mut sums = Vec::new();
        for (id, parts) in parts.unwrap_or_default() {
            let mut parts = parts.into_iter();
            let Some(sum) = parts.next() else { continue };
            for part in parts {
                add_in_place(&sum, &part)?;
            }
            sums.push((id, sum));
        }
        Ok(Some(sums))
    }

    fn gather(&mut self, place: Place, numbers: Vec<f64>) -> Result<Vec<Vec<f64>>, TrainingError> {
        self.lay(place, Laid::Numbers(numbers))?;
        self.numbers(place)
    }

    fn gather_tensors(&mut self, place: Place, tensors: Vec<Tensor>) -> Result<Vec<Vec<Tensor>>, TrainingError> {
        self.lay(place, Laid::Tensors(tensors))?;
        let all = self.take(place, |table| {
            let tensors = |laid: &Option<Laid>| match laid {
                Some(Laid::Tensors(tensors)) => tensors.clone(),
                _ => Vec::new(),
            };
            table.laid.iter().map(tensors).collect()
        })?;
        Ok(all.unwrap_or_default())
    }

    fn spread(
        &mut self,
        place: Place,
        parameters: &mut Parameters,
        changed: &[ParameterId],
    ) -> Result<(), TrainingError> {
        let own = changed.iter().filter(|id| self.owners[id.index()] == self.rank);
        let own = own.map(|&id| (id, parameters.get(id).clone())).collect();
        self.lay(place, Laid::Parameters(own))?;
        let rank = self.rank;
        let others = self.take(place, |table| {
            let mut others = Vec::new();
            for laid in table.laid.iter().enumerate().filter(|(other, _)| *other != rank) {
                if let (_, Some(Laid::Parameters(values))) = laid {
                    others.extend(values.iter().cloned());
                }
            }
            others
        })?;
        // The owners change these tensors in their next update only, for which they need figures that this rank gives
        // after it has copied.
        for (id, tensor) in others.unwrap_or_default() {
            parameters.overwrite(id, &tensor)?;
        }
        Ok(())
    }

    fn fail(&mut self, message: &str) {
        let mut state = self.shared.lock();
        self.shared.fail(&mut state, self.rank, message.to_owned());
    }

    fn waited(&mut self) -> f64 {
        std::mem::take(&mut self.waited).as_secs_f64()
    }
}
