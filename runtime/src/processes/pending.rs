//! Connections that have not sent a greeting yet. Many idle connections cannot block those that send one.

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::frame::{Hello, MAGIC, SETTINGS};

/// Timeout of the greeting.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Most pending connections. Beyond that the one that has been idle for longest is closed.
const MOST_PENDING: usize = 256;

/// Connections accepted before the pending ones are read again.
const AT_ONCE: usize = 64;

/// No greeting is longer.
const LONGEST: usize = 512 + SETTINGS;

/// The most bytes that are read at once.
const PIECE: usize = 1 << 14;

/// A process that has sent its greeting.
pub(super) struct Arrival {
    pub hello: Hello,
    pub stream: TcpStream,
    pub ip: IpAddr,
}

struct PendingConnection {
    stream: TcpStream,
    address: SocketAddr,
    said: Vec<u8>,
    until: Instant,
}

/// The oldest first.
#[derive(Default)]
pub(super) struct PendingConnections {
    all: Vec<PendingConnection>,
}

impl PendingConnections {
    /// Accepts waiting connections of a non-blocking listener. Returns whether there may be more.
    pub fn accept(&mut self, listener: &TcpListener) -> bool {
        for _ in 0..AT_ONCE {
            let Ok((stream, address)) = listener.accept() else {
                return false;
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.all.len() >= MOST_PENDING {
                let silent = self.all.iter().position(|connection| connection.said.is_empty());
                self.all.remove(silent.unwrap_or(0));
            }
            self.all.push(PendingConnection {
                stream,
                address,
                said: Vec::new(),
                until: Instant::now() + HANDSHAKE_TIMEOUT,
            });
        }
        true
    }

    /// Reads available data. Returns complete greetings, and the reasons why others are closed.
    pub fn listen(&mut self) -> Vec<Result<Arrival, String>> {
        let mut heard = Vec::new();
        for mut connection in std::mem::take(&mut self.all) {
            match connection.listen() {
                Ok(None) => self.all.push(connection),
                Ok(Some(hello)) => heard.push(connection.arrive(hello)),
                Err(why) => heard.push(Err(format!("{} connected and {why}", connection.address))),
            }
        }
        heard
    }
}

impl PendingConnection {
    /// The greeting, once it is whole; why there will be none.
    fn listen(&mut self) -> Result<Option<Hello>, String> {
        let mut piece = [0; PIECE];
        let why = match self.stream.read(&mut piece) {
            Ok(0) if self.said.is_empty() => "did not say who it is: it hung up".to_owned(),
            Ok(0) => "speaks something else".to_owned(),
            Ok(read) => {
                self.said.extend_from_slice(&piece[..read]);
                return self.understand();
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                if Instant::now() < self.until {
                    return Ok(None);
                }
                "did not say who it is in time".to_owned()
            }
            Err(error) => format!("did not say who it is: {error}"),
        };
        Err(why)
    }

    fn understand(&self) -> Result<Option<Hello>, String> {
        let begun = &self.said[..self.said.len().min(MAGIC.len())];
        let mut left = self.said.as_slice();
        if MAGIC.starts_with(begun) {
            match Hello::read(&mut left) {
                Ok(Some(hello)) if left.is_empty() => return Ok(Some(hello)),
                // The data so far is an incomplete greeting.
                Ok(None) => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && self.said.len() < LONGEST => {
                    return Ok(None);
                }
                _ => {}
            }
        }
        Err("speaks something else".to_owned())
    }

    fn arrive(self, hello: Hello) -> Result<Arrival, String> {
        let address = self.address;
        let ready = self
            .stream
            .set_nonblocking(false)
            .and_then(|()| self.stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT)))
            .and_then(|()| self.stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT)));
        match ready {
            Ok(()) => Ok(Arrival {
                hello,
                stream: self.stream,
                ip: address.ip(),
            }),
            Err(error) => Err(format!("{address} connected and cannot be answered: {error}")),
        }
    }
}
