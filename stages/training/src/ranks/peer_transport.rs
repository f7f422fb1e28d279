//! Messages between the ranks of several processes.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use candle_core::Tensor;
use flow_kind::processes::Processes;
use flow_model::{ParameterId, Parameters};

use super::codec::{Message, MessageReader, malformed_message};
use super::local_collective::{Contribution, LocalGroup};
use super::{CollectiveKey, RankLayout};
use crate::error::TrainingError;

// Kinds of messages.
const CONTRIBUTION: u8 = 0;
const RANK_FAILED: u8 = 1;

// Kinds of contributions.
const GRADIENTS: u8 = 0;
const NUMBERS: u8 = 1;
const TENSORS: u8 = 2;
const PARAMETERS: u8 = 3;

/// Topic of the messages between the ranks of one training.
pub(super) fn peer_topic(session: u32) -> u32 {
    2 + 2 * session
}

/// Reports to all other processes that a rank failed.
pub(super) fn broadcast_failure(processes: &Processes, session: u32, rank: usize, message: &str) {
    for to in (0..processes.count()).filter(|&to| to != processes.process()) {
        let failure = Message::new(RANK_FAILED).with(&rank).with_text(message);
        processes.send(to, peer_topic(session), Box::new(failure));
    }
}

/// Sends the contributions of the ranks of this process to the other processes, and receives theirs.
pub(crate) struct PeerTransport {
    processes: Arc<Processes>,
    session: u32,
    layout: RankLayout,
    /// By index; messages name parameters by index.
    ids: Vec<ParameterId>,
}

impl PeerTransport {
    pub fn new(processes: &Arc<Processes>, session: u32, layout: RankLayout, parameters: &Parameters) -> PeerTransport {
        PeerTransport {
            processes: Arc::clone(processes),
            session,
            layout,
            ids: parameters.iter().map(|(id, _)| id).collect(),
        }
    }

    fn other_processes(&self) -> impl Iterator<Item = usize> {
        let own = self.processes.process();
        (0..self.processes.count()).filter(move |&process| process != own)
    }

    /// Adds the contributions and failures that other processes send to `group`, for as long as it exists.
    pub fn deliver_to(&self, group: &Arc<LocalGroup>) {
        let (layout, ids) = (self.layout, self.ids.clone());
        let to = Arc::downgrade(group);
        self.processes.listen(peer_topic(self.session), move |from, message| {
            if let Some(group) = to.upgrade()
                && let Err(error) = deliver(&group, &message, &ids)
            {
                group.rank_failed(layout.ranks_of(from).start, &error.to_string());
            }
        });
        let to: Weak<LocalGroup> = Arc::downgrade(group);
        self.processes.on_loss(move |loss| {
            if let Some(group) = to.upgrade() {
                group.rank_failed(layout.ranks_of(loss.process).start, &loss.message);
            }
        });
    }

    /// Sends the contribution of a rank to the processes that need it. Gradients whose owners are in other processes
    /// are removed from it.
    pub fn send(
        &self,
        rank: usize,
        key: CollectiveKey,
        contribution: &mut Contribution,
        owners: &[usize],
    ) -> Result<(), TrainingError> {
        let head = Message::new(CONTRIBUTION).with(&rank).with(&key);
        match contribution {
            Contribution::Gradients(gradients) => {
                let mut by_process: BTreeMap<usize, Vec<_>> = BTreeMap::new();
                let own = self.processes.process();
                let owner = |id: &ParameterId| {
                    owners
                        .get(id.index())
                        .map_or(own, |&owner| self.layout.process_of(owner))
                };
                let sent: Vec<ParameterId> = gradients.keys().copied().filter(|id| owner(id) != own).collect();
                for id in sent {
                    let gradient = gradients.remove(&id).map(|gradient| (id, gradient));
                    by_process.entry(owner(&id)).or_default().extend(gradient);
                }
                for to in self.other_processes() {
                    // An empty list too: it says that this rank has contributed.
                    let gradients = by_process.remove(&to).unwrap_or_default();
                    self.post(to, with_ids(&head, GRADIENTS, &gradients)?);
                }
            }
            Contribution::Numbers(numbers) => {
                let head = head.with(&NUMBERS).with(numbers);
                self.other_processes().for_each(|to| self.post(to, head.clone()));
            }
            Contribution::Tensors(tensors) => {
                let head = head.with(&TENSORS).with(&tensors.len());
                let head = tensors.iter().try_fold(head, Message::with_tensor)?;
                self.other_processes().for_each(|to| self.post(to, head.clone()));
            }
            Contribution::Parameters(values) => {
                let message = with_ids(&head, PARAMETERS, values)?;
                self.other_processes().for_each(|to| self.post(to, message.clone()));
            }
        }
        Ok(())
    }

    fn post(&self, to: usize, message: Message) {
        self.processes.send(to, peer_topic(self.session), Box::new(message));
    }

    /// Reports to the other processes that a rank failed.
    pub fn send_failure(&self, rank: usize, message: &str) {
        broadcast_failure(&self.processes, self.session, rank, message);
    }
}

impl Drop for PeerTransport {
    fn drop(&mut self) {
        self.processes.close(peer_topic(self.session));
    }
}

fn with_ids(head: &Message, kind: u8, values: &[(ParameterId, Tensor)]) -> Result<Message, TrainingError> {
    let head = head.clone().with(&kind).with(&values.len());
    let mut values = values.iter();
    values.try_fold(head, |message, (id, tensor)| {
        message.with(&id.index()).with_tensor(tensor)
    })
}

/// Adds a message of another process to the group.
fn deliver(group: &LocalGroup, message: &[u8], ids: &[ParameterId]) -> Result<(), TrainingError> {
    let (kind, mut reader) = MessageReader::new(message)?;
    let rank = reader.value()?;
    match kind {
        RANK_FAILED => {
            group.rank_failed(rank, &reader.value::<String>()?);
            Ok(())
        }
        CONTRIBUTION => {
            let key = reader.value()?;
            let with_id = |reader: &mut MessageReader| {
                let id = ids
                    .get(reader.value::<usize>()?)
                    .copied()
                    .ok_or_else(malformed_message)?;
                Ok((id, reader.tensor()?))
            };
            let contribution = match reader.value()? {
                GRADIENTS => Contribution::Gradients(reader.list(with_id)?.into_iter().collect()),
                NUMBERS => Contribution::Numbers(reader.value()?),
                TENSORS => Contribution::Tensors(reader.list(MessageReader::tensor)?),
                PARAMETERS => Contribution::Parameters(reader.list(with_id)?),
                _ => return Err(malformed_message()),
            };
            // An error means that a rank failed before, which all ranks learn from the group.
            let _ = group.contribute(rank, key, contribution);
            Ok(())
        }
        _ => Err(malformed_message()),
    }
}
