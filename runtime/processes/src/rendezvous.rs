//! Rendezvous of the processes of a run: all connect to process 0, which sends each the addresses of the others.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::follow::follow;
use super::greeting::Hello;
use super::group::Processes;
use super::handshake::{Answer, Handshake, SharedSecret};
use super::lead::lead;
use super::listeners::Listeners;
use super::peer::Peer;
use super::pending::{Arrival, PendingConnections};
use flow_base::digest::Digest;

/// Polling interval.
pub(super) const AGAIN: Duration = Duration::from_millis(20);

/// Refusals that are reported at once; of later ones only the last is reported, at the end.
const TOLD: usize = 20;

/// The address of process 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub host: String,
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl Address {
    /// Whether the host is a loopback name or address.
    pub(super) fn is_local(&self) -> bool {
        is_loopback_host(&self.host)
    }

    pub(super) fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        (self.host.as_str(), self.port).to_socket_addrs().map(Iterator::collect)
    }
}

pub(super) fn is_loopback_host(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// The parameters for joining the other processes.
#[derive(Clone, Debug)]
pub struct Join {
    pub process: usize,
    pub processes: usize,
    /// Process 0.
    pub leader: Address,
    /// The port at which another process than 0 listens; none: any that is free.
    pub port: Option<u16>,
    /// The host of each process: where it listens, and where others reach it. Empty: unknown.
    pub hosts: Vec<String>,
    /// Proved on each connection. None: whoever knows the pipeline can join.
    pub secret: Option<SharedSecret>,
    /// Of pipeline, settings and program: the same for all.
    pub digest: Digest,
    /// The settings in the digest, by name, the most informative first, so that differences can be named.
    pub settings: Vec<(String, String)>,
    /// How long to wait for the others.
    pub timeout: Duration,
}

/// Why the rendezvous failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// Invalid numbers or addresses, or processes that were not started for the same run.
    #[error("{message}")]
    Refused { message: String },
    /// A process did not connect, or a port or machine cannot be reached.
    #[error("{message}")]
    Failed { message: String, help: String },
}

/// What a process says while it joins the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JoinMessage {
    Note(String),
    Warning(String),
}

impl fmt::Display for JoinMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JoinMessage::Note(text) | JoinMessage::Warning(text) => f.write_str(text),
        }
    }
}

pub(super) fn failed(message: impl fmt::Display, help: impl fmt::Display) -> JoinError {
    JoinError::Failed {
        message: message.to_string(),
        help: help.to_string(),
    }
}

/// Joins the other processes. Returns when all are connected. `tell` is called with lines of progress
/// and warnings.
///
/// # Errors
/// Where not all connect in time, or they were not started for the same run.
pub fn join(join: &Join, tell: &dyn Fn(JoinMessage)) -> Result<Arc<Processes>, JoinError> {
    if join.processes == 0 || join.process >= join.processes || join.processes > u32::MAX as usize {
        return Err(JoinError::Refused {
            message: format!(
                "there is no process {} of {}: the first is 0",
                join.process, join.processes
            ),
        });
    }
    let until = Instant::now() + join.timeout;
    let (peers, streams) = if join.process == 0 {
        lead(join, until, tell)?
    } else {
        follow(join, until, tell)?
    };
    let processes = Processes::new(join.process, peers, streams);
    processes
        .map(Arc::new)
        .map_err(|error| failed(format!("the connections cannot be used: {error}"), ""))
}

pub(super) type Joined = (Vec<Peer>, Vec<Option<TcpStream>>);

/// Accepts connections until `until`, which may change meanwhile, and passes processes that have proved that they know
/// the secret to `take`. Ends when `take` returns a value, or the time is over.
pub(super) fn arrivals<R>(
    listeners: &Listeners,
    handshake: &Handshake,
    until: &Cell<Instant>,
    mut refused: impl FnMut(String),
    mut take: impl FnMut(Arrival) -> Option<R>,
) -> Option<R> {
    let mut pending = PendingConnections::new(handshake);
    while Instant::now() < until.get() {
        let came = pending.accept(listeners);
        for heard in pending.listen() {
            match heard {
                Ok(arrival) => {
                    if let Some(result) = take(arrival) {
                        return Some(result);
                    }
                }
                Err(why) => refused(why),
            }
        }
        if !came {
            thread::sleep(AGAIN);
        }
    }
    None
}

/// The last answer of a handshake: accepted, or why not.
pub(super) fn answer(mut stream: &TcpStream, refusal: Option<&str>) -> io::Result<()> {
    let answer = refusal.map_or(Answer::Accepted, |why| Answer::Refused(why.to_owned()));
    stream.write_all(&answer.bytes())
}

/// Tells which connections were refused.
pub(super) struct Refusals<'a> {
    tell: &'a dyn Fn(JoinMessage),
    /// Their number, and the last one.
    all: RefCell<(usize, String)>,
}

impl Refusals<'_> {
    pub fn new(tell: &dyn Fn(JoinMessage)) -> Refusals<'_> {
        Refusals {
            tell,
            all: RefCell::default(),
        }
    }

    pub fn add(&self, why: String) {
        let mut all = self.all.borrow_mut();
        if all.0 < TOLD {
            (self.tell)(JoinMessage::Note(format!("refused: {why}")));
        }
        *all = (all.0 + 1, why);
    }

    /// Their number, and why the last one was.
    pub fn last(self) -> (usize, String) {
        self.all.into_inner()
    }
}

/// Why a process of another number of processes cannot be accepted.
pub(super) fn miscounted(hello: &Hello, processes: usize) -> Option<String> {
    (hello.processes as usize != processes).then(|| {
        format!(
            "it was told that there are {} processes, process 0 that there are {processes}",
            hello.processes
        )
    })
}

/// Whether the other side has closed a connection.
pub(super) fn is_closed(stream: &TcpStream) -> bool {
    let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let _ = stream.set_nonblocking(false);
    match peeked {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}

/// A port that is free at the moment.
#[cfg(test)]
pub(super) fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("its address").port()
}
