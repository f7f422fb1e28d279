//! What a process knows of the others: their messages, losses, the end of the run.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

use super::peer::{End, Loss, Peer};
use flow_base::available_memory::available_memory;

/// What a message that is kept costs beside its bytes.
const OF_A_MESSAGE: u64 = 256;

/// Messages that nobody listens to yet may have this share of the memory that is available at first,
const KEPT_SHARE: u64 = 4;
/// and this many bytes at least.
const LEAST_KEPT: u64 = 64 << 20;

pub(super) type LossListener = Arc<dyn Fn(&Loss) + Send + Sync>;

pub(super) type Listener = Arc<dyn Fn(usize, Vec<u8>) + Send + Sync>;

pub(super) enum Topic {
    /// There is no listener yet, or kept messages are still being passed to it.
    Kept(Vec<(usize, Vec<u8>)>),
    Heard(Listener),
    Closed,
}

/// The flags of a run for signals.
#[derive(Clone)]
pub struct SignalFlags {
    /// Number of the signal that asks the run to end.
    pub stop: Arc<AtomicUsize>,
    /// SIGUSR1 came.
    pub checkpoint: Arc<AtomicBool>,
}

impl SignalFlags {
    pub(super) fn set(&self, signal: i32) {
        if signal == SIGUSR1 {
            self.checkpoint.store(true, Ordering::Release);
        } else {
            self.stop.store(usize::try_from(signal).unwrap_or(0), Ordering::Release);
        }
    }
}

/// What the threads of all connections share.
pub(super) struct GroupState {
    inner: Mutex<Inner>,
    changed: Condvar,
    /// The most bytes of messages that nobody listens to yet.
    most_kept: u64,
    /// Bytes of frames.
    pub sent: AtomicU64,
    pub received: AtomicU64,
}

#[derive(Default)]
pub(super) struct Inner {
    pub topics: BTreeMap<u32, Topic>,
    /// What the messages of topics without a listener cost.
    pub kept: u64,
    pub lost: Option<Loss>,
    pub lost_since: Option<Instant>,
    pub on_loss: Vec<LossListener>,
    pub ended: Option<End>,
    /// By process: it said goodbye, or its connection is closed.
    pub gone: Vec<bool>,
    pub signals: Option<SignalFlags>,
    /// Signals that arrived before the flags were set.
    pub early: Vec<i32>,
}

impl GroupState {
    pub fn new(processes: usize) -> Self {
        let share = available_memory().map_or(LEAST_KEPT, |bytes| bytes / KEPT_SHARE);
        GroupState::keeping(processes, share.max(LEAST_KEPT))
    }

    fn keeping(processes: usize, most_kept: u64) -> Self {
        let inner = Inner {
            gone: vec![false; processes],
            ..Inner::default()
        };
        GroupState {
            inner: Mutex::new(inner),
            changed: Condvar::new(),
            most_kept,
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        // Each change under this lock is whole, whatever panicked.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a message of this many bytes may be read.
    ///
    /// # Errors
    /// If nobody listens to its topic, and too much is kept already for who may listen later.
    pub fn admit(&self, topic: u32, bytes: u64) -> io::Result<()> {
        let state = self.lock();
        match state.topics.get(&topic) {
            Some(Topic::Heard(_)) => Ok(()),
            // It is dropped once it is read: what is kept for others does not count.
            Some(Topic::Closed) => self.room_for(0, bytes),
            Some(Topic::Kept(_)) | None => self.room_for(state.kept, bytes),
        }
    }

    fn room_for(&self, kept: u64, bytes: u64) -> io::Result<()> {
        match kept.saturating_add(cost(bytes)) <= self.most_kept {
            true => Ok(()),
            false => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("more than {} bytes that nobody here asked for", self.most_kept),
            )),
        }
    }

    /// # Errors
    /// As of [`GroupState::admit`].
    pub fn deliver(&self, from: usize, topic: u32, body: Vec<u8>) -> io::Result<()> {
        let mut state = self.lock();
        let listener = match state.topics.get(&topic) {
            Some(Topic::Closed) => return Ok(()),
            Some(Topic::Heard(listener)) => Arc::clone(listener),
            Some(Topic::Kept(_)) | None => {
                self.room_for(state.kept, body.len() as u64)?;
                state.kept += cost(body.len() as u64);
                let entry = state.topics.entry(topic).or_insert_with(|| Topic::Kept(Vec::new()));
                if let Topic::Kept(kept) = entry {
                    kept.push((from, body));
                }
                return Ok(());
            }
        };
        drop(state);
        listener(from, body);
        Ok(())
    }

    /// A signal that another process got. Numbers of others than those that end a run or ask for a checkpoint are
    /// ignored.
    pub fn signal(&self, signal: i32) {
        if ![SIGINT, SIGTERM, SIGHUP, SIGUSR1].contains(&signal) {
            return;
        }
        let mut state = self.lock();
        match &state.signals {
            Some(flags) => flags.set(signal),
            None if state.early.contains(&signal) => {}
            None => state.early.push(signal),
        }
    }

    pub fn end(&self, end: End) {
        self.lock().ended.get_or_insert(end);
        self.changed.notify_all();
    }

    /// The connection to a process is closed. A loss, unless it said goodbye or the run has ended.
    ///
    /// The first loss counts, but for that of process 0: it tells the others how the run ends, so that another process which
    /// ended shortly before probably did so because it had lost process 0.
    pub fn closed(&self, peer: &Peer, why: &str) {
        let mut state = self.lock();
        let gone = std::mem::replace(&mut state.gone[peer.process], true);
        let mut told = None;
        let counts = state
            .lost
            .as_ref()
            .is_none_or(|lost| peer.process == 0 && lost.process != 0);
        if !gone && state.ended.is_none() && counts {
            let loss = Loss {
                process: peer.process,
                message: format!("{peer} {why}"),
            };
            told = Some((state.on_loss.clone(), loss.clone()));
            state.lost = Some(loss);
            state.lost_since = Some(Instant::now());
        }
        drop(state);
        self.changed.notify_all();
        if let Some((listeners, loss)) = told {
            listeners.iter().for_each(|listener| listener(&loss));
        }
    }

    pub fn goodbye(&self, process: usize) {
        self.lock().gone[process] = true;
        self.changed.notify_all();
    }

    /// Waits until `what` returns a value, at most for `timeout`.
    pub fn wait_for<R>(&self, timeout: Duration, what: impl Fn(&Inner) -> Option<R>) -> Option<R> {
        let until = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            let found = what(&state);
            let left = until.saturating_duration_since(Instant::now());
            if found.is_some() || left.is_zero() {
                return found;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Inner {
    /// Gives a topic to a listener, or closes it: what was kept for it, which costs nothing more then.
    pub fn take_kept(&mut self, topic: u32) -> Vec<(usize, Vec<u8>)> {
        let kept = match self.topics.get_mut(&topic) {
            Some(Topic::Kept(kept)) => std::mem::take(kept),
            _ => Vec::new(),
        };
        let costs = kept.iter().map(|(_, body)| cost(body.len() as u64)).sum();
        self.kept = self.kept.saturating_sub(costs);
        kept
    }
}

/// What a message of this many bytes costs while it is kept.
fn cost(bytes: u64) -> u64 {
    bytes.saturating_add(OF_A_MESSAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a process sends to topics of which nobody knows takes bounded memory, however many they are and however small.
    #[test]
    fn messages_that_nobody_listens_to_are_bounded() {
        for length in [0usize, 1000] {
            let state = GroupState::keeping(2, 100_000);
            let taken = (0..).take_while(|topic| state.deliver(1, *topic, vec![0; length]).is_ok());
            let taken = taken.count() as u64;
            assert_eq!(taken, 100_000 / (OF_A_MESSAGE + length as u64), "{length}");
            assert!(state.admit(1 << 20, length as u64).is_err());
            // Who listens, or says that it will not, makes room.
            assert_eq!(state.lock().take_kept(0).len(), 1);
            assert!(state.admit(1 << 20, length as u64).is_ok());
            assert_eq!(state.lock().kept, (taken - 1) * (OF_A_MESSAGE + length as u64));
            state.lock().topics.insert(7, Topic::Heard(Arc::new(|_, _| {})));
            assert!(state.admit(7, 1 << 30).is_ok() && state.deliver(1, 7, vec![0; 200_000]).is_ok());
            // Nobody wants them any more: they cost nothing, whatever is kept for others.
            state.lock().topics.insert(8, Topic::Closed);
            while state.deliver(1, 0, vec![0; length]).is_ok() {}
            assert!(state.admit(8, 50_000).is_ok() && state.deliver(1, 8, vec![0; 50_000]).is_ok());
            assert!(state.admit(8, 1 << 30).is_err());
        }
    }

    #[test]
    fn the_loss_of_process_0_explains_those_of_others() {
        let peer = |process| Peer {
            process,
            host: "node".into(),
            pid: 7,
        };
        let state = GroupState::new(4);
        let lost = || state.lock().lost.as_ref().map(|loss| loss.process);
        state.closed(&peer(2), "ended without a message");
        assert_eq!(lost(), Some(2));
        state.closed(&peer(1), "ended without a message");
        assert_eq!(lost(), Some(2));
        state.closed(&peer(0), "ended without a message");
        assert_eq!(lost(), Some(0));
        state.closed(&peer(3), "ended without a message");
        assert_eq!(lost(), Some(0));
    }
}
