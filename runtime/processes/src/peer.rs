//! The processes of a run, what they send each other, and how it ends for them.

use std::fmt;
use std::io::{self, Write};

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

/// A process that was lost before the run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    pub process: usize,
    /// Whole sentence without its full stop: `process 1 (node2, pid 77) ended without a word`.
    pub message: String,
}

/// The end of the run, sent by process 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// Exit code of all processes.
    pub code: u8,
    /// Why it failed; empty where it did not.
    pub message: String,
}

/// The outcome for a process that joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Ended(End),
    Lost(Loss),
}

/// The content of a message, written when it is sent, so that large data need not be copied.
pub trait Payload: Send {
    /// Bytes that [`Payload::write`] will write.
    fn size(&self) -> u64;

    /// Writes exactly [`Payload::size`] bytes.
    ///
    /// # Errors
    /// Those of `to`; the connection is then closed.
    fn write(&self, to: &mut dyn Write) -> io::Result<()>;
}

impl Payload for Vec<u8> {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(self)
    }
}

/// The same bytes for several processes.
impl Payload for std::sync::Arc<Vec<u8>> {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(self)
    }
}
