//! Connections of other processes: which are accepted, and what is said of those that are refused.

use std::cell::{Cell, RefCell};
use std::io::{self, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Instant;

use super::greeting::Hello;
use super::handshake::{Answer, Handshake};
use super::joining::{AGAIN, JoinMessage};
use super::listeners::Listeners;
use super::pending::{Arrival, PendingConnections};

/// Refusals that are reported at once; of later ones only the last is reported, at the end.
const TOLD: usize = 20;

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
