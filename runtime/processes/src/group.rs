//! This process among those of its run.

use std::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};

use super::link::{self, Outgoing};
use super::peer::{End, Loss, Outcome, Payload, Peer};
use super::state::{GroupState, Inner, Listener, SignalFlags, Topic};

/// How long process 0 waits until the others have received the end of the run, and they for each other.
const FAREWELL: Duration = Duration::from_secs(5);

/// This process among those of its run.
pub struct Processes {
    own: usize,
    peers: Vec<Peer>,
    /// By process; none for this one.
    links: Vec<Option<Sender<Outgoing>>>,
    streams: Vec<TcpStream>,
    shared: Arc<GroupState>,
    sessions: AtomicU32,
    /// By type; see [`Processes::shared`].
    values: Mutex<BTreeMap<TypeId, Arc<dyn Any + Send + Sync>>>,
}

impl Processes {
    pub(super) fn new(own: usize, peers: Vec<Peer>, streams: Vec<Option<TcpStream>>) -> io::Result<Processes> {
        let shared = Arc::new(GroupState::new(peers.len()));
        let mut processes = Processes {
            own,
            peers,
            links: Vec::new(),
            streams: Vec::new(),
            shared,
            sessions: AtomicU32::new(0),
            values: Mutex::default(),
        };
        for (process, stream) in streams.into_iter().enumerate() {
            let link = match stream {
                None => None,
                Some(stream) => {
                    processes.streams.push(stream.try_clone()?);
                    let peer = processes.peers[process].clone();
                    Some(link::start(&processes.shared, peer, stream)?)
                }
            };
            processes.links.push(link);
        }
        Ok(processes)
    }

    /// This process; 0 runs the pipeline.
    pub fn process(&self) -> usize {
        self.own
    }

    /// Number of processes.
    pub fn count(&self) -> usize {
        self.peers.len()
    }

    /// All processes, this one among them.
    pub fn peers(&self) -> &[Peer] {
        &self.peers
    }

    /// A unique number, which separates the messages of consecutive uses of a topic.
    pub fn new_session(&self) -> u32 {
        self.sessions.fetch_add(1, Ordering::Relaxed)
    }

    /// The one value of type `T` of this process in the run, made by the first call: for what the bodies of a stage and
    /// its threads beside them have in common.
    pub fn shared<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        // A value is inserted whole.
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        let value = values
            .entry(TypeId::of::<T>())
            .or_insert_with(|| Arc::new(T::default()));
        // The key is the type of the value.
        Arc::clone(value).downcast().unwrap_or_default()
    }

    /// Sends a message and returns at once; messages to one process arrive in their order. Messages to a lost process
    /// are dropped; the loss is reported by [`Processes::lost`].
    pub fn send(&self, to: usize, topic: u32, body: Box<dyn Payload>) {
        self.post(to, Outgoing::Message { topic, body });
    }

    fn post(&self, to: usize, what: Outgoing) {
        if let Some(Some(link)) = self.links.get(to) {
            // Its thread is gone if the peer is.
            let _ = link.send(what);
        }
    }

    /// Passes every message of a topic to `listener`, on the receiving threads: in order for each process, beginning
    /// with those that arrived before this call.
    pub fn listen(&self, topic: u32, listener: impl Fn(usize, Vec<u8>) + Send + Sync + 'static) {
        let listener: Listener = Arc::new(listener);
        loop {
            let mut state = self.shared.lock();
            let kept = state.take_kept(topic);
            if kept.is_empty() {
                state.topics.insert(topic, Topic::Heard(listener));
                return;
            }
            drop(state);
            // Messages that arrive meanwhile are kept and passed after these.
            for (from, body) in kept {
                listener(from, body);
            }
        }
    }

    /// Drops further messages of a topic.
    pub fn close(&self, topic: u32) {
        let mut state = self.shared.lock();
        let kept = state.take_kept(topic);
        state.topics.insert(topic, Topic::Closed);
        // Its memory is given back without the lock.
        drop(state);
        drop(kept);
    }

    /// Bytes that this process has sent to the others and received from them, without those of the rendezvous.
    pub fn traffic(&self) -> (u64, u64) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&self.shared.sent), read(&self.shared.received))
    }

    /// The first process that was lost.
    pub fn lost(&self) -> Option<Loss> {
        self.shared.lock().lost.clone()
    }

    /// How long ago the first process was lost.
    pub fn lost_for(&self) -> Option<Duration> {
        self.shared.lock().lost_since.map(|since| since.elapsed())
    }

    /// Calls `listener` when a process is lost, at once if one was.
    pub fn on_loss(&self, listener: impl Fn(&Loss) + Send + Sync + 'static) {
        let mut state = self.shared.lock();
        let lost = state.lost.clone();
        if let Some(loss) = lost {
            drop(state);
            listener(&loss);
        } else {
            state.on_loss.push(Arc::new(listener));
        }
    }

    /// At process 0: where signals that other processes got are to be noted.
    pub fn signals_to(&self, flags: SignalFlags) {
        let mut state = self.shared.lock();
        state.early.drain(..).for_each(|signal| flags.set(signal));
        state.signals = Some(flags);
    }

    /// Forwards a signal of this process to process 0.
    pub fn signal(&self, signal: i32) {
        self.post(0, Outgoing::Signal(signal));
    }

    /// At process 0: sends the outcome to all others, and waits a few seconds for them to leave.
    pub fn end(&self, end: &End) {
        self.shared.end(end.clone());
        for to in 0..self.count() {
            self.post(to, Outgoing::End(end.clone()));
        }
        let own = self.own;
        let all_gone = |state: &Inner| {
            let mut others = state.gone.iter().enumerate().filter(|(process, _)| *process != own);
            others.all(|(_, gone)| *gone).then_some(())
        };
        self.shared.wait_for(FAREWELL, all_gone);
    }

    /// At the others: the outcome of the run, if it is known within `timeout`. Another process may seem lost because it
    /// received the end of the run earlier, so process 0 gets a few seconds to report the end.
    pub fn outcome(&self, timeout: Duration) -> Option<Outcome> {
        self.shared.wait_for(timeout, |state| {
            if let Some(end) = &state.ended {
                return Some(Outcome::Ended(end.clone()));
            }
            let loss = state.lost.as_ref()?;
            let waited = state.lost_since.is_some_and(|since| since.elapsed() >= FAREWELL);
            (loss.process == 0 || waited).then(|| Outcome::Lost(loss.clone()))
        })
    }

    /// Sends a goodbye, so that the end of this process does not count as a loss.
    pub fn leave(&self) {
        let (written, all) = bounded(self.count());
        for to in 0..self.count() {
            self.post(to, Outgoing::Bye(written.clone()));
        }
        drop(written);
        let until = Instant::now() + FAREWELL;
        // Ends when every link has written its goodbye, or is gone.
        while all.recv_deadline(until).is_ok() {}
    }
}

impl fmt::Debug for Processes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of {}", self.own, self.peers.len())
    }
}

impl Processes {
    /// Closes all connections without a goodbye, like a killed process: the others end the run with the name of this one.
    pub fn cut(&self) {
        for stream in &self.streams {
            // Closed already, perhaps.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.cut();
    }
}
