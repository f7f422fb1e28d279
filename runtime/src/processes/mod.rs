//! Several processes, on one machine or several, that take part in one run.
//!
//! Process 0 runs the pipeline: it plans, commits and holds the lock of the state directory. The others join it, do what
//! a stage asks of them by messages, and end when it says so, with its exit code. Every two processes are connected, so
//! messages go straight from one to the other. What a message means is for the stage that sends it to say; the runtime
//! carries it, notices whoever dies or falls silent, and names that process to all.
//!
//! Whoever connects must speak this protocol and name the digest of the same pipeline and settings. That keeps two runs
//! apart; it is no protection against an attacker, since nothing is encrypted.

mod frame;
mod link;
mod rendezvous;
mod strangers;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};

use link::Outgoing;
pub use rendezvous::{Address, Join, JoinError, join};

/// How long process 0 waits for the others to hear that the run ended, and they for one another.
const FAREWELL: Duration = Duration::from_secs(5);

/// One of the processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub process: usize,
    pub host: String,
    pub pid: u32,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({}, pid {})", self.process, self.host, self.pid)
    }
}

/// A process that is gone before the run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    pub process: usize,
    /// Whole sentence without its full stop: `process 1 (node2, pid 77) ended without a word`.
    pub message: String,
}

/// How the run ended, as process 0 says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// Exit code of all processes.
    pub code: u8,
    /// Why it failed; empty where it did not.
    pub message: String,
}

/// What becomes of a process that joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Ended(End),
    Lost(Loss),
}

/// The content of a message. It is written when its turn comes, so that what is large need not be copied.
pub trait Body: Send {
    /// Bytes that [`Body::write`] will write.
    fn size(&self) -> u64;

    /// Writes exactly [`Body::size`] bytes.
    ///
    /// # Errors
    /// What `to` gives; the peer is then given up.
    fn write(&self, to: &mut dyn Write) -> io::Result<()>;
}

impl Body for Vec<u8> {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(self)
    }
}

/// This process among those of its run.
pub struct Processes {
    own: usize,
    peers: Vec<Peer>,
    /// By process; none for this one.
    links: Vec<Option<Sender<Outgoing>>>,
    streams: Vec<TcpStream>,
    shared: Arc<Shared>,
    sessions: AtomicU32,
}

type LossListener = Arc<dyn Fn(&Loss) + Send + Sync>;

type Listener = Arc<dyn Fn(usize, Vec<u8>) + Send + Sync>;

enum Topic {
    /// Nobody listens yet, or not all that was kept is handed over.
    Kept(Vec<(usize, Vec<u8>)>),
    Heard(Listener),
    Closed,
}

/// The flags of a run that signals set.
#[derive(Clone)]
pub(crate) struct SignalFlags {
    /// Number of the signal that asks the run to end.
    pub stop: Arc<AtomicUsize>,
    /// SIGUSR1 came.
    pub checkpoint: Arc<AtomicBool>,
}

impl SignalFlags {
    fn set(&self, signal: i32) {
        if signal == signal_hook::consts::SIGUSR1 {
            self.checkpoint.store(true, Ordering::Release);
        } else {
            self.stop.store(usize::try_from(signal).unwrap_or(0), Ordering::Release);
        }
    }
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    topics: BTreeMap<u32, Topic>,
    lost: Option<Loss>,
    lost_since: Option<Instant>,
    on_loss: Vec<LossListener>,
    ended: Option<End>,
    /// By process: it said goodbye, or its connection is closed.
    gone: Vec<bool>,
    signals: Option<SignalFlags>,
    /// That came before anybody asked for signals.
    early: Vec<i32>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change under this lock is whole, whatever panicked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, from: usize, topic: u32, body: Vec<u8>) {
        let mut state = self.lock();
        let listener = match state.topics.entry(topic).or_insert_with(|| Topic::Kept(Vec::new())) {
            Topic::Kept(kept) => return kept.push((from, body)),
            Topic::Closed => return,
            Topic::Heard(listener) => Arc::clone(listener),
        };
        drop(state);
        listener(from, body);
    }

    fn signal(&self, signal: i32) {
        let mut state = self.lock();
        match &state.signals {
            Some(flags) => flags.set(signal),
            None => state.early.push(signal),
        }
    }

    fn end(&self, end: End) {
        self.lock().ended.get_or_insert(end);
        self.changed.notify_all();
    }

    /// The connection to a process is closed. A loss, unless it said goodbye or the run has ended.
    fn closed(&self, peer: &Peer, why: &str) {
        let mut state = self.lock();
        let gone = std::mem::replace(&mut state.gone[peer.process], true);
        let mut told = None;
        if !gone && state.ended.is_none() && state.lost.is_none() {
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

    fn goodbye(&self, process: usize) {
        self.lock().gone[process] = true;
        self.changed.notify_all();
    }

    /// Waits until `what` gives something, at most for `timeout`.
    fn wait_for<R>(&self, timeout: Duration, what: impl Fn(&State) -> Option<R>) -> Option<R> {
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

impl Processes {
    fn new(own: usize, peers: Vec<Peer>, streams: Vec<Option<TcpStream>>) -> io::Result<Processes> {
        let state = State {
            gone: vec![false; peers.len()],
            ..State::default()
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let mut processes = Processes {
            own,
            peers,
            links: Vec::new(),
            streams: Vec::new(),
            shared,
            sessions: AtomicU32::new(0),
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

    /// A number that was not given before, to tell the messages of one use of a topic from those of the next.
    pub fn new_session(&self) -> u32 {
        self.sessions.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a message and returns at once; messages to one process arrive in their order. What is sent to a process
    /// that is gone is dropped: its loss is told to those that ask.
    pub fn send(&self, to: usize, topic: u32, body: Box<dyn Body>) {
        self.post(to, Outgoing::Message { topic, body });
    }

    fn post(&self, to: usize, what: Outgoing) {
        if let Some(Some(link)) = self.links.get(to) {
            // Its thread is gone if the peer is.
            let _ = link.send(what);
        }
    }

    /// Hands every message of a topic to `listener`, on the threads that receive: those of one process in their order, and
    /// those first that came before.
    pub fn listen(&self, topic: u32, listener: impl Fn(usize, Vec<u8>) + Send + Sync + 'static) {
        let listener: Listener = Arc::new(listener);
        loop {
            let mut state = self.shared.lock();
            let kept = match state.topics.get_mut(&topic) {
                Some(Topic::Kept(kept)) if !kept.is_empty() => std::mem::take(kept),
                _ => {
                    state.topics.insert(topic, Topic::Heard(listener));
                    return;
                }
            };
            drop(state);
            // What comes meanwhile is kept, and comes after these.
            for (from, body) in kept {
                listener(from, body);
            }
        }
    }

    /// Drops what comes on a topic from now on.
    pub fn close(&self, topic: u32) {
        self.shared.lock().topics.insert(topic, Topic::Closed);
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
    pub(crate) fn signals_to(&self, flags: SignalFlags) {
        let mut state = self.shared.lock();
        state.early.drain(..).for_each(|signal| flags.set(signal));
        state.signals = Some(flags);
    }

    /// Tells process 0 of a signal that this process got.
    pub fn signal(&self, signal: i32) {
        self.post(0, Outgoing::Signal(signal));
    }

    /// At process 0: tells all others how the run ended, and waits a few seconds for them to go.
    pub fn end(&self, end: &End) {
        self.shared.end(end.clone());
        for to in 0..self.count() {
            self.post(to, Outgoing::End(end.clone()));
        }
        let own = self.own;
        let all_gone = |state: &State| {
            let mut others = state.gone.iter().enumerate().filter(|(process, _)| *process != own);
            others.all(|(_, gone)| *gone).then_some(())
        };
        self.shared.wait_for(FAREWELL, all_gone);
    }

    /// At the others: what became of the run, if it is known within `timeout`. A process other than 0 that is lost may
    /// have heard of the end before this one did, so process 0 has a few seconds to say so.
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

    /// Says goodbye, so that nobody takes the end of this process for a loss.
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
    /// Closes all connections without a word, as the end of this process would. For tests.
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
