//! What a process needs to join the others, and what it says meanwhile.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use super::handshake::SharedSecret;
use super::peer::Peer;
use flow_base::digest::Digest;

/// Polling interval.
pub(super) const AGAIN: Duration = Duration::from_millis(20);

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

/// The other processes, and the connection to each by its number.
pub(super) type Joined = (Vec<Peer>, Vec<Option<TcpStream>>);
