//! The way to the ranks of other processes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use flow_model::{ParameterId, Parameters};
use flow_runtime::processes::Processes;

use super::Place;
use super::meeting::{Laid, Shared};
use super::wire::{Parcel, Reader, damaged};
use crate::error::TrainingError;

const LAID: u8 = 0;
const FAILED: u8 = 1;

const GRADIENTS: u8 = 0;
const NUMBERS: u8 = 1;
const TENSORS: u8 = 2;
const PARAMETERS: u8 = 3;

/// How ranks are shared out: each process has as many as any other, in the order of the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    each: usize,
}

/// Shares ranks out over processes.
pub(crate) fn share(ranks: usize, processes: usize) -> Result<Share, TrainingError> {
    if processes == 0 || ranks == 0 || !ranks.is_multiple_of(processes) {
        return Err(TrainingError::setting(
            "ranks",
            format!(
                "{ranks} cannot be shared out evenly over {processes} processes; each has the same number of ranks"
            ),
        ));
    }
    Ok(Share {
        each: ranks / processes,
    })
}

impl Share {
    /// The ranks of a process.
    pub fn of(self, process: usize) -> Range<usize> {
        process * self.each..(process + 1) * self.each
    }

    pub fn process_of(self, rank: usize) -> usize {
        rank / self.each
    }
}

/// Topic of what ranks of one training lay down.
pub(super) fn exchange(session: u32) -> u32 {
    2 + 2 * session
}

/// Tells all other processes that a rank cannot go on.
pub(super) fn tell_failed(processes: &Processes, session: u32, rank: usize, message: &str) {
    for to in (0..processes.count()).filter(|&to| to != processes.process()) {
        let mut parcel = Parcel::of(FAILED);
        parcel.count(rank);
        parcel.text(message);
        processes.send(to, exchange(session), Box::new(parcel));
    }
}

/// Sends what the ranks of this process lay down to those that are elsewhere, and lays down here what they send.
pub(crate) struct Elsewhere {
    processes: Arc<Processes>,
    session: u32,
    share: Share,
    /// By index.
    ids: Vec<ParameterId>,
}

impl Elsewhere {
    pub fn new(processes: &Arc<Processes>, session: u32, share: Share, parameters: &Parameters) -> Elsewhere {
        Elsewhere {
            processes: Arc::clone(processes),
            session,
            share,
            ids: parameters.iter().map(|(id, _)| id).collect(),
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.processes.process();
        (0..self.processes.count()).filter(move |&process| process != own)
    }

    /// Begins to take what others send.
    pub fn listen(&self, shared: &Arc<Shared>) {
        let (share, ids) = (self.share, self.ids.clone());
        let to = Arc::downgrade(shared);
        self.processes.listen(exchange(self.session), move |from, message| {
            if let Some(shared) = to.upgrade()
                && let Err(error) = take(&shared, &message, &ids)
            {
                shared.failed(share.of(from).start, &error.to_string());
            }
        });
        let to: Weak<Shared> = Arc::downgrade(shared);
        self.processes.on_loss(move |loss| {
            if let Some(shared) = to.upgrade() {
                shared.failed(share.of(loss.process).start, &loss.message);
            }
        });
    }

    /// Sends what a rank lays down to the processes that need it. Gradients that are owned elsewhere are taken out.
    pub fn lay(&self, rank: usize, place: Place, what: &mut Laid, owners: &[usize]) -> Result<(), TrainingError> {
        let mut head = Parcel::of(LAID);
        head.count(rank);
        head.place(place);
        match what {
            Laid::Gradients(gradients) => {
                let mut parts: BTreeMap<usize, Vec<_>> = BTreeMap::new();
                let own = self.processes.process();
                let owner = |id: &ParameterId| {
                    owners
                        .get(id.index())
                        .map_or(own, |&owner| self.share.process_of(owner))
                };
                let away: Vec<ParameterId> = gradients.keys().copied().filter(|id| owner(id) != own).collect();
                for id in away {
                    let gradient = gradients.remove(&id).map(|gradient| (id, gradient));
                    parts.entry(owner(&id)).or_default().extend(gradient);
                }
                for to in self.others() {
                    // Also where there is none: others must know that this rank has come.
                    let part = parts.remove(&to).unwrap_or_default();
                    self.send(to, with_ids(&head, GRADIENTS, &part)?);
                }
            }
            Laid::Numbers(numbers) => {
                head.u8(NUMBERS);
                head.count(numbers.len());
                numbers.iter().for_each(|number| head.f64(*number));
                self.others().for_each(|to| self.send(to, head.clone()));
            }
            Laid::Tensors(tensors) => {
                head.u8(TENSORS);
                head.count(tensors.len());
                for tensor in tensors {
                    head.tensor(tensor)?;
                }
                self.others().for_each(|to| self.send(to, head.clone()));
            }
            Laid::Parameters(values) => {
                let parcel = with_ids(&head, PARAMETERS, values)?;
                self.others().for_each(|to| self.send(to, parcel.clone()));
            }
        }
        Ok(())
    }

    fn send(&self, to: usize, parcel: Parcel) {
        self.processes.send(to, exchange(self.session), Box::new(parcel));
    }

    /// Tells the others that a rank cannot go on.
    pub fn fail(&self, rank: usize, message: &str) {
        tell_failed(&self.processes, self.session, rank, message);
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        self.processes.close(exchange(self.session));
    }
}

fn with_ids(head: &Parcel, kind: u8, values: &[(ParameterId, candle_core::Tensor)]) -> Result<Parcel, TrainingError> {
    let mut parcel = head.clone();
    parcel.u8(kind);
    parcel.count(values.len());
    for (id, tensor) in values {
        parcel.count(id.index());
        parcel.tensor(tensor)?;
    }
    Ok(parcel)
}

/// Does what a message says.
fn take(shared: &Shared, message: &[u8], ids: &[ParameterId]) -> Result<(), TrainingError> {
    let (kind, mut reader) = Reader::new(message)?;
    let rank = reader.count()?;
    match kind {
        FAILED => {
            shared.failed(rank, &reader.text()?);
            Ok(())
        }
        LAID => {
            let place = reader.place()?;
            let with_id = |reader: &mut Reader| {
                let id = ids.get(reader.count()?).copied().ok_or_else(damaged)?;
                Ok((id, reader.tensor()?))
            };
            let what = match reader.u8()? {
                GRADIENTS => Laid::Gradients(reader.several(with_id)?.into_iter().collect()),
                NUMBERS => Laid::Numbers(reader.several(Reader::f64)?),
                TENSORS => Laid::Tensors(reader.several(Reader::tensor)?),
                PARAMETERS => Laid::Parameters(reader.several(with_id)?),
                _ => return Err(damaged()),
            };
            // Where a rank has failed already, all know of it.
            let _ = shared.lay(rank, place, what);
            Ok(())
        }
        _ => Err(damaged()),
    }
}
